//! Frame: what one rank says to another between hosts, with a short message in it. None is longer than its reader has room for.

use super::links::Traffic;
use crate::messages::Message;

/// Kind of a frame.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// A whole message of up to [`SHORT`] bytes.
    Eager = 1,
    /// A longer message can be had; its first `value` bytes follow in frames.
    Offer = 2,
    /// The receiver has room for the piece of an offered message that begins at `value`.
    Request = 3,
    /// That piece.
    Piece = 4,
    /// Nothing but what the receiver has read.
    Credit = 5,
    /// The sender leaves once it hears that this was read.
    Bye = 6,
    /// The sender has refused a message of its own, for the reason that comes with the frame; `value` says which: [`REFUSED_SEND`] or
    /// [`REFUSED_RECV`].
    Refused = 7,
    /// A piece that nobody has asked for, of the message that was offered before; it begins at `value`.
    Start = 8,
    /// The sender's message waits for the call that its peer has refused; `value` is as in the refusal. The peer fails the group if it has
    /// made no call since.
    Waits = 9,
}

/// A send was refused, for whose message the other may wait.
const REFUSED_SEND: u64 = 1;
/// A receive was refused, which the other's message may wait for.
const REFUSED_RECV: u64 = 2;

/// Refusal of a message.
#[derive(Clone)]
pub(super) struct Refusal {
    /// Whether it was a send.
    pub(super) send: bool,
    pub(super) tag: i32,
    pub(super) why: String,
}

impl Refusal {
    /// What `frame` tells, with its text.
    pub(super) fn of(frame: Frame, text: &[u8]) -> Self {
        Self { send: frame.value == REFUSED_SEND, tag: frame.tag, why: String::from_utf8_lossy(text).into_owned() }
    }

    /// The frame by which the peer's message `open` asks whether the refusal still stands.
    pub(super) fn asked(&self, open: &Message) -> Frame {
        let (value, bytes) = (self.value(), open.span.bytes as u64);
        Frame { dtype: open.dtype as u8, tag: self.tag, bytes, value, ..Frame::bare(Kind::Waits) }
    }

    fn value(&self) -> u64 {
        if self.send { REFUSED_SEND } else { REFUSED_RECV }
    }

    /// True if `frame` asks for this refusal.
    pub(super) fn is_asked(&self, frame: &Frame) -> bool {
        (frame.value, frame.tag) == (self.value(), self.tag)
    }

    /// The frame that tells it, and as much of the reason as fits.
    pub(super) fn told(&self) -> (Frame, &[u8]) {
        let text = &self.why.as_bytes()[..self.why.len().min(TEXT)];
        (Frame { tag: self.tag, bytes: text.len() as u64, value: self.value(), ..Frame::bare(Kind::Refused) }, text)
    }
}

/// Head of a frame. What follows in it is a short message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Frame {
    pub(super) kind: Kind,
    /// torch's code of the element type.
    pub(super) dtype: u8,
    pub(super) tag: i32,
    /// Number of the message, counted by its sender.
    pub(super) id: u64,
    /// Length of the message.
    pub(super) bytes: u64,
    /// Offset in it.
    pub(super) value: u64,
    /// Frames that this rank has read from the other.
    pub(super) read: u64,
    /// Bytes of short messages of the other that have found their receives here.
    pub(super) matched: u64,
}

/// Length of a frame's head.
pub(super) const HEAD: usize = 48;
/// Longest message that is sent before anybody asks for it: in a frame. Asking takes a round trip, and two more threads on either side.
pub(super) const SHORT: usize = 256 << 10;
/// Length of the longest frame.
pub(super) const LONGEST: usize = HEAD + SHORT;
/// Longest text of a refusal.
const TEXT: usize = 976;
/// Length of a piece of a long message; the last one may be shorter. While one is copied another is on the wire.
pub(super) const PIECE: usize = 128 << 10;

/// Most bytes of a long message that are on their way before its receiver answers.
const UNASKED: usize = 1 << 20;

impl Frame {
    /// A frame of no message.
    pub(super) const fn bare(kind: Kind) -> Self {
        Self { kind, dtype: 0, tag: 0, id: 0, bytes: 0, value: 0, read: 0, matched: 0 }
    }

    /// The head of the frame.
    pub(super) fn encode(&self) -> [u8; HEAD] {
        let mut bytes = [0; HEAD];
        bytes[0] = self.kind as u8;
        bytes[1] = self.dtype;
        bytes[4..8].copy_from_slice(&self.tag.to_le_bytes());
        let words = [self.id, self.bytes, self.value, self.read, self.matched];
        bytes[8..].chunks_exact_mut(8).zip(words).for_each(|(to, word)| to.copy_from_slice(&word.to_le_bytes()));
        bytes
    }

