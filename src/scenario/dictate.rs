//! Dictated calls: texts whose every byte the oracle knows.

use std::io;

use rand::Rng;
use serde::Serialize as _;
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};

use super::{Content, Range, fill, lint, tool::Tool};
use crate::error::{Error, Result};

/// The line that announces dictated calls.
pub const LEAD: &str = "Make exactly this tool call, copying every character:";

/// How often a draw may be rejected before the scenario is found impossible.
const ATTEMPTS: u32 = 400;

/// One dictated call.
#[derive(Debug, Clone, PartialEq)]
pub struct Dictated {
    /// Function name.
    pub name: String,
    /// Arguments as a value.
    pub arguments: Value,
    /// Arguments as text.
    pub text: String,
    /// The whole line of the turn.
    pub line: String,
}

impl Dictated {
    fn new(name: &str, arguments: Map<String, Value>, escaped: bool) -> Self {
        let arguments = Value::Object(arguments);
        let text = spell(&arguments, escaped);
        let line = format!("{{\"name\": {}, \"arguments\": {text}}}", spell(&json!(name), escaped));
        Self { name: name.into(), arguments, text, line }
    }

    /// SHA-256 of the line, in hexadecimal.
    pub fn sha256(&self) -> String {
        hex(&Sha256::digest(self.line.as_bytes()))
    }
}

/// Lower-case hexadecimal.
pub(crate) fn hex(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    bytes.iter().flat_map(|byte| [byte >> 4, byte & 15]).map(|digit| char::from(DIGITS[digit as usize])).collect()
}

/// What a round dictates from.
pub(super) struct Wish<'a> {
    /// Tools of the session.
    pub(super) tools: &'a [Tool],
    /// Kinds of content to draw from.
    pub(super) content: &'a [Content],
    /// Bytes of a call's line.
    pub(super) answer: Range,
    /// Calls to dictate.
    pub(super) calls: u32,
    /// The session's nonce.
    pub(super) nonce: &'a str,
    /// Number of the round.
    pub(super) round: u32,
}

/// Draws call after call, each again until the turn so far passes the linter.
pub(super) fn dictate(rng: &mut impl Rng, wish: &Wish<'_>) -> Result<Vec<Dictated>> {
    let mut calls: Vec<Dictated> = Vec::new();
    for attempt in 1..=ATTEMPTS {
        if calls.len() == wish.calls as usize {
            break;
        }
        // The calls so far can leave no way on: begin anew now and then.
        if attempt.is_multiple_of(16) {
            calls.clear();
        }
        // Two calls of one tool share too much text; as long as there are others, those are drawn.
        let fresh: Vec<_> = wish.tools.iter().filter(|tool| calls.iter().all(|call| call.name != tool.name)).collect();
        let tool = if fresh.is_empty() { &wish.tools[0] } else { fill::pick(rng, &fresh) };
        if let Some(call) = draw(rng, wish, tool, calls.len()) {
            calls.push(call);
            if lint::ambiguity(&turn(&calls)).is_some() {
                calls.pop();
            }
        }
    }
    if calls.len() == wish.calls as usize {
        return Ok(calls);
    }
    Err(Error::usage(format!(
        "no unambiguous dictated text of {} calls with {} to {} bytes each was found in {ATTEMPTS} draws",
        wish.calls, wish.answer.0, wish.answer.1
    ))
    .hint("widen `answer` or dictate fewer `calls`"))
}

/// The end of a dictating turn.
pub(super) fn turn(calls: &[Dictated]) -> String {
    let mut text = String::from(LEAD);
    for call in calls {
        text.push('\n');
        text.push_str(&call.line);
    }
    text
}

