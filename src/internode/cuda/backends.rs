//! Torch's backends, such as NCCL, between GPUs of different nodes, and memory that torch
//! allocates.

use crate::coll::two_level::step::RailOp;
use crate::error::{Error, Result};
use crate::internode::rail;
use crate::lock::lock;
use crate::mem::span::Span;
use crate::rank::Rank;
use crate::sys::thread::aside;
use crate::transport::{Buffer, GivenUp, Manner, Seat, Transport, Transports, Work};
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// The ranks that a backend connects.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum BackendScope {
    /// The ranks with the same local rank on all nodes.
    Rail,
    /// All ranks of the group.
    All,
    /// This rank and another, the lower rank first.
    Pair(Rank),
}

/// The backends of one rank, and device memory. Everything is enqueued on the calling thread's
/// stream of the device, which may be recording a graph; nothing waits for a GPU. Only one thread
/// at a time calls functions other than `abort` and `close`.
pub(super) struct Connections {
    transports: Arc<dyn Transports>,
    aborted: GivenUp,
    /// The backends that have been created; `None` for one that is being created.
    made: Mutex<BTreeMap<BackendScope, Option<Arc<dyn Transport>>>>,
    enqueued: Mutex<Enqueued>,
}

/// The concurrent transfers for which the stream does not wait yet, the oldest first, and the
/// memory for enqueued work.
#[derive(Default)]
struct Enqueued {
    overlapping: VecDeque<Work>,
    memory: Vec<Buffer>,
}

impl Connections {
    pub(super) fn new(transports: Arc<dyn Transports>) -> Self {
        Self {
            transports,
            aborted: GivenUp::default(),
            made: Mutex::default(),
            enqueued: Mutex::default(),
        }
    }

    /// Returns true if the backend of `scope` has been created or is being created.
    pub(super) fn has(&self, scope: BackendScope) -> bool {
        lock(&self.made).contains_key(&scope)
    }

    fn made(&self, scope: BackendScope) -> Result<Arc<dyn Transport>> {
        let made = lock(&self.made);
        if self.aborted.is_set() {
            return Err(Error::peer("the connection has been aborted"));
        }
        made.get(&scope).cloned().flatten().ok_or_else(|| Error::peer("there is no connection"))
    }

    /// Creates the backend of `scope`, unless it exists: connects this rank with the other ranks of
    /// `scope`, once they call this function with this `name`.
    pub(super) fn make(
        &self,
        scope: BackendScope,
        name: &str,
        seat: &Seat,
        timeout: Duration,
    ) -> Result<()> {
        if self.has(scope) {
            return Ok(());
        }
        lock(&self.made).insert(scope, None);
        let transport = self.transports.connect(name, seat, timeout, false, &self.aborted)?;
        lock(&self.made).insert(scope, Some(transport));
        let transport = self.made(scope)?;
        // The first collective connects the backend, which must not happen within a graph.
        let [one, all] = [1, seat.size].map(|bytes| self.transports.allocate(seat.device, bytes));
        transport.all_gather(one?.first(1), all?.first(seat.size), Manner::default())?.follow()
    }

    /// Returns the address of `bytes` bytes of device memory, for work that is enqueued before
    /// `finish` is called.
    pub(super) fn memory(&self, device: i32, bytes: usize) -> Result<usize> {
        let buffer = self.transports.allocate(device, bytes)?;
        let address = buffer.address;
        lock(&self.enqueued).memory.push(buffer);
        Ok(address)
    }

    /// Makes the stream wait for all concurrent transfers, and frees all memory; enqueued work may
    /// still use that memory.
    pub(super) fn finish(&self) -> Result<()> {
        let Enqueued { overlapping, memory } = std::mem::take(&mut *lock(&self.enqueued));
        let followed = overlapping.iter().try_for_each(|work| work.follow());
        // The memory is freed after the waits were enqueued, because enqueued work uses it until
        // then.
        drop(memory);
        followed
    }

    /// Enqueues a transfer of GPU memory on the rail: in stream order, or, with `overlap`, after
    /// the work that is on the stream now and concurrently with later work.
    pub(super) fn start(&self, transfer: &RailOp<Span>, overlap: bool) -> Result<()> {
        let work = rail::start(
            &*self.made(BackendScope::Rail)?,
            transfer,
            Manner { overlap, ..Manner::default() },
        )?;
        if overlap {
            lock(&self.enqueued).overlapping.push_back(work);
            return Ok(());
        }
        work.follow()
    }

    /// Makes the stream wait for the oldest concurrent transfer.
    pub(super) fn follow(&self) -> Result<()> {
        let oldest = lock(&self.enqueued).overlapping.pop_front();
        oldest.map_or(Ok(()), |work| work.follow())
    }

    /// Enqueues messages concurrently with the stream: sends `give[r]` to rank `r` of `scope`, and
    /// receives `take[r]` from it, unless they are empty.
    pub(super) fn exchange(&self, scope: BackendScope, give: &[Span], take: &[Span]) -> Result<()> {
        let work = self.made(scope)?.exchange(give, take)?;
        lock(&self.enqueued).overlapping.push_back(work);
        Ok(())
    }

    /// Aborts all backends concurrently, because a backend that frees its memory waits for kernels
    /// of the others. Nothing can be enqueued on any of them afterwards.
    pub(super) fn abort(&self) {
        let made = lock(&self.made);
        self.aborted.set();
        for transport in made.values().flatten() {
            let transport = Arc::clone(transport);
            aside("symm-nccl-abort", Duration::ZERO, move || transport.abort());
        }
    }

    /// Shuts down the backends, unless they were aborted, and releases them. No call may be running
    /// on them.
    pub(super) fn close(&self) {
        let (made, aborted) = {
            let mut made = lock(&self.made);
            (std::mem::take(&mut *made), self.aborted.set())
        };
        made.into_values()
            .flatten()
            .filter(|_| !aborted)
            .for_each(|transport| transport.shutdown());
    }
}
