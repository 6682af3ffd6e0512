//! A group of ranks: combines all parts of the crate; the bridge calls only this module.
//!
//! Ranks of one node share memory. A group on several nodes differs only by its [`Internode`]: its
//! calls use the same queue, and its messages the same table.

pub mod device;
mod join;
mod monitored_barrier;
mod operators;
mod rejection;

use crate::bootstrap;
use crate::call_queue::CallQueue;
use crate::coll::call::Call;
use crate::coll::cuda::agreement::launch_log;
use crate::coll::message::Message;
use crate::coll::plan::CpuThresholds;
use crate::completion::{Completion, Observer};
use crate::control::ControlBlock;
use crate::cta::CtaOptions;
use crate::dtype::SumOrder;
use crate::error::{Error, Result};
use crate::exit_watch;
use crate::health::{DeviceSlot, Health};
use crate::internode::Internode;
use crate::lock::lock;
use crate::messages::{self, Messages};
use crate::rank::Rank;
use crate::symm_mem::peers::PeerHeapsCell;
use crate::trace::{self, GroupRecorder};
use crate::window;
use rejection::{LocalRejections, RejectedCall};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Settings that a user may choose for a group. All ranks must choose the same values, except for
/// the thresholds.
#[derive(Clone, Copy, Debug)]
pub struct GroupTuning {
    /// True if receivers of long messages may read the sender's memory where the system permits it.
    pub zero_copy: bool,
    /// Number of spin iterations of a waiting thread before it yields its core; if absent, it
    /// depends on the number of cores.
    pub spins: Option<u32>,
    /// Lengths at which the algorithms change.
    pub thresholds: CpuThresholds,
    /// Order in which reductions combine the ranks' elements.
    pub order: SumOrder,
}

impl Default for GroupTuning {
    fn default() -> Self {
        Self {
            zero_copy: true,
            spins: None,
            thresholds: CpuThresholds::default(),
            order: SumOrder::Rank,
        }
    }
}

/// One rank of a joined group, which serves one process group of torch.
///
/// It exists so that one place knows all parts of a group: collectives, messages, GPUs, symmetric
/// memory, the other nodes and the first failure. The parts do not know each other, so each can be
/// tested without the others.
///
/// # Examples
/// Ranks are processes as a rule, but threads of one process work as well:
/// ```
/// use symm::bootstrap::JoinOptions;
/// use symm::coll::call::Call;
/// use symm::cta::CtaOptions;
/// use symm::dtype::SumOrder;
/// use symm::group::Group;
/// use symm::store::memory::MemoryStore;
///
/// let store = MemoryStore::new();
/// let rank = |rank| {
///     let options = JoinOptions {
///         group: "pair".into(),
///         rank,
///         size: 2,
///         global_ranks: vec![],
///         is_default: false,
///         timeout: None,
///         order: SumOrder::Rank,
///         ctas: CtaOptions::default(),
///     };
///     let group = Group::join(&store, &options, None)?;
///     group.run(&[Call::barrier(None)], None)?;
///     group.shutdown();
///     Ok::<(), symm::error::Error>(())
/// };
/// std::thread::scope(|scope| {
///     let other = scope.spawn(|| rank(1));
///     rank(0)?;
///     other.join().expect("no panic")
/// })?;
/// # Ok::<(), symm::error::Error>(())
/// ```
pub struct Group {
    /// Control block of the ranks of this node.
    control: Arc<ControlBlock>,
    queue: Arc<CallQueue>,
    messages: Arc<Messages>,
    health: Arc<Health>,
    rejections: Arc<LocalRejections>,
    recorder: Arc<GroupRecorder>,
    timeout_ms: AtomicU64,
    closed: AtomicBool,
    watching: Mutex<Option<exit_watch::Subscription>>,
    lease: Mutex<Option<bootstrap::RankLease>>,
    /// The communicator, created by the first call on a GPU.
    communicator: Arc<DeviceSlot>,
    /// How many processors the group's kernels may take.
    ctas: CtaOptions,
    /// Held by the thread that sets up the communicator.
    setting_up: Mutex<()>,
    domains: window::Domains,
    /// Symmetric memory of the host, for collectives.
    linked: Arc<PeerHeapsCell>,
    /// The other nodes, if the group spans several.
    internode: Option<Arc<Internode>>,
}

