//! The threads that advance messages: a thread that waits for one, and the progress thread while no
//! thread waits.

use super::ending::gave_up;
use super::internode::INTERNODE_POLL;
use super::{MessageTable, Messages};
use crate::completion::FinishedTransfer;
use crate::control::{YIELD_TURNS, spin_budget};
use crate::error::{Error, Result};
use crate::lock::{lock, unpoisoned};
use crate::sync::timeout::CallTimeout;
use crate::sys::interrupt::Interrupts;
use crate::sys::thread;
use std::cell::Cell;
use std::ptr;
use std::sync::Arc;
use std::thread::ThreadId;
use std::time::{Duration, Instant};

/// The progress threads of a group. One of them is active: it advances messages while no thread
/// waits. It passes this role on while it is inside a completion, which may block.
#[derive(Default)]
pub(super) struct ProgressThreads {
    active: Option<ThreadId>,
    /// Number of threads that take over the role, including threads that have yet to start.
    spare: usize,
    /// Number of completions that are being called, on any thread.
    running: usize,
}

/// The active progress thread if the thread that calls a completion had that role.
pub(super) type ProgressRole = Option<ThreadId>;

impl ProgressThreads {
    /// Marks that a completion has returned. The thread that called it resumes its `role` unless
    /// another thread has it.
    pub(super) fn leave_completion(&mut self, role: ProgressRole) {
        self.running -= 1;
        self.active = self.active.or(role);
    }
}

thread_local! {
    /// The messages for which this thread is a progress thread.
    static SERVES: Cell<*const Messages> = const { Cell::new(ptr::null()) };
}

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
/// Poll interval of a spare progress thread, which checks whether a completion blocks the active
/// one. A wake-up per completion would cost more.
const TAKEOVER_POLL: Duration = Duration::from_millis(10);
/// Maximum number of progress threads of a group. While as many completions block, messages for
/// which no thread waits pause.
const MAX_PROGRESS_THREADS: usize = 4;
/// The time after which an unused spare progress thread ends.
const IDLE_THREAD_TIMEOUT: Duration = Duration::from_secs(1);

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
                    || !state.finished.is_empty()
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

    /// Starts a progress thread unless one is active or will be. Called before a message is posted:
    /// the memory of a posted message is in use until its completion, so a thread must exist that
    /// completes the message; otherwise the memory would be used after its tensor is freed.
    pub(super) fn ensure_worker(&self, state: &mut MessageTable) -> Result<()> {
        if state.stopping || state.progress.active.is_some() || state.progress.spare > 0 {
            return Ok(());
        }
        let Some(this) = self.this.upgrade() else { return Ok(()) };
        let mut workers = lock(&self.workers);
        workers.retain(|worker| !worker.is_finished());
        if workers.len() == MAX_PROGRESS_THREADS {
            return Ok(());
        }
        let thread = thread::spawn("symm-progress", None, move || this.work())
            .map_err(|e| Error::internal(format!("starting a group's progress thread: {e}")))?;
        workers.push(thread);
        state.progress.spare += 1;
        Ok(())
    }

    /// Removes the next message whose completion is due from the table. The caller must call the
    /// completion without the lock, and then [`ProgressThreads::leave_completion`].
    pub(super) fn begin_completion(
        &self,
        state: &mut MessageTable,
    ) -> Option<(FinishedTransfer, ProgressRole)> {
        let due = state.finished.pop_front()?;
        state.progress.running += 1;
        let serves = ptr::eq(SERVES.get(), self);
        let is_me = |thread: &ThreadId| *thread == std::thread::current().id();
        let role = state.progress.active.take_if(|active| serves && is_me(active));
        // The completion may block for as long as it likes, so another thread advances the others.
        if role.is_some()
            && state.open.len() > 1
            && let Err(error) = self.ensure_worker(state)
        {
            log::warn!("{error}; messages go on after the current completion");
        }
        Some((due, role))
    }

    /// Runs a progress thread.
    fn work(self: &Arc<Self>) {
        SERVES.set(Arc::as_ptr(self));
        let moved = self.control.contain(|| {
            self.progress_until_stopped();
            Ok(())
        });
        if let Err(error) = moved {
            let me = std::thread::current().id();
            self.lock().progress.active.take_if(|active| *active == me);
            self.close(&error);
        }
    }

    fn progress_until_stopped(&self) {
        let me = std::thread::current().id();
        let (mut idle_since, mut steps) = (Instant::now(), 0);
        let mut spare_since = Some(Instant::now());
        loop {
            let mut state = self.lock();
            if state.stopping {
                return;
            }
            if state.progress.active.is_none() {
                state.progress.active = Some(me);
                state.progress.spare -= usize::from(spare_since.take().is_some());
                idle_since = Instant::now();
            } else if state.progress.active != Some(me) {
                let since = *spare_since.get_or_insert_with(|| {
                    state.progress.spare += 1;
                    Instant::now()
                });
                if since.elapsed() > IDLE_THREAD_TIMEOUT {
                    state.progress.spare -= 1;
                    return;
                }
                drop(unpoisoned(self.begun.wait_timeout(state, TAKEOVER_POLL)));
                continue;
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
            // A thread that waits does not advance messages while it is inside a completion.
            let attended = (state.waiting_threads > state.progress.running && !left) || !due;
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
                // Their completions may have become due since this thread looked.
                if !attended && !state.finished.is_empty() {
                    continue;
                }
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
