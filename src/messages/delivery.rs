//! Delivers messages to the memory of their receives, once the messages have arrived or were
//! offered.
#![allow(unsafe_code, reason = "copies between links and the bytes of tensors")]

use super::frame::{Frame, FrameKind};
use super::matching::{MessageBody, Posted, UnmatchedMessage};
use super::{ChunkedReceive, MessageTable, PayloadSource, reading};
use crate::control::ControlBlock;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::kernels::cpu::{self, WriteMode};
use crate::rank::Rank;

impl MessageTable {
    /// Passes a message to its receive; the message has arrived, or was offered.
    pub(super) fn deliver(
        &mut self,
        control: &ControlBlock,
        direct: bool,
        posted: Posted,
        message: UnmatchedMessage,
    ) -> Result<()> {
        let from = message.from;
        let posted = self.check_size(control, from, (message.bytes, message.dtype), posted)?;
        match message.content {
            MessageBody::Eager(bytes) => {
                // SAFETY: the sizes are equal (checked above); the span belongs to the receive.
                unsafe {
                    cpu::copy(posted.span.ptr(), bytes.as_ptr(), bytes.len(), WriteMode::Cached)
                }
                self.received(posted, from);
                self.peers[from.index()].link()?.matched(bytes.len())?;
            }
            MessageBody::Own { ticket } => self.deliver_own(control, posted, ticket)?,
            // No byte of an empty message has to be read or requested.
            MessageBody::Rts { id, .. } if message.bytes == 0 => {
                if let Some(ring) = self.ring(from) {
                    ring.send_frame(Frame::control(FrameKind::Taken, id, 0));
                }
                self.received(posted, from);
            }
            MessageBody::Rts { id, value, first } => {
                let bytes = posted.span.bytes;
                let mut stream = ChunkedReceive {
                    posted,
                    got: first.len() as u64,
                    requested: 0,
                    source: PayloadSource::Frames,
                };
                if self.is_internode(from) {
                    // SAFETY: `keep_start` keeps at most the `value` bytes that the offer
                    // announces, which are fewer than the message has; the span belongs to the
                    // receive.
                    unsafe {
                        cpu::copy(
                            stream.posted.span.ptr(),
                            first.as_ptr(),
                            first.len(),
                            WriteMode::Cached,
                        )
                    }
                    stream.requested = value;
                    for piece in first.chunks(self.peers[from.index()].limits().data) {
                        self.peers[from.index()].link()?.matched(piece.len())?;
                    }
                } else if let Some(ring) = self.ring(from)
                    && direct
                    && ring.is_readable()
                    && reading::is_quicker(control, ring.peer, bytes)
                {
                    stream.source = PayloadSource::Memory(value);
                }
                self.streams.insert((from, id), stream);
                self.send_cts(from)?;
            }
        }
        Ok(())
    }

    /// Requests the missing bytes of messages from `from` that arrive in frames, the oldest message
    /// first, while the link has room.
    pub(super) fn send_cts(&mut self, from: Rank) -> Result<()> {
        let link = self.peers[from.index()].link()?;
        for (&(_, id), stream) in self.streams.range_mut((from, 0)..=(from, u64::MAX)) {
            let bytes = stream.posted.span.bytes as u64;
            while stream.source == PayloadSource::Frames && stream.requested < bytes {
                let room = link.room((bytes - stream.requested) as usize);
                if room == 0 {
                    return Ok(());
                }
                let frame = Frame { bytes, ..Frame::control(FrameKind::Cts, id, stream.requested) };
                stream.requested += room as u64;
                link.request(frame)?;
            }
        }
        Ok(())
    }

    /// Delivers a message of this rank to itself.
    pub(super) fn deliver_own(
        &mut self,
        control: &ControlBlock,
        posted: Posted,
        ticket: u64,
    ) -> Result<()> {
        let Some(send) = self.sends.get(&ticket) else { return Ok(()) };
        let (me, span, dtype) = (send.peer, send.span, send.dtype as u8);
        let posted = self.check_size(control, me, (span.bytes as u64, dtype), posted)?;
        if span.overlaps(posted.span) {
            // SAFETY: the sizes are equal (checked above); both spans belong to the user, who may
            // pass two views of one tensor.
            unsafe { std::ptr::copy(span.ptr(), posted.span.ptr(), span.bytes) }
        } else {
            // SAFETY: as above; they do not overlap.
            unsafe { cpu::copy(posted.span.ptr(), span.ptr(), span.bytes, WriteMode::Cached) }
        }
        self.finish_send(ticket);
        self.received(posted, me);
        Ok(())
    }

    /// Returns the receive `posted` if the message has its size; otherwise completes the receive
    /// with an error, and returns that error.
    pub(super) fn check_size(
        &mut self,
        control: &ControlBlock,
        from: Rank,
        (bytes, dtype): (u64, u8),
        posted: Posted,
    ) -> Result<Posted> {
        let Posted { tag, span, dtype: wanted, .. } = posted;
        if bytes == span.bytes as u64 {
            return Ok(posted);
        }
        let (peer, me, expected) = (
            self.peers[from.index()].describe(control),
            control.describe(control.rank()),
            span.bytes,
        );
        let error = Error::mismatch(if self.is_internode(from) {
            let sent = DType::from_torch(i32::from(dtype)).map_or("unknown", DType::name);
            let (group, wanted) = (control.name(), wanted.name());
            format!(
                "{peer} sent {bytes} bytes ({sent}, tag {tag}) to {me} in group \"{group}\", whose \
                 recv expects {expected} ({wanted})"
            )
        } else {
            format!("{peer} sent {bytes} bytes (tag {tag}) to {me}, whose recv expects {expected}")
        });
        self.finish(posted.ticket, posted.completion, Err(error.clone()), None);
        Err(error)
    }
}
