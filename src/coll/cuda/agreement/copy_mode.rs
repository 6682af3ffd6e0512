//! Agreement on how copy engines move the bytes of a gather. No rank waits.
//!
//! The first rank that launches a call decides, and the others follow
//! (`docs/design/copy-engine.md`). Each rank publishes two facts for the ranks that launch the call
//! later: the offsets of its tensors, and from which of these ranks it pulls a message at an
//! expected offset.

use super::launch_log;
use crate::control::ControlBlock;
use crate::rank::Rank;
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

/// How copy engines move the bytes of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyMode {
    /// Through the workspace.
    Staged,
    /// From tensor to tensor.
    Direct,
    /// Not at all: kernels move them.
    Kernels,
}

impl CopyMode {
    const ALL: [CopyMode; 3] = [CopyMode::Staged, CopyMode::Direct, CopyMode::Kernels];
}

/// How long a rank polls for the decision of a rank that launches the call at the same time.
pub(super) const DECISION_WAIT: Duration = Duration::from_micros(10);

/// Offsets of a rank's tensors in its symmetric memory, or [`TensorOffsets::ELSEWHERE`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorOffsets {
    /// Offset of the rank's input.
    pub input: u64,
    /// Offset of the rank's output.
    pub output: u64,
    /// A bit for each other rank whose message the rank pulls from the expected offset
    /// ([`Self::expected`]) if that other rank launches the call later.
    pub pulls: u16,
}

impl TensorOffsets {
    /// The value if not all tensors of the rank are in symmetric memory.
    pub const ELSEWHERE: Self = Self { input: u64::MAX, output: u64::MAX, pulls: 0 };

    /// Returns the offset at which a rank with these tensors expects the input of another rank: the
    /// offset of that input if the other rank's tensors had the same offsets. In the output the
    /// rank's own message starts at `mine`, and the other rank's message at `theirs`.
    pub fn expected(self, mine: u64, theirs: u64) -> u64 {
        let in_place = self.input == self.output.wrapping_add(mine);
        if in_place { self.output.wrapping_add(theirs) } else { self.input }
    }

    fn to_words(self) -> [u64; 2] {
        if self == Self::ELSEWHERE {
            [u64::MAX; 2]
        } else {
            [self.input, self.output | u64::from(self.pulls) << OFFSET_BITS]
        }
    }

    fn of_words([input, output]: [u64; 2]) -> Self {
        if input == u64::MAX {
            return Self::ELSEWHERE;
        }
        let pulls = (output >> OFFSET_BITS) as u16;
        Self { input, output: output & ((1 << OFFSET_BITS) - 1), pulls }
    }
}

/// Number of bits of an offset, more than the addresses of a GPU have.
const OFFSET_BITS: u32 = 48;

/// A rank that is more than this many launches ahead of another neither reads nor writes the slot
/// of its launch. The other rank may still need that slot for the decision about an earlier
/// launch.
const NEAR: u64 = 48;

/// The content of a slot's word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct SlotWord {
    number: u64,
    mode: CopyMode,
    /// A bit for each rank that has launched the call.
    launched: u64,
}

impl SlotWord {
    fn of(word: u64) -> Self {
        let mode = CopyMode::ALL[(word >> 16 & 0xf) as usize % CopyMode::ALL.len()];
        Self { number: word >> 20, mode, launched: word & 0xffff }
    }

    fn word(self) -> u64 {
        self.number << 20 | (self.mode as u64) << 16 | self.launched
    }
}

/// The decision about a launch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CopyDecision {
    /// How the launch's bytes move; the same on all ranks.
    pub mode: CopyMode,
    /// The ranks that launched the call before this rank, with the offsets of their tensors.
    pub earlier: Vec<(Rank, TensorOffsets)>,
}

