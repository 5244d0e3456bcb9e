//! JSON as the judge needs it: strict where common readers are lax (duplicate keys, depth, control characters), and able
//! to go on where they give up (lone surrogates), with the offset of the first fault.

use serde_json::{Map, Number, Value};

/// Deepest nesting that is read.
pub const DEPTH: usize = 256;

/// What is wrong with a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// The text ends inside a value: a proper prefix of something valid.
    End,
    /// A character that cannot stand here.
    Syntax,
    /// A raw control character inside a string.
    Control,
    /// A backslash before something that is no escape.
    Escape,
    /// Nested deeper than [`DEPTH`].
    Depth,
    /// A number beyond what a double can hold.
    Range,
    /// The document is complete and something follows it.
    Trailing,
}

/// A fault and where it stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{} at byte {offset}", kind.text())]
pub struct Fault {
    /// What is wrong.
    pub kind: Kind,
    /// Byte offset.
    pub offset: usize,
}

impl Kind {
    fn text(self) -> &'static str {
        match self {
            Self::End => "the text ends too early",
            Self::Syntax => "unexpected character",
            Self::Control => "raw control character in a string",
            Self::Escape => "invalid escape",
            Self::Depth => "nested deeper than 256",
            Self::Range => "number out of range",
            Self::Trailing => "text after the document",
        }
    }
}

/// The bytes between the quotes of a string.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// First byte after the opening quote.
    pub start: usize,
    /// The closing quote.
    pub end: usize,
    /// Whether a backslash stands in it.
    pub escaped: bool,
}

/// A cursor over JSON text that checks the grammar and copies nothing.
#[derive(Debug)]
pub struct Scanner<'a> {
    bytes: &'a [u8],
    at: usize,
    depth: usize,
}

type Scan<T = ()> = Result<T, Fault>;

