//! Detects within a millisecond that a member's process has ended, whatever children it leaves
//! behind, and runs timers.
//!
//! One thread serves all groups of the process. It starts with the first subscription and ends with
//! the last.
#![allow(unsafe_code, reason = "a descriptor of a process, and tests that fork")]

use crate::bootstrap::MemberProcess;
use crate::error::Result;
use crate::lock::lock;
use crate::rank::Rank;
use crate::sys::fork::{PerProcess, generation};
use crate::sys::process::{self, ProcessId};
use crate::sys::rate_limit::RateLimit;
use crate::sys::thread::{self, Waker};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::{AsFd, OwnedFd};
use rustix::io::Errno;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// The callback of a subscriber; it receives the rank and how the rank's process ended.
pub type OnExit = Arc<dyn Fn(Rank, String) + Send + Sync>;

/// A rank whose process has not ended as far as the watcher knows.
struct WatchedProcess {
    rank: Rank,
    process: ProcessId,
    pidfd: Arc<OwnedFd>,
}

struct Subscriber {
    targets: Vec<WatchedProcess>,
    on_exit: OnExit,
}

/// A callback, and when to call it once.
struct Timer {
    due: Instant,
    call: Box<dyn FnOnce() + Send>,
}

#[derive(Default)]
struct WatchState {
    subscribers: HashMap<u64, Subscriber>,
    timers: HashMap<u64, Timer>,
    next: u64,
    /// Wakes the thread; absent while no thread runs.
    wake: Option<Arc<Waker>>,
}

/// A forked child has its own state and, if necessary, its own thread.
static STATE: PerProcess<Mutex<WatchState>> = PerProcess::new(|| Mutex::new(WatchState::default()));

fn state() -> MutexGuard<'static, WatchState> {
    // Callbacks run outside this lock, and no code under it panics half-way.
    lock(STATE.get())
}

/// A registered callback or timer; dropping this value ends its calls.
///
/// Dropping never waits: a call that has started may still be running, or about to start on the
/// watcher's thread, when the drop returns. Dropping is therefore safe under any lock, including
/// the interpreter's, and from inside the call itself.
#[must_use = "dropping it ends the watch"]
#[derive(Debug)]
pub struct Subscription {
    id: u64,
    generation: u64,
}

impl Drop for Subscription {
    fn drop(&mut self) {
        // A forked child drops its copy of the parent's subscription, which its own state does not
        // know.
        if self.generation != generation() {
            return;
        }
        let mut state = state();
        // The callback may own anything, so it is dropped after the lock is released.
        let removed = (state.subscribers.remove(&self.id), state.timers.remove(&self.id));
        notify(&state);
        drop(state);
        drop(removed);
    }
}

fn notify(state: &WatchState) {
    if let Some(wake) = &state.wake {
        wake.notify();
    }
}

/// Calls `on_exit` once for each of `members` (by rank) whose process ends or has ended, with
/// `"killed by signal 9 (SIGKILL)"`, `"exited with code 3"` or `"gone"`. Ranks of this process are
/// not watched. The callback runs on the watcher's thread and must not block, because it delays the
/// callbacks of other groups.
///
/// # Errors
/// `Config` if the system refuses to start the thread.
pub fn watch(members: &[MemberProcess], on_exit: OnExit) -> Result<Subscription> {
    let targets: Vec<WatchedProcess> = (0..)
        .map(Rank)
        .zip(members)
        .filter_map(|(rank, member)| {
            let process = ProcessId { pid: member.pid, start_time: member.start_time };
            Some(WatchedProcess { rank, process, pidfd: Arc::clone(member.pidfd.as_ref()?) })
        })
        .collect();
    subscribe(|state, id| {
        if !targets.is_empty() {
            state.subscribers.insert(id, Subscriber { targets, on_exit });
        }
    })
}

/// Calls `call` once after `delay`, on the thread of `watch`'s callbacks and under their rules.
///
/// # Errors
/// `Config` if the system refuses to start the thread.
pub fn after(delay: Duration, call: impl FnOnce() + Send + 'static) -> Result<Subscription> {
    let timer = Timer { due: Instant::now() + delay, call: Box::new(call) };
    subscribe(|state, id| drop(state.timers.insert(id, timer)))
}

fn subscribe(add: impl FnOnce(&mut WatchState, u64)) -> Result<Subscription> {
    let mut state = state();
    let id = state.next;
    state.next += 1;
    add(&mut state, id);
    if state.wake.is_none() && !state.is_idle() {
        match start() {
            Ok(wake) => state.wake = Some(wake),
            Err(error) => {
                let added = (state.subscribers.remove(&id), state.timers.remove(&id));
                drop(state);
                drop(added);
                return Err(error);
            }
        }
    }
    notify(&state);
    Ok(Subscription { id, generation: generation() })
}

fn start() -> Result<Arc<Waker>> {
    let wake = Arc::new(Waker::new()?);
    process::report_suspects_to(&wake);
    let mine = Arc::clone(&wake);
    thread::spawn("symm-exit-watch", Some(256 << 10), move || run(&mine))?;
    Ok(wake)
}

