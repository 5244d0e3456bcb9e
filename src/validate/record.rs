//! Recorded responses: what `validate` reads. Case files, response bodies, event-stream transcripts, JSON lines.

use serde_json::{Map, Value};

use super::{Ending, Expectation, ExpectedCall, Observation, ToolChoice, Tools};
use crate::error::{Error, Result};

/// One recorded response and what was known when it came.
#[derive(Debug, Clone, Default)]
pub struct Record {
    /// Its id: the file's own, or the file's name.
    pub id: String,
    /// HTTP status.
    pub http_status: u16,
    /// The `content-type` header.
    pub content_type: Option<String>,
    /// Whether a stream was asked for.
    pub stream: bool,
    /// The body.
    pub body: Vec<u8>,
    /// How it ended.
    pub ending: Ending,
    /// What was known.
    pub expectation: Expectation,
}

impl Record {
    /// The response as the judge takes it.
    pub fn observation(&self) -> Observation<'_> {
        Observation {
            http_status: self.http_status,
            content_type: self.content_type.as_deref(),
            stream: self.stream,
            body: &self.body,
            ending: self.ending,
        }
    }

    /// A body of which nothing else is known.
    fn raw(id: &str, body: Vec<u8>) -> Self {
        let expectation = Expectation { tools_unknown: true, ..Expectation::default() };
        Self {
            id: id.to_owned(),
            http_status: 200,
            stream: looks_like_stream(&body),
            body,
            expectation,
            ..Self::default()
        }
    }
}

/// Reads a file of any known layout; `name` stands for it in ids and messages.
pub fn read(name: &str, bytes: &[u8]) -> Result<Vec<Record>> {
    let start = bytes.strip_prefix(b"\xEF\xBB\xBF").unwrap_or(bytes).trim_ascii_start();
    if start.is_empty() {
        return Err(Error::usage("the file is empty").within(name));
    }
    if start.starts_with(b"HTTP/") {
        return http(name, start).map(|record| vec![record]);
    }
    if start[0] != b'{' {
        return Ok(vec![Record::raw(name, bytes.to_vec())]);
    }
    match serde_json::from_slice::<Value>(start) {
        Ok(value) => object(name, &value, start).map(|record| vec![record]).map_err(|error| error.within(name)),
        Err(_) if start.trim_ascii_end().contains(&b'\n') => lines(name, start),
        // A body that is broken itself, such as half a surrogate pair, is still a body.
        Err(error) => match serde_json::from_slice::<Map<String, Value>>(start) {
            Err(_) if has_key(start, b"\"body\"") => Err(Error::usage(format!("no JSON: {error}")).within(name)),
            _ => Ok(vec![Record::raw(name, bytes.to_vec())]),
        },
    }
}

/// Whether the start of a broken file has a key, so that it is a broken case and no broken body.
fn has_key(bytes: &[u8], key: &[u8]) -> bool {
    bytes.windows(key.len()).any(|window| window == key)
}

/// One JSON document: a case, a verifier's record, or a response body.
fn object(id: &str, value: &Value, bytes: &[u8]) -> Result<Record> {
    if value.get("body").is_some() || value.get("body_b64").is_some() {
        return case(id, value);
    }
    if value.get("response").is_some() && value.get("choices").is_none() {
        return verifier(id, value);
    }
    Ok(Record::raw(id, bytes.to_vec()))
}

