//! UNSAFE: the driver calls. Nothing outside this file and its two neighbours (`compile`, `inspect`) holds a pointer.
//!
//! # Safety
//!
//! What the driver asks of callers, and what upholds it:
//!
//! - **The library is there.** Every path starts at [`Gpu::start`], which looks for it first; the binding would panic.
//! - **The context is current.** A [`Gpu`] lives on one thread (nothing of it is `Send`) and binds its context there once;
//!   nobody else in this process binds another.
//! - **Addresses are valid.** Device memory comes from [`Gpu::allocate`] and is freed with the process only, so no address
//!   dangles. Copies are bounded by their slices on the host's side and by the arena's length, which the backend checks, on
//!   the device's.
//! - **Copies that run on read memory that stays.** They read page-locked blocks of [`Staging`], written once between two
//!   waits and never freed.
//! - **Kernels get what they declare.** A launch's arguments are built from an op's regions by `launch`, next to the
//!   kernel's name; the conformance suite runs each kernel against the virtual GPU and checks that it touches nothing
//!   else. Pointers to arguments are taken right before the call, which copies them before it returns.
//! - **Handles live.** Streams, events, modules and graphs are the binding's owning types.
//!
//! Races between kernels on device memory are not undefined behaviour of this process: device memory is only ever seen
//! through copies. They are what the product is about.
#![expect(unsafe_code, reason = "the driver's interface is C; see the section on safety")]

use std::{collections::BTreeMap, ffi::c_void, sync::Arc, time::Duration};

use cudarc::{
    driver::{
        CudaContext, CudaEvent, CudaFunction, CudaGraph, CudaModule, CudaStream, DriverError,
        result::{self, memcpy_dtoh_sync, memcpy_htod_sync},
        sys,
    },
    nvrtc::Ptx,
};

use super::launch::{Arg, FUNCTIONS, Launch};
use crate::error::{Error, Result};

/// Byte that fills ballast.
const BALLAST: u8 = 0x5a;

pub(super) struct Gpu {
    context: Arc<CudaContext>,
    capability: (i32, i32),
    multiprocessors: u32,
}

pub(super) struct Stream(Arc<CudaStream>);

impl Stream {
    pub(super) fn record(&self) -> Result<Event> {
        self.0.record_event(None).map(Event).map_err(|error| failed("recording an event", error))
    }

    pub(super) fn wait(&self, event: &Event) -> Result<()> {
        self.0.wait(&event.0).map_err(|error| failed("waiting for an event", error))
    }

    /// Waits on the host for all that was enqueued on it.
    pub(super) fn wait_here(&self) -> Result<()> {
        self.0.synchronize().map_err(|error| failed("waiting for a stream", error))
    }

    pub(super) fn begin_capture(&self) -> Result<()> {
        self.0
            .begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
            .map_err(|error| failed("beginning a capture", error))
    }

    pub(super) fn end_capture(&self) -> Result<NativeGraph> {
        let flags = sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY;
        let graph = self.0.end_capture(flags).map_err(|error| failed("ending a capture", error))?;
        let graph = graph.ok_or_else(|| Error::usage("cuda: the capture was invalidated"))?;
        graph.upload().map_err(|error| failed("uploading a graph", error))?;
        Ok(NativeGraph(graph))
    }
}

pub(super) struct Event(CudaEvent);

impl Event {
    pub(super) fn is_complete(&self) -> Result<bool> {
        self.0.try_is_complete().map_err(|error| failed("querying an event", error))
    }
}

/// Two events that take the time between what surrounds them.
pub(super) struct Timer {
    start: CudaEvent,
    end: CudaEvent,
}

impl Timer {
    pub(super) fn start(&self, stream: &Stream) -> Result<()> {
        self.start.record(&stream.0).map_err(|error| failed("starting a timer", error))
    }

