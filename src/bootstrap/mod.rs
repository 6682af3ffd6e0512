//! Joining a group: the ranks of one node find each other through a key-value store and share one
//! memory segment.
//!
//! 1. Each rank publishes a `JoinRecord` under `symm/{group}/{attempt}/{rank}` (`claim`), then
//!    waits for and reads the records of all ranks (`collect_records`): a fixed number of store
//!    round trips, whatever the size.
//! 2. Rank 0 makes the memory and sends its descriptor to each other rank over a Unix socket
//!    (`coordinator`, `member`). Rank 0 listens from before it publishes its record, under a random
//!    name that the record contains.
//! 3. Each rank removes its key; in groups that keep memberships, another key then holds the rank
//!    (`rank_lease`).
//!
//! If the group may span nodes and the records name several, joining ends after step 1.
//!
//! A rank that fails reports the cause over the socket to ranks that wait there, and in its record
//! to ranks that read it later, so all ranks raise the same cause. No wait exceeds the caller's
//! deadline, except for a moment in which rank 0 may still report the cause.

mod claim;
mod collect_records;
mod coordinator;
pub mod fd_exchange;
#[cfg(fuzzing)]
pub mod fuzz;
mod handshake;
mod join_deadline;
mod member;
mod multi_node;
mod options;
mod rank_lease;
mod record;

use crate::dtype::SumOrder;
use crate::error::{Error, Result};
use crate::mem::shm::HostReservation;
use crate::rank::Rank;
use crate::store::Store;
use crate::store::deadline::DeadlineStore;
use crate::store::prefix::PrefixStore;
use crate::sys::interrupt::{self, SIGNAL_POLL};
use crate::sys::node_id::{self, NodeId};
use crate::sys::process::{self, ProcessId};
use crate::sys::random;
use crate::sys::required::{self, Required};
use claim::RankClaim;
use collect_records::Gathered;
use join_deadline::JoinDeadline;
pub use multi_node::MultiNodeRanks;
pub use options::JoinOptions;
pub use rank_lease::RankLease;
use record::JoinRecord;
pub use record::{name_members, other_members};
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Maximum size of a group on one node.
pub const MAX_SIZE: u32 = 128;

/// How long a rank waits past its deadline for rank 0 to report the cause, because rank 0's own
/// deadline may be a little later.
const COORDINATOR_GRACE: Duration = Duration::from_millis(300);

/// The shortest pause between two polls of the store, multiplied by the number of polling ranks,
/// and the longest pause.
const STORE_POLL_MIN: Duration = Duration::from_micros(50);
const STORE_POLL_MAX: Duration = Duration::from_millis(50);

/// How long a process may take to exit after its connection has closed.
const PROCESS_EXIT_DELAY: Duration = Duration::from_millis(50);

/// The group to join, and this process's part in it.
#[derive(Clone, Copy, Debug)]
pub struct JoinSpec<'a> {
    /// The group's name, the same on all ranks.
    pub group: &'a str,
    /// This rank.
    pub rank: Rank,
    /// Number of ranks.
    pub size: u32,
    /// Distinguishes attempts of one job that share a store.
    pub attempt: &'a str,
    /// Limit of the whole call.
    pub timeout: Duration,
    /// Size of the shared memory, the same on all ranks.
    pub segment_bytes: u64,
    /// Size of the prefix that rank 0 allocates in advance, so that every rank gets the error if
    /// memory is short.
    pub reserved_bytes: usize,
    /// True to reject a process that later claims a rank of this group while the group lives. Costs
    /// a key per rank, which stays in the store, and a file descriptor.
    pub hold_rank: bool,
    /// The group's members by their ranks in the default group, equal on all ranks that list any;
    /// empty if they are the same as in this group.
    pub global_ranks: &'a [i32],
    /// Order in which reductions combine the ranks' elements, the same on all ranks.
    pub order: SumOrder,
    /// The facts about the group's ranks that this process knows from other groups.
    pub known: Option<KnownPeers>,
}

/// The facts that a process knows about ranks from groups that it already shares with them.
#[derive(Clone, Copy, Debug)]
pub struct KnownPeers {
    /// Returns how the process of a rank of the default group has ended, as a sentence without a
    /// full stop; `None` if no end is known.
    pub ended: fn(u32) -> Option<String>,
}

