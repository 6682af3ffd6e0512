//! The status of a group: its failure, members that have left or exited, and what late members are
//! doing.

use super::block::{ControlBlock, KernelProgress};
use super::call_state::{AwaitedMessage, CallProgress};
use crate::error::{Error, Result};
use crate::rank::{Rank, name_ranks};
use crate::sys::process;
use std::iter;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Maximum time for which a process that leaves because of an exception counts as about to end.
const PROCESS_END_GRACE: Duration = Duration::from_secs(1);

impl ControlBlock {
    /// Records `error` unless the group has failed before, and wakes every member; returns the
    /// recorded failure.
    pub fn fail(&self, error: Error) -> Error {
        self.header().failure.record(self.rank, &error);
        self.ring_all();
        self.failure().unwrap_or(error)
    }

    /// Runs `body`; a panic in it fails the group on all ranks, see `panicked`.
    pub fn contain<T>(&self, body: impl FnOnce() -> Result<T>) -> Result<T> {
        catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|panic| Err(self.panicked(&*panic)))
    }

    /// Fails the group because of a panic of this rank: its unfinished work is in an unknown state,
    /// and peers may wait for it.
    pub fn panicked(&self, panic: &(dyn std::any::Any + Send)) -> Error {
        let doing =
            self.current_call(self.rank).map_or_else(String::new, |doing| format!(", {doing}"));
        let who = format!("{} of group \"{}\"{doing}", self.describe(self.rank), self.name());
        self.fail(Error::panicked(&who, panic))
    }

    /// Returns the first failure of the group.
    pub fn failure(&self) -> Option<Error> {
        let failure = &self.header().failure;
        if failure.stands() { failure.read(self.rank) } else { None }
    }

    /// Records that the process of `rank` has ended, and wakes this member.
    pub fn note_exit(&self, rank: Rank, how: String) {
        let _ = self.exited[rank.index()].set(how);
        let _ = self.first_exited.set(rank);
        self.words(self.rank).bell.0.ring();
        self.fail_if_kernels_wait();
    }

    /// Makes the exit of a member fail the group from now on even if no thread of this rank waits
    /// for it, because kernels may wait. `progress` describes their calls in the error message.
    pub fn set_kernel_progress(&self, progress: KernelProgress) {
        // An earlier caller has set the same value.
        let _ = self.kernel_progress.set(progress);
        self.fail_if_kernels_wait();
    }

    fn fail_if_kernels_wait(&self) {
        if let Some(progress) = self.kernel_progress.get()
            && let Some(((rank, _), dead)) = self.dead_rank().zip(self.dead())
        {
            let (theirs, me, own) =
                (progress(self, rank), self.describe(self.rank), progress(self, self.rank));
            self.fail(Error::peer(format!("{}, {theirs}; {me} is alive, {own}", dead.message)));
        }
    }

    /// Publishes that this member leaves the group, because of the error `farewell` unless that is
    /// empty. Idempotent.
    pub fn note_departure(&self, farewell: &str) {
        if self.words(self.rank).departed.load(Ordering::Relaxed) != 0 {
            return;
        }
        self.words(self.rank).exit_reason.0.write_start(farewell);
        self.words(self.rank).departed.store(1, Ordering::Release);
        self.ring_all();
    }

    /// Returns the reason why `rank` can no longer take part; `None` if it can.
    pub fn exit_reason(&self, rank: Rank) -> Option<String> {
        self.departure(rank).or_else(|| self.ended(rank).cloned())
    }

    /// Returns the same for a thread that waits for `rank`, and will ask again unless this was the
    /// `last` time.
    ///
    /// A process that leaves because of an exception is about to end. The reason is returned only
    /// once it has ended, or after [`PROCESS_END_GRACE`]: a launcher blames the process that ends
    /// first, and some launchers show only the traceback of that one.
    pub fn exit_reason_of_awaited(&self, rank: Rank, last: bool) -> Option<String> {
        if !last && self.is_about_to_end(rank) {
            return None;
        }
        self.exit_reason(rank)
    }

    /// Returns the error that names a member which has left because of an exception, and whose
    /// process is about to end.
    pub fn about_to_end(&self) -> Option<Error> {
        let rank = self.peers().find(|&rank| self.is_about_to_end(rank))?;
        Some(self.exit_error(rank, &self.departure(rank)?))
    }

    /// Returns the error that names a member which has left or ended, and `how`.
    pub fn exit_error(&self, rank: Rank, how: &str) -> Error {
        Error::peer(format!("{} of group \"{}\" {how}", self.describe(rank), self.name))
    }

    fn is_about_to_end(&self, rank: Rank) -> bool {
        // The end of this process itself is not watched.
        self.words(rank).departed.load(Ordering::Acquire) != 0
            && self.pid(rank) != self.pid(self.rank)
            && self.ended(rank).is_none()
            && !self.words(rank).exit_reason.0.read().is_empty()
            && self.failed_at[rank.index()].get_or_init(Instant::now).elapsed() < PROCESS_END_GRACE
    }

    /// Returns how `rank` has left the group, if it has.
    pub fn departure(&self, rank: Rank) -> Option<String> {
        let departed = self.words(rank).departed.load(Ordering::Acquire) != 0;
        departed.then(|| match self.words(rank).exit_reason.0.read() {
            farewell if farewell.is_empty() => {
                "left the group (destroy_process_group or exit)".into()
            }
            farewell => format!("left the group after {farewell}"),
        })
    }

    /// Returns true if the process of some member is known to have ended.
    pub fn any_ended(&self) -> bool {
        self.first_exited.get().is_some()
    }

    /// Returns how the process of `rank` ended, if that is known; the rank may have left the group
    /// before.
    pub fn ended(&self, rank: Rank) -> Option<&String> {
        self.exited[rank.index()].get()
    }

    /// Returns how the process of `rank` ended, if it did so without leaving the group.
    pub fn died(&self, rank: Rank) -> Option<&String> {
        self.ended(rank).filter(|_| self.words(rank).departed.load(Ordering::Acquire) == 0)
    }

    /// Returns the error that names a member whose process ended without leaving the group.
    pub fn dead(&self) -> Option<Error> {
        let (rank, how) = self.dead_rank()?;
        Some(self.exit_error(rank, how))
    }

    /// Returns the first member whose process ended without leaving the group, and how it ended.
    pub fn dead_rank(&self) -> Option<(Rank, &String)> {
        let first = *self.first_exited.get()?;
        iter::once(first).chain(self.ranks()).find_map(|rank| Some((rank, self.died(rank)?)))
    }

    /// Returns the first member whose process has ended as that of a rank which failed, and how:
    /// without leaving the group, after it left because of an exception, or with a code other than
    /// 0. A signal does not count once the member has left, because the exit of a process does not
    /// concern a group that was destroyed before; only `sys.exit` ends both at once.
    pub fn failed_rank(&self) -> Option<(Rank, String)> {
        let first = *self.first_exited.get()?;
        iter::once(first).chain(self.ranks()).find_map(|rank| {
            let how = self.ended(rank)?;
            let departure = self.departure(rank);
            let excepted = || !self.words(rank).exit_reason.0.read().is_empty();
            let text = match departure {
                // A program may handle the exception that it reports, and end with 0.
                Some(departure) if excepted() && process::exit_code(how) != Some(0) => departure,
                Some(_) if process::exit_code(how).unwrap_or(0) == 0 => return None,
                Some(_) | None => how.clone(),
            };
            Some((rank, text))
        })
    }

    /// Returns why a message of this rank cannot reach `rank`, of this node, which has left the
    /// group, and whether that fails the group: not if the rank has left in order. A message of a
    /// call that `waits` fails later if the process is about to end: see
    /// [`Self::exit_reason_of_awaited`].
    pub fn unreachable(&self, rank: Rank, waits: bool) -> Option<(String, bool)> {
        if self.words(rank).departed.load(Ordering::Acquire) == 0 {
            return None;
        }
        let reason = self.exit_reason_of_awaited(rank, !waits)?;
        // If the process is about to end, the group fails only then: see above.
        let fails =
            !self.words(rank).exit_reason.0.read().is_empty() && !self.is_about_to_end(rank);
        Some((reason, fails))
    }

    /// Names `ranks`, the state of each process and what the rank is `doing`, such as "rank 1 (rank
    /// 1: pid 4711 alive, asleep, in all_reduce #3)".
    pub fn states_of(&self, ranks: &[Rank], doing: impl Fn(Rank) -> String) -> String {
        let state = |&rank: &Rank| {
            let (shown, pid) = (self.display_rank(rank), self.pid(rank));
            let process = process::state(pid).unwrap_or("exited");
            format!("rank {shown}: pid {pid} {process}, {}", doing(rank))
        };
        let states: Vec<String> = ranks.iter().map(state).collect();
        let ranks: Vec<Rank> = ranks.iter().map(|&rank| self.display_rank(rank)).collect();
        format!("{} ({})", name_ranks(&ranks), states.join("; "))
    }

    /// Returns what `rank` is doing in the group, such as "in all_reduce #3".
    pub fn activity(&self, rank: Rank) -> String {
        let doing = self.current_call(rank);
        if let Some(AwaitedMessage { send, peer, tag }) = self.awaited_message(rank)
            && doing.is_none_or(|doing| doing.progress == CallProgress::Finished)
        {
            let (before, peer) = (
                doing.filter(|_| !self.has_parent()).map_or_else(String::new, |doing| {
                    format!("finished {} #{}, ", doing.op.name(), doing.number)
                }),
                self.display_rank(peer),
            );
            let what = if send { "send to" } else { "recv from" };
            return format!("{before}in {what} rank {peer} (tag {tag})");
        }
        match doing {
            None => "has begun no collective".into(),
            // The collective's name would not help the user, who called another.
            Some(doing) if self.has_parent() => match doing.progress {
                CallProgress::Running => "in a collective".into(),
                CallProgress::Finished => "in no collective".into(),
                CallProgress::WaitsForNodes => "waits for other nodes".into(),
            },
            Some(doing) => doing.to_string(),
        }
    }

    /// Lists the missing members and what each process is doing.
    pub fn late_ranks(&self, missing: &dyn Fn(Rank) -> bool) -> String {
        let late: Vec<Rank> =
            self.ranks().filter(|&rank| rank != self.rank && missing(rank)).collect();
        self.states_of(&late, |rank| self.activity(rank))
    }
}
