//! Who wrote each byte last, kept where unordered ops met out of host order; from it, the race log.
//!
//! Host order is the yardstick: a read should see the last write that the host enqueued before it. Only launches in which
//! two unordered ops that share bytes did not run one after the other in host order are watched, and only those bytes.

use std::ops::Range;

use super::{
    plan::{Plan, Race, shared_bytes},
    race::{RaceHit, RaceKind, Side},
    timing::Timing,
};
use crate::device::{LifetimeId, Op, Operand, Region};

/// The watched bytes of one launch.
#[derive(Default)]
pub(crate) struct Watch {
    areas: Vec<Area>,
    /// For each watched byte, the rank of the op that wrote it last; 0: none in this launch.
    writers: Vec<u16>,
    /// For each watched byte, the rank of the later op whose write the last, earlier op replaced; 0: none.
    replaced: Vec<u16>,
    /// For each watched byte, its value before the last write.
    before: Vec<u8>,
    /// For each op, its rank among those that touch watched bytes, in host order from 1; 0: it does not.
    ranks: Vec<u16>,
    ops: Vec<u32>,
    disturbed: Vec<Race>,
    /// For each rank, the reads that should have come after its writes.
    pending: Vec<Vec<Pending>>,
    drafts: Vec<Draft>,
}

#[derive(Debug, Clone)]
struct Area {
    range: Range<u64>,
    at: usize,
}

/// A read that came before an earlier op's write of the same bytes.
struct Pending {
    reader: u32,
    row: u32,
    range: Range<u64>,
    seen: Vec<u8>,
    at_ns: u64,
}

/// A race hit in the making.
struct Draft {
    kind: RaceKind,
    first: u32,
    second: u32,
    reader: u32,
    rows: Vec<u32>,
    bytes: Range<u64>,
    changed: u64,
    expected: Vec<u8>,
    seen: Vec<u8>,
    at_ns: u64,
}

/// One block's access to a contiguous range.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Access {
    pub(crate) op: u32,
    pub(crate) row: u32,
    pub(crate) at_ns: u64,
}

/// Bytes that a race hit quotes.
const QUOTED: usize = 8;

impl Watch {
    /// Finds out what is to be watched in this launch.
    pub(crate) fn begin(&mut self, plan: &Plan, timing: &Timing) {
        self.areas.clear();
        self.disturbed.clear();
        let disturbed = |race: &&Race| timing.op_start[race.second as usize] <= timing.op_end[race.first as usize];
        self.disturbed.extend(plan.races.iter().filter(disturbed).cloned());
        if self.disturbed.is_empty() {
            return;
        }
        let mut ranges = Vec::new();
        for race in &self.disturbed {
            shared_bytes(&plan.ops[race.first as usize], &plan.ops[race.second as usize], |range| ranges.push(range));
        }
        self.set_areas(ranges);
        self.rank(plan);
    }

    /// True where `op` may touch watched bytes.
    pub(crate) fn tracks(&self, op: u32) -> bool {
        !self.areas.is_empty() && self.ranks[op as usize] > 0
    }

    /// True where `range` holds watched bytes.
    pub(crate) fn touches(&self, range: &Range<u64>) -> bool {
        self.pieces(range).next().is_some()
    }

    /// A block read `bytes` from `start` on.
    pub(crate) fn read(&mut self, plan: &Plan, access: Access, start: u64, bytes: &[u8]) {
        let range = start..start + bytes.len() as u64;
        let pieces: Vec<(Range<u64>, usize)> = self.pieces(&range).collect();
        for (piece, at) in pieces {
            let seen = &bytes[(piece.start - start) as usize..(piece.end - start) as usize];
            self.check_overwritten(access, piece.start, at, seen);
            self.check_unwritten(plan, access, &piece, at, seen);
        }
    }

