//! Pair: this rank and one of another host, the messages between them, and what each frame does to these.
#![allow(unsafe_code, reason = "copies between staging and the bytes of tensors")]

use super::frame::{Frame, Kind, PIECE, Refusal, SHORT, piece, unasked};
use super::links::{Links, Traffic};
use super::open::{AnySource, Open};
use super::{Finished, LOOK, Names};
use crate::coll::call::Span;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::messages::MessageSpec;
use crate::rank::Rank;
use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::time::{Duration, Instant};

/// Bytes of short messages that may wait at their receiver; what is sent beyond is offered.
const BACKLOG: u64 = 4 << 20;
/// Bytes that a short message takes there beside its own.
const FOOTPRINT: u64 = 64;
/// Pieces of long messages that a receiver has room for at once.
const WINDOW: usize = 16;
/// Frames, and bytes of short messages, after which a receiver says that it has read and matched them.
const CREDIT: (u64, u64) = (64, BACKLOG / 4);

/// State of the connection.
pub(super) enum Phase {
    /// Not made yet: the peer may not have begun a message with this rank.
    Meeting,
    Open,
    Lost(Error),
}

struct Sending {
    open: Open,
    /// Flag of a message of which the peer knows.
    started: bool,
    /// Bytes that have been sent.
    next: usize,
}

/// A message that nobody here has asked for.
struct Unexpected {
    message: Arrival<Box<[u8]>>,
    arrived: Instant,
}

/// A message of the peer, whose bytes are in `B` if it is short.
struct Arrival<B> {
    tag: i32,
    dtype: u8,
    bytes: u64,
    content: Content<B>,
}

enum Content<B> {
    Short(B),
    Offer {
        id: u64,
        /// Number of the bytes that come unasked.
        unasked: usize,
        /// Those that have come.
        first: Vec<u8>,
    },
}

impl Arrival<&[u8]> {
    /// The message with a copy of its bytes.
    fn kept(self) -> Arrival<Box<[u8]>> {
        let content = match self.content {
            Content::Short(short) => Content::Short(short.into()),
            Content::Offer { id, unasked, first } => Content::Offer { id, unasked, first },
        };
        Arrival { tag: self.tag, dtype: self.dtype, bytes: self.bytes, content }
    }
}

/// A message that comes in pieces.
struct Stream {
    open: Open,
    id: u64,
    asked: usize,
    got: usize,
}

pub(super) struct Pair {
    pub(super) peer: Rank,
    pub(super) phase: Phase,
    sends: BTreeMap<u64, Sending>,
    posted: VecDeque<Open>,
    unexpected: VecDeque<Unexpected>,
    streams: VecDeque<Stream>,
    /// The last refusal of the peer, unless it has begun a message since, or was asked whether it still stands.
    pub(super) refused: Option<Refusal>,
    /// The last refusal of this rank, and the number of its calls then.
    pub(super) own: Option<(Refusal, u64)>,
    /// True while the peer does not know of that, unless this rank has begun a message with it since.
    pub(super) unsaid: bool,
    /// Pieces that were asked for and have not come.
    awaited: usize,
    /// Frames sent, and how many of them the peer has read.
    sent: u64,
    confirmed: u64,
    /// How many there were when this rank said that it leaves.
    last: u64,
    /// Frames read, and what the peer knows of that.
    read: u64,
    told_read: u64,
    /// Bytes of short messages sent, and how many of them have found their receives.
    short: u64,
    short_matched: u64,
    /// Bytes of short messages that have found their receives here, and what the peer knows of that.
    matched: u64,
    told_matched: u64,
}

/// Bytes of a message that is not complete.
fn bytes<'a>(span: Span, range: Range<usize>) -> &'a [u8] {
    assert!(range.end <= span.bytes, "outside the message");
    if range.is_empty() {
        return &[];
    }
    // SAFETY: inside the span (checked above), which its owner leaves alone until the completion: it is called after the last use of this.
    unsafe { std::slice::from_raw_parts(span.ptr().add(range.start), range.len()) }
}

