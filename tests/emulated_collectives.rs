//! Every kernel and the plans that lead to it, on threads of the host: what the GPUs of a group do, with ranks that run ahead of each
//! other, words of a unit torn apart and threads paused anywhere.
#![allow(missing_docs, clippy::unwrap_used)]

mod calls;
mod emulated;

use calls::{Case, Tensors, case};
use emulated::Program;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use symm::coll::call::{Call, Op, Span};
use symm::coll::cuda::args::{Common, REPORT_WORDS};
use symm::coll::cuda::layout::{Layout, MAX_RANKS, Stage};
use symm::coll::cuda::plan::{self, Facts, Plan, Tuning};
use symm::coll::cuda::prepare::{Args, Launch, Site, segment};
use symm::dtype::{DType, ReduceOp};
use symm::rank::Rank;

/// Threads of a block: at least as many as ranks.
const THREADS: u32 = 8;

/// A rank's device memory, whose marked slots are empty.
struct Memory {
    units: Vec<u128>,
    report: Vec<u32>,
    stop: Box<u32>,
}

impl Memory {
    fn new(layout: &Layout) -> Self {
        let mut units = vec![0u128; layout.channel_bytes() / 16];
        units[layout.marked() / 16..][..layout.marked_bytes() / 16].fill(u128::MAX);
        Self { units, report: vec![0; REPORT_WORDS], stop: Box::new(0) }
    }
}

/// A group whose GPUs are threads.
struct Host {
    n: usize,
    layout: Layout,
    tuning: Tuning,
    memory: Vec<Memory>,
    timeout: Duration,
}

impl Host {
    fn new(n: usize) -> Self {
        // Small everything: many blocks, chunks and turns of the slots in short messages.
        let tuning = Tuning {
            one_shot_bytes: 700,
            two_shot_bytes: 6000,
            low_latency_bytes: 5000,
            block_units: 16,
            blocks: 64,
            lanes: 2,
            threads: 8,
            overlap: 0,
        };
        Self::with_tuning(n, tuning)
    }

    fn with_tuning(n: usize, tuning: Tuning) -> Self {
        let layout = Layout::new(n, 64 << 20).expect("fits");
        let memory = (0..n).map(|_| Memory::new(&layout)).collect();
        Self { n, layout, tuning, memory, timeout: Duration::from_secs(60) }
    }

    /// As after some four billion calls: every count is about to begin anew.
    fn age(&mut self) {
        let layout = self.layout;
        let lanes = |stage| (layout.words(stage), layout.lanes() * size_of::<[[u32; MAX_RANKS]; 4]>());
        let counts =
            [(layout.ll_epochs(), 4 * layout.ll_blocks()), (layout.marked_epochs(), 128), lanes(Stage::Scatter), lanes(Stage::Spread)];
        for memory in &mut self.memory {
            for (offset, bytes) in counts {
                memory.units[offset / 16..][..bytes / 16].fill(0xffff_fffd_ffff_fffd_ffff_fffd_ffff_fffd);
            }
        }
    }

    fn common(&self, me: usize, call: u64) -> Common {
        let mut peer = [0; MAX_RANKS];
        for (address, memory) in peer.iter_mut().zip(&self.memory) {
            *address = memory.units.as_ptr() as u64;
        }
        let memory = &self.memory[me];
        let (stop, report) = (&raw const *memory.stop as u64, memory.report.as_ptr() as u64);
        Common { peer, stop, report, timeout: self.timeout.as_nanos() as u64, call }
    }

    fn site(&self, me: usize, call: u64) -> Site<'_> {
        Site { me, n: self.n, layout: &self.layout, edges: None, threads: THREADS, common: self.common(me, call) }
    }

    fn plan(&self, call: &Call) -> Plan {
        plan::choose(call, &Facts { n: self.n, layout: &self.layout, tuning: &self.tuning, cube_mesh: false })
    }

    fn run(&self, me: usize, launch: &Launch, dtype: DType, op: ReduceOp) {
        let (path, kernel) = launch.program.names();
        let typed = launch.program.reduces();
        let program = Program::build(path, self.n as u32, typed.then_some(dtype), typed.then_some(op));
        // SAFETY: memory and tensors live until all ranks are done.
        unsafe { program.launch(kernel, me as u32, launch.blocks, THREADS, launch.args.bytes()) };
    }
}

