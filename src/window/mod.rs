//! Symmetric memory of a group: what every rank has at an address of its own, as one of them reaches it, with signals beside it.
#![allow(unsafe_code, reason = "words of signal pads and the bytes of tensors, by their addresses")]

pub mod allocations;
mod domain;
mod offer;
pub mod operators;
mod pad_pool;
mod rendezvous;
pub mod signal_cuda;
pub mod signal_host;

use crate::control::ControlBlock;
use crate::error::{Error, Result};
use crate::kernels::cuda::driver::Stream;
use crate::mem::device::DeviceTable;
use crate::rank::Rank;
use crate::symm_mem::{OwnPin, Pin};
use crate::sys::fork::OfProcess;
use domain::Domain;
pub use domain::Domains;
use pad_pool::Pad;
pub use rendezvous::Meeting;
use signal_cuda::Signals;
use signal_host::SignalPads;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Place at which a device finds the arrays of a window.
enum Tables {
    /// Arrays in the window itself.
    Host,
    Gpu {
        buffers: DeviceTable,
        pads: DeviceTable,
        ranks: DeviceTable,
    },
}

/// Window onto the memory of all ranks of a group. This rank's own memory lives as long as its windows, whoever gives it back. Memory that
/// peers give back meanwhile stays mapped, so that no access faults; what it holds then means nothing. In a forked child every use is
/// refused.
pub struct SymmetricWindow {
    control: Arc<ControlBlock>,
    /// Address in this process of each rank's buffer.
    buffers: Vec<u64>,
    /// Address in this process of each rank's signal pad.
    pads: Vec<u64>,
    global_ranks: Vec<i32>,
    bytes: usize,
    pad: Pad,
    /// Names the segment that this rank's buffer lies in.
    segment: u64,
    timeout: Duration,
    /// A graph may use it: it lasts as long as its group.
    recorded: AtomicBool,
    held: OfProcess<Held>,
}

/// Resources that a window keeps: memory of all ranks where this process has it mapped.
struct Held {
    domain: Arc<Domain>,
    memory: Option<Memory>,
}

/// Memory that a window shows; [`Held`] keeps it.
struct Memory {
    tables: Tables,
    _pins: Vec<Pin>,
    _own: OwnPin,
}

impl SymmetricWindow {
    /// Number of this rank.
    pub fn rank(&self) -> Rank {
        self.control.rank()
    }

    /// Bytes of each rank's buffer.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Address of each rank's buffer in this process, or on its device.
    pub fn buffers(&self) -> &[u64] {
        &self.buffers
    }

    /// Address of each rank's signal pad in this process, or on its device.
    pub fn pads(&self) -> &[u64] {
        &self.pads
    }

    /// Ranks of the members in the default group.
    pub fn global_ranks(&self) -> &[i32] {
        &self.global_ranks
    }

    /// Address at which the device finds `buffers` as an array.
    pub fn buffer_table(&self) -> u64 {
        match self.tables() {
            Tables::Host => self.buffers.as_ptr() as u64,
            Tables::Gpu { buffers, .. } => buffers.address(),
        }
    }

    /// Address at which the device finds `pads` as an array.
    pub fn pad_table(&self) -> u64 {
        match self.tables() {
            Tables::Host => self.pads.as_ptr() as u64,
            Tables::Gpu { pads, .. } => pads.address(),
        }
    }

    /// Address at which the device finds `global_ranks` as an array.
    pub fn rank_table(&self) -> u64 {
        match self.tables() {
            Tables::Host => self.global_ranks.as_ptr() as u64,
            Tables::Gpu { ranks, .. } => ranks.address(),
        }
    }

    /// Signals between GPUs; `None` on the host.
    fn gpu(&self) -> Option<&Signals> {
        self.held.domain.signals.get().map(|(_, signals)| signals)
    }

    /// Signals between GPUs, to be used on `stream`, which may be recorded into a graph; `None` on the host.
    fn gpu_on(&self, stream: usize) -> Option<&Signals> {
        let signals = self.gpu()?;
        if Stream(stream).capture().is_ok_and(|capture| capture.is_some()) {
            self.record();
        }
        Some(signals)
    }

