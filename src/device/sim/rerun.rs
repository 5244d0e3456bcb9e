//! A checker: two virtual GPUs do the same work, and any difference is an error.

use super::{RaceHit, Sim, Stats};
use crate::{
    device::{Backend, CapturedGraph, EventId, GraphId, Identity, Op, SparseWeight, StreamId, WeightId},
    error::{Error, Result},
};

/// Runs everything twice and compares: interleavings at each synchronisation, bytes at each read.
pub struct Rerun {
    first: Sim,
    second: Sim,
}

impl Rerun {
    /// Both must be set up alike.
    pub fn new(first: Sim, second: Sim) -> Self {
        Self { first, second }
    }

    fn both<T>(&mut self, mut call: impl FnMut(&mut Sim) -> Result<T>) -> Result<T> {
        call(&mut self.second)?;
        call(&mut self.first)
    }
}

fn differs(what: &str, sim: &Sim) -> Error {
    let token = sim.replay_token().unwrap_or_default();
    Error::usage(format!("a launch ran twice and gave two different {what}: {token}"))
        .hint("something outside the seed decides an order or a value")
}

impl Backend for Rerun {
    fn identity(&self) -> Identity {
        self.first.identity()
    }

    fn reserve(&mut self, bytes: u64) -> Result<()> {
        self.both(|sim| sim.reserve(bytes))
    }

    fn load_weight(&mut self, id: WeightId, weight: &SparseWeight) -> Result<()> {
        self.both(|sim| sim.load_weight(id, weight))
    }

    fn create_stream(&mut self, stream: StreamId) -> Result<()> {
        self.both(|sim| sim.create_stream(stream))
    }

    fn enqueue(&mut self, stream: StreamId, op: &Op) -> Result<()> {
        self.both(|sim| sim.enqueue(stream, op))
    }

    fn record(&mut self, stream: StreamId, event: EventId) -> Result<()> {
        self.both(|sim| sim.record(stream, event))
    }

    fn wait(&mut self, stream: StreamId, event: EventId) -> Result<()> {
        self.both(|sim| sim.wait(stream, event))
    }

    fn query(&mut self, event: EventId) -> Result<bool> {
        self.both(|sim| sim.query(event))
    }

    fn begin_capture(&mut self, stream: StreamId) -> Result<()> {
        self.both(|sim| sim.begin_capture(stream))
    }

    fn end_capture(&mut self, id: GraphId, graph: &CapturedGraph) -> Result<()> {
        self.both(|sim| sim.end_capture(id, graph))
    }

    fn launch(&mut self, graph: GraphId, stream: StreamId) -> Result<()> {
        self.both(|sim| sim.launch(graph, stream))
    }

    fn synchronize(&mut self) -> Result<()> {
        self.both(Backend::synchronize)?;
        let same = self.first.replay_token() == self.second.replay_token();
        if same { Ok(()) } else { Err(differs("interleavings", &self.first)) }
    }

    fn probe(&mut self, stream: StreamId, op: &Op) -> Result<()> {
        self.both(|sim| sim.probe(stream, op))
    }

    fn write(&mut self, address: u64, bytes: &[u8]) -> Result<()> {
        self.both(|sim| sim.write(address, bytes))
    }

    fn read(&mut self, address: u64, bytes: &mut [u8]) -> Result<()> {
        self.second.read(address, bytes)?;
        let other = bytes.to_vec();
        self.first.read(address, bytes)?;
        if *bytes == other[..] { Ok(()) } else { Err(differs("results", &self.first)) }
    }

    fn stats(&self) -> Stats {
        self.first.stats()
    }

    fn timeline(&self) -> Vec<(u64, u64)> {
        self.first.timeline()
    }

    fn replay_token(&self) -> Option<String> {
        self.first.replay_token()
    }

    fn logs_races(&self) -> bool {
        self.first.logs_races()
    }

    fn drain_race_hits(&mut self) -> Vec<RaceHit> {
        self.second.drain_race_hits();
        self.first.drain_race_hits()
    }
}
