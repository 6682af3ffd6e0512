//! The sum of a fused matmul's parts by its CUDA kernel, compared bit by bit with the CPU's
//! reduction.

use crate::program::{Program, numbers};
use symm::dtype::{DType, ReduceOp};
use symm::fused::sum_parts::{NAMES, PartsSum};
use symm::kernels::cpu::{self, InputElements, WriteMode};
use symm::kernels::cuda::driver::Grid;

const BLOCKS: u32 = 3;
const THREADS: u32 = 4;
/// The content of the bytes after a result.
const UNTOUCHED: u8 = 0xa5;

fn check(n: usize, dtype: DType, mean: bool, bytes: usize) {
    let parts: Vec<Vec<u128>> = (0..n).map(|rank| numbers(rank, bytes, dtype)).collect();
    let addresses: Vec<usize> = parts.iter().map(|part| part.as_ptr().addr()).collect();
    let op = if mean { ReduceOp::Avg } else { ReduceOp::Sum };
    let mut expected = vec![0u8; bytes];
    let sources: Vec<InputElements> =
        parts.iter().map(|part| InputElements { ptr: part.as_ptr().cast(), factor: 1.0 }).collect();
    // SAFETY: every part and the result have at least `bytes`, a multiple of the element.
    unsafe {
        cpu::reduce(
            op,
            dtype,
            expected.as_mut_ptr(),
            &sources,
            bytes / dtype.size(),
            WriteMode::Cached,
        )
    };
    let program = Program::build(NAMES.0, n as u32, Some(dtype), Some(op));
    for rank in 0..n {
        let mut to = vec![u128::from_ne_bytes([UNTOUCHED; 16]); bytes.div_ceil(16) + 1];
        let sum =
            PartsSum { rank, parts: &addresses, to: to.as_mut_ptr().addr(), bytes, dtype, mean };
        let args = sum.args().expect("can be added up");
        // SAFETY: `repr(C)` numbers without padding.
        let args =
            unsafe { std::slice::from_raw_parts((&raw const args).cast(), size_of_val(&args)) };
        // SAFETY: parts and result live until the kernel has ended, and it writes only the result.
        unsafe { program.launch(NAMES.1, rank as u32, Grid::new(BLOCKS, THREADS), args) };
        let got: Vec<u8> = to.iter().flat_map(|unit| unit.to_ne_bytes()).collect();
        assert_eq!(
            got[..bytes],
            expected,
            "{dtype:?}, mean {mean}, {bytes} bytes, rank {rank} of {n}"
        );
        assert!(
            got[bytes..].iter().all(|&byte| byte == UNTOUCHED),
            "{dtype:?}, {bytes} bytes: written behind the result"
        );
    }
}

#[test]
fn sums_in_rank_order() {
    // Each is a separate compilation.
    for (n, dtype, mean) in [
        (2, DType::F16, true),
        (3, DType::BF16, false),
        (3, DType::F32, true),
        (8, DType::BF16, true),
        (8, DType::F64, false),
    ] {
        check(n, dtype, mean, 16 * 61);
    }
}

#[test]
fn odd_lengths() {
    for units in [0, 1, 12, 13] {
        for rest in [0, 2, 6, 14] {
            check(3, DType::BF16, false, 16 * units + rest);
        }
        check(3, DType::F32, true, 16 * units + 12);
    }
}
