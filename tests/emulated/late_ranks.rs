//! Ranks that arrive after another rank has timed out: each of their calls has the right result or
//! is reported, because a rank that timed out sends nothing more.

use crate::calls::{Case, Tensors, case};
use crate::copy_engine;
use crate::host::{Host, at_once};
use std::time::Duration;
use symm::coll::call::{Collective, Span};
use symm::coll::cuda::plan::{self, CudaPlan, CudaThresholds};
use symm::dtype::{DType, ReduceOp};

/// Returns true if a kernel of `me` has timed out.
fn reported(host: &Host, me: usize) -> bool {
    host.memory[me].report[0] != 0
}

/// Runs `case` several times on rank 0, which times out, and only then on the other ranks, with
/// `call(host, me, number, case, tensors)`. Each of their calls must have the right result until
/// one is reported.
fn after_rank_0(
    mut host: Host,
    case: &Case,
    call: impl Fn(&Host, usize, u64, &Case, &Tensors) + Sync,
) {
    // More calls than a lane has slots, so that rank 0 finds no free slot.
    const CALLS: usize = 6;
    host.timeout = Duration::from_millis(300);
    let name = format!("{:?} of {} × {}", case.op, case.count, case.dtype.name());
    let n = host.n;
    let all: Vec<_> =
        (0..CALLS).map(|i| (0..n).map(|me| case.tensors(me, n, i)).collect::<Vec<_>>()).collect();
    for (number, tensors) in (1..).zip(&all) {
        call(&host, 0, number, case, &tensors[0]);
    }
    assert!(reported(&host, 0), "{name}: rank 0 does not wait");
    at_once(1..n, |me| {
        for (number, tensors) in (1..).zip(&all) {
            call(&host, me, number, case, &tensors[me]);
            if reported(&host, me) {
                return;
            }
            for (i, expected) in case.expected(me, tensors).iter().enumerate() {
                assert!(
                    tensors[me].output(i) == expected,
                    "{name}, call {number}: rank {me} took invalid data for valid ones"
                );
            }
        }
        panic!("{name}: rank {me} got data in {CALLS} calls that rank 0 cannot have sent");
    });
}

/// Collectives of three ranks, by every algorithm.
fn collectives(zero_copy: bool) {
    for (op, count) in [
        (Collective::AllReduce, 4),
        (Collective::AllReduce, 100),
        (Collective::AllReduce, 1000),
        (Collective::AllReduce, 20_000),
        (Collective::AllGather, 3),
        (Collective::AllGather, 9000),
        (Collective::ReduceScatter, 9000),
        (Collective::Broadcast, 20_000),
        (Collective::AllToAll, 9000),
        (Collective::Barrier, 0),
    ] {
        let mut host = Host::new(3);
        if zero_copy {
            host.handshake(1 << 20);
        }
        after_rank_0(host, &case(op, DType::F32, count), |host, me, number, case, tensors| {
            host.call(me, number, &case.call(tensors));
        });
    }
}

fn copies() {
    for op in [Collective::ReduceScatter, Collective::AllReduce, Collective::AllGather] {
        let host = copy_engine::host(3);
        after_rank_0(host, &case(op, DType::F32, 2000), |host, me, number, case, tensors| {
            copy_engine::run(host, me, number, &case.call(tensors), None);
        });
    }
}

tests! {
    collectives_of_late_ranks_are_right_or_reported: collectives(false),
    zero_copy_collectives_of_late_ranks_are_right_or_reported: collectives(true),
    copies_of_late_ranks_are_right_or_reported: copies(),
}

/// Rank 0 sends a message that fills all slots, then one for which it times out, and only then does
/// rank 1 receive the first. While rank 1 waits for the second, rank 0 sends further messages.
fn messages(symmetric: bool) {
    const LONG: usize = 2 << 20;
    let tuning = CudaThresholds { lanes: 2, threads: 8, ..CudaThresholds::of(2) };
    let mut host = Host::with_tuning(2, tuning);
    host.handshake(64 << 20);
    host.timeout = Duration::from_millis(300);
    let plan = plan::transfers(&host.layout, &host.tuning);
    let CudaPlan::Exchange { lanes, .. } = plan else { panic!("{plan:?}") };
    let full = host.layout.unread_bytes(lanes as usize);
    let launch = |me: usize, sends: &[_], receives: &[_]| {
        let launch = host.context(me, 0, None).transfers(sends, receives, [0; 2], plan).unwrap();
        host.run(me, &launch, DType::U8, ReduceOp::Sum);
    };
    let send = |value: u8, bytes: usize| {
        let message = vec![value; bytes];
        launch(0, &[(1, Span { addr: message.as_ptr() as usize, bytes })], &[]);
    };
    let receive = |bytes: usize| {
        let mut other = vec![0u8; bytes];
        let at = if symmetric { host.heaps[1].take(bytes) } else { other.as_mut_ptr() };
        launch(1, &[], &[(0, Span { addr: at as usize, bytes })]);
        // SAFETY: `bytes` bytes that no other code uses; the kernel has ended.
        unsafe { std::slice::from_raw_parts(at, bytes) }.to_vec()
    };
    send(1, full);
    assert!(!reported(&host, 0), "the slots have room for the first message");
    send(2, LONG);
    assert!(reported(&host, 0), "rank 1 has read nothing");
    assert!(receive(full).iter().all(|&byte| byte == 1), "an unread slot was overwritten");
    assert!(!reported(&host, 1), "the first message had arrived");
    std::thread::scope(|scope| {
        let second = scope.spawn(|| receive(LONG));
        while !second.is_finished() {
            send(3, LONG);
        }
        second.join().unwrap();
        assert!(reported(&host, 1), "rank 1 received a message that rank 0 did not send");
    });
}

tests! {
    a_message_after_a_timeout_is_reported: messages(false),
    a_message_after_a_timeout_is_not_offered_a_place: messages(true),
}
