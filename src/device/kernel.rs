//! Every kernel with its scalars, operand order, grid and access sets.

/// A kernel and its scalars.
#[derive(Debug, Clone, PartialEq)]
pub enum Kernel {
    /// Copies its read region to its write region, row by row.
    Copy,
}

impl Kernel {
    /// The kernel's name in reports and in the cost model.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Copy => "copy",
        }
    }
}
