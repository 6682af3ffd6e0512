//! Transfers: all sends and receives of one rank, and the threads that move them along.

mod ending;
mod reading;
mod state;

use super::connection::{Connection, Outgoing};
use super::frame::{EAGER_BYTES, Frame, Kind};
use super::matching::{Content, Matching, Posted, Unexpected};
use crate::coll::call::Span;
use crate::completion::{Completion, Finished};
use crate::control::{ControlBlock, YIELDS, patience};
use crate::error::{Error, Result};
use crate::lock::{lock, unpoisoned};
use crate::p2p::claim::Claim;
use crate::p2p::message::Message;
use crate::rank::Rank;
use crate::sync::limit::Limit;
use crate::sys::interrupt::Interrupts;
use crate::sys::thread;
use ending::gave_up;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Tickets of transfers have this bit, those of collectives do not.
pub const TICKET_BIT: u64 = 1 << 63;

/// A rank's sends and receives.
pub struct Transfers {
    control: Arc<ControlBlock>,
    direct: bool,
    state: Mutex<State>,
    /// The progress thread waits here while nothing is open.
    begun: Condvar,
    worker: Mutex<Option<JoinHandle<()>>>,
    requested: AtomicU64,
}

struct State {
    connections: Vec<Connection>,
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

/// A thread that moves transfers along while it waits; the progress thread stands back meanwhile. It takes over again however the wait
/// ends.
struct Attending<'a>(&'a Transfers);

impl<'a> Attending<'a> {
    fn new(transfers: &'a Transfers) -> Self {
        transfers.attend(1);
        Self(transfers)
    }
}

impl Drop for Attending<'_> {
    fn drop(&mut self) {
        self.0.attend(-1);
    }
}

/// Turns of spinning before a receive waits in earnest.
const GLANCES: u32 = 100;
/// Turns of spinning between two moments of giving the core away.
const SPINS_BETWEEN: u32 = 8;
/// Messages from this size on are written past the receiver's cache.
const STREAM_BYTES: usize = 8 << 20;
/// Time that the progress thread polls after the last transfer before it parks.
const LINGER: Duration = Duration::from_millis(200);
/// Pause of the progress thread between looks while transfers are open and another thread may be moving them.
const PAUSE: Duration = Duration::from_millis(1);

