//! Format of the file.
//!
//! ```text
//! front    magic 8 | version 4 | run 16 | crc 4 | slot | slot
//! slot     length 8 | records 8 | chain 4 | crc 4
//! record   length 4 | chain 4 | crc 4 | payload: a request, or a byte when a user joins or leaves
//! ```
//!
//! All numbers are little-endian. `chain` is the checksum of a payload, continued from the previous
//! record; the first record continues from the checksum of the run. A record therefore counts only
//! after the records that preceded it when it was written. A record is acknowledged once a slot
//! covers it. The slots alternate, so one is intact whenever a writer is killed.

use crc32fast::Hasher;

/// The first bytes of the file. They are written after the rest of the front: if they are zeros,
/// the file has never been used.
pub(super) const MAGIC: [u8; 8] = *b"symmlog\n";

const VERSION: u32 = 1;

/// Why a file that starts differently is rejected.
pub(super) const NOT_A_LOG: &str = "it does not begin like the log of a store";

/// Size of the part of the front that stays the same for a run.
pub(super) const HEADER: usize = 32;

const SLOT: usize = 24;

/// Offset of the first record.
pub(super) const FRONT: usize = HEADER + 2 * SLOT;

/// Size of the header of a record.
pub(super) const RECORD: usize = 12;

/// Maximum size of a payload.
pub(super) const MAX_PAYLOAD: usize = 128 << 20;

/// A random id of one run of the file.
pub(super) type RunId = [u8; 16];

/// The end of a log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Position {
    /// The offset from the start of the file.
    pub(super) length: u64,
    pub(super) records: u64,
    pub(super) chain: u32,
}

impl Position {
    /// Returns the position of the first record of `run`.
    pub(super) fn start(run: &RunId) -> Self {
        Self { length: FRONT as u64, records: 0, chain: crc(0, run) }
    }

    /// Returns the position behind a record at this position.
    pub(super) fn behind(self, payload: usize, chain: u32) -> Self {
        Self { length: self.length + (RECORD + payload) as u64, records: self.records + 1, chain }
    }

    /// Encodes the position for a slot of `run`.
    pub(super) fn slot(self, run: &RunId) -> [u8; SLOT] {
        let mut slot = [0; SLOT];
        slot[..8].copy_from_slice(&self.length.to_le_bytes());
        slot[8..16].copy_from_slice(&self.records.to_le_bytes());
        slot[16..20].copy_from_slice(&self.chain.to_le_bytes());
        let sum = crc(crc(0, run), &slot[..20]);
        slot[20..].copy_from_slice(&sum.to_le_bytes());
        slot
    }

    /// Decodes a slot; `None` if it is damaged.
    fn from_slot(run: &RunId, slot: &[u8]) -> Option<Self> {
        let position =
            Self { length: u64_at(slot, 0), records: u64_at(slot, 8), chain: u32_at(slot, 16) };
        (position.slot(run) == slot && position.length >= FRONT as u64).then_some(position)
    }
}

/// Returns the offset of slot `index`.
pub(super) fn slot_at(index: usize) -> usize {
    HEADER + index * SLOT
}

/// The front of a file, decoded.
pub(super) struct Preamble {
    pub(super) run: RunId,
    slots: [Option<Position>; 2],
}

impl Preamble {
    /// Returns a front for an empty log.
    pub(super) fn fresh(run: &RunId) -> [u8; FRONT] {
        let mut front = [0; FRONT];
        front[..8].copy_from_slice(&MAGIC);
        front[8..12].copy_from_slice(&VERSION.to_le_bytes());
        front[12..28].copy_from_slice(run);
        let sum = crc(0, &front[..28]);
        front[28..32].copy_from_slice(&sum.to_le_bytes());
        let slot = Position::start(run).slot(run);
        front[slot_at(0)..slot_at(1)].copy_from_slice(&slot);
        front[slot_at(1)..].copy_from_slice(&slot);
        front
    }

    /// Decodes `front`. If its header is damaged, fails with the offset and the reason.
    pub(super) fn decode(front: &[u8; FRONT]) -> Result<Self, (usize, String)> {
        if front[..8] != MAGIC {
            return Err((0, NOT_A_LOG.into()));
        }
        let (version, sum) = (u32_at(front, 8), crc(0, &front[..28]));
        if sum != u32_at(front, 28) {
            return Err((
                28,
                format!(
                    "the checksum of its header is {:#010x}, not {sum:#010x}",
                    u32_at(front, 28)
                ),
            ));
        }
        if version != VERSION {
            return Err((
                8,
                format!("it is of version {version}, this library reads version {VERSION}"),
            ));
        }
        let mut run = [0; 16];
        run.copy_from_slice(&front[12..28]);
        let slots = [0, 1].map(|index| Position::from_slot(&run, &front[slot_at(index)..][..SLOT]));
        Ok(Self { run, slots })
    }

