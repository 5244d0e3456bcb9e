//! The exact byte ranges that one block touches.

use std::ops::Range;

use super::{
    super::{Memory, Touch},
    attention::{index_words, window_ranges},
    cache::{entry_page, entry_place, entry_range, key_ranges, ring_slot, window_slot},
    grid::completed,
    index::{page_keys, table_words, tile},
    matmul::slice,
    prefill::{Target, targets},
    topk::{entry_of, logits_read},
};
use crate::device::{
    Block, Op, Region,
    kernel::{ENTRY, Kernel, KeyFormat, PAGE_ENTRIES, RATIO, RING, Reader},
};

/// Collects one block's ranges.
struct Accesses<'a> {
    op: &'a Op,
    row: u64,
    memory: &'a Memory,
    visit: &'a mut dyn FnMut(Touch, Range<u64>),
}

pub(super) fn visit(op: &Op, block: &Block, memory: &Memory, visit: &mut dyn FnMut(Touch, Range<u64>)) {
    let mut accesses = Accesses { op, row: u64::from(block.index), memory, visit };
    match op.kernel {
        Kernel::Copy
        | Kernel::Embed { .. }
        | Kernel::RmsNorm { .. }
        | Kernel::Quantise
        | Kernel::QueryRope
        | Kernel::IndexRope { .. }
        | Kernel::Head { .. } => accesses.rows(),
        Kernel::Matmul { .. } | Kernel::QueryMatmul { .. } => accesses.columns(block),
        Kernel::OutputProject { .. } => accesses.output(block),
        Kernel::IndexCompress { .. } | Kernel::CoreCompress { .. } => accesses.compress(block),
        Kernel::KvStore => accesses.kv_store(),
        Kernel::IndexStore { format } => accesses.entry_store(Some(format)),
        Kernel::CoreStore => accesses.entry_store(None),
        Kernel::Logits { format, reader } => accesses.logits(block, format, reader),
        Kernel::TopkSelect { .. } => accesses.select(),
        Kernel::TopkFinalise { .. } => accesses.finalise(),
        Kernel::Attention { k, .. } => accesses.attention(k as usize),
        Kernel::Checksum { .. } => accesses.checksum(),
        Kernel::Prefill { .. } => accesses.prefill(block),
    }
}

