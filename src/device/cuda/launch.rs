//! From an op to a launch: which kernel, how many blocks, and its arguments from the op's regions. One launch an op.

use std::collections::BTreeMap;

use cudarc::driver::CudaFunction;

use super::gpu::{Map, Tiles, tensor_map};
use crate::{
    device::{
        Op, Region, WeightId,
        kernel::{
            HEAD_DIM, HEADS, HIDDEN, INDEX_DIM, INDEX_HEADS, Kernel, KeyFormat, PAGE_ENTRIES, PREFILL_TILE, RATIO,
            RING, Reader,
        },
    },
    error::{Error, Result},
};

/// Rings of pages in flight, bf16 and fp8, and the warpgroups that take turns at them, each with a warp that copies: what
/// the sources are compiled with.
const STAGES: [u64; 2] = [8, 16];
const CONSUMERS: u32 = 4;
/// Rows that the paged reader's plan has room for.
const MOST_ROWS: u64 = 1024;
/// Up to so many pages in all, bf16 and fp8, blocks that stream a few pages each beat the ring.
const FEW_PAGES: [u64; 2] = [16_384, 4096];
/// Streaming blocks that a multiprocessor holds at once, and pages that one may take.
const STREAM_BLOCKS: u64 = 4;
const STREAM_SPAN: u64 = 32;
/// Threads of a top-k block, and shared memory for the keys that it keeps and for its ring, on Hopper and elsewhere: what
/// the source is compiled with.
const TOPK_THREADS: u64 = 512;
const TOPK_SHARED: [u64; 2] = [4096 * 8 + 4 * 2 * TOPK_THREADS * 16, 4096 * 8 + 2 * TOPK_THREADS * 16];
/// Keys that one block of a cluster takes at least.
const TOPK_SHARE: u64 = 8192;
/// Threads of a kernel that reads a charged matrix, the bytes that a block of them has in flight, and how many such
/// blocks a multiprocessor gets at most: as the sources have it.
const BALLAST_THREADS: u32 = 256;
const BALLAST_TILE: u64 = BALLAST_THREADS as u64 * 8 * 16;
const BALLAST_BLOCKS: u64 = 2;
/// Rows and outputs that a warp multiplies at once.
const TILE_ROWS: u64 = 8;
const TILE_OUTPUTS: u64 = 32;
/// Shared memory of an attention block: fixed, for each index, and indices that are rounded up to.
const ATTENTION_SHARED: [u64; 2] = [42_304, 96];
const ATTENTION_CHUNK: u64 = 64;
/// Blocks of a row's attention: its orders.
const ATTENTION_ORDERS: u64 = 2;
/// Bytes of output weights of the grouped low-rank projection, and elements of the vocabulary projection.
const OUTPUT_WEIGHTS: u64 = 2 * HEADS * HEAD_DIM * 1024;
const VOCABULARY: u64 = 129_280;
/// Output columns of the index compressor and of the core compressor.
const COMPRESSED: [u64; 2] = [4 * INDEX_DIM, 4 * HEAD_DIM];

/// Kernels with their files and the dynamic shared memory that they may ask for.
pub(super) static FUNCTIONS: [(&str, &str, u32); 31] = [
    ("rows.cu", "copy_rows", 0),
    ("rows.cu", "embed", 0),
    ("rows.cu", "rms_norm", 0),
    ("rows.cu", "quantise", 0),
    ("rows.cu", "query_rope", 0),
    ("rows.cu", "index_rope", 0),
    ("rows.cu", "head", 0),
    ("matmul.cu", "matmul", 0),
    ("matmul.cu", "query_matmul", 0),
    ("matmul.cu", "compress", 0),
    ("matmul.cu", "output_project", 0),
    ("cache.cu", "kv_store", 0),
    ("cache.cu", "index_store", 0),
    ("cache.cu", "core_store", 0),
    ("cache.cu", "prefill", 0),
    ("attention.cu", "attention", (ATTENTION_SHARED[0] + ATTENTION_SHARED[1] * 512) as u32),
    ("canary.cu", "checksum", 0),
    ("logits.cu", "paged_mqa_logits_bf16", paged_shared(0)),
    ("logits.cu", "paged_mqa_logits_e4m3", paged_shared(1)),
    ("logits.cu", "stream_mqa_logits_bf16", 0),
    ("logits.cu", "stream_mqa_logits_e4m3", 0),
    ("logits.cu", "page_mqa_logits_bf16", 0),
    ("logits.cu", "page_mqa_logits_e4m3", 0),
    ("logits.cu", "direct_mqa_logits_bf16", 0),
    ("logits.cu", "direct_mqa_logits_e4m3", 0),
    ("topk.cu", "topk_select", TOPK_SHARED[1] as u32),
    ("topk.cu", "topk_select_1", TOPK_SHARED[0] as u32),
    ("topk.cu", "topk_select_2", TOPK_SHARED[0] as u32),
    ("topk.cu", "topk_select_4", TOPK_SHARED[0] as u32),
    ("topk.cu", "topk_select_8", TOPK_SHARED[0] as u32),
    ("topk.cu", "topk_finalise", 0),
];

