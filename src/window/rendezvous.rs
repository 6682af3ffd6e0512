//! Rendezvous: all ranks of a group open a window together.

use super::domain::{Domains, MemoryDomain, MemoryKind};
use super::rendezvous_request::{self, RendezvousRequest};
use super::{SymmetricWindow, Tables, WindowMemory, WindowPins};
use crate::coll::call::Span;
use crate::control::ControlBlock;
use crate::error::{Error, Result};
use crate::lock::lock;
use crate::rank::Rank;
use crate::symm_mem::peers::{AllGather, PeerHeaps, PeerHeapsCell, StepFn, step, wait_budget};
use crate::symm_mem::{FailureCheck, HOST, Heap};
use crate::sync::timeout::CallTimeout;
use crate::sys::fork::ProcessOwned;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

/// The inputs of a rendezvous: the group whose ranks meet, and its deadline.
pub struct RendezvousContext<'a> {
    /// Control block of the group.
    pub control: &'a Arc<ControlBlock>,
    /// Sends every rank's bytes to every rank.
    pub gather: &'a AllGather<'a>,
    /// The deadline of the rendezvous.
    pub limit: &'a CallTimeout,
    /// Fails if this rank must not wait any longer, whatever the deadline.
    pub check: &'a dyn Fn() -> Result<()>,
    /// Where the group's collectives find the linked heaps of host memory.
    pub linked: &'a PeerHeapsCell,
    /// Default timeout of the window's signals.
    pub timeout: Duration,
}

impl Domains {
    /// Collective. Opens a window on the memory that each rank has at its `address`: memory of CUDA
    /// device `device`, or of the host if `device` is negative. The addresses may differ between
    /// ranks. Each rank gets a signal pad of at least `pad_bytes`. Fails on all ranks: with
    /// `Mismatch` if sizes differ, with `Value` if the memory of one rank is not symmetric.
    pub fn rendezvous(
        &self,
        meeting: &RendezvousContext<'_>,
        device: i32,
        address: u64,
        pad_bytes: usize,
    ) -> Result<SymmetricWindow> {
        let kind = if device == HOST { MemoryKind::Cpu } else { MemoryKind::Gpu };
        let mut domains = lock(&self.0);
        let named = |error: Error| Error {
            message: format!("rendezvous of symmetric memory: {}", error.message),
            ..error
        };
        let gather = |bytes: &[u8]| (meeting.gather)(bytes).map_err(named);
        let control = meeting.control;
        let step = |bytes: usize, own: Result<Vec<u8>>| {
            step(&gather, control, "share memory in", bytes, own)
        };
        let domain = Arc::clone(domains.entry(kind).or_default());
        let prepared = domain.prepare(control, device, address, pad_bytes);
        let outcome = meeting.open(&domain, &prepared, &step);
        if let (Err(_), Ok((heap, own))) = (&outcome, &prepared) {
            domain.pads().return_pad(heap.base(), own);
        }
        outcome
    }
}

