//! A heap link: a connection over which two heaps advertise their segments to each other.

use super::addresses::Backing;
use super::frame::{FRAME_BYTES, HeapFrame, HeapKey};
use super::remote_heap::{ProtocolResult, RemoteHeap};
use super::service_thread::ServiceThread;
use crate::lock::lock;
use crate::sys::fork::{CloseInChild, generation};
use crate::sys::process;
use crate::sys::socket::{self, Received};
use rustix::fd::{AsFd, OwnedFd};
use rustix::io::Errno;
use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

/// Returns true if a group has failed; its kernels may then still use memory with which the rank
/// that owns the memory has finished. The call also detects a failure that has not been noticed
/// yet.
pub type FailureCheck = Arc<dyn Fn() -> bool + Send + Sync>;

/// The heap whose segments a link advertises.
pub(super) trait SegmentOwner {
    /// Handles the answer of the peer at the other end of `link` to the advertised segment `id`.
    fn answered(&self, link: u64, id: u64, accepted: bool) -> ProtocolResult;
    /// Handles the message that the peer at the other end of `link` has unmapped segment `id`.
    fn gone(&self, link: u64, id: u64);
}

/// An open socket that a forked child does not keep open.
pub(super) struct Socket {
    // Dropped before `fd`, to which it refers. Absent if too many descriptors are guarded; a forked
    // child then keeps this end of the link open.
    _unshared: Option<CloseInChild>,
    pub(super) fd: OwnedFd,
}

/// The lowest descriptor number of a link's socket. An exiting process closes its highest file
/// descriptors first, so the socket closes before the slow release of GPU memory.
const HIGH_FD_START: i32 = 768;

impl Socket {
    pub(super) fn new(fd: OwnedFd) -> Self {
        // If the limit does not allow such a number, peers notice an exit later.
        let fd = rustix::io::fcntl_dupfd_cloexec(&fd, HIGH_FD_START).unwrap_or(fd);
        Self { _unshared: CloseInChild::new(fd.as_fd()), fd }
    }
}

/// A frame to be sent, with the memory whose file descriptor is attached.
type OutgoingFrame = (HeapFrame, Option<Arc<dyn Backing>>);

#[derive(Default)]
struct Outbox {
    frames: VecDeque<OutgoingFrame>,
    /// Segments that could not be offered, so that the peer does not know them.
    unsent: HashSet<u64>,
}

/// One connection, with the peer's heap at the other end.
pub(super) struct HeapLink {
    /// Key of the peer's heap.
    pub(super) key: HeapKey,
    /// The number that both ends share.
    pub(super) number: u64,
    /// The peer's process id.
    pub(super) pid: u32,
    socket: Socket,
    remote: RemoteHeap,
    outbox: Mutex<Outbox>,
    holds: Mutex<Holds>,
    closed: AtomicBool,
    /// True if the peer made a thread wait in vain and has not sent anything since.
    late: AtomicBool,
}

#[derive(Default)]
struct Holds {
    all: HashMap<u64, LinkClaim>,
    next: u64,
}

/// A group's claim to the link.
struct LinkClaim {
    failed: FailureCheck,
    /// True once the peer has exited and no kernel of the group uses its segments any more.
    released: bool,
}

/// A group's claim to a link. While it exists, the peer's segments stay mapped as long as this
/// group's kernels may use them. The link closes when the last claim is dropped.
pub struct LinkRef {
    link: Arc<HeapLink>,
    id: u64,
    generation: u64,
    // Dropped last, because the thread serves the link until the link is closed.
    _attention: ServiceThread,
}

/// A window's claim to a segment of a peer.
pub struct SegmentPin {
    link: Arc<HeapLink>,
    id: u64,
}

impl Drop for SegmentPin {
    fn drop(&mut self) {
        if self.link.remote.unpin(self.id) && !self.link.is_closed() && !self.link.any_failed() {
            self.link.remote.unmap();
        }
    }
}

impl HeapLink {
    pub(super) fn new(
        key: HeapKey,
        number: u64,
        pid: u32,
        socket: OwnedFd,
        remote: RemoteHeap,
    ) -> Self {
        Self {
            key,
            number,
            pid,
            socket: Socket::new(socket),
            remote,
            outbox: Mutex::default(),
            holds: Mutex::default(),
            closed: AtomicBool::new(false),
            late: AtomicBool::new(false),
        }
    }

