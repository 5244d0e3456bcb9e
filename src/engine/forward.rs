//! The decode step as ops on streams, in the real layer's host order, with the lifetime mistakes that real layers
//! shipped.
//!
//! The mistakes are nothing but early drops: a tensor allocated while the main stream is current and read by a side
//! stream loses its last reference before the join, so that the allocator may hand its bytes to the main stream's next
//! request. They are marked A1 (logits), A2 (top-k workspace) and B (`qkv_a`) where they happen, and [`Fixes`] decides
//! what is done about them.

use std::{cell::RefCell, collections::BTreeMap, rc::Rc};

use super::{
    geometry::{COMPRESSED, Geometry, LAYERS},
    toggles::Toggles,
    weights::{CompressedWeights, LayerWeights, Weights},
};
use crate::{
    device::{
        Device, EventId, Op, Operand, StreamId, Tensor, WeightId,
        kernel::{
            ATTENTION_DIMS, CORE_RING_PAGE, ENTRY_PAGE, FEED_FORWARD, HEAD_DIM, HEADS, HIDDEN, INDEX_DIM, INDEX_HEADS,
            INDEX_RING_PAGE, KV, Kernel, KeyFormat, LIVE, MATCH_HEADS, MatmulSite, NormSite, Q_LORA, Q_LORA_GROUP,
            QUANTISE_GROUP, Reader, SWA_PAGE, TOPK_WORDS, WORKSPACE_WORDS,
        },
    },
    error::Result,
};

const BF16: u64 = 2;
const WORD: u64 = 4;
const HIDDEN_ROW: u64 = HIDDEN * BF16;
const QKV_ROW: u64 = (Q_LORA + KV) * BF16;
const LATENT_ROW: u64 = Q_LORA * BF16;
const ATTENTION_ROW: u64 = HEADS * HEAD_DIM * BF16;
const LIVE_QUERY_ROW: u64 = MATCH_HEADS * HEAD_DIM * BF16;
const LIVE_OUTPUT_ROW: u64 = ATTENTION_DIMS * BF16;
const FEED_FORWARD_ROW: u64 = FEED_FORWARD * BF16;
const SCALES_ROW: u64 = Q_LORA / QUANTISE_GROUP * WORD;
const INDEX_QUERY_ROW: u64 = INDEX_HEADS * INDEX_DIM * BF16;
const LIVE_INDEX_QUERY_ROW: u64 = MATCH_HEADS * INDEX_DIM * BF16;
const WORKSPACE_ROW: u64 = WORKSPACE_WORDS * WORD;
const INDICES_ROW: u64 = TOPK_WORDS * WORD;

/// The main stream and the side streams.
#[derive(Debug, Clone, Copy)]
pub(super) struct Streams {
    pub(super) main: StreamId,
    kv: StreamId,
    compressor: StreamId,
    indexer: StreamId,
}

impl Streams {
    fn serial(self) -> Self {
        Self { main: self.main, kv: self.main, compressor: self.main, indexer: self.main }
    }

    fn side(&self) -> [StreamId; 3] {
        [self.kv, self.compressor, self.indexer]
    }
}

struct LoadedLayer {
    qkv_a: WeightId,
    q_b: WeightId,
    feed_forward_up: WeightId,
    feed_forward_down: WeightId,
    output: WeightId,
    compressed: Option<LoadedCompressed>,
}

struct LoadedCompressed {
    index_query: WeightId,
    index_weights: WeightId,
    index_compress: WeightId,
    core_compress: WeightId,
}

struct Loaded {
    embedding: WeightId,
    hidden_gain: WeightId,
    latent_gain: WeightId,
    layers: Vec<LoadedLayer>,
    head: WeightId,
}

impl Loaded {
    fn new(device: &Device, weights: &Weights) -> Result<Self> {
        Ok(Self {
            embedding: device.load_weight(&weights.embedding)?,
            hidden_gain: device.load_weight(&weights.hidden_gain)?,
            latent_gain: device.load_weight(&weights.latent_gain)?,
            layers: weights.layers.iter().map(|layer| LoadedLayer::new(device, layer)).collect::<Result<_>>()?,
            head: device.load_weight(&weights.head)?,
        })
    }
}

