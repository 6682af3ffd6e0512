//! One ordered queue of collectives per group.
//!
//! A synchronous call on an idle group runs on its caller's thread. All other calls are queued. The
//! thread that waits for a job runs the jobs before it and then the job itself; if no thread waits,
//! the group's worker does. The first asynchronous call starts the worker. A short call posts its
//! data when it is submitted to an idle group; the waiting thread does the rest. A completion may
//! call the group again and wait, as torch's communication hooks do: another worker then continues
//! the queue.

mod executor;
mod state;

use crate::coll::call::Call;
use crate::coll::cpu::CpuRunner;
use crate::completion::Completion;
use crate::error::{Error, Result};
use crate::health::Health;
use crate::internode::{Internode, InternodeRunner};
use crate::lock::{lock, unpoisoned};
use crate::sync::timeout::CallTimeout;
use crate::sys::interrupt::{self, Interrupts};
use crate::sys::thread;
use crate::trace::{CallTarget, GroupRecorder};
pub use executor::Executor;
use state::{FinishedJob, QueueState, QueuedJob};
use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// A sleeping thread wakes up once an hour even without an event; calls have their own deadlines.
const IDLE_WAKEUP: Duration = Duration::from_secs(3600);
/// The time that a thread has to finish its call after another thread destroys the group.
const DESTROY_GRACE: Duration = Duration::from_millis(50);
/// The time after which an idle second worker ends.
const IDLE_THREAD_TIMEOUT: Duration = Duration::from_secs(1);

/// Interval at which a worker checks a job that was deferred to its submitter; at the second check
/// the worker runs the job. While calls keep arriving, a worker that polls need not be woken by
/// submitters: if every core has a rank, a wake-up takes longer than a short collective.
const DEFERRED_JOB_POLL: Duration = Duration::from_millis(1);
/// A submitter that waits for its job within this time of submitting it counts as prompt: torch's
/// functional collectives wait immediately, whereas other programs compute first.
/// `docs/measurements/cpu.md` has the figures.
const PROMPT_SUBMITTER: Duration = Duration::from_micros(150);

/// A group's queue.
pub struct CallQueue {
    state: Mutex<QueueState>,
    /// Idle workers sleep on this condition, separately from other threads: a thread that ends a
    /// call must not wake a worker without work, especially if every core has a rank.
    work: Condvar,
    /// Threads that wait for one job, or for all jobs, sleep on this condition.
    changed: Condvar,
    executor: Mutex<Executor>,
    workers: Mutex<Vec<JoinHandle<()>>>,
    health: Arc<Health>,
    recorder: Arc<GroupRecorder>,
}

impl CallQueue {
    /// Creates an empty queue for `runner`, in the group with this `health`.
    pub fn new(runner: CpuRunner, health: &Arc<Health>) -> Arc<Self> {
        let state = QueueState {
            queue: VecDeque::new(),
            open: BTreeMap::new(),
            next: 1,
            busy: false,
            stopping: false,
            active_callers: 0,
            idle_workers: 0,
            submitter_prompt: false,
            worker_polling: false,
            asleep: state::SleepCounts::default(),
        };
        Arc::new(Self {
            state: Mutex::new(state),
            work: Condvar::new(),
            changed: Condvar::new(),
            executor: Mutex::new(Executor { inner: RefCell::new(runner), internode: None }),
            workers: Mutex::new(Vec::new()),
            health: Arc::clone(health),
            recorder: Arc::clone(health.recorder()),
        })
    }

    /// Runs calls on several nodes from now on. `connect` connects the nodes, and may run calls of
    /// this node's ranks for that.
    pub fn connect<T>(
        &self,
        connect: impl FnOnce(&mut CpuRunner) -> Result<(Arc<Internode>, T)>,
    ) -> Result<(Arc<Internode>, T)> {
        let mut executor = lock(&self.executor);
        let (internode, more) = connect(executor.inner.get_mut())?;
        executor.internode = Some(InternodeRunner::new(Arc::clone(&internode)));
        Ok((internode, more))
    }

    /// Returns an id of this queue, for [`interrupt::within`].
    fn address(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }

    /// Returns true if no call is queued or running.
    pub fn idle(&self) -> bool {
        let state = lock(&self.state);
        !state.busy && state.queue.is_empty()
    }

