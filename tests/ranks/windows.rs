//! Windows on symmetric host memory, with ranks as threads of one process. Ranks as processes:
//! `tests/python/test_symm_mem_backend.py`.

use crate::threads::{barrier, span, with_ranks};
use std::collections::HashSet;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};
use symm::coll::call::Span;
use symm::dtype::{DType, ReduceOp};
use symm::error::{ErrorKind, Result};
use symm::group::Group;
use symm::symm_mem::HOST;
use symm::window::SymmetricWindow;
use symm::window::allocations;

const PAD: usize = 9216;

/// A window on new memory, and its address.
fn window(group: &Group, bytes: usize) -> (SymmetricWindow, u64) {
    let address = allocations::allocate(HOST, bytes).unwrap();
    (group.rendezvous(HOST, address, PAD, None).unwrap(), address)
}

fn words(address: u64, count: usize) -> &'static [AtomicU32] {
    unsafe { std::slice::from_raw_parts(address as *const AtomicU32, count) }
}

#[test]
fn memory_that_is_not_symmetric_is_refused_on_all_ranks() {
    with_ranks(2, |group, me| {
        let own = vec![0u8; 4096];
        let address =
            if me == 1 { own.as_ptr() as u64 } else { allocations::allocate(HOST, 4096).unwrap() };
        let error = group.rendezvous(HOST, address, PAD, None).err().unwrap();
        assert!(
            error.kind == ErrorKind::Value
                && error.message.contains("not in symmetric memory of the host"),
            "{error}"
        );
        assert_eq!(error.message.contains("rank 1"), me == 0, "the others are told who: {error}");
        if me == 0 {
            allocations::free(address).unwrap();
        }
    });
}

#[test]
fn a_thread_blocked_in_a_signal_is_released_when_another_destroys_the_group() {
    let over = AtomicBool::new(false);
    with_ranks(2, |group, me| {
        let (window, address) = &window(group, 64);
        window.put_signal(1 - me as i32, 5, None, 0).unwrap();
        if me == 1 {
            let begun = Instant::now();
            while !over.load(Ordering::Acquire) && begun.elapsed() < Duration::from_secs(100) {
                std::thread::sleep(Duration::from_millis(1));
            }
            return;
        }
        let waits: [fn(&SymmetricWindow) -> Result<()>; 3] = [
            |window| window.barrier(0, None, 0),
            |window| window.wait_signal(1, 3, None, 0),
            |window| window.put_signal(1, 5, None, 0),
        ];
        std::thread::scope(|scope| {
            let threads = waits.map(|wait| scope.spawn(move || wait(window)));
            std::thread::sleep(Duration::from_millis(300));
            let begun = Instant::now();
            group.destroy(Duration::from_secs(60), "");
            for thread in threads {
                let error = thread.join().unwrap().unwrap_err();
                assert_eq!(error.kind, ErrorKind::Aborted, "{error}");
                assert!(error.message.contains("group \"test\" was destroyed"), "{error}");
            }
            assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
        });
        assert_eq!(group.failure(), None);
        over.store(true, Ordering::Release);
        allocations::free(*address).unwrap();
    });
}

#[test]
fn memory_lasts_as_long_as_its_windows() {
    with_ranks(2, |group, me| {
        let (one, address) = window(group, 8192);
        let two = group.rendezvous(HOST, address, PAD, None).unwrap();
        words(address, 2048)[2047].store(7 + me, Ordering::Relaxed);
        one.barrier(0, None, 0).unwrap();
        allocations::free(address).unwrap();
        assert!(!one.is_current() && !two.is_current(), "a rendezvous there would be another");
        drop(one);
        barrier(group, None).unwrap();
        // Both ranks have freed the memory, and both still have it mapped.
        for (rank, &buffer) in (0..).zip(two.buffers()) {
            assert_eq!(words(buffer, 2048)[2047].load(Ordering::Relaxed), 7 + rank);
        }
        two.barrier(1, None, 0).unwrap();
        drop(two);
        assert_eq!(allocations::free(address).unwrap_err().kind, ErrorKind::Value);
    });
}

#[test]
fn pads_are_used_again_once_all_ranks_have_let_go() {
    let pads = Mutex::new(HashSet::new());
    with_ranks(2, |group, me| {
        for round in 0..200 {
            let (window, address) = window(group, 64);
            window.barrier(round % 3, None, 0).unwrap();
            if me == 0 {
                pads.lock().unwrap().insert(window.pads()[0]);
            }
            drop(window);
            barrier(group, None).unwrap();
            allocations::free(address).unwrap();
        }
    });
    let count = pads.lock().unwrap().len();
    assert!(count <= 4, "200 windows used {count} pads");
}

#[test]
fn ranks_that_differ_fail_together_and_a_rank_that_fails_waits_for_the_others() {
    with_ranks(3, |group, me| {
        // A tensor that is neither at the start of its memory nor on a cache line.
        let (window, address) = window(group, 52);
        let input = Span { addr: address as usize + 12, bytes: 40 };
        let mut out = [0f32; 10];
        let (all, none) = (span(&mut out), Span { addr: 0, bytes: 0 });
        let (before, behind) =
            (Span { addr: input.addr - 16, ..input }, Span { addr: input.addr + 4, ..input });
        let short = Span { bytes: 39, ..all };
        for (bad, given, to, op, differs) in [
            (0, before, all, ReduceOp::Sum, true),
            (1, behind, all, ReduceOp::Sum, true),
            (2, input, short, ReduceOp::Sum, false),
            (0, input, all, ReduceOp::BitAnd, true),
            (1, Span { bytes: 39, ..input }, all, ReduceOp::Sum, true),
        ] {
            let (given, to, op) =
                if me == bad { (given, to, op) } else { (input, all, ReduceOp::Sum) };
            let result = unsafe { window.one_shot_all_reduce(DType::F32, op, given, none, to) };
            assert_eq!(result.is_err(), differs || me == bad, "rank {me}: {result:?}");
            if differs {
                assert_eq!(result.unwrap_err().kind, ErrorKind::Mismatch);
            }
            let error = unsafe { window.all_gather(6, input, all) }.unwrap_err();
            assert!(error.message.contains("120 bytes do not fit into an output of 40"), "{error}");
        }
        barrier(group, None).unwrap();
        allocations::free(address).unwrap();
    });
}
