//! Text ↔ tokens: a token is a byte, and the byte values that UTF-8 never uses are the control tokens.
//!
//! Text cannot forge a control token, since no UTF-8 text contains one.

/// A token: a byte of UTF-8, or a control token.
pub type Token = u8;

/// Starts a turn; its role and a newline follow.
pub const TURN_START: Token = 0xF8;
/// Ends a turn; the model emits it where an answer ends.
pub const TURN_END: Token = 0xF9;
/// Starts the tool calls of an answer.
pub const CALL: Token = 0xFA;
/// Starts the text of an answer. No context matches across a control token, so a generation prompt that ends with this
/// one is answered by nothing.
pub const TEXT: Token = 0xFB;
/// Fills what is before the first token.
pub const PAD: Token = 0xFF;

/// Number of distinct tokens.
pub const VOCABULARY: usize = 256;

/// The tokens of `text`.
pub fn encode(text: &str) -> &[Token] {
    text.as_bytes()
}

/// Tokens to text, one at a time: a character comes out when its last byte is in, and what is no UTF-8 becomes U+FFFD
/// exactly as [`String::from_utf8_lossy`] has it.
#[derive(Debug, Default, Clone)]
pub struct Decoder {
    pending: Vec<u8>,
}

impl Decoder {
    /// Takes one token and appends to `out` the characters that it completes.
    pub fn push(&mut self, token: Token, out: &mut String) {
        self.pending.push(token);
        while !self.pending.is_empty() {
            match std::str::from_utf8(&self.pending) {
                Ok(text) => {
                    out.push_str(text);
                    self.pending.clear();
                }
                Err(error) => {
                    let Some(bad) = error.error_len() else { return };
                    out.push(char::REPLACEMENT_CHARACTER);
                    self.pending.drain(..bad);
                }
            }
        }
    }

    /// Ends the text: an unfinished character becomes U+FFFD.
    pub fn finish(&mut self, out: &mut String) {
        if !self.pending.is_empty() {
            self.pending.clear();
            out.push(char::REPLACEMENT_CHARACTER);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn decode(tokens: &[Token]) -> String {
        let mut decoder = Decoder::default();
        let mut out = String::new();
        for token in tokens {
            decoder.push(*token, &mut out);
        }
        decoder.finish(&mut out);
        out
    }

    #[test]
    fn a_character_comes_when_its_last_byte_is_in() {
        let mut decoder = Decoder::default();
        let mut out = String::new();
        for (at, token) in "é🙂".bytes().enumerate() {
            decoder.push(token, &mut out);
            assert_eq!(out.chars().count(), usize::from(at >= 1) + usize::from(at >= 5));
        }
        assert_eq!(out, "é🙂");
    }

    proptest! {
        #[test]
        fn decoding_is_lossy_utf8(tokens in proptest::collection::vec(any::<u8>(), 0..64)) {
            prop_assert_eq!(decode(&tokens), String::from_utf8_lossy(&tokens));
        }

        #[test]
        fn damaged_text_decodes_as_lossy_utf8(text in "[ -~é漢🙂]{0,20}", at in any::<usize>(), byte in any::<u8>()) {
            let mut tokens = encode(&text).to_vec();
            if !tokens.is_empty() {
                let at = at % tokens.len();
                tokens[at] = byte;
            }
            prop_assert_eq!(decode(&tokens), String::from_utf8_lossy(&tokens));
        }
    }
}
