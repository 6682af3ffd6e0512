//! Frames: what ranks tell each other about messages.

use crate::sync::ring::UNIT;

/// Meaning of a frame.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Nothing: skip to the start of the ring.
    Padding = 0,
    /// A whole message follows.
    Eager = 1,
    /// A message waits at `value`, an address in the sender's memory.
    Offer = 2,
    /// Send the offered message, of `bytes` bytes, in frames from offset `value` on.
    Request = 3,
    /// The bytes at offset `value` of an asked-for message follow.
    Data = 4,
    /// The offered message was read; its memory is the sender's again.
    Taken = 5,
}

/// The head of a frame. `id` numbers the messages of a sender.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Frame {
    pub kind: Kind,
    pub tag: i32,
    pub id: u64,
    /// Bytes of the whole message.
    pub bytes: u64,
    /// Address or offset, see [`Kind`].
    pub value: u64,
}

/// Longest message that travels unasked, in one frame. Several fit a ring.
pub(super) const EAGER_BYTES: usize = 64 << 10;
/// Most payload of a message in one frame that its sender shows at once: its receiver copies one part while the next is written.
const PART_BYTES: usize = 16 << 10;
/// Most payload of a frame of a longer message: one is read while the next is written.
const DATA_BYTES: usize = 32 << 10;

impl Frame {
    pub(super) const fn control(kind: Kind, id: u64, value: u64) -> Self {
        Self { kind, tag: 0, id, bytes: 0, value }
    }

    /// Bytes that follow the head.
    pub(super) fn payload(&self) -> usize {
        match self.kind {
            Kind::Eager => self.bytes as usize,
            Kind::Data => (self.bytes - self.value).min(DATA_BYTES as u64) as usize,
            Kind::Padding | Kind::Offer | Kind::Request | Kind::Taken => 0,
        }
    }

    /// Most payload that is written before the receiver is shown it.
    pub(super) fn part_bytes(&self) -> usize {
        match self.kind {
            Kind::Eager => PART_BYTES,
            Kind::Padding | Kind::Offer | Kind::Request | Kind::Data | Kind::Taken => DATA_BYTES,
        }
    }

    /// Whether it is the first frame of a message.
    pub(super) fn begins_message(&self) -> bool {
        match self.kind {
            Kind::Eager | Kind::Offer => true,
            Kind::Padding | Kind::Request | Kind::Data | Kind::Taken => false,
        }
    }

    /// Bytes in the ring.
    pub(super) fn footprint(&self) -> u64 {
        UNIT + (self.payload() as u64).next_multiple_of(UNIT)
    }

    pub(super) fn encode(&self) -> [u64; 4] {
        [self.kind as u64 | u64::from(self.tag as u32) << 32, self.id, self.bytes, self.value]
    }

    /// `None` for words that no sender writes.
    pub(super) fn decode(words: [u64; 4]) -> Option<Self> {
        const KINDS: [Kind; 6] = [Kind::Padding, Kind::Eager, Kind::Offer, Kind::Request, Kind::Data, Kind::Taken];
        let kind = *KINDS.get(usize::from(words[0] as u8))?;
        let frame = Self { kind, tag: (words[0] >> 32) as i32, id: words[1], bytes: words[2], value: words[3] };
        let sound = match kind {
            Kind::Eager => frame.bytes <= EAGER_BYTES as u64,
            Kind::Data => frame.value < frame.bytes,
            Kind::Padding | Kind::Offer | Kind::Request | Kind::Taken => true,
        };
        sound.then_some(frame)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_round_trip_and_nonsense_is_refused() {
        let frame = Frame { kind: Kind::Eager, tag: -7, id: 3, bytes: 33, value: 0 };
        assert_eq!(Frame::decode(frame.encode()), Some(frame));
        assert_eq!((frame.payload(), frame.footprint()), (33, 96));
        assert_eq!(Frame::decode([9, 0, 0, 0]), None);
        assert_eq!(Frame::decode(Frame { bytes: 1 << 40, ..frame }.encode()), None);
        assert_eq!(Frame::decode(Frame { bytes: EAGER_BYTES as u64, ..frame }.encode()).map(|frame| frame.payload()), Some(EAGER_BYTES));
        assert_eq!(Frame { kind: Kind::Data, value: 30, ..frame }.payload(), 3);
        for (value, sound) in [(32, true), (33, false), (34, false)] {
            let data = Frame { kind: Kind::Data, value, ..frame };
            assert_eq!(Frame::decode(data.encode()), sound.then_some(data));
        }
        let long = Frame { kind: Kind::Data, bytes: 1 << 40, value: 0, ..frame };
        assert_eq!((long.payload(), long.footprint()), (DATA_BYTES, UNIT + DATA_BYTES as u64));
    }
}
