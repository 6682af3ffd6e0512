//! Finding: what connects the hosts of a group, and which of its ranks are on which.

use crate::boot::hosts::{Known, Layout, Question, known, remember};
use crate::config::{Config, HostsChoice};
use crate::error::{Error, Result};
use crate::group::{DEFAULT_TIMEOUT, JoinOptions};
use crate::rank::Rank;
use crate::store::Store;
use crate::store::worker::Worker;
use std::sync::Arc;

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

/// Layout of the group that `options` name, whose hosts `choice` connects, if it is on several.
///
/// # Errors
/// `Timeout` names the ranks that did not say where they are.
pub fn find(store: &Arc<dyn Store>, store_name: &str, options: &JoinOptions, choice: HostsChoice) -> Result<Option<Layout>> {
    let size = usize::try_from(options.size).unwrap_or(0);
    if options.rank < 0 || options.rank as usize >= size {
        // Joining says so.
        return Ok(None);
    }
    let globals = || (0..size).map(|rank| options.global_ranks.get(rank).map_or(rank, |&global| global as usize));
    let met = known().and_then(|known| globals().map(|global| known.placements.get(global).cloned()).collect::<Option<Vec<_>>>());
    let places = match met {
        Some(places) => places,
        None => {
            let worker = Worker::new(Arc::clone(store), store_name.to_owned())?;
            let places = question(options).ask(&worker)?;
            if options.is_default {
                remember(Some(Known { placements: places.clone(), choice }));
            }
            places
        }
    };
    let layout = Layout::of(&places);
    Ok((layout.hosts() > 1).then_some(layout))
}

/// The question where the ranks of the group that `options` name are.
pub(super) fn question(options: &JoinOptions) -> Question<'_> {
    Question {
        group: if options.is_default { "default" } else { &options.group },
        rank: Rank(options.rank as u32),
        size: options.size as u32,
        restart: &Config::get().restart,
        timeout: options.timeout.unwrap_or(DEFAULT_TIMEOUT),
    }
}
