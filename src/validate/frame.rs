//! One JSON document of a response, a chunk or a whole answer: where in its bytes the fields stand that the judge reads.

use super::json::{Fault, Scanner, Span};

/// A field as it came.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Field {
    /// Not sent.
    #[default]
    Absent,
    /// Sent as null.
    Null,
    /// A string.
    Text(Span),
    /// Any other value: the bytes from the first offset to the second.
    Other(usize, usize),
}

impl Field {
    /// Whether the field was sent with a value.
    pub fn is_some(self) -> bool {
        matches!(self, Self::Text(_) | Self::Other(..))
    }

    fn read(scanner: &mut Scanner<'_>) -> Result<Self, Fault> {
        match scanner.peek()? {
            b'"' => Ok(Self::Text(scanner.string()?)),
            first => {
                let start = scanner.offset();
                scanner.skip()?;
                Ok(if first == b'n' { Self::Null } else { Self::Other(start, scanner.offset()) })
            }
        }
    }
}

/// One element of `tool_calls`.
#[derive(Debug, Clone, Copy, Default)]
pub struct Entry {
    /// Position that the server gives it.
    pub index: Option<i64>,
    /// Its id.
    pub id: Field,
    /// `function.name`.
    pub name: Field,
    /// `function.arguments`.
    pub arguments: Field,
}

/// What a document holds. One value is reused for all frames of a response.
#[derive(Debug, Default)]
pub struct Frame {
    /// `id`.
    pub id: Field,
    /// `error`.
    pub error: Field,
    /// Whether the fields beside `choices` are those of an error.
    pub looks_like_error: bool,
    /// A message beside `choices`, for people.
    pub note: Field,
    /// Whether `choices` is an array.
    pub has_choices: bool,
    /// How many choices it holds.
    pub choices: usize,
    /// `index` of the first choice.
    pub choice: Option<i64>,
    /// The first choice has a `delta`.
    pub has_delta: bool,
    /// The first choice has a `message`.
    pub has_message: bool,
    /// `finish_reason` of the first choice.
    pub finish: Field,
    /// `native_finish_reason` of the first choice.
    pub native_finish: Field,
    /// `content`, in parts.
    pub content: Vec<Span>,
    /// `reasoning_content`, `reasoning` and other names of it, in parts.
    pub reasoning: Vec<Span>,
    /// `refusal`.
    pub refusal: Field,
    /// The deprecated `function_call`.
    pub legacy_call: Field,
    /// `tool_calls`.
    pub entries: Vec<Entry>,
    /// `usage.completion_tokens`.
    pub completion_tokens: Option<u64>,
}

impl Frame {
    /// Reads `bytes`; on a fault the frame holds nothing that counts.
    pub fn read(&mut self, bytes: &[u8]) -> Result<(), Fault> {
        self.clear();
        let mut scanner = Scanner::new(bytes);
        let mut failed = false;
        scanner.object(|scanner, key| {
            match scanner.raw(key) {
                b"id" => self.id = Field::read(scanner)?,
                b"error" => self.error = Field::read(scanner)?,
                b"choices" => self.read_choices(scanner)?,
                b"usage" => self.read_usage(scanner)?,
                b"object" | b"type" => {
                    if let Field::Text(span) = Field::read(scanner)? {
                        failed |= scanner.raw(span) == b"error";
                    }
                }
                b"message" | b"detail" | b"msg" | b"error_msg" | b"error_message" => self.note = Field::read(scanner)?,
                b"base_resp" => failed |= Field::read(scanner)?.is_some(),
                b"success" => {
                    failed |= match Field::read(scanner)? {
                        Field::Other(start, end) => &bytes[start..end] == b"false",
                        _ => false,
                    };
                }
                _ => scanner.skip()?,
            }
            Ok(())
        })?;
        scanner.end()?;
        let error = match self.error {
            Field::Absent | Field::Null => false,
            Field::Text(span) => span.start < span.end,
            Field::Other(start, end) => !matches!(&bytes[start..end], b"false" | b"{}" | b"[]" | b"0"),
        };
        let noted = matches!(self.note, Field::Text(_)) && !self.has_choices;
        self.looks_like_error = error || failed && !self.has_choices || noted;
        Ok(())
    }

    fn clear(&mut self) {
        let content = std::mem::take(&mut self.content);
        let reasoning = std::mem::take(&mut self.reasoning);
        let entries = std::mem::take(&mut self.entries);
        *self = Self { content, reasoning, entries, ..Self::default() };
        self.content.clear();
        self.reasoning.clear();
        self.entries.clear();
    }

    fn read_choices(&mut self, scanner: &mut Scanner<'_>) -> Result<(), Fault> {
        if scanner.peek()? != b'[' {
            return scanner.skip();
        }
        self.has_choices = true;
        scanner.array(|scanner| {
            self.choices += 1;
            if self.choices > 1 || scanner.peek()? != b'{' { scanner.skip() } else { self.read_choice(scanner) }
        })
    }