    fn tables(&self) -> &Tables {
        self.held.memory.as_ref().map_or(&Tables::Host, |memory| &memory.tables)
    }

    /// Refuses to be used in a forked child, whose signals would be its parent's.
    pub fn check_process(&self) -> Result<()> {
        if self.held.is_own() {
            return Ok(());
        }
        let (name, maker, child) = (self.control.name(), self.control.pid(self.rank()), std::process::id());
        Err(Error::config(format!(
            "a window of group \"{name}\" was made by process {maker}, of which process {child} is a forked child; make a new group in the child"
        )))
    }

    /// A graph that is being recorded uses it: it stays until the group goes, as graphs with signals of a group do.
    pub fn record(&self) {
        self.recorded.store(true, Ordering::Relaxed);
    }

    /// Runs `body`. A panic in it fails the group on all ranks.
    pub fn contain<T>(&self, body: impl FnOnce() -> Result<T>) -> Result<T> {
        self.control.contain(body)
    }

    /// Why a signal of this rank has failed that nobody waited for, or the group, if one has.
    pub fn failure(&self) -> Option<Error> {
        self.gpu().map_or_else(|| self.control.failure(), Signals::failure)
    }

    /// Whether the memory that it was made of is still this rank's.
    pub fn is_current(&self) -> bool {
        // In a child the parent's locks may be held for ever.
        if !self.held.is_own() {
            return false;
        }
        let own = self.buffers[self.rank().index()];
        let segment = self.held.domain.heaps.get().and_then(|heaps| heaps.heap().segment(own));
        segment.is_some_and(|(id, _)| id == self.segment)
    }

    /// Slot of torch's `channel`, and the limit of a signal, if both are sound and nothing has failed.
    fn checked(&self, channel: i32, timeout: Option<Duration>) -> Result<(u32, Duration)> {
        self.check_process()?;
        if let Some(error) = self.failure() {
            return Err(error);
        }
        // Peers that have left as well could still meet in memory that stays mapped.
        if self.control.absence(self.rank()).is_some() {
            return Err(Error::aborted(format!("group \"{}\" was destroyed", self.control.name())));
        }
        let slot = SignalPads::slot(channel, self.pad.bytes, self.control.size())?;
        Ok((slot, timeout.unwrap_or(self.timeout)))
    }

    fn on_host(&self) -> SignalPads<'_> {
        // SAFETY: `rendezvous` saw that the pads are memory of all ranks, cleared, of this size, and pinned while `self` lives.
        unsafe { SignalPads::new(&self.control, &self.pads, self.pad.bytes) }
    }

    /// Returns once all ranks have called it on this `channel`: what they wrote before is visible then. Fails with `Timeout`, naming who is
    /// missing; the group goes on, the channel is as the ranks left it. On a GPU it is enqueued on `stream`, its failure fails the group,
    /// and a later call tells.
    pub fn barrier(&self, channel: i32, timeout: Option<Duration>, stream: usize) -> Result<()> {
        let (slot, timeout) = self.checked(channel, timeout)?;
        match self.gpu_on(stream) {
            Some(signals) => signals.barrier(&self.pads, slot, timeout, stream),
            None => self.on_host().barrier(slot, timeout),
        }
    }

    /// Sets this rank's word of `channel` in the pad of `peer`, once it is clear.
    pub fn put_signal(&self, peer: i32, channel: i32, timeout: Option<Duration>, stream: usize) -> Result<()> {
        let (peer, (slot, timeout)) = (self.peer(peer)?, self.checked(channel, timeout)?);
        match self.gpu_on(stream) {
            Some(signals) => signals.put(&self.pads, peer, slot, timeout, stream),
            None => self.on_host().put(peer, slot, timeout),
        }
    }

    /// Clears the word of `peer` on `channel` in this rank's pad, once it is set.
    pub fn wait_signal(&self, peer: i32, channel: i32, timeout: Option<Duration>, stream: usize) -> Result<()> {
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
            held.domain.pads().note_dropped(self.pad);
        }
    }
}