/// Runs `cases` back to back on every rank, `rounds` times, and checks each result.
fn run(n: usize, cases: &[Case], rounds: usize) -> HashMap<&'static str, usize> {
    let host = Arc::new(Host::new(n));
    let mut served = HashMap::new();
    for round in 0..rounds {
        let tensors: Vec<Vec<Tensors>> = cases
            .iter()
            .enumerate()
            .map(|(i, case)| {
                let of = |me: usize| {
                    let (inputs, outputs) = case.lengths(me, n);
                    Tensors::new(&inputs, &outputs, case.shift, ((round * 1000 + i) * 64 + me) as u64 * 0x9e37_79b9)
                };
                (0..n).map(of).collect()
            })
            .collect();
        std::thread::scope(|scope| {
            for me in 0..n {
                let (host, tensors) = (&host, &tensors);
                scope.spawn(move || {
                    for (i, (case, tensors)) in cases.iter().zip(tensors).enumerate() {
                        let call = tensors[me].call(case.op, case.dtype, case.reduce_op, case.root as u32);
                        call.validate(Rank(me as u32), n).expect("a valid call");
                        let plan = host.plan(&call);
                        for (index, part) in (0..).map_while(|index| segment(&call, n, index).map(|part| (index, part))) {
                            if let Some(launch) = host.site(me, i as u64).prepare(&part, plan.of_segment(index)) {
                                host.run(me, &launch, case.dtype, case.reduce_op);
                            }
                        }
                    }
                });
            }
        });
        for (case, tensors) in cases.iter().zip(&tensors) {
            for me in 0..n {
                let call = tensors[me].call(case.op, case.dtype, case.reduce_op, case.root as u32);
                *served.entry(host.plan(&call).name()).or_insert(0) += 1;
                for (i, expected) in case.expected(me, tensors).iter().enumerate() {
                    let got = tensors[me].output(i);
                    let wrong = got.iter().zip(expected).position(|(a, b)| a != b);
                    let (op, count, dtype) = (case.op, case.count, case.dtype.name());
                    assert_eq!(wrong, None, "{op:?} of {count} × {dtype} on rank {me} of {n}, output {i}, round {round}");
                }
            }
        }
        assert!(host.memory.iter().all(|memory| memory.report.iter().all(|&word| word == 0)), "a kernel gave up");
    }
    served
}

/// Every collective in sizes for every algorithm, in an order that mixes them.
fn mixture(counts: &[usize]) -> Vec<Case> {
    let mut cases = Vec::new();
    for (i, &count) in counts.iter().enumerate() {
        for op in Op::ALL {
            cases.push(Case { shift: i % 3, ..case(*op, DType::I32, count) });
            if matches!(op, Op::AllGather | Op::ReduceScatter | Op::AllToAll) {
                cases.push(Case { uneven: true, ..case(*op, DType::I32, count) });
            }
        }
        cases.push(case(Op::AllReduce, DType::F32, count));
    }
    cases
}

#[test]
fn two_ranks() {
    let served = run(2, &mixture(&[1, 7, 0, 300, 1500, 40_000, 5, 2]), 2);
    for name in ["exchange_low_latency", "exchange_staged", "exchange_mixed", "reduce_low_latency", "reduce_staged", "two_stage"] {
        assert!(served.contains_key(name), "{name} in {served:?}");
    }
}

#[test]
fn three_ranks() {
    let served = run(3, &mixture(&[1, 33, 1300, 20_001, 64]), 1);
    for name in ["one_shot", "two_shot", "two_stage"] {
        assert!(served.contains_key(name), "{name} in {served:?}");
    }
}

