//! All-reduce and reduce: each rank reduces its share of every chunk, then all ranks (or the root)
//! collect the shares.
//!
//! Under every plan, an element is combined over the ranks in the group's order, so every rank gets
//! the same bits.
#![allow(unsafe_code, reason = "copies between the group's memory and the bytes of tensors")]

use super::CpuCall;
use super::exchange::{StageCounters, chunk_of};
use super::helpers::{CopyItem, Helpers};
use super::pipeline::{self, ChunkOps, ResultSharing};
use crate::coll::call::{CallSpec, Collective, Span};
use crate::coll::plan::CpuPlan;
use crate::control::ControlBlock;
use crate::error::Result;
use crate::kernels::cpu::{self, InputElements, WriteMode};
use crate::mem::layout::MAX_RANKS;
use crate::rank::Rank;

impl CpuCall<'_> {
    pub(super) fn all_reduce(&mut self, plan: CpuPlan) -> Result<()> {
        let (control, call) = (self.control, self.call);
        let me = control.rank();
        match plan {
            CpuPlan::Inline => {
                if let Some(output) = call.outputs.first() {
                    // An array, because an allocation takes a noticeable part of such a call's
                    // time.
                    let mut sources =
                        [InputElements { ptr: std::ptr::null(), factor: 1.0 }; MAX_RANKS];
                    let sources = &mut sources[..control.size()];
                    for (source, rank) in sources.iter_mut().zip(control.ranks()) {
                        *source = if rank == me {
                            self.own(0)
                        } else {
                            self.peer(rank, self.posted(rank))
                        };
                    }
                    self.reduce(output.ptr(), sources, output.bytes, WriteMode::Cached);
                }
                Ok(())
            }
            CpuPlan::Staged { chunk, store } => {
                let input = call.inputs[0];
                let mut chunks = Shares {
                    control,
                    call,
                    input,
                    output: call.outputs.first().copied(),
                    factors: control.ranks().map(|rank| self.factor(rank)).collect(),
                    helpers: Helpers::of(call.total()),
                    sources: Vec::with_capacity(control.size()),
                    copies: Vec::with_capacity(control.size()),
                    chunk,
                    store,
                };
                let count = input.bytes.div_ceil(chunk) as u64;
                pipeline::run(&mut StageCounters(self), ResultSharing::Two, count, &mut chunks)
            }
        }
    }
}

/// The shares of one rank in a message that moves in chunks.
struct Shares<'a> {
    control: &'a ControlBlock,
    call: &'a CallSpec<'a>,
    input: Span,
    output: Option<Span>,
    factors: Vec<f64>,
    helpers: Helpers,
    sources: Vec<InputElements>,
    copies: Vec<CopyItem>,
    chunk: usize,
    store: WriteMode,
}

impl Shares<'_> {
    /// Returns the offset and length of the share of `rank` in a chunk of `bytes` bytes; shares are
    /// whole elements.
    fn share(&self, rank: Rank, bytes: usize) -> (usize, usize) {
        let share = bytes.div_ceil(self.control.size()).next_multiple_of(64);
        chunk_of(bytes, share, rank.0.into())
    }

    fn slot(&self, rank: Rank, slot: usize) -> *mut u8 {
        self.control.segment().ptr(self.control.layout().input(rank, slot), self.chunk)
    }

    fn result(&self, rank: Rank, slot: usize) -> *mut u8 {
        let layout = self.control.layout();
        self.control.segment().ptr(layout.result(rank, slot), layout.result_bytes())
    }
}

impl ChunkOps for Shares<'_> {
    fn produce(&mut self, t: u64, slot: usize) {
        let me = self.control.rank();
        let (start, bytes) = chunk_of(self.input.bytes, self.chunk, t);
        // No peer reads this rank's own share, so it is not staged.
        let (own, own_bytes) = self.share(me, bytes);
        let (from, to) = (self.input.ptr().wrapping_add(start), self.slot(me, slot));
        let after = own + own_bytes;
        let copies = [
            CopyItem::new(to, from, own),
            CopyItem::new(to.wrapping_add(after), from.wrapping_add(after), bytes - after),
        ];
        // SAFETY: own + own_bytes <= bytes <= chunk; the slot is this rank's and free in this stage
        // (pipeline).
        unsafe { self.helpers.copy(&copies, cpu::STAGING) }
    }

    fn consume(&mut self, t: u64, slot: usize, result: usize) {
        let me = self.control.rank();
        let (start, bytes) = chunk_of(self.input.bytes, self.chunk, t);
        let (own, own_bytes) = self.share(me, bytes);
        self.sources.clear();
        for rank in self.control.ranks() {
            let ptr = if rank == me {
                self.input.ptr().wrapping_add(start)
            } else {
                self.slot(rank, slot)
            };
            self.sources.push(InputElements {
                ptr: ptr.wrapping_add(own),
                factor: self.factors[rank.index()],
            });
        }
        let shared = self.result(me, result);
        let dst = self.output.map(|output| output.ptr().wrapping_add(start + own));
        let (to, twin, store) = match dst {
            // The root of a reduce does not publish its share.
            Some(dst) if self.call.op == Collective::Reduce => (dst, None, self.store),
            Some(dst) => (shared, Some(dst), self.store),
            None => (shared, None, WriteMode::Cached),
        };
        // SAFETY: the result slot, the slots (pipeline) and the output, which is as long as the
        // input, have own_bytes bytes.
        unsafe {
            self.helpers.reduce(
                (self.control.order(), self.call),
                to,
                &self.sources,
                own_bytes,
                twin,
                store,
            )
        }
    }

    fn finish(&mut self, t: u64, result: usize) {
        let Some(output) = self.output else { return };
        let (start, bytes) = chunk_of(self.input.bytes, self.chunk, t);
        self.copies.clear();
        for peer in self.control.peers() {
            let (share, share_bytes) = self.share(peer, bytes);
            self.copies.push(CopyItem::new(
                output.ptr().wrapping_add(start + share),
                self.result(peer, result),
                share_bytes,
            ));
        }
        // SAFETY: start + share + share_bytes <= output.bytes; the peers' result slots hold their
        // shares of chunk `t` (pipeline).
        unsafe { self.helpers.copy(&self.copies, self.store) }
    }
}
