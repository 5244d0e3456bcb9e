//! Who wrote each byte last, kept where unordered ops met out of host order; from it, the race log.
//!
//! Host order is the yardstick: a read should see the last write that the host enqueued before it. Only launches in which
//! two unordered ops that share bytes did not run one after the other in host order are watched, and only those bytes.

use std::ops::Range;

use super::{
    Memory,
    journal::Journal,
    plan::{Plan, Race, shared_bytes},
    race::{RaceHit, RaceKind, Side},
    timing::Timing,
};
use crate::device::{LifetimeId, Op, Operand, Region, kernel::Grid};

/// The watched bytes of one launch.
#[derive(Default)]
pub(crate) struct Watch {
    areas: Vec<Area>,
    tags: Tags,
    /// For each [`CHUNK`] of watched bytes, the highest rank among writers, or [`MIXED`] where a write was replaced.
    highest: Vec<u16>,
    /// For each [`CHUNK`] of watched bytes, the lowest rank among writers.
    lowest: Vec<u16>,
    /// For each op, its rank among those that touch watched bytes, in host order from 1; 0: it does not.
    ranks: Vec<u16>,
    disturbed: Vec<Race>,
    log: Log,
    turned_back: Tags,
}

/// Of some watched bytes: who wrote them, and what.
#[derive(Default)]
pub(crate) struct Tags {
    /// The rank of the op that wrote last; 0: none in this launch.
    writers: Vec<u16>,
    /// The rank of the later op whose write the last, earlier op replaced; 0: none.
    replaced: Vec<u16>,
    /// The value before the last write.
    before: Vec<u8>,
}

impl Tags {
    pub(crate) fn len(&self) -> usize {
        self.writers.len()
    }

    pub(crate) fn clear(&mut self) {
        self.writers.clear();
        self.replaced.clear();
        self.before.clear();
    }

    /// Appends `other`'s tags of `bytes`.
    pub(crate) fn append(&mut self, other: &Self, bytes: Range<usize>) {
        self.writers.extend_from_slice(&other.writers[bytes.clone()]);
        self.replaced.extend_from_slice(&other.replaced[bytes.clone()]);
        self.before.extend_from_slice(&other.before[bytes]);
    }

    /// Overwrites the tags from `at` on with `other`'s of `bytes`.
    pub(crate) fn copy(&mut self, at: usize, other: &Self, bytes: Range<usize>) {
        let to = at..at + bytes.len();
        self.writers[to.clone()].copy_from_slice(&other.writers[bytes.clone()]);
        self.replaced[to.clone()].copy_from_slice(&other.replaced[bytes.clone()]);
        self.before[to].copy_from_slice(&other.before[bytes]);
    }

    fn reset(&mut self, len: usize) {
        self.clear();
        self.writers.resize(len, 0);
        self.replaced.resize(len, 0);
        self.before.resize(len, 0);
    }

    /// End of the run of bytes from `from` on that have the same writers.
    fn run(&self, from: usize, end: usize) -> usize {
        let (writer, replaced) = (self.writers[from], self.replaced[from]);
        let rest = self.writers[from..end].iter().zip(&self.replaced[from..end]);
        from + rest.take_while(|&(&w, &r)| w == writer && r == replaced).count()
    }
}

#[derive(Debug, Clone)]
struct Area {
    range: Range<u64>,
    at: usize,
}

/// What has been found.
#[derive(Default)]
struct Log {
    /// The op of each rank, from rank 1.
    ops: Vec<u32>,
    /// For each rank, the reads that should have come after its writes.
    pending: Vec<Vec<Pending>>,
    drafts: Vec<Draft>,
}

/// A read that came before an earlier op's write of the same bytes.
struct Pending {
    reader: Access,
    range: Range<u64>,
    seen: Vec<u8>,
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
/// Watched bytes that share a summary.
const CHUNK: usize = 128;
/// A summary that no rank reaches.
const MIXED: u16 = u16::MAX;

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

    /// True where every watched byte that `op` may read was last written by what host order gives it, as far as the
    /// summaries tell: then no read of `op` finds anything.
    pub(crate) fn is_clean(&self, plan: &Plan, op: u32) -> bool {
        let rank = self.ranks[op as usize];
        plan.ops[op as usize].reads.iter().all(|operand| {
            self.pieces(&operand.region.span()).all(|(piece, at)| {
                let places = at..at + (piece.end - piece.start) as usize;
                let piece = Region::contiguous(piece.start, piece.end - piece.start);
                let all_written = earlier_writes(plan, &self.disturbed, op).all(|(region, race)| {
                    let (rank, mut written) = (self.ranks[race.first as usize], true);
                    region.shared(&piece, |shared| {
                        let first = at + (shared.start - piece.base) as usize;
                        let places = first..first + (shared.end - shared.start) as usize;
                        written &= summaries(places, &self.lowest).iter().all(|&lowest| lowest >= rank);
                    });
                    written
                });
                all_written && summaries(places, &self.highest).iter().all(|&highest| highest <= rank)
            })
        })
    }

