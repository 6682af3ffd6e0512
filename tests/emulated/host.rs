//! A group whose GPUs are host threads.

use crate::heap::Heap;
use crate::program::{Program, defines};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use symm::coll::call::{CallSpec, Span};
use symm::coll::cuda::arguments::{CommonArgs, DIRECT_WORD, REPORT_WORDS};
use symm::coll::cuda::arrival;
use symm::coll::cuda::launch::{CubeMeshView, Launch, LaunchContext, SymmetricView};
use symm::coll::cuda::plan::{self, Conditions, CudaPlan, CudaThresholds};
use symm::coll::cuda::workspace::layout::{ChannelLayout, MAX_RANKS, StagingPass};
use symm::dtype::{DType, ReduceOp, SumOrder};
use symm::kernels::cuda::driver::Grid;
use symm::rank::Rank;
use symm::topo::graph::CubeMesh;

/// Runs `body` for each of `ranks` at the same time.
pub(crate) fn at_once(ranks: impl IntoIterator<Item = usize>, body: impl Fn(usize) + Sync) {
    let body = &body;
    std::thread::scope(|scope| {
        ranks.into_iter().for_each(|rank| drop(scope.spawn(move || body(rank))));
    });
}

/// Number of threads in a block; at least the number of ranks.
pub(crate) const THREADS: u32 = 8;

/// Index of the word, counted from `DIRECT_WORD`, in which the report counts zero-copy collectives
/// and sends. The next word counts zero-copy receives. The tests check both counts.
const COUNT: u32 = 2;

/// A rank's device memory, with empty sentinel slots.
pub(crate) struct Memory {
    units: Vec<u128>,
    pub(crate) report: Vec<u32>,
    stop: Box<u32>,
}

impl Memory {
    fn new(layout: &ChannelLayout) -> Self {
        let mut units = vec![0u128; layout.channel_bytes() / 16];
        units[layout.sentinel() / 16..][..layout.sentinel_bytes() / 16].fill(u128::MAX);
        Self { units, report: vec![0; REPORT_WORDS], stop: Box::new(0) }
    }
}

/// A group whose GPUs are threads.
pub(crate) struct Host {
    pub(crate) n: usize,
    pub(crate) layout: ChannelLayout,
    pub(crate) tuning: CudaThresholds,
    pub(crate) memory: Vec<Memory>,
    pub(crate) timeout: Duration,
    /// Each rank's symmetric memory; without it, calls are not zero-copy.
    pub(crate) heaps: Vec<Heap>,
    reachable: Vec<Box<dyn Fn(Span) -> bool + Send + Sync>>,
    /// If set, launches that use the edges of this mesh reach only neighbours: `guard` replaces the
    /// memory of all other ranks.
    mesh: Option<CubeMesh>,
    guard: Vec<u128>,
    longest: AtomicU64,
    /// Order in which the kernels of this group sum.
    order: SumOrder,
}

/// The content of memory that no rank may touch.
const GUARD: u128 = 0xA5A5_5A5A_0F0F_F0F0_A5A5_5A5A_0F0F_F0F0;

impl Host {
    pub(crate) fn new(n: usize) -> Self {
        // Small limits, so that short messages use many blocks, chunks and rounds of slots.
        let tuning = CudaThresholds {
            one_shot_bytes: 700,
            two_shot_bytes: 6000,
            zero_copy_two_shot_bytes: 6000,
            zero_copy_bytes: 1,
            low_latency_bytes: 5000,
            block_units: 16,
            blocks: 64,
            lanes: 4,
            threads: 8,
            overlap: 0,
            cluster: 4,
            ..CudaThresholds::of(n)
        };
        Self::with_tuning(n, tuning)
    }

    pub(crate) fn with_tuning(n: usize, tuning: CudaThresholds) -> Self {
        let layout = ChannelLayout::new(n, 64 << 20).expect("fits");
        let memory = (0..n).map(|_| Memory::new(&layout)).collect();
        Self {
            n,
            layout,
            tuning,
            memory,
            timeout: Duration::from_secs(60),
            heaps: Vec::new(),
            reachable: Vec::new(),
            mesh: None,
            guard: vec![],
            longest: AtomicU64::new(0),
            order: SumOrder::Rank,
        }
    }

