//! Rail: a backend of torch, between ranks of one local index on all hosts.

use crate::config::Config;
use crate::error::Result;
use crate::sys::random;
use serde::{Deserialize, Serialize};
use std::fmt::Display;
use std::time::Duration;

/// Transfer of bytes between the ranks of a rail. Places are offsets in the rail's staging.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Transfer<'a> {
    /// `each` bytes at `from` of every host, one behind the other, reach `to`.
    AllGather {
        /// Place of the own bytes.
        from: usize,
        /// Length of one host's.
        each: usize,
        /// Place of everybody's.
        to: usize,
    },
    /// `sent[h]` bytes of those at `from` go to host `h`; `received[h]` bytes of host `h` come to `to`; each in the order of hosts.
    AllToAll {
        /// Place of what is sent.
        from: usize,
        /// Lengths of what is sent.
        sent: &'a [usize],
        /// Place of what is received.
        to: usize,
        /// Lengths of what is received.
        received: &'a [usize],
    },
    /// `bytes` bytes at `at` of host `root` reach the same place on all hosts.
    Broadcast {
        /// Host that has them.
        root: usize,
        /// Place of the bytes.
        at: usize,
        /// Number of the bytes.
        bytes: usize,
    },
}

impl Transfer<'_> {
    /// Bytes that the rank of `host`, of `hosts`, sends to others and receives from them.
    pub(super) fn bytes(&self, host: usize, hosts: usize) -> (usize, usize) {
        let others = hosts.saturating_sub(1);
        let without = |lengths: &[usize]| lengths.iter().sum::<usize>() - lengths.get(host).copied().unwrap_or(0);
        match *self {
            Self::AllGather { each, .. } => (others * each, others * each),
            Self::AllToAll { sent, received, .. } => (without(sent), without(received)),
            Self::Broadcast { root, bytes, .. } if root == host => (others * bytes, 0),
            Self::Broadcast { bytes, .. } => (0, bytes),
        }
    }
}

/// A random id that all ranks of a group share. Keys by which its backends meet contain it, so no rank reads what an earlier group of the
/// same name has left in the store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Life(u64);

impl Life {
    /// Length of its bytes.
    pub(super) const BYTES: usize = 8;

    /// A new one, which rank 0 sends to the other ranks.
    pub(super) fn new() -> Result<Self> {
        random::bytes().map(Self::from_bytes)
    }

    pub(super) fn from_bytes(bytes: [u8; Self::BYTES]) -> Self {
        Self(u64::from_le_bytes(bytes))
    }

    pub(super) fn to_bytes(self) -> [u8; Self::BYTES] {
        self.0.to_le_bytes()
    }

    /// The name, in this group, of the backend `which` of this `kind`.
    pub(super) fn name(self, kind: &str, which: impl Display) -> String {
        format!("{kind}/{:016x}/{which}", self.0)
    }
}

/// Keys in the store of the group by which the rank on `host` tells the others of its rail `name` where it can be reached: Gloo's, one for
/// each of its interfaces. Those of a link are alike.
pub(super) fn keys(name: &str, host: usize) -> impl Iterator<Item = String> {
    let interfaces = Config::get().gloo_interface.as_ref().map_or(1, |names| names.split(',').count());
    (0..interfaces).map(move |interface| format!("{name}/{interface}/{host}"))
}

/// Backend between hosts. It moves bytes between the ranks' staging and knows nothing of what they mean. Several transfers may be under
/// way; all ranks of the rail start them in the same order.
///
/// Lengths that do not fit each other may end the process with some backends: whoever starts a transfer has made sure of them.
pub trait Rail: Send + Sync {
    /// Connects this rank, on the `host`th of `hosts`, with those of the other hosts, once they call it with this `name`.
    fn make(&self, name: &str, host: usize, hosts: usize, timeout: Duration) -> Result<()>;

    /// Ends a `make` that waits on another thread for the other hosts. It may go on while a connection is being made.
    fn give_up(&self) {}

    /// Address of the staging, which has at least `bytes` bytes; what was there is lost where there were fewer before. The backend owns it:
    /// a transfer that was given up still finds it. To be called while no transfer is under way.
    fn staging(&self, bytes: usize) -> Result<usize>;

    /// Begins `transfer`, whose bytes no other that is under way writes.
    fn start(&self, transfer: &Transfer<'_>, timeout: Duration) -> Result<()>;

    /// Whether the oldest transfer that is under way has ended, after at most `limit`; then it is no longer. The error is the backend's.
    fn wait(&self, limit: Duration) -> Result<bool>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_stays_on_the_host_is_not_counted() {
        assert_eq!(Transfer::AllGather { from: 0, each: 8, to: 8 }.bytes(1, 3), (16, 16));
        assert_eq!(Transfer::AllToAll { from: 0, sent: &[1, 2, 4], to: 8, received: &[8, 16, 32] }.bytes(1, 3), (5, 40));
        assert_eq!(Transfer::Broadcast { root: 1, at: 0, bytes: 8 }.bytes(1, 3), (16, 0));
        assert_eq!(Transfer::Broadcast { root: 1, at: 0, bytes: 8 }.bytes(2, 3), (0, 8));
    }
}