impl<'a> Scanner<'a> {
    /// A cursor at the start of `bytes`.
    pub fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0, depth: 0 }
    }

    /// A second cursor at the same place.
    #[must_use]
    pub fn fork(&self) -> Self {
        Self { ..*self }
    }

    /// Where the cursor stands.
    pub fn offset(&self) -> usize {
        self.at
    }

    /// The bytes of a string, undecoded.
    pub fn raw(&self, span: Span) -> &'a [u8] {
        &self.bytes[span.start..span.end]
    }

    /// The next byte that is no white space, without passing it.
    pub fn peek(&mut self) -> Scan<u8> {
        while let Some(&byte) = self.bytes.get(self.at) {
            if !matches!(byte, b' ' | b'\n' | b'\r' | b'\t') {
                return Ok(byte);
            }
            self.at += 1;
        }
        Err(self.fault(Kind::End))
    }

    /// Fails where anything but white space follows.
    pub fn end(&mut self) -> Scan {
        match self.peek() {
            Ok(_) => Err(self.fault(Kind::Trailing)),
            Err(_) => Ok(()),
        }
    }

    /// Passes an object; `member` is called behind every colon and must pass the value.
    pub fn object(&mut self, mut member: impl FnMut(&mut Self, Span) -> Scan) -> Scan {
        self.expect(b'{')?;
        self.enter()?;
        if self.peek()? == b'}' {
            self.at += 1;
        } else {
            loop {
                self.peek()?;
                let key = self.string()?;
                self.peek()?;
                self.expect(b':')?;
                member(self, key)?;
                if self.next_or_close(b'}')? {
                    break;
                }
            }
        }
        self.depth -= 1;
        Ok(())
    }

    /// Passes an array; `item` is called before every element and must pass it.
    pub fn array(&mut self, mut item: impl FnMut(&mut Self) -> Scan) -> Scan {
        self.expect(b'[')?;
        self.enter()?;
        if self.peek()? == b']' {
            self.at += 1;
        } else {
            loop {
                item(self)?;
                if self.next_or_close(b']')? {
                    break;
                }
            }
        }
        self.depth -= 1;
        Ok(())
    }

    /// Passes a string.
    pub fn string(&mut self) -> Scan<Span> {
        self.expect(b'"')?;
        let start = self.at;
        let mut escaped = false;
        loop {
            let plain = self.bytes[self.at..].iter().position(|&byte| byte == b'"' || byte == b'\\' || byte < 0x20);
            let Some(plain) = plain else {
                self.at = self.bytes.len();
                return Err(self.fault(Kind::End));
            };
            self.at += plain;
            match self.bytes[self.at] {
                b'"' => {
                    let end = self.at;
                    self.at += 1;
                    return Ok(Span { start, end, escaped });
                }
                b'\\' => {
                    escaped = true;
                    self.escape()?;
                }
                _ => return Err(self.fault(Kind::Control)),
            }
        }
    }

    fn escape(&mut self) -> Scan {
        self.at += 1;
        match self.bytes.get(self.at) {
            None => return Err(self.fault(Kind::End)),
            Some(b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't') => {}
            Some(b'u') => {
                for _ in 0..4 {
                    self.at += 1;
                    match self.bytes.get(self.at) {
                        None => return Err(self.fault(Kind::End)),
                        Some(byte) if byte.is_ascii_hexdigit() => {}
                        Some(_) => return Err(self.fault(Kind::Escape)),
                    }
                }
            }
            Some(_) => return Err(self.fault(Kind::Escape)),
        }
        self.at += 1;
        Ok(())
    }

    /// Passes any value.
    pub fn skip(&mut self) -> Scan {
        match self.peek()? {
            b'{' => self.object(|scanner, _| scanner.skip()),
            b'[' => self.array(Self::skip),
            b'"' => self.string().map(drop),
            _ => self.scalar().map(drop),
        }
    }

    /// Passes a number or one of the three words and returns its text.
    pub fn scalar(&mut self) -> Scan<&'a str> {
        let start = self.at;
        match self.peek()? {
            b't' => self.word("true")?,
            b'f' => self.word("false")?,
            b'n' => self.word("null")?,
            _ => self.number()?,
        }
        Ok(std::str::from_utf8(&self.bytes[start..self.at]).unwrap_or_default().trim_ascii_start())
    }

    fn word(&mut self, word: &str) -> Scan {
        for expected in word.bytes() {
            match self.bytes.get(self.at) {
                None => return Err(self.fault(Kind::End)),
                Some(&byte) if byte == expected => self.at += 1,
                Some(_) => return Err(self.fault(Kind::Syntax)),
            }
        }
        Ok(())
    }

    fn number(&mut self) -> Scan {
        if self.bytes.get(self.at) == Some(&b'-') {
            self.at += 1;
        }
        match self.bytes.get(self.at) {
            Some(b'0') => self.at += 1,
            _ => self.digits()?,
        }
        if self.bytes.get(self.at) == Some(&b'.') {
            self.at += 1;
            self.digits()?;
        }
        if matches!(self.bytes.get(self.at), Some(b'e' | b'E')) {
            self.at += 1;
            if matches!(self.bytes.get(self.at), Some(b'+' | b'-')) {
                self.at += 1;
            }
            self.digits()?;
        }
        Ok(())
    }

    fn digits(&mut self) -> Scan {
        let count = self.bytes[self.at..].iter().take_while(|byte| byte.is_ascii_digit()).count();
        if count == 0 {
            let kind = if self.at == self.bytes.len() { Kind::End } else { Kind::Syntax };
            return Err(self.fault(kind));
        }
        self.at += count;
        Ok(())
    }

    fn expect(&mut self, wanted: u8) -> Scan {
        match self.bytes.get(self.at) {
            None => Err(self.fault(Kind::End)),
            Some(&byte) if byte == wanted => {
                self.at += 1;
                Ok(())
            }
            Some(_) => Err(self.fault(Kind::Syntax)),
        }
    }

    fn enter(&mut self) -> Scan {
        self.depth += 1;
        if self.depth > DEPTH { Err(self.fault(Kind::Depth)) } else { Ok(()) }
    }

    /// Behind a member or element: true at the closing bracket.
    fn next_or_close(&mut self, close: u8) -> Scan<bool> {
        let byte = self.peek()?;
        if byte != close && byte != b',' {
            return Err(self.fault(Kind::Syntax));
        }
        self.at += 1;
        Ok(byte == close)
    }

    fn fault(&self, kind: Kind) -> Fault {
        Fault { kind, offset: self.at }
    }
}

/// A complete document at the start of a text.
#[derive(Debug, Clone)]
pub struct Document {
    /// Its value. A lone surrogate reads as U+FFFD; of duplicate keys the last one counts.
    pub value: Value,
    /// Where it ends.
    pub end: usize,
    /// A key that an object holds twice.
    pub duplicate: Option<String>,
    /// Offset of the first surrogate escape without a partner.
    pub lone_surrogate: Option<usize>,
}

