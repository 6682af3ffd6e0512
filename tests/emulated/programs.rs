//! Random programs of collectives on host threads: every kind of call on tensors of any length at
//! any address, in symmetric memory or not, with ranks that run ahead of each other.

use crate::calls::{Case, Random, Tensors, case, factor};
use crate::guarded::{CANARY, Ground, Guarded, Symmetry};
use crate::heap::Heap;
use crate::host::{Host, at_once};
use std::time::Duration;
use symm::coll::call::{CallSpec, Collective, Span};
use symm::coll::cuda::plan::{self, CudaPlan, CudaThresholds};
use symm::dtype::{DType, ReduceOp};
use symm::rank::Rank;

/// Longer than any message that uses LL lines under the tunings here.
const LONG: usize = 70_000;

/// A collective of all of `n` ranks.
struct Request {
    op: Collective,
    n: usize,
    dtype: DType,
    reduce_op: ReduceOp,
    /// Length in bytes of a rank's tensor, or of each of its tensors if it has several. Uneven
    /// steps use it for some tensors at most.
    base: usize,
}

/// The action of a rank in one step of a random program.
enum Act {
    Collective(CallSpec<'static>),
    /// `apart` is true if the sends are in one launch, and the receives in another that runs at the
    /// same time.
    Transfers {
        sends: Vec<(usize, Span)>,
        receives: Vec<(usize, Span)>,
        apart: bool,
    },
}

/// One step of a random program: each rank's action, and the final content of each tensor.
struct Scene {
    title: String,
    acts: Vec<Act>,
    tensors: Vec<(Guarded, Vec<u8>)>,
    dtype: DType,
    reduce_op: ReduceOp,
}

impl Scene {
    fn random(random: &mut Random, n: usize, heaps: &[Heap]) -> Self {
        let (dtype, reduce_op) = random.of(&[
            (DType::U8, ReduceOp::Max),
            (DType::BF16, ReduceOp::Sum),
            (DType::BF16, ReduceOp::Sum),
            (DType::F64, ReduceOp::PremulSum),
        ]);
        let symmetry = random.of(&[Symmetry::None, Symmetry::Some, Symmetry::All, Symmetry::All]);
        if random.below(8) == 0 {
            return Self::transfers(random, n, heaps, symmetry);
        }
        let op = random.of(Collective::C10D);
        let base = random.bytes(dtype.size());
        Self::collective(random, heaps, symmetry, Request { op, n, dtype, reduce_op, base })
    }

