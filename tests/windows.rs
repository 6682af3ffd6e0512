//! Windows on symmetric memory of the host, with ranks as threads of one process. Ranks as processes: `tests/python/test_symm_mem_engine.py`.
#![allow(missing_docs, clippy::unwrap_used, clippy::undocumented_unsafe_blocks)]

mod ranks;

use ranks::with_ranks;
use std::collections::HashSet;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};
use symm::coll::call::{Call, Op};
use symm::dtype::{DType, ReduceOp};
use symm::error::Kind;
use symm::group::{Group, Tuning};
use symm::rank::Rank;
use symm::symm_mem::HOST;
use symm::window::SymmetricWindow;
use symm::window::allocations;

const PAD: usize = 9216;
const SHORT: Option<Duration> = Some(Duration::from_millis(40));

/// A window on new memory, whose address comes along.
fn window(group: &Group, bytes: usize) -> (SymmetricWindow, u64) {
    let address = allocations::allocate(HOST, bytes).unwrap();
    (group.rendezvous(HOST, address, PAD, None).unwrap(), address)
}

fn words(address: u64, count: usize) -> &'static [AtomicU32] {
    unsafe { std::slice::from_raw_parts(address as *const AtomicU32, count) }
}

fn barrier(group: &Group) {
    let (dtype, reduce_op, root, factor) = (DType::U8, ReduceOp::Sum, Rank(0), 1.0);
    let call = Call { op: Op::Barrier, dtype, reduce_op, root, factor, inputs: Vec::new(), outputs: Vec::new(), call_site: None };
    group.run(vec![call], None).unwrap();
}

#[test]
fn every_rank_stores_into_every_other() {
    for n in [1, 2, 5] {
        with_ranks(n, Tuning::default(), |group, me| {
            let (window, address) = window(group, 4 * n as usize);
            assert_eq!((window.bytes(), window.buffers().len(), window.pads().len()), (4 * n as usize, n as usize, n as usize));
            assert_eq!(window.buffers()[me as usize], address);
            assert!(window.is_current());
            for &peer in window.buffers() {
                words(peer, n as usize)[me as usize].store(100 * n + me, Ordering::Relaxed);
            }
            window.barrier(0, None, 0).unwrap();
            for (rank, word) in (0..).zip(words(address, n as usize)) {
                assert_eq!(word.load(Ordering::Relaxed), 100 * n + rank);
            }
            window.barrier(0, None, 0).unwrap();
            let pad = window.pads()[me as usize];
            assert!(words(pad, PAD / 4).iter().all(|word| word.load(Ordering::Relaxed) == 0), "pads are clear after use");
            barrier(group);
            allocations::free(address).unwrap();
            assert!(!window.is_current());
        });
    }
}

#[test]
fn windows_of_one_allocation_have_pads_of_their_own() {
    with_ranks(2, Tuning::default(), |group, me| {
        let (one, address) = window(group, 64);
        let two = group.rendezvous(HOST, address, PAD, None).unwrap();
        assert_eq!(one.buffers(), two.buffers());
        let peer = 1 - me as i32;
        one.put_signal(peer, 7, None, 0).unwrap();
        let error = two.wait_signal(peer, 7, SHORT, 0).unwrap_err();
        assert!(error.kind == Kind::Timeout && error.message.contains(&format!("rank {peer}")), "{error}");
        one.wait_signal(peer, 7, None, 0).unwrap();
        barrier(group);
        allocations::free(address).unwrap();
    });
}

#[test]
fn different_sizes_are_an_error_that_shows_both_sides_and_the_group_goes_on() {
    with_ranks(3, Tuning::default(), |group, me| {
        let address = allocations::allocate(HOST, if me == 2 { 8192 } else { 4096 }).unwrap();
        let error = group.rendezvous(HOST, address, PAD, None).err().unwrap();
        assert_eq!(error.kind, Kind::Mismatch);
        for part in ["rank 0", "4096 bytes", "rank 2", "8192 bytes"] {
            assert!(error.message.contains(part), "{error}");
        }
        let (window, other) = window(group, 100);
        window.barrier(1, None, 0).unwrap();
        barrier(group);
        allocations::free(address).unwrap();
        allocations::free(other).unwrap();
    });
}

#[test]
fn memory_that_is_not_symmetric_is_refused_on_all_ranks() {
    with_ranks(2, Tuning::default(), |group, me| {
        let own = vec![0u8; 4096];
        let address = if me == 1 { own.as_ptr() as u64 } else { allocations::allocate(HOST, 4096).unwrap() };
        let error = group.rendezvous(HOST, address, PAD, None).err().unwrap();
        assert!(error.kind == Kind::Value && error.message.contains("not in symmetric memory of the host"), "{error}");
        assert_eq!(error.message.contains("rank 1"), me == 0, "the others are told who: {error}");
        if me == 0 {
            allocations::free(address).unwrap();
        }
    });
}

