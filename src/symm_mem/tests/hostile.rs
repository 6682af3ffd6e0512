//! Hostile peers that violate the protocol: their messages are rejected, their link is closed, and
//! all other peers are served.
#![allow(unsafe_code, reason = "tests write where a heap says that memory lies, and fork")]

use super::host::PAGE;
use super::*;
use crate::mem::shm::ShmSegment;
use crate::symm_mem::frame::{FRAME_BYTES, HeapFrame};
use crate::sys::fork::tests::{forked, status_of};
use crate::sys::random;
use crate::sys::socket;
use rustix::fd::{AsFd, AsRawFd, OwnedFd};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::io::Write as _;

/// A peer that sends what the test wants.
pub(in crate::symm_mem) struct Raw {
    socket: OwnedFd,
    key: [u8; 16],
    number: u64,
}

impl Raw {
    fn knock(heap: &Heap) -> OwnedFd {
        socket::connect_to(&heap.address().name()).expect("connects")
    }

    pub(in crate::symm_mem) fn new(heap: &Heap) -> Self {
        let (socket, key) = (Self::knock(heap), random::bytes().expect("random"));
        let number = u64::from_le_bytes(random::bytes().expect("random"));
        let raw = Self { socket, key, number };
        raw.say(HeapFrame::Hello {
            to: heap.address().key,
            from: key,
            link: number,
            span: 16 * PAGE as u64,
        });
        raw
    }

    /// Returns the claim of `heap` to this link.
    pub(in crate::symm_mem) fn hold(&self, heap: &Heap) -> LinkRef {
        let address = HeapAddress { key: self.key, listener: [0; 16], span: 0 };
        heap.meet(&address, self.number, &healthy(), Instant::now() + PATIENCE)
            .expect("the thread runs")
            .expect("admitted")
    }

    pub(in crate::symm_mem) fn say(&self, frame: HeapFrame) {
        self.send(&frame.encode());
    }

    fn send(&self, bytes: &[u8]) {
        socket::send(&self.socket, bytes, None).expect("sent");
    }

    fn offer(&self, id: u64, offset: usize, bytes: usize) {
        let file = ShmSegment::create(16 * PAGE).expect("memfd");
        let frame = HeapFrame::Offer { id, offset: offset as u64, bytes: bytes as u64 };
        socket::send(&self.socket, &frame.encode(), Some(file.as_fd())).expect("sent");
    }

    fn hear(&self) -> Option<HeapFrame> {
        hear(&self.socket)
    }
}

/// Returns the next message; `None` if the other end has closed.
fn hear(socket: &OwnedFd) -> Option<HeapFrame> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let mut buffer = [0; FRAME_BYTES];
        match socket::receive(socket, &mut buffer) {
            Ok(received) if received.length == 0 => return None,
            Ok(received) => {
                return Some(HeapFrame::decode(&buffer[..received.length]).expect("a message"));
            }
            Err(Errno::AGAIN | Errno::INTR) => std::thread::sleep(Duration::from_millis(1)),
            Err(_) => return None,
        }
        assert!(Instant::now() < deadline, "nothing was heard");
    }
}

// proves P20
#[test]
fn who_breaks_the_rules_is_cut_off() {
    let (heap, _) = heap(16);
    let _attention = heap.attend().expect("runs");
    type Deed = fn(&Raw);
    let cases: [(&str, Deed); 15] = [
        ("a short message", |raw| raw.send(&HeapFrame::Gone { id: 1 }.encode()[..20])),
        ("a long message", |raw| raw.send(&[0; FRAME_BYTES + 8])),
        ("nonsense", |raw| raw.send(&[7; FRAME_BYTES])),
        ("no descriptor", |raw| raw.say(HeapFrame::Offer { id: 1, offset: 0, bytes: PAGE as u64 })),
        ("a stray descriptor", |raw| {
            let file = ShmSegment::create(PAGE).expect("memfd");
            let frame = HeapFrame::Gone { id: 1 }.encode();
            socket::send(&raw.socket, &frame, Some(file.as_fd())).expect("sent");
        }),
        ("behind the end", |raw| raw.offer(1, 16 * PAGE, PAGE)),
        ("across the end", |raw| raw.offer(1, 15 * PAGE, 2 * PAGE)),
        ("past all numbers", |raw| raw.offer(1, PAGE, usize::MAX)),
        ("nothing", |raw| raw.offer(1, PAGE, 0)),
        ("an overlap", |raw| {
            raw.offer(1, 0, 2 * PAGE);
            raw.offer(2, PAGE, PAGE);
        }),
        ("the same number", |raw| {
            raw.offer(1, 0, PAGE);
            raw.offer(1, 4 * PAGE, PAGE);
        }),
        ("an unknown withdrawal", |raw| raw.say(HeapFrame::Withdraw { id: 3 })),
        ("two withdrawals", |raw| {
            raw.offer(1, 0, PAGE);
            raw.say(HeapFrame::Withdraw { id: 1 });
            raw.say(HeapFrame::Withdraw { id: 1 });
        }),
        ("an answer to no offer", |raw| raw.say(HeapFrame::Accepted { id: 1 << 40 })),
        ("an introduction", |raw| {
            raw.say(HeapFrame::Hello { to: [0; 16], from: [0; 16], link: 1, span: 1 })
        }),
    ];
    let friend = Raw::new(&heap);
    let friendly = friend.hold(&heap);
    for (what, deed) in cases {
        let raw = Raw::new(&heap);
        let hold = raw.hold(&heap);
        deed(&raw);
        until(what, || hold.link().is_closed());
        assert!(!heap.reachable(heap.base(), 1, std::iter::once(&hold), PATIENCE), "{what}");
        drop(hold);
        while raw.hear().is_some() {}
    }
    assert!(!friendly.link().is_closed(), "others are served");
    friend.offer(1, 0, PAGE);
    assert_eq!(friend.hear(), Some(HeapFrame::Accepted { id: 1 }));
}

