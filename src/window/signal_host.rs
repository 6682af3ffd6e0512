//! Signals between ranks: words in shared memory that one rank sets and another clears.
#![allow(unsafe_code, reason = "words of signal pads and the bytes of tensors, by their addresses")]

use crate::control::ControlBlock;
use crate::error::{Error, Result};
use crate::rank::Rank;
use crate::sync::atomic::Atomic;
use crate::sync::timeout::CallTimeout;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

const CLEAR: u32 = 0;
const SET: u32 = 1;

/// The signal pads of all ranks, as mapped by one of them.
///
/// Rank `source` sets word `slot * n + source` of a rank's pad, and the owner of the pad clears it.
/// These two writers never write at the same time, because each waits for the other's value first.
/// The writes that precede a set (release) are visible to a rank that has observed the word as set
/// (acquire).
#[derive(Clone, Copy, Debug)]
pub struct SignalPads<'a> {
    control: &'a ControlBlock,
    pads: &'a [u64],
    bytes: usize,
}

impl<'a> SignalPads<'a> {
    /// Size of a word in bytes.
    pub const WORD: usize = size_of::<AtomicU32>();

    /// Makes the pads of all ranks of `control`, each of `bytes` bytes.
    ///
    /// # Safety
    /// Each address points to `bytes` bytes of memory that all ranks share, aligned to words,
    /// zeroed before the first signal, accessed atomically, and mapped here as long as this value
    /// is used.
    pub unsafe fn new(control: &'a ControlBlock, pads: &'a [u64], bytes: usize) -> Self {
        Self { control, pads, bytes }
    }

    /// Returns the slot of torch's `channel`, if a pad of `bytes` contains it in a group of `n`.
    pub fn slot(channel: i32, bytes: usize, n: usize) -> Result<u32> {
        let slots = bytes / Self::WORD / n;
        let slot = u32::try_from(channel).ok().filter(|&slot| (slot as usize) < slots);
        slot.ok_or_else(|| {
            Error::value(format!(
                "channel {channel} does not exist: a signal pad of {bytes} bytes \
                has {slots} for {n} ranks"
            ))
        })
    }

    /// Returns the word that `source` sets in the pad of `owner`.
    fn word(&self, owner: Rank, slot: u32, source: Rank) -> &AtomicU32 {
        let index = slot as usize * self.control.size() + source.index();
        assert!((index + 1) * Self::WORD <= self.bytes, "slot {slot} leaves the pad");
        // SAFETY: within the pad (checked above), which is mapped, aligned and accessed atomically
        // by the promise of `new`.
        unsafe { &*(self.pads[owner.index()] as *const AtomicU32).add(index) }
    }

    /// Waits until this rank's word in the pad of `peer` is clear, then sets it. Fails if `peer`
    /// has ended without leaving the group; one that left may have needed no more signals.
    pub fn put(&self, peer: Rank, slot: u32, timeout: Duration) -> Result<()> {
        let word = self.word(peer, slot, self.control.rank());
        let limit = CallTimeout::from_first_wait(timeout);
        let about = || self.about("put_signal", slot);
        self.await_value(peer, word, CLEAR, &limit, &about)?;
        let dead = |rank| rank == peer && self.control.died(rank).is_some();
        self.control.wait_alone(&limit, &about, dead)?;
        self.set(word, peer);
        Ok(())
    }

    /// Waits until the word of `peer` in this rank's pad is set, then clears it.
    pub fn wait(&self, peer: Rank, slot: u32, timeout: Duration) -> Result<()> {
        let word = self.word(self.control.rank(), slot, peer);
        self.await_value(peer, word, SET, &CallTimeout::from_first_wait(timeout), &|| {
            self.about("wait_signal", slot)
        })?;
        self.clear(word, peer);
        Ok(())
    }

    /// Returns once all ranks have called it with this slot; their earlier writes are then visible.
    pub fn barrier(&self, slot: u32, timeout: Duration) -> Result<()> {
        self.control.enter_barrier();
        let met =
            meet(&SlotWords { pads: self, slot, limit: CallTimeout::from_first_wait(timeout) });
        self.control.leave_barrier(met.is_ok());
        met
    }

    fn about(&self, what: &str, slot: u32) -> String {
        format!("{what} on channel {slot} of symmetric memory of group \"{}\"", self.control.name())
    }

    fn set(&self, word: &AtomicU32, peer: Rank) {
        word.store(SET, Ordering::Release);
        self.tell(peer);
    }

    fn clear(&self, word: &AtomicU32, peer: Rank) {
        word.store(CLEAR, Ordering::Release);
        self.tell(peer);
    }

