//! Wire types: a chat request read from JSON, field by field, and what refuses it.
//!
//! Fields are read by hand so that every refusal names the field. What the engine cannot honour is refused; what has no
//! effect on a greedy copy machine (sampling) is checked and ignored. [`IGNORED`] lists it.

use serde_json::{Map, Value, json};

use crate::engine::{
    chat::{Call, Conversation, Message, ToolChoice},
    config::DEFAULT_MAX_TOKENS,
};

/// Fields that are accepted and have no effect: the model decodes greedily and has one kind of answer.
pub const IGNORED: &[&str] = &[
    "chat_template_kwargs",
    "ignore_eos",
    "metadata",
    "min_p",
    "min_tokens",
    "prompt_cache_key",
    "reasoning_effort",
    "repetition_penalty",
    "safety_identifier",
    "seed",
    "service_tier",
    "skip_special_tokens",
    "store",
    "top_k",
    "user",
    "verbosity",
];

/// Fields that must be absent, null or empty, since the engine cannot do what they ask for.
const UNSUPPORTED: &[&str] =
    &["audio", "function_call", "functions", "logit_bias", "modalities", "prediction", "stop", "web_search_options"];

/// Fields that are read.
const READ: &[&str] = &[
    "frequency_penalty",
    "logprobs",
    "max_completion_tokens",
    "max_tokens",
    "messages",
    "model",
    "n",
    "parallel_tool_calls",
    "presence_penalty",
    "response_format",
    "stream",
    "stream_options",
    "temperature",
    "tool_choice",
    "tools",
    "top_logprobs",
    "top_p",
];

/// The most characters of a function's name.
const NAME_LIMIT: usize = 64;

/// A refusal: an HTTP status and an error object as the OpenAI API has it.
#[derive(Debug, Clone, PartialEq)]
pub struct Refusal {
    /// The HTTP status.
    pub status: u16,
    /// The error's type.
    pub kind: &'static str,
    /// The message.
    pub message: String,
    /// The offending field.
    pub param: Option<String>,
    /// The error's code.
    pub code: Option<&'static str>,
    /// Seconds after which a retry makes sense.
    pub retry_after: Option<u32>,
}

impl Refusal {
    /// A refusal of `status` that blames no field.
    pub fn new(status: u16, kind: &'static str, code: &'static str, message: impl Into<String>) -> Self {
        Self { status, kind, message: message.into(), param: None, code: Some(code), retry_after: None }
    }

    /// A bad request: `param` is wrong because of `message`.
    pub fn field(param: impl Into<String>, message: impl Into<String>) -> Self {
        let (kind, param) = ("invalid_request_error", Some(param.into()));
        Self { status: 400, kind, message: message.into(), param, code: None, retry_after: None }
    }

    /// With a code.
    #[must_use]
    pub fn code(mut self, code: &'static str) -> Self {
        self.code = Some(code);
        self
    }

    /// The body.
    pub fn body(&self) -> Value {
        json!({"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}})
    }
}

type Read<T> = Result<T, Refusal>;

/// A chat request, understood.
#[derive(Debug, Clone, PartialEq)]
pub struct ChatRequest {
    /// The model asked for.
    pub model: String,
    /// What to continue.
    pub conversation: Conversation,
    /// The most tokens of the answer, where the request says.
    pub max_tokens: Option<u32>,
    /// Whether the answer is streamed.
    pub stream: bool,
    /// Whether a stream ends with the usage.
    pub include_usage: bool,
    /// Whether an answer may hold more than one call.
    pub parallel: bool,
}

impl ChatRequest {
    /// Reads a request's body.
    pub fn parse(body: &[u8]) -> Read<Self> {
        let body: Value = serde_json::from_slice(body).map_err(|error| {
            Refusal::new(400, "invalid_request_error", "invalid_json", format!("the body is no valid JSON: {error}"))
        })?;
        let Value::Object(fields) = body else {
            return Err(Refusal::new(400, "invalid_request_error", "invalid_json", "the body is no JSON object"));
        };
        let root = Object { fields: &fields, path: String::new() };
        root.refuse_unknown()?;
        root.check_unused()?;
        let tools = tools(&root)?;
        let choice = tool_choice(&root, &tools)?;
        let stream = root.boolean("stream")?.unwrap_or(false);
        Ok(Self {
            model: root.required_string("model")?.to_owned(),
            conversation: Conversation { messages: messages(&root)?, tools, choice },
            max_tokens: max_tokens(&root)?,
            stream,
            include_usage: include_usage(&root, stream)?,
            parallel: root.boolean("parallel_tool_calls")?.unwrap_or(true),
        })
    }

    /// The most tokens of an answer to a prompt of `prompt` tokens.
    pub fn answer_limit(&self, prompt: usize, max_context: u32) -> Read<u32> {
        let room = max_context.saturating_sub(prompt as u32);
        let limit = self.max_tokens.unwrap_or(DEFAULT_MAX_TOKENS.min(room));
        if room == 0 || limit > room {
            let message = format!(
                "the longest context is {max_context} tokens: {prompt} in the messages and tools and {} for the answer \
                 are too many",
                limit.max(1)
            );
            return Err(Refusal::field("messages", message).code("context_length_exceeded"));
        }
        Ok(limit)
    }
}

/// An object and where it stands in the body.
struct Object<'a> {
    fields: &'a Map<String, Value>,
    path: String,
}

impl<'a> Object<'a> {
    fn at(&self, key: &str) -> String {
        if self.path.is_empty() { key.to_owned() } else { format!("{}.{key}", self.path) }
    }

