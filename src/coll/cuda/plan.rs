//! Choice of a call's kernel and its number of blocks. Pure, and the same on every rank, because it
//! uses only values that every rank knows.

use super::all_reduce_norm;
pub use super::tuning::CudaThresholds;
use super::workspace::layout::{ChannelLayout, LL_UNITS, UNIT};
use crate::coll::all_reduce_norm::Norm;
use crate::coll::call::{CallSpec, Collective};
use crate::dtype::DType;

/// The kernel of a call and its blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CudaPlan {
    /// No kernel: no rank has anything to move.
    Nothing,
    /// Moves messages unchanged: short ones on LL lines, others staged.
    Exchange {
        /// Number of blocks that use LL lines.
        ll_blocks: u32,
        /// Number of staging lanes. The chunk size depends on each message's length.
        lanes: u32,
    },
    /// Sends everything in one trip on LL lines.
    ReduceLowLatency {
        /// Number of blocks.
        blocks: u32,
    },
    /// Sends pieces through staging to the ranks that need them.
    ReduceStaged {
        /// Number of staging lanes.
        lanes: u32,
        /// Size of a chunk in bytes.
        chunk: u32,
    },
    /// Sends everything to every rank through sentinel slots.
    OneShot {
        /// Number of blocks.
        blocks: u32,
    },
    /// Sends pieces to their owners and the sums to every rank, through sentinel slots.
    TwoShot {
        /// Number of blocks.
        blocks: u32,
    },
    /// Sends the sums of each half to the other half, along the edges of a hybrid cube mesh, on LL
    /// lines.
    CubeMesh {
        /// Number of blocks.
        blocks: u32,
    },
    /// Sends rows to every rank through sentinel slots, and normalises them.
    NormOneShot {
        /// Number of blocks.
        blocks: u32,
        /// Number of blocks that share a row.
        cluster: u32,
    },
    /// An all-reduce with its own plan, then the norm of the rows.
    NormRows {
        /// Number of blocks.
        blocks: u32,
    },
    /// Two-shot through staging.
    RsagStaged {
        /// Number of staging lanes.
        lanes: u32,
        /// Size of a chunk in bytes.
        chunk: u32,
    },
}

impl CudaPlan {
    /// Returns the name of the plan in `torch_symm.stats()`.
    pub fn name(self) -> &'static str {
        match self {
            CudaPlan::Nothing => "nothing",
            CudaPlan::Exchange { ll_blocks: 0, .. } => "exchange_staged",
            CudaPlan::Exchange { lanes: 0, .. } => "exchange_low_latency",
            CudaPlan::Exchange { .. } => "exchange_mixed",
            CudaPlan::ReduceLowLatency { .. } => "reduce_low_latency",
            CudaPlan::ReduceStaged { .. } => "reduce_staged",
            CudaPlan::OneShot { .. } => "one_shot",
            CudaPlan::TwoShot { .. } => "two_shot",
            CudaPlan::CubeMesh { .. } => "cube_mesh",
            CudaPlan::RsagStaged { .. } => "rsag_staged",
            CudaPlan::NormOneShot { .. } => "norm_one_shot",
            CudaPlan::NormRows { .. } => "norm_rows",
        }
    }

    /// Returns true if the plan's kernel has lanes, and with them many blocks. Such a kernel has a
    /// zero-copy variant, which a group of one rank does not use.
    pub fn has_lanes(self) -> bool {
        match self {
            CudaPlan::Exchange { lanes, .. } => lanes > 0,
            CudaPlan::ReduceStaged { .. } | CudaPlan::RsagStaged { .. } => true,
            CudaPlan::Nothing
            | CudaPlan::ReduceLowLatency { .. }
            | CudaPlan::OneShot { .. }
            | CudaPlan::TwoShot { .. }
            | CudaPlan::CubeMesh { .. } => false,
            CudaPlan::NormOneShot { .. } | CudaPlan::NormRows { .. } => false,
        }
    }

    /// Returns the name in `torch_symm.stats()` of a call that is `zero_copy`
    /// ([`Conditions::zero_copy`]) or not.
    pub fn served_as(self, zero_copy: bool) -> &'static str {
        match self {
            CudaPlan::Exchange { ll_blocks: 0, lanes: 1.., .. } if zero_copy => {
                "exchange_staged_zero_copy"
            }
            CudaPlan::Exchange { lanes: 1.., .. } if zero_copy => "exchange_mixed_zero_copy",
            CudaPlan::ReduceStaged { .. } if zero_copy => "reduce_staged_zero_copy",
            CudaPlan::RsagStaged { .. } if zero_copy => "rsag_staged_zero_copy",
            CudaPlan::Nothing
            | CudaPlan::Exchange { .. }
            | CudaPlan::ReduceLowLatency { .. }
            | CudaPlan::ReduceStaged { .. } => self.name(),
            CudaPlan::OneShot { .. }
            | CudaPlan::TwoShot { .. }
            | CudaPlan::CubeMesh { .. }
            | CudaPlan::RsagStaged { .. } => self.name(),
            CudaPlan::NormOneShot { .. } | CudaPlan::NormRows { .. } => self.name(),
        }
    }
}

