//! Every collective × dtype × reduce op × odd sizes × 1..8 ranks × algorithm, against the definition.
//!
//! Reductions are compared bit by bit with one call of the kernel over all ranks' inputs, which `kernels::cpu` checks against an f64
//! reference: so every algorithm and size gives the same bits on every rank.
#![allow(missing_docs)]

mod ranks;

use ranks::{input, reduced, span, with_ranks};
use symm::coll::call::{Call, Op, Span};
use symm::coll::plan::Thresholds;
use symm::dtype::{DType, ReduceOp};
use symm::group::{Group, Tuning};
use symm::kernels::cpu;
use symm::rank::Rank;

const TUNING: Tuning = Tuning { direct: true, spins: None, thresholds: Thresholds::DEFAULT };

/// Elements: nothing, odd counts beside a flag, staged in one chunk, in many.
const COUNTS: [usize; 6] = [0, 1, 17, 1001, 9_999, 150_001];

fn call(op: Op, dtype: DType, reduce_op: ReduceOp, root: u32, rank: u32, inputs: Vec<Span>, outputs: Vec<Span>) -> Call {
    Call { op, dtype, reduce_op, root: Rank(root), factor: f64::from(rank) + 0.5, inputs, outputs, call_site: None }
}

fn spans(buffers: &mut [Vec<u8>]) -> Vec<Span> {
    buffers.iter_mut().map(|buffer| span(buffer)).collect()
}

fn check_reductions(group: &Group, rank: u32, n: u32, dtype: DType, op: ReduceOp, bytes: usize) {
    let root = n - 1;
    let what = || format!("{n} ranks, {dtype:?}, {op:?}, {bytes} bytes, rank {rank}");
    let expected = |to: u32| reduced(dtype, op, &(0..n).map(|from| input(dtype, from, to, bytes)).collect::<Vec<_>>());
    let run = |code, inputs: &mut [Vec<u8>], outputs: &mut [Vec<u8>]| {
        group.run(vec![call(code, dtype, op, root, rank, spans(inputs), spans(outputs))], None).expect("reduction");
    };
    let mut own = vec![input(dtype, rank, 0, bytes)];
    let mut output = vec![vec![0xee; bytes]];
    run(Op::AllReduce, &mut own, &mut output);
    assert_eq!(output[0], expected(0), "all_reduce, {}", what());
    let in_place = call(Op::AllReduce, dtype, op, 0, rank, spans(&mut own), spans(&mut own));
    group.run(vec![in_place], None).expect("in place");
    assert_eq!(own[0], expected(0), "all_reduce in place, {}", what());
    let mut own = vec![input(dtype, rank, 0, bytes)];
    let mut output = if rank == root { vec![vec![0xee; bytes]] } else { vec![] };
    run(Op::Reduce, &mut own, &mut output);
    assert!(rank != root || output[0] == expected(0), "reduce, {}", what());
    let mut all: Vec<Vec<u8>> = (0..n).map(|to| input(dtype, rank, to, bytes)).collect();
    let mut output = vec![vec![0xee; bytes]];
    run(Op::ReduceScatter, &mut all, &mut output);
    assert_eq!(output[0], expected(rank), "reduce_scatter, {}", what());
}

