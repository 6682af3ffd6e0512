//! An all-gather before a product: shards arrive one after the other, and groups of them are multiplied.

use super::{DeviceModel, Product, SIGNAL_US};
use std::ops::Range;

/// Shards that are multiplied at once, and how many peers' shards must have arrived before.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shards {
    /// Ranks whose rows they are; neighbours in the gathered matrix.
    pub ranks: Range<usize>,
    /// Shards arrive in the order `rank + 1, rank + 2, …`.
    pub arrived: usize,
}

/// Plan of what happens after the product of the own rows.
#[derive(Clone, Debug, PartialEq)]
pub struct Gather {
    /// The own rows are copied to where the products' left factor is returned before any other product, which waits for the link anyway;
    /// otherwise beside the last ones.
    pub own_early: bool,
    /// The products, in their order. A group of shards that wraps around the last rank is two of them.
    pub products: Vec<Shards>,
}

/// The grouping for which the last product ends first, for `rank` of `n`.
///
/// The own rows are multiplied once all ranks are ready, and not before: a product that fills the device would keep the signals from
/// running, and the link would wait for it (2 H200, 4096 × 8192 × 4096: 465 µs in place of 395).
///
/// Copying the own rows costs the processors the same whenever it is done; beside the last product of a call that waits for the link it
/// comes at its end (4 H200, 4096 × 8192 × 2048: 236 µs, early 228).
pub fn gather(n: usize, rank: usize, product: &Product, model: &DeviceModel) -> Gather {
    let own = 2.0 * model.memory_us(product.bytes(product.depth));
    let (late, products) = grouped(n, rank, product, model, 0.0);
    let (early, behind) = grouped(n, rank, product, model, own);
    // Not by rounding errors: where products are what takes long, both are the same.
    let own_early = early + 1e-3 < late + own;
    Gather { own_early, products: if own_early { behind } else { products } }
}

/// Earliest end of the last product, and the grouping of shards for that, if the processors have `busy` microseconds of other work after
/// the own product.
///
/// Where a group ends decides only when its product may begin, so that the earliest end of everything up to a shard is made of the
/// earliest end of everything up to an earlier one: a table over shards finds the best of all groupings.
fn grouped(n: usize, rank: usize, product: &Product, model: &DeviceModel, busy: f64) -> (f64, Vec<Shards>) {
    let shard = product.bytes(product.depth);
    let ready = SIGNAL_US + 2.0 * model.memory_us(shard);
    let arrival = |shards: usize| ready + shards as f64 * model.copy_us(shard);
    // Of all shards up to one: when their products end at best, and where the last group of that begins.
    let mut best = vec![(ready + model.product_us(product.rows, product) + busy, 0)];
    for last in 1..n {
        let end = |before: usize| {
            let products = runs(n, rank, before, last);
            let work: f64 = products.map(|ranks| model.product_us(ranks.len().saturating_mul(product.rows), product)).sum();
            best[before].0.max(arrival(last)) + work
        };
        // Of equals the larger group: it is fewer calls of the library.
        let found = (0..last).map(|before| (end(before), before)).min_by(|a, b| a.0.total_cmp(&b.0));
        best.push(found.unwrap_or_default());
    }
    let mut groups = Vec::new();
    let mut last = n - 1;
    while last > 0 {
        groups.push((best[last].1, last));
        last = best[last].1;
    }
    let products = groups.into_iter().rev();
    let products = products.flat_map(|(before, last)| runs(n, rank, before, last).map(move |ranks| Shards { ranks, arrived: last }));
    (best[n - 1].0, products.collect())
}

/// The ranks of the shards that arrive after the first `before`, up to the `last`th, as runs of neighbours.
fn runs(n: usize, rank: usize, before: usize, last: usize) -> impl Iterator<Item = Range<usize>> {
    let (begin, end) = (rank + before + 1, rank + last + 1);
    [begin.min(n)..end.min(n), begin.max(n) - n..end.max(n) - n].into_iter().filter(|run| !run.is_empty())
}
