//! A backend of CPU tensors as a rail.

use super::ffi::{Manner, PendingHandle, Seat, TransportHandle};
use super::{Buffer, GivenUp, HOST, Maker, connected, ended, milliseconds, start};
use crate::coll::two_level::step::RailOp;
use crate::error::{Error, Result};
use crate::internode::rail::Rail;
use crate::lock::lock;
use crate::mem::span::Span;
use cxx::SharedPtr;
use std::collections::VecDeque;
use std::sync::Mutex;
use std::time::Duration;

/// A backend of CPU tensors as a rail.
pub(in crate::bridge) struct BackendRail {
    maker: Maker,
    given_up: GivenUp,
    state: Mutex<RailState>,
}

#[derive(Default)]
struct RailState {
    transport: Option<SharedPtr<TransportHandle>>,
    hosts: usize,
    staging: Option<Buffer>,
    /// What is under way, the oldest first.
    works: VecDeque<SharedPtr<PendingHandle>>,
}

impl BackendRail {
    pub(in crate::bridge) fn new(maker: Maker) -> Self {
        Self { maker, given_up: GivenUp::default(), state: Mutex::default() }
    }
}

impl Rail for BackendRail {
    fn make(&self, name: &str, host: usize, hosts: usize, timeout: Duration) -> Result<()> {
        let transport = self.maker.connect(name, &Seat { rank: host, size: hosts, device: HOST }, timeout, &self.given_up)?;
        let mut state = lock(&self.state);
        (state.transport, state.hosts) = (Some(transport), hosts);
        Ok(())
    }

    fn give_up(&self) {
        self.given_up.set();
    }

    fn staging(&self, bytes: usize) -> Result<usize> {
        let mut state = lock(&self.state);
        if state.staging.as_ref().is_none_or(|staging| staging.bytes < bytes) {
            state.staging = Some(self.maker.allocate(HOST, bytes.max(4096))?);
        }
        Ok(state.staging.as_ref().map_or(0, |staging| staging.address))
    }

    fn start(&self, transfer: &RailOp<Span>, timeout: Duration) -> Result<()> {
        let mut state = lock(&self.state);
        let transport = connected(&state.transport)?;
        let Buffer { handle, address, .. } = state.staging.as_ref().ok_or_else(|| Error::internal("there is no staging"))?;
        let manner = Manner { timeout_ms: milliseconds(timeout), beside: true, device: HOST };
        let placed = transfer.map(|place| Span { addr: address + place.addr, ..*place });
        let work = start(transport, &placed, state.hosts, handle, &manner)?;
        state.works.push_back(work);
        Ok(())
    }

    fn wait(&self, limit: Duration) -> Result<bool> {
        let work = lock(&self.state).works.front().cloned().ok_or_else(|| Error::internal("no transfer is under way"))?;
        let ended = ended(&work, limit)?;
        if ended {
            lock(&self.state).works.pop_front();
        }
        Ok(ended)
    }
}
