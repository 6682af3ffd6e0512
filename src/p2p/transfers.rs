//! All sends and receives of one rank, and who moves them along.

use super::channel::{Channel, Outgoing};
use super::frame::{EAGER_BYTES, Frame, Kind};
use super::matching::{Content, Matching, Posted, Unexpected};
use crate::coll::call::Span;
use crate::done::Done;
use crate::error::{Error, Result};
use crate::kernels::cpu::{self, Store};
use crate::p2p::message::Message;
use crate::rank::Rank;
use crate::sync::board::{Board, YIELDS};
use crate::sync::limit::Limit;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Tickets of transfers have this bit, those of collectives do not.
pub const TICKET_BIT: u64 = 1 << 63;

/// A rank's sends and receives.
pub struct Transfers {
    board: Arc<Board>,
    direct: bool,
    state: Mutex<State>,
    /// The progress thread waits here while nothing is open.
    begun: Condvar,
    worker: Mutex<Option<JoinHandle<()>>>,
}

struct State {
    channels: Vec<Channel>,
    matching: Matching,
    sends: BTreeMap<u64, Sending>,
    streams: BTreeMap<(Rank, u64), Stream>,
    finished: Vec<Finished>,
    /// Tickets whose completion has not been called.
    open: BTreeSet<u64>,
    next: u64,
    waiting_threads: usize,
    parked: bool,
    stopping: bool,
}

struct Sending {
    peer: Rank,
    tag: i32,
    span: Span,
    limit: Limit,
    done: Done,
}

/// A message that comes in frames.
struct Stream {
    posted: Posted,
    got: u64,
}

struct Finished {
    ticket: u64,
    done: Done,
    outcome: Result<()>,
    source: Option<Rank>,
}

/// Turns of spinning between two moments of giving the core away.
const SPINS_BETWEEN: u32 = 8;
/// Bytes read directly between two looks at whether the sender attends.
const DIRECT_BYTES: usize = 256 << 10;
/// Messages from this size on are written past the receiver's cache.
const STREAM_BYTES: usize = 8 << 20;
/// How long the progress thread polls after the last transfer before it parks.
const LINGER: Duration = Duration::from_millis(200);
/// Its pause between looks while transfers are open and another thread may be moving them.
const PAUSE: Duration = Duration::from_millis(1);

impl Transfers {
    /// No transfers yet. `direct`: every rank may read every other's memory.
    pub fn new(board: Arc<Board>, direct: bool) -> Arc<Self> {
        let state = State {
            channels: board.ranks().map(Channel::new).collect(),
            matching: Matching::default(),
            sends: BTreeMap::new(),
            streams: BTreeMap::new(),
            finished: Vec::new(),
            open: BTreeSet::new(),
            next: TICKET_BIT,
            waiting_threads: 0,
            parked: false,
            stopping: false,
        };
        Arc::new(Self { board, direct, state: Mutex::new(state), begun: Condvar::new(), worker: Mutex::new(None) })
    }

    /// Starts a send.
    pub fn send(self: &Arc<Self>, message: Message, timeout: Duration, done: Done) -> Result<u64> {
        let peer = message.peer.ok_or_else(|| Error::value("send needs a destination rank"))?;
        self.check_peer(peer)?;
        let mut state = self.lock();
        let ticket = state.ticket();
        let (span, tag, bytes) = (message.span, message.tag, message.span.bytes as u64);
        state.sends.insert(ticket, Sending { peer, tag, span, limit: Limit::from(Instant::now(), timeout), done });
        if peer == self.board.rank() {
            match state.matching.take_receive(peer, tag) {
                Some(posted) => {
                    let delivered = state.deliver_own(&self.board, posted, ticket);
                    self.absorb(&mut state, delivered.map(|()| true));
                }
                None => state.matching.unexpected.push_back(Unexpected { from: peer, tag, bytes, content: Content::Own { ticket } }),
            }
        } else {
            let channel = &mut state.channels[peer.index()];
            let frame = |kind, value| Frame { kind, tag, id: ticket, bytes, value };
            channel.enqueue(if span.bytes <= EAGER_BYTES && channel.may_send_eagerly(&self.board) {
                Outgoing::Eager(frame(Kind::Eager, 0), span)
            } else {
                Outgoing::Control(frame(Kind::Offer, span.addr as u64))
            });
        }
        self.begin(state)?;
        Ok(ticket)
    }

