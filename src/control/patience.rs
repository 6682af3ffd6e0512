//! How long a waiting thread may keep its core, by what that has lately cost.
//!
//! Spinning is the fastest way to wait on a core of one's own. Where another process wants the core, a thread that spins uses up its share
//! of it, and what it waits for then finds it behind the other process for a whole slice of the scheduler's, milliseconds; a thread that
//! sleeps runs at once when it is woken. So a slice that was lost makes all threads of the process sleep soon for a while, and then try
//! again. Another loss right after makes that while longer: a machine that stays busy costs a slice in so many of them.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Giving the core away for longer than this lost a slice. Where a peer took it, it comes back sooner: peers sleep or give it away, too.
const LOST: Duration = Duration::from_millis(1);
/// Time of sleeping soon after the first loss, and at most.
const SHORTEST: u64 = 10_000_000;
const LONGEST: u64 = 320_000_000;

/// Of a process, whose threads share it. Times are in nanoseconds since some moment, never 0.
#[derive(Debug, Default)]
pub struct Patience {
    /// Threads sleep soon until then; 0: none has lost a slice.
    until: AtomicU64,
    /// For how long the last loss made them.
    pause: AtomicU64,
}

impl Patience {
    /// Whether a waiting thread ought to sleep soon; `now` is asked only if slices were lost.
    #[inline]
    pub fn is_short(&self, now: impl FnOnce() -> u64) -> bool {
        let until = self.until.load(Ordering::Relaxed);
        until != 0 && now() < until
    }

    /// Whether cores are shared with others for longer: slices were lost in a row, the last one not long ago.
    #[inline]
    pub fn is_crowded(&self, now: impl FnOnce() -> u64) -> bool {
        let (until, pause) = (self.until.load(Ordering::Relaxed), self.pause.load(Ordering::Relaxed));
        until != 0 && pause > SHORTEST && now() < until.saturating_add(pause)
    }

    /// Giving the core away took so long until `now`.
    pub fn gave_away(&self, took: Duration, now: u64) {
        if took < LOST {
            return;
        }
        let (until, pause) = (self.until.load(Ordering::Relaxed), self.pause.load(Ordering::Relaxed));
        // So soon after the last pause that this one has to be longer.
        let again = until != 0 && now < until.saturating_add(pause);
        let pause = if again { (2 * pause).min(LONGEST) } else { SHORTEST };
        self.pause.store(pause, Ordering::Relaxed);
        // Another thread may have stored a later moment since the load above.
        self.until.fetch_max(now + pause, Ordering::Relaxed);
    }
}

/// This process's.
pub static PATIENCE: Patience = Patience { until: AtomicU64::new(0), pause: AtomicU64::new(0) };

/// The clock of [`PATIENCE`].
pub fn now() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// Gives the core away, and learns from how long that took.
pub fn yield_core() {
    let start = Instant::now();
    std::thread::yield_now();
    let took = start.elapsed();
    if took >= LOST {
        PATIENCE.gave_away(took, now());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    #[test]
    fn only_a_lost_slice_counts() {
        let patience = Patience::default();
        patience.gave_away(Duration::from_micros(999), 5 * MS);
        assert!(!patience.is_short(|| panic!("nobody asks for the time")));
        patience.gave_away(Duration::from_millis(1), 5 * MS);
        assert_eq!([5, 14, 15].map(|ms| patience.is_short(|| ms * MS)), [true, true, false]);
    }

    #[test]
    fn losses_in_a_row_count_for_longer_and_one_alone_does_not() {
        let patience = Patience::default();
        let mut now = 100 * MS;
        let mut pauses = Vec::new();
        for _ in 0..7 {
            patience.gave_away(3 * LOST, now);
            let until = (0..).map(|ms| now + ms * MS).find(|&at| !patience.is_short(|| at)).expect("it ends");
            pauses.push((until - now) / MS);
            now = until + 3 * MS;
        }
        assert_eq!(pauses, [10, 20, 40, 80, 160, 320, 320]);
        patience.gave_away(3 * LOST, now + 400 * MS);
        assert!(patience.is_short(|| now + 409 * MS) && !patience.is_short(|| now + 411 * MS));
        // A thread that lost its core between its loss and its report ends no pause of another's.
        patience.gave_away(3 * LOST, now);
        assert!(patience.is_short(|| now + 409 * MS));
    }

    #[test]
    fn a_loss_in_a_row_makes_it_crowded_until_the_next_would_be_alone() {
        let patience = Patience::default();
        assert!(!patience.is_crowded(|| panic!("nobody asks for the time")));
        patience.gave_away(3 * LOST, 100 * MS);
        assert!(!patience.is_crowded(|| 105 * MS));
        patience.gave_away(3 * LOST, 115 * MS);
        assert_eq!([116, 136, 154, 155].map(|ms| patience.is_crowded(|| ms * MS)), [true, true, true, false]);
    }
}
