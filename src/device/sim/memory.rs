//! Device memory: one arena, and how a kernel reads and writes it.

use std::ops::Range;

use bytemuck::{AnyBitPattern, NoUninit};

use super::journal::{Journal, Moment};
use crate::device::{Op, SparseWeight, WeightId};

/// Bytes that share one write stamp.
pub const STAMP_BYTES: u64 = 1024;

/// The arena. Offsets are device addresses; it starts as zeros and is touched lazily.
pub struct Memory {
    words: Vec<u64>,
    stamps: Vec<u64>,
    clock: u64,
}

impl Memory {
    /// An arena of `bytes`.
    pub fn new(bytes: u64) -> Self {
        Self {
            words: vec![0; bytes.div_ceil(8) as usize],
            stamps: vec![0; bytes.div_ceil(STAMP_BYTES) as usize],
            clock: 0,
        }
    }

    /// Makes the arena at least `bytes` long.
    pub fn reserve(&mut self, bytes: u64) {
        if self.len() < bytes {
            // A fresh zeroed allocation is touched lazily; growing one in place would write all of it.
            let mut grown = Self { clock: self.clock, ..Self::new(bytes) };
            grown.words[..self.words.len()].copy_from_slice(&self.words);
            grown.stamps[..self.stamps.len()].copy_from_slice(&self.stamps);
            *self = grown;
        }
    }

    /// Length in bytes.
    pub fn len(&self) -> u64 {
        self.words.len() as u64 * 8
    }

    /// True before anything was reserved.
    pub fn is_empty(&self) -> bool {
        self.words.is_empty()
    }

    /// The bytes of `range`.
    pub fn bytes(&self, range: Range<u64>) -> &[u8] {
        &bytemuck::cast_slice(&self.words)[range.start as usize..range.end as usize]
    }

    /// The bytes of `range` as values of `T`. Panics if `range` is not aligned for them.
    pub fn slice<T: AnyBitPattern>(&self, range: Range<u64>) -> &[T] {
        bytemuck::cast_slice(self.bytes(range))
    }

    /// Overwrites the bytes at `address`.
    pub fn write(&mut self, address: u64, bytes: &[u8]) {
        let range = address..address + bytes.len() as u64;
        self.stamp_writes(&range);
        bytemuck::cast_slice_mut(&mut self.words)[range.start as usize..range.end as usize].copy_from_slice(bytes);
    }

    /// A number that grows whenever a byte of `range` may have been written (granularity [`STAMP_BYTES`]). What was
    /// derived from `range` at a stamp is still true while the stamp is the same.
    pub fn stamp(&self, range: &Range<u64>) -> u64 {
        newest(&self.stamps, range)
    }

    /// The stamp of the last write.
    pub(crate) fn clock(&self) -> u64 {
        self.clock
    }

    /// What `op` may read, and its writes' own bytes to write to. Only for ops whose writes meet neither its reads nor each
    /// other ([`writes_in_place`]).
    pub(crate) fn split<'a>(&'a mut self, op: &'a Op, weights: &'a [SparseWeight]) -> (View<'a>, Writes<'a>) {
        let mut spans: [Range<u64>; IN_PLACE] = std::array::from_fn(|_| self.len()..self.len());
        for (span, write) in spans.iter_mut().zip(&op.writes) {
            *span = write.region.span();
            self.stamp_writes(span);
        }
        spans.sort_unstable_by_key(|span| span.start);
        let mut rest: &'a mut [u8] = bytemuck::cast_slice_mut(&mut self.words);
        let (mut parts, mut offset) = (Parts::default(), 0);
        let written = spans.map(|span| {
            let (before, from) = std::mem::take(&mut rest).split_at_mut((span.start - offset) as usize);
            let (target, after) = from.split_at_mut((span.end - span.start) as usize);
            parts.push(offset, before);
            (rest, offset) = (after, span.end);
            (span.start, target)
        });
        parts.push(offset, rest);
        let view = View { memory: parts, stamps: &self.stamps, overlay: None, weights, op };
        (view, Writes { target: Target::Memory(written), op })
    }

    fn stamp_writes(&mut self, range: &Range<u64>) {
        self.clock += 1;
        let chunks = (range.start / STAMP_BYTES) as usize..range.end.div_ceil(STAMP_BYTES) as usize;
        self.stamps[chunks].fill(self.clock);
    }
}

