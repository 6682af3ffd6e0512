//! Choice of the kernel that serves a call, and of its blocks. Pure; the same on every rank, because it looks only at what every rank
//! knows.

use super::norm;
pub use super::tuning::Tuning;
use super::workspace::layout::{LL_UNITS, Layout, UNIT};
use crate::coll::call::{Op, Spec};
use crate::coll::norm::Norm;
use crate::dtype::DType;

/// Kernel and blocks of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Plan {
    /// Nothing: there is nothing to move, on any rank.
    Nothing,
    /// Messages as they are: short ones with flags in the data, others staged.
    Exchange {
        /// Blocks that serve LL lines.
        ll_blocks: u32,
        /// Lanes of staging. Each message has chunks by its own length.
        lanes: u32,
    },
    /// Sends everything in one trip on LL lines.
    ReduceLowLatency {
        /// Number of blocks.
        blocks: u32,
    },
    /// Pieces through staging to those who need them.
    ReduceStaged {
        /// Lanes of staging.
        lanes: u32,
        /// Bytes of a chunk.
        chunk: u32,
    },
    /// Everything to everybody, data as flags.
    OneShot {
        /// Number of blocks.
        blocks: u32,
    },
    /// Pieces to their owners, sums to everybody, data as flags.
    TwoShot {
        /// Number of blocks.
        blocks: u32,
    },
    /// Sums of each half to the other half, along the edges of a hybrid cube mesh, flags in the data.
    CubeMesh {
        /// Number of blocks.
        blocks: u32,
    },
    /// Rows to everybody, data as flags, and their norm.
    NormOneShot {
        /// Number of blocks.
        blocks: u32,
        /// Blocks that share a row.
        cluster: u32,
    },
    /// An all-reduce by a plan of its own, then the norm of the rows.
    NormRows {
        /// Number of blocks.
        blocks: u32,
    },
    /// Two shots through staging.
    RsagStaged {
        /// Lanes of staging.
        lanes: u32,
        /// Bytes of a chunk.
        chunk: u32,
    },
}

impl Plan {
    /// Name of the plan in `torch_symm.stats()`.
    pub fn name(self) -> &'static str {
        match self {
            Plan::Nothing => "nothing",
            Plan::Exchange { ll_blocks: 0, .. } => "exchange_staged",
            Plan::Exchange { lanes: 0, .. } => "exchange_low_latency",
            Plan::Exchange { .. } => "exchange_mixed",
            Plan::ReduceLowLatency { .. } => "reduce_low_latency",
            Plan::ReduceStaged { .. } => "reduce_staged",
            Plan::OneShot { .. } => "one_shot",
            Plan::TwoShot { .. } => "two_shot",
            Plan::CubeMesh { .. } => "cube_mesh",
            Plan::RsagStaged { .. } => "rsag_staged",
            Plan::NormOneShot { .. } => "norm_one_shot",
            Plan::NormRows { .. } => "norm_rows",
        }
    }

    /// Whether its kernel knows of symmetric memory. In a group of one there is nobody to share it with.
    pub fn can_be_zero_copy(self) -> bool {
        match self {
            Plan::Exchange { lanes, .. } => lanes > 0,
            Plan::ReduceStaged { .. } | Plan::RsagStaged { .. } => true,
            Plan::Nothing | Plan::ReduceLowLatency { .. } | Plan::OneShot { .. } | Plan::TwoShot { .. } | Plan::CubeMesh { .. } => false,
            Plan::NormOneShot { .. } | Plan::NormRows { .. } => false,
        }
    }

    /// Name of the plan in `torch_symm.stats()`, for a call that is `zero_copy` ([`Conditions::zero_copy`]) or not.
    pub fn served_as(self, zero_copy: bool) -> &'static str {
        match self {
            Plan::Exchange { ll_blocks: 0, lanes: 1.., .. } if zero_copy => "exchange_staged_zero_copy",
            Plan::Exchange { lanes: 1.., .. } if zero_copy => "exchange_mixed_zero_copy",
            Plan::ReduceStaged { .. } if zero_copy => "reduce_staged_zero_copy",
            Plan::RsagStaged { .. } if zero_copy => "rsag_staged_zero_copy",
            Plan::Nothing | Plan::Exchange { .. } | Plan::ReduceLowLatency { .. } | Plan::ReduceStaged { .. } => self.name(),
            Plan::OneShot { .. } | Plan::TwoShot { .. } | Plan::CubeMesh { .. } | Plan::RsagStaged { .. } => self.name(),
            Plan::NormOneShot { .. } | Plan::NormRows { .. } => self.name(),
        }
    }
}