#[test]
fn who_does_not_introduce_itself_is_not_let_in() {
    let (heap, _) = heap(16);
    let _attention = heap.attend().expect("runs");
    let address = heap.address();
    let hello = |to, link, span| HeapFrame::Hello { to, from: [9; 16], link, span };
    let taken = Raw::new(&heap);
    let hold = taken.hold(&heap);
    let span = PAGE as u64;
    for (what, frame) in [
        ("the listener's name is not the key", hello(address.listener, 1, span)),
        ("no heap is that large", hello(address.key, 2, 1 << 60)),
        ("no heap is that small", hello(address.key, 3, 0)),
        ("another link has that number", hello(address.key, taken.number, span)),
        ("no introduction", HeapFrame::Accepted { id: 1 }),
    ] {
        let socket = Raw::knock(&heap);
        socket::send(&socket, &frame.encode(), None).expect("sent");
        assert_eq!(hear(&socket), None, "{what}");
    }
    let socket = Raw::knock(&heap);
    socket::send(&socket, &hello(address.key, 4, span).encode(), Some(socket.as_fd()))
        .expect("sent");
    assert_eq!(hear(&socket), None, "a descriptor came along");
    assert!(!hold.link().is_closed());
}

#[test]
fn p20_memory_that_could_be_cut_short_is_refused_and_the_link_stays() {
    let (heap, _) = heap(16);
    let _attention = heap.attend().expect("runs");
    let raw = Raw::new(&heap);
    let hold = raw.hold(&heap);
    let memory = |bytes: usize, seals: SealFlags| {
        let file =
            memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).expect("memfd");
        ftruncate(&file, bytes as u64).expect("sized");
        fcntl_add_seals(&file, seals).expect("sealed");
        file
    };
    let (pipe, _other) = rustix::pipe::pipe().expect("a pipe");
    let cases = [
        ("not sealed", memory(16 * PAGE, SealFlags::empty())),
        ("sealed against growth alone", memory(16 * PAGE, SealFlags::GROW)),
        ("too short", memory(PAGE, SealFlags::SHRINK)),
        ("a pipe", pipe),
        ("a file", tempfile::tempfile().expect("a file").into()),
    ];
    for (id, (what, file)) in (1..).zip(&cases) {
        let frame = HeapFrame::Offer { id, offset: 2 * PAGE as u64, bytes: PAGE as u64 };
        socket::send(&raw.socket, &frame.encode(), Some(file.as_fd())).expect("sent");
        assert_eq!(raw.hear(), Some(HeapFrame::Refused { id }), "{what}");
    }
    assert_eq!(mapped(&hold), 0);
    raw.offer(9, 2 * PAGE, PAGE);
    assert_eq!(raw.hear(), Some(HeapFrame::Accepted { id: 9 }));
}

