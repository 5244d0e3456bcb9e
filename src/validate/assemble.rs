//! From bytes to an answer: events, frames and deltas put together as real servers send them.

use std::collections::{BTreeMap, BTreeSet};

use super::{
    fault::Quirk,
    frame::{Entry, Field, Frame},
    text::Text,
};
use crate::sse::{Decoder, Event};

/// Most text that is kept of one answer.
pub const TEXT_LIMIT: usize = 64 << 20;
/// Most bytes that are read of one body: what streams without end would fill any memory.
pub const BODY_LIMIT: usize = 128 << 20;
/// Most calls that are kept of one answer.
pub const CALL_LIMIT: usize = 4096;
/// Most bytes kept of a body that is no event stream although one was asked for.
const HEAD_LIMIT: usize = 1 << 20;

/// One call under construction.
#[derive(Debug, Clone, Default)]
pub struct Slot {
    /// Position that the server gave it.
    pub index: Option<i64>,
    /// Its first id.
    pub id: Option<String>,
    /// Another id came for the same position.
    pub id_conflict: bool,
    /// A delta carried a null or empty id.
    pub id_blank: bool,
    /// The id came again.
    pub id_resent: bool,
    /// The pieces of its name, without repetitions of the piece before.
    pub names: Vec<String>,
    /// A piece of the name came twice in a row.
    pub name_resent: bool,
    /// A name was sent, if an empty one.
    pub name_sent: bool,
    /// A name was no string.
    pub name_not_text: bool,
    /// Arguments came before the name.
    pub late_name: bool,
    /// The argument text.
    pub arguments: Text,
    /// Where each fragment of the arguments ends.
    pub ends: Vec<usize>,
    /// The arguments were no string.
    pub not_text: bool,
    /// Something came after the finish reason.
    pub late: bool,
}

/// Why a body cannot be judged as an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Unusable {
    /// An error instead of, or inside, the answer.
    Error(String),
    /// No chat completion at all.
    Envelope(String),
    /// A frame that cannot be read.
    Frame(String),
}

/// A response, reassembled.
#[derive(Debug, Default)]
pub struct Answer {
    /// Whether it was read as a stream.
    pub stream: bool,
    /// Visible text.
    pub content: Text,
    /// Reasoning text.
    pub reasoning: Text,
    /// The calls, in order of appearance.
    pub slots: Vec<Slot>,
    /// The last finish reason.
    pub finish: Option<String>,
    /// The server's own name of the finish reason.
    pub native_finish: Option<String>,
    /// `refusal` was filled.
    pub refusal: bool,
    /// The deprecated `function_call` was filled.
    pub legacy_call: bool,
    /// `[DONE]` came.
    pub done: bool,
    /// Frames that held choices.
    pub chunks: u64,
    /// Events, of any kind.
    pub events: u64,
    /// An error frame, wherever it stood.
    pub error: Option<String>,
    /// The last line that is no field of an event stream.
    pub stray_line: Option<String>,
    /// Why nothing can be read, the weightiest first.
    pub unusable: Option<Unusable>,
    /// Deviations so far.
    pub quirks: BTreeSet<Quirk>,
    /// `usage.completion_tokens`.
    pub completion_tokens: Option<u64>,
}

/// Reads a response body in any chunking.
#[derive(Debug)]
pub struct Reader {
    decoder: Decoder,
    builder: Builder,
    unary: Vec<u8>,
    head: Option<Vec<u8>>,
    undecided: bool,
    fed: usize,
}

impl Reader {
    /// A reader at the start of a body: an event stream, or one document.
    pub fn new(stream: bool) -> Self {
        let answer = Answer { stream, ..Answer::default() };
        Self {
            decoder: Decoder::new(),
            builder: Builder { answer, ..Builder::default() },
            unary: Vec::new(),
            head: None,
            undecided: true,
            fed: 0,
        }
    }

