//! Which ranks of a group are on which node, for groups that span several.
//!
//! Ranks share a node if their [`NodeId`]s are equal; containers that share no namespaces count as
//! separate nodes.

use crate::rank::{Rank, name_ranks};
use crate::sys::node_id::NodeId;

/// Where a rank runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankLocation {
    /// Identity of its node.
    pub node: NodeId,
    /// Name of its node, for messages.
    pub name: String,
    /// Id of its process there.
    pub pid: u32,
}

impl RankLocation {
    /// Returns a location on the node `name`, for tests.
    pub fn on(name: &str) -> Self {
        Self { node: NodeId { boot: name.into(), ..NodeId::default() }, name: name.into(), pid: 7 }
    }
}

/// Ranks of a group by node: nodes in the order of their lowest ranks, and the ranks of a node in
/// order. Every rank computes the same map.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeMap {
    /// Ranks of each node.
    members: Vec<Vec<Rank>>,
    /// Node and local rank of each rank.
    seats: Vec<(usize, usize)>,
    /// Name of each node.
    names: Vec<String>,
    /// Process of each rank.
    pids: Vec<u32>,
}

impl NodeMap {
    /// Makes the map of the group whose ranks are at `placements`, in the order of ranks.
    pub fn of(placements: &[RankLocation]) -> Self {
        let mut nodes: Vec<&NodeId> = Vec::new();
        let mut map =
            Self { members: Vec::new(), seats: Vec::new(), names: Vec::new(), pids: Vec::new() };
        for (rank, place) in (0..).map(Rank).zip(placements) {
            let node = nodes.iter().position(|&known| *known == place.node).unwrap_or_else(|| {
                nodes.push(&place.node);
                map.members.push(Vec::new());
                map.names.push(place.name.clone());
                nodes.len() - 1
            });
            map.seats.push((node, map.members[node].len()));
            map.members[node].push(rank);
            map.pids.push(place.pid);
        }
        map
    }

    /// Number of ranks.
    pub fn size(&self) -> usize {
        self.seats.len()
    }

    /// Number of nodes.
    pub fn num_nodes(&self) -> usize {
        self.members.len()
    }

    /// Number of rails, which is the number of local ranks that every node has.
    pub fn num_rails(&self) -> usize {
        self.members.iter().map(Vec::len).min().unwrap_or(0)
    }

    /// Node of `rank`.
    pub fn node_of(&self, rank: Rank) -> usize {
        self.seats[rank.index()].0
    }

    /// Local rank of `rank`: its index among the ranks of its node.
    pub fn local_rank(&self, rank: Rank) -> usize {
        self.seats[rank.index()].1
    }

    /// Ranks of `node`, in order.
    pub fn ranks_of(&self, node: usize) -> &[Rank] {
        &self.members[node]
    }

    /// `node "a" (ranks 0 and 1)`: how messages name a node.
    pub fn name_node(&self, node: usize) -> String {
        format!("node {:?} ({})", self.names[node], name_ranks(&self.members[node]))
    }

    /// Name of `node`.
    pub fn node_name(&self, node: usize) -> &str {
        &self.names[node]
    }

    /// All nodes except `node`, as messages name them.
    pub fn name_others(&self, node: usize) -> String {
        let others: Vec<String> = (0..self.num_nodes())
            .filter(|&other| other != node)
            .map(|other| self.name_node(other))
            .collect();
        others.join(", ")
    }

    /// `rank 2 (node "b", pid 77)`: how messages name a rank.
    pub fn describe(&self, rank: Rank) -> String {
        format!(
            "rank {rank} (node {:?}, pid {})",
            self.names[self.node_of(rank)],
            self.pids[rank.index()]
        )
    }
}

