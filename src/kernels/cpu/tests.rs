#![allow(
    unsafe_code,
    reason = "loops over the bytes of tensors, whose addresses torch vouches for"
)]

use super::dispatch::Isa;
use super::reference::{self, decode, encode};
use super::{InputElements, WriteMode, copy, reduce, reduce_on, supports};
use crate::dtype::{DType, ReduceOp, SumOrder};
use proptest::prelude::*;

const COUNTS: [usize; 11] = [0, 1, 7, 15, 16, 17, 63, 64, 65, 1000, 4099];
const FACTORS: [f64; 8] = [0.1, -3.0, 1.0 / 3.0, 1e-40, 65504.0, -0.0, 1e30, 1.0];
const FLOATS: [DType; 6] =
    [DType::F16, DType::BF16, DType::F8E5M2, DType::F8E4M3FN, DType::F8E5M2FNUZ, DType::F8E4M3FNUZ];

/// The value of bytes that the kernels must not write.
const GUARD: u8 = 0xa5;

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }
}

fn pairs() -> impl Iterator<Item = (ReduceOp, DType)> {
    let all = ReduceOp::ALL.iter().flat_map(|&op| DType::ALL.iter().map(move |&dtype| (op, dtype)));
    all.filter(|&(op, dtype)| supports(op, dtype).is_ok())
}

/// The values that break sums: huge next to small numbers, both zeros, the smallest and the largest
/// numbers, infinities, many NaNs.
fn adversary(dtype: DType, random: &mut Random) -> Vec<u8> {
    let pick = |list: &[u64], random: &mut Random| list[random.next() as usize % list.len()];
    let double =
        |list: &[f64], random: &mut Random| list[random.next() as usize % list.len()].to_bits();
    let size = dtype.size();
    let bits = match (dtype, random.next() % 3) {
        (DType::Bool, _) => random.next() & 1,
        (DType::F32 | DType::C64, 0) => pick(
            &[
                0x7f80_0001,
                0xffc1_2345,
                0x7fc0_0000,
                1,
                0x8000_0000,
                0x807f_ffff,
                0x7f7f_ffff,
                0x7f80_0000,
            ],
            random,
        ),
        (DType::F32 | DType::C64, 1) => {
            let value = f64::from_bits(double(
                &[1e30, -1e30, 1.0, -1.0, 1e-30, f64::NEG_INFINITY, 0.0, 3.3],
                random,
            ));
            (value as f32).to_bits().into()
        }
        (DType::F64 | DType::C128, 0) => {
            pick(&[0x7ff0_0000_0000_0001, 0xfff8_1234_5678_9abc, 1, 1 << 63, 0], random)
        }
        (DType::F64 | DType::C128, 1) => {
            double(&[1e300, -1e300, 1.0, f64::MAX, f64::INFINITY, 1e-308], random)
        }
        (DType::F16, 0) => pick(
            &[0x7bff, 0xfbff, 0x7c00, 0xfc00, 0x7c01, 0xfe01, 1, 0x83ff, 0x8000, 0x0400],
            random,
        ),
        (DType::BF16, 0) => pick(
            &[0x7f7f, 0xff7f, 0x7f80, 0xff80, 0x7f81, 0xffc1, 1, 0x807f, 0x8000, 0x0080],
            random,
        ),
        // Ordinary magnitudes, for which sums round instead of overflowing.
        (DType::F16, 1) => 0x3800 + random.next() % 0x1000,
        (DType::BF16, 1) => 0x3f00 + random.next() % 0x0200,
        (_, _) => random.next(),
    };
    // Complex numbers repeat the pattern in both parts.
    let part = if matches!(dtype, DType::C64 | DType::C128) { size / 2 } else { size };
    bits.to_le_bytes()[..part].iter().copied().cycle().take(size).collect()
}

fn inputs(dtype: DType, sources: usize, count: usize, seed: u64) -> Vec<Vec<u8>> {
    let mut random = Random(seed);
    (0..sources).map(|_| (0..count).flat_map(|_| adversary(dtype, &mut random)).collect()).collect()
}

fn expected(
    order: SumOrder,
    (op, dtype): (ReduceOp, DType),
    inputs: &[Vec<u8>],
    count: usize,
) -> Vec<u8> {
    let size = dtype.size();
    let element = |i: usize| {
        let values: Vec<&[u8]> =
            inputs.iter().map(|input| &input[i * size..(i + 1) * size]).collect();
        reference::element(order, op, dtype, &values, &FACTORS)
    };
    if inputs.is_empty() { vec![] } else { (0..count).flat_map(element).collect() }
}

