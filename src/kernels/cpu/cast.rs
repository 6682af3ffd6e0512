//! Conversion of floats narrower than 32 bits to float32 and back, for each instruction set.
#![allow(
    unsafe_code,
    reason = "loops over the bytes of tensors, whose addresses torch vouches for"
)]

use super::convert::{BF16, E4M3Fn, E4M3Fnuz, E5M2, E5M2Fnuz, F16};
use super::dispatch::Isa;
use super::element::Element;
use super::vector::{self, Vector};
use crate::dtype::DType;

/// Number of elements that are converted at a time.
const TILE: usize = 64;

/// Converts `count` elements at `src` to `dst`.
///
/// # Safety
/// The CPU has the instruction set. `dst` and `src` are valid for `count` elements and do not
/// overlap, except that they may be equal if elements become narrower.
pub(super) type CastFn = unsafe fn(dst: *mut u8, src: *const u8, count: usize);

macro_rules! casts {
    ($name:ident, $one:ident, $from:expr, $to:expr) => {
        mod $name {
            use super::{Element, Vector, vector};

            /// # Safety
            /// As [`super::CastFn`].
            #[inline(always)]
            unsafe fn run<E: Element<Acc = f32>, I: Vector>(
                dst: *mut u8,
                src: *const u8,
                count: usize,
            ) {
                let (from, to) = ($from(size_of::<E>()), $to(size_of::<E>()));
                let mut done = 0;
                while done < count {
                    // SAFETY: the first `done` elements and the tile or element after them are
                    // within `count`. If `dst` is `src`, a tile is read whole before it is written,
                    // and writes never reach a later tile.
                    unsafe {
                        let (src, dst) = (src.add(done * from), dst.add(done * to));
                        if count - done >= super::TILE {
                            super::$one::<E, I, { super::TILE }>(dst, src);
                            done += super::TILE;
                        } else {
                            super::$one::<E, I, 1>(dst, src);
                            done += 1;
                        }
                    }
                }
            }

            /// # Safety
            /// As [`super::CastFn`].
            pub(super) unsafe fn portable<E: Element<Acc = f32>>(
                dst: *mut u8,
                src: *const u8,
                count: usize,
            ) {
                // SAFETY: the callee has this function's contract, which the caller upholds.
                unsafe { run::<E, vector::Portable>(dst, src, count) }
            }

            /// # Safety
            /// As [`super::CastFn`].
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,f16c")]
            pub(super) unsafe fn avx2<E: Element<Acc = f32>>(
                dst: *mut u8,
                src: *const u8,
                count: usize,
            ) {
                // SAFETY: the callee has this function's contract, which the caller upholds.
                unsafe { run::<E, vector::Avx2>(dst, src, count) }
            }

            /// # Safety
            /// As [`super::CastFn`].
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
            pub(super) unsafe fn avx512<E: Element<Acc = f32>>(
                dst: *mut u8,
                src: *const u8,
                count: usize,
            ) {
                // SAFETY: the callee has this function's contract, which the caller upholds.
                unsafe { run::<E, vector::Avx512>(dst, src, count) }
            }
        }
    };
}

casts!(widening, widen_some, |size| size, |_| 4);
casts!(narrowing, narrow_some, |_| 4, |size| size);

/// # Safety
/// `src` is valid for `T` elements, `dst` for writes of `T` float32; the CPU has `I`.
#[inline(always)]
unsafe fn widen_some<E: Element<Acc = f32>, I: Vector, const T: usize>(
    dst: *mut u8,
    src: *const u8,
) {
    // SAFETY: the caller's contract; written without an alignment.
    unsafe { dst.cast::<[f32; T]>().write_unaligned(E::widen_tile::<I, T>(src)) }
}

/// # Safety
/// `src` is valid for `T` float32, `dst` for writes of `T` elements; the CPU has `I`.
#[inline(always)]
unsafe fn narrow_some<E: Element<Acc = f32>, I: Vector, const T: usize>(
    dst: *mut u8,
    src: *const u8,
) {
    // SAFETY: the caller's contract; read without an alignment.
    unsafe { E::narrow_tile::<I, T>(&src.cast::<[f32; T]>().read_unaligned(), dst) }
}

fn pair<E: Element<Acc = f32>>(isa: Isa) -> (CastFn, CastFn) {
    match isa {
        Isa::Portable => (widening::portable::<E>, narrowing::portable::<E>),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => (widening::avx2::<E>, narrowing::avx2::<E>),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => (widening::avx512::<E>, narrowing::avx512::<E>),
    }
}

/// Returns the conversions from `dtype` to float32 and back; `None` if it is not a float narrower
/// than 32 bits.
pub(super) fn casts(dtype: DType, isa: Isa) -> Option<(CastFn, CastFn)> {
    match dtype {
        DType::F16 => Some(pair::<F16>(isa)),
        DType::BF16 => Some(pair::<BF16>(isa)),
        DType::F8E5M2 => Some(pair::<E5M2>(isa)),
        DType::F8E4M3FN => Some(pair::<E4M3Fn>(isa)),
        DType::F8E5M2FNUZ => Some(pair::<E5M2Fnuz>(isa)),
        DType::F8E4M3FNUZ => Some(pair::<E4M3Fnuz>(isa)),
        DType::F32 | DType::F64 | DType::C64 | DType::C128 => None,
        DType::U8
        | DType::I8
        | DType::I16
        | DType::I32
        | DType::I64
        | DType::Bool
        | DType::U16
        | DType::U32
        | DType::U64 => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// For every bit pattern of every narrow type, widening and rounding back gives the same bits,
    /// or the canonical NaN.
    #[test]
    fn what_is_widened_and_narrowed_is_itself_on_every_instruction_set() {
        for &dtype in DType::ALL {
            let Some((widen, narrow)) = casts(dtype, Isa::Portable) else { continue };
            let count = 1usize << (8 * dtype.size());
            let given: Vec<u8> =
                (0..count).flat_map(|bits| bits.to_le_bytes()[..dtype.size()].to_vec()).collect();
            let mut wanted = vec![0u8; 4 * count];
            // SAFETY: both have `count` elements.
            unsafe { widen(wanted.as_mut_ptr(), given.as_ptr(), count) };
            let number = |at: usize| {
                f32::from_le_bytes(wanted[4 * at..4 * at + 4].try_into().unwrap_or_default())
            };
            for &isa in Isa::available() {
                let Some((widen_here, narrow_here)) = casts(dtype, isa) else {
                    panic!("{dtype:?} on {isa:?}")
                };
                let mut wide = vec![0u8; 4 * count];
                // SAFETY: both have `count` elements; the CPU has `isa`.
                unsafe { widen_here(wide.as_mut_ptr(), given.as_ptr(), count) };
                let mut back = wide.clone();
                // SAFETY: `back` has `count` float32, and the narrower elements are written to its
                // start.
                unsafe { narrow_here(back.as_mut_ptr(), back.as_ptr(), count) };
                let mut apart = vec![0u8; given.len()];
                // SAFETY: both have `count` elements.
                unsafe { narrow(apart.as_mut_ptr(), wide.as_ptr(), count) };
                assert_eq!(apart, back[..given.len()], "{dtype:?} on {isa:?}");
                for at in 0..count {
                    let same = |a: &[u8], b: &[u8], size: usize| {
                        a[at * size..(at + 1) * size] == b[at * size..(at + 1) * size]
                    };
                    assert!(
                        number(at).is_nan()
                            || same(&wide, &wanted, 4) && same(&back, &given, dtype.size()),
                        "{dtype:?} {at}"
                    );
                }
            }
        }
    }
}
