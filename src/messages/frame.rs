//! Frames: the units in which ranks exchange messages. All links use the same frames, each within
//! its own limits.

use crate::sync::ring::UNIT;

/// The meaning of a frame.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FrameKind {
    /// Padding: continue at the start of the ring.
    Padding = 0,
    /// A whole message follows.
    Eager = 1,
    /// A longer message is offered: in a ring, `value` is its address in the sender's memory; on a
    /// wire, its first `value` bytes follow in frames.
    Rts = 2,
    /// A request for `bytes` bytes of the offered message from offset `value` on: the rest, or as
    /// many as one frame carries.
    Cts = 3,
    /// The bytes at offset `value` of a requested message follow.
    Data = 4,
    /// The offered message was read; its sender may reuse the memory.
    Taken = 5,
    /// The bytes at offset `value` of the last offered message follow without a request.
    Start = 6,
    /// Only the counters of a wire.
    Credit = 7,
    /// The sender leaves once it knows that this frame was read.
    Bye = 8,
    /// The sender has rejected a message of its own, for the reason that follows; `value` is
    /// [`REJECTED_SEND`] or [`REJECTED_RECV`].
    Rejected = 9,
    /// A message of this frame's sender waits for the message that the receiver has rejected;
    /// `value` is as in the rejection. The receiver fails the group if it has made no call since.
    Waits = 10,
}

/// A send was rejected; a receive of the peer may wait for its message.
pub(super) const REJECTED_SEND: u64 = 1;
/// A receive was rejected; a send of the peer may wait for it.
pub(super) const REJECTED_RECV: u64 = 2;

/// The header of a frame. `id` numbers the messages of a sender.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Frame {
    pub kind: FrameKind,
    /// torch's code of the element type, for errors about a mismatch.
    pub dtype: u8,
    pub tag: i32,
    pub id: u64,
    /// Length of the whole message in bytes.
    pub bytes: u64,
    /// An address or an offset; see [`FrameKind`].
    pub value: u64,
}

/// The lengths that a link uses.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct LinkLimits {
    /// Maximum length of an eager message, which travels in one frame without a request.
    pub eager: usize,
    /// Maximum payload of a frame of a longer message.
    pub data: usize,
    /// Number of bytes that one request asks for; on a ring, all missing bytes.
    pub request: usize,
    /// Maximum number of bytes of a longer message that follow its offer without a request.
    pub eager_prefix: usize,
    /// True if a receiver may read the sender's memory, and then acknowledges.
    pub direct: bool,
}

/// The limits of a ring. Several of the longest frames fit into it, and one part of a long message
/// is read while the next is written.
pub(super) const RING: LinkLimits = LinkLimits {
    eager: 64 << 10,
    data: 32 << 10,
    request: usize::MAX,
    eager_prefix: 0,
    direct: true,
};
/// The limits of a wire. A request costs a round trip and wakes a thread on each side, so more
/// bytes than on a ring are sent without a request. While one chunk is copied, another one is on
/// the network.
pub(super) const WIRE: LinkLimits = LinkLimits {
    eager: 256 << 10,
    data: 128 << 10,
    request: 128 << 10,
    eager_prefix: 1 << 20,
    direct: false,
};

/// Maximum length of the text of a rejection.
pub(super) const MAX_TEXT_BYTES: usize = 976;
/// Number of payload bytes of an eager message after which its sender publishes them, so that the
/// receiver copies one part while the sender writes the next.
const PART_BYTES: usize = 16 << 10;

impl LinkLimits {
    /// Returns how many bytes of a message of `bytes` bytes follow its offer, if its receiver has
    /// space for `pieces` frames. The last chunk is always requested.
    pub(super) fn eager_prefix(&self, bytes: u64, pieces: usize) -> usize {
        let most = (bytes.saturating_sub(1) / self.data as u64)
            .min((self.eager_prefix / self.data) as u64) as usize;
        most.min(pieces) * self.data
    }
}

impl Frame {
    /// Returns a frame that belongs to no message.
    pub(super) const fn bare(kind: FrameKind) -> Self {
        Self { kind, dtype: 0, tag: 0, id: 0, bytes: 0, value: 0 }
    }