/// The process of a rank.
#[derive(Clone, Debug)]
pub struct MemberProcess {
    /// Process id of the rank.
    pub pid: u32,
    /// Start time, field 22 of `/proc/pid/stat`; a pair of `pid` and start time is never reused.
    pub start_time: u64,
    /// The pidfd of the rank's process, which becomes readable when the process ends; `None` for
    /// this process.
    pub pidfd: Option<Arc<OwnedFd>>,
}

/// The result of joining: what the ranks of a group share.
#[derive(Debug)]
pub struct Joined {
    /// `segment_bytes` of zeroed, unnamed memory whose size is sealed.
    pub segment: OwnedFd,
    /// The processes, by rank.
    pub members: Vec<MemberProcess>,
    /// The group's random id; the same on all ranks, and unique to this group.
    pub token: [u8; 16],
    /// Addresses at which this process maps `segment`. They are reserved before the ranks meet, so
    /// that all ranks get the error if that fails.
    pub addresses: HostReservation,
    /// This rank's membership, held until it is dropped.
    pub lease: Option<RankLease>,
}

/// The outcome of [`find`].
#[derive(Debug)]
pub enum Discovered<T> {
    /// All ranks are on one node and share this.
    SingleNode(T),
    /// The ranks are on several nodes.
    MultiNode(Box<MultiNodeRanks>),
}

/// The result of meeting the other ranks.
struct JoinedSegment {
    segment: OwnedFd,
    members: Vec<MemberProcess>,
    token: [u8; 16],
}

/// An attempt to join: the context of all steps of one call.
struct Attempt<'a> {
    store: &'a dyn Store,
    spec: &'a JoinSpec<'a>,
    clock: JoinDeadline,
    own: ProcessId,
    node: NodeId,
    /// True if the group may span nodes.
    multi_node: bool,
}