/// Number of blocks that use LL lines if the longest message is not known; they carry up to 64 KiB
/// between two ranks.
const UNKNOWN_LL_BLOCKS: u32 = 16;
/// Minimum length of a chunk that is worth a fence; `MIN_CHUNK` in `staging.cuh` is the same.
const MIN_CHUNK: usize = 4 << 10;

/// Returns true if a word of all ones can only be a NaN of this type (`EMPTY_IS_NAN` in
/// `reduction.cuh`).
fn can_use_sentinels(dtype: DType) -> bool {
    match dtype {
        DType::F16 | DType::BF16 | DType::F32 | DType::C64 => true,
        DType::U8
        | DType::I8
        | DType::I16
        | DType::I32
        | DType::I64
        | DType::U16
        | DType::U32
        | DType::U64
        | DType::Bool => false,
        DType::F8E5M2
        | DType::F8E4M3FN
        | DType::F8E5M2FNUZ
        | DType::F8E4M3FNUZ
        | DType::F64
        | DType::C128 => false,
    }
}

/// Maximum size of an all-reduce along the edges of a hybrid cube mesh: half of the traffic is
/// flags, and the edge to the relay has one link.
pub const CUBE_MESH_BYTES: usize = 256 << 10;

/// The conditions of a choice in addition to the call; all but `me` are the same on all ranks.
#[derive(Clone, Copy, Debug)]
pub struct Conditions<'a> {
    /// Index of this rank, which identifies its message to itself.
    pub me: usize,
    /// Number of ranks.
    pub n: usize,
    /// The group's layout.
    pub layout: &'a ChannelLayout,
    /// Thresholds between the algorithms.
    pub tuning: &'a CudaThresholds,
    /// True if the group's GPUs form a hybrid cube mesh.
    pub cube_mesh: bool,
    /// True if kernels for long messages check whether tensors are in symmetric memory; never true
    /// in a group of one rank.
    pub zero_copy: bool,
}

/// Returns the length of the longest of those messages of the call whose length every rank knows.
/// In an all_to_all between two ranks, each knows the messages between them, but not the length of
/// the message that the other rank copies to itself.
fn longest_known(call: &CallSpec, me: usize, n: usize) -> usize {
    if call.op == Collective::AllToAll && n == 2 {
        call.inputs[1 - me].bytes.max(call.outputs[1 - me].bytes)
    } else {
        call.longest()
    }
}