/// Reads the document at the start of `text`; what follows it is the caller's business.
pub fn document(text: &str) -> Result<Document, Fault> {
    let mut reader = Reader { text, scanner: Scanner::new(text.as_bytes()), duplicate: None, lone_surrogate: None };
    let value = reader.value()?;
    let end = reader.scanner.offset();
    Ok(Document { value, end, duplicate: reader.duplicate, lone_surrogate: reader.lone_surrogate })
}

/// Reads `text` as exactly one document without duplicate keys or lone surrogates.
pub fn strict(text: &str) -> Option<Value> {
    let document = document(text).ok()?;
    let whole = text[document.end..].trim_ascii().is_empty();
    (whole && document.duplicate.is_none() && document.lone_surrogate.is_none()).then_some(document.value)
}

struct Reader<'a> {
    text: &'a str,
    scanner: Scanner<'a>,
    duplicate: Option<String>,
    lone_surrogate: Option<usize>,
}

impl Reader<'_> {
    fn value(&mut self) -> Scan<Value> {
        match self.scanner.peek()? {
            b'{' => self.object(),
            b'[' => self.array(),
            b'"' => {
                let span = self.scanner.string()?;
                Ok(Value::String(self.decode(span)))
            }
            _ => self.scalar(),
        }
    }

    fn object(&mut self) -> Scan<Value> {
        let mut map = Map::new();
        self.scanner.expect(b'{')?;
        self.scanner.enter()?;
        if self.scanner.peek()? == b'}' {
            self.scanner.at += 1;
        } else {
            loop {
                self.scanner.peek()?;
                let span = self.scanner.string()?;
                let key = self.decode(span);
                self.scanner.peek()?;
                self.scanner.expect(b':')?;
                let value = self.value()?;
                if self.duplicate.is_none() && map.contains_key(&key) {
                    self.duplicate = Some(key.clone());
                }
                map.insert(key, value);
                if self.scanner.next_or_close(b'}')? {
                    break;
                }
            }
        }
        self.scanner.depth -= 1;
        Ok(Value::Object(map))
    }

    fn array(&mut self) -> Scan<Value> {
        let mut items = Vec::new();
        self.scanner.expect(b'[')?;
        self.scanner.enter()?;
        if self.scanner.peek()? == b']' {
            self.scanner.at += 1;
        } else {
            loop {
                items.push(self.value()?);
                if self.scanner.next_or_close(b']')? {
                    break;
                }
            }
        }
        self.scanner.depth -= 1;
        Ok(Value::Array(items))
    }

    fn scalar(&mut self) -> Scan<Value> {
        let offset = self.scanner.offset();
        Ok(match self.scanner.scalar()? {
            "true" => Value::Bool(true),
            "false" => Value::Bool(false),
            "null" => Value::Null,
            text => Value::Number(number(text).ok_or(Fault { kind: Kind::Range, offset })?),
        })
    }

    fn decode(&mut self, span: Span) -> String {
        let raw = &self.text[span.start..span.end];
        if !span.escaped {
            return raw.to_owned();
        }
        let mut decoded = String::with_capacity(raw.len());
        for unit in Units::new(raw.as_bytes()) {
            match unit {
                Unit::Plain(bytes) => decoded.push_str(std::str::from_utf8(bytes).unwrap_or_default()),
                Unit::Char(character) => decoded.push(character),
                Unit::Surrogate(_) => {
                    self.lone_surrogate.get_or_insert(span.start);
                    decoded.push(char::REPLACEMENT_CHARACTER);
                }
            }
        }
        decoded
    }
}

/// Whole numbers exactly, everything else as a double.
fn number(text: &str) -> Option<Number> {
    if let Ok(small) = text.parse::<i64>() {
        return Some(small.into());
    }
    if let Ok(large) = text.parse::<u64>() {
        return Some(large.into());
    }
    Number::from_f64(text.parse().ok()?)
}

/// A piece of a string's content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unit<'a> {
    /// Bytes that stand for themselves; not checked for UTF-8.
    Plain(&'a [u8]),
    /// A decoded escape.
    Char(char),
    /// A surrogate escape without a partner in this string.
    Surrogate(u16),
}

