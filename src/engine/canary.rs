//! The index-key canary: live pages are checksummed key by key, and a change that no store explains is a hit.

use std::collections::{BTreeMap, btree_map::Entry};

use serde::Serialize;

use super::{
    batch::Batch,
    forward::{Network, pages},
};
use crate::{
    device::{
        Op, Tensor,
        kernel::{CHECKSUMS_ROW, Kernel, PAGE_ENTRIES, RATIO},
    },
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
#[derive(Clone)]
pub struct Canary {
    /// Pages checked.
    pub checks: u64,
    /// Keys that changed unexplained.
    pub hits: u64,
    /// The first of them.
    pub first: Option<CanaryHit>,
    known: BTreeMap<(u8, u32), Box<Sums>>,
    /// Numbers of the pages to check, and their checksums, a row a page.
    pages: Tensor,
    sums: Tensor,
}

impl Canary {
    /// A canary that knows nothing yet. Its buffers are allocated last, so that they move nothing else.
    pub(super) fn new(network: &Network) -> Result<Self> {
        let (device, main) = (&network.device, network.streams.main);
        let most = u64::from(network.geometry.pages);
        Ok(Self {
            checks: 0,
            hits: 0,
            first: None,
            known: BTreeMap::new(),
            pages: device.alloc(main, most * 4, "canary_pages")?,
            sums: device.alloc(main, most * CHECKSUMS_ROW, "canary_sums")?,
        })
    }

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
        if live.is_empty() {
            return Ok(());
        }
        let numbers: Vec<u32> = live.keys().copied().collect();
        let rows = numbers.len() as u64;
        network.device.copy_in(self.pages.address(), bytemuck::cast_slice(&numbers))?;
        let mut sums = vec![[0; PAGE_ENTRIES as usize]; numbers.len()];
        for (cache, layer) in network.caches.iter().zip(0u8..) {
            let Some(cache) = &cache.compressed else { continue };
            let format = network.geometry.keys;
            let op = Op {
                kernel: Kernel::Checksum { format },
                reads: vec![
                    pages(&cache.index_keys, format.page_bytes()),
                    self.pages.operand(self.pages.region(4, 4, rows, 0)),
                ],
                writes: vec![self.sums.operand(self.sums.region(CHECKSUMS_ROW, CHECKSUMS_ROW, rows, 0))],
                layer: Some(layer),
            };
            network.device.probe(network.streams.main, &op)?;
            network.device.copy_out(self.sums.address(), bytemuck::cast_slice_mut(&mut sums))?;
            for ((&page, &explained), sums) in live.iter().zip(&sums) {
                self.compare((layer, page), sums, explained, step);
            }
        }
        Ok(())
    }

    fn compare(&mut self, (layer, page): (u8, u32), sums: &Sums, explained: Option<u64>, step: u64) {
        self.checks += 1;
        let known = match self.known.entry((layer, page)) {
            Entry::Vacant(place) => {
                place.insert(Box::new(*sums));
                return;
            }
            Entry::Occupied(known) => known.into_mut(),
        };
        if **known == *sums {
            return;
        }
        let changed = (0..PAGE_ENTRIES).filter(|slot| Some(*slot) != explained);
        for slot in changed.filter(|slot| known[*slot as usize] != sums[*slot as usize]) {
            self.hits += 1;
            self.first.get_or_insert(CanaryHit { step, layer, page, slot: slot as u32 });
        }
        **known = *sums;
    }
}
