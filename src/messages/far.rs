//! Far: what messages with ranks of other hosts need, and the threads that they take.

use super::links::Links;
use super::wire::{Phase, Wire};
use super::{Messages, State};
use crate::error::{Error, Result};
use crate::host_map::HostMap;
use crate::lock::unpoisoned;
use crate::rank::Rank;
use crate::store::Store;
use crate::sys::thread;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar};
use std::time::{Duration, Instant};

/// Time between two looks at the group while a rank leaves, and after which a message asks whether a refusal stands.
pub(super) const LOOK: Duration = Duration::from_millis(20);
/// Time that leaving waits for peers to read what was sent, and again for connections to end.
const RELEASE: Duration = Duration::from_secs(1);

/// The ranks of other hosts, and how messages reach them.
pub struct Far {
    /// Carry the frames.
    pub links: Arc<dyn Links>,
    /// Store through which two ranks meet.
    pub store: Arc<dyn Store>,
    /// Which ranks are on which host.
    pub layout: Arc<HostMap>,
    /// This rank.
    pub me: Rank,
    /// Prefix of the names of links, the same on all ranks of this group and of no other.
    pub prefix: String,
    /// Threads sleep on it that wait for peers or threads.
    pub changed: Condvar,
}

impl Far {
    /// Ranks of other hosts.
    pub(super) fn ranks(&self) -> impl Iterator<Item = Rank> {
        let host = self.layout.host(self.me);
        (0..self.layout.size() as u32).map(Rank).filter(move |&rank| self.layout.host(rank) != host)
    }
}

impl State {
    /// Ranks of other hosts with which this one connects or is connected.
    pub(super) fn met(&self) -> impl Iterator<Item = &Wire> {
        self.peers.iter().filter_map(|peer| peer.wire()).filter(|wire| wire.phase != Phase::Idle)
    }

    /// Ranks of other hosts that this one is not connected with.
    pub(super) fn unmet(&self) -> Vec<Rank> {
        let wires = self.peers.iter().filter_map(|peer| peer.wire());
        wires.filter(|wire| wire.phase == Phase::Idle).map(|wire| wire.peer).collect()
    }
}

impl Messages {
    /// Sees to it that this rank connects with `peer`, of another host, once both want that.
    pub(super) fn meet_once(self: &Arc<Self>, state: &mut State, peer: Rank) -> Result<()> {
        if state.wire(peer).is_some_and(|wire| wire.phase == Phase::Idle) {
            self.spawn(state, "symm-message", move |this, far| this.attend_to(far, peer))?;
            if let Some(wire) = state.wire(peer) {
                wire.phase = Phase::Meeting;
            }
        }
        Ok(())
    }

    pub(super) fn spawn(
        self: &Arc<Self>,
        state: &mut State,
        name: &str,
        work: impl FnOnce(&Arc<Self>, &Far) + Send + 'static,
    ) -> Result<()> {
        let this = Arc::clone(self);
        let thread = thread::spawn(name, None, move || {
            let Some(far) = this.far.get() else { return };
            let panicked = catch_unwind(AssertUnwindSafe(|| work(&this, far))).err();
            if let Some(panic) = panicked {
                this.health.fail(Error::panicked(&far.layout.describe(far.me), &*panic));
            }
            this.lock().threads.retain(|&thread| thread != std::thread::current().id());
            far.changed.notify_all();
        });
        state.threads.push(thread?.thread().id());
        Ok(())
    }

    /// Closes the connections, and waits for at most `limit` until they have ended.
    pub(super) fn disconnect(&self, far: &Far, limit: Duration) {
        let peers: Vec<Rank> = self.lock().met().map(|wire| wire.peer).collect();
        far.changed.notify_all();
        if !peers.is_empty() {
            let links = Arc::clone(&far.links);
            thread::aside("symm-message-end", limit, move || peers.into_iter().for_each(|peer| links.close(peer)));
        }
    }

    /// Passes to the backends what was queued for ranks of other hosts. The caller does not hold the lock.
    pub(super) fn flush(&self) {
        let lost = self.far.get().map_or_else(Vec::new, |far| far.links.flush());
        lost.into_iter().for_each(|(peer, error)| self.lose(peer, error));
    }

    /// Says to ranks of other hosts that this one leaves, and returns once they have read what was sent, or `limit` has passed.
    pub fn say_goodbye(&self, limit: Duration) {
        let Some(far) = self.far.get().filter(|_| self.health.error().is_none()) else { return };
        let deadline = Instant::now() + limit.min(RELEASE);
        let mut state = self.lock();
        if state.closed.is_some() {
            return;
        }
        state.leaving = true;
        for wire in state.peers.iter_mut().filter_map(|peer| peer.wire_mut()) {
            // A connection that has just ended has nobody who reads.
            let _ = wire.say_bye();
        }
        drop(state);
        self.flush();
        let mut state = self.lock();
        while state.met().any(Wire::is_unread) && state.closed.is_none() {
            let Some(left) = deadline.checked_duration_since(Instant::now()) else { break };
            state = unpoisoned(far.changed.wait_timeout(state, left.min(LOOK))).0;
        }
    }

    /// Ends the connections and their threads.
    pub(super) fn leave_far(&self, far: &Far) {
        self.disconnect(far, RELEASE);
        let deadline = Instant::now() + RELEASE;
        let mut state = self.lock();
        // A completion may drop the last handle of the group on one of these threads.
        while state.threads.iter().any(|&thread| thread != std::thread::current().id()) {
            let Some(left) = deadline.checked_duration_since(Instant::now()) else { break };
            state = unpoisoned(far.changed.wait_timeout(state, left)).0;
        }
    }
}
