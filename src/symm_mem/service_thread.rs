//! The lifetime of the thread that serves symmetric memory: from the first claim to it until the
//! last claim is dropped.

use crate::error::Result;
use crate::lock::lock;
use crate::sys::fork::{PerProcess, generation};
use crate::sys::thread::Waker;
use std::sync::{Arc, Mutex};

#[derive(Default)]
struct ServiceState {
    /// Number of existing claims.
    claims: usize,
    /// Wakes the thread; absent while it does not run.
    wake: Option<Arc<Waker>>,
}

/// A forked child has its own state; the parent's heaps do not work there.
static STATE: PerProcess<Mutex<ServiceState>> = PerProcess::new(Mutex::default);

/// A claim to the thread, which runs as long as a claim exists.
pub struct ServiceThread {
    generation: u64,
}

impl ServiceThread {
    /// Makes a claim; `start` starts the thread if it is not running.
    pub(super) fn new(start: impl FnOnce(Arc<Waker>) -> Result<()>) -> Result<Self> {
        let mut state = lock(STATE.get());
        if state.wake.is_none() {
            let wake = Arc::new(Waker::new()?);
            start(Arc::clone(&wake))?;
            state.wake = Some(wake);
        }
        state.claims += 1;
        Ok(Self { generation: generation() })
    }
}

impl Drop for ServiceThread {
    fn drop(&mut self) {
        if self.generation != generation() {
            return;
        }
        let mut state = lock(STATE.get());
        state.claims -= 1;
        notify(&state);
    }
}

fn notify(state: &ServiceState) {
    if let Some(wake) = &state.wake {
        wake.notify();
    }
}

/// Makes the thread check outboxes and links again, if it runs.
pub(super) fn wake() {
    notify(&lock(STATE.get()));
}

/// Returns true if no claim exists, so that the calling service thread must end. In that case it
/// first runs `last`, under the lock, so before another service thread can start.
pub(super) fn is_over(last: impl FnOnce()) -> bool {
    let mut state = lock(STATE.get());
    if state.claims > 0 {
        return false;
    }
    last();
    state.wake = None;
    true
}

#[cfg(test)]
pub(super) fn claims() -> usize {
    lock(STATE.get()).claims
}
