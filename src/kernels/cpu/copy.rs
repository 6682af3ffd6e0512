//! Copies of bytes, through the cache or past it.
#![allow(
    unsafe_code,
    reason = "loops over the bytes of tensors, whose addresses torch vouches for"
)]

/// Maximum number of bytes of one `memcpy`. Above a share of the last-level cache (about 1 MiB on a
/// Zen 5 EPYC), glibc's `memcpy` uses non-temporal stores, which slow down the next reader: four
/// ranks that each stage 1 MiB and reduce it reach 20-27 GB/s in such pieces, and 16-17 GB/s
/// without pieces (2026-11-21, `cargo bench --bench kernels -- copy`). Only
/// [`WriteMode`](super::WriteMode) decides whether stores are non-temporal.
const PIECE: usize = 128 << 10;

/// Copies with stores that leave `dst` in the cache.
///
/// # Safety
/// As [`super::copy`].
pub(super) unsafe fn cached(dst: *mut u8, src: *const u8, bytes: usize) {
    let mut done = 0;
    while bytes - done > PIECE {
        // SAFETY: `done + PIECE < bytes`.
        unsafe { src.add(done).copy_to_nonoverlapping(dst.add(done), PIECE) };
        done += PIECE;
    }
    // SAFETY: the rest ends at `bytes`.
    unsafe { src.add(done).copy_to_nonoverlapping(dst.add(done), bytes - done) };
}

/// Copies with non-temporal stores: whole cache lines of `dst` bypass the cache, partial lines at
/// its ends do not. Only [`fence`] orders them before later stores.
///
/// # Safety
/// As [`super::copy`].
#[cfg(target_arch = "x86_64")]
pub(super) unsafe fn stream(dst: *mut u8, src: *const u8, bytes: usize) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_stream_si128};
    const LINE: usize = 64;
    let head = dst.align_offset(LINE).min(bytes);
    let lines = (bytes - head) / LINE;
    let tail = head + lines * LINE;
    // SAFETY: `head <= tail <= bytes`; `dst + head` lies on a cache line when `lines > 0`; SSE2 is
    // part of x86-64.
    unsafe {
        src.copy_to_nonoverlapping(dst, head);
        for at in (head..tail).step_by(LINE) {
            let from = src.add(at).cast::<__m128i>();
            let to = dst.add(at).cast::<__m128i>();
            let line = [
                _mm_loadu_si128(from),
                _mm_loadu_si128(from.add(1)),
                _mm_loadu_si128(from.add(2)),
                _mm_loadu_si128(from.add(3)),
            ];
            _mm_stream_si128(to, line[0]);
            _mm_stream_si128(to.add(1), line[1]);
            _mm_stream_si128(to.add(2), line[2]);
            _mm_stream_si128(to.add(3), line[3]);
        }
        src.add(tail).copy_to_nonoverlapping(dst.add(tail), bytes - tail);
    }
}

/// Orders every [`stream`] of this thread before its later stores.
#[cfg(target_arch = "x86_64")]
pub(super) fn fence() {
    // SAFETY: SSE is part of x86-64.
    unsafe { std::arch::x86_64::_mm_sfence() };
}

/// Copies through the cache, because stable Rust has no non-temporal store for CPUs other than
/// x86-64.
///
/// # Safety
/// As [`super::copy`].
#[cfg(not(target_arch = "x86_64"))]
pub(super) unsafe fn stream(dst: *mut u8, src: *const u8, bytes: usize) {
    // SAFETY: the callee has this function's contract, which the caller upholds.
    unsafe { cached(dst, src, bytes) }
}

/// Does nothing, because [`stream`] used ordinary stores.
#[cfg(not(target_arch = "x86_64"))]
pub(super) fn fence() {}
