//! Backends of torch between nodes: as a [`rail`](mod@rail), as [`links`](mod@links), and between GPUs ([`device`](mod@device)).
#![allow(unsafe_code, reason = "addresses and objects that C++ hands over")]

pub(super) mod device;
pub(super) mod links;
pub(super) mod rail;

use crate::coll::two_level::step::RailOp;
use crate::config::InterNodeBackends;
use crate::error::{Error, ErrorKind, Result};
use crate::mem;
use crate::sys::epoll_fds::apart_from_children;
use cxx::SharedPtr;
use cxx::memory::SharedPtrTarget;
use ffi::{BufferHandle, Manner, PendingHandle, Seat, Span, Started, Status, TransportHandle, TransportsHandle};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// As `bridge::ffi`.
#[allow(missing_docs, unreachable_pub)] // What cxx generates is public.
#[cxx::bridge(namespace = "symm")]
pub mod ffi {
    /// Rank of this process among those that a transport connects, and the CUDA device whose memory it moves; negative: the host's.
    struct Seat {
        rank: usize,
        size: usize,
        device: i32,
    }

    /// How a transfer is to begin.
    struct Manner {
        /// The backend's own limit; 0: its usual one.
        timeout_ms: i64,
        /// On a stream of the backend's own, beside what the current stream gets next.
        beside: bool,
        device: i32,
    }

    /// A new transport, or null and why not.
    struct Connected {
        status: Status,
        transport: SharedPtr<TransportHandle>,
    }

    /// A transfer that has begun, or null and why not.
    struct Started {
        status: Status,
        work: SharedPtr<PendingHandle>,
    }

    /// New memory, or null and why not.
    struct Allocated {
        status: Status,
        buffer: SharedPtr<BufferHandle>,
    }

    unsafe extern "C++" {
        include!("symm_bridge.hpp");
        include!("symm/src/bridge.rs.h");
        type Span = crate::bridge::ffi::Span;
        type Status = crate::bridge::ffi::Status;
        /// Memory of torch's allocators. It stays as long as a transfer uses it, even after this rank has abandoned the transfer.
        type BufferHandle;
        fn address(self: &BufferHandle) -> usize;
        /// A transfer between nodes that has begun. None of its functions throws.
        type PendingHandle;
        /// Waits on the host for its end: kind 9 after the limit, where it goes on. The error is the backend's.
        fn wait(self: &PendingHandle, limit_ms: i64) -> Status;
        /// Makes the calling thread's current stream wait for its end.
        fn follow(self: &PendingHandle) -> Status;
        /// Ends it, if the backend can.
        fn abort(self: &PendingHandle) -> Status;
        /// A `c10d::Backend` that connects ranks of several nodes: it moves bytes. None of its functions throws, and none waits for a peer.
        /// Bytes lie in `keep`, unless that is null: then the caller keeps them until the transfer has ended.
        type TransportHandle;
        fn all_gather(self: &TransportHandle, from: &Span, to: &Span, keep: &SharedPtr<BufferHandle>, manner: &Manner) -> Started;
        fn all_to_all(
            self: &TransportHandle,
            from: usize,
            sent: &[usize],
            to: usize,
            received: &[usize],
            keep: &SharedPtr<BufferHandle>,
            manner: &Manner,
        ) -> Started;
        fn broadcast(self: &TransportHandle, root: usize, at: &Span, keep: &SharedPtr<BufferHandle>, manner: &Manner) -> Started;
        fn send(self: &TransportHandle, to: usize, from: &Span, tag: i32, keep: &SharedPtr<BufferHandle>) -> Started;
        fn recv(self: &TransportHandle, from: usize, to: &Span, tag: i32, keep: &SharedPtr<BufferHandle>) -> Started;
        /// Messages as one: `give[r]` to rank `r` and `take[r]` from it, where they are not empty.
        fn exchange(self: &TransportHandle, give: &[Span], take: &[Span], device: i32) -> Started;
        fn abort(self: &TransportHandle);
        fn shutdown(self: &TransportHandle);
        /// What makes transports of one group.
        type TransportsHandle;
        /// Names of the backends that `named` stands for, as `config::InterNodeBackends` has them.
        fn find(self: &TransportsHandle, named: &str, cpu: &mut String, cuda: &mut String) -> Status;
        /// Connects this rank with those that connect by the same name. A wait for them ends once `given_up` is set.
        fn connect(self: &TransportsHandle, engine: &str, name: &str, seat: &Seat, timeout_ms: i64, given_up: Box<GivenUp>) -> Connected;
        /// Allocates memory of a CUDA device, of the host if `device` is negative.
        fn allocate(self: &TransportsHandle, device: i32, bytes: usize) -> Allocated;
    }

    extern "Rust" {
        /// Tells a transport that is being made whether this rank still needs it.
        type GivenUp;
        fn is_set(self: &GivenUp) -> bool;
    }

    impl SharedPtr<TransportsHandle> {}
}

