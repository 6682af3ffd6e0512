//! Every kernel and every plan that selects it, on host threads that act as the GPUs of a group.
//! Ranks run ahead of each other, the words of a unit arrive separately, and threads pause at any
//! point.

use crate::calls::{Case, Tensors, case};
use crate::host::{Host, THREADS, at_once};
use crate::program::{Program, defines};
use std::collections::BTreeSet;
use std::time::Duration;
use symm::coll::call::Collective;
use symm::coll::cuda::kernel_spec::RSAG_STAGED;
use symm::coll::cuda::plan::{CudaPlan, CudaThresholds};
use symm::dtype::{DType, ReduceOp, SumOrder};
use symm::kernels::cuda::driver::Grid;

/// Runs `cases` back to back on every rank, `rounds` times, and checks each result. Every plan in
/// `names` must have run at least one case.
fn run(n: usize, cases: &[Case], rounds: usize, names: &[&str]) {
    let host = Host::new(n).summing(cases[0].order);
    let mut served = BTreeSet::new();
    for round in 0..rounds {
        let tensors = Case::all_tensors(cases, n, 1000 * round);
        at_once(0..n, |me| {
            for (i, (case, tensors)) in cases.iter().zip(&tensors).enumerate() {
                host.call(me, i as u64, &case.call(&tensors[me]));
            }
        });
        host.assert_well();
        for (case, tensors) in cases.iter().zip(&tensors) {
            case.check(tensors);
            served.extend((0..n).map(|me| host.plan(me, &case.call(&tensors[me])).name()));
        }
    }
    for name in names {
        assert!(served.contains(name), "{name} in {served:?}");
    }
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

/// Pairwise sums by every algorithm.
fn trees() {
    let tree = |case: Case| Case { order: SumOrder::Tree, ..case };
    let counts = [3, 500, 2000, 20_000];
    let sums = counts.iter().flat_map(|&count| {
        [Collective::AllReduce, Collective::ReduceScatter, Collective::Reduce]
            .map(|op| tree(case(op, DType::F32, count)))
    });
    let names = ["reduce_low_latency", "one_shot", "two_shot", "reduce_staged", "rsag_staged"];
    run(5, &sums.collect::<Vec<_>>(), 1, &names);
    let means = counts.map(|count| {
        tree(Case { reduce_op: ReduceOp::Avg, ..case(Collective::AllReduce, DType::BF16, count) })
    });
    run(4, &means, 1, &[]);
    run(8, &[tree(case(Collective::AllReduce, DType::F64, 300))], 1, &[]);
}

fn small_calls() {
    let ops = [Collective::AllReduce, Collective::Broadcast, Collective::AllToAll];
    let cases = (0..60).map(|i| case(ops[i % 3], DType::F32, 1 + i * 7 % 40));
    run(4, &cases.collect::<Vec<_>>(), 4, &[]);
}

tests! {
    two_ranks: run(2, &mixture(&[1, 7, 0, 300, 1500, 40_000, 5, 2]), 2, &[
        "exchange_low_latency", "exchange_staged", "reduce_low_latency", "reduce_staged",
        "rsag_staged",
    ]),
    three_ranks: run(3, &mixture(&[1, 33, 1300, 20_001, 64]), 1, &[
        "exchange_mixed", "one_shot", "two_shot", "rsag_staged",
    ]),
    eight_ranks: run(8, &mixture(&[3, 1200]), 1, &[]),
    sums_of_trees: trees(),
    small_calls_by_the_hundred: small_calls(),
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
    let channels = [(); 2].map(|()| Host::with_tuning(2, tuning));
    let cases = [(); 2].map(|()| case(Collective::AllReduce, DType::F32, 200_000));
    let tensors = Case::all_tensors(&cases, 2, 1);
    let mut defines = defines(SumOrder::Rank, 2, Some(DType::F32), Some(ReduceOp::Sum));
    defines.push("-DSYMM_RESIDENT=15".into());
    let program = Program::build_with("all_reduce/rsag_staged", &defines);
    at_once(0..4, |thread| {
        let (me, turn) = (thread / 2, thread % 2);
        let channel = (me + turn) % 2;
        std::thread::sleep(Duration::from_millis(100 * turn as u64));
        let call = cases[channel].call(&tensors[channel][me]);
        let launch = channels[channel].prepare(me, 1, &call).unwrap();
        assert_eq!(launch.grid.blocks, 3 * 4, "two thirds of the lanes");
        assert_eq!(launch.kernel, &RSAG_STAGED);
        let (grid, args) = (Grid::new(launch.grid.blocks, THREADS), launch.args.bytes());
        // SAFETY: memory and tensors live until all ranks are done.
        unsafe { program.launch("rsag_staged", me as u32, grid, args) };
    });
    channels.iter().for_each(Host::assert_well);
    cases.iter().zip(&tensors).for_each(|(case, tensors)| case.check(tensors));
}

// proves P1
#[test]
fn a_rank_that_never_comes_ends_the_wait_and_is_named() {
    for (op, count) in [
        (Collective::AllReduce, 4),
        (Collective::AllReduce, 1000),
        (Collective::AllReduce, 20_000),
        (Collective::AllGather, 3),
        (Collective::AllGather, 9000),
    ] {
        let mut host = Host::new(3);
        host.timeout = Duration::from_millis(300);
        let case = case(op, DType::F32, count);
        at_once(0..2, |me| {
            let tensors = case.tensors(me, 3, 1);
            let call = case.call(&tensors);
            assert_ne!(host.plan(me, &call), CudaPlan::Nothing);
            host.call(me, 77, &call);
        });
        assert!(host.longest() < Duration::from_secs(60), "{op:?}: {:?}", host.longest());
        (0..2).for_each(|me| host.assert_names(me, 77, 2));
    }
}

/// All-to-alls between two ranks. Both know the lengths of the messages between them; the message
/// of a rank to itself may be much longer, or empty.
#[test]
fn what_a_rank_keeps_may_be_longer_than_what_it_sends() {
    let host = Host::with_tuning(
        2,
        CudaThresholds { low_latency_bytes: 8000, lanes: 6, ..CudaThresholds::of(2) },
    );
    let case = case(Collective::AllToAll, DType::U8, 0);
    let (short, long) = ("exchange_low_latency", "exchange_staged");
    for (sent, kept, expected) in [
        ([7, 900], [100_000, 3], (short, 25)),
        ([0, 0], [70_001, 0], (short, 18)),
        ([9000, 1], [200_000, 500], (long, 4)),
        ([50_000, 70_000], [0, 300_001], (long, 6)),
    ] {
        let given = [[kept[0], sent[0]], [sent[1], kept[1]]];
        let of =
            |me: usize| Tensors::new(&given[me], &[given[0][me], given[1][me]], me, me as u64 + 1);
        let tensors = [0, 1].map(of);
        at_once(0..2, |me| host.call(me, 1, &case.call(&tensors[me])));
        case.check(&tensors);
        let call = case.call(&tensors[0]);
        let blocks = host.prepare(0, 1, &call).unwrap().grid.blocks;
        assert_eq!((host.plan(0, &call).name(), blocks), expected, "{sent:?} {kept:?}");
    }
    host.assert_well();
}
