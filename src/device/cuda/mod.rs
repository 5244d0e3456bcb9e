//! The CUDA backend: the same ops on real streams and in real graphs.
//!
//! Everything that decides what a step does lies above: allocator, streams, events and captures are the host's, so that
//! both backends behave alike. This one owns one arena, taken by plain allocation before the first capture; launches one
//! kernel an op; and captures natively, so that side streams and events become the graph's edges. After each capture the
//! native graph is read back and compared with the trace: same kernels, same order relation, same addresses.
//!
//! The driver and the kernel compiler are loaded at run time; a machine without them gets an error with a hint.
//! Automatic synchronisation by the binding is off: it would wait where the engine does not, and hide what is studied.

mod compile;
mod gpu;
mod inspect;
mod launch;

use std::{collections::BTreeMap, time::Duration};

pub use inspect::{Native, Node};

use self::{
    gpu::{Event, Gpu, NativeGraph, Staging, Stream, Timer},
    launch::{Loaded, Machine},
};
use super::{Backend, CapturedGraph, EventId, GraphId, Identity, Op, SparseWeight, StreamId, WeightId, sim::Stats};
use crate::error::{Error, Result};

/// The arena is taken once, as captured addresses cannot move; this much of it at least.
const ARENA_BYTES: u64 = 8 << 30;

/// Devices that the driver finds; none where there is no driver.
pub fn device_count() -> usize {
    gpu::device_count()
}

/// What reports say of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Description {
    /// The device's name.
    pub name: String,
    /// Compute capability.
    pub capability: (i32, i32),
    /// CUDA version of the driver, as 1000 x major + 10 x minor.
    pub driver: i32,
    /// Multiprocessors.
    pub multiprocessors: u32,
    /// Content hash of each kernel file's source, options and compiler.
    pub kernels: BTreeMap<&'static str, String>,
}

/// Up to so many bytes a copy from the host is short, and may run on while the host prepares the next.
const SHORT_COPY: usize = 64 << 10;
/// Page-locked memory for the short copies under way.
const STAGING: usize = 4 * SHORT_COPY;

/// One GPU.
pub struct Cuda {
    gpu: Gpu,
    description: Description,
    machine: Machine,
    arena_bytes: u64,
    streams: Vec<Stream>,
    events: BTreeMap<EventId, Event>,
    graphs: BTreeMap<GraphId, NativeGraph>,
    natives: BTreeMap<GraphId, Native>,
    capturing: Option<StreamId>,
    timer: Timer,
    /// The stream that was launched on last since the last synchronisation.
    launched: Option<StreamId>,
    busy: Duration,
    launches: u64,
    /// Where short copies from the host run, and whether any may run still. Everything that could meet them waits first.
    copies: Stream,
    staging: Staging,
    copying: bool,
    /// Whether anything was submitted since the last synchronisation, copies aside.
    submitted: bool,
}

impl Cuda {
    /// Starts the device with this number and compiles the kernels for it, or takes them from the cache.
    pub fn open(ordinal: usize) -> Result<Self> {
        let gpu = Gpu::start(ordinal)?;
        let mut kernels = BTreeMap::new();
        let mut modules = BTreeMap::new();
        for source in &compile::SOURCES {
            let (hash, image) = compile::image(source, gpu.capability())?;
            kernels.insert(source.name, hash);
            modules.insert(source.name, gpu.load(source.name, image)?);
        }
        let functions = gpu::functions(&modules)?;
        let description = Description {
            name: gpu.name()?,
            capability: gpu.capability(),
            driver: gpu::driver_version()?,
            multiprocessors: gpu.multiprocessors(),
            kernels,
        };
        let (copies, staging) = (gpu.stream()?, gpu.staging(STAGING)?);
        let machine = Machine::new(functions, gpu.capability(), gpu.multiprocessors());
        Ok(Self {
            timer: gpu.timer()?,
            launched: None,
            busy: Duration::ZERO,
            launches: 0,
            gpu,
            description,
            machine,
            arena_bytes: 0,
            streams: Vec::new(),
            events: BTreeMap::new(),
            graphs: BTreeMap::new(),
            natives: BTreeMap::new(),
            capturing: None,
            copies,
            staging,
            copying: false,
            submitted: false,
        })
    }

