//! A backend for each peer, as links.
#![allow(unsafe_code, reason = "staging of backends")]

use super::ffi::{BufferHandle, PendingHandle, Seat, Span, Started, TransportHandle};
use super::{Buffer, GivenUp, HOST, Maker, begun, connected, ended, outcome, span, there};
use crate::error::{Error, Result};
use crate::lock::lock;
use crate::messages::links::{Links, Traffic};
use crate::rank::Rank;
use cxx::SharedPtr;
use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Ten years: Gloo's waits break the connection when their time passes.
const EVER: Duration = Duration::from_secs(10 * 365 * 24 * 3600);

/// Staging that a link keeps for later transfers: fresh memory has to be given, page by page, by the system.
const SPARE: usize = 16;

/// Bytes of the shortest staging that is worth keeping.
const WORTH_KEEPING: usize = 16 << 10;

/// A backend for each peer, as links.
pub(in crate::bridge) struct BackendLinks {
    maker: Maker,
    links: Mutex<HashMap<Rank, Arc<Link>>>,
    /// Peers whose queues are not empty.
    due: Mutex<BTreeSet<Rank>>,
}

#[derive(Default)]
struct Link {
    closed: GivenUp,
    state: Mutex<LinkState>,
    /// Held by the thread that passes the queue to the backend, so that the order stays.
    flushing: Mutex<()>,
}

#[derive(Default)]
struct LinkState {
    transport: Option<SharedPtr<TransportHandle>>,
    other: usize,
    /// Transfers that the backend does not have yet, the oldest first.
    queue: VecDeque<Queued>,
    /// Calls of `send` that have not been confirmed, the oldest first, and how many have been.
    sends: VecDeque<Vec<Staged>>,
    confirmed: u64,
    /// What is listened for, by class of traffic, the oldest first.
    listening: [VecDeque<Staged>; 2],
    /// What has been waited for last, until it is released.
    arrived: [Option<Buffer>; 2],
    spare: Vec<Buffer>,
}

/// A transfer that the backend does not have yet.
enum Queued {
    Send(Vec<Part>),
    Listen(Part),
}

/// Bytes of one class of traffic, at the start of their staging.
struct Part {
    traffic: Traffic,
    bytes: usize,
    staging: Buffer,
}

/// One transfer with its staging.
struct Staged {
    staging: Buffer,
    work: SharedPtr<PendingHandle>,
}

fn closed() -> Error {
    Error::peer("the connection has been closed")
}

impl BackendLinks {
    pub(in crate::bridge) fn new(maker: Maker) -> Self {
        Self { maker, links: Mutex::default(), due: Mutex::default() }
    }

    /// The link to `peer`, which may be closed before it is made.
    fn link(&self, peer: Rank) -> Arc<Link> {
        Arc::clone(lock(&self.links).entry(peer).or_default())
    }

    /// Runs `body` on the link to `peer`, unless it has been closed.
    fn on_open<T>(&self, peer: Rank, body: impl FnOnce(&mut LinkState) -> Result<T>) -> Result<T> {
        let link = self.link(peer);
        let mut state = lock(&link.state);
        if link.closed.is_set() { Err(closed()) } else { body(&mut state) }
    }

    /// Queues the transfer that `make` returns.
    fn queue(&self, peer: Rank, make: impl FnOnce(&mut LinkState) -> Result<Queued>) -> Result<()> {
        self.on_open(peer, |link| {
            let queued = make(link)?;
            link.queue.push_back(queued);
            Ok(())
        })?;
        lock(&self.due).insert(peer);
        Ok(())
    }
}

impl Link {
    /// Passes the queue to the backend. The state is not locked meanwhile, so that other threads can queue.
    fn flush(&self) -> Result<()> {
        let _order = lock(&self.flushing);
        loop {
            let mut state = lock(&self.state);
            // The thread that closed the link has reported why.
            if self.closed.is_set() {
                return Ok(());
            }
            let Some(next) = state.queue.pop_front() else { return Ok(()) };
            let (transport, other) = (state.transport.clone(), state.other);
            drop(state);
            let transport = connected(&transport)?;
            match next {
                Queued::Send(parts) => {
                    let post = |part: Part| part.start(|at, tag, keep| transport.send(other, at, tag, keep));
                    let parts = parts.into_iter().map(post).collect::<Result<_>>()?;
                    lock(&self.state).sends.push_back(parts);
                }
                Queued::Listen(part) => {
                    let traffic = part.traffic;
                    let staged = part.start(|at, tag, keep| transport.recv(other, at, tag, keep))?;
                    let mut state = lock(&self.state);
                    if self.closed.is_set() {
                        // `close` did not see this receive.
                        drop(state);
                        if !staged.abort() {
                            transport.abort();
                        }
                        return Ok(());
                    }
                    state.listening[traffic as usize].push_back(staged);
                }
            }
        }
    }
}

impl Part {
    /// Starts the transfer by `start`, which gets the bytes, the tag and the staging.
    fn start(self, start: impl FnOnce(&Span, i32, &SharedPtr<BufferHandle>) -> Started) -> Result<Staged> {
        let at = span(self.staging.address, self.bytes);
        let work = begun(start(&at, self.traffic as i32, &self.staging.handle))?;
        Ok(Staged { staging: self.staging, work })
    }
}

