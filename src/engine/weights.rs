//! The constructed weights: a longest-suffix copy machine, exact in bf16 and e4m3, and ballast beside it.
//!
//! Every byte has a ±1 code of eight bits. Each layer's window attention gathers the key codes of the newest tokens;
//! the indexer's four alignments times two orders compare them with the tokens before every earlier one and fire where
//! a long context matches up to a byte, or a short one exactly; attention copies what followed the newest best match,
//! each compressed layer two of its bits. Where nothing matches, the head's bias ends the turn.
//!
//! Thresholds sit on three constant dims, because their sums (-103 and -39) fit no single number that both formats hold
//! exactly beside the codes. Ballast has its own dims, from the embedding to the head, that no live weight reads.

use rand::{RngExt, seq::SliceRandom};

use super::{
    geometry::{COMPRESSED, LAYERS},
    tokenizer::{TURN_END, TURN_START, VOCABULARY},
};
use crate::{
    device::{
        SparseWeight,
        kernel::{
            ATTENTION_DIMS, CODE, CONSTANT_AT, COPY_AT, CORE_RING_DIM, FEED_FORWARD, GATHER, GATHER_AT, GATHER_DIMS,
            HEAD_DIM, HIDDEN, INDEX_CODE, INDEX_DIM, INDEX_RING_DIM, KEY_AT, KV, LIVE, LONG, MATCH_HEADS, Q_LORA,
            Q_LORA_CONSTANT_AT, Q_LORA_GROUP, RATIO, SHORT, SPAN, VALUE_AT,
        },
    },
    seed::Seed,
};

/// The residual's constant dim, which fixes the norm's scale whatever else the live group holds.
const RESIDUAL_CONSTANT: f32 = 2048.0;
/// Gain of the layer norm's live codes: the constant over the root of the group's width, to eight bits.
const HIDDEN_GAIN: f32 = 45.25;
/// The query latent's constant before its norm.
const LATENT_CONSTANT: f32 = 1024.0;
/// Gain of the query norm's live codes: the constant over the root of the group's width.
const LATENT_GAIN: f32 = 64.0;
/// What an index head adds for the constant dims, long and short: minus (4 · 28 - 9) and minus (4 · 10 - 1).
const INDEX_THRESHOLDS: [[f32; 3]; 2] = [[-112.0, 8.0, 1.0], [-28.0, -12.0, 1.0]];
/// What an attention head adds, long and short: minus (8 · 28 - 17) and minus (8 · 10 - 1).
const MATCH_THRESHOLDS: [f32; 2] = [-207.0, -79.0];
/// Weight of a firing index head, long and short.
const INDEX_WEIGHTS: [f32; 2] = [4.0, 1.0];
/// Weight of a copied bit, long and short: a long match outvotes a short one.
const COPY_WEIGHTS: [f32; 2] = [3.0, 1.0];
/// Tokens that each order compares.
const ORDERS: [u64; 2] = [LONG, SHORT];
/// Score of one position of distance, in units of the softmax: what separates the newest match from all older ones.
const POSITION_SCORE: f32 = 32.0;
/// Bits of the copied byte that one compressed layer writes.
const BITS_PER_LAYER: u64 = 2;

/// Weights of one layer.
#[derive(Debug, Clone)]
pub struct LayerWeights {
    /// Hidden to query latent and key-value latent.
    pub qkv_a: SparseWeight,
    /// Query latent to attention queries.
    pub q_b: SparseWeight,
    /// Feed-forward, up.
    pub feed_forward_up: SparseWeight,
    /// Feed-forward, down.
    pub feed_forward_down: SparseWeight,
    /// Attention output to residual.
    pub output: SparseWeight,
    /// The indexer and the compressors; layers without compressed entries have none.
    pub compressed: Option<CompressedWeights>,
}

/// Weights that only layers with compressed entries have.
#[derive(Debug, Clone)]
pub struct CompressedWeights {
    /// Query latent to index heads.
    pub index_query: SparseWeight,
    /// Hidden to the index heads' weights.
    pub index_weights: SparseWeight,
    /// Hidden to the index compressor's ring.
    pub index_compress: SparseWeight,
    /// Hidden to the core compressor's ring.
    pub core_compress: SparseWeight,
}

