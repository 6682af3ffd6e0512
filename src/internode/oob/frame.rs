//! Frames of out-of-band messages: a length, a body, and a MAC that proves that the other end of
//! this connection sent it.

use super::CallPosition;
use super::progress::PhaseReport;
use crate::error::{Error, ErrorKind, Result};
use crate::internode::header::CallHeader;
use crate::rank::Rank;
use crate::store::tcp::proof::{HELLO, OPENING};
use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

/// A hub's random number, which every rank that connects to it must know.
pub(super) type Token = [u8; 16];

/// Size of the length that precedes the body.
const LENGTH: usize = 4;
/// Size of the MAC behind the body.
const SEAL: usize = 32;
/// Maximum length of a message's text: the length of a failure in the control block.
const TEXT: usize = 3072;
/// Maximum number of headers in one message.
pub(super) const HEADERS: usize = TEXT / CallHeader::BYTES;
/// Maximum length of a body: of a rejection, whose kind, rank and position precede its text.
const BODY: usize = 1 + 4 + 8 + 4 + 8 + TEXT;

/// A message between two ranks of a group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum OobMessage {
    /// The first message of a connection: the rank that connected.
    Hello(Rank),
    /// A heartbeat.
    Heartbeat,
    /// The failure of the sender's node.
    Failed(Error),
    /// A rank has left the group, normally or with an error; the text is a predicate without its
    /// subject.
    Left(Rank, String),
    /// A rank has rejected a call, with the reason.
    Rejected(Rank, CallPosition, String),
    /// A rank makes the call of this number, after any rejections.
    Resumed(Rank, u64),
    /// A rank has waited for long in a call.
    Waiting(Rank, PhaseReport),
    /// A rank has launched these calls on CUDA tensors, at most [`HEADERS`].
    Launched(Rank, Vec<CallHeader>),
}

/// Returns the prefix of `text` that fits.
fn cut(text: &str) -> &[u8] {
    let mut bytes = text.len().min(TEXT);
    while !text.is_char_boundary(bytes) {
        bytes -= 1;
    }
    &text.as_bytes()[..bytes]
}

impl OobMessage {
    fn encode(&self) -> Vec<u8> {
        match self {
            Self::Hello(rank) => [&[1][..], &rank.0.to_le_bytes()].concat(),
            Self::Heartbeat => vec![2],
            Self::Failed(error) => [&[3, error.kind as u8], cut(&error.message)].concat(),
            Self::Left(rank, text) => [&[4][..], &rank.0.to_le_bytes(), cut(text)].concat(),
            Self::Rejected(rank, CallPosition { calls, times, on_host }, text) => [
                &[5][..],
                &rank.0.to_le_bytes(),
                &calls.to_le_bytes(),
                &times.to_le_bytes(),
                &on_host.to_le_bytes(),
                cut(text),
            ]
            .concat(),
            Self::Resumed(rank, call) => {
                [&[6][..], &rank.0.to_le_bytes(), &call.to_le_bytes()].concat()
            }
            Self::Waiting(rank, PhaseReport { number, call, on_rail }) => [
                &[8][..],
                &rank.0.to_le_bytes(),
                &number.to_le_bytes(),
                &call.to_le_bytes(),
                &[u8::from(*on_rail)],
            ]
            .concat(),
            Self::Launched(rank, headers) => {
                let headers = headers.iter().flat_map(|header| header.to_bytes(None));
                [7].into_iter().chain(rank.0.to_le_bytes()).chain(headers).collect()
            }
        }
    }

