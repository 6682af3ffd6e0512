//! A store with a deadline, for operations that consist of many store calls, such as joining a
//! group.

use super::request::{Request, StoreOp};
use super::table::TableReply;
use super::{MAX_TIMEOUT, Store};
use crate::error::{Error, ErrorKind, Result};
use std::cell::Cell;
use std::time::{Duration, Instant};

/// How long after the deadline ranks may still use the store, to tell each other which ranks are
/// missing and why a rank fails.
const AFTER_DEADLINE_GRACE: Duration = Duration::from_millis(700);

/// A remaining time of at most this length counts as zero.
const NEGLIGIBLE: Duration = Duration::from_millis(100);

/// A store that limits each of its operations to the time left until a deadline; operations after
/// the deadline share `AFTER_DEADLINE_GRACE`.
pub struct DeadlineStore<'a> {
    store: &'a dyn Store,
    deadline: Instant,
    purpose: String,
}

impl<'a> DeadlineStore<'a> {
    /// Wraps `store`; `purpose` starts the error of an operation that the store did not finish in
    /// time.
    pub fn new(store: &'a dyn Store, deadline: Instant, purpose: String) -> Self {
        Self { store, deadline, purpose }
    }

    /// Returns the limit of an operation that starts now without a limit of its own.
    fn left(&self) -> Duration {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left > NEGLIGIBLE {
            left
        } else {
            (self.deadline + AFTER_DEADLINE_GRACE).saturating_duration_since(Instant::now())
        }
    }
}

impl Store for DeadlineStore<'_> {
    fn call(&self, request: &Request<'_>, limit: Option<Duration>) -> Result<TableReply> {
        let left = self.left();
        let outcome = self.store.call(request, Some(limit.map_or(left, |limit| limit.min(left))));
        outcome.map_err(|error| {
            // The error of a wait is passed on, because the caller adds the ranks for which it
            // waited.
            if error.kind != ErrorKind::Timeout || request.op == StoreOp::Wait {
                return error;
            }
            let key = request.keys.first().map_or_else(String::new, |key| format!(" of {key:?}"));
            Error::timeout(format!(
                "{}: {:?}{key} was not done by the store in time: {}",
                self.purpose, request.op, error.message
            ))
        })
    }
}

thread_local! {
    static WITHIN: Cell<Option<Instant>> = const { Cell::new(None) };
}

/// Limits the calling thread's operations on this crate's stores, for interfaces that take no
/// limit, such as c10d's.
pub struct ThreadDeadline(Option<Instant>);

impl ThreadDeadline {
    /// Limits the calling thread's operations while the value lives; `None` keeps the present
    /// limit.
    pub fn limit(limit: Option<Duration>) -> Self {
        let end = limit.map(|limit| Instant::now() + limit.min(MAX_TIMEOUT));
        Self(WITHIN.replace(end.or_else(|| WITHIN.get())))
    }

    /// Returns the calling thread's remaining time, if it is limited.
    pub fn left() -> Option<Duration> {
        WITHIN.get().map(|end| end.saturating_duration_since(Instant::now()))
    }
}

impl Drop for ThreadDeadline {
    fn drop(&mut self) {
        WITHIN.set(self.0);
    }
}