fn newest(stamps: &[u64], range: &Range<u64>) -> u64 {
    let chunks = (range.start / STAMP_BYTES) as usize..range.end.div_ceil(STAMP_BYTES) as usize;
    stamps[chunks].iter().copied().max().unwrap_or(0)
}

/// True where two ranges share a byte.
pub(crate) fn meets(a: &Range<u64>, b: &Range<u64>) -> bool {
    a.start < b.end && b.start < a.end
}

/// Most writes of an op that is given memory itself to write to.
const IN_PLACE: usize = 3;

/// True where `op`'s writes are few, not indexed, and meet neither its reads nor each other: it may write to memory
/// itself.
pub(crate) fn writes_in_place(op: &Op) -> bool {
    let spans: Vec<Range<u64>> = op.writes.iter().map(|write| write.region.span()).collect();
    let apart = |at: usize, span: &Range<u64>| {
        !spans[..at].iter().any(|other| meets(other, span))
            && !op.reads.iter().any(|read| meets(&read.region.span(), span))
    };
    op.writes.len() <= IN_PLACE
        && op.writes.iter().all(|write| !write.indexed && !write.region.is_empty())
        && spans.iter().enumerate().all(|(at, span)| apart(at, span))
}

/// Memory, or what of it is not being written.
#[derive(Clone, Copy, Default)]
struct Parts<'a> {
    parts: [(u64, &'a [u8]); IN_PLACE + 1],
    count: usize,
}

impl<'a> Parts<'a> {
    fn push(&mut self, start: u64, bytes: &'a [u8]) {
        self.parts[self.count] = (start, bytes);
        self.count += 1;
    }

    fn bytes(&self, range: &Range<u64>) -> &'a [u8] {
        let holds = |part: &&(u64, &[u8])| part.0 <= range.start && range.end <= part.0 + part.1.len() as u64;
        let Some((start, bytes)) = self.parts[..self.count].iter().find(holds) else {
            panic!("{range:?} is read while it is written");
        };
        &bytes[(range.start - start) as usize..(range.end - start) as usize]
    }
}

/// What a kernel may read: the regions its op declares, as the running blocks see them.
pub struct View<'a> {
    memory: Parts<'a>,
    stamps: &'a [u64],
    overlay: Option<&'a Overlay>,
    weights: &'a [SparseWeight],
    op: &'a Op,
}

impl<'a> View<'a> {
    /// A view of plain memory.
    pub fn new(op: &'a Op, memory: &'a Memory, weights: &'a [SparseWeight]) -> Self {
        let mut parts = Parts::default();
        parts.push(0, bytemuck::cast_slice(&memory.words));
        Self { memory: parts, stamps: &memory.stamps, overlay: None, weights, op }
    }

    /// A view of memory through what a block has read already.
    pub(crate) fn through(op: &'a Op, memory: &'a Memory, weights: &'a [SparseWeight], overlay: &'a Overlay) -> Self {
        Self { overlay: Some(overlay), ..Self::new(op, memory, weights) }
    }

