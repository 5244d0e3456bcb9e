//! Prefill: what decoding a chunk token by token would leave in a layer's caches.

use std::ops::Range;

use super::{
    super::{View, Writes},
    cache::{KEY_CODES, entry_page, entry_place, entry_range, key_ranges, put_entry, put_key, ring_slot, window_slot},
};
use crate::device::{
    Block, Op, SparseWeight,
    kernel::{
        CODE, ENTRY_DIGITS_AT, GATHER, GATHER_DIMS, INDEX_CODE, KEY_AT, Kernel, PAGE_TOKENS, PREFILL_TILE, RATIO, RING,
        SPAN, VALUE_AT,
    },
};

const VOCABULARY: usize = 256;

/// Where a chunk's block writes.
pub(super) enum Target {
    /// The window slot of the token at this position.
    Window(i64, Range<u64>),
    /// The index compressor's ring slot.
    IndexRing(i64, Range<u64>),
    /// The core compressor's ring slot.
    CoreRing(i64, Range<u64>),
    /// The index key that the token at this position completes, and its scale.
    Key(i64, Range<u64>, Range<u64>),
    /// The compressed entry that it completes.
    Entry(i64, Range<u64>),
}

/// Calls `visit` with everything that one block writes.
pub(super) fn targets(op: &Op, block: &Block, word: impl Fn(Range<u64>) -> i32, mut visit: impl FnMut(Target)) {
    let Kernel::Prefill { start, window_from, entries_from, ring_page, format, .. } = op.kernel else { return };
    let (start, page) = (i64::from(start), ring_page as i32);
    let end = start + op.reads[0].region.len as i64 / 4;
    let first = start + i64::from(block.index) * PREFILL_TILE as i64;
    for position in first..(first + PREFILL_TILE as i64).min(end) {
        let window = window_slot(op.writes[0].region, page, position).filter(|_| position + PAGE_TOKENS as i64 >= end);
        if let Some(at) = window.filter(|_| position >= i64::from(window_from)) {
            visit(Target::Window(position, at));
        }
        let Some(format) = format else { continue };
        if position >= i64::from(window_from) && position + RING as i64 >= end {
            let slot = |at: usize| ring_slot(op.writes[at].region, page, position);
            if let (Some(index), Some(core)) = (slot(1), slot(3)) {
                visit(Target::IndexRing(position, index));
                visit(Target::CoreRing(position, core));
            }
        }
        if position < i64::from(entries_from) || (position + 1) % RATIO as i64 != 0 {
            continue;
        }
        let (table_word, slot) = entry_place(position as i32);
        let Some(page) = entry_page(table_word, op.reads[1].region.row(0), &word) else { continue };
        if let Some((key, scale)) = key_ranges(op.writes[2].region, format, page, slot) {
            visit(Target::Key(position, key, scale));
        }
        if let Some(at) = entry_range(op.writes[4].region, page, slot) {
            visit(Target::Entry(position, at));
        }
    }
}

/// Value and key codes of every token, from the embedding.
pub(super) struct Codes {
    value: Vec<[f32; CODE as usize]>,
    key: Vec<[f32; CODE as usize]>,
}

impl Codes {
    pub(super) fn new(table: &SparseWeight) -> Self {
        let dims = |token: usize, at: u64| {
            let (columns, values) = table.row(token as u32);
            let first = columns.partition_point(|column| u64::from(*column) < at);
            let mut code = [0.0; CODE as usize];
            for (&column, &value) in columns[first..].iter().zip(&values[first..]) {
                let Some(out) = code.get_mut((u64::from(column) - at) as usize) else { break };
                *out = value;
            }
            code
        };
        Self {
            value: (0..VOCABULARY).map(|token| dims(token, VALUE_AT)).collect(),
            key: (0..VOCABULARY).map(|token| dims(token, KEY_AT)).collect(),
        }
    }
}

/// The chunk's tokens and their codes.
struct Chunk<'a> {
    codes: &'a Codes,
    tokens: &'a [u32],
    start: i64,
}

impl Chunk<'_> {
    fn token(&self, position: i64) -> Option<usize> {
        let at = usize::try_from(position - self.start).ok()?;
        self.tokens.get(at).map(|token| (*token as usize).min(VOCABULARY - 1))
    }

    /// Key codes, cut to `width` dims each, of the tokens that end at `position`, newest first.
    fn window(&self, position: i64, width: usize, out: &mut [f32]) {
        for (out, back) in out.chunks_exact_mut(width).zip(0..) {
            match self.token(position - back) {
                Some(token) => out.copy_from_slice(&self.codes.key[token][..width]),
                None => out.fill(0.0),
            }
        }
    }

    fn value(&self, position: i64, out: &mut [f32]) {
        match self.token(position) {
            Some(token) => out.copy_from_slice(&self.codes.value[token]),
            None => out.fill(0.0),
        }
    }
}

pub(super) fn prefill(op: &Op, blocks: &[Block], view: &View<'_>, out: &mut Writes<'_>, codes: &Codes) {
    let Kernel::Prefill { start, format, .. } = op.kernel else { return };
    let chunk = Chunk { codes, tokens: view.slice(op.reads[0].region.row(0)), start: i64::from(start) };
    for block in blocks {
        targets(op, block, |range| view.slice::<i32>(range)[0], |target| write(&chunk, target, format, out));
    }
}

fn write(chunk: &Chunk<'_>, target: Target, format: Option<crate::device::kernel::KeyFormat>, out: &mut Writes<'_>) {
    let (code, index_code) = (CODE as usize, INDEX_CODE as usize);
    match target {
        Target::Window(position, at) => {
            let mut dims = [0.0; CODE as usize];
            chunk.window(position, code, &mut dims);
            let slot = out.slice::<u16>(at);
            slot.fill(0);
            for (out, value) in slot.iter_mut().zip(dims) {
                *out = super::numeric::Element::put(value);
            }
        }
        Target::IndexRing(position, at) => {
            let (window, rest) = out.slice::<f32>(at).split_at_mut((GATHER * INDEX_CODE) as usize);
            chunk.window(position, index_code, window);
            rest.fill(0.0);
        }
        Target::CoreRing(position, at) => {
            let (window, rest) = out.slice::<f32>(at).split_at_mut(GATHER_DIMS as usize);
            chunk.window(position, code, window);
            rest.fill(0.0);
            chunk.value(position, &mut rest[..code]);
        }
        Target::Key(position, key, scale) => {
            let mut codes = [0.0; KEY_CODES];
            chunk.window(position - 1, index_code, &mut codes);
            if let Some(format) = format {
                put_key(&codes, format, (key, scale), out);
            }
        }
        Target::Entry(position, at) => {
            let mut codes = [0.0; (SPAN * CODE) as usize];
            chunk.window(position - 1, code, &mut codes);
            let mut values = [0.0; ENTRY_DIGITS_AT as usize];
            for (value, back) in values.chunks_exact_mut(code).zip((0..RATIO as i64).rev()) {
                chunk.value(position - back, value);
            }
            put_entry(&codes, &values, position as u64 / RATIO, at, out);
        }
    }
}