impl Group {
    /// Runs `calls` after all earlier calls, and returns when they have ended.
    pub fn run(&self, calls: &[Call<'_>], timeout: Option<Duration>) -> Result<()> {
        self.check_call()?;
        self.queue.run(calls, timeout.unwrap_or_else(|| self.timeout()))
    }

    /// Queues `calls`; `completion` gets the outcome. The returned ticket is for `wait`.
    pub fn submit(
        &self,
        calls: &[Call<'_>],
        timeout: Option<Duration>,
        completion: Completion,
    ) -> Result<u64> {
        self.check_call()?;
        self.queue.submit(calls, timeout.unwrap_or_else(|| self.timeout()), completion)
    }

    /// Runs `calls` in the turn of a queued call; see [`CallQueue::run_in_turn`]. That call has
    /// passed the checks of `submit`, and it completes although this rank leaves the group.
    pub fn run_in_turn(&self, calls: &[Call<'_>], timeout: Option<Duration>) -> Result<()> {
        self.queue.run_in_turn(calls, timeout.unwrap_or_else(|| self.timeout()))
    }

    /// Starts a send.
    pub fn send(&self, message: Message, completion: Completion) -> Result<u64> {
        self.start(true, message, completion)
    }

    /// Starts a receive.
    pub fn recv(&self, message: Message, completion: Completion) -> Result<u64> {
        self.start(false, message, completion)
    }

    /// Starts a message unless the group has failed, and records it.
    fn start(&self, send: bool, message: Message, completion: Completion) -> Result<u64> {
        self.check_alive()?;
        let recorded_as = |internode: &Arc<Internode>| {
            internode.recorded_as(
                if send { "send" } else { "recv" },
                message.peer,
                self.messages.internode().is_some(),
            )
        };
        let (shown, far) = self.internode.as_ref().map_or(Ok((message.peer, None)), recorded_as)?;
        let (shown, timeout) =
            (message.with_peer(shown), message.timeout.unwrap_or_else(|| self.timeout()));
        let number =
            self.recorder.message(send, &shown, timeout, trace::CallTarget::Cpu, far.is_some());
        let completion = completion.observed(
            far.unwrap_or_else(|| Arc::clone(&self.recorder) as Arc<dyn Observer>),
            number,
        );
        let ticket = if send {
            self.messages.send(message, timeout, completion)
        } else {
            self.messages.recv(message, timeout, completion)
        };
        ticket.inspect_err(|error| self.recorder.end(number, &Err(error.clone()), false, ""))
    }

    /// Returns once the completion of `ticket` has been called; fails with `WaitTimeout` after
    /// `timeout`.
    pub fn wait(&self, ticket: u64, timeout: Option<Duration>) -> Result<()> {
        self.check_process()?;
        if ticket & messages::TICKET_BIT != 0 {
            self.messages.wait(ticket, timeout)
        } else {
            self.queue.wait(ticket, timeout)
        }
    }

    /// Reports that this rank rejected a collective, because of `text`, before any data moved. If
    /// peers wait for this rank, and it makes no other call within 80 ms, the group fails. Peers on
    /// this node learn of the failure within 100 ms of their call or of this report, whichever is
    /// later, and other nodes within 0.2 s.
    pub fn reject(&self, text: String) {
        if self.check_alive().and_then(|()| self.health.check_kernels()).is_ok() {
            self.rejections.add(
                text,
                RejectedCall::Collective { on_device: self.health.communicator().is_some() },
            );
        }
    }

    /// Reports, as `reject` does, that this rank rejected an operator on symmetric memory of the
    /// host before the operator's first barrier. Has no effect on several nodes, where no windows
    /// exist.
    pub fn reject_operator(&self, text: String) {
        if self.internode.is_none() && self.check_alive().is_ok() {
            self.rejections.add(text, RejectedCall::Operator);
        }
    }

    /// Reports, as `reject` does, a rejected send to `peer`, or a rejected receive from it or from
    /// any source. Only a peer that is blocked in the matching call learns of it.
    pub fn reject_message(&self, send: bool, peer: Option<Rank>, tag: i32, text: String) {
        let known = peer.is_none_or(|peer| peer.index() < self.place().1);
        if known && self.check_alive().is_ok() {
            self.rejections.add(text, RejectedCall::Message { send, peer, tag });
        }
    }

    /// Advances messages and calls without blocking, for a caller that polls for their end.
    pub fn progress(&self) {
        if self.check_process().is_ok() {
            self.queue.run_promptly();
            let _ = self.messages.progress();
        }
    }

    /// Fails the group on every rank; blocked calls return at once.
    pub fn abort(&self) {
        if self.check_process().is_err() || self.closed.load(Ordering::Acquire) {
            return;
        }
        let me = self.control.describe(self.control.rank());
        self.health.fail(Error::aborted(format!("{me} aborted group \"{}\"", self.control.name())));
        // Calls the completions of messages that no other thread calls already.
        let _ = self.messages.progress();
    }

    /// Leaves the group once all submitted calls have ended, at the latest after the timeout.
    /// Idempotent.
    pub fn shutdown(&self) {
        self.destroy(self.timeout(), "");
    }

    /// Leaves the group once all submitted calls have ended. Calls that have not ended after
    /// `limit` fail, here and on the peers. A call in which another thread is blocked gets 50 ms.
    /// Idempotent.
    ///
    /// `farewell` is the error because of which this rank leaves, for its peers; empty if there is
    /// none.
    pub fn destroy(&self, limit: Duration, farewell: &str) {
        if self.check_process().is_err() || self.closed.swap(true, Ordering::AcqRel) {
            return;
        }
        let (name, since) = (self.control.name(), Instant::now());
        let left = || limit.saturating_sub(since.elapsed());
        self.rejections.forget();
        let launched = self.disconnect(limit);
        if !self.queue.drain(left()) {
            let (me, seconds) =
                (self.control.describe(self.control.rank()), since.elapsed().as_secs_f32());
            let error = self.control.about_to_end().unwrap_or_else(|| {
                Error::aborted(format!(
                    "{me} left group \"{name}\" with calls under way after {seconds:.1} s"
                ))
            });
            // Pending messages end below, with their own error.
            self.control.fail(error);
        }
        if let Some(internode) = &self.internode {
            internode.forget_keys();
        }
        self.messages.say_goodbye(left());
        self.messages.shut_down(
            &Error::aborted(format!(
                "group \"{name}\" was destroyed before this transfer was complete"
            )),
            farewell,
        );
        self.messages.stop();
        self.queue.stop();
        // Threads that were blocked in a rendezvous have been released by now.
        self.domains.drain(left());
        self.control.note_departure(farewell);
        // Threads that were blocked in signals or operators of windows end with an error.
        self.control.end_lone_waits();
        if launched {
            launch_log::abandon(&self.control);
        }
        drop(lock(&self.watching).take());
        drop(lock(&self.lease).take());
        self.recorder.leave();
        // Other owners of the group may still query its failure, which is in the part of the memory
        // that is kept.
        let kept = self.control.segment().leave_file(self.control.layout().control_bytes());
        kept.unwrap_or_else(|errno| log::debug!("group \"{name}\" keeps its memory: {errno}"));
        if let Some(internode) = &self.internode {
            internode.leave(left());
        }
    }

    /// Returns this group if all its ranks are on one node.
    ///
    /// # Errors
    /// `Config` if the group spans several nodes, where `what` is unavailable.
    pub fn single_node(&self, what: &str) -> Result<&Self> {
        self.internode.as_ref().map_or(Ok(self), |internode| Err(internode.unsupported(what)))
    }

    /// Returns the control block of the ranks of this node.
    pub fn control(&self) -> &ControlBlock {
        &self.control
    }

    /// Starts or stops the recording, in the flight recorder, of the ranks for which calls wait.
    pub fn watch(&self, on: bool) {
        self.recorder.watch(on);
    }

    /// Returns this rank and the number of ranks.
    pub fn place(&self) -> (Rank, usize) {
        self.internode.as_ref().map_or_else(
            || (self.control.rank(), self.control.size()),
            |internode| internode.place(),
        )
    }

    /// Returns the number of collectives that were called.
    pub fn sequence(&self) -> u64 {
        self.recorder.collectives()
    }

    /// Returns the timeout of calls that have none of their own.
    pub fn timeout(&self) -> Duration {
        Duration::from_millis(self.timeout_ms.load(Ordering::Relaxed))
    }

    /// Sets the timeout of calls that have none of their own.
    pub fn set_timeout(&self, timeout: Duration) {
        self.timeout_ms.store(timeout.as_millis() as u64, Ordering::Relaxed);
        self.recorder.set_timeout(timeout);
    }

    /// Returns the first failure, or the death of a rank of this node that no call has raised yet.
    pub fn error(&self) -> Option<Error> {
        self.health.error()
    }

    /// Returns the group's first failure, on the host or a device.
    pub fn failure(&self) -> Option<Error> {
        self.health.failure()
    }

    /// Runs `body`. A panic in it fails the group on all ranks, except in a forked child, which
    /// must not affect the group.
    pub fn catch_panic<T>(&self, body: impl FnOnce() -> Result<T>) -> Result<T> {
        self.health.contain(body)
    }

    /// Rejects a group that belongs to the parent of this process.
    pub fn check_process(&self) -> Result<()> {
        if !self.health.is_inherited() {
            return Ok(());
        }
        let (name, maker) = (self.control.name(), self.control.pid(self.control.rank()));
        Err(Error::config(format!(
            "group \"{name}\" was made by process {maker}, of which process {} is a forked child; \
             make a new group in the child",
            std::process::id()
        )))
    }

    /// Fails if this process can no longer use the group.
    pub fn check_open(&self) -> Result<()> {
        self.check_process()?;
        if self.closed.load(Ordering::Acquire) {
            return Err(self.control.destroyed());
        }
        Ok(())
    }

    /// Fails if the group can no longer be used, or a kernel of this rank has timed out. A call
    /// that passes these checks cancels the rejection of an earlier call.
    fn check_call(&self) -> Result<()> {
        self.check_open()?;
        self.health.check_kernels()?;
        self.rejections.resume();
        Ok(())
    }

    fn check_alive(&self) -> Result<()> {
        self.check_open()?;
        self.control
            .failure()
            .map_or(Ok(()), Err)
            .inspect_err(|error| self.recorder.note_failure(error))
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        self.shutdown();
        if self.check_process().is_err() {
            self.forget_communicator();
            self.domains.invalidate();
            if let Some(internode) = &self.internode {
                internode.forget();
                std::mem::forget(Arc::clone(&self.messages));
            }
        }
    }
}

#[cfg(test)]
mod tests;