impl Attempt<'_> {
    /// Returns the key of `rank` in this attempt's part of the store.
    fn key(rank: u32) -> String {
        rank.to_string()
    }

    /// Returns true once all `keys` exist; false after `limit`, at the deadline, or as soon as
    /// `news` returns true.
    ///
    /// Polls, because torch's TCPStore prints four lines whenever a wait times out.
    fn wait_for_keys(
        &self,
        keys: &[String],
        limit: Duration,
        news: impl Fn() -> bool,
    ) -> Result<bool> {
        let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
        // The number of polling ranks is the number of keys.
        let shortest = STORE_POLL_MIN * keys.len() as u32;
        let until = self.clock.deadline.min(Instant::now() + limit);
        loop {
            // Before the keys, because callers wait again for keys that exist.
            self.check_interrupt()?;
            if self.store.check(&keys)? {
                return Ok(true);
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() || news() {
                return Ok(false);
            }
            std::thread::sleep(
                (self.clock.started.elapsed() / 4).clamp(shortest, STORE_POLL_MAX).min(left),
            );
        }
    }

    /// Fails if a signal has ended this rank's wait. Every loop of joining calls this at least once
    /// per [`SIGNAL_POLL`].
    fn check_interrupt(&self) -> Result<()> {
        interrupt::check().map_err(|error| self.unable(error))
    }

    /// Returns the error for a `rank` whose process has ended, if another group knows of that end.
    fn known_end(&self, rank: Rank) -> Option<Error> {
        let known = self.spec.known?;
        let global =
            self.spec.global_ranks.get(rank.index()).map_or(rank.0, |&global| global as u32);
        let sentence = (known.ended)(global)?;
        Some(Error::peer(format!("rank {rank} cannot join {}: {sentence}", self.group())))
    }

    /// Returns this rank's name for messages, such as `"rank 2 (pid 77)"`.
    fn me(&self) -> String {
        format!("rank {} (pid {})", self.spec.rank, self.own.pid)
    }

    /// Returns the group's name for messages, such as `"group \"default_pg\" of 4 ranks"`.
    fn group(&self) -> String {
        format!("group {:?} of {} ranks", self.spec.group, self.spec.size)
    }

    /// Returns the error of a rank that another process has claimed.
    fn twice(&self, other: u32, membership: &str) -> Error {
        let (rank, group, own) = (self.spec.rank, self.group(), self.own.pid);
        Error::config(format!(
            "rank {rank} of {group} is claimed twice: by pid {other}{membership} and by pid {own}"
        ))
    }

    fn ended(&self, rank: Rank, pid: u32, cause: &str) -> Error {
        let group = self.group();
        Error::peer(format!("rank {rank} (pid {pid}) ended while joining {group}: {cause}"))
    }

    /// Returns the error to report if the process of `rank` ends within `limit`.
    fn end_of(&self, rank: Rank, member: &MemberProcess, limit: Duration) -> Option<Error> {
        let pidfd = member.pidfd.as_ref()?;
        let give_up = Instant::now() + limit;
        while !process::ended(pidfd) {
            if Instant::now() >= give_up {
                return None;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        let process = ProcessId { pid: member.pid, start_time: member.start_time };
        // The process may have recorded its failure before it exited.
        let failure = collect_records::failure_of(self, rank, process);
        Some(
            failure.unwrap_or_else(|| {
                self.ended(rank, member.pid, &process::exit_cause(process, pidfd))
            }),
        )
    }

    /// Returns `error` with a message which says that this rank cannot join because of it.
    fn unable(&self, error: Error) -> Error {
        Error { message: format!("{} cannot join {}: {error}", self.me(), self.group()), ..error }
    }

    /// Returns the error of a failed system call. If file descriptors ran out, the message has the
    /// limit and the number needed.
    fn refused(&self, step: Required, errno: Errno) -> Error {
        if errno != Errno::MFILE {
            return self.unable(step.failed(errno));
        }
        let (limit, open) = required::descriptors();
        // One descriptor for each other process, the socket, the memory, and the membership if the
        // group keeps one. Rank 0 needs one more for each connection.
        let others = self.spec.size as usize - 1;
        let need = if self.spec.rank == Rank(0) { 2 * others } else { others }
            + 2
            + usize::from(self.spec.hold_rank);
        let limit = limit.map_or_else(|| "unlimited".into(), |limit| limit.to_string());
        Error::config(format!(
            "RLIMIT_NOFILE {limit} of {} is too low: {open} descriptors are open and joining {} \
             needs up to {need} more",
            self.me(),
            self.group(),
        ))
    }

    /// Reserves addresses for the shared memory.
    fn addresses(&self) -> Result<HostReservation> {
        let bytes = usize::try_from(self.spec.segment_bytes).unwrap_or(usize::MAX);
        HostReservation::reserve(bytes, format_args!("{}, to join {},", self.me(), self.group()))
    }

    fn member(&self, record: &JoinRecord, pidfd: Option<Arc<OwnedFd>>) -> MemberProcess {
        MemberProcess { pid: record.pid, start_time: record.start_time, pidfd }
    }
}

/// The resources that a rank acquires before it publishes its record.
enum JoinResources {
    Coordinator(coordinator::CoordinatorResources),
    Member(member::MemberResources),
}

/// Joins the group together with its other ranks.
///
/// On success, every rank holds a descriptor of the same memory and a pidfd of every other rank's
/// process, and no record is left. On failure, only this rank's record is left, with the cause:
/// late ranks raise it, too, and the next attempt replaces it.
/// # Errors
/// `Value` and `Config` for invalid arguments; `Config` if the ranks cannot form a group (nodes,
/// versions, sizes, users, duplicates, file descriptors); `Timeout` names the missing ranks; `Peer`
/// names the rank that ended.
pub fn join(store: &dyn Store, spec: &JoinSpec<'_>) -> Result<Joined> {
    match meet(store, spec, false)? {
        Discovered::SingleNode(joined) => Ok(joined),
        Discovered::MultiNode(_) => Err(Error::internal("several nodes were not refused")),
    }
}

/// Joins the group as `join` does if its ranks are on one node, and otherwise returns their
/// locations. A group of more than [`MAX_SIZE`] ranks must span several nodes.
///
/// # Errors
/// As `join`.
pub fn find(store: &dyn Store, spec: &JoinSpec<'_>) -> Result<Discovered<Joined>> {
    meet(store, spec, true)
}

/// Returns the ranks that have announced in `store` that they join the group of `size` ranks. Ranks
/// that failed later are included. Once the group has formed, the list is empty.
pub fn announced(store: &dyn Store, group: &str, restart: &str, size: u32) -> Result<Vec<Rank>> {
    let store = PrefixStore::new(&prefix(group, restart), store);
    let mut announced = Vec::new();
    for rank in 0..size {
        if store.check(&[&Attempt::key(rank)])? {
            announced.push(Rank(rank));
        }
    }
    Ok(announced)
}

/// Returns the prefix of the keys of an attempt.
fn prefix(group: &str, restart: &str) -> String {
    format!("symm/{group}/{restart}")
}

fn meet(store: &dyn Store, spec: &JoinSpec<'_>, several: bool) -> Result<Discovered<Joined>> {
    let JoinSpec { rank, size, .. } = *spec;
    if size == 0 || rank.0 >= size {
        return Err(Error::value(format!(
            "rank {rank} does not exist in group {:?} of {size} ranks",
            spec.group
        )));
    }
    let too_large = (size > MAX_SIZE).then(|| {
        Error::config(format!(
            "group {:?} of {size} ranks is larger than torch-symm supports on \
            one node ({MAX_SIZE})",
            spec.group
        ))
    });
    if let Some(error) = too_large.as_ref().filter(|_| !several) {
        return Err(error.clone());
    }
    let clock = JoinDeadline::start(spec.timeout);
    let purpose = format!(
        "rank {rank} (pid {}) could not join group {:?} of {size} ranks",
        std::process::id(),
        spec.group
    );
    let prefix = prefix(spec.group, spec.attempt);
    let store = PrefixStore::new(&prefix, DeadlineStore::new(store, clock.deadline, purpose));
    let known = process::own().and_then(|own| Ok((own, NodeId::own()?, random::bytes()?)));
    // A rank that cannot identify itself still publishes this failure, in a record without a node.
    let nobody =
        || (ProcessId { pid: std::process::id(), start_time: 0 }, NodeId::default(), [0; 16]);
    let (own, node, token) = known.as_ref().map_or_else(|_| nobody(), Clone::clone);
    let attempt = Attempt { store: &store, spec, clock, own, node, multi_node: several };
    let known = known.map_err(|error| attempt.unable(error));
    if size == 1 {
        known?;
        let (segment, addresses) = (coordinator::segment(&attempt)?, attempt.addresses()?);
        let ProcessId { pid, start_time } = attempt.own;
        let members = vec![MemberProcess { pid, start_time, pidfd: None }];
        return Ok(Discovered::SingleNode(Joined {
            segment,
            members,
            token,
            addresses,
            lease: None,
        }));
    }
    if spec.hold_rank && known.is_ok() {
        rank_lease::reject_taken(&attempt, true)?;
    }
    let seat = known.and_then(|_| {
        if too_large.is_some() {
            return Ok(None);
        }
        let leads = rank == Rank(0);
        let seat = if leads {
            JoinResources::Coordinator(coordinator::CoordinatorResources::create(&attempt)?)
        } else {
            JoinResources::Member(member::MemberResources::create(&attempt)?)
        };
        Ok(Some((
            seat,
            spec.hold_rank.then(|| RankLease::take(&attempt)).transpose()?,
            attempt.addresses()?,
        )))
    });
    let mut record = JoinRecord {
        protocol: record::PROTOCOL,
        version: record::VERSION.into(),
        rank: rank.0,
        size,
        segment_bytes: spec.segment_bytes,
        global_ranks: spec.global_ranks.to_vec(),
        order: spec.order.name().into(),
        node: attempt.node.clone(),
        host_name: node_id::name(),
        multi_node: several,
        pid: attempt.own.pid,
        start_time: attempt.own.start_time,
        uid: rustix::process::geteuid().as_raw(),
        at: attempt.clock.started_at,
        socket: String::new(),
        nonce: token,
        failure: None,
    };
    match &seat {
        Ok(Some((JoinResources::Coordinator(seat), ..))) => record.socket.clone_from(&seat.name),
        Ok(_) => {}
        Err(error) => record.fail(error),
    }
    let mut claim = RankClaim::publish(&attempt, record)
        .map_err(|error| seat.as_ref().err().cloned().unwrap_or(error))?;
    let outcome = seat.and_then(|held| {
        let ranks = match collect_records::gather(&attempt, &claim)? {
            Gathered::MultiNode(placements) => {
                return Ok(Discovered::MultiNode(Box::new(MultiNodeRanks {
                    placements,
                    prefix,
                    published: claim.published.clone(),
                })));
            }
            Gathered::SingleNode(ranks) => ranks,
        };
        let Some((seat, membership, addresses)) = held else {
            return Err(
                too_large.unwrap_or_else(|| Error::internal("a group without a place for it"))
            );
        };
        claim.lease = membership;
        let JoinedSegment { segment, members, token } = match seat {
            JoinResources::Coordinator(seat) => seat.distribute(&attempt, &claim, ranks),
            JoinResources::Member(seat) => seat.receive(&attempt, &claim, ranks),
        }?;
        Ok(Discovered::SingleNode(Joined {
            segment,
            members,
            token,
            addresses,
            lease: claim.lease.take(),
        }))
    });
    outcome.inspect_err(|error| claim.published.fail(&store, error))
}
