//! Every kernel as a case: how to fill its operands, and how far backends may differ.

use rand::{Rng, RngExt};
use toolstorm::{
    device::{
        Device, Op, Operand, SparseWeight, StreamId, Tensor, WeightId,
        kernel::{
            CHECKSUMS_ROW, CORE_RING_PAGE, ENTRY, ENTRY_KEY, ENTRY_PAGE, FEED_FORWARD, HEAD_DIM, HEADS, HIDDEN,
            INDEX_DIM, INDEX_HEADS, INDEX_RING_PAGE, KV, Kernel, KeyFormat, LIVE, MATCH_HEADS, MatmulSite, NormSite,
            PAGE_ENTRIES, Q_LORA, Q_LORA_GROUP, QUANTISE_GROUP, Reader, SWA_PAGE, TOPK_WORDS, WORKSPACE_WORDS,
        },
    },
    seed::Seed,
};

const ROWS: u64 = 5;
/// Pages of the caches, and of one row's table.
const PAGES: u64 = 24;
const TABLE: u64 = 4;
const ENTRIES: u64 = TABLE * PAGE_ENTRIES;

/// How far two backends may differ, relative to the larger of one and the value.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Tolerance {
    Exact,
    Bf16(f32),
    F32(f32),
    /// Of the largest magnitude that the op should write: sums of large terms that nearly cancel keep the terms' error.
    OfLargest(f32),
}

/// One kernel with its scalars.
pub(crate) struct Case {
    pub(crate) name: &'static str,
    pub(crate) tolerance: Tolerance,
    build: fn(&mut Builder<'_>) -> Op,
}

/// A case on a device: its tensors filled, its op ready.
pub(crate) struct Prepared {
    pub(crate) stream: StreamId,
    pub(crate) tensors: Vec<Tensor>,
    pub(crate) op: Op,
}

impl Prepared {
    pub(crate) fn new(device: &Device, case: &Case, seed: Seed) -> Self {
        let stream = device.stream("conformance").expect("a stream");
        let mut builder = Builder { device, stream, rng: seed.rng(), tensors: Vec::new() };
        let op = (case.build)(&mut builder);
        Self { stream, tensors: builder.tensors, op }
    }
}

struct Builder<'a> {
    device: &'a Device,
    stream: StreamId,
    rng: rand_pcg::Pcg64Mcg,
    tensors: Vec<Tensor>,
}

