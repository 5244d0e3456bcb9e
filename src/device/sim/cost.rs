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

/// One block's share of memory traffic, B/ns: few blocks run at small batches and leave most of 4.8 TB/s to each.
const BYTES_PER_NS: f64 = 60.0;

/// One block's share of dense bf16 arithmetic, FLOP/ns: half a multiprocessor's 990 TFLOP/s / 132.
const BF16_PER_NS: f64 = 3750.0;

/// The same in e4m3.
const FP8_PER_NS: f64 = 7500.0;

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
    const fn bf16(floor_ns: f64) -> Self {
        Self { floor_ns, byte_ns: 1.0 / BYTES_PER_NS, flop_ns: 1.0 / BF16_PER_NS }
    }

    const fn fp8(floor_ns: f64) -> Self {
        Self { floor_ns, byte_ns: 1.0 / BYTES_PER_NS, flop_ns: 1.0 / FP8_PER_NS }
    }

    /// A block that stands for `ways` blocks sharing one sum.
    const fn split(self, ways: f64) -> Self {
        Self { floor_ns: self.floor_ns, byte_ns: self.byte_ns / ways, flop_ns: self.flop_ns / ways }
    }

    /// The rate of `kernel`. Floors are what launches of one row take on the machine: prologue, dependent loads, and for
    /// norms and scales a reduction across the block.
    pub fn of(kernel: &Kernel) -> Self {
        match kernel.name() {
            "copy" | "logits" | "logits_fallback" => Self::bf16(500.0),
            // One reduction a row; for compressors, the rest of a long inner loop's prologue.
            "rms_norm" | "q_norm" | "final_norm" | "quantise" | "index_compress" | "core_compress" => {
                Self::bf16(1200.0)
            }
            // Pages are found through two dependent loads.
            "kv_store" | "index_store" | "core_store" => Self::bf16(1600.0),
            // Sines and cosines.
            "index_rope" | "q_rope" => Self::bf16(1100.0),
            "wqkv_a" => Self::bf16(1700.0),
            // 64 columns would leave the machine idle: such products split the inner dimension.
            "weights_proj" => Self::bf16(1000.0).split(16.0),
            "wq_b" | "wq_b_idx" => Self::fp8(800.0),
            // Several passes over a row with block-wide counts between them.
            "topk_select" => Self::bf16(1800.0),
            "topk_finalise" => Self::bf16(1500.0),
            "head" => Self::bf16(800.0).split(64.0),
            _ => Self::bf16(800.0),
        }
    }

    /// Duration of `block` before jitter, ns: the roofline above a floor.
    pub fn duration_ns(&self, block: &Block) -> f64 {
        self.floor_ns + (block.bytes as f64 * self.byte_ns).max(block.flops as f64 * self.flop_ns)
    }
}
