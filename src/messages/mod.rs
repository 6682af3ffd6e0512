//! Messages: sends and receives between the ranks of a group, matched by tag.
//!
//! Frames travel over a [`link`](mod@link) to each peer: within a node a [`ring`](mod@ring) in each
//! direction, between nodes a [`wire`](mod@wire), which is a backend of two ranks. A short message
//! is sent at once, in its frame. A long one is offered first. The receiver then reads it directly
//! from the sender's memory and acknowledges; where that is not permitted, it requests the message
//! and receives it in frames.
//!
//! A thread that waits for a message advances all messages on rings. Each wire has its own thread.
//! A progress thread advances the rings while no thread waits. Completions run code of the program,
//! which may wait for other messages. The threads of wires therefore call none, and another
//! progress thread takes over while a progress thread is inside one.

mod connect;
mod delivery;
mod ending;
mod frame;
mod internode;
mod link;
pub mod links;
mod matching;
mod peer;
mod reading;
mod receiving;
mod rejection;
mod ring;
mod waiting;
mod wire;

pub use internode::InternodeLinks;

use self::ending::about;
use self::frame::{Frame, FrameKind, RING};
use self::link::Link;
use self::matching::{Matching, MessageBody, Posted, UnmatchedMessage};
use self::peer::Peer;
use self::ring::RingLink;
use self::waiting::ProgressThreads;
use self::wire::WireLink;
use crate::coll::call::Span;
use crate::coll::message::{Message, MessageSpec};
use crate::completion::{Completion, FinishedTransfer};
use crate::control::ControlBlock;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::health::{FailureListener, Health};
use crate::lock::lock;
use crate::rank::Rank;
use crate::sync::timeout::CallTimeout;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, Weak};
use std::thread::{JoinHandle, ThreadId};
use std::time::{Duration, Instant};

/// Tickets of messages have this bit; tickets of collectives do not.
pub const TICKET_BIT: u64 = 1 << 63;

/// A rank's sends and receives.
pub struct Messages {
    health: Arc<Health>,
    control: Arc<ControlBlock>,
    direct: bool,
    state: Mutex<MessageTable>,
    /// The progress thread waits here while no message is pending.
    begun: Condvar,
    workers: Mutex<Vec<JoinHandle<()>>>,
    this: Weak<Self>,
    /// The ranks of other nodes, if links carry messages to them.
    internode: OnceLock<InternodeLinks>,
}

struct MessageTable {
    /// All ranks of the group, on every node.
    peers: Vec<Peer>,
    matching: Matching,
    sends: BTreeMap<u64, PendingSend>,
    streams: BTreeMap<(Rank, u64), ChunkedReceive>,
    /// The received part of the message that each peer is writing.
    begun: Vec<IncompleteFrame>,
    /// Messages that have ended and whose completions are due, the oldest first.
    finished: VecDeque<FinishedTransfer>,
    /// Tickets whose completion has not returned.
    open: BTreeSet<u64>,
    progress: ProgressThreads,
    next: u64,
    waiting_threads: usize,
    /// True while this rank publishes to its peers that one of its threads waits for a certain
    /// message.
    announced: bool,
    idle: bool,
    /// Number of steps of long messages that were read.
    steps: u64,
    /// The first error that completed all messages; no message starts after it.
    closed: Option<Error>,
    /// A copy of `closed`, until the rest of the group has been notified of it.
    unnotified: Option<Error>,
    stopping: bool,
    /// True if messages can reach ranks of other nodes.
    reaches: bool,
    shutting_down: bool,
    /// Ids of the wires' threads.
    threads: Vec<ThreadId>,
    /// True once a thread looks for ranks that send; `blind` is the error with which it ended.
    seeking: bool,
    blind: Option<Error>,
}

struct PendingSend {
    peer: Rank,
    tag: i32,
    dtype: DType,
    span: Span,
    limit: CallTimeout,
    completion: Completion,
    /// True if the peer knows of the message.
    started: bool,
    /// Number of bytes that were sent, or will be sent without another request.
    next: usize,
}

