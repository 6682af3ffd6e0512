//! A store for threads of one process.

use super::Store;
use crate::error::{Error, Result};
use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Keys and values in this process; clones share them.
#[derive(Clone, Debug, Default)]
pub struct MemoryStore(Arc<(Mutex<BTreeMap<String, Vec<u8>>>, Condvar)>);

impl MemoryStore {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Vec<u8>>> {
        self.0.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Number of keys.
    pub fn len(&self) -> usize {
        self.lock().len()
    }

    /// Whether there are no keys.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl Store for MemoryStore {
    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>> {
        let mut map = self.lock();
        let stands = match map.get(key) {
            None if expected.is_empty() => desired,
            Some(value) if value == expected => desired,
            None => expected,
            Some(value) => return Ok(value.clone()),
        };
        if stands == desired {
            map.insert(key.into(), desired.into());
            self.0.1.notify_all();
        }
        Ok(stands.into())
    }

    fn wait(&self, keys: &[String], timeout: Duration) -> Result<bool> {
        let start = Instant::now();
        let mut map = self.lock();
        while !keys.iter().all(|key| map.contains_key(key)) {
            let Some(left) = timeout.checked_sub(start.elapsed()) else { return Ok(false) };
            map = self.0.1.wait_timeout(map, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        Ok(true)
    }

    fn multi_get(&self, keys: &[String]) -> Result<Vec<Vec<u8>>> {
        let map = self.lock();
        keys.iter().map(|key| map.get(key).cloned().ok_or_else(|| Error::config(format!("the store has no key {key}")))).collect()
    }

    fn check(&self, keys: &[String]) -> Result<bool> {
        let map = self.lock();
        Ok(keys.iter().all(|key| map.contains_key(key)))
    }

    fn delete(&self, key: &str) -> Result<()> {
        self.lock().remove(key);
        Ok(())
    }
}
