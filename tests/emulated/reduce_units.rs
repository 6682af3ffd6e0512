//! Reductions by CUDA kernels compared bit by bit with the CPU's: every type, every operation.

use crate::calls::{Random, on_cpu};
use crate::program::Program;
use symm::dtype::{DType, ReduceOp, SumOrder};
use symm::kernels::cpu;
use symm::kernels::cuda::driver::Grid;

const UNIT: usize = 16;

/// Factors that differ and are not exact in every type; the last one overflows small floats.
fn factor(rank: usize) -> f64 {
    [0.1, -1.5, 3.0, 1e-3, 0.5, -7.0, 1.0, 1e4][rank % 8]
}

/// The bit patterns at and next to which the meaning of a number changes; for complex types, the
/// patterns of one part.
fn special(dtype: DType) -> Vec<u64> {
    // The bits of infinity, of the smallest normal number, and of one.
    let (infinity, least_normal, one): (u64, u64, u64) = match dtype {
        DType::F32 | DType::C64 => (0x7f80_0000, 0x0080_0000, 0x3f80_0000),
        DType::F64 | DType::C128 => {
            (0x7ff0_0000_0000_0000, 0x0010_0000_0000_0000, 0x3ff0_0000_0000_0000)
        }
        DType::F16 => (0x7c00, 0x0400, 0x3c00),
        DType::BF16 => (0x7f80, 0x0080, 0x3f80),
        DType::F8E5M2 | DType::F8E4M3FN | DType::F8E5M2FNUZ | DType::F8E4M3FNUZ => {
            return (0..256).collect();
        }
        DType::Bool => return vec![0, 1],
        DType::U8
        | DType::I8
        | DType::U16
        | DType::I16
        | DType::U32
        | DType::I32
        | DType::U64
        | DType::I64 => {
            let top = 1u64 << (8 * dtype.size() - 1);
            return [0, 1, 2, 3, top - 1, top, top + 1, top.wrapping_mul(2).wrapping_sub(1), 0x55]
                .to_vec();
        }
    };
    let sign = 1u64 << (infinity.ilog2() + 1);
    let around = |bits: u64| [bits - 1, bits, bits + 1];
    let positive = [around(1), around(least_normal), around(one), around(infinity)];
    let nans = [infinity | (infinity >> 1), sign - 1];
    positive.iter().flatten().chain(&nans).flat_map(|&bits| [bits, bits | sign]).collect()
}

/// Each rank's elements. First come all pairs of special values on ranks 0 and 1, then random
/// numbers. Every second one of these has a similar size on all ranks.
fn inputs(dtype: DType, world: usize) -> Vec<Vec<u8>> {
    let mut random = Random(0x9e37_79b9_7f4a_7c15 ^ ((dtype as u64) << 8) ^ world as u64);
    let mut random = move || random.next().rotate_left(21);
    let part =
        if matches!(dtype, DType::C64 | DType::C128) { dtype.size() / 2 } else { dtype.size() };
    let special = special(dtype);
    let pairs = special.len() * special.len();
    let count = (pairs + 4096).next_multiple_of(UNIT);
    let mut ranks = vec![Vec::with_capacity(count * part); world];
    for at in 0..count {
        let common = random();
        for (rank, bytes) in ranks.iter_mut().enumerate() {
            let bits = match (at < pairs, rank) {
                (true, 0) => special[at % special.len()],
                (true, 1) => special[at / special.len()],
                (true, _) => special[(random() % special.len() as u64) as usize],
                // Numbers of similar size, so that their sum is rounded. Of two random floats, the
                // smaller is mostly too small to change the sum.
                (false, _) if at % 2 == 0 => common ^ (random() >> (64 - 3 * part as u32)),
                (false, _) => random(),
            };
            let bits = if dtype == DType::Bool { bits & 1 } else { bits };
            bytes.extend_from_slice(&bits.to_le_bytes()[..part]);
        }
    }
    ranks
}

fn expected(op: ReduceOp, dtype: DType, inputs: &[Vec<u8>]) -> Vec<u8> {
    if op != ReduceOp::PremulSum || dtype.size() >= 4 {
        return on_cpu(SumOrder::Rank, op, dtype, inputs, factor);
    }
    // On a GPU the sender multiplies by its factor, rounds to the element type and sends that.
    let lift = |(rank, input): (usize, &Vec<u8>)| {
        on_cpu(SumOrder::Rank, op, dtype, &[input], |_| factor(rank))
    };
    let lifted: Vec<Vec<u8>> = inputs.iter().enumerate().map(lift).collect();
    on_cpu(SumOrder::Rank, ReduceOp::Sum, dtype, &lifted, factor)
}

