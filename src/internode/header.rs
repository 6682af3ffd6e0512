//! Header: the description of a call that ranks compare before they move its data.

use crate::coll::call::CallSpec;
use crate::coll::describe::Description;
use crate::error::{Error, Result};
use crate::node_map::NodeMap;
use crate::rank::Rank;
use crate::sync::shared_text;

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
    /// Size of each text at the end of a slot: the call site, if the call has one, and before it
    /// the lengths of single ranks, if ranks agree on them.
    const TEXT_BYTES: usize = shared_text::BYTES;

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

    /// Returns the size of the texts at the end of a slot of `call`.
    pub(super) fn texts_bytes(call: &CallSpec) -> usize {
        let texts = [call.call_site.is_some(), !call.agreed_lengths().is_empty()];
        texts.into_iter().filter(|&has| has).count() * Self::TEXT_BYTES
    }

    /// Returns a slot with this header and the texts of `call`. Its length is the same for every
    /// call, whatever texts it has.
    pub(super) fn to_slot(self, call: &CallSpec) -> Vec<u8> {
        let mut slot = self.to_bytes(None).to_vec();
        slot.resize(Self::BYTES + 2 * Self::TEXT_BYTES, 0);
        Self::write_texts(&mut slot, call);
        slot
    }

    /// Writes the texts of `call` to the end of `slot`. Lengths that need more bytes are left out.
    pub(super) fn write_texts(slot: &mut [u8], call: &CallSpec) {
        let mut start = slot.len();
        if let Some(site) = call.call_site {
            start -= Self::TEXT_BYTES;
            let text = shared_text::end_of(site.text());
            slot[start..start + text.len()].copy_from_slice(text.as_bytes());
        }
        // One digit, a comma and a space: no longer list fits, so its text is not made.
        let spans = call.agreed_lengths();
        if !spans.is_empty() && spans.len() <= Self::TEXT_BYTES / "0, ".len() {
            start -= Self::TEXT_BYTES;
            let text = format!("{:?}", spans.iter().map(|span| span.bytes).collect::<Vec<_>>());
            if text.len() <= Self::TEXT_BYTES {
                slot[start..start + text.len()].copy_from_slice(text.as_bytes());
            }
        }
    }

    /// Returns the texts at the end of `slot`, whose header is `self`: the call site, and the
    /// lengths of single ranks. Each is empty if the call or the slot has none.
    fn texts(&self, slot: &[u8]) -> [String; 2] {
        let mut rest = &slot[Self::BYTES..];
        [self.description.has_call_site(), self.description.has_lengths()].map(|has| {
            let last = rest.split_last_chunk::<{ Self::TEXT_BYTES }>().filter(|_| has);
            last.map_or_else(String::new, |(others, text)| {
                rest = others;
                String::from_utf8_lossy(text).trim_end_matches('\0').to_owned()
            })
        })
    }

    /// Returns the reason why this header differs from `other`, if their calls look the same.
    /// `shown` is true if the message shows texts that differ.
    fn hidden_difference(&self, other: &Self, shown: bool) -> &'static str {
        let visible = |header: &Self| (header.sequence, header.description.without_call_site());
        let with_call_site = self.description.has_call_site();
        if visible(self) != visible(other) || shown {
            ""
        } else if with_call_site != other.description.has_call_site() {
            ": some were started with SYMM_DEBUG=call_site, others were not"
        } else if !with_call_site {
            ": the lengths of single ranks differ"
        } else if !self.description.has_lengths() {
            ": the call sites differ"
        } else {
            ": the lengths of single ranks, or the call sites, differ"
        }
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
    /// both, with their call sites if the slots have them.
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
        let other = place + 1;
        let texts = |at: usize| headers[at].texts(&shown[at * slot..(at + 1) * slot]);
        let ([site, lengths], [other_site, other_lengths]) = (texts(0), texts(other));
        let differ = |one: &str, other: &str| !one.is_empty() && !other.is_empty() && one != other;
        let lengths_differ = differ(&lengths, &other_lengths);
        let called = |at: usize, site: &str, lengths: &str| {
            let Self { sequence, description, .. } = headers[at];
            let rank = layout.describe(ranks[at]);
            let with = if lengths_differ {
                format!(" with lengths {lengths} bytes")
            } else {
                String::new()
            };
            let at = if site.is_empty() { "" } else { " at " };
            format!("{rank} called {description}{with} as #{sequence}{at}{site}")
        };
        let shown = lengths_differ || differ(&site, &other_site);
        Err(Error::mismatch(format!(
            "ranks of group \"{group}\" do not agree: {}, {}{}",
            called(0, &site, &lengths),
            called(other, &other_site, &other_lengths),
            headers[other].hidden_difference(first, shown)
        )))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::coll::call::{Collective, Span};
    use crate::coll::cuda::agreement::launch_log::tests::sum;
    use crate::node_map::RankLocation;
    use crate::sync::call_site::CallSite;

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

    /// Returns the end of the error of two ranks that make these calls; with texts in the slots if
    /// `texts` is true.
    fn difference(calls: [&CallSpec<'_>; 2], texts: bool) -> String {
        let layout = NodeMap::of(&["a", "b"].map(RankLocation::on));
        let slot = |call: &CallSpec<'_>| {
            let header = CallHeader::of(call, 3);
            if texts { header.to_slot(call) } else { header.to_bytes(None).to_vec() }
        };
        let [one, other] = calls.map(slot);
        let ranks = [0, 1].map(Rank);
        let error = CallHeader::agree(&[&*one, &other].concat(), one.len(), &ranks, &layout, "g")
            .expect_err("differs");
        let (_, called) = error.message.split_once(" called ").expect("names both calls");
        called.replace(", rank 1 (node \"b\", pid 7) called ", " | ")
    }

    #[test]
    fn calls_that_look_the_same_name_their_call_sites_or_what_differs() {
        let at =
            |text: &str| CallSpec { call_site: CallSite::known(CallSite::number(text)), ..sum(8) };
        let call = "all_reduce(2 × float32, 8 bytes, SUM) as #3";
        let (one, other, plain) = (at("a.py:1"), at("a.py:2"), sum(8));
        let sited = format!("{call} at a.py:1 | {call} at a.py:2");
        assert_eq!(difference([&one, &other], true), sited);
        assert_eq!(
            difference([&one, &other], false),
            format!("{call} | {call}: the call sites differ")
        );
        let some = ": some were started with SYMM_DEBUG=call_site, others were not";
        for (calls, expected) in [
            ([&one, &plain], format!("{call} at a.py:1 | {call}{some}")),
            ([&plain, &one], format!("{call} | {call} at a.py:1{some}")),
        ] {
            assert_eq!(difference(calls, true), expected);
            assert!(difference(calls, false).ends_with(some));
        }
        let long = at(&format!("/{}/train.py:12", "ü".repeat(100)));
        let text = difference([&one, &long], true);
        let end = text.split_once("ü").expect("the end of a long path").1;
        assert!(end.ends_with("ü/train.py:12") && end.len() < CallHeader::TEXT_BYTES, "{text}");
        let gather = |lengths: [usize; 2], call_site| CallSpec {
            op: Collective::AllGather,
            outputs: lengths.map(|bytes| Span { addr: 64, bytes }).to_vec().into(),
            call_site,
            ..sum(4)
        };
        for (call_site, expected) in [
            (None, ": the lengths of single ranks differ"),
            (one.call_site, ": the lengths of single ranks, or the call sites, differ"),
        ] {
            let calls = [[4, 8], [8, 4]].map(|lengths| gather(lengths, call_site));
            let text = difference([&calls[0], &calls[1]], false);
            assert!(text.ends_with(&format!("as #3{expected}")), "{text}");
            let (text, at) =
                (difference([&calls[0], &calls[1]], true), call_site.map_or("", |_| " at a.py:1"));
            let called = |lengths| {
                format!("all_gather(3 × float32, 12 bytes) with lengths {lengths} bytes as #3{at}")
            };
            assert_eq!(text, format!("{} | {}", called("[4, 8]"), called("[8, 4]")));
        }
    }
}