    fn collective(
        random: &mut Random,
        heaps: &[Heap],
        symmetry: Symmetry,
        requested: Request,
    ) -> Self {
        let Request { op, n, dtype, reduce_op, base } = requested;
        let (root, uneven) = (random.below(n), random.below(3));
        // The rank, if any, that has only short messages, while all other ranks have messages that
        // are too long for LL lines.
        let apart =
            (op == Collective::AllToAll && n < 5 && random.below(3) == 0).then(|| random.below(n));
        // Length of the message from each rank (row) to each rank (column). An all-gather uses only
        // column 0, and a reduce-scatter only row 0.
        let mut matrix = vec![vec![base; n]; n];
        for (place, length) in matrix.iter_mut().flatten().enumerate() {
            *length = match (apart, uneven) {
                (Some(apart), _) if place / n == apart || place % n == apart => 16,
                (Some(_), _) => random.of(&[16, LONG, LONG]),
                (None, 0) => random.bytes(dtype.size()),
                (None, 1) if random.below(2) == 0 => 0,
                (None, _) => base,
            };
        }
        let case = Case { reduce_op, root, ..case(op, dtype, base / dtype.size()) };
        let lengths = |me: usize| match op {
            Collective::AllGather => (vec![matrix[me][0]], (0..n).map(|r| matrix[r][0]).collect()),
            Collective::ReduceScatter => (matrix[0].clone(), vec![matrix[0][me]]),
            Collective::AllToAll => (matrix[me].clone(), (0..n).map(|r| matrix[r][me]).collect()),
            Collective::Barrier
            | Collective::Broadcast
            | Collective::AllReduce
            | Collective::Reduce
            | Collective::Gather
            | Collective::Scatter => case.lengths(me, n),
            Collective::AllReduceAddRmsNorm => unreachable!("not of c10d"),
        };
        let mut given = Vec::new();
        let mut got = Vec::new();
        for me in 0..n {
            let (inputs, outputs) = lengths(me);
            let ground = Ground { heap: heaps.get(me), symmetry };
            let mut new = |bytes| Guarded::new(random, ground, dtype, bytes);
            given.push(inputs.into_iter().map(&mut new).collect::<Vec<_>>());
            got.push(outputs.into_iter().map(&mut new).collect::<Vec<_>>());
        }
        let all: Vec<Tensors> = given
            .iter()
            .map(|inputs| Tensors {
                inputs: inputs.iter().map(|t| t.get().to_vec()).collect(),
                outputs: vec![],
                shift: 0,
                in_place: false,
            })
            .collect();
        let in_place = random.below(2) == 0;
        let (mut acts, mut tensors) = (Vec::new(), Vec::new());
        for (me, (inputs, outputs)) in given.into_iter().zip(got).enumerate() {
            let expected = case.expected(me, &all);
            let spans = |list: &[Guarded]| list.iter().map(Guarded::span).collect::<Vec<_>>();
            let mut call = CallSpec {
                op,
                dtype,
                reduce_op,
                root: Rank(root as u32),
                factor: factor(me),
                inputs: spans(&inputs).into(),
                outputs: spans(&outputs).into(),
                call_site: None,
                compares: None,
            };
            let replaces = match op {
                Collective::AllReduce | Collective::Reduce => Some((0, 0)),
                Collective::AllGather | Collective::Gather => Some((0, me)),
                Collective::Scatter | Collective::ReduceScatter => Some((me, 0)),
                Collective::Barrier
                | Collective::Broadcast
                | Collective::AllToAll
                | Collective::AllReduceAddRmsNorm => None,
            };
            let replaces = replaces
                .filter(|_| in_place && !call.inputs.is_empty() && !call.outputs.is_empty());
            if let Some((input, output)) = replaces {
                call.outputs.to_mut()[output] = call.inputs[input];
            }
            acts.push(Act::Collective(call));
            for (i, input) in inputs.into_iter().enumerate() {
                let kept = replaces
                    .filter(|&(input, _)| input == i)
                    .map_or_else(|| input.get().to_vec(), |(_, output)| expected[output].clone());
                tensors.push((input, kept));
            }
            for (i, output) in outputs.into_iter().enumerate() {
                let kept = if replaces.is_some_and(|(_, output)| output == i) {
                    output.get().to_vec()
                } else {
                    expected[i].clone()
                };
                tensors.push((output, kept));
            }
        }
        let title = format!(
            "{op:?} of {matrix:?} bytes, {}, root {root}, in place: {in_place}, \
             symmetric: {symmetry:?}",
            dtype.name()
        );
        Self { title, acts, tensors, dtype, reduce_op }
    }

    fn transfers(random: &mut Random, n: usize, heaps: &[Heap], symmetry: Symmetry) -> Self {
        let (mut sends, mut receives) = (vec![vec![]; n], vec![vec![]; n]);
        let mut tensors = Vec::new();
        for (from, sends) in sends.iter_mut().enumerate() {
            for to in (0..n).filter(|&to| to != from) {
                if random.below(2) == 0 {
                    let bytes = random.bytes(1);
                    let ground = |rank| Ground { heap: heaps.get(rank), symmetry };
                    let out = Guarded::new(random, ground(from), DType::U8, bytes);
                    let into = Guarded::new(random, ground(to), DType::U8, bytes);
                    sends.push((to, out.span()));
                    receives[to].push((from, into.span()));
                    let message = out.get().to_vec();
                    tensors.push((out, message.clone()));
                    tensors.push((into, message));
                }
            }
        }
        let title = format!("transfers {sends:?}, symmetric: {symmetry:?}");
        let act =
            |(sends, receives)| Act::Transfers { sends, receives, apart: random.below(2) == 0 };
        let acts = sends.into_iter().zip(receives).map(act).collect();
        Self { title, acts, tensors, dtype: DType::U8, reduce_op: ReduceOp::Sum }
    }

    fn run(&self, host: &Host, me: usize, number: u64) {
        let call = match &self.acts[me] {
            Act::Collective(call) => call,
            Act::Transfers { sends, receives, apart } => {
                let plan = plan::transfers(&host.layout, &host.tuning);
                let launch = |sends: &[_], receives: &[_]| {
                    let context = host.context(me, number, None);
                    let launch = context.transfers(sends, receives, [0; 2], plan).unwrap();
                    host.run(me, &launch, self.dtype, self.reduce_op);
                };
                if !apart {
                    return launch(sends, receives);
                }
                return std::thread::scope(|scope| {
                    scope.spawn(|| launch(sends, &[]));
                    launch(&[], receives);
                });
            }
        };
        host.call(me, number, call);
    }

