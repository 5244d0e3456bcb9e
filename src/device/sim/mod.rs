//! The virtual GPU: a discrete-event simulator with a seeded order, honest memory and real arithmetic.
//!
//! One launch runs in two passes. The **timing pass** simulates the machine block by block: every ready op queues its
//! blocks, the oldest op fills free slots first, a block holds its slot for a duration drawn from the cost model and a
//! seeded jitter, and an op whose edges are met becomes ready a little later. The **data pass** then executes the
//! arithmetic in virtual time order. An op that shares no bytes with an op running at the same time executes whole, at
//! its end. Ops that do are executed block by block: a block's reads are taken in slices spread over its duration, each
//! slice sees memory as it is at that moment, and the block commits its writes at its end. Where nobody writes meanwhile
//! what such an op reads, its blocks are computed together when the first one ends, and commit one by one all the same.
//!
//! Nothing here consults the analyser, the environment or a toggle, and nothing damages data: bytes go wrong only when
//! two ops that no edge orders touch the same memory. A launch's randomness is a function of the seed and the launch's
//! number, so any launch can be replayed alone.
//!
//! Not modelled: caches and cache coherence (a commit is visible at once), warps, shared memory and occupancy beyond a
//! number of block slots, clock changes, preemption, programmatic dependent launch, copy engines, the host's own time
//! apart from a fixed gap between eager launches.

pub mod cost;
mod data;
mod gpu;
mod journal;
pub mod memory;
pub mod order;
mod plan;
pub mod race;
pub mod reference;
mod rerun;
pub mod stats;
#[cfg(test)]
mod synthetic;
mod timing;
pub mod token;
mod watch;

pub use cost::CostModel;
pub use gpu::{Config, Sim};
pub use memory::{Memory, View, Writes};
pub use order::Schedule;
pub use race::{RaceHit, RaceKind, Side};
pub use rerun::Rerun;
pub use stats::Stats;
pub use token::Token;

use std::ops::Range;

use super::{Block, Op};

/// How a block touches a range of bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Touch {
    /// Read at the block's start, as a whole: a page table, a slot list, a row length. Decides the other ranges.
    Index,
    /// Read in slices over the block's duration.
    Read,
    /// Written at the block's end.
    Write,
}

/// What the virtual GPU needs to know of kernels: their grids, their exact accesses and their arithmetic.
///
/// Blocks of one op are independent: none reads bytes that another one of the same op writes. Indices are data and may
/// be damaged: an index outside its region must be clamped or skipped, by `accesses` and `compute` alike, never followed.
pub trait Kernels {
    /// The grid of a launch, in dispatch order, with the bytes and FLOPs of the charged geometry.
    ///
    /// `memory` is as before the launch: only static inputs, written by the host beforehand, may be read from it.
    fn blocks(&self, op: &Op, memory: &Memory, out: &mut Vec<Block>);

    /// Every range that one block touches. All [`Touch::Index`] ranges come first. `memory` is as at the block's start.
    fn accesses(&self, op: &Op, block: &Block, memory: &Memory, visit: &mut dyn FnMut(Touch, Range<u64>));

    /// The arithmetic of some blocks: pure, through `view` alone, and every byte asked of `out` is written.
    fn compute(&self, op: &Op, blocks: &[Block], view: &View<'_>, out: &mut Writes<'_>);
}
