//! Kernels with one block a row: copies, embedding, norms, quantisation, rotation, the head.

use super::{
    super::{View, Writes},
    numeric::{Element, e4m3, quantisation_scale, vectorised},
};
use crate::device::{
    Block, Op, SparseWeight,
    kernel::{HEAD_DIM, MATCH_HEADS, QUANTISE_GROUP, ROPE},
};

const EPSILON: f32 = 1e-6;
/// Partial sums that a norm keeps, so that it can use vectors and still add in a fixed order.
const LANES: usize = 16;

pub(super) fn copy(op: &Op, blocks: &[Block], view: &View<'_>, out: &mut Writes<'_>) {
    let (from, to) = (op.reads[0].region, op.writes[0].region);
    for block in blocks {
        let row = u64::from(block.index);
        out.copy(to.row(row).start, view.bytes(from.row(row)));
    }
}

pub(super) fn embed(op: &Op, blocks: &[Block], view: &View<'_>, out: &mut Writes<'_>, table: &SparseWeight) {
    let (tokens, target) = (op.reads[0].region, op.writes[0].region);
    for block in blocks {
        let row = u64::from(block.index);
        let token = view.slice::<u32>(tokens.row(row))[0].min(table.rows - 1);
        let (columns, values) = table.row(token);
        let out = out.slice::<u16>(target.row(row));
        out.fill(0);
        for (&column, &value) in columns.iter().zip(values) {
            out[column as usize] = u16::put(value);
        }
    }
}

pub(super) fn rms_norm(op: &Op, blocks: &[Block], view: &View<'_>, out: &mut Writes<'_>, gain: &[f32], group: usize) {
    let (from, to) = (op.reads[0].region, op.writes[0].region);
    for block in blocks {
        let row = u64::from(block.index);
        let source = view.slice::<u16>(from.row(row));
        let target = out.slice::<u16>(to.row(row));
        vectorised!({
            for ((x, y), gain) in source.chunks(group).zip(target.chunks_mut(group)).zip(gain.chunks(group)) {
                let mut lanes = [0.0f32; LANES];
                for part in x.chunks_exact(LANES) {
                    for (sum, &value) in lanes.iter_mut().zip(part) {
                        *sum += value.get() * value.get();
                    }
                }
                let mean = lanes.iter().sum::<f32>() / x.len() as f32;
                let inverse = 1.0 / (mean + EPSILON).sqrt();
                for ((y, &x), &gain) in y.iter_mut().zip(x).zip(gain) {
                    *y = u16::put(x.get() * inverse * gain);
                }
            }
        });
    }
}

pub(super) fn quantise(op: &Op, blocks: &[Block], view: &View<'_>, out: &mut Writes<'_>) {
    let (from, codes, scales) = (op.reads[0].region, op.writes[0].region, op.writes[1].region);
    for block in blocks {
        let row = u64::from(block.index);
        let source = view.slice::<u16>(from.row(row));
        let mut steps = [0.0f32; 64];
        let steps = &mut steps[..scales.len as usize / 4];
        let target = out.bytes(codes.row(row));
        vectorised!({
            let groups = source.chunks(QUANTISE_GROUP as usize).zip(target.chunks_mut(QUANTISE_GROUP as usize));
            for ((x, q), step) in groups.zip(&mut *steps) {
                *step = quantise_group(x, q);
            }
        });
        out.slice::<f32>(scales.row(row)).copy_from_slice(steps);
    }
}

/// Quantises one group and returns its scale.
#[inline(always)]
pub(super) fn quantise_group(source: &[u16], target: &mut [u8]) -> f32 {
    let largest = source.iter().fold(0.0f32, |largest, value| largest.max(value.get().abs()));
    let step = quantisation_scale(largest);
    for (q, x) in target.iter_mut().zip(source) {
        *q = e4m3::encode(x.get() / step);
    }
    step
}

pub(super) fn query_rope(op: &Op, blocks: &[Block], view: &View<'_>, out: &mut Writes<'_>) {
    let (query, positions, target) = (op.reads[0].region, op.reads[1].region, op.writes[0].region);
    for block in blocks {
        let row = u64::from(block.index);
        let position = view.slice::<i32>(positions.row(row))[0] as f32;
        let mut turns = [(0.0f32, 0.0f32); ROPE as usize / 2];
        for (pair, turn) in turns.iter_mut().enumerate() {
            let angle = position * (10_000.0f32).powf(-2.0 * pair as f32 / ROPE as f32);
            *turn = angle.sin_cos();
        }
        let heads = out.slice::<u16>(target.row(row));
        heads.copy_from_slice(view.slice::<u16>(query.row(row)));
        for head in heads.chunks_exact_mut(HEAD_DIM as usize).take(MATCH_HEADS as usize) {
            let rotary = &mut head[(HEAD_DIM - ROPE) as usize..];
            for (pair, (sine, cosine)) in rotary.chunks_exact_mut(2).zip(turns) {
                let (a, b) = (pair[0].get(), pair[1].get());
                pair[0] = u16::put(a * cosine - b * sine);
                pair[1] = u16::put(a * sine + b * cosine);
            }
        }
    }
}

pub(super) fn head(op: &Op, blocks: &[Block], view: &View<'_>, out: &mut Writes<'_>, weight: &SparseWeight) {
    let (hidden, tokens) = (op.reads[0].region, op.writes[0].region);
    for block in blocks {
        let row = u64::from(block.index);
        let hidden = view.slice::<u16>(hidden.row(row));
        let logit = |token: u32| {
            let (columns, values) = weight.row(token);
            columns.iter().zip(values).fold(0.0f32, |sum, (&at, &w)| sum + w * hidden[at as usize].get())
        };
        let mut best = (0, logit(0));
        for token in 1..weight.rows {
            let logit = logit(token);
            if logit > best.1 {
                best = (token, logit);
            }
        }
        out.slice::<u32>(tokens.row(row))[0] = best.0;
    }
}
