//! Calendar of the times by which connections must have done something.

use std::collections::BTreeSet;
use std::time::Instant;

/// Deadlines of connections, each of which has at most one.
#[derive(Default)]
pub(super) struct Calendar(BTreeSet<(Instant, usize)>);

impl Calendar {
    /// Replaces the deadline that `slot` holds for connection `key`.
    pub(super) fn set(&mut self, key: usize, slot: &mut Option<Instant>, deadline: Option<Instant>) {
        if let Some(old) = std::mem::replace(slot, deadline) {
            self.0.remove(&(old, key));
        }
        if let Some(new) = deadline {
            self.0.insert((new, key));
        }
    }

    /// The first deadline.
    pub(super) fn first(&self) -> Option<Instant> {
        self.0.first().map(|(deadline, _)| *deadline)
    }

    /// A connection whose deadline has passed.
    pub(super) fn expired(&self, now: Instant) -> Option<usize> {
        self.0.first().filter(|(deadline, _)| *deadline <= now).map(|(_, key)| *key)
    }
}
