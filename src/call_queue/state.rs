//! State of a group's queue, and its jobs.

use crate::coll::call::Call;
use crate::completion::Completion;
use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

pub(super) struct QueueState {
    pub(super) queue: VecDeque<QueuedJob>,
    /// Tickets whose completion has not been called, and since when they are there; none: the job was posted, and nobody needs it soon.
    pub(super) open: BTreeMap<u64, Option<Instant>>,
    pub(super) next: u64,
    /// Flag that is set while a thread holds the runner.
    pub(super) busy: bool,
    pub(super) stopping: bool,
    /// Threads inside `run` or `wait`.
    pub(super) active_callers: usize,
    /// Workers that are not inside a completion.
    pub(super) idle_workers: usize,
    /// Whether the last submitter who waited for a job came [`PROMPT_SUBMITTER`].
    pub(super) submitter_prompt: bool,
    /// Whether a worker polls again within [`DEFERRED_JOB_POLL`], without being woken.
    pub(super) worker_polling: bool,
    /// Threads asleep on `work` and on `changed`: waking nobody costs a system call too.
    pub(super) asleep: SleepCounts,
}

#[derive(Default)]
pub(super) struct SleepCounts {
    pub(super) workers: usize,
    pub(super) waiters: usize,
}

pub(super) struct QueuedJob {
    pub(super) ticket: u64,
    pub(super) calls: Vec<Call<'static>>,
    /// Number of the first call in the flight recorder.
    pub(super) number: u64,
    pub(super) submitted: Instant,
    pub(super) timeout: Duration,
    pub(super) completion: Completion,
    /// Its only call has been posted.
    pub(super) posted: bool,
    /// The job, the only one, is left to its submitter.
    pub(super) deferred: bool,
}

impl QueueState {
    pub(super) fn push(&mut self, job: QueuedJob) -> u64 {
        let ticket = self.next;
        self.next += 1;
        self.open.insert(ticket, (!job.posted).then_some(job.submitted));
        // The submitter of several waits for none of them yet.
        if let Some(first) = self.queue.front_mut() {
            first.deferred = false;
        }
        self.queue.push_back(QueuedJob { ticket, ..job });
        ticket
    }
}

impl QueuedJob {
    /// A job of `calls` that has no ticket yet; it keeps lists of its own.
    pub(super) fn new(calls: &[Call<'_>], number: u64, timeout: Duration, completion: Completion) -> Self {
        let calls = calls.iter().cloned().map(Call::into_owned).collect();
        Self { ticket: 0, calls, number, submitted: Instant::now(), timeout, completion, posted: false, deferred: false }
    }
}
