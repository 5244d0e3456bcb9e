//! Projections: sparse weights as runs, applied to slices of the output columns.

use std::ops::Range;

use super::{
    super::{View, Writes},
    numeric::{Element, e4m3, vectorised},
};
use crate::device::{
    Block, Op, SparseWeight,
    kernel::{Grid, HIDDEN, LIVE, Q_LORA, QUANTISE_GROUP, RING},
};

/// A weight prepared for the CPU: maximal runs of outputs that each take one input, consecutive ones from consecutive
/// inputs; outputs without inputs; and single outputs with several.
pub(super) struct Plan {
    pieces: Vec<Piece>,
    columns: Vec<u32>,
    values: Vec<f32>,
}

/// `outputs.len()` outputs whose stored values start at `value`.
struct Piece {
    outputs: Range<usize>,
    value: usize,
    kind: Kind,
}

enum Kind {
    Zero,
    Run { input: usize },
    Sum { terms: usize },
}

impl Plan {
    pub(super) fn new(weight: &SparseWeight) -> Self {
        let mut pieces: Vec<Piece> = Vec::new();
        for row in 0..weight.rows {
            let (output, value) = (row as usize, weight.row_start[row as usize] as usize);
            let kind = match weight.row(row).0 {
                [] => Kind::Zero,
                [input] => Kind::Run { input: *input as usize },
                terms => Kind::Sum { terms: terms.len() },
            };
            match (pieces.last_mut(), &kind) {
                (Some(Piece { outputs, kind: Kind::Zero, .. }), Kind::Zero) => outputs.end += 1,
                (Some(Piece { outputs, kind: Kind::Run { input }, .. }), Kind::Run { input: next })
                    if input.wrapping_add(outputs.len()) == *next =>
                {
                    outputs.end += 1;
                }
                _ => pieces.push(Piece { outputs: output..output + 1, value, kind }),
            }
        }
        Self { pieces, columns: weight.column.clone(), values: weight.value.clone() }
    }

    /// `out[i] = sum of w * input` for the outputs `range`, accumulated in `f32` from zero in ascending input order.
    #[inline(always)]
    fn apply<I: Element, O: Element>(&self, range: Range<usize>, input: &[I], out: &mut [O]) {
        let first = self.pieces.partition_point(|piece| piece.outputs.end <= range.start);
        for piece in &self.pieces[first..] {
            let (start, end) = (piece.outputs.start.max(range.start), piece.outputs.end.min(range.end));
            if start >= end {
                break;
            }
            let skipped = start - piece.outputs.start;
            let target = &mut out[start - range.start..end - range.start];
            match piece.kind {
                Kind::Zero => target.fill(O::put(0.0)),
                Kind::Run { input: at } => {
                    let source = &input[at + skipped..][..end - start];
                    let weights = &self.values[piece.value + skipped..][..end - start];
                    for ((out, &x), &w) in target.iter_mut().zip(source).zip(weights) {
                        *out = O::put(0.0 + w * x.get());
                    }
                }
                Kind::Sum { terms } => {
                    let stored = piece.value..piece.value + terms;
                    let products = self.columns[stored.clone()].iter().zip(&self.values[stored]);
                    target[0] = O::put(products.fold(0.0, |sum, (&at, &w)| sum + w * input[at as usize].get()));
                }
            }
        }
    }
}

/// The column slice of the blocks from `first` to `last`, as a byte range of a row of `len` bytes.
pub(super) fn slice(op: &Op, [first, last]: [&Block; 2], stride: u64, len: u64) -> Range<u64> {
    let Grid::Columns(count) = op.kernel.grid() else { return 0..0 };
    let width = stride / u64::from(count);
    (u64::from(first.index) * width).min(len)..((u64::from(last.index) + 1) * width).min(len)
}

/// The column slices of `blocks`, joined where they touch.
fn slices<'a>(op: &'a Op, blocks: &'a [Block], stride: u64, len: u64) -> impl Iterator<Item = Range<u64>> + 'a {
    let runs = blocks.chunk_by(|block, next| block.index + 1 == next.index);
    runs.map(move |run| slice(op, [&run[0], &run[run.len() - 1]], stride, len)).filter(|slice| !slice.is_empty())
}

