//! Who moves messages along: a thread that waits for one, and a progress thread while none waits.

use super::ending::gave_up;
use super::internode::INTERNODE_POLL;
use super::{MessageTable, Messages};
use crate::control::{YIELD_TURNS, spin_budget};
use crate::error::Result;
use crate::lock::unpoisoned;
use crate::sync::timeout::CallTimeout;
use crate::sys::interrupt::Interrupts;
use std::time::{Duration, Instant};

/// A thread that moves messages along while it waits; the progress thread stands back meanwhile. It takes over again however the wait
/// ends.
struct ProgressGuard<'a>(&'a Messages);

impl<'a> ProgressGuard<'a> {
    fn new(messages: &'a Messages) -> Self {
        messages.count_progressing(1);
        Self(messages)
    }
}

impl Drop for ProgressGuard<'_> {
    fn drop(&mut self) {
        self.0.count_progressing(-1);
    }
}

/// Turns of spinning before a receive waits in earnest.
const BRIEF_SPIN_TURNS: u32 = 100;
/// Turns of spinning between two moments of giving the core away.
const YIELD_EVERY_TURNS: u32 = 8;
/// Time that the progress thread polls after the last transfer before it parks.
const PROGRESS_LINGER: Duration = Duration::from_millis(200);
/// Pause of the progress thread between looks while transfers are open and another thread may be moving them.
const PROGRESS_POLL: Duration = Duration::from_millis(1);

impl Messages {
    /// Returns once the completion of `ticket` has been called.
    pub fn wait(&self, ticket: u64, limit: Option<Duration>) -> Result<()> {
        if self.spin_briefly(ticket) {
            return Ok(());
        }
        let since = Instant::now();
        let _attending = ProgressGuard::new(self);
        // What another node sends comes by a thread of its own, for which this one would only take the core.
        let far = self.lock().is_for_internode(ticket);
        let (mut turns, mut interrupts) = (0, None::<Interrupts>);
        loop {
            let mut state = self.lock();
            if !state.open.contains(&ticket) {
                return Ok(());
            }
            // However much keeps arriving for other transfers.
            if limit.is_some_and(|limit| since.elapsed() >= limit) {
                return Err(gave_up(since));
            }
            let mut stirred = self.advance(&mut state);
            let finished = !state.finished.is_empty();
            if !stirred && !finished && !far && !state.is_reading_due() {
                let crowded = || self.control.in_the_way(self.control.peers().filter(|&peer| self.control.is_progressing(peer)));
                let spins = if turns == 0 && !crowded() { self.control.spins() } else { YIELD_EVERY_TURNS };
                stirred = (0..spins).any(|_| {
                    std::hint::spin_loop();
                    state.has_work()
                });
            }
            if self.run_completions(state) || stirred || finished {
                turns = 0;
                continue;
            }
            turns += 1;
            if !far && turns <= YIELD_TURNS && !spin_budget::PATIENCE.is_short(spin_budget::now) {
                spin_budget::yield_core();
                continue;
            }
            self.fail_if_lost();
            if interrupts.get_or_insert_default().check().is_err() {
                self.close(&self.control.interrupted(&format!("a send or receive of group {:?}", self.control.name())));
                continue;
            }
            let left = limit.map_or(Duration::MAX, |limit| limit.saturating_sub(since.elapsed()));
            if left.is_zero() {
                return Err(gave_up(since));
            }
            let left = left.min(self.soonest_deadline());
            self.control.sleep(left, || {
                let mut state = self.lock();
                state.announce_wait(&self.control, ticket);
                !state.open.contains(&ticket) || state.has_work() || state.is_reading_due() || self.control.failure().is_some()
            });
        }
    }

    /// Whether the completion of `ticket` has been called, now or some turns of spinning later. Peers do not learn of a wait that is so
    /// short: what they read of it costs both sides more than the message does.
    fn spin_briefly(&self, ticket: u64) -> bool {
        let mut state = self.lock();
        if !state.open.contains(&ticket) {
            return true;
        }
        // Who receives from this rank asks whether it attends.
        if !state.sends.is_empty() || self.control.spins() < BRIEF_SPIN_TURNS || state.is_for_internode(ticket) {
            return false;
        }
        for _ in 0..BRIEF_SPIN_TURNS {
            self.advance(&mut state);
            if state.finished.is_empty() && !state.is_reading_due() {
                if !state.has_work() {
                    std::hint::spin_loop();
                }
                continue;
            }
            let read = self.run_completions(state);
            state = self.lock();
            if !state.open.contains(&ticket) {
                return true;
            }
            // The rest of a long message takes a while, for which only a wait has a limit.
            if read {
                return false;
            }
        }
        false
    }

    /// Counts the threads that move transfers along, and lets peers know whether there is one.
    fn count_progressing(&self, change: isize) {
        let mut state = self.lock();
        state.waiting_threads = state.waiting_threads.saturating_add_signed(change);
        state.retract_wait(&self.control);
        self.control.set_progressing(state.waiting_threads > 0);
    }

    fn soonest_deadline(&self) -> Duration {
        let state = self.lock();
        state.limits().filter_map(CallTimeout::remaining).min().unwrap_or(PROGRESS_POLL)
    }

    /// The progress thread.
    pub(super) fn work(&self) {
        let moved = self.control.contain(|| {
            self.progress_once();
            Ok(())
        });
        if let Err(error) = moved {
            self.close(&error);
        }
    }

    fn progress_once(&self) {
        let (mut idle_since, mut steps) = (Instant::now(), 0);
        loop {
            let mut state = self.lock();
            if state.stopping {
                return;
            }
            if !state.open.is_empty() {
                idle_since = Instant::now();
            } else if idle_since.elapsed() > PROGRESS_LINGER {
                state.idle = true;
                state = unpoisoned(self.begun.wait(state));
                state.idle = false;
                idle_since = Instant::now();
            }
            // A thread that read a step of a message may have returned since, while others sleep; one that waits for it reads the next at once.
            let left = state.is_reading_due() && state.steps == steps;
            steps = state.steps;
            let attended = (state.waiting_threads > 0 && !left) || state.open.is_empty();
            let only_far = state.reaches
                && !state.open.is_empty()
                && state.pending().all(|pending| pending.peer.is_some_and(|peer| state.is_internode(peer)));
            drop(state);
            if !attended {
                if self.progress() {
                    continue;
                }
                self.fail_if_lost();
            }
            if only_far {
                // Their threads move them along. Only deadlines and the group are to be looked at.
                let left = self.soonest_deadline().min(INTERNODE_POLL);
                let mut state = self.lock();
                state.idle = true;
                state = unpoisoned(self.begun.wait_timeout(state, left)).0;
                state.idle = false;
                continue;
            }
            std::thread::sleep(PROGRESS_POLL);
        }
    }
}

impl MessageTable {
    /// Whether `ticket` is that of a message with a rank of another node.
    fn is_for_internode(&self, ticket: u64) -> bool {
        let send = || self.sends.get(&ticket).map(|send| send.peer);
        let posted = || self.matching.posted.iter().find(|posted| posted.ticket == ticket).and_then(|posted| posted.peer);
        let stream = || self.streams.iter().find(|(_, stream)| stream.posted.ticket == ticket).map(|((from, _), _)| *from);
        self.reaches && send().or_else(posted).or_else(stream).is_some_and(|peer| self.is_internode(peer))
    }
}