/// Bytes of a receive that is not complete.
fn bytes_mut<'a>(span: Span, range: Range<usize>) -> &'a mut [u8] {
    assert!(range.end <= span.bytes, "outside the message");
    if range.is_empty() {
        return &mut [];
    }
    // SAFETY: as for `bytes`; one receive has each byte, and one thread at a time fills it, with the state locked.
    unsafe { std::slice::from_raw_parts_mut(span.ptr().add(range.start), range.len()) }
}

impl Pair {
    pub(super) fn new(peer: Rank) -> Self {
        Self {
            peer,
            phase: Phase::Meeting,
            sends: BTreeMap::new(),
            posted: VecDeque::new(),
            unexpected: VecDeque::new(),
            streams: VecDeque::new(),
            refused: None,
            own: None,
            unsaid: false,
            awaited: 0,
            sent: 0,
            confirmed: 0,
            last: 0,
            read: 0,
            told_read: 0,
            short: 0,
            short_matched: 0,
            matched: 0,
            told_matched: 0,
        }
    }

    /// What is not complete: send or receive.
    pub(super) fn pending(&self) -> impl Iterator<Item = (&'static str, &Open)> {
        let receives = self.posted.iter().chain(self.streams.iter().map(|stream| &stream.open)).map(|open| ("recv", open));
        receives.chain(self.sends.values().map(|send| ("send", &send.open)))
    }

    /// The message whose deadline is the next, with the time that is left; zero: it has passed.
    pub(super) fn most_urgent(&self) -> Option<(Duration, &'static str, &Open)> {
        let left = self.pending().map(|(name, open)| (open.limit.left().unwrap_or_default(), name, open));
        left.min_by_key(|(left, ..)| *left)
    }

    /// Takes everything that is not complete.
    pub(super) fn take_all(&mut self) -> Vec<Open> {
        let sends = std::mem::take(&mut self.sends).into_values().map(|send| send.open);
        let streams = std::mem::take(&mut self.streams).into_iter().map(|stream| stream.open);
        sends.chain(streams).chain(std::mem::take(&mut self.posted)).collect()
    }

    /// Says `frame`, with what this rank has read and matched.
    pub(super) fn say(&mut self, links: &dyn Links, frame: Frame, payload: &[u8]) -> Result<()> {
        let head = Frame { read: self.read, matched: self.matched, ..frame }.encode();
        (self.told_read, self.told_matched) = (self.read, self.matched);
        self.sent += 1;
        links.send(self.peer, &head, frame.traffic(), payload)
    }

    /// Tells the peer that this rank leaves.
    pub(super) fn say_bye(&mut self, links: &dyn Links) -> Result<()> {
        let said = self.say(links, Frame::bare(Kind::Bye), &[]);
        self.last = self.sent;
        said
    }

    /// Whether the peer is there and has not read yet that this rank leaves. It need not read what this rank answers meanwhile.
    pub(super) fn is_unread(&self) -> bool {
        matches!(self.phase, Phase::Open) && self.confirmed < self.last
    }

    /// Tells the peer what this rank has refused, once they are connected.
    pub(super) fn say_refused(&mut self, links: &dyn Links) -> Result<()> {
        if !matches!(self.phase, Phase::Open) {
            return Ok(());
        }
        let Some((refusal, _)) = self.own.clone().filter(|_| std::mem::take(&mut self.unsaid)) else { return Ok(()) };
        let (frame, text) = refusal.told();
        self.say(links, frame, text)
    }

    /// Asks the peer, once, whether its refusal still stands, if a message has waited for it for a while.
    pub(super) fn ask_whether_refused(&mut self, links: &dyn Links) -> Result<()> {
        let Some(refusal) = &self.refused else { return Ok(()) };
        let waits = if refusal.send { "recv" } else { "send" };
        let mut pending = self.pending().filter(|(name, open)| *name == waits && open.message.tag == refusal.tag);
        let frame = pending.find(|(_, open)| open.limit.waited() >= LOOK).map(|(_, open)| refusal.asked(&open.message));
        drop(pending);
        let Some(frame) = frame else { return Ok(()) };
        self.refused = None;
        self.say(links, frame, &[])
    }

