//! Every kernel for groups of 2 to 8 ranks as a GPU runs it, on a single GPU: all ranks' kernels
//! run at the same time, each on a separate stream. Not covered: links between GPUs.

use crate::calls::{Case, Tensors, case};
use crate::on_a_gpu;
use std::collections::HashMap;
use symm::coll::call::{CallSpec, Collective, Span};
use symm::coll::cuda::arguments::{CommonArgs, DIRECT_WORD, REPORT_WORDS};
use symm::coll::cuda::kernel_spec::{
    BROADCAST, EXCHANGE, EXCHANGE_LOW_LATENCY, KernelSpec as Launched, ONE_SHOT,
    REDUCE_LOW_LATENCY, REDUCE_STAGED, RSAG_STAGED, TWO_SHOT,
};
use symm::coll::cuda::launch::{CubeMeshView, Launch, LaunchContext, SymmetricView};
use symm::coll::cuda::plan::{self, Conditions, CudaThresholds};
use symm::coll::cuda::workspace::layout::{ChannelLayout, MAX_RANKS};
use symm::dtype::{DType, ReduceOp, SumOrder};
use symm::kernels::cuda::compile::{Arch, Variant, cubin};
use symm::kernels::cuda::driver::{Device, Kernel, OwnStream};
use symm::mem::pinned::PinnedWords;
use symm::mem::vmm::{DeviceAllocation, DeviceMapping, granularity};
use symm::topo::graph::CubeMesh;

/// Bytes for the tensors of one rank in one call.
const ARENA: usize = 64 << 20;

/// A program, whether it is zero-copy, and the element type and operation for which it is compiled,
/// if it depends on them.
type Key = (&'static Launched, bool, Option<(DType, ReduceOp)>);

struct Rank {
    memory: DeviceMapping,
    arena: DeviceMapping,
    stream: OwnStream,
    report: PinnedWords,
    kernels: HashMap<Key, Kernel>,
}

struct Group<'a> {
    device: &'a Device,
    n: usize,
    layout: ChannelLayout,
    tuning: CudaThresholds,
    stop: PinnedWords,
    cube_mesh: Option<CubeMesh>,
    /// The ranks (a bit each) whose tensors are symmetric memory; `None` if no call is zero-copy.
    symmetric: Option<u32>,
    ranks: Vec<Rank>,
}

impl<'a> Group<'a> {
    fn new(device: &'a Device, n: usize) -> Self {
        let layout = ChannelLayout::new(n, 128 << 20).unwrap();
        // All ranks' blocks must be on the GPU at the same time.
        let tuning = CudaThresholds {
            one_shot_bytes: 8 << 10,
            two_shot_bytes: 64 << 10,
            zero_copy_bytes: 1,
            low_latency_bytes: 16 << 10,
            blocks: 4,
            lanes: 4,
            ..CudaThresholds::of(n)
        };
        let map = |bytes: usize| {
            let bytes = bytes.next_multiple_of(granularity(device).unwrap());
            DeviceAllocation::create(device, bytes).unwrap().map(device).unwrap()
        };
        let rank = |_| {
            let (memory, arena, stream) =
                (map(layout.channel_bytes()), map(ARENA), OwnStream::new().unwrap());
            stream.stream().fill(memory.address(), 0, layout.channel_bytes()).unwrap();
            stream
                .stream()
                .fill(memory.address() + layout.sentinel() as u64, 0xFF, layout.sentinel_bytes())
                .unwrap();
            stream.stream().synchronize().unwrap();
            Rank {
                memory,
                arena,
                stream,
                report: PinnedWords::new(REPORT_WORDS).unwrap(),
                kernels: HashMap::new(),
            }
        };
        Self {
            device,
            n,
            layout,
            tuning,
            stop: PinnedWords::new(1).unwrap(),
            cube_mesh: None,
            symmetric: None,
            ranks: (0..n).map(rank).collect(),
        }
    }