    /// The bytes of `range`, which must lie in one declared range. Panics in debug builds if the op declares no read of
    /// it.
    pub fn bytes(&self, range: Range<u64>) -> &'a [u8] {
        debug_assert!(
            self.op.reads.iter().any(|operand| operand.region.covers(&range)),
            "{} reads {range:?}, which it does not declare",
            self.op.kernel.name()
        );
        let Some(overlay) = self.overlay.filter(|_| !range.is_empty()) else { return self.memory.bytes(&range) };
        overlay.find(&range).unwrap_or_else(|| {
            assert!(!overlay.strict, "{} reads {range:?}, which it did not visit", self.op.kernel.name());
            self.memory.bytes(&range)
        })
    }

    /// The bytes of `range` as values of `T`.
    pub fn slice<T: AnyBitPattern>(&self, range: Range<u64>) -> &'a [T] {
        bytemuck::cast_slice(self.bytes(range))
    }

    /// True where the running blocks see memory's own bytes of `range`.
    pub fn is_memory(&self, range: &Range<u64>) -> bool {
        self.overlay.is_none_or(|overlay| overlay.find(range).is_none())
    }

    /// The write stamp of `range` ([`Memory::stamp`]), or none where the running blocks see other bytes than memory's.
    pub fn stamp(&self, range: &Range<u64>) -> Option<u64> {
        self.is_memory(range).then(|| newest(self.stamps, range))
    }

    /// A loaded weight.
    pub fn weight(&self, id: WeightId) -> &'a SparseWeight {
        &self.weights[id.0 as usize]
    }
}

/// What a running block has read so far, slice by slice.
///
/// Slices divide everything that the block reads, laid end to end; only what somebody may write meanwhile is held. A range
/// keeps its place within [`CUT_BYTES`], so values keep their alignment and a slice never tears one.
#[derive(Default)]
pub(crate) struct Overlay {
    words: Vec<u64>,
    used: u64,
    held: Vec<Held>,
    /// How many of the held ranges were read at once.
    at_once: usize,
    /// Length of all that is read in slices, and where its last range ends.
    length: u64,
    last_end: u64,
    /// Ranges that are read in slices and may have been written meanwhile, with their places.
    noted: Vec<(Range<u64>, u64)>,
    /// The journal's length and memory's clock when the block began.
    begun: usize,
    clock: u64,
    /// Nothing but what is held may be read.
    strict: bool,
}

/// A range that an overlay holds.
struct Held {
    range: Range<u64>,
    /// Where in `words` its bytes are.
    at: u64,
    /// Its place among all that is read in slices.
    place: u64,
}

/// Slices are cut at multiples of this many bytes, as the machine moves memory.
const CUT_BYTES: u64 = 128;

impl Overlay {
    /// Begins a block, after the journal's first `begun` writes.
    pub(crate) fn begin(&mut self, strict: bool, begun: usize, memory: &Memory) {
        self.held.clear();
        self.noted.clear();
        (self.used, self.at_once, self.length, self.last_end, self.strict) = (0, 0, 0, u64::MAX, strict);
        (self.begun, self.clock) = (begun, memory.clock());
    }

    /// Adds a range that is read in slices; [`Overlay::settle`] finds out what the slices saw if `hot`.
    pub(crate) fn note(&mut self, range: Range<u64>, hot: bool) {
        let adjoins = range.start == self.last_end;
        let place = self.place(&range);
        match self.noted.last_mut() {
            Some((last, _)) if hot && adjoins && last.end == range.start => last.end = range.end,
            _ if hot => self.noted.push((range, place)),
            _ => {}
        }
    }

    /// The ranges that may have been written since the block began.
    pub(crate) fn noted(&self) -> impl Iterator<Item = &Range<u64>> {
        self.noted.iter().map(|(range, _)| range)
    }

    /// Holds what the slices saw of each noted range that was written since the block began. `visit` gets each noted range,
    /// or each slice of it, with its bytes and, if it was written since, the slice's place in the journal.
    pub(crate) fn settle(
        &mut self,
        memory: &Memory,
        journal: &Journal,
        slices: &[Moment],
        mut visit: impl FnMut(u64, &[u8], Option<usize>),
    ) {
        let noted = std::mem::take(&mut self.noted);
        for (range, place) in &noted {
            if memory.stamp(range) <= self.clock {
                visit(range.start, memory.bytes(range.clone()), None);
                continue;
            }
            self.hold(range.clone(), *place);
            let at = self.held[self.held.len() - 1].at;
            for (slice, moment) in (0..).zip(slices) {
                let (from, to) = (self.cut(slice, slices.len() as u64), self.cut(slice + 1, slices.len() as u64));
                let (start, end) = (from.max(*place), to.min(place + range.end - range.start));
                if start < end {
                    let position = journal.before(*moment, self.begun);
                    let source = range.start + start - place..range.start + end - place;
                    let target = (at + start - place) as usize..(at + end - place) as usize;
                    let bytes = &mut bytemuck::cast_slice_mut(&mut self.words)[target];
                    journal.as_of(memory, &source, position, bytes);
                    visit(source.start, bytes, Some(position));
                }
            }
        }
        self.noted = noted;
    }

