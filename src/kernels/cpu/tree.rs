//! Pairwise combination of tiles: the tiles are split at the largest power of two below their
//! number, each part is combined in the same way, and then the two results are.
#![allow(
    unsafe_code,
    reason = "loops over the bytes of tensors, whose addresses torch vouches for"
)]

use super::element::{Element, Number};
use super::reduce_op::{ReduceFn, Sum};
use super::vector::Vector;
use std::mem::MaybeUninit;

/// Maximum number of partial results at a time; `n` leaves have at most one for each bit of `n`.
const LEVELS: usize = 12;
/// Maximum number of leaves.
pub(super) const MOST: usize = (1 << LEVELS) - 1;

/// A combination of leaves in progress: each partial result combines a power of two of leaves; the
/// largest comes first. The first `held` are initialised.
pub(super) struct Tree<A, const T: usize> {
    partials: [MaybeUninit<[A; T]>; LEVELS],
    held: usize,
    leaves: usize,
}

impl<A: Number, const T: usize> Tree<A, T> {
    #[inline(always)]
    pub(super) fn new() -> Self {
        Self { partials: [const { MaybeUninit::uninit() }; LEVELS], held: 0, leaves: 0 }
    }

    /// Adds the next leaf.
    #[inline(always)]
    pub(super) fn push<O: ReduceFn<A>>(&mut self, mut value: [A; T]) {
        self.leaves += 1;
        for _ in 0..self.leaves.trailing_zeros() {
            self.held -= 1;
            // SAFETY: it was among the first `held`.
            let earlier = unsafe { self.partials[self.held].assume_init_ref() };
            before::<A, O, T>(earlier, &mut value);
        }
        self.partials[self.held].write(value);
        self.held += 1;
    }

    /// Returns the combination of all leaves, of which there is at least one, and forgets them.
    #[inline(always)]
    pub(super) fn take<O: ReduceFn<A>>(&mut self) -> [A; T] {
        // SAFETY: the first `held` are initialised, and at least one is held.
        let mut value = unsafe { self.partials[self.held - 1].assume_init() };
        for earlier in self.partials[..self.held - 1].iter().rev() {
            // SAFETY: it is among the first `held`.
            before::<A, O, T>(unsafe { earlier.assume_init_ref() }, &mut value);
        }
        (self.held, self.leaves) = (0, 0);
        value
    }
}

/// Combines `earlier` with `value`, into `value`.
#[inline(always)]
fn before<A: Number, O: ReduceFn<A>, const T: usize>(earlier: &[A; T], value: &mut [A; T]) {
    for (&earlier, value) in earlier.iter().zip(value) {
        *value = O::combine(earlier, *value);
    }
}

/// Returns the sum of `T` elements at offset `place` of each source: pairwise if there is a `tree`,
/// otherwise in order.
///
/// # Safety
/// Every source is valid for these elements of type `E`; the CPU has `I`.
#[inline(always)]
pub(super) unsafe fn sum_at<E: Element, I: Vector, const T: usize>(
    sources: &[*const u8],
    place: usize,
    tree: Option<&mut Tree<E::Acc, T>>,
) -> [E::Acc; T] {
    let Some((&first, others)) = sources.split_first() else { return [E::Acc::ZERO; T] };
    // SAFETY: the caller's contract.
    let mut sum = unsafe { E::widen_tile::<I, T>(first.add(place)) };
    if let Some(tree) = tree {
        tree.push::<Sum>(sum);
        for &other in others {
            // SAFETY: the caller's contract.
            tree.push::<Sum>(unsafe { E::widen_tile::<I, T>(other.add(place)) });
        }
        return tree.take::<Sum>();
    }
    for &other in others {
        // SAFETY: the caller's contract.
        let other = unsafe { E::widen_tile::<I, T>(other.add(place)) };
        for (sum, other) in sum.iter_mut().zip(other) {
            *sum = sum.add(other);
        }
    }
    sum
}
