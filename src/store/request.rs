//! A request to a store as a value. All stores answer the same requests; network frames and the
//! file log encode them.

use crate::error::{Error, Result};

/// Maximum length of a key in bytes.
pub const MAX_KEY: usize = 64 * 1024;

/// Maximum number of keys in one request.
pub const MAX_KEYS: usize = 64 * 1024;

/// Number of keys that an operation names.
#[derive(Clone, Copy, PartialEq, Eq)]
enum KeyCount {
    Zero,
    One,
    Any,
}

macro_rules! operations {
    ($($(#[$doc:meta])* $name:ident = $code:literal: $keys:ident, $values:literal,
        waits $waits:literal, writes $writes:literal;)*) => {
        /// An operation of `c10d::Store`.
        #[repr(u8)]
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum StoreOp {
            $($(#[$doc])* $name = $code,)*
        }

        impl StoreOp {
            /// All operations.
            pub const ALL: &[Self] = &[$(Self::$name),*];

            /// Returns the operation with this code.
            pub fn from_code(code: u8) -> Option<Self> {
                match code {
                    $($code => Some(Self::$name),)*
                    _ => None,
                }
            }

            /// Returns true if the operation waits for its keys to exist.
            pub fn waits(self) -> bool {
                match self { $(Self::$name => $waits,)* }
            }

            /// Returns true if the operation may change the store.
            pub fn writes(self) -> bool {
                match self { $(Self::$name => $writes,)* }
            }

            /// Returns true if the operation may create a key.
            pub fn makes_keys(self) -> bool {
                self.writes() && !matches!(self, Self::Delete | Self::Pop | Self::TryPop)
            }

            /// Returns the number of keys that the operation names and the number of values per
            /// key.
            fn shape(self) -> (KeyCount, usize) {
                match self { $(Self::$name => (KeyCount::$keys, $values),)* }
            }
        }
    };
}

// The codes appear in frames and logs, so a new operation needs a new code.
operations! {
    /// Sets a key to a value.
    Set = 1: One, 1, waits false, writes true;
    /// Sets a key to the second value if its value is the first, or if it is absent and the first
    /// is empty.
    CompareSet = 2: One, 2, waits false, writes true;
    /// Waits for a key and returns its value.
    Get = 3: One, 0, waits true, writes false;
    /// Adds `amount` to the decimal number in a key, which is 0 if absent.
    Add = 4: One, 0, waits false, writes true;
    /// Returns true if all keys exist.
    Check = 5: Any, 0, waits false, writes false;
    /// Waits until all keys exist.
    Wait = 6: Any, 0, waits true, writes false;
    /// Removes a key and returns true if it existed.
    Delete = 7: One, 0, waits false, writes true;
    /// Returns the number of keys with a value.
    NumKeys = 8: Zero, 0, waits false, writes false;
    /// Appends to the value of a key.
    Append = 9: One, 1, waits false, writes true;
    /// Waits for keys and returns their values.
    MultiGet = 10: Any, 0, waits true, writes false;
    /// Sets each key to its value, atomically.
    MultiSet = 11: Any, 1, waits false, writes true;
    /// Appends a value to the queue of a key.
    Push = 12: One, 1, waits false, writes true;
    /// Waits for a queue to have a value, and removes and returns the first.
    Pop = 13: One, 0, waits true, writes true;
    /// Removes and returns the first value of a queue; an empty queue is an error.
    TryPop = 14: One, 0, waits false, writes true;
    /// Returns the length of a queue.
    QueueLen = 15: One, 0, waits false, writes false;
    /// Lists all keys with a value, in no particular order.
    ListKeys = 16: Zero, 0, waits false, writes false;
}

/// An operation with its arguments.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request<'a> {
    /// The operation.
    pub op: StoreOp,
    /// The keys that the operation names.
    pub keys: Vec<&'a str>,
    /// The values, in the order of the keys.
    pub values: Vec<&'a [u8]>,
    /// The amount that [`StoreOp::Add`] adds.
    pub amount: i64,
}

impl<'a> Request<'a> {
    /// Makes a request without an amount.
    pub fn new(op: StoreOp, keys: Vec<&'a str>, values: Vec<&'a [u8]>) -> Self {
        Self { op, keys, values, amount: 0 }
    }

    /// Returns the same request for the same number of other keys.
    pub fn with_keys(&self, keys: Vec<&'a str>) -> Self {
        Self { op: self.op, keys, values: self.values.clone(), amount: self.amount }
    }

    /// Returns the number of bytes that [`encode`](Self::encode) appends.
    pub fn encoded_len(&self) -> usize {
        let keys: usize = self.keys.iter().map(|key| 4 + key.len()).sum();
        let values: usize = self.values.iter().map(|value| 4 + value.len()).sum();
        1 + 8 + 4 + keys + values
    }

    /// Fails if a key, the number of keys or the number of values is out of bounds.
    pub fn check(&self) -> Result<()> {
        let (keys, values) = self.op.shape();
        let fits = match keys {
            KeyCount::Zero => self.keys.is_empty(),
            KeyCount::One => self.keys.len() == 1,
            KeyCount::Any => true,
        };
        if !fits || self.values.len() != values * self.keys.len() {
            return Err(Error::value(format!(
                "{:?} of {} keys and {} values",
                self.op,
                self.keys.len(),
                self.values.len()
            )));
        }
        if self.keys.len() > MAX_KEYS {
            return Err(Error::value(format!(
                "{:?} of {} keys; a request holds at most {MAX_KEYS}",
                self.op,
                self.keys.len()
            )));
        }
        match self.keys.iter().find(|key| key.len() > MAX_KEY) {
            Some(key) => Err(Error::value(format!(
                "a key of {} bytes; a key has at most {MAX_KEY}",
                key.len()
            ))),
            None => Ok(()),
        }
    }

    /// Appends the request in little-endian order: operation, amount, number of keys, then each key
    /// and value after its length.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.reserve(self.encoded_len());
        out.push(self.op as u8);
        out.extend_from_slice(&self.amount.to_le_bytes());
        out.extend_from_slice(&(self.keys.len() as u32).to_le_bytes());
        for piece in self.keys.iter().map(|key| key.as_bytes()).chain(self.values.iter().copied()) {
            out.extend_from_slice(&(piece.len() as u32).to_le_bytes());
            out.extend_from_slice(piece);
        }
    }

    /// Decodes the request that occupies exactly `bytes`. Allocates at most a small multiple of
    /// their number.
    pub fn decode(bytes: &'a [u8]) -> Result<Self> {
        let mut fields = MessageReader(bytes);
        let code = fields.u8()?;
        let op = StoreOp::from_code(code)
            .ok_or_else(|| Error::value(format!("operation {code} is unknown")))?;
        let amount = i64::from_le_bytes(fields.array()?);
        let count = fields.u32()? as usize;
        let (keys, values_per_key) = op.shape();
        let most = match keys {
            KeyCount::Zero => 0,
            KeyCount::One => 1,
            // Each key takes at least the 4 bytes of its length.
            KeyCount::Any => MAX_KEYS.min(fields.0.len() / 4),
        };
        if count > most {
            return Err(Error::value(format!("{op:?} of {count} keys in {} bytes", bytes.len())));
        }
        let mut request = Self {
            op,
            keys: Vec::with_capacity(count),
            values: Vec::with_capacity(count * values_per_key),
            amount,
        };
        for _ in 0..count {
            let key = fields.bytes()?;
            request
                .keys
                .push(std::str::from_utf8(key).map_err(|_| Error::value("a key is not UTF-8"))?);
        }
        for _ in 0..count * values_per_key {
            request.values.push(fields.bytes()?);
        }
        fields.end()?;
        request.check()?;
        Ok(request)
    }
}

/// The unread rest of a message.
pub(super) struct MessageReader<'a>(pub(super) &'a [u8]);

