//! Each kernel against a naive version in `f64`, on random inputs over noise, at the edges of its shapes.

use std::ops::Range;

use rand::RngExt;

use super::{
    fixture::{Fixture, assert_close},
    numeric::e4m3,
};
use crate::device::{
    Operand,
    kernel::{
        CHECKSUMS_ROW, CODE, CORE_RING_DIM, CORE_RING_PAGE, ENTRY, ENTRY_DIGITS_AT, ENTRY_KEY, ENTRY_PAGE, GATHER,
        HEAD_DIM, HIDDEN, INDEX_DIM, INDEX_RING_DIM, INDEX_RING_PAGE, KEY_AT, KV, Kernel, KeyFormat, LIVE, MATCH_HEADS,
        MatmulSite, NormSite, PAGE_ENTRIES, Q_LORA, RING, ROPE, Reader, SWA_DIM, SWA_PAGE, VALUE_AT, WORKSPACE_WORDS,
    },
};

const BF16: f64 = 1.0 / 128.0;
const FORMATS: [KeyFormat; 2] = [KeyFormat::Bf16, KeyFormat::Fp8];

/// Positions at the edges: the first token, before and at the first entry, a page's end, a ring's wrap, the end of a tile
/// of keys, one key past it, more keys than top-k selects, the longest context.
const POSITIONS: [i32; 11] = [0, 2, 3, 28, 255, 256, 700, 1023, 1027, 2399, 32_767];
/// Pages of a cache, and words of a row of the page table.
const PAGES: u64 = 149;
const TABLE: u64 = 128;
/// Entries of the longest context.
const ENTRIES: u64 = TABLE * PAGE_ENTRIES;

fn positions(fixture: &mut Fixture, rows: u64) -> Operand {
    fixture.words(rows, 1, |row, _| POSITIONS[row as usize % POSITIONS.len()])
}

fn position(row: u64) -> i64 {
    i64::from(POSITIONS[row as usize % POSITIONS.len()])
}

fn ring_pages(fixture: &mut Fixture, rows: u64) -> Operand {
    fixture.words(rows, 1, |row, _| row as i32 + 1)
}

/// Each row's pages are others of the cache, in another place; rows share some.
fn page(row: u64, number: u64) -> u64 {
    1 + (row * 29 + number) % (PAGES - 1)
}

fn page_table(fixture: &mut Fixture, rows: u64) -> Operand {
    fixture.words(rows, TABLE, |row, number| page(row, number) as i32)
}

fn for_batches(mut check: impl FnMut(u64)) {
    [1, 3, 11, 64].into_iter().for_each(&mut check);
}

/// Batches of what is long to check: up to every position once.
fn for_small_batches(mut check: impl FnMut(u64)) {
    [1, 3, 11].into_iter().for_each(&mut check);
}

#[test]
fn copies_and_embeddings_are_exact() {
    for_batches(|rows| {
        let mut f = Fixture::new(2 << 20, rows);
        let (from, to) = (f.random(rows, 512), f.region(rows, 2048, 1024));
        f.run(Kernel::Copy, &[from], &[to]);
        let table = f.random_weight(256, HIDDEN as u32, 0.02);
        let tokens = f.words(rows, 1, |row, _| (row * 31 % 256) as i32);
        let x = f.region(rows, HIDDEN * 2, HIDDEN * 2);
        f.run(Kernel::Embed { table }, &[tokens], &[x]);
        for row in 0..rows {
            assert_eq!(f.row::<u16>(from, row), f.row::<u16>(to, row));
            let mut naive = vec![0.0; HIDDEN as usize];
            let entries = f.entries(table).into_iter().filter(|(token, ..)| *token as u64 == row * 31 % 256);
            entries.for_each(|(_, column, value)| naive[column] = value);
            assert_eq!(f.row::<u16>(x, row), naive);
        }
    });
}

#[test]
fn norms_normalise_each_group_by_itself() {
    for_batches(|rows| {
        let mut f = Fixture::new(4 << 20, rows);
        for (columns, group) in [(HIDDEN, LIVE), (Q_LORA, 256)] {
            let x = f.random(rows, columns);
            let y = f.region(rows, columns * 2, columns * 2);
            let gain = f.random_weight(1, columns as u32, 1.0);
            f.run(Kernel::RmsNorm { gain, group: group as u32, site: NormSite::Layer }, &[x], &[y]);
            let gains = f.entries(gain);
            for row in 0..rows {
                let x = f.row::<u16>(x, row);
                let naive: Vec<f64> = (x.chunks(group as usize).flat_map(|part| {
                    let mean = part.iter().map(|v| v * v).sum::<f64>() / group as f64;
                    part.iter().map(move |v| v / (mean + 1e-6).sqrt())
                }))
                .zip(&gains)
                .map(|(v, (.., gain))| v * gain)
                .collect();
                assert_close(&f.row::<u16>(y, row), &naive, BF16, "norm");
            }
        }
    });
}