    fn tell(&self, peer: Rank) {
        if peer != self.control.rank() {
            self.control.wake(peer);
        }
    }

    /// Waits until `word`, which `peer` changes, has `value`.
    fn await_value(
        &self,
        peer: Rank,
        word: &AtomicU32,
        value: u32,
        limit: &CallTimeout,
        about: &dyn Fn() -> String,
    ) -> Result<()> {
        let reached = || word.load(Ordering::Acquire) == value;
        if peer == self.control.rank() {
            let me = self.control.describe(peer);
            return if reached() {
                Ok(())
            } else {
                Err(Error::value(format!("{me} would wait for itself in {}", about())))
            };
        }
        self.control.wait_alone(limit, about, |rank| rank == peer && !reached())
    }
}

/// The words of one slot of the pads that a barrier needs. A trait, so that loom can replace the
/// hardware (`tests/loom.rs`).
pub trait Words {
    /// The type of a word.
    type Word: Atomic<u32>;
    /// The other ranks of the group.
    fn peers(&self) -> impl Iterator<Item = Rank>;
    /// This rank's word in the pad of `peer`.
    fn outward(&self, peer: Rank) -> &Self::Word;
    /// The word of `peer` in this rank's pad.
    fn inward(&self, peer: Rank) -> &Self::Word;
    /// Returns once no peer is `missing`.
    fn wait(&self, missing: impl Fn(Rank) -> bool) -> Result<()>;
    /// Wakes the peers, which then check what this rank has written.
    fn wake(&self);
}

/// Returns once all ranks have called it; their earlier writes are then visible. The words are
/// clear for the next barrier.
pub fn meet(words: &impl Words) -> Result<()> {
    for peer in words.peers() {
        let word = words.outward(peer);
        words.wait(|rank| rank == peer && word.load(Ordering::Acquire) != CLEAR)?;
        word.store(SET, Ordering::Release);
    }
    words.wake();
    // One wait for all peers, so that the error names all that are missing.
    words.wait(|peer| words.inward(peer).load(Ordering::Acquire) != SET)?;
    for peer in words.peers() {
        words.inward(peer).store(CLEAR, Ordering::Release);
    }
    words.wake();
    Ok(())
}

/// The words of a slot during one barrier.
struct SlotWords<'a> {
    pads: &'a SignalPads<'a>,
    slot: u32,
    limit: CallTimeout,
}

