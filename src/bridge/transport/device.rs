//! Backends of one GPU, and memory of torch's allocator.

use super::ffi::{Manner, PendingHandle, Seat, TransportHandle};
use super::{Buffer, GivenUp, Maker, begun, outcome, span, start, there};
use crate::coll::two_level::step::RailOp;
use crate::error::{Error, Result};
use crate::internode::cuda::backends::{Backends, Which};
use crate::lock::lock;
use crate::mem::span::Span;
use cxx::SharedPtr;
use std::collections::{HashMap, VecDeque};
use std::sync::Mutex;
use std::time::Duration;

/// Backends of one GPU, and memory of torch's allocator.
pub(in crate::bridge) struct DeviceBackends {
    maker: Maker,
    aborted: GivenUp,
    /// By number; how many ranks each connects.
    made: Mutex<HashMap<u32, (SharedPtr<TransportHandle>, usize)>>,
    enqueued: Mutex<Enqueued>,
}

/// What the stream has not followed yet, the oldest first, and the memory for it.
#[derive(Default)]
struct Enqueued {
    beside: VecDeque<SharedPtr<PendingHandle>>,
    memory: Vec<Buffer>,
}

fn follow(work: &SharedPtr<PendingHandle>) -> Result<()> {
    outcome(there(work)?.follow())
}

impl DeviceBackends {
    pub(in crate::bridge) fn new(maker: Maker) -> Self {
        Self { maker, aborted: GivenUp::default(), made: Mutex::default(), enqueued: Mutex::default() }
    }

    fn made(&self, which: Which) -> Result<(SharedPtr<TransportHandle>, usize)> {
        let made = lock(&self.made);
        if self.aborted.is_set() {
            return Err(Error::peer("the connection has been aborted"));
        }
        made.get(&which.code()).cloned().ok_or_else(|| Error::peer("there is no connection"))
    }
}

impl Backends for DeviceBackends {
    fn make(&self, which: Which, name: &str, rank: usize, size: usize, device: i32, timeout: Duration) -> Result<()> {
        let transport = self.maker.connect(name, &Seat { rank, size, device }, timeout, &self.aborted)?;
        lock(&self.made).insert(which.code(), (transport, size));
        let (transport, size) = self.made(which)?;
        // Connects, which must not happen within a graph.
        let (one, all) = (self.maker.allocate(device, 1)?, self.maker.allocate(device, size)?);
        let manner = Manner { timeout_ms: 0, beside: false, device };
        let (from, to) = (span(one.address, 1), span(all.address, size));
        follow(&begun(there(&transport)?.all_gather(&from, &to, &SharedPtr::null(), &manner))?)
    }

    fn memory(&self, device: i32, bytes: usize) -> Result<usize> {
        let buffer = self.maker.allocate(device, bytes)?;
        let address = buffer.address;
        lock(&self.enqueued).memory.push(buffer);
        Ok(address)
    }

    fn finish(&self) -> Result<()> {
        let Enqueued { beside, memory } = std::mem::take(&mut *lock(&self.enqueued));
        let followed = beside.iter().try_for_each(follow);
        // Behind what uses it.
        drop(memory);
        followed
    }

    fn start(&self, device: i32, transfer: &RailOp<Span>, beside: bool) -> Result<()> {
        let (transport, size) = self.made(Which::Rail)?;
        let manner = Manner { timeout_ms: 0, beside, device };
        let work = start(there(&transport)?, transfer, size, &SharedPtr::null(), &manner)?;
        if beside {
            lock(&self.enqueued).beside.push_back(work);
            return Ok(());
        }
        follow(&work)
    }

    fn follow(&self) -> Result<()> {
        let oldest = lock(&self.enqueued).beside.pop_front();
        oldest.as_ref().map_or(Ok(()), follow)
    }

    fn exchange(&self, which: Which, device: i32, give: &[Span], take: &[Span]) -> Result<()> {
        let spans = |spans: &[Span]| spans.iter().map(|each| span(each.addr, each.bytes)).collect::<Vec<_>>();
        let (transport, _) = self.made(which)?;
        let work = begun(there(&transport)?.exchange(&spans(give), &spans(take), device))?;
        lock(&self.enqueued).beside.push_back(work);
        Ok(())
    }

    fn abort(&self, which: Which) {
        let backend = {
            let made = lock(&self.made);
            self.aborted.set();
            made.get(&which.code()).map(|(transport, _)| transport.clone())
        };
        if let Some(backend) = backend.as_ref().and_then(SharedPtr::as_ref) {
            backend.abort();
        }
    }

    fn close(&self) {
        let (made, aborted) = {
            let mut made = lock(&self.made);
            (std::mem::take(&mut *made), self.aborted.set())
        };
        made.values().filter(|_| !aborted).filter_map(|(transport, _)| transport.as_ref()).for_each(TransportHandle::shutdown);
    }
}
