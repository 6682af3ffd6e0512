//! The two messages of joining over the socket: `JoinHello` to rank 0, `JoinReply` from it. Pure.

use super::record::PROTOCOL;
use crate::error::{Error, ErrorKind};

const MAGIC: [u8; 4] = *b"symm";

/// Maximum length of the text of a message.
const TEXT: usize = 2048;

/// Maximum length of a message, plus one byte to detect a longer one.
pub(super) const BUFFER: usize = 4 + 16 + 1 + TEXT + 1;

/// The greeting of a rank that connects.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct JoinHello {
    pub(super) rank: u32,
    pub(super) size: u32,
    pub(super) pid: u32,
    pub(super) segment_bytes: u64,
    /// Rank 0's nonce, which only readers of the store know.
    pub(super) token: [u8; 16],
}

impl JoinHello {
    const BYTES: usize = 4 + 4 * 4 + 8 + 16;

    pub(super) fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(Self::BYTES);
        bytes.extend(MAGIC);
        for word in [PROTOCOL, self.rank, self.size, self.pid] {
            bytes.extend(word.to_le_bytes());
        }
        bytes.extend(self.segment_bytes.to_le_bytes());
        bytes.extend(self.token);
        bytes
    }

    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let mut reader = Reader(bytes);
        if bytes.len() != Self::BYTES || reader.take()? != MAGIC || reader.word()? != PROTOCOL {
            return None;
        }
        Some(Self {
            rank: reader.word()?,
            size: reader.word()?,
            pid: reader.word()?,
            segment_bytes: u64::from_le_bytes(reader.take()?),
            token: reader.take()?,
        })
    }
}

/// The answer of rank 0: the memory, whose descriptor is attached, or the reason for the failure.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct JoinReply {
    pub(super) token: [u8; 16],
    pub(super) failure: Option<Error>,
}

impl JoinReply {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::from(MAGIC);
        bytes.extend(self.token);
        bytes.push(self.failure.as_ref().map_or(0, |error| error.kind as u8));
        if let Some(error) = &self.failure {
            let mut end = error.message.len().min(TEXT);
            while !error.message.is_char_boundary(end) {
                end -= 1;
            }
            bytes.extend(&error.message.as_bytes()[..end]);
        }
        bytes
    }

    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let mut reader = Reader(bytes);
        if reader.take::<4>()? != MAGIC {
            return None;
        }
        let token = reader.take()?;
        let [code] = reader.take()?;
        // Code 0 means success and has no text.
        let failure = match (code, reader.0) {
            (0, []) => None,
            (_, text) => Some(Error {
                kind: ErrorKind::from_peer(code)?,
                message: std::str::from_utf8(text).ok()?.to_owned(),
            }),
        };
        Some(Self { token, failure })
    }
}

struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (head, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*head)
    }

    fn word(&mut self) -> Option<u32> {
        self.take().map(u32::from_le_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn messages_round_trip() {
        let hello = JoinHello { rank: 1, size: 4, pid: 77, segment_bytes: 1 << 40, token: [9; 16] };
        assert_eq!(JoinHello::decode(&hello.encode()), Some(hello));
        for failure in [None, Some(Error::config("no")), Some(Error::peer(""))] {
            let answer = JoinReply { token: [3; 16], failure };
            assert_eq!(JoinReply::decode(&answer.encode()), Some(answer));
        }
        // Fuzzing starts with messages of this protocol.
        assert!(JoinHello::decode(include_bytes!("../../fuzz/seeds/join/hello")).is_some());
        assert!(JoinReply::decode(include_bytes!("../../fuzz/seeds/join/answer")).is_some());
    }

    #[test]
    fn long_sentences_are_cut_between_characters() {
        for (text, kept) in
            [("é".repeat(TEXT), TEXT), ("a".to_owned() + &"é".repeat(TEXT), TEXT - 1)]
        {
            let answer = JoinReply { token: [3; 16], failure: Some(Error::config(text)) };
            let bytes = answer.encode();
            assert_eq!(bytes.len() + 1, BUFFER - (TEXT - kept));
            let failure = JoinReply::decode(&bytes).and_then(|answer| answer.failure);
            assert_eq!(failure.map(|error| error.message.len()), Some(kept));
        }
    }

    #[test]
    fn unidentified_peers_are_refused() {
        let hello = JoinHello { rank: 1, size: 4, pid: 77, segment_bytes: 1 << 40, token: [9; 16] }
            .encode();
        // A longer message, a shorter one, one of another program, one of another protocol version.
        let changes: [fn(&mut Vec<u8>); 4] =
            [|b| b.push(0), |b| b.truncate(b.len() - 1), |b| b[0] ^= 1, |b| b[4] ^= 1];
        for change in changes {
            let mut bytes = hello.clone();
            change(&mut bytes);
            assert_eq!(JoinHello::decode(&bytes), None);
        }
        let answer = JoinReply { token: [3; 16], failure: None }.encode();
        assert_eq!(JoinReply::decode(&[&answer[..], b"text without a failure"].concat()), None);
    }

    proptest! {
        #[test]
        fn nothing_that_arrives_panics(
            mut bytes in proptest::collection::vec(any::<u8>(), 0..BUFFER), real in any::<bool>()
        ) {
            if real && bytes.len() >= 8 {
                bytes[..4].copy_from_slice(&MAGIC);
                bytes[4..8].copy_from_slice(&PROTOCOL.to_le_bytes());
            }
            let _ = JoinHello::decode(&bytes);
            let _ = JoinReply::decode(&bytes);
        }
    }
}