impl Words for SlotWords<'_> {
    type Word = AtomicU32;

    fn peers(&self) -> impl Iterator<Item = Rank> {
        self.pads.control.peers()
    }

    fn outward(&self, peer: Rank) -> &AtomicU32 {
        self.pads.word(peer, self.slot, self.pads.control.rank())
    }

    fn inward(&self, peer: Rank) -> &AtomicU32 {
        self.pads.word(self.pads.control.rank(), self.slot, peer)
    }

    fn wait(&self, missing: impl Fn(Rank) -> bool) -> Result<()> {
        self.pads.control.wait_alone(
            &self.limit,
            &|| self.pads.about("a barrier", self.slot),
            missing,
        )
    }

    fn wake(&self) {
        self.pads.control.wake_sleepers();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::tests::{controls, rung};
    use crate::error::ErrorKind;

    const BYTES: usize = 256;
    const LONG: Duration = Duration::from_secs(30);

    /// Runs `body` on ranks that are threads of this process.
    fn with_ranks(n: u32, body: impl Fn(SignalPads<'_>, Rank) + Sync) {
        let controls = controls(n);
        let memory: Vec<Vec<AtomicU32>> =
            (0..n).map(|_| (0..BYTES / 4).map(|_| AtomicU32::new(0)).collect()).collect();
        let pads: Vec<u64> = memory.iter().map(|pad| pad.as_ptr() as u64).collect();
        std::thread::scope(|scope| {
            for control in &controls {
                let (pads, body) = (&pads, &body);
                // SAFETY: the words live longer than the threads and are atomics.
                let pads = unsafe { SignalPads::new(control, pads, BYTES) };
                scope.spawn(move || body(pads, control.rank()));
            }
        });
    }

    #[test]
    fn a_late_peer_is_named_and_the_group_goes_on() {
        with_ranks(2, |pads, me| {
            if me.0 == 0 {
                let error =
                    pads.wait(Rank(1), 3, Duration::from_millis(30)).expect_err("nobody sets it");
                error.assert_says(ErrorKind::Timeout, &["rank 1", "wait_signal on channel 3"]);
                pads.put(Rank(1), 3, LONG).expect("clear");
                let error = pads.put(Rank(1), 3, Duration::from_millis(30)).expect_err("still set");
                error.assert_says(ErrorKind::Timeout, &["put_signal"]);
                assert_eq!(pads.control.failure(), None);
            }
            pads.barrier(0, LONG).expect("works on");
            if me.0 == 1 {
                pads.wait(Rank(0), 3, LONG).expect("was set before");
            }
        });
    }

    /// Runs `body` on the pads of `n` ranks in this thread.
    fn alone<const N: usize>(body: impl FnOnce([SignalPads<'_>; N], &[ControlBlock])) {
        let controls = controls(N as u32);
        let memory: [[AtomicU32; BYTES / 4]; N] =
            std::array::from_fn(|_| std::array::from_fn(|_| AtomicU32::new(0)));
        let pads = memory.each_ref().map(|pad| pad.as_ptr() as u64);
        // SAFETY: the words live longer than `body` runs and are atomics.
        body(
            std::array::from_fn(|rank| unsafe { SignalPads::new(&controls[rank], &pads, BYTES) }),
            &controls,
        );
    }

    #[test]
    fn whoever_sleeps_is_told() {
        alone(|[zero, one], controls| {
            let reported = |act: &dyn Fn() -> Result<()>| {
                let rings = || [0, 1].map(|rank| rung(&controls[rank], Rank(rank as u32)));
                let before = rings();
                // Runs once rank 1 has announced that it sleeps.
                controls[1]
                    .sleep(Duration::ZERO, || act().map(|()| true).expect("nobody is missing"));
                let after = rings();
                [after[0] - before[0], after[1] - before[1]]
            };
            assert_eq!(reported(&|| zero.put(Rank(1), 1, LONG)), [0, 1]);
            assert_eq!(reported(&|| one.wait(Rank(0), 1, LONG)), [1, 0]);
            assert_eq!(reported(&|| one.put(Rank(1), 1, LONG)), [0, 0], "a signal to itself");
            one.put(Rank(0), 2, LONG).expect("clear");
            assert_eq!(
                reported(&|| zero.barrier(2, LONG)),
                [2, 2],
                "on arrival and when the words are clear again"
            );
        });
    }

    #[test]
    fn a_barrier_names_who_has_not_taken_the_signal_before() {
        alone(|[zero, _, _], _| {
            zero.put(Rank(1), 3, LONG).expect("clear");
            let error =
                zero.barrier(3, Duration::from_millis(30)).expect_err("rank 1 takes nothing");
            error.assert_says(ErrorKind::Timeout, &["for rank 1 ("]);
            assert!(error.message.contains("a barrier on channel 3"), "{error}");
        });
    }

    #[test]
    fn a_signal_to_a_rank_that_has_ended_is_an_error() {
        alone(|[zero, _, _], controls| {
            controls[1].note_departure("");
            controls[0].note_exit(Rank(1), "has ended (exit code 0)".into());
            zero.put(Rank(1), 3, LONG).expect("rank 1 left before");
            controls[0].note_exit(Rank(2), "has ended (killed by signal 9)".into());
            let error = zero.put(Rank(2), 3, LONG).expect_err("rank 2 is dead");
            error.assert_says(ErrorKind::Peer, &["rank 2", "killed by signal 9"]);
        });
    }

    #[test]
    fn a_rank_does_not_wait_for_itself() {
        with_ranks(1, |pads, me| {
            assert_eq!(
                pads.wait(me, 0, LONG).expect_err("nobody else would").kind,
                ErrorKind::Value
            );
            pads.put(me, 0, LONG).expect("clear");
            pads.wait(me, 0, LONG).expect("set");
            pads.barrier(0, LONG).expect("all are here");
        });
    }

    #[test]
    fn each_slot_has_a_word_of_each_source() {
        alone(|[zero, _, _], _| {
            let index = |slot, source| {
                let word: *const AtomicU32 = zero.word(Rank(1), slot, Rank(source));
                (word as u64 - zero.pads[1]) as usize / SignalPads::WORD
            };
            assert_eq!([index(0, 0), index(0, 2), index(1, 0), index(5, 1)], [0, 2, 3, 16]);
        });
    }

    #[test]
    fn slots_are_counted() {
        assert_eq!(SignalPads::slot(7, 64, 2), Ok(7));
        for channel in [-1, 8] {
            let error = SignalPads::slot(channel, 64, 2).expect_err("no such channel");
            error.assert_says(ErrorKind::Value, &["has 8 for 2 ranks"]);
        }
    }
}
