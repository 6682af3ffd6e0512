//! State of the messages between this rank and its peers, and what each frame does to it.
#![allow(unsafe_code, reason = "copies between rings and the bytes of tensors")]

use super::frame::{EAGER_BYTES, Frame, Kind};
use super::link::Link;
use super::matching::{Content, Matching, Posted, Unexpected};
use super::ring::{EAGER_WINDOW, Ring};
use super::{Begun, Finished, STREAM_BYTES, Sending, Source, State, Stream, reading};
use crate::completion::Completion;
use crate::control::{Awaited, ControlBlock};
use crate::error::{Error, Result};
use crate::kernels::cpu::{self, Store};
use crate::rank::Rank;
use crate::sync::limit::Limit;
use std::collections::BTreeMap;
use std::sync::atomic::{Ordering, fence};

/// Unasked messages of one sender beyond which it is not heard. All short ones that a sender may have on their way fit.
const BACKLOG_BYTES: usize = EAGER_WINDOW as usize * EAGER_BYTES;

/// A transfer under way, as messages tell it.
struct Pending<'a> {
    name: &'static str,
    /// `None`: anybody.
    peer: Option<Rank>,
    tag: i32,
    bytes: usize,
    limit: &'a Limit,
    /// Ranks of other hosts may complete it, too.
    shared: bool,
}

impl Pending<'_> {
    /// `end`: whose end is that of this transfer; else its time is up.
    fn given_up(&self, control: &ControlBlock, end: Option<&(Rank, String)>) -> Error {
        let what = about(control, self.name, self.bytes, self.tag);
        let (me, seconds) = (control.describe(control.rank()), self.limit.waited().as_secs_f32());
        if let Some((end, how)) = end {
            let whom = self.peer.filter(|peer| peer != end).map_or_else(|| "it".into(), |peer| control.describe(peer));
            return Error::peer(format!("{} {how}; {me} had waited {seconds:.1} s for {whom} in {what}", control.describe(*end)));
        }
        let whom = self.peer.map_or_else(|| "any rank".into(), |peer| state_of(control, peer));
        Error::timeout(format!("{me} waited {seconds:.1} s until its timeout in {what} for {whom}"))
    }
}

/// Peers that take part in nothing further, and how each became so. They are to be asked for before what they wrote is read: else some of
/// it may be missed.
pub(super) struct Lost {
    absent: Vec<(Rank, String)>,
    dead: Option<(Rank, String)>,
}

impl Lost {
    pub(super) fn among(control: &ControlBlock) -> Self {
        let absent = control.peers().filter_map(|peer| Some((peer, control.absence(peer)?))).collect();
        Self { absent, dead: control.dead_rank().map(|(rank, how)| (rank, how.clone())) }
    }

    /// Whose end is that of a transfer with `peer`, or with anybody: its own, or the death of any member. One that left in order owes
    /// others nothing.
    fn ends(&self, control: &ControlBlock, pending: &Pending<'_>) -> Option<&(Rank, String)> {
        let needed = match pending.peer {
            Some(peer) => self.absent.iter().find(|(rank, _)| *rank == peer),
            None if pending.shared => None,
            None => self.absent.first().filter(|_| self.absent.len() + 1 == control.size()),
        };
        needed.or(self.dead.as_ref())
    }
}

impl Begun {
    /// Bytes that `posted` has got.
    fn bytes_of(self, posted: &Posted) -> usize {
        if self.ticket == posted.ticket { self.bytes } else { 0 }
    }

    /// Copies `payload`, which is what has come of a message, into the receive that will get the whole.
    fn go_on(&mut self, matching: &Matching, from: Rank, frame: Frame, payload: &[u8]) {
        let receive = matching.sure_receive(from, frame.tag).filter(|posted| posted.span.bytes as u64 == frame.bytes);
        let Some(posted) = receive else { return };
        let done = self.bytes_of(posted).min(payload.len());
        // SAFETY: the receiver's span has as many bytes as the whole message, and is left alone until its completion.
        unsafe { cpu::copy(posted.span.ptr().add(done), payload[done..].as_ptr(), payload.len() - done, Store::Cached) }
        *self = Self { ticket: posted.ticket, bytes: payload.len() };
    }
}

impl State {
    /// The next ticket, which is not open yet.
    pub(super) fn number(&mut self) -> u64 {
        self.next += 1;
        self.next - 1
    }

    pub(super) fn ticket(&mut self) -> u64 {
        let ticket = self.number();
        self.open.insert(ticket);
        ticket
    }

    /// The link with `peer`.
    pub(super) fn link(&mut self, peer: Rank) -> &mut dyn Link {
        &mut self.rings[peer.index()]
    }

