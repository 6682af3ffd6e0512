//! Monitored barrier: one whose failure names the ranks that did not come, in Gloo's words.

use super::Group;
use crate::coll::call::Call;
use crate::error::{Error, Result};
use crate::rank::Rank;
use crate::sync::call_site::CallSite;
use std::time::Duration;

/// Monitored barrier of rank `me`.
#[derive(Clone, Copy, Debug)]
pub struct Monitored {
    /// This rank.
    pub me: Rank,
    /// Limit of the barrier.
    pub timeout: Duration,
    /// Whether all ranks that did not come are named, not the first alone.
    pub all: bool,
}

impl Monitored {
    /// Refuses a barrier without time.
    pub fn check(&self) -> Result<()> {
        let late = || Error::timeout(format!("Rank {} timed out in monitoredBarrier after 0 ms", self.me));
        if self.timeout.is_zero() { Err(late()) } else { Ok(()) }
    }

    /// `error` as Gloo says it: on rank 0 with the ranks that were `late`, of which others know nothing.
    pub fn reworded(&self, error: Error, late: impl FnOnce() -> Vec<Rank>) -> Error {
        let (me, cause) = (self.me, &error.message);
        if me.0 != 0 {
            let reached = format!("Rank {me} successfully reached monitoredBarrier");
            let text = format!("{reached}, but received errors while waiting for send/recv from rank 0: {cause}");
            return Error { message: text, ..error };
        }
        let late = late();
        let Some(first) = late.first() else { return error };
        let named = if self.all { late.iter().map(Rank::to_string).collect::<Vec<_>>().join(", ") } else { first.to_string() };
        let plural = if self.all { "Ranks" } else { "Rank" };
        let milliseconds = self.timeout.as_millis();
        let text = format!("{plural} {named} failed to pass monitoredBarrier in {milliseconds} ms: {cause}");
        Error { message: text, ..error }
    }
}

impl Group {
    /// A barrier whose failure reads as Gloo's: on rank 0 it names the first rank that did not come, or all of them.
    pub fn monitored_barrier(&self, timeout: Option<Duration>, wait_all_ranks: bool, call_site: Option<&'static CallSite>) -> Result<()> {
        let timeout = timeout.unwrap_or_else(|| self.timeout());
        let monitored = Monitored { me: self.control.rank(), timeout, all: wait_all_ranks };
        monitored.check()?;
        let begun = |rank: Rank| self.control.collective(rank);
        let late = || self.control.ranks().filter(|&rank| begun(rank) < begun(monitored.me)).collect();
        self.run(&[Call::barrier(call_site)], Some(timeout)).map_err(|error| monitored.reworded(error, late))
    }
}
