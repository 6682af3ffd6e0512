//! All-reduce, residual and RMSNorm in one call. In the one-shot form each rank sums and normalises
//! all rows. In the two-shot form each rank does so with its share of each chunk, and then all
//! ranks collect the results of all shares. Residual and weight are the same on all ranks, so a row
//! has the same bits whichever rank normalises it.
#![allow(unsafe_code, reason = "copies between the group's memory and the bytes of tensors")]

use super::CpuCall;
use super::exchange::{StageCounters, chunk_of};
use super::pipeline::{self, ChunkOps, ResultSharing};
use crate::coll::all_reduce_norm::{Norm, Normed};
use crate::coll::call::{CallSpec, Span};
use crate::coll::plan::{self, CpuPlan};
use crate::control::ControlBlock;
use crate::dtype::SumOrder;
use crate::error::Result;
use crate::kernels::cpu::{self, NormRows, WriteMode};
use crate::rank::Rank;

/// Normalises the rows of a group of one rank.
pub(crate) fn norm_alone(call: &CallSpec) {
    if let Some(norm) = Norm::of(call) {
        norm_rows(call, &norm, SumOrder::Rank, 0, norm.rows, &[call.inputs[0].ptr()]);
    }
}

/// Normalises `count` rows starting at `first`; `sources` has the address of row `first` of each
/// rank.
fn norm_rows(
    call: &CallSpec,
    norm: &Norm,
    order: SumOrder,
    first: usize,
    count: usize,
    sources: &[*const u8],
) {
    let at = first * norm.row_bytes();
    let memory = NormRows {
        sources,
        order,
        residual: call.inputs[1].ptr().wrapping_add(at),
        weight: call.inputs[2].ptr(),
        scale: call.inputs.get(3).map_or(std::ptr::null(), |scale| scale.ptr().cast_const()),
        normed: call.outputs[0].ptr().wrapping_add(first * norm.normed_bytes()),
        sum: call.outputs[1].ptr().wrapping_add(at),
        scales: call.outputs.get(2).map_or(std::ptr::null_mut(), |scales| {
            scales.ptr().wrapping_add(first * norm.scale_bytes())
        }),
    };
    // SAFETY: `validate` checked spans of `norm.rows` rows, which include these; the spans are the
    // user's, and overlap in place only. The callers' sources have `count` rows. They are the
    // input, or posts and slots of the segment, with whose writers the callers have synchronised.
    unsafe { cpu::add_rms_norm(norm, count, &memory) }
}

impl CpuCall<'_> {
    pub(super) fn norm(&mut self, norm: &Norm, plan: CpuPlan) -> Result<()> {
        let (control, call, me) = (self.control, self.call, self.control.rank());
        match plan {
            CpuPlan::Inline => {
                let source =
                    |rank| if rank == me { call.inputs[0].ptr() } else { self.posted(rank) };
                let sources: Vec<*const u8> =
                    control.ranks().map(|rank| source(rank).cast_const()).collect();
                norm_rows(call, norm, control.order(), 0, norm.rows, &sources);
                Ok(())
            }
            CpuPlan::Staged { chunk, .. } => {
                let phases = plan::shots(norm, control.size());
                let count = call.inputs[0].bytes.div_ceil(chunk) as u64;
                let sources = Vec::with_capacity(control.size());
                let mut chunks = Normalised {
                    control,
                    call,
                    norm,
                    phases,
                    rows: chunk / norm.row_bytes(),
                    sources,
                };
                pipeline::run(&mut StageCounters(self), phases, count, &mut chunks)
            }
        }
    }
}

/// The rows of one rank in chunks of `rows`.
struct Normalised<'a> {
    control: &'a ControlBlock,
    call: &'a CallSpec<'a>,
    norm: &'a Norm,
    phases: ResultSharing,
    rows: usize,
    sources: Vec<*const u8>,
}

impl Normalised<'_> {
    /// Returns the first row of chunk `t` and its number of rows.
    fn chunk(&self, t: u64) -> (usize, usize) {
        chunk_of(self.norm.rows, self.rows, t)
    }

    /// Returns the first row of the share of `rank` in a chunk of `count` rows, and its number of
    /// rows.
    fn share(&self, rank: Rank, count: usize) -> (usize, usize) {
        match self.phases {
            ResultSharing::One => (0, count),
            ResultSharing::Two => {
                chunk_of(count, count.div_ceil(self.control.size()), rank.0.into())
            }
        }
    }

    fn slot(&self, rank: Rank, slot: usize) -> *mut u8 {
        self.control
            .segment()
            .ptr(self.control.layout().input(rank, slot), self.rows * self.norm.row_bytes())
    }

    /// Returns the parts of the outputs for `count` rows from `first`, each with its offset in a
    /// result slot.
    fn results(&self, first: usize, count: usize) -> impl Iterator<Item = (Span, usize)> {
        let (call, widths) =
            (self.call, [self.norm.normed_bytes(), self.norm.row_bytes(), self.norm.scale_bytes()]);
        let outputs = if self.norm.normed == Normed::Dynamic { 3 } else { 2 };
        let mut place = 0;
        (0..outputs).map(move |i| {
            let bytes = count * widths[i];
            place += bytes;
            (Span { addr: call.outputs[i].addr + first * widths[i], bytes }, place - bytes)
        })
    }

    fn result(&self, rank: Rank, slot: usize) -> *mut u8 {
        let layout = self.control.layout();
        self.control.segment().ptr(layout.result(rank, slot), layout.result_bytes())
    }
}

impl ChunkOps for Normalised<'_> {
    fn produce(&mut self, t: u64, slot: usize) {
        let ((first, count), row) = (self.chunk(t), self.norm.row_bytes());
        let from = self.call.inputs[0].ptr().wrapping_add(first * row);
        // SAFETY: first + count <= rows of the input; count <= self.rows, for which the slot has
        // capacity (`choose_rows`). The slot is this rank's and free in this stage (pipeline).
        unsafe { cpu::copy(self.slot(self.control.rank(), slot), from, count * row, cpu::STAGING) }
    }

    fn consume(&mut self, t: u64, slot: usize, result: usize) {
        let ((first, count), me, row) = (self.chunk(t), self.control.rank(), self.norm.row_bytes());
        let (own, own_count) = self.share(me, count);
        self.sources.clear();
        for rank in self.control.ranks() {
            let ptr = if rank == me {
                self.call.inputs[0].ptr().wrapping_add(first * row)
            } else {
                self.slot(rank, slot)
            };
            self.sources.push(ptr.wrapping_add(own * row));
        }
        norm_rows(
            self.call,
            self.norm,
            self.control.order(),
            first + own,
            own_count,
            &self.sources,
        );
        if self.phases == ResultSharing::Two {
            let shared = self.result(me, result);
            for (span, place) in self.results(first + own, own_count) {
                // SAFETY: the rows were just written; the results of a share fit into a result slot
                // (`shots`), which is free (pipeline).
                unsafe { cpu::copy(shared.add(place), span.ptr(), span.bytes, WriteMode::Cached) }
            }
        }
    }

    fn finish(&mut self, t: u64, result: usize) {
        let (first, count) = self.chunk(t);
        for peer in self.control.peers() {
            let (share, share_count) = self.share(peer, count);
            let shared = self.result(peer, result);
            for (span, place) in self.results(first + share, share_count) {
                // SAFETY: as above; the peer's result slot holds its share of chunk `t` (pipeline).
                unsafe { cpu::copy(span.ptr(), shared.add(place), span.bytes, WriteMode::Cached) }
            }
        }
    }
}
