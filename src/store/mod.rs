//! The key-value stores through which ranks meet.
//!
//! All stores share the semantics of [`table`]: [`memory`] serves the threads of a process,
//! [`mod@file`] the processes that share a file system, [`tcp`] every process that can reach a
//! server, and [`prefix`] a part of another store. A store answers [`request::Request`]s; the
//! methods of [`Store`] match those of `c10d::Store`.

pub mod deadline;
pub mod file;
pub mod load_generator;
pub mod meet;
pub mod memory;
pub mod offload;
pub mod prefix;
pub mod request;
pub mod table;
pub mod tcp;

use crate::error::{Error, Result};
use crate::rank::Rank;
use bytes::Bytes;
use meet::StoreMeeting;
use request::{Request, StoreOp};
use std::time::{Duration, Instant};
use table::TableReply;

/// Timeout of a call that does not pass a limit; the default of `c10d::Store`.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(300);

/// Maximum timeout; c10d's "no timeout" becomes this.
pub const MAX_TIMEOUT: Duration = Duration::from_secs(24 * 3600);

/// A key-value store with the semantics of `c10d::Store`.
///
/// Ranks exchange addresses and agree on a group through a store before they have any other
/// connection. An implementation provides only [`call`](Self::call); every operation is a
/// [`Request`].
///
/// Every method fails with `Timeout`, which names the missing keys, after its limit; with `Network`
/// if the server of a network store has become unreachable; and with `Config` if a store of limited
/// size is full.
///
/// # Examples
/// ```
/// use symm::store::{Store, memory::MemoryStore};
///
/// let store = MemoryStore::new();
/// store.set("address/0", b"10.0.0.1:29500")?;
/// assert_eq!(store.add("arrived", 1)?, 1);
/// assert_eq!(&store.get("address/0", None)?[..], b"10.0.0.1:29500");
/// # Ok::<(), symm::error::Error>(())
/// ```
pub trait Store: Send + Sync {
    /// Answers `request` within `limit`, or within [`DEFAULT_TIMEOUT`].
    fn call(&self, request: &Request<'_>, limit: Option<Duration>) -> Result<TableReply>;

    /// Sets `key` to `value`. When this returns, every other user of the store sees it.
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        unit(self.call(&Request::new(StoreOp::Set, vec![key], vec![value]), None)?)
    }

    /// Sets `key` to `desired` if it is absent and `expected` is empty, or if its value is
    /// `expected`. Returns the value of `key` afterwards, or `expected` if it is absent.
    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Bytes> {
        value(
            self.call(
                &Request::new(StoreOp::CompareSet, vec![key], vec![expected, desired]),
                None,
            )?,
        )
    }

    /// Waits for `key` and returns its value.
    fn get(&self, key: &str, limit: Option<Duration>) -> Result<Bytes> {
        value(self.call(&Request::new(StoreOp::Get, vec![key], vec![]), limit)?)
    }

    /// Adds `amount` to the decimal number in `key` (0 if absent) and returns the sum. `Value` if
    /// it is not a number.
    fn add(&self, key: &str, amount: i64) -> Result<i64> {
        number(
            self.call(&Request { amount, ..Request::new(StoreOp::Add, vec![key], vec![]) }, None)?,
        )
    }

    /// Returns true if all `keys` exist now.
    fn check(&self, keys: &[&str]) -> Result<bool> {
        flag(self.call(&Request::new(StoreOp::Check, keys.to_vec(), vec![]), None)?)
    }

    /// Waits until all `keys` exist.
    fn wait(&self, keys: &[&str], limit: Option<Duration>) -> Result<()> {
        unit(self.call(&Request::new(StoreOp::Wait, keys.to_vec(), vec![]), limit)?)
    }

    /// Removes `key` and returns true if it existed. `NotImplemented` if the store cannot delete,
    /// as some stores of other libraries cannot.
    fn delete(&self, key: &str) -> Result<bool> {
        flag(self.call(&Request::new(StoreOp::Delete, vec![key], vec![]), None)?)
    }

    /// Returns the number of keys with a value.
    fn num_keys(&self) -> Result<i64> {
        number(self.call(&Request::new(StoreOp::NumKeys, vec![], vec![]), None)?)
    }

    /// Appends `more` to the value of `key`, or sets it.
    fn append(&self, key: &str, more: &[u8]) -> Result<()> {
        unit(self.call(&Request::new(StoreOp::Append, vec![key], vec![more]), None)?)
    }

    /// Waits for all of `keys` and returns their values.
    fn multi_get(&self, keys: &[&str], limit: Option<Duration>) -> Result<Vec<Bytes>> {
        values(
            self.call(&Request::new(StoreOp::MultiGet, keys.to_vec(), vec![]), limit)?,
            keys.len(),
        )
    }

