//! This node as its leaders report it to others: the calls of its ranks, and failures.
//!
//! Within a node the control block reports a failure to all ranks at once, and the node leaders report it to the other
//! nodes ([`news`](super::news)). A rank that fails then releases its rail; a rank that loses a rail because of that
//! soon receives the reason, and raises the same error.

use super::header::Header;
use super::news::{Host, Place, Waiting};
use crate::error::Error;
use crate::health::Health;
use crate::lock::lock;
use std::sync::{Arc, Mutex};
use std::time::Instant;

/// The calls of one rank, as its node leader sees them.
#[derive(Default)]
pub(super) struct Current {
    /// The call that it is in.
    waiting: Mutex<Option<Waiting>>,
    /// The point at which a call was last rejected.
    refused: Mutex<Option<Place>>,
    /// Calls on CUDA tensors that no node leader has reported yet.
    launched: Mutex<Vec<Header>>,
}

impl Current {
    pub(super) fn set(&self, call: Option<Waiting>) {
        *lock(&self.waiting) = call;
    }

    /// Records that a call was rejected after `calls` others were made.
    pub(super) fn note_refused(&self, calls: u64) {
        let mut last = lock(&self.refused);
        let times = last.filter(|last| last.calls == calls).map_or(0, |last| last.times) + 1;
        *last = Some(Place { calls, times });
    }

    /// The point at which a call was last rejected.
    pub(super) fn refused(&self) -> Option<Place> {
        *lock(&self.refused)
    }

    /// Records that the call from now on waits on its rail, or within its node.
    pub(super) fn phase(&self, on_rail: bool) {
        if let Some(waiting) = &mut *lock(&self.waiting) {
            (waiting.phase_since, waiting.on_rail) = (Instant::now(), on_rail);
        }
    }

    /// Records launched calls.
    pub(super) fn launched(&self, headers: impl IntoIterator<Item = Header>) {
        lock(&self.launched).extend(headers);
    }
}

/// The ranks of this node, and the calls of this rank.
pub(super) struct Inner(pub(super) Arc<Health>, pub(super) Arc<Current>);

impl Host for Inner {
    fn failure(&self) -> Option<Error> {
        // A death ends the group even if no rank of this node waits for the dead rank.
        self.0.failure().or_else(|| self.0.control().dead().map(|death| self.0.fail(death)))
    }

    fn fail(&self, error: Error) {
        self.0.fail(error);
    }

    fn waiting(&self) -> Option<Waiting> {
        *lock(&self.1.waiting)
    }

    fn refused(&self) -> Option<Place> {
        self.1.refused()
    }

    fn note_late(&self, call: u64, hosts: String) {
        self.0.recorder().note_late(call, hosts);
    }

    fn launched(&self) -> Vec<Header> {
        std::mem::take(&mut *lock(&self.1.launched))
    }

    fn departures(&self) -> Vec<(usize, String)> {
        let control = self.0.control();
        control.ranks().filter_map(|rank| Some((rank.index(), control.departure(rank)?))).collect()
    }
}
