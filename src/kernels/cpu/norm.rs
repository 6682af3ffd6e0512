//! Sum over ranks, residual and RMSNorm of whole rows.
//!
//! An element of the sum is rounded to the tensor's type as in every collective. The residual is
//! added in float32 and rounded, and the norm of the rounded row is computed in float32 and rounded
//! once. Squares are added in one order, whatever the instruction set and the number and position
//! of rows; `src/kernels/cuda/include/norm.cuh` uses the same order:
//!
//! 1. Add the squares of [`GROUP`] neighbours in halves: the first four and the last four, then two
//!    and two, then one and one.
//! 2. Add the groups of a row in [`LANES`] accumulators: accumulator `l` is the sum of group `l`
//!    and group `l + LANES`.
//! 3. Add the accumulators in blocks of [`BLOCK`], each in halves; then add the blocks in halves.
#![allow(
    unsafe_code,
    reason = "loops over the bytes of tensors, whose addresses torch vouches for"
)]

use super::convert::{BF16, E4M3Fn, F16};
use super::dispatch::Isa;
use super::element::Element;
use super::fp_mode::DefaultFpMode;
use super::tree::{self, Tree};
use super::vector::{self, Vector};
use crate::dtype::{DType, ReduceOp, SumOrder};
use crate::rms_norm::{GROUP, Norm, Normed};

const LANES: usize = 1024;
const BLOCK: usize = 32;
/// Number of elements that are processed at a time.
const TILE: usize = 64;
/// Largest float8_e4m3fn.
const LARGEST: f32 = 448.0;
/// Minimum scale of a row, the same as vLLM's.
const LEAST_SCALE: f32 = 1.0 / (LARGEST * 512.0);

/// The memory of rows, each row after the other.
#[derive(Clone, Debug)]
pub struct NormRows<'a> {
    /// Input of each rank, in rank order.
    pub sources: &'a [*const u8],
    /// Order of the sum over ranks.
    pub order: SumOrder,
    /// Residual of each row.
    pub residual: *const u8,
    /// Weight of each element of a row.
    pub weight: *const u8,
    /// Scale of all elements, under [`Normed::Static`].
    pub scale: *const u8,
    /// Destination of the normalised rows.
    pub normed: *mut u8,
    /// Destination of the sums with their residuals.
    pub sum: *mut u8,
    /// Destination of the scale of each row, under [`Normed::Dynamic`].
    pub scales: *mut u8,
}

/// Sums `rows` rows, adds the residual and normalises them.
///
/// # Safety
/// Everything in `memory` is valid for `rows` rows of `norm` at any alignment; `normed` is a source
/// or overlaps nothing, `sum` is `residual` or overlaps nothing.
pub unsafe fn add_rms_norm(norm: &Norm, rows: usize, memory: &NormRows<'_>) {
    // SAFETY: the caller's contract; `best` returns an instruction set of this CPU.
    unsafe { add_rms_norm_on(Isa::best(), norm, rows, memory) }
}

/// [`add_rms_norm`] with a named instruction set.
///
/// # Safety
/// As [`add_rms_norm`], on a CPU that has `isa`.
unsafe fn add_rms_norm_on(isa: Isa, norm: &Norm, rows: usize, memory: &NormRows<'_>) {
    let _mode = DefaultFpMode::enter();
    // SAFETY: each callee has this function's contract, which the caller upholds.
    unsafe {
        match norm.dtype {
            DType::BF16 => of_type::<BF16>(isa, norm, rows, memory),
            DType::F16 => of_type::<F16>(isa, norm, rows, memory),
            DType::F32 => of_type::<f32>(isa, norm, rows, memory),
            DType::U8
            | DType::I8
            | DType::I16
            | DType::I32
            | DType::I64
            | DType::U16
            | DType::U32
            | DType::U64
            | DType::Bool => {}
            DType::F8E5M2
            | DType::F8E4M3FN
            | DType::F8E5M2FNUZ
            | DType::F8E4M3FNUZ
            | DType::F64
            | DType::C64
            | DType::C128 => {}
        }
    }
}

/// # Safety
/// As [`add_rms_norm_on`], of elements of type `E`.
unsafe fn of_type<E: Element<Acc = f32>>(
    isa: Isa,
    norm: &Norm,
    rows: usize,
    memory: &NormRows<'_>,
) {
    // SAFETY: each callee has this function's contract, which the caller upholds.
    unsafe {
        match isa {
            Isa::Portable => run::<E, vector::Portable>(norm, rows, memory),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => avx2::<E>(norm, rows, memory),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => avx512::<E>(norm, rows, memory),
        }
    }
}

/// # Safety
/// As [`add_rms_norm`], on a CPU with AVX2 and F16C.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,f16c")]
unsafe fn avx2<E: Element<Acc = f32>>(norm: &Norm, rows: usize, memory: &NormRows<'_>) {
    // SAFETY: the callee has this function's contract, which the caller upholds.
    unsafe { run::<E, vector::Avx2>(norm, rows, memory) }
}

