//! Progress: which ranks wait for other nodes in a long call, so that an error can name the nodes
//! that are late.
//!
//! A backend reports only that all other ranks have answered, not which rank has not. A node leader
//! that waits for long in one phase of a call therefore broadcasts its rank, the call's number, and
//! whether it waits on its rail. Every node without such a report counts as late. With two nodes no
//! reports are sent, because only the other node can be late. The reports of a rank are numbered,
//! because each may arrive over two connections.

use super::{BlockedCall, LEADERS_PER_NODE};
use crate::node_map::NodeMap;
use crate::rank::Rank;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// How long a rank waits in one phase of a call before it reports so.
const PHASE_REPORT_AFTER: Duration = Duration::from_millis(200);

/// A rank's report about the call in which it waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PhaseReport {
    /// Number of the report among the reports of its rank, from 1.
    pub(super) number: u64,
    /// Number of the call.
    pub(super) call: u64,
    /// True if it waits on its rail, false if it waits within its node.
    pub(super) on_rail: bool,
}

/// The last reports of all node leaders.
#[derive(Default)]
pub(super) struct ProgressTable(BTreeMap<Rank, PhaseReport>);

impl ProgressTable {
    /// Records the report of `rank`; returns true if it is new.
    pub(super) fn told(&mut self, rank: Rank, report: PhaseReport) -> bool {
        let new = self.0.get(&rank).is_none_or(|known| known.number < report.number);
        if new {
            self.0.insert(rank, report);
        }
        new
    }

    /// Returns the report that rank `me`, in the call `waiting`, must send now, if any, and records
    /// it.
    pub(super) fn due(
        &mut self,
        layout: &NodeMap,
        me: Rank,
        waiting: Option<BlockedCall>,
        now: Instant,
    ) -> Option<PhaseReport> {
        let long = |waiting: &BlockedCall| {
            layout.num_nodes() > 2
                && now.saturating_duration_since(waiting.phase_since) >= PHASE_REPORT_AFTER
        };
        let BlockedCall { number: call, on_rail, .. } = waiting.filter(long)?;
        let last = self.0.get(&me);
        if last.is_some_and(|last| (last.call, last.on_rail) == (call, on_rail)) {
            return None;
        }
        let report = PhaseReport { number: last.map_or(0, |last| last.number) + 1, call, on_rail };
        self.0.insert(me, report);
        Some(report)
    }

    /// Returns the nodes that have not reported that they wait in call `call`, where rank `me`
    /// waits on its rail.
    pub(super) fn late(&self, layout: &NodeMap, me: Rank, call: u64) -> Vec<usize> {
        let (own, local) = (layout.node_of(me), layout.local_rank(me));
        let waits = |node: usize| {
            // If the node's rank on this rail is a node leader, it must have reported that it waits
            // on its rail. Other ranks send no reports, so it suffices that the first rank of the
            // node is in the call.
            let place = if local < LEADERS_PER_NODE { local } else { 0 };
            let report = layout.ranks_of(node).get(place).and_then(|rank| self.0.get(rank));
            report.is_some_and(|report| {
                report.call > call || report.call == call && (report.on_rail || place != local)
            })
        };
        (0..layout.num_nodes()).filter(|&node| node != own && !waits(node)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node_map::RankLocation;

    fn layout(nodes: &[&str]) -> NodeMap {
        NodeMap::of(&nodes.iter().map(|node| RankLocation::on(node)).collect::<Vec<_>>())
    }

    fn on_rail(number: u64, call: u64) -> PhaseReport {
        PhaseReport { number, call, on_rail: true }
    }

    #[test]
    fn who_has_not_said_that_it_waits_is_late() {
        let layout = layout(&["a", "a", "b", "b", "c", "c"]);
        let mut progress = ProgressTable::default();
        assert_eq!(progress.late(&layout, Rank(0), 5), [1, 2]);
        assert!(
            progress.told(Rank(2), on_rail(2, 5)) && !progress.told(Rank(2), on_rail(2, 5)),
            "once"
        );
        assert!(!progress.told(Rank(2), on_rail(1, 4)), "old news");
        assert_eq!(progress.late(&layout, Rank(0), 5), [2]);
        assert_eq!(
            progress.late(&layout, Rank(1), 5),
            [1, 2],
            "of the other rail nothing is known"
        );
        progress.told(Rank(4), PhaseReport { on_rail: false, ..on_rail(1, 5) });
        assert_eq!(progress.late(&layout, Rank(0), 5), [2], "it waits for a rank of its own node");
        progress.told(Rank(4), PhaseReport { on_rail: false, ..on_rail(2, 6) });
        assert_eq!(progress.late(&layout, Rank(0), 5), [] as [usize; 0], "all have come");
    }

    #[test]
    fn what_lasts_is_told_once_for_each_phase() {
        let (three, two) = (layout(&["a", "b", "c"]), layout(&["a", "b"]));
        let (mut progress, now) = (ProgressTable::default(), Instant::now());
        let since = |ms: u64| now.checked_sub(Duration::from_millis(ms)).expect("uptime");
        let waiting = |number, ms, on_rail| {
            Some(BlockedCall {
                number,
                name: "barrier",
                since: since(900),
                phase_since: since(ms),
                on_rail,
            })
        };
        assert_eq!(progress.due(&three, Rank(0), None, now), None);
        assert_eq!(progress.due(&three, Rank(0), waiting(1, 100, true), now), None, "not long yet");
        assert_eq!(
            progress.due(&two, Rank(0), waiting(1, 300, true), now),
            None,
            "it is the other node"
        );
        assert_eq!(progress.due(&three, Rank(0), waiting(1, 300, true), now), Some(on_rail(1, 1)));
        assert_eq!(progress.due(&three, Rank(0), waiting(1, 400, true), now), None, "told");
        assert_eq!(
            progress.due(&three, Rank(0), waiting(1, 300, false), now),
            Some(PhaseReport { on_rail: false, ..on_rail(2, 1) })
        );
    }
}
