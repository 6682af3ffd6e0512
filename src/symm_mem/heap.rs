//! A process's own heap on a device: segments, allocated by next fit and advertised to every peer.

use super::address::HeapAddress;
use super::addresses::{AddressRange, AddressSpace, Backing};
use super::frame::HeapFrame;
use super::link::{HeapLink, SegmentOwner, Socket};
use super::remote_heap::ProtocolResult;
use super::service_thread;
use crate::error::{Error, Result};
use crate::lock::{lock, unpoisoned};
use crate::mem::layout::MAX_RANKS;
use crate::sys::required::Required;
use crate::sys::{random, socket};
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, Weak};
use std::time::{Duration, Instant};

/// How long an owner waits for peers to unmap a segment; its memory is free only then.
const SEGMENT_RELEASE_TIMEOUT: Duration = Duration::from_secs(1);
/// Maximum number of connections that wait to be accepted: more than a node has ranks.
const BACKLOG: i32 = 2 * MAX_RANKS as i32;
/// Maximum number of closed links that are remembered.
const REMEMBERED: usize = 256;

/// The heap of this process on a device.
pub struct Heap {
    pub(super) space: Arc<dyn AddressSpace>,
    pub(super) address: HeapAddress,
    listener: Socket,
    /// Error number of the last `accept` on `listener`; 0 if it succeeded.
    accept_error: AtomicI32,
    base: u64,
    /// Number of segments.
    count: AtomicUsize,
    pub(super) state: Mutex<HeapState>,
    /// Notified when answers have arrived or links have closed.
    pub(super) changed: Condvar,
    /// Held while connecting, so that two groups that meet the same peer at once share one link.
    pub(super) connecting: Mutex<()>,
    range: Box<dyn AddressRange>,
    this: Weak<Heap>,
}

#[derive(Default)]
pub(super) struct HeapState {
    /// Segments by offset.
    pub(super) segments: BTreeMap<usize, HeapSegment>,
    pub(super) links: Vec<Arc<HeapLink>>,
    last_id: u64,
    /// End of the newest segment. An offset is reused as late as possible, because windows of peers
    /// may keep the previous segment at that offset.
    cursor: usize,
    /// Withdrawn segments that peers have not unmapped yet: segment, link.
    leaving: HashSet<(u64, u64)>,
    /// Recently closed links, by number.
    pub(super) past: VecDeque<u64>,
}

pub(super) struct HeapSegment {
    pub(super) id: u64,
    pub(super) bytes: usize,
    /// Memory of the segment; `None` while it is being created, or after it was freed.
    pub(super) piece: Option<Arc<dyn Backing>>,
    /// Answers by link: true if accepted.
    pub(super) answers: HashMap<u64, bool>,
    /// True once the segment was released. It is freed when no window uses it and the device's work
    /// is done.
    pub(super) released: bool,
    /// Number of windows of this process that use it.
    pub(super) shown: usize,
}

impl HeapSegment {
    /// Returns true if the segment was released and no window uses it.
    pub(super) fn is_complete(&self) -> bool {
        self.released && self.shown == 0
    }
}

impl Heap {
    /// Makes a heap on `space` without links, which no thread serves yet.
    pub(super) fn pending_links(space: Arc<dyn AddressSpace>) -> Result<Arc<Self>> {
        let span = space.span();
        let range = space.reserve(span)?;
        let address =
            HeapAddress { key: random::bytes()?, listener: random::bytes()?, span: span as u64 };
        let listener = socket::listen_at(&address.name(), BACKLOG)
            .map_err(|errno| Required::Listen.failed(errno))?;
        Ok(Arc::new_cyclic(|this| Self {
            space,
            address,
            listener: Socket::new(listener),
            accept_error: AtomicI32::new(0),
            base: range.address(),
            count: AtomicUsize::new(0),
            state: Mutex::default(),
            changed: Condvar::new(),
            connecting: Mutex::default(),
            range,
            this: Weak::clone(this),
        }))
    }

    /// Returns the address of the heap for the members of a group.
    pub fn address(&self) -> HeapAddress {
        self.address
    }

    /// Returns the address of its first byte.
    pub fn base(&self) -> u64 {
        self.base
    }

    /// Returns true if it has no segment. Costs one relaxed load.
    pub fn is_empty(&self) -> bool {
        self.count.load(Ordering::Relaxed) == 0
    }

    /// Returns true if `address` is in its range.
    pub fn contains(&self, address: u64) -> bool {
        (self.base..self.base + self.address.span).contains(&address)
    }

    pub(super) fn listener(&self) -> &OwnedFd {
        &self.listener.fd
    }

    /// Records how the last `accept` ended; 0 stands for success.
    pub(super) fn note_accept(&self, errno: i32) {
        self.accept_error.store(errno, Ordering::Relaxed);
    }