/// Blocks that serve LL lines where nobody knows the longest message; it carries up to 64 KiB between two ranks then.
const UNKNOWN_LL_BLOCKS: u32 = 16;
/// Length of the shortest chunk that is worth a fence; `staging.cuh` has the same.
const MIN_CHUNK: usize = 4 << 10;

/// Whether a word of all ones can only be a NaN of this type (`EMPTY_IS_NAN` in `types.cuh`).
fn can_use_sentinels(dtype: DType) -> bool {
    match dtype {
        DType::F16 | DType::BF16 | DType::F32 | DType::C64 => true,
        DType::U8 | DType::I8 | DType::I16 | DType::I32 | DType::I64 | DType::U16 | DType::U32 | DType::U64 | DType::Bool => false,
        DType::F8E5M2 | DType::F8E4M3FN | DType::F8E5M2FNUZ | DType::F8E4M3FNUZ | DType::F64 | DType::C128 => false,
    }
}

/// Longest all-reduce along the edges of a hybrid cube mesh: half of what travels is flags, and the edge to the relay has one link.
pub const CUBE_MESH_BYTES: usize = 256 << 10;

/// Conditions of a choice besides the call; all but `me` are the same on all ranks.
#[derive(Clone, Copy, Debug)]
pub struct Conditions<'a> {
    /// Index of this rank, by which its message to itself is told from others.
    pub me: usize,
    /// Number of ranks.
    pub n: usize,
    /// The group's layout.
    pub layout: &'a Layout,
    /// Thresholds between the algorithms.
    pub tuning: &'a Tuning,
    /// The group's GPUs are linked as a hybrid cube mesh.
    pub cube_mesh: bool,
    /// Flag of a group whose long messages look whether tensors are symmetric memory; never set in a group of one.
    pub zero_copy: bool,
}

/// Longest message between two ranks, as far as every rank knows it. Of an all-to-all between two ranks both know what travels.
fn longest_known(call: &Spec, me: usize, n: usize) -> usize {
    if call.op == Op::AllToAll && n == 2 { call.inputs[1 - me].bytes.max(call.outputs[1 - me].bytes) } else { call.longest() }
}

