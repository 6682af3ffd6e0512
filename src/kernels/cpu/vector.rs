//! Operations with instructions that the compiler does not choose by itself.
#![allow(
    unsafe_code,
    reason = "loops over the bytes of tensors, whose addresses torch vouches for"
)]

/// An instruction set, as a type: the instructions that a loop compiled for it may use.
pub(super) trait Vector {
    /// Widens float16 from `from` into the front of `wide`, a whole vector at a time; returns the
    /// number of elements that it has widened.
    ///
    /// # Safety
    /// The CPU has the instruction set; `from` is valid for `T` float16.
    #[inline(always)]
    unsafe fn widen_halves<const T: usize>(_from: *const u8, _wide: &mut [f32; T]) -> usize {
        0
    }

    /// Adds to each accumulator the sum of eight neighbours, in halves: the first four and the last
    /// four, then two and two, then one and one. Handles only the first accumulators, eight at a
    /// time, and returns how many it has handled.
    ///
    /// # Safety
    /// The CPU has the instruction set.
    #[inline(always)]
    unsafe fn add_eights(_eights: &[[f32; 8]], _lanes: &mut [f32]) -> usize {
        0
    }

    /// Rounds the front of `wide` to float16 at `to`, a whole vector at a time, NaN to the
    /// canonical one; returns the number of elements that it has rounded.
    ///
    /// # Safety
    /// The CPU has the instruction set; `to` is valid for writes of `T` float16.
    #[inline(always)]
    unsafe fn narrow_halves<const T: usize>(_wide: &[f32; T], _to: *mut u8) -> usize {
        0
    }
}

pub(super) struct Portable;

impl Vector for Portable {}