fn product(f: &Fixture, weight: crate::device::WeightId, rows: usize, input: &[f64]) -> Vec<f64> {
    let mut out = vec![0.0; rows];
    f.entries(weight).into_iter().for_each(|(row, column, value)| out[row] += value * input[column]);
    out
}

#[test]
fn projections_multiply() {
    for_batches(|rows| {
        for density in [0.002, 0.05] {
            let mut f = Fixture::new(2 << 20, rows);
            let weight = f.random_weight(1536, HIDDEN as u32, density);
            let (x, y) = (f.random(rows, HIDDEN), f.region(rows, 3072, 3072));
            f.run(Kernel::Matmul { weight, site: MatmulSite::QkvA }, &[x], &[y]);
            for row in 0..rows {
                let naive = product(&f, weight, 1536, &f.row::<u16>(x, row));
                assert_close(&f.row::<u16>(y, row), &naive, BF16, "matmul");
            }
        }
    });
}

#[test]
fn latents_survive_quantisation() {
    for_batches(|rows| {
        let mut f = Fixture::new(6 << 20, rows);
        let latent = f.random(rows, Q_LORA);
        let (codes, scales) = (f.region(rows, Q_LORA, Q_LORA), f.region(rows, 32, 32));
        f.run(Kernel::Quantise, &[latent], &[codes, scales]);
        let weight = f.random_weight((MATCH_HEADS * HEAD_DIM) as u32, Q_LORA as u32, 0.004);
        let query = f.region(rows, 65_536, MATCH_HEADS * HEAD_DIM * 2);
        f.run(Kernel::QueryMatmul { weight }, &[codes, scales], &[query]);
        for row in 0..rows {
            let scales = f.row::<f32>(scales, row);
            let codes = f.memory.bytes(codes.region.row(row));
            let decoded: Vec<f64> =
                codes.iter().enumerate().map(|(at, code)| f64::from(e4m3::decode(*code)) * scales[at / 128]).collect();
            assert_close(&decoded, &f.row::<u16>(latent, row), 1.0 / 16.0, "quantise");
            let naive = product(&f, weight, (MATCH_HEADS * HEAD_DIM) as usize, &decoded);
            assert_close(&f.row::<u16>(query, row), &naive, BF16, "wq_b");
        }
    });
}

#[test]
fn rotation_turns_the_last_dims_only() {
    for_batches(|rows| {
        let mut f = Fixture::new(6 << 20, rows);
        let q = f.region(rows, 65_536, MATCH_HEADS * HEAD_DIM * 2);
        let source = f.random(rows, MATCH_HEADS * HEAD_DIM);
        f.run(Kernel::Copy, &[source], &[q]);
        let positions = positions(&mut f, rows);
        f.run(Kernel::QueryRope, &[q, positions], &[q]);
        for row in 0..rows {
            let mut naive = f.row::<u16>(source, row);
            for head in naive.chunks_exact_mut(HEAD_DIM as usize) {
                for (pair, dims) in head[(HEAD_DIM - ROPE) as usize..].chunks_exact_mut(2).enumerate() {
                    let angle = position(row) as f64 * 10_000f64.powf(-2.0 * pair as f64 / ROPE as f64);
                    let (a, b) = (dims[0], dims[1]);
                    dims[0] = a * angle.cos() - b * angle.sin();
                    dims[1] = a * angle.sin() + b * angle.cos();
                }
            }
            assert_close(&f.row::<u16>(q, row), &naive, 2.0 * BF16, "rope");
        }
    });
}

#[test]
fn outputs_add_to_the_residual_and_ballast_to_ballast() {
    for_batches(|rows| {
        let mut f = Fixture::new(4 << 20, rows);
        let weight = f.random_weight(HIDDEN as u32, 512, 0.004);
        let (attended, fed, x) = (f.random(rows, 512), f.random(rows, HIDDEN - LIVE), f.random(rows, HIDDEN));
        let out = f.region(rows, HIDDEN * 2, HIDDEN * 2);
        f.run(Kernel::OutputProject { weight }, &[attended, fed, x], &[out]);
        for row in 0..rows {
            let mut naive = product(&f, weight, HIDDEN as usize, &f.row::<u16>(attended, row));
            naive[LIVE as usize..].copy_from_slice(&f.row::<u16>(fed, row));
            naive.iter_mut().zip(f.row::<u16>(x, row)).for_each(|(out, x)| *out += x);
            assert_close(&f.row::<u16>(out, row), &naive, BF16, "o_proj");
        }
    });
}

