//! The time limit of a join.

use rustix::time::{ClockId, clock_gettime};
use std::time::{Duration, Instant};

/// When this call started and must end.
#[derive(Clone, Copy, Debug)]
pub(super) struct JoinDeadline {
    pub(super) started: Instant,
    pub(super) deadline: Instant,
    /// `started` on the clock that all processes of the node share: nanoseconds since boot.
    pub(super) started_at: u64,
}

impl JoinDeadline {
    pub(super) fn start(timeout: Duration) -> Self {
        // `Instant` cannot hold any duration; a year stands for "no limit".
        const YEAR: Duration = Duration::from_secs(365 * 24 * 3600);
        let started = Instant::now();
        Self { started, deadline: started + timeout.min(YEAR), started_at: now_since_boot() }
    }

    pub(super) fn remaining(&self) -> Duration {
        self.deadline.saturating_duration_since(Instant::now())
    }

    pub(super) fn waited(&self) -> f64 {
        self.started.elapsed().as_secs_f64()
    }
}

pub(super) fn now_since_boot() -> u64 {
    let now = clock_gettime(ClockId::Boottime);
    now.tv_sec.unsigned_abs() * 1_000_000_000 + now.tv_nsec.unsigned_abs()
}
