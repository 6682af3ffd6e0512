//! The link with a rank of another node, over a backend of these two ranks.
#![allow(unsafe_code, reason = "reads from the bytes of tensors")]

use super::frame::{Frame, FrameKind, MAX_TEXT_BYTES, REJECTED_RECV, REJECTED_SEND, WIRE};
use super::link::Link;
use super::links::{Links, Traffic};
use crate::coll::call::Span;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::rank::Rank;
use std::sync::Arc;

/// Length of a frame's header and the two counters of a wire that follow it.
pub(super) const HEADER_BYTES: usize = 48;
/// Maximum length of a frame.
pub(super) const MAX_FRAME_BYTES: usize = HEADER_BYTES + WIRE.eager;
/// Maximum number of bytes of eager messages that may be unmatched at their receiver; further
/// messages are offered.
const EAGER_WINDOW_BYTES: u64 = 4 << 20;
/// Number of bytes that an eager message occupies at its receiver in addition to its payload.
const MESSAGE_OVERHEAD: u64 = 64;
/// Number of chunks of long messages for which a receiver has space at a time.
const CHUNK_WINDOW: usize = 16;
/// Number of frames, and of bytes of eager messages, after which a receiver acknowledges them.
const ACK_THRESHOLD: (u64, u64) = (64, EAGER_WINDOW_BYTES / 4);

/// The state of the connection.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum LinkPhase {
    /// No message needs it.
    Idle,
    /// It is not created yet, because the peer may not have started a message with this rank.
    Connecting,
    Open,
    Lost(Error),
}

/// The rejection of a message.
#[derive(Clone)]
pub(super) struct Rejection {
    /// True if the message was a send.
    pub(super) send: bool,
    pub(super) tag: i32,
    pub(super) why: String,
}

impl Rejection {
    /// Returns the rejection that `frame`, with its text, reports.
    pub(super) fn of(frame: Frame, text: &[u8]) -> Self {
        Self {
            send: frame.value == REJECTED_SEND,
            tag: frame.tag,
            why: String::from_utf8_lossy(text).into_owned(),
        }
    }

    /// Returns the frame that asks the peer whether this rejection still holds, because a message
    /// of `bytes` bytes waits for the rejected one.
    pub(super) fn asked(&self, dtype: DType, bytes: usize) -> Frame {
        Frame {
            dtype: dtype as u8,
            tag: self.tag,
            bytes: bytes as u64,
            value: self.value(),
            ..Frame::bare(FrameKind::Waits)
        }
    }

    fn value(&self) -> u64 {
        if self.send { REJECTED_SEND } else { REJECTED_RECV }
    }

    /// Returns true if `frame` asks about this rejection.
    pub(super) fn is_asked(&self, frame: &Frame) -> bool {
        (frame.value, frame.tag) == (self.value(), self.tag)
    }

    /// Returns the frame that reports the rejection, and as much of the reason as fits.
    pub(super) fn reported(&self) -> (Frame, &[u8]) {
        let text = &self.why.as_bytes()[..self.why.len().min(MAX_TEXT_BYTES)];
        (
            Frame {
                tag: self.tag,
                bytes: text.len() as u64,
                value: self.value(),
                ..Frame::bare(FrameKind::Rejected)
            },
            text,
        )
    }
}

/// The counters in a frame, which acknowledge traffic of the opposite direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Counters {
    /// Number of frames that the sender of this frame has read.
    pub read: u64,
    /// Number of bytes of eager messages that have found their receives on that rank.
    pub matched: u64,
}

/// This rank's end of the link with `peer`.
pub(super) struct WireLink {
    pub(super) peer: Rank,
    /// Name of the peer in errors.
    pub(super) name: String,
    links: Arc<Links>,
    pub(super) phase: LinkPhase,
    /// The last rejection of the peer, unless it has started a message since, or was asked whether
    /// the rejection still holds.
    pub(super) rejected: Option<Rejection>,
    /// The last rejection of this rank, and the number of its calls at that time.
    pub(super) own: Option<(Rejection, u64)>,
    /// True while the peer has not been notified of `own`, unless this rank has started a message
    /// with the peer since.
    pub(super) unsent_rejection: bool,
    /// Number of chunks that were requested and have not arrived.
    requested_chunks: usize,
    /// Number of frames sent, and number of those that the peer has read.
    sent: u64,
    acked: u64,
    /// Number of frames sent when this rank announced that it leaves.
    last: u64,
    /// Number of bytes of eager messages sent, and number of those that have found their receives.
    short: u64,
    short_matched: u64,
    /// What this rank has read and matched, and what the peer knows of it.
    own_counters: Counters,
    acked_counters: Counters,
}

/// Returns the bytes `from..to` of a message that is not complete.
fn bytes<'a>(span: Span, from: usize, to: usize) -> &'a [u8] {
    assert!(from <= to && to <= span.bytes, "outside the message");
    if from == to {
        return &[];
    }
    // SAFETY: within the span (checked above), which its owner leaves unchanged until the
    // completion; the completion is called after the last use of this slice.
    unsafe { std::slice::from_raw_parts(span.ptr().add(from), to - from) }
}

