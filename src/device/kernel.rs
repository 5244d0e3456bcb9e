//! Every kernel with its scalars, operand order, grid and access sets.
//!
//! Kernels are specialised to the shapes below, as compiled kernels are by template parameters. Activations have the
//! sizes and strides of the charged geometry on every backend; the dims that carry the model's state sit in them at the
//! places named here and all others are ballast, which no live dim ever reads.
//!
//! Words of metadata are little-endian `i32`: `tokens`, `positions` (of the token being decoded) and `ring_pages` are
//! `[B]`, `page_table` is `[B, max_pages]`. A row has `(position + 1) / 4` compressed entries; entry `b` covers tokens
//! `4b..4b+4` and lives in page `page_table[b / 64]`, slot `b % 64`. Rows that complete no entry, padded rows among
//! them, store to page 0, slot 0, which nobody reads.

use super::weight::WeightId;

/// Residual width.
pub const HIDDEN: u64 = 4096;
/// Width of the residual group that carries the model; the rest is ballast. Norms treat the groups apart.
pub const LIVE: u64 = 2048;
/// Residual dims of the token's own value code.
pub const VALUE_AT: u64 = 0;
/// Residual dims of the token's own key code (zero for control tokens).
pub const KEY_AT: u64 = 8;
/// Residual dim of the constant: large in the residual stream, where it fixes the norm's scale, and one after a norm.
pub const CONSTANT_AT: u64 = 16;
/// Residual dims of the copied byte's bits.
pub const COPY_AT: u64 = 24;
/// Residual dims of layer 0's window codes; each layer has [`GATHER_DIMS`] of its own.
pub const GATHER_AT: u64 = 32;
/// Bits of a token's code.
pub const CODE: u64 = 8;
/// Bits of a token's code that the index keys use.
pub const INDEX_CODE: u64 = 4;
/// Tokens, the newest included, whose key codes a layer's window attention gathers.
pub const GATHER: u64 = 29;
/// Dims of one gathered window: token at distance `d` has `8d..8d+8`.
pub const GATHER_DIMS: u64 = GATHER * CODE;
/// Tokens in the key of a compressed entry, the one at `4b + 2` first and older ones after it.
pub const SPAN: u64 = 31;
/// Tokens that a long match compares.
pub const LONG: u64 = 28;
/// Tokens that a short match compares.
pub const SHORT: u64 = 10;
/// Tokens of a compressed entry, and so alignments of a match.
pub const RATIO: u64 = 4;
/// Width of the query's latent.
pub const Q_LORA: u64 = 1024;
/// Dims of the latent's live norm group: key codes of the newest [`LONG`] tokens, then the constant.
pub const Q_LORA_GROUP: u64 = 256;
/// Latent dim of the constant.
pub const Q_LORA_CONSTANT_AT: u64 = LONG * CODE;
/// Latent dims that share one quantisation scale.
pub const QUANTISE_GROUP: u64 = 128;
/// Width of the key-value latent; its first [`CODE`] dims are the token's key code.
pub const KV: u64 = 512;
/// Index heads charged; the first [`MATCH_HEADS`] are live.
pub const INDEX_HEADS: u64 = 64;
/// Dims of an index head.
pub const INDEX_DIM: u64 = 128;
/// Live heads of index and attention: head `2r + o` matches at alignment `r`, order long (`o = 0`) or short (`o = 1`).
pub const MATCH_HEADS: u64 = 8;
/// Attention heads charged.
pub const HEADS: u64 = 64;
/// Dims of an attention head; rotary dims are the last [`ROPE`].
pub const HEAD_DIM: u64 = 512;
/// Rotary dims of an attention head, all ballast.
pub const ROPE: u64 = 64;
/// Width of the feed-forward's up projection.
pub const FEED_FORWARD: u64 = 8192;
/// Words of a row of top-k indices; those past the computed k are -1.
pub const TOPK_WORDS: u64 = 512;
/// Words of a row of top-k workspace: count of candidates, k, then `(index, logit bits)` pairs, then -1.
pub const WORKSPACE_WORDS: u64 = 2050;
/// Tokens of a page, and slots of a sequence's ring of sliding-window entries.
pub const PAGE_TOKENS: u64 = 256;
/// Compressed entries of a page.
pub const PAGE_ENTRIES: u64 = PAGE_TOKENS / RATIO;
/// Tokens that window attention is charged for.
pub const WINDOW: u64 = 128;
/// Dims of a sliding-window entry (bf16): the key code, then folded ballast.
pub const SWA_DIM: u64 = 64;
/// Bytes of a sequence's ring of sliding-window entries; slot of a token: position modulo [`PAGE_TOKENS`].
pub const SWA_PAGE: u64 = PAGE_TOKENS * SWA_DIM * 2;
/// Tokens in a compressor's ring; slot of a token: position modulo this.
pub const RING: u64 = 8;
/// `f32` dims of an index compressor's ring slot: the first [`INDEX_CODE`] bits of each gathered token's key code, then
/// zeros.
pub const INDEX_RING_DIM: u64 = 128;
/// Bytes of a sequence's index compressor ring.
pub const INDEX_RING_PAGE: u64 = RING * INDEX_RING_DIM * 4;
/// `f32` dims of a core compressor's ring slot: gathered key codes, then the token's own value code, then zeros.
pub const CORE_RING_DIM: u64 = 256;
/// Bytes of a sequence's core compressor ring.
pub const CORE_RING_PAGE: u64 = RING * CORE_RING_DIM * 4;
/// Bytes of the key part of a compressed entry: e4m3, [`SPAN`] x [`CODE`] dims and zeros.
pub const ENTRY_KEY: u64 = 256;
/// Bytes of a compressed entry: the key, then 64 bf16 dims: four value codes, the entry's number as two digits of base
/// 256 (high first), two ones, zeros.
pub const ENTRY: u64 = ENTRY_KEY + 128;
/// bf16 dim, past the key, of the entry's number.
pub const ENTRY_DIGITS_AT: u64 = RATIO * CODE;
/// Bytes of a page of compressed entries.
pub const ENTRY_PAGE: u64 = PAGE_ENTRIES * ENTRY;
/// Live dims of an attention output row: the gathered window, then the byte copied by the long match, then by the short.
pub const ATTENTION_DIMS: u64 = 512;
/// Bytes of a page's checksums, one `u64` a key.
pub const CHECKSUMS_ROW: u64 = PAGE_ENTRIES * 8;
/// Tokens that a prefill block processes.
pub const PREFILL_TILE: u64 = 64;
/// Index keys that a logits block processes.
pub const LOGITS_TILE: u64 = 256;

