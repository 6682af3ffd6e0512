//! Locks that stay usable after another thread's panic.
//!
//! A thread that holds a lock of this crate either does not panic between two changes of the value,
//! or its panic fails the group that owns the value.

use std::sync::{LockResult, Mutex, MutexGuard, PoisonError};

/// Locks `mutex`, even if a holder panicked.
pub fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    unpoisoned(mutex.lock())
}

/// Returns the result of a lock or condition variable operation, even if a holder panicked.
pub fn unpoisoned<T>(outcome: LockResult<T>) -> T {
    outcome.unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::RwLock;

    #[test]
    fn locks_open_after_their_holder_panicked() {
        let (mutex, table) = (Mutex::new(1), RwLock::new(2));
        let outcome = std::thread::scope(|scope| {
            scope
                .spawn(|| {
                    let _held = (lock(&mutex), unpoisoned(table.write()));
                    panic!("while both are held");
                })
                .join()
        });
        assert!(outcome.is_err() && mutex.is_poisoned() && table.is_poisoned());
        assert_eq!((*lock(&mutex), *unpoisoned(table.read())), (1, 2));
    }
}
