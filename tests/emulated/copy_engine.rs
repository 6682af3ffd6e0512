//! Calls whose bytes copy engines move. In these tests two threads of each rank act as its two
//! streams, and copy the bytes themselves.

use crate::calls::{Case, Random, case};
use crate::host::{Host, at_once};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;
use symm::coll::call::{CallSpec, Collective, Span};
use symm::coll::cuda::copy_engine::{self, CopyTasks, DirectPeer, Task};
use symm::coll::cuda::plan::CudaThresholds;
use symm::dtype::{DType, ReduceOp, SumOrder};
use symm::rank::Rank;

/// Runs the part of a call's `tasks` that belongs to one stream: the copy stream if `copies`,
/// otherwise the main stream. The main stream notifies the copy stream at each fork, and the copy
/// stream notifies the main stream at each join.
fn run_stream(
    host: &Host,
    me: usize,
    call: &CallSpec<'_>,
    tasks: &[Task],
    copies: bool,
    (sender, receiver): (Sender<()>, Receiver<()>),
) {
    for task in tasks {
        match *task {
            Task::Kernel { side, ref launch } if side == copies => {
                host.run(me, launch, call.dtype, call.reduce_op)
            }
            Task::Copy { side, to, from, bytes } if side == copies => {
                // SAFETY: both ranges belong to tensors or workspaces that outlive the call.
                unsafe { std::ptr::copy_nonoverlapping(from as *const u8, to as *mut u8, bytes) };
            }
            Task::Kernel { .. } | Task::Copy { .. } => {}
            Task::Fork | Task::Join if matches!(task, Task::Join) == copies => {
                sender.send(()).expect("the other stream runs")
            }
            Task::Fork | Task::Join => receiver.recv().expect("the other stream runs"),
        }
    }
}

/// Runs `call` on rank `me` as launch `number` of that rank.
pub(crate) fn run(
    host: &Host,
    me: usize,
    number: u64,
    call: &CallSpec<'_>,
    direct: Option<&[DirectPeer]>,
) {
    call.validate(Rank(me as u32), host.n).expect("a valid call");
    assert!(copy_engine::serves(call, host.n), "{:?}", call.op);
    let context = host.context(me, number, Some(call));
    let tasks = CopyTasks::new(&context, &host.tuning).of(call, direct);
    let (fork, forked) = channel();
    let (join, joined) = channel();
    std::thread::scope(|scope| {
        scope.spawn(|| run_stream(host, me, call, &tasks, true, (join, forked)));
        run_stream(host, me, call, &tasks, false, (fork, joined));
    });
}

/// Runs `cases` back to back on every rank. After every second case the ranks make a call whose
/// kernels use the same slots.
fn staged(host: Host, cases: &[Case]) {
    let n = host.n;
    let host = host.summing(cases[0].order);
    let tensors = Case::all_tensors(cases, n, 0);
    let between = case(Collective::AllReduce, DType::I32, 3000);
    at_once(0..n, |me| {
        for (index, (case, tensors)) in cases.iter().zip(&tensors).enumerate() {
            run(&host, me, index as u64 + 1, &case.call(&tensors[me]), None);
            if index % 2 == 1 {
                let more = between.tensors(me, n, 7);
                host.call(me, 0, &between.call(&more));
            }
        }
    });
    host.assert_well();
    cases.iter().zip(&tensors).for_each(|(case, tensors)| case.check(tensors));
}

/// A group whose copies move 256 bytes at a time, so that long messages take several rounds of
/// slots.
pub(crate) fn host(n: usize) -> Host {
    let tuning = CudaThresholds {
        copy_chunk_bytes: 256,
        lanes: 3,
        low_latency_bytes: 0,
        one_shot_bytes: 0,
        two_shot_bytes: 0,
        ..CudaThresholds::of(n)
    };
    Host::with_tuning(n, tuning)
}