#[test]
fn the_head_takes_the_first_of_the_largest() {
    for_batches(|rows| {
        let mut f = Fixture::new(1 << 20, rows);
        let (x, tokens) = (f.random(rows, HIDDEN), f.region(rows, 4, 4));
        let weight = f.random_weight(256, HIDDEN as u32, 0.01);
        f.run(Kernel::Head { weight }, &[x], &[tokens]);
        for row in 0..rows {
            let logits = product(&f, weight, 256, &f.row::<u16>(x, row));
            let chosen = f.memory.slice::<u32>(tokens.region.row(row))[0] as usize;
            let best = logits.iter().copied().fold(f64::MIN, f64::max);
            assert!(logits[chosen] > best - 1e-3, "token {chosen}");
        }
        let zero = f.weight(crate::device::SparseWeight::from_entries(256, HIDDEN as u32, &[]));
        f.run(Kernel::Head { weight: zero }, &[x], &[tokens]);
        assert_eq!(f.memory.slice::<u32>(tokens.region.row(0))[0], 0);
    });
}

#[test]
fn window_entries_hold_the_code_and_folded_ballast() {
    for_batches(|rows| {
        let mut f = Fixture::new(4 << 20, rows);
        let latent = f.random(rows, KV);
        let (positions, pages) = (positions(&mut f, rows), ring_pages(&mut f, rows));
        let cache = f.region(rows + 1, SWA_PAGE, SWA_PAGE);
        f.run(Kernel::KvStore, &[latent, positions, pages], &[cache]);
        for row in 0..rows {
            let source = f.row::<u16>(latent, row);
            let mut naive = vec![0.0; SWA_DIM as usize];
            naive[..8].copy_from_slice(&source[..8]);
            (8..512).for_each(|dim| naive[8 + (dim - 8) % 56] += source[dim]);
            let at = (position(row) % 256) as usize * SWA_DIM as usize;
            let entry = &f.row::<u16>(cache, row + 1)[at..at + SWA_DIM as usize];
            assert_close(entry, &naive, BF16, "window entry");
        }
    });
}

#[test]
fn compressors_fill_their_ring() {
    for_batches(|rows| {
        for (dims, page, index) in [(INDEX_RING_DIM, INDEX_RING_PAGE, true), (CORE_RING_DIM, CORE_RING_PAGE, false)] {
            let mut f = Fixture::new(4 << 20, rows);
            let weight = f.random_weight(dims as u32, HIDDEN as u32, 0.003);
            let hidden = f.random(rows, HIDDEN);
            let (positions, pages) = (positions(&mut f, rows), ring_pages(&mut f, rows));
            let ring = f.region(rows + 1, page, page);
            let kernel = if index { Kernel::IndexCompress { weight } } else { Kernel::CoreCompress { weight } };
            f.run(kernel, &[hidden, positions, pages], &[ring]);
            for row in 0..rows {
                let naive = product(&f, weight, dims as usize, &f.row::<u16>(hidden, row));
                let at = position(row) as usize % RING as usize * dims as usize;
                assert_close(&f.row::<f32>(ring, row + 1)[at..at + dims as usize], &naive, 1e-5, "ring");
            }
        }
    });
}

#[test]
fn checksums_tell_each_word_of_each_key() {
    for format in FORMATS {
        for_small_batches(|rows| {
            let mut f = Fixture::new(4 << 20, rows);
            let cache = f.region(PAGES, format.page_bytes(), format.page_bytes());
            let cache = Operand { indexed: true, ..cache };
            let pages = f.words(rows, 1, |row, _| if row == 2 { PAGES as i32 } else { row as i32 * 3 + 1 });
            let sums = f.region(rows, CHECKSUMS_ROW, CHECKSUMS_ROW);
            let untouched = f.memory.bytes(sums.region.span()).to_vec();
            f.run(Kernel::Checksum { format }, &[cache, pages], &[sums]);
            for row in 0..rows {
                let found = f.memory.slice::<u64>(sums.region.row(row)).to_vec();
                if row == 2 {
                    assert_eq!(
                        bytemuck::cast_slice::<u64, u8>(&found),
                        &untouched[2 * CHECKSUMS_ROW as usize..][..512]
                    );
                    continue;
                }
                let page = f.memory.bytes(cache.region.row(row * 3 + 1));
                for (slot, sum) in found.iter().enumerate() {
                    let (bytes, mut naive) = (format.key_bytes() as usize, 1u64);
                    let mut add = |word: u64| {
                        let product = u128::from(naive ^ word) * 0x9E37_79B9_7F4A_7C15 % (1 << 64);
                        naive = ((product << 29 | product >> 35) % (1 << 64)) as u64;
                    };
                    if format == KeyFormat::Fp8 {
                        let at = 64 * 128 + 4 * slot;
                        add(u64::from(u32::from_le_bytes(page[at..at + 4].try_into().unwrap())));
                    }
                    for word in page[slot * bytes..][..bytes].chunks(8) {
                        add(u64::from_le_bytes(word.try_into().unwrap()));
                    }
                    assert_eq!(*sum, naive, "row {row}, slot {slot}");
                }
            }
        });
    }
}

