//! All shared state of ranks on CPU, with real threads on one mapping: `make tsan` runs it under
//! ThreadSanitizer, which cannot see races through two mappings of one file. No test harness,
//! because its threads communicate through parts of std that are not instrumented. The queue of
//! asynchronous calls is not tested either: ThreadSanitizer does not see that std's condition
//! variables reacquire their mutex, so it would report everything after them.
#![allow(missing_docs, clippy::unwrap_used, clippy::print_stdout)]

#[path = "../ranks/threads.rs"]
mod threads;

use crate::threads::{barrier, call, run, span};
use std::sync::atomic::AtomicU32;
use std::time::{Duration, Instant};
use symm::coll::call::{CallSpec, Collective, Span};
use symm::coll::message::{Message, MessageSpec};
use symm::coll::plan::CpuThresholds;
use symm::completion::Completion;
use symm::control::{ControlBlock, Identity};
use symm::dtype::DType;
use symm::error::ErrorKind;
use symm::group::{Group, GroupTuning};
use symm::mem::layout::SegmentLayout;
use symm::mem::shm::ShmSegment;
use symm::rank::Rank;
use symm::window::signal_host::SignalPads;

const RANKS: u32 = 3;
const LONG: Duration = Duration::from_secs(120);
/// Numbers of elements that fit next to the flag, into one chunk, and into many chunks.
const COUNTS: [usize; 3] = [16, 5000, 400_000];

fn members() -> Vec<Identity> {
    (0..RANKS).map(|global| Identity { pid: std::process::id(), global }).collect()
}

fn memory() -> ShmSegment {
    let bytes = SegmentLayout::new(RANKS as usize).total_bytes();
    ShmSegment::map(ShmSegment::create(bytes).expect("memfd"), bytes).expect("map")
}

/// Runs `body` on all ranks, which are threads with one mapping.
fn with_ranks(body: impl Fn(&Group, u32) + Sync) {
    let memory = memory();
    // No direct reads: the sanitizer does not see what Linux copies (`process_vm_readv`).
    let tuning = GroupTuning {
        zero_copy: false,
        spins: Some(64),
        thresholds: CpuThresholds::DEFAULT,
        ..GroupTuning::default()
    };
    as_threads(|rank| {
        let group =
            Group::from_joined(memory.clone(), "races", Rank(rank), members(), LONG, tuning)
                .expect("assembles");
        body(&group, rank);
    });
}

/// Runs `body` once for each rank. Joins the threads one by one, because the sanitizer does not see
/// how a scope waits for its threads.
fn as_threads(body: impl Fn(u32) + Sync) {
    std::thread::scope(|scope| {
        let body = &body;
        let threads: Vec<_> = (0..RANKS).map(|rank| scope.spawn(move || body(rank))).collect();
        threads.into_iter().for_each(|thread| thread.join().expect("no panic"));
    });
}

fn spans(data: &mut [Vec<u32>]) -> Vec<Span> {
    data.iter_mut().map(|data| span(data)).collect()
}

fn collectives(group: &Group, rank: u32) {
    for (round, count) in COUNTS.into_iter().chain(COUNTS).enumerate() {
        let root = round as u32 % RANKS;
        let n = RANKS as usize;
        for &op in Collective::C10D {
            let (inputs, outputs) = CallSpec { op, root: Rank(root), ..CallSpec::barrier(None) }
                .num_spans(Rank(rank), n);
            let mut given = vec![vec![rank + 1; count]; inputs];
            let mut got = vec![vec![0; count]; outputs];
            let spec = call(op, DType::I32, spans(&mut given), spans(&mut got));
            run(group, CallSpec { root: Rank(root), ..spec }, None).expect("a collective");
            for (from, got) in got.iter().enumerate() {
                let expected = match op {
                    Collective::Barrier => continue,
                    Collective::Broadcast | Collective::Scatter => root + 1,
                    Collective::AllReduce | Collective::Reduce | Collective::ReduceScatter => {
                        RANKS * (RANKS + 1) / 2
                    }
                    Collective::AllGather | Collective::Gather | Collective::AllToAll => {
                        from as u32 + 1
                    }
                    Collective::AllReduceAddRmsNorm => unreachable!("not of c10d"),
                };
                assert!(
                    got.iter().all(|&value| value == expected),
                    "{op:?} of {count} on rank {rank}"
                );
            }
        }
    }
}

