//! Finds the inter-node backends of a group, and its node map.

use crate::bootstrap::{self, Discovered, JoinOptions, Joined, MultiNodeRanks};
use crate::config::{Config, InterNodeBackends, InterNodeChoice};
use crate::error::{Error, Result};
use crate::lock::lock;
use crate::mem::layout::MAX_RANKS;
use crate::node_map::{NodeMap, RankLocation, advice};
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
}

static KNOWN: PerProcess<Mutex<Option<DefaultGroupNodes>>> = PerProcess::new(|| Mutex::new(None));

/// Returns the placement of the default group, if it spans nodes.
pub(super) fn known() -> Option<DefaultGroupNodes> {
    lock(KNOWN.get()).clone()
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