    /// Returns the error of the last `accept`, if it failed. A peer may then still be waiting.
    pub(super) fn accept_error(&self) -> Option<Error> {
        let errno = self.accept_error.load(Ordering::Relaxed);
        (errno != 0).then(|| Required::Accept.failed(Errno::from_raw_os_error(errno)))
    }

    pub(super) fn state(&self) -> MutexGuard<'_, HeapState> {
        lock(&self.state)
    }

    /// Allocates a segment of at least `bytes` and returns its address. Peers are notified, but
    /// this does not wait for them.
    pub fn allocate(&self, bytes: usize) -> Result<u64> {
        self.free_released();
        let wanted = bytes.max(1).checked_next_multiple_of(self.space.granularity());
        let none = || {
            Error::config(format!(
                "out of memory: no {bytes} bytes of addresses are left for symmetric memory"
            ))
        };
        let wanted = wanted.ok_or_else(none)?;
        let mut state = self.state();
        let (span, cursor) = (self.address.span as usize, state.cursor);
        let fit = first_fit(&state.segments, cursor, span, wanted)
            .or_else(|| first_fit(&state.segments, 0, span, wanted));
        let offset = fit.ok_or_else(none)?;
        state.cursor = offset + wanted;
        state.last_id += 1;
        let id = state.last_id;
        state.segments.insert(
            offset,
            HeapSegment {
                id,
                bytes: wanted,
                piece: None,
                answers: HashMap::new(),
                released: false,
                shown: 0,
            },
        );
        // Create the memory without the lock, because launches take the lock.
        drop(state);
        let made = self.range.create(offset, wanted);
        let mut state = self.state();
        let piece = match made {
            Ok(piece) => piece,
            Err(error) => {
                state.segments.remove(&offset);
                return Err(error);
            }
        };
        for link in &state.links {
            link.post(offer(id, offset, wanted), Some(Arc::clone(&piece)));
        }
        if let Some(segment) = state.segments.get_mut(&offset) {
            segment.piece = Some(piece);
        }
        drop(state);
        self.count.fetch_add(1, Ordering::Relaxed);
        service_thread::wake();
        Ok(self.base + offset as u64)
    }

    /// Releases the segment at `address`. It is freed once no window of this process uses it: the
    /// thread that drops the last one waits for the device, as `cudaFree` does, and then makes the
    /// peers unmap the segment.
    pub fn release(&self, address: u64) -> Result<()> {
        let offset = address.wrapping_sub(self.base) as usize;
        let mut state = self.state();
        match state
            .segments
            .get_mut(&offset)
            .filter(|segment| segment.piece.is_some() && !segment.released)
        {
            Some(segment) => segment.released = true,
            None => {
                return Err(Error::value(format!(
                    "no segment of symmetric memory begins at {address:#x}"
                )));
            }
        }
        drop(state);
        self.free_released();
        Ok(())
    }

    /// Frees released segments that no window uses. While a stream is captured the device cannot be
    /// synchronised, and the segments are freed later.
    pub(super) fn free_released(&self) {
        if self.is_empty() {
            return;
        }
        let state = self.state();
        let done: Vec<usize> = state
            .segments
            .iter()
            .filter(|(_, segment)| segment.is_complete())
            .map(|(offset, _)| *offset)
            .collect();
        drop(state);
        if done.is_empty() {
            return;
        }
        match self.space.settle() {
            Ok(()) => self.free(&done),
            Err(error) => log::info!(
                "{} segments of symmetric memory are given back later: {error}",
                done.len()
            ),
        }
    }

    /// Withdraws segments that no kernel of this process uses any more.
    fn free(&self, offsets: &[usize]) {
        let links = self.state().links.clone();
        // If a kernel of this process timed out, peers' kernels may still be using the segment.
        // Each group therefore checks for a failure here, so that peers learn of it before the
        // withdrawal.
        for link in &links {
            link.any_failed();
        }
        let mut state = self.state();
        let HeapState { segments, links, leaving, .. } = &mut *state;
        let mut freed = Vec::new();
        for &offset in offsets {
            let Some(segment) = segments.get_mut(&offset) else { continue };
            // If two threads try, only one frees the segment.
            if segment.piece.take().is_none() {
                continue;
            }
            freed.push((offset, segment.id, segment.bytes));
            for link in links.iter().filter(|link| !link.is_closed()) {
                link.post(HeapFrame::Withdraw { id: segment.id }, None);
                leaving.insert((segment.id, link.number));
            }
        }
        drop(state);
        service_thread::wake();
        // The offset of a freed segment stays in use until nothing is mapped there.
        for &(offset, _, bytes) in &freed {
            self.range.unmap(offset, bytes);
        }
        let mut state = self.state();
        for (offset, ..) in &freed {
            state.segments.remove(offset);
        }
        drop(state);
        self.count.fetch_sub(freed.len(), Ordering::Relaxed);
        self.wait(Instant::now() + SEGMENT_RELEASE_TIMEOUT, |state| {
            let owes = |link: &&Arc<HeapLink>| {
                freed.iter().any(|(_, id, _)| state.leaving.contains(&(*id, link.number)))
            };
            state.links.iter().filter(owes).cloned().collect()
        });
    }

    /// Waits until no link is `missing`, except for closed links and links whose peer was late
    /// before; marks the links that are missing at the deadline as late.
    pub(super) fn wait(
        &self,
        deadline: Instant,
        missing: impl Fn(&HeapState) -> Vec<Arc<HeapLink>>,
    ) {
        let mut state = self.state();
        loop {
            let waiting: Vec<Arc<HeapLink>> = missing(&state)
                .into_iter()
                .filter(|link| !link.is_closed() && !link.is_late())
                .collect();
            if waiting.is_empty() {
                return;
            }
            let Some(left) = deadline.checked_duration_since(Instant::now()) else {
                waiting.iter().for_each(|link| link.note_late());
                return;
            };
            state = unpoisoned(self.changed.wait_timeout(state, left)).0;
        }
    }

    /// Waits until all work that this process has enqueued on the device is done.
    pub fn settle(&self) -> Result<()> {
        self.space.settle()
    }

    /// Zeroes `bytes` bytes at `address`, within one segment that is not in use; returns when that
    /// is done.
    pub fn clear(&self, address: u64, bytes: usize) -> Result<()> {
        match self.segment(address) {
            Some((_, left)) if bytes <= left => self.space.clear(address, bytes),
            _ => Err(Error::internal(format!(
                "{bytes} bytes at {address:#x} leave their segment of symmetric memory"
            ))),
        }
    }

    /// Returns the id of the segment that contains `address`, and the number of bytes from there to
    /// the end of the segment. The id is unique among all segments of this heap. `None` if no
    /// segment contains `address`, or if the segment was released.
    pub fn segment(&self, address: u64) -> Option<(u64, usize)> {
        let offset = address.checked_sub(self.base)? as usize;
        let state = self.state();
        let (start, segment) = state.segments.range(..=offset).next_back()?;
        let left = (start + segment.bytes).checked_sub(offset).filter(|&left| left > 0)?;
        (segment.piece.is_some() && !segment.released).then_some((segment.id, left))
    }

    /// Returns the open links and drops the closed ones, which last as long as groups hold them.
    pub(super) fn links(&self) -> Vec<Arc<HeapLink>> {
        let mut state = self.state();
        let HeapState { segments, links, leaving, past, .. } = &mut *state;
        let mut closed = Vec::new();
        links.retain(|link| {
            if link.is_closed() {
                for segment in segments.values_mut() {
                    segment.answers.remove(&link.number);
                }
                leaving.retain(|(_, number)| *number != link.number);
                past.push_back(link.number);
                closed.push(Arc::clone(link));
            }
            !link.is_closed()
        });
        past.drain(..past.len().saturating_sub(REMEMBERED));
        let open = links.clone();
        drop(state);
        if !closed.is_empty() {
            self.changed.notify_all();
        }
        // Outside the lock, because this unmaps the peers' memory.
        drop(closed);
        open
    }

    /// Returns a weak reference to the heap.
    pub(super) fn shared(&self) -> Weak<Self> {
        Weak::clone(&self.this)
    }
}