/// Returns the plan for `call`.
pub fn choose(call: &CallSpec, conditions: &Conditions<'_>) -> CudaPlan {
    let Conditions { me, n, layout, tuning, cube_mesh, zero_copy } = *conditions;
    let longest = longest_known(call, me, n);
    if longest == 0 && !matches!(call.op, Collective::Barrier | Collective::AllToAll) {
        return CudaPlan::Nothing;
    }
    let short = longest
        <= tuning.low_latency_bytes.min(layout.ll_blocks().min(tuning.ctas) * LL_UNITS * UNIT);
    let ll_blocks = longest.div_ceil(LL_UNITS * UNIT).max(1) as u32;
    // The number of pieces of a divided message: one for each rank except the root of a broadcast.
    let parts = if call.op == Collective::Broadcast { (n - 1).max(1) } else { n };
    let piece = longest.div_ceil(parts);
    let most = Lanes { layout, tuning };
    let exchange_lanes = most.of_exchanges(call.op, n, longest, zero_copy);
    let exchange_staged =
        CudaPlan::Exchange { ll_blocks: 0, lanes: lanes_for(longest, exchange_lanes) };
    let lanes = lanes_for(piece, most.of_pieces(call.op, n, piece, zero_copy));
    // Two chunks per lane: one is in the second stage while the other is in the first.
    let rsag_staged = CudaPlan::RsagStaged { lanes, chunk: chunk_of(piece, lanes, 2, layout) };
    match call.op {
        // In a group of one rank the kernel copies the input to the output, and applies the factor
        // of PREMUL_SUM.
        Collective::AllReduce | Collective::Reduce | Collective::ReduceScatter if n == 1 => {
            rsag_staged
        }
        Collective::Broadcast if n == 1 => CudaPlan::Nothing,
        Collective::AllToAll if n != 2 => CudaPlan::Exchange {
            ll_blocks: UNKNOWN_LL_BLOCKS.min(tuning.ctas as u32),
            lanes: exchange_lanes as u32,
        },
        Collective::Barrier
        | Collective::AllGather
        | Collective::Gather
        | Collective::Scatter
        | Collective::AllToAll
            if short =>
        {
            CudaPlan::Exchange { ll_blocks, lanes: 0 }
        }
        Collective::Barrier
        | Collective::AllGather
        | Collective::Gather
        | Collective::Scatter
        | Collective::AllToAll => exchange_staged,
        Collective::Broadcast if short => CudaPlan::Exchange { ll_blocks, lanes: 0 },
        // With two ranks the only receiver cannot pass a piece on, so it gets one message.
        Collective::Broadcast if n == 2 => exchange_staged,
        Collective::Broadcast => rsag_staged,
        Collective::ReduceScatter if short => CudaPlan::ReduceLowLatency { blocks: ll_blocks },
        Collective::ReduceScatter => {
            let lanes = lanes_for(longest, most.of_reduce_scatter(longest, zero_copy));
            CudaPlan::ReduceStaged { lanes, chunk: chunk_of(longest, lanes, 1, layout) }
        }
        Collective::AllReduce if cube_mesh && longest <= CUBE_MESH_BYTES => {
            CudaPlan::CubeMesh { blocks: ll_blocks.min(layout.ll_blocks() as u32) }
        }
        Collective::AllReduce if can_use_sentinels(call.dtype) => {
            on_sentinel_slots(longest, n, layout, tuning, zero_copy).unwrap_or(rsag_staged)
        }
        Collective::AllReduce | Collective::Reduce if short => {
            CudaPlan::ReduceLowLatency { blocks: ll_blocks }
        }
        Collective::AllReduce | Collective::Reduce => rsag_staged,
        Collective::AllReduceAddRmsNorm => rows(call, conditions),
    }
}

/// Returns the plan for rows that are summed and normalised: one kernel if they are short and few,
/// otherwise an all-reduce and a kernel for the rows.
fn rows(call: &CallSpec, conditions: &Conditions<'_>) -> CudaPlan {
    let Conditions { n, layout, tuning, cube_mesh, .. } = *conditions;
    let Some(norm) = Norm::of(call).filter(|norm| norm.rows > 0) else { return CudaPlan::Nothing };
    // On a hybrid cube mesh, a short all-reduce adds in a different order. Rows that are as short
    // are summed by this all-reduce, so that they get the same bits as from the separate steps.
    let on_edges = cube_mesh && norm.row_bytes() * norm.rows <= CUBE_MESH_BYTES;
    match all_reduce_norm::one_shot(&norm, n, layout, tuning).filter(|_| !on_edges) {
        Some((blocks, cluster)) => CudaPlan::NormOneShot { blocks, cluster },
        None => CudaPlan::NormRows { blocks: all_reduce_norm::rows_blocks(norm.rows, tuning) },
    }
}

