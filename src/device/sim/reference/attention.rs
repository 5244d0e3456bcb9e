//! Sparse attention: the window's codes gathered, and selected entries under a softmax that each order's heads share.

use std::{collections::BTreeMap, ops::Range};

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
/// Words of a ternary code.
const WORDS: usize = PADDED / 32;
/// Below this a weight is zero in `f32`; such entries are left out.
const NEGLIGIBLE: f32 = -104.0;
/// Sums of packed terms are exact in any order while they are smaller.
const EXACT: f32 = 512.0;
/// Entries that are looked at together.
const LANES: usize = 16;

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

/// Space for one row, kept from row to row, and entries in packed form as of the memory stamps at which they were read.
#[derive(Default)]
pub(super) struct Scratch {
    caches: BTreeMap<u64, Vec<Shadow>>,
    row: Row,
}

#[derive(Clone, Copy, Default)]
struct Shadow {
    /// None: packed from other bytes than memory's, so never used again.
    stamp: Option<u64>,
    packed: Packed,
}

/// The entries that one row looks at, and their scores.
#[derive(Default)]
struct Row {
    /// Where each entry is.
    starts: Vec<u64>,
    keys: [Lanes; WORDS],
    digits: [Vec<f32>; 4],
    /// Which entries take the plain arithmetic.
    odd: Vec<usize>,
    scores: [Vec<f32>; HEADS],
}

/// One word of each entry's code.
#[derive(Default)]
struct Lanes {
    negative: Vec<u32>,
    nonzero: Vec<u32>,
}

impl Row {
    fn clear(&mut self) {
        self.starts.clear();
        self.odd.clear();
        for lanes in &mut self.keys {
            lanes.negative.clear();
            lanes.nonzero.clear();
        }
        self.digits.iter_mut().for_each(Vec::clear);
    }

    fn push(&mut self, start: u64, packed: &Packed) {
        if !packed.exact {
            self.odd.push(self.starts.len());
        }
        self.starts.push(start);
        for (word, lanes) in self.keys.iter_mut().enumerate() {
            lanes.negative.push(packed.key.negative[word]);
            lanes.nonzero.push(packed.key.nonzero[word]);
        }
        for (lane, digit) in self.digits.iter_mut().zip(packed.digits) {
            lane.push(digit);
        }
    }
}

pub(super) fn attention(
    op: &Op,
    blocks: &[Block],
    view: &View<'_>,
    out: &mut Writes<'_>,
    (scale, k): (f32, usize),
    (scratch, pack): (&mut Scratch, bool),
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
            list(entries, view.slice::<i32>(index_words(indices, row, k)), view, scratch);
            let copied = &mut output[GATHER_DIMS as usize..][..ORDERS * CODE as usize];
            let row = &mut scratch.row;
            score(&query, row, view, scale);
            vectorised!(attend(row, view, copied));
        }
        let target = out.slice::<u16>(op.writes[0].region.row(row));
        vectorised!({
            for (out, value) in target.iter_mut().zip(output) {
                *out = u16::put(value);
            }
        });
    }
}

