//! GB/s of the CPU kernels: `cargo bench --bench kernels [-- reduce|copy]`.
//!
//! `reduce` counts the bytes of all sources and of the result. `copy` writes to lines that another
//! core owns, as in a staging buffer; the second column is the rate at which that core then reads
//! them.
#![allow(clippy::print_stdout, reason = "a report is what a benchmark is for")]

use std::hint::black_box;
use std::time::Instant;
use symm::dtype::{DType, ReduceOp};
use symm::kernels::cpu::{InputElements, WriteMode, reduce};

#[path = "kernels/copies.rs"]
mod copies;

fn main() {
    let wanted =
        |name: &str| !std::env::args().skip(1).any(|arg| !arg.starts_with("--") && arg != name);
    if wanted("reduce") {
        reductions();
    }
    if wanted("copy") {
        copies::report();
    }
}

/// Returns the minimum of a few timings, each of enough calls to fill about a millisecond, in
/// seconds per call.
fn least(bytes: usize, mut call: impl FnMut()) -> f64 {
    let calls = (20_000_000 / bytes.max(1)).clamp(1, 20_000);
    let timing = |_| {
        let start = Instant::now();
        (0..calls).for_each(|_| call());
        start.elapsed().as_secs_f64() / calls as f64
    };
    (0..12).map(timing).fold(f64::INFINITY, f64::min)
}

fn one(op: ReduceOp, dtype: DType, sources: usize, source_bytes: usize, store: WriteMode) -> f64 {
    // These bytes are finite numbers in all float types; the values do not affect the speed.
    let inputs: Vec<Vec<u8>> =
        (0..sources).map(|rank| vec![0x30 + rank as u8; source_bytes]).collect();
    let list: Vec<InputElements> =
        inputs.iter().map(|input| InputElements { ptr: input.as_ptr(), factor: 0.5 }).collect();
    let mut output = vec![0u8; source_bytes];
    let count = source_bytes / dtype.size();
    let seconds = least((sources + 1) * source_bytes, || {
        // SAFETY: `inputs` and `output` hold `source_bytes` each and do not overlap.
        unsafe { reduce(op, dtype, black_box(output.as_mut_ptr()), black_box(&list), count, store) }
    });
    ((sources + 1) * source_bytes) as f64 / seconds / 1e9
}

fn reductions() {
    println!("reduce, GB/s over sources and result");
    println!(
        "{:<10} {:<15} {:>7} {:>9} {:>9} {:>9}",
        "op", "dtype", "sources", "8 KiB", "128 KiB", "4 MiB nt"
    );
    let row = |op: ReduceOp, dtype: DType, sources: usize| {
        println!(
            "{:<10} {:<15} {:>7} {:>9.1} {:>9.1} {:>9.1}",
            op.name(),
            dtype.name(),
            sources,
            one(op, dtype, sources, 8 << 10, WriteMode::Cached),
            one(op, dtype, sources, 128 << 10, WriteMode::Cached),
            one(op, dtype, sources, 4 << 20, WriteMode::Streaming),
        );
    };
    for sources in [2, 3, 4, 8, 16] {
        row(ReduceOp::Sum, DType::F32, sources);
    }
    for &dtype in DType::ALL {
        row(ReduceOp::Sum, dtype, 4);
    }
    for op in [ReduceOp::Avg, ReduceOp::Product, ReduceOp::Min, ReduceOp::Max] {
        row(op, DType::F32, 4);
        row(op, DType::BF16, 4);
        row(op, DType::I32, 4);
    }
    row(ReduceOp::PremulSum, DType::F32, 4);
    println!("small, ns a call: 4 sources of float32");
    for count in [1, 2, 16, 64, 100, 256, 1024] {
        let gbs = one(ReduceOp::Sum, DType::F32, 4, count * 4, WriteMode::Cached);
        println!("{count:>6} elements {:>8.1}", (5 * count * 4) as f64 / gbs);
    }
}