/// JSON lines: records, or the chunks of one stream.
fn lines(name: &str, bytes: &[u8]) -> Result<Vec<Record>> {
    let lines = bytes.split(|&byte| byte == b'\n').enumerate();
    let lines: Vec<(usize, &[u8])> =
        lines.map(|(at, line)| (at + 1, line.trim_ascii())).filter(|(_, line)| !line.is_empty()).collect();
    let mut values = Vec::new();
    for (number, line) in &lines {
        match serde_json::from_slice::<Value>(line) {
            Ok(value) => values.push(value),
            // Neither JSON nor JSON lines from the first line on: a body.
            Err(_) if *number == 1 && !has_key(bytes, b"\"body\"") => {
                return Ok(vec![Record::raw(name, bytes.to_vec())]);
            }
            Err(error) => {
                return Err(Error::usage(format!("line {number} is no JSON: {error}"))
                    .within(name)
                    .hint("a transcript has one JSON record a line, or `data:` in front of every event"));
            }
        }
    }
    if values.iter().all(|value| value.get("object").and_then(Value::as_str) == Some("chat.completion.chunk")) {
        let body = lines.iter().flat_map(|(_, line)| [b"data: ", *line, b"\n\n"].concat()).collect();
        return Ok(vec![Record { stream: true, ..Record::raw(name, body) }]);
    }
    lines
        .iter()
        .zip(values)
        .map(|((number, line), value)| {
            let id = format!("{name}:{number}");
            object(&id, &value, line).map_err(|error| error.within(format!("{name}, line {number}")))
        })
        .collect()
}

/// A case: body, tools, context and transport in one object.
fn case(fallback: &str, value: &Value) -> Result<Record> {
    let body = match (value.get("body"), value.get("body_b64")) {
        (Some(Value::String(text)), _) => text.as_bytes().to_vec(),
        (None | Some(Value::Null), Some(Value::String(text))) => {
            base64(text).ok_or_else(|| Error::usage("`body_b64` is no base64"))?
        }
        _ => return Err(Error::usage("`body` and `body_b64` are no strings")),
    };
    let stream =
        optional(value, "stream", Value::as_bool, "true or false")?.unwrap_or_else(|| looks_like_stream(&body));
    let status = optional(value, "http_status", Value::as_u64, "a number")?.unwrap_or(200);
    let http_status = u16::try_from(status).map_err(|_| Error::usage(format!("`http_status` is {status}")))?;
    let nothing = Value::Null;
    let transport = value.get("transport").unwrap_or(&nothing);
    let ending = match optional(transport, "end", Value::as_str, "a word")? {
        None | Some("eof") => Ending::Eof,
        Some("reset") => Ending::Reset,
        Some("stall") => Ending::Stall,
        Some("no_response") => Ending::NoResponse,
        Some(other) => {
            return Err(
                Error::usage(format!("`transport.end` is `{other}`")).hint("known: eof, reset, stall, no_response")
            );
        }
    };
    let id = optional(value, "id", Value::as_str, "a string")?.unwrap_or(fallback).to_owned();
    let content_type = optional(transport, "content_type", Value::as_str, "a string")?.map(str::to_owned);
    let expectation = expectation(value.get("tools"), value.get("context").unwrap_or(&nothing))?;
    Ok(Record { id, http_status, content_type, stream, body, ending, expectation })
}

/// A record of the vendor verifiers: `request`, `response`, `status`.
fn verifier(fallback: &str, value: &Value) -> Result<Record> {
    let nothing = Value::Null;
    let request = value.get("request").unwrap_or(&nothing);
    let id = ["data_index", "id", "hash"].iter().find_map(|key| match value.get(*key)? {
        Value::String(text) => Some(text.clone()),
        Value::Number(number) => Some(format!("{fallback}#{number}")),
        _ => None,
    });
    let expectation = expectation(request.get("tools").or_else(|| value.get("tools")), request)?;
    let body = match &value["response"] {
        Value::String(text) => text.as_bytes().to_vec(),
        // What the verifier wrote instead of a response that never came.
        Value::Null => b"{\"error\":\"the record holds no response\"}".to_vec(),
        response => response.to_string().into_bytes(),
    };
    let stream = looks_like_stream(&body);
    let id = id.unwrap_or_else(|| fallback.to_owned());
    Ok(Record { id, http_status: 200, stream, body, expectation, ..Record::default() })
}

