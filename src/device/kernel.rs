//! Every kernel with its scalars, operand order, grid and access sets.

/// A kernel and its scalars.
#[derive(Debug, Clone, PartialEq)]
pub enum Kernel {
    /// Copies its read region to its write region, row by row.
    Copy,
}
