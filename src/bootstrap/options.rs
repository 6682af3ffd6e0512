//! The options of joining a group.

use super::{JoinSpec, KnownPeers};
use crate::config::Config;
use crate::cta::CtaOptions;
use crate::dtype::SumOrder;
use crate::error::{Error, Result};
use crate::mem::layout::{MAX_RANKS, SegmentLayout};
use crate::rank::Rank;
use std::time::Duration;

/// The timeout of calls if none was chosen, which is torch's default.
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(30 * 60);

/// The options of joining a group.
#[derive(Clone, Debug)]
pub struct JoinOptions {
    /// The name of the group, the same on all members.
    pub group: String,
    /// The number of this rank in the group; checked when it joins.
    pub rank: i32,
    /// The number of members; checked when it joins.
    pub size: i32,
    /// The members' ranks in the default group; if empty, they equal the ranks in this group.
    pub global_ranks: Vec<i32>,
    /// True for the job's first group. It rejects a second process with a rank of a live member
    /// ([`super::RankLease`]).
    pub is_default: bool,
    /// The timeout of joining, and of every later call that sets no timeout; if absent, 30 minutes.
    pub timeout: Option<Duration>,
    /// The order in which reductions combine the ranks' elements, the same on all members.
    pub order: SumOrder,
    /// How many processors the group's kernels may take; compared when the ranks set up their GPUs.
    pub ctas: CtaOptions,
}

impl JoinOptions {
    /// Returns the name of the group, the same on all members; torch calls the default group "0".
    pub fn name(&self) -> &str {
        if self.is_default { "default" } else { &self.group }
    }

    /// Returns the timeout of joining.
    pub fn timeout(&self) -> Duration {
        self.timeout.unwrap_or(DEFAULT_TIMEOUT)
    }

    /// Returns the group to join, of at most `most` ranks. A group too large for one node gets no
    /// memory. `ended` tells which processes have ended, as for [`KnownPeers`].
    ///
    /// # Errors
    /// `Config` for an invalid size or rank.
    pub fn spec(&self, most: usize, ended: fn(u32) -> Option<String>) -> Result<JoinSpec<'_>> {
        let size = usize::try_from(self.size).ok().filter(|size| (1..=most).contains(size));
        let size = size.ok_or_else(|| {
            Error::config(format!(
                "a group of {} ranks cannot be made; there must be 1 to {MAX_RANKS}",
                self.size
            ))
        })?;
        let rank = u32::try_from(self.rank).ok().filter(|&rank| (rank as usize) < size).map(Rank);
        let rank = rank.ok_or_else(|| {
            Error::config(format!("rank {} is outside the group of {size} ranks", self.rank))
        })?;
        let layout = (size <= MAX_RANKS).then(|| SegmentLayout::new(size));
        Ok(JoinSpec {
            group: self.name(),
            rank,
            size: size as u32,
            attempt: &Config::get().restart,
            timeout: self.timeout(),
            segment_bytes: layout.map_or(0, SegmentLayout::total_bytes) as u64,
            reserved_bytes: layout.map_or(0, SegmentLayout::control_bytes),
            hold_rank: self.is_default,
            global_ranks: &self.global_ranks,
            order: self.order,
            // A restarted job has the same ranks in other processes, so its default group must
            // ignore which earlier processes have ended.
            known: (!self.is_default).then_some(KnownPeers { ended }),
        })
    }
}
