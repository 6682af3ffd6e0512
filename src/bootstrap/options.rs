//! Options of joining a group.

use super::{JoinSpec, KnownPeers};
use crate::config::Config;
use crate::dtype::SumOrder;
use crate::error::{Error, Result};
use crate::mem::layout::{MAX_RANKS, SegmentLayout};
use crate::rank::Rank;
use std::time::Duration;

/// The limit of calls where nobody chose one; torch's own default.
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(30 * 60);

/// Options of joining a group.
#[derive(Clone, Debug)]
pub struct JoinOptions {
    /// The group's name, the same on all members.
    pub group: String,
    /// Number of this rank in the group; checked when it joins.
    pub rank: i32,
    /// Number of members; checked when it joins.
    pub size: i32,
    /// Ranks of the members in the default group; empty: the same as here.
    pub global_ranks: Vec<i32>,
    /// Whether this is the job's first group: it refuses a rank that is taken even after it has formed ([`super::RankLease`]).
    pub is_default: bool,
    /// Limit of joining, and of every later call that brings none; absent: 30 minutes.
    pub timeout: Option<Duration>,
    /// Order in which reductions combine the ranks' elements; the same on all members.
    pub order: SumOrder,
}

impl JoinOptions {
    /// Name of the group, the same on all members; torch calls the default group "0".
    pub fn name(&self) -> &str {
        if self.is_default { "default" } else { &self.group }
    }

    /// Limit of joining.
    pub fn timeout(&self) -> Duration {
        self.timeout.unwrap_or(DEFAULT_TIMEOUT)
    }

    /// The group of at most `most` ranks to join; one that is too large for one node needs no memory. `ended`: as [`KnownPeers`] has it.
    ///
    /// # Errors
    /// `Config` for a size or rank that cannot be.
    pub fn spec(&self, most: usize, ended: fn(u32) -> Option<String>) -> Result<JoinSpec<'_>> {
        let size = usize::try_from(self.size).ok().filter(|size| (1..=most).contains(size));
        let size =
            size.ok_or_else(|| Error::config(format!("a group of {} ranks cannot be made; there must be 1 to {MAX_RANKS}", self.size)))?;
        let rank = u32::try_from(self.rank).ok().filter(|&rank| (rank as usize) < size).map(Rank);
        let rank = rank.ok_or_else(|| Error::config(format!("rank {} is outside the group of {size} ranks", self.rank)))?;
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
            // A job that starts anew has the same ranks in other processes.
            known: (!self.is_default).then_some(KnownPeers { ended }),
        })
    }
}
