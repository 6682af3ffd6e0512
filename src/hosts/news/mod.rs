//! News: what the hosts of a group tell each other besides their calls: that they live, what has failed, who has left.
//!
//! The first two ranks of every host, its [speakers](mod@speaker), are connected with those of the first host, the hubs. Whatever one
//! speaker learns, all learn: whoever knows of a failure tells it once to all with whom it is connected. `docs/design/several-hosts.md` has
//! a drawing, and who notices what.
//!
//! - [`frame`](mod@frame), [`connection`](mod@connection): what is said, and how nobody else can say it
//! - [`speaker`](mod@speaker): what one rank knows and tells; [`thread`](mod@thread): when it has its turn
//! - [`refusals`](mod@refusals): calls that a rank has refused and others wait in; [`launches`](mod@launches): calls on CUDA tensors
//! - [`progress`](mod@progress): which hosts have not come to a call
//! - [`meeting`](mod@meeting): how the speakers of a group find each other; [`address`](mod@address): where the hubs listen

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

/// Ranks of each host that speak for it: the second in case the first dies.
const SPEAKERS: usize = 2;

/// The ranks of this host, as a speaker sees them.
pub(super) trait Host: Send + Sync {
    /// The first failure of the group here; a death that no call has met yet is one.
    fn failure(&self) -> Option<Error>;

    /// Fails the group here because of `error`, unless it has failed.
    fn fail(&self, error: Error);

    /// The call that this rank is in, if it is in one.
    fn waiting(&self) -> Option<Waiting> {
        None
    }

    /// Where this rank has refused a call last; `None` if it never has.
    fn refused(&self) -> Option<Place> {
        None
    }

    /// Notes which `hosts`, as messages name them, have not come to the call of this number, in which this rank waits for others.
    fn note_late(&self, _call: u64, _hosts: String) {}

    /// Calls on CUDA tensors that this rank has launched since this was last asked, where it says so.
    fn launched(&self) -> Vec<Header> {
        Vec::new()
    }

    /// Local indices of the ranks that have left, each with how it has.
    fn departures(&self) -> Vec<(usize, String)>;
}

/// Where a rank has refused a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Place {
    /// Calls that it has made before.
    pub(super) calls: u64,
    /// Calls that it has refused since, this one among them.
    pub(super) times: u32,
}

/// A call that has begun.
#[derive(Clone, Copy, Debug)]
pub(super) struct Waiting {
    /// Its number in the group.
    pub(super) number: u64,
    /// Its name.
    pub(super) name: &'static str,
    /// When it began.
    pub(super) since: Instant,
    /// When its present phase began.
    pub(super) phase_since: Instant,
    /// Whether it waits on its rail in that; else inside its host.
    pub(super) on_rail: bool,
}

/// Times of a speaker.
#[derive(Clone, Copy, Debug)]
pub(super) struct Times {
    /// Time between two signs of life.
    pub(super) beat: Duration,
    /// Number of signs that a host may miss.
    pub(super) beats: u32,
    /// Time after the end of a connection in which somebody else may say why.
    pub(super) grace: Duration,
    /// Time that a caller may take to say who it is.
    pub(super) hello: Duration,
}

impl Default for Times {
    fn default() -> Self {
        Self { beat: Duration::from_secs(1), beats: 5, grace: Duration::from_millis(100), hello: Duration::from_secs(5) }
    }
}

/// Part of this rank in the news of a group, until it is dropped. A rank that is no speaker tells nothing and learns what its host does.
pub(super) struct News(Mutex<Option<Seat>>);

impl News {
    /// Tells all other hosts that the group has failed here, unless they have been told.
    pub(super) fn tell(&self, failure: &Error) {
        self.with(|speaker| speaker.tell(failure));
    }

    /// Tells all other hosts that this rank has refused a call at `place`, because of `text`.
    pub(super) fn refuse(&self, place: Place, text: &str) {
        self.with(|speaker| speaker.tell_refused(speaker.me, place, text));
    }

    /// Tells all other hosts that this rank makes the call of this number.
    pub(super) fn resume(&self, call: u64) {
        self.with(|speaker| speaker.tell_resumed(speaker.me, call));
    }

    /// Hosts that have not come to where this rank waits on its rail in this call, as messages name them, if that is known.
    pub(super) fn late(&self, call: u64) -> Option<String> {
        self.with(|speaker| speaker.late(call)).flatten()
    }

    /// Departure of a rank of another host that was told, as an error: that of `local` index rather than others'.
    pub(super) fn departure(&self, local: usize) -> Option<Error> {
        self.with(|speaker| speaker.departure(local)).flatten()
    }

    /// Tells all other hosts that this rank has left, and ends its connections.
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
