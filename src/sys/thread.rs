//! Support for this library's own threads, which sleep in `poll`.
#![allow(unsafe_code, reason = "system calls that have no safe form")]

use super::required::Required;
use crate::error::Result;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

/// An event that wakes a thread that polls it.
#[derive(Debug)]
pub struct Waker(OwnedFd);

impl Waker {
    /// Makes an event that is not set.
    pub fn new() -> Result<Self> {
        let made = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        made.map(Self).map_err(|errno| Required::Wake.failed(errno))
    }

    /// Sets the event: the file descriptor becomes readable.
    pub fn notify(&self) {
        // Fails only if the counter is full, and then the event is set.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    /// Clears the event.
    pub fn reset(&self) {
        let mut counter = [0; 8];
        // Fails only if the event was not set.
        let _ = rustix::io::read(&self.0, &mut counter);
    }
}

impl AsFd for Waker {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Starts a thread on which no signal handler of the program runs, with `stack` bytes of stack or
/// the default.
///
/// The thread starts with its signals blocked. If it blocked them itself, a signal could arrive
/// before that.
pub fn spawn<T: Send + 'static>(
    name: &str,
    stack: Option<usize>,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<std::thread::JoinHandle<T>> {
    let builder = std::thread::Builder::new().name(name.into());
    let builder = stack.into_iter().fold(builder, std::thread::Builder::stack_size);
    let _undisturbed = BlockedSignals::new();
    builder.spawn(work).map_err(|error| {
        Required::Thread.failed(Errno::from_io_error(&error).unwrap_or(Errno::INVAL))
    })
}

/// Runs `work` on its own thread. The returned receiver gets a value when `work` ends.
pub fn start_aside(name: &str, work: impl FnOnce() + Send + 'static) -> Option<Receiver<()>> {
    let (done, ended) = channel();
    let thread = spawn(name, None, move || {
        work();
        let _ = done.send(());
    });
    thread
        .inspect_err(|error| log::warn!("a thread could not be started to end a group: {error}"))
        .ok()
        .map(|_| ended)
}

/// Runs `work` on its own thread and waits at most `limit` for its end.
pub fn aside(name: &str, limit: Duration, work: impl FnOnce() + Send + 'static) {
    let ended = start_aside(name, work);
    if let Some(ended) = ended.filter(|_| !limit.is_zero()) {
        let _ = ended.recv_timeout(limit);
    }
}

/// While this value lives, blocks the signals of the thread that made it, so that the signals wait
/// or other threads take them. For system calls that start over when they are interrupted. Signals
/// of the thread's own faults (SIGSEGV and the like) are not blocked, because the kernel would kill
/// the process without calling the handlers that report the place of the fault.
pub struct BlockedSignals {
    before: libc::sigset_t,
    /// Keeps the value on its thread, because a signal mask belongs to one thread.
    _here: std::marker::PhantomData<*const ()>,
}

impl BlockedSignals {
    /// Blocks the calling thread's signals, except those of its own faults, until the value is
    /// dropped.
    pub fn new() -> Self {
        const OWN: [i32; 7] = [
            libc::SIGSEGV,
            libc::SIGBUS,
            libc::SIGFPE,
            libc::SIGILL,
            libc::SIGTRAP,
            libc::SIGABRT,
            libc::SIGSYS,
        ];
        // SAFETY: all-zero is a value of this structure of integers; `sigfillset` and
        // `pthread_sigmask` write to live values.
        unsafe {
            let [mut all, mut before] = [std::mem::zeroed::<libc::sigset_t>(); 2];
            libc::sigfillset(&raw mut all);
            for signal in OWN {
                libc::sigdelset(&raw mut all, signal);
            }
            libc::pthread_sigmask(libc::SIG_BLOCK, &raw const all, &raw mut before);
            Self { before, _here: std::marker::PhantomData }
        }
    }
}

impl Default for BlockedSignals {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for BlockedSignals {
    fn drop(&mut self) {
        // SAFETY: `before` was written by `pthread_sigmask` in `new`; the null old set is allowed.
        unsafe {
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.before, std::ptr::null_mut())
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn blocked() -> Vec<i32> {
        // SAFETY: the mask is written to a live value; the null new set is allowed.
        let mask = unsafe {
            let mut mask = std::mem::zeroed::<libc::sigset_t>();
            libc::pthread_sigmask(libc::SIG_BLOCK, std::ptr::null(), &raw mut mask);
            mask
        };
        // SAFETY: `mask` is a set of signals, and these are signals.
        [libc::SIGINT, libc::SIGALRM, libc::SIGPROF, libc::SIGSEGV]
            .into_iter()
            .filter(|s| unsafe { libc::sigismember(&mask, *s) } == 1)
            .collect()
    }

    #[test]
    fn threads_are_born_without_signals_and_their_maker_keeps_its_own() {
        let here = blocked();
        let there = spawn("symm-test", None, blocked).expect("starts").join().expect("no panic");
        assert_eq!(there, [libc::SIGINT, libc::SIGALRM, libc::SIGPROF]);
        assert_eq!(blocked(), here);
        let (outer, inner) = (BlockedSignals::new(), BlockedSignals::new());
        drop(inner);
        assert_eq!(blocked().len(), 3, "until the first one goes");
        drop(outer);
        assert_eq!(blocked(), here);
    }
}