    /// Feeds the next bytes.
    pub fn feed(&mut self, bytes: &[u8]) {
        if !self.builder.answer.stream {
            if self.unary.len() + bytes.len() > TEXT_LIMIT {
                self.builder.too_long();
            } else {
                self.unary.extend_from_slice(bytes);
            }
            return;
        }
        // Cut at the exact byte, so that it does not depend on the chunking.
        let left = BODY_LIMIT - self.fed;
        let bytes = if bytes.len() > left {
            self.builder.fail(Unusable::Frame(format!("the body is longer than {BODY_LIMIT} bytes")));
            &bytes[..left]
        } else {
            bytes
        };
        self.fed += bytes.len();
        self.keep_head(bytes);
        let builder = &mut self.builder;
        self.decoder.feed(bytes, |event| builder.event(event));
    }

    /// Reads a whole body at once.
    pub fn read(stream: bool, body: &[u8]) -> Answer {
        let mut reader = Self::new(stream);
        if stream {
            reader.feed(body);
            return reader.finish();
        }
        if body.len() > TEXT_LIMIT {
            reader.builder.too_long();
        } else {
            reader.builder.document(body);
        }
        reader.builder.close()
    }

    /// Ends the body.
    pub fn finish(mut self) -> Answer {
        if !self.builder.answer.stream {
            if self.builder.answer.unusable.is_none() {
                self.builder.document(&self.unary);
            }
            return self.builder.close();
        }
        let builder = &mut self.builder;
        self.decoder.finish(|event| builder.event(event));
        if let Some(head) = self.head.filter(|_| self.builder.answer.chunks == 0) {
            self.builder.no_stream(&head);
        }
        self.builder.close()
    }

    /// Keeps the start of a body that does not look like an event stream.
    fn keep_head(&mut self, bytes: &[u8]) {
        if self.undecided {
            let first = bytes.iter().find(|byte| !byte.is_ascii_whitespace() && !matches!(byte, 0xEF | 0xBB | 0xBF));
            let Some(first) = first else { return };
            self.undecided = false;
            self.head = matches!(first, b'{' | b'[' | b'<').then(Vec::new);
        }
        if let Some(head) = &mut self.head {
            let room = HEAD_LIMIT.saturating_sub(head.len()).min(bytes.len());
            head.extend_from_slice(&bytes[..room]);
        }
    }
}

#[derive(Debug, Default)]
struct Builder {
    answer: Answer,
    frame: Frame,
    choice: Option<i64>,
    /// The first completion id.
    id: Option<Vec<u8>>,
    deltas: u64,
    messages: u64,
    unknown_lines: u64,
    by_index: BTreeMap<i64, usize>,
    by_id: BTreeMap<String, usize>,
    last: Option<usize>,
}

impl Builder {
    fn event(&mut self, event: Event<'_>) {
        self.answer.events += 1;
        match event {
            Event::Message { name, data, ended } => self.message(name, data, ended),
            Event::Unknown(line) => self.unknown(line),
            Event::Overlong { limit } => {
                self.fail(Unusable::Frame(format!("a line or event is longer than {limit} bytes")));
            }
        }
    }

    fn message(&mut self, name: &[u8], data: &[u8], ended: bool) {
        let trimmed = data.trim_ascii();
        if name == b"error" {
            self.answer.error.get_or_insert_with(|| excerpt(trimmed));
        } else if trimmed == b"[DONE]" {
            self.answer.done = true;
        } else if trimmed.is_empty() {
            self.answer.quirks.insert(Quirk::EmptyEvent);
        } else {
            self.chunk(trimmed, ended);
        }
    }

    fn chunk(&mut self, data: &[u8], ended: bool) {
        let mut frame = std::mem::take(&mut self.frame);
        match frame.read(data) {
            Ok(()) => {
                if !ended {
                    self.answer.quirks.insert(Quirk::EventUnterminated);
                }
                self.frame(&frame, data);
            }
            Err(_) if is_keepalive(data) => {
                self.answer.quirks.insert(Quirk::NonjsonKeepalive);
            }
            // The end of the body cut this event off: the missing end of the stream says so already.
            Err(_) if !ended => {}
            Err(fault) => self.fail(Unusable::Frame(format!("{fault} of the frame {}", excerpt(data)))),
        }
        self.frame = frame;
    }

