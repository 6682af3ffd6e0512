//! The reduction loop, written once and compiled for each instruction set.
//!
//! A tile of `T` accumulators stays in registers while the loop visits the sources in rank order,
//! or pairwise ([`super::tree`]). Each output element depends only on its own inputs: not on
//! alignment, on the count, on how a range was split or on the vector width. Rust never contracts a
//! product and a sum into a fused operation, not even for an instruction set that has one.
#![allow(
    unsafe_code,
    reason = "loops over the bytes of tensors, whose addresses torch vouches for"
)]

use super::element::{Element, Number};
use super::reduce_op::ReduceFn;
use super::tree::Tree;
use super::vector::{self, Vector};
use super::{InputElements, WriteMode, copy};
use std::mem::MaybeUninit;

/// One call of [`super::reduce`]. The code that builds it vouches for its pointers.
pub(super) struct ReduceJob<'a> {
    pub(super) dst: *mut u8,
    pub(super) sources: &'a [InputElements],
    /// Number of elements, as the kernel counts them (a complex number counts as two).
    pub(super) count: usize,
    /// Number of ranks that the sources represent, by which an average divides.
    pub(super) ranks: usize,
    pub(super) store: WriteMode,
}

/// A reduction compiled for one op, element type and instruction set: reduces elements
/// `start .. start + count` of a job into `out`.
///
/// # Safety
/// The CPU has the instruction set; the sources of the job are valid for `start + count` elements
/// of the kernel's type, `out` for `count`; `out` is a source at `start` or overlaps none.
pub(super) type ReduceKernel = unsafe fn(job: &ReduceJob, start: usize, count: usize, out: *mut u8);

/// Number of bytes that a streaming reduction computes in L1 before it writes them out; a power of
/// two of cache lines.
const BLOCK: usize = 4096;

/// Minimum number of left-over elements that are padded to a whole tile. Fewer are computed one by
/// one, which takes 7 ns instead of 30 ns for one element of four ranks.
const FEW: usize = 8;

#[repr(align(64))]
struct Block([MaybeUninit<u8>; BLOCK]);

/// Runs `kernel`, which is compiled for elements of `size` bytes.
///
/// # Safety
/// The job satisfies the contract of [`super::reduce`] with elements of `size` bytes; the CPU has
/// the kernel's instruction set.
// Not a part of the kernels, because there are hundreds of them.
pub(super) unsafe fn run(kernel: ReduceKernel, size: usize, job: &ReduceJob) {
    if job.store == WriteMode::Cached {
        // SAFETY: all of `job` is in bounds by the caller's contract.
        return unsafe { kernel(job, 0, job.count, job.dst) };
    }
    let mut block = Block([const { MaybeUninit::uninit() }; BLOCK]);
    let block = block.0.as_mut_ptr().cast::<u8>();
    // Ends the first block on a cache line of `dst`, so that the others stream whole lines.
    let mut length = (BLOCK - job.dst.addr() % 64) / size;
    let mut start = 0;
    while start < job.count {
        let now = length.min(job.count - start);
        // SAFETY: `start + now <= count`; `now * size <= BLOCK`; the block overlaps no memory of
        // the caller, and the kernel writes all that is copied.
        unsafe {
            kernel(job, start, now, block);
            copy::stream(job.dst.add(start * size), block, now * size);
        }
        start += now;
        length = BLOCK / size;
    }
    copy::fence();
}

