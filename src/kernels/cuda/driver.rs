//! The CUDA driver: contexts, streams, events, kernels. It is opened at run time; without a driver
//! `Device::open` fails.
//!
//! Only this module and `mem::{device, pinned, vmm}` use `cudarc`. Contexts are the primary ones,
//! which torch also uses.
#![allow(unsafe_code, reason = "functions of the CUDA driver, found at run time")]

use crate::error::{Error, Result};
use cudarc::driver::sys::{self, CUresult};
use std::ffi::{CStr, CString, c_void};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// Returns `Ok` for success, otherwise the attempted operation and the driver's message.
pub fn check(what: &str, result: CUresult) -> Result<()> {
    if result == CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    let mut text = std::ptr::null();
    // SAFETY: `text` is valid for a write; the driver returns a static string or leaves it null.
    let text = unsafe {
        let _ = sys::cuGetErrorString(result, &raw mut text);
        if text.is_null() { "unknown error".into() } else { CStr::from_ptr(text).to_string_lossy() }
    };
    let error = format!("{what}: CUDA error {} ({text})", result as u32);
    Err(if result == CUresult::CUDA_ERROR_OUT_OF_MEMORY {
        Error::config(error)
    } else {
        Error::internal(error)
    })
}

/// Loads and initialises the driver, once.
fn initialise() -> Result<()> {
    static STATE: OnceLock<Result<()>> = OnceLock::new();
    STATE
        .get_or_init(|| {
            // SAFETY: this looks up the library by name; loading it runs only NVIDIA's
            // initialisers.
            if !unsafe { sys::is_culib_present() } {
                return Err(Error::config(
                    "the CUDA driver (libcuda.so.1) cannot be loaded on this machine",
                ));
            }
            // SAFETY: 0 is the only valid value of the flags.
            check("initialising the CUDA driver", unsafe { sys::cuInit(0) })
        })
        .clone()
}

/// A GPU of this process, with its primary context retained.
#[derive(Debug)]
pub struct Device {
    ordinal: i32,
    device: sys::CUdevice,
    context: sys::CUcontext,
    /// The UUID, 16 bytes; `GPU-…` in `nvidia-smi -L`.
    pub uuid: [u8; 16],
    /// Compute capability.
    pub capability: (u32, u32),
    /// `domain:bus:device.function`.
    pub bus: String,
}

// SAFETY: a context may be used from any thread after `enter` has made it current on that thread.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

/// Keeps a context current on this thread; dropping it restores the previous one.
#[must_use = "the context is current only while it lives"]
pub struct Entered {
    before: Option<sys::CUcontext>,
}

impl Drop for Entered {
    fn drop(&mut self) {
        if let Some(before) = self.before {
            // SAFETY: it was current when `enter` queried it; null is allowed.
            let _ = unsafe { sys::cuCtxSetCurrent(before) };
        }
    }
}

fn attribute(device: sys::CUdevice, attribute: sys::CUdevice_attribute) -> Result<u32> {
    let mut value = 0;
    // SAFETY: valid for a write; `device` came from the driver.
    check("reading a device attribute", unsafe {
        sys::cuDeviceGetAttribute(&raw mut value, attribute, device)
    })?;
    Ok(value.unsigned_abs())
}

