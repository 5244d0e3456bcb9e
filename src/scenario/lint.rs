//! Rejects dictated texts that a copying model cannot follow.
//!
//! A model that copies by longest match looks for the newest place where its last [`CONTEXT_BYTES`] bytes occurred. A
//! dictated text in which such a context occurs twice has two right continuations.

use std::collections::BTreeMap;

/// Length of the context that decides the next byte.
pub const CONTEXT_BYTES: usize = 28;

/// Why a text is ambiguous.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ambiguity {
    /// Byte offset of the context's first occurrence.
    pub first: usize,
    /// Byte offset of its second occurrence.
    pub second: usize,
}

/// The first context that repeats in `text`.
pub fn ambiguity(text: &str) -> Option<Ambiguity> {
    let mut seen = BTreeMap::new();
    text.as_bytes()
        .windows(CONTEXT_BYTES)
        .enumerate()
        .find_map(|(second, window)| seen.insert(window, second).map(|first| Ambiguity { first, second }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_context_one_byte_short_of_repeating_passes() {
        let block = "abcdefghijklmnopqrstuvwxyz0";
        assert_eq!(block.len(), CONTEXT_BYTES - 1);
        assert_eq!(ambiguity(&format!("{block}1 and {block}2")), None);
        let found = ambiguity(&format!("{block}1 and {block}1")).unwrap();
        assert_eq!((found.first, found.second), (0, 33));
    }

    #[test]
    fn a_run_of_one_byte_repeats_itself() {
        assert_eq!(ambiguity(&"!".repeat(CONTEXT_BYTES)), None);
        assert!(ambiguity(&"!".repeat(CONTEXT_BYTES + 1)).is_some());
    }
}
