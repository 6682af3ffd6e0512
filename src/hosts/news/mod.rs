//! Out-of-band messages between nodes: heartbeats, failures, departures and rejected calls.
//!
//! The first two ranks of every node, its [node leaders](mod@speaker), connect to the leaders of the first node, the
//! hubs. A leader that learns of an event sends it once over each of its connections, so the event reaches every
//! leader. `docs/design/several-hosts.md` has a drawing, and says which rank notices which failure.
//!
//! - [`frame`](mod@frame), [`connection`](mod@connection): the messages, and their protection against forgery
//! - [`speaker`](mod@speaker): the state of one node leader; [`thread`](mod@thread): the thread that runs it
//! - [`refusals`](mod@refusals): rejected calls in which other ranks wait; [`launches`](mod@launches): calls on CUDA
//!   tensors
//! - [`progress`](mod@progress): which nodes are late for a call
//! - [`meeting`](mod@meeting): how the node leaders connect; [`address`](mod@address): where the hubs listen

mod address;
mod connection;
mod frame;
mod launches;
mod meeting;
mod progress;
mod refusals;
mod speaker;
#[cfg(test)]
mod tests;
mod thread;

use super::header::Header;
use crate::error::Error;
use crate::lock::lock;
pub(super) use meeting::{Meeting, Told};
use std::sync::Mutex;
use std::time::{Duration, Instant};
use thread::Seat;

/// Maximum number of node leaders per node. With two, the node still reports events if one of them dies.
const SPEAKERS: usize = 2;

/// The ranks of this node, as a node leader sees them.
pub(super) trait Host: Send + Sync {
    /// Returns the first failure of the group on this node, including a death that no call has met yet.
    fn failure(&self) -> Option<Error>;

    /// Fails the group on this node with `error`, unless it has failed already.
    fn fail(&self, error: Error);

    /// Returns the call that this rank is in, if any.
    fn waiting(&self) -> Option<Waiting> {
        None
    }

    /// Returns where this rank last rejected a call; `None` if it never has.
    fn refused(&self) -> Option<Place> {
        None
    }

    /// Records the names of the `hosts` that are late for this call, in which this rank waits.
    fn note_late(&self, _call: u64, _hosts: String) {}

    /// Returns the calls on CUDA tensors that this rank has launched since the last query, if this rank reports them.
    fn launched(&self) -> Vec<Header> {
        Vec::new()
    }

    /// Returns the local ranks that have left, with the text that says how.
    fn departures(&self) -> Vec<(usize, String)>;
}

/// The point at which a rank has rejected a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Place {
    /// Number of calls that the rank had made before.
    pub(super) calls: u64,
    /// Number of calls that it has rejected since then, including this one.
    pub(super) times: u32,
}

/// A call that has started.
#[derive(Clone, Copy, Debug)]
pub(super) struct Waiting {
    /// Its number in the group.
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
pub(super) struct Times {
    /// Heartbeat interval.
    pub(super) beat: Duration,
    /// Number of heartbeats that a node may miss.
    pub(super) beats: u32,
    /// Grace period after a connection has ended, in which another connection may deliver the reason.
    pub(super) grace: Duration,
    /// Timeout for a caller to identify itself.
    pub(super) hello: Duration,
}

impl Default for Times {
    fn default() -> Self {
        Self { beat: Duration::from_secs(1), beats: 5, grace: Duration::from_millis(100), hello: Duration::from_secs(5) }
    }
}

/// This rank's part in the out-of-band messages of a group, until it is dropped. It is empty on a rank that is not a
/// node leader: such a rank sends nothing, and its node's shared memory reports all failures to it.
pub(super) struct News(Mutex<Option<Seat>>);

impl News {
    /// Notifies all other nodes, once, that the group has failed on this node.
    pub(super) fn tell(&self, failure: &Error) {
        self.with(|speaker| speaker.tell(failure));
    }

    /// Notifies all other nodes that this rank has rejected a call at `place`, because of `text`.
    pub(super) fn refuse(&self, place: Place, text: &str) {
        self.with(|speaker| speaker.tell_refused(speaker.me, place, text));
    }

    /// Notifies all other nodes that this rank makes the call of this number.
    pub(super) fn resume(&self, call: u64) {
        self.with(|speaker| speaker.tell_resumed(speaker.me, call));
    }

    /// Returns the names of the nodes that are late for this call, in which this rank waits on its rail, if they are
    /// known.
    pub(super) fn late(&self, call: u64) -> Option<String> {
        self.with(|speaker| speaker.late(call)).flatten()
    }

    /// Returns the departure of a rank of another node as an error, if one is known; a rank of local rank `local` is
    /// preferred.
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

    fn with<T>(&self, work: impl FnOnce(&mut speaker::Speaker) -> T) -> Option<T> {
        lock(&self.0).as_ref()?.with(work)
    }
}