/// Shifts each input to a different misalignment, starting with `offset`.
fn misaligned(inputs: &[Vec<u8>], offset: usize) -> Vec<(Vec<u8>, usize)> {
    let shifted = |(rank, input): (usize, &Vec<u8>)| {
        let shift = offset * (rank + 1) % 61;
        ([vec![GUARD; shift], input.clone()].concat(), shift)
    };
    inputs.iter().enumerate().map(shifted).collect()
}

fn sources(shifted: &[(Vec<u8>, usize)]) -> Vec<InputElements> {
    let source = |(rank, (bytes, shift)): (usize, &(Vec<u8>, usize))| InputElements {
        ptr: bytes[*shift..].as_ptr(),
        factor: FACTORS[rank],
    };
    shifted.iter().enumerate().map(source).collect()
}

/// A reduction with the kernel of an instruction set, into memory at `offset`.
#[derive(Clone, Copy)]
struct Reduction {
    isa: Isa,
    order: SumOrder,
    op: ReduceOp,
    dtype: DType,
    offset: usize,
    store: WriteMode,
}

impl Reduction {
    fn of(op: ReduceOp, dtype: DType) -> Self {
        let (isa, order) = (Isa::best(), SumOrder::Rank);
        Self { isa, order, op, dtype, offset: 0, store: WriteMode::Cached }
    }

    /// Returns the result, and checks that the kernel writes nothing else.
    fn computed(self, list: &[InputElements], count: usize) -> Vec<u8> {
        let Self { isa, order, op, dtype, offset, store } = self;
        let bytes = count * dtype.size();
        let mut out = vec![GUARD; offset + bytes + 64];
        let to = out[offset..].as_mut_ptr();
        // SAFETY: the sources hold `count` elements, and `out` holds `count` from `offset`; `isa`
        // is from `available`.
        unsafe { reduce_on(isa, order, op, dtype, to, list, count, list.len(), store) };
        assert!(out[..offset].iter().chain(&out[offset + bytes..]).all(|&byte| byte == GUARD));
        out[offset..offset + bytes].to_vec()
    }
}

#[test]
fn every_path_computes_the_reference_and_trees_combine_halves() {
    let most = COUNTS[COUNTS.len() - 1];
    // Up to 8 ranks, because `FACTORS` has a factor for each of 8 ranks.
    let in_order = [
        (0, WriteMode::Cached),
        (1, WriteMode::Cached),
        (0, WriteMode::Streaming),
        (35, WriteMode::Streaming),
    ];
    for (order, ranks, places) in [
        (SumOrder::Rank, &[1, 2, 3, 5, 8][..], &in_order[..]),
        (SumOrder::Tree, &[1, 2, 3, 4, 5, 6, 7, 8], &[in_order[1], in_order[3]]),
    ] {
        for ((op, dtype), &ranks) in pairs().flat_map(|pair| ranks.iter().map(move |n| (pair, n))) {
            let inputs = inputs(dtype, ranks, most, ranks as u64);
            let expected = expected(order, (op, dtype), &inputs, most);
            for &(offset, store) in places {
                let shifted = misaligned(&inputs, offset);
                let list = sources(&shifted);
                for (&isa, count) in
                    Isa::available().iter().flat_map(|isa| COUNTS.map(|count| (isa, count)))
                {
                    let reduction = Reduction { isa, order, op, dtype, offset, store };
                    assert!(
                        reduction.computed(&list, count) == expected[..count * dtype.size()],
                        "{order:?} {} of {ranks} x {count} {} with {isa:?}, {store:?}, offset \
                         {offset}",
                        op.name(),
                        dtype.name()
                    );
                }
            }
        }
    }
}

#[test]
fn trees_of_trees_are_trees() {
    let leaves: Vec<Vec<u8>> = inputs(DType::F32, 128, 65, 3);
    let summed = |parts: &[Vec<u8>]| -> Vec<u8> {
        let list: Vec<InputElements> =
            parts.iter().map(|part| InputElements { ptr: part.as_ptr(), factor: 1.0 }).collect();
        let sum = Reduction::of(ReduceOp::Sum, DType::F32);
        Reduction { order: SumOrder::Tree, ..sum }.computed(&list, 65)
    };
    for of in [1, 3, 8, 20, 128] {
        let leaves = &leaves[..of];
        for each in [2, 4, 8, 16, 64] {
            let parts: Vec<Vec<u8>> = leaves.chunks(each).map(summed).collect();
            assert!(summed(&parts) == summed(leaves), "{of} in {each}");
        }
    }
}