impl Device {
    /// Opens the device that torch calls `cuda:{ordinal}`.
    pub fn open(ordinal: i32) -> Result<Self> {
        use sys::CUdevice_attribute::{
            CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
            CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
        };
        initialise()?;
        let mut device = 0;
        // SAFETY: valid for a write; the driver checks the ordinal.
        check(&format!("finding cuda:{ordinal}"), unsafe {
            sys::cuDeviceGet(&raw mut device, ordinal)
        })?;
        let major = attribute(device, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let capability = (major, attribute(device, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?);
        let mut uuid = sys::CUuuid { bytes: [0; 16] };
        // SAFETY: valid for a write; `device` came from the driver.
        check("reading a device's UUID", unsafe {
            sys::cuDeviceGetUuid_v2(&raw mut uuid, device)
        })?;
        let mut bus = [0; 32];
        // SAFETY: valid for writes of the length given; `device` came from the driver.
        check("reading a device's bus id", unsafe {
            sys::cuDeviceGetPCIBusId(bus.as_mut_ptr(), bus.len() as i32, device)
        })?;
        // SAFETY: the driver terminated it with a zero.
        let bus = unsafe { CStr::from_ptr(bus.as_ptr()) }.to_string_lossy().into_owned();
        let mut context = std::ptr::null_mut();
        // SAFETY: valid for a write; released by `drop`.
        check(&format!("retaining the context of cuda:{ordinal}"), unsafe {
            sys::cuDevicePrimaryCtxRetain(&raw mut context, device)
        })?;
        Ok(Self {
            ordinal,
            device,
            context,
            uuid: uuid.bytes.map(|byte| byte as u8),
            capability,
            bus,
        })
    }

    /// Returns torch's index of the device.
    pub fn ordinal(&self) -> i32 {
        self.ordinal
    }

    /// Returns the value of an attribute of the device, as the driver reports it.
    pub fn attribute(&self, requested: sys::CUdevice_attribute) -> Result<u32> {
        attribute(self.device, requested)
    }

    /// Returns the number of its multiprocessors, at least 1.
    pub fn processors(&self) -> Result<usize> {
        let count =
            self.attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        Ok((count as usize).max(1))
    }

    /// Returns the size of its memory in bytes.
    pub fn memory(&self) -> Result<usize> {
        let mut bytes = 0;
        // SAFETY: valid for a write; `device` came from the driver.
        check("asking for the memory of a device", unsafe {
            sys::cuDeviceTotalMem_v2(&raw mut bytes, self.device)
        })?;
        Ok(bytes)
    }

    /// Blocks the host until all work of its context is done. Fails while a stream of it is
    /// captured.
    pub fn synchronize(&self) -> Result<()> {
        let _entered = self.enter()?;
        // SAFETY: takes no arguments; the context is current.
        check("waiting for a device", unsafe { sys::cuCtxSynchronize() })
    }

    /// Makes its context current on this thread.
    pub fn enter(&self) -> Result<Entered> {
        let mut current = std::ptr::null_mut();
        // SAFETY: valid for a write.
        check("asking for the current context", unsafe { sys::cuCtxGetCurrent(&raw mut current) })?;
        if current == self.context {
            return Ok(Entered { before: None });
        }
        // SAFETY: retained while `self` lives.
        check("entering a context", unsafe { sys::cuCtxSetCurrent(self.context) })?;
        Ok(Entered { before: Some(current) })
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // SAFETY: retained by `open`, once.
        let _ = unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device) };
    }
}

/// Lets this thread allocate and load while any stream of the process is being captured.
#[must_use = "ends when dropped"]
pub struct RelaxedCapture(sys::CUstreamCaptureMode);

impl RelaxedCapture {
    /// Starts the relaxed mode.
    pub fn begin() -> Result<Self> {
        let mut mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: valid for a read and a write.
        check("relaxing the capture mode", unsafe {
            sys::cuThreadExchangeStreamCaptureMode(&raw mut mode)
        })?;
        Ok(Self(mode))
    }
}

impl Drop for RelaxedCapture {
    fn drop(&mut self) {
        // SAFETY: valid for a read and a write; the mode is the previous one.
        let _ = unsafe { sys::cuThreadExchangeStreamCaptureMode(&raw mut self.0) };
    }
}

/// A stream, by its handle. Not owned: the owner must keep it alive while work is enqueued.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stream(pub usize);

impl Stream {
    /// Returns the handle.
    pub fn raw(self) -> sys::CUstream {
        self.0 as sys::CUstream
    }

