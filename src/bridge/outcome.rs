//! Outcomes between the two languages: neither panics nor exceptions cross the boundary.
#![allow(unsafe_code, reason = "addresses and objects that C++ hands over")]

use super::ffi;
use crate::completion::{Completion, TensorCopies};
use crate::error::{Error, ErrorKind, Result};
use crate::op::Collective;
use crate::rank::Rank;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

/// Runs `body`; a panic becomes an internal error.
pub(super) fn guarded(body: impl FnOnce() -> Result<()>) -> ffi::Status {
    let outcome = catch_unwind(AssertUnwindSafe(body))
        .unwrap_or_else(|panic| Err(Error::panicked("this process", &*panic)));
    status(outcome)
}

/// Runs `body` with `completion`. On failure, calls `completion` with the error on this thread and
/// returns ticket 0, which is always complete.
pub(super) fn started(body: impl FnOnce(Completion) -> Result<u64>, completion: Completion) -> u64 {
    let failed = completion.clone();
    let outcome = catch_unwind(AssertUnwindSafe(|| body(completion)))
        .unwrap_or_else(|panic| Err(Error::panicked("this process", &*panic)));
    outcome.unwrap_or_else(|error| {
        failed.call(Err(error), None);
        0
    })
}

pub(super) fn status(outcome: Result<()>) -> ffi::Status {
    match outcome {
        Ok(()) => ffi::Status { kind: ffi::ErrorKind::None, message: String::new() },
        Err(error) => {
            ffi::Status { kind: ffi::ErrorKind { repr: error.kind as u8 }, message: error.message }
        }
    }
}

pub(super) fn milliseconds(value: i64) -> Option<Duration> {
    u64::try_from(value).ok().filter(|&ms| ms > 0).map(Duration::from_millis)
}

struct Callback(cxx::UniquePtr<ffi::Completion>);

// SAFETY: the functions of `Completion` may be called on any thread, as bridge.rs requires of their
// implementation.
unsafe impl Send for Callback {}
// SAFETY: the call queue and the outcome's receiver call the functions one after another.
unsafe impl Sync for Callback {}

impl Callback {
    fn complete(&self, outcome: Result<()>, source: Option<Rank>) {
        if let Some(completion) = self.0.as_ref() {
            completion.complete(&status(outcome), source.map_or(-1, |rank| rank.0 as i32));
        }
    }
}

impl TensorCopies for Callback {
    fn copy_in(&self) {
        if let Some(completion) = self.0.as_ref() {
            completion.copy_in();
        }
    }

    fn write_back(&self) {
        if let Some(completion) = self.0.as_ref() {
            completion.write_back();
        }
    }

    fn later_calls(&self) -> usize {
        self.0.as_ref().map_or(0, |completion| completion.later_calls())
    }
}

/// Wraps a completion of the C++ side, which is called once from any thread.
pub(super) fn from_cpp(completion: cxx::UniquePtr<ffi::Completion>) -> Completion {
    let callback = Callback(completion);
    Completion::new(move |outcome, source| callback.complete(outcome, source))
}

/// Wraps the completion of a queued call, which makes the call's copies in its turn.
pub(super) fn from_cpp_in_turn(completion: cxx::UniquePtr<ffi::Completion>) -> Completion {
    if completion.as_ref().is_none_or(|completion| !completion.copies()) {
        return from_cpp(completion);
    }
    let callback = Arc::new(Callback(completion));
    let copies = Arc::clone(&callback);
    Completion::new(move |outcome, source| callback.complete(outcome, source)).copying(copies)
}

/// Checks at compile time that the enum `$own` and its shared enum of the bridge have the same
/// codes.
macro_rules! same_codes {
    ($own:ty, $shared:ty: $($name:ident),* $(,)?) => {
        $(const _: () = assert!(<$shared>::$name.repr == <$own>::$name as u8);)*
        // A new variant must be added here and in the bridge.
        const _: () = assert!(<$own>::ALL.len() == [$(<$own>::$name),*].len());
    };
}
pub(super) use same_codes;

same_codes!(
    ErrorKind, ffi::ErrorKind: Peer, Timeout, Mismatch, Config, Aborted, Value, Type,
    NotImplemented, WaitTimeout, Internal, Network, QueueEmpty
);
same_codes!(
    Collective, ffi::Collective: Barrier, Broadcast, AllReduce, Reduce, AllGather, Gather, Scatter,
    ReduceScatter, AllToAll, AllReduceAddRmsNorm
);