/// In a reduce-scatter among n ranks, pieces shorter than this number of bytes divided by n² are
/// loaded from peers' inputs. Longer pieces are faster when pushed through staging.
const PULL_BYTES: usize = 256 << 20;

/// Returns true if `call`, for rank `me` of `n`, has a length that benefits from zero-copy. For an
/// all-to-all among three or more ranks the kernel decides for each message.
pub fn worth_zero_copy(call: &CallSpec, me: usize, n: usize, tuning: &CudaThresholds) -> bool {
    let message = match call.op {
        Collective::AllToAll if n != 2 => return n > 1,
        Collective::AllToAll => longest_known(call, me, n),
        Collective::AllReduceAddRmsNorm => return false,
        Collective::ReduceScatter if call.longest() >= PULL_BYTES / (n * n) => return false,
        Collective::AllReduce | Collective::Reduce => call.longest() / n,
        Collective::Broadcast => call.longest() / (n - 1).max(1),
        Collective::Barrier
        | Collective::AllGather
        | Collective::Gather
        | Collective::Scatter
        | Collective::ReduceScatter => call.longest(),
    };
    n > 1 && message >= tuning.zero_copy_bytes
}

/// Returns the plan for sends and receives, which only their two ends know.
pub fn transfers(layout: &ChannelLayout, tuning: &CudaThresholds) -> CudaPlan {
    let lanes = Lanes { layout, tuning };
    CudaPlan::Exchange { ll_blocks: 0, lanes: lanes.within(lanes.all(), 2) as u32 }
}

/// Returns the maximum length of a message that `plan` sends on LL lines.
pub fn short_bytes(plan: CudaPlan) -> u64 {
    match plan {
        CudaPlan::Exchange { ll_blocks, .. } => u64::from(ll_blocks) * (LL_UNITS * UNIT) as u64,
        CudaPlan::Nothing | CudaPlan::ReduceLowLatency { .. } | CudaPlan::ReduceStaged { .. } => 0,
        CudaPlan::OneShot { .. }
        | CudaPlan::TwoShot { .. }
        | CudaPlan::CubeMesh { .. }
        | CudaPlan::RsagStaged { .. } => 0,
        CudaPlan::NormOneShot { .. } | CudaPlan::NormRows { .. } => 0,
    }
}

/// Returns a one-shot or two-shot plan, if the slots are large enough and every block gets a unit
/// of every piece.
fn on_sentinel_slots(
    bytes: usize,
    n: usize,
    layout: &ChannelLayout,
    tuning: &CudaThresholds,
    zero_copy: bool,
) -> Option<CudaPlan> {
    let units = bytes.div_ceil(UNIT);
    let blocks =
        |units: usize| units.div_ceil(tuning.block_units).clamp(1, tuning.blocks.min(tuning.ctas));
    if bytes <= tuning.one_shot_bytes {
        let blocks = blocks(units);
        if units.div_ceil(blocks) <= layout.sentinel_units() {
            return Some(CudaPlan::OneShot { blocks: blocks as u32 });
        }
    }
    let blocks = blocks(units.div_ceil(n));
    let fits = units.div_ceil(blocks).div_ceil(n) < layout.sentinel_units() && units / blocks >= n;
    let most = if zero_copy { tuning.zero_copy_two_shot_bytes } else { tuning.two_shot_bytes };
    (bytes <= most && fits).then_some(CudaPlan::TwoShot { blocks: blocks as u32 })
}

/// Reductions of messages from this length on use all lanes, which fill the link sooner. Shorter
/// ones are faster with fewer lanes.
const ALL_LANES_BYTES: usize = 2 << 20;

