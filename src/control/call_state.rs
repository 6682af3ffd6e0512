//! States of a member that messages report; each fits into one word of the control block.

use crate::op::Collective;
use crate::rank::Rank;

/// The progress of a member in its last collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallProgress {
    /// The member's part is not complete.
    Running,
    /// The member's part is complete.
    Finished,
    /// The member's part is complete, and the member now waits for other nodes, in the larger
    /// group's call to which the collective belongs.
    WaitsForNodes,
}

impl CallProgress {
    pub(super) const ALL: [Self; 3] = [Self::Running, Self::Finished, Self::WaitsForNodes];
}

/// The position of a member in its sequence of collectives, as messages show it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CurrentCall {
    /// The number of the collective, from 1.
    pub number: u64,
    /// The operation of the collective.
    pub op: Collective,
    /// How far this member is in it.
    pub progress: CallProgress,
}

impl CurrentCall {
    // One word, so that the end of a collective costs one store to a cache line that its rank has
    // written at the start.
    pub(super) fn word(self) -> u64 {
        self.number << 8 | (self.op as u64) << 2 | self.progress as u64
    }

    pub(super) fn of(word: u64) -> Option<Self> {
        let op = Collective::from_code((word >> 2) as u8 & 63)?;
        let &progress = CallProgress::ALL.get((word & 3) as usize)?;
        (word != 0).then_some(Self { number: word >> 8, op, progress })
    }
}

impl std::fmt::Display for CurrentCall {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (op, number) = (self.op.name(), self.number);
        match self.progress {
            CallProgress::Running => write!(f, "in {op} #{number}"),
            CallProgress::Finished => write!(f, "finished {op} #{number} and began nothing since"),
            CallProgress::WaitsForNodes => write!(f, "waits for other nodes after {op} #{number}"),
        }
    }
}

/// A message for which a member waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AwaitedMessage {
    /// True for a wait in a send, false in a receive.
    pub send: bool,
    /// The peer that receives or sends the message.
    pub peer: Rank,
    /// The tag of the message.
    pub tag: i32,
}

impl AwaitedMessage {
    // One word, never 0.
    pub(super) fn word(self) -> u64 {
        u64::from(self.tag as u32) << 32
            | u64::from(self.peer.0) << 2
            | u64::from(self.send) << 1
            | 1
    }

    pub(super) fn of(word: u64) -> Option<Self> {
        let (send, peer, tag) =
            (word & 2 != 0, Rank((word >> 2) as u32 & (u32::MAX >> 2)), word >> 32);
        (word != 0).then_some(Self { send, peer, tag: tag as u32 as i32 })
    }
}

/// The calls that a member has rejected since its last valid call. If the counts of two members are
/// equal, neither waits for a call that the other has rejected.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RejectionCount {
    /// The number of calls before the rejected ones, plus 1; 0 if no call was rejected.
    calls: u64,
    /// The number of calls rejected after these.
    times: u64,
}

impl RejectionCount {
    const TIMES: u64 = 0xffff;

    // Packs both numbers into one word: the number of rejections, which saturates, in the lower 16
    // bits, and the number of calls in the other bits.
    pub(super) fn word(self) -> u64 {
        self.calls << 16 | self.times.min(Self::TIMES)
    }

    pub(super) fn of(word: u64) -> Self {
        Self { calls: word >> 16, times: word & Self::TIMES }
    }

    /// Returns the count after one more rejection, which follows `calls` calls.
    pub(super) fn and_after(self, calls: u64) -> Self {
        let calls = calls + 1;
        Self { calls, times: if self.calls == calls { self.times + 1 } else { 1 } }
    }

    /// Returns true if a member with these rejections has rejected calls at the same position as a
    /// member with `other`, and at least equally often. Its present wait then does not concern a
    /// call that the other has rejected.
    pub fn cover(self, other: Self) -> bool {
        self.calls == other.calls && self.times >= other.times
    }
}

/// A member's counts of host-side barriers of symmetric memory. All members make the same sequence
/// of barriers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BarrierCount {
    /// Number of barriers in which all members have arrived.
    pub met: u32,
    /// Number of threads that wait in a barrier.
    pub waiting: u32,
}

impl BarrierCount {
    // One word, so that no peer takes a finished wait for a wait in the next barrier.
    pub(super) const WAITS: u64 = 1;
    pub(super) const MET: u64 = 1 << 32;

    pub(super) fn of(word: u64) -> Self {
        Self { met: (word >> 32) as u32, waiting: word as u32 }
    }

    /// Returns true if a thread waits for a barrier that a member in state `other` has not entered.
    pub fn wait_for(self, other: Self) -> bool {
        // Wrapping, because only the distance counts.
        self.waiting > 0 && other.waiting == 0 && self.met.wrapping_sub(other.met) as i32 >= 0
    }
}