    /// Returns true if `me` moves data to or from a peer in a zero-copy kernel.
    fn moves(&self, host: &Host, me: usize) -> bool {
        let Act::Collective(call) = &self.acts[me] else { return false };
        let plan = host.plan(me, call);
        let short = plan::short_bytes(plan) as usize;
        let any = |spans: &[Span]| {
            spans
                .iter()
                .enumerate()
                .any(|(r, span)| span.bytes > short && (spans.len() < host.n || r != me))
        };
        // The root of a broadcast sends everything through staging, unless only one other rank
        // receives it.
        let gives = call.op == Collective::Broadcast && host.n > 2 && call.root.index() == me;
        let moved = !gives
            && (!matches!(plan, CudaPlan::Exchange { .. })
                || any(&call.inputs)
                || any(&call.outputs));
        host.is_zero_copy(me, call) && plan.has_lanes() && moved
    }

    fn check(&self, about: &str) {
        for (i, (tensor, expected)) in self.tensors.iter().enumerate() {
            let wrong = tensor.get().iter().zip(expected).position(|(a, b)| a != b);
            assert_eq!(wrong, None, "tensor {i} of {about}: {}", self.title);
            let (before, rest) = tensor.all().split_at(tensor.start);
            let untouched = before.iter().chain(&rest[tensor.bytes..]).all(|&byte| byte == CANARY);
            assert!(untouched, "bytes beside tensor {i} of {about} were written: {}", self.title);
        }
    }
}

/// Size of a rank's symmetric memory in bytes.
const HEAP: usize = 256 << 20;

/// Random programs on `n` ranks, each under a random tuning; `SYMM_RANDOM_SEED` selects other
/// programs, and `SYMM_RANDOM_PROGRAMS` sets their number.
fn random_programs(n: usize, zero_copy: bool) {
    let number = |name: &str, default: u64| {
        std::env::var(name).map_or(default, |text| text.parse().expect("a number"))
    };
    let seed = number("SYMM_RANDOM_SEED", 1);
    for program in 0..number("SYMM_RANDOM_PROGRAMS", 1) {
        let mut random =
            Random((seed << 32 | program << 8 | n as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        let tuning = CudaThresholds {
            one_shot_bytes: random.of(&[0, 700, 5000, 70_000]),
            two_shot_bytes: random.of(&[0, 6000, 70_000]),
            zero_copy_two_shot_bytes: random.of(&[0, 0, 6000]),
            zero_copy_bytes: random.of(&[1, 1, 2000]),
            low_latency_bytes: random.of(&[0, 600, 5000, if zero_copy { 700 } else { 30_000 }]),
            block_units: random.of(&[16, 60, 256]),
            blocks: 64,
            lanes: 1 + random.below(6),
            threads: 8,
            overlap: 0,
            cluster: 1,
            ..CudaThresholds::of(n)
        };
        let mut host = Host::with_tuning(n, tuning);
        if zero_copy {
            host.handshake(HEAP);
        }
        // In every second program all counts start just before they wrap. Whether the first program
        // is one of these depends on the number of ranks and on `zero_copy`.
        if (program as usize + n + usize::from(zero_copy)) % 2 == 1 {
            host.age();
        }
        let scenes: Vec<Scene> =
            (0..40).map(|_| Scene::random(&mut random, n, &host.heaps)).collect();
        let naps: Vec<u64> = (0..n).map(|_| random.below(usize::MAX) as u64).collect();
        at_once(0..n, |me| {
            let mut random = Random(naps[me] | 1);
            for (i, scene) in scenes.iter().enumerate() {
                if random.below(6) == 0 {
                    std::thread::sleep(Duration::from_millis(random.below(5) as u64));
                }
                scene.run(&host, me, i as u64);
            }
        });
        for (i, scene) in scenes.iter().enumerate() {
            scene.check(&format!("step {i} of program {program}, {n} ranks, {tuning:?}"));
        }
        host.assert_well();
        let direct = host.direct();
        assert_eq!(zero_copy, direct.iter().all(|&kernels| kernels > 0), "{direct:?}");
    }
}

tests! {
    random_programs_alone: random_programs(1, false),
    random_programs_on_two_ranks: random_programs(2, false),
    random_programs_on_three_ranks: random_programs(3, false),
    random_programs_on_four_ranks: random_programs(4, false),
    random_programs_on_five_ranks: random_programs(5, false),
    random_zero_copy_programs_on_two_ranks: random_programs(2, true),
    random_zero_copy_programs_on_three_ranks: random_programs(3, true),
    random_zero_copy_programs_on_four_ranks: random_programs(4, true),
    random_zero_copy_programs_on_eight_ranks: random_programs(8, true),
}

/// A tuning under which every collective of `n` ranks that can be zero-copy is zero-copy.
fn always_zero_copy(n: usize) -> CudaThresholds {
    CudaThresholds {
        one_shot_bytes: 0,
        zero_copy_two_shot_bytes: 0,
        zero_copy_bytes: 1,
        low_latency_bytes: 0,
        lanes: 4,
        threads: 8,
        ..CudaThresholds::of(n)
    }
}

/// Every collective with only symmetric tensors is zero-copy, for several element types and
/// operations and for lengths that are not multiples of a unit.
fn all_symmetric_goes_direct(n: usize) {
    let mut host = Host::with_tuning(n, always_zero_copy(n));
    host.handshake(HEAP);
    let mut random = Random(n as u64);
    let reductions = [
        (DType::F32, ReduceOp::Sum),
        (DType::BF16, ReduceOp::Avg),
        (DType::F8E4M3FN, ReduceOp::Max),
        (DType::I64, ReduceOp::Product),
        (DType::F64, ReduceOp::PremulSum),
        (DType::Bool, ReduceOp::Sum),
    ];
    let mut scenes = Vec::new();
    for (i, (dtype, reduce_op)) in reductions.into_iter().enumerate() {
        for op in Collective::C10D
            .iter()
            .filter(|op| **op != Collective::Barrier && (op.reduces() || i == 0))
        {
            // In an all-to-all not every rank knows the longest message, so shorter messages would
            // use LL lines.
            let least = if *op == Collective::AllToAll { 66_000 } else { 100 };
            let base = (least + random.below(20_000)) / dtype.size() * dtype.size();
            let requested = Request { op: *op, n, dtype, reduce_op, base };
            scenes.push(Scene::collective(&mut random, &host.heaps, Symmetry::All, requested));
        }
    }
    let least: Vec<usize> =
        (0..n).map(|me| scenes.iter().filter(|scene| scene.moves(&host, me)).count()).collect();
    at_once(0..n, |me| scenes.iter().for_each(|scene| scene.run(&host, me, 1)));
    scenes.iter().enumerate().for_each(|(i, scene)| scene.check(&format!("step {i}, {n} ranks")));
    host.assert_well();
    let direct: Vec<usize> = host.direct().iter().map(|&kernels| kernels as usize).collect();
    assert_eq!(direct, least, "{n} ranks");
    assert!(least.iter().all(|&scenes| scenes > 8), "{n} ranks: {least:?}");
}

tests! {
    all_symmetric_goes_direct_on_two_ranks: all_symmetric_goes_direct(2),
    all_symmetric_goes_direct_on_three_ranks: all_symmetric_goes_direct(3),
    all_symmetric_goes_direct_on_four_ranks: all_symmetric_goes_direct(4),
    all_symmetric_goes_direct_on_eight_ranks: all_symmetric_goes_direct(8),
}

/// A rank that does not know the address of a peer's memory touches nothing.
// proves P21
#[test]
fn a_rank_that_never_comes_leaves_symmetric_memory_untouched() {
    // Gather is not among these, because only its root waits for all other ranks.
    for op in [
        Collective::AllReduce,
        Collective::AllGather,
        Collective::ReduceScatter,
        Collective::Broadcast,
    ] {
        let mut host = Host::with_tuning(3, always_zero_copy(3));
        host.handshake(HEAP);
        host.timeout = Duration::from_millis(300);
        let requested =
            Request { op, n: 3, dtype: DType::F32, reduce_op: ReduceOp::Sum, base: 40_000 };
        let scene = Scene::collective(&mut Random(5), &host.heaps, Symmetry::All, requested);
        let before: Vec<Vec<u8>> =
            scene.tensors.iter().map(|(tensor, _)| tensor.all().to_vec()).collect();
        at_once(0..2, |me| scene.run(&host, me, 77));
        assert!(host.longest() < Duration::from_secs(60), "{op:?}: {:?}", host.longest());
        // The root of a broadcast does not time out: it finishes once its chunks are in slots.
        for (me, act) in scene.acts.iter().enumerate().take(2) {
            let root = matches!(act, Act::Collective(call) if call.root.index() == me);
            if op != Collective::Broadcast || !root {
                host.assert_names(me, 77, 2);
            }
        }
        assert_eq!(host.direct(), [0, 0, 0], "{op:?}");
        assert!(
            scene.tensors.iter().zip(&before).all(|((tensor, _), before)| tensor.all() == before),
            "{op:?}"
        );
    }
}
