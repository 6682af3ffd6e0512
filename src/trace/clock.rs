//! The clock of entries, and what turns its readings into times of day.

use rustix::time::{ClockId, clock_gettime};

/// Nanoseconds of `CLOCK_MONOTONIC`: the same on all ranks of a host, and cheaper than to keep two clocks apart later.
pub(super) fn now() -> u64 {
    read(ClockId::Monotonic)
}

fn read(clock: ClockId) -> u64 {
    let time = clock_gettime(clock);
    (time.tv_sec as u64).wrapping_mul(1_000_000_000).wrapping_add(time.tv_nsec as u64)
}

/// Offset of the day's clock from other clocks.
#[derive(Clone, Copy)]
pub(super) struct Day {
    ahead: u64,
    booted: u64,
}

impl Day {
    /// Offset as it is now; entries are converted when they are written, so one reading serves all.
    pub(super) fn now() -> Self {
        let realtime = read(ClockId::Realtime);
        Self { ahead: realtime.wrapping_sub(now()), booted: realtime.wrapping_sub(read(ClockId::Boottime)) }
    }

    /// Nanoseconds since 1970 of the reading `at`; `None` for 0, which says that it was never taken.
    pub(super) fn of(self, at: u64) -> Option<u64> {
        (at != 0).then(|| at.wrapping_add(self.ahead))
    }

    /// Nanoseconds since 1970 when the host started.
    pub(super) fn booted(self) -> u64 {
        self.booted
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{SystemTime, UNIX_EPOCH};

    #[test]
    fn readings_become_times_of_day() {
        let day = Day::now();
        let expected = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970").as_nanos() as u64;
        let found = day.of(now()).expect("taken");
        assert!(found.abs_diff(expected) < 1_000_000_000, "{found} {expected}");
        assert_eq!(day.of(0), None);
        assert!(day.booted() < expected);
    }
}
