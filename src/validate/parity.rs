//! Parser or engine? The same dictated call judged in several forms: streamed, unary, raw text.
//!
//! What is broken in one form only was broken by the code that makes that form, or by a fault that strikes at random and
//! struck once: one call cannot tell, so [`Forms`] are counted over a run. What is broken in all of them was broken before
//! the parser: by the engine, or by the model.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{Class, ExpectedCall, Judgement, Verdict};

/// A form in which the same answer was asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Form {
    /// Parsed, as a stream.
    Streamed,
    /// Parsed, as one document.
    Unary,
    /// The text before any parser, searched for what was dictated.
    Raw,
}

impl Form {
    /// The parsed form of a request that asks for a stream, or does not.
    pub fn parsed(stream: bool) -> Self {
        if stream { Self::Streamed } else { Self::Unary }
    }

    /// The name in files.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Streamed => "streamed",
            Self::Unary => "unary",
            Self::Raw => "raw",
        }
    }
}

/// Where the disagreement of the forms points.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Suspect {
    /// Every form is intact.
    Nobody,
    /// Broken only in the stream: the incremental parser.
    StreamParser,
    /// Broken only in the document: the parser of whole answers.
    UnaryParser,
    /// Broken in every parsed form, intact in the raw text.
    Parser,
    /// Broken in every form that was asked.
    Engine,
    /// Too few forms could be judged.
    Unknown,
}

/// What one form of an answer is called.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Heard {
    /// The verdict.
    pub verdict: Verdict,
    /// The class.
    pub class: Class,
}

impl From<&Judgement> for Heard {
    fn from(judgement: &Judgement) -> Self {
        Self { verdict: judgement.verdict, class: judgement.class }
    }
}

impl Heard {
    /// Whether the form is corrupted; `None` where nothing can be said, as of a refused answer.
    pub fn is_broken(self) -> Option<bool> {
        match self.verdict {
            Verdict::Valid => Some(false),
            Verdict::Corrupted => Some(true),
            Verdict::Transport | Verdict::Refused | Verdict::Incomplete => None,
        }
    }
}

/// The answers to one dictated turn, by form. A form that the server does not offer is absent.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Forms(pub BTreeMap<Form, Heard>);

impl Forms {
    /// Adds a form.
    pub fn add(&mut self, form: Form, heard: Heard) {
        self.0.insert(form, heard);
    }

    /// Whether `form` came and is corrupted.
    pub fn is_broken(&self, form: Form) -> Option<bool> {
        self.0.get(&form).and_then(|heard| heard.is_broken())
    }

    /// Whom the disagreement points at.
    pub fn suspect(&self) -> Suspect {
        let broken = |form| self.is_broken(form);
        match (broken(Form::Streamed), broken(Form::Unary), broken(Form::Raw)) {
            (Some(true), Some(false), _) => Suspect::StreamParser,
            (Some(false), Some(true), _) => Suspect::UnaryParser,
            (Some(true), Some(true) | None, Some(false)) | (None, Some(true), Some(false)) => Suspect::Parser,
            (Some(true), Some(true), _) | (Some(true), None, Some(true)) | (None, Some(true), Some(true)) => {
                Suspect::Engine
            }
            (Some(false), Some(false), None | Some(false))
            | (Some(false), None, Some(false))
            | (None, Some(false), Some(false)) => Suspect::Nobody,
            _ => Suspect::Unknown,
        }
    }
}

/// What the raw text of an answer to a turn that dictated `calls` is called; `None` where it is no raw text: the server
/// parsed it all the same, or the model wrote something else since it was told not to call.
///
/// Markup differs from model to model, so the text is intact when it holds the `dictated` argument texts, or every name,
/// key and value in their order, bare or with the escapes of JSON.
pub fn raw(judgement: &Judgement, calls: &[ExpectedCall], dictated: &[String]) -> Option<Heard> {
    let broken = |class| Some(Heard { verdict: Verdict::Corrupted, class });
    match judgement.verdict {
        Verdict::Transport | Verdict::Refused | Verdict::Incomplete => return Some(judgement.into()),
        _ if !judgement.calls.is_empty() => return None,
        _ => {}
    }
    let text = judgement.content.as_str();
    let plain = unescape(text);
    let mut pieces = Vec::new();
    for call in calls {
        pieces.push(call.name.clone());
        leaves(&call.arguments, &mut pieces);
    }
    let held = |piece: &String| text.contains(piece.as_str()) || plain.contains(piece.as_str());
    // A word of the call at least must be there: a short one also stands in any refusal.
    if !pieces.iter().any(|piece| piece.len() >= 4 && held(piece)) {
        return None;
    }
    let named = calls.iter().all(|call| text.contains(&call.name));
    let verbatim = named && dictated.len() == calls.len() && in_order(text, dictated);
    match judgement.class {
        _ if verbatim || in_order(text, &pieces) || in_order(&plain, &pieces) => {
            Some(Heard { verdict: Verdict::Valid, class: Class::Ok })
        }
        class @ (Class::CrossSession | Class::Degenerate) => broken(class),
        _ => broken(Class::ValueAltered),
    }
}

