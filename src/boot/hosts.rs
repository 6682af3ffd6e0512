//! Which ranks of a group are on which host, for groups that span several.
//!
//! Ranks share a host where their [`Host`]s are equal; containers that share no namespaces are hosts of their own. The default group finds
//! out through the store, once. Every later group of the process computes its layout from that, without a word to anybody.

use super::{Clock, PAUSE, PAUSE_MAX};
use crate::config::HostsChoice;
use crate::error::{Error, Result};
use crate::rank::{Rank, name_ranks};
use crate::store::Store;
use crate::store::prefix::PrefixStore;
use crate::store::until::Until;
use crate::sys::fork::PerProcess;
use crate::sys::host::{self, Host};
use crate::sys::interrupt;
use serde::{Deserialize, Serialize};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// Where a rank runs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Placement {
    /// Identity of its host.
    pub host: Host,
    /// Name of its host, for messages.
    pub name: String,
    /// Id of its process there.
    pub pid: u32,
}

impl Placement {
    /// Placement of this process.
    pub fn own() -> Result<Self> {
        let host = Host::own()?;
        let name = if host.test.is_empty() { host::name() } else { host.test.clone() };
        Ok(Self { host, name, pid: std::process::id() })
    }
}

/// Ranks of a group by host. Hosts are in the order of their lowest ranks, the ranks of a host in order; every rank computes the same.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Ranks of each host.
    members: Vec<Vec<Rank>>,
    /// Host of each rank, and its index there.
    seats: Vec<(usize, usize)>,
    /// Name of each host.
    names: Vec<String>,
    /// Process of each rank.
    pids: Vec<u32>,
}

impl Layout {
    /// Layout of the group whose ranks are at `placements`, in the order of ranks.
    pub fn of(placements: &[Placement]) -> Self {
        let mut hosts: Vec<&Host> = Vec::new();
        let mut layout = Self { members: Vec::new(), seats: Vec::new(), names: Vec::new(), pids: Vec::new() };
        for (rank, place) in (0..).map(Rank).zip(placements) {
            let host = hosts.iter().position(|&known| *known == place.host).unwrap_or_else(|| {
                hosts.push(&place.host);
                layout.members.push(Vec::new());
                layout.names.push(place.name.clone());
                hosts.len() - 1
            });
            layout.seats.push((host, layout.members[host].len()));
            layout.members[host].push(rank);
            layout.pids.push(place.pid);
        }
        layout
    }

    /// Number of ranks.
    pub fn size(&self) -> usize {
        self.seats.len()
    }

    /// Number of hosts.
    pub fn hosts(&self) -> usize {
        self.members.len()
    }

    /// Number of rails: of local indices that every host has.
    pub fn rails(&self) -> usize {
        self.members.iter().map(Vec::len).min().unwrap_or(0)
    }

    /// Host of `rank`.
    pub fn host(&self, rank: Rank) -> usize {
        self.seats[rank.index()].0
    }

    /// Index of `rank` among the ranks of its host.
    pub fn local(&self, rank: Rank) -> usize {
        self.seats[rank.index()].1
    }

    /// Ranks of `host`, in order.
    pub fn members(&self, host: usize) -> &[Rank] {
        &self.members[host]
    }

    /// `host "a" (ranks 0 and 1)`: how messages name a host.
    pub fn name_host(&self, host: usize) -> String {
        format!("host {:?} ({})", self.names[host], name_ranks(&self.members[host]))
    }

    /// Name of `host`.
    pub fn host_name(&self, host: usize) -> &str {
        &self.names[host]
    }

    /// All hosts but `host`, as messages name them.
    pub fn name_others(&self, host: usize) -> String {
        let others: Vec<String> = (0..self.hosts()).filter(|&other| other != host).map(|other| self.name_host(other)).collect();
        others.join(", ")
    }

    /// `rank 2 (host "b", pid 77)`: how messages name a rank.
    pub fn describe(&self, rank: Rank) -> String {
        format!("rank {rank} (host {:?}, pid {})", self.names[self.host(rank)], self.pids[rank.index()])
    }
}

/// Group whose hosts are asked for.
#[derive(Clone, Copy, Debug)]
pub struct Question<'a> {
    /// Name of the group, the same on all ranks.
    pub group: &'a str,
    /// Number of this rank.
    pub rank: Rank,
    /// Number of ranks.
    pub size: u32,
    /// Tells attempts of one job apart that share a store.
    pub restart: &'a str,
    /// Limit of finding out.
    pub timeout: Duration,
}

