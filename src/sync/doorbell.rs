//! Sleeping until a peer has published something, at no cost to peers while no rank sleeps.
//!
//! A sleeper announces itself, checks its condition once more, and then sleeps on the value of its
//! bell. A publisher writes, then checks for sleepers. With a sequentially consistent fence between
//! the two steps on both sides, at least one of them sees the other.

use rustix::thread::futex;
use std::sync::atomic::{AtomicU32, Ordering, fence};
use std::time::Duration;

/// A member's bell in shared memory: any member rings it, and its owner sleeps on it.
///
/// It exists so that a waiting rank can give up its core without a system call on the publisher's
/// fast path: peers make a system call only if [`Sleepers`] shows that a rank sleeps.
///
/// # Examples
/// ```
/// use std::sync::atomic::{AtomicBool, Ordering};
/// use std::time::Duration;
/// use symm::sync::doorbell::{Doorbell, Sleepers};
///
/// let (bell, sleepers) = (Doorbell::default(), Sleepers::default());
/// let published = AtomicBool::new(false);
/// let ready = || published.load(Ordering::Acquire);
/// std::thread::scope(|scope| {
///     scope.spawn(|| {
///         published.store(true, Ordering::Release);
///         if sleepers.any() {
///             bell.ring();
///         }
///     });
///     while !ready() {
///         bell.sleep(&sleepers, Duration::from_secs(1), ready); // may end early, so check again
///     }
/// });
/// ```
#[repr(C)]
#[derive(Debug, Default)]
pub struct Doorbell {
    rung: AtomicU32,
    sleepers: AtomicU32,
}

/// Number of sleeping threads of the whole group, in shared memory.
#[repr(C)]
#[derive(Debug, Default)]
pub struct Sleepers(AtomicU32);

/// Maximum length of one sleep: a wake-up that is lost because its sender was killed costs this
/// much, not the deadline.
const FUTEX_SLICE: Duration = Duration::from_millis(50);

impl Doorbell {
    /// Returns how often the bell was rung.
    #[cfg(test)]
    pub(crate) fn rung(&self) -> u32 {
        self.rung.load(Ordering::Relaxed)
    }

    /// Sleeps until the bell is rung, for at most `limit` or 50 ms, unless `ready` returns true
    /// after the announcement.
    pub fn sleep(&self, group: &Sleepers, limit: Duration, ready: impl FnOnce() -> bool) {
        let seen = self.rung.load(Ordering::Acquire);
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        group.0.fetch_add(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        if !ready() {
            let time = limit.min(FUTEX_SLICE);
            let time = rustix::time::Timespec { tv_sec: 0, tv_nsec: time.as_nanos() as _ };
            // Woken, timed out, interrupted or rung meanwhile: the caller checks its condition in
            // every case.
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
    /// Returns true if a thread of the group may be asleep. After a `false`, a thread that falls
    /// asleep later sees everything that was published before this call.
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
        let (bell, group) = (Doorbell::default(), Sleepers::default());
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
        assert!(
            (FUTEX_SLICE..Duration::from_secs(4)).contains(&start.elapsed()),
            "{:?}",
            start.elapsed()
        );
        assert!(!group.any());
    }

    #[test]
    fn a_ring_wakes_who_sleeps_on_the_word() {
        let bell = Doorbell { sleepers: AtomicU32::new(1), ..Doorbell::default() };
        // A single long sleep, because a sleep in slices would end even if the bell failed to wake
        // the thread.
        let long = rustix::time::Timespec { tv_sec: 10, tv_nsec: 0 };
        std::thread::scope(|scope| {
            let start = Instant::now();
            let sleeper =
                scope.spawn(|| futex::wait(&bell.rung, futex::Flags::empty(), 0, Some(&long)));
            // Gives the thread time to fall asleep; if it sleeps later, it sees the new value and
            // returns.
            std::thread::sleep(Duration::from_millis(50));
            bell.ring();
            let _ = sleeper.join().expect("no panic");
            assert!(start.elapsed() < Duration::from_secs(9) && bell.rung() == 1);
        });
    }
}