/// # Safety
/// As [`add_rms_norm`], on a CPU with AVX-512 F, BW, VL and DQ.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
unsafe fn avx512<E: Element<Acc = f32>>(norm: &Norm, rows: usize, memory: &NormRows<'_>) {
    // SAFETY: the callee has this function's contract, which the caller upholds.
    unsafe { run::<E, vector::Avx512>(norm, rows, memory) }
}

/// # Safety
/// As [`add_rms_norm`].
// Loops and no closures: a closure that is not inlined would be compiled for the portable target.
#[inline(always)]
unsafe fn run<E: Element<Acc = f32>, I: Vector>(norm: &Norm, rows: usize, memory: &NormRows<'_>) {
    let hidden = norm.hidden;
    let whole = hidden - hidden % TILE;
    let order = memory.order.of(ReduceOp::Sum, norm.dtype, memory.sources.len());
    let (mut tree, mut rest) =
        if order == SumOrder::Tree { (Some(Tree::new()), Some(Tree::new())) } else { (None, None) };
    for row in 0..rows {
        let at = row * norm.row_bytes();
        // SAFETY: `row < rows`, the number of rows in all memory; tiles end at `hidden`, a multiple
        // of `GROUP`.
        unsafe {
            let mut lanes = [0f32; LANES];
            for first in (0..whole).step_by(TILE) {
                add::<E, I, TILE>(memory, at, first, tree.as_mut(), &mut lanes);
            }
            for first in (whole..hidden).step_by(GROUP) {
                add::<E, I, GROUP>(memory, at, first, rest.as_mut(), &mut lanes);
            }
            let inverse =
                1.0 / (total(&mut lanes, hidden / GROUP) / hidden as f32 + norm.eps).sqrt();
            let (sum, weight, to) =
                (memory.sum.add(at), memory.weight, memory.normed.add(row * norm.normed_bytes()));
            if norm.normed == Normed::Same {
                for first in (0..whole).step_by(TILE) {
                    write::<E, I, TILE>(sum, weight, first, inverse, to);
                }
                for first in (whole..hidden).step_by(GROUP) {
                    write::<E, I, GROUP>(sum, weight, first, inverse, to);
                }
                continue;
            }
            let scale = if norm.normed == Normed::Dynamic {
                let mut largest = [0f32; TILE];
                for first in (0..whole).step_by(TILE) {
                    measure::<E, I, TILE>(sum, weight, first, inverse, &mut largest);
                }
                for first in (whole..hidden).step_by(GROUP) {
                    measure::<E, I, GROUP>(sum, weight, first, inverse, &mut largest);
                }
                let mut most = 0f32;
                for value in largest {
                    most = larger(most, value);
                }
                let scale = larger(LEAST_SCALE, most / LARGEST);
                memory.scales.cast::<f32>().add(row).write_unaligned(f32::narrow(scale));
                Scale::Divisor(scale)
            } else {
                Scale::Factor(1.0 / memory.scale.cast::<f32>().read_unaligned())
            };
            for first in (0..whole).step_by(TILE) {
                quantize::<E, I, TILE>(sum, weight, first, inverse, scale, to);
            }
            for first in (whole..hidden).step_by(GROUP) {
                quantize::<E, I, GROUP>(sum, weight, first, inverse, scale, to);
            }
        }
    }
}

/// How a normalised element is scaled.
#[derive(Clone, Copy)]
enum Scale {
    Factor(f32),
    Divisor(f32),
}

/// Returns the larger of two numbers; a NaN wins.
#[inline(always)]
fn larger(one: f32, other: f32) -> f32 {
    if (other > one) | other.is_nan() { other } else { one }
}

/// Returns `values` rounded to the tensor's type and widened again.
#[inline(always)]
fn rounded<E: Element<Acc = f32>, I: Vector, const T: usize>(values: &[f32; T]) -> [f32; T] {
    let mut bytes = [E::ZERO; T];
    // SAFETY: `T` elements; the CPU has `I` by the contract of `run`, which inlines this.
    unsafe {
        E::narrow_tile::<I, T>(values, bytes.as_mut_ptr().cast());
        E::widen_tile::<I, T>(bytes.as_ptr().cast())
    }
}

