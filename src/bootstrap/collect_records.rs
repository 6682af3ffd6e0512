//! Waits for the records of all ranks.

use super::claim::RankClaim;
use super::record::{JoinRecord, agree};
use super::{Attempt, MemberProcess};
use crate::error::{Error, ErrorKind, Result};
use crate::node_map::RankLocation;
use crate::rank::{Rank, name_ranks};
use crate::store::Store;
use crate::sys::process::{self, ProcessId};
use crate::sys::required::Required;
use rustix::fd::OwnedFd;
use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

/// First interval between two checks for new records and for ranks that have ended; it doubles up
/// to [`RECORD_POLL_MAX`].
pub(super) const RECORD_POLL_MIN: Duration = Duration::from_millis(100);
pub(super) const RECORD_POLL_MAX: Duration = Duration::from_secs(8);

/// Interval between two reads of the records while one of them is left over from a process that has
/// ended.
pub(super) const STALE_RECORD_POLL: Duration = Duration::from_millis(10);

/// How long a rank that sees records that differ waits for the other records, so that its error
/// names all ranks that differ.
const DIFFERENCE_GRACE: Duration = Duration::from_millis(500);

/// A failure that a rank recorded before this call counts if the rank has not replaced it within
/// this time.
const RECORD_RETRY_WINDOW: Duration = Duration::from_secs(1);

/// The ranks of a group, whose records agree.
pub(super) enum Gathered {
    /// All ranks are on one node.
    SingleNode(Box<RankRecords>),
    /// The ranks are on several nodes, which is valid only if the group may span nodes.
    MultiNode(Vec<RankLocation>),
}

/// The records and processes of ranks of one node.
pub(super) struct RankRecords {
    pub(super) coordinator: JoinRecord,
    pub(super) members: Vec<MemberProcess>,
}

/// The meaning of a record in the store at this time.
pub(super) enum RecordStatus {
    /// The rank is joining.
    Live(Box<JoinRecord>, MemberProcess),
    /// The process or the attempt ended before this call started, so the record counts as absent.
    Left(Box<JoinRecord>, Option<Arc<OwnedFd>>),
}

/// Returns once all ranks have published records, and the records agree.
pub(super) fn gather(attempt: &Attempt<'_>, claim: &RankClaim<'_>) -> Result<Gathered> {
    let keys: Vec<String> = (0..attempt.spec.size).map(Attempt::key).collect();
    let mut look = RECORD_POLL_MIN;
    let mut seen = HashSet::new();
    let mut came = HashSet::new();
    let mut differing = None;
    loop {
        let ended = || {
            (0..attempt.spec.size)
                .map(Rank)
                .any(|rank| !came.contains(&rank) && attempt.known_end(rank).is_some())
        };
        // The rank that serves the store may give up during the grace; a difference says more.
        let mut or_known = |error| differing.take().unwrap_or(error);
        let complete = attempt.wait_for_keys(&keys, look, ended).map_err(&mut or_known)?;
        look = (look * 2).min(RECORD_POLL_MAX);
        // The records are read once more after the deadline, so that the timeout error names the
        // ranks that are missing at the deadline.
        let expired = attempt.clock.remaining().is_zero();
        let standings = read(attempt, claim, &keys, complete).map_err(|error| {
            let lost = [ErrorKind::Network, ErrorKind::Timeout].contains(&error.kind);
            if lost { or_known(error) } else { error }
        })?;

        let live: Vec<&JoinRecord> = standings
            .iter()
            .flatten()
            .filter_map(|standing| match standing {
                RecordStatus::Live(record, _) => Some(&**record),
                RecordStatus::Left(..) => None,
            })
            .collect();
        seen.extend(live.iter().map(|record| record.nonce));
        let agreed = agree(attempt.spec.group, &live).map_err(|error| Error {
            message: error.message + &absence(live.len(), keys.len()),
            ..error
        });
        match (agreed, differing.take()) {
            (Ok(()), None) => {}
            (Err(error), None) if !complete && !expired => {
                (differing, look) = (Some(error), DIFFERENCE_GRACE);
                continue;
            }
            // A rank whose record differed may have given up meanwhile.
            (Err(error), _) | (Ok(()), Some(error)) => return Err(error),
        }
        if live.len() == keys.len() {
            if live.iter().any(|record| record.node != attempt.node) {
                return Ok(Gathered::MultiNode(
                    live.into_iter().map(JoinRecord::placement).collect(),
                ));
            }
            return finish(standings);
        }
        for standing in standings.iter().flatten() {
            if let RecordStatus::Left(record, pidfd) = standing
                && seen.contains(&record.nonce)
            {
                return Err(ending(attempt, record, pidfd.as_ref()));
            }
        }
        for (rank, standing) in (0..).map(Rank).zip(&standings) {
            let left = match standing {
                Some(RecordStatus::Live(..)) => {
                    came.insert(rank);
                    continue;
                }
                Some(RecordStatus::Left(record, _)) => record.failure.as_ref(),
                None => None,
            };
            if let Some(error) = attempt.known_end(rank) {
                let before = left.map_or_else(String::new, |failure| {
                    format!("; before that it said: {}", failure.error())
                });
                return Err(Error { message: error.message + &before, ..error });
            }
        }
        if expired {
            return Err(missing(attempt, &standings));
        }
        if complete {
            std::thread::sleep(STALE_RECORD_POLL.min(attempt.clock.remaining()));
        }
    }
}

