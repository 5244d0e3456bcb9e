//! Index keys as bits: the codes of a healthy key are ±1 or 0 times one unit, so that a dot product is two population
//! counts. Exact where it is used; everything else takes the plain arithmetic.

use std::{collections::BTreeMap, ops::Range};

use super::{
    super::{View, memory::STAMP_BYTES},
    cache::KEY_CODES,
    numeric::{e4m3, vectorised},
};
use crate::device::kernel::{INDEX_DIM, KeyFormat, MATCH_HEADS, PAGE_ENTRIES};

const KEYS: usize = PAGE_ENTRIES as usize;
const HEADS: usize = MATCH_HEADS as usize;
/// Stamp of a page that was never read.
const NEVER: u64 = u64::MAX;

/// 124 ternary codes: bit `i` of word `i / 64`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Ternary {
    negative: [u64; 2],
    nonzero: [u64; 2],
}

impl Ternary {
    /// `codes` as bits, or nothing if one is neither `plus` nor `minus` nor zero.
    #[inline(always)]
    fn pack<T: Copy + Default + PartialEq>(codes: &[T], plus: T, minus: T) -> Option<Self> {
        let (mut packed, mut plain) = (Self::default(), true);
        for (word, codes) in codes.chunks(64).enumerate() {
            for (bit, &code) in codes.iter().enumerate() {
                packed.nonzero[word] |= u64::from(code == plus || code == minus) << bit;
                packed.negative[word] |= u64::from(code == minus) << bit;
                plain &= code == plus || code == minus || code == T::default();
            }
        }
        plain.then_some(packed)
    }
}

/// One page of keys in packed form, as of the memory stamp at which it was read.
struct Page {
    stamp: u64,
    /// Which keys are in code form.
    codes: u64,
    /// Which scales are healthy.
    scales: u64,
    negative: [[u64; KEYS]; 2],
    nonzero: [[u64; KEYS]; 2],
    scale: [f32; KEYS],
}

/// Packed copies of key pages, by cache and page, and of the queries that came last, by row.
#[derive(Default)]
pub(super) struct Shadow {
    caches: BTreeMap<u64, Vec<Option<Box<Page>>>>,
    rows: Vec<Packed>,
}

/// A row's query, and the bytes that it was packed from: the tiles of a row may come one by one, each with the same query.
#[derive(Default)]
struct Packed {
    source: Vec<u8>,
    weights: Vec<f32>,
    query: Option<Query>,
}

/// What identifies a page of keys in memory.
pub(super) struct PageAt {
    pub(super) cache: u64,
    pub(super) number: usize,
    pub(super) bytes: Range<u64>,
    pub(super) format: KeyFormat,
}

impl Shadow {
    /// The query of `row`, packed unless its bytes are those of last time.
    pub(super) fn query(
        &mut self,
        row: usize,
        source: &[u8],
        weights: &[f32],
        dims: impl FnOnce() -> [[f32; INDEX_DIM as usize]; HEADS],
    ) -> Option<Query> {
        if self.rows.len() <= row {
            self.rows.resize_with(row + 1, Packed::default);
        }
        let held = &mut self.rows[row];
        let bits = bytemuck::cast_slice::<f32, u32>;
        if held.source != source || bits(&held.weights) != bits(weights) {
            held.source.clear();
            held.source.extend_from_slice(source);
            held.weights.clear();
            held.weights.extend_from_slice(weights);
            held.query = Query::new(&dims(), weights);
        }
        held.query
    }

    fn page(&mut self, at: &PageAt, view: &View<'_>, stamp: u64) -> &Page {
        let pages = self.caches.entry(at.cache).or_default();
        if pages.len() <= at.number {
            pages.resize_with(at.number + 1, || None);
        }
        let page = pages[at.number].get_or_insert_with(Box::default);
        if page.stamp != stamp {
            page.refresh(at, view);
            page.stamp = stamp;
        }
        page
    }

