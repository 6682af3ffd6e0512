//! The health of a group: its first failure, and how all parts of the group learn of it.
//!
//! A failure is recorded in the control block, which wakes all ranks of this node. Each part of a
//! group that has to act on it is a [`FailureListener`]: first the messages end, then the
//! inter-node part reports the failure to the other nodes and drops the rail. The first call of
//! [`Health::fail`] does all of that once, in this order.

use crate::coll::cuda::communicator::Communicator;
use crate::control::ControlBlock;
use crate::error::{Error, Result};
use crate::lock::{lock, unpoisoned};
use crate::sys::fork;
use crate::trace::GroupRecorder;
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, RwLock, Weak};
use std::time::{Duration, Instant};

/// Maximum time that a rank which has lost a connection waits for the reason.
const CAUSE_WAIT: Duration = Duration::from_millis(400);
/// How long a rank that has lost a connection waits only for a failure. After this time, the exit
/// of a rank of another node counts as the reason, too.
const CAUSE_WAIT_LOCAL: Duration = Duration::from_millis(150);
/// Poll interval of a rank that waits for the reason of a loss.
const CAUSE_POLL: Duration = Duration::from_millis(10);

/// The slot for a group's communicator, which the first call on a GPU creates.
pub type DeviceSlot = RwLock<Option<Arc<Communicator>>>;

/// A part of a group that ends, or notifies others, when the group fails.
pub trait FailureListener: Send + Sync {
    /// Reports that the group has failed; called once.
    fn failed(&self, failure: &Error);

    /// Returns the exit of a rank of another node as an error, preferably the rank with this
    /// `local` index.
    fn departure(&self, _local: usize) -> Option<Error> {
        None
    }
}

/// The first failure of a group as one rank sees it.
pub struct Health {
    control: Arc<ControlBlock>,
    device: Arc<DeviceSlot>,
    recorder: Arc<GroupRecorder>,
    listeners: Mutex<FailureListeners>,
    /// Generation of the process that made the group.
    generation: u64,
}

#[derive(Default)]
struct FailureListeners {
    /// Listeners in the order in which they are notified of a failure; empty once that has
    /// happened.
    waiting: Vec<Weak<dyn FailureListener>>,
    notified: bool,
}

impl Health {
    /// Creates the health of the group of `control`, with the slot of its communicator and the
    /// recorder of its calls.
    pub fn new(
        control: &Arc<ControlBlock>,
        device: &Arc<DeviceSlot>,
        recorder: &Arc<GroupRecorder>,
    ) -> Arc<Self> {
        Arc::new(Self {
            control: Arc::clone(control),
            device: Arc::clone(device),
            recorder: Arc::clone(recorder),
            listeners: Mutex::default(),
            generation: fork::generation(),
        })
    }

    /// Returns the control block of the ranks of this node.
    pub fn control(&self) -> &Arc<ControlBlock> {
        &self.control
    }

    /// Returns the record of the group's calls.
    pub fn recorder(&self) -> &Arc<GroupRecorder> {
        &self.recorder
    }

    /// Adds `listener`, which is notified of a failure after all earlier listeners.
    pub fn listen(&self, listener: Weak<dyn FailureListener>) {
        let mut listeners = lock(&self.listeners);
        if !listeners.notified {
            return listeners.waiting.push(listener);
        }
        drop(listeners);
        if let Some((listener, failure)) = listener.upgrade().zip(self.failure()) {
            listener.failed(&failure);
        }
    }

    /// Fails the group with `error` on every rank, unless it has failed already; blocked calls
    /// return at once. Returns the first failure. Has no effect in a forked child.
    pub fn fail(&self, error: Error) -> Error {
        if self.is_inherited() {
            return error;
        }
        let stands = self.control.fail(error);
        let mut listeners = lock(&self.listeners);
        listeners.notified = true;
        let waiting = std::mem::take(&mut listeners.waiting);
        drop(listeners);
        waiting.iter().filter_map(Weak::upgrade).for_each(|listener| listener.failed(&stands));
        stands
    }

    /// Returns the first failure, or the death of a rank of this node that no call has raised yet.
    pub fn error(&self) -> Option<Error> {
        self.failure().or_else(|| self.control.dead())
    }

    /// Returns the first failure, on the host or a device.
    pub fn failure(&self) -> Option<Error> {
        let failure = self.kernels_failure().or_else(|| self.control.failure());
        failure.inspect(|error| self.recorder.note_failure(error))
    }

    /// Fails if a kernel of this rank has timed out. A kernel's report is read only here.
    pub fn check_kernels(&self) -> Result<()> {
        self.kernels_failure()
            .map_or(Ok(()), Err)
            .inspect_err(|error| self.recorder.note_failure(error))
    }

