//! This host as its speakers tell others of it: what its ranks do, and what has failed.
//!
//! Inside a host the control block tells everybody at once, and its speakers tell the other hosts ([`news`](super::news)). A rank that fails
//! lets go of its rail then; a rank that loses a rail because of that soon hears why, and raises the same.

use super::header::Header;
use super::news::{Host, Place, Waiting};
use crate::error::Error;
use crate::health::Health;
use crate::lock::lock;
use std::sync::{Arc, Mutex};
use std::time::Instant;

/// What a rank does, as its speaker sees it.
#[derive(Default)]
pub(super) struct Current {
    /// The call that it is in.
    waiting: Mutex<Option<Waiting>>,
    /// Where a call was refused last.
    refused: Mutex<Option<Place>>,
    /// Calls on CUDA tensors that no speaker has told.
    launched: Mutex<Vec<Header>>,
}

impl Current {
    pub(super) fn set(&self, call: Option<Waiting>) {
        *lock(&self.waiting) = call;
    }

    /// Notes that a call was refused after `calls` others were made.
    pub(super) fn note_refused(&self, calls: u64) {
        let mut last = lock(&self.refused);
        let times = last.filter(|last| last.calls == calls).map_or(0, |last| last.times) + 1;
        *last = Some(Place { calls, times });
    }

    /// Where a call was refused last.
    pub(super) fn refused(&self) -> Option<Place> {
        *lock(&self.refused)
    }

    /// Notes that the call waits on its rail from now on, or inside its host.
    pub(super) fn phase(&self, on_rail: bool) {
        if let Some(waiting) = &mut *lock(&self.waiting) {
            (waiting.phase_since, waiting.on_rail) = (Instant::now(), on_rail);
        }
    }

    /// Notes calls that were launched.
    pub(super) fn launched(&self, headers: impl IntoIterator<Item = Header>) {
        lock(&self.launched).extend(headers);
    }
}

/// The ranks of this host, and what this one does.
pub(super) struct Inner(pub(super) Arc<Health>, pub(super) Arc<Current>);

impl Host for Inner {
    fn failure(&self) -> Option<Error> {
        // Nobody here needs to run into a death before it ends the group.
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
