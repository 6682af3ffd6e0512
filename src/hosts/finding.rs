//! Finding: what connects the hosts of a group, and which of its ranks are on which.

use crate::boot::hosts::{Known, Layout, advice, known, remember};
use crate::boot::{Apart, Found};
use crate::config::{Config, HostsChoice};
use crate::error::{Error, Result};
use crate::group::{Group, JoinOptions};
use crate::store::worker::Worker;
use std::time::Instant;

/// What connects the hosts of the group that `options` name, whose own choice is `named`; if it has none, its default group's.
///
/// # Errors
/// `Value` where there is no choice of that name.
pub fn connects(named: &str, options: &JoinOptions) -> Result<HostsChoice> {
    if options.is_default {
        remember(None);
    }
    if !named.is_empty() {
        let unknown = || Error::value(format!("between_hosts={named:?} is none of \"refuse\", \"gloo\", \"nccl\", \"auto\""));
        return HostsChoice::named(named).ok_or_else(unknown);
    }
    Ok(known().map_or(Config::get().hosts, |known| known.choice))
}

/// Where the ranks of a group are.
pub enum Place {
    /// On one host, where they have joined.
    OneHost(Box<Group>),
    /// On several.
    SeveralHosts(Box<Several>),
}

/// A group on several hosts that is about to join.
pub struct Several {
    pub(super) layout: Layout,
    /// Records of the ranks in the store, where they have found out just now.
    pub(super) apart: Option<Box<Apart>>,
    /// Time since which the limit of joining runs.
    pub(super) since: Instant,
}

/// Joins the group that `options` name if its ranks are on one host, and else tells where they are, unless `choice` refuses that.
///
/// # Errors
/// As joining on one host; `Timeout` names the ranks that did not come.
pub fn find(worker: &Worker, options: &JoinOptions, choice: HostsChoice) -> Result<Place> {
    let since = Instant::now();
    if choice == HostsChoice::Refuse {
        return Group::join(worker, options).map(|group| Place::OneHost(Box::new(group)));
    }
    if let Some(layout) = known().and_then(|known| layout(&known, options)) {
        let several = layout.hosts() > 1;
        return if several {
            Ok(Place::SeveralHosts(Box::new(Several { layout, apart: None, since })))
        } else {
            Group::join(worker, options).map(|group| Place::OneHost(Box::new(group)))
        };
    }
    Ok(match Group::find(worker, options)? {
        Found::Together(group) => Place::OneHost(Box::new(group)),
        Found::Apart(apart) => {
            if options.rank == 0
                && let Some(advice) = advice(&apart.placements)
            {
                log::warn!("group \"{}\": they count as hosts: {advice}", options.group);
            }
            if options.is_default {
                remember(Some(Known { placements: apart.placements.clone(), choice }));
            }
            Place::SeveralHosts(Box::new(Several { layout: Layout::of(&apart.placements), apart: Some(apart), since }))
        }
    })
}

/// Layout of the group that `options` name, if its ranks are among those `known`. Joining refuses numbers that cannot be.
fn layout(known: &Known, options: &JoinOptions) -> Option<Layout> {
    let size = usize::try_from(options.size).ok().filter(|&size| (0..size as i32).contains(&options.rank))?;
    let globals = (0..size).map(|rank| options.global_ranks.get(rank).map_or(rank, |&global| global as usize));
    let placements: Option<Vec<_>> = globals.map(|global| known.placements.get(global).cloned()).collect();
    placements.map(|placements| Layout::of(&placements))
}