    fn frame(&mut self, frame: &Frame, data: &[u8]) {
        if frame.looks_like_error {
            self.answer.error.get_or_insert_with(|| excerpt(data));
            return;
        }
        self.answer.completion_tokens = frame.completion_tokens.or(self.answer.completion_tokens);
        if !frame.has_choices {
            if frame.completion_tokens.is_none() {
                self.answer.quirks.insert(Quirk::UnknownEvent);
            }
            return;
        }
        self.answer.chunks += 1;
        self.completion_id(frame, data);
        if frame.choices == 0 {
            return;
        }
        let choice = *self.choice.get_or_insert(frame.choice.unwrap_or(0));
        if frame.choices > 1 || frame.choice.is_some_and(|index| index != choice) {
            self.answer.quirks.insert(Quirk::ExtraChoice);
            if frame.choice.is_some_and(|index| index != choice) {
                return;
            }
        }
        self.deltas += u64::from(frame.has_delta);
        if self.answer.stream && frame.has_message {
            self.messages += 1;
            self.answer.quirks.insert(Quirk::MessageInChunk);
            if !frame.has_delta {
                self.finish_reason(frame, data);
                return;
            }
        }
        self.parts(frame, data);
        self.finish_reason(frame, data);
    }

    fn completion_id(&mut self, frame: &Frame, data: &[u8]) {
        let Field::Text(span) = frame.id else { return };
        let id = &data[span.start..span.end];
        match &self.id {
            _ if id.is_empty() => {}
            None => self.id = Some(id.to_vec()),
            Some(first) if first != id => {
                self.answer.quirks.insert(Quirk::ChunkIdVaries);
            }
            Some(_) => {}
        }
    }

    /// The delta or message of a frame.
    fn parts(&mut self, frame: &Frame, data: &[u8]) {
        let answer = &mut self.answer;
        for &span in &frame.content {
            answer.content.push(data, span);
        }
        for &span in &frame.reasoning {
            answer.reasoning.push(data, span);
        }
        answer.refusal |= text(frame.refusal, data).is_some_and(|refusal| !refusal.trim().is_empty());
        answer.legacy_call |= match frame.legacy_call {
            Field::Other(start, end) => end - start > 2,
            _ => false,
        };
        for entry in &frame.entries {
            self.entry(entry, data);
        }
        let kept = self.answer.content.as_str().len() + self.answer.reasoning.as_str().len();
        if kept > TEXT_LIMIT {
            self.too_long();
        }
    }

    fn finish_reason(&mut self, frame: &Frame, data: &[u8]) {
        if let Some(reason) = text(frame.finish, data).filter(|reason| !reason.trim().is_empty()) {
            self.answer.finish = Some(reason);
        }
        if let Some(reason) = text(frame.native_finish, data) {
            self.answer.native_finish = Some(reason);
        }
    }

    fn entry(&mut self, entry: &Entry, data: &[u8]) {
        let id = text(entry.id, data).filter(|id| !id.trim().is_empty());
        let name = match entry.name {
            Field::Text(span) if !span.escaped => {
                std::str::from_utf8(&data[span.start..span.end]).ok().map(std::borrow::Cow::Borrowed)
            }
            field => text(field, data).map(std::borrow::Cow::Owned),
        };
        let Some(position) = self.locate(entry, id.as_deref(), name.as_deref()) else { return };
        let late = self.answer.finish.is_some() || self.answer.done;
        let identified = id.is_some();
        let slot = &mut self.answer.slots[position];
        let before = slot.ends.len();
        slot.take_id(entry, id);
        if let Some(name) = name {
            slot.take_name(&name);
        }
        slot.name_not_text |= matches!(entry.name, Field::Other(..));
        slot.take_arguments(entry.arguments, data);
        slot.late |= late && slot.ends.len() > before;
        if slot.arguments.as_str().len() > TEXT_LIMIT {
            self.too_long();
        }
        if identified && let Some(id) = &self.answer.slots[position].id {
            self.by_id.entry(id.clone()).or_insert(position);
        }
    }