    /// Begins the sends that came before the connection.
    pub(super) fn begin(&mut self, links: &dyn Links, finished: &mut Vec<Finished>) -> Result<()> {
        self.phase = Phase::Open;
        let waiting: Vec<u64> = self.sends.keys().copied().collect();
        waiting.into_iter().try_for_each(|id| self.start(id, links, finished))?;
        self.say_refused(links)
    }

    /// Adds a send.
    pub(super) fn send(&mut self, open: Open, links: &dyn Links, finished: &mut Vec<Finished>) -> Result<()> {
        let id = open.ticket;
        self.sends.insert(id, Sending { open, started: false, next: 0 });
        match &self.phase {
            Phase::Meeting => Ok(()),
            Phase::Open => self.start(id, links, finished),
            Phase::Lost(cause) => Err(cause.clone()),
        }
    }

    fn start(&mut self, id: u64, links: &dyn Links, finished: &mut Vec<Finished>) -> Result<()> {
        let Some(send) = self.sends.get_mut(&id).filter(|send| !send.started) else { return Ok(()) };
        send.started = true;
        let MessageSpec { tag, dtype, span, .. } = *send.open.message;
        let (cost, room) = (span.bytes as u64 + FOOTPRINT, BACKLOG.saturating_sub(self.short - self.short_matched));
        // There is nothing to ask for in an empty one.
        let short = span.bytes <= SHORT && (span.bytes == 0 || cost <= room);
        let kind = if short { Kind::Eager } else { Kind::Offer };
        let frame = Frame { dtype: dtype as u8, tag, id, bytes: span.bytes as u64, ..Frame::bare(kind) };
        if !short {
            let unasked = unasked(frame.bytes, (room / (PIECE as u64 + FOOTPRINT)) as usize);
            send.next = unasked;
            // The answer is on its way while the first pieces are.
            self.say(links, Frame { value: unasked as u64, ..frame }, &[])?;
            return (0..unasked).step_by(PIECE).try_for_each(|at| {
                self.short += PIECE as u64 + FOOTPRINT;
                self.say(links, Frame { kind: Kind::Start, value: at as u64, ..frame }, bytes(span, at..at + PIECE))
            });
        }
        self.short += cost;
        self.say(links, frame, bytes(span, 0..span.bytes))?;
        finished.extend(self.sends.remove(&id).map(|send| send.open.ends(Ok(()), None)));
        Ok(())
    }

    /// Adds a receive.
    pub(super) fn recv(&mut self, open: Open, links: &dyn Links, names: &Names, finished: &mut Vec<Finished>) -> Result<()> {
        let place = self.unexpected.iter().position(|unexpected| unexpected.message.tag == open.message.tag);
        match place.and_then(|place| self.unexpected.remove(place)) {
            Some(unexpected) => self.deliver(open, unexpected.message, links, names, finished)?,
            None => self.posted.push_back(open),
        }
        match &self.phase {
            Phase::Meeting | Phase::Open => Ok(()),
            Phase::Lost(_) if self.posted.is_empty() && self.streams.is_empty() => Ok(()),
            Phase::Lost(cause) => Err(cause.clone()),
        }
    }

    /// When the oldest message with `tag` came that nobody has asked for.
    pub(super) fn arrival(&self, tag: i32) -> Option<Instant> {
        self.unexpected.iter().find(|unexpected| unexpected.message.tag == tag).map(|unexpected| unexpected.arrived)
    }

    /// The oldest receive for a message with `tag`: from this peer, or from any rank.
    fn take_receive(&mut self, tag: i32, any: &mut AnySource) -> Option<Open> {
        let own = self.posted.iter().position(|open| open.message.tag == tag);
        let ticket = own.map_or(u64::MAX, |place| self.posted[place].ticket);
        any.take(tag, ticket).or_else(|| own.and_then(|place| self.posted.remove(place)))
    }

