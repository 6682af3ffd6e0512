//! Finding the records in a log's bytes.

use super::format::{RECORD, RecordHeader};
use super::log::Replica;
use super::source::{Source, damaged};
use crate::error::Result;
use bytes::Bytes;

/// Read at once; a record that is longer gets a buffer of its own, once its bytes are known to exist.
const WINDOW: u64 = 64 * 1024;

impl Replica {
    /// Reads up to byte `end`, before which all must be whole, or as far as records are whole.
    pub(super) fn read<S: Source + ?Sized>(&mut self, source: &S, end: Option<u64>) -> Result<()> {
        let until = match end {
            Some(end) => end,
            None => source.size()?,
        };
        while self.position.length < until {
            let at = self.position.length;
            let mut window = vec![0; (until - at).min(WINDOW) as usize];
            let count = source.read(&mut window, at)?;
            if count < window.len() && end.is_some() {
                return Err(damaged(source, at + count as u64, format_args!("it ends there, of {until} bytes")));
            }
            window.truncate(count);
            if self.read_whole(source, &window)? > 0 {
                continue;
            }
            let Some((header, record)) = self.read_long(source, &window, until)? else {
                return match end {
                    Some(_) => Err(damaged(source, at, format_args!("record {} is not whole", self.position.records))),
                    None => Ok(()),
                };
            };
            self.apply(source, header, &record[RECORD..], Some(&record))?;
        }
        Ok(())
    }

    /// Takes the records that `window` holds as a whole; how many.
    fn read_whole<S: Source + ?Sized>(&mut self, source: &S, mut window: &[u8]) -> Result<usize> {
        let mut count = 0;
        while let Some(header) = window.get(..RECORD).and_then(RecordHeader::decode)
            && let Some(payload) = window[RECORD..].get(..header.length as usize)
            && RecordHeader::of(payload, self.position.chain) == header
        {
            self.apply(source, header, payload, None)?;
            window = &window[RECORD + payload.len()..];
            count += 1;
        }
        Ok(count)
    }

    /// The record that begins in `window`, if it is whole and ends before `until`.
    fn read_long<S: Source + ?Sized>(&self, source: &S, window: &[u8], until: u64) -> Result<Option<(RecordHeader, Bytes)>> {
        let Some(header) = window.get(..RECORD).and_then(RecordHeader::decode) else {
            return Ok(None);
        };
        let (at, length) = (self.position.length, RECORD + header.length as usize);
        let end = at + length as u64;
        // What fits into the window was looked at there.
        if length <= window.len() || end > until || end > source.size()? {
            return Ok(None);
        }
        let mut record = vec![0; length];
        let count = source.read(&mut record, at)?;
        let whole = count == length && RecordHeader::of(&record[RECORD..], self.position.chain) == header;
        Ok(whole.then(|| (header, record.into())))
    }
}