    /// Makes a claim for a group that reports failures with `failed`; `None` if the link is closed.
    pub(super) fn hold(
        self: &Arc<Self>,
        attention: ServiceThread,
        failed: FailureCheck,
    ) -> Option<LinkRef> {
        let mut holds = lock(&self.holds);
        // Checked under the lock under which `LinkRef::drop` closes the link.
        if self.is_closed() {
            return None;
        }
        holds.next += 1;
        let id = holds.next;
        holds.all.insert(id, LinkClaim { failed, released: false });
        drop(holds);
        Some(LinkRef {
            link: Arc::clone(self),
            id,
            generation: generation(),
            _attention: attention,
        })
    }

    /// Returns true if any group that uses the link has failed. Queries all of them, so that each
    /// detects its failure.
    pub(super) fn any_failed(&self) -> bool {
        // Called outside the lock, because the callbacks may take other locks.
        let requested: Vec<FailureCheck> =
            lock(&self.holds).all.values().map(|claim| Arc::clone(&claim.failed)).collect();
        requested.iter().fold(false, |any, failed| failed() | any)
    }

    pub(super) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    pub(super) fn close(&self) {
        self.closed.store(true, Ordering::Release);
    }

    /// Closes the link because the peer has closed its end: the peer's last group was dropped, or
    /// the peer is exiting.
    fn lost(&self) {
        self.close();
        process::suspect(self.pid);
    }

    /// Closes the link unless a group holds it.
    pub(super) fn close_if_idle(&self) {
        let holds = lock(&self.holds);
        if holds.all.is_empty() {
            self.close();
        }
    }

    pub(super) fn is_late(&self) -> bool {
        self.late.load(Ordering::Relaxed)
    }

    pub(super) fn note_late(&self) {
        self.late.store(true, Ordering::Relaxed);
    }

    pub(super) fn socket(&self) -> &OwnedFd {
        &self.socket.fd
    }

    /// Returns the address at which the peer's heap starts in this process.
    pub(super) fn base(&self) -> u64 {
        self.remote.base()
    }

    #[cfg(test)]
    pub(super) fn remote(&self) -> &RemoteHeap {
        &self.remote
    }

    /// Queues `frame` for the thread to send, with the file descriptor of `piece` attached.
    pub(super) fn post(&self, frame: HeapFrame, piece: Option<Arc<dyn Backing>>) {
        lock(&self.outbox).frames.push_back((frame, piece));
    }

    /// Returns true if frames are queued.
    pub(super) fn has_mail(&self) -> bool {
        !lock(&self.outbox).frames.is_empty()
    }

    /// Sends queued frames until the socket would block. A segment that cannot be offered counts as
    /// refused by the peer.
    pub(super) fn send(&self, owner: &dyn SegmentOwner) {
        loop {
            let mut outbox = lock(&self.outbox);
            let Some((frame, piece)) = outbox.frames.front() else { return };
            let (frame, piece) = (*frame, piece.clone());
            // Threads that hold the owner's lock post frames, so the owner is called without the
            // lock of the outbox.
            if let HeapFrame::Withdraw { id } = frame
                && outbox.unsent.remove(&id)
            {
                outbox.frames.pop_front();
                drop(outbox);
                owner.gone(self.number, id);
                continue;
            }
            let descriptor = match piece.as_ref().map(|piece| piece.export()).transpose() {
                Ok(descriptor) => descriptor,
                Err(error) => {
                    log::warn!(
                        "a segment of symmetric memory cannot be given to process {}: {error}",
                        self.pid
                    );
                    outbox.frames.pop_front();
                    if let HeapFrame::Offer { id, .. } = frame {
                        outbox.unsent.insert(id);
                        drop(outbox);
                        let _ = owner.answered(self.number, id, false);
                    }
                    continue;
                }
            };
            match socket::send(
                &self.socket.fd,
                &frame.encode(),
                descriptor.as_ref().map(AsFd::as_fd),
            ) {
                Ok(()) => drop(outbox.frames.pop_front()),
                // Retried later: the peer is slow, too many file descriptors are in flight, or a
                // signal interrupted the call.
                Err(
                    Errno::AGAIN | Errno::INTR | Errno::TOOMANYREFS | Errno::NOBUFS | Errno::NOMEM,
                ) => return,
                Err(errno) => {
                    log::info!(
                        "the link with the symmetric memory of process {} has ended: {errno}",
                        self.pid
                    );
                    self.close();
                    return;
                }
            }
        }
    }

