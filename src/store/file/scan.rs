//! Finding the records in a log's bytes.

use super::format::{RECORD, RecordHeader};
use super::log::Replica;
use super::source::{LogSource, damaged};
use crate::error::Result;
use bytes::Bytes;

/// Size of one read. A longer record gets its own buffer, once its bytes are known to exist.
const WINDOW: u64 = 64 * 1024;

impl Replica {
    /// Reads records up to byte `end` and fails if one of them is damaged; without `end`, reads up
    /// to the first damaged record.
    pub(super) fn read<S: LogSource + ?Sized>(
        &mut self,
        source: &S,
        end: Option<u64>,
    ) -> Result<()> {
        let until = match end {
            Some(end) => end,
            None => source.size()?,
        };
        while self.position.length < until {
            let at = self.position.length;
            let mut window = vec![0; (until - at).min(WINDOW) as usize];
            let count = source.read(&mut window, at)?;
            if count < window.len() && end.is_some() {
                return Err(damaged(
                    source,
                    at + count as u64,
                    format_args!("it ends there, of {until} bytes"),
                ));
            }
            window.truncate(count);
            if self.read_whole(source, &window)? > 0 {
                continue;
            }
            let Some((header, record)) = self.read_long(source, &window, until)? else {
                return match end {
                    Some(_) => Err(damaged(
                        source,
                        at,
                        format_args!("record {} is not whole", self.position.records),
                    )),
                    None => Ok(()),
                };
            };
            self.apply(source, header, &record[RECORD..], Some(&record))?;
        }
        Ok(())
    }

    /// Applies the complete records in `window`, and returns their number.
    fn read_whole<S: LogSource + ?Sized>(
        &mut self,
        source: &S,
        mut window: &[u8],
    ) -> Result<usize> {
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

    /// Returns the record at the start of `window` if it is longer than the window, intact, and
    /// ends at `until` or before.
    fn read_long<S: LogSource + ?Sized>(
        &self,
        source: &S,
        window: &[u8],
        until: u64,
    ) -> Result<Option<(RecordHeader, Bytes)>> {
        let Some(header) = window.get(..RECORD).and_then(RecordHeader::decode) else {
            return Ok(None);
        };
        let (at, length) = (self.position.length, RECORD + header.length as usize);
        let end = at + length as u64;
        // A record that fits in the window was examined by `read_whole`.
        if length <= window.len() || end > until || end > source.size()? {
            return Ok(None);
        }
        let mut record = vec![0; length];
        let count = source.read(&mut record, at)?;
        let whole =
            count == length && RecordHeader::of(&record[RECORD..], self.position.chain) == header;
        Ok(whole.then(|| (header, record.into())))
    }
}
