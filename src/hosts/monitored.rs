//! Monitored barrier on several hosts.
//!
//! Who waits for another host sees that it has not come, not which of its ranks. So every rank says in the store that it has come; where
//! the barrier fails, rank 0 looks who has said nothing. A rank takes back what it has said once it has passed the next one, or leaves:
//! rank 0 may fail where others have passed.

use super::HostsGroup;
use crate::coll::call::Call;
use crate::config::Config;
use crate::error::Result;
use crate::group::monitored::Monitored;
use crate::rank::Rank;
use crate::sync::call_site::CallSite;
use std::sync::atomic::Ordering;
use std::time::Duration;

impl HostsGroup {
    /// A barrier whose failure reads as Gloo's: on rank 0 it names the first rank that did not come, or all of them, on whichever host.
    pub fn monitored_barrier(&self, timeout: Option<Duration>, wait_all_ranks: bool, call_site: Option<&'static CallSite>) -> Result<()> {
        let timeout = timeout.unwrap_or_else(|| self.timeout());
        let monitored = Monitored { me: self.rank, timeout, all: wait_all_ranks };
        monitored.check()?;
        let number = self.monitored.fetch_add(1, Ordering::Relaxed);
        let store = self.messages.get().map(|messages| messages.store());
        if let Some(store) = store {
            // Without it the failure names hosts, or the ranks of this one.
            let _ = store.set(&self.monitored_key(number, self.rank), b"1");
        }
        let outcome = self.run(vec![Call::barrier(call_site)], Some(timeout));
        let came = |rank: &Rank| store.is_none_or(|store| store.check(&[&self.monitored_key(number, *rank)]).unwrap_or(true));
        let late = || (0..self.layout.size() as u32).map(Rank).filter(|rank| !came(rank)).collect();
        outcome.map_err(|error| monitored.reworded(error, late))?;
        if let (Some(store), Some(before)) = (store, number.checked_sub(1)) {
            let _ = store.delete(&self.monitored_key(before, self.rank));
        }
        Ok(())
    }

    fn monitored_key(&self, number: u64, rank: Rank) -> String {
        format!("symm-monitored/{}/{}/{number}/{rank}", self.inner.control().name(), Config::get().restart)
    }

    /// Takes back what this rank has said in the store.
    pub(super) fn forget_monitored(&self) {
        let last = self.monitored.load(Ordering::Relaxed).checked_sub(1);
        if let (Some(messages), Some(last), None) = (self.messages.get(), last, self.inner.failure()) {
            let _ = messages.store().delete(&self.monitored_key(last, self.rank));
        }
    }
}
