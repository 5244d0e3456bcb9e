//! The indexer: finished queries, and logits over paged keys.

use std::{
    cell::{OnceCell, RefMut},
    ops::Range,
};

use super::{
    super::{View, Writes},
    cache::page_start,
    grid::completed,
    numeric::{Element, e4m3},
    packed::{PageAt, Query, Shadow},
    rows::quantise_group,
};
use crate::device::{
    Block, Op, Region,
    kernel::{INDEX_DIM, KeyFormat, LOGITS_TILE, MATCH_HEADS, PAGE_ENTRIES, Reader},
};

const DIM: usize = INDEX_DIM as usize;
const HEADS: usize = MATCH_HEADS as usize;
const LANES: usize = 16;

pub(super) fn rope(op: &Op, blocks: &[Block], view: &View<'_>, out: &mut Writes<'_>, format: KeyFormat) {
    let [query, weights] = [0, 1].map(|at| op.reads[at].region);
    let [query_out, weights_out] = [0, 1].map(|at| op.writes[at].region);
    for block in blocks {
        let row = u64::from(block.index);
        let source = view.slice::<u16>(query.row(row));
        let mut steps = [1.0f32; HEADS];
        match format {
            KeyFormat::Bf16 => out.slice::<u16>(query_out.row(row)).copy_from_slice(source),
            KeyFormat::Fp8 => {
                let target = out.bytes(query_out.row(row));
                for ((x, q), step) in source.chunks_exact(DIM).zip(target.chunks_exact_mut(DIM)).zip(&mut steps) {
                    *step = quantise_group(x, q);
                }
            }
        }
        let weights = view.slice::<u16>(weights.row(row));
        for ((out, &weight), step) in out.slice::<f32>(weights_out.row(row)).iter_mut().zip(weights).zip(steps) {
            *out = weight.get() * step;
        }
    }
}

/// One row's query and how many keys it has.
struct Row<'a> {
    source: &'a [u8],
    dims: OnceCell<Dims>,
    weights: &'a [f32],
    packed: Option<Query>,
    entries: u64,
}

type Dims = [[f32; DIM]; HEADS];

/// First and past-the-last index that a tile visits, given the row's entries.
pub(super) fn tile(part: u32, entries: u64, width: u64, reader: Reader) -> Range<u64> {
    let limit = if reader == Reader::Fallback { width } else { entries.min(width) };
    let start = (u64::from(part) * LOGITS_TILE).min(limit);
    start..(start + LOGITS_TILE).min(limit)
}

/// Words of the page table for the keys `visited` that the row has.
pub(super) fn table_words(table: Range<u64>, visited: &Range<u64>, entries: u64) -> Range<u64> {
    let last = visited.end.min(entries);
    if visited.start >= last {
        return table.start..table.start;
    }
    let words = visited.start / PAGE_ENTRIES..last.div_ceil(PAGE_ENTRIES);
    table.start + words.start * 4..(table.start + words.end * 4).min(table.end)
}

pub(super) fn logits(
    op: &Op,
    blocks: &[Block],
    view: &View<'_>,
    out: &mut Writes<'_>,
    (format, reader): (KeyFormat, Reader),
    mut shadow: Option<RefMut<'_, Shadow>>,
) {
    let cache = op.reads[2].region;
    let target = op.writes[0].region;
    let mut current: Option<(u32, Row<'_>)> = None;
    for block in blocks {
        let number = u64::from(block.index);
        if current.as_ref().is_none_or(|(row, _)| *row != block.index) {
            current = Some((block.index, read_row(op, number, view, format, shadow.as_deref_mut())));
        }
        let Some((_, row)) = &current else { continue };
        let visited = tile(block.part, row.entries, target.len / 4, reader);
        if visited.is_empty() {
            continue;
        }
        let start = target.row(number).start;
        let out = out.slice::<f32>(start + visited.start * 4..start + visited.end * 4);
        let live = row.entries.clamp(visited.start, visited.end) - visited.start;
        let (keys, rest) = out.split_at_mut(live as usize);
        rest.fill(f32::NEG_INFINITY);
        let words = table_words(op.reads[3].region.row(number), &visited, row.entries);
        let pages = view.slice::<i32>(words).iter().copied().chain(std::iter::repeat(-1));
        for (page, out) in pages.zip(keys.chunks_mut(PAGE_ENTRIES as usize)) {
            page_logits(cache, format, row, page, view, shadow.as_deref_mut(), out);
        }
    }
}

fn read_row<'a>(op: &Op, row: u64, view: &View<'a>, format: KeyFormat, shadow: Option<&mut Shadow>) -> Row<'a> {
    let [query, weights, positions] = [0, 1, 4].map(|at| op.reads[at].region);
    let entries = completed(view.slice::<i32>(positions.row(row))[0]);
    let (source, weights) = (view.bytes(query.row(row)), view.slice::<f32>(weights.row(row)));
    let packed = shadow.and_then(|shadow| shadow.query(row as usize, source, weights, || dims(source, format)));
    Row { source, dims: OnceCell::new(), weights, packed, entries }
}

