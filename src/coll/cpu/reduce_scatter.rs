//! Reduce-scatter: each rank reduces its own message from all ranks' posts or slots.
#![allow(unsafe_code, reason = "copies between the group's memory and the bytes of tensors")]

use super::CpuCall;
use super::exchange::{StageCounters, chunk_of};
use super::helpers::{CopyItem, Helpers};
use super::pipeline::{self, ChunkOps, ResultSharing};
use crate::coll::call::{CallSpec, Span};
use crate::coll::plan::CpuPlan;
use crate::dtype::SumOrder;
use crate::error::Result;
use crate::kernels::cpu::{self, InputElements, WriteMode};
use crate::rank::Rank;

impl CpuCall<'_> {
    pub(super) fn reduce_scatter(&mut self, plan: CpuPlan) -> Result<()> {
        let (control, call) = (self.control, self.call);
        let (me, output) = (control.rank(), call.outputs[0]);
        match plan {
            CpuPlan::Inline => {
                let skipped: usize = call.inputs[..me.index()].iter().map(|span| span.bytes).sum();
                let sources: Vec<InputElements> = control
                    .ranks()
                    .map(|rank| {
                        if rank == me {
                            self.own(me.index())
                        } else {
                            self.peer(rank, self.posted(rank).wrapping_add(skipped))
                        }
                    })
                    .collect();
                self.reduce(output.ptr(), &sources, output.bytes, WriteMode::Cached);
                Ok(())
            }
            CpuPlan::Staged { chunk, store } => {
                let count = call.longest().div_ceil(chunk) as u64;
                let step: &CpuCall<'_> = self;
                let factors: Vec<f64> = control.ranks().map(|rank| step.factor(rank)).collect();
                let mut chunks = Scatter {
                    order: control.order(),
                    call,
                    helpers: Helpers::of(call.total()),
                    output,
                    factors,
                    slot: &|from, slot, index| {
                        control
                            .segment()
                            .ptr(control.layout().input(from, slot) + index * chunk, chunk)
                    },
                    sources: Vec::with_capacity(control.size()),
                    copies: Vec::with_capacity(control.size()),
                    me,
                    chunk,
                    store,
                };
                pipeline::run(&mut StageCounters(self), ResultSharing::One, count, &mut chunks)
            }
        }
    }

    /// Returns a peer's elements as a source.
    pub(super) fn peer(&self, rank: Rank, ptr: *const u8) -> InputElements {
        InputElements { ptr, factor: self.factor(rank) }
    }
}

struct Scatter<'a> {
    order: SumOrder,
    call: &'a CallSpec<'a>,
    helpers: Helpers,
    output: Span,
    factors: Vec<f64>,
    slot: &'a dyn Fn(Rank, usize, usize) -> *mut u8,
    sources: Vec<InputElements>,
    copies: Vec<CopyItem>,
    me: Rank,
    chunk: usize,
    store: WriteMode,
}

impl ChunkOps for Scatter<'_> {
    fn produce(&mut self, t: u64, slot: usize) {
        self.copies.clear();
        for (index, span) in
            self.call.inputs.iter().enumerate().filter(|&(index, _)| index != self.me.index())
        {
            let (start, bytes) = chunk_of(span.bytes, self.chunk, t);
            self.copies.push(CopyItem::new(
                (self.slot)(self.me, slot, index),
                span.ptr().wrapping_add(start),
                bytes,
            ));
        }
        // SAFETY: start + bytes <= span.bytes; the slot is this rank's and free in this stage
        // (pipeline).
        unsafe { self.helpers.copy(&self.copies, cpu::STAGING) }
    }

    fn consume(&mut self, t: u64, slot: usize, _result: usize) {
        let (start, bytes) = chunk_of(self.output.bytes, self.chunk, t);
        let me = self.me.index();
        self.sources.clear();
        for (rank, &factor) in self.factors.iter().enumerate() {
            let ptr = if rank == me {
                self.call.inputs[me].ptr().wrapping_add(start)
            } else {
                (self.slot)(Rank(rank as u32), slot, me)
            };
            self.sources.push(InputElements { ptr, factor });
        }
        let dst = self.output.ptr().wrapping_add(start);
        // SAFETY: start + bytes <= output.bytes; the slots hold chunk `t` of messages of the same
        // length (compared at arrival).
        unsafe {
            self.helpers.reduce(
                (self.order, self.call),
                dst,
                &self.sources,
                bytes,
                None,
                self.store,
            )
        }
    }

    fn finish(&mut self, _t: u64, _result: usize) {}
}