/// Decides launch `number`, which this rank has published. The first rank that launches the call
/// chooses the mode that it `wanted`. If a rank may have made this launch in the mode `usual`
/// because another rank was far behind, all ranks do so; `usual` is the same on all ranks.
pub fn decide(
    control: &ControlBlock,
    number: u64,
    (wanted, usual): (CopyMode, CopyMode),
    own: TensorOffsets,
) -> CopyDecision {
    let alone = CopyDecision { mode: usual, earlier: Vec::new() };
    // Pairs with the fences of the other ranks: of two ranks that publish the same number at the
    // same time, at least one sees the other's number.
    fence(Ordering::SeqCst);
    let launched = || control.peers().map(|peer| launch_log::launched(control, peer));
    if launched().any(|count| count + NEAR < number) {
        return alone;
    }
    let (slot, me) = (launch_log::copy_slot(control, number), control.rank().index());
    let [input, output] = own.to_words();
    slot.input[me].store(input, Ordering::Relaxed);
    slot.output[me].store(output, Ordering::Relaxed);
    // The counts are read again after the check above, so that this rank sees any rank that has
    // made this launch without the slot because some rank was far behind.
    fence(Ordering::SeqCst);
    let passed = launched().any(|count| count >= number);
    let first = SlotWord { number, mode: if passed { usual } else { wanted }, launched: 1 << me };
    let decided = || SlotWord::of(slot.word.load(Ordering::Acquire)).number == number;
    if passed {
        // A rank that has just published this launch is usually about to write the slot.
        let since = Instant::now();
        while launched().any(|count| count == number)
            && !decided()
            && since.elapsed() < DECISION_WAIT
        {
            std::hint::spin_loop();
        }
    }
    let mut seen = slot.word.load(Ordering::Acquire);
    loop {
        let found = SlotWord::of(seen);
        let (next, earlier) = match found.number == number {
            true => (SlotWord { launched: found.launched | 1 << me, ..found }, found.launched),
            false => (first, 0),
        };
        match slot.word.compare_exchange(seen, next.word(), Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => {
                let of = |rank: Rank| {
                    TensorOffsets::of_words(
                        [&slot.input, &slot.output]
                            .map(|words| words[rank.index()].load(Ordering::Relaxed)),
                    )
                };
                let earlier = control
                    .ranks()
                    .filter(|rank| earlier >> rank.index() & 1 == 1)
                    .map(|rank| (rank, of(rank)));
                return CopyDecision { mode: next.mode, earlier: earlier.collect() };
            }
            Err(now) => seen = now,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::coll::cuda::workspace::layout::Channel;
    use crate::control::tests::controls;

    /// Launches call `number` on the rank of `control`.
    fn launch(control: &ControlBlock, number: u64, wanted: CopyMode) -> CopyDecision {
        launch_or(control, number, (wanted, CopyMode::Staged))
    }

    fn launch_or(control: &ControlBlock, number: u64, modes: (CopyMode, CopyMode)) -> CopyDecision {
        launch_log::compare(control, number, &launch_log::tests::sum(4), Channel::Collectives)
            .expect("all ranks launch the same");
        decide(control, number, modes, offsets(control.rank(), number))
    }

    /// The tensors of `rank` in call `number`.
    fn offsets(rank: Rank, number: u64) -> TensorOffsets {
        let input = number * 100 + u64::from(rank.0);
        TensorOffsets { input, output: number * 1000, pulls: 1 << (rank.0 + 13) }
    }

    #[test]
    fn the_first_rank_decides_and_later_ones_know_its_tensors() {
        let controls = controls(3);
        for number in 1..=200 {
            let (a, b, c) =
                ((number % 3) as usize, ((number + 1) % 3) as usize, ((number + 2) % 3) as usize);
            let first = launch(&controls[a], number, CopyMode::Direct);
            assert_eq!(first, CopyDecision { mode: CopyMode::Direct, earlier: Vec::new() });
            let second = launch(&controls[b], number, CopyMode::Staged);
            let of = |rank: usize| (Rank(rank as u32), offsets(Rank(rank as u32), number));
            assert_eq!(second, CopyDecision { mode: CopyMode::Direct, earlier: vec![of(a)] });
            let mut both = vec![of(a), of(b)];
            both.sort_by_key(|(rank, _)| rank.0);
            assert_eq!(
                launch(&controls[c], number, CopyMode::Staged),
                CopyDecision { mode: CopyMode::Direct, earlier: both }
            );
        }
    }

    #[test]
    fn a_message_is_expected_at_the_offset_of_ones_own() {
        let apart = TensorOffsets { input: 7000, output: 100, pulls: 0 };
        assert_eq!(apart.expected(10, 30), 7000);
        let in_place = TensorOffsets { input: 110, output: 100, pulls: 0 };
        assert_eq!(in_place.expected(10, 30), 130);
    }

    #[test]
    fn ranks_far_apart_take_the_usual_mode() {
        for usual in [CopyMode::Staged, CopyMode::Kernels] {
            let controls = controls(2);
            let run = |control: &ControlBlock| -> Vec<CopyMode> {
                let one = |number| launch_or(control, number, (CopyMode::Direct, usual)).mode;
                (1..=300).map(one).collect()
            };
            let modes = run(&controls[0]);
            assert!(modes[..NEAR as usize].iter().all(|&mode| mode == CopyMode::Direct));
            assert!(modes[NEAR as usize..].iter().all(|&mode| mode == usual));
            assert_eq!(run(&controls[1]), modes);
        }
    }

    #[test]
    fn ranks_that_launch_at_the_same_time_decide_alike() {
        for round in 0..40u64 {
            let controls = controls(3);
            let decided: Vec<Vec<CopyDecision>> =
                launch_log::tests::at_the_same_time(&controls, round, |control, number, dice| {
                    launch(control, number, CopyMode::ALL[dice as usize % 2])
                });
            for number in 0..decided[0].len() {
                let modes: Vec<_> = decided.iter().map(|of_rank| of_rank[number].mode).collect();
                assert!(
                    modes.iter().all(|&mode| mode == modes[0]),
                    "round {round}, launch {number}: {modes:?}"
                );
                // Of two ranks of a direct gather exactly one knows the other's tensors.
                let knows = |a: usize, b: u32| {
                    decided[a][number].earlier.iter().any(|(rank, _)| *rank == Rank(b))
                };
                for (a, b) in [(0, 1), (0, 2), (1, 2)] {
                    let one = knows(a, b as u32) ^ knows(b, a as u32);
                    assert!(
                        modes[0] != CopyMode::Direct || one,
                        "round {round}, launch {number}: ranks {a} and {b}"
                    );
                }
            }
        }
    }
}