    /// The tags of all watched bytes.
    pub(crate) fn tags(&self) -> &Tags {
        &self.tags
    }

    /// The watched bytes of `range`, as places in [`Watch::tags`].
    pub(crate) fn places(&self, range: &Range<u64>) -> impl Iterator<Item = Range<usize>> + use<'_> {
        self.pieces(range).map(|(piece, at)| at..at + (piece.end - piece.start) as usize)
    }

    /// A block read `bytes` from `start` on, as they are now.
    pub(crate) fn read(&mut self, plan: &Plan, access: Access, start: u64, bytes: &[u8]) {
        let range = start..start + bytes.len() as u64;
        let Self { areas, tags, highest, lowest, ranks, disturbed, log, .. } = self;
        for (piece, at) in pieces(areas, &range) {
            let seen = &bytes[(piece.start - start) as usize..(piece.end - start) as usize];
            let rank = ranks[access.op as usize];
            if summaries(at..at + seen.len(), highest).iter().any(|&highest| highest > rank) {
                for (place, _) in chunks(at..at + seen.len()).filter(|&(_, chunk)| highest[chunk] > rank) {
                    let within = place.start - at..place.end - at;
                    log.check_overwritten(access, rank, tags, place, piece.start + within.start as u64, &seen[within]);
                }
            }
            for (region, race) in earlier_writes(plan, disturbed, access.op) {
                let rank = ranks[race.first as usize];
                region.shared(&Region::contiguous(piece.start, piece.end - piece.start), |shared| {
                    let offset = (shared.start - piece.start) as usize;
                    let first = at + offset;
                    let places = first..first + (shared.end - shared.start) as usize;
                    if summaries(places.clone(), lowest).iter().all(|&lowest| lowest >= rank) {
                        return;
                    }
                    for (place, _) in chunks(places).filter(|&(_, chunk)| lowest[chunk] < rank) {
                        let within = place.start - at..place.end - at;
                        let from = piece.start + within.start as u64;
                        log.check_unwritten(access, rank, tags, place, from, &seen[within]);
                    }
                });
            }
        }
    }

    /// A block read `bytes` from `start` on, as they were after the journal's first `position` writes.
    pub(crate) fn read_before(
        &mut self,
        plan: &Plan,
        access: Access,
        (start, bytes): (u64, &[u8]),
        (journal, memory, position): (&Journal, &Memory, usize),
    ) {
        let range = start..start + bytes.len() as u64;
        let Self { areas, tags, ranks, disturbed, log, turned_back, .. } = self;
        for (piece, at) in pieces(areas, &range) {
            let seen = &bytes[(piece.start - start) as usize..(piece.end - start) as usize];
            let rank = ranks[access.op as usize];
            turned_back.clear();
            turned_back.append(tags, at..at + seen.len());
            journal.rewind(turned_back, at, position);
            log.check_overwritten(access, rank, turned_back, 0..seen.len(), piece.start, seen);
            for (region, race) in earlier_writes(plan, disturbed, access.op) {
                let rank = ranks[race.first as usize];
                region.shared(&Region::contiguous(piece.start, piece.end - piece.start), |shared| {
                    let within = (shared.start - piece.start) as usize..(shared.end - piece.start) as usize;
                    let known = log.pending[usize::from(rank)].len();
                    log.check_unwritten(access, rank, turned_back, within.clone(), shared.start, &seen[within]);
                    log.resolve_from(journal, memory, position, (race.first, rank), known);
                });
            }
        }
    }

    /// A block is about to replace `old` by `new` from `start` on.
    pub(crate) fn write(&mut self, access: Access, start: u64, old: &[u8], new: &[u8]) {
        let range = start..start + new.len() as u64;
        let mine = self.ranks[access.op as usize];
        let Self { areas, tags, highest, lowest, log, .. } = self;
        for (piece, at) in pieces(areas, &range) {
            let within = (piece.start - start) as usize..(piece.end - start) as usize;
            log.resolve((access.op, mine), piece.start, &new[within.clone()], 0);
            tags.before[at..at + within.len()].copy_from_slice(&old[within.clone()]);
            for (place, summary) in chunks(at..at + within.len()) {
                let whole = place.len() == CHUNK;
                if highest[summary] <= mine {
                    tags.writers[place].fill(mine);
                    highest[summary] = mine;
                } else {
                    let both = tags.writers[place.clone()].iter_mut().zip(&mut tags.replaced[place]);
                    for (writer, replaced) in both {
                        let later = (*writer).max(*replaced);
                        *replaced = if later > mine { later } else { 0 };
                        *writer = mine;
                    }
                    highest[summary] = tags.summary(summary);
                }
                lowest[summary] = if whole { mine } else { tags.lowest(summary) };
            }
        }
    }

    /// Ends the launch: hands out what was found.
    pub(crate) fn finish(&mut self, plan: &Plan, launch: u64, hits: &mut Vec<RaceHit>) {
        self.areas.clear();
        self.log.pending.iter_mut().for_each(Vec::clear);
        for draft in self.log.drafts.drain(..) {
            let Draft { kind, first, second, reader, rows, bytes, changed, expected, seen, at_ns } = draft;
            let rows = reading_rows(&plan.ops[reader as usize], rows, &bytes);
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
        self.tags.reset(length);
        for summary in [&mut self.highest, &mut self.lowest] {
            summary.clear();
            summary.resize(length.div_ceil(CHUNK), 0);
        }
    }

    fn rank(&mut self, plan: &Plan) {
        self.ranks.clear();
        self.log.ops.clear();
        for (position, op) in plan.ops.iter().enumerate() {
            let mut operands = op.reads.iter().chain(&op.writes);
            let tracked = operands.any(|operand| pieces(&self.areas, &operand.region.span()).next().is_some());
            if tracked {
                self.log.ops.push(position as u32);
            }
            self.ranks.push(if tracked { self.log.ops.len() as u16 } else { 0 });
        }
        let ranks = self.log.ops.len() + 1;
        assert!(ranks < usize::from(MIXED), "a program of so many ops cannot be watched");
        self.log.pending.resize_with(self.log.pending.len().max(ranks), Vec::new);
    }

    fn pieces(&self, range: &Range<u64>) -> impl Iterator<Item = (Range<u64>, usize)> + use<'_> {
        pieces(&self.areas, range)
    }
}