/// Keys and scalars of `value` as text, in order.
fn leaves(value: &Value, pieces: &mut Vec<String>) {
    match value {
        Value::Object(members) => members.iter().for_each(|(key, value)| {
            pieces.push(key.clone());
            leaves(value, pieces);
        }),
        Value::Array(items) => items.iter().for_each(|item| leaves(item, pieces)),
        Value::String(text) => pieces.push(text.clone()),
        other => pieces.push(other.to_string()),
    }
}

fn in_order(text: &str, pieces: &[String]) -> bool {
    let mut rest = text;
    pieces.iter().all(|piece| match rest.split_once(piece.as_str()) {
        Some((_, after)) => {
            rest = after;
            true
        }
        None => false,
    })
}

/// `text` with the escapes of JSON read wherever they stand.
fn unescape(text: &str) -> String {
    let mut units: Vec<u16> = Vec::with_capacity(text.len());
    let mut letters = text.chars();
    while let Some(letter) = letters.next() {
        let rest = letters.as_str();
        let (unit, taken) = match (letter, rest.bytes().next()) {
            ('\\', Some(b'n')) => (10, 1),
            ('\\', Some(b'r')) => (13, 1),
            ('\\', Some(b't')) => (9, 1),
            ('\\', Some(b'b')) => (8, 1),
            ('\\', Some(b'f')) => (12, 1),
            ('\\', Some(plain @ (b'"' | b'\\' | b'/'))) => (u16::from(plain), 1),
            ('\\', Some(b'u')) => match rest.get(1..5).and_then(|digits| u16::from_str_radix(digits, 16).ok()) {
                Some(unit) => (unit, 5),
                None => (u16::from(b'\\'), 0),
            },
            _ => {
                units.extend_from_slice(letter.encode_utf16(&mut [0; 2]));
                continue;
            }
        };
        units.push(unit);
        letters = rest[taken..].chars();
    }
    String::from_utf16_lossy(&units)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use serde_json::json;

    use super::*;

    fn said(content: &str) -> Judgement {
        Judgement {
            verdict: Verdict::Corrupted,
            class: Class::MarkupLeak,
            detail: None,
            calls: Vec::new(),
            quirks: BTreeSet::new(),
            finish_reason: None,
            content: content.to_owned(),
            completion_tokens: None,
        }
    }

    #[test]
    fn raw_text_is_intact_in_any_markup_and_broken_by_one_letter() {
        let arguments = json!({"ref": "0-1-abcd2345", "note": "a \"b\"\nc", "n": 7});
        let calls = [ExpectedCall { name: "store_note".into(), arguments, text: None }];
        let class = |text: &str| raw(&said(text), &calls, &[]).map(|heard| heard.class);
        let json =
            r#"<tool_call>{"name": "store_note", "arguments": {"ref": "0-1-abcd2345", "note": "a \"b\"\nc", "n": 7}}"#;
        let tags = "<invoke name=store_note><ref>0-1-abcd2345</ref><note>a \"b\"\nc</note><n>7</n>";
        assert_eq!((class(json), class(tags)), (Some(Class::Ok), Some(Class::Ok)));
        let escaped = json.replace("abcd", r"\u0061b\u0063d").replace("\\n", "\\u000a");
        assert_eq!(class(&escaped), Some(Class::Ok), "{escaped}");
        assert_eq!(class(&json.replace("abcd", "abce")), Some(Class::ValueAltered));
        assert_eq!((class("I may not call a tool."), class("")), (None, None));
        let refused = Judgement { verdict: Verdict::Refused, class: Class::RequestRejected, ..said("") };
        assert_eq!(raw(&refused, &calls, &[]).and_then(Heard::is_broken), None);
    }
}