fn messages(group: &Group, rank: u32) {
    for (round, count) in COUNTS.into_iter().chain([30_000]).enumerate() {
        let (next, last) = ((rank + 1) % RANKS, (rank + RANKS - 1) % RANKS);
        let (mut given, mut got) = (vec![rank + 1; count], vec![0; count]);
        let spec = |peer, span| MessageSpec {
            peer: Some(Rank(peer)),
            tag: round as i32,
            dtype: DType::I32,
            span,
            timeout: None,
        };
        // SAFETY: each rank's tensors are its own, and live until the messages have ended.
        let message = |peer, span| unsafe { Message::new(spec(peer, span)) };
        let done = || Completion::new(|outcome, _| outcome.expect("a transfer"));
        let send = group.send(message(next, span(&mut given)), done()).expect("send");
        let receive = group.recv(message(last, span(&mut got)), done()).expect("recv");
        group.wait(receive, None).expect("received");
        group.wait(send, None).expect("sent");
        assert!(got.iter().all(|&value| value == last + 1), "{count} from rank {last} to {rank}");
    }
}

/// The others wait for rank 0, which does not arrive: it leaves, or another thread of rank 1 aborts
/// the group.
fn endings(aborts: bool) {
    with_ranks(|group, rank| {
        barrier(group, None).expect("all are here");
        if rank == 0 && !aborts {
            group.shutdown();
        }
        if rank == 0 {
            return;
        }
        std::thread::scope(|scope| {
            let aborting = (aborts && rank == 1).then(|| scope.spawn(|| group.abort()));
            let error = barrier(group, None).expect_err("rank 0 does not come");
            let expected = if aborts && rank == 1 { ErrorKind::Aborted } else { ErrorKind::Peer };
            assert!(error.kind == expected || error.message.contains("rank 0"), "{error}");
            if let Some(thread) = aborting {
                thread.join().expect("no panic");
            }
        });
    });
}

fn signals() {
    const BYTES: usize = 256;
    const ROUNDS: u32 = 200;
    let memory = memory();
    let words: Vec<Vec<AtomicU32>> =
        (0..RANKS).map(|_| (0..BYTES / 4).map(|_| AtomicU32::new(0)).collect()).collect();
    let pads: Vec<u64> = words.iter().map(|pad| pad.as_ptr() as u64).collect();
    let mut plain = vec![0u32; RANKS as usize];
    let shared = plain.as_mut_ptr() as usize;
    as_threads(|rank| {
        let control =
            ControlBlock::new(memory.clone(), Rank(rank), "signals".into(), members(), 64);
        // SAFETY: the words outlive the threads and are atomics.
        let pads = unsafe { SignalPads::new(&control, &pads, BYTES) };
        let cell = |rank: u32| (shared + 4 * rank as usize) as *mut u32;
        for round in 1..=ROUNDS {
            // SAFETY: a barrier separates this write from the other ranks' reads, before and after.
            unsafe { cell(rank).write(round) };
            pads.barrier(0, LONG).expect("all come");
            // SAFETY: as above.
            assert!((0..RANKS).all(|rank| unsafe { cell(rank).read() } == round));
            pads.put(Rank((rank + 1) % RANKS), 1, LONG).expect("clear");
            pads.wait(Rank((rank + RANKS - 1) % RANKS), 1, LONG).expect("comes");
            pads.barrier(1, LONG).expect("all come");
        }
    });
}

fn main() {
    let begun = Instant::now();
    with_ranks(|group, rank| {
        collectives(group, rank);
        messages(group, rank);
    });
    signals();
    for round in 0..6 {
        endings(round % 2 == 0);
    }
    println!(
        "collectives, messages, signals and endings of {RANKS} ranks on one mapping: {:.1} s",
        begun.elapsed().as_secs_f32()
    );
}
