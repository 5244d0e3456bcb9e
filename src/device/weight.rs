//! Immutable weights: sparse rows, loaded once, named by kernels.

/// A loaded weight. Weights never change, so they are no operands and no hazard.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WeightId(pub u32);

/// A matrix in compressed sparse rows; row = output, column = input. Every value must be exact in bf16.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct SparseWeight {
    /// Outputs.
    pub rows: u32,
    /// Inputs.
    pub columns: u32,
    /// For each row, where it starts in `column` and `value`; one more entry ends the last row.
    pub row_start: Vec<u32>,
    /// Input of each stored value, ascending within a row.
    pub column: Vec<u32>,
    /// The stored values.
    pub value: Vec<f32>,
}

impl SparseWeight {
    /// Builds from `(row, column, value)` entries in any order; of equal places the later one wins.
    pub fn from_entries(rows: u32, columns: u32, entries: &[(u32, u32, f32)]) -> Self {
        let mut places = std::collections::BTreeMap::new();
        for &(row, column, value) in entries {
            assert!(row < rows && column < columns, "entry ({row}, {column}) lies outside {rows} x {columns}");
            places.insert((row, column), value);
        }
        let mut weight = Self { rows, columns, row_start: vec![0], ..Self::default() };
        let mut entries = places.into_iter().peekable();
        for row in 0..rows {
            while let Some(((_, column), value)) = entries.next_if(|((r, _), _)| *r == row) {
                weight.column.push(column);
                weight.value.push(value);
            }
            weight.row_start.push(weight.column.len() as u32);
        }
        weight
    }

    /// The stored inputs and values of one output row.
    pub fn row(&self, row: u32) -> (&[u32], &[f32]) {
        let range = self.row_start[row as usize] as usize..self.row_start[row as usize + 1] as usize;
        (&self.column[range.clone()], &self.value[range])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_become_rows() {
        let weight = SparseWeight::from_entries(3, 4, &[(2, 1, 5.0), (0, 3, 1.0), (0, 0, 2.0), (2, 1, 7.0)]);
        assert_eq!(weight.row(0), (&[0, 3][..], &[2.0, 1.0][..]));
        assert_eq!(weight.row(1), (&[][..], &[][..]));
        assert_eq!(weight.row(2), (&[1][..], &[7.0][..]));
    }
}
