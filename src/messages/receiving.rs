//! Frames from ranks of other nodes: the thread of each wire, and how the group learns that a wire
//! was lost.

use super::connect::PublishedKeys;
use super::ending::{is_broken, lost_link};
use super::frame::{Frame, FrameKind, WIRE};
use super::internode::InternodeLinks;
use super::links::Traffic;
use super::wire::{
    Counters, HEADER_BYTES, LinkPhase, MAX_FRAME_BYTES, Rejection, WireLink, decode, traffic,
};
use super::{MessageTable, Messages};
use crate::error::{Error, Result};
use crate::rank::Rank;
use std::time::Duration;

impl MessageTable {
    /// Handles a frame of a rank of another node, which arrived with `payload`.
    pub(super) fn take_in(
        &mut self,
        messages: &Messages,
        peer: Rank,
        (frame, counters): (Frame, Counters),
        payload: &[u8],
    ) -> Result<()> {
        let control = &messages.control;
        let Some(wire) = self.wire(peer) else { return Ok(()) };
        if !wire.read(counters) {
            return Err(self.protocol_error(control, peer, frame));
        }
        match frame.kind {
            FrameKind::Bye => return wire.send_frame(Frame::bare(FrameKind::Credit), &[]),
            FrameKind::Rejected => wire.rejected = Some(Rejection::of(frame, payload)),
            FrameKind::Waits => messages.check_rejected(wire, frame)?,
            FrameKind::Credit => {}
            FrameKind::Padding
            | FrameKind::Taken
            | FrameKind::Eager
            | FrameKind::Rts
            | FrameKind::Cts
            | FrameKind::Data
            | FrameKind::Start => {
                if matches!(frame.kind, FrameKind::Eager | FrameKind::Rts | FrameKind::Cts) {
                    wire.rejected = None;
                }
                self.receive_frames(control, peer, frame, payload)?;
            }
        }
        self.wire(peer).map_or(Ok(()), WireLink::give_credit)
    }
}

impl Messages {
    /// Connects with `peer`, and handles its frames until the connection ends.
    pub(super) fn drive_peer(&self, far: &InternodeLinks, peer: Rank) {
        let address = far.address(peer);
        if let Err(error) = self
            .meet(far, peer)
            .and_then(|met| if met { self.listen(far, peer, address) } else { Ok(()) })
        {
            self.fail_peer(peer, error);
        }
    }

    /// Receives frames of `peer` until the connection ends. Removes the `address` of this rank
    /// after the first frame.
    fn listen(&self, far: &InternodeLinks, peer: Rank, address: PublishedKeys<'_>) -> Result<()> {
        let (links, mut address) = (&*far.links, Some(address));
        while let Some(bytes) = links.wait(peer, Traffic::Frame)? {
            links.listen(peer, Traffic::Frame, MAX_FRAME_BYTES)?;
            let nonsense = || {
                Error::internal(format!("{} sent a malformed frame", far.node_map.describe(peer)))
            };
            let (frame, counters) =
                bytes.first_chunk::<HEADER_BYTES>().and_then(decode).ok_or_else(nonsense)?;
            drop(address.take());
            let length = frame.payload(&WIRE);
            let heard = match traffic(frame.kind) {
                Traffic::Frame => self.receive_frames(
                    far,
                    peer,
                    (frame, counters),
                    &bytes[HEADER_BYTES..HEADER_BYTES + length],
                ),
                Traffic::Piece => {
                    let Some(piece) = links.wait(peer, Traffic::Piece)? else { return Ok(()) };
                    let heard = self.receive_frames(far, peer, (frame, counters), &piece[..length]);
                    links.release(peer, piece);
                    heard
                }
            };
            links.release(peer, bytes);
            if !heard {
                return Ok(());
            }
        }
        Ok(())
    }

    /// Stores a frame that arrived with `payload`. Returns true if more frames follow.
    pub(super) fn receive_frames(
        &self,
        far: &InternodeLinks,
        peer: Rank,
        head: (Frame, Counters),
        payload: &[u8],
    ) -> bool {
        far.links.note_received(peer, HEADER_BYTES + payload.len());
        let mut state = self.lock();
        if state.closed.is_some() {
            return false;
        }
        let taken = state.take_in(self, peer, head, payload);
        let heard = taken.is_ok();
        let lost = self.absorb_internode(&mut state, Some(peer), taken);
        let leaving = state.shutting_down;
        // The message for which a completion waits may be the next frame.
        self.defer_completions(state);
        if leaving {
            far.changed.notify_all();
        }
        lost.into_iter().for_each(|(peer, error)| self.fail_peer(peer, error));
        heard
    }

    /// Fails the group because of an error of a message, before the completion of that message is
    /// called. If the connection with the `far` peer was lost, returns the peer and the error for
    /// `fail_peer` instead, because the reason may still arrive.
    pub(super) fn absorb_internode(
        &self,
        state: &mut MessageTable,
        far: Option<Rank>,
        moved: Result<()>,
    ) -> Option<(Rank, Error)> {
        match (far, moved) {
            (Some(peer), Err(error)) if is_broken(&error) => Some((peer, error)),
            (_, moved) => {
                self.fail_group_on_error(state, moved.map(|()| true));
                None
            }
        }
    }

    /// Handles the end of the connection to `peer`, because of `error`. Fails the group if a
    /// message needs the connection, now or later.
    pub(super) fn fail_peer(&self, peer: Rank, error: Error) {
        let Some(far) = self.internode.get() else { return };
        let mut state = self.lock();
        if state.closed.is_some() {
            return;
        }
        let broken = is_broken(&error);
        let urgent = state.urgent(&self.control, peer);
        let cause = lost_link(&self.control, &far.node_map.describe(peer), urgent.as_ref(), error);
        let is_urgent = urgent.is_some();
        let Some(wire) = state.wire(peer) else { return };
        if let Some(first) = wire.lost() {
            drop(state);
            // Both directions report the end of a connection. The group fails only if a message
            // waits for the peer; otherwise the peer has left.
            if is_urgent {
                self.health.fail(first);
            }
            return;
        }
        wire.phase = LinkPhase::Lost(cause.clone());
        drop(state);
        far.changed.notify_all();
        // A mismatch (`!broken`) has already ended its message, which is thus no longer urgent.
        if is_urgent || !broken {
            let told = if broken {
                self.health.cause(far.node_map.local_rank(peer), Duration::MAX)
            } else {
                None
            };
            self.health.fail(told.unwrap_or(cause));
        }
    }
}
