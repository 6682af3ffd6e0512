//! Finding: what connects the hosts of a group, and which of its ranks are on which.

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

/// What the default group has found out. Where it is on several hosts, every later group of the process computes its map from that, without a
/// word to anybody.
#[derive(Clone, Debug)]
pub(super) struct Known {
    /// Places of its ranks.
    pub(super) placements: Vec<Placement>,
    /// What connects its hosts.
    choice: HostsChoice,
}

static KNOWN: PerProcess<Mutex<Option<Known>>> = PerProcess::new(|| Mutex::new(None));

/// What the default group knows, if it is on several hosts.
pub(super) fn known() -> Option<Known> {
    lock(KNOWN.get()).clone()
}

/// What connects the hosts of the group that `options` name, whose own choice is `named`; if it has none, its default group's. `torch` says
/// which backends a name stands for.
///
/// # Errors
/// `Value` where there is no choice of that name, `Config` where `SYMM_HOSTS` names none.
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
    /// On one host, where they share this.
    OneHost(Box<Joined>),
    /// On several.
    SeveralHosts(Box<Several>),
}

/// A group on several hosts that is about to join.
pub struct Several {
    pub(super) layout: HostMap,
    /// Records of the ranks in the store, where they have found out just now.
    pub(super) apart: Option<Box<Apart>>,
    /// Time since which the limit of joining runs.
    pub(super) since: Instant,
}

/// Joins the group that `options` name if its ranks are on one host, and else tells where they are, unless `choice` refuses that.
///
/// # Errors
/// As joining on one host; `Timeout` names the ranks that did not come.
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

/// Map of the group that `options` name, if its ranks are among those `known`: not where nobody has said which they are in the default
/// group, as of a merged one, which may have no common one. Joining refuses numbers that cannot be.
fn layout(known: &Known, options: &JoinOptions) -> Option<HostMap> {
    let size = usize::try_from(options.size).ok().filter(|&size| (0..size as i32).contains(&options.rank))?;
    let globals = options.global_ranks.get(..size)?.iter().map(|&global| global as usize);
    let placements: Option<Vec<_>> = globals.map(|global| known.placements.get(global).cloned()).collect();
    placements.map(|placements| HostMap::of(&placements))
}
