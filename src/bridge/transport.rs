//! Backends of torch between nodes, as [`Transports`].
#![allow(unsafe_code, reason = "objects that C++ hands over")]

use crate::config::InterNodeBackends;
use crate::error::{Error, ErrorKind, Result};
use crate::mem::span::Span;
use crate::sys::epoll_fds::apart_from_children;
use crate::sys::required;
use crate::transport::{Buffer, GivenUp, HOST, Manner, Pending, Seat, Transport, Transports, Work};
use cxx::SharedPtr;
use cxx::memory::SharedPtrTarget;
use ffi::{BufferHandle, PendingHandle, Started, Status, TransportHandle, TransportsHandle};
use std::sync::Arc;
use std::time::Duration;

/// See `bridge::ffi`.
#[allow(missing_docs, unreachable_pub)] // What cxx generates is public.
#[cxx::bridge(namespace = "symm")]
pub mod ffi {
    /// Position of this process in a transport, and the CUDA device whose memory the transport
    /// moves; negative: the host.
    struct Seat {
        rank: usize,
        size: usize,
        device: i32,
    }

    /// How a transfer starts.
    struct Manner {
        /// Timeout of the backend in milliseconds; 0: the backend's default.
        timeout_ms: i64,
        /// True to use the backend's own stream, so that later work on the current stream runs at
        /// the same time.
        overlap: bool,
    }

    /// A new transport, or null and the error.
    struct Connected {
        status: Status,
        transport: SharedPtr<TransportHandle>,
    }

    /// A transfer that has started, or null and the error.
    struct Started {
        status: Status,
        work: SharedPtr<PendingHandle>,
    }

    /// New memory, or null and the error.
    struct Allocated {
        status: Status,
        buffer: SharedPtr<BufferHandle>,
    }

    unsafe extern "C++" {
        include!("symm_bridge.hpp");
        include!("symm/src/bridge.rs.h");
        type Span = crate::bridge::ffi::Span;
        type Status = crate::bridge::ffi::Status;
        /// Memory of torch's allocators. A transfer keeps its memory until it ends, even if this
        /// rank has abandoned it.
        type BufferHandle;
        fn address(self: &BufferHandle) -> usize;
        /// A started transfer between nodes. Its functions do not throw.
        type PendingHandle;
        /// Blocks the host until the transfer ends. Returns kind 9 if the limit passes first; the
        /// transfer then continues. Returns the backend's error if the transfer fails.
        fn wait(self: &PendingHandle, limit_ms: i64) -> Status;
        /// Makes the calling thread's current stream wait for the end of the transfer.
        fn follow(self: &PendingHandle) -> Status;
        /// Ends the transfer, if the backend can.
        fn abort(self: &PendingHandle) -> Status;
        /// A `c10d::Backend` that connects ranks of several nodes: it moves bytes. Its functions
        /// neither throw nor wait for a peer. The bytes are in `keep`; if it is null, the caller
        /// keeps the memory until the transfer has ended.
        type TransportHandle;
        fn all_gather(
            self: &TransportHandle,
            from: &Span,
            to: &Span,
            keep: &SharedPtr<BufferHandle>,
            manner: &Manner,
        ) -> Started;
        fn all_to_all(
            self: &TransportHandle,
            from: &Span,
            sent: &[usize],
            to: &Span,
            received: &[usize],
            keep: &SharedPtr<BufferHandle>,
            manner: &Manner,
        ) -> Started;
        fn broadcast(
            self: &TransportHandle,
            root: usize,
            at: &Span,
            keep: &SharedPtr<BufferHandle>,
            manner: &Manner,
        ) -> Started;
        fn send(
            self: &TransportHandle,
            to: usize,
            from: &Span,
            tag: i32,
            keep: &SharedPtr<BufferHandle>,
        ) -> Started;
        fn recv(
            self: &TransportHandle,
            from: usize,
            to: &Span,
            tag: i32,
            keep: &SharedPtr<BufferHandle>,
        ) -> Started;
        /// Sends `give[r]` to every rank `r` and receives `take[r]` from it, unless they are empty,
        /// in one transfer.
        fn exchange(self: &TransportHandle, give: &[Span], take: &[Span]) -> Started;
        fn abort(self: &TransportHandle);
        fn shutdown(self: &TransportHandle);
        /// Creates the transports of one group.
        type TransportsHandle;
        /// Looks up the backends that `named` stands for, for CPU and for CUDA tensors.
        fn find(
            self: &TransportsHandle,
            named: &str,
            cpu: &mut String,
            cuda: &mut String,
        ) -> Status;
        /// Connects this rank with the ranks that connect under the same `name`. Stops waiting for
        /// their addresses once `given_up` is set, and after the timeout unless `patient`.
        fn connect(
            self: &TransportsHandle,
            backend: &str,
            name: &str,
            seat: &Seat,
            timeout_ms: i64,
            patient: bool,
            given_up: Box<GivenUp>,
        ) -> Connected;
        /// Allocates memory of a CUDA device, or of the host if `device` is negative.
        fn allocate(self: &TransportsHandle, device: i32, bytes: usize) -> Allocated;
    }

