//! Replays a log and builds new entries. This module uses no files, locks or clocks, and the bytes
//! may be arbitrary.

pub use super::source::LogSource;

use super::format::{
    FRONT, HEADER, MAX_PAYLOAD, Position, Preamble, RECORD, RecordHeader, RunId, slot_at,
};
use super::source::{cut, damaged};
use crate::error::{Error, Result};
use crate::store::request::Request;
use crate::store::table::{KeyTable, TableResult};
use bytes::Bytes;

/// The codes of entries that are not requests. They lie above the codes of operations, which occupy
/// the same byte.
const JOIN: u8 = 0xf0;
const LEAVE: u8 = 0xf1;

/// An entry to append to a log.
pub(super) enum LogEntry<'a> {
    Join,
    Leave,
    Request(&'a Request<'a>),
}

/// The contents of a log, up to the point that has been read.
pub struct Replica {
    /// The keys and values in the log.
    pub table: KeyTable,
    /// Number of users that have joined in this run.
    pub joined: u64,
    /// Number of users that have left in this run.
    pub left: u64,
    run: RunId,
    /// The front of the file, as last read or written.
    front: [u8; FRONT],
    /// Index of the newest intact slot.
    slot: usize,
    pub(super) position: Position,
    /// True if a change to `table` could not be written, so that everything must be read again.
    stale: bool,
}

impl Replica {
    /// Loads everything that was acknowledged in `source`. No process may write to it meanwhile.
    ///
    /// `Config` names the byte if the log is damaged. Allocates a small multiple of the log's size.
    pub fn load<S: LogSource + ?Sized>(source: &S) -> Result<Self> {
        let mut front = [0; FRONT];
        let count = source.read(&mut front, 0)?;
        if count < FRONT {
            return Err(cut(source, &front[..count]));
        }
        let run =
            Preamble::decode(&front).map_err(|(at, what)| damaged(source, at as u64, what))?.run;
        let mut replica = Self::fresh(run);
        replica.advance(source, front, true)?;
        Ok(replica)
    }

    /// Makes an empty log of `run`; its bytes are [`front`](Self::front).
    pub(super) fn fresh(run: RunId) -> Self {
        let (front, position) = (Preamble::fresh(&run), Position::start(&run));
        Self {
            table: KeyTable::default(),
            joined: 0,
            left: 0,
            run,
            front,
            slot: 0,
            position,
            stale: false,
        }
    }

    pub(super) fn front(&self) -> &[u8; FRONT] {
        &self.front
    }

    /// Reads the entries that were added since the last read; `false` if that needs the lock.
    /// `locked` is true if no process can write meanwhile.
    pub(super) fn follow<S: LogSource + ?Sized>(
        &mut self,
        source: &S,
        locked: bool,
    ) -> Result<bool> {
        let mut front = [0; FRONT];
        let count = source.read(&mut front, 0)?;
        if front == self.front && !self.stale {
            return Ok(true);
        }
        if count < FRONT {
            return Err(cut(source, &front[..count]));
        }
        if front[..HEADER] != self.front[..HEADER] {
            Preamble::decode(&front).map_err(|(at, what)| damaged(source, at as u64, what))?;
            return Err(Error::config(format!(
                "{} was started afresh by another run while this one used it",
                source.name()
            )));
        }
        if self.stale {
            if locked {
                *self = Self::load(source)?;
            }
            return Ok(locked);
        }
        self.advance(source, front, locked)
    }

    fn advance<S: LogSource + ?Sized>(
        &mut self,
        source: &S,
        bytes: [u8; FRONT],
        locked: bool,
    ) -> Result<bool> {
        let front =
            Preamble::decode(&bytes).map_err(|(at, what)| damaged(source, at as u64, what))?;
        // Another process may be writing one slot, and the other slot may be long outdated.
        if !front.is_whole() && !locked {
            return Ok(false);
        }
        let Some((slot, committed)) = front.newest() else {
            return Err(damaged(
                source,
                slot_at(0) as u64,
                "neither of its two commit slots has a right checksum",
            ));
        };
        if committed.length > self.position.length {
            self.read(source, Some(committed.length))?;
        }
        if front.is_whole() {
            if self.position != committed {
                let at = slot_at(slot) as u64;
                return Err(damaged(
                    source,
                    at,
                    format_args!("it says {committed:?}, the records say {:?}", self.position),
                ));
            }
        } else {
            // The damaged slot may have acknowledged the last record, so intact records after the
            // position in the other slot count.
            self.read(source, None)?;
        }
        (self.front, self.slot) = (bytes, slot);
        Ok(true)
    }

    /// Applies an intact record.
    pub(super) fn apply<S: LogSource + ?Sized>(
        &mut self,
        source: &S,
        header: RecordHeader,
        payload: &[u8],
        record: Option<&Bytes>,
    ) -> Result<()> {
        let unfit = |why: String| {
            damaged(
                source,
                self.position.length,
                format_args!("record {}: {why}", self.position.records),
            )
        };
        match payload {
            [JOIN] => self.joined += 1,
            [LEAVE] => self.left += 1,
            _ => {
                let request = Request::decode(payload).map_err(|error| unfit(error.message))?;
                if !request.op.writes() {
                    return Err(unfit(format!("{:?} changes nothing", request.op)));
                }
                match self.table.serve(&request, record).map_err(|error| unfit(error.message))? {
                    TableResult::Done(_) => {}
                    TableResult::Missing(index) => {
                        return Err(unfit(format!(
                            "{:?} of {:?}, which is not there",
                            request.op, request.keys[index]
                        )));
                    }
                }
            }
        }
        self.position = self.position.behind(payload.len(), header.chain);
        Ok(())
    }

    /// Appends `entry`, which `table` already reflects: calls `write` for the record and then for
    /// the slot, with their offsets. If that fails, the bytes that reached the log decide whether
    /// the entry counts.
    pub(super) fn append(
        &mut self,
        entry: &LogEntry<'_>,
        buffer: &mut Vec<u8>,
        write: &mut dyn FnMut(&[u8], u64) -> Result<()>,
    ) -> Result<()> {
        buffer.clear();
        buffer.resize(RECORD, 0);
        match entry {
            LogEntry::Join => buffer.push(JOIN),
            LogEntry::Leave => buffer.push(LEAVE),
            LogEntry::Request(request) => request.encode(buffer),
        }
        let header = RecordHeader::of(&buffer[RECORD..], self.position.chain);
        buffer[..RECORD].copy_from_slice(&header.encode());
        let next = self.position.behind(header.length as usize, header.chain);
        let (slot, bytes) = (1 - self.slot, next.slot(&self.run));
        self.stale = true;
        write(buffer, self.position.length)?;
        write(&bytes, slot_at(slot) as u64)?;
        self.stale = false;
        match entry {
            LogEntry::Join => self.joined += 1,
            LogEntry::Leave => self.left += 1,
            LogEntry::Request(_) => {}
        }
        self.front[slot_at(slot)..][..bytes.len()].copy_from_slice(&bytes);
        (self.slot, self.position) = (slot, next);
        Ok(())
    }

    /// Marks `table` as unreliable, so that the log is read again.
    pub(super) fn distrust(&mut self) {
        self.stale = true;
    }
}

/// Fails if `request` does not fit in a record.
pub(super) fn check_size(request: &Request<'_>) -> Result<()> {
    match request.encoded_len() {
        length if length > MAX_PAYLOAD => Err(Error::value(format!(
            "{:?} takes {length} bytes; a file store takes at most {MAX_PAYLOAD} at once",
            request.op
        ))),
        _ => Ok(()),
    }
}