impl Builder<'_> {
    /// An allocation full of noise: poison where it is written, stale bytes where it is not read.
    fn tensor(&mut self, bytes: u64) -> Tensor {
        let tensor = self.device.alloc(self.stream, bytes, "case").expect("an allocation");
        let mut noise = vec![0u8; bytes as usize];
        self.rng.fill_bytes(&mut noise);
        self.put(&tensor, 0, &noise);
        self.tensors.push(tensor.clone());
        tensor
    }

    fn put(&self, tensor: &Tensor, offset: u64, bytes: &[u8]) {
        self.device.copy_in(tensor.address() + offset, bytes).expect("a copy to the device");
    }

    /// `len` bytes from `offset` of rows of `stride`, filled row by row by `fill`.
    fn rows(
        &mut self,
        (stride, len, offset): (u64, u64, u64),
        mut fill: impl FnMut(&mut rand_pcg::Pcg64Mcg, u64) -> Vec<u8>,
    ) -> Operand {
        let tensor = self.tensor(ROWS * stride);
        for row in 0..ROWS {
            let bytes = fill(&mut self.rng, row);
            assert_eq!(bytes.len() as u64, len, "a row's bytes");
            self.put(&tensor, row * stride + offset, &bytes);
        }
        tensor.operand(tensor.region(stride, len, ROWS, offset))
    }

    fn bf16(&mut self, stride: u64, dims: u64, offset: u64) -> Operand {
        self.rows((stride, dims * 2, offset), |rng, _| (0..dims).flat_map(|_| bf16(number(rng))).collect())
    }

    fn words(&mut self, mut word: impl FnMut(&mut rand_pcg::Pcg64Mcg, u64) -> i32) -> Operand {
        self.rows((4, 4, 0), |rng, row| word(rng, row).to_le_bytes().to_vec())
    }

    /// An output of noise.
    fn out(&mut self, stride: u64, len: u64) -> Operand {
        let tensor = self.tensor(ROWS * stride);
        tensor.operand(tensor.region(stride, len, ROWS, 0))
    }

    fn positions(&mut self) -> Operand {
        let limit = (ENTRIES * 4) as i32;
        self.words(|rng, row| if row == 0 { 0 } else { rng.random_range(0..limit) })
    }

    /// Distinct ring pages, so that rows do not meet.
    fn ring_pages(&mut self) -> Operand {
        self.words(|_, row| 1 + row as i32 * 3)
    }

    /// Distinct pages for all rows.
    fn table(&mut self) -> Operand {
        let mut pages: Vec<i32> = (1..PAGES as i32).collect();
        rand::seq::SliceRandom::shuffle(&mut pages[..], &mut self.rng);
        let mut next = pages.into_iter();
        let row = |_: &mut rand_pcg::Pcg64Mcg, _| {
            (0..TABLE).flat_map(|_| next.next().unwrap_or(1).to_le_bytes()).collect::<Vec<u8>>()
        };
        let operand = self.rows((TABLE * 4, TABLE * 4, 0), row);
        Operand { indexed: true, ..operand }
    }

    /// A cache of `pages` of `page` bytes, filled by `fill`.
    fn cache(&mut self, page: u64, mut fill: impl FnMut(&mut rand_pcg::Pcg64Mcg) -> Vec<u8>) -> Operand {
        let tensor = self.tensor(PAGES * page);
        for number in 0..PAGES {
            let bytes = fill(&mut self.rng);
            self.put(&tensor, number * page, &bytes);
        }
        tensor.indexed(tensor.region(page, page, PAGES, 0))
    }

    fn ring(&mut self, page: u64) -> Operand {
        self.cache(page, |rng| (0..page / 4).flat_map(|_| number(rng).to_le_bytes()).collect())
    }

    fn keys(&mut self, format: KeyFormat) -> Operand {
        self.cache(format.page_bytes(), |rng| match format {
            KeyFormat::Bf16 => (0..PAGE_ENTRIES * INDEX_DIM).flat_map(|_| bf16(number(rng))).collect(),
            KeyFormat::Fp8 => {
                let mut bytes: Vec<u8> = (0..PAGE_ENTRIES * INDEX_DIM).map(|_| e4m3(rng)).collect();
                bytes.extend((0..PAGE_ENTRIES).flat_map(|_| rng.random_range(0.1f32..2.0).to_le_bytes()));
                bytes
            }
        })
    }

    fn entries(&mut self) -> Operand {
        self.cache(ENTRY_PAGE, |rng| {
            let entry = |rng: &mut rand_pcg::Pcg64Mcg| {
                let mut bytes: Vec<u8> = (0..ENTRY_KEY).map(|_| [0x38, 0xb8, 0][rng.random_range(0..3)]).collect();
                bytes.extend((0..(ENTRY - ENTRY_KEY) / 2).flat_map(|_| bf16(number(rng))));
                bytes
            };
            (0..PAGE_ENTRIES).flat_map(|_| entry(rng)).collect()
        })
    }

    /// A sparse weight whose values are exact in bf16.
    fn weight(&mut self, rows: u64, columns: u64, stored: u64) -> WeightId {
        let mut entries = Vec::new();
        for row in 0..rows {
            for _ in 0..self.rng.random_range(0..=stored) {
                entries.push((row as u32, self.rng.random_range(0..columns) as u32, number(&mut self.rng)));
            }
        }
        self.load(&SparseWeight::from_entries(rows as u32, columns as u32, &entries))
    }

    fn load(&self, weight: &SparseWeight) -> WeightId {
        self.device.load_weight(weight).expect("a weight")
    }

    fn gain(&mut self, columns: u64) -> WeightId {
        let entries: Vec<_> = (0..columns).map(|column| (0, column as u32, number(&mut self.rng))).collect();
        self.load(&SparseWeight::from_entries(1, columns as u32, &entries))
    }
}

