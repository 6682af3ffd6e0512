//! Calls whose bytes copy engines move: two threads of each rank act as its two streams, and copies
//! are plain copies.

use crate::calls::{Case, Random, Tensors, case};
use crate::host::Host;
use std::sync::{Condvar, Mutex};
use std::time::Duration;
use symm::coll::call::{CallSpec, Collective, Span};
use symm::coll::cuda::copy_engine::{self, CopyTasks, DirectPeer, Task};
use symm::coll::cuda::plan::CudaThresholds;
use symm::dtype::{DType, ReduceOp, SumOrder};
use symm::rank::Rank;

/// Chunks of a few hundred bytes: long messages take several rounds of slots.
fn tuning(n: usize) -> CudaThresholds {
    CudaThresholds {
        copy_chunk_bytes: 256,
        lanes: 3,
        low_latency_bytes: 0,
        one_shot_bytes: 0,
        two_shot_bytes: 0,
        ..CudaThresholds::of(n)
    }
}

/// A count that other threads wait for.
#[derive(Default)]
struct Event(Mutex<u32>, Condvar);

impl Event {
    fn raise(&self) {
        *self.0.lock().expect("no panic") += 1;
        self.1.notify_all();
    }

    fn reaches(&self, count: u32) {
        drop(self.1.wait_while(self.0.lock().expect("no panic"), |now| *now < count));
    }
}

/// Runs one stream's part of `tasks`, which all belong to one call.
fn run_stream(
    host: &Host,
    me: usize,
    call: &CallSpec<'_>,
    tasks: &[Task],
    copies: bool,
    [forked, joined]: [&Event; 2],
) {
    let (mut forks, mut joins) = (0, 0);
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
            Task::Fork if copies => {
                forks += 1;
                forked.reaches(forks);
            }
            Task::Fork => forked.raise(),
            Task::Join if copies => joined.raise(),
            Task::Join => {
                joins += 1;
                joined.reaches(joins);
            }
        }
    }
}

/// Runs `call` on rank `me` as launch `number` of that rank.
fn run(host: &Host, me: usize, number: u64, call: &CallSpec<'_>, direct: Option<&[DirectPeer]>) {
    call.validate(Rank(me as u32), host.n).expect("a valid call");
    assert!(copy_engine::serves(call, host.n), "{:?}", call.op);
    let context = host.context(me, number, Some(call));
    let tasks = CopyTasks::new(&context, &host.tuning).of(call, direct);
    let (forked, joined) = (Event::default(), Event::default());
    std::thread::scope(|scope| {
        scope.spawn(|| run_stream(host, me, call, &tasks, true, [&forked, &joined]));
        run_stream(host, me, call, &tasks, false, [&forked, &joined]);
    });
}

/// Runs `cases` back to back on every rank. After every second case the ranks make a call that uses
/// kernels, which use the same slots.
fn staged(n: usize, cases: &[Case]) {
    let order = cases.first().map_or(SumOrder::Rank, |case| case.order);
    let host = Host::with_tuning(n, tuning(n)).summing(order);
    let of = |case: &Case, index: usize, me: usize| {
        let (inputs, outputs) = case.lengths(me, n);
        Tensors::new(&inputs, &outputs, case.shift, (index * 64 + me) as u64 * 0x9e37_79b9)
    };
    let tensors: Vec<Vec<Tensors>> = cases
        .iter()
        .enumerate()
        .map(|(index, case)| (0..n).map(|me| of(case, index, me)).collect())
        .collect();
    let between = case(Collective::AllReduce, DType::I32, 3000);
    std::thread::scope(|scope| {
        for me in 0..n {
            let (host, tensors, between) = (&host, &tensors, &between);
            scope.spawn(move || {
                for (index, (case, tensors)) in cases.iter().zip(tensors).enumerate() {
                    let call =
                        tensors[me].call(case.op, case.dtype, case.reduce_op, case.root as u32);
                    run(host, me, index as u64 + 1, &call, None);
                    if index % 2 == 1 {
                        let (inputs, outputs) = between.lengths(me, n);
                        let more = Tensors::new(&inputs, &outputs, 0, 7);
                        let call = more.call(between.op, between.dtype, between.reduce_op, 0);
                        host.run(
                            me,
                            &host
                                .context(me, 0, Some(&call))
                                .prepare(&call, host.plan(me, &call))
                                .unwrap(),
                            DType::I32,
                            ReduceOp::Sum,
                        );
                    }
                }
            });
        }
    });
    assert!(host.is_well(), "a kernel gave up");
    for (case, tensors) in cases.iter().zip(&tensors) {
        for me in 0..n {
            for (output, expected) in case.expected(me, tensors).iter().enumerate() {
                let wrong = tensors[me]
                    .output(output)
                    .iter()
                    .zip(expected)
                    .position(|(got, wanted)| got != wanted);
                let (op, count) = (case.op, case.count);
                assert_eq!(wrong, None, "{op:?} of {count} on rank {me} of {n}, output {output}");
            }
        }
    }
}

