//! Requests of the program to stop waiting, such as Python makes after Ctrl-C.

use crate::error::{Error, Result};
use rustix::process::getpid;
use rustix::thread::gettid;
use std::cell::Cell;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// Maximum time that a call waits between two checks.
pub const SIGNAL_POLL: Duration = Duration::from_millis(100);

type Ask = Box<dyn Fn() -> bool + Send + Sync>;

static ASK: OnceLock<Ask> = OnceLock::new();

/// From now on, `ask` decides whether the calling thread must stop waiting; before this call, no
/// thread must. Only the first call counts.
pub fn ask_with(ask: impl Fn() -> bool + Send + Sync + 'static) {
    let _ = ASK.set(Box::new(ask));
}

/// Fails with `Aborted` if the calling thread must stop waiting. That happens only on a process's
/// first thread, because Python handles signals only there. Must be called without locks, because
/// `ask` may wait for Python's lock.
pub fn check() -> Result<()> {
    match ASK.get() {
        Some(ask) if gettid() == getpid() && ask() => {
            Err(Error::aborted("a signal has ended the waiting"))
        }
        Some(_) | None => Ok(()),
    }
}

thread_local! {
    /// Owner of the call that this thread runs; 0 if it runs no call.
    static RUNNING: Cell<usize> = const { Cell::new(0) };
}

/// Runs `body`, a call of `owner` that only this thread can end.
pub fn within<T>(owner: usize, body: impl FnOnce() -> T) -> T {
    let outside = RUNNING.replace(owner);
    let result = body();
    RUNNING.set(outside);
    result
}

/// Fails inside a call of `owner` that this thread runs itself: a signal handler, which runs while
/// [`check`] asks, must not wait for that call.
pub fn check_outside(owner: usize) -> Result<()> {
    if RUNNING.get() != owner {
        return Ok(());
    }
    let text = "a signal's handler cannot wait for a collective of the group whose collective it \
        interrupts; set a flag in it";
    Err(Error::config(text))
}

/// Limits how often a loop calls [`check`], however often the loop iterates.
pub struct Interrupts(Instant);

impl Interrupts {
    /// Starts a wait now.
    pub fn new() -> Self {
        Self(Instant::now() + SIGNAL_POLL)
    }

    /// Checks like [`check`], at most once per [`SIGNAL_POLL`].
    pub fn check(&mut self) -> Result<()> {
        let now = Instant::now();
        if now < self.0 {
            return Ok(());
        }
        self.0 = now + SIGNAL_POLL;
        check()
    }
}

impl Default for Interrupts {
    fn default() -> Self {
        Self::new()
    }
}
