//! An all-gather before a product: shards arrive one after another and are multiplied in groups.

use super::{DeviceModel, MatmulShape, SIGNAL_US};
use std::ops::Range;

/// A run of shards that one product multiplies, and how many peers' shards must have arrived before
/// it starts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShardBatch {
    /// The ranks whose shards these are; neighbours in the gathered matrix.
    pub ranks: Range<usize>,
    /// The number of shards that must have arrived; they arrive in the order `rank + 1, rank + 2,
    /// …`.
    pub arrived: usize,
}

/// The plan of an all-gather: what follows the product of this rank's own rows.
#[derive(Clone, Debug, PartialEq)]
pub struct GatherPlan {
    /// True if this rank's rows are copied to the gathered matrix before any other product; those
    /// products would wait for the link anyway. Otherwise the rows are copied while the last
    /// products run.
    pub own_early: bool,
    /// The products in order. A group of shards that wraps around the last rank takes two products.
    pub products: Vec<ShardBatch>,
}

/// Returns the grouping whose last product ends first, for `rank` of `n`.
///
/// This rank's rows are multiplied only once all ranks are ready. A product that fills the device
/// would keep the signals from running, and the link would wait for them (2 H200, 4096 × 8192 ×
/// 4096: 465 µs instead of 395 µs).
///
/// Copying this rank's rows costs the processors the same at any time. If the call is bound by the
/// link, a copy during the last product delays the end of the call (4 H200, 4096 × 8192 × 2048:
/// 236 µs; with an early copy: 228 µs).
pub fn gather(n: usize, rank: usize, product: &MatmulShape, model: &DeviceModel) -> GatherPlan {
    let own = 2.0 * model.memory_us(product.bytes(product.depth));
    let (late, products) = grouped(n, rank, product, model, 0.0);
    let (early, behind) = grouped(n, rank, product, model, own);
    // Rounding errors must not decide: where products dominate, both times are equal.
    let own_early = early + 1e-3 < late + own;
    GatherPlan { own_early, products: if own_early { behind } else { products } }
}

/// Returns the earliest end of the last product, and the grouping of shards that reaches it, if the
/// processors have `busy` microseconds of other work after the product of this rank's rows.
///
/// The last shard of a group and the end of the products before it determine when its products may
/// start. So the earliest end of all products up to a shard follows from the earliest end up to an
/// earlier shard: dynamic programming over the shards finds the best grouping.
fn grouped(
    n: usize,
    rank: usize,
    product: &MatmulShape,
    model: &DeviceModel,
    busy: f64,
) -> (f64, Vec<ShardBatch>) {
    let shard = product.bytes(product.depth);
    let ready = SIGNAL_US + 2.0 * model.memory_us(shard);
    let arrival = |shards: usize| ready + shards as f64 * model.copy_us(shard);
    // For each prefix of the shards: the earliest end of its products, and the start of its last
    // group.
    let mut best = vec![(ready + model.product_us(product.rows, product) + busy, 0)];
    for last in 1..n {
        let end = |before: usize| {
            let products = runs(n, rank, before, last);
            let work: f64 = products
                .map(|ranks| model.product_us(ranks.len().saturating_mul(product.rows), product))
                .sum();
            best[before].0.max(arrival(last)) + work
        };
        // Among equals take the larger group, because it needs fewer calls of the library.
        let found =
            (0..last).map(|before| (end(before), before)).min_by(|a, b| a.0.total_cmp(&b.0));
        best.push(found.unwrap_or_default());
    }
    let mut groups = Vec::new();
    let mut last = n - 1;
    while last > 0 {
        groups.push((best[last].1, last));
        last = best[last].1;
    }
    let products = groups.into_iter().rev();
    let products = products.flat_map(|(before, last)| {
        runs(n, rank, before, last).map(move |ranks| ShardBatch { ranks, arrived: last })
    });
    (best[n - 1].0, products.collect())
}

/// Returns the ranks of the shards that arrive after the first `before`, up to the `last`th, as
/// runs of neighbours.
fn runs(n: usize, rank: usize, before: usize, last: usize) -> impl Iterator<Item = Range<usize>> {
    let (begin, end) = (rank + before + 1, rank + last + 1);
    [begin.min(n)..end.min(n), begin.max(n) - n..end.max(n) - n]
        .into_iter()
        .filter(|run| !run.is_empty())
}
