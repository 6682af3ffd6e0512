//! The contents of a store and how it answers requests: the only implementation of the operations'
//! semantics.

use super::request::{Request, StoreOp};
use crate::error::{Error, Result};
use bytes::{Bytes, BytesMut};
use std::collections::{HashMap, VecDeque};

/// A value of this size or more shares the buffer of its request instead of being copied.
const SHARE: usize = 4096;

/// Number of bytes that the limit counts for each value, in addition to its key and its bytes.
const OVERHEAD: usize = 128;

/// Reply of a store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TableReply {
    /// The operation is done and has no value.
    Unit,
    /// Yes or no.
    Flag(bool),
    /// A count, or a sum.
    Number(i64),
    /// Value of one key.
    Value(Bytes),
    /// Several values, in the order of the keys.
    Values(Vec<Bytes>),
    /// List of keys.
    Keys(Vec<String>),
}

/// The outcome of [`KeyTable::serve`].
#[derive(Debug, PartialEq, Eq)]
pub enum TableResult {
    /// The request is done.
    Done(TableReply),
    /// The request must wait: the key with this index is missing.
    Missing(usize),
}

/// Keys with values, and keys with queues. A key may have both; as in c10d, only `check` and `wait`
/// see queues as keys.
#[derive(Debug)]
pub struct KeyTable {
    values: HashMap<String, Bytes>,
    queues: HashMap<String, VecDeque<Bytes>>,
    bytes: usize,
    limit: usize,
}

impl Default for KeyTable {
    fn default() -> Self {
        Self::bounded(usize::MAX)
    }
}

impl KeyTable {
    /// Makes an empty table that holds at most `limit` bytes: the keys, the values and 128 bytes
    /// for each value.
    pub fn bounded(limit: usize) -> Self {
        Self { values: HashMap::new(), queues: HashMap::new(), bytes: 0, limit }
    }

    /// Returns the number of keys with a value.
    pub fn len(&self) -> usize {
        self.values.len()
    }

    /// Returns true if no key has a value.
    pub fn is_empty(&self) -> bool {
        self.values.is_empty()
    }

    /// Returns the number of bytes held, as the limit counts them.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns true if `key` has what `op` waits for: a value or a queue for [`StoreOp::Wait`],
    /// otherwise what `op` returns.
    fn has(&self, op: StoreOp, key: &str) -> bool {
        let queued = self.queues.contains_key(key);
        if op == StoreOp::Pop {
            queued
        } else {
            self.values.contains_key(key) || (queued && op == StoreOp::Wait)
        }
    }

    /// Returns the indices of the keys for which `request` waits.
    pub fn missing(&self, request: &Request<'_>) -> Vec<usize> {
        let absent = |&index: &usize| !self.has(request.op, request.keys[index]);
        (0..request.keys.len()).filter(absent).collect()
    }

    /// Executes `request`, or changes nothing if a key is missing or on an error: `Value` for a
    /// malformed number, `QueueEmpty`, or `Config` when full. `source` is the buffer that `request`
    /// points into; large values may keep it alive.
    pub fn serve(&mut self, request: &Request<'_>, source: Option<&Bytes>) -> Result<TableResult> {
        request.check()?;
        let Request { op, keys, values, amount } = request;
        if op.waits() {
            // The last missing key is reported: keys are usually set in order, so a caller that
            // waits for that key usually waits once.
            if let Some(index) = keys.iter().rposition(|key| !self.has(*op, key)) {
                return Ok(TableResult::Missing(index));
            }
        }
        let reply = match op {
            StoreOp::Set => {
                self.put(keys[0], keep(values[0], source)).map(|()| TableReply::Unit)?
            }
            StoreOp::CompareSet => self.compare_set(keys[0], values[0], keep(values[1], source))?,
            StoreOp::Get => TableReply::Value(self.value(keys[0])),
            StoreOp::Add => self.add(keys[0], *amount)?,
            StoreOp::Check => TableReply::Flag(keys.iter().all(|key| self.has(StoreOp::Wait, key))),
            StoreOp::Wait => TableReply::Unit,
            StoreOp::Delete => TableReply::Flag(self.delete(keys[0])),
            StoreOp::NumKeys => TableReply::Number(self.values.len() as i64),
            StoreOp::Append => self.append(keys[0], values[0]).map(|()| TableReply::Unit)?,
            StoreOp::MultiGet => {
                TableReply::Values(keys.iter().map(|key| self.value(key)).collect())
            }
            StoreOp::MultiSet => {
                // Atomic: checks the capacity for all values first. The check does not subtract the
                // bytes of values that are replaced.
                let need = keys
                    .iter()
                    .zip(values)
                    .map(|(key, value)| key.len() + value.len() + OVERHEAD)
                    .sum();
                self.check_room(need)?;
                for (key, value) in keys.iter().zip(values) {
                    self.put(key, keep(value, source))?;
                }
                TableReply::Unit
            }
            StoreOp::Push => self.push(keys[0], keep(values[0], source))?,
            StoreOp::Pop | StoreOp::TryPop => TableReply::Value(self.pop(keys[0])?),
            StoreOp::QueueLen => {
                TableReply::Number(self.queues.get(keys[0]).map_or(0, VecDeque::len) as i64)
            }
            StoreOp::ListKeys => TableReply::Keys(self.values.keys().cloned().collect()),
        };
        Ok(TableResult::Done(reply))
    }