    /// A block is about to replace `old` by `new` from `start` on.
    pub(crate) fn write(&mut self, access: Access, start: u64, old: &[u8], new: &[u8]) {
        let range = start..start + new.len() as u64;
        let mine = self.ranks[access.op as usize];
        let pieces: Vec<(Range<u64>, usize)> = self.pieces(&range).collect();
        for (piece, at) in pieces {
            let within = (piece.start - start) as usize..(piece.end - start) as usize;
            let watched = at..at + within.len();
            self.resolve(access, &piece, &new[within.clone()]);
            self.before[watched.clone()].copy_from_slice(&old[within]);
            for (writer, replaced) in self.writers[watched.clone()].iter_mut().zip(&mut self.replaced[watched]) {
                let later = (*writer).max(*replaced);
                *replaced = if later > mine { later } else { 0 };
                *writer = mine;
            }
        }
    }

    /// Ends the launch: hands out what was found.
    pub(crate) fn finish(&mut self, plan: &Plan, launch: u64, hits: &mut Vec<RaceHit>) {
        self.pending.iter_mut().for_each(Vec::clear);
        self.areas.clear();
        for draft in self.drafts.drain(..) {
            let Draft { kind, first, second, reader, mut rows, bytes, changed, expected, seen, at_ns } = draft;
            rows.sort_unstable();
            rows.dedup();
            let [first, second] = [first, second].map(|op| side(plan, op, op == reader, bytes.start));
            hits.push(RaceHit { launch, kind, first, second, reader, rows, bytes, changed, expected, seen, at_ns });
        }
    }

    fn set_areas(&mut self, mut ranges: Vec<Range<u64>>) {
        ranges.sort_unstable_by_key(|range| (range.start, range.end));
        let mut length = 0;
        for range in ranges {
            match self.areas.last_mut() {
                Some(last) if range.start <= last.range.end => {
                    length += range.end.saturating_sub(last.range.end) as usize;
                    last.range.end = last.range.end.max(range.end);
                }
                _ => {
                    self.areas.push(Area { range: range.clone(), at: length });
                    length += (range.end - range.start) as usize;
                }
            }
        }
        for marks in [&mut self.writers, &mut self.replaced] {
            marks.clear();
            marks.resize(length, 0);
        }
        self.before.resize(length, 0);
    }

    fn rank(&mut self, plan: &Plan) {
        self.ranks.clear();
        self.ops.clear();
        for (position, op) in plan.ops.iter().enumerate() {
            let mut operands = op.reads.iter().chain(&op.writes);
            let tracked = operands.any(|operand| self.pieces(&operand.region.span()).next().is_some());
            if tracked {
                self.ops.push(position as u32);
            }
            self.ranks.push(if tracked { self.ops.len() as u16 } else { 0 });
        }
        self.pending.resize_with(self.pending.len().max(self.ops.len() + 1), Vec::new);
        assert!(self.ops.len() < usize::from(u16::MAX), "a program of so many ops cannot be watched");
    }

