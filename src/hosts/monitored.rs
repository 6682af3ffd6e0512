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
use crate::messages::links::addresses;
use crate::store::meet::Meeting;
use crate::sync::call_site::CallSite;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

impl HostsGroup {
    /// A barrier whose failure reads as Gloo's: on rank 0 it names the first rank that did not come, or all of them, on whichever host.
    pub fn monitored_barrier(&self, timeout: Option<Duration>, wait_all_ranks: bool, call_site: Option<&'static CallSite>) -> Result<()> {
        let timeout = timeout.unwrap_or_else(|| self.timeout());
        let monitored = Monitored { me: self.rank, timeout, all: wait_all_ranks };
        monitored.check()?;
        self.inner.check_open()?;
        let number = self.monitored.fetch_add(1, Ordering::Relaxed);
        let told = self.told();
        if let Some(told) = &told {
            // Without it the failure names hosts, or the ranks of this one.
            let _ = told.tell(&number.to_string(), b"1");
        }
        let outcome = self.run(&[Call::barrier(call_site)], Some(timeout));
        let late = || told.as_ref().and_then(|told| told.missing(&number.to_string()).ok()).unwrap_or_default();
        outcome.map_err(|error| monitored.reworded(error, late))?;
        if let (Some(told), Some(before)) = (&told, number.checked_sub(1)) {
            let _ = told.forget(&before.to_string());
        }
        Ok(())
    }

    /// The place where ranks say at which monitored barriers they have arrived.
    fn told(&self) -> Option<Meeting<'_>> {
        let (store, prefix) = (&*self.inner.messages().far()?.store, self.life.name("symm-monitored", "told"));
        Some(Meeting { store, prefix, me: self.rank, size: self.layout.size() as u32, deadline: Instant::now() })
    }

    /// Removes the keys of this rank that are still in the store, unless the group has failed: rank 0 may still read them then.
    pub(super) fn forget_keys(&self) {
        let (Some(far), None) = (self.inner.messages().far(), self.inner.failure()) else { return };
        if let (Some(told), Some(last)) = (self.told(), self.monitored.load(Ordering::Relaxed).checked_sub(1)) {
            let _ = told.forget(&last.to_string());
        }
        let (host, local) = (self.layout.host(self.rank), self.layout.local(self.rank));
        let name = self.life.name("symm-rail", local);
        // Other hosts connect at any time under this setting.
        let lazy = Config::get().gloo_lazy && local < self.layout.rails();
        let address = lazy.then(|| addresses(&name, host)).into_iter().flatten();
        address.for_each(|key| drop(far.store.delete(&key)));
    }
}
