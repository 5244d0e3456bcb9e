//! Reports: one trait, one writer a file, all fed by the same run events.

pub mod load;
pub mod position;
pub mod summary;
pub mod terminal;
