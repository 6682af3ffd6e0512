//! Reading long messages from their senders' memory, a step at a time and without the lock of the messages.
#![allow(unsafe_code, reason = "copies into the bytes of tensors")]

use super::frame::{Frame, FrameKind};
use super::{ChunkedReceive, MessageTable, Messages, Source};
use crate::coll::call::Span;
use crate::control::ControlBlock;
use crate::control::spin_budget::{PATIENCE, now};
use crate::error::Result;
use crate::rank::Rank;
use crate::sys::process_vm::read_memory;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::MutexGuard;

/// Bytes read directly between two looks at whether the sender attends.
const DIRECT_BYTES: usize = 256 << 10;
/// Longest message that one rank reads more quickly than two pass it on: docs/measurements/cpu.md. A thread reads as much of a longer one
/// before it looks at the group and at deadlines.
pub(super) const DIRECT_READ_MAX_BYTES: usize = 1 << 20;

/// A step of a read: the bytes from `got` on. Until `end_step` the receive stays open, so its memory stays the receiver's.
pub(super) struct ReadStep {
    from: Rank,
    /// Its number among the ranks of this node.
    local: Rank,
    id: u64,
    addr: u64,
    span: Span,
    got: usize,
}

/// Whether reading a message of `bytes` bytes is better than asking `from` for it. Two ranks that copy a long message into and out of a ring
/// are quicker than one that reads alone, but the sender may be busy elsewhere, or each wait for the other may cost a slice of the
/// scheduler's.
pub(super) fn is_quicker(control: &ControlBlock, from: Rank, bytes: usize) -> bool {
    bytes <= DIRECT_READ_MAX_BYTES || !control.is_progressing(from) || PATIENCE.yields_to_peer(now)
}

impl ReadStep {
    /// Reads until the step is complete, the group has failed or the sender attends; returns how many bytes of the message have arrived.
    pub(super) fn read(&self, control: &ControlBlock) -> (usize, Result<()>) {
        let (mut got, end) = (self.got, self.span.bytes.min(self.got + DIRECT_READ_MAX_BYTES));
        while got < end && control.failure().is_none() && is_quicker(control, self.local, self.span.bytes) {
            let bytes = DIRECT_BYTES.min(end - got);
            // SAFETY: got + bytes <= span.bytes; the span is the receiver's, and `fail_all` leaves its receive open until `end_step`.
            let read =
                unsafe { read_memory(control.pid(self.local), (self.addr as usize).wrapping_add(got), self.span.ptr().add(got), bytes) };
            if let Err(error) = read {
                return (got, Err(error));
            }
            got += bytes;
        }
        (got, Ok(()))
    }
}

impl Messages {
    /// Calls the completions that are due, without the lock. If none is, reads a step of a message from its sender's memory, also without the
    /// lock; returns whether it did.
    pub(super) fn run_completions(&self, mut state: MutexGuard<'_, MessageTable>) -> bool {
        let step = if state.finished.is_empty() { state.next_step() } else { None };
        let Some(step) = step else {
            self.complete(state);
            return false;
        };
        drop(state);
        self.flush();
        self.carry_out(step, ReadStep::read);
        true
    }

    /// Ends `step` as `read` does. A panic there fails the group, and the receive with it.
    pub(super) fn carry_out(&self, step: ReadStep, read: impl FnOnce(&ReadStep, &ControlBlock) -> (usize, Result<()>)) {
        let read = catch_unwind(AssertUnwindSafe(|| read(&step, &self.control)));
        let read = read.unwrap_or_else(|panic| (step.got, Err(self.control.panicked(&*panic))));
        let mut state = self.lock();
        let ended = state.end_step(&self.control, step, read);
        self.fail_group_on_error(&mut state, ended.map(|()| true));
        // The other transfers have deadlines and peers as well, and a long message is read for seconds.
        self.fail_hopeless(&mut state);
        self.complete(state);
    }
}

impl MessageTable {
    /// Whether a message waits for a thread that reads it.
    pub(super) fn is_reading_due(&self) -> bool {
        self.streams.values().any(|stream| matches!(stream.source, Source::Memory(_)))
    }

    /// The next step, which only the caller reads.
    pub(super) fn next_step(&mut self) -> Option<ReadStep> {
        let Self { streams, peers, steps, .. } = self;
        streams.iter_mut().find_map(|(&(from, id), stream)| {
            let (Source::Memory(addr), Some(ring)) = (stream.source, peers[from.index()].ring()) else { return None };
            stream.source = Source::BeingRead(addr);
            *steps += 1;
            Some(ReadStep { from, local: ring.peer, id, addr, span: stream.posted.span, got: stream.got as usize })
        })
    }

    /// Takes note of a step. A receive whose bytes have all arrived succeeds only if the offer still stands: a send fails after its group, or
    /// once its rank has departed, and both are looked at after the last byte was read.
    pub(super) fn end_step(&mut self, control: &ControlBlock, step: ReadStep, (got, read): (usize, Result<()>)) -> Result<()> {
        let ReadStep { from, local, id, addr, .. } = step;
        let Some(mut stream) = self.streams.remove(&(from, id)) else { return Ok(()) };
        stream.got = got as u64;
        let departed = control.departure(local).is_some();
        if let Some(failure) = control.failure().or_else(|| self.closed.clone()) {
            self.finish(stream.posted.ticket, stream.posted.completion, Err(failure), None);
        } else if departed || read.is_err() || (got < step.span.bytes && !is_quicker(control, local, step.span.bytes)) {
            // A rank that has departed may free its memory and never answers: the receive ends as any other of its messages.
            if let (Err(error), false, Some(ring)) = (&read, departed, self.ring(from)) {
                ring.disable_cma(error);
            }
            self.streams.insert((from, id), ChunkedReceive { requested: got as u64, source: Source::Frames, ..stream });
            return self.send_cts(from);
        } else if got < step.span.bytes {
            stream.source = Source::Memory(addr);
            self.streams.insert((from, id), stream);
        } else {
            if let Some(ring) = self.ring(from) {
                ring.send_frame(Frame::control(FrameKind::Taken, id, got as u64));
            }
            self.finish(stream.posted.ticket, stream.posted.completion, Ok(()), Some(from));
        }
        Ok(())
    }
}
