//! Which ranks of a group on several hosts have come to a monitored barrier, as they say in the store.

use super::Hosts;
use crate::config::Config;
use crate::messages::links::addresses;
use crate::rank::Rank;
use crate::store::meet::Meeting;
use std::sync::atomic::Ordering;
use std::time::Instant;

impl Hosts {
    /// Says that this rank has come to its next monitored barrier; returns its number. Without that the failure names hosts, or the ranks of
    /// this one.
    pub fn come_to_barrier(&self) -> u64 {
        let number = self.monitored.fetch_add(1, Ordering::Relaxed);
        let _ = self.told().tell(&number.to_string(), b"1");
        number
    }

    /// Returns the ranks that have not said that they have come to monitored barrier `number`; none if the store does not answer.
    pub fn late_to_barrier(&self, number: u64) -> Vec<Rank> {
        self.told().missing(&number.to_string()).unwrap_or_default()
    }

    /// Takes back what this rank has said of the one before monitored barrier `number`, which it has passed.
    pub fn pass_barrier(&self, number: u64) {
        if let Some(before) = number.checked_sub(1) {
            let _ = self.told().forget(&before.to_string());
        }
    }

    /// The place where ranks say at which monitored barriers they have arrived.
    fn told(&self) -> Meeting<'_> {
        let prefix = self.life.name("symm-monitored", "told");
        Meeting { store: &*self.store, prefix, me: self.rank, size: self.layout.size() as u32, deadline: Instant::now() }
    }

    /// Removes the keys of this rank that are still in the store, unless the group has failed: rank 0 may still read them then.
    pub fn forget_keys(&self) {
        if self.health.failure().is_some() {
            return;
        }
        self.pass_barrier(self.monitored.load(Ordering::Relaxed));
        let (host, local) = (self.layout.host(self.rank), self.layout.local(self.rank));
        let name = self.life.name("symm-rail", local);
        // Other hosts connect at any time under this setting.
        let lazy = Config::get().gloo_lazy && local < self.layout.rails();
        let address = lazy.then(|| addresses(&name, host)).into_iter().flatten();
        address.for_each(|key| drop(self.store.delete(&key)));
    }
}
