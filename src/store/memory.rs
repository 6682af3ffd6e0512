//! A store for the threads of one process.

use super::Store;
use crate::error::{Error, Result};
use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// How long `multi_get` waits for a key that is absent; the default of `c10d::Store`.
const GET_TIMEOUT: Duration = Duration::from_secs(300);

#[derive(Default)]
struct Shared {
    values: Mutex<HashMap<String, Vec<u8>>>,
    changed: Condvar,
}

/// A key-value store in this process's memory. Clones share the contents.
#[derive(Clone, Default)]
pub struct MemoryStore(Arc<Shared>);

impl MemoryStore {
    /// An empty store.
    pub fn new() -> Self {
        Self::default()
    }

    /// Number of keys held.
    pub fn len(&self) -> usize {
        self.values().len()
    }

    /// Whether no key is held.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn values(&self) -> MutexGuard<'_, HashMap<String, Vec<u8>>> {
        // No code that can panic runs under this lock, so the map is whole even if poisoned.
        self.0.values.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Returns the locked map once it holds all `keys`, or `None` once `timeout` has passed.
    fn await_keys(&self, keys: &[String], timeout: Duration) -> Option<MutexGuard<'_, HashMap<String, Vec<u8>>>> {
        let deadline = Instant::now().checked_add(timeout);
        let mut values = self.values();
        loop {
            if keys.iter().all(|key| values.contains_key(key)) {
                return Some(values);
            }
            let remaining = match deadline {
                Some(deadline) => deadline.saturating_duration_since(Instant::now()),
                None => Duration::MAX,
            };
            if remaining.is_zero() {
                return None;
            }
            values = self.0.changed.wait_timeout(values, remaining).unwrap_or_else(|poisoned| poisoned.into_inner()).0;
        }
    }
}

impl Store for MemoryStore {
    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>> {
        let mut values = self.values();
        let matches = match values.get(key) {
            Some(value) if value != expected => return Ok(value.clone()),
            Some(_) => true,
            None => expected.is_empty(),
        };
        if !matches {
            // As c10d stores do: an absent key with a non-empty expectation stays absent, and the expectation comes back.
            return Ok(expected.to_vec());
        }
        values.insert(key.to_owned(), desired.to_vec());
        self.0.changed.notify_all();
        Ok(desired.to_vec())
    }

    fn wait(&self, keys: &[String], timeout: Duration) -> Result<bool> {
        Ok(self.await_keys(keys, timeout).is_some())
    }

    fn multi_get(&self, keys: &[String]) -> Result<Vec<Vec<u8>>> {
        let values = self.await_keys(keys, GET_TIMEOUT).ok_or_else(|| Error::timeout(format!("waited 300 s for the keys {keys:?}")))?;
        Ok(keys.iter().filter_map(|key| values.get(key).cloned()).collect())
    }

    fn check(&self, keys: &[String]) -> Result<bool> {
        let values = self.values();
        Ok(keys.iter().all(|key| values.contains_key(key)))
    }

    fn delete(&self, key: &str) -> Result<()> {
        self.values().remove(key);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn compare_set_follows_c10d() -> Result<()> {
        let store = MemoryStore::new();
        assert_eq!(store.compare_set("k", b"old", b"new")?, b"old");
        assert!(!store.check(&keys(&["k"]))?);
        assert_eq!(store.compare_set("k", b"", b"1")?, b"1");
        assert_eq!(store.compare_set("k", b"", b"2")?, b"1");
        assert_eq!(store.compare_set("k", b"1", b"2")?, b"2");
        assert_eq!(store.multi_get(&keys(&["k"]))?, [b"2"]);
        store.delete("k")?;
        store.delete("k")?;
        assert!(store.is_empty());
        Ok(())
    }

    #[test]
    fn wait_ends_at_its_timeout_or_with_the_last_key() -> Result<()> {
        let store = MemoryStore::new();
        let started = Instant::now();
        assert!(!store.wait(&keys(&["a"]), Duration::from_millis(20))?);
        assert!(started.elapsed() >= Duration::from_millis(20));
        let writer = store.clone();
        let thread = std::thread::spawn(move || writer.compare_set("a", b"", b"1"));
        assert!(store.wait(&keys(&["a"]), Duration::MAX)?);
        assert!(thread.join().is_ok());
        Ok(())
    }
}
