//! Traffic: the bytes that the groups of this process exchange with other nodes.

use crate::config::InterNodeBackends;
use crate::lock::lock;
use crate::rank::Rank;
use crate::sys::fork::PerProcess;
use serde::Serialize;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

/// A path from this rank to ranks of other nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum TrafficPath {
    /// A rail for CPU tensors.
    Rail(usize),
    /// The wire for CPU tensors to a rank with this number in the default group.
    Link(Rank),
    /// A rail for CUDA tensors.
    CudaRail(usize),
    /// The backend of all ranks for CUDA tensors.
    CudaAll,
    /// The backend for CUDA tensors of this rank and another with this number in the default group.
    CudaPair(Rank),
}

impl TrafficPath {
    /// Returns the name of the path in a group with these inter-node `backends`.
    fn name(self, InterNodeBackends { cpu, cuda }: &InterNodeBackends) -> String {
        match self {
            Self::Rail(rail) => format!("{cpu} rail {rail}"),
            Self::Link(peer) => format!("{cpu} rank {peer}"),
            Self::CudaRail(rail) => format!("{cuda} rail {rail}"),
            Self::CudaAll => format!("{cuda} all ranks"),
            Self::CudaPair(peer) => format!("{cuda} rank {peer}"),
        }
    }
}

/// The traffic of a path. Bytes count once for each node to which they are sent; bytes that a
/// backend forwards do not count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PathStats {
    /// Number of collectives that used the path; on a wire or a pair, the number of sends and
    /// receives that named its peer.
    pub calls: u64,
    /// Number of transfers started.
    pub transfers: u64,
    /// Bytes sent to other nodes.
    pub sent: u64,
    /// Bytes received from other nodes.
    pub received: u64,
    /// Value of `transfers` when `calls` was last counted.
    #[serde(skip)]
    seen: u64,
}

/// The traffic of one group, including earlier groups of the same name.
#[derive(Default)]
pub(super) struct GroupTraffic(Mutex<BTreeMap<TrafficPath, PathStats>>);

/// Maximum number of ended groups whose traffic is kept.
const KEPT: usize = 64;

/// Traffic by group name and inter-node backends, in the order in which the groups were created.
type Groups = Vec<((String, InterNodeBackends), Arc<GroupTraffic>)>;

static GROUPS: PerProcess<Mutex<Groups>> = PerProcess::new(Mutex::default);

impl GroupTraffic {
    /// Returns the traffic of the group `name` with the inter-node backends `backends`. Only the
    /// newest [`KEPT`] ended groups are kept.
    pub(super) fn of(name: &str, backends: &InterNodeBackends) -> Arc<Self> {
        let mut groups = lock(GROUPS.get());
        if let Some((_, known)) =
            groups.iter().find(|((group, by), _)| group == name && by == backends)
        {
            return Arc::clone(known);
        }
        let is_ended = |traffic: &Arc<Self>| Arc::strong_count(traffic) == 1;
        if groups.iter().filter(|(_, traffic)| is_ended(traffic)).count() >= KEPT
            && let Some(oldest) = groups.iter().position(|(_, traffic)| is_ended(traffic))
        {
            groups.remove(oldest);
        }
        let traffic = Arc::<Self>::default();
        groups.push(((name.to_owned(), backends.clone()), Arc::clone(&traffic)));
        traffic
    }

    /// Counts a transfer of `(sent, received)` bytes.
    pub(super) fn add(&self, path: TrafficPath, (sent, received): (usize, usize)) {
        let mut all = lock(&self.0);
        let count = all.entry(path).or_default();
        count.transfers += 1;
        count.sent += sent as u64;
        count.received += received as u64;
    }

    /// Counts a send or receive that names the path's peer.
    pub(super) fn message(&self, path: TrafficPath) {
        lock(&self.0).entry(path).or_default().calls += 1;
    }

    /// Counts a collective that has ended or was enqueued. It counts on each of `paths` on which
    /// transfers have started since the previous collective.
    pub(super) fn ended(&self, paths: &[TrafficPath]) {
        let mut all = lock(&self.0);
        for path in paths {
            if let Some(count) = all.get_mut(path).filter(|count| count.transfers > count.seen) {
                (count.calls, count.seen) = (count.calls + 1, count.transfers);
            }
        }
    }
}

/// Returns `{group: {path: count}}` of this process; groups are ordered by name.
pub fn counted() -> BTreeMap<String, BTreeMap<String, PathStats>> {
    let mut all: BTreeMap<String, BTreeMap<String, PathStats>> = BTreeMap::new();
    for ((group, backends), traffic) in lock(GROUPS.get()).iter() {
        all.entry(group.clone())
            .or_default()
            .extend(lock(&traffic.0).iter().map(|(path, count)| (path.name(backends), *count)));
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_count_where_they_move_bytes() {
        let backends = |cpu: &str| InterNodeBackends { cpu: cpu.into(), cuda: String::new() };
        let traffic = GroupTraffic::of("calls_count_where_they_move_bytes", &backends("gloo"));
        let other = GroupTraffic::of("calls_count_where_they_move_bytes", &backends("mine"));
        other.message(TrafficPath::Link(Rank(3)));
        traffic.add(TrafficPath::Rail(1), (10, 20));
        traffic.add(TrafficPath::Rail(1), (1, 2));
        let both = [TrafficPath::Rail(1), TrafficPath::CudaAll];
        traffic.ended(&both);
        traffic.ended(&both);
        traffic.message(TrafficPath::Link(Rank(3)));
        let all = counted();
        let rail = PathStats { calls: 1, transfers: 2, sent: 11, received: 22, seen: 2 };
        let paths = &all["calls_count_where_they_move_bytes"];
        assert_eq!(
            (
                paths.len(),
                paths["gloo rail 1"],
                paths["gloo rank 3"].calls,
                paths["mine rank 3"].calls
            ),
            (3, rail, 1, 1)
        );
    }

    #[test]
    fn the_oldest_ended_groups_are_forgotten() {
        let backends = InterNodeBackends { cpu: "gloo".into(), cuda: String::new() };
        let of = |number: usize| GroupTraffic::of(&format!("ended-{number:04}"), &backends);
        let lives = of(0);
        (1..=10 * KEPT).for_each(|number| of(number).message(TrafficPath::Rail(0)));
        lives.message(TrafficPath::Rail(0));
        let known: Vec<String> =
            counted().into_keys().filter(|name| name.starts_with("ended-")).collect();
        assert!(known.len() <= KEPT + 1, "{}", known.len());
        assert_eq!(
            (known.first().map(String::as_str), known.last()),
            (Some("ended-0000"), Some(&format!("ended-{:04}", 10 * KEPT)))
        );
    }
}
