//! Means for threads of our own that sleep in `poll`.
#![allow(unsafe_code, reason = "system calls that have no safe form")]

use super::required::Required;
use crate::error::Result;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;

/// Wakes a thread that polls it.
#[derive(Debug)]
pub struct Wake(OwnedFd);

impl Wake {
    /// Nobody has been woken yet.
    pub fn new() -> Result<Self> {
        let made = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        made.map(Self).map_err(|errno| Required::Wake.failed(errno))
    }

    /// Makes what they poll readable from now on.
    pub fn notify(&self) {
        // Fails only where the counter is full: then the thread is being woken already.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    /// Nor is it any more.
    pub fn reset(&self) {
        let mut counter = [0; 8];
        // Fails only where it was not set.
        let _ = rustix::io::read(&self.0, &mut counter);
    }
}

impl AsFd for Wake {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// A thread on which no handler of the program runs; `stack` bytes, or the usual.
///
/// It is born with its signals blocked, so there is no moment in which one could land there.
pub fn spawn<T: Send + 'static>(
    name: &str,
    stack: Option<usize>,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<std::thread::JoinHandle<T>> {
    let builder = std::thread::Builder::new().name(name.into());
    let builder = stack.into_iter().fold(builder, std::thread::Builder::stack_size);
    let _undisturbed = Undisturbed::new();
    builder.spawn(work).map_err(|error| Required::Thread.failed(Errno::from_io_error(&error).unwrap_or(Errno::INVAL)))
}

/// Guard of a thread: while it lives, others' signals wait for this thread, which made it; other threads may take them. For system calls
/// that begin anew when they are interrupted. Not blocked is what a thread does to itself (SIGSEGV and the like): the kernel would end the
/// process without asking the handlers that say where.
pub struct Undisturbed {
    before: libc::sigset_t,
    /// A mask belongs to a thread.
    _here: std::marker::PhantomData<*const ()>,
}

impl Undisturbed {
    /// Blocks the signals of the calling thread, except those of its own faults, from now on until the value is dropped.
    pub fn new() -> Self {
        const OWN: [i32; 7] = [libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE, libc::SIGILL, libc::SIGTRAP, libc::SIGABRT, libc::SIGSYS];
        // SAFETY: all-zero is a value of this structure of integers; `sigfillset` and the mask of before are written to values that live.
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

impl Default for Undisturbed {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for Undisturbed {
    fn drop(&mut self) {
        // SAFETY: `before` was written by `pthread_sigmask` in `new`; the null old set is allowed.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.before, std::ptr::null_mut()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn blocked() -> Vec<i32> {
        // SAFETY: the mask is written to a value that lives; the null new set is allowed.
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
        let (outer, inner) = (Undisturbed::new(), Undisturbed::new());
        drop(inner);
        assert_eq!(blocked().len(), 3, "until the first one goes");
        drop(outer);
        assert_eq!(blocked(), here);
    }
}