impl LoadedLayer {
    fn new(device: &Device, layer: &LayerWeights) -> Result<Self> {
        let compressed = |weights: &CompressedWeights| -> Result<LoadedCompressed> {
            Ok(LoadedCompressed {
                index_query: device.load_weight(&weights.index_query)?,
                index_weights: device.load_weight(&weights.index_weights)?,
                index_compress: device.load_weight(&weights.index_compress)?,
                core_compress: device.load_weight(&weights.core_compress)?,
            })
        };
        Ok(Self {
            qkv_a: device.load_weight(&layer.qkv_a)?,
            q_b: device.load_weight(&layer.q_b)?,
            feed_forward_up: device.load_weight(&layer.feed_forward_up)?,
            feed_forward_down: device.load_weight(&layer.feed_forward_down)?,
            output: device.load_weight(&layer.output)?,
            compressed: layer.compressed.as_ref().map(compressed).transpose()?,
        })
    }
}

/// A layer's caches; their rows are pages.
pub(super) struct LayerCache {
    pub(super) window: Tensor,
    pub(super) compressed: Option<CompressedCache>,
}

/// Caches that only layers with compressed entries have.
pub(super) struct CompressedCache {
    pub(super) index_ring: Tensor,
    pub(super) index_keys: Tensor,
    pub(super) core_ring: Tensor,
    pub(super) entries: Tensor,
}

/// Static buffers that the host fills before a step and reads after it; a bucket uses the first rows of each.
pub(super) struct Inputs {
    pub(super) tokens: Tensor,
    pub(super) positions: Tensor,
    pub(super) ring_pages: Tensor,
    pub(super) page_table: Tensor,
    pub(super) next_tokens: Tensor,
    residual: Tensor,
    /// A prefill chunk's tokens and the page table of its sequence.
    pub(super) chunk: Tensor,
    pub(super) chunk_table: Tensor,
}

/// What `GE_DIFF` keeps of one layer's step.
#[derive(Clone)]
pub(super) struct Stash {
    hidden: Tensor,
    latent: Tensor,
    pub(super) logits: Tensor,
}

/// Buffers of one bucket that live outside every graph, in the default pool.
#[derive(Clone, Default)]
pub(super) struct Persistent {
    logits: Option<Tensor>,
    workspace: Option<Tensor>,
    pub(super) stashes: BTreeMap<usize, Stash>,
}

/// What a step does with a tensor that a side stream still reads when its last reference would go.
struct Fixes {
    hold: bool,
    record: bool,
    held: RefCell<Vec<Tensor>>,
}

impl Fixes {
    /// Gives up `tensor`, which `user` reads. With neither fix this is the mistake: the bytes are free at once.
    fn release(&self, tensor: Tensor, user: StreamId) {
        if self.record {
            tensor.record_stream(user);
        }
        if self.hold {
            self.held.borrow_mut().push(tensor);
        }
    }

    fn joined(&self) {
        self.held.borrow_mut().clear();
    }
}

/// Tensors that a layer's first part hands to its indexer and its second part.
pub(super) struct Opened {
    layer: usize,
    hidden: Tensor,
    qkv_a: Tensor,
    latent: Tensor,
    indices: Option<Tensor>,
    scratch: Option<Scratch>,
    /// After `qkv_a`, and after `q_lora`.
    produced: Option<[EventId; 2]>,
}

/// What the indexer works in and nobody else needs.
pub(super) struct Scratch {
    logits: Tensor,
    workspace: Tensor,
}

/// What the indexer of a layer reads and what it leaves, without owning it.
#[derive(Clone, Copy)]
pub(super) struct IndexerOperands {
    layer: usize,
    hidden: Operand,
    latent: Operand,
    indices: Operand,
}

impl IndexerOperands {
    /// The indexer's layer.
    pub(super) fn layer(&self) -> usize {
        self.layer
    }
}

/// The model on a device, and its decode step.
pub(super) struct Network {
    pub(super) device: Device,
    pub(super) geometry: Geometry,
    pub(super) streams: Streams,
    pub(super) caches: Vec<LayerCache>,
    pub(super) inputs: Inputs,
    toggles: Toggles,
    weights: Loaded,
    softmax_scale: f32,
    persistent: RefCell<BTreeMap<u32, Rc<Persistent>>>,
}

/// One step of one bucket being enqueued.
pub(super) struct Step<'a> {
    network: &'a Network,
    streams: Streams,
    rows: u64,
    persistent: Rc<Persistent>,
    fixes: Fixes,
}