    /// The kernel for `launch`, loaded.
    fn kernel(&mut self, me: usize, launch: &Launch, case: &Case) -> Kernel {
        let (major, minor) = self.device.capability;
        let key = (
            launch.kernel,
            launch.zero_copy,
            launch.kernel.typed.then_some((case.dtype, case.reduce_op)),
        );
        let Launched { program, symbol, .. } = *launch.kernel;
        let (dtype, op) = key.2.unzip();
        let order = key.2.map_or(SumOrder::Rank, |(dtype, op)| case.order.of(op, dtype, self.n));
        let variant = Variant {
            program,
            world: self.n as u32,
            rank: me as u32,
            dtype,
            op,
            zero_copy: launch.zero_copy,
            order,
        };
        let load =
            || Kernel::load(&cubin(&variant, Arch { major, minor }).unwrap(), symbol).unwrap();
        *self.ranks[me].kernels.entry(key).or_insert_with(load)
    }

    fn launch(&self, me: usize, kernel: Kernel, launch: &Launch) {
        kernel
            .launch(self.ranks[me].stream.stream(), launch.grid, false, launch.args.bytes())
            .unwrap();
    }

    /// `call` with its tensors moved to the GPU: inputs, then outputs, each with its former offset
    /// from a 16-byte boundary.
    fn moved(&self, me: usize, call: &CallSpec<'_>) -> CallSpec<'static> {
        let mut next = self.ranks[me].arena.address() as usize;
        let mut place = |span: &Span| {
            let at = next + span.addr % 16;
            next = (at + span.bytes).next_multiple_of(512);
            Span { addr: at, bytes: span.bytes }
        };
        CallSpec {
            inputs: call.inputs.iter().map(&mut place).collect(),
            outputs: call.outputs.iter().map(&mut place).collect(),
            ..call.clone().into_owned()
        }
    }

    /// Number of kernels of a rank that moved data between tensors without staging.
    fn direct(&self, me: usize) -> u32 {
        self.ranks[me].report.get()[DIRECT_WORD].load(std::sync::atomic::Ordering::Relaxed)
    }

    fn run(&mut self, case: &Case, seed: u64) -> &'static str {
        let tensors: Vec<Tensors> =
            (0..self.n).map(|me| case.tensors(me, self.n, seed as usize)).collect();
        let call = |me: usize| case.call(&tensors[me]);
        let mut peer = [0; MAX_RANKS];
        peer.iter_mut()
            .zip(&self.ranks)
            .for_each(|(address, rank)| *address = rank.memory.address());
        let mut name = "";
        let copy = |group: &Self, me: usize, to: &Span, from: &Span| {
            group.ranks[me]
                .stream
                .stream()
                .copy(to.addr as u64, from.addr as u64, to.bytes)
                .unwrap();
        };
        let device: Vec<CallSpec> = (0..self.n).map(|me| self.moved(me, &call(me))).collect();
        for (me, device) in device.iter().enumerate() {
            call(me)
                .inputs
                .iter()
                .zip(&*device.inputs)
                .for_each(|(from, to)| copy(self, me, to, from));
            self.ranks[me].stream.stream().synchronize().unwrap();
        }
        let layout = self.layout;
        let zero_copy = self.symmetric.is_some();
        let mut heap = [0; MAX_RANKS];
        heap.iter_mut().zip(&self.ranks).for_each(|(begins, rank)| *begins = rank.arena.address());
        let before: Vec<u32> = (0..self.n).map(|me| self.direct(me)).collect();
        let launches: Vec<_> = (0..self.n)
            .map(|me| {
                let cube_mesh = self.cube_mesh.is_some();
                let zero_copy =
                    zero_copy && plan::worth_zero_copy(&device[me], me, self.n, &self.tuning);
                let plan = plan::choose(
                    &device[me],
                    &Conditions {
                        me,
                        n: self.n,
                        layout: &layout,
                        tuning: &self.tuning,
                        cube_mesh,
                        zero_copy,
                    },
                );
                name = plan.served_as(zero_copy);
                let report = self.ranks[me].report.device();
                let common = CommonArgs {
                    peer,
                    stop: self.stop.device(),
                    report,
                    timeout: 10_000_000_000,
                    call: 1,
                };
                let edges = self.cube_mesh.as_ref().map(|mesh| CubeMeshView { mesh, peer });
                let here = self.symmetric.is_some_and(|ranks| ranks >> me & 1 == 1);
                let reachable = move |_: Span| here;
                let symmetric = zero_copy.then_some(SymmetricView {
                    heap,
                    count: 0,
                    least: 1,
                    reachable: &reachable,
                });
                LaunchContext {
                    me,
                    n: self.n,
                    layout: &layout,
                    threads: 128,
                    ctas: self.tuning.ctas,
                    edges,
                    common,
                    symmetric,
                    announces: true,
                }
                .prepare(&device[me], plan)
            })
            .collect();
        // Loading a kernel may wait for all running kernels, which wait for the kernel that is
        // being loaded. So all kernels are loaded before the first one runs.
        let kernels: Vec<_> = launches
            .iter()
            .enumerate()
            .map(|(me, launch)| launch.map(|launch| self.kernel(me, &launch, case)))
            .collect();
        for (me, (kernel, launch)) in kernels.iter().zip(&launches).enumerate() {
            if let (Some(kernel), Some(launch)) = (kernel, launch) {
                self.launch(me, *kernel, launch);
            }
        }
        for (me, device) in device.iter().enumerate() {
            self.ranks[me].stream.stream().synchronize().unwrap();
            call(me)
                .outputs
                .iter()
                .zip(&*device.outputs)
                .for_each(|(to, from)| copy(self, me, to, from));
            self.ranks[me].stream.stream().synchronize().unwrap();
            let report: Vec<u32> = self.ranks[me]
                .report
                .get()
                .iter()
                .map(|w| w.load(std::sync::atomic::Ordering::Relaxed))
                .collect();
            assert!(
                report[..DIRECT_WORD].iter().all(|&word| word == 0),
                "rank {me} of {} gave up in {name}: {report:?}",
                self.n
            );
        }
        let all = self.symmetric == Some((1 << self.n) - 1)
            && case.shift == 0
            && case.op != Collective::AllToAll;
        for (me, before) in before.into_iter().enumerate() {
            let direct = self.direct(me) - before;
            // The root of a broadcast sends all data through staging, unless there is only one
            // other rank.
            let gives =
                case.op == Collective::Broadcast && self.n > 2 && call(me).root.index() == me;
            let moves = name.ends_with("_zero_copy") && !gives;
            assert!(
                direct <= 1 && (!all || direct == u32::from(moves)),
                "rank {me} in {name}: {direct} kernels"
            );
            for (i, expected) in case.expected(me, &tensors).iter().enumerate() {
                let wrong = tensors[me].output(i).iter().zip(expected).position(|(a, b)| a != b);
                let (op, count, dtype, n) = (case.op, case.count, case.dtype.name(), self.n);
                assert_eq!(
                    wrong, None,
                    "{op:?} of {count} × {dtype} by {name} on rank {me} of {n}, output {i}"
                );
            }
        }
        name
    }
}