#[test]
fn eight_ranks() {
    run(8, &mixture(&[3, 1200]), 1);
}

#[test]
fn small_calls_by_the_hundred() {
    let cases: Vec<Case> = (0..60).map(|i| case([Op::AllReduce, Op::Broadcast, Op::AllToAll][i % 3], DType::F32, 1 + i * 7 % 40)).collect();
    run(4, &cases, 4);
}

/// Two calls at once, on two channels, begun in another order on each rank, where the device has room for one of them and a bit.
#[test]
fn calls_that_do_not_fit_on_the_device_together_get_by() {
    let lanes = 4;
    let tuning =
        Tuning { one_shot_bytes: 0, two_shot_bytes: 0, low_latency_bytes: 0, block_units: 16, blocks: 64, lanes, threads: 8, overlap: 0 };
    let channels = [Host::with_tuning(2, tuning), Host::with_tuning(2, tuning)];
    let cases = [case(Op::AllReduce, DType::F32, 200_000), case(Op::AllReduce, DType::F32, 200_000)];
    let tensors: Vec<Vec<Tensors>> =
        (0..2).map(|channel| (0..2).map(|me| Tensors::new(&[800_000], &[800_000], 0, channel * 2 + me + 1)).collect()).collect();
    let defines =
        ["-DSYMM_WORLD=2".into(), format!("-DSYMM_DTYPE={}", DType::F32 as u8), "-DSYMM_OP=0".into(), "-DSYMM_RESIDENT=15".into()];
    let program = Program::build_with("all_reduce/staged", &defines);
    std::thread::scope(|scope| {
        for me in 0..2 {
            for turn in 0..2 {
                let channel = (me + turn) % 2;
                let (host, case, tensors, program) = (&channels[channel], &cases[channel], &tensors[channel][me], &program);
                scope.spawn(move || {
                    std::thread::sleep(Duration::from_millis(100 * turn as u64));
                    let call = tensors.call(case.op, case.dtype, case.reduce_op, 0);
                    let plan = host.plan(&call);
                    let launch = host.site(me, 1).prepare(&call, plan).unwrap();
                    assert_eq!(launch.blocks, 3 * lanes as u32);
                    assert!(matches!(launch.args, Args::TwoStage(_)), "{plan:?}");
                    // SAFETY: memory and tensors live until all ranks are done.
                    unsafe { program.launch("all_reduce_staged", me as u32, launch.blocks, THREADS, launch.args.bytes()) };
                });
            }
        }
    });
    for ((host, case), tensors) in channels.iter().zip(&cases).zip(&tensors) {
        assert!(host.memory.iter().all(|memory| memory.report[0] == 0), "a kernel gave up");
        for (me, mine) in tensors.iter().enumerate() {
            assert!(mine.output(0) == case.expected(me, tensors)[0], "rank {me}");
        }
    }
}

#[test]
fn a_rank_that_never_comes_ends_the_wait_and_is_named() {
    let mut host = Host::new(3);
    host.timeout = Duration::from_millis(300);
    for (op, count) in [(Op::AllReduce, 4), (Op::AllReduce, 1000), (Op::AllReduce, 20_000), (Op::AllGather, 3), (Op::AllGather, 9000)] {
        let begun = Instant::now();
        std::thread::scope(|scope| {
            for me in 0..2 {
                let host = &host;
                scope.spawn(move || {
                    let case = case(op, DType::F32, count);
                    let (inputs, outputs) = case.lengths(me, 3);
                    let tensors = Tensors::new(&inputs, &outputs, 0, 1);
                    let call = tensors.call(op, DType::F32, ReduceOp::Sum, 0);
                    let plan = host.plan(&call);
                    assert_ne!(plan, Plan::Nothing);
                    host.run(me, &host.site(me, 77).prepare(&call, plan).unwrap(), DType::F32, ReduceOp::Sum);
                });
            }
        });
        assert!(begun.elapsed() < Duration::from_secs(20), "{op:?}: {:?}", begun.elapsed());
        for memory in &host.memory[..2] {
            assert_eq!((memory.report[0], memory.report[1], memory.report[4 + 2]), (1, 77, 1), "{op:?} {count}: {:?}", memory.report);
        }
        host.memory = (0..3).map(|_| Memory::new(&host.layout)).collect();
    }
}

