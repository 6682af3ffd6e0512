//! Reading long messages from their senders' memory, step by step and without the lock of the
//! messages.
#![allow(unsafe_code, reason = "copies into the bytes of tensors")]

use super::frame::{Frame, FrameKind};
use super::{ChunkedReceive, MessageTable, Messages, PayloadSource};
use crate::coll::call::Span;
use crate::control::ControlBlock;
use crate::control::spin_budget::{PATIENCE, now};
use crate::error::Result;
use crate::rank::Rank;
use crate::sys::process_vm::read_memory;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::MutexGuard;

/// Number of bytes that are read before this thread checks whether the sender is waiting.
const DIRECT_BYTES: usize = 256 << 10;
/// Length up to which one rank reads a message faster than two ranks copy it through the ring
/// (docs/measurements/cpu.md). Also the number of bytes of a longer message that a thread reads
/// before it checks the group and deadlines.
pub(super) const DIRECT_READ_MAX_BYTES: usize = 1 << 20;

/// A step of a read: the bytes from `got` on. The receive stays pending until `end_step`, so its
/// memory stays valid.
pub(super) struct ReadStep {
    from: Rank,
    /// The sender's local rank.
    local: Rank,
    id: u64,
    addr: u64,
    span: Span,
    got: usize,
}

/// Returns true if reading a message of `bytes` bytes is faster than requesting it from `from`. Two
/// ranks that copy a long message through the ring are faster than one rank that reads it. But the
/// sender may be busy, or share a core with the receiver, and then each hand-over between them can
/// cost a time slice of the scheduler.
pub(super) fn is_quicker(control: &ControlBlock, from: Rank, bytes: usize) -> bool {
    bytes <= DIRECT_READ_MAX_BYTES || !control.is_progressing(from) || PATIENCE.yields_to_peer(now)
}

impl ReadStep {
    /// Reads until the step is complete, the group has failed or the sender waits in a call.
    /// Returns how many bytes of the message have arrived.
    pub(super) fn read(&self, control: &ControlBlock) -> (usize, Result<()>) {
        let (mut got, end) = (self.got, self.span.bytes.min(self.got + DIRECT_READ_MAX_BYTES));
        while got < end
            && control.failure().is_none()
            && is_quicker(control, self.local, self.span.bytes)
        {
            let bytes = DIRECT_BYTES.min(end - got);
            // SAFETY: got + bytes <= span.bytes; the span belongs to the receive, which `fail_all`
            // leaves pending until `end_step`.
            let read = unsafe {
                read_memory(
                    control.pid(self.local),
                    (self.addr as usize).wrapping_add(got),
                    self.span.ptr().add(got),
                    bytes,
                )
            };
            if let Err(error) = read {
                return (got, Err(error));
            }
            got += bytes;
        }
        (got, Ok(()))
    }
}

impl Messages {
    /// Calls the completions that are due, without the lock. If no completion is due, reads a step
    /// of a message from its sender's memory, also without the lock. Returns true if it read a
    /// step.
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

    /// Runs `read` and ends `step`. A panic in `read` fails the group, and thus the receive.
    pub(super) fn carry_out(
        &self,
        step: ReadStep,
        read: impl FnOnce(&ReadStep, &ControlBlock) -> (usize, Result<()>),
    ) {
        let read = catch_unwind(AssertUnwindSafe(|| read(&step, &self.control)));
        let read = read.unwrap_or_else(|panic| (step.got, Err(self.control.panicked(&*panic))));
        let mut state = self.lock();
        let ended = state.end_step(&self.control, step, read);
        self.fail_group_on_error(&mut state, ended.map(|()| true));
        // Deadlines and peers of the other messages are checked between steps, because reading a
        // long message takes seconds.
        self.fail_hopeless(&mut state);
        self.complete(state);
    }
}

impl MessageTable {
    /// Returns true if a message waits for a thread that reads it.
    pub(super) fn is_reading_due(&self) -> bool {
        self.streams.values().any(|stream| matches!(stream.source, PayloadSource::Memory(_)))
    }

    /// Returns the next step, which the caller must read.
    pub(super) fn next_step(&mut self) -> Option<ReadStep> {
        let Self { streams, peers, steps, .. } = self;
        streams.iter_mut().find_map(|(&(from, id), stream)| {
            let (PayloadSource::Memory(addr), Some(ring)) =
                (stream.source, peers[from.index()].ring())
            else {
                return None;
            };
            stream.source = PayloadSource::BeingRead(addr);
            *steps += 1;
            Some(ReadStep {
                from,
                local: ring.peer,
                id,
                addr,
                span: stream.posted.span,
                got: stream.got as usize,
            })
        })
    }

    /// Records the result of a step. A complete receive succeeds only if the offer is still valid:
    /// a send fails after its group has failed, or once its rank has left, so both are checked
    /// after the last byte was read.
    pub(super) fn end_step(
        &mut self,
        control: &ControlBlock,
        step: ReadStep,
        (got, read): (usize, Result<()>),
    ) -> Result<()> {
        let ReadStep { from, local, id, addr, .. } = step;
        let Some(mut stream) = self.streams.remove(&(from, id)) else { return Ok(()) };
        stream.got = got as u64;
        let departed = control.departure(local).is_some();
        if let Some(failure) = control.failure().or_else(|| self.closed.clone()) {
            self.finish(stream.posted.ticket, stream.posted.completion, Err(failure), None);
        } else if departed
            || read.is_err()
            || (got < step.span.bytes && !is_quicker(control, local, step.span.bytes))
        {
            // A rank that has left may free its memory, and it never answers a request. The receive
            // then ends like every other message with that rank.
            if let (Err(error), false, Some(ring)) = (&read, departed, self.ring(from)) {
                ring.disable_cma(error);
            }
            self.streams.insert(
                (from, id),
                ChunkedReceive { requested: got as u64, source: PayloadSource::Frames, ..stream },
            );
            return self.send_cts(from);
        } else if got < step.span.bytes {
            stream.source = PayloadSource::Memory(addr);
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
