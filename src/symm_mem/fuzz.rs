//! Fuzz harness for the frames that a heap receives: no message may make it panic, or map anything
//! outside the range that it reserved.

use super::frame::{FRAME_BYTES, HeapFrame, HeapKey};
use super::heap::Heap;
use super::host::{HostMemory, PAGE};
use crate::mem::shm::ShmSegment;
use crate::sys::socket;
use rustix::fd::{AsFd, OwnedFd};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use std::sync::{Arc, OnceLock};

/// Size of a message in the fuzzer's input: kind, whether a file descriptor is attached, then three
/// words.
const STEP: usize = 2 + 3 * 8;
const PAGES: usize = 16;

struct Listener {
    heap: Arc<Heap>,
    /// Files that peers advertise: one is large enough for their whole heap, the other is not.
    files: [OwnedFd; 2],
}

static LISTENER: OnceLock<Listener> = OnceLock::new();

fn listener() -> &'static Listener {
    LISTENER.get_or_init(|| {
        let heap = Heap::new(Arc::new(HostMemory::with_span(PAGES * PAGE))).expect("a heap");
        heap.allocate(PAGE).expect("room");
        Listener {
            heap,
            files: [PAGES * PAGE, PAGE].map(|bytes| ShmSegment::create(bytes).expect("a file")),
        }
    })
}

fn step(bytes: &[u8]) -> (HeapFrame, Option<&'static OwnedFd>) {
    let word = |index: usize| u64::from_le_bytes(std::array::from_fn(|i| bytes[2 + 8 * index + i]));
    let (id, offset, length) = (word(0), word(1), word(2));
    let frame = match bytes[0] % 6 {
        0 => HeapFrame::Hello {
            to: [bytes[2]; 16],
            from: [bytes[3]; 16],
            link: offset,
            span: length,
        },
        1 => HeapFrame::Accepted { id },
        2 => HeapFrame::Refused { id },
        3 => HeapFrame::Withdraw { id },
        4 => HeapFrame::Gone { id },
        _ => HeapFrame::Offer { id, offset, bytes: length },
    };
    let files = &listener().files;
    (frame, [None, Some(&files[0]), Some(&files[0]), Some(&files[1])][usize::from(bytes[1] % 4)])
}

/// Plays a peer that introduces itself and then sends `bytes`.
pub fn messages(bytes: &[u8]) {
    if let Some(frame) = HeapFrame::decode(bytes) {
        assert_eq!(frame.encode()[..], *bytes);
    }
    let heap = &listener().heap;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let (near, far) =
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).expect("a pair");
    let from: HeapKey = [7; 16];
    let hello =
        HeapFrame::Hello { to: heap.address().key, from, link: 1, span: (PAGES * PAGE) as u64 };
    heap.admit(std::process::id(), near, &hello.encode()).expect("a right introduction");
    let Some(link) = heap.state().links.last().cloned() else { unreachable!("just admitted") };
    for bytes in bytes.chunks_exact(STEP).take(64) {
        let (frame, file) = step(bytes);
        // One message in sixteen is too short for this protocol.
        let text = &frame.encode()[..if bytes[1] >= 240 { FRAME_BYTES - 1 } else { FRAME_BYTES }];
        socket::send(&far, text, file.map(AsFd::as_fd)).expect("the queue is short");
        if link.receive(&**heap).is_err() {
            break;
        }
    }
    heap.state().links.clear();
}
