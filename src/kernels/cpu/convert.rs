//! Floats narrower than 32 bits: how they widen to `f32`, exactly, and how `f32` rounds back, once,
//! to nearest even.
//!
//! The conversions use integer arithmetic and selects, without branches or tables, so that the
//! loops around them vectorise and every instruction set computes the same bits. No step makes or
//! reads a subnormal `f32`, so the conversions also work in a thread that flushes them
//! (`torch.set_flush_denormal`).
#![allow(
    unsafe_code,
    reason = "loops over the bytes of tensors, whose addresses torch vouches for"
)]

use super::element::Element;
use super::vector::Vector;

/// A small float: one sign bit, `EXPONENT` bits, `MANTISSA` bits.
trait FloatFormat: Copy {
    const MANTISSA: u32;
    const BIAS: u32;
    /// The mask of all bits below the sign bit.
    const MAGNITUDE: u32;
    /// The largest finite magnitude.
    const LARGEST: u32;
    /// The magnitude of an overflow, before the sign: infinity if the format has one, otherwise
    /// NaN.
    const OVERFLOW: u32;
    /// The canonical NaN.
    const NAN: u32;
    /// True if the format has only finite numbers and NaN, and an unsigned zero: a zero with the
    /// sign bit set is the NaN.
    const UNSIGNED_ZERO: bool;

    fn to_code(self) -> u32;
    fn from_code(code: u32) -> Self;
}

macro_rules! layouts {
    ($($(#[$doc:meta])* $name:ident: $bits:ty, mantissa $mantissa:literal, bias $bias:literal,
        largest $largest:literal,
       overflow $overflow:literal, nan $nan:literal, unsigned zero $unsigned:literal;)*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy)]
        #[repr(transparent)]
        pub(super) struct $name(pub(super) $bits);

        impl FloatFormat for $name {
            const MANTISSA: u32 = $mantissa;
            const BIAS: u32 = $bias;
            const MAGNITUDE: u32 = (<$bits>::MAX >> 1) as u32;
            const LARGEST: u32 = $largest;
            const OVERFLOW: u32 = $overflow;
            const NAN: u32 = $nan;
            const UNSIGNED_ZERO: bool = $unsigned;

            #[inline(always)]
            fn to_code(self) -> u32 {
                u32::from(self.0)
            }

            #[inline(always)]
            fn from_code(code: u32) -> Self {
                Self(code as $bits)
            }
        }

    )*};
}

layouts! {
    /// Format of IEEE binary16.
    F16: u16, mantissa 10, bias 15, largest 0x7bff, overflow 0x7c00, nan 0x7e00,
        unsigned zero false;
    /// `torch.float8_e5m2`: the upper byte of a binary16.
    E5M2: u8, mantissa 2, bias 15, largest 0x7b, overflow 0x7c, nan 0x7f, unsigned zero false;
    /// `torch.float8_e4m3fn`: no infinity, up to 448.
    E4M3Fn: u8, mantissa 3, bias 7, largest 0x7e, overflow 0x7f, nan 0x7f, unsigned zero false;
    /// `torch.float8_e5m2fnuz`: no infinity, no negative zero.
    E5M2Fnuz: u8, mantissa 2, bias 16, largest 0x7f, overflow 0x80, nan 0x80, unsigned zero true;
    /// `torch.float8_e4m3fnuz`: no infinity, no negative zero.
    E4M3Fnuz: u8, mantissa 3, bias 8, largest 0x7f, overflow 0x80, nan 0x80, unsigned zero true;
}

const F32_MANTISSA: u32 = 23;
const F32_BIAS: u32 = 127;
const F32_INFINITY: u32 = 0x7f80_0000;
const F32_NAN: u32 = 0x7fc0_0000;

/// `2^exponent`, for exponents of normal numbers.
const fn power_of_two(exponent: i32) -> f32 {
    f32::from_bits(((exponent + F32_BIAS as i32) as u32) << F32_MANTISSA)
}

#[inline(always)]
fn widen<L: FloatFormat>(value: L) -> f32 {
    let code = value.to_code();
    let magnitude = code & L::MAGNITUDE;
    let negative = code & !L::MAGNITUDE;
    let normal =
        (magnitude << (F32_MANTISSA - L::MANTISSA)) + ((F32_BIAS - L::BIAS) << F32_MANTISSA);
    // An integer times a power of two is exact and, unlike a shifted subnormal, never has a
    // subnormal intermediate.
    let step = power_of_two(1 - (L::BIAS + L::MANTISSA) as i32);
    let subnormal = (magnitude as i32 as f32 * step).to_bits();
    let finite = if magnitude >> L::MANTISSA == 0 { subnormal } else { normal };
    let special =
        if magnitude == L::OVERFLOW && L::OVERFLOW != L::NAN { F32_INFINITY } else { F32_NAN };
    let bits = if magnitude > L::LARGEST { special } else { finite };
    if L::UNSIGNED_ZERO && code == L::NAN {
        return f32::from_bits(F32_NAN);
    }
    f32::from_bits(bits | (negative << (31 - L::MAGNITUDE.trailing_ones())))
}