/// The plan for `call`.
pub fn choose(call: &Spec, conditions: &Conditions<'_>) -> Plan {
    let Conditions { me, n, layout, tuning, cube_mesh, zero_copy } = *conditions;
    let longest = longest_known(call, me, n);
    if longest == 0 && !matches!(call.op, Op::Barrier | Op::AllToAll) {
        return Plan::Nothing;
    }
    let short = longest <= tuning.low_latency_bytes.min(layout.ll_blocks() * LL_UNITS * UNIT);
    let ll_blocks = longest.div_ceil(LL_UNITS * UNIT).max(1) as u32;
    // A message in pieces, one for each rank.
    let parts = if call.op == Op::Broadcast { (n - 1).max(1) } else { n };
    let piece = longest.div_ceil(parts);
    let most = Lanes { layout, tuning };
    let exchange_lanes = most.of_exchanges(call.op, n, longest, zero_copy);
    let exchange_staged = Plan::Exchange { ll_blocks: 0, lanes: lanes_for(longest, exchange_lanes) };
    let lanes = lanes_for(piece, most.of_pieces(call.op, n, piece, zero_copy));
    // Two: the first is on its way in the second stage while the other is in the first.
    let rsag_staged = Plan::RsagStaged { lanes, chunk: chunk_of(piece, lanes, 2, layout) };
    match call.op {
        // A group of one: what it gives becomes what it gets, once through the kernel where a factor may have to be applied.
        Op::AllReduce | Op::Reduce | Op::ReduceScatter if n == 1 => rsag_staged,
        Op::Broadcast if n == 1 => Plan::Nothing,
        Op::AllToAll if n != 2 => Plan::Exchange { ll_blocks: UNKNOWN_LL_BLOCKS, lanes: exchange_lanes as u32 },
        Op::Barrier | Op::AllGather | Op::Gather | Op::Scatter | Op::AllToAll if short => Plan::Exchange { ll_blocks, lanes: 0 },
        Op::Barrier | Op::AllGather | Op::Gather | Op::Scatter | Op::AllToAll => exchange_staged,
        Op::Broadcast if short => Plan::Exchange { ll_blocks, lanes: 0 },
        // A single other rank has nobody to pass its piece on to: it gets one message.
        Op::Broadcast if n == 2 => exchange_staged,
        Op::Broadcast => rsag_staged,
        Op::ReduceScatter if short => Plan::ReduceLowLatency { blocks: ll_blocks },
        Op::ReduceScatter => {
            let lanes = lanes_for(longest, most.of_reduce_scatter(longest, zero_copy));
            Plan::ReduceStaged { lanes, chunk: chunk_of(longest, lanes, 1, layout) }
        }
        Op::AllReduce if cube_mesh && longest <= CUBE_MESH_BYTES => Plan::CubeMesh { blocks: ll_blocks.min(layout.ll_blocks() as u32) },
        Op::AllReduce if can_use_sentinels(call.dtype) => on_sentinel_slots(longest, n, layout, tuning, zero_copy).unwrap_or(rsag_staged),
        Op::AllReduce | Op::Reduce if short => Plan::ReduceLowLatency { blocks: ll_blocks },
        Op::AllReduce | Op::Reduce => rsag_staged,
        Op::AllReduceAddRmsNorm => rows(call, conditions),
    }
}

/// The plan for rows that are summed and normed: one kernel where they are short and few, else an all-reduce and a kernel for the rows.
fn rows(call: &Spec, conditions: &Conditions<'_>) -> Plan {
    let Conditions { n, layout, tuning, cube_mesh, .. } = *conditions;
    let Some(norm) = Norm::of(call).filter(|norm| norm.rows > 0) else { return Plan::Nothing };
    // Sums on a hybrid cube mesh are added up in another order, which is that of the separate steps there.
    let on_edges = cube_mesh && norm.row_bytes() * norm.rows <= CUBE_MESH_BYTES;
    match norm::one_shot(&norm, n, layout, tuning).filter(|_| !on_edges) {
        Some((blocks, cluster)) => Plan::NormOneShot { blocks, cluster },
        None => Plan::NormRows { blocks: norm::rows_blocks(norm.rows) },
    }
}

/// Pieces of a reduce-scatter among n ranks that are shorter than this by n² are loaded from peers' inputs; others are pushed through
/// staging faster.
const LOADED_BYTES: usize = 256 << 20;

/// Whether `call`, for rank `me` of `n`, has a length for which it is worth to look for symmetric memory. Of an all-to-all among three and
/// more the kernel decides, each message for itself.
pub fn worth_zero_copy(call: &Spec, me: usize, n: usize, tuning: &Tuning) -> bool {
    let message = match call.op {
        Op::AllToAll if n != 2 => return n > 1,
        Op::AllToAll => longest_known(call, me, n),
        Op::AllReduceAddRmsNorm => return false,
        Op::ReduceScatter if call.longest() >= LOADED_BYTES / (n * n) => return false,
        Op::AllReduce | Op::Reduce => call.longest() / n,
        Op::Broadcast => call.longest() / (n - 1).max(1),
        Op::Barrier | Op::AllGather | Op::Gather | Op::Scatter | Op::ReduceScatter => call.longest(),
    };
    n > 1 && message >= tuning.zero_copy_bytes
}

