//! A job in pieces that several threads claim one after another. One job at a time.

use super::atomic::Atomic;
use std::sync::atomic::Ordering;

/// Maximum number of pieces of a job.
pub const MOST: u64 = 0xffff;

/// Number of bits of a count of pieces, and the bit at which the number of the job starts.
const COUNT_BITS: u32 = 16;
const JOB_BITS: u32 = 32;

/// The words that distribute the pieces of a job. One thread, the owner, offers jobs; it and other
/// threads claim and finish pieces.
///
/// A thread that claims a piece sees everything that the owner wrote before [`WorkItems::offer`],
/// and once [`WorkItems::is_complete`] returns true, the owner sees everything that threads wrote
/// before [`WorkItems::finish`].
#[derive(Debug, Default)]
pub struct WorkItems<W> {
    /// The number of the job, its number of pieces, and how many of them are claimed: one word, so
    /// that no thread claims a piece of a job that has ended meanwhile.
    claims: W,
    /// The owner's description of the job.
    job: W,
    finished: W,
}

impl<W: Atomic<u64>> WorkItems<W> {
    /// Makes the words with `zero`; no job has been offered.
    pub fn new(zero: impl Fn() -> W) -> Self {
        Self { claims: zero(), job: zero(), finished: zero() }
    }

    /// Offers `count` pieces of a job, at most [`MOST`]; claimants receive `job`. The previous job
    /// must be complete.
    pub fn offer(&self, job: u64, count: u64) {
        let number = (self.claims.load(Ordering::Relaxed) >> JOB_BITS).wrapping_add(1);
        self.finished.store(0, Ordering::Relaxed);
        self.job.store(job, Ordering::Relaxed);
        self.claims.store(number << JOB_BITS | count << COUNT_BITS, Ordering::Release);
    }

    /// Claims the next unclaimed piece: returns the job and the index of the piece. The job lasts
    /// until the piece is finished.
    #[inline]
    pub fn claim(&self) -> Option<(u64, u64)> {
        loop {
            let claims = self.claims.load(Ordering::Acquire);
            let (count, next) = (claims >> COUNT_BITS & MOST, claims & MOST);
            if next >= count {
                return None;
            }
            // If the exchange succeeds, this is the description of the claimed piece's job, because
            // the word does not change before the job's last piece is finished.
            let job = self.job.load(Ordering::Relaxed);
            if self
                .claims
                .compare_exchange(claims, claims + 1, Ordering::AcqRel, Ordering::Relaxed)
                .is_ok()
            {
                return Some((job, next));
            }
        }
    }

    /// Marks a claimed piece as done.
    pub fn finish(&self) {
        let mut finished = self.finished.load(Ordering::Relaxed);
        while let Err(now) = self.finished.compare_exchange(
            finished,
            finished + 1,
            Ordering::AcqRel,
            Ordering::Relaxed,
        ) {
            finished = now;
        }
    }

    /// Returns true if all `count` pieces of the job are done.
    pub fn is_complete(&self, count: u64) -> bool {
        self.finished.load(Ordering::Acquire) == count
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU64;

    #[test]
    fn equal_jobs_have_different_words_and_are_complete_once_finished() {
        let pieces = WorkItems::<AtomicU64>::default();
        let offered = [0, 1, 2].map(|_| {
            pieces.offer(7, 1);
            let word = pieces.claims.load(Ordering::Relaxed);
            assert_eq!((pieces.claim(), pieces.claim()), (Some((7, 0)), None));
            assert!(!pieces.is_complete(1));
            pieces.finish();
            assert!(pieces.is_complete(1));
            word >> JOB_BITS
        });
        // A thread that read the word of an earlier job cannot claim a piece of a later one.
        assert_eq!(offered, [1, 2, 3]);
    }

    #[test]
    fn every_piece_is_claimed_once_and_by_its_own_job() {
        const JOBS: u64 = 2000;
        let pieces = WorkItems::<AtomicU64>::default();
        let taken: Vec<AtomicU64> = (0..=JOBS).map(|_| AtomicU64::new(0)).collect();
        let ended = AtomicU64::new(0);
        let take = || {
            pieces.claim().map(|(job, piece)| {
                assert!(job > ended.load(Ordering::Acquire), "job {job} has ended");
                assert_eq!(
                    taken[job as usize].fetch_or(1 << piece, Ordering::AcqRel) & 1 << piece,
                    0,
                    "piece {piece} of job {job}"
                );
                pieces.finish();
            })
        };
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    while ended.load(Ordering::Acquire) < JOBS {
                        if take().is_none() {
                            std::thread::yield_now();
                        }
                    }
                });
            }
            for job in 1..=JOBS {
                let count = job % 64;
                pieces.offer(job, count);
                while take().is_some() {}
                while !pieces.is_complete(count) {
                    std::thread::yield_now();
                }
                assert_eq!(taken[job as usize].load(Ordering::Acquire), (1 << count) - 1);
                ended.store(job, Ordering::Release);
            }
        });
    }
}
