//! Regions of device memory: strided rows of bytes in the arena, handles and never pointers.

use std::ops::Range;

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
}