/// Judges the record under each of `keys`, which are the keys of ranks 0, 1, ...; fails if a record
/// shows that the group cannot form.
pub(super) fn read(
    attempt: &Attempt<'_>,
    claim: &RankClaim<'_>,
    keys: &[String],
    complete: bool,
) -> Result<Vec<Option<RecordStatus>>> {
    let mut present = Vec::new();
    for (rank, key) in (0..).map(Rank).zip(keys) {
        if complete || attempt.store.check(&[key])? {
            present.push(rank);
        }
    }
    let names: Vec<&str> = present.iter().map(|rank| keys[rank.index()].as_str()).collect();
    let values =
        if names.is_empty() { Vec::new() } else { attempt.store.multi_get(&names, None)? };
    if values.len() != names.len() {
        return Err(Error::internal(format!(
            "the store returned {} of {} values",
            values.len(),
            names.len()
        )));
    }
    let mut standings: Vec<Option<RecordStatus>> = keys.iter().map(|_| None).collect();
    for (rank, value) in present.into_iter().zip(values) {
        standings[rank.index()] = Some(judge(attempt, claim, JoinRecord::decode(rank, &value)?)?);
    }
    Ok(standings)
}

/// Returns the end of an error that names some of the `live` ranks of a group of `size`.
fn absence(live: usize, size: usize) -> String {
    let absent = size.saturating_sub(live);
    if absent == 0 {
        return String::new();
    }
    format!("; {absent} of {size} ranks had not joined by then")
}

/// Returns the failure that `process` has recorded under the key of `rank`, if any.
pub(super) fn failure_of(attempt: &Attempt<'_>, rank: Rank, process: ProcessId) -> Option<Error> {
    recorded_failure(attempt.store, rank, |record| record.process() == process)
}

/// Returns the failure in the record under the key of `rank`, if there is one and the record is of
/// `this` attempt.
pub(super) fn recorded_failure(
    store: &dyn Store,
    rank: Rank,
    this: impl Fn(&JoinRecord) -> bool,
) -> Option<Error> {
    let key = Attempt::key(rank.0);
    if !store.check(&[&key]).ok()? {
        return None;
    }
    let value = store.get(&key, None).ok()?;
    let record = JoinRecord::decode(rank, &value).ok()?;
    let failure = record.failure.as_ref()?;
    this(&record).then(|| failure.error())
}

