//! Every kernel and every plan that selects it, on host threads that act as the GPUs of a group.
//! Ranks run ahead of each other, the words of a unit arrive separately, and threads pause at any
//! point.

use crate::calls::{Case, Tensors, case};
use crate::host::{Host, Memory, THREADS};
use crate::program::Program;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;
use symm::coll::call::Collective;
use symm::coll::cuda::kernel_spec::RSAG_STAGED;
use symm::coll::cuda::plan::{CudaPlan, CudaThresholds};
use symm::dtype::{DType, ReduceOp, SumOrder};
use symm::kernels::cuda::driver::Grid;
use symm::rank::Rank;

/// Runs `cases` back to back on every rank, `rounds` times, and checks each result.
fn run(n: usize, cases: &[Case], rounds: usize) -> HashMap<&'static str, usize> {
    let order = cases.first().map_or(SumOrder::Rank, |case| case.order);
    let host = Arc::new(Host::new(n).summing(order));
    let mut served = HashMap::new();
    for round in 0..rounds {
        let tensors: Vec<Vec<Tensors>> = cases
            .iter()
            .enumerate()
            .map(|(i, case)| {
                let of = |me: usize| {
                    let (inputs, outputs) = case.lengths(me, n);
                    Tensors::new(
                        &inputs,
                        &outputs,
                        case.shift,
                        ((round * 1000 + i) * 64 + me) as u64 * 0x9e37_79b9,
                    )
                };
                (0..n).map(of).collect()
            })
            .collect();
        std::thread::scope(|scope| {
            for me in 0..n {
                let (host, tensors) = (&host, &tensors);
                scope.spawn(move || {
                    for (i, (case, tensors)) in cases.iter().zip(tensors).enumerate() {
                        let call =
                            tensors[me].call(case.op, case.dtype, case.reduce_op, case.root as u32);
                        call.validate(Rank(me as u32), n).expect("a valid call");
                        let plan = host.plan(me, &call);
                        if let Some(launch) =
                            host.context(me, i as u64, Some(&call)).prepare(&call, plan)
                        {
                            host.run(me, &launch, case.dtype, case.reduce_op);
                        }
                    }
                });
            }
        });
        for (case, tensors) in cases.iter().zip(&tensors) {
            for me in 0..n {
                let call = tensors[me].call(case.op, case.dtype, case.reduce_op, case.root as u32);
                *served.entry(host.plan(me, &call).name()).or_insert(0) += 1;
                for (i, expected) in case.expected(me, tensors).iter().enumerate() {
                    let got = tensors[me].output(i);
                    let wrong = got.iter().zip(expected).position(|(a, b)| a != b);
                    let (op, count, dtype) = (case.op, case.count, case.dtype.name());
                    assert_eq!(
                        wrong, None,
                        "{op:?} of {count} × {dtype} on rank {me} of {n}, output {i}, round {round}"
                    );
                }
            }
        }
        assert!(host.is_well(), "a kernel gave up");
    }
    served
}

/// Every collective, in sizes that select every algorithm, in a mixed order.
fn mixture(counts: &[usize]) -> Vec<Case> {
    let mut cases = Vec::new();
    for (i, &count) in counts.iter().enumerate() {
        for op in Collective::C10D {
            cases.push(Case { shift: i % 3, ..case(*op, DType::I32, count) });
            if matches!(
                op,
                Collective::AllGather | Collective::ReduceScatter | Collective::AllToAll
            ) {
                cases.push(Case { uneven: true, ..case(*op, DType::I32, count) });
            }
        }
        cases.push(case(Collective::AllReduce, DType::F32, count));
    }
    cases
}

#[test]
fn two_ranks() {
    let served = run(2, &mixture(&[1, 7, 0, 300, 1500, 40_000, 5, 2]), 2);
    for name in [
        "exchange_low_latency",
        "exchange_staged",
        "reduce_low_latency",
        "reduce_staged",
        "rsag_staged",
    ] {
        assert!(served.contains_key(name), "{name} in {served:?}");
    }
}

