//! Finds the inter-node backends of a group, and its node map.

use super::oob::LEADERS_PER_NODE;
use super::rail::Life;
use crate::bootstrap::{self, Discovered, JoinOptions, Joined, MultiNodeRanks};
use crate::config::{Config, InterNodeBackends, InterNodeChoice};
use crate::error::{Error, Result};
use crate::lock::lock;
use crate::mem::layout::MAX_RANKS;
use crate::node_map::{NodeMap, RankLocation, advice};
use crate::rank::Rank;
use crate::store::Store;
use crate::sys::fork::PerProcess;
use crate::trace;
use std::sync::Mutex;
use std::time::Instant;

/// The placement of the default group. If it spans nodes, every later group of the process computes
/// its node map from this without communication.
#[derive(Clone, Debug)]
pub(super) struct DefaultGroupNodes {
    /// The nodes of its ranks.
    pub(super) placements: Vec<RankLocation>,
    /// Its inter-node backends.
    choice: InterNodeChoice,
    /// Its random id, once its nodes have connected.
    pub(super) life: Option<Life>,
}

static KNOWN: PerProcess<Mutex<Option<DefaultGroupNodes>>> = PerProcess::new(|| Mutex::new(None));

/// Returns the placement of the default group, if it spans nodes.
pub(super) fn known() -> Option<DefaultGroupNodes> {
    lock(KNOWN.get()).clone()
}

/// Records the random id of the default group.
pub(super) fn note_life(life: Life) {
    if let Some(known) = &mut *lock(KNOWN.get()) {
        known.life = Some(life);
    }
}

/// Returns the first of `members`, ranks in the default group, that an open group of this process
/// has lost, by its index, and the failure of that group.
pub(super) fn lost(members: impl Iterator<Item = Rank>) -> Option<(Rank, Error)> {
    let failures = trace::peer_failures();
    if failures.is_empty() {
        return None;
    }
    let placements = known()?.placements;
    let members: Vec<Rank> = members.collect();
    failures.into_iter().find_map(|(group, globals, failure)| {
        // The pids in the failure must be those of the present default group, because a rank that
        // has joined again is another process.
        let placed = globals.iter().map(|&global| placements.get(global as usize).cloned());
        let layout = NodeMap::of(&placed.collect::<Option<Vec<_>>>()?);
        let lost = |member: &Rank| {
            let rank = globals.iter().position(|&global| global == member.0);
            rank.is_some_and(|rank| is_lost(&layout, Rank(rank as u32), &group, &failure.message))
        };
        let at = members.iter().position(lost)?;
        Some((Rank(at as u32), failure))
    })
}

/// Returns true if `failure`, of the group of this name and node map, says that `rank` or its node
/// is lost. The first failure of a group reaches all ranks only as text.
fn is_lost(layout: &NodeMap, rank: Rank, group: &str, failure: &str) -> bool {
    let says = |who: String, how| failure.contains(&format!("{who} of group \"{group}\" {how}"));
    // Only the leaders of a node have connections, so its other ranks may live.
    let leads = layout.local_rank(rank) < LEADERS_PER_NODE;
    // A node that "has not answered" may have paused.
    says(layout.describe(rank), "has ended")
        || says(layout.describe(rank), "is gone")
        || leads && says(layout.name_node(layout.node_of(rank)), "is gone")
}

/// Returns the inter-node backends of the group that `options` name: those that `named` selects, or
/// by default those of the default group. `torch` returns the backends for a name.
///
/// # Errors
/// `Value` if `named` is not a valid choice, `Config` if `SYMM_INTER_NODE_BACKEND` is not.
pub fn connects(
    named: &str,
    options: &JoinOptions,
    torch: impl Fn(&str) -> Result<InterNodeBackends>,
) -> Result<InterNodeChoice> {
    if options.is_default {
        *lock(KNOWN.get()) = None;
    }
    let choice = |name: &str| {
        InterNodeChoice::named(name).map_or_else(|| torch(name).map(InterNodeChoice::Backends), Ok)
    };
    if !named.is_empty() {
        return choice(named).map_err(|error| Error {
            message: format!("inter_node_backend={named:?}: {}", error.message),
            ..error
        });
    }
    let setting = &Config::get().inter_node;
    let unknown = |error: Error| {
        Error::config(format!("SYMM_INTER_NODE_BACKEND={setting}: {}", error.message))
    };
    known().map_or_else(|| choice(setting).map_err(unknown), |known| Ok(known.choice))
}

