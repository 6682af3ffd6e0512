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
use symm::window::operators::exchanges::RowExchange;

const PAD: usize = 9216;
const SHORT: Option<Duration> = Some(Duration::from_millis(40));

/// A window on new memory, and its address.
fn window(group: &Group, bytes: usize) -> (SymmetricWindow, u64) {
    let address = allocations::allocate(HOST, bytes).unwrap();
    (group.rendezvous(HOST, address, PAD, None).unwrap(), address)
}

fn words(address: u64, count: usize) -> &'static [AtomicU32] {
    unsafe { std::slice::from_raw_parts(address as *const AtomicU32, count) }
}

#[test]
fn every_rank_stores_into_every_other() {
    for n in [1, 2, 5] {
        with_ranks(n, |group, me| {
            let (window, address) = window(group, 4 * n as usize);
            let counts = (window.bytes(), window.buffers().len(), window.pads().len());
            assert_eq!(counts, (4 * n as usize, n as usize, n as usize));
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
            assert!(
                words(pad, PAD / 4).iter().all(|word| word.load(Ordering::Relaxed) == 0),
                "pads are clear after use"
            );
            barrier(group, None).unwrap();
            allocations::free(address).unwrap();
            assert!(!window.is_current());
        });
    }
}

#[test]
fn windows_of_one_allocation_have_pads_of_their_own() {
    with_ranks(2, |group, me| {
        let (one, address) = window(group, 64);
        let two = group.rendezvous(HOST, address, PAD, None).unwrap();
        assert_eq!(one.buffers(), two.buffers());
        let peer = 1 - me as i32;
        one.put_signal(peer, 7, None, 0).unwrap();
        let error = two.wait_signal(peer, 7, SHORT, 0).unwrap_err();
        assert!(
            error.kind == ErrorKind::Timeout && error.message.contains(&format!("rank {peer}")),
            "{error}"
        );
        one.wait_signal(peer, 7, None, 0).unwrap();
        for error in [
            one.put_signal(2, 0, None, 0),
            one.wait_signal(-1, 0, None, 0),
            one.barrier(PAD as i32 / 8, None, 0),
            one.put_signal(1, -1, None, 0),
        ] {
            assert_eq!(error.unwrap_err().kind, ErrorKind::Value);
        }
        barrier(group, None).unwrap();
        allocations::free(address).unwrap();
    });
}

