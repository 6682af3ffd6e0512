//! The all-reduce along the edges of a hybrid cube mesh, on threads of the host: its bits, its edges, and its peace with the calls that
//! use the same lines.

use crate::program::Program;
use std::time::{Duration, Instant};
use symm::coll::call::{Call, Op, Span};
use symm::coll::cuda::arguments::{Common, REPORT_WORDS};
use symm::coll::cuda::launch::{Edges, Launch, LaunchContext};
use symm::coll::cuda::plan::{self, Conditions, Plan, Tuning};
use symm::coll::cuda::workspace::layout::{Layout, MAX_RANKS};
use symm::dtype::{DType, ReduceOp};
use symm::kernels::cpu::{self, Source, Store};
use symm::kernels::cuda::driver::Grid;
use symm::rank::Rank;
use symm::topo::graph::CubeMesh;
use symm::topo::mesh::NvlMesh;

const N: usize = 8;
/// Threads of a block.
const THREADS: u32 = 8;
/// What lies in memory that nobody may touch.
const GUARD: u128 = 0xA5A5_5A5A_0F0F_F0F0_A5A5_5A5A_0F0F_F0F0;

/// The cube mesh in which `label[i]` is the i-th GPU of a DGX-1.
fn mesh(label: [usize; N]) -> CubeMesh {
    let mut rows = vec![vec![0; N]; N];
    for (a, b) in (0..N).flat_map(|a| (0..N).map(move |b| (a, b))) {
        if a != b && (a / 4 == b / 4 || a % 4 == b % 4) {
            rows[label[a]][label[b]] = 1;
        }
    }
    CubeMesh::of(&NvlMesh::new(&rows).unwrap()).expect("a cube mesh")
}

fn straight() -> CubeMesh {
    mesh([0, 1, 2, 3, 4, 5, 6, 7])
}

/// Eight GPUs, of which each reaches its neighbours in a cube mesh alone where the plan says so. For everything else all reach all.
struct Host {
    mesh: CubeMesh,
    layout: Layout,
    tuning: Tuning,
    memory: Vec<Vec<u128>>,
    reports: Vec<Vec<u32>>,
    stop: Box<u32>,
    guard: Vec<u128>,
    timeout: Duration,
}

impl Host {
    fn new(mesh: CubeMesh) -> Self {
        let layout = Layout::new(N, 64 << 20).expect("fits");
        let mut units = vec![0u128; layout.channel_bytes() / 16];
        units[layout.sentinel() / 16..][..layout.sentinel_bytes() / 16].fill(u128::MAX);
        let guard = vec![GUARD; units.len()];
        let tuning = Tuning { lanes: 2, threads: THREADS as usize, ..Tuning::of(N) };
        let reports = vec![vec![0; REPORT_WORDS]; N];
        let timeout = Duration::from_secs(60);
        Self { mesh, layout, tuning, memory: vec![units; N], reports, stop: Box::new(0), guard, timeout }
    }

    fn plan(&self, me: usize, call: &Call) -> Plan {
        plan::choose(call, &Conditions { me, n: N, layout: &self.layout, tuning: &self.tuning, cube_mesh: true, zero_copy: false })
    }

    fn launch(&self, me: usize, number: u64, call: &Call) -> Option<Launch> {
        let mut peer = [0; MAX_RANKS];
        let mut along = [0; MAX_RANKS];
        for rank in 0..N {
            peer[rank] = self.memory[rank].as_ptr() as u64;
            let near = self.mesh.relay[me] as usize == rank || self.mesh.quad_of(me as u32).contains(&(rank as u32));
            along[rank] = if near { peer[rank] } else { self.guard.as_ptr() as u64 };
        }
        let (stop, report) = (&raw const *self.stop as u64, self.reports[me].as_ptr() as u64);
        let common = Common { peer, stop, report, timeout: self.timeout.as_nanos() as u64, call: number };
        let edges = Some(Edges { mesh: &self.mesh, peer: along });
        let call_site = LaunchContext { me, n: N, layout: &self.layout, edges, threads: THREADS, common, symmetric: None };
        call_site.prepare(call, self.plan(me, call))
    }

    fn run(&self, me: usize, number: u64, call: &Call, blocks: Option<u32>) {
        let Some(launch) = self.launch(me, number, call) else { return };
        let (path, kernel) = launch.program.names();
        let typed = launch.program.reduces();
        let program = Program::build(path, N as u32, typed.then_some(call.dtype), typed.then_some(call.reduce_op));
        // SAFETY: memory and tensors live until all ranks are done.
        unsafe { program.launch(kernel, me as u32, Grid::new(blocks.unwrap_or(launch.grid.blocks), THREADS), launch.args.bytes()) };
    }

