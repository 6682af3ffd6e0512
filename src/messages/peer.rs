//! The state of the messages between this rank and its peers, and how each frame changes it.
#![allow(unsafe_code, reason = "copies between links and the bytes of tensors")]

use super::frame::{Frame, FrameKind, LinkLimits, RING, WIRE};
use super::link::Link;
use super::matching::{Matching, MessageBody, Posted, UnmatchedMessage};
use super::ring::{EAGER_WINDOW, RingLink};
use super::wire::WireLink;
use super::{
    ChunkedReceive, FinishedTransfer, IncompleteFrame, MessageTable, PayloadSource, PendingSend,
    STREAM_BYTES,
};
use crate::completion::Completion;
use crate::control::{AwaitedMessage, ControlBlock};
use crate::error::{Error, Result};
use crate::kernels::cpu::{self, WriteMode};
use crate::rank::Rank;
use std::collections::BTreeMap;

/// Maximum size of unmatched eager messages from one sender of this node; beyond it, this rank
/// stops reading from that sender. All eager messages that a sender can have in flight fit.
const BACKLOG_BYTES: usize = EAGER_WINDOW as usize * RING.eager;

/// A rank of the group, by how messages reach it.
pub(super) enum Peer {
    /// This rank.
    Own,
    /// A rank of another node that messages cannot reach.
    Apart,
    /// A rank of this node.
    IntraNode(RingLink),
    /// A rank of another node.
    Internode(Box<WireLink>),
}

impl Peer {
    /// Returns the link with the peer.
    pub(super) fn link(&mut self) -> Result<&mut dyn Link> {
        match self {
            Self::IntraNode(ring) => Ok(ring),
            Self::Internode(wire) => Ok(&mut **wire),
            Self::Own | Self::Apart => {
                Err(Error::internal("no link carries messages to this rank"))
            }
        }
    }

    pub(super) fn ring(&self) -> Option<&RingLink> {
        if let Self::IntraNode(ring) = self { Some(ring) } else { None }
    }

    pub(super) fn ring_mut(&mut self) -> Option<&mut RingLink> {
        if let Self::IntraNode(ring) = self { Some(ring) } else { None }
    }

    pub(super) fn wire(&self) -> Option<&WireLink> {
        if let Self::Internode(wire) = self { Some(wire) } else { None }
    }

    pub(super) fn wire_mut(&mut self) -> Option<&mut WireLink> {
        if let Self::Internode(wire) = self { Some(wire) } else { None }
    }

    /// Returns the limits of the link with the peer.
    pub(super) fn limits(&self) -> &'static LinkLimits {
        if let Self::Internode(_) = self { &WIRE } else { &RING }
    }

    /// Returns the name of the peer for errors.
    pub(super) fn describe(&self, control: &ControlBlock) -> String {
        match self {
            Self::IntraNode(ring) => control.describe(ring.peer),
            Self::Internode(wire) => wire.name.clone(),
            Self::Own | Self::Apart => control.describe(control.rank()),
        }
    }
}

/// The place where the payload of a frame was put.
pub(super) enum Placed {
    /// The message waits for its receive, or the frame has no receive.
    Kept,
    /// A message for this receive has started.
    Begins(Posted),
    /// The frame belongs to a message that had started. If a receive is given, it is now complete.
    Continues(Option<Posted>),
}

impl IncompleteFrame {
    /// Returns the number of bytes that `posted` has already received.
    fn bytes_of(self, posted: &Posted) -> usize {
        if self.ticket == posted.ticket { self.bytes } else { 0 }
    }

    /// Copies `payload`, the first bytes of a message, into the receive for the whole message.
    fn go_on(&mut self, matching: &Matching, from: Rank, frame: Frame, payload: &[u8]) {
        let receive = matching
            .sure_receive(from, frame.tag)
            .filter(|posted| posted.span.bytes as u64 == frame.bytes);
        let Some(posted) = receive else { return };
        let done = self.bytes_of(posted).min(payload.len());
        // SAFETY: the receiver's span has as many bytes as the whole message, and no other code
        // uses it until its completion.
        unsafe {
            cpu::copy(
                posted.span.ptr().add(done),
                payload[done..].as_ptr(),
                payload.len() - done,
                WriteMode::Cached,
            )
        }
        *self = Self { ticket: posted.ticket, bytes: payload.len() };
    }
}

impl MessageTable {
    /// Returns the next ticket, which is not pending yet.
    pub(super) fn new_ticket(&mut self) -> u64 {
        self.next += 1;
        self.next - 1
    }

