//! Reports: one writer a file, all fed by the same run events.

pub mod csv;
pub mod failure;
pub mod folder;
pub mod history;
mod hlog;
pub mod html;
pub mod junit;
pub mod load;
pub mod markdown;
pub mod measure;
pub mod parity;
pub mod plot;
pub mod position;
pub mod progress;
pub mod summary;
pub mod table;
pub mod tally;
pub mod terminal;