/// Reductions and all-gathers of each of `counts`, aligned or not; one reduce-scatter of each count
/// has parts of different lengths.
fn mixture(counts: &[usize], dtype: DType, reduce_op: ReduceOp, order: SumOrder) -> Vec<Case> {
    let one = |(index, &count): (usize, &usize)| {
        let of = |op| Case { shift: index % 3, reduce_op, order, ..case(op, dtype, count) };
        [
            of(Collective::AllReduce),
            Case { uneven: true, ..of(Collective::ReduceScatter) },
            of(Collective::ReduceScatter),
            of(Collective::AllGather),
        ]
    };
    counts.iter().enumerate().flat_map(one).collect()
}

#[test]
fn staged_calls_of_two_ranks() {
    let counts = [4000, 1, 777, 40_000, 65];
    let mut cases = mixture(&counts, DType::BF16, ReduceOp::Sum, SumOrder::Rank);
    for count in counts {
        cases.extend([
            case(Collective::Broadcast, DType::U8, count),
            case(Collective::AllToAll, DType::I32, count),
            Case { uneven: true, ..case(Collective::AllToAll, DType::I32, count) },
            Case { uneven: true, ..case(Collective::AllGather, DType::I32, count) },
        ]);
    }
    staged(host(2), &cases);
}

#[test]
fn staged_calls_of_more_ranks() {
    staged(host(3), &mixture(&[5000, 3, 900], DType::F32, ReduceOp::Avg, SumOrder::Rank));
    staged(host(5), &mixture(&[3001], DType::F16, ReduceOp::Sum, SumOrder::Tree));
    staged(host(8), &mixture(&[2500], DType::I32, ReduceOp::Max, SumOrder::Rank));
}

/// The address at which a rank expects the message of a rank that launches later: none, the right
/// one or a wrong one.
#[derive(Clone, Copy, PartialEq)]
enum Expects {
    Nothing,
    Right,
    Wrong,
}

/// All-gathers and all-reduces from tensor to tensor, in place or not. The ranks launch in a random
/// order, with right, wrong or no expectations. In a gather that is not in place, the rank that
/// launches last has its outputs in reverse order.
#[test]
fn direct_calls() {
    for n in [2, 3, 4] {
        let host = host(n);
        let mut random = Random(n as u64);
        for number in 1..=24u64 {
            let (in_place, reduces) = (random.below(2) == 0, random.below(2) == 0);
            let part = random.of(&[1, 40, 3000, 20_001]);
            let whole = part * n;
            let op = if reduces { Collective::AllReduce } else { Collective::AllGather };
            // Inputs of random integers, so small that their sum fits into a byte.
            let given = if reduces { whole } else { part };
            let mut input = |_| -> Vec<u8> { (0..given).map(|_| random.below(30) as u8).collect() };
            let inputs: Vec<Vec<u8>> = (0..n).map(&mut input).collect();
            let mut outputs = vec![vec![0; whole]; n];
            // Each rank's position in the order of launches.
            let mut order: Vec<usize> = (0..n).collect();
            (1..n).rev().for_each(|last| order.swap(last, random.below(last + 1)));
            let reversed = |me: usize| order[me] == n - 1 && !in_place && !reduces;
            let call = |(me, output): (usize, &mut Vec<u8>)| {
                let own = if reduces { 0 } else { me * part };
                let start = output.as_mut_ptr() as usize;
                let from = if in_place {
                    output[own..][..given].copy_from_slice(&inputs[me]);
                    start + own
                } else {
                    inputs[me].as_ptr() as usize
                };
                let place = |rank: usize| {
                    let rank = if reversed(me) { n - 1 - rank } else { rank };
                    Span { addr: start + rank * part, bytes: part }
                };
                let outputs = match reduces {
                    true => vec![Span { addr: start, bytes: whole }],
                    false => (0..n).map(place).collect(),
                };
                let inputs = vec![Span { addr: from, bytes: given }].into();
                let (dtype, outputs) = (DType::U8, outputs.into());
                CallSpec { op, dtype, inputs, outputs, ..CallSpec::barrier(None) }
            };
            let calls: Vec<CallSpec<'static>> = outputs.iter_mut().enumerate().map(call).collect();
            // The addresses of each rank's message and output.
            let addresses = |rank: usize| {
                let call = &calls[rank];
                let whole = copy_engine::consecutive(call).unwrap_or(call.outputs[0]);
                let piece = copy_engine::piece(whole, rank, n).addr;
                let input = if reduces { piece } else { call.inputs[0].addr };
                (input as u64, whole.addr as u64)
            };
            let mut expects = vec![vec![Expects::Nothing; n]; n];
            for one in expects.iter_mut().flatten() {
                *one = random.of(&[Expects::Nothing, Expects::Right, Expects::Wrong]);
            }
            let garbage = vec![0xAAu8; whole];
            let peer = |me: usize, rank: usize| {
                let (input, output) = addresses(rank);
                if order[rank] < order[me] {
                    let push = (expects[rank][me] != Expects::Right).then_some(output);
                    let repairs = expects[rank][me] == Expects::Wrong;
                    return DirectPeer { rank, pull: Some(input), push, repairs };
                }
                let pull = match expects[me][rank] {
                    Expects::Nothing => None,
                    Expects::Right => Some(input),
                    Expects::Wrong => Some(garbage.as_ptr() as u64),
                };
                DirectPeer { rank, pull, push: None, repairs: false }
            };
            at_once(0..n, |me| {
                let others = (0..n).filter(|&rank| rank != me);
                let peers: Vec<DirectPeer> = others.map(|rank| peer(me, rank)).collect();
                run(&host, me, number, &calls[me], Some(&peers));
            });
            let sum = |at: usize| inputs.iter().map(|input| input[at]).sum();
            for (me, output) in outputs.iter().enumerate() {
                let expected: Vec<u8> = if reduces {
                    (0..whole).map(sum).collect()
                } else if reversed(me) {
                    inputs.iter().rev().flatten().copied().collect()
                } else {
                    inputs.concat()
                };
                assert!(
                    *output == expected,
                    "launch {number}, rank {me} of {n}, reduces {reduces}, in place {in_place}, \
                     {part} bytes"
                );
            }
        }
        host.assert_well();
    }
}