    /// A field that is there and not null.
    fn get(&self, key: &str) -> Option<&'a Value> {
        self.fields.get(key).filter(|value| !value.is_null())
    }

    fn wrong(&self, key: &str, wanted: &str, found: &Value) -> Refusal {
        let param = self.at(key);
        let message = format!("`{param}` must be {wanted}, not {}", kind(found));
        Refusal::field(param, message)
    }

    fn missing(&self, key: &str) -> Refusal {
        let param = self.at(key);
        let message = format!("`{param}` is missing");
        Refusal::field(param, message)
    }

    fn string(&self, key: &str) -> Read<Option<&'a str>> {
        self.get(key).map(|v| v.as_str().ok_or_else(|| self.wrong(key, "a string", v))).transpose()
    }

    fn required_string(&self, key: &str) -> Read<&'a str> {
        self.string(key)?.ok_or_else(|| self.missing(key))
    }

    fn boolean(&self, key: &str) -> Read<Option<bool>> {
        self.get(key).map(|v| v.as_bool().ok_or_else(|| self.wrong(key, "a boolean", v))).transpose()
    }

    fn array(&self, key: &str) -> Read<Option<&'a Vec<Value>>> {
        self.get(key).map(|v| v.as_array().ok_or_else(|| self.wrong(key, "an array", v))).transpose()
    }

    fn object(&self, key: &str) -> Read<Option<Object<'a>>> {
        let object = |v: &'a Value| v.as_object().ok_or_else(|| self.wrong(key, "an object", v));
        let fields = self.get(key).map(object).transpose()?;
        Ok(fields.map(|fields| Object { fields, path: self.at(key) }))
    }

    fn number(&self, key: &str, range: std::ops::RangeInclusive<f64>) -> Read<()> {
        let Some(value) = self.get(key) else { return Ok(()) };
        let wanted = || format!("a number from {} to {}", range.start(), range.end());
        match value.as_f64() {
            Some(number) if range.contains(&number) => Ok(()),
            Some(number) => {
                let param = self.at(key);
                let message = format!("`{param}` must be {}, not {number}", wanted());
                Err(Refusal::field(param, message))
            }
            None => Err(self.wrong(key, &wanted(), value)),
        }
    }

    fn count(&self, key: &str) -> Read<Option<u32>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let count = value.as_u64().and_then(|n| u32::try_from(n).ok()).filter(|n| *n > 0);
        count.map(Some).ok_or_else(|| self.wrong(key, "a whole number from 1 to 4294967295", value))
    }

    fn refuse_unknown(&self) -> Read<()> {
        let known = |key: &str| [READ, IGNORED, UNSUPPORTED].iter().any(|list| list.contains(&key));
        match self.fields.keys().find(|key| !known(key)) {
            Some(key) => Err(Refusal::field(key.as_str(), format!("`{key}` is no field of a chat request"))),
            None => Ok(()),
        }
    }

    /// Checks the fields that are not used further.
    fn check_unused(&self) -> Read<()> {
        for key in UNSUPPORTED {
            if self.get(key).is_some_and(|value| !is_empty(value)) {
                return Err(self.unsupported(key));
            }
        }
        self.number("temperature", 0.0..=2.0)?;
        self.number("top_p", 0.0..=1.0)?;
        self.number("presence_penalty", -2.0..=2.0)?;
        self.number("frequency_penalty", -2.0..=2.0)?;
        if self.count("n")?.is_some_and(|n| n > 1) {
            return Err(Refusal::field("n", "`n` must be 1: one answer is given to a request"));
        }
        if self.boolean("logprobs")? == Some(true) {
            return Err(self.unsupported("logprobs"));
        }
        if self.get("top_logprobs").is_some_and(|value| value.as_u64() != Some(0)) {
            return Err(self.unsupported("top_logprobs"));
        }
        if let Some(format) = self.object("response_format")?
            && format.required_string("type")? != "text"
        {
            return Err(Refusal::field("response_format.type", "`response_format.type` must be `text`"));
        }
        Ok(())
    }

    fn unsupported(&self, key: &str) -> Refusal {
        let param = self.at(key);
        let message = format!("`{param}` is not supported by this server");
        Refusal::field(param, message).code("unsupported_parameter")
    }
}