#[test]
fn different_sizes_are_an_error_that_shows_both_sides_and_the_group_goes_on() {
    with_ranks(3, |group, me| {
        let address = allocations::allocate(HOST, if me == 2 { 8192 } else { 4096 }).unwrap();
        let error = group.rendezvous(HOST, address, PAD, None).err().unwrap();
        assert_eq!(error.kind, ErrorKind::Mismatch);
        for part in ["rank 0", "4096 bytes", "rank 2", "8192 bytes"] {
            assert!(error.message.contains(part), "{error}");
        }
        let (window, other) = window(group, 100);
        window.barrier(1, None, 0).unwrap();
        barrier(group, None).unwrap();
        allocations::free(address).unwrap();
        allocations::free(other).unwrap();
    });
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
fn a_rank_that_does_not_come_is_named() {
    let over = AtomicBool::new(false);
    with_ranks(2, |group, me| {
        let begun = Instant::now();
        if me == 0 {
            let address = allocations::allocate(HOST, 64).unwrap();
            let error = group.rendezvous(HOST, address, PAD, SHORT).err().unwrap();
            assert_eq!(error.kind, ErrorKind::Timeout);
            assert!(["rank 1", "rendezvous"].iter().all(|part| error.message.contains(part)));
            assert!(begun.elapsed() < Duration::from_secs(5));
            allocations::free(address).unwrap();
            over.store(true, Ordering::Release);
        } else {
            while !over.load(Ordering::Acquire) && begun.elapsed() < Duration::from_secs(20) {
                std::thread::sleep(Duration::from_millis(1));
            }
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

/// The input of rank `rank`: large and small numbers, so that another order of summands gives
/// another result.
fn brought(rank: u32, count: usize) -> Vec<f32> {
    (0..count)
        .map(|i| [1e8, 1.0, -1e8, 3.0, 0.5][rank as usize % 5] * (i % 97 + 1) as f32)
        .collect()
}

/// Sum of the inputs of all of `n` ranks, in rank order.
fn summed(n: u32, count: usize) -> Vec<f32> {
    (0..n)
        .map(|rank| brought(rank, count))
        .reduce(|sum, more| sum.iter().zip(more).map(|(a, b)| a + b).collect())
        .unwrap()
}

/// A tensor in a window on new memory, neither at its start nor on a cache line.
struct Tensor {
    window: SymmetricWindow,
    address: u64,
    count: usize,
}

impl Tensor {
    fn new(group: &Group, values: &[f32]) -> Self {
        let (window, address) = window(group, 12 + size_of_val(values));
        let mut tensor = Self { window, address, count: values.len() };
        tensor.values().copy_from_slice(values);
        tensor
    }

    fn values(&mut self) -> &mut [f32] {
        unsafe { std::slice::from_raw_parts_mut((self.address + 12) as *mut f32, self.count) }
    }

    fn span(&self) -> Span {
        Span { addr: self.address as usize + 12, bytes: 4 * self.count }
    }

    /// Frees the memory once all ranks have finished with it.
    fn free(self, group: &Group) {
        barrier(group, None).unwrap();
        allocations::free(self.address).unwrap();
    }
}

#[test]
fn all_reduces_add_in_rank_order_and_leave_what_they_may() {
    for n in [1, 2, 3, 5] {
        with_ranks(n, |group, me| {
            for count in [1, 15, 16, 17, 33, 1000, 20_001] {
                let (given, expected) = (brought(me, count), summed(n, count));
                let mut tensor = Tensor::new(group, &given);
                let (input, none, mut out) =
                    (tensor.span(), Span { addr: 0, bytes: 0 }, vec![0f32; count]);
                let (dtype, op) = (DType::F32, ReduceOp::Sum);
                let (output, about) = (span(&mut out), format!("{count} of {n} ranks"));
                let one_shot = |tensor: &Tensor, local| unsafe {
                    tensor.window.one_shot_all_reduce(dtype, op, input, local, output).unwrap()
                };
                let two_shots = |tensor: &Tensor, output| unsafe {
                    tensor.window.two_shot_all_reduce(dtype, op, input, output).unwrap()
                };
                one_shot(&tensor, none);
                assert_eq!(out, expected, "one shot, {about}");
                assert_eq!(tensor.values(), given);

                // A local input of one element; the rest is unchanged.
                one_shot(&tensor, span(&mut [7f32]));
                assert_eq!((out[0], &out[1..]), (7.0 * n as f32, &expected[1..]), "local, {about}");

                tensor.values()[0] = given[0];
                out.fill(0.0);
                two_shots(&tensor, output);
                assert_eq!(out, expected, "two shots, {about}");

                tensor.values().copy_from_slice(&given);
                two_shots(&tensor, input);
                assert_eq!(tensor.values(), expected, "two shots in place, {about}");
                tensor.free(group);
            }
        });
    }
}

#[test]
fn pieces_of_rows_are_reduced_and_inputs_gathered() {
    for n in [1, 2, 3] {
        with_ranks(n, |group, me| {
            let (rows, piece) = (4, 3);
            let row = piece * n as usize;
            let tensor = Tensor::new(group, &brought(me, rows * row));
            let (input, sums) = (tensor.span(), summed(n, rows * row));
            let mut out = vec![0f32; rows * piece];
            let (dtype, op, output) = (DType::F32, ReduceOp::Sum, span(&mut out));
            unsafe { tensor.window.reduce_scatter(dtype, op, input, 4 * row, output) }.unwrap();
            let mine: Vec<f32> = sums
                .chunks(row)
                .flat_map(|row| row[me as usize * piece..][..piece].to_vec())
                .collect();
            assert_eq!(out, mine, "{n} ranks");

            let mut gathered = vec![0f32; rows * row * n as usize];
            unsafe { tensor.window.all_gather(input, span(&mut gathered)) }.unwrap();
            let all: Vec<f32> = (0..n).flat_map(|rank| brought(rank, rows * row)).collect();
            assert_eq!(gathered, all, "{n} ranks");
            tensor.free(group);
        });
    }
}

/// Number of rows from rank `from` to rank `to` in turn `turn`; some ranks send none.
fn rows(from: u32, to: u32, turn: u32) -> usize {
    ((3 * from + 5 * to + turn) % 4) as usize * usize::from(turn > 0)
}

#[test]
fn rows_go_where_splits_in_memory_say() {
    const WIDTH: usize = 3;
    for n in [1, 2, 4] {
        with_ranks(n, |group, me| {
            let (most, room) = (4 * n as usize, 4 * n as usize);
            let tensor = Tensor::new(group, &brought(me, most * WIDTH));
            let (splits, address) = window(group, 8 * n as usize);
            for turn in 0..3 {
                let counts: Vec<i64> = (0..n).map(|to| rows(me, to, turn) as i64).collect();
                unsafe { std::slice::from_raw_parts_mut(address as *mut i64, n as usize) }
                    .copy_from_slice(&counts);
                let (mut out, mut layout) =
                    (vec![-1f32; room * WIDTH], vec![-1i64; 2 * n as usize]);
                let exchange = RowExchange {
                    input: tensor.span(),
                    rows: most,
                    splits: Span { addr: address as usize, bytes: 8 * n as usize },
                    out: span(&mut out),
                    room,
                    layout: span(&mut layout),
                };
                unsafe { tensor.window.all_to_all_vdev(&splits, &exchange) }.unwrap();
                let mut expected = Vec::new();
                for from in 0..n {
                    let skipped: usize = (0..me).map(|to| rows(from, to, turn)).sum();
                    let count = rows(from, me, turn);
                    let place = [layout[from as usize], layout[(n + from) as usize]];
                    let begin = expected.len() / WIDTH;
                    assert_eq!(place, [count as i64, begin as i64], "{n} ranks, turn {turn}");
                    let given = brought(from, most * WIDTH);
                    expected.extend_from_slice(&given[skipped * WIDTH..][..count * WIDTH]);
                }
                expected.resize(room * WIDTH, -1.0);
                assert_eq!(out, expected, "{n} ranks, turn {turn}");
            }
            tensor.free(group);
            allocations::free(address).unwrap();
        });
    }
}

#[test]
fn a_rank_that_fails_in_a_collective_waits_for_the_others() {
    with_ranks(3, |group, me| {
        let tensor = Tensor::new(group, &brought(me, 10));
        let (input, mut out) = (tensor.span(), [0f32; 10]);
        let (all, none) = (span(&mut out), Span { addr: 0, bytes: 0 });
        let (before, behind) =
            (Span { addr: input.addr - 16, ..input }, Span { addr: input.addr + 4, ..input });
        for (bad, given, to, op) in [
            (0, before, all, ReduceOp::Sum),
            (1, behind, all, ReduceOp::Sum),
            (2, input, Span { bytes: 39, ..all }, ReduceOp::Sum),
            (0, input, all, ReduceOp::BitAnd),
            (1, Span { bytes: 39, ..input }, all, ReduceOp::Sum),
        ] {
            let (given, to, op) =
                if me == bad { (given, to, op) } else { (input, all, ReduceOp::Sum) };
            let result =
                unsafe { tensor.window.one_shot_all_reduce(DType::F32, op, given, none, to) };
            assert_eq!(result.is_err(), me == bad, "rank {me}: {result:?}");
            let error = unsafe { tensor.window.all_gather(input, all) }.unwrap_err();
            assert!(error.message.contains("120 bytes do not fit into an output of 40"), "{error}");
        }
        tensor.free(group);
    });
}

#[test]
fn a_window_ends_with_its_group() {
    with_ranks(2, |group, me| {
        let (window, address) = window(group, 64);
        window.barrier(0, None, 0).unwrap();
        barrier(group, None).unwrap();
        group.shutdown();
        // Both ranks call the barrier, so it would succeed if the group were still open.
        let error = window.barrier(0, None, 0).unwrap_err();
        assert!(
            error.kind == ErrorKind::Aborted && error.message.contains("destroyed"),
            "rank {me}: {error}"
        );
        allocations::free(address).unwrap();
    });
}