impl Question<'_> {
    fn prefix(&self) -> String {
        format!("symm/{}/{}/hosts", self.group, self.restart)
    }

    /// Places of all ranks, in their order: each says where it is, and waits for all others.
    ///
    /// # Errors
    /// `Timeout` names the ranks that did not say it.
    pub fn ask(&self, store: &dyn Store) -> Result<Vec<Placement>> {
        let clock = Clock::start(self.timeout);
        let about = format!("group {:?} of {} ranks", self.group, self.size);
        let purpose = format!("rank {} (pid {}) could not find the hosts of {about}", self.rank, std::process::id());
        let store = PrefixStore::new(&self.prefix(), Until::new(store, clock.deadline, purpose));
        let own = serde_json::to_vec(&Placement::own()?).map_err(|error| Error::internal(format!("a place cannot be written: {error}")))?;
        store.set(&self.rank.to_string(), &own)?;
        let names: Vec<String> = (0..self.size).map(|rank| rank.to_string()).collect();
        let keys: Vec<&str> = names.iter().map(String::as_str).collect();
        while !store.check(&keys)? {
            interrupt::check()?;
            if clock.remaining().is_zero() {
                let missing: Vec<Rank> =
                    (0..self.size).map(Rank).filter(|rank| !store.check(&[&rank.to_string()]).unwrap_or(true)).collect();
                return Err(Error::timeout(format!(
                    "{} did not say within {:.1} s on which host they are, to join {about}: they did not come, or do not have the same \
                     SYMM_HOSTS (timeout)",
                    name_ranks(&missing),
                    clock.waited()
                )));
            }
            std::thread::sleep((clock.started.elapsed() / 4).clamp(PAUSE * self.size, PAUSE_MAX).min(clock.remaining()));
        }
        let said = store.multi_get(&keys, Some(clock.remaining().max(PAUSE_MAX)))?;
        let read = |(rank, bytes): (usize, &bytes::Bytes)| {
            serde_json::from_slice(bytes)
                .map_err(|error| Error::config(format!("what rank {rank} says of its host cannot be read: {error}")))
        };
        said.iter().enumerate().map(read).collect()
    }

    /// Removes what this rank has said; all others have read it.
    pub fn withdraw(&self, store: &dyn Store) {
        // A store that cannot delete keeps it; one that is gone needs no care.
        let _ =
            PrefixStore::new(&self.prefix(), Until::new(store, std::time::Instant::now(), String::new())).delete(&self.rank.to_string());
    }
}

/// What the default group has found out.
#[derive(Clone, Debug)]
pub struct Known {
    /// Places of its ranks.
    pub placements: Vec<Placement>,
    /// What connects its hosts.
    pub choice: HostsChoice,
}

static KNOWN: PerProcess<Mutex<Option<Known>>> = PerProcess::new(|| Mutex::new(None));

/// Keeps what the default group knows for the groups that follow, or forgets an earlier one's.
pub fn remember(known: Option<Known>) {
    *KNOWN.get().lock().unwrap_or_else(PoisonError::into_inner) = known;
}

/// What the default group knows, if it has asked where its ranks are.
pub fn known() -> Option<Known> {
    KNOWN.get().lock().unwrap_or_else(PoisonError::into_inner).clone()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn place(host: u8) -> Placement {
        Placement { host: Host { boot: host.to_string(), ..Host::default() }, name: format!("node{host}"), pid: 100 + u32::from(host) }
    }

    #[test]
    fn hosts_are_in_the_order_of_their_lowest_ranks() {
        let layout = Layout::of(&[7, 3, 7, 7, 3].map(place));
        assert_eq!((layout.hosts(), layout.rails(), layout.size()), (2, 2, 5));
        assert_eq!(layout.members(0), [Rank(0), Rank(2), Rank(3)]);
        assert_eq!((layout.host(Rank(4)), layout.local(Rank(4))), (1, 1));
        assert_eq!(layout.name_host(0), "host \"node7\" (ranks 0, 2 and 3)");
        assert_eq!(layout.name_others(0), "host \"node3\" (ranks 1 and 4)");
        assert_eq!(layout.describe(Rank(1)), "rank 1 (host \"node3\", pid 103)");
    }

    proptest! {
        #[test]
        fn every_rank_has_one_seat(hosts in proptest::collection::vec(0u8..5, 1..40)) {
            let layout = Layout::of(&hosts.iter().copied().map(place).collect::<Vec<_>>());
            for (rank, &host) in (0..).map(Rank).zip(&hosts) {
                prop_assert_eq!(layout.members(layout.host(rank))[layout.local(rank)], rank);
                prop_assert_eq!(&layout.names[layout.host(rank)], &format!("node{host}"));
            }
            let seats: usize = (0..layout.hosts()).map(|host| layout.members(host).len()).sum();
            prop_assert_eq!(seats, layout.size());
            prop_assert!((0..layout.hosts()).all(|host| layout.members(host).is_sorted() && layout.members(host).len() >= layout.rails()));
            let lowest: Vec<Rank> = (0..layout.hosts()).map(|host| layout.members(host)[0]).collect();
            prop_assert!(lowest.is_sorted());
        }
    }

    #[test]
    fn ranks_find_each_other_and_name_who_is_missing() {
        let store = crate::store::memory::MemoryStore::default();
        let ask = |rank, size, seconds| {
            Question { group: "g", rank: Rank(rank), size, restart: "0", timeout: Duration::from_millis(seconds) }.ask(&store)
        };
        let error = ask(1, 3, 60).expect_err("nobody else comes");
        assert!(error.message.starts_with("ranks 0 and 2 did not say within 0."), "{error}");
        std::thread::scope(|scope| {
            let others: Vec<_> = [0, 2].map(|rank| scope.spawn(move || ask(rank, 3, 5000))).into();
            let placements = ask(1, 3, 5000).expect("all come");
            assert_eq!(Layout::of(&placements).hosts(), 1);
            for other in others {
                assert_eq!(other.join().expect("no panic"), Ok(placements.clone()));
            }
        });
    }
}