/// Shared memory of the paged reader: the ring, two queries, barriers, the plan, and room to align.
const fn paged_shared(e4m3: usize) -> u32 {
    let tile = PAGE_ENTRIES * INDEX_DIM * if e4m3 == 1 { 1 } else { 2 };
    let scales = if e4m3 == 1 { PAGE_ENTRIES * 4 } else { 0 };
    let stages = STAGES[e4m3];
    (1024 + stages * (tile + scales) + 2 * tile + (2 * stages + 4) * 8 + (2 * MOST_ROWS + 1) * 4) as u32
}

/// A kernel's argument.
#[derive(Clone)]
pub(super) enum Arg {
    Long(u64),
    Word(i32),
    Float(f32),
    /// Base, stride, length, rows.
    Rows([u64; 4]),
    /// Row starts, columns, values, ballast, ballast bytes, rows and columns.
    Weight([u64; 6]),
    Map(Map),
}

pub(super) struct Launch<'a> {
    pub(super) function: &'a CudaFunction,
    pub(super) grid: (u32, u32),
    pub(super) threads: u32,
    pub(super) shared: u32,
    pub(super) args: Vec<Arg>,
}

/// A weight on the device.
#[derive(Debug, Clone, Copy)]
pub(super) struct Loaded {
    pub(super) start: u64,
    pub(super) column: u64,
    pub(super) value: u64,
    pub(super) rows: u32,
    pub(super) columns: u32,
    /// Address and bytes of the charged matrix.
    pub(super) ballast: (u64, u64),
}

/// What a launch depends on besides its op.
pub(super) struct Machine {
    functions: BTreeMap<&'static str, CudaFunction>,
    hopper: bool,
    multiprocessors: u32,
    pub(super) arena: u64,
    pub(super) weights: BTreeMap<WeightId, Loaded>,
}

/// The weight that an op reads and the bytes of its charged matrix, one an element.
pub(super) fn ballast(op: &Op) -> Option<(WeightId, u64)> {
    let outputs = op.writes.first().map_or(0, |write| write.region.row_stride / 2);
    match op.kernel {
        Kernel::Matmul { weight, .. } => Some((weight, op.reads[0].region.len / 2 * outputs)),
        Kernel::QueryMatmul { weight } => Some((weight, op.reads[0].region.len * outputs)),
        Kernel::IndexCompress { weight } => Some((weight, HIDDEN * COMPRESSED[0])),
        Kernel::CoreCompress { weight } => Some((weight, HIDDEN * COMPRESSED[1])),
        Kernel::OutputProject { weight } => Some((weight, OUTPUT_WEIGHTS)),
        Kernel::Head { weight } => Some((weight, VOCABULARY * HIDDEN / 64 * op.reads[0].region.rows)),
        _ => None,
    }
}

impl Machine {
    pub(super) fn new(
        functions: BTreeMap<&'static str, CudaFunction>,
        capability: (i32, i32),
        multiprocessors: u32,
    ) -> Self {
        Self { functions, hopper: capability == (9, 0), multiprocessors, arena: 0, weights: BTreeMap::new() }
    }