impl<'a> MessageReader<'a> {
    fn take(&mut self, count: usize) -> Result<&'a [u8]> {
        let (head, tail) = self.0.split_at_checked(count).ok_or_else(|| {
            Error::value(format!("a message ends {} bytes early", count - self.0.len()))
        })?;
        self.0 = tail;
        Ok(head)
    }

    pub(super) fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N)?);
        Ok(array)
    }

    pub(super) fn u8(&mut self) -> Result<u8> {
        Ok(self.array::<1>()?[0])
    }

    pub(super) fn u32(&mut self) -> Result<u32> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    /// Reads a length and as many bytes.
    pub(super) fn bytes(&mut self) -> Result<&'a [u8]> {
        let count = self.u32()? as usize;
        self.take(count)
    }

    /// Fails if unread bytes remain.
    pub(super) fn end(&self) -> Result<()> {
        if self.0.is_empty() {
            Ok(())
        } else {
            Err(Error::value(format!("a message has {} bytes too many", self.0.len())))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn encoded(request: &Request<'_>) -> Vec<u8> {
        let mut bytes = Vec::new();
        request.encode(&mut bytes);
        bytes
    }

    #[test]
    fn every_operation_comes_back_and_no_prefix_of_it_is_taken() {
        for &op in StoreOp::ALL {
            let (keys, values) = op.shape();
            let keys = match keys {
                KeyCount::Zero => vec![],
                KeyCount::One => vec!["key"],
                KeyCount::Any => vec!["", "key", "schlüssel"],
            };
            let values = vec![&b"value"[..]; values * keys.len()];
            let request = Request { amount: -7, ..Request::new(op, keys, values) };
            let bytes = encoded(&request);
            assert_eq!(bytes.len(), request.encoded_len());
            assert_eq!(Request::decode(&bytes).as_ref(), Ok(&request));
            for length in 0..bytes.len() {
                assert!(Request::decode(&bytes[..length]).is_err(), "{op:?} cut to {length} bytes");
            }
            assert!(Request::decode(&[&bytes[..], &[0]].concat()).is_err());
            assert_eq!(StoreOp::from_code(op as u8), Some(op));
        }
        assert_eq!((StoreOp::from_code(0), StoreOp::from_code(17)), (None, None));
    }

    #[test]
    fn lengths_that_lie_are_refused_before_anything_is_allocated_for_them() {
        let mut bytes = encoded(&Request::new(StoreOp::Wait, vec!["a"], vec![]));
        bytes[9..13].copy_from_slice(&u32::MAX.to_le_bytes());
        assert!(Request::decode(&bytes).is_err());
        let mut bytes = encoded(&Request::new(StoreOp::Get, vec!["a"], vec![]));
        bytes[13..17].copy_from_slice(&u32::MAX.to_le_bytes());
        assert!(Request::decode(&bytes).is_err());
        let long = "k".repeat(MAX_KEY + 1);
        assert!(
            Request::decode(&encoded(&Request::new(StoreOp::Get, vec![&long], vec![]))).is_err()
        );
        assert!(Request::new(StoreOp::MultiSet, vec!["a"], vec![b"1", b"2"]).check().is_err());
    }
}