macro_rules! compiled_for {
    ($name:ident, $vector:ty $(, $features:literal)?) => {
        /// # Safety
        /// As [`ReduceKernel`].
        $(#[target_feature(enable = $features)])?
        pub(super) unsafe fn $name<E: Element, O: ReduceFn<E::Acc>, const T: usize>(
            job: &ReduceJob,
            start: usize,
            count: usize,
            out: *mut u8,
        ) {
            // SAFETY: the callee has this function's contract, which the caller upholds.
            unsafe { span::<E, O, $vector, T>(job, start, count, out) }
        }
    };
}

compiled_for!(portable, vector::Portable);
#[cfg(target_arch = "x86_64")]
compiled_for!(avx2, vector::Avx2, "avx2,f16c");
#[cfg(target_arch = "x86_64")]
compiled_for!(avx512, vector::Avx512, "avx512f,avx512bw,avx512vl,avx512dq");

/// # Safety
/// As [`ReduceKernel`], on a CPU that has `I`.
#[inline(always)]
unsafe fn span<E: Element, O: ReduceFn<E::Acc>, I: Vector, const T: usize>(
    job: &ReduceJob,
    start: usize,
    count: usize,
    out: *mut u8,
) {
    let size = size_of::<E>();
    let rest = count % T;
    let whole = count - rest;
    let mut tree = Tree::new();
    let mut done = 0;
    while done < whole {
        // SAFETY: `done + T <= whole <= count`.
        unsafe {
            let acc =
                tile::<E, O, I, T>(job, &mut tree, |source| source.ptr.add((start + done) * size));
            E::narrow_tile::<I, T>(&acc, out.add(done * size));
        }
        done += T;
    }
    // SAFETY: `whole + rest == count`; `pad` holds `T > rest` elements, and `tile` has read one
    // padded copy before it asks for the next.
    unsafe {
        let out = out.add(whole * size);
        if rest < FEW {
            return singles::<E, O>(job, start + whole, rest, out);
        }
        let mut pad = [E::ZERO; T];
        let pad = (&raw mut pad).cast::<u8>();
        let acc = tile::<E, O, I, T>(job, &mut tree, |source| {
            source.ptr.add((start + whole) * size).copy_to_nonoverlapping(pad, rest * size);
            pad.cast_const()
        });
        E::narrow_tile::<I, T>(&acc, pad);
        pad.copy_to_nonoverlapping(out, rest * size);
    }
}

/// Reduces elements `start .. start + count` into `out`, one by one. Single elements have no
/// vectors, so all instruction sets share this function.
///
/// # Safety
/// As [`ReduceKernel`].
#[inline(never)]
unsafe fn singles<E: Element, O: ReduceFn<E::Acc>>(
    job: &ReduceJob,
    start: usize,
    count: usize,
    out: *mut u8,
) {
    for at in 0..count {
        // SAFETY: `at < count`.
        unsafe {
            let acc = tile::<E, O, vector::Portable, 1>(job, &mut Tree::new(), |source| {
                source.ptr.add((start + at) * size_of::<E>())
            });
            E::narrow_tile::<vector::Portable, 1>(&acc, out.add(at * size_of::<E>()));
        }
    }
}

/// Returns the accumulators of `T` elements; for each source, `locate` returns the address of the
/// first.
///
/// # Safety
/// `locate` returns pointers that are valid for `T` elements until its next call; the CPU has `I`.
#[inline(always)]
unsafe fn tile<E: Element, O: ReduceFn<E::Acc>, I: Vector, const T: usize>(
    job: &ReduceJob,
    tree: &mut Tree<E::Acc, T>,
    mut locate: impl FnMut(&InputElements) -> *const u8,
) -> [E::Acc; T] {
    let mut lifted = |source: &InputElements| {
        let factor = E::Acc::factor(source.factor);
        // SAFETY: `locate`'s pointers are valid for `T` elements, which are read before its next
        // call.
        let mut values = unsafe { E::widen_tile::<I, T>(locate(source)) };
        for value in &mut values {
            *value = O::lift(*value, factor);
        }
        values
    };
    let Some((first, others)) = job.sources.split_first() else {
        return [E::Acc::ZERO; T];
    };
    let mut acc = lifted(first);
    if O::PAIRED {
        tree.push::<O>(acc);
        for source in others {
            tree.push::<O>(lifted(source));
        }
        acc = tree.take::<O>();
    } else {
        for source in others {
            for (acc, value) in acc.iter_mut().zip(lifted(source)) {
                *acc = O::combine(*acc, value);
            }
        }
    }
    for value in &mut acc {
        *value = O::finish(*value, job.ranks);
    }
    acc
}
