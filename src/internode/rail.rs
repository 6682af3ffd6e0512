//! Rail: a backend of torch between the ranks with the same local rank on all nodes.

use crate::coll::call::Span;
use crate::coll::two_level::step::RailOp;
use crate::error::Result;
use crate::sys::random;
use serde::{Deserialize, Serialize};
use std::fmt::Display;
use std::time::Duration;

/// A random id that all ranks of a group share. The keys through which its backends meet contain it, so no rank reads
/// keys that an earlier group of the same name has left in the store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Life(u64);

impl Life {
    /// Number of bytes of its encoding.
    pub(super) const BYTES: usize = 8;

    /// Creates a new id, which rank 0 sends to the other ranks.
    pub(super) fn new() -> Result<Self> {
        random::bytes().map(Self::from_bytes)
    }

    pub(super) fn from_bytes(bytes: [u8; Self::BYTES]) -> Self {
        Self(u64::from_le_bytes(bytes))
    }

    pub(super) fn to_bytes(self) -> [u8; Self::BYTES] {
        self.0.to_le_bytes()
    }

    /// Returns the name, in this group, of the backend `which` of this `kind`.
    pub(super) fn name(self, kind: &str, which: impl Display) -> String {
        format!("{kind}/{:016x}/{which}", self.0)
    }
}

/// An inter-node backend. It moves bytes between the ranks' staging and does not interpret them. Several transfers may
/// be pending; all ranks of the rail start them in the same order.
///
/// With some backends, lengths that do not match end the process, so the caller of `start` must know that they match.
pub trait Rail: Send + Sync {
    /// Connects this rank, on node `node` of `nodes`, to the ranks of the other nodes, once they call it with this
    /// `name`.
    fn make(&self, name: &str, node: usize, nodes: usize, timeout: Duration) -> Result<()>;

    /// Ends a `make` that waits on another thread for the other nodes. It may continue while a connection is being
    /// made.
    fn give_up(&self) {}

    /// Returns the address of the staging, which has at least `bytes` bytes. Its content is lost if it had fewer
    /// before. The backend owns it, so that an abandoned transfer cannot write into freed memory. Must be called while
    /// no transfer is pending.
    fn staging(&self, bytes: usize) -> Result<usize>;

    /// Starts `transfer`, whose bytes no other pending transfer writes; addresses count from the staging's first byte.
    fn start(&self, transfer: &RailOp<Span>, timeout: Duration) -> Result<()>;

    /// Waits for at most `limit` for the oldest pending transfer; returns true, and removes it, if it has ended. The
    /// error is the backend's.
    fn wait(&self, limit: Duration) -> Result<bool>;
}
