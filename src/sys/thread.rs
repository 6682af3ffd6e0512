//! What the threads of our own need that sleep in `poll`.

use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::io::Result;

/// Wakes a thread that polls it.
#[derive(Debug)]
pub struct Wake(OwnedFd);

impl Wake {
    /// Nobody has been woken yet.
    pub fn new() -> Result<Self> {
        eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map(Self)
    }

    /// What to poll is readable from now on.
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

/// Signals are for the program's own threads.
pub fn block_signals() {
    // SAFETY: `set` is initialised by `sigfillset` before it is read; the null old set is allowed.
    unsafe {
        let mut set = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
        libc::sigfillset(set.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_BLOCK, set.as_ptr(), std::ptr::null_mut());
    }
}
