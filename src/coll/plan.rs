//! Choice of the algorithm that serves a call. Pure: the same on every rank, because it looks only at what every rank knows.

use crate::coll::call::Op;
use crate::kernels::cpu::Store;
use crate::mem::layout::{INLINE_BYTES, LINE_PAIR, SLOT_BYTES};

/// Algorithm of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Plan {
    /// The data travel beside the arrival flags: one synchronisation.
    Inline,
    /// Chunks through shared staging, copying and reducing overlapped; `chunk` bytes of each message at a time.
    Staged {
        /// A multiple of 64.
        chunk: usize,
        /// Way in which results are written.
        store: Store,
    },
}

impl Plan {
    /// Name of the plan in profiles of costs and in the flight recorder.
    pub fn name(self) -> &'static str {
        match self {
            Plan::Inline => "inline",
            Plan::Staged { store: Store::Cached, .. } => "staged",
            Plan::Staged { store: Store::Streaming, .. } => "staged_streaming",
        }
    }
}

/// Thresholds between one way and the next. Ranks do not compare them: how a rank writes its own results concerns nobody else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Thresholds {
    /// Results of calls whose tensors on all ranks are larger than this together are written past the cache: nobody finds them there
    /// later.
    pub stream_bytes: usize,
}

impl Thresholds {
    /// Thresholds that hold if nothing was measured.
    pub const DEFAULT: Self = Self { stream_bytes: 48 << 20 };
}

impl Default for Thresholds {
    fn default() -> Self {
        Self::DEFAULT
    }
}

/// The algorithm for a collective of `n` ranks whose longest message between two of them is `longest` bytes.
pub fn choose(op: Op, longest: usize, n: usize, thresholds: &Thresholds) -> Plan {
    // Scatter and all-to-all post one message for every rank, and reduce-scatter does too.
    let posted = match op {
        Op::Scatter | Op::AllToAll | Op::ReduceScatter => longest.saturating_mul(n),
        Op::Barrier | Op::Broadcast | Op::AllReduce | Op::Reduce | Op::AllGather | Op::Gather => longest,
    };
    if posted <= INLINE_BYTES {
        return Plan::Inline;
    }
    let messages = match op {
        Op::AllToAll => 2 * n,
        Op::AllGather | Op::ReduceScatter => n + 1,
        Op::AllReduce => 2,
        Op::Barrier | Op::Broadcast | Op::Reduce | Op::Gather | Op::Scatter => 1,
    };
    let store = if longest.saturating_mul(messages * n) > thresholds.stream_bytes { Store::Streaming } else { Store::Cached };
    let room = match op {
        Op::Scatter | Op::AllToAll | Op::ReduceScatter => SLOT_BYTES / n,
        Op::Barrier | Op::Broadcast | Op::AllReduce | Op::Reduce | Op::AllGather | Op::Gather => SLOT_BYTES,
    };
    let room = room / LINE_PAIR * LINE_PAIR;
    // Short messages go in two chunks, so that the second is copied in while the first is read.
    let chunk = longest.div_ceil(2).next_multiple_of(LINE_PAIR).clamp(4096.min(room), room);
    Plan::Staged { chunk, store }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn choose(op: Op, longest: usize, n: usize) -> Plan {
        super::choose(op, longest, n, &Thresholds::default())
    }

    #[test]
    fn the_size_decides() {
        assert_eq!(choose(Op::AllReduce, 8, 4), Plan::Inline);
        assert_eq!(choose(Op::Barrier, 0, 4), Plan::Inline);
        assert!(matches!(choose(Op::AllGather, 1 << 20, 4), Plan::Staged { store: Store::Cached, .. }));
        assert!(matches!(choose(Op::AllGather, 64 << 20, 4), Plan::Staged { store: Store::Streaming, .. }));
        assert_eq!(choose(Op::AllToAll, 4096, 4), choose(Op::Scatter, 4096, 4), "four messages do not fit a post");
    }

    #[test]
    fn thresholds_move() {
        let always = Thresholds { stream_bytes: 1 };
        let streamed = |thresholds: &Thresholds| {
            matches!(super::choose(Op::AllReduce, 1 << 20, 4, thresholds), Plan::Staged { store: Store::Streaming, .. })
        };
        assert_eq!((streamed(&always), streamed(&Thresholds::default())), (true, false));
    }

    #[test]
    fn chunks_fit_their_slots() {
        for ranks in [1, 2, 3, 5, 8, 128] {
            for op in Op::ALL {
                for longest in [INLINE_BYTES + 1, 100_000, 1 << 20, usize::MAX / 256] {
                    if let Plan::Staged { chunk, .. } = choose(*op, longest, ranks) {
                        let messages = if matches!(op, Op::Scatter | Op::AllToAll | Op::ReduceScatter) { ranks } else { 1 };
                        assert!(chunk > 0 && chunk % 64 == 0 && chunk * messages <= SLOT_BYTES, "{op:?} {ranks} {longest} {chunk}");
                    }
                }
            }
        }
    }
}
