//! Backends of torch as links.
#![allow(unsafe_code, reason = "objects that C++ hands over")]

use super::ffi::LinksHandle;
use super::rail::{milliseconds, outcome};
use crate::error::{Error, Kind, Result};
use crate::hosts::messages::links::{Links, Traffic};
use crate::rank::Rank;
use crate::sys::polled::apart_from_children;
use std::time::Duration;

/// One `c10d::Backend` for each peer, and whose they are.
pub(super) struct BackendLinks(cxx::UniquePtr<LinksHandle>, String);

// SAFETY: a c10d::Backend may be used from any thread; LinksHandle keeps nothing that belongs to one.
unsafe impl Send for BackendLinks {}
// SAFETY: LinksHandle locks what it keeps of a peer.
unsafe impl Sync for BackendLinks {}

impl BackendLinks {
    pub(super) fn new(backends: cxx::UniquePtr<LinksHandle>, engine: &str) -> Self {
        Self(backends, engine.into())
    }

    fn handle(&self) -> Result<&LinksHandle> {
        self.0.as_ref().ok_or_else(|| Error::internal("there are no backends"))
    }
}

impl Links for BackendLinks {
    fn make(&self, peer: Rank, name: &str, second: bool, timeout: Duration) -> Result<()> {
        let handle = self.handle()?;
        outcome(apart_from_children(|| handle.make(peer.0, &self.1, name, second, milliseconds(timeout))))
    }

    fn send(&self, peer: Rank, frame: &[u8], traffic: Traffic, payload: &[u8]) -> Result<()> {
        outcome(self.handle()?.send(peer.0, frame, traffic as i32, payload))
    }

    fn confirm(&self, peer: Rank, sends: u64) {
        if let Ok(handle) = self.handle() {
            handle.confirm(peer.0, sends);
        }
    }

    fn listen(&self, peer: Rank, traffic: Traffic, bytes: usize) -> Result<()> {
        outcome(self.handle()?.listen(peer.0, traffic as i32, bytes))
    }

    fn wait(&self, peer: Rank, traffic: Traffic) -> Result<Option<usize>> {
        let mut address = 0;
        match outcome(self.handle()?.wait(peer.0, traffic as i32, &mut address)) {
            Ok(()) => Ok(Some(address)),
            Err(error) if error.kind == Kind::Aborted => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn release(&self, peer: Rank, traffic: Traffic) {
        if let Ok(handle) = self.handle() {
            handle.release(peer.0, traffic as i32);
        }
    }

    fn close(&self, peer: Rank) {
        if let Ok(handle) = self.handle() {
            handle.close(peer.0);
        }
    }
}
