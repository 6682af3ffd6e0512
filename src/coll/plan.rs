//! Choice of the algorithm that runs a call. Pure, and the same on every rank, because it uses only
//! values that every rank knows.

use crate::coll::all_reduce_norm::Norm;
use crate::coll::call::Collective;
use crate::coll::cpu::pipeline::ResultSharing;
use crate::kernels::cpu::WriteMode;
use crate::mem::layout::{INLINE_BYTES, LINE_PAIR, SLOT_BYTES, SegmentLayout};

/// The algorithm of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CpuPlan {
    /// The data travel next to the arrival flags, so the ranks synchronise only once.
    Inline,
    /// The data move in chunks through shared staging, and copies overlap with reductions.
    Staged {
        /// Bytes of each message per chunk; a multiple of 64.
        chunk: usize,
        /// How results are written.
        store: WriteMode,
    },
}

impl CpuPlan {
    /// Returns the name of the plan in cost profiles and in the flight recorder.
    pub fn name(self) -> &'static str {
        match self {
            CpuPlan::Inline => "inline",
            CpuPlan::Staged { store: WriteMode::Cached, .. } => "staged",
            CpuPlan::Staged { store: WriteMode::Streaming, .. } => "staged_streaming",
        }
    }
}

/// The thresholds between algorithms. Ranks do not compare them, because a rank's way of writing
/// its own results does not affect other ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CpuThresholds {
    /// If the tensors of all ranks together are larger than this, results bypass the cache, which
    /// would not hold them until they are used.
    pub stream_bytes: usize,
}

impl CpuThresholds {
    /// The thresholds without a measurement.
    pub const DEFAULT: Self = Self { stream_bytes: 48 << 20 };
}

impl Default for CpuThresholds {
    fn default() -> Self {
        Self::DEFAULT
    }
}

/// Number of chunks of a message that fits into a slot, if some ranks write and others read.
const ONE_WAY_CHUNKS: usize = 8;

/// Returns the plan for a collective of `n` ranks whose longest message between two of them is
/// `longest` bytes. If ranks share cores, the plan has as few waits as possible.
pub fn choose(
    op: Collective,
    longest: usize,
    n: usize,
    thresholds: &CpuThresholds,
    shared_cores: bool,
) -> CpuPlan {
    // Scatter, all-to-all and reduce-scatter post one message for every rank.
    let posted = match op {
        Collective::Scatter | Collective::AllToAll | Collective::ReduceScatter => {
            longest.saturating_mul(n)
        }
        Collective::Barrier
        | Collective::Broadcast
        | Collective::AllReduce
        | Collective::Reduce
        | Collective::AllGather
        | Collective::Gather
        | Collective::AllReduceAddRmsNorm => longest,
    };
    if posted <= INLINE_BYTES {
        return CpuPlan::Inline;
    }
    let messages = match op {
        Collective::AllToAll => 2 * n,
        Collective::AllGather | Collective::ReduceScatter => n + 1,
        Collective::AllReduce | Collective::AllReduceAddRmsNorm => 2,
        Collective::Barrier
        | Collective::Broadcast
        | Collective::Reduce
        | Collective::Gather
        | Collective::Scatter => 1,
    };
    let store = if longest.saturating_mul(messages * n) > thresholds.stream_bytes {
        WriteMode::Streaming
    } else {
        WriteMode::Cached
    };
    let room = match op {
        Collective::Scatter | Collective::AllToAll | Collective::ReduceScatter => SLOT_BYTES / n,
        Collective::Barrier
        | Collective::Broadcast
        | Collective::AllReduce
        | Collective::Reduce
        | Collective::AllGather
        | Collective::Gather
        | Collective::AllReduceAddRmsNorm => SLOT_BYTES,
    };
    let room = room / LINE_PAIR * LINE_PAIR;
    // A message that fits into a slot also moves in chunks, so that one chunk is written while
    // another is read. If every rank writes and reads, two chunks are best.
    let one_way = matches!(
        op,
        Collective::Broadcast | Collective::Reduce | Collective::Gather | Collective::Scatter
    );
    let chunks = match (shared_cores, one_way && longest <= room) {
        (true, _) => 1,
        (false, true) => ONE_WAY_CHUNKS,
        (false, false) => 2,
    };
    let chunk = longest.div_ceil(chunks).next_multiple_of(LINE_PAIR).clamp(4096.min(room), room);
    CpuPlan::Staged { chunk, store }
}

/// Total size of the rows above which more than two ranks divide them among each other; not
/// measured.
const TWO_SHOT_BYTES: usize = 64 << 10;
/// Rows up to this size are not cut into two chunks.
const WHOLE_BYTES: usize = 32 << 10;

/// Returns the plan for the rows of `norm` among `n` ranks: inline, or in chunks of whole rows.
pub fn choose_rows(norm: &Norm, n: usize, shared_cores: bool) -> CpuPlan {
    let (row, bytes) = (norm.row_bytes(), norm.row_bytes() * norm.rows);
    if bytes <= INLINE_BYTES {
        return CpuPlan::Inline;
    }
    let most = match shots(norm, n) {
        ResultSharing::One => SLOT_BYTES / row,
        ResultSharing::Two => (shared_rows(norm, n) * n).min(SLOT_BYTES / row),
    };
    let chunks = if shared_cores { 1 } else { 2 };
    let rows = norm.rows.div_ceil(chunks).max(WHOLE_BYTES.div_ceil(row)).clamp(1, most);
    CpuPlan::Staged { chunk: rows * row, store: WriteMode::Cached }
}