fn judge(attempt: &Attempt<'_>, claim: &RankClaim<'_>, record: JoinRecord) -> Result<RecordStatus> {
    let mut pidfd = None;
    let mut lives = true;
    // The state of a process on another node is unknown; `agree` rejects the record unless the
    // group may span nodes.
    if record.node == attempt.node && record.process() != attempt.own {
        pidfd = process::open(record.process())
            .map_err(|errno| attempt.refused(Required::Watch, errno))?;
        lives = pidfd.as_ref().is_some_and(|pidfd| !process::ended(pidfd));
    }
    // Only records of this node have comparable times, because each node has its own clock.
    let fresh = record.node == attempt.node && record.at >= attempt.clock.started_at;
    if let Some(failure) = &record.failure {
        // A failure from before this call counts if its rank lives and does not join again. It does
        // not count if this rank took part in that attempt, because this rank now waits for the
        // others to join again.
        let stands =
            lives && !claim.again && attempt.clock.waited() >= RECORD_RETRY_WINDOW.as_secs_f64();
        if fresh || stands {
            return Err(failure.error());
        }
        return Ok(RecordStatus::Left(Box::new(record), pidfd));
    }
    if !lives {
        return if fresh {
            Err(ending(attempt, &record, pidfd.as_ref()))
        } else {
            Ok(RecordStatus::Left(Box::new(record), pidfd))
        };
    }
    let member = attempt.member(&record, pidfd);
    Ok(RecordStatus::Live(Box::new(record), member))
}

/// Returns the error that ended the attempt of `record`.
fn ending(attempt: &Attempt<'_>, record: &JoinRecord, pidfd: Option<&Arc<OwnedFd>>) -> Error {
    // The record is read again, because a value from before the process ended may lack the failure.
    failure_of(attempt, Rank(record.rank), record.process()).unwrap_or_else(|| {
        let cause = pidfd
            .map_or_else(|| "gone".into(), |pidfd| process::exit_cause(record.process(), pidfd));
        attempt.ended(Rank(record.rank), record.pid, &cause)
    })
}

fn finish(standings: Vec<Option<RecordStatus>>) -> Result<Gathered> {
    let mut leader = None;
    let mut members = Vec::with_capacity(standings.len());
    for standing in standings.into_iter().flatten() {
        if let RecordStatus::Live(record, member) = standing {
            leader = leader.or(Some(*record));
            members.push(member);
        }
    }
    let leader = leader.ok_or_else(|| Error::internal("a group without ranks"))?;
    Ok(Gathered::SingleNode(Box::new(RankRecords { coordinator: leader, members })))
}

/// Returns true if torch has made the name `group` with use_local_synchronization: such a name is a
/// SHA-1 in hexadecimal digits.
fn is_hashed(group: &str) -> bool {
    group.len() == 40 && group.bytes().all(|byte| byte.is_ascii_hexdigit())
}

fn missing(attempt: &Attempt<'_>, standings: &[Option<RecordStatus>]) -> Error {
    let mut absent = Vec::new();
    let mut remarks = String::new();
    for (rank, standing) in (0..).map(Rank).zip(standings) {
        match standing {
            Some(RecordStatus::Live(..)) => {}
            Some(RecordStatus::Left(record, _)) => {
                absent.push(rank);
                let pid = record.pid;
                let how = record.failure.as_ref().map_or_else(
                    || "has ended since".into(),
                    |failure| format!("has failed: {}", failure.error()),
                );
                remarks.push_str(&format!(
                    "; rank {rank} (pid {pid}) had come before this rank, and {how}"
                ));
            }
            None => absent.push(rank),
        }
    }
    if is_hashed(attempt.spec.group) {
        remarks.push_str(
            "; torch derives the name of a group with use_local_synchronization=True from the \
             number of groups that a rank has made: \
             a rank that has made more or fewer joins under another name, so make such groups \
             before all others, or in one order on all ranks",
        );
    }
    Error::timeout(format!(
        "{} waited {:.1} s for {} to join {}{remarks}",
        attempt.me(),
        attempt.clock.waited(),
        name_ranks(&absent),
        attempt.group()
    ))
}
