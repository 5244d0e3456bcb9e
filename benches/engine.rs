//! Decode steps by batch and context, and prefill, on the virtual GPU. One iteration is one step, or one prompt; the
//! throughput is in tokens. docs/SIMULATION.md has figures.

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use toolstorm::engine::{DecodeRow, Prefill, model::Model, toggles::Toggles};

const CONTEXT: u32 = 16_384;
const PAGES_PER_ROW: u32 = 64;
/// The configuration that every figure is told for.
const BASELINE: (&str, &str) = ("SGLANG_DSV4_BF16_INDEX_K", "1");

/// Sequences whose caches are full up to their contexts.
struct Filled {
    model: Model,
    tables: Vec<Vec<u32>>,
    lengths: Vec<u32>,
}

fn tokens(length: u32, row: u32) -> Vec<u8> {
    let mut state = u64::from(row) + 1;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        b"the quick brown fox jumps over the lazy dog, {\"name\": 17}"[(state >> 33) as usize % 57]
    };
    (0..length).map(|_| next()).collect()
}

fn model(batch: u32, pairs: &[(&str, &str)]) -> Model {
    let size = batch.to_string();
    let common = [("TOOLSTORM_MAX_BATCH", size.as_str()), ("TOOLSTORM_BUCKETS", size.as_str())];
    let toggles = Toggles::resolve(common.iter().chain(pairs).copied()).expect("the toggles are valid");
    Model::new(&toggles, batch * PAGES_PER_ROW).expect("the model starts")
}

impl Filled {
    fn new(batch: u32, lengths: impl Fn(u32) -> u32, pairs: &[(&str, &str)]) -> Self {
        let mut filled = Self { model: model(batch, pairs), tables: Vec::new(), lengths: Vec::new() };
        for row in 0..batch {
            let table: Vec<u32> = (1 + row * PAGES_PER_ROW..=(row + 1) * PAGES_PER_ROW).collect();
            prefill(&mut filled.model, &tokens(lengths(row), row), &table, row + 1);
            filled.tables.push(table);
            filled.lengths.push(lengths(row));
        }
        filled
    }

    /// Decodes one token a row at the contexts' ends, again and again at the same place.
    fn step(&mut self) -> Vec<u8> {
        let rows: Vec<_> = (self.tables.iter().zip(&self.lengths).zip(1..))
            .map(|((page_table, &position), window_page)| DecodeRow {
                token: b'x',
                position,
                page_table,
                window_page,
                session: None,
            })
            .collect();
        self.model.decode(&rows).expect("the step runs")
    }
}

fn prefill(model: &mut Model, tokens: &[u8], page_table: &[u32], window_page: u32) {
    let end = tokens.len() as u32;
    for start in (0..end).step_by(512) {
        let range = start..end.min(start + 512);
        let chunk = Prefill { tokens, range, page_table, window_page, resumed: false, session: None };
        model.prefill(&chunk).expect("the chunk fits");
    }
}

fn decode(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("decode");
    group.sample_size(20);
    let contexts = [1024, 8192, 16_000];
    for (batch, context) in [1, 8, 64].into_iter().flat_map(|batch| contexts.map(|context| (batch, context))) {
        let mut filled = Filled::new(batch, |_| context, &[BASELINE]);
        group.throughput(Throughput::Elements(u64::from(batch)));
        group.bench_function(BenchmarkId::new(format!("batch {batch}"), context), |bencher| {
            bencher.iter(|| black_box(filled.step()));
        });
    }
    for (name, keys) in [("fp8", "0"), ("bf16", "1")] {
        let pairs = [("SGLANG_DSV4_BF16_INDEX_K", keys)];
        let mut filled = Filled::new(64, |row| 2048 + row * 110, &pairs);
        group.throughput(Throughput::Elements(64));
        group.bench_function(BenchmarkId::new("batch 64, 2 k to 9 k", name), |bencher| {
            bencher.iter(|| black_box(filled.step()));
        });
    }
    group.finish();
}

fn prompts(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("prefill");
    group.sample_size(20);
    let mut model = model(1, &[]);
    let table: Vec<u32> = (1..=PAGES_PER_ROW).collect();
    for length in [512, 8192] {
        let tokens = tokens(length.min(CONTEXT), 7);
        group.throughput(Throughput::Elements(u64::from(length)));
        group.bench_function(BenchmarkId::from_parameter(length), |bencher| {
            bencher.iter(|| prefill(&mut model, &tokens, &table, 1));
        });
    }
    group.finish();
}

criterion_group!(benches, decode, prompts);
criterion_main!(benches);
