//! The key-value stores through which ranks meet.
//!
//! One meaning, [`table`], behind four doors: [`memory`] for the threads of a process, [`mod@file`] for processes that share a
//! file system, [`tcp`] for all that reach a server, [`prefix`] for a part of another store. A store answers
//! [`request::Request`]s; the methods of [`Store`] are those of `c10d::Store`.

pub mod file;
pub mod load;
pub mod meet;
pub mod memory;
pub mod prefix;
pub mod request;
pub mod table;
pub mod tcp;
pub mod until;
pub mod worker;

use crate::error::{Error, Result};
use crate::rank::Rank;
use bytes::Bytes;
use meet::Meeting;
use request::{Op, Request};
use std::time::{Duration, Instant};
use table::Reply;

/// Time that a call may take that brings no limit; the default of `c10d::Store`.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(300);

/// The longest limit; c10d's "no timeout" becomes this.
pub const MAX_TIMEOUT: Duration = Duration::from_secs(24 * 3600);

/// A key-value store; semantics of `c10d::Store`.
///
/// Every method fails with `Timeout`, naming the missing keys, when its limit has passed; a store on a network with
/// `Network` when it cannot be reached any more; a store with a bound with `Config` when it is full.
pub trait Store: Send + Sync {
    /// Answers `request` within `limit`, or [`DEFAULT_TIMEOUT`].
    fn call(&self, request: &Request<'_>, limit: Option<Duration>) -> Result<Reply>;

    /// Sets `key` to `value`. When this returns, every other user of the store sees it.
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        unit(self.call(&Request::new(Op::Set, vec![key], vec![value]), None)?)
    }

    /// Sets `key` to `desired` if it is absent and `expected` is empty, or if its value is `expected`; returns the value
    /// that stands afterwards (`expected` if it is absent).
    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Bytes> {
        value(self.call(&Request::new(Op::CompareSet, vec![key], vec![expected, desired]), None)?)
    }

    /// The value of `key`, waiting for it.
    fn get(&self, key: &str, limit: Option<Duration>) -> Result<Bytes> {
        value(self.call(&Request::new(Op::Get, vec![key], vec![]), limit)?)
    }

    /// Adds `amount` to the decimal number in `key` (0 if absent) and returns the sum. `Value` if it holds something else.
    fn add(&self, key: &str, amount: i64) -> Result<i64> {
        number(self.call(&Request { amount, ..Request::new(Op::Add, vec![key], vec![]) }, None)?)
    }

    /// Whether all `keys` exist now.
    fn check(&self, keys: &[&str]) -> Result<bool> {
        flag(self.call(&Request::new(Op::Check, keys.to_vec(), vec![]), None)?)
    }

    /// Waits until all `keys` exist.
    fn wait(&self, keys: &[&str], limit: Option<Duration>) -> Result<()> {
        unit(self.call(&Request::new(Op::Wait, keys.to_vec(), vec![]), limit)?)
    }

    /// Removes `key`; whether it existed. `NotImplemented` where the store keeps its keys until it goes itself, as some of users do.
    fn delete(&self, key: &str) -> Result<bool> {
        flag(self.call(&Request::new(Op::Delete, vec![key], vec![]), None)?)
    }

    /// Number of keys with a value.
    fn num_keys(&self) -> Result<i64> {
        number(self.call(&Request::new(Op::NumKeys, vec![], vec![]), None)?)
    }

    /// Appends `more` to the value of `key`, or sets it.
    fn append(&self, key: &str, more: &[u8]) -> Result<()> {
        unit(self.call(&Request::new(Op::Append, vec![key], vec![more]), None)?)
    }

    /// The values of `keys`, waiting for all of them.
    fn multi_get(&self, keys: &[&str], limit: Option<Duration>) -> Result<Vec<Bytes>> {
        values(self.call(&Request::new(Op::MultiGet, keys.to_vec(), vec![]), limit)?, keys.len())
    }

    /// Sets each of `keys` to its value, all at once.
    fn multi_set(&self, keys: &[&str], values: &[&[u8]]) -> Result<()> {
        unit(self.call(&Request::new(Op::MultiSet, keys.to_vec(), values.to_vec()), None)?)
    }