    /// The slot that an entry belongs to: by index, else by id, else the one before. `None` where it carries nothing.
    fn locate(&mut self, entry: &Entry, id: Option<&str>, name: Option<&str>) -> Option<usize> {
        if !self.answer.stream {
            return self.open(entry.index);
        }
        if let Some(index) = entry.index {
            if let Some(last) = self.last.filter(|&last| self.answer.slots[last].index == Some(index)) {
                return Some(last);
            }
            if let Some(&position) = self.by_index.get(&index) {
                self.last = Some(position);
                return Some(position);
            }
        }
        let named = name.is_some_and(|name| !name.trim().is_empty());
        let has_arguments = match entry.arguments {
            Field::Text(span) => span.start < span.end,
            field => field.is_some(),
        };
        let known = match (entry.index, id) {
            (None, Some(id)) => self.by_id.get(id).copied(),
            (None, None) => self.last,
            // The opener had only an id: its continuation by position belongs to it.
            (Some(_), None) if !named => self.last.filter(|&last| self.answer.slots[last].index.is_none()),
            (Some(_), Some(id)) => self.by_id.get(id).copied().filter(|&at| self.answer.slots[at].index.is_none()),
            (Some(_), None) => None,
        };
        if entry.index.is_none() && (id.is_some() || named || has_arguments) {
            self.answer.quirks.insert(Quirk::IndexMissing);
        }
        if let Some(position) = known {
            if let Some(index) = entry.index {
                self.answer.slots[position].index = Some(index);
                self.by_index.insert(index, position);
            }
            self.last = Some(position);
            return Some(position);
        }
        if id.is_none() && !named && !has_arguments && !matches!(entry.name, Field::Text(_)) {
            self.answer.quirks.insert(Quirk::EmptyDelta);
            return None;
        }
        self.open(entry.index)
    }

    fn open(&mut self, index: Option<i64>) -> Option<usize> {
        if self.answer.slots.len() == CALL_LIMIT {
            self.fail(Unusable::Frame(format!("more than {CALL_LIMIT} calls in one answer")));
            return None;
        }
        let position = self.answer.slots.len();
        self.answer.slots.push(Slot { index, ..Slot::default() });
        if let Some(index) = index {
            self.by_index.entry(index).or_insert(position);
        }
        self.last = Some(position);
        Some(position)
    }

    fn unknown(&mut self, line: &[u8]) {
        self.unknown_lines += 1;
        let trimmed = line.trim_ascii();
        if trimmed.first() == Some(&b'{') && self.answer.chunks > 0 {
            let mut frame = Frame::default();
            if frame.read(trimmed).is_ok() {
                if frame.looks_like_error {
                    self.answer.error.get_or_insert_with(|| excerpt(trimmed));
                } else {
                    self.fail(Unusable::Frame(format!("a frame without `data:`: {}", excerpt(trimmed))));
                }
                return;
            }
        }
        self.answer.stray_line = Some(excerpt(trimmed));
        self.answer.quirks.insert(Quirk::UnknownField);
    }

    /// A body that holds one document.
    fn document(&mut self, body: &[u8]) {
        let body = body.strip_prefix(b"\xEF\xBB\xBF").unwrap_or(body);
        let mut frame = Frame::default();
        if let Err(fault) = frame.read(body.trim_ascii()) {
            self.fail(Unusable::Envelope(format!("{fault} of the body {}", excerpt(body))));
            return;
        }
        if frame.looks_like_error {
            self.answer.error = Some(excerpt(body));
        } else if !frame.has_choices || (frame.choices > 0 && !frame.has_message) {
            self.fail(Unusable::Envelope(format!("the body is no chat completion: {}", excerpt(body))));
        } else {
            self.frame(&frame, body.trim_ascii());
        }
    }