    fn check(&self) {
        assert!(self.reports.iter().flatten().all(|&word| word == 0), "a kernel gave up");
        assert!(self.guard.iter().all(|&unit| unit == GUARD), "something was written to a rank that is no neighbour");
    }
}

fn reduced(op: ReduceOp, dtype: DType, pieces: &[&[u8]]) -> Vec<u8> {
    let mut result = vec![0u8; pieces[0].len()];
    let sources: Vec<Source> = pieces.iter().map(|piece| Source { ptr: piece.as_ptr(), factor: 0.5 }).collect();
    // SAFETY: all pieces and the result are equally long.
    unsafe { cpu::reduce(op, dtype, result.as_mut_ptr(), &sources, pieces[0].len() / dtype.size(), Store::Cached) };
    result
}

/// Each quad's sum in rank order, rounded; then the two, that with rank 0 first; the average divides at the end.
fn expected(mesh: &CubeMesh, op: ReduceOp, dtype: DType, inputs: &[&[u8]]) -> Vec<u8> {
    let first = if op == ReduceOp::Avg { ReduceOp::Sum } else { op };
    let last = if op == ReduceOp::PremulSum { ReduceOp::Sum } else { op };
    let halves = mesh.quad.map(|quad| reduced(first, dtype, &quad.map(|rank| inputs[rank as usize])));
    let mut pieces = vec![&halves[0][..], &halves[1][..]];
    // Six that change nothing, for the average to be of eight: -0 where there is one, since -0 + 0 is another number than -0.
    let signed = matches!(dtype, DType::F16 | DType::BF16 | DType::F32 | DType::F64);
    let nothing: Vec<u8> = (0..halves[0].len()).map(|i| if signed && i % dtype.size() == dtype.size() - 1 { 0x80 } else { 0 }).collect();
    if op == ReduceOp::Avg {
        pieces.resize(N, &nothing);
    }
    reduced(last, dtype, &pieces)
}

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 >> 16
    }
}

