//! The link within a node: a ring in each direction between this rank and one peer.
#![allow(unsafe_code, reason = "copies between rings and the bytes of tensors")]

use super::frame::{Frame, FrameKind, RING};
use super::link::Link;
use crate::coll::call::Span;
use crate::control::ControlBlock;
use crate::error::{Error, ErrorKind, Result};
use crate::kernels::cpu::{self, WriteMode};
use crate::mem::layout::{LINE_PAIR, MIN_RING_BYTES, RING_HEAD};
use crate::rank::Rank;
use crate::sync::flag::Flag;
use crate::sync::ring::{self, UNIT};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

/// An item that waits for space in the outgoing ring.
#[derive(Debug)]
enum OutgoingFrame {
    /// A frame without payload.
    Control(Frame),
    /// A whole message; send `id` is complete once the message is written.
    Eager(Frame, Span),
    /// A message from the given offset on; send `id` is complete with its last byte.
    Chunks(Frame, Span),
}

/// This rank's end of the link with `peer`.
pub(super) struct RingLink {
    control: Arc<ControlBlock>,
    /// The peer's local rank.
    pub(super) peer: Rank,
    tail: u64,
    head: u64,
    /// Tail of the incoming ring when it was last read: `head`, or a position within a message
    /// whose rest is still being written.
    seen: u64,
    /// Number of bytes of the outgoing ring that have memory, including its counters.
    reserved: usize,
    outbox: VecDeque<OutgoingFrame>,
    /// Number of eager messages sent; the peer counts those that it has matched.
    eager: u64,
    /// Number of eager messages that have arrived, and number of those that were matched.
    received: u64,
    matched: u64,
    /// Number of the latest message that has arrived or was offered; 0 if there was none.
    last_id: u64,
    /// True once a read of the peer's memory has failed; it is not tried again.
    cma_failed: bool,
}

/// Maximum number of eager messages that the peer has not matched; further ones are offered.
pub(super) const EAGER_WINDOW: u64 = 1024;

struct RingSide<'a> {
    ring: ring::ByteRing<'a, AtomicU64>,
    matched: &'a AtomicU64,
    data: *mut u8,
}

fn side(control: &ControlBlock, from: Rank, to: Rank) -> RingSide<'_> {
    let (segment, offset) = (control.segment(), control.layout().ring(from, to));
    // SAFETY: the head of each ring has three counters, each on its own pair of cache lines.
    let word = |index: usize| unsafe { segment.at::<AtomicU64>(offset + index * LINE_PAIR) };
    let bytes = control.layout().ring_data_bytes();
    let ring = ring::ByteRing { tail: word(0), head: word(1), capacity: bytes as u64 };
    RingSide { ring, matched: word(2), data: segment.ptr(offset + RING_HEAD, bytes) }
}

impl RingLink {
    pub(super) fn new(control: Arc<ControlBlock>, peer: Rank) -> Self {
        Self {
            control,
            peer,
            tail: 0,
            head: 0,
            seen: 0,
            reserved: 0,
            outbox: VecDeque::new(),
            eager: 0,
            received: 0,
            matched: 0,
            last_id: 0,
            cma_failed: false,
        }
    }