/// Where a row's entry goes: page and slot.
fn place(row: u64) -> (u64, u64) {
    let position = position(row) as u64;
    if (position + 1).is_multiple_of(4) {
        (page(row, position / 4 / PAGE_ENTRIES), position / 4 % PAGE_ENTRIES)
    } else {
        (0, 0)
    }
}

/// Ring dims of the token `back` before a row's newest.
fn slot(f: &Fixture, ring: Operand, row: u64, back: i64, dims: u64) -> Vec<f64> {
    let at = (position(row) - back).rem_euclid(RING as i64) as usize * dims as usize;
    f.row::<f32>(ring, row + 1)[at..at + dims as usize].to_vec()
}

/// The bf16 dims of an entry, past its key.
fn entry_rest(f: &Fixture, entries: Operand, page: u64, slot: u64) -> Vec<f64> {
    let entry = &f.memory.bytes(entries.region.row(page))[(slot * ENTRY) as usize..][..ENTRY as usize];
    entry[ENTRY_KEY as usize..].chunks(2).map(|b| f64::from(half::bf16::from_le_bytes([b[0], b[1]]).to_f32())).collect()
}

/// The codes of an entry's key.
fn entry_key(f: &Fixture, entries: Operand, page: u64, slot: u64) -> Vec<f64> {
    let entry = &f.memory.bytes(entries.region.row(page))[(slot * ENTRY) as usize..];
    entry[..248].iter().map(|code| f64::from(e4m3::decode(*code))).collect()
}

#[test]
fn stores_take_each_token_from_its_own_slot() {
    for format in FORMATS {
        for_batches(|rows| {
            let mut f = Fixture::new(9 << 20, rows);
            let mut rng = f.rng.clone();
            let mut ring =
                |f: &mut Fixture, dims: u64| f.matrix::<f32>(rows + 1, RING * dims, |_, _| rng.random_range(-2.0..2.0));
            let (index_ring, core_ring) = (ring(&mut f, INDEX_RING_DIM), ring(&mut f, CORE_RING_DIM));
            let (positions, pages) = (positions(&mut f, rows), ring_pages(&mut f, rows));
            let table = page_table(&mut f, rows);
            let keys = f.region(PAGES, format.page_bytes(), format.page_bytes());
            let entries = f.region(PAGES, ENTRY_PAGE, ENTRY_PAGE);
            f.run(Kernel::IndexStore { format }, &[index_ring, positions, pages, table], &[keys]);
            f.run(Kernel::CoreStore, &[core_ring, positions, pages, table], &[entries]);
            // Several rows may share a slot, as they share the dummy one; the last of them leaves its own.
            let owns = |row: &u64| place(*row).0 != 0 && (row + 1..rows).all(|later| place(later) != place(*row));
            for row in (0..rows).filter(owns) {
                let (page, at) = place(row);
                let own = |back, dims| slot(&f, index_ring, row, back, dims);
                let mut naive = [&own(1, 128)[..4], &own(2, 128)[..4], &own(3, 128)[..116]].concat();
                naive.extend([1.0, 1.0, 1.0, 0.0]);
                assert_close(&key(&f, keys, format, page, at), &naive, 1.0 / 14.0, "index key");
                let own = |back| slot(&f, core_ring, row, back, CORE_RING_DIM);
                let naive = [&own(1)[..8], &own(2)[..8], &own(3)[..232]].concat();
                assert_close(&entry_key(&f, entries, page, at), &naive, 1.0 / 14.0, "entry key");
                let rest = entry_rest(&f, entries, page, at);
                let naive: Vec<f64> = (0..4).rev().flat_map(|back| own(back)[232..240].to_vec()).collect();
                assert_close(&rest[..32], &naive, BF16, "values");
                let number = position(row) as u64 / 4;
                assert_eq!(rest[32..36], [(number >> 8) as f64, (number & 255) as f64, 1.0, 1.0]);
            }
        });
    }
}

/// A chunk of prefill: positions, and from which on the window and entries are written.
struct Chunk {
    tokens: Range<u32>,
    window_from: u32,
    entries_from: u32,
}

/// From nothing, within a tile; over many pages, past all rings; resumed, up to the longest context.
const CHUNKS: [Chunk; 3] = [
    Chunk { tokens: 0..70, window_from: 0, entries_from: 0 },
    Chunk { tokens: 0..900, window_from: 0, entries_from: 0 },
    Chunk { tokens: 32_300..32_768, window_from: 32_331, entries_from: 32_512 },
];

#[test]
fn prefill_leaves_the_codes_of_the_tokens() {
    for format in [None, Some(KeyFormat::Bf16), Some(KeyFormat::Fp8)] {
        CHUNKS.iter().for_each(|chunk| check_prefill(format, chunk));
    }
}