    /// Returns true if both slots are intact.
    pub(super) fn is_whole(&self) -> bool {
        self.slots.iter().all(Option::is_some)
    }

    /// Returns the slot with the later position, and that position; `None` if both slots are
    /// damaged.
    pub(super) fn newest(&self) -> Option<(usize, Position)> {
        let slots = self
            .slots
            .iter()
            .enumerate()
            .filter_map(|(index, slot)| slot.map(|position| (index, position)));
        slots.max_by_key(|(_, position)| position.records)
    }
}

/// The header of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RecordHeader {
    pub(super) length: u32,
    pub(super) chain: u32,
}

impl RecordHeader {
    pub(super) fn of(payload: &[u8], chain: u32) -> Self {
        Self { length: payload.len() as u32, chain: crc(chain, payload) }
    }

    pub(super) fn encode(self) -> [u8; RECORD] {
        let mut bytes = [0; RECORD];
        bytes[..4].copy_from_slice(&self.length.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.chain.to_le_bytes());
        let sum = crc(0, &bytes[..8]);
        bytes[8..].copy_from_slice(&sum.to_le_bytes());
        bytes
    }

    /// Decodes a header; `None` if it is damaged or its length is out of bounds.
    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let header = Self { length: u32_at(bytes, 0), chain: u32_at(bytes, 4) };
        let fits = (1..=MAX_PAYLOAD).contains(&(header.length as usize));
        (header.encode() == bytes && fits).then_some(header)
    }
}

/// Returns the checksum of `bytes`, continued from `before`.
fn crc(before: u32, bytes: &[u8]) -> u32 {
    // A fuzzer cannot guess checksums, and should reach the code behind them.
    if cfg!(fuzzing) {
        return 0;
    }
    let mut hasher = Hasher::new_with_initial(before);
    hasher.update(bytes);
    hasher.finalize()
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    let mut array = [0; 4];
    array.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(array)
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    let mut array = [0; 8];
    array.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(array)
}

#[cfg(test)]
mod tests {
    use super::*;

    const RUN: RunId = [7; 16];

    #[test]
    fn any_flipped_byte_of_a_front_is_noticed_where_it_stands() {
        let mut front = Preamble::fresh(&RUN);
        let next = Position::start(&RUN).behind(10, 3);
        front[slot_at(1)..].copy_from_slice(&next.slot(&RUN));
        assert!(matches!(
            Preamble::decode(&front),
            Ok(whole) if whole.is_whole() && whole.newest() == Some((1, next))
        ));
        for at in 0..FRONT {
            for flip in 1..=255 {
                let mut damaged = front;
                damaged[at] ^= flip;
                match Preamble::decode(&damaged) {
                    Err(_) => assert!(at < HEADER),
                    Ok(read) => {
                        assert!(at >= HEADER && !read.is_whole());
                        let other =
                            if at < slot_at(1) { (1, next) } else { (0, Position::start(&RUN)) };
                        assert_eq!(read.newest(), Some(other));
                    }
                }
            }
        }
    }

    #[test]
    fn slots_of_another_run_do_not_count() {
        let mut front = Preamble::fresh(&RUN);
        let unidentified = Position { length: 1000, records: 9, chain: 1 };
        front[slot_at(1)..].copy_from_slice(&unidentified.slot(&[8; 16]));
        assert!(matches!(
            Preamble::decode(&front),
            Ok(read) if read.newest() == Some((0, Position::start(&RUN)))
        ));
    }

    #[test]
    fn record_headers_come_back_unless_they_are_damaged_or_too_long() {
        let header = RecordHeader::of(b"payload", 5);
        assert_eq!(RecordHeader::decode(&header.encode()), Some(header));
        for at in 0..RECORD {
            let mut bytes = header.encode();
            bytes[at] ^= 1;
            assert_eq!(RecordHeader::decode(&bytes), None);
        }
        for length in [0, MAX_PAYLOAD as u32 + 1, u32::MAX] {
            assert_eq!(RecordHeader::decode(&RecordHeader { length, ..header }.encode()), None);
        }
    }
}
