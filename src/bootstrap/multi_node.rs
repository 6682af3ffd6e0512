//! The records of ranks that met in the store and are on several nodes.

use super::claim::Published;
use super::{PROCESS_EXIT_DELAY, collect_records};
use crate::error::Error;
use crate::node_map::RankLocation;
use crate::rank::Rank;
use crate::store::Store;
use crate::store::deadline::DeadlineStore;
use crate::store::prefix::PrefixStore;
use std::time::Instant;

/// The result of finding the ranks of a group on several nodes.
#[derive(Debug)]
pub struct MultiNodeRanks {
    /// The location of each rank, in rank order.
    pub placements: Vec<RankLocation>,
    /// Prefix of the keys of this attempt.
    pub(super) prefix: String,
    pub(super) published: Published,
}

impl MultiNodeRanks {
    /// Returns the error of a rank that could not join after all had met, if one has recorded it.
    pub fn failure(&self, store: &dyn Store) -> Option<Error> {
        let store = PrefixStore::new(&self.prefix, store);
        (0..).map(Rank).zip(&self.placements).find_map(|(rank, place)| {
            collect_records::recorded_failure(&store, rank, |record| record.pid == place.pid)
        })
    }

    /// Ends the search. Without `failed`, all ranks have read this rank's record; with it, joining
    /// failed and the record keeps the cause for ranks that read it later.
    pub fn end(&self, store: &dyn Store, failed: Option<&Error>) {
        // Best effort, even after the deadline, because no rank waits for it.
        let purpose = format!("rank {} could not remove its record", self.published.record.rank);
        let store = PrefixStore::new(
            &self.prefix,
            DeadlineStore::new(store, Instant::now() + PROCESS_EXIT_DELAY, purpose),
        );
        match failed {
            Some(error) => self.published.fail(&store, error),
            None => self.published.remove(&store),
        }
    }
}