impl Staged {
    /// Ends a receive; returns true if the backend can.
    fn abort(&self) -> bool {
        there(&self.work).and_then(|work| outcome(work.abort())).is_ok()
    }
}

impl LinkState {
    /// Staging of `bytes` bytes.
    fn staged(&mut self, maker: &Maker, bytes: usize) -> Result<Buffer> {
        let fits = |kept: &Buffer| bytes > WORTH_KEEPING && (bytes..=4 * bytes).contains(&kept.bytes);
        match self.spare.iter().position(fits) {
            Some(kept) => Ok(self.spare.remove(kept)),
            None => maker.allocate(HOST, bytes),
        }
    }

    /// Keeps `staging`, which nothing uses any more.
    fn keep(&mut self, staging: Buffer) {
        if staging.bytes > WORTH_KEEPING && self.spare.len() < SPARE {
            self.spare.push(staging);
        }
    }

    /// Copies `parts` into staging, one behind the other.
    fn copies(&mut self, maker: &Maker, parts: [&[u8]; 2], traffic: Traffic) -> Result<Part> {
        let bytes = parts.iter().map(|part| part.len()).sum();
        let staging = self.staged(maker, bytes)?;
        let mut to = staging.address;
        for part in parts {
            // SAFETY: the staging has room for all parts, and only this call uses it.
            unsafe { std::ptr::copy_nonoverlapping(part.as_ptr(), to as *mut u8, part.len()) };
            to += part.len();
        }
        Ok(Part { traffic, bytes, staging })
    }
}

impl Links for BackendLinks {
    fn make(&self, peer: Rank, name: &str, second: bool, timeout: Duration) -> Result<()> {
        let seat = Seat { rank: usize::from(second), size: 2, device: HOST };
        let transport = self.maker.connect(name, &seat, timeout, &self.link(peer).closed)?;
        self.on_open(peer, |link| {
            (link.transport, link.other) = (Some(transport), usize::from(!second));
            Ok(())
        })
    }

    fn send(&self, peer: Rank, frame: &[u8], traffic: Traffic, payload: &[u8]) -> Result<()> {
        self.queue(peer, |link| {
            let head = match traffic {
                Traffic::Frame => return Ok(Queued::Send(vec![link.copies(&self.maker, [frame, payload], traffic)?])),
                Traffic::Piece => link.copies(&self.maker, [frame, &[]], Traffic::Frame)?,
            };
            Ok(Queued::Send(vec![head, link.copies(&self.maker, [payload, &[]], traffic)?]))
        })
    }

    fn confirm(&self, peer: Rank, sends: u64) {
        let link = self.link(peer);
        let mut state = lock(&link.state);
        while state.confirmed < sends
            && let Some(parts) = state.sends.pop_front()
        {
            parts.into_iter().for_each(|part| state.keep(part.staging));
            state.confirmed += 1;
        }
    }

    fn listen(&self, peer: Rank, traffic: Traffic, bytes: usize) -> Result<()> {
        self.queue(peer, |link| Ok(Queued::Listen(Part { traffic, bytes, staging: link.staged(&self.maker, bytes)? })))
    }

    fn flush(&self) -> Vec<(Rank, Error)> {
        let due = std::mem::take(&mut *lock(&self.due));
        let failed = |peer| self.link(peer).flush().err().map(|error| (peer, error));
        due.into_iter().filter_map(failed).collect()
    }

    fn wait(&self, peer: Rank, traffic: Traffic) -> Result<Option<usize>> {
        let link = self.link(peer);
        // Another thread may have taken this link from `due` and not have come to it yet.
        link.flush()?;
        let work = {
            let state = lock(&link.state);
            if link.closed.is_set() {
                return Ok(None);
            }
            let oldest = state.listening[traffic as usize].front().map(|staged| staged.work.clone());
            oldest.ok_or_else(|| Error::internal(format!("nothing is listened for of class {traffic:?}")))?
        };
        let ended = ended(&work, EVER);
        let mut state = lock(&link.state);
        // `close` has ended the wait, with an error or without, or has left the staging alone.
        if link.closed.is_set() || !ended? {
            return Ok(None);
        }
        let came = state.listening[traffic as usize].pop_front().map(|staged| staged.staging);
        let address = came.as_ref().map(|staging| staging.address);
        state.arrived[traffic as usize] = came;
        Ok(address)
    }

    fn release(&self, peer: Rank, traffic: Traffic) {
        let link = self.link(peer);
        let mut state = lock(&link.state);
        if let Some(staging) = state.arrived[traffic as usize].take() {
            state.keep(staging);
        }
    }

    fn close(&self, peer: Rank) {
        let link = self.link(peer);
        let (queue, sends, listening, transport) = {
            let mut state = lock(&link.state);
            link.closed.set();
            let LinkState { queue, sends, listening, .. } = &mut *state;
            (std::mem::take(queue), std::mem::take(sends), std::mem::take(listening), state.transport.take())
        };
        let failed = listening.iter().flatten().filter(|staged| !staged.abort()).count();
        if let Ok(transport) = connected(&transport)
            && failed > 0
        {
            transport.abort();
        }
        // The connection closes once a thread that waits for it has released it, too.
        drop(transport);
        drop((listening, sends, queue));
    }
}
