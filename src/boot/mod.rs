//! How the members of a group find each other and come to share memory.
//!
//! 1. Each rank puts a [record](record::Record) under its own key; one wait and one read give it everybody's. All compare.
//! 2. Rank 0 listens on an abstract unix socket of random name (in its record), makes the memory, and waits for a greeting of every other
//!    rank: token, rank, size, and a pidfd of the sender. The kernel vouches for the sender's user id.
//! 3. Rank 0 sends everybody the memory and all pidfds. Everybody removes its own key.
//!
//! That is four store operations per rank, whatever the size. Nothing has a name that outlives the step: no file, no port, no key.

mod leader;
mod member;
mod message;
mod record;

use crate::error::{Error, Kind, Result};
use crate::mem::layout::MAX_RANKS;
use crate::rank::{Rank, name_ranks};
use crate::store::Store;
use crate::sync::limit::Limit;
use crate::sys::pidfd::{self, Process};
use record::Record;
use std::collections::BTreeSet;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Who joins.
#[derive(Clone, Copy, Debug)]
pub struct JoinSpec<'a> {
    /// The group's name.
    pub group: &'a str,
    /// This process's place in it.
    pub rank: Rank,
    /// Number of members.
    pub size: usize,
    /// Which attempt of the job this is.
    pub restart: &'a str,
    /// Limit of the whole.
    pub timeout: Duration,
    /// Bytes of memory that the members will share.
    pub segment_bytes: usize,
}

/// Another member, or oneself.
#[derive(Clone, Debug)]
pub struct Member {
    /// The process.
    pub process: Process,
    /// A handle for watching it; `None` where it is this very process.
    pub handle: Option<Arc<OwnedFd>>,
}

/// What joining gives.
#[derive(Debug)]
pub struct Joined {
    /// The memory file, of the size asked for.
    pub segment: OwnedFd,
    /// In rank order.
    pub members: Vec<Member>,
}

/// Nonces of the joins that are under way in this process: they tell a twin from what an earlier attempt left behind.
static UNDER_WAY: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());

struct UnderWay(String);

impl UnderWay {
    fn enter(nonce: &str) -> Self {
        UNDER_WAY.lock().unwrap_or_else(PoisonError::into_inner).insert(nonce.into());
        Self(nonce.into())
    }

    fn has(nonce: &str) -> bool {
        UNDER_WAY.lock().unwrap_or_else(PoisonError::into_inner).contains(nonce)
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        UNDER_WAY.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.0);
    }
}

/// One join under way.
struct Attempt<'a> {
    spec: &'a JoinSpec<'a>,
    store: &'a dyn Store,
    record: Record,
    keys: Vec<String>,
    limit: Limit,
}

/// Joins a group of more than one rank; returns once this rank has the memory that all share.
///
/// Fails with `Config` for a duplicate rank, ranks on other hosts or of other versions, with `Timeout` naming the ranks that never came,
/// with `Peer` if one died on the way.
pub fn join(store: &dyn Store, spec: &JoinSpec<'_>) -> Result<Joined> {
    if spec.size > MAX_RANKS || spec.rank.index() >= spec.size {
        let (rank, size) = (spec.rank, spec.size);
        return Err(Error::config(format!("rank {rank} cannot join a group of {size} ranks; there are at most {MAX_RANKS}")));
    }
    let listener = if spec.rank.0 == 0 { Some(message::listen(spec.size)?) } else { None };
    let record = Record::new(spec, listener.as_ref().map_or("", |(_, name)| name))?;
    let _under_way = UnderWay::enter(&record.nonce);
    let keys = (0..spec.size).map(|rank| format!("symm/{}/{}/{rank}", spec.group, spec.restart)).collect();
    let attempt = Attempt { spec, store, record, keys, limit: Limit::from(std::time::Instant::now(), spec.timeout) };
    let claimed = attempt.claim();
    let joined = claimed.and_then(|()| {
        let records = attempt.meet()?;
        match listener {
            Some((listener, _)) => attempt.lead(&listener, &records),
            None => attempt.follow(records),
        }
    });
    // Another rank's record is not ours to remove.
    let duplicate = joined.as_ref().is_err_and(|error| error.message.contains("is taken"));
    if joined.as_ref().is_err_and(|error| error.kind == Kind::Timeout) {
        // Others are about to ask who is missing: this rank was there.
        std::thread::sleep(GRACE);
    }
    if !duplicate {
        let _ = store.delete(attempt.own_key());
    }
    joined
}

/// How long a rank that gave up leaves its record for others to see.
const GRACE: Duration = Duration::from_millis(300);

impl Attempt<'_> {
    fn own_key(&self) -> &str {
        &self.keys[self.spec.rank.index()]
    }

    fn left(&self) -> Duration {
        self.limit.left().unwrap_or(Duration::ZERO)
    }

    /// "rank 0 (pid 12)".
    fn me(&self) -> String {
        format!("rank {} (pid {})", self.spec.rank, self.record.pid)
    }

    /// Puts this rank's record under its key, over one that a dead process or an earlier attempt left there.
    fn claim(&self) -> Result<()> {
        let own = self.record.encode();
        let mut expected = Vec::new();
        for _ in 0..8 {
            let stands = self.store.compare_set(self.own_key(), &expected, &own)?;
            if stands == own {
                return Ok(());
            }
            if let Ok(other) = Record::decode(&stands) {
                let here = other.process() == self.record.process();
                let alive = if here { UnderWay::has(&other.nonce) } else { other.host == self.record.host && pidfd::runs(other.process()) };
                if alive || other.host != self.record.host {
                    return Err(Error::config(format!(
                        "rank {} of group \"{}\" is taken: pid {} claims it, and so does pid {}",
                        self.spec.rank, self.spec.group, other.pid, self.record.pid
                    )));
                }
            }
            expected = stands;
        }
        Err(Error::config(format!("rank {} of group \"{}\" is contested by other processes", self.spec.rank, self.spec.group)))
    }

    /// Everybody's record, compared.
    fn meet(&self) -> Result<Vec<Record>> {
        if !self.store.wait(&self.keys, self.left().max(Duration::from_millis(1)))? {
            let absent = |key: &String| !self.store.check(std::slice::from_ref(key)).unwrap_or(false);
            let missing: Vec<Rank> = (0u32..).zip(&self.keys).filter(|(_, key)| absent(key)).map(|(rank, _)| Rank(rank)).collect();
            return Err(self.missing(&missing));
        }
        let records = self.store.multi_get(&self.keys)?;
        let records: Vec<Record> = records.iter().map(|bytes| Record::decode(bytes)).collect::<Result<_>>()?;
        record::compare(&records, self.spec)?;
        Ok(records)
    }

    fn missing(&self, ranks: &[Rank]) -> Error {
        let (group, size) = (self.spec.group, self.spec.size);
        let (seconds, ranks) = (self.limit.waited().as_secs_f32(), name_ranks(ranks));
        Error::timeout(format!("{} waited {seconds:.1} s for {ranks} to join group \"{group}\" of {size} ranks", self.me()))
    }

    fn member(&self, process: Process, handle: OwnedFd) -> Member {
        let own = process == self.record.process();
        Member { process, handle: (!own).then(|| pidfd::shared(process, handle)) }
    }
}

#[cfg(test)]
mod tests;
