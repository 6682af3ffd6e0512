//! Signals between the GPUs of a group: `put_signal`, `wait_signal` and `barrier` of symmetric
//! memory, each a small kernel on the caller's stream. A wait ends with the signal, at its
//! deadline, or when the group fails; it never traps.
#![allow(unsafe_code, reason = "words of signal pads and the bytes of tensors, by their addresses")]

mod request;

pub use request::{REPORT_WORDS, Signal, SignalTargets, SignalTimeout};

use crate::coll::cuda::agreement::launch_log;
use crate::coll::cuda::arguments::MAX_PEERS;
use crate::coll::cuda::communicator::KERNEL_ABORT_TIMEOUT;
use crate::coll::cuda::failure::abort_flag::AbortFlag;
use crate::coll::cuda::kernels::load;
use crate::control::ControlBlock;
use crate::dtype::SumOrder;
use crate::error::{Error, Result};
use crate::kernels::cuda::compile::Variant;
use crate::kernels::cuda::driver::{
    Device, Event, Grid, Kernel, OwnStream, RelaxedCapture, Stream, pass,
};
use crate::lock::lock;
use crate::mem::device::DeviceTable;
use crate::mem::pinned::PinnedWords;
use crate::rank::Rank;
use std::mem::ManuallyDrop;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// The file and the name of the kernel.
const PROGRAM: (&str, &str) = ("signal/signal", "signal");
/// One warp, with a thread for each peer.
const THREADS: u32 = 32;

/// Signals between the GPUs of a group, through pads that all of them have mapped. One per group
/// and device.
///
/// A pad has a word for each slot and signalling rank, `slot * ranks + source`, initially zero.
/// Each slot carries one signal at a time in each direction: two puts to one rank in one slot, or
/// two waits for one rank, must be ordered.
pub struct GpuSignals {
    control: Arc<ControlBlock>,
    kernel: Kernel,
    enqueued: Mutex<EnqueuedSignal>,
    held: ManuallyDrop<SignalResources>,
    // Dropped last, because the fields above are freed in the device's context.
    device: Arc<Device>,
}

#[derive(Default)]
struct EnqueuedSignal {
    /// Streams on which signals may be in progress.
    streams: Vec<Stream>,
    /// True once no more signals may be enqueued.
    closed: bool,
}

/// Memory and a stream that kernels use, and that belong to the context.
struct SignalResources {
    report: PinnedWords,
    stop: AbortFlag,
    stream: OwnStream,
}

impl GpuSignals {
    /// Loads the kernel now, so that no rank has to load it while kernels of its peers already
    /// wait. From now on the exit of a member fails the group at once. Fails for groups of more
    /// than 8 ranks.
    pub fn new(control: &Arc<ControlBlock>, device: i32) -> Result<Self> {
        let (world, rank) = (control.size(), control.rank());
        if world > MAX_PEERS {
            return Err(Error::config(format!(
                "the GPUs of a group of {world} ranks cannot signal each other; \
                 {MAX_PEERS} is the most"
            )));
        }
        let device = Arc::new(Device::open(device)?);
        let (program, symbol) = PROGRAM;
        let variant = Variant {
            program,
            world: world as u32,
            rank: rank.0,
            dtype: None,
            op: None,
            zero_copy: false,
            order: SumOrder::Rank,
        };
        let _relaxed = RelaxedCapture::begin()?;
        let entered = device.enter()?;
        let kernel = load(&device, &variant, symbol)?;
        let held = SignalResources {
            report: PinnedWords::new(REPORT_WORDS)?,
            stop: AbortFlag::of(control)?,
            stream: OwnStream::new()?,
        };
        drop(entered);
        control.set_kernel_progress(launch_log::progress);
        Ok(Self {
            control: Arc::clone(control),
            kernel,
            enqueued: Mutex::default(),
            held: ManuallyDrop::new(held),
            device,
        })
    }

    /// Enqueues a signal to `peer`, which is sent once `peer` has taken the previous one in this
    /// slot. Earlier work on `stream` is visible after the wait that takes the signal. `pads` has
    /// each rank's pad as mapped for this rank's GPU.
    pub fn put(
        &self,
        pads: &[u64],
        peer: Rank,
        slot: u32,
        timeout: Duration,
        stream: usize,
    ) -> Result<()> {
        self.launch(Signal::Put(peer), pads, slot, timeout, stream)
    }

    /// Enqueues a wait that takes a signal of `peer`.
    pub fn wait(
        &self,
        pads: &[u64],
        peer: Rank,
        slot: u32,
        timeout: Duration,
        stream: usize,
    ) -> Result<()> {
        self.launch(Signal::Wait(peer), pads, slot, timeout, stream)
    }

    /// Enqueues a wait until every rank's stream has reached its barrier in this slot. Work
    /// enqueued before on any of these streams is visible after it.
    pub fn barrier(&self, pads: &[u64], slot: u32, timeout: Duration, stream: usize) -> Result<()> {
        self.launch(Signal::Barrier, pads, slot, timeout, stream)
    }

