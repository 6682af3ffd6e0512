//! The thread that runs all node leaders of the process. It starts with the first node leader and
//! ends with the last.

use super::node_leader::{Descriptor, NodeLeader};
use crate::error::Result;
use crate::lock::lock;
use crate::sys::fork::{PerProcess, generation};
use crate::sys::rate_limit::RateLimit;
use crate::sys::thread::{self, Waker};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::{AsFd, AsRawFd, RawFd};
use rustix::io::Errno;
use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

/// Poll interval for events on this node, which do not wake the thread.
const INTERNODE_POLL: Timespec = Timespec { tv_sec: 0, tv_nsec: 20_000_000 };

#[derive(Default)]
struct OobThreadState {
    leaders: HashMap<u64, NodeLeader>,
    next: u64,
    /// Wakes the thread; `None` while no thread runs.
    wake: Option<Arc<Waker>>,
}

/// A forked child has its own state and, when it needs one, its own thread.
static STATE: PerProcess<Mutex<OobThreadState>> =
    PerProcess::new(|| Mutex::new(OobThreadState::default()));

fn state() -> MutexGuard<'static, OobThreadState> {
    // No thread calls `LocalNode` or panics between two changes of the state while it holds this
    // lock.
    lock(STATE.get())
}

/// A node leader that the thread runs until this is dropped.
#[derive(Debug)]
pub(super) struct LeaderRegistration {
    id: u64,
    generation: u64,
}

impl LeaderRegistration {
    /// Makes the thread run `leader` from now on.
    ///
    /// # Errors
    /// `Config` if the system cannot create the thread.
    pub(super) fn new(leader: NodeLeader) -> Result<Self> {
        let mut state = state();
        if state.wake.is_none() {
            let wake = Arc::new(Waker::new()?);
            let mine = Arc::clone(&wake);
            thread::spawn("symm-oob", Some(256 << 10), move || run(&mine))?;
            state.wake = Some(wake);
        }
        let id = state.next;
        state.next += 1;
        state.leaders.insert(id, leader);
        notify(&state);
        Ok(Self { id, generation: generation() })
    }

    /// Runs `work` on the node leader between two turns; returns `None` in a forked child, because
    /// the node leader belongs to the parent.
    pub(super) fn with<T>(&self, work: impl FnOnce(&mut NodeLeader) -> T) -> Option<T> {
        if self.generation != generation() {
            return None;
        }
        let mut state = state();
        let done = work(state.leaders.get_mut(&self.id)?);
        notify(&state);
        Some(done)
    }
}

impl Drop for LeaderRegistration {
    fn drop(&mut self) {
        if self.generation == generation() {
            let mut state = state();
            let leader = state.leaders.remove(&self.id);
            notify(&state);
            drop(state);
            // Dropped outside the lock, because it may hold the last reference to its `LocalNode`.
            drop(leader);
        }
    }
}

fn notify(state: &OobThreadState) {
    if let Some(wake) = &state.wake {
        wake.notify();
    }
}

fn run(wake: &Waker) {
    loop {
        let nodes = {
            let mut state = state();
            if state.leaders.is_empty() {
                // Cleared under the same lock, so that a node leader that is added later starts
                // another thread.
                state.wake = None;
                return;
            }
            let nodes = state.leaders.iter().map(|(&id, leader)| (id, Arc::clone(&leader.node)));
            nodes.collect::<Vec<_>>()
        };
        let looks: Vec<_> = nodes
            .iter()
            .map(|(id, node)| {
                (
                    *id,
                    node.failure(),
                    node.departures(),
                    node.waiting(),
                    node.rejected(),
                    node.launched(),
                )
            })
            .collect();
        let (mut polled, mut late) = (Vec::new(), Vec::new());
        {
            let mut state = state();
            for (id, failure, departures, waiting, refused, launched) in &looks {
                if let Some(leader) = state.leaders.get_mut(id) {
                    leader.broadcast_exits(departures);
                    leader.rejections.waiting = *waiting;
                    leader.rejections.own = *refused;
                    late.extend(leader.report_blocked(*waiting).map(|late| (*id, late)));
                    leader.report_launches(launched);
                    failure.iter().for_each(|failure| leader.broadcast_failure(failure));
                }
            }
            state.leaders.values().for_each(|leader| leader.descriptors(&mut polled));
        }
        for (id, (call, names)) in late {
            nodes
                .iter()
                .filter(|(other, _)| *other == id)
                .for_each(|(_, node)| node.note_late(call, names.clone()));
        }
        drop(nodes);
        let ready = wait(wake, &polled);
        drop(polled);
        let failed: Vec<_> = state()
            .leaders
            .values_mut()
            .filter_map(|leader| leader.poll(&ready).map(|error| (Arc::clone(&leader.node), error)))
            .collect();
        for (node, error) in failed {
            node.fail(error);
        }
    }
}

/// Sleeps until a file descriptor is ready, the node leaders change or [`INTERNODE_POLL`] has
/// passed; returns the numbers of the ready descriptors. They are hints: a number may belong to
/// another descriptor by the time it is used.
fn wait(wake: &Waker, polled: &[(Descriptor, PollFlags)]) -> HashSet<RawFd> {
    let own = PollFd::from_borrowed_fd(wake.as_fd(), PollFlags::IN);
    let others = polled
        .iter()
        .map(|(descriptor, flags)| PollFd::from_borrowed_fd(descriptor.as_fd(), *flags));
    let mut fds: Vec<PollFd<'_>> = std::iter::once(own).chain(others).collect();
    match poll(&mut fds, Some(&INTERNODE_POLL)) {
        Ok(_) => {}
        Err(Errno::INTR) => return HashSet::new(),
        Err(errno) => {
            static LINES: RateLimit = RateLimit::new();
            LINES.warn(format_args!(
                "the thread of the news cannot poll {} connections: {errno}",
                polled.len()
            ));
            std::thread::sleep(Duration::from_millis(10));
            return HashSet::new();
        }
    }
    wake.reset();
    let ready = fds.iter().skip(1).filter(|fd| !fd.revents().is_empty());
    ready.map(|fd| fd.as_fd().as_raw_fd()).collect()
}