/// Must not allocate: it runs between `fork` and `_exit`.
fn knock_as_another_user(address: &rustix::net::SocketAddrUnix, hello: &[u8]) -> i32 {
    // SAFETY: system calls on values and on memory that outlives them.
    unsafe {
        if libc::setresuid(65534, 65534, 65534) != 0 {
            return 9;
        }
        let (family, kind) = (rustix::net::AddressFamily::UNIX, rustix::net::SocketType::SEQPACKET);
        let Ok(socket) =
            rustix::net::socket_with(family, kind, rustix::net::SocketFlags::CLOEXEC, None)
        else {
            return 8;
        };
        if rustix::net::connect(&socket, address).is_err() {
            return 7;
        }
        let mut buffer = [0u8; 256];
        let fd = std::os::fd::AsRawFd::as_raw_fd(&socket);
        libc::send(fd, hello.as_ptr().cast(), hello.len(), libc::MSG_NOSIGNAL);
        let mut ready = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
        let closed = libc::poll(&raw mut ready, 1, 10_000) == 1
            && libc::recv(fd, buffer.as_mut_ptr().cast(), buffer.len(), 0) <= 0;
        i32::from(!closed)
    }
}

#[test]
fn p19_another_user_is_not_linked_even_with_the_right_words() {
    if !rustix::process::geteuid().is_root() {
        let _ = writeln!(std::io::stderr(), "skipped: only root can become another user");
        return;
    }
    let (heap, _) = heap(16);
    let _attention = heap.attend().expect("runs");
    let address = rustix::net::SocketAddrUnix::new_abstract_name(heap.address().name().as_bytes())
        .expect("a name");
    let hello =
        HeapFrame::Hello { to: heap.address().key, from: [9; 16], link: 1, span: PAGE as u64 }
            .encode();
    let child = forked(|| {
        let code = knock_as_another_user(&address, &hello);
        assert_eq!(code, 0, "9: no other user, 8: no socket, 7: no listener, 1: let in");
        true
    });
    assert_eq!(status_of(child), 0, "it was let in");
    let from = HeapAddress { key: [9; 16], listener: [0; 16], span: 0 };
    assert!(
        heap.meet(&from, 1, &healthy(), Instant::now() + Duration::from_millis(50))
            .expect("runs")
            .is_none()
    );
}

#[test]
fn random_messages_never_harm() {
    let (heap, _) = heap(16);
    let _attention = heap.attend().expect("runs");
    let mut seed = 0x1234_5678_9ABC_DEFFu64;
    let mut next = |below: u64| {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        seed % below
    };
    for _ in 0..60 {
        let raw = Raw::new(&heap);
        let hold = raw.hold(&heap);
        for _ in 0..30 {
            let (id, page) = (next(4), PAGE as u64);
            let frame = match next(7) {
                0 | 1 => HeapFrame::Offer { id, offset: next(20) * page, bytes: next(4) * page },
                2 => HeapFrame::Withdraw { id },
                3 => HeapFrame::Accepted { id },
                4 => HeapFrame::Gone { id },
                5 => HeapFrame::Refused { id },
                _ => HeapFrame::Offer { id, offset: next(u64::MAX), bytes: next(u64::MAX) },
            };
            let file = ShmSegment::create(PAGE).expect("memfd");
            let mut bytes = frame.encode();
            if next(10) == 0 {
                bytes[next(FRAME_BYTES as u64) as usize] ^= 1 << next(8);
            }
            // Fails once the link has been closed.
            let _ = socket::send(&raw.socket, &bytes, (next(2) == 0).then(|| file.as_fd()));
        }
        drop(raw);
        until("the link closed", || hold.link().is_closed());
    }
    let friend = Raw::new(&heap);
    let _hold = friend.hold(&heap);
    friend.offer(1, 0, PAGE);
    assert_eq!(friend.hear(), Some(HeapFrame::Accepted { id: 1 }));
}

#[test]
fn who_does_not_answer_is_waited_for_once() {
    let (heap, _) = heap(16);
    let raw = Raw::new(&heap);
    let hold = raw.hold(&heap);
    let (one, two) = (heap.allocate(PAGE).expect("room"), heap.allocate(PAGE).expect("room"));
    let wait = Duration::from_millis(200);
    let begun = Instant::now();
    assert!(!heap.reachable(one, 8, std::iter::once(&hold), wait));
    assert!(begun.elapsed() >= wait);
    let begun = Instant::now();
    assert!(!heap.reachable(two, 8, std::iter::once(&hold), PATIENCE));
    heap.release(two).expect("known");
    assert!(begun.elapsed() < PATIENCE / 2, "{:?}", begun.elapsed());
    let Some(HeapFrame::Offer { id, .. }) = raw.hear() else { panic!("an offer") };
    raw.say(HeapFrame::Accepted { id });
    until("it counts again", || heap.reachable(one, 8, std::iter::once(&hold), Duration::ZERO));
}