impl PendingSend {
    /// Returns the header of the whole message, whose number is `id`.
    fn frame(&self, id: u64) -> Frame {
        Frame {
            kind: FrameKind::Eager,
            dtype: self.dtype as u8,
            tag: self.tag,
            id,
            bytes: self.span.bytes as u64,
            value: 0,
        }
    }
}

/// A message of which `got` bytes have arrived.
struct ChunkedReceive {
    posted: Posted,
    got: u64,
    /// Number of bytes that will arrive in frames without another request.
    requested: u64,
    source: PayloadSource,
}

/// How the rest of a message is transferred.
#[derive(Clone, Copy, PartialEq, Eq)]
enum PayloadSource {
    /// The sender writes it in frames.
    Frames,
    /// This rank reads it at this address of the sender's memory.
    Memory(u64),
    /// As `Memory`, while a thread reads a part of the message without the lock, so the receive
    /// must not complete yet.
    BeingRead(u64),
}

/// A frame whose payload is still being written: the receive with `ticket` already has its first
/// `bytes` bytes.
#[derive(Clone, Copy, Default)]
struct IncompleteFrame {
    ticket: u64,
    bytes: usize,
}

/// Minimum size of messages that are written without using the receiver's cache.
const STREAM_BYTES: usize = 8 << 20;
impl Messages {
    /// Creates a table without messages. `direct` is true if every rank may read every other rank's
    /// memory.
    pub fn new(health: &Arc<Health>, direct: bool) -> Arc<Self> {
        let (health, control) = (Arc::clone(health), Arc::clone(health.control()));
        let own = control.display_rank(control.rank());
        let size = control
            .ranks()
            .map(|rank| control.display_rank(rank).index() + 1)
            .max()
            .unwrap_or_default();
        let mut state = MessageTable {
            peers: (0..size).map(|_| Peer::Apart).collect(),
            matching: Matching::new(size),
            sends: BTreeMap::new(),
            streams: BTreeMap::new(),
            begun: vec![IncompleteFrame::default(); size],
            finished: VecDeque::new(),
            open: BTreeSet::new(),
            progress: ProgressThreads::default(),
            next: TICKET_BIT,
            waiting_threads: 0,
            announced: false,
            idle: false,
            steps: 0,
            closed: None,
            unnotified: None,
            stopping: false,
            reaches: false,
            shutting_down: false,
            threads: Vec::new(),
            seeking: false,
            blind: None,
        };
        for peer in control.peers() {
            state.peers[control.display_rank(peer).index()] =
                Peer::IntraNode(RingLink::new(Arc::clone(&control), peer));
        }
        state.peers[own.index()] = Peer::Own;
        let made = Arc::new_cyclic(|this| Self {
            health,
            control,
            direct,
            state: Mutex::new(state),
            begun: Condvar::new(),
            workers: Mutex::default(),
            this: Weak::clone(this),
            internode: OnceLock::new(),
        });
        let listener: Arc<dyn FailureListener> = made.clone();
        made.health.listen(Arc::downgrade(&listener));
        made
    }

    /// Connects ranks of other nodes from now on; no message has started yet.
    pub fn reach(&self, far: InternodeLinks) {
        let mut state = self.lock();
        state.peers.resize_with(far.node_map.size(), || Peer::Apart);
        for peer in far.ranks() {
            state.peers[peer.index()] = Peer::Internode(Box::new(WireLink::new(
                Arc::clone(&far.links),
                peer,
                far.node_map.describe(peer),
            )));
        }
        let size = state.peers.len();
        (state.matching, state.begun, state.reaches) =
            (Matching::new(size), vec![IncompleteFrame::default(); size], true);
        let _ = self.internode.set(far);
    }

    /// Returns the ranks of other nodes, if messages reach them.
    pub fn internode(&self) -> Option<&InternodeLinks> {
        self.internode.get()
    }

