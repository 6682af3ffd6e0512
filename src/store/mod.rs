//! The key-value store through which ranks meet.

pub mod memory;

use crate::error::Result;
use std::time::Duration;

/// What joining a group needs from a key-value store; semantics of `c10d::Store`.
pub trait Store: Send + Sync {
    /// Sets `key` to `desired` if it is absent and `expected` is empty, or if its value is `expected`; returns the value that stands afterwards.
    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>>;
    /// Waits until all `keys` exist: `true`, or `false` once `timeout` has passed.
    fn wait(&self, keys: &[String], timeout: Duration) -> Result<bool>;
    /// The values of `keys`, all of which exist.
    fn multi_get(&self, keys: &[String]) -> Result<Vec<Vec<u8>>>;
    /// Whether all `keys` exist now.
    fn check(&self, keys: &[String]) -> Result<bool>;
    /// Removes `key` if it exists.
    fn delete(&self, key: &str) -> Result<()>;
}