/// Sums and gathers of `counts`, aligned or not, and with parts of different lengths.
fn mixture(counts: &[usize], dtype: DType, reduce_op: ReduceOp, order: SumOrder) -> Vec<Case> {
    let one = |(index, &count): (usize, &usize)| {
        let of = |op| Case { shift: index % 3, reduce_op, order, ..case(op, dtype, count) };
        let gather = of(Collective::AllGather);
        [
            of(Collective::AllReduce),
            Case { uneven: true, ..of(Collective::ReduceScatter) },
            of(Collective::ReduceScatter),
            gather,
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
        ]);
        cases.push(Case { uneven: true, ..case(Collective::AllToAll, DType::I32, count) });
        cases.push(Case { uneven: true, ..case(Collective::AllGather, DType::I32, count) });
    }
    staged(2, &cases);
}

#[test]
fn staged_calls_of_more_ranks() {
    staged(3, &mixture(&[5000, 3, 900], DType::F32, ReduceOp::Avg, SumOrder::Rank));
    staged(5, &mixture(&[3001], DType::F16, ReduceOp::Sum, SumOrder::Tree));
    staged(8, &mixture(&[2500], DType::I32, ReduceOp::Max, SumOrder::Rank));
}

/// A rank's input of small random integers, and its output, with room for a gathered result.
struct Flat {
    input: Vec<u8>,
    output: Vec<u8>,
}

/// The address at which a rank expects the message of a rank that launches later: none, the right
/// one or a wrong one.
#[derive(Clone, Copy, PartialEq)]
enum Expects {
    Nothing,
    Right,
    Wrong,
}

/// Gathers and all-reduces from tensor to tensor, in place and not, in any order of the ranks, with
/// right and wrong expectations. In a gather that is not in place, the rank that launches last has
/// its outputs in reverse order.
#[test]
fn direct_calls() {
    for n in [2, 3, 4] {
        let host = Host::with_tuning(n, tuning(n));
        let mut random = Random(n as u64);
        for number in 1..=24u64 {
            let (in_place, reduces) = (random.below(2) == 0, random.below(2) == 0);
            let part = [1, 40, 3000, 20_001][random.below(4)];
            let whole = part * n;
            let mut all: Vec<Flat> = (0..n)
                .map(|_| Flat {
                    input: (0..if reduces { whole } else { part })
                        .map(|_| random.below(30) as u8)
                        .collect(),
                    output: vec![0; whole],
                })
                .collect();
            let inputs: Vec<Vec<u8>> = all.iter().map(|flat| flat.input.clone()).collect();
            // Each rank's position in the order of launches.
            let mut order: Vec<usize> = (0..n).collect();
            (1..n).rev().for_each(|last| order.swap(last, random.below(last + 1)));
            let reversed = |me: usize| order[me] == n - 1 && !in_place && !reduces;
            let calls: Vec<CallSpec<'static>> = (0..n)
                .map(|me| {
                    let Flat { input, output } = &mut all[me];
                    let start = output.as_mut_ptr() as usize;
                    if in_place {
                        let at = if reduces { 0 } else { me * part };
                        output[at..][..input.len()].copy_from_slice(input);
                    }
                    let from = if in_place {
                        start + if reduces { 0 } else { me * part }
                    } else {
                        input.as_ptr() as usize
                    };
                    let outputs: Vec<Span> = match reduces {
                        true => vec![Span { addr: start, bytes: whole }],
                        false if reversed(me) => (0..n)
                            .map(|rank| Span { addr: start + (n - 1 - rank) * part, bytes: part })
                            .collect(),
                        false => (0..n)
                            .map(|rank| Span { addr: start + rank * part, bytes: part })
                            .collect(),
                    };
                    let op = if reduces { Collective::AllReduce } else { Collective::AllGather };
                    CallSpec {
                        op,
                        dtype: DType::U8,
                        reduce_op: ReduceOp::Sum,
                        root: Rank(0),
                        factor: 1.0,
                        inputs: vec![Span { addr: from, bytes: input.len() }].into(),
                        outputs: outputs.into(),
                        call_site: None,
                    }
                })
                .collect();
            // The addresses of each rank's message and output.
            let tensors: Vec<(u64, u64)> = (0..n)
                .map(|rank| {
                    let whole =
                        copy_engine::consecutive(&calls[rank]).unwrap_or(calls[rank].outputs[0]);
                    let piece = copy_engine::piece(whole, rank, n).addr;
                    let input = if reduces { piece } else { calls[rank].inputs[0].addr };
                    (input as u64, whole.addr as u64)
                })
                .collect();
            let expects: Vec<Vec<Expects>> = (0..n)
                .map(|_| {
                    let one =
                        |_| [Expects::Nothing, Expects::Right, Expects::Wrong][random.below(3)];
                    (0..n).map(one).collect()
                })
                .collect();
            let garbage = vec![0xAAu8; whole];
            let peer = |me: usize, rank: usize| {
                let (input, output) = tensors[rank];
                if order[rank] < order[me] {
                    let (right, repairs) =
                        (expects[rank][me] == Expects::Right, expects[rank][me] == Expects::Wrong);
                    return DirectPeer {
                        rank,
                        pull: Some(input),
                        push: (!right).then_some(output),
                        repairs,
                    };
                }
                let pull = match expects[me][rank] {
                    Expects::Nothing => None,
                    Expects::Right => Some(input),
                    Expects::Wrong => Some(garbage.as_ptr() as u64),
                };
                DirectPeer { rank, pull, push: None, repairs: false }
            };
            std::thread::scope(|scope| {
                for (me, call) in calls.iter().enumerate() {
                    let peers: Vec<DirectPeer> =
                        (0..n).filter(|&rank| rank != me).map(|rank| peer(me, rank)).collect();
                    let host = &host;
                    scope.spawn(move || run(host, me, number, call, Some(&peers)));
                }
            });
            let expected: Vec<u8> = match reduces {
                true => (0..whole)
                    .map(|at| inputs.iter().fold(0u8, |sum, input| sum.wrapping_add(input[at])))
                    .collect(),
                false => inputs.concat(),
            };
            for (me, flat) in all.iter().enumerate() {
                let expected = if reversed(me) {
                    inputs.iter().rev().flatten().copied().collect()
                } else {
                    expected.clone()
                };
                assert!(
                    flat.output == expected,
                    "launch {number}, rank {me} of {n}, reduces {reduces}, in place \
                     {in_place}, {part} bytes"
                );
            }
        }
        assert!(host.is_well(), "a kernel gave up");
    }
}

