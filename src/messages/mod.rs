//! Messages: sends and receives between the ranks of a group, matched by tag.
//!
//! Frames travel by a [`link`](mod@link) to each peer; within a host it is a [`ring`](mod@ring) in each direction. A short message travels in
//! its frame. A long one is offered first; the receiver then reads it straight out of the sender's memory and acknowledges, or, where that is
//! not permitted, requests it and receives it in frames. A thread that waits for a message moves all of them along; a progress thread does
//! while no thread waits.

mod claim;
mod ending;
mod frame;
mod link;
mod matching;
mod message;
mod peer;
mod reading;
mod ring;
mod waiting;

pub use claim::Claim;
pub use message::{Message, MessageSpec};

use self::frame::{Frame, Kind};
use self::link::Link;
use self::matching::{Content, Matching, Posted, Unexpected};
use self::ring::Ring;
use crate::coll::call::Span;
use crate::completion::{Completion, Finished};
use crate::control::ControlBlock;
use crate::error::{Error, Result};
use crate::lock::lock;
use crate::rank::Rank;
use crate::sync::limit::Limit;
use crate::sys::thread;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Tickets of messages have this bit, those of collectives do not.
pub const TICKET_BIT: u64 = 1 << 63;

/// A rank's sends and receives.
pub struct Messages {
    control: Arc<ControlBlock>,
    direct: bool,
    state: Mutex<State>,
    /// The progress thread waits here while nothing is open.
    begun: Condvar,
    worker: Mutex<Option<JoinHandle<()>>>,
    requested: AtomicU64,
}

struct State {
    /// Links, by rank; the one of this rank is idle.
    rings: Vec<Ring>,
    matching: Matching,
    sends: BTreeMap<u64, Sending>,
    streams: BTreeMap<(Rank, u64), Stream>,
    /// What has come of the message that each peer is writing.
    begun: Vec<Begun>,
    finished: Vec<Finished>,
    /// Tickets whose completion has not been called.
    open: BTreeSet<u64>,
    next: u64,
    waiting_threads: usize,
    /// Peers are told what a thread waits for.
    announced: bool,
    parked: bool,
    /// Number of steps of long messages that were read.
    steps: u64,
    /// Error that completed all transfers, the first one; none starts after that.
    closed: Option<Error>,
    stopping: bool,
}

struct Sending {
    peer: Rank,
    tag: i32,
    span: Span,
    limit: Limit,
    completion: Completion,
    /// Flag of a transfer that is on its way in frames.
    requested: bool,
}

/// A message of which `got` bytes have arrived.
struct Stream {
    posted: Posted,
    got: u64,
    source: Source,
}

/// How the rest of a message arrives.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Source {
    /// The sender writes it in frames.
    Frames,
    /// This rank reads it at this address of the sender's memory.
    Memory(u64),
    /// As above; a thread is reading a step of it, without the lock, so its receive must not complete yet.
    BeingRead(u64),
}

/// The receive with `ticket` has got the first `bytes` bytes of a message in one frame, whose rest is still being written.
#[derive(Clone, Copy, Default)]
struct Begun {
    ticket: u64,
    bytes: usize,
}

/// Messages from this size on are written past the receiver's cache.
const STREAM_BYTES: usize = 8 << 20;
impl Messages {
    /// Makes a table without transfers. `direct` says that every rank may read every other's memory.
    pub fn new(control: Arc<ControlBlock>, direct: bool) -> Arc<Self> {
        let state = State {
            rings: control.ranks().map(|rank| Ring::new(Arc::clone(&control), rank)).collect(),
            matching: Matching::new(control.size()),
            sends: BTreeMap::new(),
            streams: BTreeMap::new(),
            begun: vec![Begun::default(); control.size()],
            finished: Vec::new(),
            open: BTreeSet::new(),
            next: TICKET_BIT,
            waiting_threads: 0,
            announced: false,
            parked: false,
            steps: 0,
            closed: None,
            stopping: false,
        };
        let (state, begun, worker) = (Mutex::new(state), Condvar::new(), Mutex::new(None));
        Arc::new(Self { control, direct, state, begun, worker, requested: AtomicU64::new(0) })
    }

    /// Starts a send.
    pub fn send(self: &Arc<Self>, message: Message, timeout: Duration, completion: Completion) -> Result<u64> {
        self.requested.fetch_add(1, Ordering::Relaxed);
        let peer = message.peer.ok_or_else(|| Error::value("send needs a destination rank"))?;
        self.check_peer(peer)?;
        // A short one would be done before anybody looks; a receive may still find what had come.
        if let Some((dead, how)) = self.control.dead_rank() {
            let what = peer::about(&self.control, "send", message.span.bytes, message.tag);
            let (dead, me, peer) = (self.control.describe(dead), self.control.describe(self.control.rank()), self.control.describe(peer));
            return Err(self.control.fail(Error::peer(format!("{dead} {how}; {me} began {what} to {peer} after that"))));
        }
        let mut state = self.lock_open()?;
        let (ticket, own) = (state.number(), peer == self.control.rank());
        let (span, tag, bytes) = (message.span, message.tag, message.span.bytes as u64);
        let frame = Frame { kind: Kind::Eager, tag, id: ticket, bytes, value: 0 };
        let sent = if own { Ok(false) } else { state.rings[peer.index()].send_now(frame, span) };
        if sent == Ok(true) {
            drop(state);
            completion.call(Ok(()), None);
            return Ok(ticket);
        }
        self.start_worker()?;
        state.open.insert(ticket);
        state.sends.insert(ticket, Sending { peer, tag, span, limit: Limit::from(Instant::now(), timeout), completion, requested: false });
        let begun = match sent {
            Err(error) => Err(error),
            Ok(_) if !own => state.link(peer).send(frame, span).map(|_| ()),
            Ok(_) => match state.matching.take_receive(peer, tag) {
                Some(posted) => state.deliver_own(&self.control, posted, ticket),
                None => {
                    state.matching.keep(Unexpected { from: peer, tag, bytes, content: Content::Own { ticket } });
                    Ok(())
                }
            },
        };
        self.absorb(&mut state, begun.map(|()| true));
        self.begin(state);
        Ok(ticket)
    }

