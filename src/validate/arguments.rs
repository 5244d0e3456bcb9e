//! Argument text: what it holds, and what is wrong with it.

use serde_json::Value;

use super::{
    assemble::Slot,
    json::{self, Document, Fault, Kind},
    markup,
    text::Damage,
};

/// The arguments of one call, read once.
#[derive(Debug)]
pub struct Arguments<'a> {
    /// The text as it came.
    pub text: &'a str,
    /// Nothing, white space or `null`.
    pub blank: bool,
    /// The document at its start.
    pub document: Result<Document, Fault>,
    /// What follows the document.
    pub rest: &'a str,
    slot: &'a Slot,
}

impl<'a> Arguments<'a> {
    /// Reads the arguments of `slot`.
    pub fn read(slot: &'a Slot) -> Self {
        let text = slot.arguments.as_str();
        let blank = matches!(text.trim(), "" | "null");
        let document = json::document(text);
        let rest = document.as_ref().map_or("", |document| text[document.end..].trim());
        Self { text, blank, document, rest, slot }
    }

    /// The argument object, where the text holds exactly that; empty for blank arguments.
    pub fn object(&self) -> Option<Value> {
        if self.blank {
            return Some(Value::Object(serde_json::Map::new()));
        }
        self.whole().filter(|document| document.value.is_object()).map(|document| document.value.clone())
    }

    /// The argument object by reference, where there is one.
    pub fn value(&self) -> Option<&Value> {
        self.whole().map(|document| &document.value).filter(|value| value.is_object())
    }

    fn whole(&self) -> Option<&Document> {
        self.document.as_ref().ok().filter(|document| self.rest.is_empty() && document.duplicate.is_none())
    }

