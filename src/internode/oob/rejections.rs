//! Rejected calls, as nodes report them to each other.
//!
//! Ranks of one node learn of each other's rejections through shared memory. This module covers
//! calls that all ranks of a node have rejected, or that the only rank of a node has.
//!
//! A rank reports when it rejects a call, and again when it next makes a call. If a rank of another
//! node is blocked in a call that the rejecting rank has not made, the blocked rank fails the
//! group. The exception is a blocked rank that has itself rejected at least as many calls as the
//! other rank at that point: the other rank is then only late. A report that arrives over two
//! connections counts once, because its numbers only grow.
//!
//! Only calls on CPU tensors block a rank here. They are numbered separately, so a report says how
//! many of the calls before the rejection were on CPU tensors.

use super::{BlockedCall, CallPosition};
use crate::node_map::NodeMap;
use crate::rank::Rank;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// How long a rank must have waited in a call before the rejection of another rank ends it. Until
/// then the other rank may be about to make the call, or its report that it made the call may be on
/// the way.
const REJECTION_SETTLE: Duration = Duration::from_millis(60);

/// A node leader's view of rejected calls.
#[derive(Default)]
pub(super) struct RemoteRejections {
    /// The last rejection of each rank that has not made a call since, with its reason.
    standing: BTreeMap<Rank, (CallPosition, String)>,
    /// The last call that each rank has made after a rejection.
    resumed: BTreeMap<Rank, u64>,
    /// The call that this rank is in.
    pub(super) waiting: Option<BlockedCall>,
    /// Where this rank last rejected a call.
    pub(super) own: Option<CallPosition>,
}

impl RemoteRejections {
    /// Records that `rank` has rejected a call at `place`; returns true if that is new.
    pub(super) fn rejected(&mut self, rank: Rank, place: CallPosition, why: &str) -> bool {
        let outdated = self.resumed.get(&rank).is_some_and(|&call| call > place.calls);
        let known = self.standing.get(&rank).is_some_and(|(known, _)| *known >= place);
        if !outdated && !known {
            self.standing.insert(rank, (place, why.into()));
        }
        !outdated && !known
    }

    /// Records that `rank` makes a call; returns true if that is new.
    pub(super) fn resumed(&mut self, rank: Rank, call: u64) -> bool {
        let last = self.resumed.entry(rank).or_default();
        if *last >= call {
            return false;
        }
        *last = call;
        if self.standing.get(&rank).is_some_and(|(place, _)| place.calls < call) {
            self.standing.remove(&rank);
        }
        true
    }

    /// Returns the error message for the call that rank `me` is in, if a rank of another node has
    /// rejected that call.
    pub(super) fn end(
        &self,
        layout: &NodeMap,
        me: Rank,
        group: &str,
        now: Instant,
    ) -> Option<String> {
        let long = |waiting: &BlockedCall| {
            now.saturating_duration_since(waiting.since) >= REJECTION_SETTLE
        };
        let BlockedCall { number, name, .. } = self.waiting.filter(long)?;
        let mut away =
            self.standing.iter().filter(|(rank, _)| layout.node_of(**rank) != layout.node_of(me));
        let as_often = |place: &CallPosition| {
            self.own.is_some_and(|own| own.calls == place.calls && own.times >= place.times)
        };
        let (rank, (_, why)) =
            away.find(|(_, (place, _))| place.on_host < number && !as_often(place))?;
        let (rank, me) = (layout.describe(*rank), layout.describe(me));
        Some(format!(
            "{rank} rejected a call and has not repeated it since; {me} is blocked in {name}, \
             collective #{number} of group \"{group}\": {why}"
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node_map::RankLocation;

    #[test]
    fn a_refusal_stands_until_its_rank_makes_a_call() {
        let layout = NodeMap::of(&["a", "b", "b"].map(RankLocation::on));
        let (mut refusals, now, me) = (RemoteRejections::default(), Instant::now(), Rank(2));
        let began = |number, ago| {
            let since = now.checked_sub(Duration::from_millis(ago)).expect("uptime");
            Some(BlockedCall { number, name: "barrier", since, phase_since: since, on_rail: false })
        };
        // Every rank has also made 7 calls on CUDA tensors.
        let at = |on_host, times| CallPosition { calls: on_host + 7, times, on_host };
        assert!(
            refusals.rejected(Rank(0), at(4, 1), "no tensor")
                && !refusals.rejected(Rank(0), at(4, 1), "no tensor"),
            "once"
        );
        assert!(refusals.rejected(Rank(1), at(3, 1), "of the own node"));
        for (number, ago) in [(4, 500), (5, 30)] {
            refusals.waiting = began(number, ago);
            assert_eq!(
                refusals.end(&layout, me, "g", now),
                None,
                "the rank has made it, or may be about to"
            );
        }
        refusals.waiting = began(5, 80);
        assert_eq!(
            refusals.end(&layout, me, "g", now).as_deref(),
            Some(
                "rank 0 (node \"a\", pid 7) rejected a call and has not repeated it since; rank 2 \
                 (node \"b\", pid 7) is blocked in barrier, \
                 collective #5 of group \"g\": no tensor"
            )
        );
        refusals.own = Some(at(4, 1));
        assert_eq!(
            refusals.end(&layout, me, "g", now),
            None,
            "both have refused: that rank is late"
        );
        assert!(refusals.rejected(Rank(0), at(4, 2), "no tensor"), "another at the same place");
        assert!(
            refusals.end(&layout, me, "g", now).is_some(),
            "it refuses the call that this rank is in"
        );
        refusals.own = Some(at(4, 2));
        assert_eq!(refusals.end(&layout, me, "g", now), None, "as often");
        refusals.own = Some(at(3, 7));
        assert!(refusals.end(&layout, me, "g", now).is_some());
        assert!(refusals.resumed(Rank(0), 12) && !refusals.resumed(Rank(0), 12), "once");
        assert!(!refusals.rejected(Rank(0), at(4, 2), "no tensor"), "old news by another way");
        assert_eq!(refusals.end(&layout, me, "g", now), None);
        // It has resumed with a call on CUDA tensors, and rejects the call on CPU tensors again.
        let again = CallPosition { calls: 12, times: 1, on_host: 4 };
        assert!(refusals.rejected(Rank(0), again, "still no tensor"));
        assert!(refusals.end(&layout, me, "g", now).is_some());
    }
}
