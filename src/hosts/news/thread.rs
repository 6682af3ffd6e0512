//! The thread on which all speakers of the process have their turns. It starts with the first and ends with the last.

use super::speaker::{Descriptor, Speaker};
use crate::error::Result;
use crate::lock::lock;
use crate::sys::fork::{PerProcess, generation};
use crate::sys::rate_limit::RateLimit;
use crate::sys::thread::{self, Wake};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::{AsFd, AsRawFd, RawFd};
use rustix::io::Errno;
use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

/// Time between two looks at what happens on the own host, which wakes nobody.
const LOOK: Timespec = Timespec { tv_sec: 0, tv_nsec: 20_000_000 };

#[derive(Default)]
struct State {
    speakers: HashMap<u64, Speaker>,
    next: u64,
    /// Wakes the thread; absent while none runs.
    wake: Option<Arc<Wake>>,
}

/// A forked child has its own state and, when it needs one, its own thread.
static STATE: PerProcess<Mutex<State>> = PerProcess::new(|| Mutex::new(State::default()));

fn state() -> MutexGuard<'static, State> {
    // Hosts are asked and told outside this lock, and nothing under it panics half-way.
    lock(STATE.get())
}

/// A speaker that has its turns until this is dropped.
#[derive(Debug)]
pub(super) struct Seat {
    id: u64,
    generation: u64,
}

impl Seat {
    /// Gives `speaker` its turns from now on.
    ///
    /// # Errors
    /// `Config` where the system refuses the thread.
    pub(super) fn new(speaker: Speaker) -> Result<Self> {
        let mut state = state();
        if state.wake.is_none() {
            let wake = Arc::new(Wake::new()?);
            let mine = Arc::clone(&wake);
            thread::spawn("symm-news", Some(256 << 10), move || run(&mine))?;
            state.wake = Some(wake);
        }
        let id = state.next;
        state.next += 1;
        state.speakers.insert(id, speaker);
        notify(&state);
        Ok(Self { id, generation: generation() })
    }

    /// Does `work` with the speaker between two turns; `None` in a forked child, whose parent's it is.
    pub(super) fn with<T>(&self, work: impl FnOnce(&mut Speaker) -> T) -> Option<T> {
        if self.generation != generation() {
            return None;
        }
        let mut state = state();
        let done = work(state.speakers.get_mut(&self.id)?);
        notify(&state);
        Some(done)
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        if self.generation == generation() {
            let mut state = state();
            let speaker = state.speakers.remove(&self.id);
            notify(&state);
            drop(state);
            // It may be the last that knows its host.
            drop(speaker);
        }
    }
}

fn notify(state: &State) {
    if let Some(wake) = &state.wake {
        wake.notify();
    }
}

fn run(wake: &Wake) {
    loop {
        let hosts = {
            let mut state = state();
            if state.speakers.is_empty() {
                // In the same breath: a speaker that comes later starts another thread.
                state.wake = None;
                return;
            }
            let hosts = state.speakers.iter().map(|(&id, speaker)| (id, Arc::clone(&speaker.host)));
            hosts.collect::<Vec<_>>()
        };
        let looks: Vec<_> = hosts
            .iter()
            .map(|(id, host)| (*id, host.failure(), host.departures(), host.waiting(), host.refused(), host.launched()))
            .collect();
        let (mut polled, mut late) = (Vec::new(), Vec::new());
        {
            let mut state = state();
            for (id, failure, departures, waiting, refused, launched) in &looks {
                if let Some(speaker) = state.speakers.get_mut(id) {
                    speaker.tell_departures(departures);
                    speaker.refusals.waiting = *waiting;
                    speaker.refusals.own = *refused;
                    late.extend(speaker.tell_waiting(*waiting).map(|late| (*id, late)));
                    speaker.tell_launched(launched);
                    failure.iter().for_each(|failure| speaker.tell(failure));
                }
            }
            state.speakers.values().for_each(|speaker| speaker.descriptors(&mut polled));
        }
        for (id, (call, names)) in late {
            hosts.iter().filter(|(other, _)| *other == id).for_each(|(_, host)| host.note_late(call, names.clone()));
        }
        drop(hosts);
        let ready = wait(wake, &polled);
        drop(polled);
        let failed: Vec<_> = state()
            .speakers
            .values_mut()
            .filter_map(|speaker| speaker.turn(&ready).map(|error| (Arc::clone(&speaker.host), error)))
            .collect();
        for (host, error) in failed {
            host.fail(error);
        }
    }
}

/// Sleeps until a descriptor is ready, the speakers change or it is time for a look; returns the numbers of those that are ready: a hint, for
/// what has such a number may be another by the time it is used.
fn wait(wake: &Wake, polled: &[(Descriptor, PollFlags)]) -> HashSet<RawFd> {
    let own = PollFd::from_borrowed_fd(wake.as_fd(), PollFlags::IN);
    let others = polled.iter().map(|(descriptor, flags)| PollFd::from_borrowed_fd(descriptor.as_fd(), *flags));
    let mut fds: Vec<PollFd<'_>> = std::iter::once(own).chain(others).collect();
    match poll(&mut fds, Some(&LOOK)) {
        Ok(_) => {}
        Err(Errno::INTR) => return HashSet::new(),
        Err(errno) => {
            static LINES: RateLimit = RateLimit::new();
            LINES.warn(format_args!("the thread of the news cannot poll {} connections: {errno}", polled.len()));
            std::thread::sleep(Duration::from_millis(10));
            return HashSet::new();
        }
    }
    wake.reset();
    let ready = fds.iter().skip(1).filter(|fd| !fd.revents().is_empty());
    ready.map(|fd| fd.as_fd().as_raw_fd()).collect()
}
