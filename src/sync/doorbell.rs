//! Sleeping until a peer has done something, at no cost to peers of ranks that do not sleep.
//!
//! A sleeper announces itself, then looks once more at what it waits for, then sleeps on its bell's value. A publisher writes, then looks
//! for sleepers. With a sequentially consistent fence between the two steps on both sides, at least one of them sees the other.

use rustix::thread::futex;
use std::sync::atomic::{AtomicU32, Ordering, fence};
use std::time::Duration;

/// A member's bell, in shared memory: everybody rings it, its owner sleeps on it.
#[repr(C)]
#[derive(Debug)]
pub struct Doorbell {
    rung: AtomicU32,
    sleepers: AtomicU32,
}

/// Number of threads asleep in the whole group, in shared memory.
#[repr(C)]
#[derive(Debug)]
pub struct Sleepers(AtomicU32);

/// Longest sleep in one go: a wake that is lost because its sender was killed costs this much, not the deadline.
const SLICE: Duration = Duration::from_millis(50);

impl Doorbell {
    /// Number of times that it was rung.
    #[cfg(test)]
    pub(crate) fn rung(&self) -> u32 {
        self.rung.load(Ordering::Relaxed)
    }

    /// Sleeps until rung, at most `limit` or 50 ms, unless `ready` holds after the sleeper has announced itself.
    pub fn sleep(&self, group: &Sleepers, limit: Duration, ready: impl FnOnce() -> bool) {
        let seen = self.rung.load(Ordering::Acquire);
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        group.0.fetch_add(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        if !ready() {
            let time = limit.min(SLICE);
            let time = rustix::time::Timespec { tv_sec: 0, tv_nsec: time.as_nanos() as _ };
            // Woken, timed out, interrupted or rung meanwhile: the caller looks again in every case.
            let _ = futex::wait(&self.rung, futex::Flags::empty(), seen, Some(&time));
        }
        group.0.fetch_sub(1, Ordering::SeqCst);
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
    }

    /// Wakes the owner's sleeping threads, if any.
    pub fn ring(&self) {
        self.rung.fetch_add(1, Ordering::Release);
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            let _ = futex::wake(&self.rung, futex::Flags::empty(), i32::MAX as u32);
        }
    }
}

impl Sleepers {
    /// Whether anybody in the group may be asleep; everything published before is visible to whoever falls asleep after a `false`.
    pub fn any(&self) -> bool {
        fence(Ordering::SeqCst);
        self.0.load(Ordering::Relaxed) > 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicBool;
    use std::time::Instant;

    #[test]
    fn a_ring_ends_the_sleep_and_no_ring_ends_it_after_a_slice() {
        let bell = Doorbell { rung: AtomicU32::new(0), sleepers: AtomicU32::new(0) };
        let group = Sleepers(AtomicU32::new(0));
        let flag = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !flag.load(Ordering::Acquire) {
                    bell.sleep(&group, Duration::from_secs(5), || flag.load(Ordering::Acquire));
                }
            });
            while !group.any() {
                std::thread::yield_now();
            }
            flag.store(true, Ordering::Release);
            bell.ring();
        });
        let start = Instant::now();
        bell.sleep(&group, Duration::from_secs(5), || false);
        assert!((SLICE..Duration::from_secs(4)).contains(&start.elapsed()), "{:?}", start.elapsed());
        assert!(!group.any());
    }

    #[test]
    fn a_ring_wakes_who_sleeps_on_the_word() {
        let bell = Doorbell { rung: AtomicU32::new(0), sleepers: AtomicU32::new(1) };
        // Without the slice, which would end the sleep of a bell that wakes nobody.
        let long = rustix::time::Timespec { tv_sec: 10, tv_nsec: 0 };
        std::thread::scope(|scope| {
            let start = Instant::now();
            let sleeper = scope.spawn(|| futex::wait(&bell.rung, futex::Flags::empty(), 0, Some(&long)));
            // Time to fall asleep; a sleeper that is later than this sees the new value instead.
            std::thread::sleep(Duration::from_millis(50));
            bell.ring();
            let _ = sleeper.join().expect("no panic");
            assert!(start.elapsed() < Duration::from_secs(9) && bell.rung() == 1);
        });
    }
}
