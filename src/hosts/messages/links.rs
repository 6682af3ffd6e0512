//! Links: backends of two ranks each, on different hosts.

use crate::error::Result;
use crate::rank::Rank;
use std::time::Duration;

/// Lane of a link. What is sent on one is received there in the same order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lane {
    /// Frames, of one length.
    Frame = 0,
    /// The rest of short messages.
    Short = 1,
    /// Pieces of long messages.
    Piece = 2,
}

/// Backends of this rank and one peer each. They move bytes between staging of their own and know nothing of what these mean.
///
/// Lengths that do not fit each other may end the process with some backends: whoever listens has made sure of them. Nothing but `make` and
/// `wait` waits for the peer.
pub trait Links: Send + Sync {
    /// Connects this rank with `peer`, which makes a link of this `name` at the same time; `second` is true for one of the two.
    fn make(&self, peer: Rank, name: &str, second: bool, timeout: Duration) -> Result<()>;

    /// Sends a copy of `frame`, and one of `payload` on `lane` unless it is empty.
    fn send(&self, peer: Rank, frame: &[u8], lane: Lane, payload: &[u8]) -> Result<()>;

    /// The first `sends` calls of `send` have reached the peer: their staging is needed no longer.
    fn confirm(&self, peer: Rank, sends: u64);

    /// Makes room for the next `bytes` bytes that the peer sends on `lane`.
    fn listen(&self, peer: Rank, lane: Lane, bytes: usize) -> Result<()>;

    /// Waits for the oldest bytes that are listened for on `lane`; false once the link has been closed.
    fn wait(&self, peer: Rank, lane: Lane) -> Result<bool>;

    /// Copies what `wait` has waited for, and ends listening for it.
    fn take(&self, peer: Rank, lane: Lane, into: &mut [u8]) -> Result<()>;

    /// Ends every wait, and the connection. Without effect where there is none.
    fn close(&self, peer: Rank);
}