/// All weights.
#[derive(Debug, Clone)]
pub struct Weights {
    /// Row = token.
    pub embedding: SparseWeight,
    /// Gain of the layers' norms and of the last one.
    pub hidden_gain: SparseWeight,
    /// Gain of the query latent's norm.
    pub latent_gain: SparseWeight,
    /// The layers.
    pub layers: Vec<LayerWeights>,
    /// Row = token.
    pub head: SparseWeight,
    /// Softmax scale of the attention.
    pub softmax_scale: f32,
}

/// The value code of every token, as ±1.
pub fn codes() -> [[f32; CODE as usize]; VOCABULARY] {
    let mut numbers: [u8; VOCABULARY] = std::array::from_fn(|number| number as u8);
    numbers.shuffle(&mut Seed(7).fork("codes").rng());
    numbers.map(|number| std::array::from_fn(|bit| if number >> bit & 1 == 1 { 1.0 } else { -1.0 }))
}

impl Weights {
    /// The weights for sequences of up to `max_context` tokens.
    pub fn new(max_context: u32) -> Self {
        let codes = codes();
        // A power of two keeps scores exact; the slope of recency is one over it a position, below one in all.
        let span = max_context.next_power_of_two() as f32;
        Self {
            embedding: embedding(&codes),
            hidden_gain: hidden_gain(),
            latent_gain: latent_gain(),
            layers: (0..LAYERS).map(|layer| layer_weights(layer, span)).collect(),
            head: head(&codes),
            softmax_scale: POSITION_SCORE * span,
        }
    }
}

/// A ballast weight: exact in bf16, of varied size and sign, never zero.
fn ballast(rng: &mut impl RngExt) -> f32 {
    let magnitude = rng.random_range(64..=255) as f32 / 256.0;
    if rng.random() { magnitude } else { -magnitude }
}

/// Builds a weight row by row; `row` appends `(column, value)` in ascending order of column.
fn rows(rows: u64, columns: u64, mut row: impl FnMut(u64, &mut Vec<(u64, f32)>)) -> SparseWeight {
    let mut weight = SparseWeight {
        rows: rows as u32,
        columns: columns as u32,
        row_start: vec![0],
        column: Vec::new(),
        value: Vec::new(),
    };
    let mut entries = Vec::new();
    for number in 0..rows {
        row(number, &mut entries);
        debug_assert!(entries.is_sorted_by_key(|(column, _)| *column), "row {number} is not in order");
        for (column, value) in entries.drain(..) {
            weight.column.push(column as u32);
            weight.value.push(value);
        }
        weight.row_start.push(weight.column.len() as u32);
    }
    weight
}

fn embedding(codes: &[[f32; CODE as usize]; VOCABULARY]) -> SparseWeight {
    let mut rng = Seed(7).fork("embedding").rng();
    rows(VOCABULARY as u64, HIDDEN, |token, row| {
        let code = codes[token as usize].iter();
        row.extend((VALUE_AT..).zip(code.clone().copied()));
        if token < u64::from(TURN_START) {
            row.extend((KEY_AT..).zip(code.copied()));
        }
        row.push((CONSTANT_AT, RESIDUAL_CONSTANT));
        row.extend((LIVE..HIDDEN).map(|dim| (dim, ballast(&mut rng))));
    })
}

fn hidden_gain() -> SparseWeight {
    rows(1, HIDDEN, |_, row| {
        row.extend((0..HIDDEN).map(|dim| match dim {
            CONSTANT_AT => (dim, HIDDEN_GAIN / RESIDUAL_CONSTANT),
            dim if dim < LIVE => (dim, HIDDEN_GAIN),
            dim => (dim, 1.0),
        }));
    })
}

fn latent_gain() -> SparseWeight {
    rows(1, Q_LORA, |_, row| {
        row.extend((0..Q_LORA).map(|dim| match dim {
            Q_LORA_CONSTANT_AT => (dim, LATENT_GAIN / LATENT_CONSTANT),
            dim if dim < Q_LORA_GROUP => (dim, LATENT_GAIN),
            dim => (dim, 1.0),
        }));
    })
}

/// First residual dim of the window codes that `layer` gathers.
fn gathered_at(layer: usize) -> u64 {
    GATHER_AT + layer as u64 * GATHER_DIMS
}