const DTYPES: [DType; 3] = [DType::BF16, DType::I32, DType::F64];

/// Pairwise sums by every algorithm, staged and zero-copy.
#[test]
fn trees_have_the_bits_of_the_cpu() {
    on_a_gpu(trees);
}

fn trees(device: &Device) {
    for n in [4, 5, 8] {
        for symmetric in [None, Some((1 << n) - 1)] {
            let mut group = Group::new(device, n);
            group.symmetric = symmetric;
            for dtype in [DType::BF16, DType::F64] {
                for (seed, count) in [37, 1500, 9000, 70_001].into_iter().enumerate() {
                    for op in [Collective::AllReduce, Collective::ReduceScatter, Collective::Reduce]
                    {
                        group.run(
                            &Case { order: SumOrder::Tree, ..case(op, dtype, count) },
                            seed as u64,
                        );
                    }
                }
            }
        }
    }
}

/// Compiles the kernels that the ranks will need, in parallel, so that they are cached.
fn compile_all(device: &Device, n: usize) {
    let (major, minor) = device.capability;
    let compile = |rank: u32, kernel: &Launched, dtype: Option<DType>| {
        for zero_copy in
            [false, true].into_iter().filter(|&zero_copy| !zero_copy || kernel.zero_copy)
        {
            let op = dtype.map(|_| ReduceOp::Sum);
            let variant = Variant {
                program: kernel.program,
                world: n as u32,
                rank,
                dtype,
                op,
                zero_copy,
                order: SumOrder::Rank,
            };
            cubin(&variant, Arch { major, minor }).unwrap();
        }
    };
    std::thread::scope(|scope| {
        for rank in 0..n as u32 {
            let compile = &compile;
            scope.spawn(move || {
                [&EXCHANGE, &EXCHANGE_LOW_LATENCY, &BROADCAST]
                    .into_iter()
                    .for_each(|kernel| compile(rank, kernel, None))
            });
            for dtype in DTYPES {
                scope.spawn(move || {
                    let sentinel: &[&Launched] =
                        if dtype == DType::BF16 { &[&ONE_SHOT, &TWO_SHOT] } else { &[] };
                    let kernels = [&REDUCE_LOW_LATENCY, &REDUCE_STAGED, &RSAG_STAGED];
                    kernels
                        .iter()
                        .chain(sentinel)
                        .for_each(|kernel| compile(rank, kernel, Some(dtype)));
                });
            }
        }
    });
}