/// A response with its header lines, as `curl -i` prints it.
fn http(name: &str, bytes: &[u8]) -> Result<Record> {
    let end = [&b"\r\n\r\n"[..], b"\n\n"]
        .iter()
        .find_map(|mark| Some((bytes.windows(mark.len()).position(|window| window == *mark)?, mark.len())));
    let Some((end, mark)) = end else {
        return Err(Error::usage("no blank line ends the header of the response").within(name));
    };
    let head = String::from_utf8_lossy(&bytes[..end]);
    let status = head.split_ascii_whitespace().nth(1).and_then(|word| word.parse().ok());
    let Some(http_status) = status else {
        return Err(Error::usage("the first line holds no HTTP status").within(name));
    };
    let content_type = head.lines().find_map(|line| {
        let (field, value) = line.split_once(':')?;
        field.eq_ignore_ascii_case("content-type").then(|| value.trim().to_owned())
    });
    Ok(Record { http_status, content_type, ..Record::raw(name, bytes[end + mark..].to_vec()) })
}

/// What a case's `context` or a request says beside its tools.
fn expectation(tools: Option<&Value>, context: &Value) -> Result<Expectation> {
    let tools_unknown = tools.is_none_or(Value::is_null);
    let tools = match tools {
        None | Some(Value::Null) => Tools::default(),
        Some(Value::Array(values)) => Tools::new(values.clone()),
        Some(_) => return Err(Error::usage("`tools` is no array")),
    };
    tools.check()?;
    let calls = match context.get("expect_calls") {
        None | Some(Value::Null) => None,
        Some(Value::Array(calls)) => Some(calls.iter().map(expected).collect::<Result<_>>()?),
        Some(_) => return Err(Error::usage("`context.expect_calls` is no array")),
    };
    Ok(Expectation {
        tools,
        tools_unknown,
        tool_choice: tool_choice(context.get("tool_choice"))?,
        calls,
        own_canary: optional(context, "own_canary", Value::as_str, "a string")?.map(str::to_owned),
        foreign_canaries: words(context, "foreign_canaries")?,
        foreign_tools: words(context, "foreign_tools")?,
        prompt_asks_for_markup: optional(context, "prompt_asks_for_markup", Value::as_bool, "true or false")?
            .unwrap_or(false),
        extra_markup: words(context, "extra_markup")?,
        canaries: None,
    })
}

fn expected(call: &Value) -> Result<ExpectedCall> {
    let Some(name) = call.get("name").and_then(Value::as_str) else {
        return Err(Error::usage("a call of `context.expect_calls` has no `name`"));
    };
    let arguments = call.get("arguments").cloned().unwrap_or_else(|| Value::Object(Map::new()));
    let text = optional(call, "text", Value::as_str, "a string")?.map(str::to_owned);
    Ok(ExpectedCall { name: name.to_owned(), arguments, text })
}

/// The request's `tool_choice`, as a word or as an object that names a function.
pub fn tool_choice(value: Option<&Value>) -> Result<ToolChoice> {
    let name = match value {
        None | Some(Value::Null) => return Ok(ToolChoice::Auto),
        Some(Value::String(word)) => match word.as_str() {
            "auto" => return Ok(ToolChoice::Auto),
            "none" => return Ok(ToolChoice::None),
            "required" | "any" => return Ok(ToolChoice::Required),
            _ => None,
        },
        Some(object) => object.pointer("/function/name").or_else(|| object.get("name")).and_then(Value::as_str),
    };
    name.map(|name| ToolChoice::Named(name.to_owned())).ok_or_else(|| {
        Error::usage("`tool_choice` is unknown").hint("known: auto, none, required, or an object with function.name")
    })
}

fn optional<'a, T>(
    value: &'a Value,
    key: &str,
    read: impl Fn(&'a Value) -> Option<T>,
    wanted: &str,
) -> Result<Option<T>> {
    match value.get(key) {
        None | Some(Value::Null) => Ok(None),
        Some(found) => read(found).map(Some).ok_or_else(|| Error::usage(format!("`{key}` is not {wanted}"))),
    }
}

