//! State of a group's queue, and its jobs.

use crate::coll::call::Call;
use crate::completion::Completion;
use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

pub(super) struct State {
    pub(super) queue: VecDeque<Job>,
    /// Tickets whose completion has not been called, and since when they are there; none: the job was posted, and nobody needs it soon.
    pub(super) open: BTreeMap<u64, Option<Instant>>,
    pub(super) next: u64,
    /// Flag that is set while a thread holds the runner.
    pub(super) busy: bool,
    pub(super) stopping: bool,
    /// Threads inside `run` or `wait`.
    pub(super) callers: usize,
    /// Workers that are not inside a completion.
    pub(super) ready: usize,
    /// Whether the last submitter who waited for a job came [`SOON`].
    pub(super) soon: bool,
    /// Whether a worker looks again within [`LOOK`], without being woken.
    pub(super) looking: bool,
    /// Threads asleep on `work` and on `changed`: waking nobody costs a system call too.
    pub(super) asleep: Asleep,
}

#[derive(Default)]
pub(super) struct Asleep {
    pub(super) workers: usize,
    pub(super) waiters: usize,
}

pub(super) struct Job {
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
    pub(super) left: bool,
}

impl State {
    pub(super) fn push(&mut self, job: Job) -> u64 {
        let ticket = self.next;
        self.next += 1;
        self.open.insert(ticket, (!job.posted).then_some(job.submitted));
        // The submitter of several waits for none of them yet.
        if let Some(first) = self.queue.front_mut() {
            first.left = false;
        }
        self.queue.push_back(Job { ticket, ..job });
        ticket
    }
}

impl Job {
    /// A job of `calls` that has no ticket yet; it keeps lists of its own.
    pub(super) fn new(calls: &[Call<'_>], number: u64, timeout: Duration, completion: Completion) -> Self {
        let calls = calls.iter().cloned().map(Call::into_owned).collect();
        Self { ticket: 0, calls, number, submitted: Instant::now(), timeout, completion, posted: false, left: false }
    }
}