/// A value with few bits.
fn number(rng: &mut impl Rng) -> f32 {
    rng.random_range(-64..=64) as f32 / 16.0
}

fn bf16(value: f32) -> [u8; 2] {
    ((value.to_bits() >> 16) as u16).to_le_bytes()
}

/// A finite e4m3 code.
fn e4m3(rng: &mut impl Rng) -> u8 {
    let code: u8 = rng.random();
    if code & 0x7f == 0x7f { code & 0x80 } else { code }
}

fn op<const R: usize, const W: usize>(kernel: Kernel, reads: [Operand; R], writes: [Operand; W]) -> Op {
    Op { kernel, reads: reads.into(), writes: writes.into(), layer: None }
}

fn copy(b: &mut Builder<'_>) -> Op {
    let from = b.bf16(96, 32, 16);
    let to = b.out(80, 64);
    op(Kernel::Copy, [from], [to])
}

fn embed(b: &mut Builder<'_>) -> Op {
    let table = b.weight(256, HIDDEN, 40);
    let tokens = b.words(|rng, _| rng.random_range(0..256));
    let out = b.out(HIDDEN * 2, HIDDEN * 2);
    op(Kernel::Embed { table }, [tokens], [out])
}

fn layer_norm(b: &mut Builder<'_>) -> Op {
    let gain = b.gain(HIDDEN);
    let x = b.bf16(HIDDEN * 2, HIDDEN, 0);
    let out = b.out(HIDDEN * 2, HIDDEN * 2);
    op(Kernel::RmsNorm { gain, group: LIVE as u32, site: NormSite::Layer }, [x], [out])
}

fn query_norm(b: &mut Builder<'_>) -> Op {
    let gain = b.gain(Q_LORA);
    let x = b.bf16((Q_LORA + KV) * 2, Q_LORA, 0);
    let out = b.out(Q_LORA * 2, Q_LORA * 2);
    op(Kernel::RmsNorm { gain, group: Q_LORA_GROUP as u32, site: NormSite::Query }, [x], [out])
}

fn matmul(b: &mut Builder<'_>, inputs: u64, outputs: u64, live: u64, site: MatmulSite) -> Op {
    let weight = b.weight(live, inputs, 6);
    let x = b.bf16(inputs * 2, inputs, 0);
    let out = b.out(outputs * 2, live * 2);
    op(Kernel::Matmul { weight, site }, [x], [out])
}

fn quantise(b: &mut Builder<'_>) -> Op {
    let x = b.bf16(Q_LORA * 2, Q_LORA, 0);
    let codes = b.out(Q_LORA, Q_LORA);
    let groups = Q_LORA / QUANTISE_GROUP * 4;
    let scales = b.out(groups, groups);
    op(Kernel::Quantise, [x], [codes, scales])
}

fn query_matmul(b: &mut Builder<'_>) -> Op {
    let weight = b.weight(MATCH_HEADS * HEAD_DIM, Q_LORA, 6);
    let codes = b.rows((Q_LORA, Q_LORA, 0), |rng, _| (0..Q_LORA).map(|_| e4m3(rng)).collect());
    let groups = Q_LORA / QUANTISE_GROUP;
    let scales = b.rows((groups * 4, groups * 4, 0), |rng, _| {
        (0..groups).flat_map(|_| rng.random_range(0.1f32..2.0).to_le_bytes()).collect()
    });
    let out = b.out(HEADS * HEAD_DIM * 2, MATCH_HEADS * HEAD_DIM * 2);
    op(Kernel::QueryMatmul { weight }, [codes, scales], [out])
}

fn query_rope(b: &mut Builder<'_>) -> Op {
    let query = b.bf16(HEADS * HEAD_DIM * 2, MATCH_HEADS * HEAD_DIM, 0);
    let positions = b.positions();
    op(Kernel::QueryRope, [query, positions], [query])
}

fn kv_store(b: &mut Builder<'_>) -> Op {
    let latent = b.bf16((Q_LORA + KV) * 2, KV, Q_LORA * 2);
    let (positions, pages) = (b.positions(), b.ring_pages());
    let cache = b.cache(SWA_PAGE, |_| Vec::new());
    op(Kernel::KvStore, [latent, positions, pages], [cache])
}