    pub(super) const fn control(kind: FrameKind, id: u64, value: u64) -> Self {
        Self { id, value, ..Self::bare(kind) }
    }

    /// Returns how many bytes follow the header on a link of these limits.
    pub(super) fn payload(&self, limits: &LinkLimits) -> usize {
        match self.kind {
            FrameKind::Eager | FrameKind::Rejected => self.bytes as usize,
            FrameKind::Data | FrameKind::Start => {
                self.bytes.saturating_sub(self.value).min(limits.data as u64) as usize
            }
            FrameKind::Padding
            | FrameKind::Rts
            | FrameKind::Cts
            | FrameKind::Taken
            | FrameKind::Credit
            | FrameKind::Bye
            | FrameKind::Waits => 0,
        }
    }

    /// Returns how much payload is written into a ring before it is published to the receiver.
    pub(super) fn part_bytes(&self) -> usize {
        if self.kind == FrameKind::Eager { PART_BYTES } else { RING.data }
    }

    /// Returns true for the first frame of a message.
    pub(super) fn begins_message(&self) -> bool {
        matches!(self.kind, FrameKind::Eager | FrameKind::Rts)
    }

    /// Returns the number of bytes that the frame occupies in a ring.
    pub(super) fn footprint(&self) -> u64 {
        UNIT + (self.payload(&RING) as u64).next_multiple_of(UNIT)
    }

    pub(super) fn encode(&self) -> [u64; 4] {
        [
            self.kind as u64 | u64::from(self.dtype) << 8 | u64::from(self.tag as u32) << 32,
            self.id,
            self.bytes,
            self.value,
        ]
    }

