//! Arrivals of a multi-node group's ranks at a monitored barrier, recorded in the store.

use super::Internode;
use crate::config::Config;
use crate::messages::links::addresses;
use crate::rank::Rank;
use crate::store::meet::StoreMeeting;
use std::sync::atomic::Ordering;
use std::time::Instant;

impl Internode {
    /// Records in the store that this rank has arrived at its next monitored barrier; returns the
    /// barrier's number. Without these records, the error of a failed barrier could name only
    /// nodes, and ranks of this node.
    pub fn come_to_barrier(&self) -> u64 {
        let number = self.monitored.fetch_add(1, Ordering::Relaxed);
        let _ = self.reported().announce(&number.to_string(), b"1");
        number
    }

    /// Returns the ranks that have not recorded their arrival at monitored barrier `number`; empty
    /// if the store does not answer.
    pub fn late_to_barrier(&self, number: u64) -> Vec<Rank> {
        self.reported().missing(&number.to_string()).unwrap_or_default()
    }

    /// Removes this rank's record of the barrier before barrier `number`. Called once this rank has
    /// passed barrier `number`.
    pub fn pass_barrier(&self, number: u64) {
        if let Some(before) = number.checked_sub(1) {
            let _ = self.reported().forget(&before.to_string());
        }
    }

    /// Returns the keys in the store with which ranks record their arrival at monitored barriers.
    fn reported(&self) -> StoreMeeting<'_> {
        let prefix = self.life.name("symm-monitored", "told");
        StoreMeeting {
            store: &*self.store,
            prefix,
            me: self.rank,
            size: self.layout.size() as u32,
            deadline: Instant::now(),
        }
    }

    /// Removes this rank's remaining keys from the store, unless the group has failed, because rank
    /// 0 may still read them then.
    pub fn forget_keys(&self) {
        if self.health.failure().is_some() {
            return;
        }
        self.pass_barrier(self.monitored.load(Ordering::Relaxed));
        let (node, local) = (self.layout.node_of(self.rank), self.layout.local_rank(self.rank));
        let name = self.life.name("symm-rail", local);
        // Lazy rails may connect at any time until now, so their keys have stayed in the store.
        let lazy = Config::get().gloo_lazy && local < self.layout.num_rails();
        let address = lazy.then(|| addresses(&name, node)).into_iter().flatten();
        address.for_each(|key| drop(self.store.delete(&key)));
    }
}