impl SegmentOwner for Heap {
    fn answered(&self, link: u64, id: u64, accepted: bool) -> ProtocolResult {
        let mut state = self.state();
        if id == 0 || id > state.last_id {
            return Err(format!("answered to segment {id}, which was not offered"));
        }
        // A missing segment has been withdrawn in the meantime.
        if let Some(segment) = state.segments.values_mut().find(|segment| segment.id == id) {
            segment.answers.insert(link, accepted);
        }
        drop(state);
        self.changed.notify_all();
        Ok(())
    }

    fn gone(&self, link: u64, id: u64) {
        self.state().leaving.remove(&(id, link));
        self.changed.notify_all();
    }
}

impl Drop for Heap {
    fn drop(&mut self) {
        let state = unpoisoned(self.state.get_mut());
        for (offset, segment) in
            state.segments.iter().filter(|(_, segment)| segment.piece.is_some())
        {
            self.range.unmap(*offset, segment.bytes);
        }
    }
}

pub(super) fn offer(id: u64, offset: usize, bytes: usize) -> HeapFrame {
    HeapFrame::Offer { id, offset: offset as u64, bytes: bytes as u64 }
}

/// Returns the lowest offset from `from` and below `span` where `bytes` are free.
fn first_fit(
    segments: &BTreeMap<usize, HeapSegment>,
    from: usize,
    span: usize,
    bytes: usize,
) -> Option<usize> {
    let mut free = from;
    for (offset, segment) in segments {
        if offset.saturating_sub(free) >= bytes {
            return Some(free);
        }
        free = free.max(offset + segment.bytes);
    }
    (span.checked_sub(free)? >= bytes).then_some(free)
}
