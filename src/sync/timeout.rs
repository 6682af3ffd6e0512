//! The time limit of a call.

use std::cell::OnceCell;
use std::time::{Duration, Instant};

/// The time limit of one call.
///
/// All steps of a call borrow one limit, so a call of many steps still ends on time. The clock can
/// start at the first wait: most calls finish without waiting and then never read it.
///
/// # Examples
/// ```
/// use std::time::Duration;
/// use symm::sync::timeout::CallTimeout;
///
/// let limit = CallTimeout::from_first_wait(Duration::from_secs(10));
/// assert!(limit.remaining().is_some()); // the first query starts the clock
/// let over = CallTimeout::from_first_wait(Duration::ZERO);
/// assert!(over.remaining().is_none());
/// ```
#[derive(Debug)]
pub struct CallTimeout {
    started: OnceCell<Instant>,
    timeout: Duration,
}

/// Upper bound on the time after which a call that still waits logs a warning.
const WARN_AFTER: Duration = Duration::from_secs(60);

impl CallTimeout {
    /// Counts the time from the first query, so that a call that never waits does not read the
    /// clock.
    pub fn from_first_wait(timeout: Duration) -> Self {
        Self { started: OnceCell::new(), timeout }
    }

    /// Counts the time from `started`.
    pub fn from(started: Instant, timeout: Duration) -> Self {
        Self { started: OnceCell::from(started), timeout }
    }

    /// Counts the time from now, unless the clock has started already.
    pub fn start(&self) {
        self.started.get_or_init(Instant::now);
    }

    /// Returns the time since the start.
    pub fn elapsed(&self) -> Duration {
        self.started.get_or_init(Instant::now).elapsed()
    }

    /// Returns the remaining time; `None` once the limit has passed.
    pub fn remaining(&self) -> Option<Duration> {
        self.timeout.checked_sub(self.elapsed()).filter(|left| !left.is_zero())
    }

    /// Returns true once min(60 s, half the limit) has passed.
    pub fn should_warn(&self) -> bool {
        self.elapsed() >= WARN_AFTER.min(self.timeout / 2)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // proves P1
    #[test]
    fn warns_at_half_time_after_a_minute_at_most_and_ends_at_the_limit() {
        let after = |waited, timeout| {
            CallTimeout::from(
                Instant::now() - Duration::from_secs(waited),
                Duration::from_secs(timeout),
            )
        };
        assert!(!after(4, 10).should_warn() && after(6, 10).should_warn());
        assert!(!after(55, 1800).should_warn() && after(61, 1800).should_warn());
        assert!(after(6, 10).remaining().is_some());
        let limit =
            CallTimeout::from(Instant::now() - Duration::from_secs(11), Duration::from_secs(10));
        assert_eq!(limit.remaining(), None);
    }

    #[test]
    fn a_clock_that_was_started_counts_the_time_before_the_first_query() {
        let limit = CallTimeout::from_first_wait(Duration::from_secs(10));
        limit.start();
        let started = Instant::now();
        std::thread::sleep(Duration::from_millis(1));
        let waited = started.elapsed();
        limit.start();
        assert!(limit.elapsed() >= waited);
    }
}
