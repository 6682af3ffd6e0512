//! Links: backends of two ranks each, on different nodes.
#![allow(unsafe_code, reason = "staging of backends")]

use crate::config::Config;
use crate::error::{Error, Result};
use crate::rank::Rank;
use std::time::Duration;

/// Class of traffic on a link. What is sent of one class is received in the same order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Traffic {
    /// Frames, with the short messages that are in them.
    Frame = 0,
    /// Pieces of long messages.
    Piece = 1,
}

/// Backends of this rank and one peer each. They move bytes between staging of their own and know nothing of what these mean.
///
/// With some backends the process ends if more bytes arrive than were listened for, so both ends agree on the lengths. Only `make` and `wait`
/// wait for the peer. `send` and `listen` only queue, because messages call them under their lock; `flush` passes the queued transfers to the
/// backend.
pub trait Links: Send + Sync {
    /// Connects this rank with `peer`, which makes a link of this `name` at the same time; `second` is true for one of the two.
    fn make(&self, peer: Rank, name: &str, second: bool, timeout: Duration) -> Result<()>;

    /// Queues copies of `frame` and `payload`: both in one as a frame, or the frame and then the payload as a piece.
    fn send(&self, peer: Rank, frame: &[u8], traffic: Traffic, payload: &[u8]) -> Result<()>;

    /// The first `sends` calls of `send` have reached the peer: their staging is needed no longer.
    fn confirm(&self, peer: Rank, sends: u64);

    /// Queues a receive of the peer's next bytes of class `traffic`: at most `bytes` bytes.
    fn listen(&self, peer: Rank, traffic: Traffic, bytes: usize) -> Result<()>;

    /// Passes what is queued to the backends, in the order in which it was queued for each peer. Returns the links that failed.
    fn flush(&self) -> Vec<(Rank, Error)> {
        Vec::new()
    }

    /// Passes on what is queued for `peer`, and waits for the oldest bytes of class `traffic` that are listened for.
    /// Returns their address, which is valid until they are released, or `None` once the link has been closed.
    fn wait(&self, peer: Rank, traffic: Traffic) -> Result<Option<usize>>;

    /// A frame and its payload have come, `bytes` bytes in all. Told before a receive is complete with them.
    fn came(&self, _peer: Rank, _bytes: usize) {}

    /// Ends listening for what `wait` has waited for last.
    fn release(&self, peer: Rank, traffic: Traffic);

    /// Ends every wait, the connection, and a `make` on another thread or a later one.
    fn close(&self, peer: Rank);
}

/// The oldest bytes of class `traffic` that are listened for, once they are there, as long as the `room` for them; `None` once the link has
/// been closed.
pub(super) fn arrived(links: &dyn Links, peer: Rank, traffic: Traffic, room: usize) -> Result<Option<&[u8]>> {
    let Some(address) = links.wait(peer, traffic)? else { return Ok(None) };
    // SAFETY: `room` bytes of staging were listened for, which nobody writes until they are released.
    Ok(Some(unsafe { std::slice::from_raw_parts(address as *const u8, room) }))
}

/// Keys in the store of the group by which one end of a backend, which has this `place` in it, tells the others where it can be reached:
/// Gloo's, one for each of its interfaces.
pub fn addresses(name: &str, place: usize) -> impl Iterator<Item = String> {
    let interfaces = Config::get().gloo_interface.as_ref().map_or(1, |names| names.split(',').count());
    (0..interfaces).map(move |interface| format!("{name}/{interface}/{place}"))
}
