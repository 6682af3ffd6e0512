//! Which ranks of a group are on which host, for groups that span several.
//!
//! Ranks share a host where their [`Host`]s are equal; containers that share no namespaces are hosts of their own.

use crate::rank::{Rank, name_ranks};
use crate::sys::host::Host;

/// Where a rank runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// Identity of its host.
    pub host: Host,
    /// Name of its host, for messages.
    pub name: String,
    /// Id of its process there.
    pub pid: u32,
}

impl Placement {
    /// A place on the host `name`, for tests.
    pub fn on(name: &str) -> Self {
        Self { host: Host { boot: name.into(), ..Host::default() }, name: name.into(), pid: 7 }
    }
}

/// Ranks of a group by host. Hosts are in the order of their lowest ranks, the ranks of a host in order; every rank computes the same.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostMap {
    /// Ranks of each host.
    members: Vec<Vec<Rank>>,
    /// Host of each rank, and its index there.
    seats: Vec<(usize, usize)>,
    /// Name of each host.
    names: Vec<String>,
    /// Process of each rank.
    pids: Vec<u32>,
}

impl HostMap {
    /// Map of the group whose ranks are at `placements`, in the order of ranks.
    pub fn of(placements: &[Placement]) -> Self {
        let mut hosts: Vec<&Host> = Vec::new();
        let mut map = Self { members: Vec::new(), seats: Vec::new(), names: Vec::new(), pids: Vec::new() };
        for (rank, place) in (0..).map(Rank).zip(placements) {
            let host = hosts.iter().position(|&known| *known == place.host).unwrap_or_else(|| {
                hosts.push(&place.host);
                map.members.push(Vec::new());
                map.names.push(place.name.clone());
                hosts.len() - 1
            });
            map.seats.push((host, map.members[host].len()));
            map.members[host].push(rank);
            map.pids.push(place.pid);
        }
        map
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

/// Sentence that says why two ranks, of different [`Host`]s, cannot share memory, and what helps.
pub fn apart((first, here): (u32, &Placement), (other, there): (u32, &Placement)) -> String {
    let names = if here.name == there.name { format!("{:?}", here.name) } else { format!("{:?} and {:?}", here.name, there.name) };
    if here.host.boot != there.host.boot {
        return format!("run on different hosts ({names}, which have booted apart)");
    }
    if here.host.test != there.host.test {
        return format!("run on different hosts ({names}, by SYMM_TEST_HOST)");
    }
    let (namespaces, options): (Vec<&str>, Vec<&str>) = here.host.namespaces_apart(&there.host).into_iter().unzip();
    let options: Vec<&str> = options.into_iter().filter(|option| !option.is_empty()).collect();
    let help = if options.is_empty() {
        "start them in one".into()
    } else {
        format!("start the containers with {}, or all ranks in one", options.join(" "))
    };
    let noun = if namespaces.len() == 1 { "namespace" } else { "namespaces" };
    format!(
        "run in different containers of one host ({names}): rank {other} has another {} {noun} than rank {first}; {help}",
        namespaces.join(", ")
    )
}

/// What to do about ranks at `placements` that could share memory, and count as being on several hosts, if there are any.
pub fn advice(placements: &[Placement]) -> Option<String> {
    let numbered = || (0..).zip(placements);
    let container = |host: &Host, other: &Host| host != other && host.boot == other.boot && host.test == other.test;
    numbered().find_map(|one| {
        let other = numbered().find(|(_, other)| container(&one.1.host, &other.host))?;
        Some(format!("ranks {} and {} {}, to share memory", one.0, other.0, apart(one, other)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn place(host: u8) -> Placement {
        Placement { pid: 100 + u32::from(host), ..Placement::on(&format!("node{host}")) }
    }

    #[test]
    fn hosts_are_in_the_order_of_their_lowest_ranks() {
        let map = HostMap::of(&[7, 3, 7, 7, 3].map(place));
        assert_eq!((map.hosts(), map.rails(), map.size()), (2, 2, 5));
        assert_eq!(map.members(0), [Rank(0), Rank(2), Rank(3)]);
        assert_eq!((map.host(Rank(4)), map.local(Rank(4))), (1, 1));
        assert_eq!(map.name_host(0), "host \"node7\" (ranks 0, 2 and 3)");
        assert_eq!(map.name_others(0), "host \"node3\" (ranks 1 and 4)");
        assert_eq!(map.describe(Rank(1)), "rank 1 (host \"node3\", pid 103)");
    }

    proptest! {
        #[test]
        fn every_rank_has_one_seat(hosts in proptest::collection::vec(0u8..5, 1..40)) {
            let map = HostMap::of(&hosts.iter().copied().map(place).collect::<Vec<_>>());
            for (rank, &host) in (0..).map(Rank).zip(&hosts) {
                prop_assert_eq!(map.members(map.host(rank))[map.local(rank)], rank);
                prop_assert_eq!(&map.names[map.host(rank)], &format!("node{host}"));
            }
            let seats: usize = (0..map.hosts()).map(|host| map.members(host).len()).sum();
            prop_assert_eq!(seats, map.size());
            prop_assert!((0..map.hosts()).all(|host| map.members(host).is_sorted() && map.members(host).len() >= map.rails()));
            let lowest: Vec<Rank> = (0..map.hosts()).map(|host| map.members(host)[0]).collect();
            prop_assert!(lowest.is_sorted());
        }
    }

    #[test]
    fn containers_of_one_host_are_advised_and_hosts_are_not() {
        let within = |pid: &str| Placement { host: Host { pid: pid.into(), ..place(1).host }, ..place(1) };
        assert_eq!(advice(&[place(1), place(2), place(1)]), None);
        assert_eq!(
            advice(&[place(2), within("p"), within("p"), within("q")]).as_deref(),
            Some(
                "ranks 1 and 3 run in different containers of one host (\"node1\"): rank 3 has another pid namespace than rank 1; \
                 start the containers with --pid=host, or all ranks in one, to share memory"
            )
        );
    }
}
