//! The host's side of a device: streams, events, allocation, capture, launch.

use std::{
    borrow::Cow,
    cell::{Cell, RefCell},
    collections::BTreeMap,
    rc::Rc,
    time::Duration,
};

use super::{
    Backend, CapturedGraph, EventId, GraphId, Identity, Lifetime, LifetimeId, Op, PoolId, SparseWeight, StreamId,
    Tensor, WeightId,
    pool::{Allocator, Growth},
    sim::{RaceHit, Stats},
    trace::Recorder,
};
use crate::error::{Error, Result};

/// The arena grows by at least this much, outside capture.
const GROWTH_BYTES: u64 = 64 << 20;

/// A handle to one device. Clones are the same device; it lives on one thread.
#[derive(Clone)]
pub struct Device {
    inner: Rc<Inner>,
}

/// A captured graph that can be launched.
#[derive(Clone)]
#[must_use]
pub struct Graph {
    id: GraphId,
    stream: StreamId,
    trace: Rc<CapturedGraph>,
}

impl Graph {
    /// What was captured.
    pub fn trace(&self) -> &Rc<CapturedGraph> {
        &self.trace
    }
}

struct Inner {
    backend: RefCell<Box<dyn Backend>>,
    host: RefCell<Host>,
    layer: Cell<Option<u8>>,
}

#[derive(Default)]
struct Host {
    allocator: Allocator,
    sealed: bool,
    capture: Option<Recorder>,
    streams: Vec<Cow<'static, str>>,
    events: u64,
    graphs: u32,
    weights: u32,
    lifetimes: BTreeMap<LifetimeId, Tracked>,
    next_lifetime: u32,
    /// Lifetimes that ended since the last synchronisation.
    ended: Vec<LifetimeId>,
    /// Freed blocks that another stream may still use, with the events that end its use.
    awaiting: Vec<Awaiting>,
    /// Blocks whose free waits for the capture's end.
    deferred: Vec<(PoolId, u64)>,
    hits: Vec<RaceHit>,
    /// The first error of a call that cannot return one; surfaces at the next synchronisation.
    late: Option<Error>,
}

struct Tracked {
    lifetime: Lifetime,
    pool: PoolId,
    /// Allocated or freed during the capture that is under way.
    touched: bool,
    /// Seen by a finished capture, whose ops may name it for ever.
    captured: bool,
}

struct Awaiting {
    pool: PoolId,
    address: u64,
    events: Vec<EventId>,
}

impl Device {
    /// A device on `backend`.
    pub fn new(backend: Box<dyn Backend>) -> Self {
        let inner = Inner { backend: RefCell::new(backend), host: RefCell::default(), layer: Cell::new(None) };
        Self { inner: Rc::new(inner) }
    }

    /// What the device calls itself.
    pub fn identity(&self) -> Identity {
        self.inner.backend.borrow().identity()
    }

    /// Time that a real device was at work so far; none where the clock is virtual.
    pub fn busy(&self) -> Option<Duration> {
        self.inner.backend.borrow().busy()
    }

    /// Whether the backend notices and logs races.
    pub fn logs_races(&self) -> bool {
        self.inner.backend.borrow().logs_races()
    }

    /// Grows the arena to `bytes`, so that later captures find room.
    pub fn reserve(&self, bytes: u64) -> Result<()> {
        let host = &mut *self.inner.host.borrow_mut();
        if host.capture.is_some() || host.sealed {
            return Err(host.growth_refused(bytes));
        }
        self.inner.backend.borrow_mut().reserve(bytes)?;
        host.allocator.reserve(bytes);
        Ok(())
    }

    /// Ends set-up: from now on the arena may not grow and nothing may be captured.
    pub fn seal(&self) {
        self.inner.host.borrow_mut().sealed = true;
    }

    /// Loads an immutable weight.
    pub fn load_weight(&self, weight: &SparseWeight) -> Result<WeightId> {
        let host = &mut *self.inner.host.borrow_mut();
        let id = WeightId(host.weights);
        self.inner.backend.borrow_mut().load_weight(id, weight)?;
        host.weights += 1;
        Ok(id)
    }

