//! Sparse attention: the window's codes gathered, and selected entries under a softmax that each order's heads share.

use std::ops::Range;

use super::{
    super::{View, Writes},
    cache::window_slot,
    index::dot,
    numeric::{Element, e4m3, vectorised},
    topk::entry_of,
};
use crate::device::{
    Block, Op, Region,
    kernel::{
        CODE, ENTRY, ENTRY_DIGITS_AT, ENTRY_KEY, GATHER, GATHER_DIMS, HEAD_DIM, MATCH_HEADS, PAGE_TOKENS, RATIO, SPAN,
        SWA_DIM,
    },
};

const CODES: usize = (SPAN * CODE) as usize;
/// Codes, two digits, two ones.
const COMPARED: usize = CODES + 4;
const PADDED: usize = 256;
const HEADS: usize = MATCH_HEADS as usize;
const ORDERS: usize = HEADS / RATIO as usize;
/// Below this a weight is zero in `f32`; such entries are left out.
const NEGLIGIBLE: f32 = -104.0;

/// Byte ranges of the window slots that a row gathers from, in ascending order of position.
pub(super) fn window_ranges(cache: Region, page: i32, position: i32) -> [Range<u64>; 2] {
    let first = (i64::from(position) - (GATHER as i64 - 1)).max(0);
    let (Some(first), Some(last)) =
        (window_slot(cache, page, first), window_slot(cache, page, i64::from(position).max(0)))
    else {
        return [0..0, 0..0];
    };
    if first.start <= last.start {
        return [first.start..last.end, last.end..last.end];
    }
    let page = last.start - (position as u64 % PAGE_TOKENS) * SWA_DIM * 2;
    [first.start..page + PAGE_TOKENS * SWA_DIM * 2, page..last.end]
}

/// Words of a row's indices that attention reads.
pub(super) fn index_words(indices: Region, row: u64, k: usize) -> Range<u64> {
    let start = indices.row(row).start;
    start..start + (k as u64 * 4).min(indices.len)
}

pub(super) fn attention(
    op: &Op,
    blocks: &[Block],
    view: &View<'_>,
    out: &mut Writes<'_>,
    (scale, k): (f32, usize),
    pack: bool,
) {
    let [query, window, positions, pages] = [0, 1, 2, 3].map(|at| op.reads[at].region);
    for block in blocks {
        let row = u64::from(block.index);
        let position = view.slice::<i32>(positions.row(row))[0];
        let page = view.slice::<i32>(pages.row(row))[0];
        let mut output = [0.0f32; 512];
        gather(window_ranges(window, page, position), view, &mut output[..GATHER_DIMS as usize]);
        if k > 0 {
            let query = Query::new(view.slice(query.row(row)), pack);
            let [entries, indices] = [4, 5].map(|at| op.reads[at].region);
            let chosen = view.slice::<i32>(index_words(indices, row, k));
            let ranges = chosen.iter().filter_map(|&index| entry_of(entries, index, ENTRY));
            let copied = &mut output[GATHER_DIMS as usize..][..ORDERS * CODE as usize];
            let chosen: Vec<&[u8]> = ranges.map(|range| view.bytes(range)).collect();
            vectorised(|| attend(&query, &chosen, scale, copied));
        }
        for (out, value) in out.slice::<u16>(op.writes[0].region.row(row)).iter_mut().zip(output) {
            *out = u16::put(value);
        }
    }
}

fn gather(ranges: [Range<u64>; 2], view: &View<'_>, out: &mut [f32]) {
    let mut codes = out.chunks_exact_mut(CODE as usize);
    for range in ranges.into_iter().rev().filter(|range| !range.is_empty()) {
        for (slot, out) in view.slice::<u16>(range).chunks_exact(SWA_DIM as usize).rev().zip(&mut codes) {
            for (out, &value) in out.iter_mut().zip(slot) {
                *out = value.get();
            }
        }
    }
}

/// 248 ternary codes.
#[derive(Clone, Copy, Default)]
struct Ternary {
    negative: [u64; 4],
    nonzero: [u64; 4],
}

/// A row's match heads.
struct Query {
    dims: [[f32; PADDED]; HEADS],
    packed: Option<[Ternary; HEADS]>,
}

impl Query {
    fn new(row: &[u16], pack: bool) -> Self {
        let mut dims = [[0.0; PADDED]; HEADS];
        for (dims, head) in dims.iter_mut().zip(row.chunks_exact(HEAD_DIM as usize)) {
            for (dim, &value) in dims.iter_mut().zip(&head[..COMPARED]) {
                *dim = value.get();
            }
        }
        let packed = if pack { Self::pack(&dims) } else { None };
        Self { dims, packed }
    }

    fn pack(dims: &[[f32; PADDED]; HEADS]) -> Option<[Ternary; HEADS]> {
        let mut packed = [Ternary::default(); HEADS];
        for (packed, dims) in packed.iter_mut().zip(dims) {
            for (at, &code) in dims[..CODES].iter().enumerate() {
                if code.abs() == 1.0 {
                    packed.nonzero[at / 64] |= 1 << (at % 64);
                    packed.negative[at / 64] |= u64::from(code < 0.0) << (at % 64);
                } else if code != 0.0 {
                    return None;
                }
            }
            // Sums of such terms below 512 are exact in any order.
            if dims[CODES..COMPARED].iter().any(|value| (value * 32_768.0).fract() != 0.0 || value.abs() > 256.0) {
                return None;
            }
        }
        Some(packed)
    }