fn compress(b: &mut Builder<'_>, page: u64, kernel: fn(WeightId) -> Kernel) -> Op {
    let weight = b.weight(page / 8 / 4, HIDDEN, 6);
    let hidden = b.bf16(HIDDEN * 2, HIDDEN, 0);
    let (positions, pages) = (b.positions(), b.ring_pages());
    let ring = b.ring(page);
    op(kernel(weight), [hidden, positions, pages], [ring])
}

fn store(b: &mut Builder<'_>, ring: u64, cache: u64, kernel: Kernel) -> Op {
    let ring = b.ring(ring);
    // One row completes no entry, so that page 0 has one writer.
    let positions = b.words(|rng, row| if row == 0 { 5 } else { rng.random_range(0..ENTRIES as i32) * 4 + 3 });
    let (pages, table) = (b.ring_pages(), b.table());
    let cache = b.cache(cache, |_| Vec::new());
    op(kernel, [ring, positions, pages, table], [cache])
}

fn checksum(b: &mut Builder<'_>, format: KeyFormat) -> Op {
    let keys = b.keys(format);
    let pages = b.words(|rng, _| rng.random_range(0..PAGES as i32));
    let out = b.out(CHECKSUMS_ROW, CHECKSUMS_ROW);
    op(Kernel::Checksum { format }, [keys, pages], [out])
}

fn index_rope(b: &mut Builder<'_>, format: KeyFormat) -> Op {
    let query = b.bf16(INDEX_HEADS * INDEX_DIM * 2, MATCH_HEADS * INDEX_DIM, 0);
    let weights = b.bf16(INDEX_HEADS * 2, MATCH_HEADS, 0);
    let positions = b.positions();
    let out = match format {
        KeyFormat::Bf16 => query,
        KeyFormat::Fp8 => b.out(INDEX_HEADS * INDEX_DIM, MATCH_HEADS * INDEX_DIM),
    };
    let scaled = b.out(INDEX_HEADS * 4, MATCH_HEADS * 4);
    op(Kernel::IndexRope { format }, [query, weights, positions], [out, scaled])
}

fn logits(b: &mut Builder<'_>, format: KeyFormat, reader: Reader) -> Op {
    let query = match format {
        KeyFormat::Bf16 => b.bf16(INDEX_HEADS * INDEX_DIM * 2, MATCH_HEADS * INDEX_DIM, 0),
        KeyFormat::Fp8 => b.rows((INDEX_HEADS * INDEX_DIM, MATCH_HEADS * INDEX_DIM, 0), |rng, _| {
            (0..MATCH_HEADS * INDEX_DIM).map(|_| e4m3(rng)).collect()
        }),
    };
    let weights = b.rows((INDEX_HEADS * 4, MATCH_HEADS * 4, 0), |rng, _| {
        (0..MATCH_HEADS).flat_map(|_| number(rng).to_le_bytes()).collect()
    });
    let (keys, table, positions) = (b.keys(format), b.table(), b.positions());
    let out = b.out(ENTRIES * 4, ENTRIES * 4);
    let out = Operand { indexed: reader == Reader::Paged, ..out };
    op(Kernel::Logits { format, reader }, [query, weights, keys, table, positions], [out])
}

fn select(b: &mut Builder<'_>, k: u32, distinct: i32) -> Op {
    let logits = b.rows((ENTRIES * 4, ENTRIES * 4, 0), |rng, _| {
        (0..ENTRIES).flat_map(|_| (rng.random_range(-distinct..=distinct) as f32).to_le_bytes()).collect()
    });
    let positions = b.positions();
    let out = b.out(WORKSPACE_WORDS * 4, WORKSPACE_WORDS * 4);
    op(Kernel::TopkSelect { k }, [Operand { indexed: true, ..logits }, positions], [out])
}

