//! Header: the description of a call that ranks compare before they move its data.

use crate::coll::call::CallSpec;
use crate::coll::describe::Description;
use crate::error::{Error, Result};
use crate::node_map::NodeMap;
use crate::rank::Rank;

/// The description of a call, and its number in the group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CallHeader {
    pub(super) sequence: u64,
    description: Description,
    fingerprint: u64,
}

impl CallHeader {
    /// Length of a header. It is the same for every call, so ranks that disagree on everything else
    /// still exchange it in order.
    pub(super) const BYTES: usize = 48;

    pub(super) fn of(call: &CallSpec, sequence: u64) -> Self {
        let description = Description::of(call);
        Self { sequence, description, fingerprint: description.fingerprint(call) }
    }

    /// Returns the encoded header. It contains `even`, the length of every part of an all_to_all if
    /// all parts of this rank are equally long; ranks do not compare this length.
    pub(super) fn to_bytes(self, even: Option<usize>) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        let even = even.map_or(0, |bytes| bytes as u64 + 1);
        let words = [
            self.sequence,
            self.description.head,
            self.description.bytes,
            self.description.detail,
            self.fingerprint,
            even,
        ];
        bytes
            .chunks_exact_mut(8)
            .zip(words)
            .for_each(|(to, word)| to.copy_from_slice(&word.to_le_bytes()));
        bytes
    }

    pub(super) fn from_bytes(bytes: &[u8]) -> Self {
        let mut words = bytes
            .chunks_exact(8)
            .map(|word| u64::from_le_bytes(word.try_into().unwrap_or_default()));
        let mut next = || words.next().unwrap_or_default();
        let (sequence, head, bytes, detail) = (next(), next(), next(), next());
        Self { sequence, description: Description { head, bytes, detail }, fingerprint: next() }
    }

    /// Returns the one length that the headers in `shown` contain, if it is the same in all of
    /// them. `shown` consists of slots of `slot` bytes, each with a header at its start.
    pub(super) fn common(shown: &[u8], slot: usize) -> Option<usize> {
        let mut evens = shown.chunks_exact(slot).map(|shown| {
            u64::from_le_bytes(shown[Self::BYTES - 8..Self::BYTES].try_into().unwrap_or_default())
        });
        let first = evens.next()?;
        evens
            .all(|even| even == first)
            .then(|| first.checked_sub(1))
            .flatten()
            .map(|bytes| bytes as usize)
    }

    /// Compares the headers of `ranks`, each at the start of a slot of `slot` bytes in `shown`;
    /// returns their common length.
    ///
    /// # Errors
    /// `Mismatch` names the first of `ranks`, the first that differs from it, and the calls of
    /// both.
    pub(super) fn agree(
        shown: &[u8],
        slot: usize,
        ranks: &[Rank],
        layout: &NodeMap,
        group: &str,
    ) -> Result<Option<usize>> {
        let headers: Vec<Self> = shown.chunks_exact(slot).map(Self::from_bytes).collect();
        let Some((first, rest)) = headers.split_first() else { return Ok(None) };
        let Some(place) = rest.iter().position(|other| other != first) else {
            return Ok(Self::common(shown, slot));
        };
        let called = |header: &Self, rank| {
            let Self { sequence, description, .. } = header;
            format!("{} called {description} as #{sequence}", layout.describe(rank))
        };
        let other = &rest[place];
        let detail = if (other.sequence, other.description) == (first.sequence, first.description) {
            ": the lengths of single ranks, or the call sites, differ"
        } else {
            ""
        };
        Err(Error::mismatch(format!(
            "ranks of group \"{group}\" do not agree: {}, {}{detail}",
            called(first, ranks[0]),
            called(other, ranks[place + 1])
        )))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::coll::cuda::agreement::launch_log::tests::sum;
    use crate::node_map::RankLocation;

    fn header(bytes: usize, sequence: u64) -> CallHeader {
        CallHeader::of(&sum(bytes), sequence)
    }

    #[test]
    fn differing_headers_name_both_calls() {
        let layout = NodeMap::of(&["a", "a", "b"].map(RankLocation::on));
        let shown =
            |headers: [CallHeader; 3]| headers.map(|header| header.to_bytes(Some(4))).concat();
        let ranks = [0, 1, 2].map(Rank);
        let agree =
            |shown: &[u8]| CallHeader::agree(shown, CallHeader::BYTES, &ranks, &layout, "g");
        let usual = header(8, 3);
        assert_eq!(agree(&shown([usual; 3])), Ok(Some(4)));
        let error = agree(&shown([usual, usual, header(16, 3)])).expect_err("differs");
        assert_eq!(
            error.message,
            "ranks of group \"g\" do not agree: rank 0 (node \"a\", pid 7) called all_reduce(2 × \
             float32, 8 bytes, SUM) as #3, \
             rank 2 (node \"b\", pid 7) called all_reduce(4 × float32, 16 bytes, SUM) as #3"
        );
        let uneven = [Some(4), None, Some(4)].map(|even| usual.to_bytes(even)).concat();
        assert_eq!(agree(&uneven), Ok(None));
        assert!(agree(&shown([usual, header(8, 4), header(8, 4)])).is_err());
    }
}