impl Transfers {
    /// Makes a table without transfers. `direct` says that every rank may read every other's memory.
    pub fn new(control: Arc<ControlBlock>, direct: bool) -> Arc<Self> {
        let state = State {
            connections: control.ranks().map(Connection::new).collect(),
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
            let what = state::about(&self.control, "send", message.span.bytes, message.tag);
            let (dead, me, peer) = (self.control.describe(dead), self.control.describe(self.control.rank()), self.control.describe(peer));
            return Err(self.control.fail(Error::peer(format!("{dead} {how}; {me} began {what} to {peer} after that"))));
        }
        let mut state = self.lock_open()?;
        let (ticket, own) = (state.number(), peer == self.control.rank());
        let (span, tag, bytes) = (message.span, message.tag, message.span.bytes as u64);
        let short = !own && span.bytes <= EAGER_BYTES;
        let frame = |kind, value| Frame { kind, tag, id: ticket, bytes, value };
        let eager = frame(Kind::Eager, 0);
        let sent = if short { state.connections[peer.index()].send_now(&self.control, eager, span) } else { Ok(false) };
        if sent == Ok(true) {
            drop(state);
            completion.call(Ok(()), None);
            return Ok(ticket);
        }
        self.start_worker()?;
        state.open.insert(ticket);
        state.sends.insert(ticket, Sending { peer, tag, span, limit: Limit::from(Instant::now(), timeout), completion, requested: false });
        if sent.is_err() {
            self.absorb(&mut state, sent);
        } else if own {
            match state.matching.take_receive(peer, tag) {
                Some(posted) => {
                    let delivered = state.deliver_own(&self.control, posted, ticket);
                    self.absorb(&mut state, delivered.map(|()| true));
                }
                None => state.matching.keep(Unexpected { from: peer, tag, bytes, content: Content::Own { ticket } }),
            }
        } else {
            let connection = &mut state.connections[peer.index()];
            connection.enqueue(if short && connection.may_send_eagerly(&self.control) {
                Outgoing::Eager(eager, span)
            } else {
                Outgoing::Control(frame(Kind::Offer, span.addr as u64))
            });
        }
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
        let Message { peer, tag, span, .. } = message;
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

    /// Returns once the completion of `ticket` has been called.
    pub fn wait(&self, ticket: u64, limit: Option<Duration>) -> Result<()> {
        if self.glance(ticket) {
            return Ok(());
        }
        let since = Instant::now();
        let _attending = Attending::new(self);
        let (mut turns, mut interrupts) = (0, None::<Interrupts>);
        loop {
            let mut state = self.lock();
            if !state.open.contains(&ticket) {
                return Ok(());
            }
            // However much keeps arriving for other transfers.
            if limit.is_some_and(|limit| since.elapsed() >= limit) {
                return Err(gave_up(since));
            }
            let mut stirred = self.advance(&mut state);
            let finished = !state.finished.is_empty();
            if !stirred && !finished && !state.is_reading_due() {
                let crowded = || self.control.in_the_way(self.control.peers().filter(|&peer| self.control.attends(peer)));
                let spins = if turns == 0 && !crowded() { self.control.spins() } else { SPINS_BETWEEN };
                stirred = (0..spins).any(|_| {
                    std::hint::spin_loop();
                    state.stirs(&self.control)
                });
            }
            if self.settle(state) || stirred || finished {
                turns = 0;
                continue;
            }
            turns += 1;
            if turns <= YIELDS && !patience::PATIENCE.is_short(patience::now) {
                patience::yield_core();
                continue;
            }
            self.fail_if_lost();
            if interrupts.get_or_insert_default().check().is_err() {
                self.close(&self.control.interrupted(&format!("a send or receive of group {:?}", self.control.name())));
                continue;
            }
            let left = limit.map_or(Duration::MAX, |limit| limit.saturating_sub(since.elapsed()));
            if left.is_zero() {
                return Err(gave_up(since));
            }
            let left = left.min(self.soonest_deadline());
            self.control.sleep(left, || {
                let mut state = self.lock();
                state.announce(&self.control, ticket);
                !state.open.contains(&ticket) || state.stirs(&self.control) || state.is_reading_due() || self.control.failure().is_some()
            });
        }
    }

    /// Whether the completion of `ticket` has been called, now or some turns of spinning later. Peers do not learn of a wait that is so
    /// short: what they read of it costs both sides more than the message does.
    fn glance(&self, ticket: u64) -> bool {
        let mut state = self.lock();
        if !state.open.contains(&ticket) {
            return true;
        }
        // Who receives from this rank asks whether it attends.
        if !state.sends.is_empty() || self.control.spins() < GLANCES {
            return false;
        }
        for _ in 0..GLANCES {
            self.advance(&mut state);
            if state.finished.is_empty() && !state.is_reading_due() {
                if !state.stirs(&self.control) {
                    std::hint::spin_loop();
                }
                continue;
            }
            let read = self.settle(state);
            state = self.lock();
            if !state.open.contains(&ticket) {
                return true;
            }
            // The rest of a long message takes a while, for which only a wait has a limit.
            if read {
                return false;
            }
        }
        false
    }

    /// Counts the threads that move transfers along, and lets peers know whether there is one.
    fn attend(&self, change: isize) {
        let mut state = self.lock();
        state.waiting_threads = state.waiting_threads.saturating_add_signed(change);
        state.take_back(&self.control);
        self.control.attend(state.waiting_threads > 0);
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

    fn soonest_deadline(&self) -> Duration {
        let state = self.lock();
        state.limits().filter_map(Limit::left).min().unwrap_or(PAUSE)
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

    fn work(&self) {
        let moved = self.control.contain(|| {
            self.move_along();
            Ok(())
        });
        if let Err(error) = moved {
            self.close(&error);
        }
    }

    fn move_along(&self) {
        let (mut idle_since, mut steps) = (Instant::now(), 0);
        loop {
            let mut state = self.lock();
            if state.stopping {
                return;
            }
            if !state.open.is_empty() {
                idle_since = Instant::now();
            } else if idle_since.elapsed() > LINGER {
                state.parked = true;
                state = unpoisoned(self.begun.wait(state));
                state.parked = false;
                idle_since = Instant::now();
            }
            // A thread that read a step of a message may have returned since, while others sleep; one that waits for it reads the next at once.
            let left = state.is_reading_due() && state.steps == steps;
            steps = state.steps;
            let attended = (state.waiting_threads > 0 && !left) || state.open.is_empty();
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

#[cfg(test)]
mod tests;