impl Network {
    pub(super) fn new(device: Device, toggles: &Toggles, geometry: Geometry, weights: &Weights) -> Result<Self> {
        let streams = Streams {
            main: device.stream("main")?,
            kv: device.stream("kv")?,
            compressor: device.stream("compressor")?,
            indexer: device.stream("indexer")?,
        };
        device.reserve(arena_bytes(&geometry, toggles))?;
        let caches = (0..LAYERS).map(|layer| layer_cache(&device, streams.main, &geometry, layer));
        Ok(Self {
            caches: caches.collect::<Result<_>>()?,
            inputs: inputs(&device, streams.main, &geometry)?,
            weights: Loaded::new(&device, weights)?,
            toggles: toggles.clone(),
            softmax_scale: weights.softmax_scale,
            persistent: RefCell::default(),
            device,
            geometry,
            streams,
        })
    }

    /// Buffers of `bucket` outside every graph; made in its warm-up.
    pub(super) fn persistent(&self, bucket: u32) -> Result<Rc<Persistent>> {
        if let Some(buffers) = self.persistent.borrow().get(&bucket) {
            return Ok(Rc::clone(buffers));
        }
        let (rows, main) = (u64::from(bucket), self.streams.main);
        let logits_row = self.logits_row();
        let mut buffers = Persistent::default();
        if self.geometry.keys == KeyFormat::Fp8 {
            buffers.workspace = Some(self.device.alloc(main, rows * WORKSPACE_ROW, "topk_workspace")?);
        }
        if !self.toggles.ge_diff && (self.geometry.keys == KeyFormat::Fp8 || self.toggles.persistent_logits) {
            buffers.logits = Some(self.device.alloc(main, rows * logits_row, "logits")?);
        }
        if self.toggles.ge_diff {
            for layer in (0..LAYERS).filter(|layer| COMPRESSED[*layer]) {
                let stash = Stash {
                    hidden: self.device.alloc(main, rows * HIDDEN_ROW, "stash_h")?,
                    latent: self.device.alloc(main, rows * LATENT_ROW, "stash_q_lora")?,
                    logits: self.device.alloc(main, rows * logits_row, "stash_logits")?,
                };
                buffers.stashes.insert(layer, stash);
            }
        }
        let buffers = Rc::new(buffers);
        self.persistent.borrow_mut().insert(bucket, Rc::clone(&buffers));
        Ok(buffers)
    }

    /// Bytes of a row of logits.
    pub(super) fn logits_row(&self) -> u64 {
        self.geometry.max_entries() * WORD
    }

    /// A step of `bucket`; `capturing` decides, with the toggles, whether it uses the side streams.
    pub(super) fn step(&self, bucket: u32, capturing: bool) -> Result<Step<'_>> {
        let overlap = self.toggles.overlap && (capturing || self.toggles.overlap_eager);
        self.step_on(if overlap { self.streams } else { self.streams.serial() }, bucket)
    }

    /// A step on the main stream alone: what stands between two captured pieces has nothing to overlap with.
    pub(super) fn serial_step(&self, bucket: u32) -> Result<Step<'_>> {
        self.step_on(self.streams.serial(), bucket)
    }

    fn step_on(&self, streams: Streams, bucket: u32) -> Result<Step<'_>> {
        Ok(Step {
            network: self,
            streams,
            rows: u64::from(bucket),
            persistent: self.persistent(bucket)?,
            fixes: Fixes {
                hold: self.toggles.hold_until_join,
                record: self.toggles.record_stream,
                held: RefCell::default(),
            },
        })
    }

    /// Enqueues a prefill chunk for every layer. `tokens` words and the page table are in place; `kernel` gives a
    /// layer's kernel by key format.
    pub(super) fn prefill(&self, tokens: u64, kernel: impl Fn(WeightId, Option<KeyFormat>) -> Kernel) -> Result<()> {
        let Inputs { chunk, chunk_table, .. } = &self.inputs;
        for (cache, layer) in self.caches.iter().zip(0..) {
            let mut reads = vec![chunk.operand(chunk.region(tokens * WORD, tokens * WORD, 1, 0))];
            let mut writes = vec![pages(&cache.window, SWA_PAGE)];
            let mut format = None;
            if let Some(compressed) = &cache.compressed {
                format = Some(self.geometry.keys);
                reads.push(chunk_table.indexed(chunk_table.whole()));
                writes.extend([
                    pages(&compressed.index_ring, INDEX_RING_PAGE),
                    pages(&compressed.index_keys, self.geometry.keys.page_bytes()),
                    pages(&compressed.core_ring, CORE_RING_PAGE),
                    pages(&compressed.entries, ENTRY_PAGE),
                ]);
            }
            let op = Op { kernel: kernel(self.weights.embedding, format), reads, writes, layer: Some(layer) };
            self.device.enqueue(self.streams.main, op)?;
        }
        Ok(())
    }
}