    /// A new stream.
    pub fn stream(&self, name: impl Into<Cow<'static, str>>) -> Result<StreamId> {
        let host = &mut *self.inner.host.borrow_mut();
        let id = StreamId(host.streams.len() as u32);
        self.inner.backend.borrow_mut().create_stream(id)?;
        host.streams.push(name.into());
        Ok(id)
    }

    /// The decoder layer that the allocations to come are for; reports only.
    pub fn set_layer(&self, layer: Option<u8>) {
        self.inner.layer.set(layer);
    }

    /// Records an event: what is enqueued on `stream` by now.
    pub fn record(&self, stream: StreamId) -> Result<EventId> {
        let host = &mut *self.inner.host.borrow_mut();
        host.record(stream, &mut **self.inner.backend.borrow_mut())
    }

    /// Makes what is enqueued on `stream` from now on wait for `event`.
    pub fn wait(&self, stream: StreamId, event: EventId) -> Result<()> {
        let host = &mut *self.inner.host.borrow_mut();
        if let Some(capture) = &mut host.capture {
            capture.wait(stream, event)?;
        }
        self.inner.backend.borrow_mut().wait(stream, event)
    }

    /// Makes what is enqueued on `stream` from now on wait for what is enqueued on `other` by now.
    pub fn wait_stream(&self, stream: StreamId, other: StreamId) -> Result<()> {
        if stream == other {
            return Ok(());
        }
        let event = self.record(other)?;
        self.wait(stream, event)
    }

    /// Enqueues an op.
    pub fn enqueue(&self, stream: StreamId, op: Op) -> Result<()> {
        let host = &mut *self.inner.host.borrow_mut();
        self.inner.backend.borrow_mut().enqueue(stream, &op)?;
        match &mut host.capture {
            Some(capture) => capture.enqueue(stream, op),
            None => Ok(()),
        }
    }

    /// Allocates `bytes`; `stream`, the one that is current, owns them. Inside a capture they come from its pool.
    pub fn alloc(&self, stream: StreamId, bytes: u64, name: impl Into<Cow<'static, str>>) -> Result<Tensor> {
        let host = &mut *self.inner.host.borrow_mut();
        let backend = &mut **self.inner.backend.borrow_mut();
        host.release_awaiting(backend)?;
        let pool = host.capture.as_ref().map_or(PoolId::DEFAULT, Recorder::pool);
        let address = match host.allocator.alloc(pool, stream, bytes) {
            Ok(address) => address,
            Err(Growth { wanted }) => {
                host.grow(backend, wanted)?;
                host.allocator.alloc(pool, stream, bytes).map_err(|growth| host.growth_refused(growth.wanted))?
            }
        };
        let id = host.track(pool, address, stream, bytes, name.into(), self.inner.layer.get());
        Ok(Tensor::new(self.clone(), id, address, bytes, stream))
    }

    /// A private pool for graphs to share.
    pub fn graph_pool(&self) -> PoolId {
        self.inner.host.borrow_mut().allocator.create_pool()
    }

    /// Starts a capture with `stream` as its origin; allocations come from `pool` until it ends.
    pub fn begin_capture(&self, name: impl Into<String>, stream: StreamId, pool: PoolId) -> Result<()> {
        self.synchronize()?;
        let host = &mut *self.inner.host.borrow_mut();
        if host.sealed {
            return Err(Error::usage("a capture was begun on a sealed device"));
        }
        self.inner.backend.borrow_mut().begin_capture(stream)?;
        host.capture = Some(Recorder::new(name.into(), stream, pool, host.events));
        Ok(())
    }

    /// Ends the capture. Deferred frees take effect now.
    pub fn end_capture(&self) -> Result<Graph> {
        let host = &mut *self.inner.host.borrow_mut();
        let capture = host.capture.take().ok_or_else(|| Error::usage("no capture is under way"))?;
        for (pool, address) in std::mem::take(&mut host.deferred) {
            host.allocator.free(pool, address);
        }
        let stream = capture.origin();
        let referenced = capture.referenced();
        let lifetimes = (host.lifetimes.values())
            .filter(|tracked| tracked.touched || referenced.contains(&tracked.lifetime.id))
            .map(|tracked| tracked.lifetime.clone())
            .collect();
        let graph = capture.finish(lifetimes, host.streams.clone())?;
        host.end_tracking();
        host.add_graph(graph, stream, &mut **self.inner.backend.borrow_mut())
    }