    /// Adds a range that is yet to be read.
    pub(crate) fn add(&mut self, range: Range<u64>) {
        let adjoins = range.start == self.last_end;
        let place = self.place(&range);
        match self.held[self.at_once..].last_mut() {
            Some(last) if adjoins && last.range.end == range.start => {
                self.used += range.end - range.start;
                last.range.end = range.end;
                self.make_room();
            }
            _ => self.hold(range, place),
        }
    }

    /// Adds a range and reads it at once, before and apart from all slices.
    pub(crate) fn add_read(&mut self, memory: &Memory, range: Range<u64>) {
        debug_assert_eq!(self.at_once, self.held.len(), "index ranges come before the others");
        self.hold(range.clone(), 0);
        let start = self.held[self.at_once].at as usize;
        self.at_once += 1;
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut self.words);
        bytes[start..self.used as usize].copy_from_slice(memory.bytes(range));
    }

    /// Lays a range behind all others that are read in slices.
    fn place(&mut self, range: &Range<u64>) -> u64 {
        let adjoins = range.start == self.last_end;
        let place = if adjoins { self.length } else { aligned(self.length, range.start) };
        self.length = place + range.end - range.start;
        self.last_end = range.end;
        place
    }

    /// Where slice `slice` of `slices` begins.
    fn cut(&self, slice: u64, slices: u64) -> u64 {
        if slice == slices { self.length } else { self.length * slice / slices / CUT_BYTES * CUT_BYTES }
    }

    fn hold(&mut self, range: Range<u64>, place: u64) {
        let at = aligned(self.used, range.start);
        self.used = at + range.end - range.start;
        self.held.push(Held { range, at, place });
        self.make_room();
    }

    fn make_room(&mut self) {
        let words = self.used.div_ceil(8) as usize;
        if self.words.len() < words {
            self.words.resize(words.next_power_of_two(), 0);
        }
    }

    /// Reads slice `slice` of `slices` of everything added, calling `visit` with each range read.
    pub(crate) fn read(&mut self, memory: &Memory, slice: u64, slices: u64, mut visit: impl FnMut(Range<u64>)) {
        let (from, to) = (self.cut(slice, slices), self.cut(slice + 1, slices));
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut self.words);
        for Held { range, at, place } in &self.held[self.at_once..] {
            let (start, end) = (from.max(*place), to.min(place + range.end - range.start));
            if start < end {
                let source = range.start + start - place..range.start + end - place;
                let target = (at + start - place) as usize..(at + end - place) as usize;
                bytes[target].copy_from_slice(memory.bytes(source.clone()));
                visit(source);
            }
        }
    }

    fn find(&self, range: &Range<u64>) -> Option<&[u8]> {
        let holds = |held: &&Held| held.range.start <= range.start && range.end <= held.range.end;
        let held = self.held.iter().find(holds)?;
        let start = (held.at + range.start - held.range.start) as usize;
        Some(&bytemuck::cast_slice(&self.words)[start..start + (range.end - range.start) as usize])
    }
}

/// The first place from `used` on that is where `address` is within [`CUT_BYTES`].
fn aligned(used: u64, address: u64) -> u64 {
    used.next_multiple_of(CUT_BYTES) + address % CUT_BYTES
}

/// Where a kernel puts its results: memory itself where nobody else can tell, or else scratch, which the virtual GPU
/// commits.
pub struct Writes<'a> {
    target: Target<'a>,
    op: &'a Op,
}

