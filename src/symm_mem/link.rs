//! A link between two heaps: each tells the other of its segments.

use super::addresses::Piece;
use super::attention::Attention;
use super::frame::{FRAME_BYTES, Frame, Key};
use super::remote::{Remote, Sound};
use crate::lock::lock;
use crate::sys::fork::{Unshared, generation};
use crate::sys::process;
use crate::sys::socket::{self, Received};
use rustix::fd::{AsFd, OwnedFd};
use rustix::io::Errno;
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

/// Whether a group has failed: kernels of it may then still be in memory that its owner has done with. Also makes a failure known
/// of which nobody has asked yet.
pub type Failed = Arc<dyn Fn() -> bool + Send + Sync>;

/// The heap whose segments a link offers.
pub(super) trait Owner {
    /// Handles the peer's answer, at the other end of `link`, to the offer of segment `id`.
    fn answered(&self, link: u64, id: u64, accepted: bool) -> Sound;
    /// The peer at the other end of `link` has let go of segment `id`.
    fn gone(&self, link: u64, id: u64);
}

/// An open socket that a forked child does not keep open.
pub(super) struct Socket {
    // Before the descriptor that it speaks of. Absent where too many live: then a child keeps the link's end open, no more.
    _unshared: Option<Unshared>,
    pub(super) fd: OwnedFd,
}

/// A process that dies lets go of its highest descriptors first: of this one before it gives back, slowly, what its GPUs had.
const HIGH: i32 = 768;

impl Socket {
    pub(super) fn new(fd: OwnedFd) -> Self {
        // Where so high a number is not allowed the news comes later.
        let fd = rustix::io::fcntl_dupfd_cloexec(&fd, HIGH).unwrap_or(fd);
        Self { _unshared: Unshared::new(fd.as_fd()), fd }
    }
}

/// Frame to be sent, with the memory whose descriptor goes along.
type Mail = (Frame, Option<Arc<dyn Piece>>);

/// Link: one connection, with what the peer has at its other end.
pub(super) struct Link {
    /// Key of the peer's heap.
    pub(super) key: Key,
    /// Number by which both ends know the link.
    pub(super) number: u64,
    /// The peer's process.
    pub(super) pid: u32,
    socket: Socket,
    remote: Remote,
    outbox: Mutex<VecDeque<Mail>>,
    holds: Mutex<Holds>,
    closed: AtomicBool,
    /// Flag of a peer that has let somebody wait in vain, and has not spoken since.
    late: AtomicBool,
}

#[derive(Default)]
struct Holds {
    all: HashMap<u64, Claim>,
    next: u64,
}

/// Claim of a group on the link.
struct Claim {
    failed: Failed,
    /// The peer is dead, and no kernel of the group uses its segments any more.
    released: bool,
}

/// A group's claim to a link. While it lasts the peer's segments stay mapped as long as this group's kernels may use them. The link
/// closes with the last one.
pub struct Hold {
    link: Arc<Link>,
    id: u64,
    generation: u64,
    // Last: the thread serves the link until it is closed.
    _attention: Attention,
}

/// A window's claim to a segment of a peer.
pub struct Pin {
    link: Arc<Link>,
    id: u64,
}

impl Drop for Pin {
    fn drop(&mut self) {
        if self.link.remote.unpin(self.id) && !self.link.is_closed() && !self.link.any_failed() {
            self.link.remote.let_go();
        }
    }
}

