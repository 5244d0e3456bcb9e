//! The cost model: how long a block holds its slot.