/// Sums `T` elements from `first` of the row at offset `at` over the ranks, pairwise if given a
/// `tree`. Adds the residual, stores the sums, and adds their squares to `lanes`.
///
/// # Safety
/// The memory is valid for these elements of type `E`; the CPU has `I`.
#[inline(always)]
unsafe fn add<E: Element<Acc = f32>, I: Vector, const T: usize>(
    memory: &NormRows<'_>,
    at: usize,
    first: usize,
    tree: Option<&mut Tree<f32, T>>,
    lanes: &mut [f32; LANES],
) {
    let place = at + first * size_of::<E>();
    // SAFETY: the caller's contract.
    let sum = unsafe { tree::sum_at::<E, I, T>(memory.sources, place, tree) };
    let mut sum = rounded::<E, I, T>(&sum);
    // SAFETY: the caller's contract.
    let residual = unsafe { E::widen_tile::<I, T>(memory.residual.add(place)) };
    for (sum, residual) in sum.iter_mut().zip(residual) {
        *sum += residual;
    }
    let mut squares = rounded::<E, I, T>(&sum);
    // SAFETY: the caller's contract.
    unsafe { E::narrow_tile::<I, T>(&sum, memory.sum.add(place)) };
    for square in &mut squares {
        *square *= *square;
    }
    let group = first / GROUP % LANES;
    let (groups, _) = squares.as_chunks::<GROUP>();
    let lanes = &mut lanes[group..group + T / GROUP];
    // SAFETY: the CPU has `I`, by the caller's contract.
    let added = unsafe { I::add_eights(groups, lanes) };
    for (lane, q) in lanes[added..].iter_mut().zip(&groups[added..]) {
        let (a, b, c, d) = (q[0] + q[4], q[1] + q[5], q[2] + q[6], q[3] + q[7]);
        *lane += (a + c) + (b + d);
    }
}

/// Returns the sum of the accumulators, and overwrites them. Accumulators from `groups` on are zero
/// and do not change a sum of squares.
#[inline(always)]
fn total(lanes: &mut [f32; LANES], groups: usize) -> f32 {
    let mut blocks = [0f32; LANES / BLOCK];
    for (block, total) in
        lanes.as_chunks_mut::<BLOCK>().0.iter_mut().zip(&mut blocks).take(groups.div_ceil(BLOCK))
    {
        *total = halved(block);
    }
    halved(&mut blocks)
}

#[inline(always)]
fn halved(values: &mut [f32; BLOCK]) -> f32 {
    let mut half = BLOCK / 2;
    while half > 0 {
        for i in 0..half {
            values[i] += values[i + half];
        }
        half /= 2;
    }
    values[0]
}

/// Returns the normalised elements from `first` of a row, not rounded.
///
/// # Safety
/// `sum` and `weight` are valid for a row of type `E` with `T` elements from `first`; the CPU has
/// `I`.
#[inline(always)]
unsafe fn normed<E: Element<Acc = f32>, I: Vector, const T: usize>(
    sum: *const u8,
    weight: *const u8,
    first: usize,
    inverse: f32,
) -> [f32; T] {
    let place = first * size_of::<E>();
    // SAFETY: the caller's contract.
    let (mut values, weight) = unsafe {
        (E::widen_tile::<I, T>(sum.add(place)), E::widen_tile::<I, T>(weight.add(place)))
    };
    for (value, weight) in values.iter_mut().zip(weight) {
        *value = *value * inverse * weight;
    }
    values
}

/// Finds the largest magnitudes of normalised elements, in any order, because the maximum does not
/// depend on it.
///
/// # Safety
/// As [`normed`].
#[inline(always)]
unsafe fn measure<E: Element<Acc = f32>, I: Vector, const T: usize>(
    sum: *const u8,
    weight: *const u8,
    first: usize,
    inverse: f32,
    largest: &mut [f32; TILE],
) {
    // SAFETY: the caller's contract.
    let values = rounded::<E, I, T>(&unsafe { normed::<E, I, T>(sum, weight, first, inverse) });
    for (largest, value) in largest.iter_mut().zip(values) {
        *largest = larger(*largest, value.abs());
    }
}

/// Writes the normalised elements from `first` of a row.
///
/// # Safety
/// As [`normed`]; `to` is valid for a row.
#[inline(always)]
unsafe fn write<E: Element<Acc = f32>, I: Vector, const T: usize>(
    sum: *const u8,
    weight: *const u8,
    first: usize,
    inverse: f32,
    to: *mut u8,
) {
    // SAFETY: the caller's contract.
    unsafe {
        E::narrow_tile::<I, T>(
            &normed::<E, I, T>(sum, weight, first, inverse),
            to.add(first * size_of::<E>()),
        )
    };
}

/// Writes the normalised elements from `first` of a row, scaled, as float8_e4m3fn.
///
/// # Safety
/// As [`write`].
#[inline(always)]
unsafe fn quantize<E: Element<Acc = f32>, I: Vector, const T: usize>(
    sum: *const u8,
    weight: *const u8,
    first: usize,
    inverse: f32,
    by: Scale,
    to: *mut u8,
) {
    // SAFETY: the caller's contract.
    let mut values = rounded::<E, I, T>(&unsafe { normed::<E, I, T>(sum, weight, first, inverse) });
    match by {
        Scale::Factor(factor) => {
            for value in &mut values {
                *value *= factor;
            }
        }
        Scale::Divisor(scale) => {
            for value in &mut values {
                *value /= scale;
            }
        }
    }
    for value in &mut values {
        // These comparisons keep a NaN, which `min` and `max` would replace by the limit.
        let above = if *value > LARGEST { LARGEST } else { *value };
        *value = if above < -LARGEST { -LARGEST } else { above };
    }
    // SAFETY: the caller's contract.
    unsafe { E4M3Fn::narrow_tile::<I, T>(&values, to.add(first)) };
}

#[cfg(test)]
mod tests;
