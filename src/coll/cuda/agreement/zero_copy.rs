//! Agreement on the launch from which a group's kernels start with the zero-copy handshake. A rank
//! never waits for a rank that does not launch.
//!
//! The ranks share one word, initially [`NEVER`]. The first rank that wants zero-copy proposes a
//! launch that no rank has reached, checks that this still holds, and settles it
//! (`docs/design/memory-model.md`).

use super::launch_log;
use crate::control::ControlBlock;
use crate::error::Result;
use crate::rank::Rank;
use crate::sync::timeout::CallTimeout;
use std::sync::atomic::{Ordering, fence};
use std::time::Duration;

/// The word while no rank has proposed a launch.
const NEVER: u64 = 0;
/// Maximum exponent of a raise: a proposal that ranks have overtaken is raised to 1, 2, 4 …
/// launches past the highest published launch, so that the loop ends.
const STEEPEST: u32 = 16;

/// A word that is not [`NEVER`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Proposal {
    /// Launches with this number or a higher one are zero-copy.
    first: u64,
    by: u32,
    /// True once the launch is final.
    settled: bool,
}

impl Proposal {
    fn of(word: u64) -> Option<Self> {
        let proposal =
            Self { first: word >> 8, by: (word >> 1) as u32 & 127, settled: word & 1 == 1 };
        (word != NEVER).then_some(proposal)
    }

    fn word(self) -> u64 {
        self.first << 8 | u64::from(self.by) << 1 | u64::from(self.settled)
    }
}

/// The shared words. A trait, so that loom can run the code below.
pub trait ZeroCopyWords {
    /// Returns the word.
    fn word(&self) -> u64;
    /// Replaces `from` by `to` with sequential consistency; returns false if the word was not
    /// `from`.
    fn exchange(&self, from: u64, to: u64) -> bool;
    /// Returns the highest launch number that another rank has published. Reads after a
    /// sequentially consistent fence.
    fn most_launched(&self) -> u64;
    /// Returns once `ready` is true, which rank `by` must bring about.
    fn wait(&self, by: u32, ready: &dyn Fn() -> bool) -> Result<()>;
    /// Wakes the waiting ranks.
    fn wake(&self);
}

/// Returns true if launch `number` is zero-copy; the result is the same on all ranks. This rank,
/// `me`, has published the number and issued a sequentially consistent fence. If no rank has
/// proposed a launch and this rank `wanted` zero-copy, it proposes this launch, or the next one
/// that no rank has reached.
pub fn decide(shared: &impl ZeroCopyWords, me: u32, number: u64, wanted: bool) -> Result<bool> {
    if wanted && shared.word() == NEVER {
        propose(shared, me, number);
    }
    let Some(seen) = Proposal::of(shared.word()) else { return Ok(false) };
    if number < seen.first || seen.settled {
        return Ok(number >= seen.first);
    }
    let open = || {
        Proposal::of(shared.word()).filter(|proposal| number >= proposal.first && !proposal.settled)
    };
    shared.wait(seen.by, &|| open().is_none())?;
    Ok(Proposal::of(shared.word()).is_some_and(|proposal| number >= proposal.first))
}

fn propose(shared: &impl ZeroCopyWords, me: u32, number: u64) {
    // This launch is still undecided here, so it may be the first.
    let mut proposal =
        Proposal { first: number.max(shared.most_launched() + 1), by: me, settled: false };
    if !shared.exchange(NEVER, proposal.word()) {
        return;
    }
    let mut steps = 0;
    loop {
        let most = shared.most_launched();
        if most < proposal.first {
            break;
        }
        // A rank may have decided a launch before it could see the proposal.
        let raised = Proposal { first: most + (1 << steps), ..proposal };
        steps = (steps + 1).min(STEEPEST);
        // No other rank changes a proposal that is not settled.
        shared.exchange(proposal.word(), raised.word());
        proposal = raised;
    }
    shared.exchange(proposal.word(), Proposal { settled: true, ..proposal }.word());
    shared.wake();
}

/// A group's word, as seen by one launch.
pub(in crate::coll::cuda) struct ControlBlockWords<'a> {
    pub(in crate::coll::cuda) control: &'a ControlBlock,
    pub(in crate::coll::cuda) number: u64,
    pub(in crate::coll::cuda) timeout: Duration,
}