    /// Returns the id of the capture that records this stream's work into a graph, if any.
    pub fn capture(self) -> Result<Option<u64>> {
        let (mut status, mut id) = (sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE, 0);
        let null = std::ptr::null_mut();
        // SAFETY: both are valid for writes; the other results may be null.
        let result = unsafe {
            sys::cuStreamGetCaptureInfo_v2(
                self.raw(),
                &raw mut status,
                &raw mut id,
                null,
                null.cast(),
                null.cast(),
            )
        };
        check("asking whether a stream is captured", result)?;
        Ok((status == sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE).then_some(id))
    }

    /// Blocks the host until all enqueued work is done.
    pub fn synchronize(self) -> Result<()> {
        // SAFETY: the caller's handle.
        check("waiting for a stream", unsafe { sys::cuStreamSynchronize(self.raw()) })
    }

    /// Orders all work enqueued from now on after `event`.
    pub fn wait(self, event: &Event) -> Result<()> {
        // SAFETY: both handles live.
        check("making a stream wait", unsafe { sys::cuStreamWaitEvent(self.raw(), event.0, 0) })
    }

    /// Fills `bytes` bytes at `address`.
    pub fn fill(self, address: u64, byte: u8, bytes: usize) -> Result<()> {
        // SAFETY: the caller owns the range, which the driver checks to be memory of a device.
        check("filling device memory", unsafe {
            sys::cuMemsetD8Async(address, byte, bytes, self.raw())
        })
    }

    /// Copies between any two addresses that the device can access.
    pub fn copy(self, to: u64, from: u64, bytes: usize) -> Result<()> {
        // SAFETY: the caller owns both ranges; the driver knows which memory they are in.
        check("copying memory", unsafe { sys::cuMemcpyAsync(to, from, bytes, self.raw()) })
    }
}

/// An owned stream without implicit synchronisation.
#[derive(Debug)]
pub struct OwnStream(sys::CUstream);

// SAFETY: a stream may be used from any thread.
unsafe impl Send for OwnStream {}
// SAFETY: as above.
unsafe impl Sync for OwnStream {}

impl OwnStream {
    /// Creates a stream in the current context.
    pub fn new() -> Result<Self> {
        Self::with_priority(0)
    }

    /// Creates a stream of the highest priority in the current context: its work starts before the
    /// work of other streams.
    pub fn urgent() -> Result<Self> {
        // The driver uses the nearest priority that it supports.
        Self::with_priority(-100)
    }

    fn with_priority(priority: i32) -> Result<Self> {
        let mut stream = std::ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: valid for a write; destroyed by `drop`.
        check("making a stream", unsafe {
            sys::cuStreamCreateWithPriority(&raw mut stream, flags, priority)
        })?;
        Ok(Self(stream))
    }

    /// Returns the stream, for use while `self` lives.
    pub fn stream(&self) -> Stream {
        Stream(self.0 as usize)
    }
}

impl Drop for OwnStream {
    fn drop(&mut self) {
        // SAFETY: created by `new`.
        let _ = unsafe { sys::cuStreamDestroy_v2(self.0) };
    }
}

/// A point in a stream.
#[derive(Debug)]
pub struct Event(sys::CUevent);

// SAFETY: an event may be used from any thread.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    /// Creates an event in the current context, without timing.
    pub fn new() -> Result<Self> {
        let mut event = std::ptr::null_mut();
        let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
        // SAFETY: valid for a write; destroyed by `drop`.
        check("making an event", unsafe { sys::cuEventCreate(&raw mut event, flags) })?;
        Ok(Self(event))
    }

    /// Records the event after all work enqueued in `stream` so far.
    pub fn record(&self, stream: Stream) -> Result<()> {
        // SAFETY: both handles live.
        check("recording an event", unsafe { sys::cuEventRecord(self.0, stream.raw()) })
    }

    /// Returns true if the device has passed it.
    pub fn passed(&self) -> Result<bool> {
        // SAFETY: the handle lives.
        let result = unsafe { sys::cuEventQuery(self.0) };
        if result == CUresult::CUDA_ERROR_NOT_READY {
            return Ok(false);
        }
        check("asking for an event", result).map(|()| true)
    }
}

