//! The reduce operations, as types, so that each loop is compiled for exactly one.

use super::element::{Bits, Number};
use std::marker::PhantomData;

/// An operation that combines the sources' elements.
pub(super) trait ReduceFn<A: Number> {
    /// True if the sources are combined pairwise ([`super::tree`]), not in their order.
    const PAIRED: bool = false;

    /// Returns the value that a source contributes, given that source's factor.
    #[inline(always)]
    fn lift(value: A, _factor: A) -> A {
        value
    }

    fn combine(acc: A, value: A) -> A;

    /// Returns the result, once all of `ranks` sources are combined.
    #[inline(always)]
    fn finish(acc: A, _ranks: usize) -> A {
        acc
    }
}

pub(super) struct Sum;
pub(super) struct Avg;
pub(super) struct Product;
pub(super) struct Min;
pub(super) struct Max;
pub(super) struct And;
pub(super) struct Or;
pub(super) struct Xor;
pub(super) struct PremulSum;
/// The operation `O` that combines the sources pairwise.
pub(super) struct Paired<O>(PhantomData<O>);

impl<A: Number, O: ReduceFn<A>> ReduceFn<A> for Paired<O> {
    const PAIRED: bool = true;

    #[inline(always)]
    fn lift(value: A, factor: A) -> A {
        O::lift(value, factor)
    }

    #[inline(always)]
    fn combine(acc: A, value: A) -> A {
        O::combine(acc, value)
    }

    #[inline(always)]
    fn finish(acc: A, ranks: usize) -> A {
        O::finish(acc, ranks)
    }
}

impl<A: Number> ReduceFn<A> for Sum {
    #[inline(always)]
    fn combine(acc: A, value: A) -> A {
        acc.add(value)
    }
}

impl<A: Number> ReduceFn<A> for Avg {
    #[inline(always)]
    fn combine(acc: A, value: A) -> A {
        acc.add(value)
    }

    // A division, because a product with 1/ranks would round twice.
    #[inline(always)]
    fn finish(acc: A, ranks: usize) -> A {
        acc.divide(ranks)
    }
}

impl<A: Number> ReduceFn<A> for Product {
    #[inline(always)]
    fn combine(acc: A, value: A) -> A {
        acc.multiply(value)
    }
}

impl<A: Number> ReduceFn<A> for Min {
    #[inline(always)]
    fn combine(acc: A, value: A) -> A {
        acc.lesser(value)
    }
}

impl<A: Number> ReduceFn<A> for Max {
    #[inline(always)]
    fn combine(acc: A, value: A) -> A {
        acc.greater(value)
    }
}

impl<A: Bits> ReduceFn<A> for And {
    #[inline(always)]
    fn combine(acc: A, value: A) -> A {
        acc.and(value)
    }
}

impl<A: Bits> ReduceFn<A> for Or {
    #[inline(always)]
    fn combine(acc: A, value: A) -> A {
        acc.or(value)
    }
}

impl<A: Bits> ReduceFn<A> for Xor {
    #[inline(always)]
    fn combine(acc: A, value: A) -> A {
        acc.xor(value)
    }
}

impl<A: Number> ReduceFn<A> for PremulSum {
    #[inline(always)]
    fn lift(value: A, factor: A) -> A {
        value.multiply(factor)
    }

    #[inline(always)]
    fn combine(acc: A, value: A) -> A {
        acc.add(value)
    }
}