/// The plan for sends and receives: nobody but the two ends knows of them.
pub fn transfers(layout: &Layout, tuning: &Tuning) -> Plan {
    Plan::Exchange { ll_blocks: 0, lanes: Lanes { layout, tuning }.all() as u32 }
}

/// Longest message that `plan` sends with flags in the data.
pub fn short_bytes(plan: Plan) -> u64 {
    match plan {
        Plan::Exchange { ll_blocks, .. } => u64::from(ll_blocks) * (LL_UNITS * UNIT) as u64,
        Plan::Nothing | Plan::ReduceLowLatency { .. } | Plan::ReduceStaged { .. } => 0,
        Plan::OneShot { .. } | Plan::TwoShot { .. } | Plan::CubeMesh { .. } | Plan::RsagStaged { .. } => 0,
        Plan::NormOneShot { .. } | Plan::NormRows { .. } => 0,
    }
}

/// Plan in one shot or two, if the slots are large enough and every block gets a unit of every piece.
fn on_sentinel_slots(bytes: usize, n: usize, layout: &Layout, tuning: &Tuning, zero_copy: bool) -> Option<Plan> {
    let units = bytes.div_ceil(UNIT);
    let blocks = |units: usize| units.div_ceil(tuning.block_units).clamp(1, tuning.blocks);
    if bytes <= tuning.one_shot_bytes {
        let blocks = blocks(units);
        if units.div_ceil(blocks) <= layout.sentinel_units() {
            return Some(Plan::OneShot { blocks: blocks as u32 });
        }
    }
    let blocks = blocks(units.div_ceil(n));
    let fits = units.div_ceil(blocks).div_ceil(n) < layout.sentinel_units() && units / blocks >= n;
    let most = if zero_copy { tuning.zero_copy_two_shot_bytes } else { tuning.two_shot_bytes };
    (bytes <= most && fits).then_some(Plan::TwoShot { blocks: blocks as u32 })
}

/// Messages from this length on are worth all lanes where sums are made: with more of them under way the link is full sooner. Shorter ones
/// go through fewer lanes faster.
const WIDE_BYTES: usize = 2 << 20;

/// Pieces of an all-reduce between two ranks whose sums go straight into tensors are worth all lanes if they are shorter.
const LONG_PIECE: usize = 64 << 20;

/// Messages between two ranks from this length on are worth all lanes where the rank copies another to itself.
const WIDE_MESSAGE: usize = 4 << 20;

/// Lanes that load from peers' tensors, at most: more wait for each other at the handshake longer than they gain.
const LOADING_LANES: usize = 64;

/// Most lanes of each kind of kernel. The blocks of all of them are a multiple of the processors, of which [`Tuning::lanes`] is the number:
/// where some processors have a block more than others, all wait for those (docs/measurements/gpu-h200.md).
struct Lanes<'a> {
    layout: &'a Layout,
    tuning: &'a Tuning,
}

impl Lanes<'_> {
    fn all(&self) -> usize {
        self.tuning.lanes.min(self.layout.lanes())
    }

    fn few(&self) -> usize {
        self.tuning.lanes.min(self.layout.few_lanes())
    }

    /// Exchanges have two roles: a block for each processor, or two where long messages differ.
    fn of_exchanges(&self, op: Op, n: usize, longest: usize, zero_copy: bool) -> usize {
        let wide = op == Op::AllToAll && n == 2 && longest >= WIDE_MESSAGE && !zero_copy;
        if wide { self.all() } else { (self.tuning.lanes / 2).clamp(1, self.all()) }
    }

    fn of_reduce_scatter(&self, bytes: usize, zero_copy: bool) -> usize {
        match (zero_copy, bytes >= WIDE_BYTES) {
            (true, _) => self.few().min(LOADING_LANES),
            (false, true) => self.all(),
            (false, false) => self.few(),
        }
    }

    /// All-reduce, reduce and broadcast among `n` ranks have three roles: two blocks for each processor, or three.
    fn of_pieces(&self, op: Op, n: usize, piece: usize, zero_copy: bool) -> usize {
        let two_thirds = (self.tuning.lanes * 2 / 3).clamp(1, self.all());
        match n {
            2 if op == Op::AllReduce && zero_copy && piece < LONG_PIECE => self.all(),
            2 => two_thirds,
            3..=4 if op == Op::Broadcast => two_thirds,
            _ if op == Op::AllReduce && piece >= WIDE_BYTES => self.all(),
            _ => self.few(),
        }
    }
}