/// `count` elements: any bytes, or numbers that betray every other order of reduction.
fn elements(dtype: DType, op: ReduceOp, count: usize, seed: u64) -> Vec<u8> {
    const FINITE: [f32; 6] = [1e30, -1e30, 1.0, 3.0e-39, -0.0, -1.000_001];
    let mut random = Random((seed + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let mut number = || match random.next() {
        // Of equal ones the first stays.
        chance if op == ReduceOp::Min => [0.0, -0.0][chance as usize % 2],
        // Few, else nothing else would be seen.
        chance if chance.is_multiple_of(64) => [f32::NAN, f32::INFINITY][chance as usize / 64 % 2],
        chance => FINITE[chance as usize % 6],
    };
    match dtype {
        DType::F64 => (0..count).flat_map(|_| f64::from(number()).to_le_bytes()).collect(),
        DType::F32 => (0..count).flat_map(|_| number().to_le_bytes()).collect(),
        DType::BF16 => (0..count).flat_map(|_| number().to_le_bytes()[2..].to_vec()).collect(),
        DType::Bool => (0..count).map(|_| (random.next() & 1) as u8).collect(),
        DType::U8
        | DType::I8
        | DType::I16
        | DType::I32
        | DType::I64
        | DType::U16
        | DType::U32
        | DType::U64
        | DType::F16
        | DType::C64
        | DType::C128
        | DType::F8E5M2
        | DType::F8E4M3FN
        | DType::F8E5M2FNUZ
        | DType::F8E4M3FNUZ => (0..count * dtype.size()).map(|_| random.next() as u8).collect(),
    }
}

/// One call of all ranks.
#[derive(Clone, Copy)]
struct Case {
    op: Op,
    dtype: DType,
    reduce_op: ReduceOp,
    count: usize,
    /// Bytes by which tensors are off an aligned address.
    shift: usize,
    in_place: bool,
    /// Fewer blocks than planned, for more rounds.
    blocks: Option<u32>,
}

impl Case {
    fn all_reduce(dtype: DType, reduce_op: ReduceOp, count: usize) -> Self {
        Case { op: Op::AllReduce, dtype, reduce_op, count, shift: 0, in_place: false, blocks: None }
    }

    fn other(op: Op, count: usize) -> Self {
        Case { op, ..Case::all_reduce(DType::I32, ReduceOp::Sum, count) }
    }

    /// Pieces of the input and of the output.
    fn pieces(&self, me: usize) -> (usize, usize) {
        match self.op {
            Op::Barrier => (0, 0),
            Op::AllReduceAddRmsNorm => unreachable!("not of c10d"),
            Op::AllReduce => (1, 1),
            Op::Broadcast => {
                if me == 0 {
                    (1, 0)
                } else {
                    (0, 1)
                }
            }
            Op::Reduce => {
                if me == 0 {
                    (1, 1)
                } else {
                    (1, 0)
                }
            }
            Op::AllGather => (1, N),
            Op::Gather => {
                if me == 0 {
                    (1, N)
                } else {
                    (1, 0)
                }
            }
            Op::Scatter => {
                if me == 0 {
                    (N, 1)
                } else {
                    (0, 1)
                }
            }
            Op::ReduceScatter => (N, 1),
            Op::AllToAll => (N, N),
        }
    }

    fn result(&self, mesh: &CubeMesh, me: usize, all: &[Tensors]) -> Vec<Vec<u8>> {
        let column = |i: usize| -> Vec<&[u8]> { all.iter().map(|tensors| tensors.input(i)).collect() };
        let copies = |pieces: Vec<&[u8]>| pieces.iter().map(|piece| piece.to_vec()).collect();
        match self.op {
            _ if self.pieces(me).1 == 0 => vec![],
            Op::Barrier => vec![],
            Op::AllReduceAddRmsNorm => unreachable!("not of c10d"),
            Op::AllReduce => vec![expected(mesh, self.reduce_op, self.dtype, &column(0))],
            Op::Reduce => vec![reduced(self.reduce_op, self.dtype, &column(0))],
            Op::Broadcast => vec![all[0].input(0).to_vec()],
            Op::Scatter => vec![all[0].input(me).to_vec()],
            Op::AllGather | Op::Gather => copies(column(0)),
            Op::ReduceScatter => vec![reduced(self.reduce_op, self.dtype, &column(me))],
            Op::AllToAll => copies(column(me)),
        }
    }
}

/// What one rank gives and gets.
struct Tensors {
    before: Vec<Vec<u8>>,
    inputs: Vec<Vec<u8>>,
    outputs: Vec<Vec<u8>>,
    case: Case,
}

impl Tensors {
    fn new(case: Case, me: usize, seed: u64) -> Self {
        let (inputs, outputs) = case.pieces(me);
        let fill = |i: usize| [vec![0; case.shift], elements(case.dtype, case.reduce_op, case.count, seed * 64 + i as u64)].concat();
        let inputs: Vec<_> = (0..inputs).map(fill).collect();
        let outputs = vec![vec![0xEE; case.shift + case.count * case.dtype.size()]; outputs];
        Self { before: inputs.clone(), inputs, outputs, case }
    }

    fn call(&self) -> Call {
        let Case { op, dtype, reduce_op, shift, .. } = self.case;
        let spans = |data: &[Vec<u8>]| data.iter().map(|d| Span { addr: d.as_ptr() as usize + shift, bytes: d.len() - shift }).collect();
        let inputs: Vec<Span> = spans(&self.inputs);
        let outputs = if self.case.in_place { inputs.clone() } else { spans(&self.outputs) };
        Call { op, dtype, reduce_op, root: Rank(0), factor: 0.5, inputs, outputs, call_site: None }
    }

    fn input(&self, i: usize) -> &[u8] {
        &self.before[i][self.case.shift..]
    }

    fn output(&self, i: usize) -> &[u8] {
        let data = if self.case.in_place { &self.inputs } else { &self.outputs };
        &data[i][self.case.shift..]
    }
}

/// Runs `cases` back to back on every rank and checks each result; which algorithms served them.
fn run(mesh: CubeMesh, cases: &[Case]) -> Vec<&'static str> {
    let host = Host::new(mesh);
    let tensors: Vec<Vec<Tensors>> =
        cases.iter().enumerate().map(|(i, case)| (0..N).map(|me| Tensors::new(*case, me, (i * N + me) as u64)).collect()).collect();
    std::thread::scope(|scope| {
        for me in 0..N {
            let (host, tensors) = (&host, &tensors);
            scope.spawn(move || {
                for (i, (case, tensors)) in cases.iter().zip(tensors).enumerate() {
                    let call = tensors[me].call();
                    call.validate(Rank(me as u32), N).expect("a valid call");
                    host.run(me, i as u64, &call, case.blocks);
                }
            });
        }
    });
    host.check();
    for (i, (case, tensors)) in cases.iter().zip(&tensors).enumerate() {
        for me in 0..N {
            for (j, expected) in case.result(&host.mesh, me, tensors).iter().enumerate() {
                let wrong = tensors[me].output(j).iter().zip(expected).position(|(a, b)| a != b);
                let (op, count, dtype, how) = (case.op, case.count, case.dtype.name(), case.reduce_op.name());
                assert_eq!(wrong, None, "call {i}, {op:?} {how} of {count} × {dtype} on rank {me}, output {j}; {:?}", host.mesh);
            }
            if case.op == Op::AllReduce {
                assert_eq!(tensors[me].output(0), tensors[0].output(0), "rank {me} has other bits than rank 0");
            }
        }
    }
    tensors.iter().map(|tensors| host.plan(0, &tensors[0].call()).name()).collect()
}

const TYPES: [(DType, ReduceOp); 13] = [
    (DType::F32, ReduceOp::Sum),
    (DType::F32, ReduceOp::Avg),
    (DType::F32, ReduceOp::PremulSum),
    (DType::BF16, ReduceOp::Sum),
    (DType::BF16, ReduceOp::Avg),
    (DType::BF16, ReduceOp::Min),
    (DType::F16, ReduceOp::Product),
    (DType::F64, ReduceOp::Max),
    (DType::I64, ReduceOp::Product),
    (DType::I8, ReduceOp::Avg),
    (DType::U8, ReduceOp::BitXor),
    (DType::Bool, ReduceOp::Sum),
    (DType::F8E4M3FN, ReduceOp::Sum),
];

#[test]
fn every_rank_gets_the_bits_of_the_documented_order() {
    let all_reduce = |(dtype, op): (DType, ReduceOp), count| Case::all_reduce(dtype, op, count);
    let mut cases = Vec::new();
    for (i, of) in TYPES.into_iter().enumerate() {
        cases.push(Case { shift: of.0.size(), ..all_reduce(of, [1, 37, 515][i % 3]) });
        cases.push(Case { in_place: i % 2 == 0, ..all_reduce(of, 9000 / of.0.size()) });
    }
    assert!(run(straight(), &cases).iter().all(|name| *name == "cube_mesh"));
}

#[test]
fn messages_longer_than_the_lines_take_several_rounds() {
    let long = |count, blocks| Case { blocks: Some(blocks), ..Case::all_reduce(DType::BF16, ReduceOp::Sum, count) };
    // Rounds of 4 and 8 KiB; the last of some has nothing for its second block.
    run(straight(), &[long(2048, 1), long(2049, 1), long(6000, 1), long(9000, 2), long(8195, 2), long(3, 2), long(6000, 1)]);
}

#[test]
fn labels_do_not_matter() {
    let mut random = Random(77);
    for _ in 0..12 {
        let mut label = [0, 1, 2, 3, 4, 5, 6, 7];
        (1..N).for_each(|i| label.swap(i, random.next() as usize % (i + 1)));
        run(mesh(label), &[Case::all_reduce(DType::F32, ReduceOp::Sum, 100), Case::all_reduce(DType::BF16, ReduceOp::Avg, 70)]);
    }
}

#[test]
fn calls_that_hear_from_all_and_calls_that_hear_from_neighbours_take_turns() {
    let mut random = Random(5);
    let others = [Op::Barrier, Op::AllGather, Op::ReduceScatter, Op::Broadcast, Op::Reduce, Op::Gather, Op::Scatter, Op::AllToAll];
    let mut cases = Vec::new();
    for _ in 0..150 {
        let count = 1 + random.next() as usize % 60;
        let rounds = random.next().is_multiple_of(4);
        let count = if rounds { count + 1024 } else { count };
        let cube = Case { blocks: rounds.then_some(1), ..Case::all_reduce(DType::F32, ReduceOp::Sum, count) };
        let other = Case::other(others[random.next() as usize % others.len()], 1 + random.next() as usize % 60);
        cases.push(if random.next().is_multiple_of(2) { cube } else { other });
    }
    let names = run(mesh([3, 0, 6, 1, 7, 2, 5, 4]), &cases);
    for name in ["cube_mesh", "exchange_low_latency", "reduce_low_latency", "exchange_mixed"] {
        assert!(names.contains(&name), "{name} in {names:?}");
    }
    assert!(names.windows(2).filter(|pair| pair[0] != pair[1]).count() > 50, "{names:?}");
}

#[test]
fn a_rank_that_never_comes_is_named_by_its_quad_and_among_its_quad_by_the_other() {
    const MISSING: usize = 6;
    for label in [[0, 1, 2, 3, 4, 5, 6, 7], [6, 0, 3, 5, 1, 2, 4, 7]] {
        let mut host = Host::new(mesh(label));
        host.timeout = Duration::from_millis(400);
        let begun = Instant::now();
        std::thread::scope(|scope| {
            for me in (0..N).filter(|&me| me != MISSING) {
                let host = &host;
                scope.spawn(move || {
                    let tensors = Tensors::new(Case::all_reduce(DType::F32, ReduceOp::Sum, 50), me, 1);
                    host.run(me, 77, &tensors.call(), None);
                });
            }
        });
        assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
        let quad = host.mesh.quad_of(MISSING as u32);
        for me in (0..N).filter(|&me| me != MISSING) {
            let report = &host.reports[me];
            let named: Vec<u32> = (0..N as u32).filter(|&rank| report[4 + rank as usize] != 0).collect();
            let right = if quad.contains(&(me as u32)) { vec![MISSING as u32] } else { quad.to_vec() };
            assert_eq!((report[0], report[1], named), (1, 77, right), "rank {me}");
        }
    }
}
