//! A monitored barrier, whose failure names the ranks that did not arrive, in Gloo's words.
//!
//! A rank that waits for another node knows which node is late, but not which ranks of that node.
//! Therefore, on several nodes, every rank sets a key in the store before it enters the barrier. If
//! the barrier fails, rank 0 reads which keys are missing. A rank deletes its key only when it has
//! passed the next barrier or leaves, because the barrier may fail on rank 0 after other ranks have
//! passed it.

use super::Group;
use crate::coll::call::Call;
use crate::error::{Error, Result};
use crate::rank::Rank;
use crate::sync::call_site::CallSite;
use std::time::Duration;

impl Group {
    /// Runs a barrier whose error has the wording of Gloo's. On rank 0 it names the first late rank
    /// of all nodes, or all late ranks if `wait_all_ranks` is true.
    pub fn monitored_barrier(
        &self,
        timeout: Option<Duration>,
        wait_all_ranks: bool,
        call_site: Option<&'static CallSite>,
    ) -> Result<()> {
        let (timeout, me) = (timeout.unwrap_or_else(|| self.timeout()), self.place().0);
        if timeout.is_zero() {
            return Err(Error::timeout(format!(
                "Rank {me} timed out in monitoredBarrier after 0 ms"
            )));
        }
        self.check_open()?;
        let nodes = self.internode.as_ref().map(|nodes| (nodes, nodes.come_to_barrier()));
        let late = || match nodes {
            Some((internode, number)) => internode.late_to_barrier(number),
            None => {
                let begun = |rank: Rank| self.control.collective(rank);
                self.control.ranks().filter(|&rank| begun(rank) < begun(me)).collect()
            }
        };
        let outcome = self.run(&[Call::barrier(call_site)], Some(timeout));
        outcome.map_err(|error| reworded(error, me, timeout, wait_all_ranks, late))?;
        if let Some((nodes, number)) = nodes {
            nodes.pass_barrier(number);
        }
        Ok(())
    }
}

/// Converts `error` of rank `me` into Gloo's words; on rank 0 it names the `late` ranks, `all` of
/// them or only the first.
fn reworded(
    error: Error,
    me: Rank,
    timeout: Duration,
    all: bool,
    late: impl FnOnce() -> Vec<Rank>,
) -> Error {
    let cause = &error.message;
    if me.0 != 0 {
        let reached = format!("Rank {me} successfully reached monitoredBarrier");
        let text = format!(
            "{reached}, but received errors while waiting for send/recv from rank 0: {cause}"
        );
        return Error { message: text, ..error };
    }
    let late = late();
    let Some(first) = late.first() else { return error };
    let named = if all {
        late.iter().map(Rank::to_string).collect::<Vec<_>>().join(", ")
    } else {
        first.to_string()
    };
    let plural = if all { "Ranks" } else { "Rank" };
    let milliseconds = timeout.as_millis();
    let text =
        format!("{plural} {named} failed to pass monitoredBarrier in {milliseconds} ms: {cause}");
    Error { message: text, ..error }
}