/// Where the ranks of a group are.
pub enum GroupLocation {
    /// On one node, with the memory that they share.
    SingleNode(Box<Joined>),
    /// On several nodes.
    MultiNode(Box<MultiNodeJoin>),
}

/// A multi-node group that is about to join.
pub struct MultiNodeJoin {
    pub(super) layout: NodeMap,
    /// The ranks' records in the store, if the node map was found through them.
    pub(super) apart: Option<Box<MultiNodeRanks>>,
    /// Start of the timeout of joining.
    pub(super) since: Instant,
}

/// Joins the group that `options` name if its ranks are on one node. Otherwise returns their node
/// map, unless `choice` rejects multi-node groups.
///
/// # Errors
/// The errors of joining on one node; `Timeout` names the ranks that did not join.
pub fn find(
    store: &dyn Store,
    options: &JoinOptions,
    choice: &InterNodeChoice,
) -> Result<GroupLocation> {
    let since = Instant::now();
    let together = || {
        bootstrap::join(store, &options.spec(MAX_RANKS, trace::ended)?)
            .map(|joined| GroupLocation::SingleNode(Box::new(joined)))
    };
    if *choice == InterNodeChoice::None {
        return together();
    }
    if let Some(layout) = known().and_then(|known| layout(&known, options)) {
        let several = layout.num_nodes() > 1;
        return if several {
            Ok(GroupLocation::MultiNode(Box::new(MultiNodeJoin { layout, apart: None, since })))
        } else {
            together()
        };
    }
    Ok(match bootstrap::find(store, &options.spec(usize::MAX, trace::ended)?)? {
        Discovered::SingleNode(joined) => GroupLocation::SingleNode(Box::new(joined)),
        Discovered::MultiNode(apart) => {
            if options.rank == 0
                && let Some(advice) = advice(&apart.placements)
            {
                log::warn!("group \"{}\": they count as nodes: {advice}", options.group);
            }
            if options.is_default {
                *lock(KNOWN.get()) = Some(DefaultGroupNodes {
                    placements: apart.placements.clone(),
                    choice: choice.clone(),
                    life: None,
                });
            }
            GroupLocation::MultiNode(Box::new(MultiNodeJoin {
                layout: NodeMap::of(&apart.placements),
                apart: Some(apart),
                since,
            }))
        }
    })
}

/// Returns the node map of the group that `options` name; `None` unless `options` list the ranks'
/// numbers in the default group and `known` has these ranks. A merged group may lack the numbers,
/// because it may have no common default group. Joining rejects impossible numbers.
fn layout(known: &DefaultGroupNodes, options: &JoinOptions) -> Option<NodeMap> {
    let size = usize::try_from(options.size)
        .ok()
        .filter(|&size| (0..size as i32).contains(&options.rank))?;
    let globals = options.global_ranks.get(..size)?.iter().map(|&global| global as usize);
    let placements: Option<Vec<_>> =
        globals.map(|global| known.placements.get(global).cloned()).collect();
    placements.map(|placements| NodeMap::of(&placements))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_failure_that_names_a_rank_or_its_node_as_lost_counts() {
        let place = |(pid, node): (u32, &str)| RankLocation { pid, ..RankLocation::on(node) };
        let layout = NodeMap::of(&(100..).zip(["a", "a", "b", "a"]).map(place).collect::<Vec<_>>());
        let cases = [
            ("rank 0 (node \"a\", pid 100) of group \"g\" has ended (killed by signal 9)", "0"),
            ("rank 2 waited for rank 0 (node \"a\", pid 100) of group \"g\" has ended (gone)", "0"),
            ("rank 1 (node \"a\", pid 101) of group \"g\" is gone: its connection has ended", "1"),
            ("node \"a\" (ranks 0, 1 and 3) of group \"g\" is gone: all its connections", "0 1"),
            ("node \"a\" (ranks 0, 1 and 3) of group \"g\" has not answered for 5.0 s", ""),
            ("node \"b\" (rank 2) of group \"g\" is gone: all its connections have ended", "2"),
            // An earlier process, a rank that lives, and a group with other numbers.
            ("rank 0 (node \"a\", pid 99) of group \"g\" has ended (gone)", ""),
            ("rank 0 (node \"a\", pid 100) of group \"g\" left the group", ""),
            ("rank 0 (node \"a\", pid 100) of group \"h\" has ended (gone)", ""),
        ];
        for (failure, expected) in cases {
            let lost: Vec<String> = (0..4)
                .filter(|&rank| is_lost(&layout, Rank(rank), "g", failure))
                .map(|rank| rank.to_string())
                .collect();
            assert_eq!(lost.join(" "), expected, "{failure}");
        }
    }
}
