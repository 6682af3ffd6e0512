//! Links: transports of two ranks on different nodes.
#![allow(unsafe_code, reason = "staging of transports")]

use crate::config::Config;
use crate::error::{Error, Result};
use crate::lock::lock;
use crate::rank::Rank;
use crate::transport::{Buffer, GivenUp, HOST, Seat, Transport, Transports, Work};
use std::collections::{BTreeSet, HashMap, VecDeque};
use std::ops::Deref;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// An unlimited wait: ten years, because a wait of Gloo that times out breaks the connection.
const EVER: Duration = Duration::from_secs(10 * 365 * 24 * 3600);

/// Number of staging buffers that a link keeps for later transfers, because the system must zero
/// fresh memory page by page.
const SPARE: usize = 16;

/// Minimum size of a staging buffer that is kept.
const WORTH_KEEPING: usize = 16 << 10;

/// A class of traffic on a link. Bytes of one class are received in the order in which they were
/// sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Traffic {
    /// Frames, with the eager messages that they carry.
    Frame = 0,
    /// Chunks of long messages.
    Piece = 1,
}

/// Called with the peer, and the number of bytes sent to it and received from it.
pub type Count = Box<dyn Fn(Rank, usize, usize) + Send + Sync>;

/// Transports between this rank and one peer each, with their staging.
///
/// With some backends the process ends if more bytes arrive than a receive expects, so both ends
/// agree on the lengths. Only `make` and `wait` wait for the peer. `send` and `listen` only queue,
/// because they are called with the lock of all messages held; `flush` passes the queued transfers
/// to the transports.
pub struct Links {
    transports: Arc<dyn Transports>,
    count: Count,
    links: Mutex<HashMap<Rank, Arc<PeerLink>>>,
    /// Peers whose queues are not empty.
    due: Mutex<BTreeSet<Rank>>,
}

#[derive(Default)]
struct PeerLink {
    closed: GivenUp,
    state: Mutex<PeerLinkState>,
    /// Held by the thread that passes the queue to the transport, so that the order is kept.
    flushing: Mutex<()>,
}

#[derive(Default)]
struct PeerLinkState {
    transport: Option<Arc<dyn Transport>>,
    other: usize,
    /// Transfers that have not been passed to the transport, the oldest first.
    queue: VecDeque<Queued>,
    /// Calls of `send` that have not been confirmed, the oldest first, and the number of confirmed
    /// ones.
    sends: VecDeque<Vec<Staged>>,
    confirmed: u64,
    /// Pending receives by class of traffic, the oldest first.
    listening: [VecDeque<Staged>; 2],
    spare: Vec<Buffer>,
}

/// A transfer that has not been passed to the transport.
enum Queued {
    Send(Vec<FramePart>),
    Listen(FramePart),
}

/// Bytes of one class of traffic, at the start of a staging buffer.
struct FramePart {
    traffic: Traffic,
    bytes: usize,
    staging: Buffer,
}

/// One started transfer with its staging.
struct Staged {
    staging: Buffer,
    work: Work,
}

/// A buffer that starts with the received bytes. It may be longer than these bytes.
pub(super) struct Arrived(Buffer);

impl Deref for Arrived {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the receive into this staging has ended, and nothing else uses it until it is
        // released, because `Links::wait` took it out of its link.
        unsafe { std::slice::from_raw_parts(self.0.address as *const u8, self.0.bytes) }
    }
}

impl Links {
    /// Creates an empty set of links; `count` is called with the bytes that they move.
    pub fn new(transports: Arc<dyn Transports>, count: Count) -> Self {
        Self { transports, count, links: Mutex::default(), due: Mutex::default() }
    }

    /// Returns the link to `peer`, which may be closed before it is connected.
    fn link(&self, peer: Rank) -> Arc<PeerLink> {
        Arc::clone(lock(&self.links).entry(peer).or_default())
    }

    /// Runs `body` on the link to `peer`, unless it has been closed.
    fn on_open<T>(
        &self,
        peer: Rank,
        body: impl FnOnce(&mut PeerLinkState) -> Result<T>,
    ) -> Result<T> {
        let link = self.link(peer);
        let mut state = lock(&link.state);
        if link.closed.is_set() {
            Err(Error::peer("the connection has been closed"))
        } else {
            body(&mut state)
        }
    }

