//! The atomic operations that the protocols need.

use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};

/// An atomic word. A trait, so that loom can replace the hardware (`tests/loom.rs`) while the
/// memory orders stay those of the code.
pub trait Atomic<T> {
    /// Loads the value, like `load` of `std`.
    fn load(&self, order: Ordering) -> T;
    /// Stores a value, like `store` of `std`.
    fn store(&self, value: T, order: Ordering);
    /// Compares and exchanges, like `compare_exchange` of `std`.
    fn compare_exchange(
        &self,
        current: T,
        new: T,
        success: Ordering,
        failure: Ordering,
    ) -> Result<T, T>;
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
            fn compare_exchange(
                &self, current: $value, new: $value, success: Ordering, failure: Ordering,
            ) -> Result<$value, $value> {
                <$atomic>::compare_exchange(self, current, new, success, failure)
            }
        })*
    };
}

atomics!(AtomicU8 => u8, AtomicU32 => u32, AtomicU64 => u64);