/// xorshift.
struct Random(u64);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 20) as usize % end
    }

    fn of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())]
    }

    /// Mostly short.
    fn bytes(&mut self, unit: usize) -> usize {
        let end = self.of(&[1, 40, 40, 700, 700, 6000, 20_000, 60_000]);
        self.below(end) / unit * unit
    }
}

/// What surrounds every tensor, and what outputs begin with.
const CANARY: u8 = 0xA5;
const MARGIN: usize = 48;

/// A tensor at any address, between canaries.
struct Guarded {
    data: Vec<u8>,
    start: usize,
    bytes: usize,
}

impl Guarded {
    fn new(random: &mut Random, dtype: DType, bytes: usize) -> Self {
        let aligned = random.below(2) == 0;
        let mut data = vec![CANARY; bytes + 3 * MARGIN];
        let rest = 16 - data.as_ptr() as usize % 16;
        let start = 16 + rest + if aligned { 0 } else { random.below(16) };
        let size = dtype.size();
        for (i, byte) in data[start..][..bytes].iter_mut().enumerate() {
            // No NaN and no infinity: the highest bit of a float's exponent is 0.
            *byte = random.below(256) as u8 & if size > 1 && i % size == size - 1 { 0xBF } else { 0xFF };
        }
        Self { data, start, bytes }
    }

    fn span(&self) -> Span {
        Span { addr: self.data.as_ptr() as usize + self.start, bytes: self.bytes }
    }

    fn get(&self) -> &[u8] {
        &self.data[self.start..][..self.bytes]
    }
}

/// What a rank does in one step of a random program.
enum Act {
    Collective(Call),
    Transfers { sends: Vec<(usize, Span)>, receives: Vec<(usize, Span)> },
}

/// One step of a random program: what each rank does, and what each tensor holds in the end.
struct Scene {
    title: String,
    acts: Vec<Act>,
    tensors: Vec<(Guarded, Vec<u8>)>,
    /// Long messages go in parts of so many bytes.
    part: usize,
    dtype: DType,
    reduce_op: ReduceOp,
}

