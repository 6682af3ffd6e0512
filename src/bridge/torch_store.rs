//! torch's stores behind this crate's trait.
#![allow(unsafe_code, reason = "addresses and objects that C++ hands over")]

use super::ffi::{self, Blob, StoreHandle, StoreOp};
use crate::error::{Error, ErrorKind, Result};
use crate::store::deadline::ThreadDeadline;
use crate::store::request::{Request, StoreOp as RequestOp};
use crate::store::table::TableReply;
use crate::store::{MAX_TIMEOUT, Store, timed_out};
use crate::sys::interrupt::Interrupts;
use bytes::Bytes;
use std::time::{Duration, Instant};

/// The time by which a store may report a timeout too early: stores count in milliseconds, some
/// with their own clocks.
const STORE_CLOCK_SKEW: Duration = Duration::from_millis(50);

/// Maximum pause between two polls of a queue.
const QUEUE_POLL_MAX: Duration = Duration::from_millis(20);

/// A `c10d::Store` of torch or of a user. A call without a limit is limited by the store's own
/// timeout.
///
/// With a limit, `get` and `multi_get` are `wait` and then the operation: if another user deletes a
/// key in between, they wait once more, for the store's own timeout. c10d has no `get` with a
/// limit, and changing the store's timeout temporarily would affect its other threads. The
/// guarantee of `set` depends on the store: torch's TCPStore sends without waiting for a reply, so
/// other users may see the change a little later.
pub(super) struct TorchStore(cxx::UniquePtr<StoreHandle>);

// SAFETY: a c10d::Store may be used from any thread.
unsafe impl Send for TorchStore {}
// SAFETY: c10d::Store implementations lock inside.
unsafe impl Sync for TorchStore {}

impl Store for TorchStore {
    fn call(&self, request: &Request<'_>, limit: Option<Duration>) -> Result<TableReply> {
        request.check()?;
        // Limits a store of this crate that is called through c10d's interface, which takes no
        // limit.
        let _within = ThreadDeadline::limit(limit);
        match request.op {
            RequestOp::Wait => self.wait(request, limit),
            RequestOp::Get | RequestOp::MultiGet => {
                if limit.is_some() {
                    self.wait(request, limit)?;
                }
                self.fetch(request, limit)
            }
            RequestOp::Pop => self.pop(request, limit),
            RequestOp::Append if !self.handle()?.extended() => Err(Error::not_implemented(
                "append: the store has none of its own, and its compare_set does not tell two \
                 writers of equal values apart",
            )),
            RequestOp::MultiSet if !self.handle()?.extended() => {
                for (key, value) in request.keys.iter().zip(&request.values) {
                    self.direct(&Request::new(RequestOp::Set, vec![key], vec![value]), 0)?;
                }
                Ok(TableReply::Unit)
            }
            RequestOp::Set
            | RequestOp::Delete
            | RequestOp::CompareSet
            | RequestOp::Add
            | RequestOp::Check
            | RequestOp::NumKeys
            | RequestOp::Append
            | RequestOp::MultiSet
            | RequestOp::Push
            | RequestOp::TryPop
            | RequestOp::QueueLen
            | RequestOp::ListKeys => self.direct(request, 0),
        }
    }
}

impl TorchStore {
    pub(super) fn new(store: cxx::UniquePtr<StoreHandle>) -> Self {
        Self(store)
    }

    /// Returns the name of the store in errors.
    pub(super) fn name(&self) -> Result<String> {
        Ok(self.handle()?.name())
    }

    fn handle(&self) -> Result<&StoreHandle> {
        self.0.as_ref().ok_or_else(|| Error::config("the store is missing"))
    }

    /// Returns the store's own timeout, or the maximum if it has none.
    fn own_limit(&self) -> Result<Duration> {
        Ok(match u64::try_from(self.handle()?.timeout_ms()) {
            Ok(ms) if ms > 0 => Duration::from_millis(ms).min(MAX_TIMEOUT),
            _ => MAX_TIMEOUT,
        })
    }