#[test]
fn every_kernel_for_every_number_of_ranks() {
    on_a_gpu(every_kernel);
}

fn every_kernel(device: &Device) {
    // Under a sanitizer fewer ranks are enough.
    let most = std::env::var("SYMM_TEST_RANKS")
        .map_or(8, |ranks| ranks.parse().expect("a number of ranks"));
    for n in 2..=most {
        compile_all(device, n);
        let mut group = Group::new(device, n);
        let mut served = HashMap::<&str, u32>::new();
        let mut seed = 1;
        // No call is zero-copy, or symmetric memory holds the tensors of all ranks, of no rank, or
        // of every second rank.
        let lengths: [usize; 5] = [1, 37, 1500, 9000, 70_001];
        for symmetric in [None, Some((1 << n) - 1), Some(0), Some(0b1010_1010)] {
            group.symmetric = symmetric;
            let counts = if symmetric.is_none() { &lengths[..] } else { &lengths[2..] };
            for dtype in DTYPES {
                for &count in counts {
                    for &op in Collective::C10D {
                        for shift in [0, dtype.size() % 16] {
                            seed += 1;
                            let name = group.run(&Case { shift, ..case(op, dtype, count) }, seed);
                            *served.entry(name).or_insert(0) += 1;
                        }
                    }
                }
            }
        }
        group.symmetric = None;
        if n == 8 {
            // Integers only, because a cube mesh adds floats in a different order.
            group.cube_mesh = Some(CubeMesh {
                quad: [[0, 1, 2, 3], [4, 5, 6, 7]],
                relay: [5, 4, 7, 6, 1, 0, 3, 2],
            });
            for count in [1, 37, 1500, 9000] {
                let name =
                    group.run(&case(Collective::AllReduce, DType::I32, count), seed + count as u64);
                *served.entry(name).or_insert(0) += 1;
            }
        }
        eprintln!("{n} ranks: {served:?}");
        // Two ranks know all lengths of an exchange, so theirs is never mixed.
        assert!(served.len() >= if n == 2 { 10 } else { 11 }, "{n} ranks: {served:?}");
    }
}
