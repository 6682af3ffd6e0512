//! Traffic: what the groups of this process have sent to other hosts, and received from them.

use crate::config::Engines;
use crate::error::{Error, Result};
use crate::lock::lock;
use crate::messages::links::{self, Links};
use crate::rank::Rank;
use crate::sys::fork::PerProcess;
use serde::Serialize;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// What connects this rank with ranks of other hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Path {
    /// A rail, of CPU tensors.
    Rail(usize),
    /// The link with a rank of this number in the default group, of CPU tensors.
    Link(Rank),
    /// A rail, of CUDA tensors.
    CudaRail(usize),
    /// The backend of all ranks, of CUDA tensors.
    CudaAll,
    /// The backend of this rank and one of this number in the default group, of CUDA tensors.
    CudaPair(Rank),
}

impl Path {
    /// Its name, where `engines` connect hosts.
    fn name(self, Engines { cpu, cuda }: &Engines) -> String {
        match self {
            Self::Rail(rail) => format!("{cpu} rail {rail}"),
            Self::Link(peer) => format!("{cpu} rank {peer}"),
            Self::CudaRail(rail) => format!("{cuda} rail {rail}"),
            Self::CudaAll => format!("{cuda} all ranks"),
            Self::CudaPair(peer) => format!("{cuda} rank {peer}"),
        }
    }
}

/// What has gone by a path. Bytes count once for each host that they go to; what a backend forwards for others does not count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Count {
    /// Collectives that used the path; of a link or pair: sends and receives that named its peer.
    pub calls: u64,
    /// Transfers that were begun.
    pub transfers: u64,
    /// Bytes to other hosts.
    pub sent: u64,
    /// Bytes from other hosts.
    pub received: u64,
    /// Transfers of the calls that were counted.
    #[serde(skip)]
    seen: u64,
}

/// What has gone by the paths of one group, and of those of this name before it.
#[derive(Default)]
pub(super) struct Traffic(Mutex<BTreeMap<Path, Count>>);

/// Maximum number of ended groups whose traffic is kept.
const KEPT: usize = 64;

/// By the name of the group, and what connects its hosts; in the order in which the groups began.
type Groups = Vec<((String, Engines), Arc<Traffic>)>;

static GROUPS: PerProcess<Mutex<Groups>> = PerProcess::new(Mutex::default);

impl Traffic {
    /// Traffic of the group `name` of this process, whose hosts `engines` connect. Of ended groups the oldest are forgotten.
    pub(super) fn of(name: &str, engines: &Engines) -> Arc<Self> {
        let mut groups = lock(GROUPS.get());
        if let Some((_, known)) = groups.iter().find(|((group, by), _)| group == name && by == engines) {
            return Arc::clone(known);
        }
        let is_ended = |traffic: &Arc<Self>| Arc::strong_count(traffic) == 1;
        if groups.iter().filter(|(_, traffic)| is_ended(traffic)).count() >= KEPT
            && let Some(oldest) = groups.iter().position(|(_, traffic)| is_ended(traffic))
        {
            groups.remove(oldest);
        }
        let traffic = Arc::<Self>::default();
        groups.push(((name.to_owned(), engines.clone()), Arc::clone(&traffic)));
        traffic
    }

    /// Counts a transfer that brings `(sent, received)` bytes.
    pub(super) fn add(&self, path: Path, (sent, received): (usize, usize)) {
        let mut all = lock(&self.0);
        let count = all.entry(path).or_default();
        count.transfers += 1;
        count.sent += sent as u64;
        count.received += received as u64;
    }

    /// Counts a send or receive of the path's peer.
    pub(super) fn message(&self, path: Path) {
        lock(&self.0).entry(path).or_default().calls += 1;
    }

    /// A collective has ended, or was enqueued: it counts for those of `paths` that have had transfers since the one before.
    pub(super) fn ended(&self, paths: &[Path]) {
        let mut all = lock(&self.0);
        for path in paths {
            if let Some(count) = all.get_mut(path).filter(|count| count.transfers > count.seen) {
                (count.calls, count.seen) = (count.calls + 1, count.transfers);
            }
        }
    }
}