/// Why two ranks with different [`NodeId`]s cannot share memory, and what helps, as a sentence.
pub fn apart((first, here): (u32, &RankLocation), (other, there): (u32, &RankLocation)) -> String {
    let names = if here.name == there.name {
        format!("{:?}", here.name)
    } else {
        format!("{:?} and {:?}", here.name, there.name)
    };
    if here.node.boot != there.node.boot {
        return format!("run on different nodes ({names}, which have booted apart)");
    }
    if here.node.test != there.node.test {
        return format!("run on different nodes ({names}, by SYMM_TEST_NODE)");
    }
    let (namespaces, options): (Vec<&str>, Vec<&str>) =
        here.node.namespaces_apart(&there.node).into_iter().unzip();
    let options: Vec<&str> = options.into_iter().filter(|option| !option.is_empty()).collect();
    let help = if options.is_empty() {
        "start them in one".into()
    } else {
        format!("start the containers with {}, or all ranks in one", options.join(" "))
    };
    let noun = if namespaces.len() == 1 { "namespace" } else { "namespaces" };
    format!(
        "run in different containers of one node ({names}): rank {other} has another {} {noun} \
         than rank {first}; {help}",
        namespaces.join(", ")
    )
}

/// Returns how to start those ranks at `placements` that could share memory but count as several
/// nodes; `None` if no such ranks exist.
pub fn advice(placements: &[RankLocation]) -> Option<String> {
    let numbered = || (0..).zip(placements);
    let container = |node: &NodeId, other: &NodeId| {
        node != other && node.boot == other.boot && node.test == other.test
    };
    numbered().find_map(|one| {
        let other = numbered().find(|(_, other)| container(&one.1.node, &other.node))?;
        Some(format!("ranks {} and {} {}, to share memory", one.0, other.0, apart(one, other)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn place(node: u8) -> RankLocation {
        RankLocation { pid: 100 + u32::from(node), ..RankLocation::on(&format!("node{node}")) }
    }

    #[test]
    fn nodes_are_in_the_order_of_their_lowest_ranks() {
        let map = NodeMap::of(&[7, 3, 7, 7, 3].map(place));
        assert_eq!((map.num_nodes(), map.num_rails(), map.size()), (2, 2, 5));
        assert_eq!(map.ranks_of(0), [Rank(0), Rank(2), Rank(3)]);
        assert_eq!((map.node_of(Rank(4)), map.local_rank(Rank(4))), (1, 1));
        assert_eq!(map.name_node(0), "node \"node7\" (ranks 0, 2 and 3)");
        assert_eq!(map.name_others(0), "node \"node3\" (ranks 1 and 4)");
        assert_eq!(map.describe(Rank(1)), "rank 1 (node \"node3\", pid 103)");
    }

    proptest! {
        #[test]
        fn every_rank_has_one_seat(nodes in proptest::collection::vec(0u8..5, 1..40)) {
            let map = NodeMap::of(&nodes.iter().copied().map(place).collect::<Vec<_>>());
            for (rank, &node) in (0..).map(Rank).zip(&nodes) {
                prop_assert_eq!(map.ranks_of(map.node_of(rank))[map.local_rank(rank)], rank);
                prop_assert_eq!(&map.names[map.node_of(rank)], &format!("node{node}"));
            }
            let seats: usize = (0..map.num_nodes()).map(|node| map.ranks_of(node).len()).sum();
            prop_assert_eq!(seats, map.size());
            for node in 0..map.num_nodes() {
                let ranks = map.ranks_of(node);
                prop_assert!(ranks.is_sorted() && ranks.len() >= map.num_rails());
            }
            let lowest: Vec<Rank> =
                (0..map.num_nodes()).map(|node| map.ranks_of(node)[0]).collect();
            prop_assert!(lowest.is_sorted());
        }
    }

    #[test]
    fn containers_of_one_node_are_advised_and_nodes_are_not() {
        let within = |pid: &str| RankLocation {
            node: NodeId { pid: pid.into(), ..place(1).node },
            ..place(1)
        };
        assert_eq!(advice(&[place(1), place(2), place(1)]), None);
        assert_eq!(
            advice(&[place(2), within("p"), within("p"), within("q")]).as_deref(),
            Some(
                "ranks 1 and 3 run in different containers of one node (\"node1\"): rank 3 has \
                 another pid namespace than rank 1; \
                 start the containers with --pid=host, or all ranks in one, to share memory"
            )
        );
    }
}