#[test]
fn nothing_is_written_without_sources() {
    for (op, dtype) in pairs() {
        let result = Reduction { offset: 3, ..Reduction::of(op, dtype) }.computed(&[], 65);
        assert!(result.iter().all(|&byte| byte == GUARD));
    }
}

#[test]
fn the_result_may_replace_any_source() {
    for (op, dtype) in pairs() {
        for (store, replaced) in
            [(WriteMode::Cached, 0), (WriteMode::Cached, 2), (WriteMode::Streaming, 1)]
        {
            let count = 1201;
            let inputs = inputs(dtype, 3, count, 9);
            let mut shifted = misaligned(&inputs, 5);
            let (bytes, shift) = &mut shifted[replaced];
            let dst = bytes[*shift..].as_mut_ptr();
            let mut list = sources(&shifted);
            list[replaced].ptr = dst;
            // SAFETY: all hold `count` elements; `dst` is one of the sources.
            unsafe { reduce(op, dtype, dst, &list, count, store) };
            let (bytes, shift) = &shifted[replaced];
            assert!(
                bytes[*shift..] == expected(SumOrder::Rank, (op, dtype), &inputs, count),
                "{} {}",
                op.name(),
                dtype.name()
            );
        }
    }
}

#[test]
fn averages_of_many_ranks_fit() {
    for (dtype, value, average) in
        [(DType::I8, 0xff, 0xff), (DType::I8, 1, 0xff), (DType::U8, 1, 1), (DType::U8, 2, 0)]
    {
        let values = [value; 9];
        let source = InputElements { ptr: values.as_ptr(), factor: 1.0 };
        let result = Reduction::of(ReduceOp::Avg, dtype).computed(&[source; 128], 9);
        assert_eq!(result, [average; 9], "{value} as {}", dtype.name());
    }
}

#[test]
fn huge_values_cancel_in_rank_order() {
    let values = [1e30f32, -1e30, 1.0];
    for (order, sum) in [([0, 1, 2], 1.0), ([0, 2, 1], 0.0), ([2, 0, 1], 0.0)] {
        let list = order.map(|i| InputElements { ptr: values[i..].as_ptr().cast(), factor: 1.0 });
        let result = Reduction::of(ReduceOp::Sum, DType::F32).computed(&list, 1);
        assert_eq!(decode(DType::F32, &result), sum);
    }
}

#[test]
fn small_floats_round_like_the_half_crate_and_torch() {
    let narrowed = |dtype, value: f32| encode(dtype, value.into());
    for line in include_str!("float8_from_torch.txt").lines().filter(|line| !line.starts_with('#'))
    {
        let columns: Vec<u32> =
            line.split(' ').map(|hex| u32::from_str_radix(hex, 16).expect("hex")).collect();
        let value = f32::from_bits(columns[0]);
        let formats = [DType::F8E4M3FN, DType::F8E5M2, DType::F8E4M3FNUZ, DType::F8E5M2FNUZ];
        for (dtype, &code) in formats.into_iter().zip(&columns[1..]) {
            assert_eq!(narrowed(dtype, value), [code as u8], "{value:e} as {}", dtype.name());
            assert_eq!(
                kernel_narrowed(dtype, value),
                [code as u8],
                "{value:e} as {}",
                dtype.name()
            );
        }
    }
    let mut random = Random(4);
    for _ in 0..200_000 {
        let value = f32::from_bits(random.next() as u32);
        if !value.is_nan() {
            assert_eq!(
                narrowed(DType::F16, value),
                half::f16::from_f32(value).to_le_bytes(),
                "{value:e}"
            );
            assert_eq!(
                narrowed(DType::BF16, value),
                half::bf16::from_f32(value).to_le_bytes(),
                "{value:e}"
            );
        }
    }
}

