//! How messages end: completions, failures, and the end of all at once.

use super::peer::Lost;
use super::{Messages, State};
use crate::completion::Finished;
use crate::error::{Error, Result};
use std::sync::MutexGuard;
use std::time::Instant;

/// The error of a wait that ended before its transfer did.
pub(super) fn gave_up(since: Instant) -> Error {
    Error::wait_timeout(format!("wait() gave up after {:.1} s; the transfer itself goes on", since.elapsed().as_secs_f32()))
}

impl Messages {
    /// Completes everything that is open with `error`.
    pub fn close(&self, error: &Error) {
        let mut state = self.lock();
        state.fail_all(error);
        self.settle(state);
    }

    /// As `close`, because this rank leaves the group with `farewell`. If a send is open, the rank departs before the send fails: a receiver
    /// that reads its memory must know, as this memory is its owner's again afterwards.
    pub fn leave(&self, error: &Error, farewell: &str) {
        let mut state = self.lock();
        if !state.sends.is_empty() {
            self.control.depart(farewell);
        }
        state.fail_all(error);
        self.settle(state);
    }

    /// The state, unless all transfers have been closed.
    pub(super) fn lock_open(&self) -> Result<MutexGuard<'_, State>> {
        let state = self.lock();
        state.closed.clone().map_or(Ok(state), Err)
    }

    /// A failure of one transfer is the group's.
    pub(super) fn absorb(&self, state: &mut State, moved: Result<bool>) -> bool {
        moved.unwrap_or_else(|error| {
            let error = self.control.fail(error);
            state.fail_all(&error);
            true
        })
    }

    /// Calls the completions that are due, without the lock.
    pub(super) fn complete(&self, mut state: MutexGuard<'_, State>) {
        let finished = std::mem::take(&mut state.finished);
        drop(state);
        if finished.is_empty() {
            return;
        }
        let tickets = Finished::complete(finished);
        let mut state = self.lock();
        for ticket in tickets {
            state.open.remove(&ticket);
        }
        drop(state);
        // Other threads of this rank may sleep until one of these tickets is complete.
        self.control.wake_sleepers();
    }

    /// Fails the group if something open can never complete.
    pub(super) fn fail_if_lost(&self) {
        let mut state = self.lock();
        if state.open.is_empty() {
            return;
        }
        self.fail_hopeless(&mut state);
        self.settle(state);
    }

    pub(super) fn fail_hopeless(&self, state: &mut State) {
        let lost = Lost::among(&self.control);
        // What a peer wrote before it ended is still served.
        self.advance(state);
        let failure = self.control.failure().or_else(|| state.hopeless(&self.control, &lost).map(|error| self.control.fail(error)));
        if let Some(failure) = failure {
            state.fail_all(&failure);
        }
    }
}