    extern "Rust" {
        /// A flag that is set once this rank no longer needs a transport that is being created.
        type GivenUp;
        fn is_set(self: &GivenUp) -> bool;
    }

    impl SharedPtr<TransportsHandle> {}
}

// SAFETY: the handle owns an allocation, which changes only when the handle is dropped.
unsafe impl Send for BufferHandle {}
// SAFETY: as above.
unsafe impl Sync for BufferHandle {}
// SAFETY: a c10d::Work may be used from any thread.
unsafe impl Send for PendingHandle {}
// SAFETY: a c10d::Work locks inside.
unsafe impl Sync for PendingHandle {}
// SAFETY: a c10d::Backend may be used from any thread.
unsafe impl Send for TransportHandle {}
// SAFETY: users of a `Transport` start one transfer after another; a backend accepts `abort` at any
// time.
unsafe impl Sync for TransportHandle {}
// SAFETY: the handle has a store, which may be used from any thread, and a name.
unsafe impl Send for TransportsHandle {}
// SAFETY: a c10d::Store locks inside.
unsafe impl Sync for TransportsHandle {}

fn outcome(status: Status) -> Result<()> {
    match ErrorKind::from_code(status.kind.repr) {
        None => Ok(()),
        Some(kind) => Err(Error { kind, message: status.message }),
    }
}

fn there<T: SharedPtrTarget>(pointer: &SharedPtr<T>) -> Result<&T> {
    pointer.as_ref().ok_or_else(|| Error::internal("there is no backend"))
}

fn begun(started: Started) -> Result<Work> {
    outcome(started.status).map(|()| Arc::new(started.work) as Work)
}

/// Maximum timeout of a backend. Backends add timeouts to the present time in nanoseconds, and that
/// sum overflows after some 290 years.
const MAX_TIMEOUT: Duration = Duration::from_secs(10 * 365 * 24 * 3600);

/// Returns the milliseconds of a backend's timeout. They are rounded up, so that the caller's
/// deadline passes first: its error names the missing ranks. At most [`MAX_TIMEOUT`].
fn milliseconds(time: Duration) -> i64 {
    (time.min(MAX_TIMEOUT).as_nanos().div_ceil(1_000_000) as i64).max(1)
}

fn kept(keep: Option<&Buffer>) -> Result<SharedPtr<BufferHandle>> {
    let Some(buffer) = keep else { return Ok(SharedPtr::null()) };
    buffer
        .owner
        .downcast_ref()
        .cloned()
        .ok_or_else(|| Error::internal("a buffer of other transports"))
}

fn manner(manner: Manner<'_>) -> ffi::Manner {
    ffi::Manner { timeout_ms: manner.timeout.map_or(0, milliseconds), overlap: manner.overlap }
}

/// Upper bound on the number of file descriptors that a backend opens in addition to one for each
/// rank.
const CONNECT_FDS: usize = 8;

/// Connects the ranks of one group through torch's backend with the name `backend`.
pub(super) struct TorchTransports {
    transports: SharedPtr<TransportsHandle>,
    backend: String,
}

impl TorchTransports {
    pub(super) fn new(transports: &SharedPtr<TransportsHandle>, backend: &str) -> Self {
        Self { transports: transports.clone(), backend: backend.into() }
    }
}