    /// The head of a frame; `None` if it makes no sense.
    pub(super) fn decode(bytes: &[u8; HEAD]) -> Option<Self> {
        let kind = [Kind::Eager, Kind::Offer, Kind::Request, Kind::Piece, Kind::Credit, Kind::Bye, Kind::Refused, Kind::Start, Kind::Waits];
        let kind = kind.into_iter().find(|kind| *kind as u8 == bytes[0])?;
        let word = |place: usize| Some(u64::from_le_bytes(bytes[8 + 8 * place..16 + 8 * place].try_into().ok()?));
        let frame = Self {
            kind,
            dtype: bytes[1],
            tag: i32::from_le_bytes(bytes[4..8].try_into().ok()?),
            id: word(0)?,
            bytes: word(1)?,
            value: word(2)?,
            read: word(3)?,
            matched: word(4)?,
        };
        let sensible = match kind {
            Kind::Eager => frame.bytes <= SHORT as u64,
            Kind::Offer => frame.value <= unasked(frame.bytes, usize::MAX) as u64 && frame.value.is_multiple_of(PIECE as u64),
            Kind::Start => frame.value < unasked(frame.bytes, usize::MAX) as u64 && frame.value.is_multiple_of(PIECE as u64),
            Kind::Request | Kind::Piece => frame.value < frame.bytes && frame.value.is_multiple_of(PIECE as u64),
            Kind::Credit | Kind::Bye => true,
            Kind::Refused => frame.bytes <= TEXT as u64 && [REFUSED_SEND, REFUSED_RECV].contains(&frame.value),
            Kind::Waits => [REFUSED_SEND, REFUSED_RECV].contains(&frame.value),
        };
        sensible.then_some(frame)
    }

    /// Length of what comes with the frame.
    pub(super) fn payload(&self) -> usize {
        match self.kind {
            Kind::Eager | Kind::Refused => self.bytes as usize,
            Kind::Start | Kind::Piece => piece(self.bytes, self.value),
            Kind::Offer | Kind::Request | Kind::Credit | Kind::Bye | Kind::Waits => 0,
        }
    }

    /// Class of traffic by which that comes.
    pub(super) fn traffic(&self) -> Traffic {
        match self.kind {
            Kind::Piece => Traffic::Piece,
            Kind::Eager | Kind::Offer | Kind::Request | Kind::Credit | Kind::Bye | Kind::Refused | Kind::Start | Kind::Waits => {
                Traffic::Frame
            }
        }
    }
}

/// Length of the piece at `offset` of a message of `bytes`.
pub(super) fn piece(bytes: u64, offset: u64) -> usize {
    bytes.saturating_sub(offset).min(PIECE as u64) as usize
}

/// Bytes of a message of `bytes` that are sent unasked, in pieces, of which the receiver has room for `pieces`. The last one is asked for.
pub(super) fn unasked(bytes: u64, pieces: usize) -> usize {
    let most = (bytes.saturating_sub(1) / PIECE as u64).min((UNASKED / PIECE) as u64) as usize;
    most.min(pieces) * PIECE
}

#[cfg(test)]
mod tests {
    use super::*;

    const _: () = assert!(PIECE <= SHORT, "a piece fits in a frame");

    #[test]
    fn all_but_the_last_piece_are_sent_unasked_up_to_a_limit_and_as_far_as_there_is_room() {
        let at = |pieces: usize| (pieces * PIECE) as u64;
        assert_eq!([0, 1, at(1), at(1) + 1, at(3)].map(|bytes| unasked(bytes, 99) / PIECE), [0, 0, 0, 1, 2]);
        assert_eq!((unasked(at(1000), 99), unasked(at(1000), 3), unasked(at(1000), 0)), (UNASKED, 3 * PIECE, 0));
    }

    #[test]
    fn frames_come_back_as_they_were_and_nonsense_does_not() {
        let frame = Frame { kind: Kind::Eager, dtype: 6, tag: -7, id: 1 << 40, bytes: 3, value: 0, read: 9, matched: u64::MAX };
        assert_eq!((Frame::decode(&frame.encode()), frame.payload(), frame.traffic()), (Some(frame), 3, Traffic::Frame));
        let piece = Frame { kind: Kind::Piece, bytes: PIECE as u64 + 5, value: PIECE as u64, ..frame };
        assert_eq!((piece.payload(), piece.traffic()), (5, Traffic::Piece));
        let start = Frame { kind: Kind::Start, value: 0, ..piece };
        assert_eq!((Frame::decode(&start.encode()), start.payload(), start.traffic()), (Some(start), PIECE, Traffic::Frame));
        let offer = Frame { kind: Kind::Offer, ..piece };
        assert_eq!((Frame::decode(&offer.encode()), offer.payload()), (Some(offer), 0), "the first piece follows");
        for wrong in [
            Frame { bytes: SHORT as u64 + 1, ..frame },
            Frame { value: 1, ..piece },
            Frame { value: 2 * PIECE as u64, ..piece },
            Frame { value: PIECE as u64, ..start },
            Frame { value: 2 * PIECE as u64, ..offer },
        ] {
            assert_eq!(Frame::decode(&wrong.encode()), None, "{wrong:?}");
        }
        assert_eq!(Frame::decode(&[0; HEAD]), None);
    }
}