    fn decode(body: &[u8]) -> Option<Self> {
        let (&kind, rest) = body.split_first()?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        match kind {
            1 => Some(Self::Hello(Rank(u32::from_le_bytes(rest.try_into().ok()?)))),
            2 => rest.is_empty().then_some(Self::Heartbeat),
            3 => {
                let (&code, message) = rest.split_first()?;
                let kind = ErrorKind::from_peer(code).unwrap_or(ErrorKind::Peer);
                Some(Self::Failed(Error { kind, message: text(message) }))
            }
            4 => {
                let (rank, message) = rest.split_first_chunk()?;
                Some(Self::Left(Rank(u32::from_le_bytes(*rank)), text(message)))
            }
            5 | 6 => {
                let (rank, rest) = rest.split_first_chunk()?;
                let (call, message) = rest.split_first_chunk()?;
                let (rank, call) = (Rank(u32::from_le_bytes(*rank)), u64::from_le_bytes(*call));
                if kind == 5 {
                    let (times, message) = message.split_first_chunk()?;
                    let (on_host, message) = message.split_first_chunk()?;
                    let place = CallPosition {
                        calls: call,
                        times: u32::from_le_bytes(*times),
                        on_host: u64::from_le_bytes(*on_host),
                    };
                    Some(Self::Rejected(rank, place, text(message)))
                } else {
                    message.is_empty().then_some(Self::Resumed(rank, call))
                }
            }
            7 => {
                let (rank, rest) = rest.split_first_chunk()?;
                let (headers, []) = rest.as_chunks::<{ CallHeader::BYTES }>() else { return None };
                let headers = headers.iter().map(|header| CallHeader::from_bytes(header)).collect();
                Some(Self::Launched(Rank(u32::from_le_bytes(*rank)), headers))
            }
            8 => {
                let (rank, rest) = rest.split_first_chunk()?;
                let (number, rest) = rest.split_first_chunk()?;
                let (call, [on_rail @ (0 | 1)]) = rest.split_first_chunk()? else { return None };
                let (number, call) = (u64::from_le_bytes(*number), u64::from_le_bytes(*call));
                Some(Self::Waiting(
                    Rank(u32::from_le_bytes(*rank)),
                    PhaseReport { number, call, on_rail: *on_rail == 1 },
                ))
            }
            _ => None,
        }
    }
}

/// One end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ConnectionEnd {
    /// The end that connected.
    Leader,
    /// The hub's end.
    Hub,
}

/// The key of one connection, and the number of frames sent and received. Both enter the MAC, so a
/// frame cannot be replayed, reordered or moved to another connection.
pub(super) struct Sealer {
    key: [u8; 32],
    end: ConnectionEnd,
    sent: u64,
    received: u64,
}

fn mac(key: &[u8], parts: &[&[u8]]) -> Hmac<Sha256> {
    // HMAC takes keys of any length.
    let keyed = Hmac::<Sha256>::new_from_slice(key);
    let mut mac = keyed.unwrap_or_else(|_| unreachable!("a key of any length will do"));
    parts.iter().for_each(|part| mac.update(part));
    mac
}

impl Sealer {
    /// Creates the sealer of the connection that starts with `opening` and `hello`, whose ends have
    /// proved that they know `token`.
    pub(super) fn new(
        token: &Token,
        opening: &[u8; OPENING],
        hello: &[u8; HELLO],
        end: ConnectionEnd,
    ) -> Self {
        let key =
            mac(token, &[b"symm news connection", opening, hello]).finalize().into_bytes().into();
        Self { key, end, sent: 0, received: 0 }
    }

    fn mac(&self, by: ConnectionEnd, number: u64, body: &[u8]) -> Hmac<Sha256> {
        mac(&self.key, &[&[by as u8], &number.to_le_bytes(), body])
    }

    /// Returns the frame of `message`. Frames must be sent in the order in which they were created.
    pub(super) fn seal(&mut self, message: &OobMessage) -> Vec<u8> {
        let body = message.encode();
        debug_assert!(body.len() <= BODY, "the other end rejects {} bytes", body.len());
        let seal = self.mac(self.end, self.sent, &body).finalize().into_bytes();
        self.sent += 1;
        [&(body.len() as u32).to_le_bytes()[..], &body, &seal].concat()
    }