impl Tags {
    /// The highest rank that wrote to a chunk, or [`MIXED`].
    fn summary(&self, chunk: usize) -> u16 {
        let bytes = chunk * CHUNK..self.len().min((chunk + 1) * CHUNK);
        let mixed = self.replaced[bytes.clone()].iter().any(|&replaced| replaced != 0);
        if mixed { MIXED } else { self.writers[bytes].iter().copied().max().unwrap_or(0) }
    }

    fn lowest(&self, chunk: usize) -> u16 {
        let bytes = chunk * CHUNK..self.len().min((chunk + 1) * CHUNK);
        self.writers[bytes].iter().copied().min().unwrap_or(0)
    }
}

/// The parts of `range` that lie in `areas`, each with its place among the watched bytes.
fn pieces<'a>(areas: &'a [Area], range: &Range<u64>) -> impl Iterator<Item = (Range<u64>, usize)> + use<'a> {
    let range = range.clone();
    let from = areas.partition_point(|area| area.range.end <= range.start);
    let end = range.end;
    areas[from..].iter().take_while(move |area| area.range.start < end).map(move |area| {
        let piece = area.range.start.max(range.start)..area.range.end.min(range.end);
        let at = area.at + (piece.start - area.range.start) as usize;
        (piece, at)
    })
}

/// Cuts places among the watched bytes into chunks; each with the chunk's number.
fn chunks(places: Range<usize>) -> impl Iterator<Item = (Range<usize>, usize)> {
    let numbers = places.start / CHUNK..places.end.div_ceil(CHUNK);
    numbers.map(move |chunk| (places.start.max(chunk * CHUNK)..places.end.min((chunk + 1) * CHUNK), chunk))
}

/// The summaries of the chunks that `places` meet.
fn summaries(places: Range<usize>, all: &[u16]) -> &[u16] {
    &all[places.start / CHUNK..places.end.div_ceil(CHUNK)]
}