/// `{group: {path: count}}` of this process; groups in the order of their names.
pub fn counted() -> BTreeMap<String, BTreeMap<String, Count>> {
    let mut all: BTreeMap<String, BTreeMap<String, Count>> = BTreeMap::new();
    for ((group, engines), traffic) in lock(GROUPS.get()).iter() {
        all.entry(group.clone()).or_default().extend(lock(&traffic.0).iter().map(|(path, count)| (path.name(engines), *count)));
    }
    all
}

/// Links whose bytes are counted.
pub(super) struct Counted {
    links: Arc<dyn Links>,
    traffic: Arc<Traffic>,
    globals: Vec<i32>,
}

impl Counted {
    /// `links` of a group whose ranks have these numbers in the default group; none: the same.
    pub(super) fn new(links: Arc<dyn Links>, traffic: &Arc<Traffic>, globals: &[i32]) -> Self {
        Self { links, traffic: Arc::clone(traffic), globals: globals.to_vec() }
    }

    fn path(&self, peer: Rank) -> Path {
        Path::Link(self.globals.get(peer.index()).map_or(peer, |&global| Rank(global as u32)))
    }
}

impl Links for Counted {
    fn make(&self, peer: Rank, name: &str, second: bool, timeout: Duration) -> Result<()> {
        self.links.make(peer, name, second, timeout)
    }

    fn send(&self, peer: Rank, frame: &[u8], traffic: links::Traffic, payload: &[u8]) -> Result<()> {
        self.traffic.add(self.path(peer), (frame.len() + payload.len(), 0));
        self.links.send(peer, frame, traffic, payload)
    }

    fn confirm(&self, peer: Rank, sends: u64) {
        self.links.confirm(peer, sends);
    }

    fn listen(&self, peer: Rank, traffic: links::Traffic, bytes: usize) -> Result<()> {
        self.links.listen(peer, traffic, bytes)
    }

    fn flush(&self) -> Vec<(Rank, Error)> {
        self.links.flush()
    }

    fn wait(&self, peer: Rank, traffic: links::Traffic) -> Result<Option<usize>> {
        self.links.wait(peer, traffic)
    }

    fn came(&self, peer: Rank, bytes: usize) {
        self.traffic.add(self.path(peer), (0, bytes));
        self.links.came(peer, bytes);
    }

    fn release(&self, peer: Rank, traffic: links::Traffic) {
        self.links.release(peer, traffic);
    }

    fn close(&self, peer: Rank) {
        self.links.close(peer);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_count_where_they_move_bytes() {
        let engines = |cpu: &str| Engines { cpu: cpu.into(), cuda: String::new() };
        let traffic = Traffic::of("calls_count_where_they_move_bytes", &engines("gloo"));
        let other = Traffic::of("calls_count_where_they_move_bytes", &engines("mine"));
        other.message(Path::Link(Rank(3)));
        traffic.add(Path::Rail(1), (10, 20));
        traffic.add(Path::Rail(1), (1, 2));
        let both = [Path::Rail(1), Path::CudaAll];
        traffic.ended(&both);
        traffic.ended(&both);
        traffic.message(Path::Link(Rank(3)));
        let all = counted();
        let rail = Count { calls: 1, transfers: 2, sent: 11, received: 22, seen: 2 };
        let paths = &all["calls_count_where_they_move_bytes"];
        assert_eq!((paths.len(), paths["gloo rail 1"], paths["gloo rank 3"].calls, paths["mine rank 3"].calls), (3, rail, 1, 1));
    }

    #[test]
    fn the_oldest_ended_groups_are_forgotten() {
        let engines = Engines { cpu: "gloo".into(), cuda: String::new() };
        let of = |number: usize| Traffic::of(&format!("ended-{number:04}"), &engines);
        let lives = of(0);
        (1..=10 * KEPT).for_each(|number| of(number).message(Path::Rail(0)));
        lives.message(Path::Rail(0));
        let known: Vec<String> = counted().into_keys().filter(|name| name.starts_with("ended-")).collect();
        assert!(known.len() <= KEPT + 1, "{}", known.len());
        assert_eq!((known.first().map(String::as_str), known.last()), (Some("ended-0000"), Some(&format!("ended-{:04}", 10 * KEPT))));
    }
}