    /// Logits of the first `out.len()` keys of a page, where the packed form gives them; `plain_logit` gives the others.
    pub(super) fn logits(
        &mut self,
        at: &PageAt,
        query: &Query,
        view: &View<'_>,
        stamp: u64,
        out: &mut [f32],
        mut plain_logit: impl FnMut(usize) -> f32,
    ) {
        let page = self.page(at, view, stamp);
        out.fill(0.0);
        vectorised!({
            let mut firing = screen(page, query) & u64::MAX >> (KEYS - out.len());
            while firing != 0 {
                let key = firing.trailing_zeros() as usize;
                firing &= firing - 1;
                out[key] = query.logit(page, key, at.format);
            }
        });
        let mut odd = !(page.codes & page.scales);
        while odd != 0 {
            let key = odd.trailing_zeros() as usize;
            odd &= odd - 1;
            if key < out.len() {
                out[key] = plain_logit(key);
            }
        }
    }
}

impl Default for Page {
    fn default() -> Self {
        Self {
            stamp: NEVER,
            codes: 0,
            scales: 0,
            negative: [[0; KEYS]; 2],
            nonzero: [[0; KEYS]; 2],
            scale: [1.0; KEYS],
        }
    }
}

impl Page {
    /// Packs the keys that may have changed since the page's stamp, and reads all scales.
    fn refresh(&mut self, at: &PageAt, view: &View<'_>) {
        let bytes = view.bytes(at.bytes.clone());
        let width = at.format.key_bytes();
        let (keys, scales) = bytes.split_at(KEYS * width as usize);
        // Keys that share a stamp.
        let together = (STAMP_BYTES / width) as usize;
        for (part, keys) in keys.chunks(together * width as usize).enumerate() {
            let start = at.bytes.start + part as u64 * STAMP_BYTES;
            let changed = view.stamp(&(start..start + STAMP_BYTES)).is_none_or(|stamp| stamp > self.stamp);
            if self.stamp == NEVER || changed {
                for (slot, key) in keys.chunks_exact(width as usize).enumerate() {
                    self.put(part * together + slot, key, at.format);
                }
            }
        }
        self.scales = u64::MAX;
        for (slot, scale) in scales.chunks_exact(4).enumerate() {
            self.scale[slot] = bytemuck::pod_read_unaligned(scale);
            let healthy = self.scale[slot] >= 0.0 && self.scale[slot].is_finite();
            self.scales &= !(u64::from(!healthy) << slot);
        }
    }

    fn put(&mut self, slot: usize, key: &[u8], format: KeyFormat) {
        let packed = match format {
            KeyFormat::Bf16 => {
                let key = bytemuck::cast_slice::<u8, u16>(key);
                vectorised!(pack_key(key, 0x3f80, 0x8000))
            }
            KeyFormat::Fp8 => vectorised!(pack_key(key, e4m3::encode(448.0), 0x80)),
        };
        self.codes = self.codes & !(1 << slot) | u64::from(packed.is_some()) << slot;
        let packed = packed.unwrap_or_default();
        for word in 0..2 {
            self.negative[word][slot] = packed.negative[word];
            self.nonzero[word][slot] = packed.nonzero[word];
        }
    }
}

#[inline(always)]
fn pack_key<T: Copy + Default + PartialEq + std::ops::BitOr<Output = T>>(
    key: &[T],
    one: T,
    sign: T,
) -> Option<Ternary> {
    let (codes, ones) = key.split_at(KEY_CODES);
    if ones[..3].iter().any(|value| *value != one) || ones[3] != T::default() {
        return None;
    }
    Ternary::pack(codes, one, one | sign)
}

/// A head's query: `unit * codes`, and what its constant dims add for any healthy key.
#[derive(Clone, Copy, Default)]
struct Head {
    codes: Ternary,
    unit: f32,
    constant: f32,
    weight: f32,
    /// A key with this many codes wrong, or more, gives nothing.
    wrong_limit: u64,
}

/// A row's index query in packed form.
#[derive(Clone, Copy)]
pub(super) struct Query {
    heads: [Head; HEADS],
}