    pub(super) fn end(&self, stream: &Stream) -> Result<()> {
        self.end.record(&stream.0).map_err(|error| failed("ending a timer", error))
    }

    /// Once both events have completed.
    pub(super) fn elapsed(&self) -> Result<Duration> {
        let milliseconds = self.start.elapsed_ms(&self.end).map_err(|error| failed("reading a timer", error))?;
        Ok(Duration::from_secs_f64(f64::from(milliseconds.max(0.0)) / 1e3))
    }
}

pub(super) struct NativeGraph(CudaGraph);

impl NativeGraph {
    pub(super) fn handle(&self) -> sys::CUgraph {
        self.0.cu_graph()
    }

    pub(super) fn launch(&self) -> Result<()> {
        self.0.launch().map_err(|error| failed("launching a graph", error))
    }
}

/// A tensor map, as the bulk copies of Hopper take it.
#[derive(Clone, Copy)]
pub(super) struct Map(sys::CUtensorMap);

/// What a tensor map describes: three dimensions, swizzled by 128 bytes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Tiles {
    pub(super) address: u64,
    /// bf16 elements, or bytes.
    pub(super) bf16: bool,
    pub(super) dims: [u64; 3],
    pub(super) strides: [u64; 2],
    pub(super) tile: [u32; 3],
}

pub(super) fn failed(what: &str, error: DriverError) -> Error {
    let name = error.error_name().ok().and_then(|name| name.to_str().ok()).unwrap_or("an unknown error");
    Error::usage(format!("cuda: {what} failed: {name}"))
}

pub(super) fn is_driver_present() -> bool {
    // SAFETY: looks a library up by its well-known names; loading the driver's library runs no code that needs more.
    unsafe { sys::is_culib_present() }
}

pub(super) fn device_count() -> usize {
    if is_driver_present() { CudaContext::device_count().map_or(0, |count| count.max(0) as usize) } else { 0 }
}

/// Page-locked memory that holds what asynchronous copies read, one after the other, until they have ended.
pub(super) struct Staging {
    address: usize,
    bytes: usize,
    used: usize,
}

impl Staging {
    pub(super) fn has_room(&self, bytes: usize) -> bool {
        bytes <= self.bytes - self.used
    }

    /// Every copy out of it has ended.
    pub(super) fn empty(&mut self) {
        self.used = 0;
    }

    fn keep(&mut self, bytes: &[u8]) -> &[u8] {
        assert!(self.has_room(bytes.len()), "{} bytes do not fit behind {} of {}", bytes.len(), self.used, self.bytes);
        // SAFETY: `has_room` says that the range lies in this page-locked block, which is never freed; no copy reads it, as
        // `used` moves back only when all have ended, and the borrow of `self` keeps others out while it is written.
        let kept = unsafe { std::slice::from_raw_parts_mut((self.address + self.used) as *mut u8, bytes.len()) };
        self.used += bytes.len();
        kept.copy_from_slice(bytes);
        kept
    }
}

impl Gpu {
    pub(super) fn start(ordinal: usize) -> Result<Self> {
        let no_device = |message: String| Error::usage(message).hint("TOOLSTORM_DEVICE=sim runs on the virtual GPU");
        if !is_driver_present() {
            return Err(no_device("no CUDA device: the NVIDIA driver (libcuda.so.1) is not installed".to_owned()));
        }
        let context =
            CudaContext::new(ordinal).map_err(|error| no_device(failed("opening the device", error).to_string()))?;
        // SAFETY: ordering between streams is the engine's business, through events; nothing here relies on the binding's.
        unsafe { context.disable_event_tracking() };
        let attribute = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
        let multiprocessors = context.attribute(attribute).map_err(|error| failed("reading the device", error))? as u32;
        let capability = context.compute_capability().map_err(|error| failed("reading the device", error))?;
        Ok(Self { context, capability, multiprocessors })
    }

    pub(super) fn capability(&self) -> (i32, i32) {
        self.capability
    }

