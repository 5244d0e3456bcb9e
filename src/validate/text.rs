//! Text put together from deltas. Whole bytes are decoded first, and a surrogate pair whose halves came in two frames is
//! joined, so that whatever damage remains was made by the server.

use super::json::{Span, Unit, Units, join};

/// What was wrong with the encoding of a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Damage {
    /// Bytes that are not UTF-8.
    Bytes,
    /// A surrogate without a partner.
    LoneSurrogate,
    /// A surrogate pair split between frames: joined here, lost in readers that decode every frame on its own.
    SplitPair,
}

/// A text under construction.
#[derive(Debug, Clone, Default)]
pub struct Text {
    decoded: String,
    pending: Option<u16>,
    damage: Option<Damage>,
}

impl Text {
    /// Appends the string that `span` marks in `frame`.
    pub fn push(&mut self, frame: &[u8], span: Span) {
        let raw = &frame[span.start..span.end];
        if !span.escaped && self.pending.is_none() {
            self.push_bytes(raw);
            return;
        }
        for unit in Units::new(raw) {
            match unit {
                Unit::Surrogate(unit) => self.push_surrogate(unit),
                Unit::Plain(bytes) => {
                    self.settle();
                    self.push_bytes(bytes);
                }
                Unit::Char(character) => {
                    self.settle();
                    self.decoded.push(character);
                }
            }
        }
    }

    /// Appends bytes that stand for themselves.
    pub fn push_bytes(&mut self, bytes: &[u8]) {
        if let Ok(text) = std::str::from_utf8(bytes) {
            self.decoded.push_str(text);
        } else {
            self.note(Damage::Bytes);
            self.decoded.push_str(&String::from_utf8_lossy(bytes));
        }
    }

    fn push_surrogate(&mut self, unit: u16) {
        if let Some(character) = self.pending.and_then(|high| join(high, unit)) {
            self.pending = None;
            self.note(Damage::SplitPair);
            self.decoded.push(character);
            return;
        }
        self.settle();
        if unit < 0xDC00 {
            self.pending = Some(unit);
        } else {
            self.lone();
        }
    }

    /// Gives up on the partner of a pending surrogate.
    pub fn settle(&mut self) {
        if self.pending.take().is_some() {
            self.lone();
        }
    }

    fn lone(&mut self) {
        self.note(Damage::LoneSurrogate);
        self.decoded.push(char::REPLACEMENT_CHARACTER);
    }

    fn note(&mut self, damage: Damage) {
        self.damage.get_or_insert(damage);
    }

    /// What has come so far.
    pub fn as_str(&self) -> &str {
        &self.decoded
    }

    /// The first damage.
    pub fn damage(&self) -> Option<Damage> {
        self.damage
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn push(text: &mut Text, raw: &[u8]) {
        let span = Span { start: 0, end: raw.len(), escaped: raw.contains(&b'\\') };
        text.push(raw, span);
    }

    #[test]
    fn a_pair_split_between_frames_is_joined_and_noted() {
        let mut text = Text::default();
        push(&mut text, br"a\ud83d");
        push(&mut text, br"\ude00b");
        text.settle();
        assert_eq!((text.as_str(), text.damage()), ("a😀b", Some(Damage::SplitPair)));
    }

    #[test]
    fn a_pair_in_one_frame_is_no_damage_and_half_a_pair_is() {
        let mut text = Text::default();
        push(&mut text, br"\ud83d\ude00");
        assert_eq!((text.as_str(), text.damage()), ("😀", None));
        push(&mut text, br"\ud83d");
        push(&mut text, b"x");
        text.settle();
        assert_eq!((text.as_str(), text.damage()), ("😀\u{fffd}x", Some(Damage::LoneSurrogate)));
    }

    #[test]
    fn bytes_that_are_not_utf8_are_noted() {
        let mut text = Text::default();
        push(&mut text, b"\xF0\x9F");
        assert_eq!(text.damage(), Some(Damage::Bytes));
    }
}
