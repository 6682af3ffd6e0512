//! Atomic words, as far as protocols need them.

use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};

/// An atomic word. A trait, so that loom can stand in for the hardware (`tests/loom.rs`) while the orders stay those of the code.
pub trait Atomic<T> {
    /// Loads the value, as `load` of `std` does.
    fn load(&self, order: Ordering) -> T;
    /// Stores a value, as `store` of `std` does.
    fn store(&self, value: T, order: Ordering);
    /// Compares and exchanges, as `compare_exchange` of `std` does.
    fn compare_exchange(&self, current: T, new: T, success: Ordering, failure: Ordering) -> Result<T, T>;
}

macro_rules! atomics {
    ($($atomic:ty => $value:ty),*) => {
        $(impl Atomic<$value> for $atomic {
            #[inline]
            fn load(&self, order: Ordering) -> $value {
                <$atomic>::load(self, order)
            }

            #[inline]
            fn store(&self, value: $value, order: Ordering) {
                <$atomic>::store(self, value, order);
            }

            #[inline]
            fn compare_exchange(&self, current: $value, new: $value, success: Ordering, failure: Ordering) -> Result<$value, $value> {
                <$atomic>::compare_exchange(self, current, new, success, failure)
            }
        })*
    };
}

atomics!(AtomicU8 => u8, AtomicU32 => u32, AtomicU64 => u64);
