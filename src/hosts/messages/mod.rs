//! Messages between ranks of different hosts, by backends of two ranks each.
//!
//! Two ranks connect once both have begun a message with each other: a thread of the pair meets the peer through the store, makes the
//! [`links`] and then reads what comes. Nobody else waits for a peer. Short messages are sent at once; of long ones the receiver asks for
//! a piece after the other, as it has room. What is under way is a table; `docs/design/several-hosts.md` shows the steps.

mod any;
mod frame;
pub mod links;
mod meeting;
mod names;
mod open;
mod pair;
mod refused;
#[cfg(test)]
mod tests;

use super::shared::aside;
use crate::completion::{Completion, Finished};
use crate::error::{Error, Kind, Result};
use crate::lock::{lock, unpoisoned};
use crate::messages::Message;
use crate::rank::Rank;
use crate::store::Store;
use crate::sync::limit::Limit;
use crate::sys::interrupt::{self, Interrupts};
use crate::sys::{fork, thread};
use crate::watch::Subscription;
use frame::{Frame, HEAD, LONGEST, PIECE};
use links::{Links, Traffic, arrived};
use meeting::Said;
pub(super) use names::Names;
use open::{AnySource, Open};
use pair::{Pair, Phase};
use std::collections::{BTreeMap, BTreeSet};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

/// Tickets of messages between hosts have this bit, no others do.
pub(super) const TICKET_BIT: u64 = 1 << 62;

/// Time between two looks at the group and at deadlines while messages are open.
const LOOK: Duration = Duration::from_millis(20);
/// Pauses between two looks for a peer in the store.
const PAUSE: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(50));
/// Frames that may come before this rank has read the first.
const DEPTH: usize = 8;
/// Time that leaving waits for peers to read what was sent, and again for connections to end.
const RELEASE: Duration = Duration::from_secs(1);

/// What messages know of the group around them.
pub(super) trait Around: Send + Sync {
    /// Number of calls that this rank has made in the group: collectives and messages.
    fn calls(&self) -> u64;
    /// The first failure, or the death of a rank of this host.
    fn error(&self) -> Option<Error>;
    /// Fails the group; returns the failure that stands.
    fn fail(&self, error: Error) -> Error;
    /// Reason why the connection to a rank was lost, if it is told soon.
    fn cause(&self, peer: Rank) -> Option<Error>;
}

/// A rank's messages with ranks of other hosts.
pub(super) struct Messages {
    links: Arc<dyn Links>,
    around: Box<dyn Around>,
    store: Arc<dyn Store>,
    names: Names,
    state: Mutex<State>,
    /// Threads sleep on it that wait for messages, peers or threads.
    changed: Condvar,
    /// The thread that looks at deadlines sleeps on it.
    begun: Condvar,
    generation: u64,
}

#[derive(Default)]
struct State {
    pairs: BTreeMap<Rank, Pair>,
    any: AnySource,
    /// Tickets whose completion has not been called.
    open: BTreeSet<u64>,
    next: u64,
    /// Why no message begins any more.
    closed: Option<Error>,
    leaving: bool,
    threads: Vec<ThreadId>,
    /// The look at a refused message that comes next.
    refusal: Option<Subscription>,
    looked_after: bool,
    /// The thread that looks at deadlines has nothing to do.
    parked: bool,
}

impl State {
    fn ticket(&mut self) -> u64 {
        let ticket = TICKET_BIT | self.next;
        self.next += 1;
        self.open.insert(ticket);
        ticket
    }
}

impl Messages {
    pub(super) fn new(links: Arc<dyn Links>, around: Box<dyn Around>, store: Arc<dyn Store>, names: Names) -> Arc<Self> {
        let (changed, begun, generation) = (Condvar::new(), Condvar::new(), fork::generation());
        Arc::new(Self { links, around, store, names, state: Mutex::default(), changed, begun, generation })
    }

    /// The number of `rank` in the default group.
    pub(super) fn global(&self, rank: Rank) -> Rank {
        self.names.globals.get(rank.index()).map_or(rank, |&global| Rank(global as u32))
    }

    /// The store by which ranks meet.
    pub(super) fn store(&self) -> &dyn Store {
        &*self.store
    }