    pub(super) fn ticket(&mut self) -> u64 {
        let ticket = self.new_ticket();
        self.open.insert(ticket);
        ticket
    }

    /// Returns the ring to `peer`, a rank of this node.
    pub(super) fn ring(&mut self, peer: Rank) -> Option<&mut RingLink> {
        self.peers[peer.index()].ring_mut()
    }

    /// Returns the wire to `peer`, a rank of another node.
    pub(super) fn wire(&mut self, peer: Rank) -> Option<&mut WireLink> {
        self.peers.get_mut(peer.index())?.wire_mut()
    }

    pub(super) fn is_internode(&self, peer: Rank) -> bool {
        matches!(self.peers.get(peer.index()), Some(Peer::Internode(_)))
    }

    fn rings(&self) -> impl Iterator<Item = (Rank, &RingLink)> {
        (0..).map(Rank).zip(&self.peers).filter_map(|(rank, peer)| Some((rank, peer.ring()?)))
    }

    pub(super) fn has_work(&self) -> bool {
        self.rings()
            .any(|(peer, ring)| ring.has_room() || (ring.has_arrived() && self.may_read(peer)))
    }

    /// Returns true if an acknowledgement waits for space in the ring to a peer that can still read
    /// it.
    pub(super) fn has_acknowledgement(&self, control: &ControlBlock) -> bool {
        self.closed.is_none()
            && self.rings().any(|(_, ring)| {
                ring.has_acknowledgement() && control.exit_reason(ring.peer).is_none()
            })
    }

    /// Returns true if frames of `peer` are read. They are not read if it has sent too many
    /// unmatched bytes and no pending message could be completed by reading more: no receive from
    /// it or from any source, and no send whose answer may be behind the unread frames. The peer
    /// then runs out of space and waits.
    fn may_read(&self, peer: Rank) -> bool {
        self.matching.backlog(peer) < BACKLOG_BYTES
            || self.pending().any(|pending| pending.peer.is_none_or(|other| other == peer))
    }

    pub(super) fn finish(
        &mut self,
        ticket: u64,
        completion: Completion,
        outcome: Result<()>,
        source: Option<Rank>,
    ) {
        self.finished.push_back(FinishedTransfer { ticket, completion, outcome, source });
    }

    pub(super) fn received(&mut self, posted: Posted, from: Rank) {
        self.finish(posted.ticket, posted.completion, Ok(()), Some(from));
    }

    pub(super) fn finish_send(&mut self, ticket: u64) {
        if let Some(send) = self.sends.remove(&ticket) {
            self.finish(ticket, send.completion, Ok(()), None);
        }
    }

    /// Publishes to the peers of this node that a thread of this rank waits for the end of message
    /// `ticket`, until messages next advance.
    pub(super) fn announce_wait(&mut self, control: &ControlBlock, ticket: u64) {
        let send = self.sends.get(&ticket).map(|send| (true, send.peer, send.tag));
        let waits = send.or_else(|| {
            let posted = self.matching.posted.iter().find(|posted| posted.ticket == ticket)?;
            Some((false, posted.peer?, posted.tag))
        });
        let awaited = waits.and_then(|(send, peer, tag)| {
            let peer = match &self.peers[peer.index()] {
                Peer::IntraNode(ring) => ring.peer,
                Peer::Own => control.rank(),
                Peer::Internode(_) | Peer::Apart => return None,
            };
            Some(AwaitedMessage { send, peer, tag })
        });
        self.announced = awaited.is_some();
        control.await_message(awaited);
    }

    pub(super) fn retract_wait(&mut self, control: &ControlBlock) {
        if std::mem::take(&mut self.announced) {
            control.await_message(None);
        }
    }

    /// Returns true if `peer`, of this node, sleeps for a message of this rank, although it has
    /// read all frames that this rank sent, and this rank has no pending message with it.
    pub(super) fn peer_waits_for(
        &self,
        control: &ControlBlock,
        peer: Rank,
        send: bool,
        tag: i32,
    ) -> bool {
        let rank = control.display_rank(peer);
        let open = || self.pending().any(|pending| pending.peer.is_none_or(|other| other == rank));
        let drained = || self.peers[rank.index()].ring().is_some_and(RingLink::is_drained);
        // In this order: see `await_message`.
        !open()
            && drained()
            && control.awaits(peer, AwaitedMessage { send, peer: control.rank(), tag })
    }