    /// Makes a launchable graph of a trace: one that was changed, or read from elsewhere.
    pub fn load_graph(&self, trace: CapturedGraph, stream: StreamId) -> Result<Graph> {
        let host = &mut *self.inner.host.borrow_mut();
        host.add_graph(trace, stream, &mut **self.inner.backend.borrow_mut())
    }

    /// Launches a graph on its capture's origin stream.
    pub fn launch(&self, graph: &Graph) -> Result<()> {
        if self.inner.host.borrow().capture.is_some() {
            return Err(Error::usage("a graph was launched during a capture"));
        }
        self.inner.backend.borrow_mut().launch(graph.id, graph.stream)
    }

    /// Runs everything enqueued to its end.
    pub fn synchronize(&self) -> Result<()> {
        let host = &mut *self.inner.host.borrow_mut();
        host.refuse_in_capture("a synchronisation")?;
        let backend = &mut **self.inner.backend.borrow_mut();
        backend.synchronize()?;
        host.settle(backend);
        host.late.take().map_or(Ok(()), Err)
    }

    /// Runs an op of a probe to its end, once everything enqueued has run. On the virtual GPU it takes no time, draws
    /// nothing and counts nowhere, so that a probe which only reads changes no result; a real device runs it like any other.
    pub fn probe(&self, stream: StreamId, op: &Op) -> Result<()> {
        self.synchronize()?;
        self.inner.backend.borrow_mut().probe(stream, op)
    }

    /// Copies `bytes` to the arena, once everything enqueued has run.
    pub fn copy_in(&self, address: u64, bytes: &[u8]) -> Result<()> {
        self.inner.host.borrow().refuse_in_capture("a copy from the host")?;
        self.synchronize()?;
        self.inner.backend.borrow_mut().write(address, bytes)
    }

    /// Fills `bytes` from the arena, once everything enqueued has run.
    pub fn copy_out(&self, address: u64, bytes: &mut [u8]) -> Result<()> {
        self.inner.host.borrow().refuse_in_capture("a copy to the host")?;
        self.synchronize()?;
        self.inner.backend.borrow_mut().read(address, bytes)
    }

    /// Time on the device's clock and overlap so far.
    pub fn stats(&self) -> Stats {
        self.inner.backend.borrow().stats()
    }

    /// What replays the last launch, in one line of text.
    pub fn replay_token(&self) -> Option<String> {
        self.inner.backend.borrow().replay_token()
    }

    /// Start and end of each op of the last launch, virtual ns, in host order; empty without a virtual clock.
    pub fn timeline(&self) -> Vec<(u64, u64)> {
        self.inner.backend.borrow().timeline()
    }

    /// Takes the race hits logged since the last call.
    pub fn drain_race_hits(&self) -> Vec<RaceHit> {
        std::mem::take(&mut self.inner.host.borrow_mut().hits)
    }

    /// Bytes of the arena that segments take.
    pub fn carved(&self) -> u64 {
        self.inner.host.borrow().allocator.carved()
    }

    pub(super) fn free(&self, id: LifetimeId) {
        let host = &mut *self.inner.host.borrow_mut();
        host.free(id, &mut **self.inner.backend.borrow_mut());
    }

    pub(super) fn record_stream(&self, id: LifetimeId, stream: StreamId) {
        let host = &mut *self.inner.host.borrow_mut();
        let Some(tracked) = host.lifetimes.get_mut(&id) else { return };
        let lifetime = &mut tracked.lifetime;
        if stream != lifetime.stream && !lifetime.recorded.contains(&stream) {
            lifetime.recorded.push(stream);
        }
    }
}

impl Host {
    fn record(&mut self, stream: StreamId, backend: &mut dyn Backend) -> Result<EventId> {
        let event = EventId(self.events);
        if let Some(capture) = &mut self.capture {
            capture.record(stream, event)?;
        }
        backend.record(stream, event)?;
        self.events += 1;
        Ok(event)
    }