fn layer_weights(layer: usize, span: f32) -> LayerWeights {
    let mut rng = Seed(7).fork("layer").index(layer as u64).rng();
    let window = layer.checked_sub(1).map(gathered_at);
    let qkv_a = rows(Q_LORA + KV, HIDDEN, |dim, row| match (dim, window) {
        (Q_LORA_CONSTANT_AT, _) => row.push((CONSTANT_AT, LATENT_CONSTANT)),
        (0..Q_LORA_CONSTANT_AT, Some(window)) => row.push((window + dim, 1.0)),
        (0..Q_LORA_GROUP, _) => {}
        (Q_LORA.., _) if dim < Q_LORA + CODE => row.push((KEY_AT + dim - Q_LORA, 1.0)),
        _ => row.push((LIVE + dim, ballast(&mut rng))),
    });
    let q_b = rows(MATCH_HEADS * HEAD_DIM, Q_LORA, |row, entries| entries.extend(match_query(row, span, &mut rng)));
    let feed_forward_up =
        rows(FEED_FORWARD, HIDDEN, |dim, row| row.push((LIVE + dim % (HIDDEN - LIVE), ballast(&mut rng))));
    let feed_forward_down = rows(HIDDEN, FEED_FORWARD, |dim, row| row.push((dim, ballast(&mut rng))));
    LayerWeights {
        qkv_a,
        q_b,
        feed_forward_up,
        feed_forward_down,
        output: output(layer),
        compressed: window.filter(|_| COMPRESSED[layer]).map(compressed),
    }
}

/// Order and alignment of a match head.
fn head_of(head: u64) -> (usize, u64) {
    ((head % ORDERS.len() as u64) as usize, head / ORDERS.len() as u64)
}

/// Latent dim that a match head compares with bit `bit` of the key's token `offset`.
fn compared(head: u64, offset: u64, bit: u64) -> Option<u64> {
    let (order, alignment) = head_of(head);
    let token = offset.checked_sub(RATIO - 1 - alignment)?;
    (token < ORDERS[order]).then_some(token * CODE + bit)
}

/// One row of the attention query: codes, digits of recency, threshold, the alignment's own recency, ballast.
fn match_query(row: u64, span: f32, rng: &mut impl RngExt) -> Option<(u64, f32)> {
    const DIGITS_AT: u64 = SPAN * CODE;
    let (head, dim) = (row / HEAD_DIM, row % HEAD_DIM);
    let (order, alignment) = head_of(head);
    let constant = match dim {
        0..DIGITS_AT => return compared(head, dim / CODE, dim % CODE).map(|latent| (latent, 1.0)),
        DIGITS_AT => 256.0 * RATIO as f32 / span,
        249 => RATIO as f32 / span,
        250 => MATCH_THRESHOLDS[order],
        251 if alignment == 0 => return None,
        251 => alignment as f32 / span,
        _ => return Some((Q_LORA_GROUP + dim, ballast(rng))),
    };
    Some((Q_LORA_CONSTANT_AT, constant))
}

fn compressed(window: u64) -> CompressedWeights {
    const CODES: u64 = SPAN * INDEX_CODE;
    let index_query = rows(MATCH_HEADS * INDEX_DIM, Q_LORA, |row, entries| {
        let (head, dim) = (row / INDEX_DIM, row % INDEX_DIM);
        if dim < CODES {
            entries.extend(compared(head, dim / INDEX_CODE, dim % INDEX_CODE).map(|latent| (latent, 1.0)));
        } else if let Some(&value) = INDEX_THRESHOLDS[head_of(head).0].get((dim - CODES) as usize) {
            entries.push((Q_LORA_CONSTANT_AT, value));
        }
    });
    let index_weights = rows(MATCH_HEADS, HIDDEN, |head, row| row.push((CONSTANT_AT, INDEX_WEIGHTS[head_of(head).0])));
    let index_compress = rows(INDEX_RING_DIM, HIDDEN, |dim, row| {
        if dim < GATHER * INDEX_CODE {
            row.push((window + dim / INDEX_CODE * CODE + dim % INDEX_CODE, 1.0));
        }
    });
    let core_compress = rows(CORE_RING_DIM, HIDDEN, |dim, row| {
        if dim < GATHER_DIMS {
            row.push((window + dim, 1.0));
        } else if dim < GATHER_DIMS + CODE {
            row.push((VALUE_AT + dim - GATHER_DIMS, 1.0));
        }
    });
    CompressedWeights { index_query, index_weights, index_compress, core_compress }
}