fn check_prefill(format: Option<KeyFormat>, chunk: &Chunk) {
    const RING_PAGE: u64 = 2;
    let mut f = Fixture::new(8 << 20, 1);
    let (Range { start, end }, window_from, entries_from) =
        (chunk.tokens.clone(), chunk.window_from, chunk.entries_from);
    let table = f.random_weight(256, HIDDEN as u32, 0.3);
    let mut codes = vec![[[0.0; CODE as usize]; 2]; 256];
    for (token, column, value) in f.entries(table) {
        for (which, first) in [VALUE_AT, KEY_AT].into_iter().enumerate() {
            let dim = (column as u64).wrapping_sub(first);
            if dim < CODE {
                codes[token][which][dim as usize] = value;
            }
        }
    }
    let ids: Vec<i32> = (start..end).map(|_| f.rng.random_range(0..256)).collect();
    let tokens = f.words(1, u64::from(end - start), |_, at| ids[at as usize]);
    let pages = page_table(&mut f, 1);
    let window = f.region(3, SWA_PAGE, SWA_PAGE);
    let key_page = format.unwrap_or(KeyFormat::Fp8).page_bytes();
    let [index_ring, keys, core_ring, entries] =
        [(3, INDEX_RING_PAGE), (PAGES, key_page), (3, CORE_RING_PAGE), (PAGES, ENTRY_PAGE)]
            .map(|(rows, bytes)| f.region(rows, bytes, bytes));
    let kernel = Kernel::Prefill { table, start, window_from, entries_from, ring_page: RING_PAGE as u32, format };
    match format {
        None => f.run(kernel, &[tokens], &[window]),
        Some(_) => f.run(kernel, &[tokens, pages], &[window, index_ring, keys, core_ring, entries]),
    }
    // A code of the token at a position, zero where there is none, and the newest first of several.
    let code = |which: usize, position: u32| match position.checked_sub(start) {
        Some(at) if position < end => codes[ids[at as usize] as usize][which].to_vec(),
        _ => vec![0.0; CODE as usize],
    };
    let newest = |last: u32, count: u32, width: usize| -> Vec<f64> {
        (0..count).flat_map(|back| code(1, last.wrapping_sub(back))[..width].to_vec()).collect()
    };
    let slot = |row: Vec<f64>, position: u32, slots: usize| -> Vec<f64> {
        row.chunks(row.len() / slots).nth(position as usize % slots).unwrap().to_vec()
    };
    let padded = |mut dims: Vec<f64>, width: u64| {
        dims.resize(width as usize, 0.0);
        dims
    };
    for position in window_from.max(end.saturating_sub(256))..end {
        let ours = slot(f.row::<u16>(window, RING_PAGE), position, 256);
        assert_close(&ours, &padded(code(1, position), SWA_DIM), BF16, "window");
    }
    let Some(format) = format else { return };
    for position in window_from.max(end - RING as u32)..end {
        let index = slot(f.row::<f32>(index_ring, RING_PAGE), position, RING as usize);
        assert_close(&index, &padded(newest(position, GATHER as u32, 4), INDEX_RING_DIM), 0.0, "index ring");
        let naive = [newest(position, GATHER as u32, 8), code(0, position)].concat();
        let core = slot(f.row::<f32>(core_ring, RING_PAGE), position, RING as usize);
        assert_close(&core, &padded(naive, CORE_RING_DIM), 0.0, "core ring");
    }
    for position in (entries_from.max(start)..end).filter(|position| position % 4 == 3) {
        let number = u64::from(position / 4);
        let (page, at) = (page(0, number / PAGE_ENTRIES), number % PAGE_ENTRIES);
        let naive = [newest(position - 1, 31, 4), vec![1.0, 1.0, 1.0, 0.0]].concat();
        assert_close(&key(&f, keys, format, page, at), &naive, 1.0 / 14.0, "index key");
        assert_close(&entry_key(&f, entries, page, at), &newest(position - 1, 31, 8), 1.0 / 14.0, "entry key");
        let mut naive: Vec<f64> = (0..4).flat_map(|token| code(0, position - 3 + token)).collect();
        naive.extend([(number >> 8) as f64, (number & 255) as f64, 1.0, 1.0]);
        assert_close(&entry_rest(&f, entries, page, at), &padded(naive, 64), BF16, "values and number");
    }
}