    /// Unscaled scores of one entry for all heads.
    #[inline(always)]
    fn scores(&self, entry: &Entry<'_>) -> [f32; HEADS] {
        if let (Some(packed), Some(key)) = (&self.packed, entry.pack())
            && let Some(scores) = self.packed_scores(packed, &key, entry.digits())
        {
            return scores;
        }
        let mut dims = [0.0; PADDED];
        for (dim, &code) in dims.iter_mut().zip(&entry.key[..CODES]) {
            *dim = e4m3::decode(code);
        }
        dims[CODES..COMPARED].copy_from_slice(&entry.digits());
        std::array::from_fn(|head| dot(&self.dims[head], &dims))
    }

    #[inline(always)]
    fn packed_scores(&self, packed: &[Ternary; HEADS], key: &Ternary, digits: [f32; 4]) -> Option<[f32; HEADS]> {
        let mut scores = [0.0; HEADS];
        for ((score, query), dims) in scores.iter_mut().zip(packed).zip(&self.dims) {
            let (mut both, mut wrong) = (0, 0);
            for word in 0..4 {
                let compared = query.nonzero[word] & key.nonzero[word];
                both += compared.count_ones();
                wrong += ((query.negative[word] ^ key.negative[word]) & compared).count_ones();
            }
            let terms: [f32; 4] = std::array::from_fn(|at| dims[CODES + at] * digits[at]);
            let size = CODES as f32 + terms.iter().map(|term| term.abs()).sum::<f32>();
            let whole = digits.iter().all(|digit| digit.fract() == 0.0);
            if !(whole && size < 512.0) {
                return None;
            }
            *score = both as f32 - 2.0 * wrong as f32 + terms.iter().sum::<f32>();
        }
        Some(scores)
    }
}

/// One compressed entry as bytes.
struct Entry<'a> {
    key: &'a [u8],
    rest: &'a [u16],
}

impl<'a> Entry<'a> {
    fn new(bytes: &'a [u8]) -> Self {
        let (key, rest) = bytes.split_at(ENTRY_KEY as usize);
        Self { key, rest: bytemuck::cast_slice(rest) }
    }

    fn digits(&self) -> [f32; 4] {
        std::array::from_fn(|at| self.rest[ENTRY_DIGITS_AT as usize + at].get())
    }

    fn value(&self, alignment: usize) -> [f32; CODE as usize] {
        std::array::from_fn(|bit| self.rest[alignment * CODE as usize + bit].get())
    }

    /// The key's codes as bits, eight a step, unless some byte is neither ±1 nor 0.
    #[inline(always)]
    fn pack(&self) -> Option<Ternary> {
        const LOW: u64 = 0x0101_0101_0101_0101;
        const ONE: u64 = 0x38;
        let mut packed = Ternary::default();
        for (at, bytes) in self.key[..CODES].chunks_exact(8).enumerate() {
            let word = u64::from_le_bytes(bytes.try_into().unwrap_or_default());
            let (signs, nonzero) = (word >> 7 & LOW, word >> 3 & LOW);
            if (nonzero * ONE) | (signs << 7) != word || signs & !nonzero != 0 {
                return None;
            }
            let bits = |flags: u64| flags.wrapping_mul(0x0102_0408_1020_4080) >> 56;
            packed.nonzero[at / 8] |= bits(nonzero) << (at % 8 * 8);
            packed.negative[at / 8] |= bits(signs) << (at % 8 * 8);
        }
        Some(packed)
    }
}

#[inline(always)]
fn attend(query: &Query, entries: &[&[u8]], scale: f32, out: &mut [f32]) {
    // Plain loops: a closure handed to an adapter would be compiled for the narrowest vectors again.
    let mut scored = Vec::with_capacity(entries.len());
    for bytes in entries {
        let entry = Entry::new(bytes);
        let mut scores = query.scores(&entry);
        for score in &mut scores {
            *score *= scale;
        }
        scored.push((entry, scores));
    }
    for (order, out) in out.chunks_exact_mut(CODE as usize).enumerate() {
        let heads = || (0..RATIO as usize).map(|alignment| (alignment, alignment * ORDERS + order));
        let mut largest = 0.0f32;
        for (_, scores) in &scored {
            for (_, head) in heads() {
                largest = largest.max(scores[head]);
            }
        }
        let mut total = (-largest).exp();
        for (alignment, head) in heads() {
            for (entry, scores) in &scored {
                let below = scores[head] - largest;
                if below < NEGLIGIBLE {
                    continue;
                }
                let weight = below.exp();
                total += weight;
                for (out, value) in out.iter_mut().zip(entry.value(alignment)) {
                    *out += weight * value;
                }
            }
        }
        for out in out {
            *out /= total;
        }
    }
}
