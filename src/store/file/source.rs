//! The source of a log's bytes, and the errors for bytes that are damaged.

use super::format::{FRONT, MAGIC, NOT_A_LOG};
use crate::error::{Error, Result};

/// The bytes of a log.
pub trait LogSource {
    /// Returns the name of the file for errors.
    fn name(&self) -> String;

    /// Returns the number of bytes.
    fn size(&self) -> Result<u64>;

    /// Fills `buffer` with the bytes from offset `at`, and returns how many there were.
    fn read(&self, buffer: &mut [u8], at: u64) -> Result<usize>;
}

impl LogSource for [u8] {
    fn name(&self) -> String {
        format!("a log of {} bytes", self.len())
    }

    fn size(&self) -> Result<u64> {
        Ok(self.len() as u64)
    }

    fn read(&self, buffer: &mut [u8], at: u64) -> Result<usize> {
        let rest = usize::try_from(at).ok().and_then(|at| self.get(at..)).unwrap_or_default();
        let count = rest.len().min(buffer.len());
        buffer[..count].copy_from_slice(&rest[..count]);
        Ok(count)
    }
}

/// Returns the error of a damaged log.
pub(super) fn damaged<S: LogSource + ?Sized>(
    source: &S,
    at: u64,
    what: impl std::fmt::Display,
) -> Error {
    Error::config(format!("{} is damaged at byte {at}: {what}", source.name()))
}

/// Returns the error of a file that ends within its front.
pub(super) fn cut<S: LogSource + ?Sized>(source: &S, front: &[u8]) -> Error {
    if front.iter().zip(MAGIC).any(|(one, other)| *one != other) {
        return damaged(source, 0, NOT_A_LOG);
    }
    damaged(source, front.len() as u64, format_args!("it ends within the first {FRONT} bytes"))
}