    fn incoming(&self) -> RingSide<'_> {
        side(&self.control, self.peer, self.control.rank())
    }

    fn outgoing(&self) -> RingSide<'_> {
        side(&self.control, self.control.rank(), self.peer)
    }

    /// Returns true if another eager message may be sent.
    fn may_send_eagerly(&self) -> bool {
        // Wrapping arithmetic, here and below: an impossible count from a peer stops eager
        // messages, but causes no panic.
        self.eager.wrapping_sub(self.outgoing().matched.observe()) < EAGER_WINDOW
    }

    fn enqueue(&mut self, item: OutgoingFrame) {
        if matches!(item, OutgoingFrame::Eager(..)) {
            self.eager += 1;
        }
        self.outbox.push_back(item);
    }

    /// Sends a frame without payload as soon as there is space.
    pub(super) fn send_frame(&mut self, frame: Frame) {
        self.enqueue(OutgoingFrame::Control(frame));
    }

    /// Drops all queued items except frames without payload, because the senders may reuse the
    /// messages' memory.
    pub(super) fn release_span(&mut self) {
        self.outbox.retain(|item| matches!(item, OutgoingFrame::Control(_)));
    }

    /// Returns true unless a read of the peer's memory has failed.
    pub(super) fn is_readable(&self) -> bool {
        !self.cma_failed
    }

    /// Stops reading the peer's memory because of `error`, so its long messages arrive in frames
    /// from now on. The system may revoke the permission that it gave when the group was joined;
    /// frames need none. If the peer has died (an error of kind `Peer`), no warning is logged,
    /// because the death is detected elsewhere.
    pub(super) fn disable_cma(&mut self, error: &Error) {
        if !std::mem::replace(&mut self.cma_failed, true) && error.kind != ErrorKind::Peer {
            log::warn!(
                "long messages from {} come in pieces from now on: {error}",
                self.control.describe(self.peer)
            );
        }
    }

    /// Returns true if the peer has sent a frame.
    pub(super) fn has_arrived(&self) -> bool {
        self.incoming().ring.tail.observe() != self.seen
    }

    /// Returns true if the peer has freed space for a queued item.
    pub(super) fn has_room(&self) -> bool {
        let reserved = |item: &OutgoingFrame| {
            self.outgoing().ring.reserve(self.tail, next_frame(item).footprint()).is_some()
        };
        self.outbox.front().is_some_and(reserved)
    }

    /// Returns true if an acknowledgement is queued. No pending message of this rank needs it, but
    /// the send of the peer does.
    pub(super) fn has_acknowledgement(&self) -> bool {
        self.outbox.iter().any(|item| next_frame(item).kind == FrameKind::Taken)
    }

    /// Returns true if the peer has read all frames and no item is queued.
    pub(super) fn is_drained(&self) -> bool {
        self.outbox.is_empty() && self.outgoing().ring.head.observe() == self.tail
    }

    /// Writes the queued items that fit. `sent` gets the ids of messages that no longer need their
    /// memory. Returns true if anything was written.
    pub(super) fn flush(&mut self, mut sent: impl FnMut(u64)) -> Result<bool> {
        if self.outbox.is_empty() {
            return Ok(false);
        }
        let side = side(&self.control, self.control.rank(), self.peer);
        let before = self.tail;
        while let Some(frame) = self.outbox.front().map(next_frame) {
            let Some(reserved) = side.ring.reserve(self.tail, frame.footprint()) else { break };
            // Padding fills the end of the ring.
            let end =
                reserved.padding.map_or(reserved.place + frame.footprint(), |_| side.ring.capacity);
            have_memory(&self.control, self.peer, &mut self.reserved, RING_HEAD + end as usize)?;
            let Some(item) = self.outbox.front_mut() else { break };
            if let Some(place) = reserved.padding {
                write_head(&side, place, Frame::control(FrameKind::Padding, 0, 0));
            }
            write_head(&side, reserved.place, frame);
            let payload = match item {
                OutgoingFrame::Control(_) => None,
                OutgoingFrame::Eager(_, span) => Some(span.ptr()),
                OutgoingFrame::Chunks(_, span) => {
                    Some(span.ptr().wrapping_add(frame.value as usize))
                }
            };
            if let Some(from) = payload {
                let begin = reserved.tail - frame.footprint() + UNIT;
                for at in (0..frame.payload(&RING)).step_by(frame.part_bytes()) {
                    // Publishes the bytes before this part; the last part is published with the end
                    // of the frame.
                    if at > 0 {
                        side.ring.publish(begin + at as u64);
                    }
                    let (to, bytes) = (
                        (reserved.place + UNIT) as usize + at,
                        frame.part_bytes().min(frame.payload(&RING) - at),
                    );
                    // SAFETY: `reserved` granted footprint() bytes at `place` before the ring's
                    // end, which the consumer has released; the span stays valid, because its send
                    // is not complete yet.
                    unsafe { cpu::copy(side.data.add(to), from.add(at), bytes, WriteMode::Cached) }
                }
            }
            self.tail = reserved.tail;
            side.ring.publish(self.tail);
            match item {
                OutgoingFrame::Chunks(head, _)
                    if frame.value + (frame.payload(&RING) as u64) < frame.bytes =>
                {
                    head.value += frame.payload(&RING) as u64;
                    self.control.wake(self.peer);
                    continue;
                }
                OutgoingFrame::Eager(..) | OutgoingFrame::Chunks(..) => sent(frame.id),
                OutgoingFrame::Control(_) => {}
            }
            self.outbox.pop_front();
        }
        if self.tail != before {
            self.control.wake(self.peer);
        }
        Ok(self.tail != before)
    }

    /// Passes the oldest incoming frame and its payload to `take`; returns false if there is none.
    /// A frame that is still being written is passed with the payload that has arrived, and again
    /// later.
    pub(super) fn receive(
        &mut self,
        take: impl FnOnce(Frame, &[u8]) -> Result<()>,
    ) -> Result<bool> {
        let side = side(&self.control, self.peer, self.control.rank());
        loop {
            let Some(place) = side.ring.oldest(self.head) else { return Ok(false) };
            // SAFETY: frames start at multiples of UNIT, so four words fit; the producer published
            // them.
            let words = unsafe { side.data.add(place as usize).cast::<[u64; 4]>().read() };
            let frame = Frame::decode(words, &RING);
            let capacity = side.ring.capacity;
            let tail = side.ring.tail.observe();
            let ahead = tail.wrapping_sub(self.head);
            // Padding is valid only before the end of the ring. If padding could fill the whole
            // ring, an empty ring with a forged tail would be skipped forever.
            let length = |frame: &Frame| {
                if frame.kind == FrameKind::Padding { capacity - place } else { frame.footprint() }
            };
            let written = |frame: &Frame| {
                length(frame) <= ahead
                    || (frame.payload(&RING) > frame.part_bytes() && ahead > UNIT)
            };
            let fits = |frame: &Frame| {
                place + length(frame) <= capacity && written(frame) && length(frame) < capacity
            };
            // A peer must not send more eager messages than allowed, so that they cannot fill the
            // memory here.
            let allowed = |frame: &Frame| {
                frame.kind != FrameKind::Eager || self.received - self.matched < EAGER_WINDOW
            };
            // A sender numbers its messages upwards. A second message with the same number would
            // replace the first, whose receive would never end.
            let fresh = |frame: &Frame| !frame.begins_message() || frame.id > self.last_id;
            let Some(frame) = frame
                .filter(|frame| fits(frame) && allowed(frame) && fresh(frame) && ahead <= capacity)
            else {
                return Err(Error::internal(format!(
                    "{} sent a malformed frame: {words:x?}",
                    self.control.describe(self.peer)
                )));
            };
            if frame.kind == FrameKind::Padding {
                self.head += capacity - place;
                self.seen = self.head;
                continue;
            }
            let bytes = frame.payload(&RING).min((ahead - UNIT) as usize);
            // SAFETY: the payload lies within the ring and these bytes before its tail (checked
            // above); they stay until `release`.
            let payload = unsafe {
                std::slice::from_raw_parts(side.data.add((place + UNIT) as usize), bytes)
            };
            take(frame, payload)?;
            if frame.footprint() > ahead {
                self.seen = tail;
                return Ok(false);
            }
            if frame.begins_message() {
                self.last_id = frame.id;
            }
            self.received += u64::from(frame.kind == FrameKind::Eager);
            self.head += frame.footprint();
            self.seen = self.head;
            side.ring.release(self.head);
            // Only a producer that ran out of space waits for this notification.
            if side.ring.tail.observe().wrapping_sub(self.head) > capacity / 2 {
                self.control.wake(self.peer);
            }
            return Ok(true);
        }
    }
}