/// Returns true if the device passes all `events` within `limit`; called in the context in which
/// they were created.
pub fn pass(events: &[Event], limit: Duration) -> bool {
    let begun = Instant::now();
    while !events.iter().all(|event| event.passed().unwrap_or(true)) {
        if begun.elapsed() > limit {
            return false;
        }
        std::thread::sleep(Duration::from_micros(50));
    }
    true
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: created by `new`.
        let _ = unsafe { sys::cuEventDestroy_v2(self.0) };
    }
}

/// The number of threads that run a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    /// Number of blocks.
    pub blocks: u32,
    /// Number of threads in a block.
    pub threads: u32,
    /// Number of blocks in a cluster; more than 1 requires Hopper or later.
    pub cluster: u32,
}

impl Grid {
    /// A grid without clusters.
    pub fn new(blocks: u32, threads: u32) -> Self {
        Self { blocks, threads, cluster: 1 }
    }
}

/// A loaded kernel. It is never unloaded, because a captured graph may hold it; a process loads few
/// kernels.
#[derive(Clone, Copy, Debug)]
pub struct Kernel(sys::CUfunction);

// SAFETY: a function may be launched from any thread.
unsafe impl Send for Kernel {}
// SAFETY: as above.
unsafe impl Sync for Kernel {}

impl Kernel {
    /// Loads `name` from a cubin into the current context, completely: nothing is left for the
    /// first launch, when peers may already wait in their kernels.
    pub fn load(cubin: &[u8], name: &str) -> Result<Self> {
        let (mut module, mut function) = (std::ptr::null_mut(), std::ptr::null_mut());
        let symbol = CString::new(name)
            .map_err(|_| Error::internal(format!("{name:?} is not a valid kernel name")))?;
        // SAFETY: `cubin` is a whole image from the compiler; the results are valid for writes.
        unsafe {
            check(
                &format!("loading {name}"),
                sys::cuModuleLoadData(&raw mut module, cubin.as_ptr().cast()),
            )?;
            check(
                &format!("finding {name}"),
                sys::cuModuleGetFunction(&raw mut function, module, symbol.as_ptr()),
            )?;
            check(&format!("loading {name}"), sys::cuFuncLoad(function))?;
        }
        Ok(Self(function))
    }

    /// Enqueues the kernel. `args` are the bytes of its argument, with the same alignment. With
    /// `overlap`, the kernel's set-up may overlap with its predecessor in the stream; the kernel
    /// itself waits for the predecessor.
    pub fn launch(self, stream: Stream, grid: Grid, overlap: bool, args: &[u8]) -> Result<()> {
        let Grid { blocks, threads, cluster } = grid;
        // SAFETY: all zeroes is a valid value of this C union.
        let [mut serial, mut together]: [sys::CUlaunchAttributeValue; 2] =
            unsafe { std::mem::zeroed() };
        serial.programmaticStreamSerializationAllowed = 1;
        together.clusterDim =
            sys::CUlaunchAttributeValue_union__bindgen_ty_1 { x: cluster, y: 1, z: 1 };
        let mut attributes = [
            (
                sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
                serial,
            ),
            (sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, together),
        ]
        .map(|(id, value)| sys::CUlaunchAttribute { id, pad: [0; 4], value });
        // Devices before Hopper support neither attribute.
        let wanted = &mut attributes[usize::from(!overlap)..1 + usize::from(cluster > 1)];
        let config = sys::CUlaunchConfig {
            gridDimX: blocks,
            gridDimY: 1,
            gridDimZ: 1,
            blockDimX: threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: 0,
            hStream: stream.raw(),
            attrs: wanted.as_mut_ptr(),
            numAttrs: wanted.len() as u32,
        };
        let mut arguments = [args.as_ptr().cast_mut().cast::<c_void>()];
        // SAFETY: the kernel takes one argument with these bytes; the driver copies it before it
        // returns.
        let result = unsafe {
            sys::cuLaunchKernelEx(
                &raw const config,
                self.0,
                arguments.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        check("launching a kernel", result)
    }
}
