//! A group's state for one kind of memory: links to the peers' heaps, signal pads and signals.

use super::WindowMemory;
use super::allocations;
use super::pad_pool::Pads;
use super::rendezvous_request::{DroppedWindows, RendezvousRequest};
use super::signal_cuda::GpuSignals;
use crate::control::ControlBlock;
use crate::error::{Error, Result};
use crate::lock::{lock, unpoisoned};
use crate::symm_mem::peers::PeerHeaps;
use crate::symm_mem::{self, HOST, Heap};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::Duration;

/// Where a group's windows are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum MemoryKind {
    Cpu,
    Gpu,
}

/// A group's state for one kind of memory.
#[derive(Default)]
pub(super) struct MemoryDomain {
    /// Links to the peers' heaps; set by the first window.
    pub(super) heaps: OnceLock<Arc<PeerHeaps>>,
    pads: Mutex<Pads>,
    /// This rank's device and the signals between the group's GPUs; unset on the host.
    pub(super) signals: OnceLock<(i32, GpuSignals)>,
    /// Memory of dropped windows that graphs of the group may still use.
    recorded: Mutex<Vec<WindowMemory>>,
}

/// The domains of a group. A thread holds the lock during a rendezvous, so that the steps of two
/// rendezvous do not interleave.
#[derive(Default)]
pub struct Domains(pub(super) Mutex<HashMap<MemoryKind, Arc<MemoryDomain>>>);

impl Domains {
    /// Waits up to `limit` for the enqueued signals to complete, then makes the pending ones end.
    /// No signal can be enqueued afterwards.
    pub fn drain(&self, limit: Duration) {
        let domains: Vec<Arc<MemoryDomain>> = lock(&self.0).values().cloned().collect();
        for (_, signals) in domains.iter().filter_map(|domain| domain.signals.get()) {
            if !signals.drain(limit) {
                log::warn!(
                    "signals of a group that is left have not ended, and keep their memory until \
                     this process ends"
                );
            }
        }
    }

    /// Forgets the domains, which belong to another process, without freeing them.
    pub fn invalidate(&mut self) {
        std::mem::forget(std::mem::take(unpoisoned(self.0.get_mut())));
    }
}

impl MemoryDomain {
    pub(super) fn pads(&self) -> MutexGuard<'_, Pads> {
        lock(&self.pads)
    }

    pub(super) fn recorded(&self) -> MutexGuard<'_, Vec<WindowMemory>> {
        lock(&self.recorded)
    }

    /// Returns the signals between the group's GPUs. Called by one thread at a time.
    fn signals(&self, control: &Arc<ControlBlock>, device: i32) -> Result<&GpuSignals> {
        if self.signals.get().is_none() {
            let made = GpuSignals::new(control, device)?;
            self.signals.get_or_init(|| (device, made));
        }
        match self.signals.get() {
            Some((known, signals)) if *known == device => Ok(signals),
            Some((known, _)) => Err(Error::value(format!(
                "group \"{}\" has windows on cuda:{known}, this tensor is on cuda:{device}; a \
                 group has one GPU per rank",
                control.name()
            ))),
            None => Err(Error::internal("signals were just made")),
        }
    }

    /// Prepares this rank's part of a rendezvous: its heap and its offer.
    pub(super) fn prepare(
        &self,
        control: &Arc<ControlBlock>,
        device: i32,
        address: u64,
        pad_bytes: usize,
    ) -> Result<(Arc<Heap>, RendezvousRequest)> {
        let heap = symm_mem::of(device)?;
        let domain = if device == HOST { "the host".into() } else { format!("cuda:{device}") };
        let foreign = || {
            Error::value(format!(
                "the tensor at {address:#x} is not in symmetric memory of {domain}; allocate it \
                 with symm_mem.empty"
            ))
        };
        let (segment, left) = heap.segment(address).ok_or_else(foreign)?;
        if device != HOST {
            self.signals(control, device)?;
        }
        let dropped = self.pads().dropped();
        if dropped != DroppedWindows::default() {
            // Signals to peers' pads of the dropped windows may still be in progress.
            heap.settle()?;
        }
        let pad = self.pads().take(&heap, pad_bytes)?;
        // Cleared before the ranks meet, because peers may signal from then on.
        heap.clear(pad.address, pad.bytes)?;
        let allocation = allocations::find(address);
        let offer = RendezvousRequest {
            host: device == HOST,
            linked: self.heaps.get().is_some(),
            exact: allocation.is_some(),
            number: allocation.map_or(0, |allocation| allocation.number),
            bytes: allocation.map_or(left, |allocation| allocation.bytes) as u64,
            buffer: address - heap.base(),
            pad: pad.address - heap.base(),
            pad_bytes: pad.bytes as u64,
            segment,
            dropped,
            heap: heap.address(),
        };
        Ok((heap, offer))
    }
}

impl Drop for MemoryDomain {
    /// Releases the pads; the group and its windows no longer exist.
    fn drop(&mut self) {
        let pads = std::mem::take(unpoisoned(self.pads.get_mut()));
        let recorded = std::mem::take(unpoisoned(self.recorded.get_mut()));
        // If kernels do not end, nothing can wait for the device, so the memory that they use is
        // kept.
        if self.signals.get().is_some_and(|(_, signals)| !signals.drain(Duration::ZERO)) {
            std::mem::forget((recorded, self.heaps.take()));
            return;
        }
        // Signals end before their memory is freed. Links end before a release of segments waits
        // for the peers at their other ends.
        drop((self.signals.take(), recorded, self.heaps.take()));
        for segment in pads.into_segments() {
            if let Err(error) = symm_mem::release(segment) {
                log::warn!("signal pads of a group that is left stay taken: {error}");
            }
        }
    }
}
