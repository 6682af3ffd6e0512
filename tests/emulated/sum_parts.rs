//! The CUDA kernel that sums the parts of a fused matmul, compared bit by bit with the CPU's
//! reduction.

use crate::calls::on_cpu;
use crate::program::{Program, bytes_of, numbers};
use symm::dtype::{DType, ReduceOp, SumOrder};
use symm::fused::sum_parts::{NAMES, PartsSum};

/// The content of the bytes after a result.
const UNTOUCHED: u8 = 0xa5;

fn check(n: usize, dtype: DType, mean: bool, bytes: usize) {
    let parts: Vec<Vec<u128>> = (0..n).map(|rank| numbers(rank, bytes, dtype)).collect();
    let addresses: Vec<usize> = parts.iter().map(|part| part.as_ptr().addr()).collect();
    let op = if mean { ReduceOp::Avg } else { ReduceOp::Sum };
    let given: Vec<&[u8]> = parts.iter().map(|part| &bytes_of(part)[..bytes]).collect();
    let expected = on_cpu(SumOrder::Rank, op, dtype, &given, |_| 1.0);
    let program = Program::build(NAMES.0, n as u32, Some(dtype), Some(op));
    for rank in 0..n {
        let mut to = vec![u128::from_ne_bytes([UNTOUCHED; 16]); bytes.div_ceil(16) + 1];
        let sum =
            PartsSum { rank, parts: &addresses, to: to.as_mut_ptr().addr(), bytes, dtype, mean };
        let args = sum.args().expect("can be added up");
        // SAFETY: parts and result live until the kernel has ended, and it writes only the result.
        unsafe { program.launch_with(NAMES.1, rank, &args) };
        let (got, behind) = bytes_of(&to).split_at(bytes);
        let about = format!("{dtype:?}, mean {mean}, {bytes} bytes, rank {rank} of {n}");
        assert_eq!(got, expected, "{about}");
        assert!(behind.iter().all(|&byte| byte == UNTOUCHED), "written behind the result: {about}");
    }
}

#[test]
fn sums_in_rank_order() {
    // Each case needs a separate compilation.
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