/// How index keys are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum KeyFormat {
    /// `[pages, 64, 128]` bf16.
    Bf16,
    /// `[pages, 64 x 128 bytes of e4m3, then 64 f32 scales]`, scale = max(1e-4, amax) / 448 per entry.
    Fp8,
}

impl KeyFormat {
    /// Bytes of one page of index keys.
    pub fn page_bytes(self) -> u64 {
        match self {
            Self::Bf16 => PAGE_ENTRIES * INDEX_DIM * 2,
            Self::Fp8 => PAGE_ENTRIES * (INDEX_DIM + 4),
        }
    }

    /// Bytes of one index key without its scale.
    pub fn key_bytes(self) -> u64 {
        match self {
            Self::Bf16 => INDEX_DIM * 2,
            Self::Fp8 => INDEX_DIM,
        }
    }
}

/// Which paged logits reader runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Reader {
    /// Visits and writes the row's entries only.
    Paged,
    /// Visits the whole maximum context; logits past the row's entries become negative infinity.
    Fallback,
}

/// Which norm it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum NormSite {
    /// Before a layer.
    Layer,
    /// Of the query's latent.
    Query,
    /// Before the head.
    Final,
}

/// Which plain projection it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MatmulSite {
    /// Hidden to query latent and key-value latent.
    QkvA,
    /// Query latent to index heads.
    IndexQuery,
    /// Hidden to index head weights.
    IndexWeights,
    /// Feed-forward, up.
    FeedForwardUp,
    /// Feed-forward, down.
    FeedForwardDown,
}

/// How a launch is cut into blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Grid {
    /// One block a row of the batch.
    Rows,
    /// So many blocks, each an equal slice of the charged output columns, for all rows.
    Columns(u32),
    /// Tiles of a row's index keys: `index` = row, `part` = tile.
    KeyTiles,
    /// Tiles of a prefill chunk's tokens: `index` = tile.
    TokenTiles,
}

