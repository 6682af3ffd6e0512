//! Transports: backends of torch that connect ranks of several nodes, such as Gloo and NCCL, and
//! the memory that they use. They move bytes and do not interpret them.
//!
//! With some backends, lengths that do not match end the process, so the caller must know that they
//! match.

use crate::error::{Error, Result};
use crate::mem::span::Span;
use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Device number of the host.
pub const HOST: i32 = -1;

/// Creates transports through one of torch's backends.
pub trait Transports: Send + Sync {
    /// Connects this rank with the ranks that connect under the same `name`, within `timeout`. If
    /// `patient`, waits without a timeout for the addresses of these ranks. Fails once `given_up`
    /// is set, unless the backend is creating a connection at that moment.
    fn connect(
        &self,
        name: &str,
        seat: &Seat,
        timeout: Duration,
        patient: bool,
        given_up: &GivenUp,
    ) -> Result<Arc<dyn Transport>>;

    /// Allocates memory of a CUDA device, or of the host.
    fn allocate(&self, device: i32, bytes: usize) -> Result<Buffer>;
}

/// The place of a rank in a transport.
#[derive(Clone, Copy, Debug)]
pub struct Seat {
    /// Number of this rank in the transport.
    pub rank: usize,
    /// Number of ranks that the transport connects.
    pub size: usize,
    /// The CUDA device whose memory the transport moves, or [`HOST`].
    pub device: i32,
}

/// Memory of torch's allocators, which lives until its last owner drops it.
#[derive(Clone)]
pub struct Buffer {
    /// The owner, which keeps the memory alive.
    pub owner: Arc<dyn Any + Send + Sync>,
    /// Address of the first byte; memory of a device is aligned to 256 bytes.
    pub address: usize,
    /// Length in bytes.
    pub bytes: usize,
}

impl Buffer {
    /// Returns the first `bytes` bytes.
    pub fn first(&self, bytes: usize) -> Span {
        Span { addr: self.address, bytes }
    }

    /// Allocates a buffer in the memory of this process.
    #[cfg(test)]
    pub(crate) fn in_host_memory(bytes: usize) -> Self {
        let mut memory = vec![0xeeu8; bytes];
        Self { address: memory.as_mut_ptr().addr(), owner: Arc::new(memory), bytes }
    }
}

/// How a transfer starts.
#[derive(Clone, Copy, Default)]
pub struct Manner<'a> {
    /// Timeout of the transfer in the backend; `None`: the backend's default.
    pub timeout: Option<Duration>,
    /// True if the transfer runs after the present work of the current stream and concurrently with
    /// its later work; false if it runs in stream order.
    pub overlap: bool,
    /// The memory that the transfer uses: it lives until the transfer has ended, even if this rank
    /// abandons the transfer. `None` if the caller keeps the memory.
    pub keep: Option<&'a Buffer>,
}

/// A backend that connects several ranks. No function waits for a peer or, except `abort`, for a
/// GPU. Several transfers may be pending; all ranks start them in the same order. Bytes that one
/// rank sends to another with one tag arrive in the order in which they were sent. Transfers of
/// device memory are enqueued on the calling thread's stream, which may be recording a graph.
///
/// Only `abort` may be called concurrently with another function.
pub trait Transport: Send + Sync {
    /// Starts to gather the bytes at `from` of all ranks at `to` on every rank, in rank order.
    fn all_gather(&self, _from: Span, _to: Span, _manner: Manner<'_>) -> Result<Work> {
        Err(lacks("all_gather"))
    }

    /// Starts to send `sent[r]` bytes to each rank `r`, one behind the other in `from`, and to
    /// receive `received[r]` bytes from it, one behind the other in `to`.
    fn all_to_all(
        &self,
        _from: Span,
        _sent: &[usize],
        _to: Span,
        _received: &[usize],
        _manner: Manner<'_>,
    ) -> Result<Work> {
        Err(lacks("all_to_all"))
    }

    /// Starts to copy the bytes at `at` on `root` to `at` on all ranks.
    fn broadcast(&self, _root: usize, _at: Span, _manner: Manner<'_>) -> Result<Work> {
        Err(lacks("broadcast"))
    }

    /// Starts to send `from`, in `keep`, to rank `to`.
    fn send(&self, _to: usize, _from: Span, _tag: i32, _keep: &Buffer) -> Result<Work> {
        Err(lacks("send"))
    }

    /// Starts to receive the next bytes with `tag` from rank `from` into `to`, a part of `keep`: at
    /// most as many bytes as `to` has.
    fn recv(&self, _from: usize, _to: Span, _tag: i32, _keep: &Buffer) -> Result<Work> {
        Err(lacks("recv"))
    }

    /// Enqueues messages concurrently with the stream: sends `give[r]` to rank `r`, and receives
    /// `take[r]` from it, unless they are empty.
    fn exchange(&self, _give: &[Span], _take: &[Span]) -> Result<Work> {
        Err(lacks("exchange"))
    }

    /// Aborts all transfers, which may end with an error. May wait for the device, and so for work
    /// of other backends.
    fn abort(&self) {}

    /// Releases the backend. Its transfers must have ended.
    fn shutdown(&self) {}
}

/// A transfer that has started.
pub type Work = Arc<dyn Pending>;

/// A transfer that has started. It continues if no thread waits for it.
pub trait Pending: Send + Sync {
    /// Waits for at most `limit` for the end of the transfer; returns true if it has ended. Returns
    /// the backend's error if the transfer has failed.
    fn wait(&self, limit: Duration) -> Result<bool>;

    /// Makes the calling thread's stream wait for the end of the transfer.
    fn follow(&self) -> Result<()> {
        Err(lacks("follow"))
    }

    /// Ends the transfer; fails if the backend cannot.
    fn abort(&self) -> Result<()> {
        Err(lacks("abort"))
    }
}

fn lacks(what: &str) -> Error {
    Error::not_implemented(format!("this transport has no {what}"))
}

/// A flag that is set once this rank no longer needs a transport, so that waiting for its peers
/// ends.
#[derive(Clone, Debug, Default)]
pub struct GivenUp(Arc<AtomicBool>);

impl GivenUp {
    /// Returns true if the flag is set.
    pub fn is_set(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }

    /// Sets the flag; returns true if it was set before.
    pub fn set(&self) -> bool {
        self.0.swap(true, Ordering::AcqRel)
    }
}