/// Bytes at an address with the alignment of units.
fn units(bytes: &[u8]) -> Vec<u128> {
    bytes
        .chunks_exact(UNIT)
        .map(|unit| u128::from_le_bytes(unit.try_into().expect("16 bytes")))
        .collect()
}

fn on_gpu(
    program: &Program,
    kernel: &str,
    op: ReduceOp,
    dtype: DType,
    inputs: &[Vec<u8>],
) -> Vec<u8> {
    let inputs: Vec<Vec<u128>> = inputs.iter().map(|input| units(input)).collect();
    let mut output = vec![0u128; inputs[0].len()];
    let mut args: Vec<u8> = Vec::new();
    let mut put = |word: u64| args.extend_from_slice(&word.to_ne_bytes());
    inputs.iter().for_each(|input| put(input.as_ptr().addr() as u64));
    put(output.as_mut_ptr().addr() as u64);
    put(output.len() as u64);
    (0..inputs.len()).for_each(|rank| put(factor(rank).to_bits()));
    put(dtype as u64 | (op as u64) << 32);
    // SAFETY: the arguments match reduce_units.cu for the number of inputs, which all have the
    // output's length.
    unsafe { program.launch(kernel, 0, Grid::new(1, 2), &args) };
    output.iter().flat_map(|unit| unit.to_le_bytes()).collect()
}

fn check(program: &Program, op: ReduceOp, dtype: DType, world: usize) {
    let inputs = inputs(dtype, world);
    let (expected, computed) =
        (expected(op, dtype, &inputs), on_gpu(program, "reduce_units", op, dtype, &inputs));
    for (at, (want, got)) in
        expected.chunks(dtype.size()).zip(computed.chunks(dtype.size())).enumerate()
    {
        if want != got {
            let given: Vec<&[u8]> =
                inputs.iter().map(|input| &input[at * dtype.size()..][..dtype.size()]).collect();
            panic!(
                "{dtype:?} {op:?}, {world} ranks, element {at}: {given:02x?} gave {got:02x?} \
                 instead of {want:02x?}"
            );
        }
    }
}

fn check_all(world: usize) {
    let program = Program::build("tests/emulated/reduce_units", world as u32, None, None);
    for &dtype in DType::ALL {
        for &op in ReduceOp::ALL {
            if cpu::supports(op, dtype).is_ok() {
                check(&program, op, dtype, world);
            }
        }
    }
}

tests! {
    two_ranks: check_all(2),
    three_ranks: check_all(3),
    eight_ranks: check_all(8),
}

/// Tests kernels that are compiled for one type and operation.
#[test]
fn the_chosen_pair() {
    for (dtype, op) in [
        (DType::BF16, ReduceOp::Sum),
        (DType::I16, ReduceOp::Avg),
        (DType::C64, ReduceOp::PremulSum),
    ] {
        let program = Program::build("tests/emulated/reduce_units", 3, Some(dtype), Some(op));
        check(&program, op, dtype, 3);
    }
}

#[test]
fn scrubbing_leaves_no_word_of_ones_and_every_number() {
    for dtype in [
        DType::F32,
        DType::F16,
        DType::BF16,
        DType::C64,
        DType::F8E5M2,
        DType::F8E4M3FN,
        DType::I32,
        DType::F8E4M3FNUZ,
    ] {
        let program =
            Program::build("tests/emulated/reduce_units", 1, Some(dtype), Some(ReduceOp::Sum));
        let words: Vec<u32> =
            (0..1024u32).map(|i| if i % 3 == 0 { u32::MAX } else { u32::MAX - i }).collect();
        let before = vec![words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<u8>>()];
        let after = on_gpu(&program, "scrub_units", ReduceOp::Sum, dtype, &before);
        let empties = after.chunks(4).filter(|word| *word == [0xff; 4]).count();
        let scrubs = !matches!(dtype, DType::I32 | DType::F8E4M3FN | DType::F8E4M3FNUZ);
        assert_eq!(empties, if scrubs { 0 } else { words.len().div_ceil(3) }, "{dtype:?}");
        // The words that scrubbing replaced must still be NaN. A reduction of one rank, which makes
        // every NaN canonical, shows this.
        let canonical =
            |bytes: &[u8]| on_cpu(SumOrder::Rank, ReduceOp::Sum, dtype, &[bytes], |_| 1.0);
        assert_eq!(canonical(&after), canonical(&before[0]), "{dtype:?}");
    }
}