impl Query {
    /// Packs a query, unless its dims are no codes or its sums might round.
    pub(super) fn new(dims: &[[f32; INDEX_DIM as usize]; HEADS], weights: &[f32]) -> Option<Self> {
        let mut heads = [Head::default(); HEADS];
        for ((head, dims), &weight) in heads.iter_mut().zip(dims).zip(weights) {
            *head = pack_head(dims, weight)?;
        }
        let alike = heads.chunks_exact(2).all(|pair| {
            let ([long, short], words) = ([pair[0].codes, pair[1].codes], [0, 1]);
            words.iter().all(|&word| {
                let within = short.nonzero[word] & !long.nonzero[word] == 0;
                within && short.negative[word] == long.negative[word] & short.nonzero[word]
            }) && short.nonzero[1] == 0
        });
        alike.then_some(Self { heads })
    }

    #[inline(always)]
    fn logit(&self, page: &Page, key: usize, format: KeyFormat) -> f32 {
        let step = if format == KeyFormat::Fp8 { 448.0 } else { 1.0 };
        let mut sum = 0.0f32;
        for head in &self.heads {
            let (mut both, mut wrong) = (0, 0);
            for word in 0..2 {
                let compared = page.nonzero[word][key] & head.codes.nonzero[word];
                both += compared.count_ones();
                wrong += ((page.negative[word][key] ^ head.codes.negative[word]) & compared).count_ones();
            }
            let dot = step * (head.unit * (both as f32 - 2.0 * wrong as f32) + head.constant);
            sum += head.weight * dot.max(0.0);
        }
        if format == KeyFormat::Fp8 { sum * page.scale[key] } else { sum }
    }
}

fn pack_head(dims: &[f32; INDEX_DIM as usize], weight: f32) -> Option<Head> {
    let (codes, ones) = dims.split_at(KEY_CODES);
    let unit = codes.iter().fold(0.0f32, |unit, code| unit.max(code.abs()));
    let whole = |value: f32| value.fract() == 0.0 && value.abs() <= 512.0;
    let constants = &ones[..3];
    let largest = 124.0 * unit + constants.iter().map(|value| value.abs()).sum::<f32>();
    let exact = whole(unit) && constants.iter().all(|value| whole(*value)) && largest <= 32_768.0 && ones[3] == 0.0;
    if !exact || unit == 0.0 || !(weight >= 0.0 && weight.is_finite()) {
        return None;
    }
    let codes = Ternary::pack(codes, unit, -unit)?;
    let mut head = Head { codes, unit, weight, constant: constants.iter().sum(), ..Head::default() };
    let compared = head.codes.nonzero.iter().map(|word| word.count_ones()).sum::<u32>();
    let fires = |wrong: u32| unit * (compared as f32 - 2.0 * wrong as f32) + head.constant > 0.0;
    head.wrong_limit = u64::from((0..=compared).find(|wrong| !fires(*wrong)).unwrap_or(compared + 1));
    Some(head)
}

/// A bit for every key on which a head may fire; may set too many. A head that finds too much wrong in the first word
/// cannot fire, whatever the second holds.
#[inline(always)]
fn screen(page: &Page, query: &Query) -> u64 {
    let mut flags = [0u64; KEYS];
    let rows = page.negative[0].iter().zip(&page.nonzero[0]);
    for pair in query.heads.chunks_exact(2) {
        let [long, short] = [&pair[0], &pair[1]];
        for (flag, (&negative, &nonzero)) in flags.iter_mut().zip(rows.clone()) {
            let wrong = (negative ^ long.codes.negative[0]) & nonzero & long.codes.nonzero[0];
            let fires = u64::from(u64::from(wrong.count_ones()) < long.wrong_limit);
            let short_wrong = u64::from((wrong & short.codes.nonzero[0]).count_ones());
            *flag |= fires | u64::from(short_wrong < short.wrong_limit);
        }
    }
    let mut firing = 0;
    for (key, flag) in flags.iter().enumerate() {
        firing |= flag << key;
    }
    firing
}
