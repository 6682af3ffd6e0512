//! Choice of the algorithm that runs a call. Pure, and the same on every rank, because it uses only values that every
//! rank knows.

use crate::coll::call::Op;
use crate::coll::cpu::pipeline::Phases;
use crate::coll::norm::Norm;
use crate::kernels::cpu::Store;
use crate::mem::layout::{INLINE_BYTES, LINE_PAIR, Layout, SLOT_BYTES};

/// The algorithm of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Plan {
    /// The data travel next to the arrival flags: one synchronisation.
    Inline,
    /// The data move in chunks through shared staging, and copies overlap with reductions.
    Staged {
        /// Bytes of each message per chunk; a multiple of 64.
        chunk: usize,
        /// How results are written.
        store: Store,
    },
}

impl Plan {
    /// Returns the name of the plan in cost profiles and in the flight recorder.
    pub fn name(self) -> &'static str {
        match self {
            Plan::Inline => "inline",
            Plan::Staged { store: Store::Cached, .. } => "staged",
            Plan::Staged { store: Store::Streaming, .. } => "staged_streaming",
        }
    }
}

/// The thresholds between algorithms. Ranks do not compare them, because a rank's way of writing its own results does
/// not affect other ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Thresholds {
    /// If the tensors of all ranks together are larger than this, results bypass the cache, which would not hold them
    /// until they are used.
    pub stream_bytes: usize,
}

impl Thresholds {
    /// The thresholds without a measurement.
    pub const DEFAULT: Self = Self { stream_bytes: 48 << 20 };
}

impl Default for Thresholds {
    fn default() -> Self {
        Self::DEFAULT
    }
}

/// Number of chunks of a short message if some ranks write and others read.
const ONE_WAY_CHUNKS: usize = 8;

/// Returns the plan for a collective of `n` ranks whose longest message between two of them is `longest` bytes. If
/// ranks share cores, the plan has as few waits as possible.
pub fn choose(op: Op, longest: usize, n: usize, thresholds: &Thresholds, shared_cores: bool) -> Plan {
    // Scatter, all-to-all and reduce-scatter post one message for every rank.
    let posted = match op {
        Op::Scatter | Op::AllToAll | Op::ReduceScatter => longest.saturating_mul(n),
        Op::Barrier | Op::Broadcast | Op::AllReduce | Op::Reduce | Op::AllGather | Op::Gather | Op::AllReduceAddRmsNorm => longest,
    };
    if posted <= INLINE_BYTES {
        return Plan::Inline;
    }
    let messages = match op {
        Op::AllToAll => 2 * n,
        Op::AllGather | Op::ReduceScatter => n + 1,
        Op::AllReduce | Op::AllReduceAddRmsNorm => 2,
        Op::Barrier | Op::Broadcast | Op::Reduce | Op::Gather | Op::Scatter => 1,
    };
    let store = if longest.saturating_mul(messages * n) > thresholds.stream_bytes { Store::Streaming } else { Store::Cached };
    let room = match op {
        Op::Scatter | Op::AllToAll | Op::ReduceScatter => SLOT_BYTES / n,
        Op::Barrier | Op::Broadcast | Op::AllReduce | Op::Reduce | Op::AllGather | Op::Gather | Op::AllReduceAddRmsNorm => SLOT_BYTES,
    };
    let room = room / LINE_PAIR * LINE_PAIR;
    // Short messages move in chunks, so that the next one is written while one is read. If every rank does both, two
    // chunks are best.
    let one_way = matches!(op, Op::Broadcast | Op::Reduce | Op::Gather | Op::Scatter);
    let chunks = match (shared_cores, one_way && longest <= room) {
        (true, _) => 1,
        (false, true) => ONE_WAY_CHUNKS,
        (false, false) => 2,
    };
    let chunk = longest.div_ceil(chunks).next_multiple_of(LINE_PAIR).clamp(4096.min(room), room);
    Plan::Staged { chunk, store }
}

/// Size of the rows from which more than two ranks share the work; not measured.
const TWO_SHOT_BYTES: usize = 64 << 10;
/// Rows up to this size are not cut into two chunks.
const WHOLE_BYTES: usize = 32 << 10;