#[test]
fn three_ranks() {
    let served = run(3, &mixture(&[1, 33, 1300, 20_001, 64]), 1);
    for name in ["exchange_mixed", "one_shot", "two_shot", "rsag_staged"] {
        assert!(served.contains_key(name), "{name} in {served:?}");
    }
}

#[test]
fn eight_ranks() {
    run(8, &mixture(&[3, 1200]), 1);
}

/// Pairwise sums by every algorithm.
#[test]
fn trees() {
    let tree = |case: Case| Case { order: SumOrder::Tree, ..case };
    let counts = [3, 500, 2000, 20_000];
    let sums = counts.iter().flat_map(|&count| {
        [Collective::AllReduce, Collective::ReduceScatter, Collective::Reduce]
            .map(|op| case(op, DType::F32, count))
    });
    let served = run(5, &sums.map(tree).collect::<Vec<_>>(), 1);
    for name in ["reduce_low_latency", "one_shot", "two_shot", "reduce_staged", "rsag_staged"] {
        assert!(served.contains_key(name), "{name} in {served:?}");
    }
    let means = counts.map(|count| {
        tree(Case { reduce_op: ReduceOp::Avg, ..case(Collective::AllReduce, DType::BF16, count) })
    });
    run(4, &means, 1);
    run(8, &[tree(case(Collective::AllReduce, DType::F64, 300))], 1);
}

#[test]
fn small_calls_by_the_hundred() {
    let cases: Vec<Case> = (0..60)
        .map(|i| {
            case(
                [Collective::AllReduce, Collective::Broadcast, Collective::AllToAll][i % 3],
                DType::F32,
                1 + i * 7 % 40,
            )
        })
        .collect();
    run(4, &cases, 4);
}