    fn track(
        &mut self,
        pool: PoolId,
        address: u64,
        stream: StreamId,
        bytes: u64,
        name: Cow<'static, str>,
        layer: Option<u8>,
    ) -> LifetimeId {
        let id = LifetimeId(self.next_lifetime);
        self.next_lifetime += 1;
        let allocated_at = self.capture.as_ref().map(Recorder::position);
        let lifetime =
            Lifetime { id, name, address, bytes, stream, allocated_at, freed_at: None, layer, recorded: Vec::new() };
        self.lifetimes.insert(id, Tracked { lifetime, pool, touched: allocated_at.is_some(), captured: false });
        id
    }

    fn free(&mut self, id: LifetimeId, backend: &mut dyn Backend) {
        let Some(tracked) = self.lifetimes.get_mut(&id) else { return };
        self.ended.push(id);
        let (pool, address) = (tracked.pool, tracked.lifetime.address);
        let users = tracked.lifetime.recorded.clone();
        if let Some(capture) = &self.capture {
            tracked.lifetime.freed_at = Some(capture.position());
            tracked.touched = true;
            if users.is_empty() {
                self.allocator.free(pool, address);
            } else {
                self.deferred.push((pool, address));
            }
            return;
        }
        let mut events = Vec::new();
        for user in users {
            match self.record(user, backend) {
                Ok(event) => events.push(event),
                Err(error) => self.late = Some(error),
            }
        }
        if events.is_empty() {
            self.allocator.free(pool, address);
        } else {
            self.awaiting.push(Awaiting { pool, address, events });
        }
    }

    fn release_awaiting(&mut self, backend: &mut dyn Backend) -> Result<()> {
        if self.capture.is_some() || self.awaiting.is_empty() {
            return Ok(());
        }
        for block in std::mem::take(&mut self.awaiting) {
            let mut complete = true;
            for &event in &block.events {
                complete &= backend.query(event)?;
            }
            if complete {
                self.allocator.free(block.pool, block.address);
            } else {
                self.awaiting.push(block);
            }
        }
        Ok(())
    }

    fn grow(&mut self, backend: &mut dyn Backend, wanted: u64) -> Result<()> {
        if self.capture.is_some() || self.sealed {
            return Err(self.growth_refused(wanted));
        }
        let bytes = wanted.next_multiple_of(GROWTH_BYTES);
        backend.reserve(bytes)?;
        self.allocator.reserve(bytes);
        Ok(())
    }

    fn growth_refused(&self, wanted: u64) -> Error {
        let when = match &self.capture {
            Some(capture) => format!("during the capture of `{}`", capture.name()),
            None => "of a sealed device".to_owned(),
        };
        let reserved = self.allocator.reserved();
        Error::usage(format!(
            "the device arena would have to grow {when}: {wanted} bytes are wanted, {reserved} reserved"
        ))
        .hint("reserve a larger arena before the first capture")
    }

    fn refuse_in_capture(&self, what: &str) -> Result<()> {
        match &self.capture {
            Some(capture) => {
                Err(Error::usage(format!("{what} was asked for during the capture of `{}`", capture.name())))
            }
            None => Ok(()),
        }
    }

    fn end_tracking(&mut self) {
        for tracked in self.lifetimes.values_mut() {
            // A later capture sees what this one left alive as allocated before it.
            tracked.lifetime.allocated_at = None;
            tracked.captured |= std::mem::take(&mut tracked.touched);
        }
    }

    fn add_graph(&mut self, trace: CapturedGraph, stream: StreamId, backend: &mut dyn Backend) -> Result<Graph> {
        let id = GraphId(self.graphs);
        backend.end_capture(id, &trace)?;
        self.graphs += 1;
        Ok(Graph { id, stream, trace: Rc::new(trace) })
    }

