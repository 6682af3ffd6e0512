//! A store for the threads of one process.

use super::request::Request;
use super::table::{KeyTable, TableReply, TableResult};
use super::{Store, deadline, timed_out};
use crate::error::{Error, Result};
use crate::lock::{lock, unpoisoned};
use crate::sys::{fork, interrupt};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

struct SharedTable {
    table: Mutex<KeyTable>,
    changed: Condvar,
    /// Fork generation of the process that made the store.
    generation: u64,
}

/// A key-value store in this process's memory. Clones share the contents.
#[derive(Clone)]
pub struct MemoryStore(Arc<SharedTable>);

impl Default for MemoryStore {
    fn default() -> Self {
        Self(Arc::new(SharedTable {
            table: Mutex::default(),
            changed: Condvar::new(),
            generation: fork::generation(),
        }))
    }
}

impl MemoryStore {
    /// Makes an empty store.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the number of keys.
    pub fn len(&self) -> usize {
        self.table().len()
    }

    /// Returns true if the store has no keys.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn table(&self) -> MutexGuard<'_, KeyTable> {
        // A request is executed completely or not at all, so the table is consistent even if the
        // lock is poisoned.
        lock(&self.0.table)
    }
}

impl Store for MemoryStore {
    fn call(&self, request: &Request<'_>, limit: Option<Duration>) -> Result<TableReply> {
        if self.0.generation != fork::generation() {
            return Err(Error::config(
                "a memory store lives in the process that made it, not in its forked children",
            ));
        }
        let deadline = deadline(limit);
        let mut table = self.table();
        loop {
            if let TableResult::Done(reply) = table.serve(request, None)? {
                if request.op.writes() {
                    self.0.changed.notify_all();
                }
                return Ok(reply);
            }
            let remaining = deadline.saturating_duration_since(Instant::now());
            if remaining.is_zero() {
                return Err(timed_out(request, limit, &table.missing(request)));
            }
            let nap = remaining.min(interrupt::SIGNAL_POLL);
            let (woken, over) = unpoisoned(self.0.changed.wait_timeout(table, nap));
            table = woken;
            if over.timed_out() {
                drop(table);
                interrupt::check()?;
                table = self.table();
            }
        }
    }
}
