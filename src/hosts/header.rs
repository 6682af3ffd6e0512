//! Header: what ranks show each other of a call before they move its data.

use crate::boot::hosts::Layout;
use crate::coll::call::Call;
use crate::coll::describe::Description;
use crate::error::{Error, Result};
use crate::rank::Rank;

/// Description of a call, and its number in the group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) sequence: u64,
    description: Description,
    fingerprint: u64,
}

impl Header {
    /// Length of a header, the same for every call: ranks that disagree on all else still exchange it in order.
    pub(super) const BYTES: usize = 32;

    pub(super) fn of(call: &Call, sequence: u64) -> Self {
        let description = Description::of(call);
        Self { sequence, description, fingerprint: description.fingerprint(call) }
    }

    pub(super) fn to_bytes(self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        let words = [self.sequence, self.description.head, self.description.bytes, self.fingerprint];
        bytes.chunks_exact_mut(8).zip(words).for_each(|(to, word)| to.copy_from_slice(&word.to_le_bytes()));
        bytes
    }

    fn from_bytes(bytes: &[u8]) -> Self {
        let mut words = bytes.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().unwrap_or_default()));
        let mut next = || words.next().unwrap_or_default();
        let (sequence, head, bytes) = (next(), next(), next());
        Self { sequence, description: Description { head, bytes }, fingerprint: next() }
    }

    /// Whether the headers of `ranks`, one behind the other in `shown`, are the same.
    ///
    /// # Errors
    /// `Mismatch` names the first of `ranks`, the first that differs from it, and what each was called for.
    pub(super) fn agree(shown: &[u8], ranks: &[Rank], layout: &Layout, group: &str) -> Result<()> {
        let headers: Vec<Self> = shown.chunks_exact(Self::BYTES).map(Self::from_bytes).collect();
        let Some((first, rest)) = headers.split_first() else { return Ok(()) };
        let Some(place) = rest.iter().position(|other| other != first) else { return Ok(()) };
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
    use crate::boot::hosts::Placement;
    use crate::coll::call::{Op, Span};
    use crate::dtype::{DType, ReduceOp};
    use crate::sys::host::Host;

    fn header(bytes: usize, sequence: u64) -> Header {
        let span = Span { addr: 0, bytes };
        let call = Call {
            op: Op::AllReduce,
            dtype: DType::F32,
            reduce_op: ReduceOp::Sum,
            root: Rank(0),
            factor: 1.0,
            inputs: vec![span],
            outputs: vec![span],
            call_site: None,
        };
        Header::of(&call, sequence)
    }

    #[test]
    fn differing_headers_name_both_calls() {
        let place = |boot: &str| Placement { host: Host { boot: boot.into(), ..Host::default() }, name: boot.into(), pid: 7 };
        let layout = Layout::of(&["a", "a", "b"].map(place));
        let shown = |headers: [Header; 3]| headers.map(Header::to_bytes).concat();
        let ranks = [0, 1, 2].map(Rank);
        assert_eq!(Header::agree(&shown([header(8, 3); 3]), &ranks, &layout, "g"), Ok(()));
        let error = Header::agree(&shown([header(8, 3), header(8, 3), header(16, 3)]), &ranks, &layout, "g").expect_err("differs");
        assert_eq!(
            error.message,
            "ranks of group \"g\" do not agree: rank 0 (host \"a\", pid 7) called all_reduce(2 × float32, 8 bytes, SUM) as #3, \
             rank 2 (host \"b\", pid 7) called all_reduce(4 × float32, 16 bytes, SUM) as #3"
        );
        assert!(Header::agree(&shown([header(8, 3), header(8, 4), header(8, 4)]), &ranks, &layout, "g").is_err());
    }
}