impl WireLink {
    pub(super) fn new(links: Arc<Links>, peer: Rank, name: String) -> Self {
        Self {
            peer,
            name,
            links,
            phase: LinkPhase::Idle,
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

    /// Returns the reason why the connection has ended, if it has.
    pub(super) fn lost(&self) -> Option<Error> {
        if let LinkPhase::Lost(cause) = &self.phase { Some(cause.clone()) } else { None }
    }

    fn is_open(&self) -> bool {
        self.phase == LinkPhase::Open
    }

    /// Sends `frame`, with the counters of what this rank has read and matched.
    pub(super) fn send_frame(&mut self, frame: Frame, payload: &[u8]) -> Result<()> {
        let mut head = [0; HEADER_BYTES];
        let words =
            frame.encode().into_iter().chain([self.own_counters.read, self.own_counters.matched]);
        head.chunks_exact_mut(8)
            .zip(words)
            .for_each(|(to, word)| to.copy_from_slice(&word.to_le_bytes()));
        self.acked_counters = self.own_counters;
        self.sent += 1;
        self.links.send(self.peer, &head, traffic(frame.kind), payload)
    }

    /// Announces to the peer that this rank leaves.
    pub(super) fn send_goodbye(&mut self) -> Result<()> {
        if !self.is_open() {
            return Ok(());
        }
        let said = self.send_frame(Frame::bare(FrameKind::Bye), &[]);
        self.last = self.sent;
        said
    }

    /// Returns true if the peer is connected and has not yet read that this rank leaves. The peer
    /// need not read answers that this rank sends after the goodbye.
    pub(super) fn is_unread(&self) -> bool {
        self.is_open() && self.acked < self.last
    }

    /// Reports a rejection of this rank to the peer once they are connected.
    pub(super) fn send_rejection(&mut self) -> Result<()> {
        if !self.is_open() {
            return Ok(());
        }
        let Some((refusal, _)) =
            self.own.clone().filter(|_| std::mem::take(&mut self.unsent_rejection))
        else {
            return Ok(());
        };
        let (frame, text) = refusal.reported();
        self.send_frame(frame, text)
    }

    /// Records the counters of a frame of the peer; returns false if they are impossible.
    pub(super) fn read(&mut self, counters: Counters) -> bool {
        self.own_counters.read += 1;
        let credible = (self.acked..=self.sent).contains(&counters.read)
            && (self.short_matched..=self.short).contains(&counters.matched);
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
        let due = own.read - told.read >= ACK_THRESHOLD.0
            || own.matched - told.matched >= ACK_THRESHOLD.1;
        if due && self.is_open() {
            self.send_frame(Frame::bare(FrameKind::Credit), &[])
        } else {
            Ok(())
        }
    }
}

/// Returns the class of traffic in which the payload of a frame of this `kind` arrives.
pub(super) fn traffic(kind: FrameKind) -> Traffic {
    if kind == FrameKind::Data { Traffic::Piece } else { Traffic::Frame }
}

impl Link for WireLink {
    fn send_now(&mut self, frame: Frame, span: Span) -> Result<bool> {
        let (cost, room) = (
            frame.bytes + MESSAGE_OVERHEAD,
            EAGER_WINDOW_BYTES.saturating_sub(self.short - self.short_matched),
        );
        // An empty message is always eager, because its receiver would never request any bytes.
        if !self.is_open() || span.bytes > WIRE.eager || (span.bytes > 0 && cost > room) {
            return Ok(false);
        }
        self.short += cost;
        self.send_frame(frame, bytes(span, 0, span.bytes)).map(|()| true)
    }

    fn send(&mut self, frame: Frame, span: Span) -> Result<Option<usize>> {
        match &self.phase {
            LinkPhase::Idle | LinkPhase::Connecting => return Ok(None),
            LinkPhase::Lost(cause) => return Err(cause.clone()),
            LinkPhase::Open => {}
        }
        let room = EAGER_WINDOW_BYTES.saturating_sub(self.short - self.short_matched);
        let unasked =
            WIRE.eager_prefix(frame.bytes, (room / (WIRE.data as u64 + MESSAGE_OVERHEAD)) as usize);
        // The receiver can request the rest while the first chunks are still on the way.
        self.send_frame(Frame { kind: FrameKind::Rts, value: unasked as u64, ..frame }, &[])?;
        for at in (0..unasked).step_by(WIRE.data) {
            self.short += WIRE.data as u64 + MESSAGE_OVERHEAD;
            self.send_frame(
                Frame { kind: FrameKind::Start, value: at as u64, ..frame },
                bytes(span, at, at + WIRE.data),
            )?;
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
        // The sender keeps the staging of chunks until they are acknowledged, so this rank
        // acknowledges a complete message at once.
        if whole { self.send_frame(Frame::bare(FrameKind::Credit), &[]) } else { Ok(()) }
    }

    fn serve(&mut self, frame: Frame, span: Span) -> Result<bool> {
        let from = frame.value as usize;
        let to = from + frame.payload(&WIRE);
        self.send_frame(frame, bytes(span, from, to)).map(|()| to == span.bytes)
    }
}

/// Decodes a frame of a wire and the counters behind it. Returns `None` for a header that no sender
/// writes.
pub(super) fn decode(head: &[u8; HEADER_BYTES]) -> Option<(Frame, Counters)> {
    let mut words =
        head.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().unwrap_or_default()));
    let mut next = || words.next().unwrap_or_default();
    let frame = Frame::decode([next(), next(), next(), next()], &WIRE)?;
    Some((frame, Counters { read: next(), matched: next() }))
}

const _: () = assert!(WIRE.eager as u64 + MESSAGE_OVERHEAD <= EAGER_WINDOW_BYTES);