    /// Starts a send.
    pub fn send(
        self: &Arc<Self>,
        message: Message,
        timeout: Duration,
        completion: Completion,
    ) -> Result<u64> {
        let peer = message.peer.ok_or_else(|| Error::value("send needs a destination rank"))?;
        let mut state = self.lock();
        let far = state.check_peer(peer)?;
        // Checked here because an eager send would complete before any thread polls. `recv` has no
        // such check, because a receive may still find a message that has arrived.
        if !far {
            self.check_exits(&state.peers[peer.index()], &message)?;
        }
        state.closed.clone().map_or(Ok(()), Err)?;
        if far {
            self.meet_once(&mut state, peer)?;
            state.wire(peer).into_iter().for_each(|wire| wire.unsent_rejection = false);
        }
        let ticket = state.new_ticket();
        let MessageSpec { tag, dtype, span, .. } = *message;
        let frame = Frame {
            kind: FrameKind::Eager,
            dtype: dtype as u8,
            tag,
            id: ticket,
            bytes: span.bytes as u64,
            value: 0,
        };
        let sent = match &mut state.peers[peer.index()] {
            Peer::IntraNode(ring) => ring.send_now(frame, span),
            Peer::Internode(wire) => wire.send_now(frame, span),
            Peer::Own | Peer::Apart => Ok(false),
        };
        if sent == Ok(true) {
            drop(state);
            if far {
                self.flush();
            }
            completion.call(Ok(()), None);
            return Ok(ticket);
        }
        self.ensure_worker(&mut state)?;
        state.open.insert(ticket);
        let limit = CallTimeout::from(Instant::now(), timeout);
        state.sends.insert(
            ticket,
            PendingSend { peer, tag, dtype, span, limit, completion, started: false, next: 0 },
        );
        let begun = match sent {
            Ok(_) if matches!(state.peers[peer.index()], Peer::Own) => {
                match state.matching.take_receive(peer, tag) {
                    Some(posted) => state.deliver_own(&self.control, posted, ticket),
                    None => {
                        let (bytes, content) = (frame.bytes, MessageBody::Own { ticket });
                        state.matching.keep(UnmatchedMessage {
                            from: peer,
                            tag,
                            dtype: frame.dtype,
                            bytes,
                            content,
                        });
                        Ok(())
                    }
                }
            }
            Ok(_) => state.begin_send(ticket),
            Err(error) => Err(error),
        };
        self.begin(state, Some(peer), begun);
        Ok(ticket)
    }

    /// Fails if a send to `peer`, of this node, could not be received, or a rank has failed.
    fn check_exits(&self, peer: &Peer, message: &Message) -> Result<()> {
        let control = &self.control;
        let error = |gone, how: &str| {
            let what = about(control, "send", message.span.bytes, message.tag);
            let (gone, me) = (control.describe(gone), control.describe(control.rank()));
            let peer = peer.describe(control);
            Error::peer(format!("{gone} {how}; {me} began {what} to {peer} after that"))
        };
        if let Some((dead, how)) = control.failed_rank() {
            return Err(control.fail(error(dead, &how)));
        }
        let waits = message.span.bytes > RING.eager;
        let left =
            peer.ring().and_then(|ring| Some((ring.peer, control.unreachable(ring.peer, waits)?)));
        left.map_or(Ok(()), |(gone, (how, fails))| {
            let error = error(gone, &how);
            Err(if fails { control.fail(error) } else { error })
        })
    }