impl Link {
    pub(super) fn new(key: Key, number: u64, pid: u32, socket: OwnedFd, remote: Remote) -> Self {
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

    /// A claim for a group of which `failed` tells; `None` if the link is closed.
    pub(super) fn hold(self: &Arc<Self>, attention: Attention, failed: Failed) -> Option<Hold> {
        let mut holds = lock(&self.holds);
        // Under the lock: `Hold::drop` closes the link under it.
        if self.is_closed() {
            return None;
        }
        holds.next += 1;
        let id = holds.next;
        holds.all.insert(id, Claim { failed, released: false });
        drop(holds);
        Some(Hold { link: Arc::clone(self), id, generation: generation(), _attention: attention })
    }

    /// Whether any group that uses the link has failed. Asks all of them: each makes its failure known.
    pub(super) fn any_failed(&self) -> bool {
        // Asked outside the lock: who answers may hold others.
        let requested: Vec<Failed> = lock(&self.holds).all.values().map(|claim| Arc::clone(&claim.failed)).collect();
        requested.iter().fold(false, |any, failed| failed() | any)
    }

    pub(super) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    pub(super) fn close(&self) {
        self.closed.store(true, Ordering::Release);
    }

    /// The peer has closed its end: its last group is gone, or it is dying.
    fn lost(&self) {
        self.close();
        process::suspect(self.pid);
    }

    /// Closes it unless a group holds it.
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

    /// Address at which the peer's heap begins here.
    pub(super) fn base(&self) -> u64 {
        self.remote.base()
    }

    #[cfg(test)]
    pub(super) fn remote(&self) -> &Remote {
        &self.remote
    }

    /// Leaves `frame` for the thread to send; `piece` goes along as a descriptor.
    pub(super) fn post(&self, frame: Frame, piece: Option<Arc<dyn Piece>>) {
        lock(&self.outbox).push_back((frame, piece));
    }

    /// Whether something is to be sent.
    pub(super) fn has_mail(&self) -> bool {
        !lock(&self.outbox).is_empty()
    }

    /// Sends what the socket takes.
    pub(super) fn send(&self) {
        let mut outbox = lock(&self.outbox);
        while let Some((frame, piece)) = outbox.front() {
            let descriptor = match piece.as_ref().map(|piece| piece.export()).transpose() {
                Ok(descriptor) => descriptor,
                Err(error) => {
                    // The peer never learns of it, so calls on it go through staging.
                    log::warn!("a segment of symmetric memory cannot be given to process {}: {error}", self.pid);
                    outbox.pop_front();
                    continue;
                }
            };
            match socket::send(&self.socket.fd, &frame.encode(), descriptor.as_ref().map(AsFd::as_fd)) {
                Ok(()) => drop(outbox.pop_front()),
                // Later: the peer is slow, too many descriptors are on their way, or signals are in the way.
                Err(Errno::AGAIN | Errno::INTR | Errno::TOOMANYREFS | Errno::NOBUFS | Errno::NOMEM) => return,
                Err(errno) => {
                    log::info!("the link with the symmetric memory of process {} has ended: {errno}", self.pid);
                    self.close();
                    return;
                }
            }
        }
    }

    /// Takes what the peer has sent, at most so much that other links have their turn. Errors are the peer's fault.
    pub(super) fn receive(&self, owner: &dyn Owner) -> Sound {
        for _ in 0..64 {
            let mut buffer = [0; FRAME_BYTES + 1];
            let Received { length, fd, cut } = match socket::receive(&self.socket.fd, &mut buffer) {
                Ok(received) => received,
                Err(Errno::AGAIN | Errno::INTR) => return Ok(()),
                Err(errno) => {
                    log::info!("the link with the symmetric memory of process {} has ended: {errno}", self.pid);
                    self.lost();
                    return Ok(());
                }
            };
            if length == 0 {
                self.lost();
                return Ok(());
            }
            self.late.store(false, Ordering::Relaxed);
            if cut {
                return Err("sent more than one message can hold, or no descriptor is free here".into());
            }
            let frame = Frame::decode(&buffer[..length]).ok_or_else(|| format!("sent {length} bytes that are no message"))?;
            self.take(owner, frame, fd)?;
        }
        Ok(())
    }

    fn take(&self, owner: &dyn Owner, frame: Frame, fd: Option<OwnedFd>) -> Sound {
        let fd = match (frame, fd) {
            (Frame::Offer { id, offset, bytes }, Some(fd)) => {
                let mapped = self.remote.accept(id, offset, bytes, fd)?;
                self.post(if mapped { Frame::Accepted { id } } else { Frame::Refused { id } }, None);
                return Ok(());
            }
            (_, fd) => fd,
        };
        if fd.is_some() {
            return Err("sent a descriptor with a message that needs none".into());
        }
        match frame {
            Frame::Offer { id, .. } => return Err(format!("offered segment {id} without a descriptor")),
            Frame::Hello { .. } => return Err("introduced itself twice".into()),
            Frame::Withdraw { id } => {
                self.remote.withdraw(id, self.any_failed())?;
                self.post(Frame::Gone { id }, None);
            }
            Frame::Accepted { id } => owner.answered(self.number, id, true)?,
            Frame::Refused { id } => owner.answered(self.number, id, false)?,
            Frame::Gone { id } => owner.gone(self.number, id),
        }
        Ok(())
    }
}

impl Hold {
    /// Address at which the peer's heap begins in this process: what lies at an offset there lies at that offset here.
    pub fn base(&self) -> u64 {
        self.link.base()
    }

    /// Keeps `bytes` at `offset` of the peer's heap mapped while the pin lives; `None` if they do not lie in one segment that is mapped
    /// here.
    pub fn pin(&self, offset: u64, bytes: usize) -> Option<Pin> {
        let id = self.link.remote.pin(usize::try_from(offset).ok()?, bytes)?;
        Some(Pin { link: Arc::clone(&self.link), id })
    }

    /// The peer's process has ended, and no kernel of this group uses its segments any more: they go once all groups say so.
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

    /// Closes the link, whoever holds it: the peer does not have it any more.
    pub fn abandon(self) {
        self.link.close();
    }

    /// The link.
    pub(super) fn link(&self) -> &Arc<Link> {
        &self.link
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        // A forked child's copy: the link is the parent's.
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
            self.link.remote.let_go();
        }
    }
}
