//! Symmetric memory of a group: every rank's buffer at addresses that this rank can access, and a
//! signal pad for each.
#![allow(unsafe_code, reason = "words of signal pads and the bytes of tensors, by their addresses")]

pub mod allocations;
mod domain;
pub mod operators;
mod pad_pool;
mod rendezvous;
mod rendezvous_request;
pub mod signal_cuda;
pub mod signal_host;

use crate::control::ControlBlock;
use crate::dtype::SumOrder;
use crate::error::{Error, Result};
use crate::kernels::cuda::driver::Stream;
use crate::mem::device::DeviceTable;
use crate::rank::Rank;
use crate::symm_mem::{OwnPin, SegmentPin};
use crate::sys::fork::ProcessOwned;
pub use domain::Domains;
use domain::MemoryDomain;
use pad_pool::Pad;
pub use rendezvous::RendezvousContext;
use signal_cuda::GpuSignals;
use signal_host::SignalPads;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// The arrays of addresses that a device reads.
enum Tables {
    /// The arrays of the window itself.
    Cpu,
    Gpu {
        buffers: DeviceTable,
        pads: DeviceTable,
        ranks: DeviceTable,
    },
}

/// A view of the memory of all ranks of a group. This rank's memory lives as long as its windows,
/// even if it is freed in the meantime. Memory that a peer frees stays mapped, so that no access
/// faults, but its content is undefined. In a forked child every use fails.
pub struct SymmetricWindow {
    control: Arc<ControlBlock>,
    /// Address of each rank's buffer in this process.
    buffers: Vec<u64>,
    /// Address of each rank's signal pad in this process.
    pads: Vec<u64>,
    global_ranks: Vec<i32>,
    bytes: usize,
    pad: Pad,
    /// Id of the segment that contains this rank's buffer.
    segment: u64,
    timeout: Duration,
    /// True if a graph may use the window, which then lasts as long as its group.
    recorded: AtomicBool,
    held: ProcessOwned<WindowPins>,
}

/// The resources of a window: the mapped memory of all ranks.
struct WindowPins {
    domain: Arc<MemoryDomain>,
    memory: Option<WindowMemory>,
}

/// The memory that a window maps.
struct WindowMemory {
    tables: Tables,
    _pins: Vec<SegmentPin>,
    _own: OwnPin,
}

impl SymmetricWindow {
    /// Returns the order in which reductions combine the ranks' elements.
    pub(crate) fn order(&self) -> SumOrder {
        self.control.order()
    }

    /// Returns this rank's number.
    pub fn rank(&self) -> Rank {
        self.control.rank()
    }

    /// Returns the size of each rank's buffer in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns the address of each rank's buffer in this process, or on its device.
    pub fn buffers(&self) -> &[u64] {
        &self.buffers
    }

    /// Returns the address of each rank's signal pad in this process, or on its device.
    pub fn pads(&self) -> &[u64] {
        &self.pads
    }

    /// Returns the members' ranks in the default group.
    pub fn global_ranks(&self) -> &[i32] {
        &self.global_ranks
    }

    /// Returns the address at which the device can read `buffers` as an array.
    pub fn buffer_table(&self) -> u64 {
        match self.tables() {
            Tables::Cpu => self.buffers.as_ptr() as u64,
            Tables::Gpu { buffers, .. } => buffers.address(),
        }
    }

    /// Returns the address at which the device can read `pads` as an array.
    pub fn pad_table(&self) -> u64 {
        match self.tables() {
            Tables::Cpu => self.pads.as_ptr() as u64,
            Tables::Gpu { pads, .. } => pads.address(),
        }
    }

    /// Returns the address at which the device can read `global_ranks` as an array.
    pub fn rank_table(&self) -> u64 {
        match self.tables() {
            Tables::Cpu => self.global_ranks.as_ptr() as u64,
            Tables::Gpu { ranks, .. } => ranks.address(),
        }
    }

    /// Returns the signals between GPUs; `None` on the host.
    fn gpu(&self) -> Option<&GpuSignals> {
        self.held.domain.signals.get().map(|(_, signals)| signals)
    }

    /// Returns the signals between GPUs for use on `stream`, which may be being captured; `None` on
    /// the host.
    fn gpu_on(&self, stream: usize) -> Option<&GpuSignals> {
        let signals = self.gpu()?;
        if Stream(stream).capture().is_ok_and(|capture| capture.is_some()) {
            self.record();
        }
        Some(signals)
    }

    fn tables(&self) -> &Tables {
        self.held.memory.as_ref().map_or(&Tables::Cpu, |memory| &memory.tables)
    }

