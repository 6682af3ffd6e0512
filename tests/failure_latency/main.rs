//! Upper limits on times: how soon calls end and exits are noticed. A separate program that runs
//! one test at a time, so that no other test delays it.
#![allow(missing_docs, clippy::unwrap_used, clippy::print_stdout, clippy::print_stderr)]

#[path = "../ranks/threads.rs"]
mod threads;

mod calls;

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Blocks until no other test holds the guard, because the ranks of a test need the cores.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}
