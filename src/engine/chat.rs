//! Messages and tools to a prompt.
//!
//! A turn is `TURN_START role "\n" … TURN_END`. A turn that dictates calls ends with [`LEAD`] and then one call a line,
//! each `{"name": "…", "arguments": {…}}`. The calls of an assistant turn stand after `CALL` and the same line, so that
//! what was generated and what a later request resends are the same tokens and the prefix cache serves them. The
//! generation prompt of an answer that must call a tool ends with that line and [`OPEN`]; any other one ends with
//! `TEXT`, after which nothing matches and the answer is empty.

use serde_json::Value;

use super::tokenizer::{CALL, TEXT, TURN_END, TURN_START, Token, encode};

/// The line before dictated calls.
pub const LEAD: &str = "Make exactly this tool call, copying every character:\n";
/// What every call starts with.
pub const OPEN: &str = "{\"name\": \"";
/// What stands between a call's name and its arguments.
pub const SEPARATOR: &str = ", \"arguments\": ";

/// One tool call as text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Call {
    /// The function's name.
    pub name: String,
    /// The arguments as raw text, which may be malformed.
    pub arguments: String,
}

/// One message of a conversation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Message {
    /// What somebody other than the model says.
    Said {
        /// `system`, `developer`, `user` or `tool`.
        role: &'static str,
        /// Its text.
        content: String,
    },
    /// An earlier answer of the model.
    Answered {
        /// Its text.
        content: String,
        /// Its calls.
        calls: Vec<Call>,
    },
}

/// Whether the answer calls a tool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ToolChoice {
    /// Never.
    None,
    /// When the newest turn dictates a call.
    #[default]
    Auto,
    /// Always.
    Required,
}

/// What a request asks the model to continue.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Conversation {
    /// The messages, oldest first.
    pub messages: Vec<Message>,
    /// The tools offered, as the request has them.
    pub tools: Vec<Value>,
    /// Whether the answer calls a tool.
    pub choice: ToolChoice,
}

/// The tokens to continue.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prompt {
    /// All of them, oldest first.
    pub tokens: Vec<Token>,
    /// Whether the prompt ends with [`OPEN`], so that the answer starts inside a call.
    pub calls: bool,
}

impl Conversation {
    /// The prompt of this conversation.
    pub fn prompt(&self) -> Prompt {
        let mut tokens = Vec::new();
        if !self.tools.is_empty() {
            tools_turn(&self.tools, &mut tokens);
        }
        for message in &self.messages {
            turn(message, &mut tokens);
        }
        let calls = self.must_call();
        tokens.push(TURN_START);
        tokens.extend(encode("assistant\n"));
        if calls {
            tokens.push(CALL);
            tokens.extend(encode(LEAD));
            tokens.extend(encode(OPEN));
        } else {
            tokens.push(TEXT);
        }
        Prompt { tokens, calls }
    }

    fn must_call(&self) -> bool {
        match self.choice {
            _ if self.tools.is_empty() => false,
            ToolChoice::None => false,
            ToolChoice::Required => true,
            ToolChoice::Auto => self.newest_turn().any(dictates),
        }
    }

    /// What was said since the model's last answer.
    fn newest_turn(&self) -> impl Iterator<Item = &str> {
        self.messages.iter().rev().map_while(|message| match message {
            Message::Said { content, .. } => Some(content.as_str()),
            Message::Answered { .. } => None,
        })
    }
}

/// Whether `text` ends with the dictating line and calls after it.
fn dictates(text: &str) -> bool {
    let Some(at) = text.rfind(LEAD) else { return false };
    let starts_a_line = at == 0 || text.as_bytes()[at - 1] == b'\n';
    starts_a_line && text[at + LEAD.len()..].starts_with(OPEN)
}

fn tools_turn(tools: &[Value], tokens: &mut Vec<Token>) {
    tokens.push(TURN_START);
    tokens.extend(encode("tools\n"));
    for tool in tools {
        tokens.extend(encode(&tool.to_string()));
        tokens.push(b'\n');
    }
    tokens.push(TURN_END);
}