    fn kernels_failure(&self) -> Option<Error> {
        self.communicator().and_then(|communicator| communicator.failure())
    }

    /// Returns the reason why this rank lost a connection, if it is known within `limit` and
    /// `CAUSE_WAIT`: a failure, or the exit of a rank of another node, preferably the rank with
    /// this `local` index.
    pub fn cause(&self, local: usize, limit: Duration) -> Option<Error> {
        let (begun, most) = (Instant::now(), limit.min(CAUSE_WAIT));
        loop {
            let over = begun.elapsed() >= most;
            let told = self.error().or_else(|| {
                if over || begun.elapsed() >= CAUSE_WAIT_LOCAL {
                    self.departure(local)
                } else {
                    None
                }
            });
            if told.is_some() || over {
                return told;
            }
            std::thread::sleep(CAUSE_POLL);
        }
    }

    fn departure(&self, local: usize) -> Option<Error> {
        let listeners: Vec<_> =
            lock(&self.listeners).waiting.iter().filter_map(Weak::upgrade).collect();
        listeners.iter().find_map(|listener| listener.departure(local))
    }

    /// Returns the group's communicator, if it is set up; `None` in a forked child, where the
    /// driver's memory is not mapped.
    pub fn communicator(&self) -> Option<Arc<Communicator>> {
        if self.is_inherited() { None } else { unpoisoned(self.device.read()).clone() }
    }

    /// Runs `body`. A panic in it fails the group on all ranks, except in a forked child, which
    /// must not affect the group.
    pub fn contain<T>(&self, body: impl FnOnce() -> Result<T>) -> Result<T> {
        if self.is_inherited() {
            return body();
        }
        catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|panic| Err(self.panicked(&*panic)))
    }

    /// Fails the group because this rank has panicked.
    pub fn panicked(&self, panic: &(dyn Any + Send)) -> Error {
        self.fail(self.control.panicked(panic))
    }

    /// Returns true if this process is a forked child of the process that joined the group.
    pub fn is_inherited(&self) -> bool {
        fork::generation() != self.generation
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::tests::controls;

    /// A part of a group that records the failures that are reported to it.
    struct Listener {
        name: &'static str,
        heard: Arc<Mutex<Vec<(&'static str, String)>>>,
        health: Arc<Health>,
    }

    impl FailureListener for Listener {
        fn failed(&self, failure: &Error) {
            assert_eq!(
                self.health.control.failure().as_ref(),
                Some(failure),
                "it stands before anybody hears of it"
            );
            lock(&self.heard).push((self.name, failure.message.clone()));
            // A part that is notified may fail the group itself; the first failure stays.
            assert_eq!(self.health.fail(Error::peer("rail lost")), *failure);
        }

        fn departure(&self, local: usize) -> Option<Error> {
            (local == 1 && self.name == "internode").then(|| Error::peer("has left"))
        }
    }

    fn health() -> Arc<Health> {
        let control = Arc::new(controls(2).swap_remove(0));
        Health::new(
            &control,
            &Arc::default(),
            &GroupRecorder::new(&control, Duration::from_secs(1)),
        )
    }

    #[test]
    fn every_part_hears_of_the_first_failure_once_and_in_its_order() {
        let (health, heard) = (health(), Arc::default());
        let part = |name| {
            Arc::new(Listener { name, heard: Arc::clone(&heard), health: Arc::clone(&health) })
        };
        let parts = ["messages", "internode"].map(part);
        parts.iter().for_each(|part| {
            health.listen(Arc::downgrade(&(Arc::clone(part) as Arc<dyn FailureListener>)))
        });
        assert_eq!(health.error(), None);
        let first = health.fail(Error::aborted("the cause"));
        assert_eq!(health.fail(Error::timeout("a consequence")), first);
        assert_eq!(health.failure(), Some(first.clone()));
        assert_eq!(health.cause(1, Duration::ZERO), Some(first));
        // A listener that is added after the failure is notified, too.
        let late = part("late");
        health.listen(Arc::downgrade(&(Arc::clone(&late) as Arc<dyn FailureListener>)));
        let names = ["messages", "internode", "late"].map(|name| (name, "the cause".to_owned()));
        assert_eq!(*lock(&heard), names);
    }

    #[test]
    fn who_loses_a_connection_hears_that_its_peer_has_left() {
        let (health, heard) = (health(), Arc::default());
        let internode =
            Arc::new(Listener { name: "internode", heard, health: Arc::clone(&health) });
        health.listen(Arc::downgrade(&(Arc::clone(&internode) as Arc<dyn FailureListener>)));
        assert_eq!(health.cause(0, Duration::ZERO), None);
        assert_eq!(health.cause(1, Duration::MAX), Some(Error::peer("has left")));
    }
}