#[cfg(target_arch = "x86_64")]
pub(super) use x86::{Avx2, Avx512};

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::Vector;
    use std::arch::x86_64::{
        _CMP_UNORD_Q, _MM_FROUND_TO_NEAREST_INT, _mm_loadu_si128, _mm_storeu_si128, _mm256_add_ps,
        _mm256_blendv_ps, _mm256_castpd_ps, _mm256_castps_pd, _mm256_cmp_ps, _mm256_cvtph_ps,
        _mm256_cvtps_ph, _mm256_loadu_ps, _mm256_loadu_si256, _mm256_permute2f128_ps,
        _mm256_set1_ps, _mm256_setzero_ps, _mm256_storeu_ps, _mm256_storeu_si256,
        _mm256_unpackhi_pd, _mm256_unpackhi_ps, _mm256_unpacklo_pd, _mm256_unpacklo_ps,
        _mm512_cmp_ps_mask, _mm512_cvtph_ps, _mm512_cvtps_ph, _mm512_loadu_ps,
        _mm512_mask_blend_ps, _mm512_set1_ps, _mm512_storeu_ps,
    };

    const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT;

    /// [`Vector::add_eights`].
    ///
    /// # Safety
    /// The CPU has AVX2.
    #[inline(always)]
    unsafe fn add_eights(eights: &[[f32; 8]], lanes: &mut [f32]) -> usize {
        let (eights, _) = eights.as_chunks::<8>();
        let (lanes, _) = lanes.as_chunks_mut::<8>();
        for (e, lanes) in eights.iter().zip(lanes.iter_mut()) {
            // SAFETY: vectors of eight numbers each; the CPU has AVX2 by the caller's contract.
            unsafe {
                let mut fours = [_mm256_setzero_ps(); 4];
                for (i, four) in fours.iter_mut().enumerate() {
                    let (one, other) =
                        (_mm256_loadu_ps(e[i].as_ptr()), _mm256_loadu_ps(e[i + 4].as_ptr()));
                    *four = _mm256_add_ps(
                        _mm256_permute2f128_ps::<0x20>(one, other),
                        _mm256_permute2f128_ps::<0x31>(one, other),
                    );
                }
                // Of each four, add the first number to the third and the second to the fourth, two
                // fours at a time.
                let [a, b, c, d] = fours;
                let front = _mm256_castps_pd(_mm256_add_ps(
                    _mm256_unpacklo_ps(a, b),
                    _mm256_unpackhi_ps(a, b),
                ));
                let back = _mm256_castps_pd(_mm256_add_ps(
                    _mm256_unpacklo_ps(c, d),
                    _mm256_unpackhi_ps(c, d),
                ));
                let (odd, even) =
                    (_mm256_unpacklo_pd(front, back), _mm256_unpackhi_pd(front, back));
                let ones = _mm256_add_ps(_mm256_castpd_ps(odd), _mm256_castpd_ps(even));
                _mm256_storeu_ps(
                    lanes.as_mut_ptr(),
                    _mm256_add_ps(_mm256_loadu_ps(lanes.as_ptr()), ones),
                );
            }
        }
        8 * eights.len().min(lanes.len())
    }

    /// AVX2 and F16C.
    pub(in crate::kernels::cpu) struct Avx2;

    impl Vector for Avx2 {
        #[inline(always)]
        unsafe fn add_eights(eights: &[[f32; 8]], lanes: &mut [f32]) -> usize {
            // SAFETY: the CPU has AVX2 by the caller's contract.
            unsafe { add_eights(eights, lanes) }
        }

        #[inline(always)]
        unsafe fn widen_halves<const T: usize>(from: *const u8, wide: &mut [f32; T]) -> usize {
            for (i, eight) in wide.as_chunks_mut::<8>().0.iter_mut().enumerate() {
                // SAFETY: `8 * i + 8 <= T` float16 of two bytes; the CPU has F16C by the caller's
                // contract.
                unsafe {
                    let halves = _mm_loadu_si128(from.add(16 * i).cast());
                    _mm256_storeu_ps(eight.as_mut_ptr(), _mm256_cvtph_ps(halves));
                }
            }
            T / 8 * 8
        }

        #[inline(always)]
        unsafe fn narrow_halves<const T: usize>(wide: &[f32; T], to: *mut u8) -> usize {
            for (i, eight) in wide.as_chunks::<8>().0.iter().enumerate() {
                // SAFETY: `8 * i + 8 <= T` float16 of two bytes; the CPU has F16C by the caller's
                // contract.
                unsafe {
                    let value = _mm256_loadu_ps(eight.as_ptr());
                    let nan = _mm256_cmp_ps::<_CMP_UNORD_Q>(value, value);
                    let value = _mm256_blendv_ps(value, _mm256_set1_ps(CANONICAL), nan);
                    _mm_storeu_si128(to.add(16 * i).cast(), _mm256_cvtps_ph::<NEAREST>(value));
                }
            }
            T / 8 * 8
        }
    }

    /// AVX-512 F, BW, VL and DQ.
    pub(in crate::kernels::cpu) struct Avx512;

    impl Vector for Avx512 {
        #[inline(always)]
        unsafe fn add_eights(eights: &[[f32; 8]], lanes: &mut [f32]) -> usize {
            // SAFETY: the CPU has AVX2 by the caller's contract.
            unsafe { add_eights(eights, lanes) }
        }

        #[inline(always)]
        unsafe fn widen_halves<const T: usize>(from: *const u8, wide: &mut [f32; T]) -> usize {
            for (i, sixteen) in wide.as_chunks_mut::<16>().0.iter_mut().enumerate() {
                // SAFETY: `16 * i + 16 <= T` float16 of two bytes; the CPU has AVX512F by the
                // caller's contract.
                unsafe {
                    let halves = _mm256_loadu_si256(from.add(32 * i).cast());
                    _mm512_storeu_ps(sixteen.as_mut_ptr(), _mm512_cvtph_ps(halves));
                }
            }
            T / 16 * 16
        }

        #[inline(always)]
        unsafe fn narrow_halves<const T: usize>(wide: &[f32; T], to: *mut u8) -> usize {
            for (i, sixteen) in wide.as_chunks::<16>().0.iter().enumerate() {
                // SAFETY: `16 * i + 16 <= T` float16 of two bytes; the CPU has AVX512F by the
                // caller's contract.
                unsafe {
                    let value = _mm512_loadu_ps(sixteen.as_ptr());
                    let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(value, value);
                    let value = _mm512_mask_blend_ps(nan, value, _mm512_set1_ps(CANONICAL));
                    _mm256_storeu_si256(to.add(32 * i).cast(), _mm512_cvtps_ph::<NEAREST>(value));
                }
            }
            T / 16 * 16
        }
    }

    /// The NaN that converts to float16's canonical one.
    const CANONICAL: f32 = f32::from_bits(0x7fc0_0000);
}
