//! What was asked: one collective call in plain values.

use crate::dtype::{DType, ReduceOp};
use crate::rank::Rank;

/// A collective of c10d, reduced to its data movement.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Op {
    /// Everybody arrives; no data.
    Barrier = 0,
    /// The root's input reaches every output.
    Broadcast = 1,
    /// Every output holds the reduction of all inputs.
    AllReduce = 2,
    /// The root's output holds the reduction of all inputs.
    Reduce = 3,
    /// Output `r` holds rank `r`'s input.
    AllGather = 4,
    /// The root's output `r` holds rank `r`'s input.
    Gather = 5,
    /// The output holds the root's input of this rank.
    Scatter = 6,
    /// The output holds the reduction of every rank's input of this rank.
    ReduceScatter = 7,
    /// Output `r` holds rank `r`'s input of this rank.
    AllToAll = 8,
}

impl Op {
    /// Every collective, in code order.
    pub const ALL: &[Op] =
        &[Op::Barrier, Op::Broadcast, Op::AllReduce, Op::Reduce, Op::AllGather, Op::Gather, Op::Scatter, Op::ReduceScatter, Op::AllToAll];

    /// The collective with this code, as it crosses the bridge and shared memory.
    pub fn from_code(code: u8) -> Option<Self> {
        Self::ALL.get(usize::from(code)).copied()
    }

    /// The name in error messages and traces: torch's function name.
    pub const fn name(self) -> &'static str {
        match self {
            Op::Barrier => "barrier",
            Op::Broadcast => "broadcast",
            Op::AllReduce => "all_reduce",
            Op::Reduce => "reduce",
            Op::AllGather => "all_gather",
            Op::Gather => "gather",
            Op::Scatter => "scatter",
            Op::ReduceScatter => "reduce_scatter",
            Op::AllToAll => "all_to_all",
        }
    }

    /// Whether the collective combines elements.
    pub const fn reduces(self) -> bool {
        matches!(self, Op::AllReduce | Op::Reduce | Op::ReduceScatter)
    }

    /// Whether one rank is distinguished.
    pub const fn rooted(self) -> bool {
        matches!(self, Op::Broadcast | Op::Reduce | Op::Gather | Op::Scatter)
    }
}

/// A contiguous piece of a tensor's memory: address and length in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// First byte; any alignment; ignored when `bytes` is 0.
    pub addr: usize,
    /// Length in bytes.
    pub bytes: usize,
}

impl Span {
    /// The first byte.
    pub fn ptr(self) -> *mut u8 {
        self.addr as *mut u8
    }
}

/// One collective on one rank.
///
/// | op | `inputs` | `outputs` |
/// |---|---|---|
/// | barrier | – | – |
/// | broadcast | root: 1 | others: 1 (root: none) |
/// | all_reduce | 1 | 1 |
/// | reduce | 1 | root: 1 |
/// | all_gather | 1 | n, entry `r` of the length that rank `r` sends |
/// | gather | 1 | root: n, all of the input's length |
/// | scatter | root: n, all of the output's length | 1 |
/// | reduce_scatter | n, entry `r` of the length that rank `r` receives | 1 |
/// | all_to_all | n | n |
///
/// An output may be the very same span as the input that it replaces (in place); any other overlap is undefined.
#[derive(Clone, Debug)]
pub struct Call {
    /// Which collective.
    pub op: Op,
    /// Element type.
    pub dtype: DType,
    /// How elements combine; ignored unless the collective reduces.
    pub reduce_op: ReduceOp,
    /// The distinguished rank; ignored unless the collective has one.
    pub root: Rank,
    /// This rank's factor under PREMUL_SUM; ignored otherwise.
    pub factor: f64,
    /// What this rank gives.
    pub inputs: Vec<Span>,
    /// What this rank receives.
    pub outputs: Vec<Span>,
}