    fn read_choice(&mut self, scanner: &mut Scanner<'_>) -> Result<(), Fault> {
        let mut message = None;
        scanner.object(|scanner, key| {
            match scanner.raw(key) {
                b"index" => self.choice = read_integer(scanner)?,
                b"finish_reason" => self.finish = Field::read(scanner)?,
                b"native_finish_reason" => self.native_finish = Field::read(scanner)?,
                b"delta" if scanner.peek()? == b'{' => {
                    self.has_delta = true;
                    self.read_message(scanner)?;
                }
                b"message" if scanner.peek()? == b'{' => {
                    self.has_message = true;
                    message = Some(scanner.fork());
                    scanner.skip()?;
                }
                _ => scanner.skip()?,
            }
            Ok(())
        })?;
        // A message counts only where there is no delta: some servers repeat the whole answer beside the last one.
        match message {
            Some(mut message) if !self.has_delta => self.read_message(&mut message),
            _ => Ok(()),
        }
    }

    fn read_message(&mut self, scanner: &mut Scanner<'_>) -> Result<(), Fault> {
        scanner.object(|scanner, key| match scanner.raw(key) {
            b"content" => read_parts(scanner, &mut self.content),
            b"reasoning_content" | b"reasoning" | b"reasoning_text" | b"thinking" => {
                let earlier = !self.reasoning.is_empty();
                read_parts(scanner, &mut self.reasoning)?;
                // The same reasoning often comes under two names.
                if earlier {
                    self.reasoning.truncate(1);
                }
                Ok(())
            }
            b"refusal" => {
                self.refusal = Field::read(scanner)?;
                Ok(())
            }
            b"function_call" => {
                self.legacy_call = Field::read(scanner)?;
                Ok(())
            }
            b"tool_calls" => self.read_calls(scanner),
            _ => scanner.skip(),
        })
    }

    fn read_calls(&mut self, scanner: &mut Scanner<'_>) -> Result<(), Fault> {
        match scanner.peek()? {
            b'[' => {
                scanner.array(|scanner| if scanner.peek()? == b'{' { self.read_call(scanner) } else { scanner.skip() })
            }
            b'{' => self.read_call(scanner),
            _ => scanner.skip(),
        }
    }

    fn read_call(&mut self, scanner: &mut Scanner<'_>) -> Result<(), Fault> {
        let mut entry = Entry::default();
        scanner.object(|scanner, key| {
            match scanner.raw(key) {
                b"index" => entry.index = read_integer(scanner)?,
                b"id" => entry.id = Field::read(scanner)?,
                b"function" if scanner.peek()? == b'{' => scanner.object(|scanner, key| {
                    match scanner.raw(key) {
                        b"name" => entry.name = Field::read(scanner)?,
                        b"arguments" => entry.arguments = Field::read(scanner)?,
                        _ => scanner.skip()?,
                    }
                    Ok(())
                })?,
                _ => scanner.skip()?,
            }
            Ok(())
        })?;
        self.entries.push(entry);
        Ok(())
    }

    fn read_usage(&mut self, scanner: &mut Scanner<'_>) -> Result<(), Fault> {
        if scanner.peek()? != b'{' {
            return scanner.skip();
        }
        scanner.object(|scanner, key| {
            if scanner.raw(key) != b"completion_tokens" {
                return scanner.skip();
            }
            self.completion_tokens = read_integer(scanner)?.and_then(|count| u64::try_from(count).ok());
            Ok(())
        })
    }
}

/// A whole number, also inside quotes; anything else is `None`.
fn read_integer(scanner: &mut Scanner<'_>) -> Result<Option<i64>, Fault> {
    match scanner.peek()? {
        b'"' => {
            let span = scanner.string()?;
            Ok(std::str::from_utf8(scanner.raw(span)).ok().and_then(|text| text.parse().ok()))
        }
        b'{' | b'[' => {
            scanner.skip()?;
            Ok(None)
        }
        _ => Ok(scanner.scalar()?.parse().ok()),
    }
}

/// A string, or an array of strings and of objects with `text`.
fn read_parts(scanner: &mut Scanner<'_>, parts: &mut Vec<Span>) -> Result<(), Fault> {
    match scanner.peek()? {
        b'"' => parts.push(scanner.string()?),
        b'[' => scanner.array(|scanner| match scanner.peek()? {
            b'"' => {
                parts.push(scanner.string()?);
                Ok(())
            }
            b'{' => scanner.object(|scanner, key| {
                if scanner.raw(key) == b"text" && scanner.peek()? == b'"' {
                    parts.push(scanner.string()?);
                    return Ok(());
                }
                scanner.skip()
            }),
            _ => scanner.skip(),
        })?,
        _ => scanner.skip()?,
    }
    Ok(())
}