    fn launch(
        &self,
        signal: Signal,
        pads: &[u64],
        slot: u32,
        timeout: Duration,
        stream: usize,
    ) -> Result<()> {
        if let Some(failure) = self.failure() {
            return Err(failure);
        }
        if pads.len() != self.control.size() {
            let (name, n) = (self.control.name(), self.control.size());
            return Err(Error::internal(format!(
                "{} signal pads for the {n} ranks of group \"{name}\"",
                pads.len()
            )));
        }
        let (stop, report) = (self.held.stop.device(), self.held.report.device());
        let place = SignalTargets { me: self.control.rank(), pads, slot, timeout, stop, report };
        let Some(args) = signal.args(&place)? else { return Ok(()) };
        let stream = Stream(stream);
        let _entered = self.device.enter()?;
        let mut enqueued = lock(&self.enqueued);
        if enqueued.closed {
            return Err(self.control.destroyed());
        }
        if !enqueued.streams.contains(&stream) {
            enqueued.streams.push(stream);
        }
        // If the launch fails, peers would wait for a kernel that never runs, so the group fails.
        self.kernel
            .launch(stream, Grid::new(1, THREADS), false, args.bytes())
            .map_err(|error| self.control.fail(error))
    }

    /// Returns the failure of the group, if any. A signal of this rank that timed out fails the
    /// group when this is called.
    pub fn failure(&self) -> Option<Error> {
        if let Some(failure) = self.control.failure() {
            return Some(failure);
        }
        let words = self.held.report.get();
        let gave_up = SignalTimeout::read(words[0].load(Ordering::Acquire))?;
        let seconds = f64::from(words[1].load(Ordering::Relaxed)) / 1e3;
        let late = self.control.late_ranks(&|rank| gave_up.missing.contains(&rank));
        let (me, name) = (self.control.describe(self.control.rank()), self.control.name());
        let text = format!(
            "{me} reached its timeout after {seconds:.1} s in {gave_up} of group \"{name}\", \
             waiting for {late}"
        );
        Some(self.control.fail(Error::timeout(text)))
    }

    /// Zeroes `bytes` bytes at `address` and waits until that is done; other streams may be being
    /// captured meanwhile.
    pub fn clear(&self, address: u64, bytes: usize) -> Result<()> {
        let _relaxed = RelaxedCapture::begin()?;
        let _entered = self.device.enter()?;
        let stream = self.held.stream.stream();
        stream.fill(address, 0, bytes)?;
        stream.synchronize()
    }

    /// Returns an array on the device that holds `words`: pointers or ranks.
    pub fn table(&self, words: &[u8]) -> Result<DeviceTable> {
        DeviceTable::new(&self.device, &self.held.stream, words)
    }

    /// Waits up to `limit` for the enqueued signals to complete, then makes the pending ones end.
    /// Returns false if some have still not ended; the memory that they use must then be kept. No
    /// signal can be enqueued afterwards, and graphs with such signals must not be replayed.
    #[must_use = "memory that kernels use must not be given back"]
    pub fn drain(&self, limit: Duration) -> bool {
        lock(&self.enqueued).closed = true;
        let streams = lock(&self.enqueued).streams.clone();
        let Ok(events) = self.marked(&streams) else { return false };
        let Ok(_entered) = self.device.enter() else { return false };
        if !pass(&events, limit) {
            self.held.report.get()[0].store(request::CLOSED, Ordering::Release);
            if !pass(&events, KERNEL_ABORT_TIMEOUT) {
                return false;
            }
        }
        lock(&self.enqueued).streams.clear();
        true
    }

    /// Records an event at the current end of each of `streams`.
    fn marked(&self, streams: &[Stream]) -> Result<Vec<Event>> {
        let _relaxed = RelaxedCapture::begin()?;
        let _entered = self.device.enter()?;
        let mut events = Vec::new();
        for &stream in streams {
            // A stream under capture does not run the group's signals.
            if stream.capture()?.is_none() {
                let event = Event::new()?;
                event.record(stream)?;
                events.push(event);
            }
        }
        Ok(events)
    }
}

impl Drop for GpuSignals {
    fn drop(&mut self) {
        if !self.drain(Duration::ZERO) {
            log::warn!(
                "group \"{}\": signals are still under way; what they use stays",
                self.control.name()
            );
            return;
        }
        // The thread that drops this may have no context, and without one the driver would not free
        // the memory.
        if let (Ok(_relaxed), Ok(_entered)) = (RelaxedCapture::begin(), self.device.enter()) {
            // SAFETY: this runs once; `self.held` is not used afterwards, and no kernel uses its
            // memory, since all have ended.
            unsafe { ManuallyDrop::drop(&mut self.held) };
        }
    }
}