fn kind(value: &Value) -> String {
    match value {
        Value::Null => "null".into(),
        Value::Bool(_) | Value::Number(_) => value.to_string(),
        Value::String(_) => "a string".into(),
        Value::Array(_) => "an array".into(),
        Value::Object(_) => "an object".into(),
    }
}

fn is_empty(value: &Value) -> bool {
    match value {
        Value::Array(items) => items.is_empty(),
        Value::Object(fields) => fields.is_empty(),
        _ => false,
    }
}

fn max_tokens(root: &Object<'_>) -> Read<Option<u32>> {
    let limits = (root.count("max_completion_tokens")?, root.count("max_tokens")?);
    Ok(limits.0.or(limits.1))
}

fn include_usage(root: &Object<'_>, stream: bool) -> Read<bool> {
    let Some(options) = root.object("stream_options")? else { return Ok(false) };
    if !stream {
        return Err(Refusal::field("stream_options", "`stream_options` is only allowed when `stream` is true"));
    }
    Ok(options.boolean("include_usage")?.unwrap_or(false))
}

fn tools(root: &Object<'_>) -> Read<Vec<Value>> {
    let tools = root.array("tools")?.map_or(&[][..], Vec::as_slice);
    for (index, tool) in tools.iter().enumerate() {
        let tool = item(tool, format!("tools[{index}]"))?;
        function_type(&tool)?;
        let function = tool.object("function")?.ok_or_else(|| tool.missing("function"))?;
        let name = function.required_string("name")?;
        let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
        if name.is_empty() || name.len() > NAME_LIMIT || !name.chars().all(plain) {
            let param = function.at("name");
            let message = format!("`{param}` must be 1 to {NAME_LIMIT} letters, digits, `_`, `-` or `.`");
            return Err(Refusal::field(param, message));
        }
        function.string("description")?;
        function.object("parameters")?;
        function.boolean("strict")?;
    }
    Ok(tools.to_vec())
}

fn tool_choice(root: &Object<'_>, tools: &[Value]) -> Read<ToolChoice> {
    let Some(choice) = root.get("tool_choice") else { return Ok(ToolChoice::Auto) };
    let choice = match choice {
        Value::String(word) => match word.as_str() {
            "none" => ToolChoice::None,
            "auto" => ToolChoice::Auto,
            "required" => ToolChoice::Required,
            _ => {
                let message = format!("`tool_choice` must be `none`, `auto`, `required` or a function, not `{word}`");
                return Err(Refusal::field("tool_choice", message));
            }
        },
        Value::Object(fields) => named_choice(&Object { fields, path: "tool_choice".into() }, tools)?,
        other => return Err(root.wrong("tool_choice", "a string or an object", other)),
    };
    if choice == ToolChoice::Required && tools.is_empty() {
        return Err(Refusal::field("tool_choice", "`tool_choice` asks for a call and `tools` offers none"));
    }
    Ok(choice)
}

fn named_choice(choice: &Object<'_>, tools: &[Value]) -> Read<ToolChoice> {
    function_type(choice)?;
    let function = choice.object("function")?.ok_or_else(|| choice.missing("function"))?;
    let name = function.required_string("name")?;
    if tools.iter().any(|tool| tool["function"]["name"] == name) {
        return Ok(ToolChoice::Required);
    }
    let param = function.at("name");
    let message = format!("`{param}` is `{name}`, which is not among `tools`");
    Err(Refusal::field(param, message))
}

fn function_type(object: &Object<'_>) -> Read<()> {
    if object.required_string("type")? == "function" {
        return Ok(());
    }
    let param = object.at("type");
    let message = format!("`{param}` must be `function`");
    Err(Refusal::field(param, message))
}

