//! Limits of one server, so that no client can exhaust its node.

use std::time::Duration;

/// Maximum length of a frame in either direction: a value of 64 MiB with the longest key.
pub const MAX_FRAME: usize = 64 * 1024 * 1024 + 2 * 64 * 1024;

/// Limits of a server; `docs/design/store.md` explains the defaults.
#[derive(Clone, Debug)]
pub struct ConnectionLimits {
    /// Maximum size of all keys and values.
    pub stored: usize,
    /// Maximum size of all long frames in transit, over all clients.
    pub moving: usize,
    /// Maximum number of connected clients.
    pub clients: usize,
    /// Maximum number of connections that have not authenticated; the oldest is closed first.
    pub unidentified: usize,
    /// How long an unidentified peer may take to authenticate.
    pub hello: Duration,
    /// How long a frame may take from its first byte to its last, and how long a client may take to
    /// receive an answer.
    pub frame: Duration,
}

impl Default for ConnectionLimits {
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
