//! How a rank that joins a multi-node group learns of ranks that cannot join or are late.
//!
//! The ranks of the default group met through records in the store, which also hold their failures.
//! The ranks of a later group have none. They share one key, at which the first rank that fails
//! leaves its failure, and know from other groups which ranks are lost.

use super::{InternodeJoin, global, inside};
use crate::bootstrap;
use crate::config::Config;
use crate::error::{Error, ErrorKind};
use crate::internode::discovery;
use crate::lock::lock;
use crate::rank::Rank;
use crate::store::Store;
use crate::store::prefix::PrefixStore;
use crate::store::request::{Request, StoreOp};
use crate::store::table::TableReply;
use crate::sys::fork::PerProcess;
use std::cell::Cell;
use std::collections::HashSet;
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// Interval between two readings of all ranks' records, for each rank, and of a later group's
/// failure.
const RECORDS_POLL: Duration = Duration::from_millis(50);
/// Time for a rank to leave its failure in the store, even after the deadline.
const REPORT_TIME: Duration = Duration::from_millis(50);

/// The keys of failures in which this process took part. The next attempt removes them.
static FAILED: PerProcess<Mutex<HashSet<String>>> = PerProcess::new(|| Mutex::new(HashSet::new()));

fn encoded(failure: &Error) -> Vec<u8> {
    [&[failure.kind as u8], failure.message.as_bytes()].concat()
}

/// Returns the failure for the other ranks.
fn decoded(bytes: &[u8]) -> Option<Error> {
    let (&code, message) = bytes.split_first()?;
    let kind = ErrorKind::from_peer(code).unwrap_or(ErrorKind::Internal);
    Some(Error { kind, message: String::from_utf8_lossy(message).into_owned() })
}

impl InternodeJoin<'_> {
    /// Ends the ranks' search for each other in `store` with the outcome of joining.
    pub fn end(self, store: &dyn Store, failed: Option<&Error>) {
        if let Some(records) = self.records {
            return records.end(store, failed);
        }
        if let Some((error, key)) = failed.zip(self.failure_key()) {
            // The other ranks reach their own deadlines.
            if error.kind != ErrorKind::Timeout {
                // Best effort, because a store error must not replace the failure.
                let text = encoded(error);
                let request = Request::new(StoreOp::CompareSet, vec![&key], vec![&[], &text]);
                let _ = store.call(&request, Some(REPORT_TIME));
            }
            lock(FAILED.get()).insert(key);
        }
    }

    /// Returns the key at which a rank leaves the failure of joining a later group; `None` if the
    /// ranks have records. It contains the id of the default group, so that ranks which form a new
    /// default group over the same store do not read it.
    fn failure_key(&self) -> Option<String> {
        let life = discovery::known().filter(|_| self.records.is_none())?.life?;
        let restart = &Config::get().restart;
        Some(life.name("symm-failed", format_args!("{}/{restart}", self.options.group)))
    }

    /// Removes the failure of an earlier attempt in which this process took part.
    pub(super) fn forget_failure(&self) {
        if let Some(key) = self.failure_key().filter(|key| lock(FAILED.get()).remove(key)) {
            // A store that cannot delete keeps the key, and this attempt ends like the earlier one.
            let _ = self.store.delete(&key);
        }
    }

    /// Returns a function that returns the error of a rank that cannot join, if this process knows
    /// of its loss, or if a rank has left a failure in the store. It reads the store rarely,
    /// because a rank that joins at once needs none of that.
    pub(super) fn failures(&self) -> impl Fn() -> Option<Error> {
        let ranks = if self.records.is_some() { self.node_map.size() as u32 } else { 1 };
        let (interval, key) = (RECORDS_POLL * ranks, self.failure_key());
        let (next, first) = (Cell::new(Instant::now() + interval), Cell::new(true));
        move || {
            let due = Instant::now() >= next.get();
            let lost = if first.replace(false) || due { self.lost() } else { None };
            if lost.is_none() && !due {
                return None;
            }
            next.set(Instant::now() + interval);
            // A rank that has failed and then ended has left the cause in the store.
            let left = match (&self.records, &key) {
                (Some(records), _) => records.failure(&self.store),
                (None, Some(key)) => self.failure_at(key),
                (None, None) => None,
            };
            left.or(lost)
        }
    }

    /// Returns the failure that a rank has left at `key`.
    fn failure_at(&self, key: &str) -> Option<Error> {
        // The store's server may have been on the lost node.
        let request = Request::new(StoreOp::Check, vec![key], vec![]);
        let TableReply::Flag(true) = self.store.call(&request, Some(REPORT_TIME)).ok()? else {
            return None;
        };
        decoded(&self.store.get(key, Some(REPORT_TIME)).ok()?)
    }

    /// Returns the error that names a member which another group of this process has lost.
    fn lost(&self) -> Option<Error> {
        let members = (0..self.node_map.size() as u32).map(Rank);
        let globals = &self.options.global_ranks;
        let (rank, failure) = discovery::lost(members.map(|rank| global(globals, rank)))?;
        let (who, group) = (self.node_map.describe(rank), &self.options.group);
        Some(Error::peer(format!("{who} cannot join group \"{group}\": {}", failure.message)))
    }

    /// Returns the error for the timeout that names the late ranks of nodes whose other ranks have
    /// arrived, if there are any.
    pub(super) fn late(&self) -> Option<Error> {
        let (mut late, layout, group) = (Vec::new(), &self.node_map, &self.options.group);
        for node in 0..layout.num_nodes() {
            let members = layout.ranks_of(node);
            let store = PrefixStore::new(&inside(layout, node), &self.store);
            // Ranks that have found each other have removed their keys. So if no key of a node
            // exists, its ranks may have joined, and do not count as late.
            let announced =
                bootstrap::announced(&store, group, &Config::get().restart, members.len() as u32)
                    .ok()?;
            let waited_for = (0..)
                .map(Rank)
                .zip(members)
                .filter(|(local, _)| !announced.is_empty() && !announced.contains(local));
            late.extend(waited_for.map(|(_, &rank)| layout.describe(rank)));
        }
        let (me, late) = (layout.describe(self.rank), (!late.is_empty()).then(|| late.join(", "))?);
        Some(Error::timeout(format!(
            "{me} waited {:.1} s for {late} to join group \"{group}\"",
            self.limit.elapsed().as_secs_f64()
        )))
    }
}