/// Lists the entries that `chosen` names, in packed form.
fn list(cache: Region, chosen: &[i32], view: &View<'_>, scratch: &mut Scratch) {
    let shadows = scratch.caches.entry(cache.base).or_default();
    scratch.row.clear();
    for &index in chosen {
        let Some(range) = entry_of(cache, index, ENTRY) else { continue };
        let at = index as usize;
        if shadows.len() <= at {
            shadows.resize(at + 1, Shadow::default());
        }
        let shadow = &mut shadows[at];
        // Where the block sees other bytes than memory's, there is no stamp.
        let stamp = view.stamp(&range);
        if stamp.is_none() || stamp != shadow.stamp {
            *shadow = Shadow { stamp, packed: Packed::new(&Entry::new(view.bytes(range.clone()))) };
        }
        scratch.row.push(range.start, &shadow.packed);
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

/// 248 ternary codes: bit `i % 32` of word `i / 32`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Ternary {
    negative: [u32; WORDS],
    nonzero: [u32; WORDS],
}

/// An entry's key and digits.
#[derive(Clone, Copy, Default)]
struct Packed {
    key: Ternary,
    digits: [f32; 4],
    /// The key is a code and the digits are whole numbers.
    exact: bool,
}

impl Packed {
    fn new(entry: &Entry<'_>) -> Self {
        let (key, digits) = (entry.pack(), entry.digits());
        let whole = digits.iter().all(|digit| digit.fract() == 0.0);
        Self { key: key.unwrap_or_default(), digits, exact: key.is_some() && whole }
    }
}

/// A row's match heads.
struct Query {
    dims: [[f32; PADDED]; HEADS],
    packed: Option<[Ternary; HEADS]>,
}

impl Query {
    fn new(row: &[u16], pack: bool) -> Self {
        let mut dims = [[0.0; PADDED]; HEADS];
        let packed = vectorised!({
            for (dims, head) in dims.iter_mut().zip(row.chunks_exact(HEAD_DIM as usize)) {
                for (dim, &value) in dims.iter_mut().zip(&head[..COMPARED]) {
                    *dim = value.get();
                }
            }
            if pack { Self::pack(&dims) } else { None }
        });
        Self { dims, packed }
    }

    #[inline(always)]
    fn pack(dims: &[[f32; PADDED]; HEADS]) -> Option<[Ternary; HEADS]> {
        let mut packed = [Ternary::default(); HEADS];
        let mut plain = true;
        for (packed, dims) in packed.iter_mut().zip(dims) {
            for (word, dims) in dims.as_chunks::<32>().0.iter().enumerate() {
                let width = CODES.saturating_sub(word * 32).min(32);
                let (mut nonzero, mut negative) = (0, 0);
                for (bit, &code) in dims[..width].iter().enumerate() {
                    nonzero |= u32::from(code.abs() == 1.0) << bit;
                    negative |= u32::from(code == -1.0) << bit;
                    plain &= code.abs() == 1.0 || code == 0.0;
                }
                (packed.nonzero[word], packed.negative[word]) = (nonzero, negative);
            }
            // Sums of such terms below `EXACT` are exact in any order.
            for value in &dims[CODES..COMPARED] {
                plain &= ((value * 32_768.0).fract() == 0.0) & (value.abs() <= 256.0);
            }
        }
        plain.then_some(packed)
    }

    /// Unscaled scores of one entry for all heads.
    fn scores(&self, entry: &Entry<'_>) -> [f32; HEADS] {
        let mut dims = [0.0; PADDED];
        for (dim, &code) in dims.iter_mut().zip(&entry.key[..CODES]) {
            *dim = e4m3::decode(code);
        }
        dims[CODES..COMPARED].copy_from_slice(&entry.digits());
        std::array::from_fn(|head| dot(&self.dims[head], &dims))
    }
}

/// Scores of all heads for one row's entries, scaled.
fn score(query: &Query, row: &mut Row, view: &View<'_>, scale: f32) {
    let count = row.starts.len();
    for scores in &mut row.scores {
        scores.clear();
        scores.resize(count, 0.0);
    }
    let exact = query.packed.as_ref().is_some_and(|packed| {
        vectorised!({
            let mut exact = true;
            for ((query, dims), scores) in packed.iter().zip(&query.dims).zip(&mut row.scores) {
                exact &= packed_scores(query, &dims[CODES..COMPARED], &row.keys, &row.digits, scale, scores);
            }
            exact
        })
    });
    let Row { starts, odd, scores, .. } = row;
    let mut plain = |at: usize| {
        let entry = Entry::new(view.bytes(starts[at]..starts[at] + ENTRY));
        for (scores, score) in scores.iter_mut().zip(query.scores(&entry)) {
            scores[at] = score * scale;
        }
    };
    if exact { odd.iter().copied().for_each(&mut plain) } else { (0..count).for_each(&mut plain) }
}

/// One head's scaled scores, by population counts. False where a sum might round; the codes and digits that are none give
/// any score.
#[inline(always)]
fn packed_scores(
    query: &Ternary,
    dims: &[f32],
    keys: &[Lanes; WORDS],
    digits: &[Vec<f32>; 4],
    scale: f32,
    scores: &mut [f32],
) -> bool {
    let count = scores.len();
    let negative: [&[u32]; WORDS] = std::array::from_fn(|word| &keys[word].negative[..count]);
    let nonzero: [&[u32]; WORDS] = std::array::from_fn(|word| &keys[word].nonzero[..count]);
    let digits: [&[f32]; 4] = std::array::from_fn(|digit| &digits[digit][..count]);
    let mut exact = true;
    for at in 0..count {
        let (mut both, mut wrong) = (0, 0);
        for word in 0..WORDS {
            let compared = query.nonzero[word] & nonzero[word][at];
            both += compared.count_ones() as i32;
            wrong += ((query.negative[word] ^ negative[word][at]) & compared).count_ones() as i32;
        }
        let terms: [f32; 4] = std::array::from_fn(|digit| dims[digit] * digits[digit][at]);
        let size = CODES as f32 + (terms[0].abs() + terms[1].abs() + terms[2].abs() + terms[3].abs());
        exact &= size < EXACT;
        let sum = terms[0] + terms[1] + terms[2] + terms[3];
        scores[at] = (both as f32 - 2.0 * wrong as f32 + sum) * scale;
    }
    exact
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
            let bits = |flags: u64| (flags.wrapping_mul(0x0102_0408_1020_4080) >> 56) as u32;
            packed.nonzero[at / 4] |= bits(nonzero) << (at % 4 * 8);
            packed.negative[at / 4] |= bits(signs) << (at % 4 * 8);
        }
        Some(packed)
    }
}