#[test]
fn a_rank_that_does_not_come_is_named() {
    with_ranks(2, Tuning::default(), |group, me| {
        if me == 0 {
            let begun = Instant::now();
            let address = allocations::allocate(HOST, 64).unwrap();
            let error = group.rendezvous(HOST, address, PAD, SHORT).err().unwrap();
            assert!(error.kind == Kind::Timeout && error.message.contains("rank 1"), "{error}");
            assert!(begun.elapsed() < Duration::from_secs(5));
            assert!(error.message.contains("rendezvous"), "{error}");
            allocations::free(address).unwrap();
        } else {
            std::thread::sleep(Duration::from_millis(500));
        }
    });
}

#[test]
fn memory_lasts_as_long_as_its_windows() {
    with_ranks(2, Tuning::default(), |group, me| {
        let (one, address) = window(group, 8192);
        let two = group.rendezvous(HOST, address, PAD, None).unwrap();
        words(address, 2048)[2047].store(7 + me, Ordering::Relaxed);
        one.barrier(0, None, 0).unwrap();
        allocations::free(address).unwrap();
        assert!(!one.is_current() && !two.is_current(), "a rendezvous there would be another");
        drop(one);
        barrier(group);
        // Both ranks have given it back, and both still see it.
        for (rank, &buffer) in (0..).zip(two.buffers()) {
            assert_eq!(words(buffer, 2048)[2047].load(Ordering::Relaxed), 7 + rank);
        }
        two.barrier(1, None, 0).unwrap();
        drop(two);
        assert_eq!(allocations::free(address).unwrap_err().kind, Kind::Value);
    });
}

#[test]
fn pads_are_used_again_once_all_ranks_have_let_go() {
    let pads = Mutex::new(HashSet::new());
    with_ranks(2, Tuning::default(), |group, me| {
        for round in 0..200 {
            let (window, address) = window(group, 64);
            window.barrier(round % 3, None, 0).unwrap();
            if me == 0 {
                pads.lock().unwrap().insert(window.pads()[0]);
            }
            drop(window);
            barrier(group);
            allocations::free(address).unwrap();
        }
    });
    let count = pads.lock().unwrap().len();
    assert!(count <= 4, "200 windows used {count} pads");
}

#[test]
fn reductions_are_in_rank_order_and_stay_within_the_window() {
    with_ranks(4, Tuning::default(), |group, me| {
        let (window, address) = window(group, 4 * 10);
        let own = unsafe { std::slice::from_raw_parts_mut(address as *mut f32, 10) };
        own.iter_mut().enumerate().for_each(|(i, x)| *x = [1e8, 1.0, -1e8, 1.0][me as usize] * (i as f32 + 1.0));
        window.barrier(0, None, 0).unwrap();
        let mut out = [0f32; 8];
        let to = ranks::span(&mut out).ptr();
        unsafe { window.reduce(DType::F32, ReduceOp::Sum, 8, 32, to) }.unwrap();
        let expected: Vec<f32> = (2..10).map(|i| [1e8f32, 1.0, -1e8, 1.0].map(|x| x * (i as f32 + 1.0)).into_iter().sum()).collect();
        assert_eq!(out[..], expected[..]);
        for (dtype, op, offset, bytes) in
            [(DType::F32, ReduceOp::Sum, 16, 32), (DType::F32, ReduceOp::Sum, 0, 6), (DType::F32, ReduceOp::BitAnd, 0, 8)]
        {
            assert!(unsafe { window.reduce(dtype, op, offset, bytes, to) }.is_err());
        }
        window.barrier(0, None, 0).unwrap();
        allocations::free(address).unwrap();
    });
}

#[test]
fn wrong_ranks_and_channels_are_refused() {
    with_ranks(2, Tuning::default(), |group, _| {
        let (window, address) = window(group, 4);
        for error in [
            window.put_signal(2, 0, None, 0),
            window.wait_signal(-1, 0, None, 0),
            window.barrier(PAD as i32 / 8, None, 0),
            window.put_signal(1, -1, None, 0),
        ] {
            assert_eq!(error.unwrap_err().kind, Kind::Value);
        }
        barrier(group);
        allocations::free(address).unwrap();
    });
}

#[test]
fn a_window_ends_with_its_group() {
    with_ranks(2, Tuning::default(), |group, me| {
        let (window, address) = window(group, 64);
        window.barrier(0, None, 0).unwrap();
        barrier(group);
        group.shutdown();
        // Both ranks call it, and could meet.
        let error = window.barrier(0, None, 0).unwrap_err();
        assert!(error.kind == Kind::Aborted && error.message.contains("destroyed"), "rank {me}: {error}");
        allocations::free(address).unwrap();
    });
}