/// Returns whether each rank normalises all rows or its share of them. Shares move less data if
/// there are many rows, but cost one more wait.
pub fn shots(norm: &Norm, n: usize) -> ResultSharing {
    let long = norm.row_bytes() * norm.rows > TWO_SHOT_BYTES;
    if n > 2 && long && shared_rows(norm, n) > 0 { ResultSharing::Two } else { ResultSharing::One }
}

/// Returns the number of rows whose results fit into a result slot.
fn shared_rows(norm: &Norm, n: usize) -> usize {
    SegmentLayout::new(n).result_bytes()
        / (norm.normed_bytes() + norm.row_bytes() + norm.scale_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::coll::all_reduce_norm::Normed;
    use crate::dtype::DType;

    fn choose(op: Collective, longest: usize, n: usize) -> CpuPlan {
        super::choose(op, longest, n, &CpuThresholds::default(), false)
    }

    #[test]
    fn the_size_decides() {
        assert_eq!(choose(Collective::AllReduce, 8, 4), CpuPlan::Inline);
        assert_eq!(choose(Collective::Barrier, 0, 4), CpuPlan::Inline);
        assert!(matches!(
            choose(Collective::AllGather, 1 << 20, 4),
            CpuPlan::Staged { store: WriteMode::Cached, .. }
        ));
        assert!(matches!(
            choose(Collective::AllGather, 64 << 20, 4),
            CpuPlan::Staged { store: WriteMode::Streaming, .. }
        ));
        assert_eq!(
            choose(Collective::AllToAll, 4096, 4),
            choose(Collective::Scatter, 4096, 4),
            "four messages do not fit a post"
        );
    }

    #[test]
    fn shared_cores_make_chunks_long() {
        let chunk =
            |op, shared| match super::choose(op, 64 << 10, 4, &CpuThresholds::default(), shared) {
                CpuPlan::Staged { chunk, .. } => chunk,
                CpuPlan::Inline => 0,
            };
        assert_eq!(
            [Collective::Broadcast, Collective::AllReduce]
                .map(|op| [chunk(op, false), chunk(op, true)]),
            [[8 << 10, 64 << 10], [32 << 10, 64 << 10]]
        );
    }

    #[test]
    fn thresholds_move() {
        let always = CpuThresholds { stream_bytes: 1 };
        let streamed = |thresholds: &CpuThresholds| {
            matches!(
                super::choose(Collective::AllReduce, 1 << 20, 4, thresholds, false),
                CpuPlan::Staged { store: WriteMode::Streaming, .. }
            )
        };
        assert_eq!((streamed(&always), streamed(&CpuThresholds::default())), (true, false));
    }

    #[test]
    fn chunks_of_rows_fit_their_slots() {
        for n in [2, 3, 8, 128] {
            for (hidden, rows) in
                [(8, 100_000), (4096, 1), (4096, 2), (8192, 64), (16384, 1), (16384, 1000)]
            {
                for (dtype, normed) in [
                    (DType::BF16, Normed::Same),
                    (DType::F32, Normed::Same),
                    (DType::BF16, Normed::Dynamic),
                ] {
                    let norm = Norm { dtype, hidden, rows, eps: 0.0, normed };
                    let CpuPlan::Staged { chunk, .. } = choose_rows(&norm, n, rows % 3 == 1) else {
                        assert!(norm.row_bytes() * rows <= INLINE_BYTES);
                        continue;
                    };
                    let (chunk, rest) = (chunk / norm.row_bytes(), chunk % norm.row_bytes());
                    assert!(
                        rest == 0 && chunk > 0 && chunk * norm.row_bytes() <= SLOT_BYTES,
                        "{norm:?} {n}"
                    );
                    if shots(&norm, n) == ResultSharing::Two {
                        let each = norm.normed_bytes() + norm.row_bytes() + norm.scale_bytes();
                        assert!(
                            chunk.div_ceil(n) * each <= SegmentLayout::new(n).result_bytes(),
                            "{norm:?} {n}"
                        );
                    }
                }
            }
        }
        let norm =
            Norm { dtype: DType::BF16, hidden: 4096, rows: 64, eps: 0.0, normed: Normed::Same };
        assert_eq!((shots(&norm, 2), shots(&norm, 4)), (ResultSharing::One, ResultSharing::Two));
    }

    #[test]
    fn chunks_fit_their_slots() {
        for ranks in [1, 2, 3, 5, 8, 128] {
            for op in Collective::ALL {
                let lengths = [INLINE_BYTES + 1, 100_000, 1 << 20, usize::MAX / 256];
                for (longest, shared) in
                    lengths.into_iter().flat_map(|longest| [(longest, false), (longest, true)])
                {
                    if let CpuPlan::Staged { chunk, .. } =
                        super::choose(*op, longest, ranks, &CpuThresholds::default(), shared)
                    {
                        let messages = if matches!(
                            op,
                            Collective::Scatter | Collective::AllToAll | Collective::ReduceScatter
                        ) {
                            ranks
                        } else {
                            1
                        };
                        assert!(
                            chunk > 0 && chunk % 64 == 0 && chunk * messages <= SLOT_BYTES,
                            "{op:?} {ranks} {longest} {chunk}"
                        );
                    }
                }
            }
        }
    }
}