    /// Starts a send to `peer`.
    pub(super) fn send(self: &Arc<Self>, peer: Rank, message: Message, timeout: Duration, completion: Completion) -> Result<u64> {
        self.start(peer, message, timeout, completion, |this, pair, open, finished| pair.send(open, &*this.links, finished))
    }

    /// Starts a receive from `peer`.
    pub(super) fn recv(self: &Arc<Self>, peer: Rank, message: Message, timeout: Duration, completion: Completion) -> Result<u64> {
        self.start(peer, message, timeout, completion, |this, pair, open, finished| pair.recv(open, &*this.links, &this.names, finished))
    }

    fn start(
        self: &Arc<Self>,
        peer: Rank,
        message: Message,
        timeout: Duration,
        completion: Completion,
        add: impl FnOnce(&Self, &mut Pair, Open, &mut Vec<Finished>) -> Result<()>,
    ) -> Result<u64> {
        let mut state = self.lock();
        self.prepare(&mut state)?;
        self.meet_once(&mut state, peer)?;
        let ticket = state.ticket();
        let open = Open { ticket, message, limit: Limit::from(Instant::now(), timeout), completion };
        let mut finished = Vec::new();
        let pair = state.pairs.entry(peer).or_insert_with(|| Pair::new(peer));
        pair.unsaid = false;
        let added = add(self, pair, open, &mut finished);
        self.wake(&mut state);
        drop(state);
        // The group has failed by the time that anybody hears of it.
        if let Err(error) = added {
            self.lose(peer, error);
        }
        self.settle(finished);
        Ok(ticket)
    }

    /// Makes sure that a message may begin, and that somebody looks at its deadline.
    fn prepare(self: &Arc<Self>, state: &mut State) -> Result<()> {
        if let Some(error) = &state.closed {
            return Err(error.clone());
        }
        if !state.looked_after {
            self.spawn(state, "symm-messages", |this| this.look_after())?;
            state.looked_after = true;
        }
        Ok(())
    }

    /// Sees to it that this rank connects with `peer` once both want that.
    fn meet_once(self: &Arc<Self>, state: &mut State, peer: Rank) -> Result<()> {
        if !state.pairs.contains_key(&peer) {
            self.spawn(state, "symm-message", move |this| this.serve(peer))?;
            state.pairs.insert(peer, Pair::new(peer));
        }
        Ok(())
    }

    /// Has deadlines looked at again.
    fn wake(&self, state: &mut State) {
        if std::mem::take(&mut state.parked) {
            self.begun.notify_all();
        }
    }

    fn spawn(self: &Arc<Self>, state: &mut State, name: &str, work: impl FnOnce(&Arc<Self>) + Send + 'static) -> Result<()> {
        let this = Arc::clone(self);
        let thread = thread::spawn(name, None, move || {
            let panicked = catch_unwind(AssertUnwindSafe(|| work(&this))).err();
            if let Some(panic) = panicked {
                this.fail(Error::panicked(&this.names.layout.describe(this.names.me), &*panic));
            }
            this.lock().threads.retain(|&thread| thread != std::thread::current().id());
            this.changed.notify_all();
        });
        state.threads.push(thread?.thread().id());
        Ok(())
    }