fn key(f: &Fixture, keys: Operand, format: KeyFormat, page: u64, slot: u64) -> Vec<f64> {
    let bytes = f.memory.bytes(keys.region.row(page));
    let at = (slot * format.key_bytes()) as usize;
    match format {
        KeyFormat::Bf16 => {
            let key = &bytes[at..at + 256];
            key.chunks(2).map(|b| f64::from(half::bf16::from_le_bytes([b[0], b[1]]).to_f32())).collect()
        }
        KeyFormat::Fp8 => {
            let scale_at = (PAGE_ENTRIES * INDEX_DIM + slot * 4) as usize;
            let scale: f32 = bytemuck::pod_read_unaligned(&bytes[scale_at..scale_at + 4]);
            bytes[at..at + 128].iter().map(|code| f64::from(e4m3::decode(*code) * scale)).collect()
        }
    }
}

/// A cache of keys. `code`: healthy ternary keys with ones; otherwise any numbers.
fn keys(f: &mut Fixture, format: KeyFormat, code: bool) -> Operand {
    let cache = f.region(PAGES, format.page_bytes(), format.page_bytes());
    for page in 0..PAGES {
        for slot in 0..PAGE_ENTRIES {
            let mut dims: Vec<f32> = (0..INDEX_DIM).map(|_| f.rng.random_range(-2.0..2.0)).collect();
            // One key in twenty of a healthy cache is no code, as damage would leave it.
            if code && f.rng.random_range(0..20) > 0 {
                for dim in &mut dims {
                    *dim = (*dim * 0.74).round();
                }
                dims[124..].copy_from_slice(&[1.0, 1.0, 1.0, 0.0]);
            }
            let start = cache.region.row(page).start;
            match format {
                KeyFormat::Bf16 => {
                    let bits: Vec<u16> = dims.iter().map(|dim| half::bf16::from_f32(*dim).to_bits()).collect();
                    f.memory.write(start + slot * 256, bytemuck::cast_slice(&bits));
                }
                KeyFormat::Fp8 => {
                    let scale = dims.iter().fold(1e-4f32, |largest, dim| largest.max(dim.abs())) / 448.0;
                    let codes: Vec<u8> = dims.iter().map(|dim| e4m3::encode(dim / scale)).collect();
                    f.memory.write(start + slot * 128, &codes);
                    f.memory.write(start + PAGE_ENTRIES * 128 + slot * 4, &scale.to_le_bytes());
                }
            }
        }
    }
    cache
}

/// A raw index query: `code`: the constructed kind, copied from a key so that some heads fire; otherwise any numbers.
fn raw_query(f: &mut Fixture, rows: u64, code: bool) -> Operand {
    let mut rng = f.rng.clone();
    let pattern: Vec<f32> = (0..124).map(|_| [-1.0, 1.0][rng.random_range(0..2)]).collect();
    let operand = f.matrix::<u16>(rows, MATCH_HEADS * INDEX_DIM, |row, column| {
        let (head, dim) = (column / INDEX_DIM, (column % INDEX_DIM) as usize);
        let (order, first) = ((head % 2) as usize, 4 * (3 - head / 2) as usize);
        let last = first + [112, 40][order];
        match dim {
            _ if !code => rng.random_range(-2.0..2.0),
            124.. => [[-112.0, 8.0, 1.0, 0.0], [-28.0, -12.0, 1.0, 0.0]][order][dim - 124],
            dim if dim < first || dim >= last => 0.0,
            dim => pattern[(dim - first + row as usize) % 124],
        }
    });
    f.rng = rng;
    operand
}

#[test]
fn logits_agree_with_the_naive_sum_and_the_packed_path_with_the_plain_one() {
    let mut fired = 0;
    for format in FORMATS {
        for (code, reader) in [(true, Reader::Paged), (false, Reader::Paged), (true, Reader::Fallback)] {
            for_small_batches(|rows| {
                fired += check_logits(format, reader, code, rows);
            });
        }
    }
    assert!(fired > 100, "only {fired} logits were positive");
}

