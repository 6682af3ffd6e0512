//! Domain of a group: what it has of one kind of memory: links with the peers' heaps, signal pads, signals.

use super::Memory;
use super::allocations;
use super::offer::{Dropped, Offer};
use super::pad_pool::Pads;
use super::signal_cuda::Signals;
use crate::control::ControlBlock;
use crate::error::{Error, Result};
use crate::lock::{lock, unpoisoned};
use crate::symm_mem::peers::Heaps;
use crate::symm_mem::{self, HOST, Heap};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::Duration;

/// Whether a group's windows lie on the host or on GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Kind {
    Host,
    Gpu,
}

/// Domain: what a group has of one kind of memory.
#[derive(Default)]
pub(super) struct Domain {
    /// Links with the peers' heaps, since the first window.
    pub(super) heaps: OnceLock<Arc<Heaps>>,
    pads: Mutex<Pads>,
    /// Device of this rank and signals between the group's GPUs; unset on the host.
    pub(super) signals: OnceLock<(i32, Signals)>,
    /// Memory of windows that are gone, but that graphs of the group may still use.
    recorded: Mutex<Vec<Memory>>,
}

/// The domains of a group. Locked while the ranks meet: they take one step after another.
#[derive(Default)]
pub struct Domains(pub(super) Mutex<HashMap<Kind, Arc<Domain>>>);

impl Domains {
    /// Waits until signals that were enqueued are done, at most `limit`; those that are not are made to end. None can be enqueued
    /// afterwards.
    pub fn drain(&self, limit: Duration) {
        let domains: Vec<Arc<Domain>> = lock(&self.0).values().cloned().collect();
        for (_, signals) in domains.iter().filter_map(|domain| domain.signals.get()) {
            if !signals.drain(limit) {
                log::warn!("signals of a group that is left have not ended, and keep their memory until this process ends");
            }
        }
    }

    /// Lets go of what is another process's.
    pub fn forget(&mut self) {
        std::mem::forget(std::mem::take(unpoisoned(self.0.get_mut())));
    }
}

impl Domain {
    pub(super) fn pads(&self) -> MutexGuard<'_, Pads> {
        lock(&self.pads)
    }

    pub(super) fn recorded(&self) -> MutexGuard<'_, Vec<Memory>> {
        lock(&self.recorded)
    }

    /// Signals between the group's GPUs. Called by one thread at a time.
    fn signals(&self, control: &Arc<ControlBlock>, device: i32) -> Result<&Signals> {
        if self.signals.get().is_none() {
            let made = Signals::new(control, device)?;
            self.signals.get_or_init(|| (device, made));
        }
        match self.signals.get() {
            Some((known, signals)) if *known == device => Ok(signals),
            Some((known, _)) => Err(Error::value(format!(
                "group \"{}\" has windows on cuda:{known}, this tensor is on cuda:{device}; a group has one GPU per rank",
                control.name()
            ))),
            None => Err(Error::internal("signals were just made")),
        }
    }

    /// Part of this rank in a rendezvous: its heap, and its offer.
    pub(super) fn prepare(&self, control: &Arc<ControlBlock>, device: i32, address: u64, pad_bytes: usize) -> Result<(Arc<Heap>, Offer)> {
        let heap = symm_mem::of(device)?;
        let domain = if device == HOST { "the host".into() } else { format!("cuda:{device}") };
        let foreign =
            || Error::value(format!("the tensor at {address:#x} is not in symmetric memory of {domain}; allocate it with symm_mem.empty"));
        let (segment, left) = heap.segment(address).ok_or_else(foreign)?;
        if device != HOST {
            self.signals(control, device)?;
        }
        let dropped = self.pads().dropped();
        if dropped != Dropped::default() {
            // Signals to peers' pads of those windows may be under way.
            heap.settle()?;
        }
        let pad = self.pads().take(&heap, pad_bytes)?;
        // Before the ranks meet: none of them signals earlier.
        heap.clear(pad.address, pad.bytes)?;
        let allocation = allocations::find(address);
        let offer = Offer {
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

impl Drop for Domain {
    /// Gives the pads back; their group and its windows are gone.
    fn drop(&mut self) {
        let pads = std::mem::take(unpoisoned(self.pads.get_mut()));
        let recorded = std::mem::take(unpoisoned(self.recorded.get_mut()));
        // Nobody could wait for the device while kernels run that do not end: what they use stays.
        if self.signals.get().is_some_and(|(_, signals)| !signals.drain(Duration::ZERO)) {
            std::mem::forget(recorded);
            return;
        }
        // Signals end before their memory goes, links before anybody waits for the peers at their other ends.
        drop((self.signals.take(), recorded, self.heaps.take()));
        for segment in pads.into_segments() {
            if let Err(error) = symm_mem::release(segment) {
                log::warn!("signal pads of a group that is left stay taken: {error}");
            }
        }
    }
}