/// Reduce-scatters of two ranks from tensor to tensor. The rank that launches first has a right,
/// a wrong or no expectation. The output of the rank that launches last may be its part of the
/// input.
#[test]
fn direct_reduce_scatters() {
    let host = host(2);
    let mut random = Random(5);
    for number in 1..=60u64 {
        let (first, part) = (random.below(2), random.of(&[1, 40, 3000, 20_001]));
        let (in_place, shift) = (random.below(2) == 0, random.below(3));
        let expects = random.of(&[Expects::Nothing, Expects::Right, Expects::Wrong]);
        let mut input =
            |_| -> Vec<u8> { (0..shift + 2 * part).map(|_| random.below(100) as u8).collect() };
        let mut inputs: Vec<Vec<u8>> = (0..2).map(&mut input).collect();
        let sum: Vec<u8> =
            (shift..shift + 2 * part).map(|at| inputs[0][at] + inputs[1][at]).collect();
        let mut outputs = vec![vec![0xEE; part]; 2];
        let of = |me: usize, input: &mut [u8], output: &mut [u8]| {
            let start = input.as_mut_ptr() as usize + shift;
            let span = |rank: usize| Span { addr: start + rank * part, bytes: part };
            let place = Span { addr: output.as_mut_ptr() as usize, bytes: part };
            let place = if in_place && me != first { span(me) } else { place };
            CallSpec {
                op: Collective::ReduceScatter,
                dtype: DType::U8,
                inputs: vec![span(0), span(1)].into(),
                outputs: vec![place].into(),
                ..CallSpec::barrier(None)
            }
        };
        let both = inputs.iter_mut().zip(&mut outputs).enumerate();
        let calls: Vec<CallSpec<'static>> =
            both.map(|(me, (input, output))| of(me, input, output)).collect();
        let message = |from: usize| calls[from].inputs[1 - from].addr as u64;
        let garbage = vec![0xAAu8; part];
        at_once(0..2, |me| {
            let (rank, later) = (1 - me, me != first);
            let pull = match if later { Expects::Right } else { expects } {
                Expects::Nothing => None,
                Expects::Right => Some(message(rank)),
                Expects::Wrong => Some(garbage.as_ptr() as u64),
            };
            let output = calls[rank].outputs[0].addr as u64;
            let push = (later && expects != Expects::Right).then_some(output);
            let repairs = later && expects == Expects::Wrong;
            let peer = DirectPeer { rank, pull, push, repairs };
            run(&host, me, number, &calls[me], Some(&[peer]));
        });
        for (me, output) in outputs.iter().enumerate() {
            let found = if in_place && me != first {
                &inputs[me][shift + me * part..][..part]
            } else {
                &output[..]
            };
            assert!(
                *found == sum[me * part..][..part],
                "launch {number}, rank {me}, {part} bytes, in place {in_place}, first {first}"
            );
        }
    }
    host.assert_well();
}

