//! Torch's backends, such as NCCL, between GPUs of different nodes, and memory that torch allocates.

use crate::coll::two_level::step::RailOp;
use crate::error::Result;
use crate::lock::lock;
use crate::mem::span::Span;
use crate::rank::Rank;
use crate::sys::thread::aside;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Ranks that a backend connects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Which {
    /// The ranks with the same local rank on all nodes.
    Rail,
    /// All ranks of the group.
    All,
    /// This rank and another, the lower rank first.
    Pair(Rank),
}

impl Which {
    /// Returns the number of the backend among this rank's.
    pub fn code(self) -> u32 {
        match self {
            Which::Rail => 0,
            Which::All => 1,
            Which::Pair(peer) => 2 + peer.0,
        }
    }
}

/// The backends of one rank, and device memory. Everything is enqueued on the calling thread's stream of the device,
/// which may be recording a graph; nothing waits for a GPU. Only one thread at a time calls functions other than
/// `abort` and `close`.
pub trait Backends: Send + Sync {
    /// Connects this rank, number `rank` of `size`, with the other ranks of `which` once they call it with this `name`.
    fn make(&self, which: Which, name: &str, rank: usize, size: usize, device: i32, timeout: Duration) -> Result<()>;

    /// Returns the address of `bytes` bytes of device memory, aligned to 256, for work that is enqueued until `finish`.
    fn memory(&self, device: i32, bytes: usize) -> Result<usize>;

    /// Makes the stream wait for all concurrent transfers, and frees all memory; enqueued work may still use that
    /// memory.
    fn finish(&self) -> Result<()>;

    /// Enqueues a transfer of GPU memory on the rail: in stream order, or, with `beside`, after the work on the stream
    /// now and concurrently with later work.
    fn start(&self, device: i32, transfer: &RailOp<Span>, beside: bool) -> Result<()>;

    /// Makes the stream wait for the oldest concurrent transfer.
    fn follow(&self) -> Result<()>;

    /// Enqueues messages concurrently with the stream: sends `give[r]` to rank `r` of `which`, and receives `take[r]`
    /// from it, unless they are empty.
    fn exchange(&self, which: Which, device: i32, give: &[Span], take: &[Span]) -> Result<()>;

    /// Aborts all transfers of `which`; they may end with an error. Nothing may be enqueued on any backend afterwards.
    /// May wait for the device, and so for work of other backends.
    fn abort(&self, which: Which);

    /// Releases the backends, which have ended.
    fn close(&self);
}

/// The backends, and the ones that have been created.
pub(super) struct Connections {
    pub(super) backends: Arc<dyn Backends>,
    made: Mutex<Vec<Which>>,
}

impl Connections {
    pub(super) fn new(backends: Arc<dyn Backends>) -> Self {
        Self { backends, made: Mutex::default() }
    }

    /// Returns true if `which` has been created or is being created.
    pub(super) fn has(&self, which: Which) -> bool {
        lock(&self.made).contains(&which)
    }

    /// Creates `which`, unless it exists; the arguments are those of [`Backends::make`].
    pub(super) fn make(&self, which: Which, name: &str, rank: usize, size: usize, device: i32, timeout: Duration) -> Result<()> {
        if self.has(which) {
            return Ok(());
        }
        lock(&self.made).push(which);
        self.backends.make(which, name, rank, size, device, timeout)
    }

    /// Aborts all backends concurrently, because one that frees its memory waits for kernels of the others.
    pub(super) fn abort(&self) {
        for which in lock(&self.made).iter().copied() {
            let backends = Arc::clone(&self.backends);
            aside("symm-nccl-abort", Duration::ZERO, move || backends.abort(which));
        }
    }
}