fn output(layer: usize) -> SparseWeight {
    let (gathered, first_bit) = (gathered_at(layer), (layer as u64).saturating_sub(1) * BITS_PER_LAYER);
    let copied = COPY_AT + first_bit..COPY_AT + first_bit + BITS_PER_LAYER;
    rows(HIDDEN, ATTENTION_DIMS, |dim, row| {
        if COMPRESSED[layer] && copied.contains(&dim) {
            let bit = dim - COPY_AT;
            row.extend(COPY_WEIGHTS.iter().zip(0..).map(|(&weight, order)| (GATHER_DIMS + order * CODE + bit, weight)));
        } else if (gathered..gathered + GATHER_DIMS).contains(&dim) {
            row.push((dim - gathered, 1.0));
        }
    })
}

fn head(codes: &[[f32; CODE as usize]; VOCABULARY]) -> SparseWeight {
    rows(VOCABULARY as u64, HIDDEN, |token, row| {
        if token == u64::from(TURN_END) {
            row.push((CONSTANT_AT, 0.5));
        }
        row.extend((COPY_AT..).zip(codes[token as usize]));
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(weights: &Weights) -> Vec<(&'static str, &SparseWeight)> {
        let mut all = vec![
            ("embedding", &weights.embedding),
            ("hidden_gain", &weights.hidden_gain),
            ("latent_gain", &weights.latent_gain),
            ("head", &weights.head),
        ];
        for layer in &weights.layers {
            all.extend([("qkv_a", &layer.qkv_a), ("q_b", &layer.q_b), ("output", &layer.output)]);
            all.extend([("up", &layer.feed_forward_up), ("down", &layer.feed_forward_down)]);
            if let Some(compressed) = &layer.compressed {
                all.extend([
                    ("index_query", &compressed.index_query),
                    ("index_weights", &compressed.index_weights),
                    ("index_compress", &compressed.index_compress),
                    ("core_compress", &compressed.core_compress),
                ]);
            }
        }
        all
    }

    #[test]
    fn every_weight_is_exact_in_bf16() {
        for context in [256, 1000, 16_384, 32_768] {
            for (name, weight) in all(&Weights::new(context)) {
                for &value in &weight.value {
                    assert_eq!(half::bf16::from_f32(value).to_f32(), value, "{name} at {context}");
                }
                assert!(weight.column.iter().all(|column| *column < weight.columns), "{name}");
            }
        }
    }

    #[test]
    fn codes_are_distinct() {
        let distinct: std::collections::BTreeSet<_> =
            codes().map(|code| code.map(|bit| bit > 0.0)).into_iter().collect();
        assert_eq!(distinct.len(), VOCABULARY);
    }

    #[test]
    fn no_live_output_reads_ballast() {
        let weights = Weights::new(16_384);
        for layer in &weights.layers {
            let live = (0..Q_LORA_GROUP).chain(Q_LORA..Q_LORA + CODE);
            assert!(live.flat_map(|dim| layer.qkv_a.row(dim as u32).0).all(|column| u64::from(*column) < LIVE));
            for head in 0..MATCH_HEADS {
                let compared = (0..252).flat_map(|dim| layer.q_b.row((head * HEAD_DIM + dim) as u32).0);
                assert!(compared.copied().all(|column| u64::from(column) < Q_LORA_GROUP));
            }
            if let Some(compressed) = &layer.compressed {
                let live = [&compressed.index_weights, &compressed.index_compress, &compressed.core_compress];
                assert!(live.iter().flat_map(|weight| &weight.column).all(|column| u64::from(*column) < LIVE));
                assert!(compressed.index_query.column.iter().all(|column| u64::from(*column) < Q_LORA_GROUP));
            }
            assert!(layer.output.column.iter().all(|column| u64::from(*column) < GATHER_DIMS + 2 * CODE));
        }
        assert!(weights.head.column.iter().all(|column| u64::from(*column) < LIVE));
    }
}