fn item(value: &Value, path: String) -> Read<Object<'_>> {
    match value {
        Value::Object(fields) => Ok(Object { fields, path }),
        other => {
            let message = format!("`{path}` must be an object, not {}", kind(other));
            Err(Refusal::field(path, message))
        }
    }
}

fn messages(root: &Object<'_>) -> Read<Vec<Message>> {
    let messages = root.array("messages")?.ok_or_else(|| root.missing("messages"))?;
    if messages.is_empty() {
        return Err(Refusal::field("messages", "`messages` must hold at least one message"));
    }
    let mut called = Vec::new();
    let parse = |(index, value)| message(&item(value, format!("messages[{index}]"))?, &mut called);
    messages.iter().enumerate().map(parse).collect()
}

/// One message; `called` collects the ids of the calls so far, which results must name.
fn message<'a>(message: &Object<'a>, called: &mut Vec<&'a str>) -> Read<Message> {
    let role = match message.required_string("role")? {
        "assistant" => return answered(message, called),
        "system" => "system",
        "developer" => "developer",
        "user" => "user",
        "tool" => "tool",
        other => {
            let param = message.at("role");
            let message = format!("`{param}` must be system, developer, user, assistant or tool, not `{other}`");
            return Err(Refusal::field(param, message));
        }
    };
    if role == "tool" {
        let id = message.required_string("tool_call_id")?;
        if !called.contains(&id) {
            let param = message.at("tool_call_id");
            let message = format!("`{param}` is `{id}`, which is the id of no earlier tool call");
            return Err(Refusal::field(param, message));
        }
    }
    let content = content(message)?.ok_or_else(|| message.missing("content"))?;
    Ok(Message::Said { role, content })
}

fn answered<'a>(message: &Object<'a>, called: &mut Vec<&'a str>) -> Read<Message> {
    let list = message.array("tool_calls")?.map_or(&[][..], Vec::as_slice);
    let mut calls = Vec::with_capacity(list.len());
    for (index, value) in list.iter().enumerate() {
        let call = item(value, format!("{}[{index}]", message.at("tool_calls")))?;
        called.push(call.required_string("id")?);
        function_type(&call)?;
        let function = call.object("function")?.ok_or_else(|| call.missing("function"))?;
        let name = function.required_string("name")?.to_owned();
        calls.push(Call { name, arguments: function.required_string("arguments")?.to_owned() });
    }
    let content = content(message)?;
    if content.is_none() && calls.is_empty() {
        return Err(message.missing("content"));
    }
    Ok(Message::Answered { content: content.unwrap_or_default(), calls })
}

