//! What a scenario file means: sessions, rounds, dictated calls.

mod arrival;
mod span;

pub use arrival::Arrival;
pub use span::Span;