    /// What reports say of it.
    pub fn description(&self) -> &Description {
        &self.description
    }

    /// A captured graph as the driver holds it.
    pub fn native(&self, graph: GraphId) -> Option<&Native> {
        self.natives.get(&graph)
    }

    fn stream(&self, stream: StreamId) -> Result<&Stream> {
        self.streams.get(stream.0 as usize).ok_or_else(|| Error::usage(format!("stream {} does not exist", stream.0)))
    }

    /// Starts the timer before the first launch since the last synchronisation; within a capture nothing runs.
    fn time(&mut self, stream: StreamId) -> Result<()> {
        if self.capturing.is_none() && self.launched.replace(stream).is_none() {
            self.timer.start(self.stream(stream)?)?;
        }
        Ok(())
    }

    /// Ends the copies from the host that run still: before anything else is submitted, and before memory is read.
    fn settle(&mut self) -> Result<()> {
        if std::mem::take(&mut self.copying) {
            self.copies.wait_here()?;
            self.staging.empty();
        }
        Ok(())
    }

    fn range(&self, address: u64, len: usize) -> Result<u64> {
        if address.checked_add(len as u64).is_none_or(|end| end > self.arena_bytes) {
            return Err(Error::usage(format!("{len} bytes at {address:#x} lie outside the device arena")));
        }
        Ok(self.machine.arena + address)
    }
}

impl Backend for Cuda {
    fn identity(&self) -> Identity {
        Identity { backend: "cuda", name: self.description.name.clone() }
    }

    fn reserve(&mut self, bytes: u64) -> Result<()> {
        if bytes <= self.arena_bytes {
            return Ok(());
        }
        if self.arena_bytes > 0 {
            return Err(Error::usage(format!(
                "the device arena of {} bytes is full: {bytes} are wanted",
                self.arena_bytes
            ))
            .hint("lower TOOLSTORM_MAX_BATCH or TOOLSTORM_MAX_CONTEXT"));
        }
        self.arena_bytes = bytes.max(ARENA_BYTES);
        self.machine.arena = self.gpu.allocate(self.arena_bytes)?;
        Ok(())
    }

    fn load_weight(&mut self, id: WeightId, weight: &SparseWeight) -> Result<()> {
        let start = self.gpu.upload(bytemuck::cast_slice(&weight.row_start))?;
        let column = self.gpu.upload(bytemuck::cast_slice(&weight.column))?;
        // A norm's gain is read dense.
        let dense: Vec<f32> = if weight.rows == 1 {
            let mut dense = vec![0.0; weight.columns as usize];
            for (&column, &value) in weight.column.iter().zip(&weight.value) {
                dense[column as usize] = value;
            }
            dense
        } else {
            weight.value.clone()
        };
        let value = self.gpu.upload(bytemuck::cast_slice(&dense))?;
        let loaded = Loaded { start, column, value, rows: weight.rows, columns: weight.columns, ballast: (0, 0) };
        self.machine.weights.insert(id, loaded);
        Ok(())
    }

    fn create_stream(&mut self, stream: StreamId) -> Result<()> {
        assert_eq!(stream.0 as usize, self.streams.len(), "stream ids count up");
        self.streams.push(self.gpu.stream()?);
        Ok(())
    }

    fn enqueue(&mut self, stream: StreamId, op: &Op) -> Result<()> {
        if let Some((weight, bytes)) = launch::ballast(op)
            && self.capturing.is_none()
            && self.machine.weights.get(&weight).is_some_and(|loaded| loaded.ballast.1 < bytes)
        {
            let address = self.gpu.allocate_filled(bytes)?;
            if let Some(loaded) = self.machine.weights.get_mut(&weight) {
                loaded.ballast = (address, bytes);
            }
        }
        self.settle()?;
        self.submitted = true;
        self.time(stream)?;
        let launch = self.machine.plan(op)?;
        let stream = self.stream(stream)?;
        self.gpu.launch(stream, &launch).map_err(|error| error.within(op.kernel.name()))
    }

