//! Connection of two heaps: one connects, the other accepts.

use super::address::HeapAddress;
use super::frame::HeapFrame;
use super::heap::{Heap, offer};
use super::link::{FailureCheck, HeapLink, LinkRef};
use super::remote_heap::{ProtocolResult, RemoteHeap};
use super::service;
use super::service_thread::{self, ServiceThread};
use crate::error::{Error, Result};
use crate::lock::{lock, unpoisoned};
use crate::sys::interrupt::SIGNAL_POLL;
use crate::sys::required::Required;
use crate::sys::{random, socket};
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Maximum size of a heap; a larger size in a message is an error.
const MOST_SPAN: u64 = 1 << 44;

/// Pause between two attempts to connect.
const CONNECT_RETRY: Duration = Duration::from_millis(1);

/// A link and its number, or an error, with the error of the system if a system call failed.
type ConnectResult = std::result::Result<(LinkRef, u64), (Error, Option<Errno>)>;

fn refused(step: Required) -> impl Fn(Errno) -> Error {
    move |errno| {
        let error = step.failed(errno);
        Error { message: format!("linking symmetric memory: {error}"), ..error }
    }
}

impl Heap {
    /// Keeps the process's service thread alive; without this thread, no peer can connect.
    pub fn attend(&self) -> Result<ServiceThread> {
        service::attend()
    }

    /// Returns a link to the heap at `peer` for a group that reports failures with `failed`, and
    /// its number, which the other end passes to `meet`. One of the two ends calls this. Tries
    /// until `deadline` while the peer's queue is full or its thread drops connections.
    pub fn connect(
        &self,
        peer: &HeapAddress,
        failed: &FailureCheck,
        deadline: Instant,
    ) -> Result<(LinkRef, u64)> {
        loop {
            match self.try_connect(peer, failed) {
                Err((_, Some(Errno::AGAIN | Errno::INTR | Errno::PIPE | Errno::CONNRESET)))
                    if Instant::now() < deadline && !failed() =>
                {
                    std::thread::sleep(CONNECT_RETRY);
                }
                outcome => return outcome.map_err(|(error, _)| error),
            }
        }
    }

    fn try_connect(&self, peer: &HeapAddress, failed: &FailureCheck) -> ConnectResult {
        let refused = |step: Required| move |errno| (refused(step)(errno), Some(errno));
        let plain = |error: Error| (error, None);
        let _turn = lock(&self.connecting);
        let own = self
            .state()
            .links
            .iter()
            .rfind(|link| link.key == peer.key && !link.is_closed())
            .cloned();
        if let Some(link) = own
            && let Some(hold) = link.hold(self.attend().map_err(plain)?, Arc::clone(failed))
        {
            return Ok((hold, link.number));
        }
        let socket = socket::connect_to(&peer.name()).map_err(refused(Required::Connect))?;
        let them = socket::peer(&socket).map_err(refused(Required::Identify))?;
        if !them.is_own_user() {
            return Err(plain(Error::config(format!(
                "user {} (process {}) listens where a peer's symmetric memory did",
                them.uid, them.pid
            ))));
        }
        let number = u64::from_le_bytes(random::bytes().map_err(plain)?);
        let remote = self.reserve(peer.span).map_err(plain)?;
        let hello = HeapFrame::Hello {
            to: peer.key,
            from: self.address.key,
            link: number,
            span: self.address.span,
        };
        socket::send(&socket, &hello.encode(), None).map_err(refused(Required::Send))?;
        let link = Arc::new(HeapLink::new(peer.key, number, them.pid, socket, remote));
        let hold = link
            .hold(self.attend().map_err(plain)?, Arc::clone(failed))
            .ok_or_else(|| plain(Error::internal("a new link is closed")))?;
        self.add(link);
        Ok((hold, number))
    }

    /// The other end of `connect`: returns a claim to the link with this number once it exists.
    /// Returns `None` if it does not exist by `deadline`, has closed, or the group has `failed`;
    /// returns the error that keeps the thread from accepting it. The end that made the link must
    /// then `abandon` it.
    pub fn meet(
        &self,
        peer: &HeapAddress,
        number: u64,
        failed: &FailureCheck,
        deadline: Instant,
    ) -> Result<Option<LinkRef>> {
        let attention = self.attend()?;
        // Asked without the lock, because the answer may need other locks.
        while !failed() {
            let state = self.state();
            if let Some(link) =
                state.links.iter().find(|link| link.key == peer.key && link.number == number)
            {
                let link = Arc::clone(link);
                drop(state);
                return Ok(link.hold(attention, Arc::clone(failed)));
            }
            if state.past.contains(&number) {
                return Ok(None);
            }
            let Some(left) = deadline.checked_duration_since(Instant::now()) else {
                drop(state);
                return self.accept_error().map_or(Ok(None), Err);
            };
            drop(unpoisoned(self.changed.wait_timeout(state, left.min(SIGNAL_POLL))));
        }
        Ok(None)
    }

    fn reserve(&self, span: u64) -> Result<RemoteHeap> {
        if span == 0 || span > MOST_SPAN {
            return Err(Error::config(format!(
                "a peer's symmetric memory has {span} bytes of addresses"
            )));
        }
        Ok(RemoteHeap::new(self.space.reserve(span as usize)?, span as usize))
    }

    /// Accepts a link from process `pid`, which sent `frame` as its first message.
    pub(super) fn admit(&self, pid: u32, socket: OwnedFd, frame: &[u8]) -> ProtocolResult {
        let Some(HeapFrame::Hello { to, from, link, span }) = HeapFrame::decode(frame) else {
            return Err("did not introduce itself".into());
        };
        if to != self.address.key {
            return Err("does not know this heap".into());
        }
        if self.state().links.iter().any(|other| other.number == link) {
            return Err("used a link's number again".into());
        }
        let remote = self.reserve(span).map_err(|error| format!("cannot be mapped: {error}"))?;
        self.add(Arc::new(HeapLink::new(from, link, pid, socket, remote)));
        Ok(())
    }

    fn add(&self, link: Arc<HeapLink>) {
        let mut state = self.state();
        for (offset, segment) in &state.segments {
            if let Some(piece) = &segment.piece {
                link.post(offer(segment.id, *offset, segment.bytes), Some(Arc::clone(piece)));
            }
        }
        state.links.push(link);
        drop(state);
        self.changed.notify_all();
        service_thread::wake();
    }
}