/// Lanes for messages of at most `bytes`, at most `most`: enough to fill the link.
fn lanes_for(bytes: usize, most: usize) -> u32 {
    bytes.div_ceil(2 * MIN_CHUNK).clamp(1, most) as u32
}

/// Longest chunk of what is added up or passed on: who does that waits for a whole one.
const LONGEST_CHUNK: usize = 24 << 10;

/// Bytes of a chunk of such messages, so many of them for each lane if they are not too short or too long for that.
fn chunk_of(bytes: usize, lanes: u32, each: usize, layout: &Layout) -> u32 {
    let most = layout.slot_bytes().min(LONGEST_CHUNK);
    bytes.div_ceil(lanes as usize * each).next_multiple_of(512).clamp(MIN_CHUNK.min(most), most) as u32
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::coll::call::Span;
    use crate::dtype::ReduceOp;
    use crate::rank::Rank;

    fn call(op: Op, dtype: DType, bytes: usize) -> Spec<'static> {
        // More than an all-to-all needs will do.
        let spans = vec![Span { addr: 0, bytes }; if op == Op::AllToAll { 16 } else { 1 }];
        Spec {
            op,
            dtype,
            reduce_op: ReduceOp::Sum,
            root: Rank(0),
            factor: 1.0,
            inputs: spans.clone().into(),
            outputs: spans.into(),
            call_site: None,
        }
    }

    #[test]
    fn every_plan_fits_its_memory() {
        for n in 2..=16 {
            let (layout, tuning) = (Layout::new(n, 256 << 20).expect("fits"), Tuning::of(n));
            let conditions = Conditions { me: 0, n, layout: &layout, tuning: &tuning, cube_mesh: n == 8, zero_copy: false };
            for op in Op::C10D {
                for shift in 0..33 {
                    for bytes in [1usize << shift, (1 << shift) + 1, (1 << shift) * 3 / 2] {
                        let units = bytes.div_ceil(UNIT);
                        match choose(&call(*op, DType::BF16, bytes), &conditions) {
                            Plan::Nothing => panic!("{op:?} of {bytes} bytes"),
                            Plan::Exchange { ll_blocks, lanes } => {
                                assert!(ll_blocks as usize <= layout.ll_blocks() && lanes as usize <= layout.lanes());
                                assert!(lanes > 0 || units <= ll_blocks as usize * LL_UNITS);
                            }
                            Plan::ReduceLowLatency { blocks } => {
                                assert!(units <= blocks as usize * LL_UNITS && blocks as usize <= layout.ll_blocks())
                            }
                            Plan::OneShot { blocks } => {
                                assert!(units.div_ceil(blocks as usize) <= layout.sentinel_units() && units >= blocks as usize);
                            }
                            Plan::TwoShot { blocks } => {
                                let block = units.div_ceil(blocks as usize);
                                assert!(block.div_ceil(n) <= layout.sentinel_units() && units / blocks as usize >= n, "{n} {bytes}");
                            }
                            Plan::CubeMesh { blocks } => {
                                assert!(n == 8 && *op == Op::AllReduce && bytes <= CUBE_MESH_BYTES);
                                assert!((1..=layout.ll_blocks()).contains(&(blocks as usize)) && units > (blocks as usize - 1) * LL_UNITS);
                            }
                            Plan::NormOneShot { .. } | Plan::NormRows { .. } => panic!("{op:?} norms nothing"),
                            Plan::ReduceStaged { lanes, chunk } | Plan::RsagStaged { lanes, chunk } => {
                                assert!(
                                    (1..=layout.lanes()).contains(&(lanes as usize))
                                        && chunk as usize <= layout.slot_bytes()
                                        && chunk >= 512
                                );
                            }
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn the_size_and_the_type_decide() {
        let (layout, tuning) = (Layout::new(8, 256 << 20).expect("fits"), Tuning::of(8));
        let conditions = Conditions { me: 0, n: 8, layout: &layout, tuning: &tuning, cube_mesh: false, zero_copy: false };
        let plan = |op, dtype, bytes| choose(&call(op, dtype, bytes), &conditions);
        assert_eq!(plan(Op::AllReduce, DType::BF16, 1024), Plan::OneShot { blocks: 1 });
        assert_eq!(plan(Op::AllReduce, DType::I32, 1024), Plan::ReduceLowLatency { blocks: 1 });
        assert!(matches!(plan(Op::AllReduce, DType::BF16, 1 << 20), Plan::TwoShot { .. }));
        assert!(matches!(plan(Op::AllReduce, DType::BF16, 16 << 20), Plan::RsagStaged { .. }));
        assert_eq!(plan(Op::AllReduce, DType::F32, 0), Plan::Nothing);
        assert!(matches!(plan(Op::AllToAll, DType::F32, 0), Plan::Exchange { .. }), "others may have data");
    }

    #[test]
    fn no_processor_has_a_block_more_than_the_others() {
        for (n, processors, zero_copy) in [(2, 132, false), (2, 132, true), (2, 108, false), (3, 132, false), (4, 132, false)] {
            let (layout, tuning) = (Layout::new(n, 512 << 20).expect("fits"), Tuning { lanes: processors, ..Tuning::of(n) });
            let conditions = Conditions { me: 0, n, layout: &layout, tuning: &tuning, cube_mesh: false, zero_copy };
            for op in [Op::Broadcast, Op::AllGather, Op::AllToAll, Op::AllReduce, Op::ReduceScatter] {
                let blocks = match choose(&call(op, DType::BF16, 256 << 20), &conditions) {
                    Plan::Exchange { lanes, .. } => 2 * lanes,
                    Plan::ReduceStaged { .. } if zero_copy => continue,
                    Plan::ReduceStaged { lanes, .. } => 2 * lanes,
                    Plan::RsagStaged { lanes, .. } => 3 * lanes,
                    Plan::Nothing | Plan::ReduceLowLatency { .. } | Plan::OneShot { .. } | Plan::TwoShot { .. } => panic!("{op:?} is long"),
                    Plan::CubeMesh { .. } | Plan::NormOneShot { .. } | Plan::NormRows { .. } => panic!("{op:?} is none of these"),
                };
                assert!(blocks.is_multiple_of(processors as u32), "{op:?} of {n}: {blocks} blocks on {processors} processors");
            }
        }
    }

    #[test]
    fn a_broadcast_to_a_single_other_rank_is_one_message() {
        for (n, long) in [(2, "exchange_staged"), (3, "rsag_staged")] {
            let (layout, tuning) = (Layout::new(n, 256 << 20).expect("fits"), Tuning::of(n));
            let conditions = Conditions { me: 0, n, layout: &layout, tuning: &tuning, cube_mesh: false, zero_copy: false };
            let name = |bytes| choose(&call(Op::Broadcast, DType::BF16, bytes), &conditions).name();
            assert_eq!((name(1 << 10), name(64 << 20)), ("exchange_low_latency", long), "{n} ranks");
        }
    }

    #[test]
    fn short_all_reduces_of_a_cube_mesh_keep_to_its_edges() {
        let (layout, tuning) = (Layout::new(8, 256 << 20).expect("fits"), Tuning::of(8));
        let with = Conditions { me: 0, n: 8, layout: &layout, tuning: &tuning, cube_mesh: true, zero_copy: false };
        let without = Conditions { cube_mesh: false, ..with };
        let plan = |op, dtype, bytes| choose(&call(op, dtype, bytes), &with);
        for dtype in [DType::BF16, DType::F64, DType::I8, DType::F8E4M3FN] {
            assert_eq!(plan(Op::AllReduce, dtype, 8), Plan::CubeMesh { blocks: 1 });
            assert_eq!(plan(Op::AllReduce, dtype, 4096), Plan::CubeMesh { blocks: 1 });
            assert_eq!(plan(Op::AllReduce, dtype, 4097), Plan::CubeMesh { blocks: 2 });
            assert_eq!(plan(Op::AllReduce, dtype, CUBE_MESH_BYTES).name(), "cube_mesh");
            assert_eq!(plan(Op::AllReduce, dtype, 0), Plan::Nothing);
            let long = call(Op::AllReduce, dtype, CUBE_MESH_BYTES + 1);
            assert_eq!(choose(&long, &with), choose(&long, &without));
        }
        for op in Op::C10D.iter().filter(|op| **op != Op::AllReduce) {
            let call = call(*op, DType::F32, 4096);
            assert_eq!(choose(&call, &with), choose(&call, &without), "{op:?}");
        }
    }

    #[test]
    fn long_messages_alone_are_zero_copy() {
        let layout = Layout::new(8, 256 << 20).expect("fits");
        let tuning = Tuning { zero_copy_two_shot_bytes: 1 << 20, ..Tuning::of(8) };
        let without = Conditions { me: 0, n: 8, layout: &layout, tuning: &tuning, cube_mesh: false, zero_copy: false };
        let with = Conditions { zero_copy: true, ..without };
        for (op, bytes, name) in [
            (Op::AllGather, 1 << 10, "exchange_low_latency"),
            (Op::AllGather, 1 << 20, "exchange_staged_zero_copy"),
            (Op::AllToAll, 1 << 10, "exchange_mixed_zero_copy"),
            (Op::Broadcast, 1 << 20, "rsag_staged_zero_copy"),
            (Op::ReduceScatter, 1 << 10, "reduce_low_latency"),
            (Op::ReduceScatter, 1 << 20, "reduce_staged_zero_copy"),
            (Op::AllReduce, 1 << 20, "two_shot"),
            (Op::AllReduce, 2 << 20, "rsag_staged_zero_copy"),
        ] {
            let plan = choose(&call(op, DType::BF16, bytes), &with);
            assert_eq!(plan.served_as(true), name);
            assert_eq!(plan.can_be_zero_copy(), name.ends_with("_zero_copy"), "{op:?} {bytes}");
            assert_eq!(plan.served_as(false), plan.name());
        }
        assert!(matches!(choose(&call(Op::AllReduce, DType::BF16, 2 << 20), &without), Plan::TwoShot { .. }));
        let worth = |op, bytes, n| worth_zero_copy(&call(op, DType::BF16, bytes), 0, n, &Tuning { zero_copy_bytes: 1 << 20, ..tuning });
        for (op, n, least) in [
            (Op::AllGather, 2, 1 << 20),
            (Op::ReduceScatter, 8, 1 << 20),
            (Op::AllReduce, 4, 4 << 20),
            (Op::Broadcast, 4, 3 << 20),
            (Op::Broadcast, 2, 1 << 20),
            (Op::AllToAll, 2, 1 << 20),
            (Op::AllToAll, 3, 0),
        ] {
            assert!(worth(op, least, n) && (least == 0 || !worth(op, least - 2, n)), "{op:?}");
        }
        assert!(worth(Op::ReduceScatter, (4 << 20) - 1, 8) && !worth(Op::ReduceScatter, 4 << 20, 8), "pushed faster than loaded");
        assert!(![Op::Broadcast, Op::AllToAll, Op::AllGather].iter().any(|op| worth(*op, 1 << 30, 1)), "there is nobody to share with");
        // Blocks of one kernel find their words in the handshake's area.
        assert!(UNKNOWN_LL_BLOCKS as usize <= Layout::new(16, 256 << 20).expect("fits").handshake_blocks());
    }
}
