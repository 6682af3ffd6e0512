//! One ordered queue of collectives per group.
//!
//! A synchronous call on an idle group runs on its caller's thread. Everything else queues; whoever waits for a job, or else the group's
//! worker, runs what stands before it and then the job itself. The worker thread begins with the first asynchronous call.
//! A completion may call the group again and wait, as torch's communication hooks do: the queue goes on meanwhile, under another worker.

use crate::coll::call::Call;
use crate::coll::cpu::Runner;
use crate::completion::Completion;
use crate::control::ControlBlock;
use crate::error::{Error, Result};
use crate::sync::limit::Limit;
use crate::sys::thread;
use crate::trace::{Recorder, Target};
use std::collections::{BTreeMap, VecDeque};
use std::ops::RangeInclusive;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// A sleeper looks up once an hour even if nothing happens; calls have limits of their own.
const FOREVER: Duration = Duration::from_secs(3600);
/// Time that a thread inside a call may still need to finish it once another thread destroys the group.
const PARTING: Duration = Duration::from_millis(50);
/// Time that a second worker stays without work.
const SPARE: Duration = Duration::from_secs(1);

/// Time that a worker leaves a job to its submitter, who then runs it in `wait` without a change of threads: where every core has a rank, a
/// change takes longer than a short collective. The time is longer, the more often submitters came [`SOON`], as torch's functional
/// collectives do. It is 0 once one came late or not at all, as one does that computes meanwhile. `docs/measurements/cpu.md` has the figures.
const GRACE: RangeInclusive<Duration> = Duration::from_micros(200)..=Duration::from_millis(2);
const SOON: Duration = Duration::from_micros(400);

/// What runs the calls of a queue, one at a time.
pub trait Run: Send + 'static {
    /// Control block of the group, on this host.
    fn control(&self) -> &ControlBlock;
    /// Number of collectives begun.
    fn sequence(&self) -> u64;
    /// Name of the algorithm of the last call; empty: none was chosen.
    fn served(&self) -> &'static str;
    /// Whether these calls serve those of a larger group, on several hosts.
    fn inside(&self) -> bool;
    /// Runs `call`, which has been validated and is `entry` in the flight recorder; returns when its outputs are complete and its inputs may change.
    fn run(&mut self, call: &Call, limit: &Limit, entry: u64) -> Result<()>;
}

impl Run for Runner {
    fn control(&self) -> &ControlBlock {
        self.control()
    }

    fn sequence(&self) -> u64 {
        self.sequence()
    }

    fn served(&self) -> &'static str {
        self.served()
    }

    fn inside(&self) -> bool {
        self.control().is_part()
    }

    fn run(&mut self, call: &Call, limit: &Limit, _entry: u64) -> Result<()> {
        self.run(call, limit)
    }
}

/// A group's queue.
pub struct Engine<R = Runner> {
    state: Mutex<State>,
    /// Workers without work sleep on it. Not with the others: whoever ends a call must not wake a thread that has nothing to do, least of
    /// all where every core has a rank.
    work: Condvar,
    /// Threads sleep on it that wait for a job, or for all.
    changed: Condvar,
    runner: Mutex<R>,
    inside: bool,
    workers: Mutex<Vec<JoinHandle<()>>>,
    issued: AtomicU64,
    recorder: Arc<Recorder>,
}

struct State {
    queue: VecDeque<Job>,
    /// Tickets whose completion has not been called, and since when they are there.
    open: BTreeMap<u64, Instant>,
    next: u64,
    /// Flag that is set while a thread holds the runner.
    busy: bool,
    stopping: bool,
    /// Threads inside `run` or `wait`.
    callers: usize,
    /// Workers that are not inside a completion.
    ready: usize,
    /// Time that the job is left to its submitter: none, or within [`GRACE`].
    grace: Duration,
    /// Threads asleep on `work` and on `changed`: waking nobody costs a system call too.
    asleep: Asleep,
}