/// What earlier ops that `op` met out of order write.
fn earlier_writes<'a>(
    plan: &'a Plan,
    disturbed: &'a [Race],
    op: u32,
) -> impl Iterator<Item = (&'a Region, &'a Race)> + use<'a> {
    let races = disturbed.iter().filter(move |race| race.second == op);
    races.flat_map(|race| plan.ops[race.first as usize].writes.iter().map(move |write| (&write.region, race)))
}

impl Log {
    /// Reads of bytes that a later op, or an earlier one too late, has replaced. The bytes from `start` on, `seen`, have
    /// the tags of `places`.
    fn check_overwritten(
        &mut self,
        access: Access,
        mine: u16,
        tags: &Tags,
        places: Range<usize>,
        start: u64,
        seen: &[u8],
    ) {
        let mut from = places.start;
        while from < places.end {
            let (writer, replaced) = (tags.writers[from], tags.replaced[from]);
            let to = tags.run(from, places.end);
            let seen = &seen[from - places.start..to - places.start];
            let expected = &tags.before[from..to];
            let wrong = writer > mine || (replaced != 0 && replaced < mine);
            if wrong && expected != seen {
                let writer_op = self.ops[usize::from(writer) - 1];
                let pair = if writer > mine {
                    (RaceKind::WriteAfterRead, access.op, writer_op)
                } else {
                    (RaceKind::WriteAfterWrite, writer_op, self.ops[usize::from(replaced) - 1])
                };
                self.draft(pair, access, start + (from - places.start) as u64, expected, seen);
            }
            from = to;
        }
    }

    /// Reads of bytes that the earlier op of `rank` has yet to write.
    fn check_unwritten(
        &mut self,
        access: Access,
        rank: u16,
        tags: &Tags,
        places: Range<usize>,
        start: u64,
        seen: &[u8],
    ) {
        let mut from = places.start;
        while from < places.end {
            let unwritten = |writer: &&u16| (**writer < rank) == (tags.writers[from] < rank);
            let to = from + tags.writers[from..places.end].iter().take_while(unwritten).count();
            if tags.writers[from] < rank {
                let first = start + (from - places.start) as u64;
                let seen = seen[from - places.start..to - places.start].to_vec();
                let range = first..first + seen.len() as u64;
                self.pending[usize::from(rank)].push(Pending { reader: access, range, seen });
            }
            from = to;
        }
    }

    /// The write that some reads should have seen: `new`, from `start` on. Looks at pending reads from `known` on.
    fn resolve(&mut self, (writer, rank): (u32, u16), start: u64, new: &[u8], known: usize) {
        let end = start + new.len() as u64;
        let pending = std::mem::take(&mut self.pending[usize::from(rank)]);
        for read in &pending[known..] {
            let (first, last) = (start.max(read.range.start), end.min(read.range.end));
            if first >= last {
                continue;
            }
            let expected = &new[(first - start) as usize..(last - start) as usize];
            let seen = &read.seen[(first - read.range.start) as usize..(last - read.range.start) as usize];
            if expected != seen {
                let pair = (RaceKind::ReadAfterWrite, writer, read.reader.op);
                self.draft(pair, read.reader, first, expected, seen);
            }
        }
        self.pending[usize::from(rank)] = pending;
    }

    /// Resolves pending reads from `known` on by writes that the journal has already seen.
    fn resolve_from(&mut self, journal: &Journal, memory: &Memory, position: usize, writer: (u32, u16), known: usize) {
        let pending = &self.pending[usize::from(writer.1)][known..];
        let Some(first) = pending.first() else { return };
        let hull = first.range.start..pending[pending.len() - 1].range.end;
        let mut new = Vec::new();
        for (range, after) in journal.writes_of(writer.0, hull, position) {
            new.resize((range.end - range.start) as usize, 0);
            journal.as_of(memory, &range, after, &mut new);
            self.resolve(writer, range.start, &new, known);
        }
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

/// The rows of `op` that read wrong bytes: those of its `blocks`, or, where blocks are columns, those of `bytes`.
fn reading_rows(op: &Op, mut blocks: Vec<u32>, bytes: &Range<u64>) -> Vec<u32> {
    let columns = matches!(op.kernel.grid(), Grid::Columns(_));
    let holds = |operand: &&Operand| operand.region.covers(&(bytes.start..bytes.start + 1));
    if let Some(Operand { region, .. }) = op.reads.iter().find(holds).filter(|_| columns) {
        let row = |byte: u64| ((byte - region.base) / region.row_stride).min(region.rows - 1) as u32;
        return (row(bytes.start)..=row(bytes.end - 1)).collect();
    }
    blocks.sort_unstable();
    blocks.dedup();
    blocks
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
