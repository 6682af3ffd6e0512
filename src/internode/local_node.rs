//! This node as its leaders report it to others: the calls of its ranks, and failures.
//!
//! Within a node the control block reports a failure to all ranks at once, and the node leaders
//! report it to the other nodes ([`oob`](super::oob)). A rank that fails then releases its rail; a
//! rank that loses a rail because of that soon receives the reason, and raises the same error.

use super::header::CallHeader;
use super::oob::{BlockedCall, CallPosition, LocalNode};
use crate::error::Error;
use crate::health::Health;
use crate::lock::lock;
use std::sync::{Arc, Mutex};
use std::time::Instant;

/// The calls of one rank, as its node leader sees them.
#[derive(Default)]
pub(super) struct LocalCallState {
    /// The call that it is in.
    waiting: Mutex<Option<BlockedCall>>,
    /// The point at which a call was last rejected.
    rejected: Mutex<Option<CallPosition>>,
    /// Calls on CUDA tensors that no node leader has reported yet.
    launched: Mutex<Vec<CallHeader>>,
}

impl LocalCallState {
    pub(super) fn set(&self, call: Option<BlockedCall>) {
        *lock(&self.waiting) = call;
    }

    /// Records that a call was rejected after `calls` others were made, `on_host` of them on CPU
    /// tensors.
    pub(super) fn note_rejected(&self, calls: u64, on_host: u64) {
        let mut last = lock(&self.rejected);
        let times = last.filter(|last| last.calls == calls).map_or(0, |last| last.times) + 1;
        *last = Some(CallPosition { calls, times, on_host });
    }

    /// Returns the point at which a call was last rejected.
    pub(super) fn rejected(&self) -> Option<CallPosition> {
        *lock(&self.rejected)
    }

    /// Records that the call waits on its rail from now on if `on_rail` is true, otherwise within
    /// its node.
    pub(super) fn phase(&self, on_rail: bool) {
        if let Some(waiting) = &mut *lock(&self.waiting) {
            (waiting.phase_since, waiting.on_rail) = (Instant::now(), on_rail);
        }
    }

    /// Records launched calls.
    pub(super) fn launched(&self, headers: impl IntoIterator<Item = CallHeader>) {
        lock(&self.launched).extend(headers);
    }
}

/// The ranks of this node, and the calls of this rank.
pub(super) struct IntraNodeRanks(pub(super) Arc<Health>, pub(super) Arc<LocalCallState>);

impl LocalNode for IntraNodeRanks {
    fn failure(&self) -> Option<Error> {
        // A death ends the group even if no rank of this node waits for the dead rank.
        self.0.failure().or_else(|| self.0.control().dead().map(|death| self.0.fail(death)))
    }

    fn fail(&self, error: Error) {
        self.0.fail(error);
    }

    fn waiting(&self) -> Option<BlockedCall> {
        *lock(&self.1.waiting)
    }

    fn rejected(&self) -> Option<CallPosition> {
        self.1.rejected()
    }

    fn note_late(&self, call: u64, nodes: String) {
        self.0.recorder().note_late(call, nodes);
    }

    fn launched(&self) -> Vec<CallHeader> {
        std::mem::take(&mut *lock(&self.1.launched))
    }

    fn departures(&self) -> Vec<(usize, String)> {
        let control = self.0.control();
        control.ranks().filter_map(|rank| Some((rank.index(), control.departure(rank)?))).collect()
    }
}