/// All-reduces between two ranks whose sums are stored directly to tensors use all lanes if their
/// pieces are shorter than this.
const LONG_PIECE: usize = 64 << 20;

/// Message length from which a staged all_to_all between two ranks uses all lanes. In this
/// collective each rank also copies a message to itself.
const WIDE_MESSAGE: usize = 4 << 20;

/// Maximum number of lanes that load from peers' tensors: more lanes wait longer at the handshake
/// than they gain.
const PULL_LANES: usize = 64;

/// The maximum number of lanes for each kind of kernel. The total number of blocks is a multiple of
/// the number of processors, which is [`CudaThresholds::lanes`]: if some processors have one more
/// block, all others wait for them (docs/measurements/gpu-h200.md).
struct Lanes<'a> {
    layout: &'a ChannelLayout,
    tuning: &'a CudaThresholds,
}

impl Lanes<'_> {
    fn all(&self) -> usize {
        self.tuning.lanes.min(self.layout.lanes())
    }

    fn few(&self) -> usize {
        self.tuning.lanes.min(self.layout.few_lanes())
    }

    /// Returns `lanes`, or fewer if a kernel with `roles` blocks per lane would have too many
    /// blocks.
    fn within(&self, lanes: usize, roles: usize) -> usize {
        lanes.min((self.tuning.ctas / roles).max(1))
    }

    /// Exchanges have two roles, hence two blocks per lane. Most use half as many lanes as the GPU
    /// has processors; a long staged all_to_all between two ranks uses all lanes.
    fn of_exchanges(&self, op: Collective, n: usize, longest: usize, zero_copy: bool) -> usize {
        let wide = op == Collective::AllToAll && n == 2 && longest >= WIDE_MESSAGE && !zero_copy;
        self.within(if wide { self.all() } else { (self.tuning.lanes / 2).clamp(1, self.all()) }, 2)
    }

    fn of_reduce_scatter(&self, bytes: usize, zero_copy: bool) -> usize {
        let lanes = match (zero_copy, bytes >= ALL_LANES_BYTES) {
            (true, _) => self.few().min(PULL_LANES),
            (false, true) => self.all(),
            (false, false) => self.few(),
        };
        self.within(lanes, 2)
    }

    /// All-reduce, reduce and broadcast have three roles, hence three blocks per lane. With two
    /// lanes for every three processors each processor has two blocks; with all lanes, three.
    fn of_pieces(&self, op: Collective, n: usize, piece: usize, zero_copy: bool) -> usize {
        let two_thirds = (self.tuning.lanes * 2 / 3).clamp(1, self.all());
        let lanes = match n {
            2 if op == Collective::AllReduce && zero_copy && piece < LONG_PIECE => self.all(),
            2 => two_thirds,
            3..=4 if op == Collective::Broadcast => two_thirds,
            _ if op == Collective::AllReduce && piece >= ALL_LANES_BYTES => self.all(),
            _ => self.few(),
        };
        self.within(lanes, 3)
    }
}

/// Returns the number of lanes, at most `most`, that fill the link with messages of up to `bytes`.
fn lanes_for(bytes: usize, most: usize) -> u32 {
    bytes.div_ceil(2 * MIN_CHUNK).clamp(1, most) as u32
}

/// Maximum chunk size of data that a rank reduces or forwards, since the rank waits for a whole
/// chunk.
const LONGEST_CHUNK: usize = 24 << 10;

/// Returns the chunk size of messages that a rank reduces or forwards: `each` chunks per lane,
/// within the minimum and maximum size.
fn chunk_of(bytes: usize, lanes: u32, each: usize, layout: &ChannelLayout) -> u32 {
    let most = layout.slot_bytes().min(LONGEST_CHUNK);
    bytes.div_ceil(lanes as usize * each).next_multiple_of(512).clamp(MIN_CHUNK.min(most), most)
        as u32
}

#[cfg(test)]
pub(crate) mod tests;