#[test]
fn p1_a_rank_that_never_comes_is_named_and_nothing_is_summed() {
    let mut host = Host::with_tuning(3, tuning(3));
    host.timeout = Duration::from_millis(300);
    let tensors: Vec<Tensors> =
        (0..2).map(|me| Tensors::new(&[8000; 3], &[8000], 0, me + 1)).collect();
    std::thread::scope(|scope| {
        for (me, tensors) in tensors.iter().enumerate() {
            let host = &host;
            scope.spawn(move || {
                run(
                    host,
                    me,
                    77,
                    &tensors.call(Collective::ReduceScatter, DType::F32, ReduceOp::Sum, 0),
                    None,
                )
            });
        }
    });
    for (memory, tensors) in host.memory[..2].iter().zip(&tensors) {
        assert_eq!(
            (memory.report[0], memory.report[1], memory.report[4 + 2]),
            (1, 77, 1),
            "{:?}",
            memory.report
        );
        assert!(tensors.output(0).iter().all(|&byte| byte == 0xEE), "a sum without rank 2");
    }
}

/// Counts that are about to wrap, as after about four billion steps.
#[test]
fn counts_wrap() {
    let mut host = Host::with_tuning(2, tuning(2));
    host.age();
    let tensors: Vec<Vec<Tensors>> = (0..4)
        .map(|call| {
            (0..2).map(|me| Tensors::new(&[4000; 2], &[4000], 0, call * 2 + me + 1)).collect()
        })
        .collect();
    std::thread::scope(|scope| {
        for me in 0..2 {
            let (host, tensors) = (&host, &tensors);
            scope.spawn(move || {
                for (number, tensors) in tensors.iter().enumerate() {
                    let call =
                        tensors[me].call(Collective::ReduceScatter, DType::I32, ReduceOp::Sum, 0);
                    run(host, me, number as u64 + 1, &call, None);
                }
            });
        }
    });
    assert!(host.is_well(), "a kernel gave up");
    let sum = case(Collective::ReduceScatter, DType::I32, 1000);
    for tensors in &tensors {
        for (me, mine) in tensors.iter().enumerate() {
            assert!(mine.output(0) == sum.expected(me, tensors)[0], "rank {me}");
        }
    }
}