fn words(value: &Value, key: &str) -> Result<Vec<String>> {
    let read = |found: &Value| {
        found.as_array()?.iter().map(|word| word.as_str().map(str::to_owned)).collect::<Option<Vec<String>>>()
    };
    Ok(optional(value, key, read, "an array of strings")?.unwrap_or_default())
}

/// Whether a body is an event stream: its first line is a field or a comment of one.
fn looks_like_stream(body: &[u8]) -> bool {
    let start = body.strip_prefix(b"\xEF\xBB\xBF").unwrap_or(body).trim_ascii_start();
    [&b"data:"[..], b"event:", b"id:", b"retry:", b":"].iter().any(|field| start.starts_with(field))
}

/// Standard base64, with or without padding; `None` for anything else.
fn base64(text: &str) -> Option<Vec<u8>> {
    let mut bytes = Vec::with_capacity(text.len() / 4 * 3);
    let (mut bits, mut count) = (0_u32, 0);
    let digits = text.bytes().filter(|byte| !byte.is_ascii_whitespace());
    for digit in digits.take_while(|&byte| byte != b'=') {
        let value = match digit {
            b'A'..=b'Z' => digit - b'A',
            b'a'..=b'z' => digit - b'a' + 26,
            b'0'..=b'9' => digit - b'0' + 52,
            b'+' | b'-' => 62,
            b'/' | b'_' => 63,
            _ => return None,
        };
        bits = bits << 6 | u32::from(value);
        count += 6;
        if count >= 8 {
            count -= 8;
            bytes.push((bits >> count) as u8);
        }
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ANSWER: &str = r#"{"choices":[{"message":{"content":"hi"},"finish_reason":"stop"}]}"#;

    #[test]
    fn layouts_are_told_apart() {
        let one = |text: &str| read("f", text.as_bytes()).unwrap();
        assert!(!one(ANSWER)[0].stream);
        assert!(one("data: {}\n\n")[0].stream);
        assert!(one("<!doctype html>")[0].expectation.tools_unknown);
        assert_eq!(one("HTTP/1.1 503 Busy\r\ncontent-type: text/plain\r\n\r\nbusy")[0].http_status, 503);
        let chunk = r#"{"object":"chat.completion.chunk","choices":[]}"#;
        let chunks = one(&format!("{chunk}\n{chunk}\n"));
        assert_eq!((chunks.len(), chunks[0].stream), (1, true));
        let record = format!("{{\"data_index\":3,\"request\":{{\"tools\":[]}},\"response\":{ANSWER}}}");
        let records = one(&format!("{record}\n\n{record}\n"));
        assert_eq!(records.iter().map(|record| record.id.as_str()).collect::<Vec<_>>(), ["f:1#3", "f:3#3"]);
        assert_eq!(one(r#"{"body_b64":"77u/ZGF0YTo=","id":"x"}"#)[0].body, b"\xEF\xBB\xBFdata:");
    }

    #[test]
    fn bad_files_name_what_is_wrong() {
        let error = |text: &str| read("f", text.as_bytes()).unwrap_err().to_string();
        assert_eq!(error(""), "f: the file is empty");
        assert_eq!(error(r#"{"body": 3}"#), "f: `body` and `body_b64` are no strings");
        assert_eq!(error(r#"{"body": "", "http_status": 70000}"#), "f: `http_status` is 70000");
        assert_eq!(error(r#"{"body": "", "transport": {"end": "x"}}"#), "f: `transport.end` is `x`");
        assert_eq!(error(r#"{"body": "", "tools": [{}]}"#), "f: tools[0] has no function name");
        assert!(error("{\"body\": \"x").starts_with("f: no JSON"));
        assert!(error("{\"a\": 1}\nnonsense\n").starts_with("f: line 2 is no JSON"));
    }
}