impl Accesses<'_> {
    fn read(&mut self, at: usize) -> Region {
        self.op.reads[at].region
    }

    fn touch(&mut self, touch: Touch, range: Range<u64>) {
        if !range.is_empty() {
            (self.visit)(touch, range);
        }
    }

    fn touch_row(&mut self, touch: Touch, region: Region) {
        self.touch(touch, region.row(self.row));
    }

    fn all_rows(&mut self, region: Region) {
        for row in 0..region.rows {
            self.touch(Touch::Read, region.row(row));
        }
    }

    /// Visits the word at `range` as an index and returns it.
    fn index(&mut self, range: Range<u64>) -> i32 {
        self.touch(Touch::Index, range.clone());
        self.memory.slice::<i32>(range)[0]
    }

    fn index_row(&mut self, at: usize) -> i32 {
        let word = self.read(at).row(self.row);
        self.index(word)
    }

    fn rows(&mut self) {
        let op = self.op;
        for operand in &op.reads {
            self.touch_row(Touch::Read, operand.region);
        }
        for operand in &op.writes {
            self.touch_row(Touch::Write, operand.region);
        }
    }

    fn columns(&mut self, block: &Block) {
        let op = self.op;
        for operand in &op.reads {
            self.all_rows(operand.region);
        }
        let output = op.writes[0].region;
        self.slice(Touch::Write, output, &slice(op, [block, block], output.row_stride, output.len));
    }

    fn slice(&mut self, touch: Touch, region: Region, slice: &Range<u64>) {
        for row in 0..region.rows {
            let start = region.row(row).start;
            self.touch(touch, start + slice.start..start + slice.end);
        }
    }

    fn output(&mut self, block: &Block) {
        let output = self.op.writes[0].region;
        let slice = slice(self.op, [block, block], output.row_stride, output.len);
        for at in [0, 1] {
            let region = self.read(at);
            self.all_rows(region);
        }
        let residual = self.read(2);
        self.slice(Touch::Read, residual, &slice);
        self.slice(Touch::Write, output, &slice);
    }

    fn compress(&mut self, block: &Block) {
        let [hidden, positions, pages] = [0, 1, 2].map(|at| self.read(at));
        let ring = self.op.writes[0].region;
        let width = ring.row_stride / RING;
        let slice = slice(self.op, [block, block], width, width);
        for row in 0..hidden.rows {
            self.index(positions.row(row));
            self.index(pages.row(row));
        }
        self.all_rows(hidden);
        let memory = self.memory;
        let word = |region: Region, row| memory.slice::<i32>(region.row(row))[0];
        for row in 0..hidden.rows {
            if let Some(slot) = ring_slot(ring, word(pages, row), i64::from(word(positions, row))) {
                self.touch(Touch::Write, slot.start + slice.start..slot.start + slice.end);
            }
        }
    }

    fn kv_store(&mut self) {
        let (position, page) = (self.index_row(1), self.index_row(2));
        let latent = self.read(0);
        self.touch_row(Touch::Read, latent);
        let slot = window_slot(self.op.writes[0].region, page, i64::from(position));
        if let Some(slot) = slot {
            self.touch(Touch::Write, slot);
        }
    }

    fn entry_store(&mut self, format: Option<KeyFormat>) {
        let (position, ring_page) = (self.index_row(1), self.index_row(2));
        let (word, slot) = entry_place(position);
        let table = self.read(3).row(self.row);
        if let Some(word) = word {
            let at = table.start + word * 4;
            if at + 4 <= table.end {
                self.touch(Touch::Index, at..at + 4);
            }
        }
        let Some(page) = entry_page(word, table, |range| self.memory.slice::<i32>(range)[0]) else { return };
        let (ring, cache) = (self.read(0), self.op.writes[0].region);
        for back in (0..RATIO as i64).rev() {
            let slot = ring_slot(ring, ring_page, i64::from(position) - back);
            if let Some(slot) = slot {
                self.touch(Touch::Read, slot);
            }
        }
        let ranges = match format {
            Some(format) => key_ranges(cache, format, page, slot),
            None => entry_range(cache, page, slot).map(|range| (range.clone(), range.end..range.end)),
        };
        if let Some((key, scale)) = ranges {
            self.touch(Touch::Write, key);
            self.touch(Touch::Write, scale);
        }
    }

    fn logits(&mut self, block: &Block, format: KeyFormat, reader: Reader) {
        let entries = completed(self.index_row(4));
        let (table, target) = (self.read(3).row(self.row), self.op.writes[0].region);
        let visited = tile(block.part, entries, target.len / 4, reader);
        let words = table_words(table, &visited, entries);
        self.touch(Touch::Index, words.clone());
        let [query, weights, cache] = [0, 1, 2].map(|at| self.read(at));
        self.touch_row(Touch::Read, query);
        self.touch_row(Touch::Read, weights);
        let memory = self.memory;
        for (&page, first) in memory.slice::<i32>(words).iter().zip((visited.start..).step_by(PAGE_ENTRIES as usize)) {
            let count = (entries.min(visited.end) - first).min(PAGE_ENTRIES);
            let Some(start) = super::cache::page_start(cache, page) else { continue };
            let (keys, scales) = page_keys(start, format, count);
            self.touch(Touch::Read, keys);
            self.touch(Touch::Read, scales);
        }
        let start = target.row(self.row).start;
        self.touch(Touch::Write, start + visited.start * 4..start + visited.end * 4);
    }

    fn select(&mut self) {
        let position = self.index_row(1);
        let logits = self.read(0);
        self.touch(Touch::Read, logits_read(logits, position, self.row));
        self.touch_row(Touch::Write, self.op.writes[0].region);
    }

    fn finalise(&mut self) {
        self.index_row(2);
        for at in [0, 1] {
            let region = self.read(at);
            self.touch_row(Touch::Read, region);
        }
        self.touch_row(Touch::Write, self.op.writes[0].region);
    }

    fn attention(&mut self, k: usize) {
        let (position, page) = (self.index_row(2), self.index_row(3));
        let entries = (k > 0).then(|| (self.read(4), index_words(self.read(5), self.row, k)));
        if let Some((_, words)) = &entries {
            self.touch(Touch::Index, words.clone());
        }
        let (query, window) = (self.read(0), self.read(1));
        self.touch_row(Touch::Read, query);
        for range in window_ranges(window, page, position) {
            self.touch(Touch::Read, range);
        }
        if let Some((cache, words)) = entries {
            let memory = self.memory;
            for range in memory.slice::<i32>(words).iter().filter_map(|&index| entry_of(cache, index, ENTRY)) {
                self.touch(Touch::Read, range);
            }
        }
        self.touch_row(Touch::Write, self.op.writes[0].region);
    }

    fn checksum(&mut self) {
        let page = self.index_row(1);
        let cache = self.read(0);
        let Some(start) = super::cache::page_start(cache, page) else { return };
        self.touch(Touch::Read, start..start + cache.len);
        self.touch_row(Touch::Write, self.op.writes[0].region);
    }

    fn prefill(&mut self, block: &Block) {
        let (op, memory) = (self.op, self.memory);
        if let Some(table) = op.reads.get(1) {
            self.touch(Touch::Index, table.region.row(0));
        }
        self.touch(Touch::Read, op.reads[0].region.row(0));
        let word = |range| memory.slice::<i32>(range)[0];
        targets(op, block, word, |target| match target {
            Target::Window(_, at) | Target::IndexRing(_, at) | Target::CoreRing(_, at) | Target::Entry(_, at) => {
                self.touch(Touch::Write, at);
            }
            Target::Key(_, key, scale) => {
                self.touch(Touch::Write, key);
                self.touch(Touch::Write, scale);
            }
        });
    }
}