    fn check_room(&self, more: usize) -> Result<()> {
        if more > self.limit.saturating_sub(self.bytes) {
            return Err(Error::config(format!(
                "the store is full: it holds {} bytes of at most {}, {more} more do not fit",
                self.bytes, self.limit
            )));
        }
        Ok(())
    }

    fn value(&self, key: &str) -> Bytes {
        self.values.get(key).cloned().unwrap_or_default()
    }

    fn put(&mut self, key: &str, value: Bytes) -> Result<()> {
        if let Some(old) = self.values.get_mut(key) {
            let (before, after) = (old.len(), value.len());
            if after > before && after - before > self.limit - self.bytes {
                return self.check_room(after - before);
            }
            *old = value;
            self.bytes = self.bytes - before + after;
            return Ok(());
        }
        let need = key.len() + value.len() + OVERHEAD;
        self.check_room(need)?;
        self.values.insert(key.to_owned(), value);
        self.bytes += need;
        Ok(())
    }

    fn compare_set(&mut self, key: &str, expected: &[u8], desired: Bytes) -> Result<TableReply> {
        match self.values.get(key) {
            Some(value) if value != expected => return Ok(TableReply::Value(value.clone())),
            // As in c10d, an absent key with a non-empty expectation stays absent, and the
            // expectation is returned.
            None if !expected.is_empty() => {
                return Ok(TableReply::Value(Bytes::copy_from_slice(expected)));
            }
            Some(_) | None => self.put(key, desired.clone())?,
        }
        Ok(TableReply::Value(desired))
    }

    fn add(&mut self, key: &str, amount: i64) -> Result<TableReply> {
        let value = self.values.get(key).map_or(&[][..], |value| value);
        let before = match std::str::from_utf8(value).map(str::trim) {
            Ok("") => Some(0),
            Ok(text) => text.parse::<i64>().ok(),
            Err(_) => None,
        };
        let before = before.ok_or_else(|| {
            Error::value(format!(
                "add to key {key:?}: its value of {} bytes is not a number",
                value.len()
            ))
        })?;
        let sum = before.checked_add(amount).ok_or_else(|| {
            Error::value(format!("add to key {key:?}: {before} + {amount} overflows 64 bits"))
        })?;
        self.put(key, Bytes::from(sum.to_string()))?;
        Ok(TableReply::Number(sum))
    }

    fn delete(&mut self, key: &str) -> bool {
        let removed = self.values.remove(key);
        self.bytes -= removed.as_ref().map_or(0, |value| key.len() + value.len() + OVERHEAD);
        removed.is_some()
    }

    fn append(&mut self, key: &str, more: &[u8]) -> Result<()> {
        if !self.values.contains_key(key) {
            return self.put(key, Bytes::copy_from_slice(more));
        }
        self.check_room(more.len())?;
        if let Some(value) = self.values.get_mut(key) {
            // Appends in place if no reader holds the value at this moment; its buffer then grows
            // in steps, not with each call.
            let mut buffer = match std::mem::take(value).try_into_mut() {
                Ok(buffer) => buffer,
                Err(shared) => BytesMut::from(&shared[..]),
            };
            buffer.extend_from_slice(more);
            *value = buffer.freeze();
            self.bytes += more.len();
        }
        Ok(())
    }

