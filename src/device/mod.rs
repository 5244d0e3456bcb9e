//! The device layer: one contract for every backend.
//!
//! The engine enqueues [`Op`]s on streams, records and waits for events, allocates and frees tensors, captures and
//! launches graphs; nothing else. An op names its kernel, its scalars and the exact byte regions it reads and writes.
//! Three readers consume the same record: the virtual GPU runs it, CUDA launches it, the hazard analyser checks it.
//! Addresses are offsets into one arena; no pointer leaves the device layer, and the device layer knows no models.

pub mod buffer;
pub mod kernel;
pub mod op;
pub mod pool;
pub mod sim;
pub mod trace;

pub use buffer::Region;
pub use op::{Block, Op, Operand};