    /// After everything has run: names the race hits, frees what waited for events, forgets dead lifetimes.
    fn settle(&mut self, backend: &mut dyn Backend) {
        for mut hit in backend.drain_race_hits() {
            for side in [&mut hit.first, &mut hit.second] {
                side.stream_name.clone_from(&self.streams[side.stream.0 as usize]);
                if let Some(tracked) = self.lifetimes.get(&side.lifetime) {
                    side.tensor.clone_from(&tracked.lifetime.name);
                }
            }
            self.hits.push(hit);
        }
        for block in std::mem::take(&mut self.awaiting) {
            self.allocator.free(block.pool, block.address);
        }
        for id in self.ended.drain(..) {
            if self.lifetimes.get(&id).is_some_and(|tracked| !tracked.captured) {
                self.lifetimes.remove(&id);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::ops::Range;

    use rand::RngExt;

    use super::*;
    use crate::{
        device::{
            Block,
            kernel::Kernel,
            sim::{Config, Kernels, Memory, Sim, Touch, View, Writes},
        },
        seed::Seed,
    };

    /// Kernels that do nothing.
    struct Idle;

    impl Kernels for Idle {
        fn blocks(&self, _op: &Op, _memory: &Memory, out: &mut Vec<Block>) {
            out.push(Block { index: 0, part: 0, bytes: 0, flops: 0 });
        }

        fn accesses(&self, _op: &Op, _block: &Block, _memory: &Memory, _visit: &mut dyn FnMut(Touch, Range<u64>)) {}

        fn compute(&self, _op: &Op, _blocks: &[Block], _view: &View<'_>, _out: &mut Writes<'_>) {}
    }

    fn device() -> (Device, StreamId, StreamId) {
        let device = Device::new(Box::new(Sim::new(Config::default(), Box::new(Idle))));
        device.reserve(512 << 20).unwrap();
        let streams = ["main", "side"].map(|name| device.stream(name).unwrap());
        (device, streams[0], streams[1])
    }

    fn touch(tensor: &Tensor) -> Op {
        Op { kernel: Kernel::Copy, reads: Vec::new(), writes: vec![tensor.operand(tensor.whole())], layer: None }
    }

    #[test]
    fn the_last_clone_frees_at_once_and_the_owner_is_handed_the_bytes_again() {
        let (device, main, side) = device();
        let first = device.alloc(main, 1000, "first").unwrap();
        let (clone, address) = (first.clone(), first.address());
        drop(first);
        assert_ne!(device.alloc(main, 1000, "while a clone lives").unwrap().address(), address);
        drop(clone);
        assert_ne!(device.alloc(side, 1000, "of another stream").unwrap().address(), address);
        assert_eq!(device.alloc(main, 1000, "of its owner").unwrap().address(), address);
    }

    #[test]
    fn edges_are_stream_order_and_waits_and_lifetimes_have_positions() {
        let (device, main, side) = device();
        let kept = device.alloc(main, 512, "kept").unwrap();
        let pool = device.graph_pool();
        device.begin_capture("small", main, pool).unwrap();
        device.set_layer(Some(3));
        device.enqueue(main, touch(&kept)).unwrap();
        device.wait_stream(side, main).unwrap();
        let brief = device.alloc(main, 512, "brief").unwrap();
        device.enqueue(side, touch(&brief)).unwrap();
        device.enqueue(main, touch(&kept)).unwrap();
        drop(brief);
        device.wait_stream(main, side).unwrap();
        device.enqueue(main, touch(&kept)).unwrap();
        let graph = device.end_capture().unwrap();
        let trace = graph.trace();
        assert_eq!(trace.edges, [(0, 1), (0, 2), (1, 3), (2, 3)]);
        let spans: Vec<_> = trace.lifetimes.iter().map(|l| (&*l.name, l.allocated_at, l.freed_at, l.layer)).collect();
        assert_eq!(spans, [("kept", None, None, None), ("brief", Some(1), Some(3), Some(3))]);
        device.begin_capture("next", main, pool).unwrap();
        device.enqueue(main, touch(&kept)).unwrap();
        assert_eq!(device.end_capture().unwrap().trace().lifetimes.len(), 1, "only what this capture touched");
    }

    #[test]
    fn what_a_capture_forbids_is_an_error_that_names_it() {
        let (device, main, side) = device();
        let before = device.alloc(main, 512, "before").unwrap();
        let event = device.record(main).unwrap();
        let pool = device.graph_pool();
        device.begin_capture("strict", main, pool).unwrap();
        let refused = |result: Result<()>, what: &str| {
            let error = result.expect_err(what);
            assert!(error.to_string().contains("strict"), "{what}: {error}");
        };
        refused(device.copy_in(before.address(), &[1]), "a host copy");
        refused(device.copy_out(before.address(), &mut [0]), "a host copy");
        refused(device.synchronize(), "a synchronisation");
        refused(device.reserve(1 << 40), "arena growth by request");
        refused(device.alloc(main, 1 << 40, "vast").map(drop), "arena growth by allocation");
        refused(device.wait(side, event), "an event of before");
        refused(device.enqueue(side, touch(&before)), "a stream that has not joined");
        device.wait_stream(side, main).unwrap();
        device.enqueue(side, touch(&before)).unwrap();
        refused(device.end_capture().map(drop), "a stream left behind");
        device.seal();
        assert!(device.alloc(main, 1 << 40, "vast").is_err());
        assert!(device.begin_capture("late", main, pool).is_err());
    }

    /// Bytes that may not be handed out, and until when.
    #[derive(PartialEq, Clone, Copy)]
    enum Until {
        CaptureEnds,
        DeviceIsIdle,
    }

    #[test]
    fn recorded_streams_defer_the_free_and_nothing_else_does() {
        let (device, main, side) = device();
        let mut rng = Seed(4).fork("deferral").rng();
        let pool = device.graph_pool();
        let (mut live, mut barred): (Vec<Tensor>, Vec<(Range<u64>, Until)>) = Default::default();
        let (mut capturing, mut deferrals, mut reuses) = (false, 0, 0);
        let mut given: Vec<(Range<u64>, StreamId, bool)> = Vec::new();
        for step in 0..20_000 {
            match rng.random_range(0..20) {
                0..9 if live.len() < 60 => {
                    let stream = if rng.random_ratio(3, 4) { main } else { side };
                    let tensor = device.alloc(stream, 512 * rng.random_range(1..200), "any").unwrap();
                    let range = tensor.address()..tensor.address() + tensor.bytes();
                    let meets = |other: &Range<u64>| other.start < range.end && range.start < other.end;
                    assert!(
                        !live.iter().any(|t| meets(&(t.address()..t.address() + t.bytes()))),
                        "overlaps a live one"
                    );
                    assert!(!barred.iter().any(|(other, _)| meets(other)), "step {step}: reused too early");
                    let owners = given.iter().filter(|(other, ..)| meets(other));
                    reuses += usize::from(owners.clone().count() > 0);
                    assert!(owners.clone().all(|&(_, owner, private)| (owner, private) == (stream, capturing)));
                    given.push((range, stream, capturing));
                    live.push(tensor);
                }
                9..17 if !live.is_empty() => {
                    let tensor = live.swap_remove(rng.random_range(0..live.len()));
                    let user = if tensor.stream() == main { side } else { main };
                    if rng.random_ratio(1, 2) {
                        tensor.record_stream(user);
                        let range = tensor.address()..tensor.address() + tensor.bytes();
                        let until = if capturing { Until::CaptureEnds } else { Until::DeviceIsIdle };
                        if !capturing {
                            device.enqueue(user, touch(&tensor)).unwrap();
                        }
                        barred.push((range, until));
                        deferrals += 1;
                    }
                }
                17 if capturing => {
                    device.wait_stream(main, side).unwrap();
                    let _ = device.end_capture().unwrap();
                    barred.retain(|(_, until)| *until != Until::CaptureEnds);
                    capturing = false;
                }
                18 if !capturing => {
                    device.begin_capture("random", main, pool).unwrap();
                    device.wait_stream(side, main).unwrap();
                    barred.retain(|(_, until)| *until != Until::DeviceIsIdle);
                    capturing = true;
                }
                19 if !capturing => {
                    device.synchronize().unwrap();
                    barred.retain(|(_, until)| *until != Until::DeviceIsIdle);
                }
                _ => {}
            }
        }
        assert!(deferrals > 500 && reuses > 1000, "{deferrals} deferrals, {reuses} reuses");
    }
}