/// The pieces of a string whose grammar has been checked.
#[derive(Debug)]
pub struct Units<'a>(&'a [u8]);

impl<'a> Units<'a> {
    /// The pieces of `raw`, the bytes between the quotes.
    pub fn new(raw: &'a [u8]) -> Self {
        Self(raw)
    }

    fn hex(&self, at: usize) -> Option<u16> {
        let digits = std::str::from_utf8(self.0.get(at..at + 4)?).ok()?;
        u16::from_str_radix(digits, 16).ok()
    }
}

impl<'a> Iterator for Units<'a> {
    type Item = Unit<'a>;

    fn next(&mut self) -> Option<Unit<'a>> {
        if self.0.is_empty() {
            return None;
        }
        let plain = self.0.iter().position(|&byte| byte == b'\\').unwrap_or(self.0.len());
        if plain > 0 {
            let (head, tail) = self.0.split_at(plain);
            self.0 = tail;
            return Some(Unit::Plain(head));
        }
        let character = match self.0.get(1)? {
            b'b' => '\u{8}',
            b'f' => '\u{c}',
            b'n' => '\n',
            b'r' => '\r',
            b't' => '\t',
            b'u' => return self.unicode(),
            &other => char::from(other),
        };
        self.0 = &self.0[2..];
        Some(Unit::Char(character))
    }
}

impl<'a> Units<'a> {
    fn unicode(&mut self) -> Option<Unit<'a>> {
        let unit = self.hex(2)?;
        if let Some(character) = char::from_u32(u32::from(unit)) {
            self.0 = &self.0[6..];
            return Some(Unit::Char(character));
        }
        if unit < 0xDC00
            && self.0.get(6..8) == Some(b"\\u")
            && let Some(character) = self.hex(8).and_then(|low| join(unit, low))
        {
            self.0 = &self.0[12..];
            return Some(Unit::Char(character));
        }
        self.0 = &self.0[6..];
        Some(Unit::Surrogate(unit))
    }
}

/// The character of a surrogate pair.
pub fn join(high: u16, low: u16) -> Option<char> {
    char::decode_utf16([high, low]).next()?.ok().filter(|character| u32::from(*character) > 0xFFFF)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kind(text: &str) -> Option<Kind> {
        document(text).err().map(|fault| fault.kind)
    }

    #[test]
    fn reads_what_serde_json_reads() {
        for text in [
            r#"{"a": [1, -2.5e3, true, null], "b": {"c": "\u00e9\n\ud83d\ude00 é"}}"#,
            "9007199254740993",
            "18446744073709551615",
            "\"\"",
            "[]",
            " {} ",
        ] {
            let expected: Value = serde_json::from_str(text).unwrap();
            assert_eq!(document(text).unwrap().value, expected, "{text}");
        }
    }

    #[test]
    fn names_the_fault() {
        assert_eq!(kind("{\"a\": \"b"), Some(Kind::End));
        assert_eq!(kind("{\"a\": tr"), Some(Kind::End));
        assert_eq!(kind("{\"a\": \"\\u00"), Some(Kind::End));
        assert_eq!(kind("{\"a\": -"), Some(Kind::End));
        assert_eq!(kind("{\"a\": NaN}"), Some(Kind::Syntax));
        assert_eq!(kind("{\"a\": 01}"), Some(Kind::Syntax));
        assert_eq!(kind("{\"a\": 1,}"), Some(Kind::Syntax));
        assert_eq!(kind("{'a': 1}"), Some(Kind::Syntax));
        assert_eq!(kind("\"\t\""), Some(Kind::Control));
        assert_eq!(kind("\"\\x\""), Some(Kind::Escape));
        assert_eq!(kind("1e999"), Some(Kind::Range));
        assert_eq!(kind(&"[".repeat(100_000)), Some(Kind::Depth));
    }

    #[test]
    fn keeps_duplicates_and_lone_surrogates_as_findings() {
        let found = document(r#"{"a": 1, "a": 2, "b": "\ud83d"} tail"#).unwrap();
        assert_eq!(found.duplicate.as_deref(), Some("a"));
        assert!(found.lone_surrogate.is_some());
        assert_eq!(found.end, 31);
        assert!(strict(r#"{"a": 1, "a": 2}"#).is_none());
    }
}
