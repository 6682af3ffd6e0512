//! A store within a deadline: what every operation of something larger, such as joining, is asked with.

use super::request::{Op, Request};
use super::table::Reply;
use super::{MAX_TIMEOUT, Store};
use crate::error::{Error, Kind, Result};
use std::cell::Cell;
use std::time::{Duration, Instant};

/// Time after the deadline in which something may still be said and read: who is missing, and why this rank gives up.
const LAST_WORDS: Duration = Duration::from_millis(700);

/// Time below which a limit is as good as over.
const SHORT: Duration = Duration::from_millis(100);

/// A store whose operations all get a limit: up to a deadline, and together not much longer than that for what is left to say then.
pub struct Until<'a> {
    store: &'a dyn Store,
    deadline: Instant,
    purpose: String,
}

impl<'a> Until<'a> {
    /// `purpose` begins the error of an operation that the store did not do in time.
    pub fn new(store: &'a dyn Store, deadline: Instant, purpose: String) -> Self {
        Self { store, deadline, purpose }
    }

    /// Time left for an operation that begins now and brings no limit.
    fn left(&self) -> Duration {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left > SHORT { left } else { (self.deadline + LAST_WORDS).saturating_duration_since(Instant::now()) }
    }
}

impl Store for Until<'_> {
    fn call(&self, request: &Request<'_>, limit: Option<Duration>) -> Result<Reply> {
        let left = self.left();
        let outcome = self.store.call(request, Some(limit.map_or(left, |limit| limit.min(left))));
        outcome.map_err(|error| {
            // Whoever waits knows what to say of whom it waited for.
            if error.kind != Kind::Timeout || request.op == Op::Wait {
                return error;
            }
            let key = request.keys.first().map_or_else(String::new, |key| format!(" of {key:?}"));
            Error::timeout(format!("{}: {:?}{key} was not done by the store in time: {}", self.purpose, request.op, error.message))
        })
    }
}

thread_local! {
    static WITHIN: Cell<Option<Instant>> = const { Cell::new(None) };
}

/// Bounds what the calling thread asks of this crate's stores through an interface that has no place for a limit, as c10d's has none.
pub struct Within(Option<Instant>);

impl Within {
    /// Bounds the calling thread's operations as long as the value lives; without a limit they keep the one they have.
    pub fn limit(limit: Option<Duration>) -> Self {
        let end = limit.map(|limit| Instant::now() + limit.min(MAX_TIMEOUT));
        Self(WITHIN.replace(end.or_else(|| WITHIN.get())))
    }

    /// Time that is left for the calling thread, if it is bounded.
    pub fn left() -> Option<Duration> {
        WITHIN.get().map(|end| end.saturating_duration_since(Instant::now()))
    }
}

impl Drop for Within {
    fn drop(&mut self) {
        WITHIN.set(self.0);
    }
}
