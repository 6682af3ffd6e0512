//! Rail: a transport between the ranks with the same local rank on all nodes.

use crate::coll::call::Span;
use crate::coll::two_level::step::RailOp;
use crate::error::{Error, Result};
use crate::lock::lock;
use crate::sys::random;
use crate::transport::{Buffer, HOST, Manner, Transport, Transports, Work};
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::fmt::Display;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// A random id that all ranks of a group share. The keys through which its backends meet contain
/// it, so no rank reads keys that an earlier group of the same name has left in the store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Life(u64);

impl Life {
    /// Number of bytes of its encoding.
    pub(super) const BYTES: usize = 8;

    /// Creates a new id, which rank 0 sends to the other ranks.
    pub(super) fn new() -> Result<Self> {
        random::bytes().map(Self::from_bytes)
    }

    pub(super) fn from_bytes(bytes: [u8; Self::BYTES]) -> Self {
        Self(u64::from_le_bytes(bytes))
    }

    /// Returns the id as a number.
    pub(super) fn id(self) -> u64 {
        self.0
    }

    pub(super) fn to_bytes(self) -> [u8; Self::BYTES] {
        self.0.to_le_bytes()
    }

    /// Returns the name, in this group, of the backend `which` of this `kind`.
    pub(super) fn name(self, kind: &str, which: impl Display) -> String {
        format!("{kind}/{:016x}/{which}", self.0)
    }
}

/// An inter-node backend for CPU tensors, and the transfers on it. Several transfers may be
/// pending; all ranks of the rail start them in the same order.
///
/// With some backends, lengths that do not match end the process, so the caller of `start` must
/// know that they match.
pub struct Rail {
    transports: Arc<dyn Transports>,
    transport: Arc<dyn Transport>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    staging: Option<Buffer>,
    /// Pending transfers, the oldest first.
    works: VecDeque<Work>,
}

impl Rail {
    /// Creates a rail on `transport`, whose staging is memory of `transports`.
    pub fn new(transports: Arc<dyn Transports>, transport: Arc<dyn Transport>) -> Self {
        Self { transports, transport, state: Mutex::default() }
    }

    /// Returns the address of the staging buffer, which has at least `bytes` bytes. If the previous
    /// buffer is shorter, a new one replaces it, and the content is lost. An abandoned transfer
    /// keeps its buffer, so that it cannot write into freed memory. Must be called while no
    /// transfer is pending.
    pub(super) fn staging(&self, bytes: usize) -> Result<usize> {
        let mut state = lock(&self.state);
        debug_assert!(state.works.is_empty(), "a transfer is pending");
        if state.staging.as_ref().is_none_or(|staging| staging.bytes < bytes) {
            state.staging = Some(self.transports.allocate(HOST, bytes.max(4096))?);
        }
        Ok(state.staging.as_ref().map_or(0, |staging| staging.address))
    }

    /// Starts `transfer` within the staging. No other pending transfer may write the same bytes.
    pub(super) fn start(&self, transfer: &RailOp<Span>, timeout: Duration) -> Result<()> {
        let mut state = lock(&self.state);
        let manner = Manner { timeout: Some(timeout), overlap: true, keep: state.staging.as_ref() };
        let work = start(&*self.transport, transfer, manner)?;
        state.works.push_back(work);
        Ok(())
    }

    /// Waits for at most `limit` for the oldest pending transfer; returns true, and removes it, if
    /// it has ended. Returns the backend's error if it has failed.
    pub(super) fn wait(&self, limit: Duration) -> Result<bool> {
        let work = lock(&self.state)
            .works
            .front()
            .cloned()
            .ok_or_else(|| Error::internal("no transfer is under way"))?;
        let ended = work.wait(limit)?;
        if ended {
            lock(&self.state).works.pop_front();
        }
        Ok(ended)
    }
}

/// Starts `transfer` on `transport`.
pub(super) fn start(
    transport: &dyn Transport,
    transfer: &RailOp<Span>,
    manner: Manner<'_>,
) -> Result<Work> {
    match transfer {
        RailOp::AllGather { from, to } => transport.all_gather(*from, *to, manner),
        RailOp::AllToAll { from, sent, to, received } => {
            transport.all_to_all(*from, sent, *to, received, manner)
        }
        RailOp::Broadcast { root, at } => transport.broadcast(*root, *at, manner),
    }
}
