//! What is enqueued: an op, its operands, and the blocks of one launch.

use super::{buffer::Region, kernel::Kernel};

/// Identity of one allocation lifetime: from `alloc` to `free`, never reused, although its bytes are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LifetimeId(pub u32);

/// One region that an op reads or writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Operand {
    /// The bytes.
    pub region: Region,
    /// The allocation that the op means by them.
    pub lifetime: LifetimeId,
    /// False: every byte of the region is touched. True: some bytes, chosen at run time by an index operand (a page
    /// table, a slot list).
    pub indexed: bool,
}

/// One kernel launch with everything that three readers need to know of it.
#[derive(Debug, Clone, PartialEq)]
pub struct Op {
    /// Kernel and scalars.
    pub kernel: Kernel,
    /// Regions read, in the kernel's operand order.
    pub reads: Vec<Operand>,
    /// Regions written, in the kernel's operand order.
    pub writes: Vec<Operand>,
    /// Decoder layer, for reports.
    pub layer: Option<u8>,
}

/// One block of a launch: what part of the op it does, and what it costs.
///
/// The virtual GPU derives a block's duration from the kernel, `bytes` and `flops` alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Block {
    /// Row (of the batch) or column slice that this block works on.
    pub index: u32,
    /// Part of that row, for kernels that split rows into tiles.
    pub part: u32,
    /// Bytes moved, of the charged geometry.
    pub bytes: u64,
    /// Floating-point operations, of the charged geometry.
    pub flops: u64,
}