    pub(super) fn multiprocessors(&self) -> u32 {
        self.multiprocessors
    }

    pub(super) fn name(&self) -> Result<String> {
        self.context.name().map_err(|error| failed("reading the device", error))
    }

    pub(super) fn load(&self, name: &str, image: Vec<u8>) -> Result<Arc<CudaModule>> {
        self.context
            .load_module(Ptx::from_binary(image))
            .map_err(|error| failed(&format!("loading kernels/{name}"), error))
    }

    /// Zeroed device memory, for the life of the process.
    pub(super) fn allocate(&self, bytes: u64) -> Result<u64> {
        self.allocate_with(bytes, 0)
    }

    /// Device memory for ballast.
    pub(super) fn allocate_filled(&self, bytes: u64) -> Result<u64> {
        self.allocate_with(bytes, BALLAST)
    }

    fn allocate_with(&self, bytes: u64, fill: u8) -> Result<u64> {
        self.bind()?;
        let failure = |error: DriverError| {
            failed(&format!("allocating {bytes} bytes"), error).hint("free device memory or lower TOOLSTORM_MAX_BATCH")
        };
        // SAFETY: the context is current; the memory is never freed, so the address stays valid.
        let address = unsafe { result::malloc_sync(bytes as usize) }.map_err(failure)?;
        // SAFETY: fills exactly what was allocated.
        unsafe { result::memset_d8_sync(address, fill, bytes as usize) }.map_err(failure)?;
        // Despite its name the fill runs on, and no stream of ours waits for it.
        self.synchronize()?;
        Ok(address)
    }

    /// Device memory that holds a copy of `bytes`.
    pub(super) fn upload(&self, bytes: &[u8]) -> Result<u64> {
        // Some weights store nothing; their address is never followed.
        let address = self.allocate(bytes.len().max(16) as u64)?;
        self.copy_in(address, bytes)?;
        Ok(address)
    }

    pub(super) fn copy_in(&self, address: u64, bytes: &[u8]) -> Result<()> {
        self.bind()?;
        // SAFETY: the caller's range lies in one allocation; the copy ends before this returns.
        unsafe { memcpy_htod_sync(address, bytes) }.map_err(|error| failed("a copy to the device", error))
    }

    /// Page-locked memory for copies that run on: the driver does not promise to have read pageable memory when an
    /// asynchronous copy from it returns.
    pub(super) fn staging(&self, bytes: usize) -> Result<Staging> {
        self.bind()?;
        // SAFETY: takes no memory of ours; the driver's context outlives the process's use of it.
        let memory = unsafe { result::malloc_host(bytes, 0) }
            .map_err(|error| failed(&format!("page-locking {bytes} bytes"), error))?;
        Ok(Staging { address: memory as usize, bytes, used: 0 })
    }

    /// A copy to the device that may end after this returns: [`Stream::wait_here`] waits for it, and until then `staging`
    /// must not be emptied. It must have room for the bytes.
    pub(super) fn begin_copy_in(
        &self,
        stream: &Stream,
        staging: &mut Staging,
        address: u64,
        bytes: &[u8],
    ) -> Result<()> {
        self.bind()?;
        let kept = staging.keep(bytes);
        // SAFETY: the caller's range lies in one allocation, and what is copied stays as it is until the copy has ended.
        unsafe { result::memcpy_htod_async(address, kept, stream.0.cu_stream()) }
            .map_err(|error| failed("a copy to the device", error))
    }

    pub(super) fn copy_out(&self, address: u64, bytes: &mut [u8]) -> Result<()> {
        self.bind()?;
        // SAFETY: the caller's range lies in one allocation; the copy ends before this returns.
        unsafe { memcpy_dtoh_sync(bytes, address) }.map_err(|error| failed("a copy from the device", error))
    }

    pub(super) fn stream(&self) -> Result<Stream> {
        self.context.new_stream().map(Stream).map_err(|error| failed("creating a stream", error))
    }

