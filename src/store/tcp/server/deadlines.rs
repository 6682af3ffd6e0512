//! The queue of the connections' deadlines.

use std::collections::BTreeSet;
use std::time::Instant;

/// The deadlines of connections, ordered by time; a connection has at most one.
#[derive(Default)]
pub(super) struct DeadlineQueue(BTreeSet<(Instant, usize)>);

impl DeadlineQueue {
    /// Replaces the deadline of connection `key`, which `slot` holds.
    pub(super) fn set(
        &mut self,
        key: usize,
        slot: &mut Option<Instant>,
        deadline: Option<Instant>,
    ) {
        if let Some(old) = std::mem::replace(slot, deadline) {
            self.0.remove(&(old, key));
        }
        if let Some(new) = deadline {
            self.0.insert((new, key));
        }
    }

    /// Returns the earliest deadline.
    pub(super) fn first(&self) -> Option<Instant> {
        self.0.first().map(|(deadline, _)| *deadline)
    }

    /// Returns a connection whose deadline has passed.
    pub(super) fn expired(&self, now: Instant) -> Option<usize> {
        self.0.first().filter(|(deadline, _)| *deadline <= now).map(|(_, key)| *key)
    }
}