fn arena_bytes(geometry: &Geometry, toggles: &Toggles) -> u64 {
    const SLACK: u64 = 192 << 20;
    let logits = geometry.max_entries() * WORD;
    let stash = if toggles.ge_diff { LAYERS as u64 * (HIDDEN_ROW + LATENT_ROW + logits) } else { 0 };
    let persistent = logits + WORKSPACE_ROW + stash;
    let captured_rows: u64 = geometry.buckets.iter().map(|bucket| u64::from(*bucket)).sum();
    let step = 3 * ATTENTION_ROW + 2 * FEED_FORWARD_ROW + 4 * HIDDEN_ROW + 4 * INDEX_QUERY_ROW + 2 * persistent;
    let deferred = if toggles.record_stream { LAYERS as u64 * (QKV_ROW + persistent) } else { 0 };
    let steps = 4 * u64::from(geometry.max_batch()) * (step + deferred);
    geometry.cache_bytes() + captured_rows * persistent + steps + SLACK
}

fn layer_cache(device: &Device, stream: StreamId, geometry: &Geometry, layer: usize) -> Result<LayerCache> {
    device.set_layer(Some(layer as u8));
    let (rings, entries) = (geometry.ring_pages(), u64::from(geometry.pages));
    let compressed = || -> Result<CompressedCache> {
        Ok(CompressedCache {
            index_ring: device.alloc(stream, rings * INDEX_RING_PAGE, "index_ring")?,
            index_keys: device.alloc(stream, entries * geometry.keys.page_bytes(), "index_keys")?,
            core_ring: device.alloc(stream, rings * CORE_RING_PAGE, "core_ring")?,
            entries: device.alloc(stream, entries * ENTRY_PAGE, "c4_entries")?,
        })
    };
    let cache = LayerCache {
        window: device.alloc(stream, rings * SWA_PAGE, "swa_cache")?,
        compressed: COMPRESSED[layer].then(compressed).transpose()?,
    };
    device.set_layer(None);
    Ok(cache)
}

fn inputs(device: &Device, stream: StreamId, geometry: &Geometry) -> Result<Inputs> {
    let rows = u64::from(geometry.max_batch());
    let words = |count: u64, name: &'static str| device.alloc(stream, count * WORD, name);
    Ok(Inputs {
        tokens: words(rows, "tokens")?,
        positions: words(rows, "positions")?,
        ring_pages: words(rows, "ring_pages")?,
        page_table: words(rows * geometry.table_words(), "page_table")?,
        next_tokens: words(rows, "next_tokens")?,
        residual: device.alloc(stream, rows * HIDDEN_ROW, "x")?,
        chunk: words(u64::from(geometry.max_context), "chunk_tokens")?,
        chunk_table: words(geometry.table_words(), "chunk_page_table")?,
    })
}

/// A cache, one row a page, of which index operands choose the bytes.
pub(super) fn pages(cache: &Tensor, page: u64) -> Operand {
    cache.indexed(cache.region(page, page, cache.bytes() / page, 0))
}

