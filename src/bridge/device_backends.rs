//! Backends of torch between GPUs of different hosts.
#![allow(unsafe_code, reason = "addresses and objects that C++ hands over")]

use super::ffi::{self, DeviceBackendsHandle};
use super::rail::{milliseconds, outcome};
use crate::error::{Error, Result};
use crate::hosts::cuda::backends::{Backends, Transfer, Which};
use crate::mem::span::Span;
use std::time::Duration;

/// `c10d::Backend`s on one GPU, whose they are, and memory of torch's allocator.
pub(super) struct DeviceBackends(cxx::UniquePtr<DeviceBackendsHandle>, String);

// SAFETY: a c10d::Backend may be used from any thread; DeviceBackendsHandle keeps nothing that belongs to one.
unsafe impl Send for DeviceBackends {}
// SAFETY: DeviceBackendsHandle locks what `abort` and `close` share with the others, of which there is one caller at a time.
unsafe impl Sync for DeviceBackends {}

impl DeviceBackends {
    pub(super) fn new(backends: cxx::UniquePtr<DeviceBackendsHandle>, engine: &str) -> Self {
        Self(backends, engine.into())
    }

    fn handle(&self) -> Result<&DeviceBackendsHandle> {
        self.0.as_ref().ok_or_else(|| Error::internal("there are no backends"))
    }
}

fn spans(spans: &[Span]) -> Vec<ffi::Span> {
    spans.iter().map(|span| ffi::Span { addr: span.addr, bytes: span.bytes }).collect()
}

impl Backends for DeviceBackends {
    fn make(&self, which: Which, name: &str, rank: usize, size: usize, device: i32, timeout: Duration) -> Result<()> {
        outcome(self.handle()?.make(which.code(), &self.1, name, [rank, size], device, milliseconds(timeout)))
    }

    fn memory(&self, device: i32, bytes: usize) -> Result<usize> {
        let mut address = 0;
        outcome(self.handle()?.memory(device, bytes, &mut address)).map(|()| address)
    }

    fn finish(&self) -> Result<()> {
        outcome(self.handle()?.follow(true))
    }

    fn start(&self, device: i32, transfer: &Transfer, beside: bool) -> Result<()> {
        let backends = self.handle()?;
        outcome(match transfer {
            Transfer::AllGather { from, to } => backends.all_gather(device, from.addr, from.bytes, *to, beside),
            Transfer::AllToAll { from, sent, to, received } => backends.all_to_all(device, [*from, *to], sent, received, beside),
            Transfer::Broadcast { root, at } => backends.broadcast(device, *root, at.addr, at.bytes, beside),
        })
    }

    fn follow(&self) -> Result<()> {
        outcome(self.handle()?.follow(false))
    }

    fn exchange(&self, which: Which, device: i32, give: &[Span], take: &[Span]) -> Result<()> {
        outcome(self.handle()?.exchange(which.code(), device, &spans(give), &spans(take)))
    }

    fn abort(&self, which: Which) {
        if let Ok(handle) = self.handle() {
            handle.abort(which.code());
        }
    }

    fn close(&self) {
        if let Ok(handle) = self.handle() {
            handle.close();
        }
    }
}