    /// Reads and writes the rings.
    pub(super) fn advance(&mut self, control: &ControlBlock, direct: bool) -> Result<bool> {
        self.retract_wait(control);
        let mut moved = false;
        for peer in (0..self.peers.len() as u32).map(Rank) {
            if self.ring(peer).is_none() {
                continue;
            }
            while self.may_read(peer) {
                let Self { peers, matching, streams, begun, .. } = self;
                let (Some(ring), begun, mut incoming) =
                    (peers[peer.index()].ring_mut(), &mut begun[peer.index()], None)
                else {
                    break;
                };
                let mut wrong = None;
                moved |= ring.receive(|frame, payload| {
                    if payload.len() < frame.payload(&RING) {
                        begun.go_on(matching, peer, frame, payload);
                        return Ok(());
                    }
                    let placed =
                        place(matching, streams, std::mem::take(begun), peer, frame, payload);
                    match placed {
                        Some(placed) => incoming = Some((frame, placed)),
                        None => wrong = Some(frame),
                    }
                    Ok(())
                })?;
                if let Some(frame) = wrong {
                    return Err(self.protocol_error(control, peer, frame));
                }
                let Some((frame, placed)) = incoming else { break };
                self.react(control, direct, peer, frame, placed)?;
            }
            let mut sent = Vec::new();
            if let Some(ring) = self.ring(peer) {
                moved |= ring.flush(|ticket| sent.push(ticket))?;
            }
            for ticket in sent {
                self.finish_send(ticket);
            }
        }
        Ok(moved)
    }

    /// Handles `frame` of a rank of another node, which arrived with `payload`.
    pub(super) fn receive_frames(
        &mut self,
        control: &ControlBlock,
        peer: Rank,
        frame: Frame,
        payload: &[u8],
    ) -> Result<()> {
        let Self { matching, streams, .. } = self;
        let Some(placed) =
            place(matching, streams, IncompleteFrame::default(), peer, frame, payload)
        else {
            return Err(self.protocol_error(control, peer, frame));
        };
        if let (FrameKind::Start, Placed::Continues(_)) = (frame.kind, &placed) {
            self.peers[peer.index()].link()?.matched(payload.len())?;
        }
        self.react(control, false, peer, frame, placed)
    }

    /// Completes a frame whose payload has been stored.
    fn react(
        &mut self,
        control: &ControlBlock,
        direct: bool,
        peer: Rank,
        frame: Frame,
        placed: Placed,
    ) -> Result<()> {
        match (frame.kind, placed) {
            (FrameKind::Eager, Placed::Begins(posted)) => {
                let posted = self.check_size(control, peer, (frame.bytes, frame.dtype), posted)?;
                // A complete receive reports its success even if the link is lost at that moment.
                self.received(posted, peer);
                self.peers[peer.index()].link()?.matched(frame.bytes as usize)?;
            }
            (FrameKind::Rts, Placed::Begins(posted)) => {
                let content =
                    MessageBody::Rts { id: frame.id, value: frame.value, first: Vec::new() };
                let Frame { tag, dtype, bytes, .. } = frame;
                self.deliver(
                    control,
                    direct,
                    posted,
                    UnmatchedMessage { from: peer, tag, dtype, bytes, content },
                )?;
            }
            (FrameKind::Data, Placed::Continues(complete)) => {
                let whole = complete.is_some();
                if let Some(posted) = complete {
                    self.received(posted, peer);
                }
                self.peers[peer.index()].link()?.arrived(whole)?;
                self.send_cts(peer)?;
            }
            (FrameKind::Cts, _) => self.run_peer(control, peer, frame)?,
            (FrameKind::Taken, _) => {
                // A second acknowledgement would let the receiver read memory that the sender has
                // reused.
                if self.sends.get(&frame.id).is_some_and(|send| send.peer != peer || send.next > 0)
                {
                    return Err(self.protocol_error(control, peer, frame));
                }
                self.finish_send(frame.id);
            }
            _ => {}
        }
        Ok(())
    }

    /// Sends the bytes of an offered message that `peer` requests, each byte once.
    fn run_peer(&mut self, control: &ControlBlock, peer: Rank, frame: Frame) -> Result<()> {
        let limits = self.peers[peer.index()].limits();
        // A receiver that reads memory itself requests only the bytes that it has not read.
        let fits = |send: &PendingSend| {
            let next = send.next as u64 == frame.value || (limits.direct && send.next == 0);
            send.peer == peer && send.started && next && send.span.bytes as u64 == frame.bytes
        };
        let Some(send) = self.sends.get_mut(&frame.id).filter(|send| fits(send)) else {
            return Err(self.protocol_error(control, peer, frame));
        };
        send.next = (frame.value as usize).saturating_add(limits.request).min(send.span.bytes);
        let span = send.span;
        let head = Frame { kind: FrameKind::Data, tag: send.tag, dtype: 0, ..frame };
        if self.peers[peer.index()].link()?.serve(head, span)? {
            self.finish_send(frame.id);
        }
        Ok(())
    }

