//! The threads that advance messages: a thread that waits for one, and the progress thread while no
//! thread waits.

use super::ending::gave_up;
use super::internode::INTERNODE_POLL;
use super::{MessageTable, Messages};
use crate::control::{YIELD_TURNS, spin_budget};
use crate::error::Result;
use crate::lock::unpoisoned;
use crate::sync::timeout::CallTimeout;
use crate::sys::interrupt::Interrupts;
use std::time::{Duration, Instant};

/// Marks a thread that advances messages while it waits. The progress thread pauses meanwhile, and
/// continues however the wait ends.
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

/// Number of spin iterations before a receive publishes its wait to peers and may sleep.
const BRIEF_SPIN_TURNS: u32 = 100;
/// Number of spin iterations after which a thread yields its core.
const YIELD_EVERY_TURNS: u32 = 8;
/// Time that the progress thread polls after the last message before it sleeps.
const PROGRESS_LINGER: Duration = Duration::from_millis(200);
/// Poll interval of the progress thread while messages are pending and another thread may be
/// advancing them.
const PROGRESS_POLL: Duration = Duration::from_millis(1);

impl Messages {
    /// Returns once the completion of `ticket` has been called.
    pub fn wait(&self, ticket: u64, limit: Option<Duration>) -> Result<()> {
        if self.spin_briefly(ticket) {
            return Ok(());
        }
        let since = Instant::now();
        let _attending = ProgressGuard::new(self);
        // A message of another node arrives on the wire's thread; polling here would only take a
        // core from it.
        let far = self.lock().is_for_internode(ticket);
        let (mut turns, mut interrupts) = (0, None::<Interrupts>);
        loop {
            let mut state = self.lock();
            if !state.open.contains(&ticket) {
                return Ok(());
            }
            // The deadline holds no matter how much arrives for other messages.
            if limit.is_some_and(|limit| since.elapsed() >= limit) {
                return Err(gave_up(since));
            }
            let mut stirred = self.advance(&mut state);
            let finished = !state.finished.is_empty();
            if !stirred && !finished && !far && !state.is_reading_due() {
                let crowded = || {
                    self.control.in_the_way(
                        self.control.peers().filter(|&peer| self.control.is_progressing(peer)),
                    )
                };
                let spins =
                    if turns == 0 && !crowded() { self.control.spins() } else { YIELD_EVERY_TURNS };
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
            // A handler may take seconds, and the message may end meanwhile.
            if interrupts.get_or_insert_default().check().is_err()
                && self.lock().open.contains(&ticket)
            {
                self.close(
                    &self.control.interrupted(&format!(
                        "a send or receive of group {:?}",
                        self.control.name()
                    )),
                );
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
                !state.open.contains(&ticket)
                    || state.has_work()
                    || state.is_reading_due()
                    || self.control.failure().is_some()
            });
        }
    }

    /// Returns true if the completion of `ticket` has been called, now or within some spin
    /// iterations. Such a short wait is not published to peers, because publishing and reading it
    /// would cost both sides more than the message does.
    fn spin_briefly(&self, ticket: u64) -> bool {
        let mut state = self.lock();
        if !state.open.contains(&ticket) {
            return true;
        }
        // While sends are pending, their receivers check whether this rank waits, so the wait must
        // be published.
        if !state.sends.is_empty()
            || self.control.spins() < BRIEF_SPIN_TURNS
            || state.is_for_internode(ticket)
        {
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
            // Reading the rest of a long message takes time, and only the full wait has a deadline.
            if read {
                return false;
            }
        }
        false
    }

    /// Counts the threads that advance messages, and publishes to peers whether one exists.
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

    /// Runs the progress thread.
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
            let acknowledges = state.has_acknowledgement(&self.control);
            let due = acknowledges || !state.open.is_empty();
            if due {
                idle_since = Instant::now();
            } else if idle_since.elapsed() > PROGRESS_LINGER {
                state.idle = true;
                state = unpoisoned(self.begun.wait(state));
                state.idle = false;
                idle_since = Instant::now();
            }
            // If a step is due and no step was read since the last check, the thread that read the
            // previous step may have returned to its caller while the other waiting threads sleep.
            // The progress thread then reads the step. A thread that waits for that message would
            // have read it at once.
            let left = state.is_reading_due() && state.steps == steps;
            steps = state.steps;
            let attended = (state.waiting_threads > 0 && !left) || !due;
            let only_far = state.reaches
                && due
                && !acknowledges
                && state
                    .pending()
                    .all(|pending| pending.peer.is_some_and(|peer| state.is_internode(peer)));
            drop(state);
            if !attended {
                if self.progress() {
                    continue;
                }
                self.fail_if_lost();
            }
            if only_far {
                // The wires' threads advance these messages, so only deadlines and the group are
                // checked.
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
    /// Returns true if `ticket` is a message with a rank of another node.
    fn is_for_internode(&self, ticket: u64) -> bool {
        let send = || self.sends.get(&ticket).map(|send| send.peer);
        let posted = || {
            self.matching
                .posted
                .iter()
                .find(|posted| posted.ticket == ticket)
                .and_then(|posted| posted.peer)
        };
        let stream = || {
            self.streams
                .iter()
                .find(|(_, stream)| stream.posted.ticket == ticket)
                .map(|((from, _), _)| *from)
        };
        self.reaches
            && send().or_else(posted).or_else(stream).is_some_and(|peer| self.is_internode(peer))
    }
}
