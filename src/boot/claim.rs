//! Claim of one rank on its key in the store, which is taken, changed and given back by its owner only.

use super::Attempt;
use super::membership::{self, Membership};
use super::record::Record;
use crate::error::{Error, Kind, Result};
use crate::lock::lock;
use crate::rank::Rank;
use crate::store::Store;
use crate::sys::fork::PerProcess;
use crate::sys::process;
use crate::sys::required::Required;
use std::collections::HashSet;
use std::sync::Mutex;

/// Nonces of the records whose owners are joining in this process right now. Two ranks may be threads of one process, so
/// that its being alive does not tell a live claim from what an earlier call of the same process left behind.
static JOINING: PerProcess<Mutex<HashSet<[u8; 16]>>> = PerProcess::new(|| Mutex::new(HashSet::new()));

/// A record as it stands in the store.
#[derive(Clone, Debug)]
pub(super) struct Published {
    pub(super) key: String,
    pub(super) record: Record,
    bytes: Vec<u8>,
}

impl Published {
    /// Adds the cause to the record, for those who read it later. Best effort: the cause itself is what matters.
    pub(super) fn fail(&self, store: &dyn Store, error: &Error) {
        let mut record = self.record.clone();
        record.at = super::now_since_boot();
        record.fail(error);
        let written = record.encode().and_then(|bytes| store.compare_set(&self.key, &self.bytes, &bytes));
        if let Err(error) = written {
            log::debug!("rank {} (pid {}): the failure could not be stored: {error}", record.rank, record.pid);
        }
    }

    /// Removes the key.
    pub(super) fn remove(&self, store: &dyn Store) {
        if let Err(error) = store.delete(&self.key)
            // A store that has no deletion goes with its job.
            && error.kind != Kind::NotImplemented
        {
            log::warn!("rank {} (pid {}): its record could not be removed: {error}", self.record.rank, self.record.pid);
        }
    }
}

/// A rank's membership, held against any other claimant.
pub(super) struct Claim<'a> {
    attempt: &'a Attempt<'a>,
    pub(super) published: Published,
    /// Whether a record of an earlier attempt stood here.
    pub(super) again: bool,
    /// Membership that is announced when the record goes.
    pub(super) membership: Option<Membership>,
}

impl<'a> Claim<'a> {
    /// Publishes `record`, replacing what an ended process or an earlier call has left. Refused where another claimant lives.
    pub(super) fn publish(attempt: &'a Attempt<'a>, record: Record) -> Result<Self> {
        let key = Attempt::key(record.rank);
        let bytes = record.encode()?;
        lock(JOINING.get()).insert(record.nonce);
        let mut claim = Self { attempt, published: Published { key, record, bytes }, again: false, membership: None };
        let mut expected = Vec::new();
        loop {
            let Published { key, bytes, .. } = &claim.published;
            let standing = attempt.store.compare_set(key, &expected, bytes)?;
            if standing == *bytes {
                if attempt.spec.keep_membership {
                    // Asked again: the group may have formed, and withdrawn the record that would have stood here, since it was asked
                    // before.
                    membership::refuse_taken(attempt, false).inspect_err(|_| claim.published.remove(attempt.store))?;
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
                // Removed meanwhile; c10d stores return the expectation for an absent key.
                expected.clear();
                continue;
            }
            claim.refuse_living(&standing)?;
            claim.again = true;
            expected = standing.to_vec();
        }
    }

    fn refuse_living(&self, standing: &[u8]) -> Result<()> {
        let Ok(other) = Record::decode(Rank(self.published.record.rank), standing) else {
            // Another version's, or not ours at all: whoever wrote it is told by our record, or has long ended.
            return Ok(());
        };
        let attempt = self.attempt;
        let lives = if other.host != attempt.host {
            // Of a process there nothing can be known; where hosts may be connected, it may come again after a failure.
            !attempt.several || other.failure.is_none()
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
        let membership = if other.host == attempt.host { String::new() } else { format!(" on host {:?}", other.host_name) };
        Err(attempt.twice(other.pid, &membership))
    }

    /// Removes the key, since all others have read it; what says who has the rank from now on stands before that.
    pub(super) fn withdraw(&self) {
        if let Some(membership) = &self.membership {
            membership.announce(self.attempt);
        }
        self.published.remove(self.attempt.store);
    }

    /// Publishes the record again after [`Self::withdraw`], so that it can hold the cause of a failure. Best effort.
    pub(super) fn restore(&self) {
        let Published { key, bytes, .. } = &self.published;
        let _ = self.attempt.store.compare_set(key, &[], bytes);
    }
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        lock(JOINING.get()).remove(&self.published.record.nonce);
    }
}