    /// Sends `ticket`, which its peer does not know yet: at once, or when the link permits it. Does
    /// nothing while no link exists.
    pub(super) fn begin_send(&mut self, ticket: u64) -> Result<()> {
        let Some(send) = self.sends.get_mut(&ticket).filter(|send| !send.started) else {
            return Ok(());
        };
        let (frame, span, link) =
            (send.frame(ticket), send.span, self.peers[send.peer.index()].link()?);
        if link.send_now(frame, span)? {
            self.finish_send(ticket);
        } else if let Some(unasked) = link.send(frame, span)? {
            (send.started, send.next) = (true, unasked);
        }
        Ok(())
    }

    pub(super) fn protocol_error(&self, control: &ControlBlock, peer: Rank, frame: Frame) -> Error {
        let (name, group) = (self.peers[peer.index()].describe(control), control.name());
        let place =
            if self.is_internode(peer) { format!(" in group \"{group}\"") } else { String::new() };
        Error::internal(format!("{name} sent a malformed frame{place}: {frame:?}"))
    }
}

/// Stores a frame's payload where it belongs. Returns `None` if no sender writes such a frame; then
/// nothing was changed.
fn place(
    matching: &mut Matching,
    streams: &mut BTreeMap<(Rank, u64), ChunkedReceive>,
    begun: IncompleteFrame,
    from: Rank,
    frame: Frame,
    payload: &[u8],
) -> Option<Placed> {
    match frame.kind {
        FrameKind::Eager | FrameKind::Rts => {
            if let Some(posted) = matching.take_receive(from, frame.tag) {
                // An offer has no payload; `check_size` reports a message of another size.
                if posted.span.bytes == payload.len() {
                    let rest = &payload[begun.bytes_of(&posted).min(payload.len())..];
                    let to = posted.span.ptr().wrapping_add(payload.len() - rest.len());
                    // SAFETY: the payload has as many bytes as the receiver's span, which no other
                    // code uses until its completion.
                    unsafe { cpu::copy(to, rest.as_ptr(), rest.len(), WriteMode::Cached) }
                }
                return Some(Placed::Begins(posted));
            }
            let offer = || MessageBody::Rts { id: frame.id, value: frame.value, first: Vec::new() };
            let content = if frame.kind == FrameKind::Eager {
                MessageBody::Eager(payload.into())
            } else {
                offer()
            };
            matching.keep(UnmatchedMessage {
                from,
                tag: frame.tag,
                dtype: frame.dtype,
                bytes: frame.bytes,
                content,
            });
            Some(Placed::Kept)
        }
        FrameKind::Data | FrameKind::Start => {
            // Chunks arrive in order and without gaps, so the count of bytes tells when the message
            // is complete. `payload` has at most `bytes - value` bytes.
            let end = frame.value + payload.len() as u64;
            let fits = |stream: &&mut ChunkedReceive| {
                let bytes = stream.posted.span.bytes as u64;
                stream.source == PayloadSource::Frames
                    && (frame.bytes, frame.value) == (bytes, stream.got)
                    && end <= stream.requested
            };
            let Some(stream) = streams.get_mut(&(from, frame.id)).filter(fits) else {
                let waits = frame.kind == FrameKind::Start
                    && matching.keep_start(from, frame.id, frame.value as usize, payload);
                return waits.then_some(Placed::Kept);
            };
            let store = if frame.bytes >= STREAM_BYTES as u64 {
                WriteMode::Streaming
            } else {
                WriteMode::Cached
            };
            // SAFETY: the chunk lies within the receiver's span (checked above), which no other
            // code uses until its completion.
            unsafe {
                cpu::copy(
                    stream.posted.span.ptr().add(frame.value as usize),
                    payload.as_ptr(),
                    payload.len(),
                    store,
                )
            }
            stream.got = end;
            let whole = if end == frame.bytes { streams.remove(&(from, frame.id)) } else { None };
            Some(Placed::Continues(whole.map(|stream| stream.posted)))
        }
        FrameKind::Cts | FrameKind::Taken => Some(Placed::Kept),
        FrameKind::Padding
        | FrameKind::Credit
        | FrameKind::Bye
        | FrameKind::Rejected
        | FrameKind::Waits => None,
    }
}
