//! Backends of torch as rails.
#![allow(unsafe_code, reason = "addresses and objects that C++ hands over")]

use super::ffi::{RailHandle, Status};
use crate::config::Engines;
use crate::error::{Error, Kind, Result};
use crate::hosts::rail::{Rail, Transfer};
use crate::sys::polled::apart_from_children;
use std::time::Duration;

/// A `c10d::Backend` between hosts, made by `make`, and whose it is.
pub(super) struct BackendRail(cxx::UniquePtr<RailHandle>, String);

// SAFETY: a c10d::Backend may be used from any thread; RailHandle keeps nothing that belongs to one.
unsafe impl Send for BackendRail {}
// SAFETY: a rail is asked for one transfer after another, by whoever runs the group's calls; between them a lock is passed on.
unsafe impl Sync for BackendRail {}

impl BackendRail {
    pub(super) fn new(backend: cxx::UniquePtr<RailHandle>, engine: &str) -> Self {
        Self(backend, engine.into())
    }

    fn handle(&self) -> Result<&RailHandle> {
        self.0.as_ref().ok_or_else(|| Error::internal("there is no backend"))
    }
}

pub(super) fn outcome(status: Status) -> Result<()> {
    match Kind::from_code(status.kind.repr) {
        None => Ok(()),
        Some(kind) => Err(Error { kind, message: status.message }),
    }
}

/// Names of the backends that `named` stands for, as torch knows them.
///
/// # Errors
/// `Value` says what there is.
pub(super) fn engines(torch: &RailHandle, named: &str) -> Result<Engines> {
    let mut found = Engines { cpu: String::new(), cuda: String::new() };
    outcome(torch.engines(named, &mut found.cpu, &mut found.cuda)).map(|()| found)
}

/// Milliseconds for a backend: rounded up, so that its own timeout does not pass before the caller's deadline, which says who is missing.
pub(super) fn milliseconds(time: Duration) -> i64 {
    i64::try_from(time.as_nanos().div_ceil(1_000_000)).unwrap_or(i64::MAX).max(1)
}

impl Rail for BackendRail {
    fn make(&self, name: &str, host: usize, hosts: usize, timeout: Duration) -> Result<()> {
        let handle = self.handle()?;
        outcome(apart_from_children(|| handle.make(&self.1, name, host, hosts, milliseconds(timeout))))
    }

    fn give_up(&self) {
        if let Ok(handle) = self.handle() {
            handle.give_up();
        }
    }

    fn staging(&self, bytes: usize) -> Result<usize> {
        let mut address = 0;
        outcome(self.handle()?.staging(bytes, &mut address)).map(|()| address)
    }

    fn start(&self, transfer: &Transfer<'_>, timeout: Duration) -> Result<()> {
        let (backend, timeout) = (self.handle()?, milliseconds(timeout));
        outcome(match *transfer {
            Transfer::AllGather { from, each, to } => backend.all_gather(from, each, to, timeout),
            Transfer::AllToAll { from, sent, to, received } => backend.all_to_all(from, sent, to, received, timeout),
            Transfer::Broadcast { root, at, bytes } => backend.broadcast(root, at, bytes, timeout),
        })
    }

    fn wait(&self, limit: Duration) -> Result<bool> {
        match outcome(self.handle()?.wait(milliseconds(limit))) {
            Ok(()) => Ok(true),
            Err(error) if error.kind == Kind::WaitTimeout => Ok(false),
            Err(error) => Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_backend_has_no_less_time_than_its_caller() {
        for nanoseconds in [0, 1, 999_999, 1_000_000, 1_000_001, 1_999_999_999] {
            let time = Duration::from_nanos(nanoseconds);
            assert!(Duration::from_millis(milliseconds(time) as u64) >= time, "{time:?}");
        }
        assert_eq!((milliseconds(Duration::ZERO), milliseconds(Duration::from_secs(2)), milliseconds(Duration::MAX)), (1, 2000, i64::MAX));
    }
}
