//! Translation of a call and its plan into a kernel and its arguments. Pure.

mod transfers;

use super::all_reduce_norm;
use super::arguments::{
    self, AllReduceArgs, ArgBytes, CommonArgs, ExchangeArgs, Handshake, LowLatencyArgs,
    OutgoingArgs, PerRank, ReduceLowLatencyArgs, ReduceStagedArgs, RsagStagedArgs, SentinelArgs,
    StagingArgs,
};
use super::kernel_spec::{
    BROADCAST, CUBE_MESH, EXCHANGE, EXCHANGE_LOW_LATENCY, KernelSpec, NORM_ONE_SHOT, NORM_ROWS,
    ONE_SHOT, REDUCE_LOW_LATENCY, REDUCE_STAGED, RSAG_STAGED, TRANSFERS, TWO_SHOT,
};
use super::plan::{CudaPlan, short_bytes};
use super::workspace::layout::{ChannelLayout, LL_UNITS, MAX_RANKS, StagingPass, UNIT};
use crate::coll::all_reduce_norm::Norm;
use crate::coll::call::{CallSpec, Collective, Span};
use crate::kernels::cuda::driver::Grid;
use crate::topo::graph::CubeMesh;

/// Number of threads in a block that does not belong to a lane; `THREADS` in `device.cuh`.
pub(super) const THREADS: u32 = 512;

/// Maximum number of threads in a lane's block of the `TRANSFERS` kernel, and of a reduction with
/// few lanes among three or more ranks.
const FEW_THREADS: u32 = 128;

/// A kernel ready to be launched.
#[derive(Clone, Copy, Debug)]
pub struct Launch {
    /// The kernel.
    pub kernel: &'static KernelSpec,
    /// Number of blocks and of their threads.
    pub grid: Grid,
    /// True for the zero-copy variant.
    pub zero_copy: bool,
    /// Arguments of the kernel.
    pub args: ArgBytes,
}

/// A hybrid cube mesh as one rank sees it.
#[derive(Clone, Copy, Debug)]
pub struct CubeMeshView<'a> {
    /// The whole mesh.
    pub mesh: &'a CubeMesh,
    /// The channel's memory on this rank and its neighbours; other entries are not used.
    pub peer: PerRank,
}

/// Symmetric memory as one rank accesses it.
#[derive(Clone, Copy)]
pub struct SymmetricView<'a> {
    /// Start of each rank's symmetric memory, as mapped in this process; including this rank's.
    pub heap: PerRank,
    /// The report's word that counts the channel's zero-copy collectives or sends, as an index from
    /// `DIRECT_WORD`.
    pub count: u32,
    /// Minimum length of a zero-copy message of an exchange, not 0; see
    /// [`super::plan::worth_zero_copy`].
    pub least: u32,
    /// Returns true if a span is in this rank's symmetric memory and all peers have mapped it.
    pub reachable: &'a dyn Fn(Span) -> bool,
}

impl std::fmt::Debug for SymmetricView<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Symmetric")
            .field("heap", &self.heap)
            .field("count", &self.count)
            .finish_non_exhaustive()
    }
}

/// The rank that launches, and its memory.
#[derive(Clone, Copy, Debug)]
pub struct LaunchContext<'a> {
    /// This rank's number.
    pub me: usize,
    /// Number of ranks.
    pub n: usize,
    /// The group's layout.
    pub layout: &'a ChannelLayout,
    /// The edges of the group's hybrid cube mesh; required for the plan `CubeMesh`.
    pub edges: Option<CubeMeshView<'a>>,
    /// Number of threads in a block of a lane.
    pub threads: u32,
    /// Maximum number of blocks of a kernel.
    pub ctas: usize,
    /// Arguments that every kernel has.
    pub common: CommonArgs,
    /// Symmetric memory of a zero-copy call; `None` if the call is not zero-copy.
    pub symmetric: Option<SymmetricView<'a>>,
    /// True if the kernel of a staged collective announces this rank ([`super::arrival`]).
    pub announces: bool,
}

