//! Broadcast, all-gather, gather, scatter, all-to-all: messages that move unchanged.
//!
//! These collectives differ only in the senders, the receivers, and whether all receivers get the
//! same message.
#![allow(unsafe_code, reason = "copies between the group's memory and the bytes of tensors")]

use super::CpuCall;
use super::helpers::{CopyItem, Helpers};
use super::pipeline::{self, ChunkOps, ResultSharing, StageClock};
use crate::coll::call::{Collective, Span};
use crate::coll::plan::CpuPlan;
use crate::error::{Error, Result};
use crate::kernels::cpu::{self, WriteMode};
use crate::mem::layout::INLINE_BYTES;
use crate::rank::Rank;
use crate::sync::flag::Flag;

/// A group's stage counters, as the pipeline sees them.
pub(super) struct StageCounters<'a, 'b>(pub(super) &'a mut CpuCall<'b>);

impl StageClock for StageCounters<'_, '_> {
    fn stage(&self) -> u64 {
        *self.0.stage
    }

    fn tick(&mut self) {
        *self.0.stage += 1;
        let control = self.0.control;
        control.stage(control.rank()).publish(*self.0.stage);
        control.wake_sleepers();
    }

    fn wait_for(&mut self, stage: u64) -> Result<()> {
        let step = &self.0;
        let missing = |peer| step.control.stage(peer).observe() < stage;
        step.control.wait_for_peers(step.limit, &|| step.about(), missing)
    }

    fn check_abort(&mut self) -> Result<()> {
        let step = &self.0;
        step.control.look(step.limit, &|| step.about())
    }
}

/// Returns the start and length of chunk `t`.
pub(super) fn chunk_of(bytes: usize, chunk: usize, t: u64) -> (usize, usize) {
    let start = (t as usize).saturating_mul(chunk).min(bytes);
    (start, chunk.min(bytes - start))
}

