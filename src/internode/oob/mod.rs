//! Out-of-band messages between nodes: heartbeats, failures, departures and rejected calls.
//!
//! The first two ranks of every node, its [node leaders](mod@node_leader), connect to the leaders
//! of the first node, the hubs. A leader that learns of an event sends it once over each of its
//! connections, so the event reaches every leader. `docs/design/multi-node.md` has a drawing, and
//! says which rank notices which failure.
//!
//! - [`frame`](mod@frame), [`connection`](mod@connection): the messages, and their protection
//!   against forgery
//! - [`node_leader`](mod@node_leader): the state of one node leader; [`thread`](mod@thread): the
//!   thread that runs it
//! - [`rejections`](mod@rejections): rejected calls in which other ranks wait;
//!   [`launch_history`](mod@launch_history): calls on CUDA tensors
//! - [`progress`](mod@progress): which nodes are late for a call
//! - [`connect`](mod@connect): how the node leaders connect; [`address`](mod@address): where the
//!   hubs listen

mod address;
mod connect;
mod connection;
mod frame;
mod launch_history;
mod node_leader;
mod progress;
mod rejections;
#[cfg(test)]
mod tests;
mod thread;

use super::header::CallHeader;
use crate::error::Error;
use crate::lock::lock;
pub(super) use connect::{HubAnnouncement, OobConnector};
use std::sync::Mutex;
use std::time::{Duration, Instant};
use thread::LeaderRegistration;

/// Maximum number of node leaders per node. With two, the node still reports events if one of them
/// dies.
pub(super) const LEADERS_PER_NODE: usize = 2;

/// The ranks of this node, as a node leader sees them.
pub(super) trait LocalNode: Send + Sync {
    /// Returns the first failure of the group on this node, including a death that no call has
    /// noticed yet.
    fn failure(&self) -> Option<Error>;

    /// Fails the group on this node with `error`, unless it has failed already.
    fn fail(&self, error: Error);

    /// Returns the call that this rank is in, if any.
    fn waiting(&self) -> Option<BlockedCall> {
        None
    }

    /// Returns where this rank last rejected a call; `None` if it never has.
    fn rejected(&self) -> Option<CallPosition> {
        None
    }

    /// Records the names of the `nodes` that are late for this call, in which this rank waits.
    fn note_late(&self, _call: u64, _nodes: String) {}

    /// Returns the calls on CUDA tensors that this rank has launched since the last query, if this
    /// rank reports them.
    fn launched(&self) -> Vec<CallHeader> {
        Vec::new()
    }

    /// Returns the local ranks that have left, with the text that says how.
    fn departures(&self) -> Vec<(usize, String)>;
}

/// The point at which a rank has rejected a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct CallPosition {
    /// Number of calls that the rank had made before.
    pub(super) calls: u64,
    /// Number of calls that it has rejected since then, including this one.
    pub(super) times: u32,
    /// Number of `calls` on CPU tensors, which [`BlockedCall`] counts.
    pub(super) on_host: u64,
}

/// A call that has started.
#[derive(Clone, Copy, Debug)]
pub(super) struct BlockedCall {
    /// Its number among the group's collectives on CPU tensors.
    pub(super) number: u64,
    /// Its name.
    pub(super) name: &'static str,
    /// When it started.
    pub(super) since: Instant,
    /// When its present phase started.
    pub(super) phase_since: Instant,
    /// True while the call waits on its rail, false while it waits within its node.
    pub(super) on_rail: bool,
}

/// The intervals and timeouts of a node leader.
#[derive(Clone, Copy, Debug)]
pub(super) struct OobTimeouts {
    /// Heartbeat interval.
    pub(super) heartbeat_interval: Duration,
    /// Number of heartbeats that a node may miss.
    pub(super) max_missed_heartbeats: u32,
    /// Grace period after a connection has ended, in which another connection may deliver the
    /// reason.
    pub(super) disconnect_grace: Duration,
    /// Timeout for a caller to identify itself.
    pub(super) handshake_timeout: Duration,
}

impl Default for OobTimeouts {
    fn default() -> Self {
        Self {
            heartbeat_interval: Duration::from_secs(1),
            max_missed_heartbeats: 5,
            disconnect_grace: Duration::from_millis(100),
            handshake_timeout: Duration::from_secs(5),
        }
    }
}

/// This rank's part in the out-of-band messages of a group, until it is dropped. It is empty on a
/// rank that is not a node leader: such a rank sends nothing, and its node's shared memory reports
/// all failures to it.
pub(super) struct OobEndpoint(Mutex<Option<LeaderRegistration>>);

impl OobEndpoint {
    /// Notifies all other nodes, once, that the group has failed on this node.
    pub(super) fn broadcast_failure(&self, failure: &Error) {
        self.with(|speaker| speaker.broadcast_failure(failure));
    }

    /// Notifies all other nodes that this rank has rejected a call at `place`, because of `text`.
    pub(super) fn broadcast_rejection(&self, place: CallPosition, text: &str) {
        self.with(|speaker| speaker.broadcast_rejection(speaker.me, place, text));
    }

    /// Notifies all other nodes that this rank makes the call of this number.
    pub(super) fn resume(&self, call: u64) {
        self.with(|speaker| speaker.broadcast_resumed(speaker.me, call));
    }

    /// Returns the names of the nodes that are late for collective `call`, in which this rank waits
    /// on its rail. Returns `None` if this rank does not know which nodes are late.
    pub(super) fn late(&self, call: u64) -> Option<String> {
        self.with(|speaker| speaker.late(call)).flatten()
    }

    /// Returns the departure of a rank of another node as an error, if one is known; a rank with
    /// local rank `local` is preferred.
    pub(super) fn departure(&self, local: usize) -> Option<Error> {
        self.with(|speaker| speaker.departure(local)).flatten()
    }

    /// Notifies all other nodes that this rank has left, and closes its connections.
    pub(super) fn leave(&self, how: &str) {
        let seat = lock(&self.0).take();
        if let Some(seat) = seat {
            seat.with(|speaker| speaker.leave(how));
        }
    }

    fn with<T>(&self, work: impl FnOnce(&mut node_leader::NodeLeader) -> T) -> Option<T> {
        lock(&self.0).as_ref()?.with(work)
    }
}
