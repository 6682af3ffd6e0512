//! Progress: which ranks wait in a long call for other hosts, so that those which have not come to it can be told from the others.
//!
//! A backend tells a rank only that all others have answered. So a speaker that waits for long, in the same phase, says so: the rank, the
//! number of the call, and whether it waits on its rail. Whoever has not said that it waits there is late. On two hosts nobody says anything:
//! it is the other one. Reports of a rank are numbered, since they come by two ways.

use super::{SPEAKERS, Waiting};
use crate::host_map::HostMap;
use crate::rank::Rank;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Time in one phase of a call after which a rank says that it waits.
const LONG: Duration = Duration::from_millis(200);

/// What a rank says of the call that it waits in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Report {
    /// Number of the report among those of its rank, from 1.
    pub(super) number: u64,
    /// Number of the call.
    pub(super) call: u64,
    /// Whether it waits on its rail; else inside its host.
    pub(super) on_rail: bool,
}

/// The last reports of all speakers.
#[derive(Default)]
pub(super) struct Progress(BTreeMap<Rank, Report>);

impl Progress {
    /// Notes what `rank` says; whether that is new.
    pub(super) fn told(&mut self, rank: Rank, report: Report) -> bool {
        let new = self.0.get(&rank).is_none_or(|known| known.number < report.number);
        if new {
            self.0.insert(rank, report);
        }
        new
    }

    /// What rank `me`, in the call `waiting`, is to say now, if anything: it is noted.
    pub(super) fn due(&mut self, layout: &HostMap, me: Rank, waiting: Option<Waiting>, now: Instant) -> Option<Report> {
        let long = |waiting: &Waiting| layout.hosts() > 2 && now.saturating_duration_since(waiting.phase_since) >= LONG;
        let Waiting { number: call, on_rail, .. } = waiting.filter(long)?;
        let last = self.0.get(&me);
        if last.is_some_and(|last| (last.call, last.on_rail) == (call, on_rail)) {
            return None;
        }
        let report = Report { number: last.map_or(0, |last| last.number) + 1, call, on_rail };
        self.0.insert(me, report);
        Some(report)
    }

    /// Hosts that have not come to where rank `me` waits, on its rail in call `call`; none if that cannot be told.
    pub(super) fn late(&self, layout: &HostMap, me: Rank, call: u64) -> Vec<usize> {
        let (own, local) = (layout.host(me), layout.local(me));
        let came = |host: usize| {
            // Who has this rail, if it speaks; else it is enough that the first rank of the host is in the call.
            let place = if local < SPEAKERS { local } else { 0 };
            let report = layout.members(host).get(place).and_then(|rank| self.0.get(rank));
            report.is_some_and(|report| report.call > call || report.call == call && (report.on_rail || place != local))
        };
        (0..layout.hosts()).filter(|&host| host != own && !came(host)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host_map::Placement;

    fn layout(hosts: &[&str]) -> HostMap {
        HostMap::of(&hosts.iter().map(|host| Placement::on(host)).collect::<Vec<_>>())
    }

    fn on_rail(number: u64, call: u64) -> Report {
        Report { number, call, on_rail: true }
    }

    #[test]
    fn who_has_not_said_that_it_waits_is_late() {
        let layout = layout(&["a", "a", "b", "b", "c", "c"]);
        let mut progress = Progress::default();
        assert_eq!(progress.late(&layout, Rank(0), 5), [1, 2]);
        assert!(progress.told(Rank(2), on_rail(2, 5)) && !progress.told(Rank(2), on_rail(2, 5)), "once");
        assert!(!progress.told(Rank(2), on_rail(1, 4)), "old news");
        assert_eq!(progress.late(&layout, Rank(0), 5), [2]);
        assert_eq!(progress.late(&layout, Rank(1), 5), [1, 2], "of the other rail nothing is known");
        progress.told(Rank(4), Report { on_rail: false, ..on_rail(1, 5) });
        assert_eq!(progress.late(&layout, Rank(0), 5), [2], "it waits for a rank of its own host");
        progress.told(Rank(4), Report { on_rail: false, ..on_rail(2, 6) });
        assert_eq!(progress.late(&layout, Rank(0), 5), [] as [usize; 0], "all have come");
    }

    #[test]
    fn what_lasts_is_told_once_for_each_phase() {
        let (three, two) = (layout(&["a", "b", "c"]), layout(&["a", "b"]));
        let (mut progress, now) = (Progress::default(), Instant::now());
        let since = |ms: u64| now.checked_sub(Duration::from_millis(ms)).expect("uptime");
        let waiting = |number, ms, on_rail| Some(Waiting { number, name: "barrier", since: since(900), phase_since: since(ms), on_rail });
        assert_eq!(progress.due(&three, Rank(0), None, now), None);
        assert_eq!(progress.due(&three, Rank(0), waiting(1, 100, true), now), None, "not long yet");
        assert_eq!(progress.due(&two, Rank(0), waiting(1, 300, true), now), None, "it is the other host");
        assert_eq!(progress.due(&three, Rank(0), waiting(1, 300, true), now), Some(on_rail(1, 1)));
        assert_eq!(progress.due(&three, Rank(0), waiting(1, 400, true), now), None, "told");
        assert_eq!(progress.due(&three, Rank(0), waiting(1, 300, false), now), Some(Report { on_rail: false, ..on_rail(2, 1) }));
    }
}
