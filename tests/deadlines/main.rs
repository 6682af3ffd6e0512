//! Upper limits on times: how soon calls end and deaths are heard of. A program of its own, one test at a time, so that no test slows it.
#![allow(missing_docs, clippy::unwrap_used, clippy::print_stdout, clippy::print_stderr)]

#[path = "../process/mod.rs"]
mod process;
#[path = "../ranks/threads.rs"]
mod threads;

mod calls;
mod killed;

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Held by the test that runs: ranks need cores.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}