fn content(message: &Object<'_>) -> Read<Option<String>> {
    match message.get("content") {
        None => Ok(None),
        Some(Value::String(text)) => Ok(Some(text.clone())),
        Some(Value::Array(parts)) => {
            let mut text = String::new();
            for (index, part) in parts.iter().enumerate() {
                let part = item(part, format!("{}[{index}]", message.at("content")))?;
                if part.required_string("type")? != "text" {
                    let param = part.at("type");
                    let message = format!("`{param}` must be `text`: this model reads nothing else");
                    return Err(Refusal::field(param, message));
                }
                text.push_str(part.required_string("text")?);
            }
            Ok(Some(text))
        }
        Some(other) => Err(message.wrong("content", "a string or an array of text parts", other)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(body: &Value) -> Read<ChatRequest> {
        ChatRequest::parse(body.to_string().as_bytes())
    }

    fn body() -> Value {
        json!({
            "model": "m",
            "messages": [{"role": "user", "content": "hi"}],
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
        })
    }

    fn with(key: &str, value: Value) -> Value {
        let mut body = body();
        body[key] = value;
        body
    }

    #[test]
    fn a_usual_request_is_read() {
        let request = parse(&json!({
            "model": "m",
            "messages": [
                {"role": "system", "content": "be brief"},
                {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
                {"role": "assistant", "content": null, "tool_calls": [
                    {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{bad"}}]},
                {"role": "tool", "tool_call_id": "c1", "content": "42"},
            ],
            "temperature": 0.7, "top_p": 1, "seed": 3, "stop": null, "n": 1, "logprobs": false,
            "stream": true, "stream_options": {"include_usage": true}, "max_completion_tokens": 9,
        }))
        .unwrap();
        assert_eq!(request.max_tokens, Some(9));
        assert!(request.stream && request.include_usage && request.parallel);
        let said = |role, content: &str| Message::Said { role, content: content.into() };
        let calls = vec![Call { name: "f".into(), arguments: "{bad".into() }];
        assert_eq!(
            request.conversation.messages,
            [
                said("system", "be brief"),
                said("user", "ab"),
                Message::Answered { content: String::new(), calls },
                said("tool", "42")
            ]
        );
    }

    #[test]
    fn every_refusal_names_its_field() {
        let call = json!([{"id": "x", "type": "function", "function": {"name": "f"}}]);
        for (body, param) in [
            (json!({"messages": []}), "model"),
            (json!({"model": "m"}), "messages"),
            (with("model", json!(3)), "model"),
            (with("messages", json!([])), "messages"),
            (with("messages", json!("hi")), "messages"),
            (with("messages", json!([3])), "messages[0]"),
            (with("messages", json!([{"content": "x"}])), "messages[0].role"),
            (with("messages", json!([{"role": "oracle", "content": "x"}])), "messages[0].role"),
            (with("messages", json!([{"role": "user"}])), "messages[0].content"),
            (with("messages", json!([{"role": "user", "content": 5}])), "messages[0].content"),
            (
                with("messages", json!([{"role": "user", "content": [{"type": "image_url"}]}])),
                "messages[0].content[0].type",
            ),
            (with("messages", json!([{"role": "tool", "content": "x"}])), "messages[0].tool_call_id"),
            (
                with("messages", json!([{"role": "tool", "content": "x", "tool_call_id": "y"}])),
                "messages[0].tool_call_id",
            ),
            (with("messages", json!([{"role": "assistant"}])), "messages[0].content"),
            (
                with("messages", json!([{"role": "assistant", "tool_calls": call}])),
                "messages[0].tool_calls[0].function.arguments",
            ),
            (with("tools", json!({})), "tools"),
            (with("tools", json!([{"type": "retrieval"}])), "tools[0].type"),
            (with("tools", json!([{"type": "function", "function": {"name": "a b"}}])), "tools[0].function.name"),
            (
                with("tools", json!([{"type": "function", "function": {"name": "f", "parameters": 1}}])),
                "tools[0].function.parameters",
            ),
            (with("tool_choice", json!("maybe")), "tool_choice"),
            (with("tool_choice", json!({"type": "function", "function": {"name": "g"}})), "tool_choice.function.name"),
            (
                json!({"model": "m", "messages": [{"role": "user", "content": "x"}], "tool_choice": "required"}),
                "tool_choice",
            ),
            (with("temperature", json!("hot")), "temperature"),
            (with("temperature", json!(2.5)), "temperature"),
            (with("max_tokens", json!(0)), "max_tokens"),
            (with("max_tokens", json!(-5)), "max_tokens"),
            (with("max_tokens", json!(1.5)), "max_tokens"),
            (with("max_tokens", json!(1u64 << 40)), "max_tokens"),
            (with("n", json!(2)), "n"),
            (with("stop", json!("x")), "stop"),
            (with("logprobs", json!(true)), "logprobs"),
            (with("functions", json!([{"name": "f"}])), "functions"),
            (with("response_format", json!({"type": "json_object"})), "response_format.type"),
            (with("stream_options", json!({"include_usage": true})), "stream_options"),
            (with("strean", json!(true)), "strean"),
        ] {
            let refusal = parse(&body).expect_err(&format!("{body} is refused"));
            assert_eq!((refusal.status, refusal.param.as_deref()), (400, Some(param)), "{body}");
            assert!(refusal.message.contains(param), "{} does not name {param}", refusal.message);
        }
    }

    #[test]
    fn what_is_no_object_is_refused() {
        for body in ["", "[]", "null", "{", "{\"model\": \"\\ud800\"}", "\u{feff}{}"] {
            assert_eq!(ChatRequest::parse(body.as_bytes()).unwrap_err().status, 400, "{body}");
        }
        let deep = format!("{{\"model\": {}{}}}", "[".repeat(100_000), "]".repeat(100_000));
        assert!(ChatRequest::parse(deep.as_bytes()).unwrap_err().message.contains("recursion limit"));
    }

    #[test]
    fn the_answer_fits_the_context() {
        let request = parse(&body()).unwrap();
        assert_eq!(request.answer_limit(100, 16_384), Ok(DEFAULT_MAX_TOKENS));
        assert_eq!(request.answer_limit(16_000, 16_384), Ok(384));
        let refusal = request.answer_limit(16_384, 16_384).unwrap_err();
        assert_eq!((refusal.code, refusal.param.as_deref()), (Some("context_length_exceeded"), Some("messages")));
        assert!(parse(&with("max_tokens", json!(16_300))).unwrap().answer_limit(100, 16_384).is_err());
    }
}