    /// Puts `value` at the end of the queue of `key`.
    fn queue_push(&self, key: &str, value: &[u8]) -> Result<()> {
        unit(self.call(&Request::new(Op::Push, vec![key], vec![value]), None)?)
    }

    /// Takes the first value of the queue of `key`, waiting for one.
    fn queue_pop(&self, key: &str, limit: Option<Duration>) -> Result<Bytes> {
        value(self.call(&Request::new(Op::Pop, vec![key], vec![]), limit)?)
    }

    /// Pops from a queue without waiting: `QueueEmpty` if it holds nothing.
    fn try_queue_pop(&self, key: &str) -> Result<Bytes> {
        value(self.call(&Request::new(Op::TryPop, vec![key], vec![]), None)?)
    }

    /// Length of the queue of `key`.
    fn queue_len(&self, key: &str) -> Result<i64> {
        number(self.call(&Request::new(Op::QueueLen, vec![key], vec![]), None)?)
    }

    /// Lists all keys with a value, in no order.
    fn list_keys(&self) -> Result<Vec<String>> {
        keys(self.call(&Request::new(Op::ListKeys, vec![], vec![]), None)?)
    }

    /// Returns once all `size` ranks have called it with this `key`; may be used again and again. `Timeout` names the
    /// ranks that did not come, and the key must not be used again then.
    ///
    /// Each rank counts its own calls, so all know which round they are in; the last one of a round opens it and removes
    /// what is left of the round before, so `size` + 2 keys stay.
    fn barrier(&self, key: &str, rank: Rank, size: u32, limit: Option<Duration>) -> Result<()> {
        if rank.0 >= size {
            return Err(Error::value(format!("barrier {key:?}: rank {rank} of {size}")));
        }
        Meeting { store: self, prefix: key.into(), me: rank, size, deadline: deadline(limit) }.pass()
    }
}

/// Deadline of a call that begins now.
fn deadline(limit: Option<Duration>) -> Instant {
    Instant::now() + limit.unwrap_or(DEFAULT_TIMEOUT).min(MAX_TIMEOUT)
}

/// Error of a call whose `limit` has passed while `missing` of the keys of `request` do not exist.
pub(crate) fn timed_out(request: &Request<'_>, limit: Option<Duration>, missing: &[usize]) -> Error {
    const NAMED: usize = 8;
    let named: Vec<String> = missing.iter().take(NAMED).map(|&index| format!("{:?}", request.keys[index])).collect();
    let more = match missing.len().saturating_sub(NAMED) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    let total = if request.keys.len() > 1 { format!(" of {}", request.keys.len()) } else { String::new() };
    let noun = if missing.len() == 1 { "key" } else { "keys" };
    let limit = limit.unwrap_or(DEFAULT_TIMEOUT).min(MAX_TIMEOUT).as_millis();
    Error::timeout(format!("wait timeout after {limit} ms: {} {noun}{total} did not come: {}{more}", missing.len(), named.join(", ")))
}

fn unexpected(reply: &Reply) -> Error {
    Error::internal(format!("a store answered another question: {reply:?}"))
}

fn unit(reply: Reply) -> Result<()> {
    if reply == Reply::Unit { Ok(()) } else { Err(unexpected(&reply)) }
}

fn flag(reply: Reply) -> Result<bool> {
    if let Reply::Flag(flag) = reply { Ok(flag) } else { Err(unexpected(&reply)) }
}

fn number(reply: Reply) -> Result<i64> {
    if let Reply::Number(number) = reply { Ok(number) } else { Err(unexpected(&reply)) }
}

fn value(reply: Reply) -> Result<Bytes> {
    if let Reply::Value(value) = reply { Ok(value) } else { Err(unexpected(&reply)) }
}

fn values(reply: Reply, count: usize) -> Result<Vec<Bytes>> {
    if let Reply::Values(values) = reply
        && values.len() == count
    {
        return Ok(values);
    }
    Err(Error::internal(format!("a store did not answer with {count} values")))
}

fn keys(reply: Reply) -> Result<Vec<String>> {
    if let Reply::Keys(keys) = reply { Ok(keys) } else { Err(unexpected(&reply)) }
}