    /// The launch of an op.
    pub(super) fn plan(&self, op: &Op) -> Result<Launch<'_>> {
        match op.kernel {
            Kernel::Logits { format, reader } => self.logits(op, format, reader),
            Kernel::TopkSelect { k } => self.select(op, k),
            Kernel::Prefill { .. } => self.prefill(op),
            Kernel::Attention { scale, k } => {
                let mut args = self.operands(&op.reads[..4]);
                args.extend((4..6).map(|at| self.operand(op.reads.get(at))));
                args.push(self.rows(op.writes[0].region));
                args.extend([Arg::Float(scale), Arg::Word(k as i32)]);
                let (blocks, shared) = match u64::from(k).next_multiple_of(ATTENTION_CHUNK) {
                    0 => (1, 0),
                    indices => (ATTENTION_ORDERS, ATTENTION_SHARED[0] + ATTENTION_SHARED[1] * indices),
                };
                self.launch("attention", op.writes[0].region.rows * blocks, 256, shared, args)
            }
            _ => self.plain(op),
        }
    }

    /// Kernels that take all regions in the op's order, then a weight, then scalars.
    fn plain(&self, op: &Op) -> Result<Launch<'_>> {
        let (write, first) = (op.writes[0].region, op.reads[0].region);
        let mut args = self.operands(&op.reads);
        args.extend(self.operands(&op.writes));
        let flag = |format: KeyFormat| Arg::Word(i32::from(format == KeyFormat::Fp8));
        let (name, blocks, threads, shared) = match op.kernel {
            Kernel::Copy => ("copy_rows", write.rows, 256, 0),
            Kernel::Embed { table } => {
                args.push(self.weight(table, op)?);
                ("embed", write.rows, 256, 0)
            }
            Kernel::RmsNorm { gain, group, .. } => {
                args.extend([self.weight(gain, op)?, Arg::Word(group as i32)]);
                ("rms_norm", write.rows, (first.len / 16).next_multiple_of(32) as u32, first.len * 2)
            }
            Kernel::Quantise => ("quantise", write.rows, 256, 0),
            Kernel::QueryRope => ("query_rope", write.rows, 256, 0),
            Kernel::KvStore => ("kv_store", op.reads[1].region.rows, 64, 0),
            Kernel::IndexStore { format } => {
                args.push(flag(format));
                ("index_store", op.reads[1].region.rows, 32, 0)
            }
            Kernel::CoreStore => ("core_store", op.reads[1].region.rows, 128, 0),
            Kernel::IndexRope { format } => {
                args.push(flag(format));
                ("index_rope", write.rows, (first.len / (INDEX_DIM * 2) * 32) as u32, 0)
            }
            Kernel::Checksum { format } => {
                args.push(flag(format));
                ("checksum", write.rows, PAGE_ENTRIES as u32, 0)
            }
            Kernel::TopkFinalise { k } => {
                args.push(Arg::Word(k as i32));
                ("topk_finalise", write.rows, 256, 0)
            }
            Kernel::Head { weight } => {
                args.push(self.weight(weight, op)?);
                ("head", self.blocks(op, write.rows), BALLAST_THREADS, 0)
            }
            Kernel::Matmul { weight, .. } => {
                args.push(self.weight(weight, op)?);
                ("matmul", self.blocks(op, tiles(op)), BALLAST_THREADS, 0)
            }
            Kernel::QueryMatmul { weight } => {
                args.push(self.weight(weight, op)?);
                ("query_matmul", self.blocks(op, tiles(op)), BALLAST_THREADS, 0)
            }
            Kernel::IndexCompress { weight } | Kernel::CoreCompress { weight } => {
                args.push(self.weight(weight, op)?);
                ("compress", self.blocks(op, tiles(op)), BALLAST_THREADS, 0)
            }
            Kernel::OutputProject { weight } => {
                args.push(self.weight(weight, op)?);
                ("output_project", self.blocks(op, tiles(op)), BALLAST_THREADS, 0)
            }
            Kernel::Logits { .. } | Kernel::TopkSelect { .. } | Kernel::Attention { .. } | Kernel::Prefill { .. } => {
                return Err(Error::usage(format!("no plain launch for `{}`", op.kernel.name())));
            }
        };
        self.launch(name, blocks, threads, shared, args)
    }

    fn logits(&self, op: &Op, format: KeyFormat, reader: Reader) -> Result<Launch<'_>> {
        let [query, weights, keys, table, positions] = [0, 1, 2, 3, 4].map(|at| op.reads[at].region);
        let out = op.writes[0].region;
        let e4m3 = format == KeyFormat::Fp8;
        let pages = table.len / 4;
        let shift = RATIO.ilog2() as i32;
        let words = |region: Region| Arg::Word((region.row_stride / 4) as i32);
        if reader == Reader::Fallback || !self.hopper {
            let name = if e4m3 { "direct_mqa_logits_e4m3" } else { "direct_mqa_logits_bf16" };
            let width = if reader == Reader::Fallback { out.len / 4 } else { 0 };
            let blocks = pages.max(width.div_ceil(PAGE_ENTRIES)).max(1);
            let args = vec![
                self.address(keys),
                self.address(query),
                Arg::Long(query.row_stride),
                self.address(weights),
                words(weights),
                Arg::Word(head_groups(weights)),
                self.address(positions),
                Arg::Word(shift),
                self.address(table),
                words(table),
                self.address(out),
                words(out),
                Arg::Word(1),
                Arg::Word(width as i32),
            ];
            let mut launch = self.launch(name, blocks, 128, 0, args)?;
            launch.grid.1 = out.rows as u32;
            return Ok(launch);
        }
        if out.rows * pages <= FEW_PAGES[usize::from(e4m3)] || out.rows > MOST_ROWS {
            // One wave of blocks: the fewest pages a block with which all of them run at once.
            let most = STREAM_BLOCKS * u64::from(self.multiprocessors);
            let span = (1..STREAM_SPAN).find(|span| out.rows * pages.div_ceil(*span) <= most).unwrap_or(STREAM_SPAN);
            let parts = pages.div_ceil(span).max(1);
            let span = pages.div_ceil(parts).max(1);
            let name = match (span, e4m3) {
                (1, false) => "page_mqa_logits_bf16",
                (1, true) => "page_mqa_logits_e4m3",
                (_, false) => "stream_mqa_logits_bf16",
                (_, true) => "stream_mqa_logits_e4m3",
            };
            let args = vec![
                self.address(positions),
                self.address(table),
                self.address(query),
                self.address(keys),
                words(table),
                Arg::Word(query.row_stride as i32),
                Arg::Word(shift),
                Arg::Word(span as i32),
                self.address(weights),
                self.address(out),
                words(weights),
                words(out),
                Arg::Word(head_groups(weights)),
            ];
            let mut launch = self.launch(name, out.rows, 128, 0, args)?;
            launch.grid.1 = parts as u32;
            return Ok(launch);
        }
        let name = if e4m3 { "paged_mqa_logits_e4m3" } else { "paged_mqa_logits_bf16" };
        let [key_map, query_map] = self.maps(query, keys, e4m3);
        let args = vec![
            Arg::Map(tensor_map(&key_map)?),
            Arg::Map(tensor_map(&query_map)?),
            self.address(keys),
            self.address(weights),
            words(weights),
            Arg::Word(head_groups(weights)),
            self.address(positions),
            Arg::Word(shift),
            self.address(table),
            words(table),
            self.address(out),
            words(out),
            Arg::Word(out.rows as i32),
        ];
        let shared = u64::from(paged_shared(usize::from(e4m3)));
        self.launch(name, u64::from(self.multiprocessors), (128 + 32) * CONSUMERS, shared, args)
    }

    /// Tensor maps of the keys and of the queries, whose charged heads are all multiplied.
    fn maps(&self, query: Region, keys: Region, e4m3: bool) -> [Tiles; 2] {
        let address = |region: Region| self.arena + region.base;
        let (bytes, dims) = if e4m3 { (INDEX_DIM, INDEX_DIM) } else { (INDEX_DIM * 2, INDEX_DIM / 2) };
        let tile = [dims as u32, PAGE_ENTRIES as u32, 1];
        let keys = if e4m3 {
            Tiles {
                address: address(keys),
                bf16: false,
                dims: [INDEX_DIM, PAGE_ENTRIES, keys.rows],
                strides: [bytes, keys.row_stride],
                tile,
            }
        } else {
            let entries = keys.rows * PAGE_ENTRIES;
            Tiles {
                address: address(keys),
                bf16: true,
                dims: [INDEX_DIM, entries, 1],
                strides: [bytes, entries * bytes],
                tile,
            }
        };
        let query = Tiles {
            address: address(query),
            bf16: !e4m3,
            dims: [INDEX_DIM, INDEX_HEADS, query.rows],
            strides: [bytes, query.row_stride],
            tile: [dims as u32, INDEX_HEADS as u32, 1],
        };
        [keys, query]
    }

    fn select(&self, op: &Op, k: u32) -> Result<Launch<'_>> {
        let (logits, positions, out) = (op.reads[0].region, op.reads[1].region, op.writes[0].region);
        let (width, rows) = (logits.len / 4, out.rows);
        let (name, cluster) = match self.cluster(width, rows) {
            _ if !self.hopper => ("topk_select", 1),
            1 => ("topk_select_1", 1),
            2 => ("topk_select_2", 2),
            4 => ("topk_select_4", 4),
            _ => ("topk_select_8", 8),
        };
        let args = vec![
            self.address(logits),
            Arg::Word((logits.row_stride / 4) as i32),
            self.address(positions),
            Arg::Word(RATIO.ilog2() as i32),
            Arg::Word(k as i32),
            self.address(out),
            Arg::Word((out.row_stride / 4) as i32),
        ];
        let shared = TOPK_SHARED[usize::from(!self.hopper)];
        self.launch(name, rows * cluster, TOPK_THREADS as u32, shared, args)
    }

    /// Blocks that share a row of top-k. More clusters than fit at once would wait for each other; a cluster lies within
    /// one group of multiprocessors, of which some cannot be filled by fours and eights.
    fn cluster(&self, width: u64, rows: u64) -> u64 {
        let all = u64::from(self.multiprocessors);
        let fits = |cluster: &u64| {
            width >= cluster * TOPK_SHARE && rows * cluster <= if *cluster > 2 { all * 3 / 4 } else { all }
        };
        [8, 4, 2].into_iter().find(fits).unwrap_or(1)
    }

    fn prefill(&self, op: &Op) -> Result<Launch<'_>> {
        let Kernel::Prefill { table, start, window_from, entries_from, ring_page, format } = op.kernel else {
            return Err(Error::usage("not a prefill"));
        };
        let mut args: Vec<Arg> = (0..2).map(|at| self.operand(op.reads.get(at))).collect();
        args.extend((0..5).map(|at| self.operand(op.writes.get(at))));
        args.push(self.weight(table, op)?);
        args.extend([start, window_from, entries_from, ring_page].map(|word| Arg::Word(word as i32)));
        args.push(Arg::Word(match format {
            None => -1,
            Some(KeyFormat::Bf16) => 0,
            Some(KeyFormat::Fp8) => 1,
        }));
        let tiles = (op.reads[0].region.len / 4).div_ceil(PREFILL_TILE);
        self.launch("prefill", tiles, 256, 256 * 16 * 4, args)
    }

    fn launch(&self, name: &str, blocks: u64, threads: u32, shared: u64, args: Vec<Arg>) -> Result<Launch<'_>> {
        let function = self.functions.get(name).ok_or_else(|| {
            Error::usage(format!("this device has no kernel `{name}`")).hint("use bf16 index keys before Ada")
        })?;
        Ok(Launch { function, grid: (blocks as u32, 1), threads, shared: shared as u32, args })
    }

    /// Blocks of a kernel that reads a charged matrix and has `tiles` of its own work: enough for both, and no more than
    /// are resident at once.
    fn blocks(&self, op: &Op, tiles: u64) -> u64 {
        let bytes = ballast(op).map_or(0, |(_, bytes)| bytes);
        let most = u64::from(self.multiprocessors) * BALLAST_BLOCKS;
        bytes.div_ceil(BALLAST_TILE).max(tiles).clamp(1, most)
    }

    fn rows(&self, region: Region) -> Arg {
        Arg::Rows([self.arena + region.base, region.row_stride, region.len, region.rows])
    }

    fn operand(&self, operand: Option<&crate::device::Operand>) -> Arg {
        operand.map_or(Arg::Rows([0; 4]), |operand| self.rows(operand.region))
    }

    fn operands(&self, operands: &[crate::device::Operand]) -> Vec<Arg> {
        operands.iter().map(|operand| self.rows(operand.region)).collect()
    }

    fn address(&self, region: Region) -> Arg {
        Arg::Long(self.arena + region.base)
    }

    fn weight(&self, id: WeightId, op: &Op) -> Result<Arg> {
        let loaded = self.weights.get(&id).ok_or_else(|| Error::usage(format!("weight {} is not loaded", id.0)))?;
        let bytes = ballast(op).map_or(0, |(_, bytes)| bytes.min(loaded.ballast.1));
        let shape = u64::from(loaded.rows) | u64::from(loaded.columns) << 32;
        Ok(Arg::Weight([loaded.start, loaded.column, loaded.value, loaded.ballast.0, bytes, shape]))
    }
}

/// Tiles of outputs and rows of a multiplication.
fn tiles(op: &Op) -> u64 {
    let write = op.writes[0].region;
    let (outputs, rows) = match op.kernel {
        Kernel::IndexCompress { .. } | Kernel::CoreCompress { .. } => (write.len / RING / 4, op.reads[0].region.rows),
        _ => (write.len / 2, write.rows),
    };
    outputs.div_ceil(TILE_OUTPUTS) * rows.div_ceil(TILE_ROWS)
}

/// Groups of eight heads whose logits are summed: those with weights.
fn head_groups(weights: Region) -> i32 {
    (weights.len / 4 / 8) as i32
}