    pub(super) fn timer(&self) -> Result<Timer> {
        let event = || {
            let flags = sys::CUevent_flags::CU_EVENT_DEFAULT;
            self.context.new_event(Some(flags)).map_err(|error| failed("making a timer", error))
        };
        Ok(Timer { start: event()?, end: event()? })
    }

    pub(super) fn synchronize(&self) -> Result<()> {
        self.context.synchronize().map_err(|error| failed("synchronising", error))
    }

    pub(super) fn launch(&self, stream: &Stream, launch: &Launch<'_>) -> Result<()> {
        self.bind()?;
        let mut pointers: Vec<*mut c_void> = launch.args.iter().map(pointer).collect();
        let (x, y) = launch.grid;
        // SAFETY: the function belongs to a loaded module, the arguments match its signature in number, order and size
        // (the conformance suite launches each), and all they point to is device memory that is never freed.
        unsafe {
            result::launch_kernel(
                launch.function.cu_function(),
                (x, y, 1),
                (launch.threads, 1, 1),
                launch.shared,
                stream.0.cu_stream(),
                &mut pointers,
            )
        }
        .map_err(|error| failed("a launch", error))
    }

    fn bind(&self) -> Result<()> {
        self.context.bind_to_thread().map_err(|error| failed("binding the context", error))
    }
}

fn pointer(arg: &Arg) -> *mut c_void {
    match arg {
        Arg::Long(value) => std::ptr::from_ref(value).cast_mut().cast(),
        Arg::Word(value) => std::ptr::from_ref(value).cast_mut().cast(),
        Arg::Float(value) => std::ptr::from_ref(value).cast_mut().cast(),
        Arg::Rows(value) => std::ptr::from_ref(value).cast_mut().cast(),
        Arg::Weight(value) => std::ptr::from_ref(value).cast_mut().cast(),
        Arg::Map(value) => std::ptr::from_ref(&value.0).cast_mut().cast(),
    }
}

pub(super) fn driver_version() -> Result<i32> {
    let mut version = 0;
    // SAFETY: writes one integer to a live one.
    unsafe { sys::cuDriverGetVersion(&raw mut version) }
        .result()
        .map_err(|error| failed("reading the driver's version", error))?;
    Ok(version)
}

/// Every kernel that the modules have, with its shared memory allowed.
pub(super) fn functions(modules: &BTreeMap<&str, Arc<CudaModule>>) -> Result<BTreeMap<&'static str, CudaFunction>> {
    let mut functions = BTreeMap::new();
    for (file, name, shared) in FUNCTIONS {
        // Kernels of newer architectures are missing from older devices' modules.
        let Some(function) = modules.get(file).and_then(|module| module.load_function(name).ok()) else { continue };
        if shared > 48 << 10 {
            let attribute = sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            function
                .set_attribute(attribute, shared as i32)
                .map_err(|error| failed(&format!("giving {name} its shared memory"), error))?;
        }
        functions.insert(name, function);
    }
    Ok(functions)
}

/// Encodes what a bulk copy needs to know.
pub(super) fn tensor_map(tiles: &Tiles) -> Result<Map> {
    let kind = if tiles.bf16 {
        sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
    } else {
        sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_UINT8
    };
    let mut map = sys::CUtensorMap { opaque: [0; 16] };
    let whole = [1u32; 3];
    // SAFETY: every pointer is to a live array of the length that rank three asks for; the address is only recorded.
    unsafe {
        sys::cuTensorMapEncodeTiled(
            &raw mut map,
            kind,
            3,
            tiles.address as *mut c_void,
            tiles.dims.as_ptr(),
            tiles.strides.as_ptr(),
            tiles.tile.as_ptr(),
            whole.as_ptr(),
            sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
            sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
            sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    }
    .result()
    .map_err(|error| failed("encoding a tensor map", error))?;
    Ok(Map(map))
}
