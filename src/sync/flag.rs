//! A word that one member writes and others read.

use std::sync::atomic::{AtomicU64, Ordering};

/// A flag in shared memory. A trait, so that loom can stand in for the hardware (`tests/loom.rs`).
pub trait Flag {
    /// Stores `value`; everything this member wrote before is visible to whoever observes it.
    fn publish(&self, value: u64);
    /// The latest value; what its writer wrote before is visible afterwards.
    fn observe(&self) -> u64;
}

impl Flag for AtomicU64 {
    fn publish(&self, value: u64) {
        self.store(value, Ordering::Release);
    }

    fn observe(&self) -> u64 {
        self.load(Ordering::Acquire)
    }
}