fn kernel_narrowed(dtype: DType, value: f32) -> Vec<u8> {
    use super::convert::{BF16, E4M3Fn, E4M3Fnuz, E5M2, E5M2Fnuz, F16};
    use super::element::Element;
    let codes = [
        (DType::F16, F16::narrow(value).0.to_le_bytes().to_vec()),
        (DType::BF16, BF16::narrow(value).0.to_le_bytes().to_vec()),
        (DType::F8E5M2, vec![E5M2::narrow(value).0]),
        (DType::F8E4M3FN, vec![E4M3Fn::narrow(value).0]),
        (DType::F8E5M2FNUZ, vec![E5M2Fnuz::narrow(value).0]),
        (DType::F8E4M3FNUZ, vec![E4M3Fnuz::narrow(value).0]),
    ];
    codes.into_iter().find(|(of, _)| *of == dtype).expect("a float").1
}

#[test]
fn conversions_hold_at_every_code_and_around_every_midpoint() {
    for dtype in FLOATS {
        let bits = 8 * dtype.size() as u32;
        for code in 0..1u32 << bits {
            let bytes = &code.to_le_bytes()[..dtype.size()];
            let value = decode(dtype, bytes);
            let source = InputElements { ptr: bytes.as_ptr(), factor: 1.0 };
            let sum = Reduction { isa: Isa::Portable, ..Reduction::of(ReduceOp::Sum, dtype) };
            let same = sum.computed(&[source], 1);
            assert_eq!(same, encode(dtype, value), "{code:#x} of {}", dtype.name());
            let next = decode(dtype, &(code + 1).to_le_bytes()[..dtype.size()]);
            let middle = ((value + next) / 2.0) as f32;
            let around = [-1i32, 0, 1]
                .map(|step| f32::from_bits(middle.to_bits().wrapping_add_signed(step)));
            for value in around {
                assert_eq!(
                    kernel_narrowed(dtype, value),
                    encode(dtype, value.into()),
                    "{value:e} {}",
                    dtype.name()
                );
            }
        }
    }
}

// proves P22
#[test]
fn refusals_name_what_is_served() {
    let refused = |op, dtype| supports(op, dtype).expect_err("refused").message;
    assert_eq!(
        refused(ReduceOp::BitAnd, DType::F32),
        "reduce op BAND is not defined for float32; \
         use SUM, AVG, PRODUCT, MIN, MAX or PREMUL_SUM, or view the tensor as int32"
    );
    assert_eq!(
        refused(ReduceOp::Product, DType::C64),
        "reduce op PRODUCT is not defined for complex64; \
         use SUM, AVG or PREMUL_SUM, or reduce its parts as float32 with torch.view_as_real"
    );
    assert_eq!(pairs().count(), 8 * 6 + 2 * 3 + 8 * 8 + 7);
}

// proves P8
#[test]
fn copies_move_every_byte_and_no_other() {
    for store in [WriteMode::Cached, WriteMode::Streaming] {
        for bytes in [0, 1, 15, 63, 64, 65, 127, 1000, 4096, 600_003] {
            for (from, to) in [(0, 0), (1, 0), (0, 7), (33, 63)] {
                let mut random = Random(bytes as u64);
                let source: Vec<u8> = (0..from + bytes).map(|_| random.next() as u8).collect();
                let mut out = vec![GUARD; to + bytes + 64];
                // SAFETY: both hold `bytes` bytes from their offsets.
                unsafe { copy(out[to..].as_mut_ptr(), source[from..].as_ptr(), bytes, store) };
                assert!(out[to..to + bytes] == source[from..]);
                assert!(out[..to].iter().chain(&out[to + bytes..]).all(|&byte| byte == GUARD));
            }
        }
    }
}

proptest! {
    #[test]
    fn splitting_a_range_changes_no_bit(
        pair in 0..pairs().count(), ranks in 1..9usize, count in 0..700usize, at in 0..700usize,
        offset in 0..64usize, seed: u64, streaming: bool,
    ) {
        let (op, dtype) = pairs().nth(pair).expect("counted");
        let store = if streaming { WriteMode::Streaming } else { WriteMode::Cached };
        let inputs = inputs(dtype, ranks, count, seed);
        let at = at.min(count);
        let shifted = misaligned(&inputs, offset);
        let list = sources(&shifted);
        let later: Vec<InputElements> = list
            .iter()
            .map(|source| {
                let ptr = source.ptr.wrapping_add(at * dtype.size());
                InputElements { ptr, ..*source }
            })
            .collect();
        let reduction = Reduction { offset, store, ..Reduction::of(op, dtype) };
        let parts = [reduction.computed(&list, at), reduction.computed(&later, count - at)];
        prop_assert!(parts.concat() == expected(SumOrder::Rank, (op, dtype), &inputs, count));
    }
}
