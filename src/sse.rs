//! Server-sent events from bytes, in any chunking (WHATWG event stream format).
//!
//! The decoder is fed bytes as they come and hands out events that borrow from them wherever an event lies whole inside
//! one read. Nothing is skipped in silence: a line that is no field of the format is an event of its own.

/// Longest line, and longest data of one event, that is kept. What is longer is cut with [`Event::Overlong`].
pub const LIMIT: usize = 16 << 20;

const MARK: [u8; 3] = [0xEF, 0xBB, 0xBF];

/// What the decoder hands out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event<'a> {
    /// An event with at least one `data` line.
    Message {
        /// The `event` field; empty where none was sent.
        name: &'a [u8],
        /// The `data` lines, joined by LF.
        data: &'a [u8],
        /// Whether a blank line ended the event; false only for what the end of the body cut off.
        ended: bool,
    },
    /// A line that is neither a comment nor a known field.
    Unknown(&'a [u8]),
    /// A line or an event longer than the limit; the rest of it is dropped.
    Overlong {
        /// The limit, in bytes.
        limit: usize,
    },
}

/// Decodes an event stream incrementally, in bounded memory.
#[derive(Debug)]
pub struct Decoder {
    limit: usize,
    mark: Mark,
    line: Vec<u8>,
    data: Vec<u8>,
    name: Vec<u8>,
    has_data: bool,
    after_carriage_return: bool,
    /// The rest of the current line is dropped.
    dropping_line: bool,
    /// The rest of the current event's data is dropped.
    dropping_data: bool,
}

/// How much of a byte order mark has been seen.
#[derive(Debug, Clone, Copy)]
enum Mark {
    Seen(usize),
    Decided,
}

impl Default for Decoder {
    fn default() -> Self {
        Self::new()
    }
}

impl Decoder {
    /// A decoder at the start of a body, with the usual [`LIMIT`].
    pub fn new() -> Self {
        Self::with_limit(LIMIT)
    }

    /// A decoder that cuts lines and events at `limit` bytes.
    pub fn with_limit(limit: usize) -> Self {
        Self {
            limit,
            mark: Mark::Seen(0),
            line: Vec::new(),
            data: Vec::new(),
            name: Vec::new(),
            has_data: false,
            after_carriage_return: false,
            dropping_line: false,
            dropping_data: false,
        }
    }

    /// Feeds the next bytes of the body; `sink` gets every event that they complete.
    pub fn feed(&mut self, bytes: &[u8], mut sink: impl FnMut(Event<'_>)) {
        let mut rest = self.skip_mark(bytes);
        let mut single: Option<&[u8]> = None;
        while !rest.is_empty() {
            if self.after_carriage_return {
                self.after_carriage_return = false;
                if rest[0] == b'\n' {
                    rest = &rest[1..];
                    continue;
                }
            }
            let Some(end) = line_end(rest) else {
                self.carry(rest, &mut sink);
                break;
            };
            self.after_carriage_return = rest[end] == b'\r';
            let head = &rest[..end];
            rest = &rest[end + 1..];
            if self.line.is_empty() && !self.dropping_line {
                if head.len() > self.limit {
                    sink(Event::Overlong { limit: self.limit });
                } else {
                    self.accept(head, &mut single, &mut sink);
                }
                continue;
            }
            self.carry(head, &mut sink);
            if std::mem::take(&mut self.dropping_line) {
                continue;
            }
            let line = std::mem::take(&mut self.line);
            let mut inner = None;
            self.accept(&line, &mut inner, &mut sink);
            if let Some(value) = inner {
                self.store(value, &mut sink);
            }
            self.line = line;
            self.line.clear();
        }
        if let Some(value) = single {
            self.store(value, &mut sink);
        }
    }

    /// Ends the body: what a missing blank line held back comes out with `ended: false`.
    pub fn finish(&mut self, mut sink: impl FnMut(Event<'_>)) {
        if let Mark::Seen(count) = self.mark {
            self.mark = Mark::Decided;
            self.line.extend_from_slice(&MARK[..count]);
        }
        if !self.line.is_empty() {
            let line = std::mem::take(&mut self.line);
            let mut single = None;
            self.accept(&line, &mut single, &mut sink);
            if let Some(value) = single {
                self.store(value, &mut sink);
            }
        }
        if self.has_data && !self.dropping_data {
            sink(Event::Message { name: &self.name, data: &self.data, ended: false });
        }
        self.reset();
    }

    fn skip_mark<'a>(&mut self, bytes: &'a [u8]) -> &'a [u8] {
        let mut rest = bytes;
        while let Mark::Seen(count) = self.mark {
            let Some(&first) = rest.first() else { break };
            if first == MARK[count] {
                rest = &rest[1..];
                self.mark = if count == 2 { Mark::Decided } else { Mark::Seen(count + 1) };
            } else {
                self.mark = Mark::Decided;
                self.line.extend_from_slice(&MARK[..count]);
            }
        }
        rest
    }

