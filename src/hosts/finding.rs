//! Finding: the inter-node backends of a group, and its node map.

use crate::boot::{self, Apart, Found, JoinOptions, Joined};
use crate::config::{Config, Engines, HostsChoice};
use crate::error::{Error, Result};
use crate::host_map::{HostMap, Placement, advice};
use crate::lock::lock;
use crate::mem::layout::MAX_RANKS;
use crate::store::Store;
use crate::sys::fork::PerProcess;
use crate::trace;
use std::sync::Mutex;
use std::time::Instant;

/// The placement of the default group. If it spans nodes, every later group of the process computes its node map from
/// this without communication.
#[derive(Clone, Debug)]
pub(super) struct Known {
    /// The nodes of its ranks.
    pub(super) placements: Vec<Placement>,
    /// Its inter-node backends.
    choice: HostsChoice,
}

static KNOWN: PerProcess<Mutex<Option<Known>>> = PerProcess::new(|| Mutex::new(None));

/// Returns the placement of the default group, if it spans nodes.
pub(super) fn known() -> Option<Known> {
    lock(KNOWN.get()).clone()
}

/// Returns the inter-node backends of the group that `options` name: those that `named` selects, or by default those of
/// the default group. `torch` returns the backends for a name.
///
/// # Errors
/// `Value` if `named` is not a valid choice, `Config` if `SYMM_HOSTS` is not.
pub fn connects(named: &str, options: &JoinOptions, torch: impl Fn(&str) -> Result<Engines>) -> Result<HostsChoice> {
    if options.is_default {
        *lock(KNOWN.get()) = None;
    }
    let choice = |name: &str| HostsChoice::named(name).map_or_else(|| torch(name).map(HostsChoice::Engines), Ok);
    if !named.is_empty() {
        return choice(named).map_err(|error| Error { message: format!("between_hosts={named:?}: {}", error.message), ..error });
    }
    let setting = &Config::get().hosts;
    let unknown = |error: Error| Error::config(format!("SYMM_HOSTS={setting}: {}", error.message));
    known().map_or_else(|| choice(setting).map_err(unknown), |known| Ok(known.choice))
}

/// Where the ranks of a group are.
pub enum Place {
    /// On one node, with the memory that they share.
    OneHost(Box<Joined>),
    /// On several nodes.
    SeveralHosts(Box<Several>),
}

/// A multi-node group that is about to join.
pub struct Several {
    pub(super) layout: HostMap,
    /// The ranks' records in the store, if the node map was found through them.
    pub(super) apart: Option<Box<Apart>>,
    /// Start of the timeout of joining.
    pub(super) since: Instant,
}

/// Joins the group that `options` name if its ranks are on one node. Otherwise returns their node map, unless `choice`
/// rejects multi-node groups.
///
/// # Errors
/// The errors of joining on one node; `Timeout` names the ranks that did not join.
pub fn find(store: &dyn Store, options: &JoinOptions, choice: &HostsChoice) -> Result<Place> {
    let since = Instant::now();
    let together = || boot::join(store, &options.spec(MAX_RANKS, trace::ended)?).map(|joined| Place::OneHost(Box::new(joined)));
    if *choice == HostsChoice::Refuse {
        return together();
    }
    if let Some(layout) = known().and_then(|known| layout(&known, options)) {
        let several = layout.hosts() > 1;
        return if several { Ok(Place::SeveralHosts(Box::new(Several { layout, apart: None, since }))) } else { together() };
    }
    Ok(match boot::find(store, &options.spec(usize::MAX, trace::ended)?)? {
        Found::Together(joined) => Place::OneHost(Box::new(joined)),
        Found::Apart(apart) => {
            if options.rank == 0
                && let Some(advice) = advice(&apart.placements)
            {
                log::warn!("group \"{}\": they count as hosts: {advice}", options.group);
            }
            if options.is_default {
                *lock(KNOWN.get()) = Some(Known { placements: apart.placements.clone(), choice: choice.clone() });
            }
            Place::SeveralHosts(Box::new(Several { layout: HostMap::of(&apart.placements), apart: Some(apart), since }))
        }
    })
}

/// Returns the node map of the group that `options` name, if the ranks' numbers in the default group are given and
/// `known`. A merged group may lack them, because it may have no common default group. Joining rejects impossible
/// numbers.
fn layout(known: &Known, options: &JoinOptions) -> Option<HostMap> {
    let size = usize::try_from(options.size).ok().filter(|&size| (0..size as i32).contains(&options.rank))?;
    let globals = options.global_ranks.get(..size)?.iter().map(|&global| global as usize);
    let placements: Option<Vec<_>> = globals.map(|global| known.placements.get(global).cloned()).collect();
    placements.map(|placements| HostMap::of(&placements))
}
