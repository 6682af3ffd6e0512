//! A reduce-scatter after a product: each rank adds up what all have computed for it.

use super::{DeviceModel, Product, SIGNAL_US};

/// Rate at which processors load a peer's memory, as a part of a copy engine's.
const LOADED: f64 = 0.9;

/// Microseconds that one more copy is to save at least: each is calls on the host, which small products wait for.
const WORTH_US: f64 = 1.0;

/// Number of a rank's `n - 1` parts from peers, the earliest, that are copied to it while products still run. The others are loaded by the
/// sum itself: they come too late to be hidden, and are moved but once that way.
///
/// Each rank computes the part of `rank + 1` first, and its own last. So the part of the peer `k` ranks before is there after `k` of `n`
/// products, whoever asks.
pub fn pulled(n: usize, product: &Product, model: &DeviceModel) -> usize {
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
        // The sum begins with the last part: that of the next rank comes one product before the own one is done.
        let end = copied.max(n as f64 * step) + remote.max(local) + pulled as f64 * WORTH_US;
        if end < best.0 {
            best = (end, pulled);
        }
    }
    best.1
}