    /// Keeps a piece of an unfinished line.
    fn carry(&mut self, piece: &[u8], sink: &mut impl FnMut(Event<'_>)) {
        if self.dropping_line {
            return;
        }
        if self.line.len() + piece.len() > self.limit {
            self.line = Vec::new();
            self.dropping_line = true;
            sink(Event::Overlong { limit: self.limit });
            return;
        }
        self.line.extend_from_slice(piece);
    }

    /// Takes one whole line. `single` holds the only data line so far where it can be borrowed from the read itself.
    fn accept<'a>(&mut self, line: &'a [u8], single: &mut Option<&'a [u8]>, sink: &mut impl FnMut(Event<'_>)) {
        if line.is_empty() {
            self.dispatch(single.take(), sink);
            return;
        }
        if line[0] == b':' {
            return;
        }
        let (field, value) = split_field(line);
        match field {
            b"data" => {
                if let Some(earlier) = single.take() {
                    self.store(earlier, sink);
                    self.store(value, sink);
                } else if self.has_data {
                    self.store(value, sink);
                } else {
                    *single = Some(value);
                }
            }
            b"event" => {
                self.name.clear();
                self.name.extend_from_slice(value);
            }
            b"id" | b"retry" => {}
            _ => sink(Event::Unknown(line)),
        }
    }

    fn store(&mut self, value: &[u8], sink: &mut impl FnMut(Event<'_>)) {
        if self.dropping_data {
            return;
        }
        if self.data.len() + value.len() + 1 > self.limit {
            self.data = Vec::new();
            self.dropping_data = true;
            sink(Event::Overlong { limit: self.limit });
            return;
        }
        if self.has_data {
            self.data.push(b'\n');
        }
        self.has_data = true;
        self.data.extend_from_slice(value);
    }

    fn dispatch(&mut self, single: Option<&[u8]>, sink: &mut impl FnMut(Event<'_>)) {
        if let Some(data) = single {
            sink(Event::Message { name: &self.name, data, ended: true });
        } else if self.has_data && !self.dropping_data {
            sink(Event::Message { name: &self.name, data: &self.data, ended: true });
        }
        self.reset();
    }

    fn reset(&mut self) {
        self.data.clear();
        self.name.clear();
        self.has_data = false;
        self.dropping_data = false;
    }
}

fn line_end(bytes: &[u8]) -> Option<usize> {
    bytes.iter().position(|&byte| byte == b'\n' || byte == b'\r')
}

/// Splits a line at its first colon; one space after the colon belongs to neither side.
fn split_field(line: &[u8]) -> (&[u8], &[u8]) {
    match line.iter().position(|&byte| byte == b':') {
        None => (line, b""),
        Some(colon) => {
            let value = &line[colon + 1..];
            (&line[..colon], value.strip_prefix(b" ").unwrap_or(value))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Events as owned values, for comparison.
    fn decode(bytes: &[u8], cut: usize) -> Vec<String> {
        let mut decoder = Decoder::with_limit(64);
        let mut events = Vec::new();
        for piece in bytes.chunks(cut) {
            decoder.feed(piece, |event| events.push(show(event)));
        }
        decoder.finish(|event| events.push(show(event)));
        events
    }

    fn show(event: Event<'_>) -> String {
        match event {
            Event::Message { name, data, ended } => {
                format!("{}|{}|{ended}", String::from_utf8_lossy(name), String::from_utf8_lossy(data))
            }
            Event::Unknown(line) => format!("?{}", String::from_utf8_lossy(line)),
            Event::Overlong { limit } => format!("overlong {limit}"),
        }
    }

    #[test]
    fn every_chunking_gives_the_same_events() {
        let body: &[u8] =
            "\u{feff}event: a\rdata: 1\r\r\n: comment\r\n\r\ndata:2\ndata: 3\n\nid: 7\n\nbroken line\ndata\n\n\
            retry: 1\ndata: 東京\r\n\r\nerror: {}\ndata: tail"
                .as_bytes();
        let whole = decode(body, body.len());
        assert_eq!(
            whole,
            ["a|1|true", "|2\n3|true", "?broken line", "||true", "|東京|true", "?error: {}", "|tail|false"]
        );
        for cut in 1..body.len() {
            assert_eq!(decode(body, cut), whole, "cut every {cut} bytes");
        }
    }

    #[test]
    fn a_long_line_is_cut_once_and_the_next_event_survives() {
        let body = format!("data: {}\n\ndata: ok\n\n", "x".repeat(100));
        for cut in 1..body.len() {
            assert_eq!(decode(body.as_bytes(), cut), ["overlong 64", "|ok|true"], "cut every {cut} bytes");
        }
    }

    #[test]
    fn many_short_data_lines_are_cut_as_one_event() {
        let body = format!("{}\ndata: ok\n\n", "data: 0123456789\n".repeat(10));
        for cut in [1, 7, 64, body.len()] {
            assert_eq!(decode(body.as_bytes(), cut), ["overlong 64", "|ok|true"], "cut every {cut} bytes");
        }
    }

    #[test]
    fn a_broken_byte_order_mark_is_text() {
        assert_eq!(decode(b"\xEF\xBBdata: 1\n\ndata: 2\n\n", 1).len(), 2);
        assert_eq!(decode(b"\xEF\xBB", 1).len(), 1);
    }
}
