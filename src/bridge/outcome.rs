//! Outcomes on their way between the two languages: no panic and no exception crosses.

use super::ffi;
use crate::completion::Done;
use crate::error::{Error, Result};
use crate::rank::Rank;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

/// Runs `body`; a panic becomes an internal error.
pub(super) fn guarded(body: impl FnOnce() -> Result<()>) -> ffi::Status {
    let outcome = catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|panic| Err(Error::panicked("this process", &*panic)));
    status(outcome)
}

/// Runs `body` with `done`; if it fails, `done` hears of it here and the ticket is 0, which is always complete.
pub(super) fn started(body: impl FnOnce(Done) -> Result<u64>, done: Done) -> u64 {
    let failed = done.clone();
    let outcome = catch_unwind(AssertUnwindSafe(|| body(done))).unwrap_or_else(|panic| Err(Error::panicked("this process", &*panic)));
    outcome.unwrap_or_else(|error| {
        failed.call(Err(error), None);
        0
    })
}

pub(super) fn status(outcome: Result<()>) -> ffi::Status {
    match outcome {
        Ok(()) => ffi::Status { kind: 0, message: String::new() },
        Err(error) => ffi::Status { kind: error.kind as u8, message: error.message },
    }
}

pub(super) fn milliseconds(value: i64) -> Option<Duration> {
    u64::try_from(value).ok().filter(|&ms| ms > 0).map(Duration::from_millis)
}

/// A completion of the C++ side, callable once from any thread.
pub(super) fn completion(done: cxx::UniquePtr<ffi::Completion>) -> Done {
    struct Callback(cxx::UniquePtr<ffi::Completion>);
    // SAFETY: `Completion::complete` may be called on any thread, as bridge.rs demands of its implementation.
    unsafe impl Send for Callback {}
    let callback = Callback(done);
    Done::new(move |outcome, source: Option<Rank>| {
        let Callback(done) = &callback;
        if let Some(done) = done.as_ref() {
            done.complete(&status(outcome), source.map_or(-1, |rank| rank.0 as i32));
        }
    })
}
