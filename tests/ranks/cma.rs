//! Exchanges that read peers' private memory, with ranks as threads that may have lost time slices:
//! the results equal those of staged exchanges, even if a rank cannot read its peers' memory. Each
//! test has a separate process, because lost slices shorten every wait of a process.

use crate::process::alone;
use crate::threads::{input, map, memory, span};
use std::sync::Arc;
use std::time::Duration;
use symm::coll::call::{Call, CallSpec, Collective, Span};
use symm::coll::cpu::CpuRunner;
use symm::coll::plan::CpuThresholds;
use symm::control::spin_budget::{PATIENCE, now};
use symm::control::{ControlBlock, Identity};
use symm::dtype::DType;
use symm::rank::Rank;
use symm::sync::timeout::CallTimeout;

const ROOT: u32 = 1;

/// Marks this process as losing time slices until it exits: the losses are dated a day ahead.
fn lose_slices() {
    let tomorrow = now() + 86_400_000_000_000;
    (0..2).for_each(|_| PATIENCE.gave_away(Duration::from_millis(10), tomorrow));
}

/// Calls `body` with each rank's runner. All ranks use `pids` as the ids of the ranks' processes;
/// `reads` says which ranks may read their peers' memory.
fn with_runners(pids: &[u32], reads: &[bool], body: impl Fn(&mut CpuRunner, u32) + Sync) {
    let n = pids.len() as u32;
    let file = memory(n);
    std::thread::scope(|scope| {
        for (rank, &reads) in (0..).zip(reads) {
            let (segment, body) = (map(&file, n), &body);
            scope.spawn(move || {
                let members =
                    (0..).zip(pids).map(|(global, &pid)| Identity { pid, global }).collect();
                let control = ControlBlock::new(segment, Rank(rank), "test".into(), members, 1);
                let (control, thresholds) = (Arc::new(control), CpuThresholds::default());
                let runner = CpuRunner::new(control, thresholds, Arc::default());
                body(&mut runner.reading(reads), rank);
            });
        }
    });
}

/// Length of messages that are read only if slices are lost.
const LONG: usize = 1_300_001;

/// Runs `op` with messages of `least` bytes, slightly more for an all-to-all; returns the
/// algorithm, and whether this rank's outputs are correct.
fn exchange(
    runner: &mut CpuRunner,
    op: Collective,
    me: u32,
    n: u32,
    least: usize,
) -> (&'static str, bool) {
    let uneven = |from: u32, to: u32| {
        if op == Collective::AllToAll { least / 300 * (from + 2 * to) as usize } else { 0 }
    };
    let length = |from: u32, to: u32| least + uneven(from, to);
    let personal = matches!(op, Collective::Scatter | Collective::AllToAll);
    let sends = !matches!(op, Collective::Broadcast | Collective::Scatter) || me == ROOT;
    let data = |from: u32, to: u32| {
        input(DType::U8, from, if personal { to } else { 0 }, length(from, to))
    };
    let receivers = if !sends { 0..0 } else { 0..if personal { n } else { 1 } };
    // Separate tensors, not contiguous memory.
    let mut inputs: Vec<Vec<u8>> = receivers.map(|to| data(me, to)).collect();
    let pieces: Vec<Span> = inputs.iter_mut().map(|input| span(input)).collect();
    let senders: Vec<u32> = match op {
        Collective::Broadcast if me == ROOT => vec![],
        Collective::Broadcast | Collective::Scatter => vec![ROOT],
        Collective::Gather if me != ROOT => vec![],
        Collective::AllGather | Collective::Gather | Collective::AllToAll => (0..n).collect(),
        Collective::Barrier
        | Collective::AllReduce
        | Collective::Reduce
        | Collective::ReduceScatter
        | Collective::AllReduceAddRmsNorm => unreachable!("not an exchange"),
    };
    let mut outputs: Vec<Vec<u8>> =
        senders.iter().map(|&from| vec![0xee; length(from, me)]).collect();
    let spans = outputs.iter_mut().map(|output| span(output)).collect();
    let spec = CallSpec {
        op,
        root: Rank(ROOT),
        inputs: pieces.into(),
        outputs: spans,
        ..CallSpec::barrier(None)
    };
    let call = unsafe { Call::new(spec, Rank(me), n as usize) }.unwrap();
    runner.run(&call, &CallTimeout::from_first_wait(Duration::from_secs(60))).unwrap();
    let right = senders.iter().zip(&outputs).all(|(&from, output)| *output == data(from, me));
    (runner.last_algorithm(), right)
}

const EXCHANGES: [Collective; 5] = [
    Collective::Broadcast,
    Collective::AllGather,
    Collective::Gather,
    Collective::Scatter,
    Collective::AllToAll,
];

/// Runs `ops` with messages of `bytes` bytes. Operations in `read` must read peers' memory; all
/// others must be staged. Slices are lost before each call if `loses` is true.
fn check(
    pids: &[u32],
    reads: &[bool],
    ops: &[Collective],
    (bytes, loses): (usize, bool),
    read: &[Collective],
) {
    let n = pids.len() as u32;
    with_runners(pids, reads, |runner, me| {
        for &op in ops {
            if loses {
                lose_slices();
            }
            let expected = if read.contains(&op) { "read" } else { "staged" };
            let found = exchange(runner, op, me, n, bytes);
            assert_eq!(found, (expected, true), "{op:?} of {bytes} bytes on rank {me} of {n}");
        }
    });
}

#[test]
fn private_memory_is_read_where_slices_are_lost_and_all_can_and_may_read() {
    if !alone() {
        return;
    }
    let pid = std::process::id();
    for n in [2, 3, 5] {
        check(&vec![pid; n], &vec![true; n], &EXCHANGES, (LONG, true), &EXCHANGES);
    }
    check(&[pid; 2], &[true, false], &EXCHANGES, (LONG, true), &[]);
    // No process has the id of the root, which is the only reader in a gather.
    for op in EXCHANGES {
        let pids = [pid, 4_194_303, pid];
        check(&pids, &[true; 3], &[op; 2], (LONG, true), &[Collective::Gather]);
    }
}

#[test]
fn messages_of_middle_length_are_read_by_few_ranks_with_cores_of_their_own() {
    if !alone() {
        return;
    }
    let pid = std::process::id();
    let few = [Collective::AllToAll, Collective::AllGather];
    // Number of ranks, a length below the minimum that applies if slices are lost, and the
    // operations that read peers' memory.
    for (n, bytes, read) in [
        (2, 20_000, &[][..]),
        (2, 32_768, &EXCHANGES),
        (2, 250_003, &EXCHANGES),
        (4, 20_000, &few[..1]),
        (4, 32_769, &few),
        (4, 120_000, &few),
        (4, 131_073, &[]),
        (5, 60_000, &[]),
    ] {
        check(&vec![pid; n], &vec![true; n], &EXCHANGES, (bytes, false), read);
    }
    check(&[pid; 2], &[true, false], &[Collective::AllGather], (100_000, false), &[]);
}
