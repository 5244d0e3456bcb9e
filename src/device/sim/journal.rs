//! What writes replaced, so that a block can still be given what it read earlier.
//!
//! A block that runs beside a conflicting op reads in slices, each at its own time. Rather than copy every slice when it
//! is due, the bytes that a write replaces are kept, and a slice is worked out when its block commits: memory, less the
//! writes that came after the slice. Where nothing was written meanwhile, nothing is copied.

use std::ops::Range;

use super::{Memory, watch::Tags};

/// The writes of one launch to bytes that some sliced block may have read.
#[derive(Default)]
pub(crate) struct Journal {
    entries: Vec<Entry>,
    bytes: Vec<u8>,
    tags: Tags,
    saved: Vec<Saved>,
}

/// When and by whom: virtual time, op, block.
pub(crate) type Moment = (u64, u32, u32);

struct Entry {
    moment: Moment,
    range: Range<u64>,
    at: usize,
    saved: Range<usize>,
}

/// Tags that a write replaced: `len` of them from watched byte `index` on.
struct Saved {
    index: usize,
    at: usize,
    len: usize,
}

impl Journal {
    pub(crate) fn clear(&mut self) {
        self.entries.clear();
        self.bytes.clear();
        self.tags.clear();
        self.saved.clear();
    }

    /// How many writes there were.
    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    /// A write to `range` is about to replace `old`, and the tags of these watched bytes.
    pub(crate) fn record(
        &mut self,
        moment: Moment,
        range: Range<u64>,
        old: &[u8],
        tags: &Tags,
        watched: impl Iterator<Item = Range<usize>>,
    ) {
        let first = self.saved.len();
        for bytes in watched {
            self.saved.push(Saved { index: bytes.start, at: self.tags.len(), len: bytes.len() });
            self.tags.append(tags, bytes);
        }
        self.entries.push(Entry { moment, range, at: self.bytes.len(), saved: first..self.saved.len() });
        self.bytes.extend_from_slice(old);
    }

    /// How many of the writes came before `moment`; the first `known` did.
    pub(crate) fn before(&self, moment: Moment, known: usize) -> usize {
        known + self.entries[known..].partition_point(|entry| entry.moment < moment)
    }

    /// Fills `out` with the bytes of `range` as they were after the first `position` writes.
    pub(crate) fn as_of(&self, memory: &Memory, range: &Range<u64>, position: usize, out: &mut [u8]) {
        out.copy_from_slice(memory.bytes(range.clone()));
        for entry in self.entries[position..].iter().rev() {
            let (start, end) = (range.start.max(entry.range.start), range.end.min(entry.range.end));
            if start < end {
                let from = entry.at + (start - entry.range.start) as usize;
                let len = (end - start) as usize;
                let to = (start - range.start) as usize;
                out[to..to + len].copy_from_slice(&self.bytes[from..from + len]);
            }
        }
    }

    /// Turns `tags`, which belong to the watched bytes from `index` on, back to after the first `position` writes.
    pub(crate) fn rewind(&self, tags: &mut Tags, index: usize, position: usize) {
        let end = index + tags.len();
        for entry in self.entries[position..].iter().rev() {
            for saved in &self.saved[entry.saved.clone()] {
                let (first, last) = (index.max(saved.index), end.min(saved.index + saved.len));
                if first < last {
                    let from = saved.at + first - saved.index;
                    tags.copy(first - index, &self.tags, from..from + last - first);
                }
            }
        }
    }

    /// The writes of `op` after the first `position` ones that meet `range`: where, and the count of writes up to each.
    pub(crate) fn writes_of(
        &self,
        op: u32,
        range: Range<u64>,
        position: usize,
    ) -> impl Iterator<Item = (Range<u64>, usize)> {
        self.entries.iter().enumerate().skip(position).filter(move |(_, entry)| entry.moment.1 == op).filter_map(
            move |(at, entry)| {
                let shared = range.start.max(entry.range.start)..range.end.min(entry.range.end);
                (!shared.is_empty()).then_some((shared, at + 1))
            },
        )
    }
}