impl Scene {
    fn random(random: &mut Random, n: usize) -> Self {
        let (dtype, reduce_op) = random.of(&[
            (DType::U8, ReduceOp::Max),
            (DType::BF16, ReduceOp::Sum),
            (DType::BF16, ReduceOp::Sum),
            (DType::F64, ReduceOp::PremulSum),
        ]);
        let part = random.of(&[usize::MAX, 8192, 4096]);
        if random.below(8) == 0 {
            return Self::transfers(random, n, part);
        }
        let op = random.of(Op::ALL);
        let (root, base, uneven) = (random.below(n), random.bytes(dtype.size()), random.below(3));
        // Of what one rank has for another, or for all.
        let mut matrix = vec![vec![base; n]; n];
        for length in matrix.iter_mut().flatten() {
            *length = match uneven {
                0 => random.bytes(dtype.size()),
                1 if random.below(2) == 0 => 0,
                _ => base,
            };
        }
        let case = Case { op, dtype, reduce_op, root, count: base / dtype.size(), uneven: false, shift: 0 };
        let lengths = |me: usize| match op {
            Op::AllGather => (vec![matrix[me][0]], (0..n).map(|r| matrix[r][0]).collect()),
            Op::ReduceScatter => (matrix[0].clone(), vec![matrix[0][me]]),
            Op::AllToAll => (matrix[me].clone(), (0..n).map(|r| matrix[r][me]).collect()),
            Op::Barrier | Op::Broadcast | Op::AllReduce | Op::Reduce | Op::Gather | Op::Scatter => case.lengths(me, n),
        };
        let mut given = Vec::new();
        let mut got = Vec::new();
        for me in 0..n {
            let (inputs, outputs) = lengths(me);
            given.push(inputs.into_iter().map(|bytes| Guarded::new(random, dtype, bytes)).collect::<Vec<_>>());
            got.push(outputs.into_iter().map(|bytes| Guarded::new(random, dtype, bytes)).collect::<Vec<_>>());
        }
        let all: Vec<Tensors> = given
            .iter()
            .map(|inputs| Tensors { inputs: inputs.iter().map(|t| t.get().to_vec()).collect(), outputs: vec![], shift: 0, in_place: false })
            .collect();
        let in_place = random.below(2) == 0;
        let (mut acts, mut tensors) = (Vec::new(), Vec::new());
        for (me, (inputs, outputs)) in given.into_iter().zip(got).enumerate() {
            let expected = case.expected(me, &all);
            let spans = |list: &[Guarded]| list.iter().map(Guarded::span).collect::<Vec<_>>();
            let mut call =
                Call { op, dtype, reduce_op, root: Rank(root as u32), factor: 0.5, inputs: spans(&inputs), outputs: spans(&outputs) };
            let replaces = match op {
                Op::AllReduce | Op::Reduce => Some((0, 0)),
                Op::AllGather | Op::Gather => Some((0, me)),
                Op::Scatter | Op::ReduceScatter => Some((me, 0)),
                Op::Barrier | Op::Broadcast | Op::AllToAll => None,
            };
            let replaces = replaces.filter(|_| in_place && !call.inputs.is_empty() && !call.outputs.is_empty());
            if let Some((input, output)) = replaces {
                call.outputs[output] = call.inputs[input];
            }
            acts.push(Act::Collective(call));
            for (i, input) in inputs.into_iter().enumerate() {
                let kept =
                    replaces.filter(|&(input, _)| input == i).map_or_else(|| input.get().to_vec(), |(_, output)| expected[output].clone());
                tensors.push((input, kept));
            }
            for (i, output) in outputs.into_iter().enumerate() {
                let kept = if replaces.is_some_and(|(_, output)| output == i) { output.get().to_vec() } else { expected[i].clone() };
                tensors.push((output, kept));
            }
        }
        let title = format!("{op:?} of {matrix:?} bytes, {}, root {root}, in place: {in_place}, parts of {part}", dtype.name());
        Self { title, acts, tensors, part, dtype, reduce_op }
    }

    fn transfers(random: &mut Random, n: usize, part: usize) -> Self {
        let (mut sends, mut receives) = (vec![vec![]; n], vec![vec![]; n]);
        let mut tensors = Vec::new();
        for (from, sends) in sends.iter_mut().enumerate() {
            for to in (0..n).filter(|&to| to != from) {
                if random.below(2) == 0 {
                    let bytes = random.bytes(1);
                    let (out, into) = (Guarded::new(random, DType::U8, bytes), Guarded::new(random, DType::U8, bytes));
                    sends.push((to, out.span()));
                    receives[to].push((from, into.span()));
                    let message = out.get().to_vec();
                    tensors.push((out, message.clone()));
                    tensors.push((into, message));
                }
            }
        }
        let title = format!("transfers {sends:?}");
        let acts = sends.into_iter().zip(receives).map(|(sends, receives)| Act::Transfers { sends, receives }).collect();
        Self { title, acts, tensors, part, dtype: DType::U8, reduce_op: ReduceOp::Sum }
    }

