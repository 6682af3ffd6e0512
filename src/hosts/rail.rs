//! Rail: a backend of torch, between ranks of one local index on all hosts.

use crate::coll::call::Span;
use crate::coll::two_level::step::Transfer;
use crate::error::Result;
use crate::sys::random;
use serde::{Deserialize, Serialize};
use std::fmt::Display;
use std::time::Duration;

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

    /// Begins `transfer`, whose bytes no other that is under way writes; addresses count from the staging's first byte.
    fn start(&self, transfer: &Transfer<Span>, timeout: Duration) -> Result<()>;

    /// Whether the oldest transfer that is under way has ended, after at most `limit`; then it is no longer. The error is the backend's.
    fn wait(&self, limit: Duration) -> Result<bool>;
}
