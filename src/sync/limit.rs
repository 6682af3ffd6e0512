//! How long a call may take.

use std::cell::{Cell, OnceCell};
use std::time::{Duration, Instant};

/// The time limit of one call, and whether its early warning was given.
#[derive(Debug)]
pub struct Limit {
    started: OnceCell<Instant>,
    timeout: Duration,
    warned: Cell<bool>,
}

/// No call is warned about before this time.
const WARN_AFTER: Duration = Duration::from_secs(60);

impl Limit {
    /// The time counts from the first look at the clock: a call that never has to wait does not read it.
    pub fn from_first_wait(timeout: Duration) -> Self {
        Self { started: OnceCell::new(), timeout, warned: Cell::new(false) }
    }

    /// The time counts from `started`.
    pub fn from(started: Instant, timeout: Duration) -> Self {
        Self { started: OnceCell::from(started), timeout, warned: Cell::new(false) }
    }

    /// Time since the start.
    pub fn waited(&self) -> Duration {
        self.started.get_or_init(Instant::now).elapsed()
    }

    /// Time left; `None` once the limit has passed.
    pub fn left(&self) -> Option<Duration> {
        self.timeout.checked_sub(self.waited()).filter(|left| !left.is_zero())
    }

    /// True once, when min(60 s, half the limit) has passed.
    pub fn warning_due(&self) -> bool {
        !self.warned.get() && self.waited() >= WARN_AFTER.min(self.timeout / 2) && {
            self.warned.set(true);
            true
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn warns_once_at_half_time_and_ends_at_the_limit() {
        let limit = Limit::from(Instant::now() - Duration::from_secs(6), Duration::from_secs(10));
        assert!(limit.warning_due());
        assert!(!limit.warning_due());
        assert!(limit.left().is_some());
        let limit = Limit::from(Instant::now() - Duration::from_secs(11), Duration::from_secs(10));
        assert_eq!(limit.left(), None);
    }
}