#[test]
fn a_link_that_does_not_come_is_waited_for_until_the_deadline() {
    let (heap, _) = heap(16);
    let address = HeapAddress { key: [1; 16], listener: [2; 16], span: PAGE as u64 };
    assert!(
        heap.meet(&address, 7, &healthy(), Instant::now() + Duration::from_millis(50))
            .expect("runs")
            .is_none()
    );
    assert!(
        heap.connect(&address, &healthy(), Instant::now() + PATIENCE).is_err(),
        "nobody listens there"
    );
    let raw = Raw::new(&heap);
    let _hold = raw.hold(&heap);
    assert!(
        heap.meet(&address, raw.number, &healthy(), Instant::now() + Duration::from_millis(50))
            .expect("runs")
            .is_none(),
        "another's"
    );
}

#[test]
fn silent_connections_keep_no_peer_out() {
    // In a separate process, because the limit applies to all heaps of a process.
    let child = forked(|| {
        let ((heap, _), (other, _)) = (heap(16), heap(16));
        let _attention = heap.attend().expect("runs");
        let name = heap.address().name();
        let mut silent = Vec::new();
        while silent.len() < 200 {
            match socket::connect_to(&name) {
                Ok(socket) => silent.push(socket),
                // The queue is full until the thread has accepted some.
                Err(errno) => {
                    assert_eq!(errno, Errno::AGAIN);
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
        }
        let begun = Instant::now();
        let (near, far) = link(&other, &heap, &healthy());
        assert!(begun.elapsed() < Duration::from_secs(4), "{:?}", begun.elapsed());
        assert!(!near.link().is_closed() && !far.link().is_closed());
        assert_eq!(hear(&silent[0]), None, "the oldest was closed");
        true
    });
    assert_eq!(status_of(child), 0);
}

#[test]
fn a_full_queue_is_tried_again_until_the_deadline() {
    let (heap, _) = heap(16);
    let _attention = heap.attend().expect("runs");
    let key = random::bytes().expect("random");
    let address = HeapAddress { key, listener: key, span: PAGE as u64 };
    let listener = socket::listen_at(&address.name(), 0).expect("listens");
    let _queued = socket::connect_to(&address.name()).expect("connects");
    assert_eq!(socket::connect_to(&address.name()).expect_err("full"), Errno::AGAIN);
    let (begun, wait) = (Instant::now(), Duration::from_millis(50));
    assert!(heap.connect(&address, &healthy(), begun + wait).is_err());
    assert!(begun.elapsed() >= wait);
    std::thread::scope(|scope| {
        let connected =
            scope.spawn(|| heap.connect(&address, &healthy(), Instant::now() + PATIENCE).is_ok());
        std::thread::sleep(Duration::from_millis(20));
        socket::accept(&listener).expect("the queued one");
        assert!(connected.join().expect("no panic"));
    });
}

#[test]
fn a_segment_that_begins_within_a_page_is_refused_and_the_link_goes_on() {
    let (heap, _) = heap(16);
    let _attention = heap.attend().expect("runs");
    let raw = Raw::new(&heap);
    let hold = raw.hold(&heap);
    raw.offer(1, 112, PAGE);
    raw.offer(2, 4 * PAGE, PAGE);
    let mut received = [raw.hear(), raw.hear()];
    received.sort_by_key(|frame| matches!(frame, Some(HeapFrame::Accepted { .. })));
    assert_eq!(received, [Some(HeapFrame::Refused { id: 1 }), Some(HeapFrame::Accepted { id: 2 })]);
    assert_eq!(mapped(&hold), 1);
}

#[test]
fn a_moment_without_a_free_descriptor_costs_one_segment() {
    let child = forked(|| {
        let (own, _) = heap(16);
        let _attention = own.attend().expect("runs");
        let raw = Raw::new(&own);
        let hold = raw.hold(&own);
        let file = ShmSegment::create(16 * PAGE).expect("memfd");
        let offer = |id| {
            let frame = HeapFrame::Offer { id, offset: id * PAGE as u64, bytes: PAGE as u64 };
            socket::send(&raw.socket, &frame.encode(), Some(file.as_fd())).expect("sent");
            raw.hear()
        };
        let limit = getrlimit(Resource::Nofile);
        let free = rustix::io::dup(&raw.socket).expect("a descriptor").as_raw_fd() as u64;
        setrlimit(Resource::Nofile, Rlimit { current: Some(free), ..limit }).expect("lowered");
        assert_eq!(offer(1), Some(HeapFrame::Refused { id: 1 }));
        setrlimit(Resource::Nofile, limit).expect("as before");
        assert_eq!(offer(2), Some(HeapFrame::Accepted { id: 2 }));
        raw.say(HeapFrame::Withdraw { id: 1 });
        assert_eq!(raw.hear(), Some(HeapFrame::Gone { id: 1 }));
        !hold.link().is_closed()
    });
    assert_eq!(status_of(child), 0);
}
