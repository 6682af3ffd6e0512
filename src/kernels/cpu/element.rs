//! Elements, as stored in a tensor and as accumulated in a reduction.
#![allow(
    unsafe_code,
    reason = "loops over the bytes of tensors, whose addresses torch vouches for"
)]

use super::vector::Vector;

/// The type in which a reduction accumulates: `f32` and `f64` for floats, the type itself for
/// integers.
pub(super) trait Number: Copy {
    const ZERO: Self;
    /// Converts a premultiplication factor to this type. Integers do not support PREMUL_SUM, so
    /// their factor is never used.
    fn factor(factor: f64) -> Self;
    fn add(self, other: Self) -> Self;
    fn multiply(self, other: Self) -> Self;
    /// Divides by a number of ranks; integers truncate toward zero like
    /// `torch.div(rounding_mode="trunc")`.
    fn divide(self, ranks: usize) -> Self;
    /// Returns `self` unless `other` is strictly less; any NaN wins.
    fn lesser(self, other: Self) -> Self;
    /// Returns `self` unless `other` is strictly greater; any NaN wins.
    fn greater(self, other: Self) -> Self;
}

/// Numbers with bit operations.
pub(super) trait Bits: Number {
    fn and(self, other: Self) -> Self;
    fn or(self, other: Self) -> Self;
    fn xor(self, other: Self) -> Self;
}

/// An element as stored in a tensor.
pub(super) trait Element: Copy {
    type Acc: Number;
    const ZERO: Self;
    fn widen(self) -> Self::Acc;
    /// Widens `T` elements at any alignment. A format may use a conversion instruction of `I`.
    ///
    /// # Safety
    /// `from` is valid for `T` elements; the CPU has `I`.
    #[inline(always)]
    unsafe fn widen_tile<I: Vector, const T: usize>(from: *const u8) -> [Self::Acc; T] {
        // SAFETY: the index is below `T`; read without an alignment.
        std::array::from_fn(|i| unsafe { from.cast::<Self>().add(i).read_unaligned() }.widen())
    }
    /// Narrows `T` accumulators to any alignment.
    ///
    /// # Safety
    /// `to` is valid for writes of `T` elements; the CPU has `I`.
    #[inline(always)]
    unsafe fn narrow_tile<I: Vector, const T: usize>(acc: &[Self::Acc; T], to: *mut u8) {
        for (i, &value) in acc.iter().enumerate() {
            // SAFETY: `i < T`; written without an alignment.
            unsafe { to.cast::<Self>().add(i).write_unaligned(Self::narrow(value)) };
        }
    }
    /// Rounds once, to nearest even. Every NaN becomes the format's one canonical NaN: the payload
    /// and sign that an x86 addition propagates depend on the operand order that the compiler
    /// chose, so they must not reach the result.
    fn narrow(acc: Self::Acc) -> Self;
}

macro_rules! float {
    ($float:ty, $infinity:expr, $nan:expr) => {
        impl Number for $float {
            const ZERO: Self = 0.0;

            #[inline(always)]
            fn factor(factor: f64) -> Self {
                factor as $float
            }

            #[inline(always)]
            fn add(self, other: Self) -> Self {
                self + other
            }

            #[inline(always)]
            fn multiply(self, other: Self) -> Self {
                self * other
            }

            #[inline(always)]
            fn divide(self, ranks: usize) -> Self {
                self / ranks as $float
            }

            #[inline(always)]
            fn lesser(self, other: Self) -> Self {
                if (other < self) | other.is_nan() { other } else { self }
            }

            #[inline(always)]
            fn greater(self, other: Self) -> Self {
                if (other > self) | other.is_nan() { other } else { self }
            }
        }

        impl Element for $float {
            type Acc = $float;
            const ZERO: Self = 0.0;

            #[inline(always)]
            fn widen(self) -> $float {
                self
            }

            // On bits, not with `is_nan`: the compiler may treat all NaNs as equal and drop a float
            // select.
            #[inline(always)]
            fn narrow(acc: $float) -> Self {
                let bits = acc.to_bits();
                Self::from_bits(if bits << 1 > $infinity << 1 { $nan } else { bits })
            }
        }
    };
}

float!(f32, 0x7f80_0000, 0x7fc0_0000);
float!(f64, 0x7ff0_0000_0000_0000, 0x7ff8_0000_0000_0000);

macro_rules! integers {
    ($($int:ty, $wide:ty;)*) => {$(
        impl Number for $int {
            const ZERO: Self = 0;

            #[inline(always)]
            fn factor(_factor: f64) -> Self {
                1
            }

            #[inline(always)]
            fn add(self, other: Self) -> Self {
                self.wrapping_add(other)
            }

            #[inline(always)]
            fn multiply(self, other: Self) -> Self {
                self.wrapping_mul(other)
            }

            // In 64 bits: 128 ranks do not fit an i8.
            #[inline(always)]
            fn divide(self, ranks: usize) -> Self {
                (self as $wide / ranks as $wide) as $int
            }

            #[inline(always)]
            fn lesser(self, other: Self) -> Self {
                if other < self { other } else { self }
            }

            #[inline(always)]
            fn greater(self, other: Self) -> Self {
                if other > self { other } else { self }
            }
        }

        impl Bits for $int {
            #[inline(always)]
            fn and(self, other: Self) -> Self {
                self & other
            }

            #[inline(always)]
            fn or(self, other: Self) -> Self {
                self | other
            }

            #[inline(always)]
            fn xor(self, other: Self) -> Self {
                self ^ other
            }
        }

        impl Element for $int {
            type Acc = $int;
            const ZERO: Self = 0;

            #[inline(always)]
            fn widen(self) -> $int {
                self
            }

            #[inline(always)]
            fn narrow(acc: $int) -> Self {
                acc
            }
        }
    )*};
}

integers! {
    i8, i64;
    i16, i64;
    i32, i64;
    i64, i64;
    u8, u64;
    u16, u64;
    u32, u64;
    u64, u64;
}