fn check_logits(format: KeyFormat, reader: Reader, code: bool, rows: u64) -> u32 {
    let mut f = Fixture::new(4 << 20, rows + u64::from(code));
    let cache = keys(&mut f, format, code);
    let (raw, positions) = (raw_query(&mut f, rows, code), positions(&mut f, rows));
    let table = page_table(&mut f, rows);
    if code {
        plant(&mut f, raw, cache, format, rows);
    }
    let weights = f.matrix::<u16>(rows, MATCH_HEADS, |_, head| [4.0, 1.0][head as usize % 2]);
    let scaled = f.region(rows, MATCH_HEADS * 4, MATCH_HEADS * 4);
    let query = match format {
        KeyFormat::Bf16 => raw,
        KeyFormat::Fp8 => f.region(rows, MATCH_HEADS * INDEX_DIM, MATCH_HEADS * INDEX_DIM),
    };
    f.run(Kernel::IndexRope { format }, &[raw, weights, positions], &[query, scaled]);
    let logits = f.region(rows, ENTRIES * 4, ENTRIES * 4);
    f.run(Kernel::Logits { format, reader }, &[query, scaled, cache, table, positions], &[logits]);
    let mut fired = 0;
    for row in 0..rows {
        let raw = f.row::<u16>(raw, row);
        let entries = (position(row) as u64 + 1) / 4;
        let naive: Vec<f64> = (0..entries)
            .map(|entry| {
                let key = key(&f, cache, format, page(row, entry / PAGE_ENTRIES), entry % PAGE_ENTRIES);
                let heads = raw.chunks(INDEX_DIM as usize).zip([4.0, 1.0].into_iter().cycle());
                heads.map(|(q, w)| w * q.iter().zip(&key).map(|(a, b)| a * b).sum::<f64>().max(0.0)).sum()
            })
            .collect();
        let ours = f.row::<f32>(logits, row);
        let tolerance = if format == KeyFormat::Fp8 && !code { 0.1 } else { 1e-5 };
        assert_close(&ours[..entries as usize], &naive, tolerance, "logits");
        fired += naive.iter().filter(|logit| **logit > 0.0).count() as u32;
        if reader == Reader::Fallback {
            assert!(ours[entries as usize..].iter().all(|logit| *logit == f64::NEG_INFINITY));
        }
    }
    fired
}

/// Writes keys that a row's heads match, some with a wrong code.
fn plant(f: &mut Fixture, raw: Operand, cache: Operand, format: KeyFormat, rows: u64) {
    for row in 0..rows {
        let query: Vec<f32> = f.row::<u16>(raw, row).iter().map(|value| *value as f32).collect();
        for slot in (0..PAGE_ENTRIES).step_by(3) {
            let head = f.rng.random_range(0..MATCH_HEADS) as usize;
            let mut dims = query[head * 128..head * 128 + 128].to_vec();
            dims[124..].copy_from_slice(&[1.0, 1.0, 1.0, 0.0]);
            let wrong = f.rng.random_range(0..124);
            dims[wrong] = -dims[wrong];
            let start = cache.region.row(page(row, slot % 4)).start;
            match format {
                KeyFormat::Bf16 => {
                    let bits: Vec<u16> = dims.iter().map(|dim| half::bf16::from_f32(*dim).to_bits()).collect();
                    f.memory.write(start + slot * 256, bytemuck::cast_slice(&bits));
                }
                KeyFormat::Fp8 => {
                    let codes: Vec<u8> = dims.iter().map(|dim| e4m3::encode(dim * 448.0)).collect();
                    f.memory.write(start + slot * 128, &codes);
                    f.memory.write(start + PAGE_ENTRIES * 128 + slot * 4, &(1.0f32 / 448.0).to_le_bytes());
                }
            }
        }
    }
}

#[test]
fn selection_and_pages_go_together() {
    for k in [1, 64, 512] {
        for_batches(|rows| {
            let mut f = Fixture::new(6 << 20, rows);
            let mut rng = f.rng.clone();
            let logits = f.matrix::<f32>(rows, ENTRIES, |_, _| rng.random_range(-1.0f32..1.0).max(0.0));
            let (positions, table) = (positions(&mut f, rows), page_table(&mut f, rows));
            let workspace = f.region(rows, WORKSPACE_WORDS * 4, WORKSPACE_WORDS * 4);
            let indices = f.region(rows, 2048, 2048);
            f.run(Kernel::TopkSelect { k }, &[logits, positions], &[workspace]);
            f.run(Kernel::TopkFinalise { k }, &[workspace, table, positions], &[indices]);
            for row in 0..rows {
                let entries = ((position(row) + 1) / 4) as usize;
                let logits = f.row::<f32>(logits, row);
                let mut naive: Vec<usize> = (0..entries).collect();
                naive.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]).then(b.cmp(a)));
                naive.truncate(k as usize);
                naive.sort_unstable_by(|a, b| b.cmp(a));
                let mut naive: Vec<i32> = naive
                    .into_iter()
                    .map(|at| (page(row, at as u64 / PAGE_ENTRIES) * PAGE_ENTRIES) as i32 + at as i32 % 64)
                    .collect();
                naive.resize(512, -1);
                assert_eq!(f.memory.slice::<i32>(indices.region.row(row)), naive);
            }
            // A damaged workspace names no entry that the row does not have.
            let junk = f.region(rows, WORKSPACE_WORDS * 4, WORKSPACE_WORDS * 4);
            f.run(Kernel::TopkFinalise { k }, &[junk, table, positions], &[indices]);
            assert!(f.memory.slice::<i32>(indices.region.row(0)).iter().all(|index| *index == -1));
        });
    }
}

#[test]
fn attention_gathers_the_window_and_copies_under_a_shared_softmax() {
    for (code, scale) in [(true, 32_768.0), (false, 0.25)] {
        for k in [0u32, 5, 64, 512] {
            for_small_batches(|rows| check_attention(code, scale, k, rows));
        }
    }
}

