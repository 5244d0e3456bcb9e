//! The index-key canary: live pages are checksummed key by key, and a change that no store explains is a hit.

use std::collections::BTreeMap;

use serde::Serialize;

use super::{batch::Batch, forward::Network};
use crate::{
    device::kernel::{KeyFormat, PAGE_ENTRIES, RATIO},
    error::Result,
};

/// A key that changed although nothing stored it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct CanaryHit {
    /// Decode step, from 0, before or in which it changed.
    pub step: u64,
    /// Layer.
    pub layer: u8,
    /// Page.
    pub page: u32,
    /// Slot in the page.
    pub slot: u32,
}

type Sums = [u64; PAGE_ENTRIES as usize];

/// What the canary knows and found so far.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Canary {
    /// Pages checked.
    pub checks: u64,
    /// Keys that changed unexplained.
    pub hits: u64,
    /// The first of them.
    pub first: Option<CanaryHit>,
    #[serde(skip)]
    known: BTreeMap<(u8, u32), Box<Sums>>,
    #[serde(skip)]
    bytes: Vec<u8>,
}

impl Canary {
    /// Forgets pages: prefill is about to write them.
    pub(super) fn forget(&mut self, pages: &[u32]) {
        self.known.retain(|(_, page), _| !pages.contains(page));
    }

    /// Checks the pages of a batch. With `after`, the keys that its rows just completed are explained.
    pub(super) fn check(&mut self, network: &Network, batch: &Batch, after: bool, step: u64) -> Result<()> {
        let words = network.geometry.table_words() as usize;
        let mut live = BTreeMap::new();
        for row in 0..batch.rows {
            let entries = batch.entries(row);
            let table = &batch.page_table[row * words..][..words];
            let completes = after && (batch.positions[row] as u64 + 1).is_multiple_of(RATIO);
            let stored = entries.checked_sub(1).filter(|_| completes);
            for (&page, number) in table.iter().zip(0..entries.div_ceil(PAGE_ENTRIES)) {
                let stored = stored.filter(|entry| entry / PAGE_ENTRIES == number).map(|entry| entry % PAGE_ENTRIES);
                let explained: &mut Option<u64> = live.entry(page as u32).or_default();
                *explained = explained.or(stored);
            }
        }
        for (cache, layer) in network.caches.iter().zip(0u8..) {
            let Some(cache) = &cache.compressed else { continue };
            for (&page, &explained) in &live {
                let bytes = network.geometry.keys.page_bytes();
                self.bytes.resize(bytes as usize, 0);
                network.device.copy_out(cache.index_keys.address() + u64::from(page) * bytes, &mut self.bytes)?;
                self.compare(network.geometry.keys, (layer, page), explained, step);
            }
        }
        Ok(())
    }

    fn compare(&mut self, format: KeyFormat, (layer, page): (u8, u32), explained: Option<u64>, step: u64) {
        self.checks += 1;
        let sums = Box::new(checksums(&self.bytes, format));
        if let Some(known) = self.known.get(&(layer, page)) {
            let changed = (0..PAGE_ENTRIES).filter(|slot| Some(*slot) != explained);
            for slot in changed.filter(|slot| known[*slot as usize] != sums[*slot as usize]) {
                self.hits += 1;
                self.first.get_or_insert(CanaryHit { step, layer, page, slot: slot as u32 });
            }
        }
        self.known.insert((layer, page), sums);
    }
}

/// A checksum of each key of a page, its scale included.
fn checksums(page: &[u8], format: KeyFormat) -> Sums {
    let (keys, scales) = page.split_at((PAGE_ENTRIES * format.key_bytes()) as usize);
    let mut sums = [0; PAGE_ENTRIES as usize];
    for (slot, (sum, key)) in sums.iter_mut().zip(keys.chunks_exact(format.key_bytes() as usize)).enumerate() {
        let scale = scales.get(slot * 4..slot * 4 + 4).unwrap_or_default();
        let mix = |sum: u64, word: u64| (sum ^ word).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(29);
        let words = key.chunks_exact(8).map(bytemuck::pod_read_unaligned::<u64>);
        *sum = scale.iter().map(|byte| u64::from(*byte)).chain(words).fold(1, mix);
    }
    sums
}