/// One call of a length within the wish; `None` when the draw came out too long or too short.
fn draw(rng: &mut impl Rng, wish: &Wish<'_>, tool: &Tool, call: usize) -> Option<Dictated> {
    let content = fill::pick(rng, wish.content);
    let reference = format!("{call}-{}-{}", wish.round, wish.nonce);
    let (mut arguments, last) = tool.arguments(rng, content, &reference);
    let escaped = content == Content::Escaped;
    let target = wish.answer.draw(rng) as usize;
    let bare = Dictated::new(&tool.name, arguments.clone(), escaped).line.len();
    let mut text = match content {
        Content::Empty => String::new(),
        Content::Runs => format!("{} {}", fill::longest_run(), fill::text(rng, content, target)),
        _ => fill::text(rng, content, target.saturating_sub(bare).max(1)),
    };
    loop {
        arguments.insert(last.into(), json!(text));
        let dictated = Dictated::new(&tool.name, arguments.clone(), escaped);
        let bytes = dictated.line.len();
        if bytes <= target || text.is_empty() {
            let fits = bytes as u64 >= wish.answer.0 && bytes as u64 <= wish.answer.1;
            return (fits || content == Content::Empty && bytes as u64 <= wish.answer.1).then_some(dictated);
        }
        text.pop();
    }
}

/// JSON with a space after each comma and colon, as models are used to; `escaped` keeps it ASCII.
fn spell(value: &Value, escaped: bool) -> String {
    let mut bytes = Vec::new();
    let mut serializer = serde_json::Serializer::with_formatter(&mut bytes, Spaced { escaped });
    // Writing a JSON value to memory cannot fail.
    let _ = value.serialize(&mut serializer);
    String::from_utf8(bytes).unwrap_or_default()
}

struct Spaced {
    escaped: bool,
}

impl serde_json::ser::Formatter for Spaced {
    fn begin_array_value<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(b": ")
    }

    fn write_string_fragment<W: ?Sized + io::Write>(&mut self, writer: &mut W, fragment: &str) -> io::Result<()> {
        if !self.escaped {
            return writer.write_all(fragment.as_bytes());
        }
        for unit in fragment.encode_utf16() {
            match u8::try_from(unit) {
                Ok(byte) if byte.is_ascii() => writer.write_all(&[byte])?,
                _ => write!(writer, "\\u{unit:04x}")?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{scenario::tool, seed::Seed};

    const KINDS: &[Content] = &[
        Content::Ascii,
        Content::Unicode,
        Content::Escaped,
        Content::Escapes,
        Content::Nested,
        Content::Numbers,
        Content::Empty,
        Content::Runs,
    ];

    #[test]
    fn every_dictated_text_is_json_of_its_value_within_its_length() {
        for seed in 0..200 {
            let mut rng = Seed(seed).rng();
            let tools = tool::offer(&mut rng, seed, 7);
            let wish = Wish {
                tools: &tools,
                content: KINDS,
                answer: Range(60, 260),
                calls: 1 + (seed % 4) as u32,
                nonce: "k7m2q9xa",
                round: 3,
            };
            let calls = dictate(&mut rng, &wish).unwrap();
            assert_eq!(calls.len() as u32, wish.calls);
            assert_eq!(lint::ambiguity(&turn(&calls)), None);
            for call in calls {
                let line: Value = serde_json::from_str(&call.line).unwrap();
                assert_eq!(line, json!({"name": call.name, "arguments": call.arguments}), "{}", call.line);
                assert!(call.line.starts_with("{\"name\": \"") && call.line.ends_with(&format!("{}}}", call.text)));
                assert!(call.line.len() <= 260 && call.line.contains(wish.nonce));
            }
        }
    }

    #[test]
    fn escaped_texts_are_ascii_and_mean_the_same() {
        let value = json!({"a": "é🙂", "b": "\u{1}\""});
        let text = spell(&value, true);
        assert_eq!(text, r#"{"a": "\u00e9\ud83d\ude42", "b": "\u0001\""}"#);
        assert_eq!(serde_json::from_str::<Value>(&text).unwrap(), value);
    }

    #[test]
    fn an_impossible_length_is_an_error_with_a_hint() {
        let tools = tool::offer(&mut Seed(1).rng(), 0, 3);
        let wish = Wish { tools: &tools, content: KINDS, answer: Range(5, 10), calls: 1, nonce: "k7m2q9xa", round: 0 };
        assert!(dictate(&mut Seed(1).rng(), &wish).unwrap_err().cure().is_some());
    }
}