    /// Returns once the completion of `ticket` has been called.
    pub(super) fn wait(&self, ticket: u64, limit: Option<Duration>) -> Result<()> {
        self.check_process()?;
        let (since, mut interrupts) = (Instant::now(), Interrupts::new());
        loop {
            if interrupts.check().is_err() {
                let (me, group) = (self.names.layout.describe(self.names.me), &self.names.group);
                self.fail(Error::aborted(format!("{me} was interrupted by a signal in a send or receive of group {group:?}")));
            }
            let state = self.lock();
            if !state.open.contains(&ticket) {
                return Ok(());
            }
            let left = limit.map_or(interrupt::LOOK, |limit| limit.saturating_sub(since.elapsed()).min(interrupt::LOOK));
            if left.is_zero() {
                let text = format!("wait() gave up after {:.1} s; the transfer itself goes on", since.elapsed().as_secs_f32());
                return Err(Error::wait_timeout(text));
            }
            drop(unpoisoned(self.changed.wait_timeout(state, left)));
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // What panics under the lock fails the group.
        lock(&self.state)
    }

    /// Calls completions, without the lock.
    fn settle(&self, finished: Vec<Finished>) {
        if finished.is_empty() {
            return;
        }
        let tickets = Finished::complete(finished);
        let mut state = self.lock();
        for ticket in tickets {
            state.open.remove(&ticket);
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Meets `peer`, and does what it asks for until the connection ends.
    fn serve(&self, peer: Rank) {
        let address = self.address(peer);
        if let Err(error) = self.meet(peer).and_then(|met| if met { self.listen(peer, address) } else { Ok(()) }) {
            self.lose(peer, error);
        }
    }

    /// Reads what `peer` says until the connection ends. It needs the `address` of this rank no longer once it has said something.
    fn listen(&self, peer: Rank, address: Said<'_>) -> Result<()> {
        let mut address = Some(address);
        while let Some(bytes) = arrived(&*self.links, peer, Traffic::Frame, LONGEST)? {
            self.links.listen(peer, Traffic::Frame, LONGEST)?;
            let head = bytes.first_chunk::<HEAD>().and_then(Frame::decode);
            let nonsense = || Error::internal(format!("{} sent a frame that makes no sense", self.names.layout.describe(peer)));
            let frame = head.ok_or_else(nonsense)?;
            drop(address.take());
            let length = frame.payload();
            let heard = match frame.traffic() {
                Traffic::Frame => {
                    let heard = self.hear(peer, frame, &bytes[HEAD..HEAD + length]);
                    self.links.release(peer, Traffic::Frame);
                    heard
                }
                Traffic::Piece => {
                    let Some(piece) = arrived(&*self.links, peer, Traffic::Piece, PIECE)? else { return Ok(()) };
                    let heard = self.hear(peer, frame, &piece[..length]);
                    self.links.release(peer, Traffic::Piece);
                    self.links.release(peer, Traffic::Frame);
                    heard
                }
            };
            if !heard {
                return Ok(());
            }
        }
        Ok(())
    }

    /// Does what `frame` asks for, with which `payload` has come; whether more is to be read.
    fn hear(&self, peer: Rank, frame: Frame, payload: &[u8]) -> bool {
        self.links.came(peer, HEAD + payload.len());
        let (mut state, mut finished) = (self.lock(), Vec::new());
        if state.closed.is_some() {
            return false;
        }
        let State { pairs, any, .. } = &mut *state;
        let Some(pair) = pairs.get_mut(&peer) else { return false };
        let reacted = pair.react(frame, payload, &*self.links, &self.names, any, &mut finished);
        let reacted = reacted.and_then(|()| if frame.kind == frame::Kind::Waits { self.check_refused(pair, frame) } else { Ok(()) });
        let leaving = state.leaving;
        drop(state);
        let failed = reacted.map_err(|error| self.lose(peer, error)).is_err();
        self.settle(finished);
        if leaving && !failed {
            self.changed.notify_all();
        }
        !failed
    }

    /// The connection to `peer` has ended because of `error`, or is to. That fails the group if a message needs it, now or later.
    fn lose(&self, peer: Rank, error: Error) {
        let (me, whom) = (self.names.layout.describe(self.names.me), self.names.layout.describe(peer));
        let mut state = self.lock();
        if state.closed.is_some() {
            return;
        }
        let Some(pair) = state.pairs.get_mut(&peer) else { return };
        if let Phase::Lost(first) = &pair.phase {
            let first = first.clone();
            drop(state);
            self.fail(first);
            return;
        }
        let broken = matches!(error.kind, Kind::Peer | Kind::Network);
        let urgent = pair.most_urgent().map(|(_, name, open)| (self.about(name, open), open.limit.waited().as_secs_f32()));
        let cause = match &urgent {
            Some((what, seconds)) if broken => {
                Error::peer(format!("{me} lost its connection to {whom} after {seconds:.1} s in {what}: {}", error.message))
            }
            _ if !broken => error,
            Some(_) | None => {
                let group = &self.names.group;
                Error { message: format!("{me} has lost its connection to {whom} in group \"{group}\": {}", error.message), ..error }
            }
        };
        pair.phase = Phase::Lost(cause.clone());
        drop(state);
        self.changed.notify_all();
        // A mismatch has ended its own message already.
        if urgent.is_some() || !broken {
            let told = if broken { self.around.cause(peer) } else { None };
            self.fail(told.unwrap_or(cause));
        }
    }

    /// Looks at the group and at deadlines while messages are open.
    fn look_after(&self) {
        let mut state = self.lock();
        while state.closed.is_none() {
            if state.open.is_empty() {
                state.parked = true;
                state = unpoisoned(self.begun.wait(state));
                continue;
            }
            let urgent = state.pairs.values().filter_map(|pair| Some((pair, pair.most_urgent()?))).min_by_key(|(_, (left, ..))| *left);
            let mut late = match &urgent {
                Some((pair, (left, name, open))) if left.is_zero() => Some(self.late(pair, name, open)),
                Some(_) | None => None,
            };
            let mut pause = urgent.map_or(LOOK, |(_, (left, ..))| left.min(LOOK));
            if let Some((left, open)) = state.any.most_urgent() {
                late = late.or_else(|| left.is_zero().then(|| self.late_for_any(&state, open)));
                pause = pause.min(left);
            }
            let asked = |pair: &mut Pair| Some((pair.peer, pair.ask_whether_refused(&*self.links).err()?));
            let lost: Vec<(Rank, Error)> = state.pairs.values_mut().filter_map(asked).collect();
            drop(state);
            lost.into_iter().for_each(|(peer, error)| self.lose(peer, error));
            if let Some(error) = self.around.error() {
                self.close(&error);
            } else if let Some(late) = late {
                self.fail(late);
            }
            state = self.lock();
            if state.closed.is_none() {
                state = unpoisoned(self.begun.wait_timeout(state, pause)).0;
            }
        }
    }

    fn fail(&self, error: Error) {
        let stands = self.around.fail(error);
        self.close(&stands);
    }

    /// Ends everything with `error`; no message begins any more.
    pub(super) fn close(&self, error: &Error) {
        self.end(error, Duration::ZERO);
    }

    /// A forked child has none of the threads, and its copy of the lock may be held for ever.
    fn check_process(&self) -> Result<()> {
        let ours = self.generation == fork::generation();
        let group = &self.names.group;
        if ours { Ok(()) } else { Err(Error::config(format!("group \"{group}\" was made by another process, of which this is a child"))) }
    }

    fn end(&self, error: &Error, limit: Duration) {
        if self.check_process().is_err() {
            return;
        }
        let mut state = self.lock();
        let error = state.closed.get_or_insert_with(|| error.clone()).clone();
        let wanted = std::mem::take(&mut state.any.wanted).into_iter().map(|wanted| wanted.open);
        let finished = state.pairs.values_mut().flat_map(Pair::take_all).chain(wanted).map(|open| open.fails(&error)).collect();
        let peers: Vec<Rank> = state.pairs.keys().copied().collect();
        drop(state);
        self.begun.notify_all();
        self.settle(finished);
        self.changed.notify_all();
        if !peers.is_empty() {
            let links = Arc::clone(&self.links);
            aside("symm-message-end", limit, move || peers.into_iter().for_each(|peer| links.close(peer)));
        }
    }

    /// Leaves once peers have read what was sent, or `limit` has passed; what is open then fails.
    pub(super) fn leave(&self, limit: Duration) {
        if self.check_process().is_err() {
            return;
        }
        let (deadline, failed) = (Instant::now() + limit.min(RELEASE), self.around.error().is_some());
        let mut state = self.lock();
        if state.closed.is_none() && !failed {
            state.leaving = true;
            for pair in state.pairs.values_mut().filter(|pair| matches!(pair.phase, Phase::Open)) {
                // A connection that has just ended has nobody who reads.
                let _ = pair.say_bye(&*self.links);
            }
            while state.pairs.values().any(Pair::is_unread) && state.closed.is_none() {
                let Some(left) = deadline.checked_duration_since(Instant::now()) else { break };
                state = unpoisoned(self.changed.wait_timeout(state, left.min(LOOK))).0;
            }
        }
        drop(state);
        let group = &self.names.group;
        self.end(&Error::aborted(format!("group \"{group}\" was destroyed before this transfer was complete")), RELEASE);
        let deadline = Instant::now() + RELEASE;
        let mut state = self.lock();
        // A completion may drop the last handle of the group on one of these threads.
        while state.threads.iter().any(|&thread| thread != std::thread::current().id()) {
            let Some(left) = deadline.checked_duration_since(Instant::now()) else { break };
            state = unpoisoned(self.changed.wait_timeout(state, left)).0;
        }
    }
}