    fn pieces(&self, range: &Range<u64>) -> impl Iterator<Item = (Range<u64>, usize)> + use<'_> {
        let range = range.clone();
        let from = self.areas.partition_point(|area| area.range.end <= range.start);
        self.areas[from..].iter().take_while(move |area| area.range.start < range.end).map(move |area| {
            let piece = area.range.start.max(range.start)..area.range.end.min(range.end);
            let at = area.at + (piece.start - area.range.start) as usize;
            (piece, at)
        })
    }

    /// Reads of bytes that a later op, or an earlier one too late, has replaced.
    fn check_overwritten(&mut self, access: Access, start: u64, at: usize, seen: &[u8]) {
        let mine = self.ranks[access.op as usize];
        let wrong = |writer: u16, replaced: u16| writer > mine || (replaced != 0 && replaced < mine);
        let mut from = 0;
        while from < seen.len() {
            let (writer, replaced) = (self.writers[at + from], self.replaced[at + from]);
            let same = self.writers[at + from..at + seen.len()].iter().zip(&self.replaced[at + from..]);
            let to = from + same.take_while(|&(&w, &r)| w == writer && r == replaced).count();
            if wrong(writer, replaced) && self.before[at + from..at + to] != seen[from..to] {
                let writer_op = self.ops[usize::from(writer) - 1];
                let (kind, first, second) = if writer > mine {
                    (RaceKind::WriteAfterRead, access.op, writer_op)
                } else {
                    (RaceKind::WriteAfterWrite, writer_op, self.ops[usize::from(replaced) - 1])
                };
                let expected = self.before[at + from..at + to].to_vec();
                self.draft((kind, first, second), access, start + from as u64, &expected, &seen[from..to]);
            }
            from = to;
        }
    }

    /// Reads of bytes that an earlier op has yet to write.
    fn check_unwritten(&mut self, plan: &Plan, access: Access, piece: &Range<u64>, at: usize, seen: &[u8]) {
        let region = Region::contiguous(piece.start, piece.end - piece.start);
        for race in self.disturbed.iter().filter(|race| race.second == access.op) {
            let rank = self.ranks[race.first as usize];
            for write in &plan.ops[race.first as usize].writes {
                write.region.shared(&region, |shared| {
                    let within = (shared.start - piece.start) as usize..(shared.end - piece.start) as usize;
                    if self.writers[at + within.start..at + within.end].iter().any(|&writer| writer < rank) {
                        self.pending[usize::from(rank)].push(Pending {
                            reader: access.op,
                            row: access.row,
                            seen: seen[within].to_vec(),
                            range: shared,
                            at_ns: access.at_ns,
                        });
                    }
                });
            }
        }
    }

    /// The write that some reads should have seen.
    fn resolve(&mut self, access: Access, piece: &Range<u64>, new: &[u8]) {
        let rank = usize::from(self.ranks[access.op as usize]);
        let pending = std::mem::take(&mut self.pending[rank]);
        for read in &pending {
            let (start, end) = (piece.start.max(read.range.start), piece.end.min(read.range.end));
            if start >= end {
                continue;
            }
            let expected = &new[(start - piece.start) as usize..(end - piece.start) as usize];
            let seen = &read.seen[(start - read.range.start) as usize..(end - read.range.start) as usize];
            if expected != seen {
                let reader = Access { op: read.reader, row: read.row, at_ns: read.at_ns };
                self.draft((RaceKind::ReadAfterWrite, access.op, read.reader), reader, start, expected, seen);
            }
        }
        self.pending[rank] = pending;
    }

    fn draft(&mut self, pair: (RaceKind, u32, u32), access: Access, start: u64, expected: &[u8], seen: &[u8]) {
        let differs = |(e, s): (&u8, &u8)| e != s;
        let lo = expected.iter().zip(seen).position(differs).unwrap_or(0);
        let hi = expected.iter().zip(seen).rposition(differs).unwrap_or(0) + 1;
        let bytes = start + lo as u64..start + hi as u64;
        let changed = expected.iter().zip(seen).filter(|&pair| differs(pair)).count() as u64;
        let (kind, first, second) = pair;
        let quote = |bytes: &[u8]| bytes[lo..bytes.len().min(lo + QUOTED)].to_vec();
        let same = |d: &&mut Draft| (d.kind, d.first, d.second, d.reader) == (kind, first, second, access.op);
        if let Some(draft) = self.drafts.iter_mut().find(same) {
            if bytes.start < draft.bytes.start {
                (draft.expected, draft.seen) = (quote(expected), quote(seen));
            }
            draft.bytes = draft.bytes.start.min(bytes.start)..draft.bytes.end.max(bytes.end);
            draft.changed += changed;
            draft.at_ns = draft.at_ns.min(access.at_ns);
            if draft.rows.last() != Some(&access.row) {
                draft.rows.push(access.row);
            }
            return;
        }
        self.drafts.push(Draft {
            kind,
            first,
            second,
            reader: access.op,
            rows: vec![access.row],
            bytes,
            changed,
            expected: quote(expected),
            seen: quote(seen),
            at_ns: access.at_ns,
        });
    }
}

fn side(plan: &Plan, position: u32, reads: bool, place: u64) -> Side {
    let op: &Op = &plan.ops[position as usize];
    let holds = |operand: &&Operand| operand.region.covers(&(place..place + 1));
    let operands = if reads { &op.reads } else { &op.writes };
    let operand = operands.iter().find(holds).or_else(|| op.reads.iter().chain(&op.writes).find(holds));
    Side {
        op: position,
        kernel: op.kernel.name(),
        layer: op.layer,
        stream: plan.streams[position as usize],
        stream_name: "".into(),
        lifetime: operand.map_or(LifetimeId(u32::MAX), |operand| operand.lifetime),
        tensor: "".into(),
    }
}