/// A kernel and its scalars. Operands are listed as `reads → writes`, in order; `?` marks an indexed one. All matrices are
/// bf16 with `f32` accumulation unless said otherwise.
#[derive(Debug, Clone, PartialEq)]
pub enum Kernel {
    /// `source → target`: copies row by row.
    Copy,
    /// `tokens → x`: row `token` of the table (256 x hidden).
    Embed {
        /// Row = token, column = residual dim.
        table: WeightId,
    },
    /// `x → h`: RMS norm of each group of `group` dims by itself (epsilon 1e-6), times the gain.
    RmsNorm {
        /// One row.
        gain: WeightId,
        /// Dims normalised together.
        group: u32,
        /// Which norm.
        site: NormSite,
    },
    /// `in → out`: `out = W in`.
    Matmul {
        /// Row = output, column = input.
        weight: WeightId,
        /// Which projection.
        site: MatmulSite,
    },
    /// `q_lora → q8, scale`: e4m3 with one `f32` scale = max(1e-4, amax) / 448 per [`QUANTISE_GROUP`] dims.
    Quantise,
    /// `q8, scale → q`: `q = W (q8 * scale)`; q's row stride is the charged one, its row length that of the live heads.
    QueryMatmul {
        /// Row = output, column = input.
        weight: WeightId,
    },
    /// `q, positions → q`: rotates each live head's last [`ROPE`] dims in place, pairs `(2i, 2i + 1)`, base 10 000.
    QueryRope,
    /// `qkv_a's key-value columns, positions, ring_pages → swa?`: one sliding-window entry a row. Dims 0..8 are the
    /// first 8 as they are; dim `8 + j` is the sum of the others with `(dim - 8) % 56 = j`, in ascending order.
    KvStore,
    /// `h, positions, ring_pages → index ring?`: slot = W h, `f32`.
    IndexCompress {
        /// Row = ring dim, column = hidden dim.
        weight: WeightId,
    },
    /// `index ring?, positions, ring_pages, page_table? → index keys?`: when a row completes an entry, its key: token
    /// `4b + 2` from that token's slot, `4b + 1` from its own, all older ones from the slot of `4b`; then three ones
    /// and a zero. Of other rows the same, taken as if the token closed an entry, goes to page 0, slot 0.
    IndexStore {
        /// How keys are stored.
        format: KeyFormat,
    },
    /// `q, w, positions → q, w`: finishes index queries. bf16: q is returned in place. fp8: q becomes e4m3, scale =
    /// max(1e-4, amax) / 448 a head. `w` becomes `f32`, in fp8 multiplied by the head's scale.
    IndexRope {
        /// How keys are stored.
        format: KeyFormat,
    },
    /// `q, w, index keys?, page_table?, positions → logits?`: sum over live heads, in order, of `w * relu(q . k)`; fp8
    /// multiplies by the key's scale last.
    Logits {
        /// How keys are stored.
        format: KeyFormat,
        /// Which reader.
        reader: Reader,
    },
    /// `logits?, positions → workspace`: the k largest by (logit, later index), newest index first. NaN counts
    /// as larger than any number, by sign and payload (`f32::total_cmp`).
    TopkSelect {
        /// How many.
        k: u32,
    },
    /// `workspace's header and k pairs, page_table?, positions → indices`: `page * 64 + slot` of each candidate below the row's length; -1
    /// for all others.
    TopkFinalise {
        /// How many.
        k: u32,
    },
    /// `h, positions, ring_pages → core ring?`: slot = W h, `f32`.
    CoreCompress {
        /// Row = ring dim, column = hidden dim.
        weight: WeightId,
    },
    /// `core ring?, positions, ring_pages, page_table? → entries?`: as [`Kernel::IndexStore`], with the full code, the
    /// value code of token `4b + r` from its own slot, and the entry's number.
    CoreStore,
    /// `q, swa?, positions, ring_pages [, entries?, indices] → out`: window heads gather the key codes of the newest
    /// [`GATHER`] tokens (zero before the first). With entries, each order's four match heads share one softmax with a
    /// sink at 0: score = `scale * (q . [key, digits, 1, 1])` over q's dims 0..252, value = value code `r` of the entry.
    Attention {
        /// Softmax scale, a power of two.
        scale: f32,
        /// Entries attended to at most; 0 = the layer has none, and the last two operands are missing.
        k: u32,
    },
    /// `index keys?, pages → checksums`: of each page in the list a row of 64 `u64`, one a key: from 1, for the scale (fp8)
    /// and then each eight bytes of the key, little-endian, `rotate_left((sum ^ word) * 0x9E37_79B9_7F4A_7C15, 29)`. A
    /// change of one word always shows.
    Checksum {
        /// How keys are stored.
        format: KeyFormat,
    },
    /// `attention out, feed-forward's ballast half, x → x`: `x + W out`, and `x + y` in the ballast group.
    OutputProject {
        /// Row = residual dim, column = attention dim.
        weight: WeightId,
    },
    /// `h → tokens`: argmax of `W h`, the smallest token of equals.
    Head {
        /// Row = token, column = residual dim.
        weight: WeightId,
    },
    /// `tokens, page_table? → swa? [, index ring?, index keys?, core ring?, entries?]`: what decoding `tokens` one by one
    /// would leave in a layer's caches, with `tokens[0]` at position `start`. Sliding-window and ring slots are written
    /// for positions from `window_from` on (the newest of each slot), entries for those that end at or after
    /// `entries_from`. The [`SPAN`] tokens before either bound are in `tokens`, or do not exist. Ballast dims get zero.
    Prefill {
        /// The embedding: row = token.
        table: WeightId,
        /// Position of the first token.
        start: u32,
        /// First position whose window and ring slots are written.
        window_from: u32,
        /// First position that may complete an entry.
        entries_from: u32,
        /// The sequence's ring page.
        ring_page: u32,
        /// How index keys are stored; none: the layer has no compressed entries.
        format: Option<KeyFormat>,
    },
}

