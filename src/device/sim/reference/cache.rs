//! Stores into the caches: window entries, index keys, compressed entries.

use std::ops::Range;

use super::{
    super::{View, Writes},
    numeric::{Element, e4m3, quantisation_scale, vectorised},
};
use crate::device::{
    Block, Op, Region,
    kernel::{
        CODE, CORE_RING_PAGE, ENTRY, ENTRY_DIGITS_AT, ENTRY_KEY, GATHER, GATHER_DIMS, INDEX_CODE, INDEX_DIM,
        INDEX_RING_PAGE, KeyFormat, PAGE_ENTRIES, PAGE_TOKENS, RATIO, RING, SPAN, SWA_DIM,
    },
};

/// Dims of an index key that hold codes; three ones and a zero follow.
pub(super) const KEY_CODES: usize = (SPAN * INDEX_CODE) as usize;
const ONES: f32 = 1.0;

/// Bytes of a compressor's ring slot of the token at `position`; rows of `ring` are pages.
pub(super) fn ring_slot(ring: Region, page: i32, position: i64) -> Option<Range<u64>> {
    let page = page_start(ring, page)?;
    let width = ring.len / RING;
    let start = page + position.rem_euclid(RING as i64) as u64 * width;
    Some(start..start + width)
}

/// Bytes of the window slot of the token at `position`.
pub(super) fn window_slot(cache: Region, page: i32, position: i64) -> Option<Range<u64>> {
    let start = page_start(cache, page)? + position.rem_euclid(PAGE_TOKENS as i64) as u64 * SWA_DIM * 2;
    Some(start..start + SWA_DIM * 2)
}

/// First byte of a page of a cache whose rows are pages.
pub(super) fn page_start(cache: Region, page: i32) -> Option<u64> {
    let page = u64::try_from(page).ok().filter(|page| *page < cache.rows)?;
    Some(cache.row(page).start)
}

/// Where the row's token stores its entry: word of the page table to read, or none for the dummy slot; and the slot.
pub(super) fn entry_place(position: i32) -> (Option<u64>, u64) {
    if position < 0 || (position + 1) % RATIO as i32 != 0 {
        return (None, 0);
    }
    let entry = position as u64 / RATIO;
    (Some(entry / PAGE_ENTRIES), entry % PAGE_ENTRIES)
}

/// The page that [`entry_place`] names, read from a row of the page table.
pub(super) fn entry_page(word: Option<u64>, table: Range<u64>, read: impl Fn(Range<u64>) -> i32) -> Option<i32> {
    let Some(word) = word else { return Some(0) };
    let at = table.start + word * 4;
    (at + 4 <= table.end).then(|| read(at..at + 4))
}

/// Byte ranges of one index key: the key, and its scale in fp8.
pub(super) fn key_ranges(cache: Region, format: KeyFormat, page: i32, slot: u64) -> Option<(Range<u64>, Range<u64>)> {
    let page = page_start(cache, page)?;
    let key = page + slot * format.key_bytes();
    let scale = page + PAGE_ENTRIES * format.key_bytes() + slot * 4;
    let scale = if format == KeyFormat::Fp8 { scale..scale + 4 } else { scale..scale };
    Some((key..key + format.key_bytes(), scale))
}

/// Byte range of one compressed entry.
pub(super) fn entry_range(cache: Region, page: i32, slot: u64) -> Option<Range<u64>> {
    let start = page_start(cache, page)? + slot * ENTRY;
    Some(start..start + ENTRY)
}

pub(super) fn kv_store(op: &Op, blocks: &[Block], view: &View<'_>, out: &mut Writes<'_>) {
    let [latent, positions, pages] = [0, 1, 2].map(|at| op.reads[at].region);
    for block in blocks {
        let row = u64::from(block.index);
        let position = view.slice::<i32>(positions.row(row))[0];
        let page = view.slice::<i32>(pages.row(row))[0];
        let Some(slot) = window_slot(op.writes[0].region, page, i64::from(position)) else { continue };
        let (code, ballast) = view.slice::<u16>(latent.row(row)).split_at(CODE as usize);
        let mut folded = [0.0f32; (SWA_DIM - CODE) as usize];
        for part in ballast.chunks_exact(folded.len()) {
            for (sum, &value) in folded.iter_mut().zip(part) {
                *sum += value.get();
            }
        }
        let (codes, rest) = out.slice::<u16>(slot).split_at_mut(CODE as usize);
        codes.copy_from_slice(code);
        for (out, sum) in rest.iter_mut().zip(folded) {
            *out = u16::put(sum);
        }
    }
}

/// What both entry stores read first: the ring slots of the entry's four tokens and the entry's place.
struct Closing<'a> {
    slots: [&'a [f32]; RATIO as usize],
    page: i32,
    slot: u64,
    entry: u64,
}

fn closing<'a>(op: &Op, row: u64, view: &View<'a>) -> Option<Closing<'a>> {
    let [ring, positions, pages, table] = [0, 1, 2, 3].map(|at| op.reads[at].region);
    let position = view.slice::<i32>(positions.row(row))[0];
    let ring_page = view.slice::<i32>(pages.row(row))[0];
    let (word, slot) = entry_place(position);
    let page = entry_page(word, table.row(row), |range| view.slice::<i32>(range)[0])?;
    let mut slots: [&[f32]; RATIO as usize] = [&[]; RATIO as usize];
    for (back, target) in (0..RATIO as i64).rev().zip(&mut slots) {
        *target = view.slice(ring_slot(ring, ring_page, i64::from(position) - back)?);
    }
    Some(Closing { slots, page, slot, entry: position.max(0) as u64 / RATIO })
}

