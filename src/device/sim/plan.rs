//! What stays the same from launch to launch: edges, order, and which unordered ops share bytes.

use std::ops::Range;

use super::{
    cost::{CostModel, Rate},
    memory::{meets, writes_in_place},
};
use crate::device::{Op, Operand, StreamId};

/// A program of ops with everything that does not depend on a launch's data or draw.
#[derive(Default)]
pub(crate) struct Plan {
    pub(crate) ops: Vec<Op>,
    pub(crate) streams: Vec<StreamId>,
    /// Earliest start, in host time from the program's begin.
    pub(crate) launched_at: Vec<u64>,
    pub(crate) rates: Vec<Rate>,
    /// Which ops may write to memory itself when they execute whole.
    pub(crate) in_place: Vec<bool>,
    pub(crate) indegree: Vec<u32>,
    pub(crate) races: Vec<Race>,
    successor_start: Vec<u32>,
    successors: Vec<u32>,
    words: usize,
    /// For each op, the set of ops from which a path leads to it.
    ancestors: Vec<u64>,
}

/// Two ops that no path orders and that share bytes, at least one of them writing. `first` comes first in host order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Race {
    pub(crate) first: u32,
    pub(crate) second: u32,
    /// The smallest range that holds all shared bytes.
    pub(crate) span: Range<u64>,
}

impl Plan {
    /// `edges` are direct, `(earlier, later)`, sorted, without duplicates.
    pub(crate) fn new(ops: Vec<(Op, StreamId)>, edges: &[(u32, u32)], launched_at: Vec<u64>, cost: &CostModel) -> Self {
        let (ops, streams): (Vec<Op>, Vec<StreamId>) = ops.into_iter().unzip();
        let rates = ops.iter().map(|op| cost.rate(&op.kernel)).collect();
        let in_place = ops.iter().map(writes_in_place).collect();
        let mut plan =
            Self { launched_at, rates, in_place, indegree: vec![0; ops.len()], ops, streams, ..Self::default() };
        plan.link(edges);
        if plan.streams.iter().any(|stream| *stream != plan.streams[0]) {
            plan.order(edges);
            plan.find_races();
        }
        plan
    }

    pub(crate) fn len(&self) -> usize {
        self.ops.len()
    }

    pub(crate) fn successors(&self, op: u32) -> &[u32] {
        let op = op as usize;
        &self.successors[self.successor_start[op] as usize..self.successor_start[op + 1] as usize]
    }

    fn link(&mut self, edges: &[(u32, u32)]) {
        debug_assert!(edges.is_sorted(), "edges come sorted");
        self.successors = edges.iter().map(|&(_, later)| later).collect();
        for &(_, later) in edges {
            self.indegree[later as usize] += 1;
        }
        self.successor_start = (0..=self.ops.len())
            .map(|op| edges.partition_point(|&(earlier, _)| (earlier as usize) < op) as u32)
            .collect();
    }

    fn order(&mut self, edges: &[(u32, u32)]) {
        self.words = self.ops.len().div_ceil(64);
        self.ancestors = vec![0; self.words * self.ops.len()];
        let mut by_later = edges.to_vec();
        by_later.sort_unstable_by_key(|&(earlier, later)| (later, earlier));
        for (earlier, later) in by_later {
            let (before, after) = self.ancestors.split_at_mut(later as usize * self.words);
            let source = &before[earlier as usize * self.words..][..self.words];
            for (word, bits) in after[..self.words].iter_mut().zip(source) {
                *word |= bits;
            }
            after[earlier as usize / 64] |= 1 << (earlier % 64);
        }
    }

    /// True where a path leads from `earlier` to `later`.
    fn ordered(&self, earlier: usize, later: usize) -> bool {
        self.ancestors[later * self.words + earlier / 64] >> (earlier % 64) & 1 == 1
    }

    fn find_races(&mut self) {
        let spans: Vec<Range<u64>> = self.ops.iter().map(|op| hull(op.reads.iter().chain(&op.writes))).collect();
        for second in 1..self.ops.len() {
            for first in 0..second {
                if meets(&spans[first], &spans[second]) && !self.ordered(first, second) {
                    let mut span: Option<Range<u64>> = None;
                    shared_bytes(&self.ops[first], &self.ops[second], |shared| {
                        let held = span.get_or_insert(shared.clone());
                        *held = held.start.min(shared.start)..held.end.max(shared.end);
                    });
                    if let Some(span) = span {
                        self.races.push(Race { first: first as u32, second: second as u32, span });
                    }
                }
            }
        }
    }
}

fn hull<'a>(operands: impl Iterator<Item = &'a Operand>) -> Range<u64> {
    operands
        .map(|operand| operand.region.span())
        .filter(|span| !span.is_empty())
        .reduce(|a, b| a.start.min(b.start)..a.end.max(b.end))
        .unwrap_or(0..0)
}

/// Calls `visit` with every range that both ops touch and at least one of them writes. Ranges may repeat.
pub(crate) fn shared_bytes(first: &Op, second: &Op, mut visit: impl FnMut(Range<u64>)) {
    for write in &first.writes {
        for operand in second.reads.iter().chain(&second.writes) {
            write.region.shared(&operand.region, &mut visit);
        }
    }
    for write in &second.writes {
        for operand in &first.reads {
            write.region.shared(&operand.region, &mut visit);
        }
    }
}