    /// Queues the transfer that `make` returns.
    fn queue(
        &self,
        peer: Rank,
        make: impl FnOnce(&mut PeerLinkState) -> Result<Queued>,
    ) -> Result<()> {
        self.on_open(peer, |link| {
            let queued = make(link)?;
            link.queue.push_back(queued);
            Ok(())
        })?;
        lock(&self.due).insert(peer);
        Ok(())
    }

    /// Connects this rank with `peer`, which makes a link of this `name` at the same time; `second`
    /// is true on one of the two. Waits for the address of `peer` until the link is closed, and for
    /// the connection for at most `timeout`.
    pub(super) fn make(
        &self,
        peer: Rank,
        name: &str,
        second: bool,
        timeout: Duration,
    ) -> Result<()> {
        let seat = Seat { rank: usize::from(second), size: 2, device: HOST };
        // The peer may be stopped before it publishes its address. The deadline of a message then
        // closes the link.
        let closed = &self.link(peer).closed;
        let transport = self.transports.connect(name, &seat, timeout, true, closed)?;
        self.on_open(peer, |link| {
            (link.transport, link.other) = (Some(transport), usize::from(!second));
            Ok(())
        })
    }

    /// Queues copies of `frame` and `payload`: together as one frame, or the frame and then the
    /// payload as a piece.
    pub(super) fn send(
        &self,
        peer: Rank,
        frame: &[u8],
        traffic: Traffic,
        payload: &[u8],
    ) -> Result<()> {
        (self.count)(peer, frame.len() + payload.len(), 0);
        self.queue(peer, |link| {
            let mut copies =
                |parts: &[&[u8]], traffic| link.copies(&*self.transports, parts, traffic);
            Ok(Queued::Send(match traffic {
                Traffic::Frame => vec![copies(&[frame, payload], traffic)?],
                Traffic::Piece => {
                    vec![copies(&[frame], Traffic::Frame)?, copies(&[payload], traffic)?]
                }
            }))
        })
    }

    /// Reuses the staging of the first `sends` calls of `send`, which have reached the peer.
    pub(super) fn confirm(&self, peer: Rank, sends: u64) {
        let link = self.link(peer);
        let mut state = lock(&link.state);
        while state.confirmed < sends
            && let Some(parts) = state.sends.pop_front()
        {
            parts.into_iter().for_each(|part| state.keep(part.staging));
            state.confirmed += 1;
        }
    }

    /// Queues a receive of the peer's next bytes of class `traffic`: at most `bytes` bytes.
    pub(super) fn listen(&self, peer: Rank, traffic: Traffic, bytes: usize) -> Result<()> {
        self.queue(peer, |link| {
            Ok(Queued::Listen(FramePart {
                traffic,
                bytes,
                staging: link.staged(&*self.transports, bytes)?,
            }))
        })
    }

    /// Passes the queued transfers of each peer to the transports in order. Returns the links that
    /// failed.
    pub(super) fn flush(&self) -> Vec<(Rank, Error)> {
        let due = std::mem::take(&mut *lock(&self.due));
        let failed = |peer| self.link(peer).flush().err().map(|error| (peer, error));
        due.into_iter().filter_map(failed).collect()
    }

    /// Starts the queued transfers of `peer`, then waits for the oldest receive of class `traffic`.
    /// Returns `None` once the link has been closed.
    pub(super) fn wait(&self, peer: Rank, traffic: Traffic) -> Result<Option<Arrived>> {
        let link = self.link(peer);
        // Another thread may have taken this link from `due` without having flushed it yet.
        link.flush()?;
        let work = {
            let state = lock(&link.state);
            if link.closed.is_set() {
                return Ok(None);
            }
            let oldest =
                state.listening[traffic as usize].front().map(|staged| Arc::clone(&staged.work));
            oldest.ok_or_else(|| {
                Error::internal(format!("no receive of class {traffic:?} is pending"))
            })?
        };
        let ended = work.wait(EVER);
        let mut state = lock(&link.state);
        // If the link was closed, `close` owns the staging, whether or not the wait failed.
        if link.closed.is_set() || !ended? {
            return Ok(None);
        }
        Ok(state.listening[traffic as usize].pop_front().map(|staged| Arrived(staged.staging)))
    }

