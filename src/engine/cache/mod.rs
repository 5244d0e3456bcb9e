//! The paged cache of the engine: which sequence holds which pages. What is in a page is the model's business.
//!
//! A page holds what 256 positions leave in every C4 and index-K cache; a window page is the ring of one sequence's
//! sliding window. Page 0 of both takes the writes of padded rows and is never leased. Pages come back by themselves:
//! whoever drops a [`Table`] returns what nobody else holds.

pub mod pages;
pub mod prefix;
pub mod table;

pub use pages::{Lease, PADDING_PAGE, PagePool};
pub use prefix::PrefixCache;
pub use table::Table;

use super::tokenizer::Token;

/// Positions in a page.
pub const PAGE_TOKENS: u32 = 256;

/// Pages that `tokens` positions fill.
pub fn pages_for(tokens: u32) -> u32 {
    tokens.div_ceil(PAGE_TOKENS)
}

/// Who holds which page.
#[derive(Debug)]
pub struct KvCache {
    pages: PagePool,
    windows: PagePool,
    /// `None` when the prefix cache is off.
    prefix: Option<PrefixCache>,
}

impl KvCache {
    /// A cache of `pages` pages for at most `sequences` sequences at a time.
    pub fn new(pages: u32, sequences: u32, prefix_cache: bool) -> Self {
        let prefix = prefix_cache.then(PrefixCache::default);
        Self { pages: PagePool::new(pages), windows: PagePool::new(sequences), prefix }
    }

    /// Pages that a sequence of this prompt takes from [`spare`](Self::spare), at worst: all but those that running
    /// sequences hold already.
    pub fn cost(&self, prompt: &[Token], max_tokens: u32) -> u32 {
        let busy = self.prefix.as_ref().map_or(0, |cache| cache.busy(reusable(prompt)));
        pages_for(prompt.len() as u32 + max_tokens) - busy
    }

    /// Pages that are free or would be after evicting what only the prefix cache holds.
    pub fn spare(&self) -> u32 {
        self.pages.available() + self.prefix.as_ref().map_or(0, PrefixCache::idle)
    }

    /// Pages for a prompt and its answer, the cached prefix shared and the rest leased; `None` when there are too few.
    pub fn admit(&mut self, prompt: &[Token], max_tokens: u32) -> Option<Table> {
        let shared = self.prefix.as_mut().map_or_else(Vec::new, |cache| cache.lookup(reusable(prompt)));
        let own = pages_for(prompt.len() as u32 + max_tokens) as usize - shared.len();
        while (self.pages.available() as usize) < own {
            if !self.prefix.as_mut()?.evict() {
                return None;
            }
        }
        let own = (0..own).map(|_| self.pages.lease()).collect::<Option<Vec<_>>>()?;
        Some(Table::new(shared, own, self.windows.lease()?))
    }

    /// Takes a finished sequence's pages back; `tokens` are those whose entries were written. Full pages stay in the
    /// prefix cache, the others are free at once.
    pub fn retire(&mut self, tokens: &[Token], table: Table) {
        if let Some(cache) = &mut self.prefix {
            cache.insert(tokens, |index| table.lease(index));
        }
        drop(table);
    }

    /// Pages held by running sequences.
    pub fn held(&self) -> u32 {
        self.pages.capacity() - self.spare()
    }

    /// Pages that only the prefix cache holds.
    pub fn idle(&self) -> u32 {
        self.prefix.as_ref().map_or(0, PrefixCache::idle)
    }

    /// All pages.
    pub fn capacity(&self) -> u32 {
        self.pages.capacity()
    }
}

/// The part of a prompt that may come from the prefix cache: the last token is decoded and the one before it
/// prefilled, since the window and the rings are rebuilt by a prefill.
fn reusable(prompt: &[Token]) -> &[Token] {
    &prompt[..prompt.len().saturating_sub(2)]
}

#[cfg(test)]
mod tests {
    use rand::RngExt;

    use super::*;
    use crate::seed::Seed;

    fn prompt(first: u8, pages: u32, rest: u32) -> Vec<Token> {
        (0..pages * PAGE_TOKENS + rest).map(|at| first.wrapping_add((at / PAGE_TOKENS) as u8)).collect()
    }