    fn run(&self, host: &Host, me: usize, number: u64) {
        let site = host.site(me, number);
        let run = |launch: &Launch| host.run(me, launch, self.dtype, self.reduce_op);
        let call = match &self.acts[me] {
            Act::Collective(call) => call,
            Act::Transfers { sends, receives } => {
                let plan = plan::transfers(&host.layout, &host.tuning);
                return run(&site.transfers(sends, receives, plan).unwrap());
            }
        };
        call.validate(Rank(me as u32), host.n).expect("a valid call");
        let plan = host.plan(call);
        // As `segment` does it, where the plan may come to that.
        let in_parts =
            matches!(plan, Plan::TwoStage { .. } | Plan::ReduceStaged { .. }) || matches!(plan, Plan::Exchange { lanes: 1.., .. });
        let step = if in_parts { self.part } else { usize::MAX };
        for index in 0..call.longest().div_ceil(step).max(1) {
            let cut = |span: &Span| {
                let first = span.bytes.min(index * step);
                Span { addr: span.addr + first, bytes: (span.bytes - first).min(step) }
            };
            let part =
                Call { inputs: call.inputs.iter().map(cut).collect(), outputs: call.outputs.iter().map(cut).collect(), ..call.clone() };
            if let Some(launch) = site.prepare(&part, plan.of_segment(index)) {
                run(&launch);
            }
        }
    }

    fn check(&self, about: &str) {
        for (i, (tensor, expected)) in self.tensors.iter().enumerate() {
            let wrong = tensor.get().iter().zip(expected).position(|(a, b)| a != b);
            assert_eq!(wrong, None, "tensor {i} of {about}: {}", self.title);
            let (before, rest) = tensor.data.split_at(tensor.start);
            let untouched = before.iter().chain(&rest[tensor.bytes..]).all(|&byte| byte == CANARY);
            assert!(untouched, "bytes beside tensor {i} of {about} were written: {}", self.title);
        }
    }
}

/// Random programs on `n` ranks, each under a random tuning; `SYMM_RANDOM_SEED` and `SYMM_RANDOM_PROGRAMS` for others and more.
fn random_programs(n: usize) {
    let number = |name: &str, default: u64| std::env::var(name).map_or(default, |text| text.parse().expect("a number"));
    let seed = number("SYMM_RANDOM_SEED", 1);
    for program in 0..number("SYMM_RANDOM_PROGRAMS", 2) {
        let mut random = Random((seed << 32 | program << 8 | n as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        let tuning = Tuning {
            one_shot_bytes: random.of(&[0, 700, 5000, 70_000]),
            two_shot_bytes: random.of(&[0, 6000, 70_000]),
            low_latency_bytes: random.of(&[0, 600, 5000, 30_000]),
            block_units: random.of(&[16, 60, 256]),
            blocks: 64,
            lanes: 1 + random.below(4),
            threads: 8,
            overlap: 0,
        };
        let mut host = Host::with_tuning(n, tuning);
        if program % 2 == 1 {
            host.age();
        }
        let scenes: Vec<Scene> = (0..40).map(|_| Scene::random(&mut random, n)).collect();
        let naps: Vec<u64> = (0..n).map(|_| random.below(usize::MAX) as u64).collect();
        std::thread::scope(|scope| {
            for (me, nap) in naps.into_iter().enumerate() {
                let (host, scenes) = (&host, &scenes);
                scope.spawn(move || {
                    let mut random = Random(nap | 1);
                    for (i, scene) in scenes.iter().enumerate() {
                        if random.below(6) == 0 {
                            std::thread::sleep(Duration::from_millis(random.below(5) as u64));
                        }
                        scene.run(host, me, i as u64);
                    }
                });
            }
        });
        for (i, scene) in scenes.iter().enumerate() {
            scene.check(&format!("step {i} of program {program}, {n} ranks, {tuning:?}"));
        }
        assert!(host.memory.iter().all(|memory| memory.report.iter().all(|&word| word == 0)), "a kernel gave up");
    }
}

#[test]
fn random_programs_alone() {
    random_programs(1);
}

#[test]
fn random_programs_on_two_ranks() {
    random_programs(2);
}

#[test]
fn random_programs_on_three_ranks() {
    random_programs(3);
}

#[test]
fn random_programs_on_four_ranks() {
    random_programs(4);
}

#[test]
fn random_programs_on_five_ranks() {
    random_programs(5);
}
