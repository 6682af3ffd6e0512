//! Status of a group: what failed, who has left or died, and what late members are doing.

use super::block::{ControlBlock, Progress};
use crate::error::{Error, Result};
use crate::rank::{Rank, name_ranks};
use crate::sys::process;
use std::iter;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;

impl ControlBlock {
    /// Records the group's first failure and wakes everybody; returns the failure that stands.
    pub fn fail(&self, error: Error) -> Error {
        self.header().failure.record(self.rank, &error);
        self.ring_all();
        self.failure().unwrap_or(error)
    }

    /// Runs `body`. A panic in it fails the group on all ranks: see `panicked`.
    pub fn contain<T>(&self, body: impl FnOnce() -> Result<T>) -> Result<T> {
        catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|panic| Err(self.panicked(&*panic)))
    }

    /// Fails the group because of a panic of this rank: nobody knows what it left half done, and peers may wait for the rest.
    pub fn panicked(&self, panic: &(dyn std::any::Any + Send)) -> Error {
        let doing = self.doing(self.rank).map_or_else(String::new, |doing| format!(", {doing}"));
        let who = format!("{} of group \"{}\"{doing}", self.describe(self.rank), self.name());
        self.fail(Error::panicked(&who, panic))
    }

    /// The first failure of the group.
    pub fn failure(&self) -> Option<Error> {
        let failure = &self.header().failure;
        if failure.stands() { failure.read(self.rank) } else { None }
    }

    /// Notes that the process of `rank` has ended, and wakes this member.
    pub fn note_gone(&self, rank: Rank, how: String) {
        let _ = self.gone[rank.index()].set(how);
        let _ = self.first_gone.set(rank);
        self.words(self.rank).bell.0.ring();
        self.fail_if_unattended();
    }

    /// Makes a member's death fail the group from now on, even if no call waits for it here: kernels may. `progress` is for the message.
    pub fn wait_unattended(&self, progress: Progress) {
        // Who was first has said the same.
        let _ = self.unattended.set(progress);
        self.fail_if_unattended();
    }

    fn fail_if_unattended(&self) {
        if let Some(progress) = self.unattended.get()
            && let Some(((rank, _), dead)) = self.dead_rank().zip(self.dead())
        {
            let (theirs, me, own) = (progress(self, rank), self.describe(self.rank), progress(self, self.rank));
            self.fail(Error::peer(format!("{}, {theirs}; {me} is alive, {own}", dead.message)));
        }
    }

    /// Tells all members that this one takes part in nothing further, because of the error `farewell` if that is not empty. Idempotent.
    pub fn depart(&self, farewell: &str) {
        if self.words(self.rank).departed.load(Ordering::Relaxed) != 0 {
            return;
        }
        self.words(self.rank).farewell.0.write_start(farewell);
        self.words(self.rank).departed.store(1, Ordering::Release);
        self.ring_all();
    }

    /// Reason why `rank` is unable to take part, if it is.
    pub fn absence(&self, rank: Rank) -> Option<String> {
        self.departure(rank).or_else(|| self.ended(rank).cloned())
    }

    /// How `rank` has left the group, if it has.
    pub fn departure(&self, rank: Rank) -> Option<String> {
        let departed = self.words(rank).departed.load(Ordering::Acquire) != 0;
        departed.then(|| match self.words(rank).farewell.0.read() {
            farewell if farewell.is_empty() => "left the group (destroy_process_group or exit)".into(),
            farewell => format!("left the group after {farewell}"),
        })
    }

    /// Whether the process of a member is known to have ended.
    pub fn any_ended(&self) -> bool {
        self.first_gone.get().is_some()
    }

    /// End of the process of `rank`, in words, if it is known; the rank may have left the group before.
    pub fn ended(&self, rank: Rank) -> Option<&String> {
        self.gone[rank.index()].get()
    }

    /// Error that names a member whose process has ended without leaving the group.
    pub fn dead(&self) -> Option<Error> {
        let (rank, how) = self.dead_rank()?;
        Some(Error::peer(format!("{} of group \"{}\" {how}", self.describe(rank), self.name)))
    }

    /// A member whose process ended without leaving the group, the first if there are several, and how it ended.
    pub fn dead_rank(&self) -> Option<(Rank, &String)> {
        let first = *self.first_gone.get()?;
        let died = |rank: Rank| self.ended(rank).filter(|_| self.words(rank).departed.load(Ordering::Acquire) == 0);
        iter::once(first).chain(self.ranks()).find_map(|rank| Some((rank, died(rank)?)))
    }

    /// State of a rank's process, such as "rank 1: pid 4711 alive, asleep".
    pub fn process_state(&self, rank: Rank) -> String {
        let pid = self.pid(rank);
        format!("rank {}: pid {pid} {}", self.shown(rank), process::state(pid).unwrap_or("exited"))
    }

    /// The missing members, each with what its process is doing.
    pub fn late(&self, missing: &dyn Fn(Rank) -> bool) -> String {
        let late: Vec<Rank> = self.ranks().filter(|&rank| rank != self.rank && missing(rank)).collect();
        let state = |rank: &Rank| {
            let doing = match self.doing(*rank) {
                None => "has begun no collective".into(),
                // Which it is would say nothing to the user, who called another.
                Some(doing) if self.is_part() => if doing.finished { "in no collective" } else { "in a collective" }.into(),
                Some(doing) => doing.to_string(),
            };
            format!("{}, {doing}", self.process_state(*rank))
        };
        let states: Vec<String> = late.iter().map(state).collect();
        let late: Vec<Rank> = late.into_iter().map(|rank| self.shown(rank)).collect();
        format!("{} ({})", name_ranks(&late), states.join("; "))
    }
}
