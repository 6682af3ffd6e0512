//! Launches: calls on CUDA tensors. Nodes compare them after the fact, because a launch must not
//! wait for a GPU or another node.
//!
//! At each poll of its node leaders, the first rank of each node sends its new launches to the
//! first rank of the group, which compares them call by call. Launches within a node are compared
//! on that node.

use crate::error::Error;
use crate::internode::header::CallHeader;
use crate::node_map::NodeMap;
use crate::rank::Rank;
use std::collections::{BTreeMap, VecDeque};

/// Number of headers kept per rank. Older ones are not compared; no node launches that far ahead of
/// the others.
const MAX_HEADERS_KEPT: usize = 4096;
/// Maximum number of headers sent at once. Further ones are not compared; no program launches that
/// many calls between two polls.
pub(super) const MAX_HEADERS_PER_POLL: usize = 512;

/// The launches of the first ranks of all nodes, in order, that the first rank of the group has not
/// yet compared.
#[derive(Default)]
pub(super) struct LaunchHistory {
    own: VecDeque<CallHeader>,
    others: BTreeMap<Rank, VecDeque<CallHeader>>,
}

fn keep(kept: &mut VecDeque<CallHeader>, headers: impl IntoIterator<Item = CallHeader>) {
    kept.extend(headers);
    kept.drain(..kept.len().saturating_sub(MAX_HEADERS_KEPT));
}

impl LaunchHistory {
    /// Records the launches of this rank.
    pub(super) fn launched(&mut self, headers: &[CallHeader]) {
        keep(&mut self.own, headers.iter().copied());
    }

    /// Records the launches that `rank` has reported.
    pub(super) fn told(&mut self, rank: Rank, headers: Vec<CallHeader>) {
        keep(self.others.entry(rank).or_default(), headers);
    }

    /// Compares the calls that this rank, `me`, and another rank have both launched; returns the
    /// first difference.
    pub(super) fn compare(&mut self, layout: &NodeMap, me: Rank, group: &str) -> Option<Error> {
        for (&rank, theirs) in &mut self.others {
            while let (Some(their), Some(oldest)) = (theirs.front(), self.own.front()) {
                let Some(behind) = their.sequence.checked_sub(oldest.sequence) else {
                    // Not compared: this rank no longer keeps its own header of that call.
                    theirs.pop_front();
                    continue;
                };
                let Some(own) =
                    usize::try_from(behind).ok().and_then(|behind| self.own.get(behind))
                else {
                    break;
                };
                let shown = [own.to_bytes(None), their.to_bytes(None)].concat();
                theirs.pop_front();
                if let Err(error) =
                    CallHeader::agree(&shown, CallHeader::BYTES, &[me, rank], layout, group)
                {
                    return Some(error);
                }
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::coll::call::CallSpec;
    use crate::node_map::RankLocation;

    fn headers(numbers: std::ops::Range<u64>, bytes: impl Fn(u64) -> usize) -> Vec<CallHeader> {
        let span = |number| crate::coll::call::Span { addr: 0, bytes: bytes(number) };
        let call = |number| CallSpec {
            op: crate::coll::call::Collective::AllReduce,
            inputs: vec![span(number)].into(),
            outputs: vec![span(number)].into(),
            ..CallSpec::barrier(None)
        };
        numbers.map(|number| CallHeader::of(&call(number), number)).collect()
    }

    #[test]
    fn the_first_difference_is_found_however_far_ahead_a_node_is() {
        let layout = NodeMap::of(&["a", "b", "c"].map(RankLocation::on));
        let mut launches = LaunchHistory::default();
        let compare = |launches: &mut LaunchHistory| {
            launches.compare(&layout, Rank(0), "g").map(|error| error.message)
        };
        launches.told(Rank(1), headers(1..4, |_| 8));
        assert_eq!(compare(&mut launches), None, "nothing of our own yet");
        launches.launched(&headers(1..3, |_| 8));
        launches.told(Rank(2), headers(1..2, |_| 8));
        assert_eq!(compare(&mut launches), None);
        launches.launched(&headers(3..9, |number| if number == 5 { 16 } else { 8 }));
        launches.told(Rank(2), headers(2..5, |_| 8));
        assert_eq!(compare(&mut launches), None, "the fifth is not told yet");
        launches.told(Rank(2), headers(5..9, |_| 8));
        assert_eq!(
            compare(&mut launches).as_deref(),
            Some(
                "ranks of group \"g\" do not agree: rank 0 (node \"a\", pid 7) called \
                 all_reduce(16 × uint8, 16 bytes, SUM) as #5, \
                 rank 2 (node \"c\", pid 7) called all_reduce(8 × uint8, 8 bytes, SUM) as #5"
            )
        );
    }

    #[test]
    fn what_is_kept_is_bounded_and_too_old_calls_are_not_compared() {
        let layout = NodeMap::of(&["a", "b"].map(RankLocation::on));
        let mut launches = LaunchHistory::default();
        let many = MAX_HEADERS_KEPT as u64 + 10;
        launches.launched(&headers(1..many, |_| 8));
        assert_eq!(launches.own.len(), MAX_HEADERS_KEPT);
        launches.told(Rank(1), headers(1..many, |number| if number < 9 { 16 } else { 8 }));
        assert_eq!(launches.compare(&layout, Rank(0), "g"), None);
        assert!(launches.others[&Rank(1)].is_empty());
    }
}