    fn record(&mut self, stream: StreamId, event: EventId) -> Result<()> {
        self.submitted = true;
        let recorded = self.stream(stream)?.record()?;
        self.events.insert(event, recorded);
        Ok(())
    }

    fn wait(&mut self, stream: StreamId, event: EventId) -> Result<()> {
        match self.events.get(&event) {
            Some(event) => self.stream(stream)?.wait(event),
            // Recorded before the last synchronisation, which waited for it.
            None => Ok(()),
        }
    }

    fn query(&mut self, event: EventId) -> Result<bool> {
        self.events.get(&event).map_or(Ok(true), Event::is_complete)
    }

    fn begin_capture(&mut self, stream: StreamId) -> Result<()> {
        self.settle()?;
        self.stream(stream)?.begin_capture()?;
        self.capturing = Some(stream);
        Ok(())
    }

    fn end_capture(&mut self, id: GraphId, graph: &CapturedGraph) -> Result<()> {
        let Some(origin) = self.capturing.take() else {
            return Err(Error::usage(format!("graph `{}` was not captured on this device", graph.name))
                .hint("changed or foreign traces run on the virtual GPU only"));
        };
        let captured = self.stream(origin)?.end_capture()?;
        let native = inspect::read(&captured)?;
        native.agree(graph, self.machine.arena).map_err(|error| error.within(&graph.name))?;
        self.graphs.insert(id, captured);
        self.natives.insert(id, native);
        Ok(())
    }

    fn launch(&mut self, graph: GraphId, stream: StreamId) -> Result<()> {
        self.settle()?;
        self.submitted = true;
        self.time(stream)?;
        let graph = self.graphs.get(&graph).ok_or_else(|| Error::usage(format!("graph {} does not exist", graph.0)))?;
        graph.launch()
    }

    fn synchronize(&mut self) -> Result<()> {
        if std::mem::take(&mut self.submitted) {
            let launched = self.launched.take();
            if let Some(stream) = launched {
                self.timer.end(self.stream(stream)?)?;
            }
            self.gpu.synchronize()?;
            if launched.is_some() {
                self.busy += self.timer.elapsed()?;
                self.launches += 1;
            }
        }
        self.events.clear();
        Ok(())
    }

    fn write(&mut self, address: u64, bytes: &[u8]) -> Result<()> {
        let address = self.range(address, bytes.len())?;
        if bytes.len() > SHORT_COPY {
            self.settle()?;
            return self.gpu.copy_in(address, bytes);
        }
        if !self.staging.has_room(bytes.len()) {
            self.settle()?;
        }
        self.copying = true;
        self.gpu.begin_copy_in(&self.copies, &mut self.staging, address, bytes)
    }

    fn read(&mut self, address: u64, bytes: &mut [u8]) -> Result<()> {
        let address = self.range(address, bytes.len())?;
        self.settle()?;
        self.gpu.copy_out(address, bytes)
    }

    /// Without overlap, which events cannot tell.
    fn stats(&self) -> Stats {
        Stats { launches: self.launches, total_ns: self.busy.as_nanos() as u64, ..Stats::default() }
    }

    fn busy(&self) -> Option<Duration> {
        Some(self.busy)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_without_a_device_gets_an_error_and_a_hint() {
        if device_count() > 0 {
            return;
        }
        let Err(error) = Cuda::open(0) else { panic!("a device was opened without a driver") };
        assert!(error.to_string().contains("driver"), "{error}");
        assert!(error.cure().is_some_and(|hint| hint.contains("TOOLSTORM_DEVICE=sim")), "{:?}", error.cure());
    }
}