fn check_movements(group: &Group, rank: u32, n: u32, bytes: usize) {
    let (dtype, root) = (DType::U8, n / 2);
    let run = |op, inputs: &mut [Vec<u8>], outputs: &mut [Vec<u8>]| {
        group.run(vec![call(op, dtype, ReduceOp::Sum, root, rank, spans(inputs), spans(outputs))], None).expect("movement");
    };
    // Uneven where the collective allows it: rank r's messages are r bytes longer.
    let uneven = |from: u32| if bytes == 0 { 0 } else { bytes + from as usize };
    let blank = |count: u32, bytes: &dyn Fn(u32) -> usize| (0..count).map(|r| vec![0xee; bytes(r)]).collect::<Vec<_>>();
    let mine = || input(dtype, rank, 0, bytes);

    let mut inputs = if rank == root { vec![mine()] } else { vec![] };
    let mut outputs = blank(u32::from(rank != root), &|_| bytes);
    run(Op::Broadcast, &mut inputs, &mut outputs);
    assert!(rank == root || outputs[0] == input(dtype, root, 0, bytes), "broadcast of {bytes} to {rank} of {n}");

    let mut outputs = blank(n, &uneven);
    run(Op::AllGather, &mut [input(dtype, rank, 0, uneven(rank))], &mut outputs);
    assert!((0..n).all(|r| outputs[r as usize] == input(dtype, r, 0, uneven(r))), "all_gather of {bytes} to {rank} of {n}");

    let mut outputs = blank(if rank == root { n } else { 0 }, &|_| bytes);
    run(Op::Gather, &mut [mine()], &mut outputs);
    assert!(outputs.iter().enumerate().all(|(r, got)| *got == input(dtype, r as u32, 0, bytes)), "gather of {bytes} to {rank} of {n}");

    let mut inputs: Vec<_> = if rank == root { (0..n).map(|to| input(dtype, root, to, bytes)).collect() } else { vec![] };
    let mut outputs = blank(1, &|_| bytes);
    run(Op::Scatter, &mut inputs, &mut outputs);
    assert!(outputs[0] == input(dtype, root, rank, bytes), "scatter of {bytes} to {rank} of {n}");

    // Every pair has a length of its own; one is zero.
    let pair = |from: u32, to: u32| if (from, to) == (0, n - 1) { 0 } else { uneven(2 * from + to) };
    let mut inputs: Vec<_> = (0..n).map(|to| input(dtype, rank, to, pair(rank, to))).collect();
    let mut outputs = blank(n, &|from| pair(from, rank));
    run(Op::AllToAll, &mut inputs, &mut outputs);
    assert!((0..n).all(|r| outputs[r as usize] == input(dtype, r, rank, pair(r, rank))), "all_to_all of {bytes} to {rank} of {n}");
}

#[test]
fn movements_of_every_size_and_algorithm() {
    for n in 1..=8 {
        with_ranks(n, TUNING, |group, rank| {
            for bytes in COUNTS.into_iter().chain([600_001, 1_500_000]) {
                check_movements(group, rank, n, bytes);
            }
        });
    }
}

#[test]
fn reductions_of_every_dtype_and_op() {
    for n in 1..=8 {
        with_ranks(n, TUNING, |group, rank| {
            for &dtype in DType::ALL {
                for &op in ReduceOp::ALL {
                    if cpu::supports(op, dtype).is_ok() {
                        for count in [0, 1, 17, 1001] {
                            check_reductions(group, rank, n, dtype, op, count * dtype.size());
                        }
                    }
                }
            }
        });
    }
}

#[test]
fn reductions_of_every_size() {
    for n in [2, 3, 4, 7] {
        with_ranks(n, TUNING, |group, rank| {
            for dtype in [DType::F32, DType::BF16, DType::F8E4M3FN, DType::I64] {
                for count in COUNTS {
                    check_reductions(group, rank, n, dtype, ReduceOp::Sum, count * dtype.size());
                }
            }
        });
    }
}

#[test]
fn many_small_calls_of_mixed_kinds_keep_their_order() {
    with_ranks(4, TUNING, |group, rank| {
        for i in 0..2000u32 {
            let bytes = [4, 64, 12_000, 100][i as usize % 4];
            let mut data = vec![i.wrapping_mul(rank + 1); bytes / 4];
            let span = vec![span(&mut data)];
            group.run(vec![call(Op::AllReduce, DType::I32, ReduceOp::Sum, 0, rank, span.clone(), span)], None).expect("all_reduce");
            assert!(data.iter().all(|&value| value == i.wrapping_mul(10)), "call {i}");
        }
    });
}

#[test]
fn more_ranks_than_cores_do_not_collapse() {
    let begin = std::time::Instant::now();
    with_ranks(16, TUNING, |group, rank| {
        for _ in 0..50 {
            let mut data = vec![1i32; 5000];
            let span = vec![span(&mut data)];
            group.run(vec![call(Op::AllReduce, DType::I32, ReduceOp::Sum, 0, rank, span.clone(), span)], None).expect("all_reduce");
            assert!(data.iter().all(|&value| value == 16));
        }
    });
    assert!(begin.elapsed().as_secs() < 30, "50 calls of 16 ranks took {:?}", begin.elapsed());
}
