//! Tokens of an answer to content and tool calls: one state machine for streamed and unary answers.
//!
//! It is as tolerant as the field's parsers are. A call is a line `{"name": "…", "arguments": {…}}`; it ends at the next
//! such line or at the answer's end, and whatever stands between its name and its last brace is its argument text, raw,
//! well-formed or not. A newline that follows a closed call and starts no other one ends the calls: what follows is
//! content. What is no UTF-8 becomes U+FFFD.

use super::{
    chat::{LEAD, OPEN, SEPARATOR},
    tokenizer::{CALL, Decoder, Token},
};

/// A piece of the answer, in the order of the text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Delta {
    /// Text outside calls.
    Content(String),
    /// A call starts.
    Call {
        /// Which call of the answer.
        index: u32,
        /// The whole name.
        name: String,
    },
    /// The next piece of a call's arguments.
    Arguments {
        /// Which call of the answer.
        index: u32,
        /// The piece.
        text: String,
    },
}

/// Where in the text the parser stands.
#[derive(Debug, Clone)]
enum State {
    Content,
    /// At the start of a line among calls; holds what was seen of [`OPEN`] or [`LEAD`].
    Line(String),
    /// Inside a name; holds its raw text.
    Name {
        raw: String,
        escaped: bool,
    },
    /// After a name; counts what was seen of [`SEPARATOR`].
    Separator(usize),
    Arguments(Arguments),
}

/// The nesting of a call's text, and what may turn out to be its end.
#[derive(Debug, Clone, Default)]
struct Arguments {
    /// Brackets open inside the call's own brace.
    depth: i32,
    in_string: bool,
    escaped: bool,
    /// A closing brace, a newline, the start of another call: held back until it is clear whether the call ends here.
    held: String,
    /// Whether the call's own brace was closed when the held newline came.
    closed: bool,
}

impl Arguments {
    fn track(&mut self, c: char) {
        match c {
            _ if self.escaped => self.escaped = false,
            '\\' if self.in_string => self.escaped = true,
            '"' => self.in_string = !self.in_string,
            '{' | '[' if !self.in_string => self.depth += 1,
            '}' | ']' if !self.in_string => self.depth -= 1,
            _ => {}
        }
    }

    fn is_closed(&self) -> bool {
        self.depth < 0 && !self.in_string
    }
}

/// The state machine. Feed it tokens, then [`finish`](Parser::finish) it.
#[derive(Debug, Clone)]
pub struct Parser {
    decoder: Decoder,
    state: State,
    calls: u32,
}

impl Parser {
    /// A parser for an answer that starts inside a call (its prompt ended with [`OPEN`]), or in content.
    pub fn new(in_call: bool) -> Self {
        let state = if in_call { name() } else { State::Content };
        Self { decoder: Decoder::default(), state, calls: 0 }
    }

    /// Takes a token and appends what it reveals.
    pub fn push(&mut self, token: Token, out: &mut Vec<Delta>) {
        let mut text = String::new();
        if token == CALL && matches!(self.state, State::Content) {
            self.decoder.finish(&mut text);
            text.chars().for_each(|c| self.advance(c, out));
            self.state = State::Line(String::new());
            return;
        }
        self.decoder.push(token, &mut text);
        text.chars().for_each(|c| self.advance(c, out));
    }

    /// Ends the answer and appends what was held back. `complete` is false when the answer was cut at its token limit.
    pub fn finish(&mut self, complete: bool, out: &mut Vec<Delta>) {
        let mut text = String::new();
        self.decoder.finish(&mut text);
        text.chars().for_each(|c| self.advance(c, out));
        match std::mem::replace(&mut self.state, State::Content) {
            State::Content => {}
            State::Line(seen) => content(&seen, out),
            State::Name { raw, .. } if raw.is_empty() => {}
            State::Name { raw, .. } => {
                self.start_call(&raw, out);
            }
            State::Separator(seen) => arguments(self.calls - 1, &SEPARATOR[..seen], out),
            State::Arguments(state) => self.end_arguments(&state, complete, out),
        }
    }

