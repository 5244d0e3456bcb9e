//! Sizes of the built-in model and of what the engine keeps for it.

use std::ops::RangeInclusive;

use crate::device::kernel::{
    CORE_RING_PAGE, ENTRY_PAGE, INDEX_RING_PAGE, KeyFormat, PAGE_ENTRIES, PAGE_TOKENS, RATIO, SWA_PAGE,
};

/// Whether each layer has compressed entries and an indexer.
pub const COMPRESSED: [bool; 5] = [false, true, true, true, true];
/// Number of layers.
pub const LAYERS: usize = COMPRESSED.len();
/// Contexts that the constructed weights are exact for.
pub const CONTEXTS: RangeInclusive<u32> = PAGE_TOKENS as u32..=32_768;
/// Batches that may be asked for.
pub const BATCHES: RangeInclusive<u32> = 1..=512;
/// Numbers of index entries that may be selected: the workspace and the index rows are sized for the largest.
pub const TOPKS: RangeInclusive<u32> = 1..=512;

/// Sizes that a run chooses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Geometry {
    /// Most tokens a sequence may have.
    pub max_context: u32,
    /// Batch sizes that are captured, ascending; the last is the largest batch.
    pub buckets: Vec<u32>,
    /// Index entries selected a row.
    pub top_k: u32,
    /// Pages of compressed entries and index keys, page 0 included.
    pub pages: u32,
    /// How index keys are stored.
    pub keys: KeyFormat,
}

impl Geometry {
    /// Words of a row of the page table.
    pub fn table_words(&self) -> u64 {
        u64::from(self.max_context).div_ceil(PAGE_TOKENS)
    }

    /// Compressed entries of the longest sequence, and so the charged width of a row of logits.
    pub fn max_entries(&self) -> u64 {
        self.table_words() * PAGE_ENTRIES
    }

    /// The largest batch.
    pub fn max_batch(&self) -> u32 {
        self.buckets.last().copied().unwrap_or(1)
    }

    /// Pages of window entries and compressor rings: one a sequence, and page 0 for padded rows.
    pub fn ring_pages(&self) -> u64 {
        u64::from(self.max_batch()) + 1
    }

    /// The smallest bucket that holds `rows`.
    pub fn bucket(&self, rows: u32) -> Option<u32> {
        self.buckets.iter().copied().find(|bucket| *bucket >= rows)
    }

    /// Bytes of all persistent caches.
    pub fn cache_bytes(&self) -> u64 {
        let compressed = COMPRESSED.iter().filter(|has| **has).count() as u64;
        let rings = LAYERS as u64 * SWA_PAGE + compressed * (INDEX_RING_PAGE + CORE_RING_PAGE);
        self.ring_pages() * rings + u64::from(self.pages) * compressed * (ENTRY_PAGE + self.keys.page_bytes())
    }
}

/// Which batch sizes are captured.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Buckets {
    /// 1, 2, 4, 8, 12, 16, then every eighth.
    Fine,
    /// Powers of two.
    Coarse,
    /// These.
    List(Vec<u32>),
}

impl Buckets {
    /// The sizes up to `max_batch`, which is always one of them; ascending.
    pub fn sizes(&self, max_batch: u32) -> Vec<u32> {
        let mut sizes: Vec<u32> = match self {
            Self::Fine => [1, 2, 4, 8, 12, 16].into_iter().chain((24..=max_batch).step_by(8)).collect(),
            Self::Coarse => (0..32).map(|bit| 1 << bit).collect(),
            Self::List(sizes) => sizes.clone(),
        };
        sizes.retain(|size| *size < max_batch);
        sizes.push(max_batch);
        sizes.sort_unstable();
        sizes.dedup();
        sizes
    }
}

const _: () = assert!(PAGE_TOKENS == PAGE_ENTRIES * RATIO);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_end_at_the_largest_batch() {
        assert_eq!(Buckets::Fine.sizes(40), [1, 2, 4, 8, 12, 16, 24, 32, 40]);
        assert_eq!(Buckets::Fine.sizes(1), [1]);
        assert_eq!(Buckets::Fine.sizes(10), [1, 2, 4, 8, 10]);
        assert_eq!(Buckets::Coarse.sizes(48), [1, 2, 4, 8, 16, 32, 48]);
        assert_eq!(Buckets::List(vec![5, 3, 90]).sizes(64), [3, 5, 64]);
    }
}