fn finalise(b: &mut Builder<'_>) -> Op {
    let k = 64;
    let workspace = b.rows((WORKSPACE_WORDS * 4, WORKSPACE_WORDS * 4, 0), |rng, row| {
        let mut words = vec![-1i32; WORKSPACE_WORDS as usize];
        words[0] = [k, 3, 0, 100, k][row as usize];
        words[1] = k;
        for pair in words[2..2 + 2 * k as usize].chunks_exact_mut(2) {
            pair[0] = rng.random_range(0..2 * ENTRIES as i32);
        }
        words.iter().flat_map(|word| word.to_le_bytes()).collect()
    });
    let (table, positions) = (b.table(), b.positions());
    let out = b.out(TOPK_WORDS * 4, TOPK_WORDS * 4);
    op(Kernel::TopkFinalise { k: k as u32 }, [workspace, table, positions], [out])
}

fn attention(b: &mut Builder<'_>, k: u32) -> Op {
    let query = b.bf16(HEADS * HEAD_DIM * 2, MATCH_HEADS * HEAD_DIM, 0);
    let window = b.cache(SWA_PAGE, |rng| (0..SWA_PAGE / 2).flat_map(|_| bf16(number(rng))).collect());
    let (positions, pages) = (b.positions(), b.ring_pages());
    let out_row = HEADS * HEAD_DIM * 2;
    let kernel = Kernel::Attention { scale: 1.0 / 64.0, k };
    if k == 0 {
        let out = b.out(out_row, 1024);
        return op(kernel, [query, window, positions, pages], [out]);
    }
    let entries = b.entries();
    let indices = b.rows((TOPK_WORDS * 4, TOPK_WORDS * 4, 0), |rng, _| {
        let index = |rng: &mut rand_pcg::Pcg64Mcg| rng.random_range(-1..(PAGES * PAGE_ENTRIES) as i32);
        (0..TOPK_WORDS).flat_map(|_| index(rng).to_le_bytes()).collect()
    });
    let out = b.out(out_row, 1024);
    op(kernel, [query, window, positions, pages, entries, indices], [out])
}

fn output_project(b: &mut Builder<'_>) -> Op {
    let weight = b.weight(HIDDEN, 512, 4);
    let attended = b.bf16(HEADS * HEAD_DIM * 2, 512, 0);
    let fed = b.bf16(HIDDEN * 2, HIDDEN - LIVE, LIVE * 2);
    let x = b.bf16(HIDDEN * 2, HIDDEN, 0);
    op(Kernel::OutputProject { weight }, [attended, fed, x], [x])
}

fn head(b: &mut Builder<'_>) -> Op {
    let weight = b.weight(256, HIDDEN, 9);
    let hidden = b.bf16(HIDDEN * 2, HIDDEN, 0);
    let out = b.out(4, 4);
    op(Kernel::Head { weight }, [hidden], [out])
}

fn prefill(b: &mut Builder<'_>, format: Option<KeyFormat>) -> Op {
    let table = b.weight(256, 64, 40);
    let count = b.rng.random_range(40..400u64);
    let start = b.rng.random_range(0..100u32);
    let tensor = b.tensor(count * 4 + 64);
    let tokens: Vec<u8> = (0..count).flat_map(|_| b.rng.random_range(0..256i32).to_le_bytes()).collect();
    b.put(&tensor, 0, &tokens);
    let tokens = tensor.operand(tensor.region(count * 4, count * 4, 1, 0));
    let window = b.cache(SWA_PAGE, |_| Vec::new());
    let kernel = Kernel::Prefill {
        table,
        start,
        window_from: start + 31,
        entries_from: start + 33,
        ring_page: b.rng.random_range(1..PAGES as u32),
        format,
    };
    let Some(format) = format else { return op(kernel, [tokens], [window]) };
    let words = b.tensor(TABLE * 4);
    b.put(&words, 0, &[3i32, 9, 1, 7].iter().flat_map(|page| page.to_le_bytes()).collect::<Vec<u8>>());
    let writes = [
        window,
        b.ring(INDEX_RING_PAGE),
        b.cache(format.page_bytes(), |_| Vec::new()),
        b.ring(CORE_RING_PAGE),
        b.cache(ENTRY_PAGE, |_| Vec::new()),
    ];
    op(kernel, [tokens, words.indexed(words.whole())], writes)
}

