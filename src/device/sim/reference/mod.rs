//! Each kernel on the CPU: its grid and what a block costs, its exact accesses, its arithmetic.
//!
//! Results do not depend on how a launch is cut: a block's output is a function of what it reads. Fast paths (packed
//! index keys, runs in sparse weights) give the plain arithmetic's bits and are tested against it.

#![expect(clippy::inline_always, reason = "only what inlines into a vectorised closure is compiled for wide vectors")]

mod access;
mod attention;
mod cache;
mod grid;
mod index;
mod matmul;
mod numeric;
mod packed;
mod prefill;
mod rows;
mod topk;

#[cfg(test)]
mod fixture;
#[cfg(test)]
mod naive;

use std::{cell::RefCell, collections::BTreeMap, ops::Range, rc::Rc};

use super::{Kernels, Memory, Touch, View, Writes};
use crate::device::{Block, Op, WeightId, kernel::Kernel};

/// The CPU's kernels.
#[derive(Default)]
pub struct Reference {
    plans: RefCell<BTreeMap<WeightId, Rc<matmul::Plan>>>,
    codes: RefCell<BTreeMap<WeightId, Rc<prefill::Codes>>>,
    keys: RefCell<packed::Shadow>,
    attention: RefCell<attention::Scratch>,
    topk: RefCell<topk::Scratch>,
    dense_only: bool,
}

impl Reference {
    /// The kernels with their fast paths.
    pub fn new() -> Self {
        Self::default()
    }

    /// The kernels without the packed paths: what those must agree with.
    pub fn dense() -> Self {
        Self { dense_only: true, ..Self::default() }
    }

    fn plan(&self, id: WeightId, view: &View<'_>) -> Rc<matmul::Plan> {
        let mut plans = self.plans.borrow_mut();
        Rc::clone(plans.entry(id).or_insert_with(|| Rc::new(matmul::Plan::new(view.weight(id)))))
    }

    fn codes(&self, embedding: WeightId, view: &View<'_>) -> Rc<prefill::Codes> {
        let mut codes = self.codes.borrow_mut();
        Rc::clone(codes.entry(embedding).or_insert_with(|| Rc::new(prefill::Codes::new(view.weight(embedding)))))
    }
}

impl Kernels for Reference {
    fn blocks(&self, op: &Op, memory: &Memory, out: &mut Vec<Block>) {
        grid::blocks(op, memory, out);
    }

    fn accesses(&self, op: &Op, block: &Block, memory: &Memory, visit: &mut dyn FnMut(Touch, Range<u64>)) {
        access::visit(op, block, memory, visit);
    }

    fn compute(&self, op: &Op, blocks: &[Block], view: &View<'_>, out: &mut Writes<'_>) {
        match &op.kernel {
            Kernel::Copy => rows::copy(op, blocks, view, out),
            Kernel::Embed { table } => rows::embed(op, blocks, view, out, view.weight(*table)),
            Kernel::RmsNorm { gain, group, .. } => {
                rows::rms_norm(op, blocks, view, out, &view.weight(*gain).value, *group as usize);
            }
            Kernel::Quantise => rows::quantise(op, blocks, view, out),
            Kernel::QueryRope => rows::query_rope(op, blocks, view, out),
            Kernel::Head { weight } => rows::head(op, blocks, view, out, view.weight(*weight)),
            Kernel::Matmul { weight, .. } => matmul::matmul(op, blocks, view, out, &self.plan(*weight, view)),
            Kernel::QueryMatmul { weight } => matmul::query(op, blocks, view, out, &self.plan(*weight, view)),
            Kernel::OutputProject { weight } => matmul::output(op, blocks, view, out, &self.plan(*weight, view)),
            Kernel::IndexCompress { weight } | Kernel::CoreCompress { weight } => {
                matmul::compress(op, blocks, view, out, &self.plan(*weight, view));
            }
            Kernel::KvStore => cache::kv_store(op, blocks, view, out),
            Kernel::IndexStore { format } => cache::index_store(op, blocks, view, out, *format),
            Kernel::CoreStore => cache::core_store(op, blocks, view, out),
            Kernel::Checksum { format } => cache::checksum(op, blocks, view, out, *format),
            Kernel::IndexRope { format } => index::rope(op, blocks, view, out, *format),
            Kernel::Logits { format, reader } => {
                let shadow = (!self.dense_only).then(|| self.keys.borrow_mut());
                index::logits(op, blocks, view, out, (*format, *reader), shadow);
            }
            Kernel::TopkSelect { k } => topk::select(op, blocks, view, out, *k as usize, &mut self.topk.borrow_mut()),
            Kernel::TopkFinalise { k } => topk::finalise(op, blocks, view, out, *k as usize),
            Kernel::Attention { scale, k } => {
                let scratch = &mut *self.attention.borrow_mut();
                attention::attention(op, blocks, view, out, (*scale, *k as usize), (scratch, !self.dense_only));
            }
            Kernel::Prefill { table, .. } => prefill::prefill(op, blocks, view, out, &self.codes(*table, view)),
        }
    }
}