pub(super) fn index_store(op: &Op, blocks: &[Block], view: &View<'_>, out: &mut Writes<'_>, format: KeyFormat) {
    let (code, window) = (INDEX_CODE as usize, (GATHER * INDEX_CODE) as usize);
    for block in blocks {
        let Some(closing) = closing(op, u64::from(block.index), view) else { continue };
        let mut codes = [0.0; KEY_CODES];
        codes[..code].copy_from_slice(&closing.slots[2][..code]);
        codes[code..2 * code].copy_from_slice(&closing.slots[1][..code]);
        codes[2 * code..].copy_from_slice(&closing.slots[0][..window]);
        let Some((key, scale)) = key_ranges(op.writes[0].region, format, closing.page, closing.slot) else { continue };
        put_key(&codes, format, (key, scale), out);
    }
}

/// Checksums of the keys of each listed page.
pub(super) fn checksum(op: &Op, blocks: &[Block], view: &View<'_>, out: &mut Writes<'_>, format: KeyFormat) {
    let [cache, pages] = [0, 1].map(|at| op.reads[at].region);
    let mix = |sum: u64, word: u64| (sum ^ word).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(29);
    for block in blocks {
        let row = u64::from(block.index);
        let page = view.slice::<i32>(pages.row(row))[0];
        let Some(start) = page_start(cache, page) else { continue };
        let (keys, scales) =
            view.bytes(start..start + cache.len).split_at((PAGE_ENTRIES * format.key_bytes()) as usize);
        let sums = out.slice::<u64>(op.writes[0].region.row(row));
        for (slot, (sum, key)) in sums.iter_mut().zip(keys.chunks_exact(format.key_bytes() as usize)).enumerate() {
            let scale =
                scales.get(slot * 4..slot * 4 + 4).map(|scale| u64::from(bytemuck::pod_read_unaligned::<u32>(scale)));
            let words = key.chunks_exact(8).map(bytemuck::pod_read_unaligned::<u64>);
            *sum = scale.into_iter().chain(words).fold(1, mix);
        }
    }
}

/// Writes one index key.
pub(super) fn put_key(
    codes: &[f32; KEY_CODES],
    format: KeyFormat,
    (key, scale): (Range<u64>, Range<u64>),
    out: &mut Writes<'_>,
) {
    let mut dims = [0.0; INDEX_DIM as usize];
    dims[..KEY_CODES].copy_from_slice(codes);
    dims[KEY_CODES..KEY_CODES + 3].fill(ONES);
    match format {
        KeyFormat::Bf16 => {
            for (out, &value) in out.slice::<u16>(key).iter_mut().zip(&dims) {
                *out = u16::put(value);
            }
        }
        KeyFormat::Fp8 => {
            let largest = dims.iter().fold(0.0f32, |largest, value| largest.max(value.abs()));
            let step = quantisation_scale(largest);
            for (out, &value) in out.bytes(key).iter_mut().zip(&dims) {
                *out = e4m3::encode(value / step);
            }
            out.slice::<f32>(scale)[0] = step;
        }
    }
}

pub(super) fn core_store(op: &Op, blocks: &[Block], view: &View<'_>, out: &mut Writes<'_>) {
    let (code, window) = (CODE as usize, GATHER_DIMS as usize);
    for block in blocks {
        let Some(closing) = closing(op, u64::from(block.index), view) else { continue };
        let Some(range) = entry_range(op.writes[0].region, closing.page, closing.slot) else { continue };
        let mut codes = [0.0; (SPAN * CODE) as usize];
        codes[..code].copy_from_slice(&closing.slots[2][..code]);
        codes[code..2 * code].copy_from_slice(&closing.slots[1][..code]);
        codes[2 * code..].copy_from_slice(&closing.slots[0][..window]);
        let mut values = [0.0; ENTRY_DIGITS_AT as usize];
        for (value, slot) in values.chunks_exact_mut(code).zip(closing.slots) {
            value.copy_from_slice(&slot[window..window + code]);
        }
        put_entry(&codes, &values, closing.entry, range, out);
    }
}

/// Writes one compressed entry.
pub(super) fn put_entry(codes: &[f32], values: &[f32], entry: u64, range: Range<u64>, out: &mut Writes<'_>) {
    let (key, rest) = out.bytes(range).split_at_mut(ENTRY_KEY as usize);
    key.fill(0);
    vectorised!({
        for (out, &value) in key.iter_mut().zip(codes) {
            *out = e4m3::encode(value);
        }
    });
    let rest: &mut [u16] = bytemuck::cast_slice_mut(rest);
    rest.fill(0);
    for (out, &value) in rest.iter_mut().zip(values) {
        *out = u16::put(value);
    }
    let digits = [(entry >> 8) as f32, (entry & 0xff) as f32, ONES, ONES];
    for (out, digit) in rest[values.len()..].iter_mut().zip(digits) {
        *out = u16::put(digit);
    }
}

const _: () = assert!(CORE_RING_PAGE.is_multiple_of(RING) && INDEX_RING_PAGE.is_multiple_of(RING));