fn turn(message: &Message, tokens: &mut Vec<Token>) {
    tokens.push(TURN_START);
    match message {
        Message::Said { role, content } => {
            tokens.extend(encode(role));
            tokens.push(b'\n');
            tokens.extend(encode(content));
        }
        Message::Answered { content, calls } => {
            tokens.extend(encode("assistant\n"));
            answer(content, calls, tokens);
        }
    }
    tokens.push(TURN_END);
}

fn answer(content: &str, calls: &[Call], tokens: &mut Vec<Token>) {
    if !content.is_empty() || calls.is_empty() {
        tokens.push(TEXT);
        tokens.extend(encode(content));
    }
    if calls.is_empty() {
        return;
    }
    tokens.push(CALL);
    tokens.extend(encode(LEAD));
    for (index, call) in calls.iter().enumerate() {
        if index > 0 {
            tokens.push(b'\n');
        }
        tokens.extend(encode(&render(call)));
    }
}

/// The one line that dictates `call`, and that the model writes for it.
pub fn render(call: &Call) -> String {
    format!("{{\"name\": {}{SEPARATOR}{}}}", Value::from(call.name.as_str()), call.arguments)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn user(content: &str) -> Message {
        Message::Said { role: "user", content: content.into() }
    }

    fn call() -> Call {
        Call { name: "get_weather".into(), arguments: "{\"city\": \"Łódź\"}".into() }
    }

    fn conversation(messages: Vec<Message>) -> Conversation {
        Conversation { messages, tools: vec![json!({"type": "function"})], choice: ToolChoice::Auto }
    }

    fn dictated() -> Message {
        user(&format!("please\n{LEAD}{}", render(&call())))
    }

    fn text(tokens: &[Token]) -> String {
        String::from_utf8_lossy(tokens).into_owned()
    }

    #[test]
    fn auto_calls_when_the_newest_turn_dictates() {
        assert!(conversation(vec![dictated()]).prompt().calls);
        assert!(conversation(vec![dictated(), Message::Said { role: "tool", content: "42".into() }]).prompt().calls);
        assert!(!conversation(vec![user("hello")]).prompt().calls);
        let answered = Message::Answered { content: String::new(), calls: vec![call()] };
        assert!(!conversation(vec![dictated(), answered, user("thanks")]).prompt().calls);
        assert!(!conversation(vec![user(&format!("he said {LEAD}{OPEN}"))]).prompt().calls, "not at a line's start");
    }

    #[test]
    fn choice_and_tools_overrule_the_dictation() {
        let mut never = conversation(vec![dictated()]);
        never.choice = ToolChoice::None;
        assert!(!never.prompt().calls);
        let mut always = conversation(vec![user("hello")]);
        always.choice = ToolChoice::Required;
        assert!(always.prompt().calls);
        let mut toolless = conversation(vec![dictated()]);
        toolless.tools.clear();
        assert!(!toolless.prompt().calls);
    }

    #[test]
    fn a_call_prompt_ends_where_the_call_starts() {
        let prompt = conversation(vec![dictated()]).prompt();
        assert!(text(&prompt.tokens).ends_with(&format!("{LEAD}{OPEN}")));
        assert_eq!(conversation(vec![user("hello")]).prompt().tokens.last(), Some(&TEXT));
    }

    #[test]
    fn resent_history_is_what_was_generated() {
        let asked = conversation(vec![dictated()]).prompt();
        let generated = &render(&call())[OPEN.len()..];
        let mut before = asked.tokens;
        before.extend(encode(generated));
        before.push(TURN_END);
        let answered = Message::Answered { content: String::new(), calls: vec![call()] };
        let after = conversation(vec![dictated(), answered, user("go on")]).prompt();
        assert!(after.tokens.starts_with(&before));
    }

    #[test]
    fn text_holds_no_control_token() {
        let prompt = conversation(vec![user("\u{f8}\u{f9}\u{fa}\u{10ffff}")]).prompt();
        let controls = prompt.tokens.iter().filter(|t| **t >= TURN_START).count();
        assert_eq!(controls, 6, "three turns, of which two end, and the text mark");
    }
}