    /// Removes the first frame from `input`; returns `None` if it has not arrived completely.
    ///
    /// # Errors
    /// `Network` if the MAC is wrong: the other end did not create the frame, or not at this
    /// position. The body is decoded only after its MAC has been verified.
    pub(super) fn open(&mut self, input: &mut Vec<u8>) -> Result<Option<OobMessage>> {
        let Some((length, _)) = input.split_first_chunk() else { return Ok(None) };
        let length = u32::from_le_bytes(*length) as usize;
        if length > BODY {
            return Err(Error::network(format!("a frame of {length} bytes")));
        }
        let Some(frame) = input.get(LENGTH..LENGTH + length + SEAL) else { return Ok(None) };
        let (body, seal) = frame.split_at(length);
        let by =
            if self.end == ConnectionEnd::Hub { ConnectionEnd::Leader } else { ConnectionEnd::Hub };
        if self.mac(by, self.received, body).verify_slice(seal).is_err() {
            return Err(Error::network("a frame with a wrong seal"));
        }
        let message =
            OobMessage::decode(body).ok_or_else(|| Error::network("a frame of an unknown kind"))?;
        self.received += 1;
        input.drain(..LENGTH + length + SEAL);
        Ok(Some(message))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::coll::call::CallSpec;

    fn ends() -> (Sealer, Sealer) {
        let end = |end| Sealer::new(&[7; 16], &[1; OPENING], &[2; HELLO], end);
        (end(ConnectionEnd::Leader), end(ConnectionEnd::Hub))
    }

    #[test]
    fn messages_come_back_in_their_order_and_in_no_other() {
        let (mut caller, mut hub) = ends();
        let long = "ü".repeat(TEXT);
        let messages = [
            OobMessage::Hello(Rank(3)),
            OobMessage::Heartbeat,
            OobMessage::Failed(Error::mismatch("ranks disagree")),
            OobMessage::Left(Rank(2), "left the group".into()),
            OobMessage::Rejected(
                Rank(1),
                CallPosition { calls: 1 << 40, times: 3, on_host: 1 << 39 },
                "x".repeat(TEXT),
            ),
            OobMessage::Resumed(Rank(1), 7),
            OobMessage::Waiting(Rank(2), PhaseReport { number: 3, call: 1 << 33, on_rail: true }),
            OobMessage::Launched(
                Rank(1),
                (1..=HEADERS as u64)
                    .map(|number| CallHeader::of(&CallSpec::barrier(None), number))
                    .collect(),
            ),
        ];
        let frames: Vec<Vec<u8>> = messages.iter().map(|message| caller.seal(message)).collect();
        let mut input = frames.concat();
        let whole = input.clone();
        for (message, frame) in messages.iter().zip(&frames) {
            let mut part = input[..frame.len() - 1].to_vec();
            assert_eq!(hub.open(&mut part), Ok(None));
            assert_eq!(hub.open(&mut input).as_ref(), Ok(&Some(message.clone())));
        }
        assert_eq!(hub.open(&mut input), Ok(None));
        assert!(hub.open(&mut whole.clone()).is_err(), "no frame twice");
        let back = hub.seal(&OobMessage::Failed(Error::aborted(long)));
        assert!(hub.open(&mut back.clone()).is_err(), "none of one's own");
        let Ok(Some(OobMessage::Failed(error))) = caller.open(&mut back.clone()) else {
            panic!("comes back")
        };
        assert_eq!((error.kind, error.message.len()), (ErrorKind::Peer, TEXT));
    }

    #[test]
    fn the_longest_message_of_every_kind_comes_back() {
        let (rank, text) = (Rank(u32::MAX), "x".repeat(TEXT));
        let longest = [
            OobMessage::Hello(rank),
            OobMessage::Heartbeat,
            OobMessage::Failed(Error::mismatch(text.clone())),
            OobMessage::Left(rank, text.clone()),
            OobMessage::Rejected(
                rank,
                CallPosition { calls: u64::MAX, times: u32::MAX, on_host: u64::MAX },
                text,
            ),
            OobMessage::Resumed(rank, u64::MAX),
            OobMessage::Launched(
                rank,
                vec![CallHeader::of(&CallSpec::barrier(None), u64::MAX); HEADERS],
            ),
            OobMessage::Waiting(
                rank,
                PhaseReport { number: u64::MAX, call: u64::MAX, on_rail: true },
            ),
        ];
        let kinds: Vec<u8> = longest.iter().map(|message| message.encode()[0]).collect();
        assert_eq!(kinds, Vec::from_iter(1..=8), "one message of each kind");
        assert_eq!(OobMessage::decode(&[9; 64]), None, "a ninth kind is missing above");
        let (mut caller, mut hub) = ends();
        for message in longest {
            let mut frame = caller.seal(&message);
            assert_eq!(hub.open(&mut frame), Ok(Some(message)));
        }
    }

    #[test]
    fn nothing_else_is_taken() {
        let (mut caller, mut hub) = ends();
        let good = caller.seal(&OobMessage::Hello(Rank(1)));
        for at in 0..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 0x40;
            // If the changed byte makes the length longer, the frame counts as incomplete instead.
            assert!(hub.open(&mut bad).map_or(true, |message| message.is_none()), "byte {at}");
        }
        assert!(hub.open(&mut u32::MAX.to_le_bytes().to_vec()).is_err());
        let mut other = Sealer::new(&[8; 16], &[1; OPENING], &[2; HELLO], ConnectionEnd::Leader);
        assert!(hub.open(&mut other.seal(&OobMessage::Heartbeat)).is_err());
        assert_eq!(hub.open(&mut good.clone()), Ok(Some(OobMessage::Hello(Rank(1)))));
        for body in [
            &[][..],
            &[0],
            &[1],
            &[1, 0, 0, 0],
            &[1, 0, 0, 0, 0, 0],
            &[2, 0],
            &[3],
            &[4, 0, 0, 0],
            &[5],
            &[5, 0, 0, 0, 0, 1],
            &[6, 0, 0, 0, 0],
            &[7],
            &[8],
        ] {
            assert_eq!(OobMessage::decode(body), None, "{body:?}");
        }
    }
}