    /// Fails in a forked child, whose signals would look like its parent's.
    pub fn check_process(&self) -> Result<()> {
        if self.held.is_own() {
            return Ok(());
        }
        let (name, maker, child) =
            (self.control.name(), self.control.pid(self.rank()), std::process::id());
        Err(Error::config(format!(
            "a window of group \"{name}\" was made by process {maker}, of which process {child} is \
             a forked child; make a new group in the child"
        )))
    }

    /// Notes that a graph being recorded uses the window. The window is then kept until the group
    /// is destroyed, because a graph with signals may be replayed until then.
    pub fn record(&self) {
        self.recorded.store(true, Ordering::Relaxed);
    }

    /// Runs `body`. A panic in it fails the group on all ranks.
    pub fn contain<T>(&self, body: impl FnOnce() -> Result<T>) -> Result<T> {
        self.control.contain(body)
    }

    /// Returns the failure of the group, or of a signal of this rank for which no thread waited.
    pub fn failure(&self) -> Option<Error> {
        self.gpu().map_or_else(|| self.control.failure(), GpuSignals::failure)
    }

    /// Returns true if this rank still holds the memory from which the window was made.
    pub fn is_current(&self) -> bool {
        // In a child, the parent's locks may be held forever.
        if !self.held.is_own() {
            return false;
        }
        let own = self.buffers[self.rank().index()];
        let segment = self.held.domain.heaps.get().and_then(|heaps| heaps.heap().segment(own));
        segment.is_some_and(|(id, _)| id == self.segment)
    }

    /// Returns the slot of torch's `channel` and the timeout of a signal, if both are valid and
    /// nothing has failed.
    fn checked(&self, channel: i32, timeout: Option<Duration>) -> Result<(u32, Duration)> {
        self.check_process()?;
        if let Some(error) = self.failure() {
            return Err(error);
        }
        // Otherwise ranks that have all left could still signal each other in memory that stays
        // mapped.
        if self.control.exit_reason(self.rank()).is_some() {
            return Err(self.control.destroyed());
        }
        let slot = SignalPads::slot(channel, self.pad.signal_bytes(), self.control.size())?;
        Ok((slot, timeout.unwrap_or(self.timeout)))
    }

    fn on_host(&self) -> SignalPads<'_> {
        // SAFETY: `rendezvous` checked that the pads are cleared memory of all ranks with this
        // size, and it pinned them for the life of `self`.
        unsafe { SignalPads::new(&self.control, &self.pads, self.pad.signal_bytes()) }
    }

    /// Returns once all ranks have called `barrier` on this `channel`; their earlier writes are
    /// then visible. A timeout is a `Timeout` error that names the missing ranks; the group
    /// continues, and the channel stays as the ranks left it. On a GPU the barrier is enqueued on
    /// `stream`; its failure fails the group, and a later call reports it.
    pub fn barrier(&self, channel: i32, timeout: Option<Duration>, stream: usize) -> Result<()> {
        let (slot, timeout) = self.checked(channel, timeout)?;
        match self.gpu_on(stream) {
            Some(signals) => signals.barrier(&self.pads, slot, timeout, stream),
            None => self.on_host().barrier(slot, timeout),
        }
    }

    /// Waits until this rank's word of `channel` in the pad of `peer` is clear, then sets it.
    pub fn put_signal(
        &self,
        peer: i32,
        channel: i32,
        timeout: Option<Duration>,
        stream: usize,
    ) -> Result<()> {
        let (peer, (slot, timeout)) = (self.peer(peer)?, self.checked(channel, timeout)?);
        match self.gpu_on(stream) {
            Some(signals) => signals.put(&self.pads, peer, slot, timeout, stream),
            None => self.on_host().put(peer, slot, timeout),
        }
    }

    /// Waits until `peer` has set its word on `channel` in this rank's pad, then clears the word.
    pub fn wait_signal(
        &self,
        peer: i32,
        channel: i32,
        timeout: Option<Duration>,
        stream: usize,
    ) -> Result<()> {
        let (peer, (slot, timeout)) = (self.peer(peer)?, self.checked(channel, timeout)?);
        match self.gpu_on(stream) {
            Some(signals) => signals.wait(&self.pads, peer, slot, timeout, stream),
            None => self.on_host().wait(peer, slot, timeout),
        }
    }

    fn peer(&self, peer: i32) -> Result<Rank> {
        let n = self.control.size();
        let known = u32::try_from(peer).ok().filter(|&peer| (peer as usize) < n).map(Rank);
        known.ok_or_else(|| Error::value(format!("rank {peer} is outside the group of {n} ranks")))
    }
}

impl Drop for SymmetricWindow {
    fn drop(&mut self) {
        let Some(held) = self.held.own_mut() else { return };
        if self.recorded.load(Ordering::Relaxed) {
            let memory = held.memory.take();
            held.domain.recorded().extend(memory);
        } else {
            held.domain.pads().record_dropped(self.pad);
        }
    }
}