impl ZeroCopyWords for ControlBlockWords<'_> {
    fn word(&self) -> u64 {
        launch_log::zero_copy_word(self.control).load(Ordering::Acquire)
    }

    fn exchange(&self, from: u64, to: u64) -> bool {
        launch_log::zero_copy_word(self.control)
            .compare_exchange(from, to, Ordering::SeqCst, Ordering::Relaxed)
            .is_ok()
    }

    fn most_launched(&self) -> u64 {
        fence(Ordering::SeqCst);
        self.control.peers().map(|rank| launch_log::launched(self.control, rank)).max().unwrap_or(0)
    }

    fn wait(&self, by: u32, ready: &dyn Fn() -> bool) -> Result<()> {
        let about = || {
            let (number, group) = (self.number, self.control.name());
            format!(
                "agreeing on symmetric memory before CUDA collective #{number} of group \"{group}\""
            )
        };
        self.control.wait_for_peers(&CallTimeout::from_first_wait(self.timeout), &about, |rank| {
            rank == Rank(by) && !ready()
        })
    }

    fn wake(&self) {
        self.control.wake_sleepers();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::coll::cuda::workspace::layout::Channel;
    use crate::control::tests::controls;
    use crate::error::ErrorKind;
    use std::time::Instant;

    /// Runs launch `number` of the rank of `control`.
    fn launch(
        control: &ControlBlock,
        number: u64,
        wanted: bool,
        timeout: Duration,
    ) -> Result<bool> {
        launch_log::compare(control, number, &launch_log::tests::sum(4), Channel::Collectives)?;
        decide(&ControlBlockWords { control, number, timeout }, control.rank().0, number, wanted)
    }

    const PATIENCE: Duration = Duration::from_secs(20);

    #[test]
    fn who_is_not_overtaken_gets_what_it_wants_at_once() {
        let controls = controls(3);
        for control in &controls {
            assert!(!launch(control, 1, false, PATIENCE).expect("nobody asked"));
        }
        assert!(launch(&controls[1], 2, true, PATIENCE).expect("alone"));
        assert!(
            launch(&controls[0], 2, false, PATIENCE).expect("agreed")
                && launch(&controls[2], 2, false, PATIENCE).expect("agreed")
        );
    }

    #[test]
    fn a_rank_behind_waits_until_it_has_caught_up() {
        let controls = controls(2);
        (1..=5).for_each(|number| {
            assert!(!launch(&controls[0], number, false, PATIENCE).expect("nobody asked"))
        });
        for number in 1..=5 {
            assert!(
                !launch(&controls[1], number, true, PATIENCE)
                    .expect("rank 0 has launched it otherwise"),
                "{number}"
            );
        }
        assert!(
            launch(&controls[1], 6, false, PATIENCE).expect("agreed")
                && launch(&controls[0], 6, false, PATIENCE).expect("agreed")
        );
    }

    #[test]
    fn all_ranks_decide_alike_whoever_asks_when() {
        const LAUNCHES: u64 = 60;
        let random = |round: u64, rank: u64, number: u64| {
            let mixed = (round << 40 | rank << 20 | number).wrapping_mul(0x9E37_79B9_7F4A_7C15);
            (mixed ^ mixed >> 29).wrapping_mul(0xBF58_476D_1CE4_E5B9) >> 40
        };
        for round in 0..150 {
            let controls = controls(3);
            let decided: Vec<Vec<bool>> = std::thread::scope(|scope| {
                let run = |control| {
                    scope.spawn(move || {
                        let rank = u64::from(ControlBlock::rank(control).0);
                        let one = |number| {
                            let dice = random(round, rank, number);
                            (0..dice % 300).for_each(|_| std::hint::spin_loop());
                            if dice % 7 == 0 {
                                std::thread::yield_now();
                            }
                            launch(control, number, number >= 20 && dice % 5 == 0, PATIENCE)
                                .expect("decided")
                        };
                        (1..=LAUNCHES).map(one).collect()
                    })
                };
                let threads: Vec<_> = controls.iter().map(run).collect();
                threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
            });
            assert_eq!(decided[0], decided[1], "round {round}");
            assert_eq!(decided[0], decided[2], "round {round}");
            assert!(decided[0].is_sorted(), "once zero-copy, always zero-copy");
            assert!(!decided[0][18], "before anybody asked");
        }
    }

    #[test]
    fn a_proposer_that_stops_is_named_at_the_deadline() {
        let controls = controls(3);
        let open = Proposal { first: 2, by: 1, settled: false };
        launch_log::zero_copy_word(&controls[1]).store(open.word(), Ordering::SeqCst);
        assert!(!launch(&controls[0], 1, true, PATIENCE).expect("before the proposal"));
        let begun = Instant::now();
        let error = launch(&controls[0], 2, false, Duration::from_millis(80))
            .expect_err("rank 1 has not settled it");
        assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
        error.assert_says(ErrorKind::Timeout, &["for rank 1", "CUDA collective #2"]);
        assert!(!error.message.contains("rank 2"), "{error}");
    }

    #[test]
    fn a_proposer_that_leaves_ends_the_wait() {
        let controls = controls(2);
        launch_log::zero_copy_word(&controls[1])
            .store(Proposal { first: 1, by: 1, settled: false }.word(), Ordering::SeqCst);
        controls[1].note_departure("");
        let shared = ControlBlockWords { control: &controls[0], number: 1, timeout: PATIENCE };
        let error = decide(&shared, 0, 1, false).expect_err("rank 1 has left");
        assert_eq!(error.kind, ErrorKind::Peer);
    }
}
