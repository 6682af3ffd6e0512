//! Links: backends of two ranks each, on different hosts.

use crate::error::Result;
use crate::rank::Rank;
use std::time::Duration;

/// Class of traffic on a link. What is sent of one class is received in the same order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Traffic {
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

    /// Sends a copy of `frame`, and one of `payload` of class `traffic` unless it is empty.
    fn send(&self, peer: Rank, frame: &[u8], traffic: Traffic, payload: &[u8]) -> Result<()>;

    /// The first `sends` calls of `send` have reached the peer: their staging is needed no longer.
    fn confirm(&self, peer: Rank, sends: u64);

    /// Makes room for the next `bytes` bytes that the peer sends of class `traffic`.
    fn listen(&self, peer: Rank, traffic: Traffic, bytes: usize) -> Result<()>;

    /// Waits for the oldest bytes of class `traffic` that are listened for; false once the link has been closed.
    fn wait(&self, peer: Rank, traffic: Traffic) -> Result<bool>;

    /// Copies what `wait` has waited for, and ends listening for it.
    fn take(&self, peer: Rank, traffic: Traffic, into: &mut [u8]) -> Result<()>;

    /// Ends every wait, and the connection. Without effect where there is none.
    fn close(&self, peer: Rank);
}
