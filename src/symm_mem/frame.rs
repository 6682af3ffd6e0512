//! Frames between two heaps: messages of one fixed size. Pure.

/// Key of a heap. It is random, so that only processes that received it can name the heap.
pub type HeapKey = [u8; 16];

/// Size of every message in bytes.
pub(super) const FRAME_BYTES: usize = 56;

/// A message. All kinds except `Hello` are sent in both directions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum HeapFrame {
    /// The first message of the heap that connects: the wanted heap, its own key, the link's number
    /// and its address range.
    Hello {
        /// Key of the heap that listens. Only ranks of its groups receive the key, so a peer that
        /// names it is such a rank.
        to: HeapKey,
        /// Key of the heap that connects.
        from: HeapKey,
        /// A random number that both ends of the link share.
        link: u64,
        /// Size of its heap's address range in bytes.
        span: u64,
    },
    /// Advertises a new segment, with its file descriptor attached.
    Offer {
        /// Number of the segment, never reused by the same heap.
        id: u64,
        /// Offset of the segment in the heap.
        offset: u64,
        /// Length of the segment.
        bytes: u64,
    },
    /// The segment is mapped; kernels may use addresses in it from now on.
    Accepted {
        /// Number of the offered segment.
        id: u64,
    },
    /// The segment could not be mapped.
    Refused {
        /// Number of the offered segment.
        id: u64,
    },
    /// The segment is being freed: the owner does not use it any more.
    Withdraw {
        /// Number of the offered segment.
        id: u64,
    },
    /// The withdrawn segment is unmapped, or will be as soon as possible.
    Gone {
        /// Number of the offered segment.
        id: u64,
    },
}

const MAGIC: u32 = 0x7068_7331;

impl HeapFrame {
    /// Encodes the frame.
    pub(super) fn encode(self) -> [u8; FRAME_BYTES] {
        let (kind, words): (u32, [u64; 6]) = match self {
            HeapFrame::Hello { to, from, link, span } => {
                let half = |key: HeapKey, at: usize| {
                    u64::from_le_bytes(std::array::from_fn(|i| key[at + i]))
                };
                (1, [half(to, 0), half(to, 8), half(from, 0), half(from, 8), link, span])
            }
            HeapFrame::Offer { id, offset, bytes } => (2, [id, offset, bytes, 0, 0, 0]),
            HeapFrame::Accepted { id } => (3, [id, 0, 0, 0, 0, 0]),
            HeapFrame::Refused { id } => (4, [id, 0, 0, 0, 0, 0]),
            HeapFrame::Withdraw { id } => (5, [id, 0, 0, 0, 0, 0]),
            HeapFrame::Gone { id } => (6, [id, 0, 0, 0, 0, 0]),
        };
        let mut bytes = [0; FRAME_BYTES];
        bytes[..4].copy_from_slice(&MAGIC.to_le_bytes());
        bytes[4..8].copy_from_slice(&kind.to_le_bytes());
        bytes[8..]
            .chunks_exact_mut(8)
            .zip(words)
            .for_each(|(place, word)| place.copy_from_slice(&word.to_le_bytes()));
        bytes
    }

    /// Decodes `bytes`; `None` if they are not exactly one frame.
    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let (head, rest) = bytes.split_first_chunk::<8>()?;
        let mut words = [0u64; 6];
        if bytes.len() != FRAME_BYTES || head[..4] != MAGIC.to_le_bytes() {
            return None;
        }
        words.iter_mut().zip(rest.chunks_exact(8)).for_each(|(word, place)| {
            *word = u64::from_le_bytes(std::array::from_fn(|i| place[i]));
        });
        let id = words[0];
        let key = |at: usize| std::array::from_fn(|i| rest[at + i]);
        let frame = match u32::from_le_bytes([head[4], head[5], head[6], head[7]]) {
            1 => HeapFrame::Hello { to: key(0), from: key(16), link: words[4], span: words[5] },
            2 => HeapFrame::Offer { id, offset: words[1], bytes: words[2] },
            3 => HeapFrame::Accepted { id },
            4 => HeapFrame::Refused { id },
            5 => HeapFrame::Withdraw { id },
            6 => HeapFrame::Gone { id },
            _ => return None,
        };
        // Unused bytes of a message are zero.
        (frame.encode() == bytes).then_some(frame)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn every_message_arrives_as_it_was_sent() {
        let key = |first: u8| std::array::from_fn(|i| first + i as u8);
        let id = u64::MAX - 3;
        for frame in [
            HeapFrame::Hello { to: key(3), from: key(90), link: 1 << 60, span: 1 << 38 },
            HeapFrame::Offer { id, offset: 1 << 30, bytes: 2 << 20 },
            HeapFrame::Accepted { id },
            HeapFrame::Refused { id },
            HeapFrame::Withdraw { id },
            HeapFrame::Gone { id },
        ] {
            let bytes = frame.encode();
            assert_eq!(HeapFrame::decode(&bytes), Some(frame));
            assert_eq!(HeapFrame::decode(&bytes[..FRAME_BYTES - 1]), None, "cut short");
            assert_eq!(HeapFrame::decode(&[&bytes[..], &[0]].concat()), None, "too long");
            let mut other = bytes;
            other[0] ^= 1;
            assert_eq!(HeapFrame::decode(&other), None, "not ours");
        }
        let mut stray = HeapFrame::Gone { id }.encode();
        stray[FRAME_BYTES - 1] = 1;
        assert_eq!(HeapFrame::decode(&stray), None, "bytes that mean nothing");
    }

    proptest! {
        #[test]
        fn random_bytes_are_refused_or_mean_exactly_what_they_say(
            kind in 0u32..9, honest in any::<bool>(),
            mut bytes in proptest::collection::vec(any::<u8>(), 0..70)
        ) {
            if honest && bytes.len() >= 8 {
                bytes[..4].copy_from_slice(&MAGIC.to_le_bytes());
                bytes[4..8].copy_from_slice(&kind.to_le_bytes());
            }
            if let Some(frame) = HeapFrame::decode(&bytes) {
                prop_assert_eq!(&frame.encode()[..], &bytes[..]);
            }
        }
    }
}