// SAFETY: an allocation, which only its owner's drop changes.
unsafe impl Send for BufferHandle {}
// SAFETY: as above.
unsafe impl Sync for BufferHandle {}
// SAFETY: a c10d::Work may be used from any thread.
unsafe impl Send for PendingHandle {}
// SAFETY: a c10d::Work locks inside.
unsafe impl Sync for PendingHandle {}
// SAFETY: a c10d::Backend may be used from any thread.
unsafe impl Send for TransportHandle {}
// SAFETY: each adapter below starts one transfer after another; a backend accepts `abort` at any time.
unsafe impl Sync for TransportHandle {}
// SAFETY: it has a store, which may be used from any thread, and a name.
unsafe impl Send for TransportsHandle {}
// SAFETY: a c10d::Store locks inside.
unsafe impl Sync for TransportsHandle {}

/// Device number of the host.
const HOST: i32 = -1;

/// True once this rank no longer needs a transport, so that making it ends.
#[derive(Clone, Debug, Default)]
pub struct GivenUp(Arc<AtomicBool>);

impl GivenUp {
    pub(super) fn is_set(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }

    /// Sets the flag; whether it was set before.
    fn set(&self) -> bool {
        self.0.swap(true, Ordering::AcqRel)
    }
}

fn outcome(status: Status) -> Result<()> {
    match ErrorKind::from_code(status.kind.repr) {
        None => Ok(()),
        Some(kind) => Err(Error { kind, message: status.message }),
    }
}

fn there<T: SharedPtrTarget>(pointer: &SharedPtr<T>) -> Result<&T> {
    pointer.as_ref().ok_or_else(|| Error::internal("there is no backend"))
}

fn connected(transport: &Option<SharedPtr<TransportHandle>>) -> Result<&TransportHandle> {
    transport.as_ref().and_then(SharedPtr::as_ref).ok_or_else(|| Error::peer("there is no connection"))
}

fn begun(started: Started) -> Result<SharedPtr<PendingHandle>> {
    outcome(started.status).map(|()| started.work)
}

/// Begins `transfer` on `transport`, which connects `size` ranks.
fn start(
    transport: &TransportHandle,
    transfer: &RailOp<mem::span::Span>,
    size: usize,
    keep: &SharedPtr<BufferHandle>,
    manner: &Manner,
) -> Result<SharedPtr<PendingHandle>> {
    begun(match transfer {
        RailOp::AllGather { from, to } => {
            transport.all_gather(&span(from.addr, from.bytes), &span(to.addr, size * from.bytes), keep, manner)
        }
        RailOp::AllToAll { from, sent, to, received } => transport.all_to_all(from.addr, sent, to.addr, received, keep, manner),
        RailOp::Broadcast { root, at } => transport.broadcast(*root, &span(at.addr, at.bytes), keep, manner),
    })
}

/// Whether `work` has ended, after at most `limit`.
fn ended(work: &SharedPtr<PendingHandle>, limit: Duration) -> Result<bool> {
    match outcome(there(work)?.wait(milliseconds(limit))) {
        Ok(()) => Ok(true),
        Err(error) if error.kind == ErrorKind::WaitTimeout => Ok(false),
        Err(error) => Err(error),
    }
}

/// Milliseconds for a backend: rounded up, so that its own timeout does not pass before the caller's deadline, which says who is missing.
fn milliseconds(time: Duration) -> i64 {
    i64::try_from(time.as_nanos().div_ceil(1_000_000)).unwrap_or(i64::MAX).max(1)
}

fn span(addr: usize, bytes: usize) -> Span {
    Span { addr, bytes }
}

/// Memory of torch's.
#[derive(Clone)]
struct Buffer {
    handle: SharedPtr<BufferHandle>,
    address: usize,
    bytes: usize,
}

/// What makes backends of one engine for one group.
#[derive(Clone)]
pub(super) struct Maker {
    transports: SharedPtr<TransportsHandle>,
    engine: String,
}

impl Maker {
    pub(super) fn new(transports: &SharedPtr<TransportsHandle>, engine: &str) -> Self {
        Self { transports: transports.clone(), engine: engine.into() }
    }

    fn connect(&self, name: &str, seat: &Seat, timeout: Duration, given_up: &GivenUp) -> Result<SharedPtr<TransportHandle>> {
        let transports = there(&self.transports)?;
        let connect = || transports.connect(&self.engine, name, seat, milliseconds(timeout), Box::new(given_up.clone()));
        let connected = if seat.device < 0 { apart_from_children(connect) } else { connect() };
        outcome(connected.status).map(|()| connected.transport)
    }

    fn allocate(&self, device: i32, bytes: usize) -> Result<Buffer> {
        let allocated = there(&self.transports)?.allocate(device, bytes);
        outcome(allocated.status)?;
        let address = there(&allocated.buffer)?.address();
        Ok(Buffer { handle: allocated.buffer, address, bytes })
    }
}

/// Names of the backends that `named` stands for, as torch knows them.
///
/// # Errors
/// `Value` says what there is.
pub(super) fn engines(transports: &SharedPtr<TransportsHandle>, named: &str) -> Result<InterNodeBackends> {
    let mut found = InterNodeBackends { cpu: String::new(), cuda: String::new() };
    outcome(there(transports)?.find(named, &mut found.cpu, &mut found.cuda)).map(|()| found)
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