impl Transports for TorchTransports {
    fn connect(
        &self,
        name: &str,
        seat: &Seat,
        timeout: Duration,
        patient: bool,
        given_up: &GivenUp,
    ) -> Result<Arc<dyn Transport>> {
        let (transports, Seat { rank, size, device }) = (there(&self.transports)?, *seat);
        // Gloo ends the process if it cannot accept a connection.
        required::ensure_descriptors(CONNECT_FDS + size, &self.backend)?;
        let seat = ffi::Seat { rank, size, device };
        let connect = || {
            transports.connect(
                &self.backend,
                name,
                &seat,
                milliseconds(timeout),
                patient,
                Box::new(given_up.clone()),
            )
        };
        let connected = if device == HOST { apart_from_children(connect) } else { connect() };
        outcome(connected.status).map(|()| Arc::new(connected.transport) as Arc<dyn Transport>)
    }

    fn allocate(&self, device: i32, bytes: usize) -> Result<Buffer> {
        let allocated = there(&self.transports)?.allocate(device, bytes);
        outcome(allocated.status)?;
        let address = there(&allocated.buffer)?.address();
        Ok(Buffer { owner: Arc::new(allocated.buffer), address, bytes })
    }
}

impl Transport for SharedPtr<TransportHandle> {
    fn all_gather(&self, from: Span, to: Span, how: Manner<'_>) -> Result<Work> {
        begun(there(self)?.all_gather(&span(from), &span(to), &kept(how.keep)?, &manner(how)))
    }

    fn all_to_all(
        &self,
        from: Span,
        sent: &[usize],
        to: Span,
        received: &[usize],
        how: Manner<'_>,
    ) -> Result<Work> {
        begun(there(self)?.all_to_all(
            &span(from),
            sent,
            &span(to),
            received,
            &kept(how.keep)?,
            &manner(how),
        ))
    }

    fn broadcast(&self, root: usize, at: Span, how: Manner<'_>) -> Result<Work> {
        begun(there(self)?.broadcast(root, &span(at), &kept(how.keep)?, &manner(how)))
    }

    fn send(&self, to: usize, from: Span, tag: i32, keep: &Buffer) -> Result<Work> {
        begun(there(self)?.send(to, &span(from), tag, &kept(Some(keep))?))
    }

    fn recv(&self, from: usize, to: Span, tag: i32, keep: &Buffer) -> Result<Work> {
        begun(there(self)?.recv(from, &span(to), tag, &kept(Some(keep))?))
    }

    fn exchange(&self, give: &[Span], take: &[Span]) -> Result<Work> {
        let [give, take] =
            [give, take].map(|spans| spans.iter().copied().map(span).collect::<Vec<_>>());
        begun(there(self)?.exchange(&give, &take))
    }

    fn abort(&self) {
        self.as_ref().into_iter().for_each(TransportHandle::abort);
    }

    fn shutdown(&self) {
        self.as_ref().into_iter().for_each(TransportHandle::shutdown);
    }
}

impl Pending for SharedPtr<PendingHandle> {
    fn wait(&self, limit: Duration) -> Result<bool> {
        match outcome(there(self)?.wait(milliseconds(limit))) {
            Ok(()) => Ok(true),
            Err(error) if error.kind == ErrorKind::WaitTimeout => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn follow(&self) -> Result<()> {
        outcome(there(self)?.follow())
    }

    fn abort(&self) -> Result<()> {
        outcome(there(self)?.abort())
    }
}

fn span(span: Span) -> ffi::Span {
    ffi::Span { addr: span.addr, bytes: span.bytes }
}

/// Returns the names of the backends that `named` stands for, as torch knows them.
///
/// # Errors
/// `Value` if torch knows no such backend; the message lists those that it knows.
pub(super) fn find_backends(
    transports: &SharedPtr<TransportsHandle>,
    named: &str,
) -> Result<InterNodeBackends> {
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
        assert_eq!(
            (
                milliseconds(Duration::ZERO),
                milliseconds(Duration::from_secs(2)),
                milliseconds(Duration::MAX)
            ),
            (1, 2000, MAX_TIMEOUT.as_millis() as i64)
        );
    }
}
