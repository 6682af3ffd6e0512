//! A backend of CPU tensors as a rail.

use super::ffi::{Manner, PendingHandle, Seat, TransportHandle};
use super::{Buffer, GivenUp, HOST, Maker, begun, connected, ended, milliseconds, span};
use crate::error::{Error, Result};
use crate::hosts::rail::{self, Rail};
use crate::lock::lock;
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

    fn start(&self, transfer: &rail::Transfer<'_>, timeout: Duration) -> Result<()> {
        let mut state = lock(&self.state);
        let (transport, manner) = (connected(&state.transport)?, Manner { timeout_ms: milliseconds(timeout), beside: true, device: HOST });
        let Buffer { handle, address, .. } = state.staging.as_ref().ok_or_else(|| Error::internal("there is no staging"))?;
        let at = |offset: usize, bytes: usize| span(address + offset, bytes);
        let started = match *transfer {
            rail::Transfer::AllGather { from, each, to } => {
                transport.all_gather(&at(from, each), &at(to, state.hosts * each), handle, &manner)
            }
            rail::Transfer::AllToAll { from, sent, to, received } => {
                transport.all_to_all(address + from, sent, address + to, received, handle, &manner)
            }
            rail::Transfer::Broadcast { root, at: place, bytes } => transport.broadcast(root, &at(place, bytes), handle, &manner),
        };
        let work = begun(started)?;
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