    /// A second document behind the first.
    fn second(&self) -> Option<&'a str> {
        let rest = self.rest.trim_start_matches([',', ';', ' ', '\n', '\r', '\t']);
        let object =
            self.document.as_ref().is_ok_and(|document| document.value.is_object() || document.value.is_array());
        (object && rest.starts_with('{')).then_some(rest)
    }

    /// Two different documents in one slot.
    pub fn merged(&self) -> Option<String> {
        let second = self.second()?;
        if self.repeated().is_some() {
            return None;
        }
        let offset = self.text.len() - second.len();
        Some(format!("a second document starts at byte {offset}"))
    }

    /// Text sent more than once.
    pub fn repeated(&self) -> Option<String> {
        if self.blank || (self.document.is_ok() && self.rest.is_empty()) {
            return None;
        }
        self.resent_fragment().or_else(|| self.resent_tail()).or_else(|| self.restarted())
    }

    /// Beginnings of one document, and then all of it.
    fn restarted(&self) -> Option<String> {
        const HEAD: usize = 4;
        let (at, _) = self.text.char_indices().nth(HEAD)?;
        let head = &self.text[..at];
        let start = self.text.rfind(head).filter(|&start| start >= at)?;
        let whole = &self.text[start..];
        let mut begun = self.text[..start].match_indices(head).map(|(at, _)| at).chain([start]);
        let mut from = begun.next()?;
        let beginnings = begun.all(|to| {
            let piece = &self.text[std::mem::replace(&mut from, to)..to];
            whole.starts_with(piece) && piece.len() < whole.len()
        });
        let whole = beginnings && json::strict(whole).is_some_and(|value| value.is_object());
        whole.then(|| format!("the text begins anew at byte {start}"))
    }

    /// A document followed by itself, or by its own tail.
    fn resent_tail(&self) -> Option<String> {
        let document = self.document.as_ref().ok()?;
        let text = self.text[..document.end].trim();
        if let Some(second) = self.second() {
            let mut rest = second;
            while !rest.is_empty() {
                let next = json::document(rest).ok()?;
                if next.value != document.value {
                    return None;
                }
                rest = rest[next.end..].trim_start_matches([',', ';', ' ', '\n', '\r', '\t']);
            }
            return Some("the whole text came more than once".to_owned());
        }
        let tail = self.rest.len() >= 3 && text.ends_with(self.rest);
        tail.then(|| format!("the tail {:?} came twice", self.rest))
    }

    /// Fragments that repeat what came before them, and give one object once they do not.
    fn resent_fragment(&self) -> Option<String> {
        let ends = &self.slot.ends;
        if ends.len() < 2 {
            return None;
        }
        let starts = std::iter::once(0).chain(ends.iter().copied());
        let fragments: Vec<&str> =
            starts.zip(ends).map(|(start, &end)| &self.text[start..end]).filter(|piece| !piece.is_empty()).collect();
        let last = fragments.last()?;
        let is_object = |text: &str| json::strict(text).is_some_and(|value| value.is_object());
        if fragments.len() >= 2 && is_object(last) {
            let earlier = &self.text[..self.text.len() - last.len()];
            let grows = fragments[..fragments.len() - 1].iter().all(|piece| last.starts_with(piece));
            if grows || last.starts_with(earlier) {
                return Some("every fragment repeats the ones before it".to_owned());
            }
        }
        let mut once: Vec<&str> = fragments.clone();
        once.dedup();
        let shorter = once.len() < fragments.len() && is_object(&once.concat());
        shorter.then(|| "a fragment came twice in a row".to_owned())
    }

    /// A shape that is no object in a string.
    pub fn wrong_shape(&self) -> Option<String> {
        if self.slot.not_text {
            return Some("arguments is a JSON value, not a string".to_owned());
        }
        let document = self.document.as_ref().ok().filter(|_| self.rest.is_empty() && !self.blank)?;
        match &document.value {
            Value::Object(_) => None,
            Value::String(inner) if json::strict(inner).is_some_and(|value| value.is_object()) => {
                Some("encoded twice: the text decodes to a string that holds the object".to_owned())
            }
            Value::Array(_) => Some("an array where an object is wanted".to_owned()),
            other => Some(format!("{other} where an object is wanted")),
        }
    }

    /// Bytes, surrogates or characters that do not survive.
    pub fn encoding(&self) -> Option<String> {
        match self.slot.arguments.damage() {
            Some(Damage::Bytes) => return Some("bytes that are not UTF-8".to_owned()),
            Some(Damage::SplitPair) => return Some("a surrogate pair is split between two frames".to_owned()),
            Some(Damage::LoneSurrogate) => return Some("a lone surrogate in the frame".to_owned()),
            None => {}
        }
        if let Some(offset) = self.document.as_ref().ok().and_then(|document| document.lone_surrogate) {
            return Some(format!("a lone surrogate escape in the string at byte {offset}"));
        }
        self.replacement()
    }

    /// U+FFFD, which a dictated text may hold.
    fn replacement(&self) -> Option<String> {
        let raw = self.text.find(char::REPLACEMENT_CHARACTER);
        let escaped = || self.text.to_ascii_lowercase().find("\\ufffd");
        raw.or_else(escaped).map(|offset| format!("U+FFFD at byte {offset}"))
    }

    /// Text around a complete object.
    pub fn extra(&self) -> Option<String> {
        if self.blank {
            return None;
        }
        match &self.document {
            Ok(_) if self.rest.is_empty() => None,
            Ok(document) => {
                let object = document.value.is_object() || document.value.is_array();
                object.then(|| format!("text after the object: {:?}", clip(self.rest)))
            }
            Err(_) => self.lead().map(|lead| format!("text before the object: {:?}", clip(lead))),
        }
    }

    /// Prose in front of a complete object; what is left of a torn document is no prose.
    fn lead(&self) -> Option<&'a str> {
        let trimmed = self.text.trim_start();
        if trimmed.starts_with(['{', '[', '"']) {
            return None;
        }
        let brace = trimmed.find('{')?;
        let lead = trimmed[..brace].trim_end();
        if lead.ends_with([':', ',', '[', '{']) && lead.contains('"') {
            return None;
        }
        let document = json::document(&trimmed[brace..]).ok()?;
        let tail = trimmed[brace + document.end..].trim_start();
        (!tail.starts_with(['}', ']', ',', ':', '"'])).then_some(lead)
    }

    /// A proper prefix of an object.
    pub fn truncated(&self) -> Option<String> {
        let fault = self.document.as_ref().err().filter(|_| !self.blank)?;
        if fault.kind == Kind::End {
            return Some(format!("the text ends at byte {} inside the object", fault.offset));
        }
        let (before, after) = self.text.split_at_checked(fault.offset)?;
        let cut = json::document(before).is_err_and(|fault| fault.kind == Kind::End);
        let markup = after.starts_with(['<', '[', '|', '｜']) && markup::find(after, &[]).is_some();
        (cut && markup).then(|| format!("markup at byte {} inside the object: {:?}", fault.offset, clip(after)))
    }

    /// No JSON.
    pub fn malformed(&self) -> Option<String> {
        if self.blank {
            return None;
        }
        match &self.document {
            Err(fault) if fault.kind != Kind::End => Some(format!("{fault}: {:?}", self.around(fault.offset))),
            Err(_) => None,
            Ok(document) => match &document.duplicate {
                Some(key) => Some(format!("the key {key:?} stands twice in one object")),
                None if self.rest.is_empty() => None,
                None => Some(format!("no JSON object: {:?}", clip(self.text))),
            },
        }
    }

    fn around(&self, offset: usize) -> String {
        let lead = self.text[..offset.min(self.text.len())].char_indices().rev().nth(11).map_or(0, |(at, _)| at);
        self.text.get(lead..).unwrap_or_default().chars().take(32).collect()
    }

    /// The text with its escapes resolved as far as they are sound, for searches in text that is no JSON.
    pub fn unescaped(&self) -> String {
        let mut plain = String::with_capacity(self.text.len());
        let mut characters = self.text.chars();
        while let Some(character) = characters.next() {
            let resolved = match character {
                '\\' => match characters.next() {
                    Some('n') => '\n',
                    Some('t') => '\t',
                    Some('r') => '\r',
                    Some(other) => other,
                    None => break,
                },
                other => other,
            };
            plain.push(resolved);
        }
        plain
    }
}

/// The start of a text, for a message.
fn clip(text: &str) -> String {
    text.chars().take(40).collect()
}

/// Calls `visit` for every key and every string of a value until one call finds something.
pub fn strings<T>(value: &Value, visit: &mut impl FnMut(&str) -> Option<T>) -> Option<T> {
    match value {
        Value::String(text) => visit(text),
        Value::Array(items) => items.iter().find_map(|item| strings(item, visit)),
        Value::Object(map) => map.iter().find_map(|(key, value)| visit(key).or_else(|| strings(value, visit))),
        _ => None,
    }
}