    pub(super) fn stirs(&self, control: &ControlBlock) -> bool {
        control.peers().any(|peer| {
            let ring = &self.rings[peer.index()];
            ring.has_room() || (ring.has_come() && self.listens(peer))
        })
    }

    /// Whether what `peer` sends is read. Not while it has sent too much that nobody has asked for and nothing is open that more of it
    /// could complete: a receive from it or from anybody, or a send whose answer stands behind the rest. It then runs out of room.
    fn listens(&self, peer: Rank) -> bool {
        self.matching.backlog(peer) < BACKLOG_BYTES || self.pending().any(|pending| pending.peer.is_none_or(|other| other == peer))
    }

    pub(super) fn limits(&self) -> impl Iterator<Item = &Limit> {
        self.pending().map(|pending| pending.limit)
    }

    fn pending(&self) -> impl Iterator<Item = Pending<'_>> {
        let receives = self.matching.posted.iter().chain(self.streams.values().map(|stream| &stream.posted));
        let receives =
            receives.map(|Posted { peer, tag, span, limit, claim, .. }| ("recv", *peer, *tag, span.bytes, limit, claim.is_some()));
        let sends = self.sends.values().map(|Sending { peer, tag, span, limit, .. }| ("send", Some(*peer), *tag, span.bytes, limit, false));
        receives.chain(sends).map(|(name, peer, tag, bytes, limit, shared)| Pending { name, peer, tag, bytes, limit, shared })
    }

    pub(super) fn finish(&mut self, ticket: u64, completion: Completion, outcome: Result<()>, source: Option<Rank>) {
        self.finished.push(Finished { ticket, completion, outcome, source });
    }

    fn finish_send(&mut self, ticket: u64) {
        if let Some(send) = self.sends.remove(&ticket) {
            self.finish(ticket, send.completion, Ok(()), None);
        }
    }

    /// Tells peers, until the next step, what `ticket` waits for.
    pub(super) fn announce(&mut self, control: &ControlBlock, ticket: u64) {
        let awaited = match self.sends.get(&ticket) {
            Some(send) => Some(Awaited { send: true, peer: send.peer, tag: send.tag }),
            None => self
                .matching
                .posted
                .iter()
                .find(|posted| posted.ticket == ticket)
                .and_then(|posted| Some(Awaited { send: false, peer: posted.peer?, tag: posted.tag })),
        };
        self.announced = awaited.is_some();
        control.await_message(awaited);
    }

    pub(super) fn take_back(&mut self, control: &ControlBlock) {
        if std::mem::take(&mut self.announced) {
            control.await_message(None);
        }
    }

    /// Whether `peer` sleeps for a message of this rank, though it has read all that was sent to it, and nothing between the two is open
    /// here.
    pub(super) fn is_awaited(&self, control: &ControlBlock, peer: Rank, send: bool, tag: i32) -> bool {
        let open = || self.pending().any(|pending| pending.peer.is_none_or(|other| other == peer));
        // In this order: see `await_message`.
        !open() && self.rings[peer.index()].is_drained() && control.awaits(peer, Awaited { send, peer: control.rank(), tag })
    }

    pub(super) fn advance(&mut self, control: &ControlBlock, direct: bool) -> Result<bool> {
        self.take_back(control);
        let mut moved = false;
        for peer in control.peers() {
            while self.listens(peer) {
                let mut incoming = None;
                let took = self.rings[peer.index()].receive(|frame, payload| {
                    let begun = &mut self.begun[peer.index()];
                    if payload.len() < frame.payload() {
                        begun.go_on(&self.matching, peer, frame, payload);
                        return Ok(());
                    }
                    let placed = place(&mut self.matching, &mut self.streams, std::mem::take(begun), peer, frame, payload);
                    let posted = placed.ok_or_else(|| nonsense(control, peer, frame))?;
                    incoming = Some((frame, posted));
                    Ok(())
                })?;
                moved |= took;
                let Some((frame, posted)) = incoming else { break };
                self.react(control, direct, peer, frame, posted)?;
            }
            let mut sent = Vec::new();
            moved |= self.rings[peer.index()].flush(|ticket| sent.push(ticket))?;
            for ticket in sent {
                self.finish_send(ticket);
            }
        }
        Ok(moved)
    }

    /// Completes a frame whose payload has been put in its place; `posted` is the receive it belongs to, if that is known.
    fn react(&mut self, control: &ControlBlock, direct: bool, peer: Rank, frame: Frame, posted: Option<Posted>) -> Result<()> {
        match (frame.kind, posted) {
            (Kind::Eager, Some(posted)) => {
                let posted = self.check_size(control, peer, frame.bytes, posted)?;
                self.link(peer).matched(posted.span.bytes)?;
                self.finish(posted.ticket, posted.completion, Ok(()), Some(peer));
            }
            (Kind::Offer, Some(posted)) => {
                let content = Content::Offer { id: frame.id, addr: frame.value };
                let message = Unexpected { from: peer, tag: frame.tag, bytes: frame.bytes, content };
                self.deliver(control, direct, posted, message)?;
            }
            (Kind::Data, Some(posted)) => self.finish(posted.ticket, posted.completion, Ok(()), Some(peer)),
            (Kind::Request, _) => {
                if let Some(send) = self.offered(control, peer, frame)? {
                    send.requested = true;
                    let (span, bytes) = (send.span, send.span.bytes as u64);
                    let head = Frame { kind: Kind::Data, tag: send.tag, id: frame.id, bytes, value: frame.value.min(bytes) };
                    if self.link(peer).serve(head, span)? {
                        self.finish_send(frame.id);
                    }
                }
            }
            (Kind::Taken, _) => {
                if self.offered(control, peer, frame)?.is_some() {
                    self.finish_send(frame.id);
                }
            }
            (Kind::Padding | Kind::Eager | Kind::Offer | Kind::Data, _) => {}
        }
        Ok(())
    }

    /// The send that `peer` answers, unless it has failed meanwhile. It answers only what was offered to it, and once: a second answer
    /// would have memory read that is its sender's again.
    fn offered(&mut self, control: &ControlBlock, peer: Rank, frame: Frame) -> Result<Option<&mut Sending>> {
        match self.sends.get_mut(&frame.id) {
            Some(send) if send.peer != peer || send.requested => Err(nonsense(control, peer, frame)),
            send => Ok(send),
        }
    }

    /// Gives a message that has come or been offered to its receive.
    pub(super) fn deliver(&mut self, control: &ControlBlock, direct: bool, posted: Posted, message: Unexpected) -> Result<()> {
        let from = message.from;
        let posted = self.check_size(control, from, message.bytes, posted)?;
        match message.content {
            Content::Eager(bytes) => {
                // SAFETY: sizes are equal (checked above); the span is the receiver's.
                unsafe { cpu::copy(posted.span.ptr(), bytes.as_ptr(), bytes.len(), Store::Cached) }
                self.link(from).matched(posted.span.bytes)?;
                self.finish(posted.ticket, posted.completion, Ok(()), Some(from));
            }
            Content::Own { ticket } => self.deliver_own(control, posted, ticket)?,
            // Nothing is to be read or asked for.
            Content::Offer { id, .. } if message.bytes == 0 => {
                self.rings[from.index()].say(Frame::control(Kind::Taken, id, 0));
                self.finish(posted.ticket, posted.completion, Ok(()), Some(from));
            }
            Content::Offer { id, addr } => {
                let direct = direct && posted.span.bytes > 0 && self.rings[from.index()].is_readable();
                let source = if direct { Source::Memory(addr) } else { Source::Frames };
                let stream = Stream { posted, got: 0, source };
                if !direct || !reading::is_quicker(control, from, stream.posted.span.bytes) {
                    self.ask(from, id, stream)?;
                } else {
                    self.streams.insert((from, id), stream);
                }
            }
        }
        Ok(())
    }

    /// Has the sender write what is missing of a message.
    pub(super) fn ask(&mut self, from: Rank, id: u64, stream: Stream) -> Result<()> {
        let frame = Frame { bytes: stream.posted.span.bytes as u64, ..Frame::control(Kind::Request, id, stream.got) };
        self.streams.insert((from, id), Stream { source: Source::Frames, ..stream });
        self.link(from).request(frame)
    }

    /// Gives a rank's message to itself.
    pub(super) fn deliver_own(&mut self, control: &ControlBlock, posted: Posted, ticket: u64) -> Result<()> {
        let Some(send) = self.sends.get(&ticket) else { return Ok(()) };
        let me = control.rank();
        let span = send.span;
        let posted = self.check_size(control, me, span.bytes as u64, posted)?;
        if span.addr != posted.span.addr {
            // SAFETY: sizes are equal (checked above); both spans are the user's, and a message is not received over itself in part.
            unsafe { cpu::copy(posted.span.ptr(), span.ptr(), span.bytes, Store::Cached) }
        }
        self.finish_send(ticket);
        self.finish(posted.ticket, posted.completion, Ok(()), Some(me));
        Ok(())
    }

    /// Returns the receive if the message is of its size; else the receive is complete, with the error.
    fn check_size(&mut self, control: &ControlBlock, from: Rank, bytes: u64, posted: Posted) -> Result<Posted> {
        if bytes == posted.span.bytes as u64 {
            return Ok(posted);
        }
        let (from, me, expected) = (control.describe(from), control.describe(control.rank()), posted.span.bytes);
        let text = format!("{from} sent {bytes} bytes (tag {}) to {me}, whose recv expects {expected}", posted.tag);
        Err(self.refuse(posted, Error::mismatch(text)))
    }

    fn refuse(&mut self, posted: Posted, error: Error) -> Error {
        self.finish(posted.ticket, posted.completion, Err(error.clone()), None);
        error
    }

    /// Reason why some open transfer can never complete, or must not, if there is one.
    pub(super) fn hopeless(&self, control: &ControlBlock, lost: &Lost) -> Option<Error> {
        self.pending().find_map(|pending| {
            let end = lost.ends(control, &pending);
            (end.is_some() || pending.limit.left().is_none()).then(|| pending.given_up(control, end))
        })
    }

    pub(super) fn fail_all(&mut self, error: &Error) {
        // The failure is visible before what their owners write to the tensors after this: see `end_step`.
        fence(Ordering::Release);
        self.closed.get_or_insert_with(|| error.clone());
        let posted = std::mem::take(&mut self.matching.posted);
        // What is being read is written to until the step ends, which then fails as well.
        let being_read = |(_, stream): &(_, Stream)| matches!(stream.source, Source::BeingRead(_));
        let (kept, streams): (BTreeMap<_, _>, BTreeMap<_, _>) = std::mem::take(&mut self.streams).into_iter().partition(being_read);
        self.streams = kept;
        for posted in posted.into_iter().chain(streams.into_values().map(|stream| stream.posted)) {
            self.finish(posted.ticket, posted.completion, Err(error.clone()), None);
        }
        for (ticket, send) in std::mem::take(&mut self.sends) {
            self.finish(ticket, send.completion, Err(error.clone()), None);
        }
        self.rings.iter_mut().for_each(Ring::let_go);
    }
}