impl RendezvousContext<'_> {
    /// Opens the window once this rank has prepared its part or failed to.
    fn open(
        &self,
        domain: &Arc<MemoryDomain>,
        prepared: &Result<(Arc<Heap>, RendezvousRequest)>,
        step: &StepFn<'_>,
    ) -> Result<SymmetricWindow> {
        let (control, limit) = (self.control, self.limit);
        let messages = prepared.as_ref().map_err(Clone::clone).map(|(_, offer)| offer.encode());
        let messages = step(RendezvousRequest::BYTES, messages)?;
        let (heap, _) = prepared.as_ref().map_err(Clone::clone)?;
        let all: Vec<RendezvousRequest> =
            messages.iter().map(|bytes| RendezvousRequest::decode(bytes)).collect();
        rendezvous_request::compare(control, &all)?;
        let me = control.rank().index();
        let own = &all[me];
        let heaps = match domain.heaps.get().filter(|_| all.iter().all(|offer| offer.linked)) {
            Some(heaps) => heaps,
            None => {
                let heaps = self.link(heap, &all, step)?;
                let heaps = domain.heaps.get_or_init(|| Arc::new(heaps));
                // Set before a step in which all ranks take part, so that no rank passes an address
                // in symmetric memory to a rank that does not check for such addresses yet.
                if own.host {
                    self.linked.set(heaps);
                }
                heaps
            }
        };
        let bytes = all.iter().map(|offer| offer.bytes).min().unwrap_or(0) as usize;
        let deadline = Instant::now() + wait_budget(limit);
        let lacking = |offset: u64, bytes: usize| {
            let addr = (heap.base() + offset) as usize;
            heaps.unmapped_by(Span { addr, bytes: bytes.max(1) }, deadline, self.check)
        };
        let reach = |lacking: Vec<Rank>, bytes: usize| {
            if lacking.is_empty() {
                return Ok(());
            }
            let names: Vec<String> =
                lacking.into_iter().map(|rank| control.describe(rank)).collect();
            let own = control.describe(control.rank());
            Err(Error::config(format!(
                "{bytes} bytes of {own} have not been mapped by {}",
                names.join(", ")
            )))
        };
        let pad_bytes = own.pad_bytes as usize;
        let (without, without_pad) = (lacking(own.buffer, bytes)?, lacking(own.pad, pad_bytes)?);
        let reached = reach(without, bytes).and_then(|()| reach(without_pad, pad_bytes));
        step(0, reached.map(|()| Vec::new()))?;
        // Peers' addresses are checked below: all of the memory is pinned, or the window does not
        // open.
        let at = |offset: fn(&RendezvousRequest) -> u64| {
            heaps
                .bases
                .iter()
                .zip(&all)
                .map(move |(base, offer)| base.wrapping_add(offset(offer)))
                .collect::<Vec<_>>()
        };
        let (buffers, pads) = (at(|offer| offer.buffer), at(|offer| offer.pad));
        let global_ranks: Vec<i32> =
            control.ranks().map(|rank| control.global(rank) as i32).collect();
        let pin = || {
            let (own, mut pins) = (heap.show(heap.base() + own.buffer, bytes)?, Vec::new());
            for (rank, offer) in all.iter().enumerate().filter(|&(rank, _)| rank != me) {
                for (offset, bytes) in
                    [(offer.buffer, bytes), (offer.pad, offer.pad_bytes as usize)]
                {
                    let gone = || {
                        Error::config(format!(
                            "{} has given its memory back meanwhile",
                            control.describe(Rank(rank as u32))
                        ))
                    };
                    pins.extend(heaps.pin(rank, offset, bytes).ok_or_else(gone)?);
                }
            }
            let Some((_, signals)) = domain.signals.get() else {
                return Ok(WindowMemory { tables: Tables::Cpu, _pins: pins, _own: own });
            };
            let addresses = |all: &[u64]| {
                all.iter().flat_map(|address| address.to_ne_bytes()).collect::<Vec<u8>>()
            };
            let ranks: Vec<u8> = global_ranks.iter().flat_map(|rank| rank.to_ne_bytes()).collect();
            let table = |bytes: &[u8]| signals.table(bytes);
            let tables = Tables::Gpu {
                buffers: table(&addresses(&buffers))?,
                pads: table(&addresses(&pads))?,
                ranks: table(&ranks)?,
            };
            Ok(WindowMemory { tables, _pins: pins, _own: own })
        };
        let pinned = pin();
        step(0, pinned.as_ref().map_err(Clone::clone).map(|_| Vec::new()))?;
        let memory = Some(pinned?);
        let pad = domain.pads().opened(&all, heap.base(), own);
        Ok(SymmetricWindow {
            buffers,
            pads,
            global_ranks,
            control: Arc::clone(control),
            bytes,
            pad,
            segment: own.segment,
            timeout: self.timeout,
            recorded: AtomicBool::new(false),
            held: ProcessOwned::new(WindowPins { domain: Arc::clone(domain), memory }),
        })
    }

    /// Links this rank's heap with the heaps of all other ranks.
    fn link(
        &self,
        heap: &Arc<Heap>,
        all: &[RendezvousRequest],
        step: &StepFn<'_>,
    ) -> Result<PeerHeaps> {
        if all.len() == 1 {
            return Ok(PeerHeaps::single_rank(heap));
        }
        let requested = Arc::downgrade(self.control);
        let failed: FailureCheck = Arc::new(move || {
            requested.upgrade().is_some_and(|control| control.failure().is_some())
        });
        let addresses: Vec<_> = all.iter().map(|offer| Some(offer.heap)).collect();
        let heaps =
            PeerHeaps::link(self.control, step, Some(heap), &addresses, &failed, self.limit)?;
        let refused = |lacking| {
            Error::config(format!(
                "the processes of group \"{}\" cannot give each other memory: {lacking}",
                self.control.name()
            ))
        };
        heaps.map_err(refused)
    }
}
