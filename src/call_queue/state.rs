//! The state of a group's queue, and its jobs.

use super::CallQueue;
use crate::coll::call::Call;
use crate::completion::Completion;
use crate::error::Result;
use crate::lock::lock;
use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

pub(super) struct QueueState {
    pub(super) queue: VecDeque<QueuedJob>,
    /// Tickets whose completion has not been called, each with the time of its submission. A job
    /// without a time has been posted, and no thread needs it soon.
    pub(super) open: BTreeMap<u64, Option<Instant>>,
    pub(super) next: u64,
    /// True while a thread holds the runner.
    pub(super) busy: bool,
    pub(super) stopping: bool,
    /// Number of threads inside `run` or `wait`.
    pub(super) active_callers: usize,
    /// Number of workers that are not inside a completion.
    pub(super) idle_workers: usize,
    /// True if the last submitter that waited for a job did so within [`PROMPT_SUBMITTER`].
    pub(super) submitter_prompt: bool,
    /// True if a worker polls again within [`DEFERRED_JOB_POLL`], without being woken.
    pub(super) worker_polling: bool,
    /// Numbers of threads that sleep on `work` and on `changed`, because a wake-up costs a system
    /// call even if no thread sleeps.
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
    /// True if its only call has been posted.
    pub(super) posted: bool,
    /// True if the job, the only one in the queue, is deferred to its submitter.
    pub(super) deferred: bool,
}

/// A job whose completion has not been called.
pub(super) struct FinishedJob {
    pub(super) ticket: u64,
    pub(super) outcome: Result<()>,
    pub(super) completion: Completion,
}

impl FinishedJob {
    /// Calls the completion, without holding a lock.
    pub(super) fn call_completion(self, queue: &CallQueue) {
        self.completion.call(self.outcome, None);
        let mut state = lock(&queue.state);
        state.open.remove(&self.ticket);
        queue.wake_waiters(&state);
    }
}

impl QueueState {
    pub(super) fn push(&mut self, job: QueuedJob) -> u64 {
        let ticket = self.next;
        self.next += 1;
        self.open.insert(ticket, (!job.posted).then_some(job.submitted));
        // The submitter of this job does not wait for the first job yet, so a worker may run it.
        if let Some(first) = self.queue.front_mut() {
            first.deferred = false;
        }
        self.queue.push_back(QueuedJob { ticket, ..job });
        ticket
    }
}

impl QueuedJob {
    /// Creates a job of `calls` without a ticket; it keeps its own copies of the lists.
    pub(super) fn new(
        calls: &[Call<'_>],
        number: u64,
        timeout: Duration,
        completion: Completion,
    ) -> Self {
        let calls = calls.iter().cloned().map(Call::into_owned).collect();
        Self {
            ticket: 0,
            calls,
            number,
            submitted: Instant::now(),
            timeout,
            completion,
            posted: false,
            deferred: false,
        }
    }
}