    /// A body that is no event stream although one was asked for.
    fn no_stream(&mut self, head: &[u8]) {
        let mut frame = Frame::default();
        let head = head.strip_prefix(b"\xEF\xBB\xBF").unwrap_or(head).trim_ascii();
        if frame.read(head).is_ok() && frame.looks_like_error {
            self.answer.error.get_or_insert_with(|| excerpt(head));
        }
        self.fail(Unusable::Envelope(format!("no event stream: {}", excerpt(head))));
    }

    fn too_long(&mut self) {
        self.fail(Unusable::Frame(format!("the answer is longer than {TEXT_LIMIT} bytes")));
    }

    fn fail(&mut self, reason: Unusable) {
        self.answer.unusable.get_or_insert(reason);
    }

    fn close(mut self) -> Answer {
        self.answer.content.settle();
        self.answer.reasoning.settle();
        for slot in &mut self.answer.slots {
            slot.arguments.settle();
        }
        if self.answer.stream && self.answer.chunks == 0 && self.answer.error.is_none() {
            if self.unknown_lines > 0 || self.answer.quirks.contains(&Quirk::UnknownEvent) {
                self.fail(Unusable::Envelope("the stream holds no chat completion chunk".to_owned()));
            }
        } else if self.answer.stream && self.messages > 0 && self.deltas == 0 {
            self.fail(Unusable::Envelope("the stream holds messages instead of deltas".to_owned()));
        }
        if let Some(message) = self.answer.error.clone() {
            self.answer.unusable = Some(Unusable::Error(message));
        }
        self.answer
    }
}

impl Slot {
    fn take_id(&mut self, entry: &Entry, id: Option<String>) {
        match (&self.id, id) {
            (_, None) => self.id_blank |= entry.id != Field::Absent,
            (None, Some(id)) => self.id = Some(id),
            (Some(first), Some(id)) if *first == id => self.id_resent = true,
            (Some(_), Some(_)) => self.id_conflict = true,
        }
    }

    fn take_name(&mut self, name: &str) {
        self.name_sent = true;
        if name.trim().is_empty() {
            return;
        }
        if self.names.is_empty() && !self.arguments.as_str().is_empty() {
            self.late_name = true;
        }
        if self.names.last().is_some_and(|last| last == name) {
            self.name_resent = true;
        } else {
            self.names.push(name.to_owned());
        }
    }

    fn take_arguments(&mut self, field: Field, data: &[u8]) {
        match field {
            Field::Absent | Field::Null => return,
            Field::Text(span) => {
                if span.start == span.end {
                    return;
                }
                self.arguments.push(data, span);
            }
            Field::Other(start, end) => {
                self.not_text = true;
                self.arguments.push_bytes(&data[start..end]);
            }
        }
        self.ends.push(self.arguments.as_str().len());
    }
}

/// A field as text; what is no string keeps its JSON form.
fn text(field: Field, data: &[u8]) -> Option<String> {
    let mut text = Text::default();
    match field {
        Field::Absent | Field::Null => return None,
        Field::Text(span) => text.push(data, span),
        Field::Other(start, end) => text.push_bytes(&data[start..end]),
    }
    text.settle();
    Some(text.as_str().to_owned())
}

/// A payload that loses nothing when it is dropped: no JSON value starts like this.
fn is_keepalive(data: &[u8]) -> bool {
    const WORDS: [&str; 6] = ["ping", "pong", "keepalive", "keep-alive", "keep_alive", "heartbeat"];
    if data[0] == b':' {
        return true;
    }
    let text = String::from_utf8_lossy(&data[..data.len().min(64)]).to_ascii_lowercase();
    let bare = text.trim_matches(|character: char| !character.is_ascii_alphanumeric());
    data.len() < 32 && WORDS.contains(&bare)
}

/// The start of some bytes, for a message.
pub fn excerpt(bytes: &[u8]) -> String {
    const LENGTH: usize = 160;
    let text = String::from_utf8_lossy(&bytes[..bytes.len().min(LENGTH)]);
    let end = if bytes.len() > LENGTH { "…" } else { "" };
    format!("{:?}{end}", text.trim())
}