    /// Handles up to 64 messages of the peer, so that other links get their turn. Errors are
    /// violations by the peer.
    pub(super) fn receive(&self, owner: &dyn SegmentOwner) -> ProtocolResult {
        for _ in 0..64 {
            let mut buffer = [0; FRAME_BYTES + 1];
            let Received { length, fd, cut } = match socket::receive(&self.socket.fd, &mut buffer) {
                Ok(received) => received,
                Err(Errno::AGAIN | Errno::INTR) => return Ok(()),
                Err(errno) => {
                    log::info!(
                        "the link with the symmetric memory of process {} has ended: {errno}",
                        self.pid
                    );
                    self.lost();
                    return Ok(());
                }
            };
            if length == 0 {
                self.lost();
                return Ok(());
            }
            self.late.store(false, Ordering::Relaxed);
            if cut && (length > FRAME_BYTES || fd.is_some()) {
                return Err("sent more than one message can hold".into());
            }
            let frame = HeapFrame::decode(&buffer[..length])
                .ok_or_else(|| format!("sent {length} bytes, a malformed message"))?;
            self.take(owner, frame, fd, cut)?;
        }
        Ok(())
    }

    /// `lost`: the message had a descriptor for which this process has no free number.
    fn take(
        &self,
        owner: &dyn SegmentOwner,
        frame: HeapFrame,
        fd: Option<OwnedFd>,
        lost: bool,
    ) -> ProtocolResult {
        let given = fd.is_some() || lost;
        match frame {
            HeapFrame::Offer { id, .. } if !given => {
                return Err(format!("offered segment {id} without a descriptor"));
            }
            HeapFrame::Offer { id, offset, bytes } => {
                let mapped = self.remote.accept(id, offset, bytes, fd)?;
                self.post(
                    if mapped { HeapFrame::Accepted { id } } else { HeapFrame::Refused { id } },
                    None,
                );
            }
            _ if given => return Err("sent a descriptor with a message that needs none".into()),
            HeapFrame::Hello { .. } => return Err("introduced itself twice".into()),
            HeapFrame::Withdraw { id } => {
                self.remote.withdraw(id, self.any_failed())?;
                self.post(HeapFrame::Gone { id }, None);
            }
            HeapFrame::Accepted { id } => owner.answered(self.number, id, true)?,
            HeapFrame::Refused { id } => owner.answered(self.number, id, false)?,
            HeapFrame::Gone { id } => owner.gone(self.number, id),
        }
        Ok(())
    }
}

impl LinkRef {
    /// Returns the address at which the peer's heap starts in this process; offsets are the same in
    /// both.
    pub fn base(&self) -> u64 {
        self.link.base()
    }

    /// Pins the `bytes` bytes at `offset` in the peer's heap: they stay mapped while the returned
    /// pin exists. Returns `None` if they are not in one mapped segment.
    pub fn pin(&self, offset: u64, bytes: usize) -> Option<SegmentPin> {
        let id = self.link.remote.pin(usize::try_from(offset).ok()?, bytes)?;
        Some(SegmentPin { link: Arc::clone(&self.link), id })
    }

    /// Notes that the peer's process has exited and no kernel of this group uses its segments any
    /// more. They are unmapped once all groups have called this.
    pub fn release_dead(&self) {
        let mut holds = lock(&self.link.holds);
        if let Some(claim) = holds.all.get_mut(&self.id) {
            claim.released = true;
        }
        let agreed = holds.all.values().all(|claim| claim.released);
        drop(holds);
        if agreed {
            self.link.close();
            self.link.remote.release_dead();
        }
    }

    /// Closes the link even if other groups hold it: the peer does not have it any more.
    pub fn abandon(self) {
        self.link.close();
    }

    /// Returns the link.
    pub(super) fn link(&self) -> &Arc<HeapLink> {
        &self.link
    }
}

impl Drop for LinkRef {
    fn drop(&mut self) {
        // In a forked child this is a copy; the link belongs to the parent.
        if self.generation != generation() {
            return;
        }
        let mut holds = lock(&self.link.holds);
        let ended = holds.all.remove(&self.id);
        if holds.all.is_empty() {
            self.link.close();
        }
        drop(holds);
        drop(ended);
        if !self.link.is_closed() && !self.link.any_failed() {
            self.link.remote.unmap();
        }
    }
}