    /// Counts a received frame and its payload, `bytes` bytes in all, before the receive completes.
    pub(super) fn note_received(&self, peer: Rank, bytes: usize) {
        (self.count)(peer, 0, bytes);
    }

    /// Reuses the staging of bytes that have `arrived`, which the caller no longer needs.
    pub(super) fn release(&self, peer: Rank, arrived: Arrived) {
        lock(&self.link(peer).state).keep(arrived.0);
    }

    /// Ends every wait, closes the connection, and makes every later `make` fail, as well as a
    /// `make` that is running on another thread.
    pub(super) fn close(&self, peer: Rank) {
        let link = self.link(peer);
        let (queue, sends, listening, transport) = {
            let mut state = lock(&link.state);
            link.closed.set();
            let PeerLinkState { queue, sends, listening, .. } = &mut *state;
            (
                std::mem::take(queue),
                std::mem::take(sends),
                std::mem::take(listening),
                state.transport.take(),
            )
        };
        let failed =
            listening.iter().flatten().filter(|staged| staged.work.abort().is_err()).count();
        if failed > 0 {
            transport.iter().for_each(|transport| transport.abort());
        }
        // A waiting thread may hold the connection, too; it closes when the last holder drops it.
        drop(transport);
        drop((listening, sends, queue));
    }
}

impl PeerLink {
    /// Passes the queue to the transport. The state is not locked meanwhile, so that other threads
    /// can queue.
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
            let transport = transport.ok_or_else(|| Error::peer("there is no connection"))?;
            match next {
                Queued::Send(parts) => {
                    let post = |FramePart { traffic, bytes, staging }| {
                        let work = transport.send(
                            other,
                            staging.first(bytes),
                            traffic as i32,
                            &staging,
                        )?;
                        Ok(Staged { staging, work })
                    };
                    let parts = parts.into_iter().map(post).collect::<Result<_>>()?;
                    lock(&self.state).sends.push_back(parts);
                }
                Queued::Listen(FramePart { traffic, bytes, staging }) => {
                    let work =
                        transport.recv(other, staging.first(bytes), traffic as i32, &staging)?;
                    let mut state = lock(&self.state);
                    if self.closed.is_set() {
                        // `close` ran before this receive was listed, so the receive is aborted
                        // here.
                        drop(state);
                        if work.abort().is_err() {
                            transport.abort();
                        }
                        return Ok(());
                    }
                    state.listening[traffic as usize].push_back(Staged { staging, work });
                }
            }
        }
    }
}

impl PeerLinkState {
    /// Returns staging for `bytes` bytes.
    fn staged(&mut self, transports: &dyn Transports, bytes: usize) -> Result<Buffer> {
        let fits =
            |kept: &Buffer| bytes > WORTH_KEEPING && (bytes..=4 * bytes).contains(&kept.bytes);
        match self.spare.iter().position(fits) {
            Some(kept) => Ok(self.spare.remove(kept)),
            None => transports.allocate(HOST, bytes),
        }
    }

    /// Keeps `staging`, which is no longer in use, for later.
    fn keep(&mut self, staging: Buffer) {
        if staging.bytes > WORTH_KEEPING && self.spare.len() < SPARE {
            self.spare.push(staging);
        }
    }

    /// Copies `parts` into staging, one behind the other.
    fn copies(
        &mut self,
        transports: &dyn Transports,
        parts: &[&[u8]],
        traffic: Traffic,
    ) -> Result<FramePart> {
        let bytes = parts.iter().map(|part| part.len()).sum();
        let staging = self.staged(transports, bytes)?;
        let mut to = staging.address;
        for part in parts {
            // SAFETY: the staging has room for all parts, and only this call uses it.
            unsafe { std::ptr::copy_nonoverlapping(part.as_ptr(), to as *mut u8, part.len()) };
            to += part.len();
        }
        Ok(FramePart { traffic, bytes, staging })
    }
}

/// Returns the keys in the group's store at which the rank with this `place` in a backend publishes
/// its addresses: Gloo uses one key for each of its interfaces.
pub fn addresses(name: &str, place: usize) -> impl Iterator<Item = String> {
    let interfaces =
        Config::get().gloo_interface.as_ref().map_or(1, |names| names.split(',').count());
    (0..interfaces).map(move |interface| format!("{name}/{interface}/{place}"))
}