impl Link for RingLink {
    fn send_now(&mut self, frame: Frame, span: Span) -> Result<bool> {
        if span.bytes > RING.eager || !self.outbox.is_empty() || !self.may_send_eagerly() {
            return Ok(false);
        }
        self.enqueue(OutgoingFrame::Eager(frame, span));
        let sent = self.flush(|_| ());
        if self.outbox.pop_back().is_some() {
            self.eager -= 1;
        }
        sent
    }

    fn send(&mut self, frame: Frame, span: Span) -> Result<Option<usize>> {
        self.enqueue(if span.bytes <= RING.eager && self.may_send_eagerly() {
            OutgoingFrame::Eager(frame, span)
        } else {
            OutgoingFrame::Control(Frame { kind: FrameKind::Rts, value: span.addr as u64, ..frame })
        });
        Ok(Some(0))
    }

    fn matched(&mut self, _bytes: usize) -> Result<()> {
        self.matched += 1;
        self.incoming().matched.publish(self.matched);
        Ok(())
    }

    fn room(&self, rest: usize) -> usize {
        rest
    }

    fn request(&mut self, frame: Frame) -> Result<()> {
        self.send_frame(frame);
        Ok(())
    }

    fn arrived(&mut self, _whole: bool) -> Result<()> {
        Ok(())
    }