impl LaunchContext<'_> {
    fn low_latency(&self) -> LowLatencyArgs {
        LowLatencyArgs {
            epochs: self.layout.ll_epochs() as u64,
            lines: self.layout.ll_lines() as u64,
            units: LL_UNITS as u32,
        }
    }

    fn sentinel(&self) -> SentinelArgs {
        let units = self.layout.sentinel_units() as u32;
        SentinelArgs {
            epochs: self.layout.sentinel_epochs() as u64,
            slots: self.layout.sentinel() as u64,
            units,
        }
    }

    fn staging(&self, stage: StagingPass, lanes: u32, chunk: u32) -> StagingArgs {
        let (words, slots) = (self.layout.words(stage) as u64, self.layout.slots(stage) as u64);
        StagingArgs {
            words,
            slots,
            slot_bytes: self.layout.slot_bytes() as u32,
            chunk_bytes: chunk,
            lanes,
            arrivals: if self.announces { self.layout.arrivals() as u32 } else { 0 },
        }
    }

    /// Returns the number of threads in a block of a kernel with `lanes` lanes
    /// (docs/measurements/gpu-h200.md).
    fn lane_threads(&self, kernel: &KernelSpec, lanes: u32) -> u32 {
        let wide = self.n == 2 || lanes as usize > self.layout.few_lanes();
        // A kernel that sends and a kernel that receives must fit on the device at the same time,
        // and they use the most registers of all kernels (tests/gpu/compile.rs).
        let many = if kernel.typed { wide } else { *kernel != TRANSFERS };
        if many { self.threads } else { self.threads.min(FEW_THREADS) }
    }

    /// Returns true if `plan` is launched in its zero-copy variant.
    fn handshakes(&self, plan: CudaPlan) -> bool {
        self.symmetric.is_some() && self.n > 1 && plan.has_lanes()
    }

    /// Returns true if peers may load and store `span`; true for an empty span, which no peer
    /// accesses.
    fn direct(&self, span: Span) -> bool {
        span.bytes == 0
            || self.symmetric.is_some_and(|symmetric| {
                span.addr.is_multiple_of(UNIT) && (symmetric.reachable)(span)
            })
    }

    /// Returns the handshake of a zero-copy kernel: `give` has a bit for each rank that may load
    /// the message that this rank sends to it, `take` a bit for each rank that may store its
    /// message at the destination on this rank.
    fn handshake(&self, give: u32, take: u32) -> Handshake {
        let Some(SymmetricView { heap, count, least, .. }) = self.symmetric else {
            return Handshake::default();
        };
        let (epochs, lines) =
            (self.layout.handshake_epochs() as u64, self.layout.handshake_lines() as u64);
        Handshake {
            epochs,
            lines,
            counts: self.layout.handshake_counts() as u64,
            heap,
            give,
            take,
            count,
            least,
        }
    }

    /// Returns the messages that `call` sends to each rank.
    fn outgoing(&self, call: &CallSpec) -> OutgoingArgs {
        let root = call.root.index();
        let mut out = OutgoingArgs::default();
        let mut put = |r: usize, span: Span| {
            (out.from[r], out.bytes[r]) = (span.addr as u64, span.bytes as u64)
        };
        match call.op {
            Collective::Barrier | Collective::AllReduceAddRmsNorm => {}
            Collective::Broadcast | Collective::AllGather | Collective::AllReduce => {
                call.inputs.iter().for_each(|&input| (0..self.n).for_each(|r| put(r, input)));
                out.same = 1;
            }
            Collective::Reduce | Collective::Gather => {
                put(root, call.inputs[0]);
                put(self.me, call.inputs[0]);
            }
            Collective::Scatter | Collective::ReduceScatter | Collective::AllToAll => {
                call.inputs.iter().enumerate().for_each(|(r, &input)| put(r, input))
            }
        }
        out
    }

    /// Returns the destination and length of each rank's message.
    fn incoming(&self, call: &CallSpec) -> (PerRank, PerRank) {
        let (mut to, mut bytes) = ([0; MAX_RANKS], [0; MAX_RANKS]);
        let mut put =
            |r: usize, span: Span| (to[r], bytes[r]) = (span.addr as u64, span.bytes as u64);
        match call.op {
            Collective::Broadcast | Collective::Scatter => {
                call.outputs.iter().for_each(|&output| put(call.root.index(), output))
            }
            Collective::Barrier
            | Collective::AllReduce
            | Collective::Reduce
            | Collective::ReduceScatter
            | Collective::AllReduceAddRmsNorm => {}
            Collective::AllGather | Collective::Gather | Collective::AllToAll => {
                call.outputs.iter().enumerate().for_each(|(r, &output)| put(r, output))
            }
        }
        (to, bytes)
    }

    /// Returns the kernel for `call` under `plan`, or `None` if there is nothing to do.
    pub fn prepare(&self, call: &CallSpec, plan: CudaPlan) -> Option<Launch> {
        let common = self.common;
        let all = |yes: bool| if yes { (1u32 << self.n) - 1 } else { 0 };
        let output = call.outputs.first().copied().unwrap_or(Span { addr: 0, bytes: 0 });
        let launch = |kernel, blocks, args| {
            Some(Launch { kernel, grid: Grid::new(blocks, THREADS), zero_copy: false, args })
        };
        let staged = |kernel, lanes, roles, args| {
            let (grid, zero_copy) =
                (Grid::new(roles * lanes, self.lane_threads(kernel, lanes)), self.handshakes(plan));
            Some(Launch { kernel, grid, zero_copy, args })
        };
        match plan {
            CudaPlan::Nothing => None,
            CudaPlan::Exchange { .. } => {
                let (to, bytes) = self.incoming(call);
                let span = |r: usize| Span { addr: to[r] as usize, bytes: bytes[r] as usize };
                let zero_copy = self.handshakes(plan);
                // Senders store messages at their destination; no rank loads.
                let least = self.symmetric.map_or(1, |symmetric| u64::from(symmetric.least));
                let takes = |r: &usize| {
                    zero_copy && *r != self.me && bytes[*r] >= least && self.direct(span(*r))
                };
                let handshake = self.handshake(0, (0..self.n).filter(takes).map(|r| 1 << r).sum());
                Some(self.exchange(plan, self.outgoing(call), to, bytes, zero_copy, handshake))
            }
            CudaPlan::ReduceLowLatency { blocks } => {
                let out = self.outgoing(call);
                let (ll, factor) = (self.low_latency(), call.factor);
                let (to, bytes) = (output.addr as u64, output.bytes as u64);
                let args = ReduceLowLatencyArgs {
                    common,
                    ll,
                    from: out.from,
                    send: out.bytes,
                    to,
                    bytes,
                    factor,
                };
                launch(&REDUCE_LOW_LATENCY, blocks, ArgBytes::of(&args))
            }
            CudaPlan::ReduceStaged { lanes, chunk } => {
                let (staging, mut out) =
                    (self.staging(StagingPass::Scatter, lanes, chunk), self.outgoing(call));
                let handshake =
                    self.handshake(all(call.inputs.iter().all(|&input| self.direct(input))), 0);
                for r in (0..self.n).filter(|&r| handshake.give != 0 && out.bytes[r] == 0) {
                    // An empty message may have any address of this heap.
                    out.from[r] = handshake.heap[self.me];
                }
                let (to, bytes) = (output.addr as u64, output.bytes as u64);
                let args = ReduceStagedArgs {
                    common,
                    staging,
                    out,
                    to,
                    bytes,
                    factor: call.factor,
                    handshake,
                };
                staged(&REDUCE_STAGED, lanes, 2, ArgBytes::of(&args))
            }
            CudaPlan::OneShot { blocks } | CudaPlan::TwoShot { blocks } => {
                let (input, sentinel) = (call.inputs[0], self.sentinel());
                let (from, to, bytes) = (input.addr as u64, output.addr as u64, input.bytes as u64);
                let args = AllReduceArgs { common, sentinel, from, to, bytes, factor: call.factor };
                // One-shot: one thread per unit, up to the maximum size of a block.
                let units = input.bytes.div_ceil(UNIT).div_ceil(blocks as usize) as u32;
                let one = matches!(plan, CudaPlan::OneShot { .. });
                let threads = if one { units.next_multiple_of(32).min(THREADS) } else { THREADS };
                let kernel = if one { &ONE_SHOT } else { &TWO_SHOT };
                Some(Launch {
                    kernel,
                    grid: Grid::new(blocks, threads),
                    zero_copy: false,
                    args: ArgBytes::of(&args),
                })
            }
            CudaPlan::NormOneShot { blocks, cluster } => {
                self.norm(call, &NORM_ONE_SHOT, (blocks, cluster), call.inputs[0])
            }
            CudaPlan::NormRows { blocks } => self.norm(
                call,
                &NORM_ROWS,
                (blocks, 1),
                all_reduce_norm::reduction(call).outputs[0],
            ),
            CudaPlan::CubeMesh { blocks } => {
                let CubeMeshView { mesh, peer } =
                    self.edges.unwrap_or_else(|| unreachable!("planned where there are edges"));
                let (me, input) = (self.me as u32, call.inputs[0]);
                let mut mates = mesh.quad_of(me).into_iter().filter(|&rank| rank != me);
                let args = arguments::CubeMeshArgs {
                    common: CommonArgs { peer, ..common },
                    ll: self.low_latency(),
                    from: input.addr as u64,
                    to: output.addr as u64,
                    bytes: input.bytes as u64,
                    factor: call.factor,
                    quad: std::array::from_fn(|_| mates.next().unwrap_or(me)),
                    relay: mesh.relay[self.me],
                    first_quad: u32::from(mesh.quad_of(me).contains(&0)),
                };
                launch(&CUBE_MESH, blocks, ArgBytes::of(&args))
            }
            CudaPlan::RsagStaged { lanes, chunk } => {
                let (scatter, gather) = (
                    self.staging(StagingPass::Scatter, lanes, chunk),
                    self.staging(StagingPass::Gather, lanes, chunk),
                );
                let input = call.inputs.first().copied().unwrap_or(output);
                let root = call.root.0;
                let targets =
                    if call.op == Collective::Reduce { 1 << root } else { (1u32 << self.n) - 1 };
                let (from, to, bytes) = (input.addr as u64, output.addr as u64, input.bytes as u64);
                // The root of a broadcast has no piece, because it would have to send that piece to
                // every rank.
                let n = self.n as u32;
                let broadcast = call.op == Collective::Broadcast;
                let (kernel, parts, first) = if broadcast {
                    (&BROADCAST, n - 1, (root + 1) % n)
                } else {
                    (&RSAG_STAGED, n, 0)
                };
                // The root of a broadcast already has all bytes.
                let stored = !broadcast || self.me != call.root.index();
                let takes =
                    stored && call.outputs.first().is_some_and(|&output| self.direct(output));
                let (factor, handshake) = (call.factor, self.handshake(0, all(takes)));
                let args = RsagStagedArgs {
                    common,
                    scatter,
                    gather,
                    from,
                    to,
                    bytes,
                    factor,
                    root,
                    parts,
                    first,
                    targets,
                    handshake,
                };
                staged(kernel, lanes, 3, ArgBytes::of(&args))
            }
        }
    }

    /// Returns the launch of `kernel`, which normalises the rows of `call`; `from` is this rank's
    /// input or the sum.
    fn norm(
        &self,
        call: &CallSpec,
        kernel: &'static KernelSpec,
        (blocks, cluster): (u32, u32),
        from: Span,
    ) -> Option<Launch> {
        let of_call = Norm::of(call)?;
        let addr = |spans: &[Span], at: usize| spans.get(at).map_or(0, |span| span.addr as u64);
        let args = arguments::NormArgs {
            common: self.common,
            sentinel: self.sentinel(),
            from: from.addr as u64,
            residual: addr(&call.inputs, 1),
            weight: addr(&call.inputs, 2),
            scale: addr(&call.inputs, 3),
            normed: addr(&call.outputs, 0),
            sum: addr(&call.outputs, 1),
            scales: addr(&call.outputs, 2),
            rows: of_call.rows as u64,
            hidden: of_call.hidden as u32,
            eps: of_call.eps,
            normed_type: of_call.normed as u32,
        };
        let grid = Grid {
            blocks,
            threads: all_reduce_norm::threads(&of_call, cluster as usize) as u32,
            cluster,
        };
        Some(Launch { kernel, grid, zero_copy: false, args: ArgBytes::of(&args) })
    }

    fn exchange(
        &self,
        plan: CudaPlan,
        out: OutgoingArgs,
        to: PerRank,
        bytes: PerRank,
        zero_copy: bool,
        handshake: Handshake,
    ) -> Launch {
        let CudaPlan::Exchange { ll_blocks, lanes } = plan else {
            unreachable!("only exchanges come here");
        };
        let (ll, staging) = (
            self.low_latency(),
            self.staging(StagingPass::Scatter, lanes, self.layout.slot_bytes() as u32),
        );
        let args = ExchangeArgs {
            common: self.common,
            ll,
            staging,
            ll_blocks,
            short_bytes: short_bytes(plan),
            out,
            to,
            bytes,
            handshake,
        };
        // This rank's message to itself may be longer than the others; more blocks then copy it.
        let keeping = out.bytes[self.me]
            .div_ceil((LL_UNITS * UNIT) as u64)
            .min(self.layout.lanes().min(self.ctas) as u64) as u32;
        let (kernel, grid) = match lanes {
            0 => (&EXCHANGE_LOW_LATENCY, Grid::new(ll_blocks.max(keeping), THREADS)),
            _ => (
                &EXCHANGE,
                Grid::new(ll_blocks.max(2 * lanes), self.lane_threads(&EXCHANGE, lanes)),
            ),
        };
        Launch { kernel, grid, zero_copy, args: ArgBytes::of(&args) }
    }
}
