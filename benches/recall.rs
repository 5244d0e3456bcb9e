//! Recall of the index on keys without any structure: of the entries with the k largest logits in `f64`, how many the
//! device selects with bf16 and with fp8 keys, against context length and k. The engine's own keys are exact in both
//! formats by construction, so its answers cannot show this; random ones do.
//!
//! Prints CSV. `cargo bench --bench recall > results/recall-index.csv` takes a minute; nothing here is a timing.

#![expect(clippy::print_stdout, reason = "the table is what it is for")]

use std::collections::BTreeSet;

use half::{bf16, slice::HalfFloatSliceExt};
use rand::Rng;
use rand_distr::{Distribution, StandardNormal};
use toolstorm::{
    device::{
        Device, Op, Operand, StreamId, Tensor,
        kernel::{INDEX_DIM, Kernel, KeyFormat, MATCH_HEADS, PAGE_ENTRIES, Reader, WORKSPACE_WORDS},
        sim::{Config, Sim, reference::Reference},
    },
    seed::Seed,
};

const QUERIES: u64 = 32;
const DIM: usize = INDEX_DIM as usize;
const HEADS: usize = MATCH_HEADS as usize;

/// A device with an arena, and a stream to work on.
struct Bench {
    device: Device,
    stream: StreamId,
}

impl Bench {
    fn put<T: bytemuck::NoUninit>(&self, values: &[T]) -> Tensor {
        let bytes: &[u8] = bytemuck::cast_slice(values);
        let tensor = self.device.alloc(self.stream, bytes.len() as u64, "input").expect("room");
        self.device.copy_in(tensor.address(), bytes).expect("a copy");
        tensor
    }

    fn take<T: bytemuck::AnyBitPattern + bytemuck::NoUninit>(&self, tensor: &Tensor, count: usize) -> Vec<T> {
        let mut values = vec![T::zeroed(); count];
        self.device.copy_out(tensor.address(), bytemuck::cast_slice_mut(&mut values)).expect("a copy");
        values
    }

    fn space(&self, bytes: u64) -> Tensor {
        self.device.alloc(self.stream, bytes, "output").expect("room")
    }

    fn run(&self, kernel: Kernel, reads: Vec<Operand>, writes: Vec<Operand>) {
        self.device.enqueue(self.stream, Op { kernel, reads, writes, layer: None }).expect("an op");
        self.device.synchronize().expect("an end");
    }

    /// Heads of queries as the kernels read them, and their weights; keys are quantised as if they were heads of queries.
    fn finish(&self, heads: &[bf16], weights: &[bf16], format: KeyFormat) -> (Tensor, Tensor) {
        let rows = (weights.len() / HEADS) as u64;
        let (heads, weights) = (self.put(heads.reinterpret_cast()), self.put(weights.reinterpret_cast()));
        let positions = self.put(&vec![0i32; rows as usize]);
        let width = if format == KeyFormat::Fp8 { 1 } else { 2 };
        let out = if format == KeyFormat::Fp8 { self.space(heads.bytes() / 2) } else { heads.clone() };
        let scaled = self.space(rows * MATCH_HEADS * 4);
        self.run(
            Kernel::IndexRope { format },
            vec![
                rows_of(&heads, MATCH_HEADS * INDEX_DIM * 2, rows),
                rows_of(&weights, MATCH_HEADS * 2, rows),
                rows_of(&positions, 4, rows),
            ],
            vec![rows_of(&out, MATCH_HEADS * INDEX_DIM * width, rows), rows_of(&scaled, MATCH_HEADS * 4, rows)],
        );
        (out, scaled)
    }
}

fn rows_of(tensor: &Tensor, bytes: u64, rows: u64) -> Operand {
    tensor.operand(tensor.region(bytes, bytes, rows, 0))
}

fn gaussian(rng: &mut impl Rng, count: usize) -> Vec<bf16> {
    (0..count).map(|_| bf16::from_f32(StandardNormal.sample(rng))).collect()
}

/// Index pages with `keys` in the wanted format.
fn pages(bench: &Bench, keys: &[bf16], format: KeyFormat) -> Tensor {
    if format == KeyFormat::Bf16 {
        return bench.put(keys.reinterpret_cast());
    }
    let entries = keys.len() / DIM;
    let (codes, scales) = bench.finish(keys, &vec![bf16::ONE; entries], format);
    let codes = bench.take::<u8>(&codes, keys.len());
    let scales = bench.take::<f32>(&scales, entries);
    let page = PAGE_ENTRIES as usize;
    let bytes: Vec<u8> = codes
        .chunks(page * DIM)
        .zip(scales.chunks(page))
        .flat_map(|(codes, scales)| codes.iter().copied().chain(bytemuck::cast_slice(scales).iter().copied()))
        .collect();
    bench.put(&bytes)
}

