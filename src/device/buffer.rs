//! Regions of device memory, and the guards that own it: handles, never pointers.

use std::{fmt, ops::Range, rc::Rc};

use super::{LifetimeId, Operand, StreamId, context::Device};

/// Strided rows of bytes: row `r` is `base + r * row_stride .. + len`.
///
/// Exact rows decide what is a hazard, so a column slice of a matrix is a region of its own and not the whole matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Region {
    /// Arena offset of the first byte of row 0.
    pub base: u64,
    /// Bytes from the start of one row to the start of the next; at least `len`.
    pub row_stride: u64,
    /// Bytes of one row.
    pub len: u64,
    /// Number of rows.
    pub rows: u64,
}

impl Region {
    /// One contiguous run of bytes.
    pub fn contiguous(base: u64, len: u64) -> Self {
        Self { base, row_stride: len, len, rows: 1 }
    }

    /// The bytes of row `row`.
    pub fn row(&self, row: u64) -> Range<u64> {
        debug_assert!(row < self.rows, "row {row} of {} rows", self.rows);
        let start = self.base + row * self.row_stride;
        start..start + self.len
    }

    /// The smallest range that holds every row.
    pub fn span(&self) -> Range<u64> {
        if self.rows == 0 || self.len == 0 {
            return self.base..self.base;
        }
        self.base..self.base + (self.rows - 1) * self.row_stride + self.len
    }

    /// True where the region has no byte.
    pub fn is_empty(&self) -> bool {
        self.rows == 0 || self.len == 0
    }

    /// True where `range` lies inside one row, or inside the span of a region without gaps.
    pub fn covers(&self, range: &Range<u64>) -> bool {
        let span = self.span();
        if range.start < span.start || range.end > span.end {
            return false;
        }
        self.rows <= 1 || self.row_stride == self.len || {
            let offset = (range.start - self.base) % self.row_stride;
            offset + (range.end - range.start) <= self.len
        }
    }

    /// Calls `visit` with every range of bytes that both regions hold, in ascending order.
    pub fn shared(&self, other: &Self, mut visit: impl FnMut(Range<u64>)) {
        if self.is_empty() || other.is_empty() {
            return;
        }
        let (mut mine, mut theirs) = (self.first_row_past(other.base), other.first_row_past(self.base));
        while mine < self.rows && theirs < other.rows {
            let (a, b) = (self.row(mine), other.row(theirs));
            let (start, end) = (a.start.max(b.start), a.end.min(b.end));
            if start < end {
                visit(start..end);
            }
            if a.end <= b.end { mine += 1 } else { theirs += 1 }
        }
    }

    /// True where the two regions have a byte in common.
    pub fn intersects(&self, other: &Self) -> bool {
        let (a, b) = (self.span(), other.span());
        if a.start >= b.end || b.start >= a.end {
            return false;
        }
        let mut found = false;
        self.shared(other, |_| found = true);
        found
    }

    fn first_row_past(&self, address: u64) -> u64 {
        if self.rows <= 1 || address < self.base + self.len {
            return 0;
        }
        ((address - self.base - self.len) / self.row_stride + 1).min(self.rows)
    }
}

/// An allocation. Clones share it; dropping the last one frees the bytes at once, in host order, or defers the free if
/// [`Tensor::record_stream`] named another user.
#[derive(Clone)]
#[must_use]
pub struct Tensor {
    guard: Rc<Guard>,
}

struct Guard {
    device: Device,
    lifetime: LifetimeId,
    address: u64,
    bytes: u64,
    stream: StreamId,
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.device.free(self.lifetime);
    }
}

impl Tensor {
    pub(super) fn new(device: Device, lifetime: LifetimeId, address: u64, bytes: u64, stream: StreamId) -> Self {
        Self { guard: Rc::new(Guard { device, lifetime, address, bytes, stream }) }
    }

    /// Identity of this allocation.
    pub fn lifetime(&self) -> LifetimeId {
        self.guard.lifetime
    }

    /// Arena offset of its first byte.
    pub fn address(&self) -> u64 {
        self.guard.address
    }

    /// Bytes that were asked for.
    pub fn bytes(&self) -> u64 {
        self.guard.bytes
    }

    /// The stream that owns the bytes: only its later allocations may be handed them again.
    pub fn stream(&self) -> StreamId {
        self.guard.stream
    }

    /// Names `stream` as another user: the free is deferred until what is enqueued there by then has run, or, inside a
    /// capture, to the capture's end.
    pub fn record_stream(&self, stream: StreamId) {
        self.guard.device.record_stream(self.guard.lifetime, stream);
    }

    /// `rows` strided rows of `len` bytes, the first at `offset`. Panics if they reach past the allocation.
    pub fn region(&self, row_stride: u64, len: u64, rows: u64, offset: u64) -> Region {
        let region = Region { base: self.guard.address + offset, row_stride, len, rows };
        assert!(len <= row_stride || rows <= 1, "rows of {len} bytes overlap at a stride of {row_stride}");
        let end = self.guard.address + self.guard.bytes;
        assert!(region.span().end <= end, "region {region:?} reaches past its tensor, which ends at {end}");
        region
    }

    /// The whole allocation as one contiguous region.
    pub fn whole(&self) -> Region {
        Region::contiguous(self.guard.address, self.guard.bytes)
    }

    /// An operand that touches every byte of `region`.
    pub fn operand(&self, region: Region) -> Operand {
        Operand { region, lifetime: self.guard.lifetime, indexed: false }
    }

    /// An operand that touches bytes of `region` which an index operand chooses at run time.
    pub fn indexed(&self, region: Region) -> Operand {
        Operand { region, lifetime: self.guard.lifetime, indexed: true }
    }
}

impl fmt::Debug for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Guard { lifetime, address, bytes, .. } = &*self.guard;
        write!(f, "Tensor({} at {address:#x}, {bytes} bytes)", lifetime.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shared_bytes_agree_with_a_byte_set() {
        let shapes: Vec<Region> = (0..400u64)
            .map(|i| {
                let len = i % 7;
                Region { base: i % 13, row_stride: len + i % 5, len, rows: i / 7 % 6 }
            })
            .collect();
        let bytes = |r: &Region| (0..r.rows).flat_map(|row| r.row(row)).collect::<std::collections::BTreeSet<u64>>();
        let mut meetings = 0;
        for a in &shapes {
            for b in shapes.iter().step_by(5) {
                let mut shared = std::collections::BTreeSet::new();
                a.shared(b, |range| shared.extend(range));
                let expected: std::collections::BTreeSet<u64> = bytes(a).intersection(&bytes(b)).copied().collect();
                assert_eq!(shared, expected, "{a:?} and {b:?}");
                assert_eq!(a.intersects(b), !expected.is_empty());
                meetings += usize::from(!expected.is_empty());
            }
        }
        assert!(meetings > 1000, "only {meetings} pairs met");
    }
}
