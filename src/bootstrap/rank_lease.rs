//! A rank's membership in a group that has formed: while the group lives, other processes that
//! claim the same rank are rejected.
//!
//! Joining removes all records, so a membership has its own key, which stays. Only groups whose
//! names recur, such as the default group, keep memberships, so the number of keys does not grow. A
//! key counts while a process listens on the socket named in it. The listener never answers, and it
//! closes with the group or with the process, however the process ends.

use super::Attempt;
use crate::error::{Error, Result};
use crate::sys::fork::CloseInChild;
use crate::sys::node_id::NodeId;
use crate::sys::process::{self, ProcessId};
use crate::sys::required::Required;
use crate::sys::{random, socket};
use rustix::fd::{AsFd, OwnedFd};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use std::time::{Duration, Instant};

/// How long to wait for a membership to be released: ranks leave one after another, and some may
/// return under other numbers.
const LEASE_RELEASE_TIMEOUT: Duration = Duration::from_millis(500);
const LEASE_POLL: Duration = Duration::from_millis(20);

/// The value of a membership's key in the store.
#[derive(Debug, Serialize, Deserialize)]
struct LeaseKey {
    node: NodeId,
    pid: u32,
    start_time: u64,
    socket: String,
}

/// A membership, held until it is dropped.
#[derive(Debug)]
pub struct RankLease {
    name: String,
    /// Keeps the listener out of forked children, which do not hold their parent's membership.
    _unshared: Option<CloseInChild>,
    _listener: OwnedFd,
}

impl RankLease {
    pub(super) fn take(attempt: &Attempt<'_>) -> Result<Self> {
        let name = random::name("symm-membership-")?;
        let listener = socket::listen_at(&name, 1)
            .map_err(|errno| attempt.refused(Required::Listen, errno))?;
        Ok(Self { name, _unshared: CloseInChild::new(listener.as_fd()), _listener: listener })
    }

    /// Publishes the membership in the store. Best effort, because the group has formed.
    pub(super) fn announce(&self, attempt: &Attempt<'_>) {
        let ProcessId { pid, start_time } = attempt.own;
        let held =
            LeaseKey { node: attempt.node.clone(), pid, start_time, socket: self.name.clone() };
        let written = serde_json::to_vec(&held)
            .map_err(|error| Error::internal(error.to_string()))
            .and_then(|bytes| attempt.store.set(&key(attempt), &bytes));
        if let Err(error) = written {
            log::warn!(
                "{}: its membership in {} could not be stored: {error}",
                attempt.me(),
                attempt.group()
            );
        }
    }
}

fn key(attempt: &Attempt<'_>) -> String {
    format!("{}/membership", attempt.spec.rank)
}

/// Returns once no other process holds this rank's membership. Fails if a process still holds it
/// after [`LEASE_RELEASE_TIMEOUT`]; without `wait`, fails at once.
pub(super) fn reject_taken(attempt: &Attempt<'_>, wait: bool) -> Result<()> {
    let give_up = Instant::now() + LEASE_RELEASE_TIMEOUT.min(attempt.clock.remaining());
    loop {
        let Some(pid) = holder(attempt)? else { return Ok(()) };
        if !wait || Instant::now() >= give_up {
            return Err(attempt.twice(pid, ""));
        }
        attempt.check_interrupt()?;
        std::thread::sleep(LEASE_POLL);
    }
}

/// Returns the process that holds this rank's membership, if it is another process.
fn holder(attempt: &Attempt<'_>) -> Result<Option<u32>> {
    let key = key(attempt);
    if !attempt.store.check(&[&key])? {
        return Ok(None);
    }
    // Another version or another program wrote this value, which is not a reason to fail.
    let Ok(held) = serde_json::from_slice::<LeaseKey>(
        &attempt.store.get(&key, Some(attempt.clock.remaining()))?,
    ) else {
        return Ok(None);
    };
    let process = ProcessId { pid: held.pid, start_time: held.start_time };
    // The state of a process on another node is unknown, and joining rejects such a process later.
    // A process may make its group again before it has left the old one.
    if held.node != attempt.node || process == attempt.own {
        return Ok(None);
    }
    let pidfd = process::open(process).map_err(|errno| attempt.refused(Required::Watch, errno))?;
    if pidfd.is_none_or(|pidfd| process::ended(&pidfd)) {
        return Ok(None);
    }
    match socket::connect_to(&held.socket) {
        // `AGAIN` also means that a process listens: connections of earlier checks fill its queue.
        Ok(_) | Err(Errno::AGAIN) => Ok(Some(held.pid)),
        Err(Errno::CONNREFUSED | Errno::NOENT) => Ok(None),
        Err(errno) => Err(attempt.refused(Required::Connect, errno)),
    }
}
