//! State of a member's call, in a word of the control block each.

use crate::op::Op;
use crate::rank::Rank;

/// Place of a member among its collectives, as messages tell it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Doing {
    /// Number of the collective, from 1.
    pub number: u64,
    /// Operation of the collective.
    pub op: Op,
    /// Flag that is set once this member's part of it is complete.
    pub finished: bool,
}

impl Doing {
    // One word, so that the end of a collective costs one store to a line that its rank has written at the begin.
    pub(super) fn word(self) -> u64 {
        self.number << 8 | (self.op as u64) << 1 | u64::from(self.finished)
    }

    pub(super) fn of(word: u64) -> Option<Self> {
        let op = Op::from_code((word >> 1) as u8 & 127)?;
        (word != 0).then_some(Self { number: word >> 8, op, finished: word & 1 == 1 })
    }
}

impl std::fmt::Display for Doing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (op, number) = (self.op.name(), self.number);
        if self.finished { write!(f, "finished {op} #{number} and began nothing since") } else { write!(f, "in {op} #{number}") }
    }
}

/// A message that a member waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Awaited {
    /// Flag of a wait in a send; without it the wait is in a receive.
    pub send: bool,
    /// Peer that the message goes to or comes from.
    pub peer: Rank,
    /// The message's.
    pub tag: i32,
}

impl Awaited {
    // One word, never 0.
    pub(super) fn word(self) -> u64 {
        u64::from(self.tag as u32) << 32 | u64::from(self.peer.0) << 2 | u64::from(self.send) << 1 | 1
    }
}

/// Calls that a member has refused since it made another: peers that have refused as many disturb each other no more.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Refusals {
    /// Number of calls made before, and 1; 0: none was refused yet.
    calls: u64,
    /// Number of calls refused since.
    times: u64,
}

impl Refusals {
    const TIMES: u64 = 0xffff;

    // One word: the number of calls above that of refusals, which stops at its highest.
    pub(super) fn word(self) -> u64 {
        self.calls << 16 | self.times.min(Self::TIMES)
    }

    pub(super) fn of(word: u64) -> Self {
        Self { calls: word >> 16, times: word & Self::TIMES }
    }

    /// These and one more, after `calls` calls.
    pub(super) fn and_after(self, calls: u64) -> Self {
        let calls = calls + 1;
        Self { calls, times: if self.calls == calls { self.times + 1 } else { 1 } }
    }

    /// Whether a member that has refused these has refused at the same place as one that has refused `other`, at least as often: whatever it
    /// waits in is no call that the other has refused.
    pub fn cover(self, other: Self) -> bool {
        self.calls == other.calls && self.times >= other.times
    }
}

/// A member's barriers of symmetric memory on the host, of which all members make the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Barriers {
    /// Those in which all members have come.
    pub met: u32,
    /// Threads that wait in one.
    pub waiting: u32,
}

impl Barriers {
    // One word, so that nobody sees a wait that is over as one for the next barrier.
    pub(super) const WAITS: u64 = 1;
    pub(super) const MET: u64 = 1 << 32;

    pub(super) fn of(word: u64) -> Self {
        Self { met: (word >> 32) as u32, waiting: word as u32 }
    }

    /// Whether a thread waits for a barrier to which a member that stands at `other` has not come.
    pub fn wait_for(self, other: Self) -> bool {
        // Wrapping: only the distance counts.
        self.waiting > 0 && other.waiting == 0 && self.met.wrapping_sub(other.met) as i32 >= 0
    }
}
