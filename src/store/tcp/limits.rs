//! Limits of one server, so that nobody who reaches it can exhaust its host.

use std::time::Duration;

/// The longest frame, either way: a value of 64 MiB with the longest key.
pub const MAX_FRAME: usize = 64 * 1024 * 1024 + 2 * 64 * 1024;

/// Bounds of a server; the defaults are those of `docs/design/store.md`.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Bytes of keys and values.
    pub stored: usize,
    /// Bytes of long frames that are on their way in or out, all clients together.
    pub moving: usize,
    /// Clients connected at once.
    pub clients: usize,
    /// Connections at once that have not introduced themselves; the oldest goes first.
    pub unidentified: usize,
    /// Time that an unidentified peer may take to introduce itself.
    pub hello: Duration,
    /// Time that a frame may take, from its first byte to its last, or an answer to be taken.
    pub frame: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            stored: 256 * 1024 * 1024,
            moving: 256 * 1024 * 1024,
            clients: 16 * 1024,
            unidentified: 1024,
            hello: Duration::from_secs(5),
            frame: Duration::from_secs(60),
        }
    }
}