    /// Calls started so far.
    pub fn calls(&self) -> u32 {
        self.calls
    }

    fn advance(&mut self, c: char, out: &mut Vec<Delta>) {
        self.state = match std::mem::replace(&mut self.state, State::Content) {
            State::Content => {
                content(c.encode_utf8(&mut [0; 4]), out);
                State::Content
            }
            State::Line(seen) => line(seen, c, out),
            State::Name { raw, escaped } => self.name(raw, escaped, c, out),
            State::Separator(seen) => self.separator(seen, c, out),
            State::Arguments(state) => self.arguments(state, c, out),
        };
    }

    fn name(&mut self, mut raw: String, escaped: bool, c: char, out: &mut Vec<Delta>) -> State {
        match c {
            '"' if !escaped => {
                self.start_call(&raw, out);
                State::Separator(0)
            }
            '\n' => {
                self.start_call(&raw, out);
                State::Line(String::new())
            }
            c => {
                raw.push(c);
                State::Name { raw, escaped: c == '\\' && !escaped }
            }
        }
    }

    fn start_call(&mut self, raw: &str, out: &mut Vec<Delta>) {
        let name = serde_json::from_str(&format!("\"{raw}\"")).unwrap_or_else(|_| raw.to_owned());
        out.push(Delta::Call { index: self.calls, name });
        self.calls += 1;
    }

    fn separator(&mut self, seen: usize, c: char, out: &mut Vec<Delta>) -> State {
        if SEPARATOR[seen..].starts_with(c) {
            let seen = seen + c.len_utf8();
            return if seen == SEPARATOR.len() {
                State::Arguments(Arguments::default())
            } else {
                State::Separator(seen)
            };
        }
        // A damaged separator: everything after the name is argument text.
        let mut state = Arguments::default();
        for earlier in SEPARATOR[..seen].chars() {
            state.track(earlier);
        }
        arguments(self.calls - 1, &SEPARATOR[..seen], out);
        self.arguments(state, c, out)
    }

    fn arguments(&mut self, mut state: Arguments, c: char, out: &mut Vec<Delta>) -> State {
        let index = self.calls - 1;
        if let Some(line) = state.held.find('\n') {
            let mut next = state.held[line + 1..].to_owned();
            next.push(c);
            if next == OPEN {
                return name();
            }
            if OPEN.starts_with(&next) {
                state.held.push(c);
                return State::Arguments(state);
            }
            if state.closed {
                content(&next, out);
                return State::Content;
            }
            for held in state.held[line + 1..].to_owned().chars() {
                state.track(held);
            }
            arguments(index, &std::mem::take(&mut state.held), out);
        }
        state.track(c);
        match c {
            '\n' => {
                state.closed = state.is_closed();
                state.held.push(c);
            }
            '}' => {
                arguments(index, &std::mem::take(&mut state.held), out);
                state.held.push(c);
            }
            c => {
                state.held.push(c);
                arguments(index, &std::mem::take(&mut state.held), out);
            }
        }
        State::Arguments(state)
    }

    fn end_arguments(&mut self, state: &Arguments, complete: bool, out: &mut Vec<Delta>) {
        let (brace, line) = match state.held.split_once('\n') {
            Some((brace, line)) => (brace, Some(line)),
            None => (state.held.as_str(), None),
        };
        let index = self.calls - 1;
        let ends_call = state.is_closed() || state.closed || complete;
        if brace == "}" && ends_call {
            content(line.unwrap_or_default(), out);
        } else {
            arguments(index, &state.held, out);
        }
    }
}

fn name() -> State {
    State::Name { raw: String::new(), escaped: false }
}

fn line(mut seen: String, c: char, out: &mut Vec<Delta>) -> State {
    seen.push(c);
    if seen == OPEN {
        return name();
    }
    if seen == LEAD {
        return State::Line(String::new());
    }
    if OPEN.starts_with(&seen) || LEAD.starts_with(&seen) {
        return State::Line(seen);
    }
    content(&seen, out);
    State::Content
}