#[inline(always)]
fn narrow<L: FloatFormat>(value: f32) -> L {
    let bits = value.to_bits();
    let magnitude = bits & 0x7fff_ffff;
    let cut = F32_MANTISSA - L::MANTISSA;
    // Adds half a step, less one, plus the last kept bit, so that ties go to even. A carry moves
    // into the exponent.
    let odd = (magnitude >> cut) & 1;
    let rebias = (F32_BIAS - L::BIAS) << F32_MANTISSA;
    let normal = magnitude.wrapping_sub(rebias).wrapping_add((1 << (cut - 1)) - 1 + odd) >> cut;
    // Adding a number whose last bit weighs one subnormal step makes the processor round to that
    // step.
    let magic = power_of_two(1 - (L::BIAS + L::MANTISSA) as i32 + F32_MANTISSA as i32);
    let subnormal = (f32::from_bits(magnitude) + magic).to_bits().wrapping_sub(magic.to_bits());
    let least_normal = power_of_two(1 - L::BIAS as i32).to_bits();
    let rounded = if magnitude < least_normal { subnormal } else { normal };
    let finite =
        if rounded > L::LARGEST || magnitude >= F32_INFINITY { L::OVERFLOW } else { rounded };
    let negative = (bits >> 31) << L::MAGNITUDE.trailing_ones();
    let signed = if L::UNSIGNED_ZERO && finite == 0 { 0 } else { finite | negative };
    L::from_code(if magnitude > F32_INFINITY { L::NAN } else { signed })
}

/// `torch.bfloat16`: the upper half of an `f32`.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(super) struct BF16(pub(super) u16);

macro_rules! through_integers {
    ($($name:ident),*) => {$(
        impl Element for $name {
            type Acc = f32;
            const ZERO: Self = Self(0);

            #[inline(always)]
            fn widen(self) -> f32 {
                widen(self)
            }

            #[inline(always)]
            fn narrow(acc: f32) -> Self {
                narrow(acc)
            }
        }
    )*};
}

through_integers!(E5M2, E4M3Fn, E5M2Fnuz, E4M3Fnuz);

impl Element for F16 {
    type Acc = f32;
    const ZERO: Self = Self(0);

    #[inline(always)]
    fn widen(self) -> f32 {
        widen(self)
    }

    #[inline(always)]
    fn narrow(acc: f32) -> Self {
        narrow(acc)
    }

    // The integer code widens and sums float16 at a quarter of the speed of F16C.
    #[inline(always)]
    unsafe fn widen_tile<I: Vector, const T: usize>(from: *const u8) -> [f32; T] {
        let mut wide = [0.0; T];
        // SAFETY: the caller's contract; `widen_halves` returns how many elements it has converted,
        // at most `T`.
        let done = unsafe { I::widen_halves(from, &mut wide) };
        for (i, value) in wide.iter_mut().enumerate().skip(done) {
            // SAFETY: `i < T`; read without an alignment.
            *value = unsafe { from.cast::<Self>().add(i).read_unaligned() }.widen();
        }
        wide
    }

    #[inline(always)]
    unsafe fn narrow_tile<I: Vector, const T: usize>(acc: &[f32; T], to: *mut u8) {
        // SAFETY: the caller's contract; `narrow_halves` returns how many elements it has
        // converted, at most `T`.
        let done = unsafe { I::narrow_halves(acc, to) };
        for (i, &value) in acc.iter().enumerate().skip(done) {
            // SAFETY: `i < T`; written without an alignment.
            unsafe { to.cast::<Self>().add(i).write_unaligned(Self::narrow(value)) };
        }
    }
}

impl Element for BF16 {
    type Acc = f32;
    const ZERO: Self = Self(0);

    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from_bits(u32::from(self.0) << 16)
    }

    // Not `vcvtneps2bf16` of AVX512_BF16: it flushes subnormals.
    #[inline(always)]
    fn narrow(acc: f32) -> Self {
        let bits = acc.to_bits();
        let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
        Self(if bits << 1 > F32_INFINITY << 1 { 0x7fc0 } else { rounded as u16 })
    }
}
