//! Rate limits for log lines that outsiders can cause.

use rustix::time::{ClockId, clock_gettime};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Interval between two lines.
const INTERVAL: Duration = Duration::from_secs(1);

/// Writes one kind of line at most once a second, the first at once, and counts the others, so that
/// no outsider can fill a disk. Lock-free, so that a forked child may use its copy.
#[derive(Debug, Default)]
pub struct RateLimit {
    /// When the next line may be written, on the monotonic clock in nanoseconds.
    next: AtomicU64,
    left_out: AtomicU64,
}

impl RateLimit {
    /// Makes a limit for one kind of line.
    pub const fn new() -> Self {
        Self { next: AtomicU64::new(0), left_out: AtomicU64::new(0) }
    }

    /// Writes `line` as a warning with the number of lines omitted since the last one, or counts
    /// it.
    pub fn warn(&self, line: fmt::Arguments<'_>) {
        let now = clock_gettime(ClockId::Monotonic);
        let now = now.tv_sec.unsigned_abs() * 1_000_000_000 + now.tv_nsec.unsigned_abs();
        match self.admit(now) {
            Some(0) => log::warn!("{line}"),
            Some(left_out) => {
                log::warn!("{line} ({left_out} more such lines were left out before this one)")
            }
            None => {}
        }
    }

    /// Returns the number of omitted lines if a line may be written at `now`.
    fn admit(&self, now: u64) -> Option<u64> {
        let due = self.next.load(Ordering::Relaxed);
        let next = now + INTERVAL.as_nanos() as u64;
        // Of several concurrent threads, one writes and the others count.
        if now < due
            || self.next.compare_exchange(due, next, Ordering::Relaxed, Ordering::Relaxed).is_err()
        {
            self.left_out.fetch_add(1, Ordering::Relaxed);
            return None;
        }
        Some(self.left_out.swap(0, Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_a_second_with_the_count_of_the_others() {
        let limit = RateLimit::new();
        let second = INTERVAL.as_nanos() as u64;
        assert_eq!(limit.admit(5), Some(0), "the first at once");
        let admitted = (6..second + 5).step_by(100_000).filter(|&now| limit.admit(now).is_some());
        assert_eq!(admitted.count(), 0);
        assert_eq!(limit.admit(second + 5), Some(10_000));
        assert_eq!(
            limit.admit(9 * second),
            Some(0),
            "those that were told of are not told of again"
        );
    }
}