impl CpuCall<'_> {
    /// Returns true if every receiver gets a different message.
    pub(super) fn personal(&self) -> bool {
        matches!(self.call.op, Collective::Scatter | Collective::AllToAll)
    }

    /// The messages that this rank sends, each with its index among its sender's messages.
    fn outgoing(&self) -> impl Iterator<Item = (usize, Span)> {
        // A rank's personal message to itself does not use the slots.
        let me = self.control.rank().index();
        let personal = self.personal();
        self.call
            .inputs
            .iter()
            .copied()
            .enumerate()
            .filter(move |&(index, _)| !personal || index != me)
    }

    /// The messages that this rank receives, with their senders.
    pub(super) fn incoming(&self) -> impl Iterator<Item = (Rank, Span)> {
        let (call, me) = (self.call, self.control.rank());
        let one = matches!(call.op, Collective::Broadcast | Collective::Scatter);
        let single =
            call.outputs.first().filter(|_| one && me != call.root).map(|&span| (call.root, span));
        let many = self
            .control
            .peers()
            .filter(move |_| !one)
            .filter_map(|peer| Some((peer, *call.outputs.get(peer.index())?)));
        single.into_iter().chain(many)
    }

    /// [`CpuCall::incoming`] starting from the next rank, so that the ranks do not all read the
    /// same tensor at once.
    pub(super) fn incoming_from_next(&self) -> Vec<(Rank, Span)> {
        let mut incoming: Vec<_> = self.incoming().collect();
        let next = incoming.iter().position(|&(from, _)| from > self.control.rank()).unwrap_or(0);
        incoming.rotate_left(next);
        incoming
    }

    /// Returns the offset, among all bytes that `from` sends, of the message that this rank
    /// receives at `output`.
    pub(super) fn skipped(&self, from: Rank, output: Span) -> usize {
        match self.call.op {
            Collective::Scatter => self.control.rank().index() * output.bytes,
            Collective::AllToAll => (0..self.control.rank().0)
                .fold(0, |sum, to| self.sent(from, Rank(to)).saturating_add(sum)),
            Collective::Barrier
            | Collective::Broadcast
            | Collective::AllReduce
            | Collective::Reduce
            | Collective::AllGather
            | Collective::Gather => 0,
            Collective::ReduceScatter | Collective::AllReduceAddRmsNorm => 0,
        }
    }

    /// Copies the message that this rank sends to itself.
    pub(super) fn keep_own(&self, helpers: &Helpers) {
        let (call, me) = (self.call, self.control.rank().index());
        let pick = |spans: &[Span]| {
            if spans.len() > 1 { spans.get(me).copied() } else { spans.first().copied() }
        };
        if let (Some(input), Some(output)) = (pick(&call.inputs), pick(&call.outputs))
            && input.addr != output.addr
        {
            // SAFETY: `validate` saw equal lengths; the spans are the caller's and do not overlap
            // unless they are the same.
            unsafe {
                helpers.copy(
                    &[CopyItem::new(output.ptr(), input.ptr(), input.bytes)],
                    WriteMode::Cached,
                )
            }
        }
    }

    /// Runs the exchange; `longest` is the length of the longest message between two ranks.
    pub(super) fn exchange(&mut self, plan: CpuPlan, longest: usize) -> Result<()> {
        let helpers =
            if plan == CpuPlan::Inline { Helpers::none() } else { Helpers::of(self.call.total()) };
        match plan {
            CpuPlan::Inline => {
                for (from, output) in self.incoming() {
                    let skipped = self.skipped(from, output);
                    // The lengths are read again after the comparison, and a faulty rank may have
                    // overwritten them.
                    if skipped.saturating_add(output.bytes) > INLINE_BYTES {
                        let (about, from) = (self.about(), self.control.describe(from));
                        return Err(self.control.fail(Error::internal(format!(
                            "{about}: the lengths that {from} sends have changed meanwhile"
                        ))));
                    }
                    // SAFETY: within the INLINE_BYTES of the post (checked above), which
                    // `await_posts` acquired.
                    unsafe {
                        cpu::copy(
                            output.ptr(),
                            self.posted(from).add(skipped),
                            output.bytes,
                            WriteMode::Cached,
                        )
                    }
                }
            }
            CpuPlan::Staged { chunk, store } => {
                let count = longest.div_ceil(chunk) as u64;
                let (control, personal) = (self.control, self.personal());
                let mut chunks = RankMessages {
                    outgoing: self.outgoing().collect(),
                    incoming: self.incoming().collect(),
                    slot: &|from, slot, index| {
                        let index = if personal { index } else { 0 };
                        control
                            .segment()
                            .ptr(control.layout().input(from, slot) + index * chunk, chunk)
                    },
                    me: control.rank(),
                    helpers: &helpers,
                    copies: Vec::with_capacity(control.size()),
                    chunk,
                    store,
                };
                pipeline::run(&mut StageCounters(self), ResultSharing::One, count, &mut chunks)?;
            }
        }
        self.keep_own(&helpers);
        Ok(())
    }
}

/// The messages of one rank, in chunks.
struct RankMessages<'a> {
    outgoing: Vec<(usize, Span)>,
    incoming: Vec<(Rank, Span)>,
    /// Returns the address of message `index` in an input slot of a rank, valid for `chunk` bytes.
    slot: &'a dyn Fn(Rank, usize, usize) -> *mut u8,
    me: Rank,
    helpers: &'a Helpers,
    copies: Vec<CopyItem>,
    chunk: usize,
    store: WriteMode,
}

impl ChunkOps for RankMessages<'_> {
    fn produce(&mut self, t: u64, slot: usize) {
        self.copies.clear();
        for &(index, span) in &self.outgoing {
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
        self.copies.clear();
        for &(from, span) in &self.incoming {
            let (start, bytes) = chunk_of(span.bytes, self.chunk, t);
            self.copies.push(CopyItem::new(
                span.ptr().wrapping_add(start),
                (self.slot)(from, slot, self.me.index()),
                bytes,
            ));
        }
        // SAFETY: as above; the slot holds chunk `t` of a message of the same length (compared at
        // arrival).
        unsafe { self.helpers.copy(&self.copies, self.store) }
    }

    fn finish(&mut self, _t: u64, _result: usize) {}
}