    /// Ranks whose GPUs form a hybrid cube mesh.
    pub(crate) fn with_mesh(mesh: CubeMesh) -> Self {
        let n = mesh.relay.len();
        let tuning = CudaThresholds { lanes: 2, threads: 8, ..CudaThresholds::of(n) };
        let host = Self::with_tuning(n, tuning);
        let guard = vec![GUARD; host.memory[0].units.len()];
        Self { mesh: Some(mesh), guard, ..host }
    }

    /// Makes the kernels of this group sum in `order`.
    pub(crate) fn summing(self, order: SumOrder) -> Self {
        Self { order, ..self }
    }

    fn edges(&self, me: usize) -> Option<CubeMeshView<'_>> {
        let mesh = self.mesh.as_ref()?;
        let mut peer = [self.guard.as_ptr() as u64; MAX_RANKS];
        for (rank, memory) in self.memory.iter().enumerate() {
            if mesh.relay[me] as usize == rank || mesh.quad_of(me as u32).contains(&(rank as u32)) {
                peer[rank] = memory.units.as_ptr() as u64;
            }
        }
        Some(CubeMeshView { mesh, peer })
    }

    /// Sets all counts to the values that they have after about four billion calls, just before
    /// they wrap.
    pub(crate) fn age(&mut self) {
        const OLD: u128 = 0xffff_fffd_ffff_fffd_ffff_fffd_ffff_fffd;
        let layout = self.layout;
        let lanes =
            |stage| (layout.words(stage), layout.lanes() * size_of::<[[u32; MAX_RANKS]; 4]>());
        let counts = [
            (layout.ll_epochs(), 4 * layout.ll_blocks()),
            (layout.sentinel_epochs(), 256),
            (layout.handshake_epochs(), 4 * layout.handshake_blocks()),
            lanes(StagingPass::Scatter),
            lanes(StagingPass::Gather),
            (layout.message_words(true), 2 * size_of::<[[u32; MAX_RANKS]; 2]>()),
        ];
        for memory in &mut self.memory {
            for (offset, bytes) in counts {
                memory.units[offset / 16..][..bytes / 16].fill(OLD);
            }
            // `CopyWords`: two words for each rank, then the base.
            for words in [layout.copy_words() / 16, layout.arrivals() / 16] {
                memory.units[words..][..MAX_RANKS / 2].fill(OLD);
                memory.units[words + MAX_RANKS / 2] = 0xffff_fffd;
            }
        }
    }

    /// Gives every rank symmetric memory.
    pub(crate) fn handshake(&mut self, bytes: usize) {
        self.heaps = (0..self.n).map(|me| Heap::new(me, self.n, bytes)).collect();
        let within = |(me, heap): (usize, &Heap)| {
            let (begin, end) = (heap.seen_by(me), heap.seen_by(me) + bytes);
            Box::new(move |span: Span| begin <= span.addr && span.addr + span.bytes <= end)
                as Box<dyn Fn(Span) -> bool + Send + Sync>
        };
        self.reachable = self.heaps.iter().enumerate().map(within).collect();
    }

    pub(crate) fn is_zero_copy(&self, me: usize, call: &CallSpec<'_>) -> bool {
        !self.heaps.is_empty() && plan::worth_zero_copy(call, me, self.n, &self.tuning)
    }

    /// Number of each rank's kernels, for collectives and sends, that moved data directly between
    /// tensors.
    pub(crate) fn direct(&self) -> Vec<u32> {
        self.memory.iter().map(|memory| memory.report[DIRECT_WORD + COUNT as usize]).collect()
    }

    /// Number of receives of each rank whose tensors were written directly.
    pub(crate) fn received_in_place(&self) -> Vec<u32> {
        self.memory.iter().map(|memory| memory.report[DIRECT_WORD + COUNT as usize + 1]).collect()
    }

    /// Tells the kernels of `me` that the group has failed.
    pub(crate) fn stop(&mut self, me: usize) {
        *self.memory[me].stop = 1;
    }

    /// Asserts that a kernel of `me` timed out in call `number` and reported `missing`.
    pub(crate) fn assert_names(&self, me: usize, number: u32, missing: usize) {
        let report = &self.memory[me].report;
        assert_eq!((report[0], report[1], report[4 + missing]), (1, number, 1), "{report:?}");
    }

    /// Duration of the longest launch, without its compilation.
    pub(crate) fn longest(&self) -> Duration {
        Duration::from_millis(self.longest.load(Ordering::Relaxed))
    }

    /// Asserts that no kernel has timed out or written to a rank that is not a neighbour.
    pub(crate) fn assert_well(&self) {
        assert!(
            self.guard.iter().all(|&unit| unit == GUARD),
            "a kernel wrote to a rank that is not a neighbour"
        );
        let mut words = self.memory.iter().flat_map(|memory| &memory.report[..DIRECT_WORD]);
        assert!(words.all(|&word| word == 0), "a kernel gave up");
    }

    fn common(&self, me: usize, call: u64) -> CommonArgs {
        let mut peer = [0; MAX_RANKS];
        for (address, memory) in peer.iter_mut().zip(&self.memory) {
            *address = memory.units.as_ptr() as u64;
        }
        let memory = &self.memory[me];
        let (stop, report) = (&raw const *memory.stop as u64, memory.report.as_ptr() as u64);
        CommonArgs { peer, stop, report, timeout: self.timeout.as_nanos() as u64, call }
    }

    /// The context of launch `number`. `call` is `None` for sends and receives, which are always
    /// allowed to be zero-copy.
    pub(crate) fn context(
        &self,
        me: usize,
        number: u64,
        call: Option<&CallSpec<'_>>,
    ) -> LaunchContext<'_> {
        let mut heap = [0; MAX_RANKS];
        for (begins, heap) in heap.iter_mut().zip(&self.heaps) {
            *begins = heap.seen_by(me) as u64;
        }
        let least = self.tuning.zero_copy_bytes as u32;
        let zero_copy = call.is_none_or(|call| self.is_zero_copy(me, call));
        let reachable = self.reachable.get(me).filter(|_| zero_copy);
        let symmetric =
            reachable.map(|reachable| SymmetricView { heap, count: COUNT, least, reachable });
        LaunchContext {
            me,
            n: self.n,
            layout: &self.layout,
            edges: self.edges(me),
            threads: THREADS,
            ctas: self.tuning.ctas,
            common: self.common(me, number),
            symmetric,
            announces: call.is_some() && self.n > 1,
        }
    }

    pub(crate) fn plan(&self, me: usize, call: &CallSpec<'_>) -> CudaPlan {
        let conditions = Conditions {
            me,
            n: self.n,
            layout: &self.layout,
            tuning: &self.tuning,
            cube_mesh: self.mesh.is_some(),
            zero_copy: self.is_zero_copy(me, call),
        };
        plan::choose(call, &conditions)
    }

    /// Prepares `call` as launch `number` of rank `me`; `None` if the rank has nothing to do.
    pub(crate) fn prepare(&self, me: usize, number: u64, call: &CallSpec<'_>) -> Option<Launch> {
        call.validate(Rank(me as u32), self.n).expect("a valid call");
        self.context(me, number, Some(call)).prepare(call, self.plan(me, call))
    }

    /// Runs `call` as launch `number` of rank `me`. If its kernel has lanes, some ranks first wait
    /// for the others, in turn, because each rank decides that for itself.
    pub(crate) fn call(&self, me: usize, number: u64, call: &CallSpec<'_>) {
        let Some(launch) = self.prepare(me, number, call) else { return };
        let plan = self.plan(me, call);
        if self.n == 1 || !plan.has_lanes() || !(me as u64 + number).is_multiple_of(3) {
            return self.run(me, &launch, call.dtype, call.reduce_op);
        }
        let context = self.context(me, number, Some(call));
        let arrival = arrival::kernel(&context);
        let launch = LaunchContext { announces: false, ..context }.prepare(call, plan);
        for launch in [Some(arrival), launch].iter().flatten() {
            self.run(me, launch, call.dtype, call.reduce_op);
        }
    }

    pub(crate) fn run(&self, me: usize, launch: &Launch, dtype: DType, op: ReduceOp) {
        let Launch { kernel, grid, zero_copy, args } = launch;
        let mut defines = if kernel.typed {
            let order = self.order.of(op, dtype, self.n);
            defines(order, self.n as u32, Some(dtype), Some(op))
        } else {
            defines(SumOrder::Rank, self.n as u32, None, None)
        };
        defines.extend(zero_copy.then(|| "-DSYMM_ZERO_COPY=1".into()));
        let program = Program::build_with(kernel.program, &defines);
        let (begun, grid) = (Instant::now(), Grid { threads: THREADS, ..*grid });
        // SAFETY: memory and tensors live until all ranks have finished.
        unsafe { program.launch(kernel.symbol, me as u32, grid, args.bytes()) };
        self.longest.fetch_max(begun.elapsed().as_millis() as u64, Ordering::Relaxed);
    }
}