impl WatchState {
    fn is_idle(&self) -> bool {
        self.subscribers.is_empty() && self.timers.is_empty()
    }

    /// Removes and returns the timers that are due.
    fn due(&mut self) -> Vec<Timer> {
        let now = Instant::now();
        self.timers.extract_if(|_, timer| timer.due <= now).map(|(_, timer)| timer).collect()
    }
}

/// Returns the pidfds of the watched processes that are reported as suspects and are exiting.
fn ending(state: &WatchState) -> Vec<Arc<OwnedFd>> {
    let suspects = process::suspects();
    let targets = state.subscribers.values().flat_map(|subscriber| &subscriber.targets);
    let suspected = targets.filter(|target| {
        suspects.contains(&target.process.pid) && process::is_ending(target.process)
    });
    suspected.map(|target| Arc::clone(&target.pidfd)).collect()
}

/// Runs the watcher's thread, which ends once no subscriber and no timer is left.
fn run(wake: &Waker) {
    loop {
        let due = state().due();
        for timer in due {
            guarded("a callback after some time", timer.call);
        }
        let (pidfds, next) = {
            let mut state = state();
            if state.is_idle() {
                // `wake` is cleared under the lock of the check, so that the next subscriber sees
                // that it must start another thread.
                state.wake = None;
                return;
            }
            (watched(&state), state.timers.values().map(|timer| timer.due).min())
        };
        let mut ended = wait(wake, &pidfds, next);
        ended.extend(ending(&state()));
        if ended.is_empty() {
            continue;
        }
        let mut news = Vec::new();
        for subscriber in state().subscribers.values_mut() {
            let (gone, left) = std::mem::take(&mut subscriber.targets)
                .into_iter()
                .partition(|target| ended.iter().any(|pidfd| Arc::ptr_eq(pidfd, &target.pidfd)));
            subscriber.targets = left;
            let gone: Vec<WatchedProcess> = gone;
            news.extend(gone.into_iter().map(|target| (target, Arc::clone(&subscriber.on_exit))));
        }
        for (target, on_exit) in news {
            let cause = process::exit_cause(target.process, &target.pidfd);
            guarded("a callback on the end of a rank", || on_exit(target.rank, cause));
        }
    }
}

fn guarded(what: &str, call: impl FnOnce()) {
    if std::panic::catch_unwind(std::panic::AssertUnwindSafe(call)).is_err() {
        log::error!("{what} panicked");
    }
}

/// Returns the watched pidfds, each once.
fn watched(state: &WatchState) -> Vec<Arc<OwnedFd>> {
    let mut pidfds: HashMap<*const OwnedFd, &Arc<OwnedFd>> = HashMap::new();
    for target in state.subscribers.values().flat_map(|subscriber| &subscriber.targets) {
        pidfds.insert(Arc::as_ptr(&target.pidfd), &target.pidfd);
    }
    pidfds.into_values().cloned().collect()
}