/// Two calls at once on two channels, started in a different order on each rank, on a device that
/// has room for little more than one of them.
#[test]
fn calls_that_do_not_fit_on_the_device_together_get_by() {
    let tuning = CudaThresholds {
        one_shot_bytes: 0,
        two_shot_bytes: 0,
        low_latency_bytes: 0,
        lanes: 6,
        threads: 8,
        ..CudaThresholds::of(2)
    };
    let channels = [Host::with_tuning(2, tuning), Host::with_tuning(2, tuning)];
    let cases = [
        case(Collective::AllReduce, DType::F32, 200_000),
        case(Collective::AllReduce, DType::F32, 200_000),
    ];
    let tensors: Vec<Vec<Tensors>> = (0..2)
        .map(|channel| {
            (0..2).map(|me| Tensors::new(&[800_000], &[800_000], 0, channel * 2 + me + 1)).collect()
        })
        .collect();
    let defines = [
        "-DSYMM_WORLD=2".into(),
        format!("-DSYMM_DTYPE={}", DType::F32 as u8),
        "-DSYMM_OP=0".into(),
        "-DSYMM_RESIDENT=15".into(),
    ];
    let program = Program::build_with("all_reduce/rsag_staged", &defines);
    std::thread::scope(|scope| {
        for me in 0..2 {
            for turn in 0..2 {
                let channel = (me + turn) % 2;
                let (host, case, tensors, program) =
                    (&channels[channel], &cases[channel], &tensors[channel][me], &program);
                scope.spawn(move || {
                    std::thread::sleep(Duration::from_millis(100 * turn as u64));
                    let call = tensors.call(case.op, case.dtype, case.reduce_op, 0);
                    let plan = host.plan(me, &call);
                    let launch = host.context(me, 1, Some(&call)).prepare(&call, plan).unwrap();
                    assert_eq!(launch.grid.blocks, 3 * 4, "two thirds of the lanes");
                    assert_eq!(launch.kernel, &RSAG_STAGED, "{plan:?}");
                    // SAFETY: memory and tensors live until all ranks are done.
                    unsafe {
                        program.launch(
                            "rsag_staged",
                            me as u32,
                            Grid::new(launch.grid.blocks, THREADS),
                            launch.args.bytes(),
                        )
                    };
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

// proves P1
#[test]
fn a_rank_that_never_comes_ends_the_wait_and_is_named() {
    let mut host = Host::new(3);
    host.timeout = Duration::from_millis(300);
    for (op, count) in [
        (Collective::AllReduce, 4),
        (Collective::AllReduce, 1000),
        (Collective::AllReduce, 20_000),
        (Collective::AllGather, 3),
        (Collective::AllGather, 9000),
    ] {
        std::thread::scope(|scope| {
            for me in 0..2 {
                let host = &host;
                scope.spawn(move || {
                    let case = case(op, DType::F32, count);
                    let (inputs, outputs) = case.lengths(me, 3);
                    let tensors = Tensors::new(&inputs, &outputs, 0, 1);
                    let call = tensors.call(op, DType::F32, ReduceOp::Sum, 0);
                    let plan = host.plan(me, &call);
                    assert_ne!(plan, CudaPlan::Nothing);
                    host.run(
                        me,
                        &host.context(me, 77, Some(&call)).prepare(&call, plan).unwrap(),
                        DType::F32,
                        ReduceOp::Sum,
                    );
                });
            }
        });
        assert!(host.longest() < Duration::from_secs(60), "{op:?}: {:?}", host.longest());
        for memory in &host.memory[..2] {
            assert_eq!(
                (memory.report[0], memory.report[1], memory.report[4 + 2]),
                (1, 77, 1),
                "{op:?} {count}: {:?}",
                memory.report
            );
        }
        host.memory = (0..3).map(|_| Memory::new(&host.layout)).collect();
    }
}

/// All-to-alls between two ranks, which both know the lengths; the messages of a rank to itself are
/// longer, or empty.
#[test]
fn what_a_rank_keeps_may_be_longer_than_what_it_sends() {
    let host = Host::with_tuning(
        2,
        CudaThresholds { low_latency_bytes: 8000, lanes: 6, ..CudaThresholds::of(2) },
    );
    let mut blocks = Vec::new();
    for (sent, kept) in [
        ([7, 900], [100_000, 3]),
        ([0, 0], [70_001, 0]),
        ([9000, 1], [200_000, 500]),
        ([50_000, 70_000], [0, 300_001]),
    ] {
        let given = |me: usize| if me == 0 { [kept[0], sent[0]] } else { [sent[1], kept[1]] };
        let tensors: Vec<Tensors> = (0..2)
            .map(|me| Tensors::new(&given(me), &[given(0)[me], given(1)[me]], me, me as u64 + 1))
            .collect();
        std::thread::scope(|scope| {
            for (me, tensors) in tensors.iter().enumerate() {
                let host = &host;
                scope.spawn(move || {
                    let call = tensors.call(Collective::AllToAll, DType::U8, ReduceOp::Sum, 0);
                    let launch = host
                        .context(me, 1, Some(&call))
                        .prepare(&call, host.plan(me, &call))
                        .unwrap();
                    host.run(me, &launch, DType::U8, ReduceOp::Sum);
                });
            }
        });
        for me in 0..2 {
            assert!(
                (0..2).all(|r| tensors[me].output(r) == tensors[r].input(me)),
                "{sent:?} {kept:?} on rank {me}"
            );
        }
        let call = tensors[0].call(Collective::AllToAll, DType::U8, ReduceOp::Sum, 0);
        let plan = host.plan(0, &call);
        blocks.push((
            plan.name(),
            host.context(0, 1, Some(&call)).prepare(&call, plan).unwrap().grid.blocks,
        ));
    }
    assert!(host.is_well(), "a kernel gave up");
    let (short, long) = ("exchange_low_latency", "exchange_staged");
    assert_eq!(blocks, [(short, 25), (short, 18), (long, 4), (long, 6)]);
}