#[inline(always)]
fn attend(row: &Row, view: &View<'_>, out: &mut [f32]) {
    // Plain loops: a closure handed to an adapter would be compiled for the narrowest vectors again.
    for (order, out) in out.chunks_exact_mut(CODE as usize).enumerate() {
        let heads = || (0..RATIO as usize).map(|alignment| (alignment, &row.scores[alignment * ORDERS + order]));
        let mut largest = 0.0f32;
        for (_, scores) in heads() {
            largest = largest.max(largest_of(scores));
        }
        let mut total = (-largest).exp();
        for (alignment, scores) in heads() {
            for (scores, starts) in scores.chunks(LANES).zip(row.starts.chunks(LANES)) {
                let mut counts = false;
                for score in scores {
                    counts |= !negligible(score - largest);
                }
                if !counts {
                    continue;
                }
                for (score, &start) in scores.iter().zip(starts) {
                    let below = score - largest;
                    if negligible(below) {
                        continue;
                    }
                    let weight = below.exp();
                    total += weight;
                    let entry = Entry::new(view.bytes(start..start + ENTRY));
                    for (out, value) in out.iter_mut().zip(entry.value(alignment)) {
                        *out += weight * value;
                    }
                }
            }
        }
        for out in out {
            *out /= total;
        }
    }
}

/// False for what is no number, too.
#[inline(always)]
fn negligible(below: f32) -> bool {
    below < NEGLIGIBLE
}

/// The largest positive number of `scores`, or 0.
#[inline(always)]
fn largest_of(scores: &[f32]) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let (chunks, rest) = scores.as_chunks::<LANES>();
    for chunk in chunks {
        for (lane, &score) in lanes.iter_mut().zip(chunk) {
            *lane = if score > *lane { score } else { *lane };
        }
    }
    rest.iter().chain(&lanes).fold(0.0, |largest, &score| if score > largest { score } else { largest })
}