/// Sleeps until the subscriptions change, a process ends or a timer is due; returns the pidfds of
/// the processes that have ended.
fn wait(wake: &Waker, pidfds: &[Arc<OwnedFd>], next: Option<Instant>) -> Vec<Arc<OwnedFd>> {
    let mut fds: Vec<PollFd<'_>> = std::iter::once(wake.as_fd())
        .chain(pidfds.iter().map(|pidfd| pidfd.as_fd()))
        .map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN))
        .collect();
    let left = next.map(|due| due.saturating_duration_since(Instant::now()));
    let left = left.and_then(|left| Timespec::try_from(left).ok());
    match poll(&mut fds, left.as_ref()) {
        Ok(_) => {}
        Err(Errno::INTR) => return Vec::new(),
        Err(errno) => {
            // Out of kernel memory, or RLIMIT_NOFILE was lowered below the number of open
            // descriptors: retry, without spinning.
            static LINES: RateLimit = RateLimit::new();
            LINES.warn(format_args!("the watcher cannot poll {} processes: {errno}", pidfds.len()));
            std::thread::sleep(Duration::from_millis(10));
            return Vec::new();
        }
    }
    wake.reset();
    let processes = fds.iter().skip(1).zip(pidfds);
    processes
        .filter(|(fd, _)| !fd.revents().is_empty())
        .map(|(_, pidfd)| Arc::clone(pidfd))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::fork::tests::{forked, status_of};
    use std::process::{Child, Command};
    use std::sync::mpsc::{Receiver, channel};

    fn member_of(pid: u32) -> MemberProcess {
        let id = process::tests::identity(pid);
        let pidfd = process::open(id).expect("opens");
        MemberProcess { pid, start_time: id.start_time, pidfd }
    }

    fn sleeper() -> (Child, MemberProcess) {
        let child = Command::new("sleep").arg("60").spawn().expect("sleep runs");
        let member = member_of(child.id());
        (child, member)
    }

    fn watching(members: &[MemberProcess]) -> (Subscription, Receiver<(Rank, String)>) {
        let (sender, receiver) = channel();
        let on_exit: OnExit = Arc::new(move |rank, how| {
            let _ = sender.send((rank, how));
        });
        (watch(members, on_exit).expect("starts"), receiver)
    }

    fn myself() -> MemberProcess {
        let own = process::own().expect("known");
        MemberProcess { pid: own.pid, start_time: own.start_time, pidfd: None }
    }

    #[test]
    fn each_subscriber_hears_of_each_rank_once() {
        let (mut first, member) = sleeper();
        let (mut second, other) = sleeper();
        let (_a, received_by_a) = watching(&[myself(), member.clone(), other.clone()]);
        let (_b, received_by_b) = watching(&[member.clone(), member]);
        let (c, received_by_c) = watching(&[other]);
        drop(c);
        first.kill().expect("killed");
        let second_look = Duration::from_secs(2);
        let how = "killed by signal 9 (SIGKILL)".to_owned();
        assert_eq!(received_by_a.recv_timeout(second_look), Ok((Rank(1), how.clone())));
        assert_eq!(received_by_b.recv_timeout(second_look), Ok((Rank(0), how.clone())));
        assert_eq!(received_by_b.recv_timeout(second_look), Ok((Rank(1), how.clone())));
        second.kill().expect("killed");
        assert_eq!(received_by_a.recv_timeout(second_look), Ok((Rank(2), how)));
        assert!(received_by_b.recv_timeout(Duration::from_millis(50)).is_err());
        assert!(received_by_c.try_recv().is_err());
        first.wait().expect("reaped");
        second.wait().expect("reaped");
    }

    // proves P3
    #[test]
    fn an_exit_code_is_told_where_the_kernel_knows_it() {
        let mut child = Command::new("sh")
            .args(["-c", "read x; exit 3"])
            .stdin(std::process::Stdio::piped())
            .spawn()
            .expect("sh runs");
        let member = member_of(child.id());
        let (_watch, received) = watching(&[member]);
        drop(child.stdin.take());
        let (rank, how) = received.recv_timeout(Duration::from_secs(5)).expect("received");
        assert_eq!((rank, how.as_str()), (Rank(0), "exited with code 3"));
        child.wait().expect("reaped");
    }

    #[test]
    fn a_callback_may_drop_its_own_subscription() {
        let (mut child, member) = sleeper();
        let own: Arc<Mutex<Option<Subscription>>> = Arc::default();
        let (sender, receiver) = channel();
        let kept = Arc::clone(&own);
        let on_exit: OnExit = Arc::new(move |_, _| {
            drop(kept.lock().expect("not poisoned").take());
            let _ = sender.send(());
        });
        let subscription = watch(&[member], on_exit).expect("starts");
        *own.lock().expect("not poisoned") = Some(subscription);
        child.kill().expect("killed");
        assert_eq!(receiver.recv_timeout(Duration::from_secs(2)), Ok(()));
        child.wait().expect("reaped");
    }

    #[test]
    fn timers_go_off_in_their_order_unless_dropped() {
        let (sender, received) = channel();
        let timer = |delay: u64, name: &'static str| {
            let sender = sender.clone();
            after(Duration::from_millis(delay), move || sender.send(name).unwrap_or_default())
                .expect("starts")
        };
        let begun = Instant::now();
        let (_late, _early, dropped) =
            (timer(150, "late"), timer(30, "early"), timer(60, "dropped"));
        drop(dropped);
        let patience = Duration::from_secs(5);
        assert_eq!(received.recv_timeout(patience), Ok("early"));
        assert!(begun.elapsed() >= Duration::from_millis(30));
        assert_eq!(received.recv_timeout(patience), Ok("late"));
        assert!(begun.elapsed() >= Duration::from_millis(150));
        let again = sender.clone();
        let _chain = after(Duration::ZERO, move || {
            let second =
                after(Duration::ZERO, move || again.send("from the callback").unwrap_or_default())
                    .expect("starts");
            std::mem::forget(second);
        });
        assert_eq!(received.recv_timeout(patience), Ok("from the callback"));
        assert!(received.try_recv().is_err(), "what was dropped never came");
    }

    // proves P14
    #[test]
    fn a_forked_child_watches_anew_and_leaves_the_parent_alone() {
        let (mut sleeper, member) = sleeper();
        let (subscription, received) = watching(std::slice::from_ref(&member));
        let mut subscription = Some(subscription);
        let child = forked(|| {
            // This drops the child's copy; the parent's copy stays.
            drop(subscription.take());
            let (_watch, news) = watching(std::slice::from_ref(&member));
            news.recv_timeout(Duration::from_secs(5)).is_ok()
        });
        std::thread::sleep(Duration::from_millis(50));
        sleeper.kill().expect("killed");
        assert_eq!(status_of(child), 0);
        assert!(received.recv_timeout(Duration::from_secs(2)).is_ok());
        drop(subscription);
        sleeper.wait().expect("reaped");
    }
}
