//! A rank's claim on its key in the store. Only the owner takes, changes and removes it.

use super::Attempt;
use super::join_deadline::now_since_boot;
use super::rank_lease::{self, RankLease};
use super::record::JoinRecord;
use crate::error::{Error, ErrorKind, Result};
use crate::lock::lock;
use crate::rank::Rank;
use crate::store::Store;
use crate::sys::fork::PerProcess;
use crate::sys::process;
use crate::sys::required::Required;
use std::collections::HashSet;
use std::sync::Mutex;

/// Nonces of the records whose owners are joining in this process right now. Two ranks may be
/// threads of one process, so a live process does not prove that a record is live: an earlier call
/// may have left it.
static JOINING: PerProcess<Mutex<HashSet<[u8; 16]>>> =
    PerProcess::new(|| Mutex::new(HashSet::new()));

/// A record that is set in the store.
#[derive(Clone, Debug)]
pub(super) struct Published {
    pub(super) key: String,
    pub(super) record: JoinRecord,
    bytes: Vec<u8>,
}

impl Published {
    /// Adds `error` to the record for ranks that read it later. Best effort, because a store error
    /// must not replace `error`.
    pub(super) fn fail(&self, store: &dyn Store, error: &Error) {
        let mut record = self.record.clone();
        record.at = now_since_boot();
        record.fail(error);
        let written =
            record.encode().and_then(|bytes| store.compare_set(&self.key, &self.bytes, &bytes));
        if let Err(error) = written {
            log::debug!(
                "rank {} (pid {}): the failure could not be stored: {error}",
                record.rank,
                record.pid
            );
        }
    }

    /// Removes the key.
    pub(super) fn remove(&self, store: &dyn Store) {
        if let Err(error) = store.delete(&self.key)
            // A store that cannot delete disappears with its job.
            && error.kind != ErrorKind::NotImplemented
        {
            log::warn!(
                "rank {} (pid {}): its record could not be removed: {error}",
                self.record.rank,
                self.record.pid
            );
        }
    }
}

/// A rank's claim, which excludes any other claimant.
pub(super) struct RankClaim<'a> {
    attempt: &'a Attempt<'a>,
    pub(super) published: Published,
    /// True if the key held a record of an earlier attempt.
    pub(super) again: bool,
    /// The membership to announce when the record is removed.
    pub(super) lease: Option<RankLease>,
}

impl<'a> RankClaim<'a> {
    /// Publishes `record`, replacing the record of an ended process or an earlier call. Fails if
    /// another claimant lives.
    pub(super) fn publish(attempt: &'a Attempt<'a>, record: JoinRecord) -> Result<Self> {
        let key = Attempt::key(record.rank);
        let bytes = record.encode()?;
        lock(JOINING.get()).insert(record.nonce);
        let mut claim = Self {
            attempt,
            published: Published { key, record, bytes },
            again: false,
            lease: None,
        };
        let mut expected = Vec::new();
        loop {
            let Published { key, bytes, .. } = &claim.published;
            let standing = attempt.store.compare_set(key, &expected, bytes)?;
            if standing == *bytes {
                if attempt.spec.hold_rank {
                    // Checked again: since the first check, another process may have joined as this
                    // rank and removed its record, so `compare_set` no longer finds it.
                    rank_lease::reject_taken(attempt, false)
                        .inspect_err(|_| claim.published.remove(attempt.store))?;
                }
                return Ok(claim);
            }
            if attempt.clock.remaining().is_zero() {
                return Err(Error::timeout(format!(
                    "{} waited {:.1} s to publish its record of {}",
                    attempt.me(),
                    attempt.clock.waited(),
                    attempt.group()
                )));
            }
            if standing.is_empty() || standing == expected {
                // The record was removed meanwhile; c10d stores return the expectation for an
                // absent key.
                expected.clear();
                continue;
            }
            claim.refuse_living(&standing)?;
            claim.again = true;
            expected = standing.to_vec();
        }
    }

    fn refuse_living(&self, standing: &[u8]) -> Result<()> {
        let Ok(other) = JoinRecord::decode(Rank(self.published.record.rank), standing) else {
            // Another version or another program wrote this value. Either its process reads our
            // record, or it ended long ago.
            return Ok(());
        };
        let attempt = self.attempt;
        let lives = if other.node != attempt.node {
            // The state of a process on another node is unknown; in a group that may span nodes, a
            // rank may join again after a failure.
            !attempt.multi_node || other.failure.is_none()
        } else if other.process() == attempt.own {
            lock(JOINING.get()).contains(&other.nonce)
        } else {
            other.failure.is_none()
                && process::open(other.process())
                    .map_err(|errno| attempt.refused(Required::Watch, errno))?
                    .is_some_and(|pidfd| !process::ended(&pidfd))
        };
        if !lives {
            return Ok(());
        }
        let membership = if other.node == attempt.node {
            String::new()
        } else {
            format!(" on node {:?}", other.host_name)
        };
        Err(attempt.twice(other.pid, &membership))
    }

    /// Removes the key, which every rank has read, after announcing the membership that replaces
    /// it.
    pub(super) fn withdraw(&self) {
        if let Some(membership) = &self.lease {
            membership.announce(self.attempt);
        }
        self.published.remove(self.attempt.store);
    }

    /// Publishes the record again after [`Self::withdraw`], so that it can hold the cause of a
    /// failure. Best effort.
    pub(super) fn restore(&self) {
        let Published { key, bytes, .. } = &self.published;
        let _ = self.attempt.store.compare_set(key, &[], bytes);
    }
}

impl Drop for RankClaim<'_> {
    fn drop(&mut self) {
        lock(JOINING.get()).remove(&self.published.record.nonce);
    }
}
