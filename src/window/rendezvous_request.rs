//! The description that each rank gives of the memory that it brings to a rendezvous.

use crate::control::ControlBlock;
use crate::error::{Error, Result};
use crate::symm_mem::HeapAddress;
use crate::window::operators::agreement::CALL_BYTES;

/// Maximum number of dropped windows that a rank reports in one rendezvous.
pub(super) const REPORTED: usize = 4;

/// Numbers of windows that a rank has dropped; 0 is an empty entry.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct DroppedWindows(pub(super) [u64; REPORTED]);

/// The memory that one rank brings to a rendezvous, and its state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RendezvousRequest {
    /// True for host memory, false for GPU memory.
    pub(super) host: bool,
    /// True if the rank's heaps are already linked for this kind of memory.
    pub(super) linked: bool,
    /// True for an explicit allocation, whose size is exact; false for memory in a pool.
    pub(super) exact: bool,
    /// Sequence number of the allocation.
    pub(super) number: u64,
    pub(super) bytes: u64,
    /// Offset of the buffer in the rank's heap.
    pub(super) buffer: u64,
    /// Offset of the signal pad in the rank's heap.
    pub(super) pad: u64,
    pub(super) pad_bytes: u64,
    /// Id of the segment.
    pub(super) segment: u64,
    /// Windows that the rank has dropped.
    pub(super) dropped: DroppedWindows,
    pub(super) heap: HeapAddress,
}

impl RendezvousRequest {
    const WORDS: usize = 6 + REPORTED;
    pub(super) const BYTES: usize = 8 + 8 * Self::WORDS + HeapAddress::BYTES;

    pub(super) fn encode(&self) -> Vec<u8> {
        let mut bytes =
            vec![u8::from(self.host), u8::from(self.linked), u8::from(self.exact), 0, 0, 0, 0, 0];
        let words = [self.number, self.bytes, self.buffer, self.pad, self.pad_bytes, self.segment];
        bytes.extend(words.iter().chain(&self.dropped.0).flat_map(|word| word.to_le_bytes()));
        bytes.extend(self.heap.encode());
        bytes
    }

    /// Decodes the request that a rank encoded; `bytes` has [`RendezvousRequest::BYTES`] bytes.
    pub(super) fn decode(bytes: &[u8]) -> Self {
        let word =
            |index: usize| u64::from_le_bytes(std::array::from_fn(|i| bytes[8 + 8 * index + i]));
        let heap: [u8; HeapAddress::BYTES] =
            std::array::from_fn(|i| bytes[8 + 8 * Self::WORDS + i]);
        Self {
            host: bytes[0] != 0,
            linked: bytes[1] != 0,
            exact: bytes[2] != 0,
            number: word(0),
            bytes: word(1),
            buffer: word(2),
            pad: word(3),
            pad_bytes: word(4),
            segment: word(5),
            dropped: DroppedWindows(std::array::from_fn(|i| word(6 + i))),
            heap: HeapAddress::decode(&heap),
        }
    }

    fn kind(&self) -> &'static str {
        if self.host { "the host" } else { "a GPU" }
    }
}

/// Rejects offers that do not match, with the same error on all ranks.
pub(super) fn compare(control: &ControlBlock, all: &[RendezvousRequest]) -> Result<()> {
    let (first, me) = (&all[0], control.rank());
    let refused = |rank, one: String, two: String| {
        let (zero, other, group) =
            (control.describe(crate::rank::Rank(0)), control.describe(rank), control.name());
        Err(Error::mismatch(format!(
            "the ranks of group \"{group}\" bring different memory to a rendezvous: {zero} \
             {one}, {other} {two}"
        )))
    };
    for (rank, offer) in control.ranks().zip(all) {
        if offer.host != first.host {
            return refused(
                rank,
                format!("memory of {}", first.kind()),
                format!("memory of {}", offer.kind()),
            );
        }
        if offer.exact && first.exact && offer.bytes != first.bytes {
            return refused(
                rank,
                format!("{} bytes", first.bytes),
                format!("{} bytes", offer.bytes),
            );
        }
        if offer.pad_bytes != first.pad_bytes {
            let pad = |offer: &RendezvousRequest| {
                let bytes = offer.pad_bytes.saturating_sub(CALL_BYTES as u64);
                format!("a signal pad of {bytes} bytes")
            };
            return refused(rank, pad(first), pad(offer));
        }
        let other_count = offer.exact && first.exact && offer.number != first.number;
        if other_count && me.0 == 0 && control.is_first_allocation_warning() {
            let (one, two) = (control.describe(me), control.describe(rank));
            log::warn!(
                "group \"{}\": {one} brings its allocation #{} to a rendezvous, {two} its #{}; \
                 both have {} bytes",
                control.name(),
                first.number,
                offer.number,
                offer.bytes
            );
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::tests::controls;

    fn offer() -> RendezvousRequest {
        let heap = HeapAddress { key: [3; 16], listener: [4; 16], span: 1 << 38 };
        let dropped = DroppedWindows([7, 0, 9, 1 << 60]);
        RendezvousRequest {
            host: true,
            linked: false,
            exact: true,
            number: 5,
            bytes: 1 << 40,
            buffer: 4096,
            pad: 8192,
            pad_bytes: 9216,
            segment: 77,
            dropped,
            heap,
        }
    }

    #[test]
    fn what_a_rank_says_arrives() {
        let offer = offer();
        let bytes = offer.encode();
        assert_eq!(bytes.len(), RendezvousRequest::BYTES);
        assert_eq!(RendezvousRequest::decode(&bytes), offer);
    }

    #[test]
    fn the_warning_of_different_allocations_leaves_the_warning_of_late_ranks() {
        let controls = controls(2);
        let other = RendezvousRequest { number: 6, ..offer() };
        assert_eq!(compare(&controls[0], &[offer(), other]), Ok(()));
        assert!(!controls[0].is_first_allocation_warning(), "it has been logged");
        assert!(controls[0].is_first_warning());
    }
}
