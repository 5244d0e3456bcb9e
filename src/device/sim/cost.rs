//! The cost model: how long a block holds its slot. A function of kernel, bytes and FLOPs alone.

use crate::device::{Block, kernel::Kernel};

/// Blocks that run at once: 132 multiprocessors with two each. With one each, head-of-line blocking makes an event
/// batch-wide.
pub const SLOTS: usize = 264;

/// From a finished predecessor to the first block of its successor, ns: what graph replays show between dependent nodes.
pub const NODE_LATENCY_NS: u64 = 1000;

/// Host time of one eager launch, ns: a launch from Python costs 5 to 8 µs.
pub const EAGER_LAUNCH_NS: u64 = 6000;

/// Host time of one graph launch, ns.
pub const GRAPH_LAUNCH_NS: u64 = 6000;

/// Lognormal spread of a block's duration. Contention, clock and memory refresh; 0.15 is the edge at which the slack of
/// the indexer's chain is sometimes used up.
pub const JITTER_SIGMA: f64 = 0.15;

/// How fast one block of a kernel works.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rate {
    /// Time of a block that moves and computes nothing, ns.
    pub floor_ns: f64,
    /// Time a byte, ns.
    pub byte_ns: f64,
    /// Time a FLOP, ns.
    pub flop_ns: f64,
}

impl Rate {
    /// One block's share of memory traffic: 60 B/ns, since small batches leave most of 4.8 TB/s to few blocks.
    const BYTE_NS: f64 = 1.0 / 60.0;
    /// One block's share of the arithmetic: half a multiprocessor's dense bf16 rate, 990 TFLOP/s / 264.
    const FLOP_NS: f64 = 1.0 / 3750.0;

    /// The rate of `kernel`.
    pub fn of(kernel: &Kernel) -> Self {
        let floor_ns = match kernel.name() {
            "copy" => 500.0,
            _ => 800.0,
        };
        Self { floor_ns, byte_ns: Self::BYTE_NS, flop_ns: Self::FLOP_NS }
    }

    /// Duration of `block` before jitter, ns: the roofline above a floor.
    pub fn duration_ns(&self, block: &Block) -> f64 {
        self.floor_ns + (block.bytes as f64 * self.byte_ns).max(block.flops as f64 * self.flop_ns)
    }
}
