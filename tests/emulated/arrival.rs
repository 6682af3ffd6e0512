//! Ranks that wait for all others before a kernel with lanes starts.

use crate::calls::case;
use crate::host::{Host, at_once};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use symm::coll::call::Collective;
use symm::coll::cuda::arrival;
use symm::dtype::DType;

/// Ranks 0 and 1 wait for rank 2, which arrives later and waits for no rank.
#[test]
fn no_lane_starts_before_the_last_rank_has_arrived() {
    let host = Host::new(3);
    let case = case(Collective::AllReduce, DType::F32, 20_000);
    let tensors: Vec<_> = (0..3).map(|me| case.tensors(me, 3, 0)).collect();
    let arrived = AtomicBool::new(false);
    at_once(0..3, |me| {
        let call = case.call(&tensors[me]);
        let plan = host.plan(me, &call);
        assert!(plan.has_lanes(), "{plan:?}");
        let mut context = host.context(me, 1, Some(&call));
        if me == 2 {
            std::thread::sleep(Duration::from_millis(100));
            arrived.store(true, Ordering::SeqCst);
        } else {
            host.run(me, &arrival::kernel(&context), call.dtype, call.reduce_op);
            assert!(arrived.load(Ordering::SeqCst), "rank {me} did not wait for rank 2");
            context.announces = false;
        }
        let launch = context.prepare(&call, plan).unwrap();
        host.run(me, &launch, call.dtype, call.reduce_op);
    });
    host.assert_well();
    case.check(&tensors);
}

#[test]
fn p1_a_rank_that_never_arrives_is_named_and_no_lane_stores_anything() {
    let mut host = Host::new(3);
    host.timeout = Duration::from_millis(300);
    let case = case(Collective::AllGather, DType::F32, 9000);
    let tensors = [0, 1].map(|me| case.tensors(me, 3, 1));
    // In launch 78 rank 0 waits first, and rank 1 in its kernel.
    at_once(0..2, |me| host.call(me, 78, &case.call(&tensors[me])));
    for (me, tensors) in tensors.iter().enumerate() {
        host.assert_names(me, 78, 2);
        assert!(tensors.output(2).iter().all(|&byte| byte == 0xEE), "data of rank 2");
    }
    assert!(tensors[0].output(1).iter().all(|&byte| byte == 0xEE), "rank 0 started its lanes");
}