#[test]
fn p1_a_rank_that_never_comes_is_named_and_nothing_is_summed() {
    let mut host = host(3);
    host.timeout = Duration::from_millis(300);
    let case = case(Collective::ReduceScatter, DType::F32, 2000);
    let tensors = [0, 1].map(|me| case.tensors(me, 3, 1));
    at_once(0..2, |me| run(&host, me, 77, &case.call(&tensors[me]), None));
    for (me, tensors) in tensors.iter().enumerate() {
        host.assert_names(me, 77, 2);
        assert!(tensors.output(0).iter().all(|&byte| byte == 0xEE), "a sum without rank 2");
    }
}

/// Rank 1 pushes its message to rank 0's output, once rank 0 has arrived; it never does.
#[test]
fn a_rank_that_times_out_writes_to_no_peer() {
    for repairs in [false, true] {
        let mut host = host(2);
        host.timeout = Duration::from_millis(300);
        let case = case(Collective::AllGather, DType::U8, 3000);
        let tensors = [0, 1].map(|me| case.tensors(me, 2, 1));
        let (theirs, call) = (case.call(&tensors[0]), case.call(&tensors[1]));
        let (input, output) = (theirs.inputs[0].addr as u64, theirs.outputs[0].addr as u64);
        let peer = DirectPeer { rank: 0, pull: Some(input), push: Some(output), repairs };
        run(&host, 1, 5, &call, Some(&[peer]));
        host.assert_names(1, 5, 0);
        for i in 0..2 {
            assert!(tensors[0].output(i).iter().all(|&byte| byte == 0xEE), "rank 0's output {i}");
        }
    }
}

/// Rank 1 would add rank 0's message to its own part of the input, once rank 0 has arrived.
#[test]
fn a_direct_sum_that_times_out_stores_nothing() {
    let mut host = host(2);
    host.timeout = Duration::from_millis(300);
    let case = case(Collective::ReduceScatter, DType::U8, 3000);
    let tensors = [0, 1].map(|me| case.tensors(me, 2, 1));
    let [theirs, mut call] = [0, 1].map(|me| case.call(&tensors[me]));
    call.outputs = vec![call.inputs[1]].into();
    // SAFETY: the tensor outlives the call.
    let own = || unsafe {
        std::slice::from_raw_parts(call.inputs[1].addr as *const u8, call.inputs[1].bytes).to_vec()
    };
    let before = own();
    let pull = Some(theirs.inputs[1].addr as u64);
    run(&host, 1, 5, &call, Some(&[DirectPeer { rank: 0, pull, push: None, repairs: false }]));
    host.assert_names(1, 5, 0);
    assert!(own() == before, "a sum without rank 0");
}

/// Counts that are about to wrap, as after about four billion steps.
#[test]
fn counts_wrap() {
    let mut host = host(2);
    host.age();
    staged(host, &[(); 4].map(|()| case(Collective::ReduceScatter, DType::I32, 1000)));
}