    /// Makes one call of the c10d store. `timeout_ms` is for [`StoreOp::Wait`].
    fn direct(&self, request: &Request<'_>, timeout_ms: i64) -> Result<TableReply> {
        let keys: Vec<Blob<'_>> =
            request.keys.iter().map(|key| Blob { data: key.as_bytes() }).collect();
        let values: Vec<Blob<'_>> = request.values.iter().map(|&data| Blob { data }).collect();
        let op = StoreOp { repr: request.op as u8 };
        let answer = self.handle()?.call(op, &keys, &values, request.amount, timeout_ms);
        if answer.status.kind != ffi::ErrorKind::None {
            // c10d's timeout error covers other failures, too, and an operation that does not wait
            // has no timeout.
            let late =
                request.op.waits() || ThreadDeadline::left().is_some_and(|left| left.is_zero());
            let kind = ErrorKind::from_code(answer.status.kind.repr)
                .filter(|&kind| kind != ErrorKind::Timeout || late);
            let kind = kind.unwrap_or(ErrorKind::Config);
            return Err(Error {
                kind,
                message: format!("the store failed at {:?}: {}", request.op, answer.status.message),
            });
        }
        let mut pieces = answer.pieces.into_vec();
        Ok(match request.op {
            RequestOp::Set
            | RequestOp::Wait
            | RequestOp::Append
            | RequestOp::MultiSet
            | RequestOp::Push => TableReply::Unit,
            RequestOp::Check | RequestOp::Delete => TableReply::Flag(answer.number != 0),
            RequestOp::Add | RequestOp::NumKeys | RequestOp::QueueLen => {
                TableReply::Number(answer.number)
            }
            RequestOp::CompareSet | RequestOp::Get | RequestOp::Pop | RequestOp::TryPop => {
                TableReply::Value(pieces.pop().unwrap_or_default())
            }
            RequestOp::MultiGet => TableReply::Values(pieces),
            RequestOp::ListKeys => {
                TableReply::Keys(pieces.into_iter().map(key).collect::<Result<_>>()?)
            }
        })
    }

    /// Waits for the keys of `request`.
    fn wait(&self, request: &Request<'_>, limit: Option<Duration>) -> Result<TableReply> {
        let limit = limit.map_or_else(|| self.own_limit(), |limit| Ok(limit.min(MAX_TIMEOUT)))?;
        // Not 0, which c10d takes for "no limit".
        let timeout = limit.as_millis().max(1) as i64;
        let started = Instant::now();
        let wait = Request::new(RequestOp::Wait, request.keys.clone(), vec![]);
        self.direct(&wait, timeout).or_else(|error| {
            self.explain(request, limit, started, error).map(|()| TableReply::Unit)
        })
    }

    /// Returns the values of the keys of `request`.
    fn fetch(&self, request: &Request<'_>, limit: Option<Duration>) -> Result<TableReply> {
        let started = Instant::now();
        let fetch = || {
            if request.op == RequestOp::Get || self.handle()?.extended() {
                return self.direct(request, 0);
            }
            let one = |key: &&str| {
                let reply = self.direct(&Request::new(RequestOp::Get, vec![key], vec![]), 0)?;
                if let TableReply::Value(value) = reply {
                    Ok(value)
                } else {
                    Err(Error::internal("get answered no value"))
                }
            };
            request.keys.iter().map(one).collect::<Result<_>>().map(TableReply::Values)
        };
        fetch().or_else(|error| {
            // If the keys were set at the last moment, `explain` succeeds and they exist now.
            self.explain(request, limit.map_or_else(|| self.own_limit(), Ok)?, started, error)?;
            fetch()
        })
    }

    /// Takes the first value of a queue by polling. c10d's blocking pop knows only the store's own
    /// timeout, fails if another thread was faster, and in a TCPStore holds the lock that this
    /// object's pushes need.
    fn pop(&self, request: &Request<'_>, limit: Option<Duration>) -> Result<TableReply> {
        let limit = limit.map_or_else(|| self.own_limit(), |limit| Ok(limit.min(MAX_TIMEOUT)))?;
        let started = Instant::now();
        let look = Request::new(RequestOp::TryPop, request.keys.clone(), vec![]);
        let (mut pause, mut interrupts) = (Duration::from_millis(1), Interrupts::new());
        loop {
            match self.direct(&look, 0) {
                Err(error) if error.kind == ErrorKind::QueueEmpty => {}
                outcome => return outcome,
            }
            let left = limit.saturating_sub(started.elapsed());
            if left.is_zero() {
                return Err(timed_out(request, Some(limit), &[0]));
            }
            std::thread::sleep(pause.min(left));
            interrupts.check()?;
            pause = (2 * pause).min(QUEUE_POLL_MAX);
        }
    }

    /// Interprets the `error` of a waiting call that began at `started`: `Timeout` with the missing
    /// keys if its time has passed, success if no key is missing any more, otherwise the error
    /// itself. Stores have their own exceptions for a timeout, so the clock distinguishes it from a
    /// failure.
    fn explain(
        &self,
        request: &Request<'_>,
        limit: Duration,
        started: Instant,
        error: Error,
    ) -> Result<()> {
        if error.kind != ErrorKind::Timeout && started.elapsed() + STORE_CLOCK_SKEW < limit {
            return Err(error);
        }
        let mut missing = Vec::new();
        for (index, key) in request.keys.iter().enumerate() {
            if self.direct(&Request::new(RequestOp::Check, vec![key], vec![]), 0)?
                == TableReply::Flag(false)
            {
                missing.push(index);
            }
        }
        if missing.is_empty() { Ok(()) } else { Err(timed_out(request, Some(limit), &missing)) }
    }
}

fn key(bytes: Bytes) -> Result<String> {
    String::from_utf8(bytes.into())
        .map_err(|_| Error::value("the store holds a key that is not UTF-8"))
}
