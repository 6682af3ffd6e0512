//! The clock of entries, and its conversion to the time of day.

use rustix::time::{ClockId, clock_gettime};

/// Returns nanoseconds of `CLOCK_MONOTONIC`, which is the same on all ranks of a node.
pub(super) fn now() -> u64 {
    read(ClockId::Monotonic)
}

fn read(clock: ClockId) -> u64 {
    let time = clock_gettime(clock);
    (time.tv_sec as u64).wrapping_mul(1_000_000_000).wrapping_add(time.tv_nsec as u64)
}

/// The offset of the time of day from the other clocks.
#[derive(Clone, Copy)]
pub(super) struct WallClock {
    ahead: u64,
    booted: u64,
}

impl WallClock {
    /// Returns the offset at this moment. Entries are converted when they are written to a file, so
    /// one offset serves all entries of the file.
    pub(super) fn now() -> Self {
        let realtime = read(ClockId::Realtime);
        Self {
            ahead: realtime.wrapping_sub(now()),
            booted: realtime.wrapping_sub(read(ClockId::Boottime)),
        }
    }

    /// Converts the reading `at` to nanoseconds since 1970; `None` for 0, which means that no
    /// reading was taken.
    pub(super) fn of(self, at: u64) -> Option<u64> {
        (at != 0).then(|| at.wrapping_add(self.ahead))
    }

    /// Returns when the node booted, in nanoseconds since 1970.
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
        let day = WallClock::now();
        let expected =
            SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970").as_nanos() as u64;
        let found = day.of(now()).expect("taken");
        assert!(found.abs_diff(expected) < 1_000_000_000, "{found} {expected}");
        assert_eq!(day.of(0), None);
        assert!(day.booted() < expected);
    }
}
