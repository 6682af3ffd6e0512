//! Wire: the link with a rank of another node, by a backend of these two ranks.
#![allow(unsafe_code, reason = "reads from the bytes of tensors")]

use super::frame::{Frame, FrameKind, MAX_TEXT_BYTES, REJECTED_RECV, REJECTED_SEND, WIRE};
use super::link::Link;
use super::links::{Links, Traffic};
use crate::coll::call::Span;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::rank::Rank;
use std::sync::Arc;

/// Length of a frame's head, and of the two counters of a wire behind it.
pub(super) const HEADER_BYTES: usize = 48;
/// Length of the longest frame.
pub(super) const MAX_FRAME_BYTES: usize = HEADER_BYTES + WIRE.eager;
/// Bytes of short messages that may wait at their receiver; what is sent beyond is offered.
const EAGER_WINDOW_BYTES: u64 = 4 << 20;
/// Bytes that a short message takes there beside its own.
const MESSAGE_OVERHEAD: u64 = 64;
/// Pieces of long messages that a receiver has room for at once.
const CHUNK_WINDOW: usize = 16;
/// Frames, and bytes of short messages, after which a receiver says that it has read and matched them.
const ACK_THRESHOLD: (u64, u64) = (64, EAGER_WINDOW_BYTES / 4);

/// State of the connection.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum LinkState {
    /// No message needs it.
    Idle,
    /// Not made yet: the peer may not have begun a message with this rank.
    Connecting,
    Open,
    Lost(Error),
}

/// Refusal of a message.
#[derive(Clone)]
pub(super) struct Rejection {
    /// Whether it was a send.
    pub(super) send: bool,
    pub(super) tag: i32,
    pub(super) why: String,
}

impl Rejection {
    /// What `frame` tells, with its text.
    pub(super) fn of(frame: Frame, text: &[u8]) -> Self {
        Self { send: frame.value == REJECTED_SEND, tag: frame.tag, why: String::from_utf8_lossy(text).into_owned() }
    }

    /// The frame by which a message of `bytes` bytes of the peer asks whether the refusal still stands.
    pub(super) fn asked(&self, dtype: DType, bytes: usize) -> Frame {
        Frame { dtype: dtype as u8, tag: self.tag, bytes: bytes as u64, value: self.value(), ..Frame::bare(FrameKind::Waits) }
    }

    fn value(&self) -> u64 {
        if self.send { REJECTED_SEND } else { REJECTED_RECV }
    }

    /// True if `frame` asks for this refusal.
    pub(super) fn is_asked(&self, frame: &Frame) -> bool {
        (frame.value, frame.tag) == (self.value(), self.tag)
    }

    /// The frame that tells it, and as much of the reason as fits.
    pub(super) fn reported(&self) -> (Frame, &[u8]) {
        let text = &self.why.as_bytes()[..self.why.len().min(MAX_TEXT_BYTES)];
        (Frame { tag: self.tag, bytes: text.len() as u64, value: self.value(), ..Frame::bare(FrameKind::Rejected) }, text)
    }
}

/// What a frame says of those that went the other way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Counters {
    /// Frames that its sender has read.
    pub read: u64,
    /// Bytes of short messages that have found their receives there.
    pub matched: u64,
}

/// Side of this rank in the link with `peer`.
pub(super) struct WireLink {
    pub(super) peer: Rank,
    /// Name of the peer in error messages.
    pub(super) name: String,
    links: Arc<Links>,
    pub(super) phase: LinkState,
    /// The last refusal of the peer, unless it has begun a message since, or was asked whether it still stands.
    pub(super) rejected: Option<Rejection>,
    /// The last refusal of this rank, and the number of its calls then.
    pub(super) own: Option<(Rejection, u64)>,
    /// True while the peer does not know of that, unless this rank has begun a message with it since.
    pub(super) unsent_rejection: bool,
    /// Pieces that were requested and have not come.
    requested_chunks: usize,
    /// Frames sent, and how many of them the peer has read.
    sent: u64,
    acked: u64,
    /// How many there were when this rank said that it leaves.
    last: u64,
    /// Bytes of short messages sent, and how many of them have found their receives.
    short: u64,
    short_matched: u64,
    /// What this rank has read and matched, and what the peer knows of that.
    own_counters: Counters,
    acked_counters: Counters,
}

/// Bytes `from..to` of a message that is not complete.
fn bytes<'a>(span: Span, from: usize, to: usize) -> &'a [u8] {
    assert!(from <= to && to <= span.bytes, "outside the message");
    if from == to {
        return &[];
    }
    // SAFETY: inside the span (checked above), which its owner leaves alone until the completion: it is called after the last use of this.
    unsafe { std::slice::from_raw_parts(span.ptr().add(from), to - from) }
}

impl WireLink {
    pub(super) fn new(links: Arc<Links>, peer: Rank, name: String) -> Self {
        Self {
            peer,
            name,
            links,
            phase: LinkState::Idle,
            rejected: None,
            own: None,
            unsent_rejection: false,
            requested_chunks: 0,
            sent: 0,
            acked: 0,
            last: 0,
            short: 0,
            short_matched: 0,
            own_counters: Counters::default(),
            acked_counters: Counters::default(),
        }
    }

    /// Why the connection has ended, if it has.
    pub(super) fn lost(&self) -> Option<Error> {
        if let LinkState::Lost(cause) = &self.phase { Some(cause.clone()) } else { None }
    }

    fn is_open(&self) -> bool {
        self.phase == LinkState::Open
    }