    /// Starts a receive.
    pub fn recv(
        self: &Arc<Self>,
        message: Message,
        timeout: Duration,
        completion: Completion,
    ) -> Result<u64> {
        let mut state = self.lock();
        let far = message.peer.map(|peer| state.check_peer(peer)).transpose()?.unwrap_or(false);
        state.closed.clone().map_or(Ok(()), Err)?;
        self.ensure_worker(&mut state)?;
        if let Some(peer) = message.peer.filter(|_| far) {
            self.meet_once(&mut state, peer)?;
            state.wire(peer).into_iter().for_each(|wire| wire.unsent_rejection = false);
        }
        if message.peer.is_none() && state.reaches {
            if !std::mem::replace(&mut state.seeking, true) {
                self.spawn(&mut state, "symm-p2p-any", |this, far| this.seek(far))
                    .inspect_err(|_| state.seeking = false)?;
            }
            self.internode.get().into_iter().for_each(|far| far.changed.notify_all());
        }
        let ticket = state.ticket();
        let MessageSpec { peer, tag, dtype, span, .. } = *message;
        let posted = Posted {
            ticket,
            peer,
            tag,
            dtype,
            span,
            limit: CallTimeout::from_first_wait(timeout),
            completion,
        };
        let found = state.matching.take_message(peer, tag);
        // A receive that is complete at once does not read the clock. A pending one starts its
        // clock here, because the progress thread may be busy with a completion.
        if !found.as_ref().is_some_and(|message| matches!(message.content, MessageBody::Eager(_))) {
            posted.limit.start();
        }
        let (from, begun) = match found {
            Some(message) => {
                (Some(message.from), state.deliver(&self.control, self.direct, posted, message))
            }
            None => {
                state.matching.posted.push_back(posted);
                (
                    peer,
                    peer.and_then(|peer| state.wire(peer))
                        .and_then(|wire| wire.lost())
                        .map_or(Ok(()), Err),
                )
            }
        };
        self.begin(state, from, begun);
        Ok(ticket)
    }

    /// Advances messages once after a message with `peer` was started, with the outcome `begun`. If
    /// any message stays pending or an acknowledgement is queued, wakes the progress thread.
    fn begin(
        &self,
        mut state: MutexGuard<'_, MessageTable>,
        peer: Option<Rank>,
        begun: Result<()>,
    ) {
        let far = peer.filter(|&peer| state.is_internode(peer));
        let lost = self.absorb_internode(&mut state, far, begun);
        self.advance(&mut state);
        let pending = state.open.len() > state.finished.len();
        if state.idle && (pending || state.has_acknowledgement(&self.control)) {
            self.begun.notify_all();
        }
        self.run_completions(state);
        if let Some((peer, error)) = lost {
            self.fail_peer(peer, error);
        }
    }

    /// Advances all messages without blocking; returns true if anything moved.
    pub fn progress(&self) -> bool {
        let mut state = self.lock();
        let moved = self.advance(&mut state);
        self.run_completions(state) || moved
    }

    /// Returns a peer among `peers` that sleeps for a message with this tag that this rank has not
    /// started: a send of this rank if `send` is true, otherwise a receive. Never waits: returns
    /// `None` if another thread is advancing messages.
    pub fn awaited_by(
        &self,
        mut peers: impl Iterator<Item = Rank>,
        send: bool,
        tag: i32,
    ) -> Option<Rank> {
        let state = self.state.try_lock().ok()?;
        peers.find(|&peer| state.peer_waits_for(&self.control, peer, send, tag))
    }

    /// Stops the progress threads.
    pub fn stop(&self) {
        self.lock().stopping = true;
        self.begun.notify_all();
        let workers = std::mem::take(&mut *lock(&self.workers));
        // A completion on a progress thread may drop the last reference to the group.
        for worker in
            workers.into_iter().filter(|worker| worker.thread().id() != std::thread::current().id())
        {
            let _ = worker.join();
        }
    }

    fn lock(&self) -> MutexGuard<'_, MessageTable> {
        lock(&self.state)
    }

    /// Writes and reads all frames that it can without blocking; an error fails the group.
    fn advance(&self, state: &mut MessageTable) -> bool {
        // The rings of a rank that has left no longer exist.
        if state.closed.is_some() {
            return false;
        }
        let moved = state.advance(&self.control, self.direct);
        self.fail_group_on_error(state, moved)
    }
}

impl MessageTable {
    /// Returns true if `peer` is on another node; fails for a rank that no message can reach.
    fn check_peer(&self, peer: Rank) -> Result<bool> {
        match self.peers.get(peer.index()) {
            Some(Peer::Apart) | None => Err(Error::value(format!(
                "rank {peer} is outside the group of {} ranks",
                self.peers.len()
            ))),
            Some(peer) => Ok(matches!(peer, Peer::Internode(_))),
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;