/// The k entries that the device selects for each query.
fn selected(
    bench: &Bench,
    (queries, weights): (&[bf16], &[bf16]),
    keys: &[bf16],
    format: KeyFormat,
    k: u32,
) -> Vec<BTreeSet<usize>> {
    let entries = (keys.len() / DIM) as u64;
    let count = entries / PAGE_ENTRIES;
    let (queries, weights) = bench.finish(queries, weights, format);
    let cache = pages(bench, keys, format);
    let page_bytes = cache.bytes().min(format.page_bytes() * count) / count;
    let table: Vec<i32> = (0..QUERIES).flat_map(|_| 0..count as i32).collect();
    let table = bench.put(&table);
    let positions = bench.put(&vec![(entries * 4 - 1) as i32; QUERIES as usize]);
    let logits = bench.space(QUERIES * entries * 4);
    let workspace = bench.space(QUERIES * WORKSPACE_WORDS * 4);
    let width = if format == KeyFormat::Fp8 { 1 } else { 2 };
    bench.run(
        Kernel::Logits { format, reader: Reader::Paged },
        vec![
            rows_of(&queries, MATCH_HEADS * INDEX_DIM * width, QUERIES),
            rows_of(&weights, MATCH_HEADS * 4, QUERIES),
            cache.indexed(cache.region(page_bytes, page_bytes, count, 0)),
            rows_of(&table, count * 4, QUERIES),
            rows_of(&positions, 4, QUERIES),
        ],
        vec![logits.indexed(logits.region(entries * 4, entries * 4, QUERIES, 0))],
    );
    bench.run(
        Kernel::TopkSelect { k },
        vec![logits.indexed(logits.region(entries * 4, entries * 4, QUERIES, 0)), rows_of(&positions, 4, QUERIES)],
        vec![rows_of(&workspace, WORKSPACE_WORDS * 4, QUERIES)],
    );
    let words = bench.take::<u32>(&workspace, (QUERIES * WORKSPACE_WORDS) as usize);
    words
        .chunks(WORKSPACE_WORDS as usize)
        .map(|row| row[2..].chunks(2).take(row[0] as usize).map(|pair| pair[0] as usize).collect())
        .collect()
}

/// The entries with the k largest logits in `f64`, for each query.
fn exact((queries, weights): (&[bf16], &[bf16]), keys: &[bf16], k: u32) -> Vec<BTreeSet<usize>> {
    let row = |(query, weights): (&[bf16], &[bf16])| {
        let logit = |key: &[bf16]| {
            let head = |(head, weight): (&[bf16], &bf16)| {
                let dot: f64 = head.iter().zip(key).map(|(a, b)| a.to_f64() * b.to_f64()).sum();
                weight.to_f64() * dot.max(0.0)
            };
            query.chunks(DIM).zip(weights).map(head).sum::<f64>()
        };
        let mut order: Vec<_> = keys.chunks(DIM).map(logit).zip(0..).collect();
        order.sort_by(|a: &(f64, usize), b| b.0.total_cmp(&a.0).then(b.1.cmp(&a.1)));
        order[..k as usize].iter().map(|(_, entry)| *entry).collect()
    };
    queries.chunks(HEADS * DIM).zip(weights.chunks(HEADS)).map(row).collect()
}

fn main() {
    println!("context_tokens,index_topk,keys,queries,recall");
    for entries in [1024, 4096, 16_384] {
        let mut rng = Seed(1).fork("recall").index(entries).rng();
        let keys = gaussian(&mut rng, entries as usize * DIM);
        let queries = gaussian(&mut rng, QUERIES as usize * HEADS * DIM);
        let weights: Vec<_> = gaussian(&mut rng, QUERIES as usize * HEADS)
            .into_iter()
            .map(|w| bf16::from_f32(w.to_f32().abs()))
            .collect();
        for k in [16, 64, 512] {
            let truth = exact((&queries, &weights), &keys, k);
            for (name, format) in [("bf16", KeyFormat::Bf16), ("fp8", KeyFormat::Fp8)] {
                let device = Device::new(Box::new(Sim::new(Config::default(), Box::new(Reference::new()))));
                device.reserve(256 << 20).expect("an arena");
                let stream = device.stream("main").expect("a stream");
                let bench = Bench { device, stream };
                let found = selected(&bench, (&queries, &weights), &keys, format, k);
                let hits: usize =
                    truth.iter().zip(&found).map(|(truth, found)| truth.intersection(found).count()).sum();
                let recall = hits as f64 / (QUERIES * u64::from(k)) as f64;
                println!("{},{k},{name},{QUERIES},{recall:.4}", entries * 4);
            }
        }
    }
}