/// Puts a frame's payload where it belongs; returns the receive that it completes or, for an offer, that waits for it. `None`: no sender
/// writes such a frame, and nothing was touched.
fn place(
    matching: &mut Matching,
    streams: &mut BTreeMap<(Rank, u64), Stream>,
    begun: Begun,
    from: Rank,
    frame: Frame,
    payload: &[u8],
) -> Option<Option<Posted>> {
    let completed = match frame.kind {
        Kind::Eager | Kind::Offer => {
            let posted = matching.take_receive(from, frame.tag);
            match &posted {
                Some(posted) if posted.span.bytes == payload.len() => {
                    let rest = &payload[begun.bytes_of(posted).min(payload.len())..];
                    let to = posted.span.ptr().wrapping_add(payload.len() - rest.len());
                    // SAFETY: the payload has as many bytes as the receiver's span, which is left alone until its completion.
                    unsafe { cpu::copy(to, rest.as_ptr(), rest.len(), Store::Cached) }
                }
                // An offer has no payload; a message of another size is reported by `check_size`.
                Some(_) => {}
                None => {
                    let content = match frame.kind {
                        Kind::Eager => Content::Eager(payload.into()),
                        Kind::Offer | Kind::Padding | Kind::Request | Kind::Data | Kind::Taken => {
                            Content::Offer { id: frame.id, addr: frame.value }
                        }
                    };
                    matching.keep(Unexpected { from, tag: frame.tag, bytes: frame.bytes, content });
                }
            }
            posted
        }
        Kind::Data => {
            // Pieces that were under way when their receive ended belong nowhere any more.
            let Some(stream) = streams.get_mut(&(from, frame.id)) else { return Some(None) };
            // They come in order and without gaps, so that all have come once as many bytes have. `payload` holds at most `bytes - value`.
            let bytes = stream.posted.span.bytes;
            if stream.source != Source::Frames || (frame.bytes, frame.value) != (bytes as u64, stream.got) {
                return None;
            }
            let store = if bytes >= STREAM_BYTES { Store::Streaming } else { Store::Cached };
            // SAFETY: the piece lies within the receiver's span (checked above), which is left alone until its completion.
            unsafe { cpu::copy(stream.posted.span.ptr().add(frame.value as usize), payload.as_ptr(), payload.len(), store) }
            stream.got += payload.len() as u64;
            if stream.got < bytes as u64 {
                return Some(None);
            }
            streams.remove(&(from, frame.id)).map(|stream| stream.posted)
        }
        Kind::Padding | Kind::Request | Kind::Taken => None,
    };
    Some(completed)
}

fn nonsense(control: &ControlBlock, peer: Rank, frame: Frame) -> Error {
    Error::internal(format!("{} sent a frame that makes no sense: {frame:?}", control.describe(peer)))
}

/// Names a transfer in messages.
pub(super) fn about(control: &ControlBlock, name: &str, bytes: usize, tag: i32) -> String {
    format!("{name}({bytes} bytes, tag {tag}) of group \"{}\"", control.name())
}

fn state_of(control: &ControlBlock, peer: Rank) -> String {
    let state = crate::sys::process::state(control.pid(peer)).unwrap_or("exited");
    format!("{} ({state})", control.describe(peer))
}