enum Target<'a> {
    Scratch(&'a mut Scratch),
    Memory([(u64, &'a mut [u8]); IN_PLACE]),
}

/// Reusable space behind [`Writes`].
#[derive(Default)]
pub struct Scratch {
    words: Vec<u64>,
    used: usize,
    ranges: Vec<(Range<u64>, usize)>,
}

impl<'a> Writes<'a> {
    /// Starts collecting into `scratch`, which is emptied.
    pub fn new(op: &'a Op, scratch: &'a mut Scratch) -> Self {
        scratch.used = 0;
        scratch.ranges.clear();
        Self { target: Target::Scratch(scratch), op }
    }

    /// The future bytes of `range`: all must be written, none may be read first. Panics in debug builds if the op
    /// declares no write of it.
    pub fn bytes(&mut self, range: Range<u64>) -> &mut [u8] {
        debug_assert!(
            self.op.writes.iter().any(|operand| operand.region.covers(&range)),
            "{} writes {range:?}, which it does not declare",
            self.op.kernel.name()
        );
        match &mut self.target {
            Target::Scratch(scratch) => scratch.bytes(range),
            Target::Memory(parts) => {
                let len = range.end - range.start;
                let holds = |part: &&mut (u64, &mut [u8])| {
                    part.0 <= range.start && range.start - part.0 + len <= part.1.len() as u64
                };
                let Some((start, bytes)) = parts.iter_mut().find(holds) else {
                    panic!("{range:?} is no part of what {} writes", self.op.kernel.name());
                };
                let at = (range.start - *start) as usize;
                &mut bytes[at..at + len as usize]
            }
        }
    }

    /// The future bytes of `range` as values of `T`.
    pub fn slice<T: AnyBitPattern + NoUninit>(&mut self, range: Range<u64>) -> &mut [T] {
        bytemuck::cast_slice_mut(self.bytes(range))
    }

    /// Writes `bytes` at `address`.
    pub fn copy(&mut self, address: u64, bytes: &[u8]) {
        self.bytes(address..address + bytes.len() as u64).copy_from_slice(bytes);
    }

    /// Writes `byte` over `range`.
    pub fn fill(&mut self, range: Range<u64>, byte: u8) {
        self.bytes(range).fill(byte);
    }
}

impl Scratch {
    /// Puts the collected writes in order of address, as [`Scratch::find`] needs them. False where two of them meet.
    pub(crate) fn sort(&mut self) -> bool {
        self.ranges.retain(|(range, _)| !range.is_empty());
        self.ranges.sort_unstable_by_key(|(range, _)| range.start);
        self.ranges.is_sorted_by(|(before, _), (after, _)| before.end <= after.start)
    }

    /// The bytes collected for `range`, which lies in one collected write.
    pub(crate) fn find(&self, range: &Range<u64>) -> &[u8] {
        let held = self.ranges.partition_point(|(held, _)| held.start <= range.start).saturating_sub(1);
        let Some((held, at)) =
            self.ranges.get(held).filter(|(held, _)| held.start <= range.start && range.end <= held.end)
        else {
            panic!("{range:?} was not written");
        };
        let start = at + (range.start - held.start) as usize;
        &bytemuck::cast_slice(&self.words)[start..start + (range.end - range.start) as usize]
    }

    fn bytes(&mut self, range: Range<u64>) -> &mut [u8] {
        let at = self.used.next_multiple_of(8) + (range.start % 8) as usize;
        let end = at + (range.end - range.start) as usize;
        if self.words.len() * 8 < end {
            self.words.resize(end.div_ceil(8).next_power_of_two(), 0);
        }
        self.used = end;
        self.ranges.push((range, at));
        &mut bytemuck::cast_slice_mut(&mut self.words)[at..end]
    }

    /// The collected writes, in the order in which they were asked for.
    pub fn iter(&self) -> impl Iterator<Item = (&Range<u64>, &[u8])> {
        let bytes: &[u8] = bytemuck::cast_slice(&self.words);
        self.ranges.iter().map(move |(range, at)| (range, &bytes[*at..*at + (range.end - range.start) as usize]))
    }
}