#[derive(Default)]
struct Asleep {
    workers: usize,
    /// Workers that leave a job to its submitter.
    waiting: usize,
    waiters: usize,
}

struct Job {
    ticket: u64,
    calls: Vec<Call>,
    /// Number of the first call in the flight recorder.
    number: u64,
    submitted: Instant,
    timeout: Duration,
    completion: Completion,
}

/// A job whose completion has not been called.
struct Finished {
    ticket: u64,
    outcome: Result<()>,
    completion: Completion,
}

/// A lock whose holder panicked is taken over: every state change under these locks is a single step.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<R: Run> Engine<R> {
    /// An idle queue in front of `runner`, whose calls `recorder` keeps.
    pub fn new(runner: R, recorder: Arc<Recorder>) -> Arc<Self> {
        let state = State {
            queue: VecDeque::new(),
            open: BTreeMap::new(),
            next: 1,
            busy: false,
            stopping: false,
            callers: 0,
            ready: 0,
            grace: Duration::ZERO,
            asleep: Asleep::default(),
        };
        Arc::new(Self {
            state: Mutex::new(state),
            work: Condvar::new(),
            changed: Condvar::new(),
            inside: runner.inside(),
            runner: Mutex::new(runner),
            workers: Mutex::new(Vec::new()),
            issued: AtomicU64::new(0),
            recorder,
        })
    }

    /// Number of collectives asked for.
    pub fn sequence(&self) -> u64 {
        self.issued.load(Ordering::Relaxed)
    }

    /// Whether nothing is queued or running.
    pub fn idle(&self) -> bool {
        let state = lock(&self.state);
        !state.busy && state.queue.is_empty()
    }

    /// Counts `calls` that are not this queue's.
    pub fn count(&self, calls: usize) {
        self.issued.fetch_add(calls as u64, Ordering::Relaxed);
    }

    /// Runs `calls` after everything submitted before, on this thread, and returns when they are done.
    pub fn run(&self, calls: Vec<Call>, timeout: Duration) -> Result<()> {
        self.issued.fetch_add(calls.len() as u64, Ordering::Relaxed);
        let mut state = lock(&self.state);
        if !state.busy && state.queue.is_empty() {
            state.busy = true;
            state.callers += 1;
            drop(state);
            let outcome = self.execute(&calls, &Limit::from_first_wait(timeout), timeout, None);
            let mut state = lock(&self.state);
            state.callers -= 1;
            self.rest(&mut state);
            return outcome;
        }
        let outcome = Arc::new(Mutex::new(Err(Error::internal("the call was dropped from the queue"))));
        let slot = Arc::clone(&outcome);
        let completion = Completion::new(move |result, _| *lock(&slot) = result);
        let number = self.recorder.schedule(&calls, timeout, false, Target::Host, self.inside);
        let ticket = state.push(calls, number, timeout, completion);
        self.finish(state, ticket, None)?;
        lock(&outcome).clone()
    }

    /// Queues `calls`; `completion` gets the outcome.
    pub fn submit(self: &Arc<Self>, calls: Vec<Call>, timeout: Duration, completion: Completion) -> Result<u64> {
        let mut state = lock(&self.state);
        if state.ready == 0 {
            self.start_worker(&mut state)?;
        }
        self.issued.fetch_add(calls.len() as u64, Ordering::Relaxed);
        let number = self.recorder.schedule(&calls, timeout, true, Target::Host, self.inside);
        let ticket = state.push(calls, number, timeout, completion);
        // The submitter of several waits for none of them yet.
        if !state.busy && (state.asleep.waiting == 0 || state.queue.len() > 1) {
            self.wake_workers(&state);
        }
        Ok(ticket)
    }

    /// Returns once the completion of `ticket` has been called. Without a limit this thread runs the queue if nobody else does.
    pub fn wait(&self, ticket: u64, limit: Option<Duration>) -> Result<()> {
        let mut state = lock(&self.state);
        if let Some(submitted) = state.open.get(&ticket) {
            let runs_it = limit.is_none() && submitted.elapsed() < SOON;
            state.grace = if runs_it { (2 * state.grace).clamp(*GRACE.start(), *GRACE.end()) } else { Duration::ZERO };
            if limit.is_some() && state.asleep.waiting > 0 {
                self.wake_workers(&state);
            }
        }
        self.finish(state, ticket, limit)
    }

    fn finish<'a>(&'a self, mut state: MutexGuard<'a, State>, ticket: u64, limit: Option<Duration>) -> Result<()> {
        state.callers += 1;
        let limit = limit.map(|limit| (limit, Instant::now()));
        let outcome = loop {
            if !state.open.contains_key(&ticket) {
                break Ok(());
            }
            state = match limit {
                None => match if state.busy { None } else { state.queue.pop_front() } {
                    Some(job) => {
                        self.run_job(state, job).tell(self);
                        lock(&self.state)
                    }
                    None => self.sleep(state, FOREVER),
                },
                Some((limit, since)) => {
                    let Some(left) = limit.checked_sub(since.elapsed()).filter(|left| !left.is_zero()) else {
                        let text = format!("wait() gave up after {:.1} s; the call itself goes on", limit.as_secs_f32());
                        break Err(Error::wait_timeout(text));
                    };
                    self.sleep(state, left)
                }
            };
        };
        state.callers -= 1;
        outcome
    }

    /// Waits until nothing is queued or running: false if that is not so after `limit`, or very soon where a thread is inside a call: it
    /// must not stay there because another destroys the group. Completions may still be under way.
    pub fn drain(&self, limit: Duration) -> bool {
        let since = Instant::now();
        let mut state = lock(&self.state);
        while state.busy || !state.queue.is_empty() {
            let limit = if state.callers > 0 { limit.min(PARTING) } else { limit };
            let Some(left) = limit.checked_sub(since.elapsed()) else { return false };
            state = self.sleep(state, left);
        }
        true
    }

    /// Ends the worker after the jobs that are queued.
    pub fn stop(&self) {
        let mut state = lock(&self.state);
        state.stopping = true;
        self.wake_workers(&state);
        drop(state);
        let workers = std::mem::take(&mut *lock(&self.workers));
        // A completion may drop the last handle of the group on the worker itself.
        for worker in workers.into_iter().filter(|worker| worker.thread().id() != std::thread::current().id()) {
            let _ = worker.join();
        }
    }

    fn start_worker(self: &Arc<Self>, state: &mut State) -> Result<()> {
        let mut workers = lock(&self.workers);
        workers.retain(|worker| !worker.is_finished());
        let engine = Arc::clone(self);
        let thread = thread::spawn("symm-worker", None, move || engine.work());
        workers.push(thread.map_err(|e| Error::internal(format!("starting a group's worker thread: {e}")))?);
        state.ready += 1;
        Ok(())
    }

    /// Runs jobs until the engine stops. Two workers stay where completions overlap with further jobs, the second for a while.
    fn work(self: &Arc<Self>) {
        // Else the kernel adds its 50 µs to the shortest grace.
        let _ = rustix::thread::set_current_timer_slack(std::num::NonZeroU64::new(1));
        let mut state = lock(&self.state);
        loop {
            if !state.busy
                && let Some(left) = state.patience()
            {
                state.asleep.waiting += 1;
                state = self.work.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
                state.asleep.waiting -= 1;
                continue;
            } else if !state.busy
                && let Some(job) = state.queue.pop_front()
            {
                if state.queue.is_empty() {
                    state.grace = Duration::ZERO;
                }
                let finished = self.run_job(state, job);
                self.leave_queue();
                finished.tell(self);
                state = lock(&self.state);
                state.ready += 1;
                if state.ready <= 2 {
                    continue;
                }
            } else if !state.stopping || !state.queue.is_empty() {
                let (since, limit) = (Instant::now(), if state.ready > 1 { SPARE } else { FOREVER });
                state.asleep.workers += 1;
                state = self.work.wait_timeout(state, limit).unwrap_or_else(PoisonError::into_inner).0;
                state.asleep.workers -= 1;
                if state.ready == 1 || since.elapsed() < SPARE {
                    continue;
                }
            }
            state.ready -= 1;
            return;
        }
    }

    /// The calling worker turns to a completion, which may wait for what is queued.
    fn leave_queue(self: &Arc<Self>) {
        let mut state = lock(&self.state);
        state.ready -= 1;
        if state.ready == 0
            && !state.queue.is_empty()
            && let Err(error) = self.start_worker(&mut state)
        {
            log::warn!("{error}; the queue goes on after the current completion");
        }
    }

    fn sleep<'a>(&'a self, mut state: MutexGuard<'a, State>, limit: Duration) -> MutexGuard<'a, State> {
        state.asleep.waiters += 1;
        let mut state = self.changed.wait_timeout(state, limit).unwrap_or_else(PoisonError::into_inner).0;
        state.asleep.waiters -= 1;
        state
    }

    fn wake_workers(&self, state: &State) {
        if state.asleep.workers + state.asleep.waiting > 0 {
            self.work.notify_all();
        }
    }

    fn wake_waiters(&self, state: &State) {
        if state.asleep.waiters > 0 {
            self.changed.notify_all();
        }
    }

    /// Runs `job`, the oldest. Nobody may be busy.
    fn run_job(&self, mut state: MutexGuard<'_, State>, job: Job) -> Finished {
        state.busy = true;
        drop(state);
        let outcome = self.execute(&job.calls, &Limit::from(job.submitted, job.timeout), job.timeout, Some(job.number));
        self.rest(&mut lock(&self.state));
        Finished { ticket: job.ticket, outcome, completion: job.completion }
    }

    /// `queued`: the recorder's number of the first call, if it was scheduled before.
    fn execute(&self, calls: &[Call], limit: &Limit, timeout: Duration, queued: Option<u64>) -> Result<()> {
        let mut runner = lock(&self.runner);
        let mut one = |(place, call): (u64, &Call)| {
            let next = runner.sequence() + 1;
            let number = match queued {
                Some(first) => {
                    self.recorder.start(first + place, next);
                    first + place
                }
                None => self.recorder.begin(call, timeout, next, self.inside),
            };
            let outcome = runner.run(call, limit, number);
            let begun = runner.sequence() == next;
            self.recorder.end(number, &outcome, begun, if begun { runner.served() } else { "" });
            outcome
        };
        let body = AssertUnwindSafe(|| (0..).zip(calls).try_for_each(&mut one));
        let outcome = catch_unwind(body).unwrap_or_else(|panic| Err(runner.control().panicked(&*panic)));
        drop(runner);
        outcome.inspect_err(|error| {
            if let Some(first) = queued {
                self.recorder.abandon(first..first + calls.len() as u64, error);
            }
            self.recorder.saw(error);
        })
    }

    fn rest(&self, state: &mut State) {
        state.busy = false;
        self.wake_waiters(state);
        if !state.queue.is_empty() {
            self.wake_workers(state);
        }
    }
}

impl Finished {
    /// Calls the completion, without any lock held.
    fn tell<R: Run>(self, engine: &Engine<R>) {
        self.completion.call(self.outcome, None);
        let mut state = lock(&engine.state);
        state.open.remove(&self.ticket);
        engine.wake_waiters(&state);
    }
}

impl State {
    /// Time for which the only job is still left to its submitter.
    fn patience(&self) -> Option<Duration> {
        let job = self.queue.front().filter(|_| self.queue.len() == 1 && !self.stopping)?;
        self.grace.checked_sub(job.submitted.elapsed())
    }

    fn push(&mut self, calls: Vec<Call>, number: u64, timeout: Duration, completion: Completion) -> u64 {
        let (ticket, submitted) = (self.next, Instant::now());
        self.next += 1;
        self.open.insert(ticket, submitted);
        self.queue.push_back(Job { ticket, calls, number, submitted, timeout, completion });
        ticket
    }
}