fn content(piece: &str, out: &mut Vec<Delta>) {
    match out.last_mut() {
        _ if piece.is_empty() => {}
        Some(Delta::Content(text)) => text.push_str(piece),
        _ => out.push(Delta::Content(piece.to_owned())),
    }
}

fn arguments(of: u32, piece: &str, out: &mut Vec<Delta>) {
    match out.last_mut() {
        _ if piece.is_empty() => {}
        Some(Delta::Arguments { index, text }) if *index == of => text.push_str(piece),
        _ => out.push(Delta::Arguments { index: of, text: piece.to_owned() }),
    }
}

/// The whole answer, put together from its pieces.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Answer {
    /// Text outside calls.
    pub content: String,
    /// The calls: name and raw arguments.
    pub calls: Vec<super::chat::Call>,
}

impl Answer {
    /// Adds the next piece.
    pub fn add(&mut self, delta: Delta) {
        match delta {
            Delta::Content(text) => self.content.push_str(&text),
            Delta::Call { name, .. } => self.calls.push(super::chat::Call { name, arguments: String::new() }),
            Delta::Arguments { index, text } => {
                if let Some(call) = self.calls.get_mut(index as usize) {
                    call.arguments.push_str(&text);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::Value;

    use super::*;
    use crate::engine::chat::{Call, render};

    fn pieces(in_call: bool, tokens: &[u8], complete: bool) -> Vec<Vec<Delta>> {
        let mut parser = Parser::new(in_call);
        let mut all = Vec::new();
        for token in tokens {
            let mut out = Vec::new();
            parser.push(*token, &mut out);
            all.push(out);
        }
        let mut out = Vec::new();
        parser.finish(complete, &mut out);
        all.push(out);
        all
    }

    fn answer(in_call: bool, tokens: &[u8]) -> Answer {
        let mut answer = Answer::default();
        pieces(in_call, tokens, true).into_iter().flatten().for_each(|d| answer.add(d));
        answer
    }

    fn call(name: &str, arguments: &str) -> Call {
        Call { name: name.into(), arguments: arguments.into() }
    }

    fn generated(calls: &[Call]) -> String {
        let lines: Vec<_> = calls.iter().map(render).collect();
        lines.join("\n")[OPEN.len()..].to_owned()
    }

    #[test]
    fn one_call() {
        let calls = vec![call("get_weather", r#"{"city": "Łódź", "nested": {"name": "x", "a": [1, {}]}}"#)];
        assert_eq!(answer(true, generated(&calls).as_bytes()), Answer { content: String::new(), calls });
    }

    #[test]
    fn parallel_calls_with_brackets_and_quotes_in_strings() {
        let calls = vec![
            call("a", r#"{"x": "}}]{\"", "y": "\\"}"#),
            call("b", "{}"),
            call("c", r#"{"name": "{\"name\": \"z"}"#),
        ];
        assert_eq!(answer(true, generated(&calls).as_bytes()).calls, calls);
    }

    #[test]
    fn a_name_with_escapes_round_trips() {
        let calls = vec![call("we\"ird\\\u{1}näme", "{}")];
        assert_eq!(answer(true, generated(&calls).as_bytes()).calls, calls);
    }

    #[test]
    fn arguments_stream_as_they_come() {
        let all = pieces(true, br#"f", "arguments": {"a": "bcd"}}"#, true);
        let with_text = all.iter().filter(|p| p.iter().any(|d| matches!(d, Delta::Arguments { .. }))).count();
        assert!(with_text >= 10, "{with_text} of {} tokens revealed argument text", all.len());
    }

    #[test]
    fn malformed_arguments_pass_through_raw() {
        for (raw, name, arguments) in [
            (r#"f", "arguments": {"a": 1X}}"#, "f", r#"{"a": 1X}"#),
            (r#"f", "arguments": {"a": "b}}"#, "f", r#"{"a": "b}"#),
            (r#"f", "arguments": {"a": 1}}}"#, "f", r#"{"a": 1}}"#),
            (r#"f", "arguments": {"a": 1"#, "f", r#"{"a": 1"#),
            (r#"f", "argumentX": {"a": 1}}"#, "f", r#", "argumentX": {"a": 1}"#),
            ("f\", \"arguments\": {\"a\": \"x\ny\"}}", "f", "{\"a\": \"x\ny\"}"),
            (r#"f", "arguments": not json"#, "f", "not json"),
            ("f", "f", ""),
        ] {
            let answer = answer(true, raw.as_bytes());
            assert_eq!(answer.calls, vec![call(name, arguments)], "{raw}");
            assert_eq!(answer.content, "", "{raw}");
        }
    }

    #[test]
    fn a_damaged_newline_merges_two_calls() {
        let merged = generated(&[call("a", "{}"), call("b", "{}")]).replace('\n', "_");
        assert_eq!(answer(true, merged.as_bytes()).calls, vec![call("a", r#"{}}_{"name": "b", "arguments": {}"#)]);
    }

    #[test]
    fn text_outside_a_call_is_content() {
        let text = format!("{}\nthat was it", generated(&[call("a", "{}")]));
        assert_eq!(
            answer(true, text.as_bytes()),
            Answer { content: "that was it".into(), calls: vec![call("a", "{}")] }
        );
        let mut tokens = b"let me see".to_vec();
        tokens.push(CALL);
        tokens.extend(format!("{LEAD}{}", render(&call("a", "{}"))).bytes());
        assert_eq!(answer(false, &tokens), Answer { content: "let me see".into(), calls: vec![call("a", "{}")] });
        assert_eq!(answer(false, b"hello"), Answer { content: "hello".into(), calls: Vec::new() });
    }

    #[test]
    fn an_answer_that_says_nothing_is_empty() {
        assert_eq!(answer(true, b""), Answer::default());
        assert_eq!(answer(false, b""), Answer::default());
    }

    #[test]
    fn a_cut_answer_keeps_its_inner_braces() {
        let mut cut = Answer::default();
        pieces(true, br#"f", "arguments": {"a": {"b": 1}"#, false).into_iter().flatten().for_each(|d| cut.add(d));
        assert_eq!(cut.calls, vec![call("f", r#"{"a": {"b": 1}"#)]);
    }

    #[test]
    fn bytes_that_are_no_text_become_replacement_characters() {
        let answer = answer(true, b"f\", \"arguments\": {\"a\": \"\xfa\xc3(\"}}");
        assert_eq!(answer.calls, vec![call("f", "{\"a\": \"\u{fffd}\u{fffd}(\"}")]);
    }

    fn json() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            "[ -~é漢🙂\n]{0,12}".prop_map(Value::from),
        ];
        leaf.prop_recursive(3, 12, 3, |inner| {
            prop_oneof![
                proptest::collection::vec(inner.clone(), 0..3).prop_map(Value::from),
                proptest::collection::btree_map("[a-z\"}{]{1,6}", inner, 0..3)
                    .prop_map(|m| Value::Object(m.into_iter().collect())),
            ]
        })
    }

    proptest! {
        #[test]
        fn well_formed_calls_come_back_exactly(
            calls in proptest::collection::vec(("[a-zA-Z_\"\\\\{}]{1,12}", json()), 1..5)
        ) {
            let calls: Vec<_> = calls.into_iter().map(|(name, json)| call(&name, &json.to_string())).collect();
            let answer = answer(true, generated(&calls).as_bytes());
            prop_assert_eq!(answer.calls, calls);
            prop_assert_eq!(answer.content, "");
        }

        /// Nothing is lost whatever comes: the parser never panics, and argument text is a part of the input.
        #[test]
        fn any_bytes_are_survived(tokens in proptest::collection::vec(any::<u8>(), 0..80), in_call: bool, complete: bool) {
            let mut answer = Answer::default();
            pieces(in_call, &tokens, complete).into_iter().flatten().for_each(|d| answer.add(d));
            let text = String::from_utf8_lossy(&tokens).into_owned();
            for call in &answer.calls {
                prop_assert!(text.contains(&call.arguments));
            }
        }
    }
}
