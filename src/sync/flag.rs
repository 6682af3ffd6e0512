//! A word that one member writes and others read.

use std::sync::atomic::{AtomicU64, Ordering};

/// A flag in shared memory. A trait, so that loom can replace the hardware (`tests/loom.rs`).
pub trait Flag {
    /// Stores `value` with release ordering: a member that observes it sees everything that this
    /// member wrote before.
    fn publish(&self, value: u64);
    /// Returns the latest value with acquire ordering: everything that its writer wrote before is
    /// visible afterwards.
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
