//! Top-k: selection into the workspace, then page indices.

use super::{
    super::{View, Writes},
    cache::page_start,
    grid::completed,
};
use crate::device::{
    Block, Op, Region,
    kernel::{PAGE_ENTRIES, WORKSPACE_WORDS},
};

/// Bits of a logit such that unsigned order is `f32::total_cmp`'s.
#[inline(always)]
fn ordered(bits: u32) -> u32 {
    if bits >> 31 == 0 { bits | 1 << 31 } else { !bits }
}

/// Space for one row, kept from row to row.
#[derive(Default)]
pub(super) struct Scratch {
    chosen: Vec<u32>,
    order: Vec<(u32, u32)>,
}

/// The k largest of `logits` by (logit, later index), newest index first, as a scan from the end finds them.
fn largest(logits: &[u32], k: usize, Scratch { chosen, order }: &mut Scratch) {
    chosen.clear();
    if logits.len() <= k {
        chosen.extend((0..logits.len() as u32).rev());
        return;
    }
    let negative = logits.iter().fold(0, |all, bits| all | bits) >> 31 != 0;
    let positive = logits.iter().filter(|bits| **bits != 0).count();
    if negative || positive > k {
        order.clear();
        order.extend(logits.iter().zip(0..).map(|(&bits, index)| (ordered(bits), index)));
        order.select_nth_unstable_by(k - 1, |a, b| b.cmp(a));
        chosen.extend(order[..k].iter().map(|(_, index)| index));
        chosen.sort_unstable_by(|a, b| b.cmp(a));
        return;
    }
    // Most logits are zero: every positive one is chosen, and the latest zeros fill up.
    let zeros = k - positive;
    let first_zero = logits.iter().enumerate().rev().filter(|(_, bits)| **bits == 0).nth(zeros.max(1) - 1);
    let from = if zeros == 0 { logits.len() } else { first_zero.map_or(0, |(index, _)| index) };
    chosen.extend((from as u32..logits.len() as u32).rev());
    chosen.extend((0..from as u32).rev().filter(|index| logits[*index as usize] != 0));
    debug_assert_eq!(chosen.len(), k, "chosen by zeros");
}

pub(super) fn select(
    op: &Op,
    blocks: &[Block],
    view: &View<'_>,
    out: &mut Writes<'_>,
    k: usize,
    scratch: &mut Scratch,
) {
    let (logits, positions, workspace) = (op.reads[0].region, op.reads[1].region, op.writes[0].region);
    for block in blocks {
        let row = u64::from(block.index);
        let read = logits_read(logits, view.slice::<i32>(positions.row(row))[0], row);
        let logits = view.slice::<u32>(read);
        largest(logits, k, scratch);
        let chosen = &scratch.chosen;
        let words = out.slice::<u32>(workspace.row(row));
        words.fill(u32::MAX);
        words[0] = chosen.len() as u32;
        words[1] = k as u32;
        for (pair, &index) in words[2..WORKSPACE_WORDS as usize].chunks_exact_mut(2).zip(chosen) {
            pair.copy_from_slice(&[index, logits[index as usize]]);
        }
    }
}

/// Bytes of a row's logits.
pub(super) fn logits_read(logits: Region, position: i32, row: u64) -> std::ops::Range<u64> {
    let start = logits.row(row).start;
    start..start + (completed(position) * 4).min(logits.len)
}

pub(super) fn finalise(op: &Op, blocks: &[Block], view: &View<'_>, out: &mut Writes<'_>, k: usize) {
    let [workspace, table, positions] = [0, 1, 2].map(|at| op.reads[at].region);
    for block in blocks {
        let row = u64::from(block.index);
        let length = completed(view.slice::<i32>(positions.row(row))[0]);
        let candidates = view.slice::<u32>(workspace.row(row));
        let pages = view.slice::<i32>(table.row(row));
        let words = out.slice::<i32>(op.writes[0].region.row(row));
        words.fill(-1);
        let count = (candidates[0] as usize).min(k);
        for (word, pair) in words.iter_mut().zip(candidates[2..].chunks_exact(2)).take(count) {
            let index = u64::from(pair[0]);
            if index < length
                && let Some(&page) = pages.get((index / PAGE_ENTRIES) as usize)
            {
                *word = page.wrapping_mul(PAGE_ENTRIES as i32).wrapping_add((index % PAGE_ENTRIES) as i32);
            }
        }
    }
}

/// Bytes of the entry that an index names, if it names one.
pub(super) fn entry_of(cache: Region, index: i32, entry_bytes: u64) -> Option<std::ops::Range<u64>> {
    if index < 0 {
        return None;
    }
    let start = page_start(cache, index / PAGE_ENTRIES as i32)? + (index as u64 % PAGE_ENTRIES) * entry_bytes;
    Some(start..start + entry_bytes)
}

#[cfg(test)]
mod tests {
    use rand::RngExt;

    use super::*;
    use crate::seed::Seed;

    #[test]
    fn selection_is_a_total_order_on_any_bits() {
        let mut rng = Seed(1).rng();
        let (mut fast, mut general) = (0, 0);
        for case in 0..4000 {
            let n = rng.random_range(0..400);
            let k = rng.random_range(1..80);
            let few: u32 = rng.random_range(1..120);
            let logits: Vec<u32> = (0..n)
                .map(|_| match case % 4 {
                    0 => rng.random(),
                    1 if rng.random_range(0..200) < few => (rng.random_range(1..9) as f32).to_bits(),
                    2 => [0, 1 << 31, f32::NAN.to_bits(), 1f32.to_bits()][rng.random_range(0..4)],
                    _ => 0,
                })
                .collect();
            let mut scratch = Scratch::default();
            largest(&logits, k, &mut scratch);
            let chosen = scratch.chosen;
            let mut naive: Vec<u32> = (0..n as u32).collect();
            naive.sort_by(|a, b| {
                let [x, y] = [a, b].map(|i| f32::from_bits(logits[*i as usize]));
                y.total_cmp(&x).then(b.cmp(a))
            });
            naive.truncate(k);
            naive.sort_unstable_by(|a, b| b.cmp(a));
            assert_eq!(chosen, naive, "{logits:x?} with k = {k}");
            if n > k {
                *(if logits.iter().all(|b| b >> 31 == 0) { &mut fast } else { &mut general }) += 1;
            }
        }
        assert!(fast > 500 && general > 500, "{fast} {general}");
    }
}
