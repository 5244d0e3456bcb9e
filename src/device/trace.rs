//! What a capture recorded: ops, edges, lifetimes.

use std::{
    borrow::Cow,
    collections::{BTreeMap, BTreeSet},
};

use super::{EventId, LifetimeId, Op, PoolId, StreamId};
use crate::error::{Error, Result};

/// One allocation as a capture saw it. Positions count the ops captured before the event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lifetime {
    /// Its identity.
    pub id: LifetimeId,
    /// What the engine calls it.
    pub name: Cow<'static, str>,
    /// Arena offset.
    pub address: u64,
    /// Bytes asked for.
    pub bytes: u64,
    /// The stream that was current at allocation.
    pub stream: StreamId,
    /// Position of the allocation; none: before the capture.
    pub allocated_at: Option<u32>,
    /// Position at which the last reference dropped; none: not during the capture.
    pub freed_at: Option<u32>,
    /// Decoder layer that was current at allocation.
    pub layer: Option<u8>,
    /// Other users named by `record_stream`.
    pub recorded: Vec<StreamId>,
}

/// A captured graph: what three readers consume.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct CapturedGraph {
    /// What the engine calls it.
    pub name: String,
    /// Ops in host order with their streams.
    pub ops: Vec<(Op, StreamId)>,
    /// Direct edges `(earlier, later)`: stream order and event waits; sorted, without duplicates.
    pub edges: Vec<(u32, u32)>,
    /// Every allocation that was made or touched during the capture, by id.
    pub lifetimes: Vec<Lifetime>,
    /// Stream names by [`StreamId`].
    pub streams: Vec<Cow<'static, str>>,
}

impl CapturedGraph {
    /// The lifetime with this id.
    pub fn lifetime(&self, id: LifetimeId) -> Option<&Lifetime> {
        self.lifetimes.binary_search_by_key(&id, |lifetime| lifetime.id).ok().map(|at| &self.lifetimes[at])
    }
}

/// Records a capture: who depends on whom, as a capturing stream sees it.
pub(super) struct Recorder {
    graph: CapturedGraph,
    origin: StreamId,
    pool: PoolId,
    /// Events below this were recorded before the capture.
    first_event: u64,
    /// For each stream that takes part, the ops that its next op depends on.
    frontiers: BTreeMap<StreamId, Vec<u32>>,
    events: BTreeMap<EventId, Vec<u32>>,
}

impl Recorder {
    pub(super) fn new(name: String, origin: StreamId, pool: PoolId, first_event: u64) -> Self {
        Self {
            graph: CapturedGraph { name, ..CapturedGraph::default() },
            origin,
            pool,
            first_event,
            frontiers: BTreeMap::from([(origin, Vec::new())]),
            events: BTreeMap::new(),
        }
    }

    pub(super) fn name(&self) -> &str {
        &self.graph.name
    }

    pub(super) fn origin(&self) -> StreamId {
        self.origin
    }

    pub(super) fn pool(&self) -> PoolId {
        self.pool
    }

    /// Ops captured so far.
    pub(super) fn position(&self) -> u32 {
        self.graph.ops.len() as u32
    }

    pub(super) fn enqueue(&mut self, stream: StreamId, op: Op) -> Result<()> {
        let position = self.position();
        let frontier = self.frontier(stream)?;
        let dependencies = std::mem::replace(frontier, vec![position]);
        self.graph.edges.extend(dependencies.into_iter().map(|earlier| (earlier, position)));
        self.graph.ops.push((op, stream));
        Ok(())
    }

    pub(super) fn record(&mut self, stream: StreamId, event: EventId) -> Result<()> {
        let frontier = self.frontier(stream)?.clone();
        self.events.insert(event, frontier);
        Ok(())
    }

    /// Joins `stream` to the capture, as waiting for a captured event does.
    pub(super) fn wait(&mut self, stream: StreamId, event: EventId) -> Result<()> {
        let Some(recorded) = self.events.get(&event) else {
            let when = if event.0 < self.first_event { "before it" } else { "nowhere" };
            return Err(Error::usage(format!(
                "the capture of `{}` waits for event {}, which was recorded {when}",
                self.graph.name, event.0
            )));
        };
        let frontier = self.frontiers.entry(stream).or_default();
        frontier.extend(recorded);
        frontier.sort_unstable();
        frontier.dedup();
        Ok(())
    }

    /// The allocations that captured ops name.
    pub(super) fn referenced(&self) -> BTreeSet<LifetimeId> {
        let operands = self.graph.ops.iter().flat_map(|(op, _)| op.reads.iter().chain(&op.writes));
        operands.map(|operand| operand.lifetime).collect()
    }

    pub(super) fn finish(mut self, lifetimes: Vec<Lifetime>, streams: Vec<Cow<'static, str>>) -> Result<CapturedGraph> {
        self.graph.edges.sort_unstable();
        self.graph.edges.dedup();
        (self.graph.lifetimes, self.graph.streams) = (lifetimes, streams);
        match self.first_unjoined() {
            Some(op) => {
                let (op, stream) = &self.graph.ops[op];
                let (name, kernel, stream) =
                    (&self.graph.name, op.kernel.name(), &self.graph.streams[stream.0 as usize]);
                Err(Error::usage(format!(
                    "the capture of `{name}` ended before stream `{stream}` joined: `{kernel}` is left"
                )))
            }
            None => Ok(self.graph),
        }
    }

    /// The last op from which no path leads to the origin stream's end.
    fn first_unjoined(&self) -> Option<usize> {
        let mut successors = vec![Vec::new(); self.graph.ops.len()];
        for &(earlier, later) in &self.graph.edges {
            successors[earlier as usize].push(later as usize);
        }
        let ends = &self.frontiers[&self.origin];
        let mut joined = vec![false; successors.len()];
        for op in (0..successors.len()).rev() {
            joined[op] = ends.contains(&(op as u32)) || successors[op].iter().any(|&later| joined[later]);
        }
        joined.iter().rposition(|joined| !joined)
    }

    fn frontier(&mut self, stream: StreamId) -> Result<&mut Vec<u32>> {
        let name = &self.graph.name;
        self.frontiers.get_mut(&stream).ok_or_else(|| {
            Error::usage(format!("stream {} takes no part in the capture of `{name}`", stream.0))
                .hint("make it wait for an event of the capture first")
        })
    }
}
