//! The state that messages with ranks of other nodes need, and their threads.

use super::links::Links;
use super::wire::{LinkPhase, WireLink};
use super::{MessageTable, Messages};
use crate::error::{Error, Result};
use crate::lock::unpoisoned;
use crate::node_map::NodeMap;
use crate::rank::Rank;
use crate::store::Store;
use crate::sys::thread;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar};
use std::time::{Duration, Instant};

/// Poll interval for failures of the group while a rank leaves. Also how long a message waits
/// before its rank asks the peer whether a rejection still holds.
pub(super) const INTERNODE_POLL: Duration = Duration::from_millis(20);
/// Maximum time that a leaving rank waits until peers have read all its frames, and again until the
/// connections have ended. Longer in unit tests, which check that ranks leave without this wait.
const LINK_CLOSE_TIMEOUT: Duration = Duration::from_secs(if cfg!(test) { 5 } else { 1 });
/// The same for acknowledgements, if threads wait for messages, which end only after that.
const FLUSH_GRACE: Duration = Duration::from_millis(50);

/// The ranks of other nodes, and how messages reach them.
pub struct InternodeLinks {
    /// The links that carry the frames.
    pub links: Arc<Links>,
    /// The store through which two ranks find each other.
    pub store: Arc<dyn Store>,
    /// The node of each rank.
    pub node_map: Arc<NodeMap>,
    /// This rank.
    pub me: Rank,
    /// Prefix of the names of links, the same on all ranks of this group and of no other group.
    pub prefix: String,
    /// Notifies threads that wait for peers or for other threads.
    pub changed: Condvar,
}

impl InternodeLinks {
    /// Returns the ranks of other nodes.
    pub(super) fn ranks(&self) -> impl Iterator<Item = Rank> {
        let node = self.node_map.node_of(self.me);
        (0..self.node_map.size() as u32)
            .map(Rank)
            .filter(move |&rank| self.node_map.node_of(rank) != node)
    }
}

impl MessageTable {
    /// Returns the ranks of other nodes with which this rank connects or is connected.
    pub(super) fn met(&self) -> impl Iterator<Item = &WireLink> {
        self.peers
            .iter()
            .filter_map(|peer| peer.wire())
            .filter(|wire| wire.phase != LinkPhase::Idle)
    }

    /// Returns the ranks of other nodes with which this rank is not connected.
    pub(super) fn unmet(&self) -> Vec<Rank> {
        let wires = self.peers.iter().filter_map(|peer| peer.wire());
        wires.filter(|wire| wire.phase == LinkPhase::Idle).map(|wire| wire.peer).collect()
    }
}

impl Messages {
    /// Makes this rank connect with `peer`, of another node, once both want a link.
    pub(super) fn meet_once(self: &Arc<Self>, state: &mut MessageTable, peer: Rank) -> Result<()> {
        if state.wire(peer).is_some_and(|wire| wire.phase == LinkPhase::Idle) {
            self.spawn(state, "symm-p2p-peer", move |this, far| this.drive_peer(far, peer))?;
            if let Some(wire) = state.wire(peer) {
                wire.phase = LinkPhase::Connecting;
            }
        }
        Ok(())
    }

    pub(super) fn spawn(
        self: &Arc<Self>,
        state: &mut MessageTable,
        name: &str,
        work: impl FnOnce(&Arc<Self>, &InternodeLinks) + Send + 'static,
    ) -> Result<()> {
        let this = Arc::clone(self);
        let thread = thread::spawn(name, None, move || {
            let Some(far) = this.internode.get() else { return };
            let panicked = catch_unwind(AssertUnwindSafe(|| work(&this, far))).err();
            if let Some(panic) = panicked {
                this.health.fail(Error::panicked(&far.node_map.describe(far.me), &*panic));
            }
            this.lock().threads.retain(|&thread| thread != std::thread::current().id());
            far.changed.notify_all();
        });
        state.threads.push(thread?.thread().id());
        Ok(())
    }

    /// Closes the connections, and waits for at most `limit` until they have ended.
    pub(super) fn disconnect(&self, far: &InternodeLinks, limit: Duration) {
        let peers: Vec<Rank> = self.lock().met().map(|wire| wire.peer).collect();
        far.changed.notify_all();
        if !peers.is_empty() {
            let links = Arc::clone(&far.links);
            thread::aside("symm-message-end", limit, move || {
                peers.into_iter().for_each(|peer| links.close(peer))
            });
        }
    }

    /// Passes queued transfers to the backends. The caller does not hold the lock.
    pub(super) fn flush(&self) {
        let lost = self.internode.get().map_or_else(Vec::new, |far| far.links.flush());
        lost.into_iter().for_each(|(peer, error)| self.fail_peer(peer, error));
    }

    /// Writes the acknowledgements that wait for space in rings, because the sends of peers end
    /// with them, until `deadline`.
    fn flush_acknowledgements(&self, deadline: Instant) {
        loop {
            let mut state = self.lock();
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() || !state.has_acknowledgement(&self.control) {
                return;
            }
            self.advance(&mut state);
            self.run_completions(state);
            self.control.sleep(left, || {
                let state = self.lock();
                state.has_work() || !state.has_acknowledgement(&self.control)
            });
        }
    }

    /// Prepares that this rank leaves: writes the acknowledgements for ranks of its node and
    /// notifies ranks of other nodes. Returns once they have read all its frames, or after `limit`.
    pub fn say_goodbye(&self, limit: Duration) {
        let now = Instant::now();
        let deadline = now + limit.min(LINK_CLOSE_TIMEOUT);
        // Threads that wait for messages must soon be released.
        let waited_for = !self.lock().open.is_empty();
        self.flush_acknowledgements(if waited_for { now + FLUSH_GRACE } else { deadline });
        let Some(far) = self.internode.get().filter(|_| self.health.error().is_none()) else {
            return;
        };
        let mut state = self.lock();
        if state.closed.is_some() {
            return;
        }
        state.shutting_down = true;
        for wire in state.peers.iter_mut().filter_map(|peer| peer.wire_mut()) {
            // If this fails, the connection has just ended, and no peer would read the frame.
            let _ = wire.send_goodbye();
        }
        drop(state);
        self.flush();
        let mut state = self.lock();
        while state.met().any(WireLink::is_unread) && state.closed.is_none() {
            let Some(left) = deadline.checked_duration_since(Instant::now()) else { break };
            state = unpoisoned(far.changed.wait_timeout(state, left.min(INTERNODE_POLL))).0;
        }
    }

    /// Ends the connections and their threads.
    pub(super) fn leave_internode(&self, far: &InternodeLinks) {
        self.disconnect(far, LINK_CLOSE_TIMEOUT);
        let deadline = Instant::now() + LINK_CLOSE_TIMEOUT;
        let mut state = self.lock();
        // One of these threads may hold the last reference to the group.
        while state.threads.iter().any(|&thread| thread != std::thread::current().id()) {
            let Some(left) = deadline.checked_duration_since(Instant::now()) else { break };
            state = unpoisoned(far.changed.wait_timeout(state, left)).0;
        }
    }
}
