//! Matrix products fused with an all-gather before or a reduce-scatter after them: which part runs
//! when. Pure, except for [`model`].
//!
//! A product is cut into blocks of rows, one per rank, and neighbouring blocks may be multiplied in
//! one call. The plans cut so that the link is never idle and the last product is short. They
//! change results only because products of other shapes round differently. [`workspace`] chooses
//! the memory of a call, [`schedule`] its steps.

mod gather;
#[cfg(test)]
mod happens_before;
mod model;
mod scatter;
pub mod schedule;
pub mod sum_parts;
#[cfg(test)]
mod tests;
pub mod workspace;

pub use gather::{GatherPlan, ShardBatch, gather};
pub use model::of_device;
pub use scatter::pulled;

use crate::error::{Error, Result};

/// The product of one rank's rows: `rows × depth` times `depth × columns`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MatmulShape {
    /// Rows of one rank.
    pub rows: usize,
    /// Columns of all right factors together.
    pub columns: usize,
    /// Length of the dimension that the product sums over.
    pub depth: usize,
    /// Size of an element in bytes.
    pub element: usize,
}

/// The performance model of a device that the plans use.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DeviceModel {
    /// Number of processors; each multiplies one tile at a time.
    pub processors: usize,
    /// Floating-point operations of one processor per microsecond, within a large product.
    pub flops_per_us: f64,
    /// Rate at which a copy engine reads from one peer, in GB/s.
    pub link: f64,
    /// Bandwidth of the device's own memory, in GB/s.
    pub memory: f64,
}

/// The tile of one processor in the kernels that libraries choose for large matrices.
const TILE: (usize, usize) = (128, 256);
/// Microseconds to start a product and to wait for its last tile.
const PRODUCT_US: f64 = 3.0;
/// Microseconds to add the partial sums of a tile that more than two processors share. Two
/// processors compute half a tile each, without partial sums.
const SPLIT_US: f64 = 5.0;
/// Maximum number of parts into which libraries split the sum of a tile.
const MOST_SPLITS: usize = 8;
/// Microseconds to start a copy from a peer and to signal that it is done: copies of 17, 34 and 67
/// MB followed each other after 50, 96 and 186 µs (4 H200, 2026-11-22).
const COPY_US: f64 = 4.5;
/// Parts of a product start at multiples of this, which suits both a copy engine and a kernel.
const PART_ALIGNMENT: usize = 256;
/// Microseconds that a signal between two ranks takes, or a barrier.
const SIGNAL_US: f64 = 5.0;

impl MatmulShape {
    /// Size of one rank's shard of an all-gather, in bytes.
    ///
    /// # Errors
    /// [`Value`](crate::error::ErrorKind::Value) if the size overflows.
    pub fn shard_bytes(&self) -> Result<usize> {
        self.bytes_of_all(self.depth, 1, 1).map(|(_, all)| all)
    }

    /// Distance between two parts of a reduce-scatter, and size of the parts for all `n` ranks, in
    /// bytes.
    ///
    /// # Errors
    /// As [`shard_bytes`](Self::shard_bytes).
    pub fn part_bytes(&self, n: usize) -> Result<(usize, usize)> {
        self.bytes_of_all(self.columns, PART_ALIGNMENT, n)
    }

    fn bytes_of_all(&self, length: usize, alignment: usize, n: usize) -> Result<(usize, usize)> {
        let one =
            self.rows.checked_mul(length).and_then(|elements| elements.checked_mul(self.element));
        let one = one.and_then(|bytes| bytes.checked_next_multiple_of(alignment));
        let both = one.and_then(|bytes| Some((bytes, bytes.checked_mul(n)?)));
        both.ok_or_else(|| {
            Error::value(format!(
                "no memory has {n} times {} rows of {length} elements of {} bytes",
                self.rows, self.element
            ))
        })
    }

    /// Size of one rank's `rows` of `length` elements in bytes. It saturates, so that plans for
    /// impossible sizes do not fail.
    fn bytes(&self, length: usize) -> usize {
        self.rows.saturating_mul(length).saturating_mul(self.element)
    }
}

impl DeviceModel {
    /// Time of the product of `rows` rows. Tiles run in waves of one per processor. If there are
    /// fewer tiles than processors, several processors share a tile; a last wave that is not full
    /// uses smaller tiles.
    pub fn product_us(&self, rows: usize, product: &MatmulShape) -> f64 {
        let tiles = rows.div_ceil(TILE.0).saturating_mul(product.columns.div_ceil(TILE.1));
        let tile_us = 2.0 * (TILE.0 * TILE.1) as f64 * product.depth as f64 / self.flops_per_us;
        let (full, rest) = (tiles / self.processors, tiles % self.processors);
        if full == 0 && rest > 0 {
            let splits = (self.processors / rest).min(MOST_SPLITS);
            let shared = if splits > 2 { SPLIT_US } else { 0.0 };
            return PRODUCT_US + shared + tile_us / splits as f64;
        }
        let part = rest as f64 / self.processors as f64;
        PRODUCT_US + tile_us * (full as f64 + if rest > 0 { part.max(0.5) } else { 0.0 })
    }

    /// Time to copy `bytes` from one peer.
    fn copy_us(&self, bytes: usize) -> f64 {
        COPY_US + bytes as f64 / (self.link * 1e3)
    }

    /// Time to move `bytes` through the device's own memory.
    fn memory_us(&self, bytes: usize) -> f64 {
        bytes as f64 / (self.memory * 1e3)
    }
}
