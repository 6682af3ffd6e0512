//! Pauses between polls of a file, because nothing announces a change.

use crate::error::Result;
use crate::sys::interrupt::Interrupts;
use std::time::{Duration, Instant};

/// Number of first polls that only yield the core, because most answers arrive within microseconds.
const YIELDS: u32 = 60;

const FILE_POLL_MIN: Duration = Duration::from_micros(20);

/// A sequence of growing pauses.
pub(super) struct Backoff {
    yields: u32,
    next: Duration,
    longest: Duration,
    interrupts: Interrupts,
}

impl Backoff {
    pub(super) fn new(longest: Duration) -> Self {
        Self { yields: 0, next: FILE_POLL_MIN, longest, interrupts: Interrupts::new() }
    }

    /// Pauses like [`pause`](Self::pause), and fails if the program has asked to stop waiting.
    pub(super) fn pause_or_stop(&mut self, deadline: Instant) -> Result<()> {
        self.pause(deadline);
        self.interrupts.check()
    }

    /// Returns after the next pause, or at `deadline`.
    pub(super) fn pause(&mut self, deadline: Instant) {
        if self.yields < YIELDS {
            self.yields += 1;
            std::thread::yield_now();
            return;
        }
        std::thread::sleep(self.next.min(deadline.saturating_duration_since(Instant::now())));
        self.next = (self.next * 3 / 2).min(self.longest);
    }
}
