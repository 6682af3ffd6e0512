//! How long a waiting thread may keep its core, adapted to recent contention.
//!
//! Spinning is the fastest way to wait on an uncontended core. If another process wants the core, a
//! spinning thread uses up its share of the core. When its wait ends, the thread is then queued
//! behind the other process for a whole scheduler slice, which takes milliseconds. A thread that
//! sleeps runs at once when it is woken. After the loss of a slice, all threads of the process
//! therefore sleep early for a while, and then try again. Another loss soon after that doubles this
//! time, so a machine that stays busy loses few slices.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// A yield that takes longer than this has lost a slice. A yield to a peer takes less time, because
/// the peer itself soon sleeps or yields.
const PREEMPTED_AFTER: Duration = Duration::from_millis(1);
/// How long threads sleep early after the first loss, and the maximum, in nanoseconds.
const MIN_BACKOFF_NS: u64 = 10_000_000;
const MAX_BACKOFF_NS: u64 = 320_000_000;

/// The state of a process, shared by its threads. Times are in nanoseconds from an arbitrary
/// origin, never 0.
#[derive(Debug, Default)]
pub struct SpinBudget {
    /// The time until which threads sleep early; 0 before the first loss.
    until: AtomicU64,
    /// How long threads sleep early because of the last loss.
    pause: AtomicU64,
}

impl SpinBudget {
    /// Returns true if a waiting thread should sleep early; calls `now` only after a loss.
    #[inline]
    pub fn is_short(&self, now: impl FnOnce() -> u64) -> bool {
        let until = self.until.load(Ordering::Relaxed);
        until != 0 && now() < until
    }

    /// Returns true if the cores are contended persistently: slices were lost in a row, the last
    /// one recently.
    #[inline]
    pub fn yields_to_peer(&self, now: impl FnOnce() -> u64) -> bool {
        let (until, pause) =
            (self.until.load(Ordering::Relaxed), self.pause.load(Ordering::Relaxed));
        until != 0 && pause > MIN_BACKOFF_NS && now() < until.saturating_add(pause)
    }

    /// Reports that a yield which ended at `now` took `took`.
    pub fn gave_away(&self, took: Duration, now: u64) {
        if took < PREEMPTED_AFTER {
            return;
        }
        let (until, pause) =
            (self.until.load(Ordering::Relaxed), self.pause.load(Ordering::Relaxed));
        // This loss follows soon after the last pause, so the new pause must be longer.
        let again = until != 0 && now < until.saturating_add(pause);
        let pause = if again { (2 * pause).min(MAX_BACKOFF_NS) } else { MIN_BACKOFF_NS };
        self.pause.store(pause, Ordering::Relaxed);
        // Another thread may have stored a later time since the load above.
        self.until.fetch_max(now + pause, Ordering::Relaxed);
    }
}

/// The state of this process.
pub static PATIENCE: SpinBudget = SpinBudget { until: AtomicU64::new(0), pause: AtomicU64::new(0) };

/// Returns the time on the clock of [`PATIENCE`].
pub fn now() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// Yields the core, and adapts to how long that took.
pub fn yield_core() {
    let start = Instant::now();
    std::thread::yield_now();
    let took = start.elapsed();
    if took >= PREEMPTED_AFTER {
        PATIENCE.gave_away(took, now());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    #[test]
    fn only_a_lost_slice_counts() {
        let patience = SpinBudget::default();
        patience.gave_away(Duration::from_micros(999), 5 * MS);
        assert!(!patience.is_short(|| panic!("nobody asks for the time")));
        patience.gave_away(Duration::from_millis(1), 5 * MS);
        assert_eq!([5, 14, 15].map(|ms| patience.is_short(|| ms * MS)), [true, true, false]);
    }

    #[test]
    fn losses_in_a_row_count_for_longer_and_one_alone_does_not() {
        let patience = SpinBudget::default();
        let mut now = 100 * MS;
        let mut pauses = Vec::new();
        for _ in 0..7 {
            patience.gave_away(3 * PREEMPTED_AFTER, now);
            let until = (0..)
                .map(|ms| now + ms * MS)
                .find(|&at| !patience.is_short(|| at))
                .expect("it ends");
            pauses.push((until - now) / MS);
            now = until + 3 * MS;
        }
        assert_eq!(pauses, [10, 20, 40, 80, 160, 320, 320]);
        patience.gave_away(3 * PREEMPTED_AFTER, now + 400 * MS);
        assert!(patience.is_short(|| now + 409 * MS) && !patience.is_short(|| now + 411 * MS));
        // A report that is late, because its thread lost the core again before it could report,
        // does not shorten another thread's pause.
        patience.gave_away(3 * PREEMPTED_AFTER, now);
        assert!(patience.is_short(|| now + 409 * MS));
    }

    #[test]
    fn a_loss_in_a_row_makes_it_crowded_until_the_next_would_be_alone() {
        let patience = SpinBudget::default();
        assert!(!patience.yields_to_peer(|| panic!("nobody asks for the time")));
        patience.gave_away(3 * PREEMPTED_AFTER, 100 * MS);
        assert!(!patience.yields_to_peer(|| 105 * MS));
        patience.gave_away(3 * PREEMPTED_AFTER, 115 * MS);
        assert_eq!(
            [116, 136, 154, 155].map(|ms| patience.yields_to_peer(|| ms * MS)),
            [true, true, true, false]
        );
    }
}
