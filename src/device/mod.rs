//! The device layer: one contract for every backend.
//!
//! The engine enqueues [`Op`]s on streams, records and waits for events, allocates and frees tensors, captures and
//! launches graphs; nothing else. An op names its kernel, its scalars and the exact byte regions it reads and writes.
//! Three readers consume the same record: the virtual GPU runs it, CUDA launches it, the hazard analyser checks it.
//! Addresses are offsets into one arena; no pointer leaves the device layer, and the device layer knows no models.
//!
//! [`Device`] is the host's side: allocator, capture recorder and a [`Backend`]. It lives on one thread. A [`Tensor`] is
//! a reference-counted guard; when its last clone drops, its bytes are free **at once, in host order**, whatever the
//! streams still have to do, unless [`Tensor::record_stream`] named another user. That is the caching allocator's
//! contract in PyTorch, and the root of the lifetime mistakes that this product hunts.

pub mod buffer;
pub mod context;
pub mod cuda;
pub mod kernel;
pub mod op;
pub mod pool;
pub mod sim;
pub mod trace;
pub mod weight;

pub use buffer::{Region, Tensor};
pub use context::{Device, Graph};
pub use op::{Block, LifetimeId, Op, Operand};
pub use trace::{CapturedGraph, Lifetime};
pub use weight::{SparseWeight, WeightId};

use std::time::Duration;

use serde::Serialize;

use crate::error::Result;

/// A stream: ops on it run in the order in which they were enqueued.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StreamId(pub u32);

/// One recording of an event. Outside capture it may be waited for until the next [`Device::synchronize`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct EventId(pub u64);

/// A memory pool: the default one, or one that graphs share.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PoolId(pub u32);

impl PoolId {
    /// The pool of everything allocated outside capture.
    pub const DEFAULT: Self = Self(0);
}

/// A captured graph as the backend knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct GraphId(pub u32);

/// What a device calls itself.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Identity {
    /// `sim` or `cuda`, as `TOOLSTORM_DEVICE` takes them; nothing where no device is behind it.
    pub backend: &'static str,
    /// The device's name.
    pub name: String,
}

/// What runs the ops: the virtual GPU or CUDA.
///
/// Streams, events, pools and capture state are [`Device`]'s business; it calls a backend only in a valid order. While a
/// capture is under way the backend sees the same `enqueue`, `record` and `wait` calls (CUDA captures them natively; the
/// virtual GPU ignores them and takes the recorded graph at the end).
pub trait Backend {
    /// What the device calls itself.
    fn identity(&self) -> Identity {
        Identity::default()
    }

    /// Makes the arena at least `bytes` long. Never called during capture.
    fn reserve(&mut self, bytes: u64) -> Result<()>;

    /// Takes an immutable weight.
    fn load_weight(&mut self, id: WeightId, weight: &SparseWeight) -> Result<()>;

    /// Makes a stream; ids count up from 0.
    fn create_stream(&mut self, stream: StreamId) -> Result<()>;

    /// Appends an op to a stream.
    fn enqueue(&mut self, stream: StreamId, op: &Op) -> Result<()>;

    /// Records an event on a stream.
    fn record(&mut self, stream: StreamId, event: EventId) -> Result<()>;

    /// Makes a stream wait for an event.
    fn wait(&mut self, stream: StreamId, event: EventId) -> Result<()>;

    /// True once the event has completed; never blocks.
    fn query(&mut self, event: EventId) -> Result<bool>;

    /// Starts a capture whose origin is `stream`.
    fn begin_capture(&mut self, stream: StreamId) -> Result<()>;

    /// Ends the capture; `graph` is what the device recorded meanwhile.
    fn end_capture(&mut self, id: GraphId, graph: &CapturedGraph) -> Result<()>;

    /// Launches a graph on a stream.
    fn launch(&mut self, graph: GraphId, stream: StreamId) -> Result<()>;

    /// Runs everything enqueued to its end.
    fn synchronize(&mut self) -> Result<()>;

    /// Runs one op of a probe to its end; the device is idle. What it costs is charged, unless the backend can run it
    /// outside of its time.
    fn probe(&mut self, stream: StreamId, op: &Op) -> Result<()> {
        self.enqueue(stream, op)?;
        self.synchronize()
    }

    /// Copies host bytes to the arena; the device is idle.
    fn write(&mut self, address: u64, bytes: &[u8]) -> Result<()>;

    /// Copies arena bytes to the host; the device is idle.
    fn read(&mut self, address: u64, bytes: &mut [u8]) -> Result<()>;

    /// Time on the device's clock and overlap so far; zero where the backend cannot tell.
    fn stats(&self) -> sim::Stats {
        sim::Stats::default()
    }

    /// Time that a real device was at work, from the first launch after a synchronisation to the last one's end, summed.
    /// None where the clock is virtual.
    fn busy(&self) -> Option<Duration> {
        None
    }

    /// What replays the last launch, in one line of text.
    fn replay_token(&self) -> Option<String> {
        None
    }

    /// Start and end of each op of the last launch, virtual ns, in host order; empty without a virtual clock.
    fn timeline(&self) -> Vec<(u64, u64)> {
        Vec::new()
    }

    /// Whether races are noticed and logged; only the virtual GPU can know them.
    fn logs_races(&self) -> bool {
        false
    }

    /// Takes the race hits logged since the last call; empty without a log.
    fn drain_race_hits(&mut self) -> Vec<sim::RaceHit> {
        Vec::new()
    }
}
