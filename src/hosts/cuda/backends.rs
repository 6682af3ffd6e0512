//! Backends of torch, such as NCCL, between GPUs of different hosts, and memory of torch's.

use crate::coll::two_level::step::Transfer;
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
    /// Those of one local index on all hosts.
    Rail,
    /// All of the group.
    All,
    /// This one and another, the lower rank first.
    Pair(Rank),
}

impl Which {
    /// Number of the backend among this rank's.
    pub fn code(self) -> u32 {
        match self {
            Which::Rail => 0,
            Which::All => 1,
            Which::Pair(peer) => 2 + peer.0,
        }
    }
}

/// Backends of one rank, and memory. Everything is enqueued on the calling thread's stream of the device, which records a graph or not;
/// nothing waits for a GPU. One thread at a time calls all but `abort` and `close`.
pub trait Backends: Send + Sync {
    /// Connects this rank, number `rank` of `size`, with the others of `which` once they call it with this `name`.
    fn make(&self, which: Which, name: &str, rank: usize, size: usize, device: i32, timeout: Duration) -> Result<()>;

    /// Address of `bytes` bytes of the device, aligned to 256, for what is enqueued until `finish`.
    fn memory(&self, device: i32, bytes: usize) -> Result<usize>;

    /// Makes the stream wait for all that goes beside it, and gives back all memory, which what was enqueued may still use.
    fn finish(&self) -> Result<()>;

    /// Enqueues a transfer of the GPU's memory on the rail: in the stream's order, or behind what the stream holds now and `beside` what follows.
    fn start(&self, device: i32, transfer: &Transfer<Span>, beside: bool) -> Result<()>;

    /// Makes the stream wait for the oldest transfer beside it.
    fn follow(&self) -> Result<()>;

    /// Enqueues messages beside the stream: `give[r]` to rank `r` of `which` and `take[r]` from it, where they are not empty.
    fn exchange(&self, which: Which, device: i32, give: &[Span], take: &[Span]) -> Result<()>;

    /// Ends what is under way in `which`, with an error or none; nothing may be enqueued any more, anywhere. May wait for the device, and so
    /// for what is under way elsewhere.
    fn abort(&self, which: Which);

    /// Lets go of the backends, which have ended.
    fn close(&self);
}

/// Backends, and which of them have been made.
pub(super) struct Connections {
    pub(super) backends: Arc<dyn Backends>,
    made: Mutex<Vec<Which>>,
}

impl Connections {
    pub(super) fn new(backends: Arc<dyn Backends>) -> Self {
        Self { backends, made: Mutex::default() }
    }

    /// Whether `which` has been made, or is being made.
    pub(super) fn has(&self, which: Which) -> bool {
        lock(&self.made).contains(&which)
    }

    /// Makes `which`, unless it is there; the arguments are those of [`Backends::make`].
    pub(super) fn make(&self, which: Which, name: &str, rank: usize, size: usize, device: i32, timeout: Duration) -> Result<()> {
        if self.has(which) {
            return Ok(());
        }
        lock(&self.made).push(which);
        self.backends.make(which, name, rank, size, device, timeout)
    }

    /// Aborts all, at once: one that gives its memory back waits for kernels of the others.
    pub(super) fn abort(&self) {
        for which in lock(&self.made).iter().copied() {
            let backends = Arc::clone(&self.backends);
            aside("symm-nccl-abort", Duration::ZERO, move || backends.abort(which));
        }
    }
}