    /// Sets each of `keys` to its value, atomically.
    fn multi_set(&self, keys: &[&str], values: &[&[u8]]) -> Result<()> {
        unit(self.call(&Request::new(StoreOp::MultiSet, keys.to_vec(), values.to_vec()), None)?)
    }

    /// Appends `value` to the queue of `key`.
    fn queue_push(&self, key: &str, value: &[u8]) -> Result<()> {
        unit(self.call(&Request::new(StoreOp::Push, vec![key], vec![value]), None)?)
    }

    /// Waits for the queue of `key` to have a value, and removes and returns the first.
    fn queue_pop(&self, key: &str, limit: Option<Duration>) -> Result<Bytes> {
        value(self.call(&Request::new(StoreOp::Pop, vec![key], vec![]), limit)?)
    }

    /// Removes and returns the first value of the queue of `key` without waiting; `QueueEmpty` if
    /// the queue is empty.
    fn try_queue_pop(&self, key: &str) -> Result<Bytes> {
        value(self.call(&Request::new(StoreOp::TryPop, vec![key], vec![]), None)?)
    }

    /// Returns the length of the queue of `key`.
    fn queue_len(&self, key: &str) -> Result<i64> {
        number(self.call(&Request::new(StoreOp::QueueLen, vec![key], vec![]), None)?)
    }

    /// Lists all keys with a value, in no particular order.
    fn list_keys(&self) -> Result<Vec<String>> {
        keys(self.call(&Request::new(StoreOp::ListKeys, vec![], vec![]), None)?)
    }

    /// Returns once all `size` ranks have called it with this `key`, which may be used repeatedly.
    /// `Timeout` names the ranks that did not arrive; the key must not be used after that.
    ///
    /// Each rank counts its own calls, so all ranks agree on the round. The last rank of a round
    /// opens it and removes the keys of the previous round, so `size` + 2 keys remain.
    fn barrier(&self, key: &str, rank: Rank, size: u32, limit: Option<Duration>) -> Result<()> {
        if rank.0 >= size {
            return Err(Error::value(format!("barrier {key:?}: rank {rank} of {size}")));
        }
        StoreMeeting { store: self, prefix: key.into(), me: rank, size, deadline: deadline(limit) }
            .pass()
    }
}

/// Returns the deadline of a call that starts now.
fn deadline(limit: Option<Duration>) -> Instant {
    Instant::now() + limit.unwrap_or(DEFAULT_TIMEOUT).min(MAX_TIMEOUT)
}

/// Returns the error of a call whose `limit` has passed while the keys of `request` at the indices
/// `missing` do not exist.
pub(crate) fn timed_out(
    request: &Request<'_>,
    limit: Option<Duration>,
    missing: &[usize],
) -> Error {
    const NAMED: usize = 8;
    let named: Vec<String> =
        missing.iter().take(NAMED).map(|&index| format!("{:?}", request.keys[index])).collect();
    let more = match missing.len().saturating_sub(NAMED) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    let total =
        if request.keys.len() > 1 { format!(" of {}", request.keys.len()) } else { String::new() };
    let noun = if missing.len() == 1 { "key" } else { "keys" };
    let limit = limit.unwrap_or(DEFAULT_TIMEOUT).min(MAX_TIMEOUT).as_millis();
    Error::timeout(format!(
        "wait timeout after {limit} ms: {} {noun}{total} did not come: {}{more}",
        missing.len(),
        named.join(", ")
    ))
}

fn unexpected(reply: &TableReply) -> Error {
    Error::internal(format!("a store answered another question: {reply:?}"))
}

fn unit(reply: TableReply) -> Result<()> {
    if reply == TableReply::Unit { Ok(()) } else { Err(unexpected(&reply)) }
}

fn flag(reply: TableReply) -> Result<bool> {
    if let TableReply::Flag(flag) = reply { Ok(flag) } else { Err(unexpected(&reply)) }
}

fn number(reply: TableReply) -> Result<i64> {
    if let TableReply::Number(number) = reply { Ok(number) } else { Err(unexpected(&reply)) }
}

fn value(reply: TableReply) -> Result<Bytes> {
    if let TableReply::Value(value) = reply { Ok(value) } else { Err(unexpected(&reply)) }
}

fn values(reply: TableReply, count: usize) -> Result<Vec<Bytes>> {
    if let TableReply::Values(values) = reply
        && values.len() == count
    {
        return Ok(values);
    }
    Err(Error::internal(format!("a store did not answer with {count} values")))
}

fn keys(reply: TableReply) -> Result<Vec<String>> {
    if let TableReply::Keys(keys) = reply { Ok(keys) } else { Err(unexpected(&reply)) }
}