fn dims(source: &[u8], format: KeyFormat) -> Dims {
    let mut dims = [[0.0; DIM]; HEADS];
    let out = dims.as_flattened_mut().iter_mut();
    match format {
        KeyFormat::Bf16 => {
            out.zip(bytemuck::cast_slice::<u8, u16>(source)).for_each(|(out, &value)| *out = value.get());
        }
        KeyFormat::Fp8 => out.zip(source).for_each(|(out, &code)| *out = e4m3::decode(code)),
    }
    dims
}

fn page_logits(
    cache: Region,
    format: KeyFormat,
    row: &Row<'_>,
    number: i32,
    view: &View<'_>,
    shadow: Option<&mut Shadow>,
    out: &mut [f32],
) {
    let Some(start) = page_start(cache, number) else {
        // A page outside the cache has no keys.
        out.fill(0.0);
        return;
    };
    let (keys, scales) = page_keys(start, format, out.len() as u64);
    let dense = |key: usize| dense_logit(row, format, key, view, &keys, &scales);
    let own = view.is_memory(&keys) && (scales.is_empty() || view.is_memory(&scales));
    let whole = start..start + format.page_bytes();
    if let (Some(shadow), Some(query), true, Some(stamp)) = (shadow, &row.packed, own, view.stamp(&whole)) {
        let at = PageAt { cache: cache.base, number: number as usize, bytes: whole, format };
        shadow.logits(&at, query, view, stamp, out, dense);
        return;
    }
    for (key, out) in out.iter_mut().enumerate() {
        *out = dense(key);
    }
}

/// Bytes of the first `count` keys of the page at `start`, and of their scales.
pub(super) fn page_keys(start: u64, format: KeyFormat, count: u64) -> (Range<u64>, Range<u64>) {
    let scales = start + PAGE_ENTRIES * format.key_bytes();
    let scale_bytes = if format == KeyFormat::Fp8 { 4 } else { 0 };
    (start..start + count * format.key_bytes(), scales..scales + count * scale_bytes)
}

fn dense_logit(
    row: &Row<'_>,
    format: KeyFormat,
    key: usize,
    view: &View<'_>,
    keys: &Range<u64>,
    scales: &Range<u64>,
) -> f32 {
    let mut dims = [0.0f32; DIM];
    match format {
        KeyFormat::Bf16 => {
            let source = &view.slice::<u16>(keys.clone())[key * DIM..][..DIM];
            for (dim, &value) in dims.iter_mut().zip(source) {
                *dim = value.get();
            }
        }
        KeyFormat::Fp8 => {
            let source = &view.bytes(keys.clone())[key * DIM..][..DIM];
            for (dim, &code) in dims.iter_mut().zip(source) {
                *dim = e4m3::decode(code);
            }
        }
    }
    let query = row.dims.get_or_init(|| self::dims(row.source, format));
    let sum =
        query.iter().zip(row.weights).fold(0.0, |sum, (query, &weight)| sum + weight * dot(query, &dims).max(0.0));
    if format == KeyFormat::Fp8 { sum * view.slice::<f32>(scales.clone())[key] } else { sum }
}

/// Dot product in `f32`, added up in a fixed order. The length must be a multiple of 16.
#[inline(always)]
pub(super) fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut lanes = [0.0f32; LANES];
    for (a, b) in a.chunks_exact(LANES).zip(b.chunks_exact(LANES)) {
        for ((sum, a), b) in lanes.iter_mut().zip(a).zip(b) {
            *sum += a * b;
        }
    }
    lanes.iter().sum()
}