    /// Gives a message to its receive.
    fn deliver<B: AsRef<[u8]>>(
        &mut self,
        open: Open,
        message: Arrival<B>,
        links: &dyn Links,
        names: &Names,
        finished: &mut Vec<Finished>,
    ) -> Result<()> {
        let MessageSpec { span, dtype, tag, .. } = *open.message;
        if message.bytes != span.bytes as u64 {
            let sent = DType::from_torch(i32::from(message.dtype)).map_or("unknown", DType::name);
            let (peer, me, group) = (names.layout.describe(self.peer), names.layout.describe(names.me), &names.group);
            let error = Error::mismatch(format!(
                "{peer} sent {} bytes ({sent}, tag {tag}) to {me} in group \"{group}\", whose recv expects {} ({})",
                message.bytes,
                span.bytes,
                dtype.name()
            ));
            finished.push(open.ends(Err(error.clone()), None));
            return Err(error);
        }
        match message.content {
            Content::Short(short) => {
                bytes_mut(span, 0..span.bytes).copy_from_slice(short.as_ref());
                self.matched += message.bytes + FOOTPRINT;
                finished.push(open.ends(Ok(()), Some(self.peer)));
                self.give_credit(links)
            }
            Content::Offer { id, unasked, first } => {
                first.chunks(PIECE).enumerate().for_each(|(at, piece)| self.place_unasked(span, at * PIECE, piece));
                self.streams.push_back(Stream { open, id, asked: unasked, got: first.len() });
                self.ask(links)
            }
        }
    }

    /// Puts a piece that nobody has asked for in its place.
    fn place_unasked(&mut self, span: Span, at: usize, piece: &[u8]) {
        bytes_mut(span, at..at + piece.len()).copy_from_slice(piece);
        self.matched += piece.len() as u64 + FOOTPRINT;
    }

    /// Asks for the next pieces of long messages, the oldest first, as far as there is room.
    fn ask(&mut self, links: &dyn Links) -> Result<()> {
        while self.awaited < WINDOW && matches!(self.phase, Phase::Open) {
            let next = self.streams.iter_mut().find(|stream| stream.asked < stream.open.message.span.bytes);
            let Some(Stream { open, id, asked, .. }) = next else { break };
            let (id, bytes, value) = (*id, open.message.span.bytes as u64, *asked as u64);
            let length = piece(bytes, value);
            *asked += length;
            self.awaited += 1;
            links.listen(self.peer, Traffic::Piece, PIECE)?;
            self.say(links, Frame { id, bytes, value, ..Frame::bare(Kind::Request) }, &[])?;
        }
        Ok(())
    }

    fn give_credit(&mut self, links: &dyn Links) -> Result<()> {
        let due = self.read - self.told_read >= CREDIT.0 || self.matched - self.told_matched >= CREDIT.1;
        if due && matches!(self.phase, Phase::Open) { self.say(links, Frame::bare(Kind::Credit), &[]) } else { Ok(()) }
    }

    /// Does what `frame` of the peer asks for; `payload` has come with it.
    pub(super) fn react(
        &mut self,
        frame: Frame,
        payload: &[u8],
        links: &dyn Links,
        names: &Names,
        any: &mut AnySource,
        finished: &mut Vec<Finished>,
    ) -> Result<()> {
        self.read += 1;
        let credible = (self.confirmed..=self.sent).contains(&frame.read) && (self.short_matched..=self.short).contains(&frame.matched);
        if !credible {
            return Err(self.nonsense(names, frame));
        }
        if frame.read > self.confirmed {
            self.confirmed = frame.read;
            links.confirm(self.peer, frame.read);
        }
        self.short_matched = frame.matched;
        match frame.kind {
            Kind::Eager | Kind::Offer => {
                self.refused = None;
                let offer = Content::Offer { id: frame.id, unasked: frame.value as usize, first: Vec::new() };
                let content = if frame.kind == Kind::Eager { Content::Short(payload) } else { offer };
                let message = Arrival { tag: frame.tag, dtype: frame.dtype, bytes: frame.bytes, content };
                match self.take_receive(frame.tag, any) {
                    Some(open) => self.deliver(open, message, links, names, finished)?,
                    None => self.unexpected.push_back(Unexpected { message: message.kept(), arrived: Instant::now() }),
                }
            }
            Kind::Request => {
                self.refused = None;
                self.serve(frame, links, names, finished)?;
            }
            Kind::Start => self.start_with(frame, payload, names)?,
            Kind::Piece => self.fill(frame, payload, links, names, finished)?,
            Kind::Credit | Kind::Waits => {}
            Kind::Refused => self.refused = Some(Refusal::of(frame, payload)),
            Kind::Bye => return self.say(links, Frame::bare(Kind::Credit), &[]),
        }
        self.give_credit(links)
    }

