//! A reduce-scatter after a product: each rank sums the parts that all ranks computed for it.

use super::{DeviceModel, MatmulShape, SIGNAL_US};

/// Rate at which processors load a peer's memory, as a fraction of a copy engine's rate.
const LOADED: f64 = 0.9;

/// Microseconds that one more copy must save: each copy costs calls on the host, which small
/// products wait for.
const WORTH_US: f64 = 1.0;

/// Returns how many of a rank's `n - 1` parts from peers are copied to it while products still run;
/// these are the earliest ones. The sum itself loads the other parts, so that they move only once:
/// they are ready too late for products to hide a copy.
///
/// Each rank computes the part of rank `rank + 1` first and its own last. So on every rank, the
/// part from the peer `k` ranks before it is ready after `k` of `n` products.
pub fn pulled(n: usize, product: &MatmulShape, model: &DeviceModel) -> usize {
    let part = product.bytes(product.columns);
    let step = model.product_us(product.rows, product);
    let (mut copied, mut best) = (0.0f64, (f64::INFINITY, 0));
    for pulled in 0..n {
        if pulled > 0 {
            copied = copied.max(pulled as f64 * step + SIGNAL_US) + model.copy_us(part);
        }
        let loaded = n - 1 - pulled;
        let remote = loaded as f64 * part as f64 / (model.link * LOADED * 1e3);
        let local = model.memory_us(part.saturating_mul(pulled + 2));
        // The sum starts after the last part: the next rank computes this rank's part one product
        // before it computes its own.
        let end = copied.max(n as f64 * step) + remote.max(local) + pulled as f64 * WORTH_US;
        if end < best.0 {
            best = (end, pulled);
        }
    }
    best.1
}