    /// Runs `calls` on this thread after all earlier calls, and returns when they have ended.
    pub fn run(&self, calls: &[Call<'_>], timeout: Duration) -> Result<()> {
        interrupt::check_outside(self.address())?;
        self.recorder.ask_on_host(calls.len());
        let mut state = lock(&self.state);
        if !state.busy && state.queue.is_empty() {
            state.busy = true;
            state.active_callers += 1;
            drop(state);
            let outcome =
                self.execute(calls, &CallTimeout::from_first_wait(timeout), timeout, None);
            let mut state = lock(&self.state);
            state.active_callers -= 1;
            self.skip_failed(&mut state);
            return outcome;
        }
        let outcome =
            Arc::new(Mutex::new(Err(Error::internal("the call was dropped from the queue"))));
        let slot = Arc::clone(&outcome);
        let completion = Completion::new(move |result, _| *lock(&slot) = result);
        let number = self.recorder.schedule(calls, timeout, false, CallTarget::Cpu);
        let ticket = state.push(QueuedJob::new(calls, number, timeout, completion));
        self.finish(state, ticket, None)?;
        lock(&outcome).clone()
    }

    /// Runs `calls` of the ranks of this node as `run` does. They are not calls of the group: they
    /// have no number and no entry in the flight recorder.
    pub fn run_intra_node(&self, calls: &[Call<'_>], timeout: Duration) -> Result<()> {
        let mut state = loop {
            // Runs no call, but returns after all earlier calls.
            self.run(&[], timeout)?;
            let state = lock(&self.state);
            if !state.busy && state.queue.is_empty() {
                break state;
            }
        };
        state.busy = true;
        state.active_callers += 1;
        drop(state);
        let body = AssertUnwindSafe(|| {
            lock(&self.executor).run_intra_node(calls, &CallTimeout::from_first_wait(timeout))
        });
        let outcome = interrupt::within(self.address(), || catch_unwind(body));
        let mut state = lock(&self.state);
        state.active_callers -= 1;
        self.skip_failed(&mut state);
        drop(state);
        outcome.unwrap_or_else(|panic| Err(self.health.panicked(&*panic)))
    }

    /// Queues `calls`; `completion` gets the outcome.
    pub fn submit(
        self: &Arc<Self>,
        calls: &[Call<'_>],
        timeout: Duration,
        completion: Completion,
    ) -> Result<u64> {
        let mut state = lock(&self.state);
        if state.idle_workers == 0 {
            self.start_worker(&mut state)?;
        }
        self.recorder.ask_on_host(calls.len() + completion.later_calls());
        let number = self.recorder.schedule(calls, timeout, true, CallTarget::Cpu);
        let mut job = QueuedJob::new(calls, number, timeout, completion);
        if !state.busy && state.queue.is_empty() {
            job.posted = self.post(&job);
            job.deferred = job.posted || state.submitter_prompt;
        }
        let left = job.deferred;
        let ticket = state.push(job);
        let comes = if left { state.worker_polling } else { state.busy };
        if !comes {
            self.wake_workers(&state);
        }
        Ok(ticket)
    }

    /// Runs `calls` in the turn of the job whose [`write_back`] calls this function; they are among
    /// its [`later_calls`].
    ///
    /// [`write_back`]: crate::completion::TensorCopies::write_back
    /// [`later_calls`]: crate::completion::TensorCopies::later_calls
    pub fn run_in_turn(&self, calls: &[Call<'_>], timeout: Duration) -> Result<()> {
        self.execute(calls, &CallTimeout::from_first_wait(timeout), timeout, None)
    }

    /// Posts the call of `job` if the job has only one.
    fn post(&self, job: &QueuedJob) -> bool {
        let [call] = &*job.calls else { return false };
        // The copies of a call with later calls may take long, and the queue is locked here.
        if job.completion.later_calls() > 0 {
            return false;
        }
        job.completion.copy_in();
        let mut executor = lock(&self.executor);
        let body = AssertUnwindSafe(|| {
            executor.post(call, &|sequence| self.recorder.start(job.number, sequence))
        });
        let posted = catch_unwind(body);
        posted.unwrap_or_else(|panic| {
            // Not `Health::panicked`, because completions may use the queue, which is locked here.
            self.health.control().panicked(&*panic);
            false
        })
    }

    /// Returns once the completion of `ticket` has been called. Without a timeout this thread runs
    /// the queue if no other thread does.
    pub fn wait(&self, ticket: u64, limit: Option<Duration>) -> Result<()> {
        interrupt::check_outside(self.address())?;
        let mut state = lock(&self.state);
        if let Some(Some(submitted)) = state.open.get(&ticket) {
            state.submitter_prompt = limit.is_none() && submitted.elapsed() < PROMPT_SUBMITTER;
        }
        if limit.is_some() {
            self.cancel_deferral(&mut state);
        }
        self.finish(state, ticket, limit)
    }

    /// Stops deferring jobs to their submitters, because a caller polls for their end and does not
    /// run them. Does not block.
    pub fn run_promptly(&self) {
        self.cancel_deferral(&mut lock(&self.state));
    }

    fn cancel_deferral(&self, state: &mut QueueState) {
        if state.queue.front_mut().is_some_and(|job| std::mem::take(&mut job.deferred)) {
            self.wake_workers(state);
        }
    }

    fn finish<'a>(
        &'a self,
        mut state: MutexGuard<'a, QueueState>,
        ticket: u64,
        limit: Option<Duration>,
    ) -> Result<()> {
        state.active_callers += 1;
        let (limit, mut interrupts) = (limit.map(|limit| (limit, Instant::now())), None);
        let outcome = loop {
            if !state.open.contains_key(&ticket) {
                break Ok(());
            }
            state = match limit {
                None => match if state.busy { None } else { state.queue.pop_front() } {
                    Some(job) => {
                        self.run_job(state, job).call_completion(self);
                        lock(&self.state)
                    }
                    None => self.nap(state, ticket, IDLE_WAKEUP, &mut interrupts),
                },
                Some((limit, since)) => {
                    let Some(left) =
                        limit.checked_sub(since.elapsed()).filter(|left| !left.is_zero())
                    else {
                        let text = format!(
                            "wait() gave up after {:.1} s; the call itself goes on",
                            limit.as_secs_f32()
                        );
                        break Err(Error::wait_timeout(text));
                    };
                    self.nap(state, ticket, left, &mut interrupts)
                }
            };
        };
        state.active_callers -= 1;
        outcome
    }

    /// Sleeps. Fails the group if a signal handler raises on this thread before the call `ticket`
    /// has ended; the call then ends soon, on the thread that runs it.
    fn nap<'a>(
        &'a self,
        state: MutexGuard<'a, QueueState>,
        ticket: u64,
        limit: Duration,
        interrupts: &mut Option<Interrupts>,
    ) -> MutexGuard<'a, QueueState> {
        drop(self.sleep(state, limit.min(interrupt::SIGNAL_POLL)));
        // A handler may take seconds, and the call may end meanwhile.
        if interrupts.get_or_insert_default().check().is_err()
            && lock(&self.state).open.contains_key(&ticket)
        {
            self.recorder.interrupted();
        }
        lock(&self.state)
    }

    /// Waits until no call is queued or running; completions may still be running. Returns false if
    /// that takes longer than `limit`. While a thread is inside a call, the limit is at most
    /// [`DESTROY_GRACE`]: that thread must return soon, because another thread destroys the group.
    pub fn drain(&self, limit: Duration) -> bool {
        let since = Instant::now();
        let mut state = lock(&self.state);
        self.cancel_deferral(&mut state);
        while state.busy || !state.queue.is_empty() {
            let limit = if state.active_callers > 0 { limit.min(DESTROY_GRACE) } else { limit };
            let Some(left) = limit.checked_sub(since.elapsed()) else { return false };
            state = self.sleep(state, left);
        }
        true
    }

    /// Ends the worker after the queued jobs.
    pub fn stop(&self) {
        let mut state = lock(&self.state);
        state.stopping = true;
        self.cancel_deferral(&mut state);
        self.wake_workers(&state);
        drop(state);
        let workers = std::mem::take(&mut *lock(&self.workers));
        // A completion on the worker may drop the last reference to the group.
        for worker in
            workers.into_iter().filter(|worker| worker.thread().id() != std::thread::current().id())
        {
            let _ = worker.join();
        }
    }

    fn start_worker(self: &Arc<Self>, state: &mut QueueState) -> Result<()> {
        let mut workers = lock(&self.workers);
        workers.retain(|worker| !worker.is_finished());
        let queue = Arc::clone(self);
        let thread = thread::spawn("symm-worker", None, move || queue.work());
        workers.push(thread?);
        state.idle_workers += 1;
        Ok(())
    }

    /// Runs jobs until the queue stops. A second worker exists, for a while, if completions overlap
    /// with further jobs.
    fn work(self: &Arc<Self>) {
        let mut state = lock(&self.state);
        let mut seen = 0;
        loop {
            if !state.busy
                && state.queue.front().is_some_and(|job| !job.deferred)
                && let Some(job) = state.queue.pop_front()
            {
                let finished = self.run_job(state, job);
                self.run_completion();
                finished.call_completion(self);
                state = lock(&self.state);
                state.idle_workers += 1;
                if state.idle_workers <= 2 {
                    continue;
                }
            } else if !state.stopping && !state.worker_polling && state.next != seen {
                seen = state.next;
                state.worker_polling = true;
                state = self.park_worker(state, DEFERRED_JOB_POLL);
                state.worker_polling = false;
                if let Some(job) = state.queue.front_mut() {
                    job.deferred &= job.ticket >= seen;
                }
                continue;
            } else if !state.stopping || !state.queue.is_empty() {
                let (since, limit) = (
                    Instant::now(),
                    if state.idle_workers > 1 { IDLE_THREAD_TIMEOUT } else { IDLE_WAKEUP },
                );
                state = self.park_worker(state, limit);
                if state.idle_workers == 1 || since.elapsed() < IDLE_THREAD_TIMEOUT {
                    continue;
                }
            }
            state.idle_workers -= 1;
            return;
        }
    }

    fn park_worker<'a>(
        &'a self,
        mut state: MutexGuard<'a, QueueState>,
        limit: Duration,
    ) -> MutexGuard<'a, QueueState> {
        state.asleep.workers += 1;
        let mut state = unpoisoned(self.work.wait_timeout(state, limit)).0;
        state.asleep.workers -= 1;
        state
    }

    /// Marks that the calling worker runs a completion, which may wait for queued jobs.
    fn run_completion(self: &Arc<Self>) {
        let mut state = lock(&self.state);
        state.idle_workers -= 1;
        if state.idle_workers == 0
            && !state.queue.is_empty()
            && let Err(error) = self.start_worker(&mut state)
        {
            log::warn!("{error}; the queue goes on after the current completion");
        }
    }

    fn sleep<'a>(
        &'a self,
        mut state: MutexGuard<'a, QueueState>,
        limit: Duration,
    ) -> MutexGuard<'a, QueueState> {
        state.asleep.waiters += 1;
        let mut state = unpoisoned(self.changed.wait_timeout(state, limit)).0;
        state.asleep.waiters -= 1;
        state
    }

    fn wake_workers(&self, state: &QueueState) {
        if state.asleep.workers > 0 {
            self.work.notify_all();
        }
    }

    fn wake_waiters(&self, state: &QueueState) {
        if state.asleep.waiters > 0 {
            self.changed.notify_all();
        }
    }

    /// Runs `job`, the oldest one. No other thread may be running a job.
    fn run_job(&self, mut state: MutexGuard<'_, QueueState>, job: QueuedJob) -> FinishedJob {
        state.busy = true;
        drop(state);
        job.completion.copy_in();
        let outcome = self.execute(
            &job.calls,
            &CallTimeout::from(job.submitted, job.timeout),
            job.timeout,
            Some(&job),
        );
        if outcome.is_ok() {
            job.completion.write_back();
        }
        self.skip_failed(&mut lock(&self.state));
        FinishedJob { ticket: job.ticket, outcome, completion: job.completion }
    }

    /// Runs calls; `queued` is their job, if they were queued.
    fn execute(
        &self,
        calls: &[Call<'_>],
        limit: &CallTimeout,
        timeout: Duration,
        queued: Option<&QueuedJob>,
    ) -> Result<()> {
        let mut executor = lock(&self.executor);
        let mut one = |(place, call): (u64, &Call<'_>)| {
            let posted = queued.is_some_and(|job| job.posted);
            let next = executor.sequence() + u64::from(!posted);
            let number = match queued {
                Some(job) => {
                    if !posted {
                        self.recorder.start(job.number + place, next);
                    }
                    job.number + place
                }
                None => self.recorder.begin(call, timeout, next),
            };
            let outcome = executor.run(call, limit, number);
            let begun = executor.sequence() == next;
            self.recorder.end(
                number,
                &outcome,
                begun,
                if begun { executor.last_algorithm() } else { "" },
            );
            outcome
        };
        let body = AssertUnwindSafe(|| (0..).zip(calls).try_for_each(&mut one));
        let outcome = interrupt::within(self.address(), || catch_unwind(body));
        drop(executor);
        let outcome = outcome.unwrap_or_else(|panic| Err(self.health.panicked(&*panic)));
        outcome.inspect_err(|error| {
            if let Some(job) = queued {
                self.recorder.abandon(job.number..job.number + calls.len() as u64, error);
            }
            self.recorder.note_failure(error);
        })
    }

    fn skip_failed(&self, state: &mut QueueState) {
        state.busy = false;
        self.wake_waiters(state);
        if !state.queue.is_empty() {
            self.wake_workers(state);
        }
    }
}
