//! Device memory: one arena, and how a kernel reads and writes it.

use std::{marker::PhantomData, ops::Range};

use bytemuck::{AnyBitPattern, NoUninit};

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
            self.words.resize(bytes.div_ceil(8) as usize, 0);
            self.stamps.resize(bytes.div_ceil(STAMP_BYTES) as usize, 0);
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
        let chunks = (range.start / STAMP_BYTES) as usize..range.end.div_ceil(STAMP_BYTES) as usize;
        self.stamps[chunks].iter().copied().max().unwrap_or(0)
    }

    fn stamp_writes(&mut self, range: &Range<u64>) {
        self.clock += 1;
        let chunks = (range.start / STAMP_BYTES) as usize..range.end.div_ceil(STAMP_BYTES) as usize;
        self.stamps[chunks].fill(self.clock);
    }
}

/// What a kernel may read: the regions its op declares, as the running blocks see them.
pub struct View<'a> {
    memory: &'a Memory,
    overlay: Option<&'a Overlay>,
    weights: &'a [SparseWeight],
    op: &'a Op,
}

impl<'a> View<'a> {
    /// A view of plain memory.
    pub fn new(op: &'a Op, memory: &'a Memory, weights: &'a [SparseWeight]) -> Self {
        Self { memory, overlay: None, weights, op }
    }

    /// A view of memory through what a block has read already.
    pub(crate) fn through(op: &'a Op, memory: &'a Memory, weights: &'a [SparseWeight], overlay: &'a Overlay) -> Self {
        Self { memory, overlay: Some(overlay), weights, op }
    }

    /// The bytes of `range`, which must lie in one declared range. Panics in debug builds if the op declares no read of
    /// it.
    pub fn bytes(&self, range: Range<u64>) -> &'a [u8] {
        debug_assert!(
            self.op.reads.iter().any(|operand| operand.region.covers(&range)),
            "{} reads {range:?}, which it does not declare",
            self.op.kernel.name()
        );
        match self.overlay.and_then(|overlay| overlay.find(&range)) {
            Some(bytes) => bytes,
            None => self.memory.bytes(range),
        }
    }

    /// The bytes of `range` as values of `T`.
    pub fn slice<T: AnyBitPattern>(&self, range: Range<u64>) -> &'a [T] {
        bytemuck::cast_slice(self.bytes(range))
    }

    /// The write stamp of `range` ([`Memory::stamp`]), or none where the running blocks see other bytes than memory's.
    pub fn stamp(&self, range: &Range<u64>) -> Option<u64> {
        let covered = self.overlay.is_some_and(|overlay| overlay.find(range).is_some());
        (!covered).then(|| self.memory.stamp(range))
    }

    /// A loaded weight.
    pub fn weight(&self, id: WeightId) -> &'a SparseWeight {
        &self.weights[id.0 as usize]
    }
}

/// What a running block has read so far, slice by slice.
///
/// A range keeps its place within [`CUT_BYTES`], so values keep their alignment and a slice never tears one.
#[derive(Default)]
pub(crate) struct Overlay {
    words: Vec<u64>,
    used: u64,
    ranges: Vec<(Range<u64>, u64)>,
    /// How many of the ranges were read at once, and where the others begin.
    at_once: usize,
    sliced_from: u64,
}

/// Slices are cut at multiples of this many bytes, as the machine moves memory.
const CUT_BYTES: u64 = 128;

impl Overlay {
    pub(crate) fn clear(&mut self) {
        (self.used, self.at_once, self.sliced_from) = (0, 0, 0);
        self.ranges.clear();
    }

    /// Adds a range that is yet to be read.
    pub(crate) fn add(&mut self, range: Range<u64>) {
        match self.ranges[self.at_once..].last_mut() {
            Some((last, _)) if last.end == range.start => {
                self.used += range.end - range.start;
                last.end = range.end;
                self.make_room();
            }
            _ => self.add_apart(range),
        }
    }

    /// Adds a range and reads it at once, before and apart from all slices.
    pub(crate) fn add_read(&mut self, memory: &Memory, range: Range<u64>) {
        debug_assert_eq!(self.at_once, self.ranges.len(), "index ranges come before the others");
        self.add_apart(range.clone());
        self.at_once = self.ranges.len();
        let start = self.ranges[self.at_once - 1].1 as usize;
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut self.words);
        bytes[start..self.used as usize].copy_from_slice(memory.bytes(range));
        self.sliced_from = self.used;
    }

    fn add_apart(&mut self, range: Range<u64>) {
        let at = self.used.next_multiple_of(CUT_BYTES) + range.start % CUT_BYTES;
        self.used = at + range.end - range.start;
        self.ranges.push((range, at));
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
        let length = self.used - self.sliced_from;
        let cut = |slice: u64| match self.sliced_from + length * slice / slices {
            _ if slice == slices => self.used,
            at => (at / CUT_BYTES * CUT_BYTES).max(self.sliced_from),
        };
        let (from, to) = (cut(slice), cut(slice + 1));
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut self.words);
        for (range, at) in &self.ranges[self.at_once..] {
            let (start, end) = (from.max(*at), to.min(*at + range.end - range.start));
            if start < end {
                let source = range.start + start - at..range.start + end - at;
                bytes[start as usize..end as usize].copy_from_slice(memory.bytes(source.clone()));
                visit(source);
            }
        }
    }

    fn find(&self, range: &Range<u64>) -> Option<&[u8]> {
        let (held, at) = self.ranges.iter().find(|(held, _)| held.start <= range.start && range.end <= held.end)?;
        let start = (at + range.start - held.start) as usize;
        Some(&bytemuck::cast_slice(&self.words)[start..start + (range.end - range.start) as usize])
    }
}

/// Where a kernel puts its results; they reach memory when the virtual GPU commits them.
pub struct Writes<'a> {
    scratch: &'a mut Scratch,
    op: PhantomData<&'a Op>,
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
    pub fn new(_op: &'a Op, scratch: &'a mut Scratch) -> Self {
        scratch.used = 0;
        scratch.ranges.clear();
        Self { scratch, op: PhantomData }
    }

    /// The future bytes of `range`: all must be written, none may be read first.
    pub fn bytes(&mut self, range: Range<u64>) -> &mut [u8] {
        let at = self.scratch.used.next_multiple_of(8) + (range.start % 8) as usize;
        let end = at + (range.end - range.start) as usize;
        if self.scratch.words.len() * 8 < end {
            self.scratch.words.resize(end.div_ceil(8).next_power_of_two(), 0);
        }
        self.scratch.used = end;
        self.scratch.ranges.push((range, at));
        &mut bytemuck::cast_slice_mut(&mut self.scratch.words)[at..end]
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
    /// The collected writes, in the order in which they were asked for.
    pub fn iter(&self) -> impl Iterator<Item = (&Range<u64>, &[u8])> {
        let bytes: &[u8] = bytemuck::cast_slice(&self.words);
        self.ranges.iter().map(move |(range, at)| (range, &bytes[*at..*at + (range.end - range.start) as usize]))
    }
}