    #[test]
    fn a_resent_prompt_shares_its_full_pages() {
        let mut cache = KvCache::new(16, 4, true);
        let tokens = prompt(1, 3, 10);
        let first = cache.admit(&tokens, 100).unwrap();
        let pages = first.pages().to_vec();
        assert_eq!((first.cached(), pages.len()), (0, 4));
        cache.retire(&tokens, first);
        assert_eq!((cache.held(), cache.idle()), (0, 3));
        let second = cache.admit(&tokens, 100).unwrap();
        assert_eq!(second.cached(), 3 * PAGE_TOKENS);
        assert_eq!(second.pages()[..3], pages[..3]);
        let third = cache.admit(&tokens, 100).unwrap();
        assert_eq!(third.pages()[..3], pages[..3], "running sequences share as well");
        assert_ne!(third.pages()[3], second.pages()[3]);
        assert_ne!(third.window(), second.window());
    }

    #[test]
    fn the_last_two_tokens_are_never_cached() {
        let mut cache = KvCache::new(16, 4, true);
        let tokens = prompt(1, 2, 1);
        let first = cache.admit(&tokens, 1).unwrap();
        cache.retire(&tokens, first);
        assert_eq!(cache.admit(&tokens, 1).unwrap().cached(), PAGE_TOKENS);
    }

    #[test]
    fn a_page_is_found_only_behind_its_own_prefix() {
        let mut cache = KvCache::new(16, 4, true);
        let table = cache.admit(&prompt(1, 2, 2), 1).unwrap();
        cache.retire(&prompt(1, 2, 2), table);
        let mut other = prompt(1, 2, 2);
        other[0] ^= 1;
        assert_eq!(cache.admit(&other, 1).unwrap().cached(), 0, "the second page is equal, what precedes it is not");
    }

    #[test]
    fn eviction_takes_the_least_recently_used_and_spares_what_is_held() {
        let mut cache = KvCache::new(6, 4, true);
        for first in [10, 20] {
            let tokens = prompt(first, 2, 2);
            let table = cache.admit(&tokens, 1).unwrap();
            cache.retire(&tokens, table);
        }
        let held = cache.admit(&prompt(10, 2, 2), 1).unwrap();
        assert_eq!(held.cached(), 2 * PAGE_TOKENS);
        assert!(cache.admit(&prompt(30, 3, 2), 1).is_none(), "4 wanted, 3 to be had");
        let table = cache.admit(&prompt(30, 2, 2), 1).unwrap();
        assert_eq!((cache.held(), cache.spare()), (6, 0));
        drop((held, table));
        assert_eq!(cache.admit(&prompt(20, 2, 2), 1).unwrap().cached(), 0, "the older one was evicted");
    }

    #[test]
    fn too_few_pages_admit_nothing_and_leak_nothing() {
        let mut cache = KvCache::new(4, 1, true);
        assert!(cache.admit(&prompt(1, 5, 0), 0).is_none());
        let only = cache.admit(&prompt(1, 1, 0), 1).unwrap();
        assert!(cache.admit(&prompt(2, 1, 0), 1).is_none(), "no window page is left");
        drop(only);
        assert_eq!((cache.spare(), cache.held()), (4, 0));
    }

    #[test]
    fn random_traffic_keeps_every_promise() {
        let mut rng = Seed(7).rng();
        let mut cache = KvCache::new(24, 6, true);
        let mut running: Vec<(Vec<Token>, Table)> = Vec::new();
        let (mut shared, mut refused, mut admitted) = (0, 0, 0);
        for _ in 0..3000 {
            if running.len() == 6 || (!running.is_empty() && rng.random_ratio(1, 3)) {
                let (tokens, table) = running.swap_remove(rng.random_range(0..running.len()));
                if rng.random_ratio(1, 4) { drop(table) } else { cache.retire(&tokens, table) }
            } else {
                let tokens = prompt(rng.random_range(0..4) * 50, rng.random_range(0..6), rng.random_range(2..200));
                let answer = rng.random_range(1..400);
                let fits = cache.cost(&tokens, answer) <= cache.spare();
                let table = cache.admit(&tokens, answer);
                assert!(table.is_some() || !fits, "what fits is admitted");
                refused += u32::from(table.is_none());
                if let Some(table) = table {
                    admitted += 1;
                    shared += u32::from(table.cached() > 0);
                    assert!(table.pages().iter().all(|page| *page != PADDING_PAGE));
                    running.push((tokens, table));
                }
            }
            let own: Vec<_> =
                running.iter().flat_map(|(_, t)| &t.pages()[(t.cached() / PAGE_TOKENS) as usize..]).collect();
            let mut distinct = own.clone();
            distinct.sort_unstable();
            distinct.dedup();
            assert_eq!(distinct.len(), own.len(), "a page of one's own is nobody else's");
        }
        running.clear();
        assert_eq!(cache.held(), 0, "all pages came back");
        assert!(
            shared > 100 && refused > 100 && admitted > 500,
            "{shared} shared, {refused} refused, {admitted} admitted"
        );
    }
}
