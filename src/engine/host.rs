//! A model that is only its rule: it copies what followed the longest recent match, computed on the host.
//!
//! It keeps nothing but the tokens, in pages, so a page that is shared, freed or handed out wrongly shows as wrong
//! bytes. It is the worker's and the server's test double, and the oracle of what a healthy device answers.

use super::{
    Activity, DecodeRow, Prefill, TokenModel,
    cache::PAGE_TOKENS,
    tokenizer::{PAD, TURN_END, TURN_START, Token},
};
use crate::error::Result;

/// Tokens that the long and the short match compare.
const MATCHES: [usize; 2] = [28, 10];

/// The copy rule over tokens in pages.
#[derive(Debug)]
pub struct HostModel {
    pages: Vec<[Token; PAGE_TOKENS as usize]>,
    steps: u64,
}

impl HostModel {
    /// A model over `pages` pages beside the padding page.
    pub fn new(pages: u32) -> Self {
        Self { pages: vec![[PAD; PAGE_TOKENS as usize]; pages as usize + 1], steps: 0 }
    }

    fn store(&mut self, page_table: &[u32], position: u32, token: Token) {
        let page = page_table[(position / PAGE_TOKENS) as usize];
        self.pages[page as usize][(position % PAGE_TOKENS) as usize] = token;
    }

    fn history(&self, row: &DecodeRow<'_>) -> Vec<Token> {
        let mut tokens: Vec<_> = row.page_table.iter().flat_map(|page| self.pages[*page as usize]).collect();
        tokens.truncate(row.position as usize + 1);
        tokens
    }
}

impl TokenModel for HostModel {
    fn prefill(&mut self, chunk: &Prefill<'_>) -> Result<()> {
        for position in chunk.range.clone() {
            self.store(chunk.page_table, position, chunk.tokens[position as usize]);
        }
        Ok(())
    }

    fn decode(&mut self, rows: &[DecodeRow<'_>]) -> Result<Vec<Token>> {
        self.steps += 1;
        for row in rows {
            self.store(row.page_table, row.position, row.token);
        }
        Ok(rows.iter().map(|row| copied(&self.history(row))).collect())
    }

    fn activity(&self) -> Activity {
        Activity { steps: self.steps, ..Activity::default() }
    }
}

/// What followed the newest place where the last tokens stood before; the longer match decides, and control tokens
/// match nothing.
fn copied(tokens: &[Token]) -> Token {
    let found = MATCHES.iter().find_map(|length| {
        let context = tokens.get(tokens.len().checked_sub(*length)?..)?;
        if context.iter().any(|token| *token >= TURN_START) {
            return None;
        }
        (*length..tokens.len()).rev().find(|end| tokens[end - length..*end] == *context)
    });
    found.map_or(TURN_END, |at| tokens[at])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_longest_match_is_copied() {
        let long = b"abcdefghijklmnopqrstuvwxyz0123";
        let tokens = [long.as_slice(), b"X..", &long[20..], b"Y..", long].concat();
        assert_eq!(copied(&tokens), b'X', "28 tokens outweigh the newer 10");
        let tokens = [&long[20..], b"X..", &long[20..], b"Y..", &long[20..]].concat();
        assert_eq!(copied(&tokens), b'Y');
        assert_eq!(copied(b"nothing here twice"), TURN_END);
    }
}