    /// Starts a receive.
    pub fn recv(self: &Arc<Self>, message: Message, timeout: Duration, done: Done) -> Result<u64> {
        if let Some(peer) = message.peer {
            self.check_peer(peer)?;
        }
        let mut state = self.lock();
        let ticket = state.ticket();
        let Message { peer, tag, span, .. } = message;
        let posted = Posted { ticket, peer, tag, span, limit: Limit::from(Instant::now(), timeout), done };
        match state.matching.take_message(peer, tag) {
            Some(message) => {
                let delivered = state.deliver(&self.board, self.direct, posted, message);
                self.absorb(&mut state, delivered.map(|()| true));
            }
            None => state.matching.posted.push_back(posted),
        }
        self.begin(state)?;
        Ok(ticket)
    }

    fn check_peer(&self, peer: Rank) -> Result<()> {
        if peer.index() < self.board.size() {
            return Ok(());
        }
        Err(Error::value(format!("rank {peer} is outside the group of {} ranks", self.board.size())))
    }

    /// Moves things along once; where something stays open, sees to it that the progress thread looks after it.
    fn begin(self: &Arc<Self>, mut state: MutexGuard<'_, State>) -> Result<()> {
        self.advance(&mut state);
        self.settle(state);
        let state = self.lock();
        if state.open.is_empty() {
            return Ok(());
        }
        if state.parked {
            self.begun.notify_all();
        }
        drop(state);
        self.start_worker()
    }

    /// Moves everything along without blocking; returns whether anything moved.
    pub fn progress(&self) -> bool {
        let mut state = self.lock();
        let moved = self.advance(&mut state);
        self.settle(state);
        moved
    }

    /// Returns once the completion of `ticket` has been called.
    pub fn wait(&self, ticket: u64, limit: Option<Duration>) -> Result<()> {
        let since = Instant::now();
        self.attend(1);
        let mut turns = 0;
        let outcome = loop {
            let mut state = self.lock();
            if !state.open.contains(&ticket) {
                break Ok(());
            }
            let mut stirred = self.advance(&mut state);
            let crowded = || self.board.in_the_way(self.board.peers().filter(|&peer| self.board.attends(peer)));
            let spins = if turns == 0 && !crowded() { self.board.spins() } else { SPINS_BETWEEN };
            for _ in 0..spins {
                if stirred || !state.finished.is_empty() {
                    break;
                }
                std::hint::spin_loop();
                stirred = state.stirs(&self.board);
            }
            let finished = !state.finished.is_empty();
            self.settle(state);
            if stirred || finished {
                turns = 0;
                continue;
            }
            turns += 1;
            if turns <= YIELDS {
                std::thread::yield_now();
                continue;
            }
            self.fail_if_lost();
            let left = limit.map_or(Duration::MAX, |limit| limit.saturating_sub(since.elapsed()));
            if left.is_zero() {
                let text = format!("wait() gave up after {:.1} s; the transfer itself goes on", since.elapsed().as_secs_f32());
                break Err(Error::wait_timeout(text));
            }
            let left = left.min(self.soonest_deadline());
            self.board.sleep(left, || {
                let state = self.lock();
                !state.open.contains(&ticket) || state.stirs(&self.board) || self.board.failure().is_some()
            });
        };
        self.attend(-1);
        outcome
    }

    /// Counts the threads that move transfers along, and lets peers know whether there is one.
    fn attend(&self, change: isize) {
        let mut state = self.lock();
        state.waiting_threads = state.waiting_threads.saturating_add_signed(change);
        self.board.attend(state.waiting_threads > 0);
    }

    /// Completes everything that is open with `error`.
    pub fn close(&self, error: &Error) {
        let mut state = self.lock();
        state.fail_all(error);
        self.settle(state);
    }

