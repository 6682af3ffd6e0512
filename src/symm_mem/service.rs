//! The thread that serves all links of the process. It starts with the first group that links heaps
//! and ends with the last.

use super::addresses::AddressSpace;
use super::frame::FRAME_BYTES;
use super::heap::Heap;
use super::link::HeapLink;
use super::service_thread::{self, ServiceThread};
use crate::error::Result;
use crate::lock::lock;
use crate::sys::fork::PerProcess;
use crate::sys::rate_limit::RateLimit;
use crate::sys::socket::{self, PeerCredentials, Received};
use crate::sys::thread::{self, Waker};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::{AsFd, OwnedFd};
use rustix::io::Errno;
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

/// How long a pending connection may take to introduce itself.
const INTRODUCTION: Duration = Duration::from_secs(5);
/// Poll interval for events without a notification, such as a freed file descriptor.
const PAUSE: Timespec = Timespec { tv_sec: 0, tv_nsec: 20_000_000 };
/// Maximum number of pending connections of all heaps; the oldest is closed first.
const UNIDENTIFIED: usize = 64;

/// Rate limits of log lines that other processes can cause.
static BROKEN_LINKS: RateLimit = RateLimit::new();
static OTHER_USERS: RateLimit = RateLimit::new();
static UNKNOWN: RateLimit = RateLimit::new();
static REFUSED: RateLimit = RateLimit::new();
static NO_POLL: RateLimit = RateLimit::new();

/// The live heaps of this process. A forked child has a separate list; the parent's heaps do not
/// work there.
static HEAPS: PerProcess<Mutex<Vec<Weak<Heap>>>> = PerProcess::new(Mutex::default);

/// Returns the heaps that have not been dropped.
fn living() -> Vec<Arc<Heap>> {
    let mut heaps = lock(HEAPS.get());
    heaps.retain(|heap| heap.strong_count() > 0);
    heaps.iter().filter_map(Weak::upgrade).collect()
}

/// Keeps the service thread alive; without this thread, no peer can connect.
pub(super) fn attend() -> Result<ServiceThread> {
    ServiceThread::new(|wake| {
        thread::spawn("symm-heap", Some(512 << 10), move || run(&wake)).map(|_| ())
    })
}

impl Heap {
    /// Makes a heap on `space` without links; the thread serves the heap while it exists.
    pub fn new(space: Arc<dyn AddressSpace>) -> Result<Arc<Self>> {
        let heap = Self::pending_links(space)?;
        lock(HEAPS.get()).push(heap.shared());
        service_thread::wake();
        Ok(heap)
    }
}

/// A connection that has not introduced itself yet.
struct Unidentified {
    heap: Arc<Heap>,
    pid: u32,
    socket: OwnedFd,
    since: Instant,
}

fn run(wake: &Waker) {
    let mut unidentified: Vec<Unidentified> = Vec::new();
    // Set for one iteration, of at most `PAUSE`: a connection that cannot be accepted would make
    // `poll` return at once.
    let mut deaf = false;
    loop {
        // A later claim starts another thread. That thread finds no unserved link, because idle
        // links are closed here.
        let over = service_thread::is_over(|| {
            for heap in living() {
                heap.links().iter().for_each(|link| link.close_if_idle());
                drop(heap.links());
            }
        });
        if over {
            return;
        }
        let heaps = living();
        let links: Vec<(Arc<Heap>, Arc<HeapLink>)> = heaps
            .iter()
            .flat_map(|heap| heap.links().into_iter().map(|link| (Arc::clone(heap), link)))
            .collect();
        for (heap, link) in &links {
            link.send(&**heap);
        }
        let ready = wait(wake, &heaps, &unidentified, &links, deaf);
        let (listeners, rest) = ready.split_at(heaps.len());
        let (waiting, served) = rest.split_at(unidentified.len());
        for ((heap, link), _) in links.iter().zip(served).filter(|(_, ready)| **ready) {
            if let Err(violation) = link.receive(&**heap) {
                BROKEN_LINKS.warn(format_args!(
                    "process {}, linked for symmetric memory, {violation}; the link is closed",
                    link.pid
                ));
                link.close();
            }
        }
        let mut waiting = waiting.iter();
        unidentified = unidentified
            .into_iter()
            .filter_map(|unidentified| introduced(unidentified, *waiting.next()?))
            .collect();
        deaf = false;
        for (heap, _) in heaps.iter().zip(listeners).filter(|(_, ready)| **ready) {
            deaf |= !welcome(heap, &mut unidentified);
        }
    }
}