/// Returns the plan for the rows of `norm` among `n` ranks: inline, or in chunks of whole rows.
pub fn choose_rows(norm: &Norm, n: usize, shared_cores: bool) -> Plan {
    let (row, bytes) = (norm.row_bytes(), norm.row_bytes() * norm.rows);
    if bytes <= INLINE_BYTES {
        return Plan::Inline;
    }
    let most = match shots(norm, n) {
        Phases::One => SLOT_BYTES / row,
        Phases::Two => (shared_rows(norm, n) * n).min(SLOT_BYTES / row),
    };
    let chunks = if shared_cores { 1 } else { 2 };
    let rows = norm.rows.div_ceil(chunks).max(WHOLE_BYTES.div_ceil(row)).clamp(1, most);
    Plan::Staged { chunk: rows * row, store: Store::Cached }
}

/// Returns whether each rank normalises all rows or its share of them. Shares move less data if there are many rows,
/// but cost one more wait.
pub fn shots(norm: &Norm, n: usize) -> Phases {
    let long = norm.row_bytes() * norm.rows > TWO_SHOT_BYTES;
    if n > 2 && long && shared_rows(norm, n) > 0 { Phases::Two } else { Phases::One }
}

/// Returns the number of rows whose results fit into a result slot.
fn shared_rows(norm: &Norm, n: usize) -> usize {
    Layout::new(n).result_bytes() / (norm.normed_bytes() + norm.row_bytes() + norm.scale_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::coll::norm::Normed;
    use crate::dtype::DType;

    fn choose(op: Op, longest: usize, n: usize) -> Plan {
        super::choose(op, longest, n, &Thresholds::default(), false)
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
    fn shared_cores_make_chunks_long() {
        let chunk = |op, shared| match super::choose(op, 64 << 10, 4, &Thresholds::default(), shared) {
            Plan::Staged { chunk, .. } => chunk,
            Plan::Inline => 0,
        };
        assert_eq!(
            [Op::Broadcast, Op::AllReduce].map(|op| [chunk(op, false), chunk(op, true)]),
            [[8 << 10, 64 << 10], [32 << 10, 64 << 10]]
        );
    }

    #[test]
    fn thresholds_move() {
        let always = Thresholds { stream_bytes: 1 };
        let streamed = |thresholds: &Thresholds| {
            matches!(super::choose(Op::AllReduce, 1 << 20, 4, thresholds, false), Plan::Staged { store: Store::Streaming, .. })
        };
        assert_eq!((streamed(&always), streamed(&Thresholds::default())), (true, false));
    }

    #[test]
    fn chunks_of_rows_fit_their_slots() {
        for n in [2, 3, 8, 128] {
            for (hidden, rows) in [(8, 100_000), (4096, 1), (4096, 2), (8192, 64), (16384, 1), (16384, 1000)] {
                for (dtype, normed) in [(DType::BF16, Normed::Same), (DType::F32, Normed::Same), (DType::BF16, Normed::Dynamic)] {
                    let norm = Norm { dtype, hidden, rows, eps: 0.0, normed };
                    let Plan::Staged { chunk, .. } = choose_rows(&norm, n, rows % 3 == 1) else {
                        assert!(norm.row_bytes() * rows <= INLINE_BYTES);
                        continue;
                    };
                    let (chunk, rest) = (chunk / norm.row_bytes(), chunk % norm.row_bytes());
                    assert!(rest == 0 && chunk > 0 && chunk * norm.row_bytes() <= SLOT_BYTES, "{norm:?} {n}");
                    if shots(&norm, n) == Phases::Two {
                        let each = norm.normed_bytes() + norm.row_bytes() + norm.scale_bytes();
                        assert!(chunk.div_ceil(n) * each <= Layout::new(n).result_bytes(), "{norm:?} {n}");
                    }
                }
            }
        }
        let norm = Norm { dtype: DType::BF16, hidden: 4096, rows: 64, eps: 0.0, normed: Normed::Same };
        assert_eq!((shots(&norm, 2), shots(&norm, 4)), (Phases::One, Phases::Two));
    }

    #[test]
    fn chunks_fit_their_slots() {
        for ranks in [1, 2, 3, 5, 8, 128] {
            for op in Op::ALL {
                let lengths = [INLINE_BYTES + 1, 100_000, 1 << 20, usize::MAX / 256];
                for (longest, shared) in lengths.into_iter().flat_map(|longest| [(longest, false), (longest, true)]) {
                    if let Plan::Staged { chunk, .. } = super::choose(*op, longest, ranks, &Thresholds::default(), shared) {
                        let messages = if matches!(op, Op::Scatter | Op::AllToAll | Op::ReduceScatter) { ranks } else { 1 };
                        assert!(chunk > 0 && chunk % 64 == 0 && chunk * messages <= SLOT_BYTES, "{op:?} {ranks} {longest} {chunk}");
                    }
                }
            }
        }
    }
}