    /// Ends the progress thread.
    pub fn stop(&self) {
        self.lock().stopping = true;
        self.begun.notify_all();
        let worker = self.worker.lock().unwrap_or_else(PoisonError::into_inner).take();
        // A completion may drop the last handle of the group on the progress thread itself.
        if let Some(worker) = worker.filter(|worker| worker.thread().id() != std::thread::current().id()) {
            let _ = worker.join();
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes and reads what can be; a failure closes everything.
    fn advance(&self, state: &mut State) -> bool {
        let moved = state.advance(&self.board, self.direct);
        self.absorb(state, moved)
    }

    /// A failure of one transfer is the group's.
    fn absorb(&self, state: &mut State, moved: Result<bool>) -> bool {
        moved.unwrap_or_else(|error| {
            let error = self.board.fail(error);
            state.fail_all(&error);
            true
        })
    }

    /// Calls the completions that are due, without the lock.
    fn settle(&self, mut state: MutexGuard<'_, State>) {
        let finished = std::mem::take(&mut state.finished);
        drop(state);
        if finished.is_empty() {
            return;
        }
        let tickets: Vec<u64> = finished.iter().map(|finished| finished.ticket).collect();
        for Finished { done, outcome, source, .. } in finished {
            done.call(outcome, source);
        }
        let mut state = self.lock();
        for ticket in tickets {
            state.open.remove(&ticket);
        }
        drop(state);
        // Other threads of this rank may sleep until one of these tickets is complete.
        self.board.wake_sleepers();
    }

    /// Fails the group if something open can never complete.
    fn fail_if_lost(&self) {
        let mut state = self.lock();
        if state.open.is_empty() {
            return;
        }
        let lost: Vec<(Rank, String)> = self.board.peers().filter_map(|peer| Some((peer, self.board.absence(peer)?))).collect();
        // What a peer wrote before it ended is still served.
        self.advance(&mut state);
        let failure = self.board.failure().or_else(|| state.hopeless(&self.board, &lost).map(|error| self.board.fail(error)));
        if let Some(failure) = failure {
            state.fail_all(&failure);
        }
        self.settle(state);
    }

    fn soonest_deadline(&self) -> Duration {
        let state = self.lock();
        state.limits().filter_map(Limit::left).min().unwrap_or(PAUSE)
    }

    fn start_worker(self: &Arc<Self>) -> Result<()> {
        let mut worker = self.worker.lock().unwrap_or_else(PoisonError::into_inner);
        if worker.is_none() {
            let this = Arc::clone(self);
            let thread = std::thread::Builder::new().name("symm-transfers".into()).spawn(move || this.work());
            *worker = Some(thread.map_err(|e| Error::internal(format!("starting a group's progress thread: {e}")))?);
        }
        Ok(())
    }

    fn work(&self) {
        let mut idle_since = Instant::now();
        loop {
            let mut state = self.lock();
            if state.stopping {
                return;
            }
            if !state.open.is_empty() {
                idle_since = Instant::now();
            } else if idle_since.elapsed() > LINGER {
                state.parked = true;
                state = self.begun.wait(state).unwrap_or_else(PoisonError::into_inner);
                state.parked = false;
                idle_since = Instant::now();
            }
            let attended = state.waiting_threads > 0 || state.open.is_empty();
            drop(state);
            if !attended {
                if self.progress() {
                    continue;
                }
                self.fail_if_lost();
            }
            std::thread::sleep(PAUSE);
        }
    }
}

impl State {
    fn ticket(&mut self) -> u64 {
        let ticket = self.next;
        self.next += 1;
        self.open.insert(ticket);
        ticket
    }

    fn stirs(&self, board: &Board) -> bool {
        board.peers().any(|peer| self.channels[peer.index()].stirs(board))
    }

    fn limits(&self) -> impl Iterator<Item = &Limit> {
        let receives = self.matching.posted.iter().chain(self.streams.values().map(|stream| &stream.posted));
        receives.map(|posted| &posted.limit).chain(self.sends.values().map(|send| &send.limit))
    }

    fn finish(&mut self, ticket: u64, done: Done, outcome: Result<()>, source: Option<Rank>) {
        self.finished.push(Finished { ticket, done, outcome, source });
    }

    fn finish_send(&mut self, ticket: u64) {
        if let Some(send) = self.sends.remove(&ticket) {
            self.finish(ticket, send.done, Ok(()), None);
        }
    }

    fn advance(&mut self, board: &Board, direct: bool) -> Result<bool> {
        let mut moved = false;
        for peer in board.peers() {
            loop {
                let mut incoming = None;
                let took = self.channels[peer.index()].receive(board, |frame, payload| {
                    incoming = Some((frame, place(&mut self.matching, &mut self.streams, peer, frame, payload)));
                    Ok(())
                })?;
                moved |= took;
                let Some((frame, posted)) = incoming else { break };
                self.react(board, direct, peer, frame, posted)?;
            }
            let mut sent = Vec::new();
            moved |= self.channels[peer.index()].flush(board, |ticket| sent.push(ticket))?;
            for ticket in sent {
                self.finish_send(ticket);
            }
        }
        Ok(moved)
    }

    /// What follows from a frame whose payload has been put in its place; `posted` is the receive it belongs to, if that is known.
    fn react(&mut self, board: &Board, direct: bool, peer: Rank, frame: Frame, posted: Option<Posted>) -> Result<()> {
        match (frame.kind, posted) {
            (Kind::Eager, Some(posted)) => {
                let posted = self.check_size(board, peer, frame.bytes, posted)?;
                self.channels[peer.index()].count_match(board);
                self.finish(posted.ticket, posted.done, Ok(()), Some(peer));
            }
            (Kind::Offer, Some(posted)) => {
                let content = Content::Offer { id: frame.id, addr: frame.value };
                let message = Unexpected { from: peer, tag: frame.tag, bytes: frame.bytes, content };
                self.deliver(board, direct, posted, message)?;
            }
            (Kind::Data, Some(posted)) => self.finish(posted.ticket, posted.done, Ok(()), Some(peer)),
            (Kind::Ask, _) => {
                if let Some(send) = self.sends.get(&frame.id) {
                    let bytes = send.span.bytes as u64;
                    let head = Frame { kind: Kind::Data, tag: send.tag, id: frame.id, bytes, value: frame.value.min(bytes) };
                    self.channels[peer.index()].enqueue(Outgoing::Stream(head, send.span));
                }
            }
            (Kind::Taken, _) => self.finish_send(frame.id),
            (Kind::Padding | Kind::Eager | Kind::Offer | Kind::Data, _) => {}
        }
        Ok(())
    }

    /// Gives a message that has come or been offered to its receive.
    fn deliver(&mut self, board: &Board, direct: bool, posted: Posted, message: Unexpected) -> Result<()> {
        let from = message.from;
        let posted = self.check_size(board, from, message.bytes, posted)?;
        match message.content {
            Content::Eager(bytes) => {
                // SAFETY: sizes are equal (checked above); the span is the receiver's.
                unsafe { cpu::copy(posted.span.ptr(), bytes.as_ptr(), bytes.len(), Store::Cached) }
                self.channels[from.index()].count_match(board);
                self.finish(posted.ticket, posted.done, Ok(()), Some(from));
            }
            Content::Own { ticket } => self.deliver_own(board, posted, ticket)?,
            Content::Offer { id, addr } => {
                // Two ranks that copy into and out of a ring are quicker than one that reads alone, but the sender may be busy elsewhere.
                let (span, mut got) = (posted.span, 0);
                while direct && got < span.bytes && !board.attends(from) {
                    let bytes = DIRECT_BYTES.min(span.bytes - got);
                    // SAFETY: got + bytes <= span.bytes; the span is the receiver's, who leaves it alone until its completion.
                    let read = unsafe { crate::sys::remote::read_memory(board.pid(from), addr as usize + got, span.ptr().add(got), bytes) };
                    if let Err(error) = read {
                        let text = format!("receiving {} bytes from {}: {error}", span.bytes, board.describe(from));
                        return Err(self.refuse(posted, Error::peer(text)));
                    }
                    got += bytes;
                }
                let reply = if got == span.bytes { Kind::Taken } else { Kind::Ask };
                self.channels[from.index()].enqueue(Outgoing::Control(Frame::control(reply, id, got as u64)));
                if reply == Kind::Taken {
                    self.finish(posted.ticket, posted.done, Ok(()), Some(from));
                } else {
                    self.streams.insert((from, id), Stream { posted, got: got as u64 });
                }
            }
        }
        Ok(())
    }

    /// Gives a rank's message to itself.
    fn deliver_own(&mut self, board: &Board, posted: Posted, ticket: u64) -> Result<()> {
        let Some(send) = self.sends.get(&ticket) else { return Ok(()) };
        let me = board.rank();
        let span = send.span;
        let posted = self.check_size(board, me, span.bytes as u64, posted)?;
        if span.addr != posted.span.addr {
            // SAFETY: sizes are equal (checked above); both spans are the user's, and a message is not received over itself in part.
            unsafe { cpu::copy(posted.span.ptr(), span.ptr(), span.bytes, Store::Cached) }
        }
        self.finish_send(ticket);
        self.finish(posted.ticket, posted.done, Ok(()), Some(me));
        Ok(())
    }

    /// Returns the receive if the message is of its size; else the receive is complete, with the error.
    fn check_size(&mut self, board: &Board, from: Rank, bytes: u64, posted: Posted) -> Result<Posted> {
        if bytes == posted.span.bytes as u64 {
            return Ok(posted);
        }
        let (from, me, expected) = (board.describe(from), board.describe(board.rank()), posted.span.bytes);
        let text = format!("{from} sent {bytes} bytes (tag {}) to {me}, whose recv expects {expected}", posted.tag);
        Err(self.refuse(posted, Error::mismatch(text)))
    }

    fn refuse(&mut self, posted: Posted, error: Error) -> Error {
        self.finish(posted.ticket, posted.done, Err(error.clone()), None);
        error
    }

    /// Why some open transfer can never complete, if so.
    fn hopeless(&self, board: &Board, lost: &[(Rank, String)]) -> Option<Error> {
        let me = board.describe(board.rank());
        let find = |peer: Rank| lost.iter().find(|(rank, _)| *rank == peer);
        let receives = self.matching.posted.iter().chain(self.streams.values().map(|stream| &stream.posted));
        for Posted { peer, tag, span, limit, .. } in receives {
            let gone = match peer {
                Some(peer) => find(*peer),
                None => lost.first().filter(|_| lost.len() + 1 == board.size()),
            };
            let what = || format!("recv({} bytes, tag {tag}) of group \"{}\"", span.bytes, board.name());
            if let Some((peer, how)) = gone {
                let (peer, seconds) = (board.describe(*peer), limit.waited().as_secs_f32());
                return Some(Error::peer(format!("{peer} {how}; {me} had waited {seconds:.1} s for it in {}", what())));
            }
            if limit.left().is_none() {
                let from = peer.map_or_else(|| "any rank".into(), |peer| state_of(board, peer));
                return Some(Error::timeout(format!(
                    "{me} waited {:.1} s until its timeout in {} for {from}",
                    limit.waited().as_secs_f32(),
                    what()
                )));
            }
        }
        for Sending { peer, tag, span, limit, .. } in self.sends.values() {
            let what = || format!("send({} bytes, tag {tag}) of group \"{}\"", span.bytes, board.name());
            if let Some((peer, how)) = find(*peer) {
                let (peer, seconds) = (board.describe(*peer), limit.waited().as_secs_f32());
                return Some(Error::peer(format!("{peer} {how}; {me} had waited {seconds:.1} s for it in {}", what())));
            }
            if limit.left().is_none() {
                let to = state_of(board, *peer);
                return Some(Error::timeout(format!(
                    "{me} waited {:.1} s until its timeout in {} for {to}",
                    limit.waited().as_secs_f32(),
                    what()
                )));
            }
        }
        None
    }

    fn fail_all(&mut self, error: &Error) {
        let posted = std::mem::take(&mut self.matching.posted);
        let streams = std::mem::take(&mut self.streams);
        for posted in posted.into_iter().chain(streams.into_values().map(|stream| stream.posted)) {
            self.finish(posted.ticket, posted.done, Err(error.clone()), None);
        }
        for (ticket, send) in std::mem::take(&mut self.sends) {
            self.finish(ticket, send.done, Err(error.clone()), None);
        }
    }
}

/// Puts a frame's payload where it belongs; returns the receive that it completes or, for an offer, that waits for it.
fn place(matching: &mut Matching, streams: &mut BTreeMap<(Rank, u64), Stream>, from: Rank, frame: Frame, payload: &[u8]) -> Option<Posted> {
    match frame.kind {
        Kind::Eager | Kind::Offer => {
            let posted = matching.take_receive(from, frame.tag);
            match &posted {
                Some(posted) if posted.span.bytes == payload.len() => {
                    // SAFETY: as many bytes as the receiver's span holds, which is left alone until its completion.
                    unsafe { cpu::copy(posted.span.ptr(), payload.as_ptr(), payload.len(), Store::Cached) }
                }
                // An offer has no payload; a message of another size is reported by `check_size`.
                Some(_) => {}
                None => {
                    let content = match frame.kind {
                        Kind::Eager => Content::Eager(payload.into()),
                        Kind::Offer | Kind::Padding | Kind::Ask | Kind::Data | Kind::Taken => {
                            Content::Offer { id: frame.id, addr: frame.value }
                        }
                    };
                    matching.unexpected.push_back(Unexpected { from, tag: frame.tag, bytes: frame.bytes, content });
                }
            }
            posted
        }
        Kind::Data => {
            let stream = streams.get_mut(&(from, frame.id))?;
            let end = frame.value as usize + payload.len();
            if end > stream.posted.span.bytes {
                return None;
            }
            let store = if stream.posted.span.bytes >= STREAM_BYTES { Store::Streaming } else { Store::Cached };
            // SAFETY: the piece lies within the receiver's span (checked above), which is left alone until its completion.
            unsafe { cpu::copy(stream.posted.span.ptr().add(frame.value as usize), payload.as_ptr(), payload.len(), store) }
            stream.got += payload.len() as u64;
            if stream.got < stream.posted.span.bytes as u64 {
                return None;
            }
            streams.remove(&(from, frame.id)).map(|stream| stream.posted)
        }
        Kind::Padding | Kind::Ask | Kind::Taken => None,
    }
}

fn state_of(board: &Board, peer: Rank) -> String {
    let state = crate::sys::process::state(board.pid(peer)).unwrap_or("gone");
    format!("{} ({state})", board.describe(peer))
}