/// Waits; returns which of the listeners, pending connections and links are readable, in this
/// order.
fn wait(
    wake: &Waker,
    heaps: &[Arc<Heap>],
    unidentified: &[Unidentified],
    links: &[(Arc<Heap>, Arc<HeapLink>)],
    deaf: bool,
) -> Vec<bool> {
    let reads = |fd| PollFd::from_borrowed_fd(fd, PollFlags::IN);
    let mut fds = vec![reads(wake.as_fd())];
    let knocks = if deaf { PollFlags::empty() } else { PollFlags::IN };
    fds.extend(heaps.iter().map(|heap| PollFd::from_borrowed_fd(heap.listener().as_fd(), knocks)));
    fds.extend(unidentified.iter().map(|unidentified| reads(unidentified.socket.as_fd())));
    let mut mail = false;
    for (_, link) in links {
        let outgoing = link.has_mail();
        mail |= outgoing;
        let flags = if outgoing { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN };
        fds.push(PollFd::from_borrowed_fd(link.socket().as_fd(), flags));
    }
    // Queued frames and new connections may also wait for a free file descriptor, for which there
    // is no notification.
    let pause = (mail || deaf || !unidentified.is_empty()).then_some(PAUSE);
    match poll(&mut fds, pause.as_ref()) {
        Ok(_) => {}
        Err(Errno::INTR) => return vec![false; fds.len() - 1],
        Err(errno) => {
            // Out of kernel memory, or RLIMIT_NOFILE was lowered below what is open: try again,
            // without spinning.
            NO_POLL.warn(format_args!(
                "the thread for symmetric memory cannot poll {} descriptors: {errno}",
                fds.len()
            ));
            std::thread::sleep(Duration::from_millis(10));
            return vec![false; fds.len() - 1];
        }
    }
    wake.reset();
    let wanted = PollFlags::IN | PollFlags::ERR | PollFlags::HUP;
    fds[1..].iter().map(|fd| fd.revents().intersects(wanted)).collect()
}

/// Returns true if a connection waits to be accepted, or if that is unknown.
fn has_connection(heap: &Heap) -> bool {
    let mut listener = [PollFd::from_borrowed_fd(heap.listener().as_fd(), PollFlags::IN)];
    let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut listener, Some(&at_once)) != Ok(0)
}

/// Accepts a limited number of connections of this user, so that links get their turn. A connection
/// is read before a later one can displace it. Returns false if no connection can be accepted now.
fn welcome(heap: &Arc<Heap>, unidentified: &mut Vec<Unidentified>) -> bool {
    for _ in 0..UNIDENTIFIED {
        let socket = match socket::accept(heap.listener()) {
            Ok(socket) => {
                heap.note_accept(0);
                socket
            }
            Err(Errno::AGAIN) => {
                heap.note_accept(0);
                return true;
            }
            Err(Errno::INTR | Errno::CONNABORTED) => continue,
            // No free file descriptor, or no memory. Without a free descriptor Linux fails even if
            // no connection waits.
            Err(errno) => {
                let waits = has_connection(heap);
                heap.note_accept(if waits { errno.raw_os_error() } else { 0 });
                return !waits;
            }
        };
        match socket::peer(&socket) {
            Ok(peer) if !peer.is_own_user() => {
                let PeerCredentials { uid, pid } = peer;
                OTHER_USERS.warn(format_args!(
                    "user {uid} (process {pid}) knocked at the symmetric \
                    memory of this one; refused"
                ));
            }
            Ok(peer) => {
                if unidentified.len() >= UNIDENTIFIED {
                    drop(introduced(unidentified.remove(0), true));
                }
                unidentified.push(Unidentified {
                    heap: Arc::clone(heap),
                    pid: peer.pid,
                    socket,
                    since: Instant::now(),
                });
            }
            Err(errno) => {
                UNKNOWN.warn(format_args!(
                    "somebody who knocked at the symmetric memory of this \
                    process cannot be identified: {errno}"
                ));
            }
        }
    }
    true
}

/// Returns the pending connection if it still has to introduce itself.
fn introduced(unidentified: Unidentified, ready: bool) -> Option<Unidentified> {
    let waiting = unidentified.since.elapsed() < INTRODUCTION;
    if !ready {
        return waiting.then_some(unidentified);
    }
    let mut buffer = [0; FRAME_BYTES + 1];
    match socket::receive(&unidentified.socket, &mut buffer) {
        Ok(Received { length: 0, .. }) => {}
        Ok(Received { length, fd: None, cut: false }) => {
            if let Err(violation) =
                unidentified.heap.admit(unidentified.pid, unidentified.socket, &buffer[..length])
            {
                let pid = unidentified.pid;
                REFUSED.warn(format_args!(
                    "process {pid}, which knocked at the symmetric memory of \
                    this one, {violation}; refused"
                ));
            }
        }
        Ok(_) => {
            let pid = unidentified.pid;
            REFUSED.warn(format_args!(
                "process {pid} knocked at the symmetric memory of this one \
                with descriptors; refused"
            ));
        }
        Err(Errno::AGAIN | Errno::INTR) => return waiting.then_some(unidentified),
        Err(errno) => log::info!(
            "process {}, which knocked at the symmetric memory of this one, has left: {errno}",
            unidentified.pid
        ),
    }
    None
}