use KeyFormat::{Bf16, Fp8};
use Tolerance::Exact;

const fn exact(name: &'static str, build: fn(&mut Builder<'_>) -> Op) -> Case {
    Case { name, tolerance: Exact, build }
}

const fn near(name: &'static str, tolerance: Tolerance, build: fn(&mut Builder<'_>) -> Op) -> Case {
    Case { name, tolerance, build }
}

/// Sums of a few hundred products in another order; the matrix units keep fewer bits of fp8 sums.
const LOGITS: Tolerance = Tolerance::F32(2e-5);
const LOGITS_FP8: Tolerance = Tolerance::OfLargest(1e-3);

pub(crate) const CASES: &[Case] = &[
    exact("copy", copy),
    exact("embed", embed),
    exact("rms_norm, layer", layer_norm),
    exact("rms_norm, query", query_norm),
    exact("matmul, qkv_a", |b| matmul(b, HIDDEN, Q_LORA + KV, Q_LORA + KV, MatmulSite::QkvA)),
    exact("matmul, index query", |b| {
        matmul(b, Q_LORA, INDEX_HEADS * INDEX_DIM, MATCH_HEADS * INDEX_DIM, MatmulSite::IndexQuery)
    }),
    exact("matmul, index weights", |b| matmul(b, HIDDEN, INDEX_HEADS, MATCH_HEADS, MatmulSite::IndexWeights)),
    exact("matmul, up", |b| matmul(b, HIDDEN, FEED_FORWARD, FEED_FORWARD, MatmulSite::FeedForwardUp)),
    exact("matmul, down", |b| matmul(b, FEED_FORWARD, HIDDEN, HIDDEN, MatmulSite::FeedForwardDown)),
    exact("quantise", quantise),
    exact("query_matmul", query_matmul),
    near("query_rope", Tolerance::Bf16(8e-3), query_rope),
    exact("kv_store", kv_store),
    exact("index_compress", |b| compress(b, INDEX_RING_PAGE, |weight| Kernel::IndexCompress { weight })),
    exact("core_compress", |b| compress(b, CORE_RING_PAGE, |weight| Kernel::CoreCompress { weight })),
    exact("index_store, bf16", |b| store(b, INDEX_RING_PAGE, Bf16.page_bytes(), Kernel::IndexStore { format: Bf16 })),
    exact("index_store, fp8", |b| store(b, INDEX_RING_PAGE, Fp8.page_bytes(), Kernel::IndexStore { format: Fp8 })),
    exact("core_store", |b| store(b, CORE_RING_PAGE, ENTRY_PAGE, Kernel::CoreStore)),
    exact("checksum, bf16", |b| checksum(b, Bf16)),
    exact("checksum, fp8", |b| checksum(b, Fp8)),
    exact("index_rope, bf16", |b| index_rope(b, Bf16)),
    exact("index_rope, fp8", |b| index_rope(b, Fp8)),
    near("logits, bf16, paged", LOGITS, |b| logits(b, Bf16, Reader::Paged)),
    near("logits, fp8, paged", LOGITS_FP8, |b| logits(b, Fp8, Reader::Paged)),
    near("logits, bf16, fallback", LOGITS, |b| logits(b, Bf16, Reader::Fallback)),
    near("logits, fp8, fallback", LOGITS_FP8, |b| logits(b, Fp8, Reader::Fallback)),
    exact("topk_select, few ties", |b| select(b, 64, 100_000)),
    exact("topk_select, many ties", |b| select(b, 64, 2)),
    exact("topk_select, k of 512", |b| select(b, 512, 9)),
    exact("topk_finalise", finalise),
    exact("attention, window only", |b| attention(b, 0)),
    near("attention, 64 entries", Tolerance::Bf16(8e-3), |b| attention(b, 64)),
    near("attention, 512 entries", Tolerance::Bf16(8e-3), |b| attention(b, 512)),
    exact("output_project", output_project),
    exact("head", head),
    exact("prefill, window only", |b| prefill(b, None)),
    exact("prefill, bf16", |b| prefill(b, Some(Bf16))),
    exact("prefill, fp8", |b| prefill(b, Some(Fp8))),
];