    /// Says `frame`, with what this rank has read and matched.
    pub(super) fn send_frame(&mut self, frame: Frame, payload: &[u8]) -> Result<()> {
        let mut head = [0; HEADER_BYTES];
        let words = frame.encode().into_iter().chain([self.own_counters.read, self.own_counters.matched]);
        head.chunks_exact_mut(8).zip(words).for_each(|(to, word)| to.copy_from_slice(&word.to_le_bytes()));
        self.acked_counters = self.own_counters;
        self.sent += 1;
        self.links.send(self.peer, &head, traffic(frame.kind), payload)
    }

    /// Tells the peer that this rank leaves.
    pub(super) fn send_goodbye(&mut self) -> Result<()> {
        if !self.is_open() {
            return Ok(());
        }
        let said = self.send_frame(Frame::bare(FrameKind::Bye), &[]);
        self.last = self.sent;
        said
    }

    /// Whether the peer is there and has not read yet that this rank leaves. It need not read what this rank answers meanwhile.
    pub(super) fn is_unread(&self) -> bool {
        self.is_open() && self.acked < self.last
    }

    /// Tells the peer what this rank has refused, once they are connected.
    pub(super) fn send_rejection(&mut self) -> Result<()> {
        if !self.is_open() {
            return Ok(());
        }
        let Some((refusal, _)) = self.own.clone().filter(|_| std::mem::take(&mut self.unsent_rejection)) else { return Ok(()) };
        let (frame, text) = refusal.reported();
        self.send_frame(frame, text)
    }

    /// Takes note of a frame of the peer, and of what it has read and matched; whether that can be.
    pub(super) fn read(&mut self, counters: Counters) -> bool {
        self.own_counters.read += 1;
        let credible = (self.acked..=self.sent).contains(&counters.read) && (self.short_matched..=self.short).contains(&counters.matched);
        if credible && counters.read > self.acked {
            self.acked = counters.read;
            self.links.confirm(self.peer, counters.read);
        }
        if credible {
            self.short_matched = counters.matched;
        }
        credible
    }

    pub(super) fn give_credit(&mut self) -> Result<()> {
        let (own, told) = (self.own_counters, self.acked_counters);
        let due = own.read - told.read >= ACK_THRESHOLD.0 || own.matched - told.matched >= ACK_THRESHOLD.1;
        if due && self.is_open() { self.send_frame(Frame::bare(FrameKind::Credit), &[]) } else { Ok(()) }
    }
}

/// Class of traffic by which the payload of such a frame comes.
pub(super) fn traffic(kind: FrameKind) -> Traffic {
    if kind == FrameKind::Data { Traffic::Piece } else { Traffic::Frame }
}

impl Link for WireLink {
    fn send_now(&mut self, frame: Frame, span: Span) -> Result<bool> {
        let (cost, room) = (frame.bytes + MESSAGE_OVERHEAD, EAGER_WINDOW_BYTES.saturating_sub(self.short - self.short_matched));
        // There is nothing to request in an empty one.
        if !self.is_open() || span.bytes > WIRE.eager || (span.bytes > 0 && cost > room) {
            return Ok(false);
        }
        self.short += cost;
        self.send_frame(frame, bytes(span, 0, span.bytes)).map(|()| true)
    }

    fn send(&mut self, frame: Frame, span: Span) -> Result<Option<usize>> {
        match &self.phase {
            LinkState::Idle | LinkState::Connecting => return Ok(None),
            LinkState::Lost(cause) => return Err(cause.clone()),
            LinkState::Open => {}
        }
        let room = EAGER_WINDOW_BYTES.saturating_sub(self.short - self.short_matched);
        let unasked = WIRE.eager_prefix(frame.bytes, (room / (WIRE.data as u64 + MESSAGE_OVERHEAD)) as usize);
        // The answer is on its way while the first pieces are.
        self.send_frame(Frame { kind: FrameKind::Rts, value: unasked as u64, ..frame }, &[])?;
        for at in (0..unasked).step_by(WIRE.data) {
            self.short += WIRE.data as u64 + MESSAGE_OVERHEAD;
            self.send_frame(Frame { kind: FrameKind::Start, value: at as u64, ..frame }, bytes(span, at, at + WIRE.data))?;
        }
        Ok(Some(unasked))
    }

    fn matched(&mut self, bytes: usize) -> Result<()> {
        self.own_counters.matched += bytes as u64 + MESSAGE_OVERHEAD;
        self.give_credit()
    }

    fn room(&self, rest: usize) -> usize {
        if self.requested_chunks < CHUNK_WINDOW { rest.min(WIRE.request) } else { 0 }
    }

    fn request(&mut self, frame: Frame) -> Result<()> {
        self.lost().map_or(Ok(()), Err)?;
        self.requested_chunks += 1;
        self.links.listen(self.peer, Traffic::Piece, WIRE.data)?;
        self.send_frame(frame, &[])
    }

    fn arrived(&mut self, whole: bool) -> Result<()> {
        self.requested_chunks -= 1;
        // The sender keeps the staging of pieces until it hears that they were read.
        if whole { self.send_frame(Frame::bare(FrameKind::Credit), &[]) } else { Ok(()) }
    }

    fn serve(&mut self, frame: Frame, span: Span) -> Result<bool> {
        let from = frame.value as usize;
        let to = from + frame.payload(&WIRE);
        self.send_frame(frame, bytes(span, from, to)).map(|()| to == span.bytes)
    }
}

/// A frame of a wire as its head says, with the counters behind it; `None` for a head that no sender writes.
pub(super) fn decode(head: &[u8; HEADER_BYTES]) -> Option<(Frame, Counters)> {
    let mut words = head.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().unwrap_or_default()));
    let mut next = || words.next().unwrap_or_default();
    let frame = Frame::decode([next(), next(), next(), next()], &WIRE)?;
    Some((frame, Counters { read: next(), matched: next() }))
}

const _: () = assert!(WIRE.eager as u64 + MESSAGE_OVERHEAD <= EAGER_WINDOW_BYTES);