    /// Sends the piece that the peer has asked for. The send is complete with its last one.
    fn serve(&mut self, frame: Frame, links: &dyn Links, names: &Names, finished: &mut Vec<Finished>) -> Result<()> {
        let fits =
            |send: &&mut Sending| send.started && (send.next as u64, send.open.message.span.bytes as u64) == (frame.value, frame.bytes);
        let Some(send) = self.sends.get_mut(&frame.id).filter(fits) else { return Err(self.nonsense(names, frame)) };
        let (span, begin) = (send.open.message.span, send.next);
        send.next += piece(frame.bytes, frame.value);
        let end = send.next;
        self.say(
            links,
            Frame { id: frame.id, bytes: frame.bytes, value: frame.value, ..Frame::bare(Kind::Piece) },
            bytes(span, begin..end),
        )?;
        if end == span.bytes {
            finished.extend(self.sends.remove(&frame.id).map(|send| send.open.ends(Ok(()), None)));
        }
        Ok(())
    }

    /// Takes a piece of an offered message that nobody has asked for: to its receive, or for it.
    fn start_with(&mut self, frame: Frame, piece: &[u8], names: &Names) -> Result<()> {
        let (id, at, bytes) = (frame.id, frame.value as usize, frame.bytes);
        let continues = |stream: &Stream| (stream.id, stream.got, stream.open.message.span.bytes as u64) == (id, at, bytes);
        if let Some(place) = self.streams.iter().position(|stream| continues(stream) && stream.asked >= at + piece.len()) {
            self.streams[place].got += piece.len();
            self.place_unasked(self.streams[place].open.message.span, at, piece);
            return Ok(());
        }
        let waiting = self.unexpected.iter_mut().find_map(|Unexpected { message, .. }| match &mut message.content {
            Content::Offer { id: offered, unasked, first } => {
                (*offered == id && first.len() == at && *unasked >= at + piece.len()).then_some(first)
            }
            Content::Short(_) => None,
        });
        let Some(first) = waiting else { return Err(self.nonsense(names, frame)) };
        first.extend_from_slice(piece);
        Ok(())
    }

    /// Puts a piece in its place. The receive is complete with its last one.
    fn fill(&mut self, frame: Frame, piece: &[u8], links: &dyn Links, names: &Names, finished: &mut Vec<Finished>) -> Result<()> {
        let fits = |stream: &Stream| {
            stream.id == frame.id
                && stream.got < stream.asked
                && (stream.got as u64, stream.open.message.span.bytes as u64) == (frame.value, frame.bytes)
        };
        let Some(place) = self.streams.iter().position(fits) else { return Err(self.nonsense(names, frame)) };
        let stream = &mut self.streams[place];
        let (span, begin) = (stream.open.message.span, stream.got);
        stream.got += piece.len();
        let end = stream.got;
        self.awaited -= 1;
        bytes_mut(span, begin..end).copy_from_slice(piece);
        if end == span.bytes {
            finished.extend(self.streams.remove(place).map(|stream| stream.open.ends(Ok(()), Some(self.peer))));
            // Its sender keeps the staging of pieces until it hears that they were read.
            self.say(links, Frame::bare(Kind::Credit), &[])?;
        }
        self.ask(links)
    }

    fn nonsense(&self, names: &Names, frame: Frame) -> Error {
        let (peer, group) = (names.layout.describe(self.peer), &names.group);
        Error::internal(format!("{peer} sent a frame that makes no sense in group \"{group}\": {frame:?}"))
    }
}

const _: () = assert!(SHORT as u64 + FOOTPRINT <= BACKLOG);