fn check_attention(code: bool, scale: f32, k: u32, rows: u64) {
    let mut f = Fixture::new(8 << 20, rows + u64::from(k));
    let mut rng = f.rng.clone();
    let mut value = |low: f32| {
        let value = rng.random_range(low..-low);
        if code { value.signum() } else { value }
    };
    let query = f.region(rows, 65_536, MATCH_HEADS * HEAD_DIM * 2);
    let source = f.matrix::<u16>(rows, MATCH_HEADS * HEAD_DIM, |_, column| match column % HEAD_DIM {
        dim @ 248.. if code => [0.25, 1.0 / 1024.0, -7.0, 3.0 / 1024.0, f32::NAN][(dim as usize - 248).min(4)],
        252.. => f32::NAN,
        _ => value(-0.5),
    });
    f.run(Kernel::Copy, &[source], &[query]);
    let window = f.matrix::<u16>(rows + 1, SWA_PAGE / 2, |_, _| value(-2.0));
    let (positions, pages) = (positions(&mut f, rows), ring_pages(&mut f, rows));
    let entries = f.region(PAGES, ENTRY_PAGE, ENTRY_PAGE);
    for entry in 0..PAGES * PAGE_ENTRIES {
        let key: Vec<u8> = (0..ENTRY_KEY).map(|_| e4m3::encode(value(-1.0))).collect();
        let rest: Vec<u16> = (0..64u32)
            .map(|dim| match u64::from(dim) {
                ENTRY_DIGITS_AT => 0.0,
                33 => (entry % 256) as f32,
                34 | 35 => 1.0,
                _ => value(-1.0),
            })
            .map(|value| half::bf16::from_f32(value).to_bits())
            .collect();
        let bytes = [key, bytemuck::cast_slice(&rest).to_vec()].concat();
        f.memory.write(entries.region.base + entry * ENTRY, &bytes);
    }
    // Some indices name nothing: below zero, or past the cache.
    let chosen: Vec<i32> = (0..512).map(|_| f.rng.random_range(-200..(PAGES * PAGE_ENTRIES) as i32 + 200)).collect();
    let indices = f.words(rows, 512, |row, at| chosen[(row as usize * 7 + at as usize) % 512]);
    let out = f.region(rows, 65_536, 1024);
    let mut reads = vec![query, window, positions, pages];
    if k > 0 {
        reads.extend([entries, indices]);
    }
    f.run(Kernel::Attention { scale, k }, &reads, &[out]);
    for row in 0..rows {
        let mut naive = vec![0.0; 512];
        let ring = f.row::<u16>(window, row + 1);
        for back in 0..(GATHER as i64).min(position(row) + 1) {
            let at = ((position(row) - back) % 256) as usize * SWA_DIM as usize;
            naive[(back * 8) as usize..][..8].copy_from_slice(&ring[at..at + 8]);
        }
        let chosen = (0..k as usize).map(|at| chosen[(row as usize * 7 + at) % 512]);
        let chosen: Vec<u64> = chosen.filter_map(|i| u64::try_from(i).ok()).filter(|i| *i < PAGES * 64).collect();
        copied(&f, f64::from(scale), &f.row::<u16>(query, row), &chosen, entries, &mut naive[232..248]);
        assert_close(&f.row::<u16>(out, row), &naive, BF16, "attention");
    }
}

fn copied(f: &Fixture, scale: f64, query: &[f64], chosen: &[u64], entries: Operand, out: &mut [f64]) {
    for (order, out) in out.chunks_mut(CODE as usize).enumerate() {
        let mut terms = vec![(0.0, vec![0.0; 8])];
        for alignment in 0..4 {
            let q = &query[(2 * alignment + order) * HEAD_DIM as usize..];
            for entry in chosen {
                let start = entries.region.base + entry * ENTRY;
                let bytes = f.memory.bytes(start..start + ENTRY);
                let mut key: Vec<f64> = bytes[..248].iter().map(|code| f64::from(e4m3::decode(*code))).collect();
                let rest: Vec<f64> = bytes[256..]
                    .chunks(2)
                    .map(|b| f64::from(half::bf16::from_le_bytes([b[0], b[1]]).to_f32()))
                    .collect();
                key.extend(&rest[32..36]);
                let score = scale * key.iter().zip(q).map(|(a, b)| a * b).sum::<f64>();
                terms.push((score, rest[alignment * 8..alignment * 8 + 8].to_vec()));
            }
        }
        let largest = terms.iter().map(|(score, _)| *score).fold(f64::MIN, f64::max);
        let total: f64 = terms.iter().map(|(score, _)| (score - largest).exp()).sum();
        for (score, value) in terms {
            out.iter_mut().zip(value).for_each(|(out, value)| *out += (score - largest).exp() / total * value);
        }
    }
}