    fn serve(&mut self, frame: Frame, span: Span) -> Result<bool> {
        self.enqueue(OutgoingFrame::Chunks(frame, span));
        Ok(false)
    }
}

/// Extends the memory of the ring to `peer` from `reserved` bytes to at least `end`. A part of a
/// ring gets memory only when it is filled for the first time.
fn have_memory(control: &ControlBlock, peer: Rank, reserved: &mut usize, end: usize) -> Result<()> {
    while *reserved < end {
        let ring = control.layout().ring(control.rank(), peer);
        let bytes = if *reserved == 0 { RING_HEAD + MIN_RING_BYTES } else { MIN_RING_BYTES };
        let purpose = format_args!("messages from rank {} to rank {peer}", control.rank());
        control.segment().reserve(ring + *reserved, bytes, purpose)?;
        *reserved += bytes;
    }
    Ok(())
}

fn next_frame(item: &OutgoingFrame) -> Frame {
    match item {
        OutgoingFrame::Control(frame)
        | OutgoingFrame::Eager(frame, _)
        | OutgoingFrame::Chunks(frame, _) => *frame,
    }
}

fn write_head(side: &RingSide<'_>, place: u64, frame: Frame) {
    // SAFETY: `place` is a multiple of UNIT below the capacity, granted by `reserved`.
    unsafe { side.data.add(place as usize).cast::<[u64; 4]>().write(frame.encode()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::tests::controls;
    use crate::mem::layout::SegmentLayout;

    const PEER: Rank = Rank(1);

    /// Returns the link of rank 0 with `PEER`, and its control block.
    fn connected() -> (Arc<ControlBlock>, RingLink) {
        let control = Arc::new(controls(2).swap_remove(0));
        (Arc::clone(&control), RingLink::new(control, PEER))
    }

    #[test]
    fn counters_and_frames_that_no_peer_writes_are_an_error_not_a_wait() {
        let offer = Frame::control(FrameKind::Rts, 1, 0);
        let long = Frame { id: 1, bytes: 4096, ..Frame::bare(FrameKind::Eager) };
        // The first frame and the tail of each case: two cases with padding only, a tail beyond the
        // ring, a message longer than the bytes sent, and a message whose first part is missing.
        let parts = Frame { bytes: 40 << 10, ..long };
        let beyond = SegmentLayout::new(2).ring_data_bytes() as u64 + 32;
        for (frame, tail) in [
            (None, u64::MAX),
            (None, 32),
            (Some(offer), beyond),
            (Some(long), 64),
            (Some(parts), 32),
        ] {
            let (control, mut connection) = connected();
            let ring = side(&control, PEER, Rank(0));
            if let Some(frame) = frame {
                write_head(&ring, 0, frame);
            }
            ring.ring.publish(tail);
            let error = connection.receive(|_, _| Ok(())).expect_err("it makes no sense");
            error.assert_says(ErrorKind::Internal, &["rank 1"]);
        }
        let (control, mut connection) = connected();
        let ring = side(&control, PEER, Rank(0));
        write_head(&ring, 0, offer);
        ring.ring.publish(32);
        let mut came = None;
        let take = |frame: Frame, _: &[u8]| {
            came = Some(frame);
            Ok(())
        };
        assert_eq!(connection.receive(take), Ok(true));
        assert_eq!(came, Some(offer));
        assert_eq!(connection.receive(|_, _| Ok(())), Ok(false));
    }

    #[test]
    fn a_message_that_is_being_written_is_shown_in_parts_and_does_not_stir_without_more() {
        let (control, mut connection) = connected();
        let ring = side(&control, PEER, Rank(0));
        let frame = Frame { id: 1, bytes: 40 << 10, ..Frame::bare(FrameKind::Eager) };
        write_head(&ring, 0, frame);
        for (bytes, whole) in [(16 << 10, false), (32 << 10, false), (40 << 10, true)] {
            ring.ring.publish(UNIT + bytes);
            assert!(connection.has_arrived());
            let mut shown = 0;
            let take = |_: Frame, payload: &[u8]| {
                shown = payload.len() as u64;
                Ok(())
            };
            assert_eq!(connection.receive(take), Ok(whole));
            assert_eq!(shown, bytes);
            assert!(!connection.has_arrived(), "nothing new");
        }
        assert_eq!(ring.ring.head.observe(), frame.footprint());
    }
}