    fn push(&mut self, key: &str, value: Bytes) -> Result<TableReply> {
        let need = key.len() + value.len() + OVERHEAD;
        self.check_room(need)?;
        self.queues.entry(key.to_owned()).or_default().push_back(value);
        self.bytes += need;
        Ok(TableReply::Unit)
    }

    fn pop(&mut self, key: &str) -> Result<Bytes> {
        let queue = self.queues.get_mut(key);
        let value = queue
            .and_then(VecDeque::pop_front)
            .ok_or_else(|| Error::queue_empty(format!("queue is empty: {key:?}")))?;
        self.bytes -= key.len() + value.len() + OVERHEAD;
        // An empty queue does not count as a key.
        if self.queues.get(key).is_some_and(VecDeque::is_empty) {
            self.queues.remove(key);
        }
        Ok(value)
    }
}

/// Returns `value` for storage: a part of `source` if `value` makes up most of it, otherwise a
/// copy.
fn keep(value: &[u8], source: Option<&Bytes>) -> Bytes {
    match source {
        Some(source) if value.len() >= SHARE && value.len() >= source.len() / 2 => {
            source.slice_ref(value)
        }
        _ => Bytes::copy_from_slice(value),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn serve(
        table: &mut KeyTable,
        op: StoreOp,
        keys: &[&str],
        values: &[&[u8]],
    ) -> Result<TableResult> {
        table.serve(&Request::new(op, keys.to_vec(), values.to_vec()), None)
    }

    #[test]
    fn bytes_return_to_zero_with_the_last_value() {
        let mut table = KeyTable::bounded(10_000);
        for op in [StoreOp::Set, StoreOp::Append, StoreOp::Push, StoreOp::Push] {
            assert!(serve(&mut table, op, &["k"], &[b"value"]).is_ok());
        }
        assert!(
            serve(&mut table, StoreOp::MultiSet, &["k", "k", "l"], &[b"1", b"22", b"333"]).is_ok()
        );
        assert_eq!(table.bytes(), 2 * (1 + OVERHEAD + 5) + (1 + OVERHEAD + 2) + (1 + OVERHEAD + 3));
        for (op, key) in [
            (StoreOp::Delete, "k"),
            (StoreOp::Delete, "l"),
            (StoreOp::Pop, "k"),
            (StoreOp::TryPop, "k"),
        ] {
            assert!(serve(&mut table, op, &[key], &[]).is_ok());
        }
        assert_eq!(table.bytes(), 0);
        assert!(table.queues.is_empty() && table.is_empty());
    }

    #[test]
    fn a_full_table_refuses_and_changes_nothing() {
        let mut table = KeyTable::bounded(2 * OVERHEAD + 100);
        assert!(serve(&mut table, StoreOp::Set, &["k"], &[&[0; 90]]).is_ok());
        let before = table.bytes();
        for (op, keys, values) in [
            (StoreOp::Set, &["l"][..], &[&[0; 60][..]][..]),
            (StoreOp::Set, &["k"], &[&[0; 300]]),
            (StoreOp::CompareSet, &["l"], &[&[], &[0; 300]]),
            (StoreOp::Append, &["k"], &[&[0; 300]]),
            (StoreOp::Push, &["q"], &[&[0; 300]]),
            (StoreOp::MultiSet, &["a", "b"], &[&[0; 1], &[0; 1]]),
        ] {
            let error = serve(&mut table, op, keys, values).expect_err("full");
            assert!(error.message.contains("full"), "{op:?}: {error:?}");
            assert_eq!((table.bytes(), table.len()), (before, 1));
        }
        assert!(serve(&mut table, StoreOp::Set, &["k"], &[&[0; 10]]).is_ok());
    }

    #[test]
    fn large_values_share_their_request_and_small_ones_do_not() {
        let source = Bytes::from(vec![7; 2 * SHARE]);
        assert_eq!(keep(&source[10..], Some(&source)).as_ptr(), source[10..].as_ptr());
        assert_ne!(keep(&source[10..20], Some(&source)).as_ptr(), source[10..].as_ptr());
        assert_eq!(keep(&source[10..], None), source[10..]);
    }
}