impl Step<'_> {
    fn alloc(&self, stream: StreamId, row: u64, name: &'static str) -> Result<Tensor> {
        self.network.device.alloc(stream, self.rows * row, name)
    }

    /// All rows of `tensor`, whole.
    fn all(&self, tensor: &Tensor, row: u64) -> Operand {
        self.part(tensor, row, row, 0)
    }

    /// `len` bytes from `offset` of each row.
    fn part(&self, tensor: &Tensor, row: u64, len: u64, offset: u64) -> Operand {
        tensor.operand(tensor.region(row, len, self.rows, offset))
    }

    fn enqueue<const R: usize, const W: usize>(
        &self,
        stream: StreamId,
        kernel: Kernel,
        reads: [Operand; R],
        writes: [Operand; W],
        layer: Option<usize>,
    ) -> Result<()> {
        let layer = layer.map(|layer| layer as u8);
        self.network.device.enqueue(stream, Op { kernel, reads: reads.into(), writes: writes.into(), layer })
    }

    fn positions(&self) -> Operand {
        self.all(&self.network.inputs.positions, WORD)
    }

    fn ring_pages(&self) -> Operand {
        self.all(&self.network.inputs.ring_pages, WORD)
    }

    fn page_table(&self) -> Operand {
        let (table, row) = (&self.network.inputs.page_table, self.network.geometry.table_words() * WORD);
        table.indexed(table.region(row, row, self.rows, 0))
    }

    fn residual(&self) -> Operand {
        self.all(&self.network.inputs.residual, HIDDEN_ROW)
    }

    /// The whole step.
    pub(super) fn run(&self) -> Result<()> {
        self.embed()?;
        for layer in 0..LAYERS {
            let mut opened = self.open(layer, true)?;
            if let (Some(operands), Some(scratch)) = (self.indexer(&opened), opened.scratch.take()) {
                self.index(&operands, &scratch, opened.produced)?;
                self.release(scratch);
            }
            self.close(opened)?;
        }
        self.finish()
    }

    /// Token embeddings to the residual stream.
    pub(super) fn embed(&self) -> Result<()> {
        let table = self.network.weights.embedding;
        let tokens = self.all(&self.network.inputs.tokens, WORD);
        self.enqueue(self.streams.main, Kernel::Embed { table }, [tokens], [self.residual()], None)
    }

    /// A layer up to the query latent. With `whole`, side streams start here and the indexer's scratch is allocated;
    /// without it [`Step::close`] forks and the indexer runs between the two.
    pub(super) fn open(&self, layer: usize, whole: bool) -> Result<Opened> {
        let Self { network, streams, .. } = self;
        let (device, main, weights) = (&network.device, streams.main, &network.weights);
        device.set_layer(Some(layer as u8));
        let at = Some(layer);

        let hidden = self.alloc(main, HIDDEN_ROW, "h")?;
        let norm = Kernel::RmsNorm { gain: weights.hidden_gain, group: LIVE as u32, site: NormSite::Layer };
        self.enqueue(main, norm, [self.residual()], [self.all(&hidden, HIDDEN_ROW)], at)?;
        if whole {
            self.fork()?;
        }

        let qkv_a = self.alloc(main, QKV_ROW, "qkv_a")?;
        let project = Kernel::Matmul { weight: weights.layers[layer].qkv_a, site: MatmulSite::QkvA };
        self.enqueue(main, project, [self.all(&hidden, HIDDEN_ROW)], [self.all(&qkv_a, QKV_ROW)], at)?;
        let first = if whole { Some(device.record(main)?) } else { None };

        let latent = self.alloc(main, LATENT_ROW, "q_lora")?;
        let norm = Kernel::RmsNorm { gain: weights.latent_gain, group: Q_LORA_GROUP as u32, site: NormSite::Query };
        let query_part = self.part(&qkv_a, QKV_ROW, LATENT_ROW, 0);
        self.enqueue(main, norm, [query_part], [self.all(&latent, LATENT_ROW)], at)?;
        let second = if whole { Some(device.record(main)?) } else { None };

        if let Some(stash) = self.persistent.stashes.get(&layer) {
            for (from, to, row) in [(&hidden, &stash.hidden, HIDDEN_ROW), (&latent, &stash.latent, LATENT_ROW)] {
                self.enqueue(main, Kernel::Copy, [self.all(from, row)], [self.all(to, row)], at)?;
            }
        }
        // Whatever of the scratch is not persistent is allocated while the main stream is current, and the indices,
        // which live until the attention, come last: both as in the real layer.
        let scratch = if whole && COMPRESSED[layer] { Some(self.scratch(layer)?) } else { None };
        let indices = if COMPRESSED[layer] { Some(self.alloc(main, INDICES_ROW, "topk_indices")?) } else { None };
        Ok(Opened { layer, hidden, qkv_a, latent, indices, scratch, produced: first.zip(second).map(|(a, b)| [a, b]) })
    }

    fn fork(&self) -> Result<()> {
        let streams = &self.streams;
        streams.side().into_iter().try_for_each(|side| self.network.device.wait_stream(side, streams.main))
    }

    /// Logits and workspace of a layer's indexer.
    pub(super) fn scratch(&self, layer: usize) -> Result<Scratch> {
        let main = self.streams.main;
        let stashed = self.persistent.stashes.get(&layer).map(|stash| &stash.logits);
        let logits = match stashed.or(self.persistent.logits.as_ref()) {
            Some(kept) => kept.clone(),
            None => self.alloc(main, self.network.logits_row(), "logits")?,
        };
        let workspace = match &self.persistent.workspace {
            Some(kept) => kept.clone(),
            None => self.alloc(main, WORKSPACE_ROW, "topk_workspace")?,
        };
        Ok(Scratch { logits, workspace })
    }

    /// A1 and A2: the reader returns, and its logits and workspace go while the indexer has yet to read them.
    pub(super) fn release(&self, scratch: Scratch) {
        self.fixes.release(scratch.logits, self.streams.indexer);
        self.fixes.release(scratch.workspace, self.streams.indexer);
    }

    /// The operands of an opened layer's indexer, if it has one.
    pub(super) fn indexer(&self, opened: &Opened) -> Option<IndexerOperands> {
        Some(IndexerOperands {
            layer: opened.layer,
            hidden: self.all(&opened.hidden, HIDDEN_ROW),
            latent: self.all(&opened.latent, LATENT_ROW),
            indices: self.all(opened.indices.as_ref()?, INDICES_ROW),
        })
    }

    /// The indexer, on its stream.
    pub(super) fn index(
        &self,
        operands: &IndexerOperands,
        scratch: &Scratch,
        produced: Option<[EventId; 2]>,
    ) -> Result<()> {
        let &IndexerOperands { layer, hidden, latent, indices } = operands;
        let (network, stream) = (self.network, self.streams.indexer);
        let (Some(weights), Some(cache)) =
            (&network.weights.layers[layer].compressed, &network.caches[layer].compressed)
        else {
            return Ok(());
        };
        let (at, format) = (Some(layer), network.geometry.keys);
        let ring = pages(&cache.index_ring, INDEX_RING_PAGE);
        let keys = pages(&cache.index_keys, format.page_bytes());

        let compress = Kernel::IndexCompress { weight: weights.index_compress };
        self.enqueue(stream, compress, [hidden, self.positions(), self.ring_pages()], [ring], at)?;
        let reads = [ring, self.positions(), self.ring_pages(), self.page_table()];
        self.enqueue(stream, Kernel::IndexStore { format }, reads, [keys], at)?;

        if let Some([_, latent_ready]) = produced {
            network.device.wait(stream, latent_ready)?;
        }
        self.logits(stream, layer, hidden, latent, &scratch.logits)?;

        let k = network.geometry.top_k;
        let row = network.logits_row();
        let logits = scratch.logits.indexed(scratch.logits.region(row, row, self.rows, 0));
        let workspace = self.all(&scratch.workspace, WORKSPACE_ROW);
        self.enqueue(stream, Kernel::TopkSelect { k }, [logits, self.positions()], [workspace], at)?;
        // The header and the pairs that can be there; the padding behind them is nobody's to read.
        let pairs = scratch.workspace.region(WORKSPACE_ROW, (2 + 2 * u64::from(k)) * 4, self.rows, 0);
        let reads = [scratch.workspace.operand(pairs), self.page_table(), self.positions()];
        self.enqueue(stream, Kernel::TopkFinalise { k }, reads, [indices], at)
    }

    /// Queries, weights and logits from the hidden state and the latent.
    pub(super) fn logits(
        &self,
        stream: StreamId,
        layer: usize,
        hidden: Operand,
        latent: Operand,
        logits: &Tensor,
    ) -> Result<()> {
        let (network, at) = (self.network, Some(layer));
        let (Some(weights), Some(cache)) =
            (&network.weights.layers[layer].compressed, &network.caches[layer].compressed)
        else {
            return Ok(());
        };
        let format = network.geometry.keys;
        let query = self.alloc(stream, INDEX_QUERY_ROW, "q_idx")?;
        let live_query = self.part(&query, INDEX_QUERY_ROW, LIVE_INDEX_QUERY_ROW, 0);
        let project = Kernel::Matmul { weight: weights.index_query, site: MatmulSite::IndexQuery };
        self.enqueue(stream, project, [latent], [live_query], at)?;
        let raw = self.alloc(stream, INDEX_HEADS * BF16, "w_idx")?;
        let live_raw = self.part(&raw, INDEX_HEADS * BF16, MATCH_HEADS * BF16, 0);
        let project = Kernel::Matmul { weight: weights.index_weights, site: MatmulSite::IndexWeights };
        self.enqueue(stream, project, [hidden], [live_raw], at)?;

        let scaled = self.alloc(stream, INDEX_HEADS * WORD, "w_idx_scaled")?;
        let live_scaled = self.part(&scaled, INDEX_HEADS * WORD, MATCH_HEADS * WORD, 0);
        let finished = match format {
            KeyFormat::Bf16 => query.clone(),
            KeyFormat::Fp8 => self.alloc(stream, INDEX_QUERY_ROW / BF16, "q_idx_fp8")?,
        };
        let live_finished = match format {
            KeyFormat::Bf16 => live_query,
            KeyFormat::Fp8 => self.part(&finished, INDEX_QUERY_ROW / BF16, LIVE_INDEX_QUERY_ROW / BF16, 0),
        };
        let reads = [live_query, live_raw, self.positions()];
        self.enqueue(stream, Kernel::IndexRope { format }, reads, [live_finished, live_scaled], at)?;

        let reader = if network.toggles.paged_reader { Reader::Paged } else { Reader::Fallback };
        let keys = pages(&cache.index_keys, format.page_bytes());
        let reads = [live_finished, live_scaled, keys, self.page_table(), self.positions()];
        let row = network.logits_row();
        let target = logits.region(row, row, self.rows, 0);
        let target = if reader == Reader::Paged { logits.indexed(target) } else { logits.operand(target) };
        self.enqueue(stream, Kernel::Logits { format, reader }, reads, [target], at)
    }

    /// The rest of a layer: what runs beside the indexer, the join, the attention.
    pub(super) fn close(&self, opened: Opened) -> Result<()> {
        let (streams, layer) = (self.streams, opened.layer);
        let Opened { hidden, qkv_a, latent, indices, produced, .. } = opened;
        let device = &self.network.device;
        device.set_layer(Some(layer as u8));
        match produced {
            Some([qkv_ready, _]) => device.wait(streams.kv, qkv_ready)?,
            None => self.fork()?,
        }
        self.store_window(layer, &qkv_a)?;
        // B: the key-value stream has yet to read the latent's last columns.
        self.fixes.release(qkv_a, streams.kv);
        self.compress_core(layer, &hidden)?;

        let query = self.query(layer, &latent)?;
        let fed = self.feed_forward(layer, &hidden)?;

        for side in streams.side() {
            device.wait_stream(streams.main, side)?;
        }
        self.fixes.joined();
        self.attend(layer, query, &fed, indices.as_ref())?;
        device.set_layer(None);
        Ok(())
    }

    fn store_window(&self, layer: usize, qkv_a: &Tensor) -> Result<()> {
        let latent = self.part(qkv_a, QKV_ROW, KV * BF16, LATENT_ROW);
        let window = pages(&self.network.caches[layer].window, SWA_PAGE);
        let reads = [latent, self.positions(), self.ring_pages()];
        self.enqueue(self.streams.kv, Kernel::KvStore, reads, [window], Some(layer))
    }

    fn compress_core(&self, layer: usize, hidden: &Tensor) -> Result<()> {
        let (network, stream, at) = (self.network, self.streams.compressor, Some(layer));
        let (Some(weights), Some(cache)) =
            (&network.weights.layers[layer].compressed, &network.caches[layer].compressed)
        else {
            return Ok(());
        };
        let ring = pages(&cache.core_ring, CORE_RING_PAGE);
        let compress = Kernel::CoreCompress { weight: weights.core_compress };
        let reads = [self.all(hidden, HIDDEN_ROW), self.positions(), self.ring_pages()];
        self.enqueue(stream, compress, reads, [ring], at)?;
        let reads = [ring, self.positions(), self.ring_pages(), self.page_table()];
        self.enqueue(stream, Kernel::CoreStore, reads, [pages(&cache.entries, ENTRY_PAGE)], at)
    }

    fn query(&self, layer: usize, latent: &Tensor) -> Result<Tensor> {
        let (main, at) = (self.streams.main, Some(layer));
        let codes = self.alloc(main, Q_LORA, "q_lora_fp8")?;
        let scales = self.alloc(main, SCALES_ROW, "q_lora_scale")?;
        let quantised = [self.all(&codes, Q_LORA), self.all(&scales, SCALES_ROW)];
        self.enqueue(main, Kernel::Quantise, [self.all(latent, LATENT_ROW)], quantised, at)?;
        let query = self.alloc(main, ATTENTION_ROW, "q")?;
        let live = self.part(&query, ATTENTION_ROW, LIVE_QUERY_ROW, 0);
        let project = Kernel::QueryMatmul { weight: self.network.weights.layers[layer].q_b };
        self.enqueue(main, project, quantised, [live], at)?;
        drop((codes, scales));
        self.enqueue(main, Kernel::QueryRope, [live, self.positions()], [live], at)?;
        Ok(query)
    }

    /// The parallel feed-forward: it reads the same norm as the attention, so it runs beside the indexer.
    fn feed_forward(&self, layer: usize, hidden: &Tensor) -> Result<Tensor> {
        let (main, at, weights) = (self.streams.main, Some(layer), &self.network.weights.layers[layer]);
        let up = self.alloc(main, FEED_FORWARD_ROW, "ffn_up")?;
        let project = Kernel::Matmul { weight: weights.feed_forward_up, site: MatmulSite::FeedForwardUp };
        let reads = [self.all(hidden, HIDDEN_ROW)];
        self.enqueue(main, project, reads, [self.all(&up, FEED_FORWARD_ROW)], at)?;
        let down = self.alloc(main, HIDDEN_ROW, "ffn_down")?;
        let project = Kernel::Matmul { weight: weights.feed_forward_down, site: MatmulSite::FeedForwardDown };
        let reads = [self.all(&up, FEED_FORWARD_ROW)];
        self.enqueue(main, project, reads, [self.all(&down, HIDDEN_ROW)], at)?;
        Ok(down)
    }

    fn attend(&self, layer: usize, query: Tensor, fed: &Tensor, indices: Option<&Tensor>) -> Result<()> {
        let (network, main, at) = (self.network, self.streams.main, Some(layer));
        let cache = &network.caches[layer];
        let attended = self.alloc(main, ATTENTION_ROW, "attn_out")?;
        let live = self.part(&attended, ATTENTION_ROW, LIVE_OUTPUT_ROW, 0);
        let live_query = self.part(&query, ATTENTION_ROW, LIVE_QUERY_ROW, 0);
        let window = pages(&cache.window, SWA_PAGE);
        let scale = network.softmax_scale;
        let shared = [live_query, window, self.positions(), self.ring_pages()];
        match (&cache.compressed, indices) {
            (Some(compressed), Some(indices)) => {
                let kernel = Kernel::Attention { scale, k: network.geometry.top_k };
                let [query, window, positions, ring_pages] = shared;
                let entries = pages(&compressed.entries, ENTRY_PAGE);
                let indices = self.all(indices, INDICES_ROW);
                self.enqueue(main, kernel, [query, window, positions, ring_pages, entries, indices], [live], at)?;
            }
            _ => self.enqueue(main, Kernel::Attention { scale, k: 0 }, shared, [live], at)?,
        }
        drop(query);
        let project = Kernel::OutputProject { weight: network.weights.layers[layer].output };
        let ballast = self.part(fed, HIDDEN_ROW, (HIDDEN - LIVE) * BF16, LIVE * BF16);
        self.enqueue(main, project, [live, ballast, self.residual()], [self.residual()], at)
    }

    /// The last norm, the head and the choice of the next tokens.
    pub(super) fn finish(&self) -> Result<()> {
        let (network, main) = (self.network, self.streams.main);
        let hidden = self.alloc(main, HIDDEN_ROW, "h_final")?;
        let gain = network.weights.hidden_gain;
        let norm = Kernel::RmsNorm { gain, group: LIVE as u32, site: NormSite::Final };
        self.enqueue(main, norm, [self.residual()], [self.all(&hidden, HIDDEN_ROW)], None)?;
        let head = Kernel::Head { weight: network.weights.head };
        let next = self.all(&network.inputs.next_tokens, WORD);
        self.enqueue(main, head, [self.all(&hidden, HIDDEN_ROW)], [next], None)
    }

    /// Logits of `layer`, recomputed on the main stream from what its stash kept.
    pub(super) fn recompute(&self, layer: usize, stash: &Stash) -> Result<Tensor> {
        let logits = self.alloc(self.streams.main, self.network.logits_row(), "logits_again")?;
        let (hidden, latent) = (self.all(&stash.hidden, HIDDEN_ROW), self.all(&stash.latent, LATENT_ROW));
        self.logits(self.streams.main, layer, hidden, latent, &logits)?;
        Ok(logits)
    }
}