pub(super) fn matmul(op: &Op, blocks: &[Block], view: &View<'_>, out: &mut Writes<'_>, plan: &Plan) {
    let (input, output) = (op.reads[0].region, op.writes[0].region);
    for slice in slices(op, blocks, output.row_stride, output.len) {
        let outputs = slice.start as usize / 2..slice.end as usize / 2;
        for row in 0..output.rows {
            let source = view.slice::<u16>(input.row(row));
            let start = output.row(row).start;
            let target = out.slice::<u16>(start + slice.start..start + slice.end);
            vectorised!(plan.apply(outputs.clone(), source, target));
        }
    }
}

pub(super) fn query(op: &Op, blocks: &[Block], view: &View<'_>, out: &mut Writes<'_>, plan: &Plan) {
    let (codes, scales, output) = (op.reads[0].region, op.reads[1].region, op.writes[0].region);
    let mut dims = [0.0f32; Q_LORA as usize];
    let source = &mut dims[..codes.len as usize];
    for slice in slices(op, blocks, output.row_stride, output.len) {
        let outputs = slice.start as usize / 2..slice.end as usize / 2;
        for row in 0..output.rows {
            let scale = view.slice::<f32>(scales.row(row));
            let groups = view.bytes(codes.row(row)).chunks(QUANTISE_GROUP as usize);
            for ((group, &scale), target) in groups.zip(scale).zip(source.chunks_mut(QUANTISE_GROUP as usize)) {
                for (value, &code) in target.iter_mut().zip(group) {
                    *value = e4m3::decode(code) * scale;
                }
            }
            let start = output.row(row).start;
            let target = out.slice::<u16>(start + slice.start..start + slice.end);
            vectorised!(plan.apply(outputs.clone(), source, target));
        }
    }
}

pub(super) fn output(op: &Op, blocks: &[Block], view: &View<'_>, out: &mut Writes<'_>, plan: &Plan) {
    let [attention, ballast, residual] = [0, 1, 2].map(|at| op.reads[at].region);
    let output = op.writes[0].region;
    let mut update = [0.0f32; HIDDEN as usize];
    for slice in slices(op, blocks, output.row_stride, output.len) {
        let outputs = slice.start as usize / 2..slice.end as usize / 2;
        for row in 0..output.rows {
            let attended = view.slice::<u16>(attention.row(row));
            let fed = view.slice::<u16>(ballast.row(row));
            let before = residual.row(row).start;
            let before = view.slice::<u16>(before + slice.start..before + slice.end);
            let start = output.row(row).start;
            let target = out.slice::<u16>(start + slice.start..start + slice.end);
            let update = &mut update[..outputs.len()];
            vectorised!({
                plan.apply(outputs.clone(), attended, update);
                for ((out, &x), &added) in target.iter_mut().zip(before).zip(&*update) {
                    *out = u16::put(x.get() + added);
                }
                let first = outputs.start.max(LIVE as usize);
                if first < outputs.end {
                    let fed = &fed[first - LIVE as usize..outputs.end - LIVE as usize];
                    let ballast = first - outputs.start;
                    for ((out, &x), &y) in target[ballast..].iter_mut().zip(&before[ballast..]).zip(fed) {
                        *out = u16::put(x.get() + y.get());
                    }
                }
            });
        }
    }
}

pub(super) fn compress(op: &Op, blocks: &[Block], view: &View<'_>, out: &mut Writes<'_>, plan: &Plan) {
    let [hidden, positions, pages] = [0, 1, 2].map(|at| op.reads[at].region);
    let ring = op.writes[0].region;
    for slice in slices(op, blocks, ring.row_stride / RING, ring.row_stride / RING) {
        let outputs = slice.start as usize / 4..slice.end as usize / 4;
        for row in 0..hidden.rows {
            let position = view.slice::<i32>(positions.row(row))[0];
            let page = view.slice::<i32>(pages.row(row))[0];
            let Some(slot) = super::cache::ring_slot(ring, page, i64::from(position)) else { continue };
            let source = view.slice::<u16>(hidden.row(row));
            let target = out.slice::<f32>(slot.start + slice.start..slot.start + slice.end);
            vectorised!(plan.apply(outputs.clone(), source, target));
        }
    }
}