impl Kernel {
    /// The kernel's name in reports and in the cost model.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Copy => "copy",
            Self::Embed { .. } => "embed",
            Self::RmsNorm { site: NormSite::Layer, .. } => "rms_norm",
            Self::RmsNorm { site: NormSite::Query, .. } => "q_norm",
            Self::RmsNorm { site: NormSite::Final, .. } => "final_norm",
            Self::Matmul { site: MatmulSite::QkvA, .. } => "wqkv_a",
            Self::Matmul { site: MatmulSite::IndexQuery, .. } => "wq_b_idx",
            Self::Matmul { site: MatmulSite::IndexWeights, .. } => "weights_proj",
            Self::Matmul { site: MatmulSite::FeedForwardUp, .. } => "ffn_up",
            Self::Matmul { site: MatmulSite::FeedForwardDown, .. } => "ffn_down",
            Self::Quantise => "quantise",
            Self::QueryMatmul { .. } => "wq_b",
            Self::QueryRope => "q_rope",
            Self::KvStore => "kv_store",
            Self::IndexCompress { .. } => "index_compress",
            Self::IndexStore { .. } => "index_store",
            Self::IndexRope { .. } => "index_rope",
            Self::Logits { reader: Reader::Paged, .. } => "logits",
            Self::Logits { reader: Reader::Fallback, .. } => "logits_fallback",
            Self::TopkSelect { .. } => "topk_select",
            Self::TopkFinalise { .. } => "topk_finalise",
            Self::CoreCompress { .. } => "core_compress",
            Self::CoreStore => "core_store",
            Self::Attention { .. } => "attention",
            Self::Checksum { .. } => "checksum",
            Self::OutputProject { .. } => "o_proj",
            Self::Head { .. } => "head",
            Self::Prefill { .. } => "prefill",
        }
    }

    /// How a launch is cut into blocks.
    pub fn grid(&self) -> Grid {
        match self {
            Self::Copy
            | Self::Embed { .. }
            | Self::RmsNorm { .. }
            | Self::Quantise
            | Self::QueryRope
            | Self::KvStore
            | Self::IndexStore { .. }
            | Self::IndexRope { .. }
            | Self::TopkSelect { .. }
            | Self::TopkFinalise { .. }
            | Self::CoreStore
            | Self::Attention { .. }
            | Self::Checksum { .. }
            | Self::Head { .. } => Grid::Rows,
            Self::Matmul { site, .. } => Grid::Columns(match site {
                MatmulSite::QkvA => 96,
                MatmulSite::IndexQuery => 64,
                MatmulSite::IndexWeights => 1,
                MatmulSite::FeedForwardUp | MatmulSite::FeedForwardDown => 128,
            }),
            Self::IndexCompress { .. } | Self::CoreCompress { .. } => Grid::Columns(32),
            Self::QueryMatmul { .. } | Self::OutputProject { .. } => Grid::Columns(256),
            Self::Logits { .. } => Grid::KeyTiles,
            Self::Prefill { .. } => Grid::TokenTiles,
        }
    }
}