    /// Starts a receive.
    pub fn recv(self: &Arc<Self>, message: Message, timeout: Duration, completion: Completion) -> Result<u64> {
        self.recv_claimed(message, timeout, completion, None)
    }

    /// Starts a receive. With a `claim` it may be filled from elsewhere, until a message has taken the claim.
    pub fn recv_claimed(
        self: &Arc<Self>,
        message: Message,
        timeout: Duration,
        completion: Completion,
        claim: Option<Claim>,
    ) -> Result<u64> {
        self.requested.fetch_add(1, Ordering::Relaxed);
        if let Some(peer) = message.peer {
            self.check_peer(peer)?;
        }
        self.start_worker()?;
        let mut state = self.lock_open()?;
        let ticket = state.ticket();
        let MessageSpec { peer, tag, span, .. } = *message;
        let posted = Posted { ticket, peer, tag, span, limit: Limit::from_first_wait(timeout), completion, claim };
        let found = state.matching.take_message(peer, tag);
        // Nobody need look at the clock meanwhile: the progress thread may be in a completion. One that is complete at once reads none.
        if !found.as_ref().is_some_and(|message| matches!(message.content, Content::Eager(_))) {
            posted.limit.start();
        }
        match found {
            Some(message) => {
                // Nobody else knows of it yet.
                let _ = posted.claim.as_ref().map(Claim::take);
                let delivered = state.deliver(&self.control, self.direct, posted, message);
                self.absorb(&mut state, delivered.map(|()| true));
            }
            None => state.matching.posted.push_back(posted),
        }
        self.begin(state);
        Ok(ticket)
    }

    /// Forgets a receive that was filled from elsewhere.
    pub fn withdraw(&self, ticket: u64) {
        let mut state = self.lock();
        state.matching.posted.retain(|posted| posted.ticket != ticket);
        state.open.remove(&ticket);
        drop(state);
        self.control.wake_sleepers();
    }

    fn check_peer(&self, peer: Rank) -> Result<()> {
        if peer.index() < self.control.size() {
            return Ok(());
        }
        Err(Error::value(format!("rank {peer} is outside the group of {} ranks", self.control.size())))
    }

    /// Moves things along once; where something stays open, sees to it that the progress thread looks after it.
    fn begin(&self, mut state: MutexGuard<'_, State>) {
        self.advance(&mut state);
        if state.parked && state.open.len() > state.finished.len() {
            self.begun.notify_all();
        }
        self.settle(state);
    }

    /// Moves everything along without blocking; returns whether anything moved.
    pub fn progress(&self) -> bool {
        let mut state = self.lock();
        let moved = self.advance(&mut state);
        self.settle(state) || moved
    }

    /// Number of sends and receives asked for.
    pub fn requested(&self) -> u64 {
        self.requested.load(Ordering::Relaxed)
    }

    /// Peer among `peers` that sleeps for a message that this rank has not begun: a `send` of its own, or a receive, with this tag. Never
    /// waits: while something is moved along here, it names nobody.
    pub fn awaited_by(&self, mut peers: impl Iterator<Item = Rank>, send: bool, tag: i32) -> Option<Rank> {
        let state = self.state.try_lock().ok()?;
        peers.find(|&peer| state.is_awaited(&self.control, peer, send, tag))
    }

    /// Ends the progress thread.
    pub fn stop(&self) {
        self.lock().stopping = true;
        self.begun.notify_all();
        let worker = lock(&self.worker).take();
        // A completion may drop the last handle of the group on the progress thread itself.
        if let Some(worker) = worker.filter(|worker| worker.thread().id() != std::thread::current().id()) {
            let _ = worker.join();
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Writes and reads what can be; a failure closes everything.
    fn advance(&self, state: &mut State) -> bool {
        // A rank that has left has no rings any more.
        if state.closed.is_some() {
            return false;
        }
        let moved = state.advance(&self.control, self.direct);
        self.absorb(state, moved)
    }

    /// Starts the worker before anything is posted. What is posted is read or written until its completion, and so must have a thread to
    /// complete it, or the memory of a transfer that raised would be used after its tensor.
    fn start_worker(self: &Arc<Self>) -> Result<()> {
        let mut worker = lock(&self.worker);
        if worker.is_none() {
            let this = Arc::clone(self);
            let thread = thread::spawn("symm-transfers", None, move || this.work());
            *worker = Some(thread.map_err(|e| Error::internal(format!("starting a group's progress thread: {e}")))?);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