    /// Decodes a header. Returns `None` for words that no sender writes on a link of these limits.
    pub(super) fn decode(words: [u64; 4], limits: &LinkLimits) -> Option<Self> {
        const KINDS: [FrameKind; 11] = [
            FrameKind::Padding,
            FrameKind::Eager,
            FrameKind::Rts,
            FrameKind::Cts,
            FrameKind::Data,
            FrameKind::Taken,
            FrameKind::Start,
            FrameKind::Credit,
            FrameKind::Bye,
            FrameKind::Rejected,
            FrameKind::Waits,
        ];
        let kind = *KINDS.get(usize::from(words[0] as u8))?;
        let (dtype, tag) = ((words[0] >> 8) as u8, (words[0] >> 32) as i32);
        let frame = Self { kind, dtype, tag, id: words[1], bytes: words[2], value: words[3] };
        let (ring, piece) =
            (limits.direct, limits.direct || frame.value.is_multiple_of(limits.data as u64));
        let refusal = [REJECTED_SEND, REJECTED_RECV].contains(&frame.value);
        let unasked = limits.eager_prefix(frame.bytes, usize::MAX) as u64;
        let sound = match kind {
            FrameKind::Padding | FrameKind::Taken => ring,
            FrameKind::Eager => frame.bytes <= limits.eager as u64,
            FrameKind::Rts => ring || (frame.value <= unasked && piece),
            FrameKind::Cts | FrameKind::Data => frame.value < frame.bytes && piece,
            FrameKind::Start => !ring && frame.value < unasked && piece,
            FrameKind::Credit | FrameKind::Bye => !ring,
            FrameKind::Rejected => !ring && frame.bytes <= MAX_TEXT_BYTES as u64 && refusal,
            FrameKind::Waits => !ring && refusal,
        };
        sound.then_some(frame)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const _: () = assert!(WIRE.data <= WIRE.eager, "a piece fits in a frame");

    #[test]
    fn frames_round_trip_and_nonsense_is_refused() {
        let frame = Frame { kind: FrameKind::Eager, dtype: 6, tag: -7, id: 3, bytes: 33, value: 0 };
        let decode = |frame: Frame| Frame::decode(frame.encode(), &RING);
        assert_eq!(decode(frame), Some(frame));
        assert_eq!((frame.payload(&RING), frame.footprint()), (33, 96));
        assert_eq!(Frame::decode([11, 0, 0, 0], &RING), None);
        assert_eq!(decode(Frame { bytes: 1 << 40, ..frame }), None);
        assert_eq!(
            decode(Frame { bytes: RING.eager as u64, ..frame }).map(|frame| frame.payload(&RING)),
            Some(RING.eager)
        );
        assert_eq!(Frame { kind: FrameKind::Data, value: 30, ..frame }.payload(&RING), 3);
        let offer = Frame { kind: FrameKind::Rts, ..frame };
        let answer = Frame::control(FrameKind::Cts, 3, 7);
        assert_eq!((answer.kind, answer.id, answer.value), (FrameKind::Cts, 3, 7));
        assert_eq!([frame, offer, answer].map(|frame| frame.begins_message()), [true, true, false]);
        assert_eq!([frame, offer].map(|frame| frame.part_bytes()), [16 << 10, RING.data]);
        for (value, sound) in [(32, true), (33, false), (34, false)] {
            let data = Frame { kind: FrameKind::Data, value, ..frame };
            assert_eq!(decode(data), sound.then_some(data));
        }
        let long = Frame { kind: FrameKind::Data, bytes: 1 << 40, value: 0, ..frame };
        assert_eq!((long.payload(&RING), long.footprint()), (RING.data, UNIT + RING.data as u64));
        for kind in [
            FrameKind::Start,
            FrameKind::Credit,
            FrameKind::Bye,
            FrameKind::Rejected,
            FrameKind::Waits,
        ] {
            assert_eq!(
                decode(Frame { bytes: 1 << 40, value: REJECTED_SEND, ..Frame::bare(kind) }),
                None,
                "{kind:?} on a ring"
            );
        }
    }

    #[test]
    fn all_but_the_last_piece_are_sent_unasked_up_to_a_limit_and_as_far_as_there_is_room() {
        let at = |pieces: usize| (pieces * WIRE.data) as u64;
        assert_eq!(
            [0, 1, at(1), at(1) + 1, at(3)].map(|bytes| WIRE.eager_prefix(bytes, 99) / WIRE.data),
            [0, 0, 0, 1, 2]
        );
        assert_eq!(
            (
                WIRE.eager_prefix(at(1000), 99),
                WIRE.eager_prefix(at(1000), 3),
                WIRE.eager_prefix(at(1000), 0)
            ),
            (WIRE.eager_prefix, 3 * WIRE.data, 0)
        );
    }

    #[test]
    fn frames_of_a_wire_come_back_as_they_were_and_nonsense_does_not() {
        let decode = |frame: Frame| Frame::decode(frame.encode(), &WIRE);
        let frame =
            Frame { kind: FrameKind::Eager, dtype: 6, tag: -7, id: 1 << 40, bytes: 3, value: 0 };
        assert_eq!((decode(frame), frame.payload(&WIRE)), (Some(frame), 3));
        let piece = Frame {
            kind: FrameKind::Data,
            bytes: WIRE.data as u64 + 5,
            value: WIRE.data as u64,
            ..frame
        };
        assert_eq!((decode(piece), piece.payload(&WIRE)), (Some(piece), 5));
        let start = Frame { kind: FrameKind::Start, value: 0, ..piece };
        assert_eq!((decode(start), start.payload(&WIRE)), (Some(start), WIRE.data));
        let offer = Frame { kind: FrameKind::Rts, ..piece };
        assert_eq!(
            (decode(offer), offer.payload(&WIRE)),
            (Some(offer), 0),
            "the first piece follows"
        );
        let refusal = Frame { kind: FrameKind::Rejected, value: REJECTED_SEND, ..frame };
        assert_eq!((decode(refusal), refusal.payload(&WIRE)), (Some(refusal), 3));
        for wrong in [
            Frame { bytes: MAX_TEXT_BYTES as u64 + 1, ..refusal },
            Frame { value: 0, ..refusal },
            Frame { bytes: WIRE.eager as u64 + 1, ..frame },
            Frame { value: 1, ..piece },
            Frame { value: 2 * WIRE.data as u64, ..piece },
            Frame { value: WIRE.data as u64, ..start },
            Frame { value: 2 * WIRE.data as u64, ..offer },
            Frame { kind: FrameKind::Taken, ..frame },
            Frame::bare(FrameKind::Padding),
            Frame::bare(FrameKind::Waits),
        ] {
            assert_eq!(decode(wrong), None, "{wrong:?}");
        }
    }
}
