//! Grids, and the bytes and FLOPs of their blocks in the charged geometry.
//!
//! Weights count one byte an element (fp8 checkpoints). What several blocks of a launch read counts once for the launch,
//! spread evenly: the other reads hit the second-level cache.

use super::super::Memory;
use crate::device::{
    Block, Op,
    kernel::{
        FEED_FORWARD, Grid, HEAD_DIM, HEADS, HIDDEN, INDEX_DIM, INDEX_HEADS, Kernel, LOGITS_TILE, PAGE_ENTRIES,
        PREFILL_TILE, RATIO, Reader, TOPK_WORDS, WINDOW,
    },
};

/// Bytes of one token or entry of the core cache, packed as the real layer packs it.
const CORE_ENTRY: u64 = 584;
/// Output columns of the index compressor and of the core compressor.
const COMPRESSED: [u64; 2] = [4 * INDEX_DIM, 4 * HEAD_DIM];
/// Weights of the grouped low-rank output projection.
const OUTPUT_WEIGHTS: u64 = 2 * HEADS * HEAD_DIM * 1024;
const VOCABULARY: u64 = 129_280;

pub(super) fn blocks(op: &Op, memory: &Memory, out: &mut Vec<Block>) {
    match op.kernel.grid() {
        Grid::Rows => {
            let (bytes, flops) = row_cost(op);
            let rows = op.writes[0].region.rows.max(op.reads[0].region.rows);
            out.extend((0..batch(op).unwrap_or(rows)).map(|row| Block { index: row as u32, part: 0, bytes, flops }));
        }
        Grid::Columns(count) => {
            let (bytes, flops) = launch_cost(op);
            let count = u64::from(count);
            let block = |index| Block { index, part: 0, bytes: bytes / count, flops: flops / count };
            out.extend((0..count as u32).map(block));
        }
        Grid::KeyTiles => key_tiles(op, memory, out),
        Grid::TokenTiles => {
            let tokens = op.reads[0].region.len / 4;
            let flops = PREFILL_TILE * 2 * HIDDEN * (3 * FEED_FORWARD);
            let block = |index| Block { index, part: 0, bytes: 3 * HIDDEN * FEED_FORWARD / 8, flops };
            out.extend((0..tokens.div_ceil(PREFILL_TILE) as u32).map(block));
        }
    }
}

/// Rows of the batch for kernels whose first operands are not batch rows.
fn batch(op: &Op) -> Option<u64> {
    let metadata = match op.kernel {
        Kernel::IndexStore { .. }
        | Kernel::CoreStore
        | Kernel::KvStore
        | Kernel::TopkSelect { .. }
        | Kernel::Checksum { .. } => 1,
        _ => return None,
    };
    Some(op.reads[metadata].region.rows)
}

fn row_cost(op: &Op) -> (u64, u64) {
    let lengths = |operands: &[crate::device::Operand]| -> u64 {
        operands.iter().filter(|operand| !operand.indexed).map(|operand| operand.region.len).sum()
    };
    let plain = lengths(&op.reads) + lengths(&op.writes);
    match op.kernel {
        Kernel::Attention { k, .. } => {
            let entries = WINDOW + if k > 0 { TOPK_WORDS } else { 0 };
            (2 * HEADS * HEAD_DIM * 2 + entries * CORE_ENTRY, 4 * HEADS * HEAD_DIM * entries)
        }
        Kernel::Head { .. } => (plain + VOCABULARY * HIDDEN / 64, 2 * VOCABULARY * HIDDEN),
        Kernel::TopkSelect { .. } | Kernel::Checksum { .. } => (plain + op.reads[0].region.len, 0),
        Kernel::IndexRope { .. } => (3 * INDEX_HEADS * INDEX_DIM, 10 * INDEX_HEADS * INDEX_DIM),
        _ => (plain, 4 * plain),
    }
}

fn launch_cost(op: &Op) -> (u64, u64) {
    let read = op.reads[0].region;
    let (inputs, outputs) = match op.kernel {
        Kernel::IndexCompress { .. } => (HIDDEN, COMPRESSED[0]),
        Kernel::CoreCompress { .. } => (HIDDEN, COMPRESSED[1]),
        Kernel::QueryMatmul { .. } => (read.len, op.writes[0].region.row_stride / 2),
        _ => (read.len / 2, op.writes[0].region.row_stride / 2),
    };
    let weights = match op.kernel {
        Kernel::OutputProject { .. } => OUTPUT_WEIGHTS,
        _ => inputs * outputs,
    };
    (weights + read.rows * 2 * (inputs + outputs), 2 * read.rows * weights)
}

fn key_tiles(op: &Op, memory: &Memory, out: &mut Vec<Block>) {
    let Kernel::Logits { format, reader } = op.kernel else { return };
    let width = op.writes[0].region.len / 4;
    for row in 0..op.writes[0].region.rows {
        let entries = entries(op.reads[4].region.row(row).start, memory).min(width);
        let visited = if reader == Reader::Fallback { width } else { entries };
        for part in 0..visited.div_ceil(LOGITS_TILE).max(1) {
            let keys = (visited - part * LOGITS_TILE).min(LOGITS_TILE).next_multiple_of(PAGE_ENTRIES);
            let bytes = keys * (format.key_bytes() + 8) + INDEX_HEADS * (format.key_bytes() + 4);
            let flops = 2 * keys * INDEX_HEADS * INDEX_DIM;
            out.push(Block { index: row as u32, part: part as u32, bytes, flops });
        }
    }
}

/// Complete entries of a row, from its position word.
pub(super) fn entries(position_at: u64, memory: &Memory) -> u64 {
    completed(memory.slice::<i32>(position_at..position_at + 4)[0])
}

/// Complete entries of a row whose newest token is at `position`.
pub(super) fn completed(position: i32) -> u64 {
    (i64::from(position) + 1).max(0) as u64 / RATIO
}
