//! Garbage that a faulty rank may leave in shared memory: a reader fails or computes nonsense, but
//! writes only its own tensors.

use crate::threads::{assemble, map, memory, span};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};
use symm::coll::call::Span;
use symm::coll::message::{Message, MessageSpec};
use symm::completion::Completion;
use symm::dtype::DType;
use symm::error::{ErrorKind, Result};
use symm::group::{Group, GroupTuning};
use symm::mem::layout::{LINE_PAIR, RING_HEAD, SegmentLayout};
use symm::mem::shm::ShmSegment;
use symm::rank::Rank;

pub(super) const PATIENCE: Duration = Duration::from_secs(20);

/// The memory of a group of two, and a mapping of it that belongs to no rank.
pub(super) fn group_memory() -> (OwnedFd, ShmSegment) {
    let file = memory(2);
    let forger = map(&file, 2);
    (file, forger)
}

/// Both ranks of a group of two. `timeout` is for their calls; a busy node may need longer to start
/// two threads.
pub(super) fn pair(file: &OwnedFd, timeout: Duration, direct: bool) -> [Group; 2] {
    let rank = |rank| {
        let tuning = GroupTuning { zero_copy: direct, ..GroupTuning::default() };
        assemble(file, rank, 2, PATIENCE, tuning)
    };
    let groups = thread::scope(|scope| {
        let other = scope.spawn(|| rank(1));
        [rank(0), other.join().unwrap()]
    });
    groups.iter().for_each(|group| group.set_timeout(timeout));
    groups
}

pub(super) fn message(peer: u32, tag: i32, span: Span) -> Message {
    // SAFETY: tests keep the memory until the message has ended.
    unsafe {
        Message::new(MessageSpec {
            peer: Some(Rank(peer)),
            tag,
            dtype: DType::U8,
            span,
            timeout: None,
        })
    }
}

/// Returns the completion of a send or receive, and a function that polls for the outcome.
pub(super) fn received() -> (Completion, impl Fn() -> Option<Result<()>>) {
    let (sender, receiver) = std::sync::mpsc::channel();
    let done = Completion::new(move |outcome, _| sender.send(outcome).unwrap_or(()));
    (done, move || receiver.try_recv().ok())
}

pub(super) fn until<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < deadline, "{what} did not happen");
        thread::sleep(Duration::from_millis(1));
    }
}

/// Memory that faults on every access after it has been freed.
struct Pages {
    base: *mut std::ffi::c_void,
    bytes: usize,
}

impl Pages {
    fn new(bytes: usize) -> Self {
        use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
        use std::ptr::null_mut;
        // SAFETY: a fresh mapping at an address of the kernel's choice touches no memory of this
        // process.
        let access = ProtFlags::READ | ProtFlags::WRITE;
        let base = unsafe { mmap_anonymous(null_mut(), bytes, access, MapFlags::PRIVATE) };
        Self { base: base.unwrap(), bytes }
    }

    fn span(&self) -> Span {
        Span { addr: self.base as usize, bytes: self.bytes }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`; all users of the span have finished with it.
        unsafe { rustix::mm::munmap(self.base, self.bytes) }.unwrap();
    }
}

/// The ring through which rank 1 sends to rank 0, written by the forger.
struct Ring<'a> {
    forger: &'a ShmSegment,
    tail: u64,
}

impl Ring<'_> {
    /// Writes four words as the next frame, and publishes `bytes` bytes.
    fn say(&mut self, words: [u64; 4], bytes: u64) {
        let layout = SegmentLayout::new(2);
        let base = layout.ring(Rank(1), Rank(0));
        let place = base + RING_HEAD + self.tail as usize % layout.ring_data_bytes();
        for (index, word) in words.into_iter().enumerate() {
            // SAFETY: atomics; frames are words of a ring.
            unsafe { self.forger.at::<AtomicU64>(place + 8 * index) }
                .store(word, Ordering::Relaxed);
        }
        self.tail += bytes;
        // SAFETY: the first word of a ring is its tail.
        unsafe { self.forger.at::<AtomicU64>(base) }.store(self.tail, Ordering::Release);
    }

    /// Number of bytes that rank 0 has read.
    fn read(&self) -> u64 {
        let base = SegmentLayout::new(2).ring(Rank(1), Rank(0));
        // SAFETY: the second counter of a ring is its head.
        unsafe { self.forger.at::<AtomicU64>(base + LINE_PAIR) }.load(Ordering::Acquire)
    }
}

#[test]
fn memory_of_a_send_that_has_failed_is_not_read_again() {
    let (file, _forger) = group_memory();
    let [sender, receiver] = pair(&file, PATIENCE, false);
    // More than the ring holds, so that some frames wait for space.
    let fit = (SegmentLayout::new(2).ring_data_bytes() / (60 << 10)) as i32;
    let sent: Vec<(Pages, _)> = (0..fit + 12)
        .map(|tag| {
            let (pages, (done, outcome)) = (Pages::new(60 << 10), received());
            sender.send(message(1, tag, pages.span()), done).unwrap();
            (pages, outcome)
        })
        .collect();
    sender.abort();
    // The progress thread may notice the abort first and report the outcomes.
    let failed = sent
        .iter()
        .filter(|(_, outcome)| until("an outcome of every send", outcome).is_err())
        .count();
    assert!(failed > 5, "{failed} were waiting");
    drop(sent);
    // The receiver frees space in the ring, which the failed sends must not use.
    for _ in 0..5 {
        receiver.progress();
        sender.progress();
    }
}

#[test]
fn forged_frames_end_no_transfer_of_others_and_stretch_none() {
    let (file, forger) = group_memory();
    let [victim, _silent] = pair(&file, PATIENCE, false);
    let mut ring = Ring { forger: &forger, tail: 0 };
    // A long message is announced (RTS) and requested twice (CTS): its memory must not be read
    // again once it has been sent.
    let pages = Pages::new(2 << 20);
    let (done, outcome) = received();
    let ticket = victim.send(message(1, 7, pages.span()), done).unwrap();
    for _ in 0..2 {
        ring.say([3, ticket, 2 << 20, 0], 32);
    }
    let error = until("an outcome", || {
        victim.progress();
        outcome()
    })
    .expect_err("nobody asks twice");
    assert_eq!(error.kind, ErrorKind::Internal, "{error}");
    assert!(error.message.contains("rank 1") && error.message.contains("malformed"), "{error}");
    drop(pages);
    victim.progress();
}

#[test]
fn a_frame_that_makes_no_sense_is_an_error_that_names_its_sender() {
    let cases = [
        ("an unknown kind", [9, 0, 0, 0]),
        ("longer than any short message", [1, 1, 1 << 40, 0]),
        ("a piece behind the end", [4, 1, 100, 100]),
        ("a piece of nothing", [4, 1, 0, 0]),
        ("an offset past all numbers", [4, 1, 100, u64::MAX]),
    ];
    for (what, words) in cases {
        assert_eq!(refused(16, &[(words, 32)]), [0; 16], "{what}");
    }
    // More short messages than a sender may have in flight.
    let short: Vec<_> = (1..=1025).map(|number| ([1, number, 0, 0], 32)).collect();
    assert_eq!(outcome_of(16, &short[..1024], false).0, None);
    refused(16, &short);
}

#[test]
fn messages_that_nobody_asks_for_are_left_to_their_sender_until_somebody_does() {
    const CAP: u64 = 64 << 20;
    let (file, forger) = group_memory();
    let [victim, _silent] = pair(&file, PATIENCE, false);
    let mut ring = Ring { forger: &forger, tail: 0 };
    let mut numbers = 1u64..;
    let mut number = || numbers.next().unwrap();
    let mut flood = |ring: &mut Ring<'_>, frames: u64| {
        let begun = ring.read();
        for _ in 0..frames {
            if ring.tail - ring.read() > 256 << 10 {
                victim.progress();
                if ring.tail - ring.read() > 256 << 10 {
                    break;
                }
            }
            ring.say([2 | 5 << 32, number(), 1, 0], 32);
        }
        (ring.read() - begun) / 32
    };
    // A pending RTS counts at least as many bytes towards the receiver's limit as it has in the
    // ring.
    let taken = flood(&mut ring, 2 * CAP / 32);
    assert!((100_000..CAP / 32).contains(&taken), "{taken} offers");
    assert_eq!(flood(&mut ring, 1), 0, "it is not heard");
    // A receive with another tag has to search past all pending RTS frames.
    let mut room = [0u8; 16];
    let (done, outcome) = received();
    victim.recv(message(1, 6, span(&mut room)), done).unwrap();
    ring.say([1 | 6 << 32, u64::MAX >> 1, 16, 0], 64);
    until("the message behind the flood", || {
        victim.progress();
        outcome()
    })
    .unwrap();
    assert_eq!(ring.read(), ring.tail);
    assert_eq!(flood(&mut ring, CAP), 0, "nor is it now");
}

/// The words of a frame, and its size in the ring.
type Frame = ([u64; 4], u64);

/// Returns the outcome of a receive of `bytes` bytes while rank 1 writes `frames`, and the received
/// bytes. If `expected` is true, waits for the outcome; otherwise returns `None` unless the outcome
/// is known at once.
fn outcome_of(bytes: usize, frames: &[Frame], expected: bool) -> (Option<Result<()>>, Vec<u8>) {
    let (file, forger) = group_memory();
    let [victim, _silent] = pair(&file, PATIENCE, false);
    let mut ring = Ring { forger: &forger, tail: 0 };
    let mut room = vec![0u8; bytes];
    let (done, outcome) = received();
    victim.recv(message(1, 3, span(&mut room)), done).unwrap();
    for &(words, taken) in frames {
        ring.say(words, taken);
        victim.progress();
    }
    // The progress thread may be reading the last frame, and may report the outcome a moment later.
    let found = if expected { Some(until("an outcome", outcome)) } else { outcome() };
    victim.abort();
    (found, room)
}

fn accepted(bytes: usize, frames: &[Frame]) {
    assert_eq!(outcome_of(bytes, frames, true).0, Some(Ok(())));
}

/// Asserts that the receive fails, because no correct sender writes such frames; returns the
/// received bytes.
fn refused(bytes: usize, frames: &[Frame]) -> Vec<u8> {
    let (outcome, room) = outcome_of(bytes, frames, true);
    let error = outcome.expect("an outcome").expect_err("malformed");
    assert!(error.kind == ErrorKind::Internal && error.message.contains("rank 1"), "{error}");
    room
}

#[test]
fn a_second_message_of_a_number_takes_nobodys_place() {
    let offer = |number: u64| ([2 | 3 << 32, number, 16, 4096], 32);
    refused(16, &[offer(77), offer(77)]);
    refused(16, &[offer(77), offer(76)]);
    let short = |number: u64| ([1 | 4 << 32, number, 16, 0], 64);
    refused(16, &[short(77), short(77)]);
    accepted(16, &[short(77), short(78), offer(79), ([4 | 3 << 32, 79, 16, 0], 64)]);
}

#[test]
fn pieces_complete_a_message_in_order_and_once_each() {
    const BYTES: usize = 64 << 10;
    let offer = ([2 | 3 << 32, 77, BYTES as u64, 4096], 32);
    let piece = |bytes: usize, from: u64| ([4 | 3 << 32, 77, bytes as u64, from], 32 + (32 << 10));
    let half = BYTES as u64 / 2;
    accepted(BYTES, &[offer, piece(BYTES, 0), piece(BYTES, half)]);
    refused(BYTES, &[offer, piece(BYTES, 0), piece(BYTES, 0)]);
    refused(BYTES, &[offer, piece(BYTES, half)]);
    refused(BYTES, &[offer, piece(2 * BYTES, 0)]);
    assert_eq!(outcome_of(BYTES, &[offer, piece(BYTES, 0)], false).0, None, "half of it has come");
}

#[test]
fn a_message_whose_rest_does_not_come_is_no_message() {
    const BYTES: u64 = 40 << 10;
    let begun = ([1 | 3 << 32, 77, BYTES, 0], 32 + (16 << 10));
    // The next part of the same message has no header: it starts with payload.
    let more = |bytes: u64| ([u64::MAX; 4], bytes);
    accepted(BYTES as usize, &[begun, more(8 << 10), more(16 << 10)]);
    let (outcome, _) = outcome_of(BYTES as usize, &[begun, more(8 << 10)], false);
    assert_eq!(outcome, None, "24 of 40 KB have come");
    refused(BYTES as usize, &[([1 | 3 << 32, 77, BYTES, 0], 32)]);
    let (outcome, _) = outcome_of(16, &[begun, more(24 << 10)], true);
    let other = outcome.expect("an outcome").expect_err("it is longer than the receive");
    assert_eq!(other.kind, ErrorKind::Mismatch, "{other}");
}

#[test]
fn a_wait_that_panics_leaves_what_is_open_to_the_progress_thread() {
    until("a wait that meets its message", || {
        let (file, forger) = group_memory();
        let [victim, silent] = pair(&file, PATIENCE, false);
        let mut ring = Ring { forger: &forger, tail: 0 };
        let (mut first, mut second) = ([0u8; 16], [0u8; 16]);
        let panics = Completion::new(|_, _| panic!("a completion's bug"));
        let ticket = victim.recv(message(1, 3, span(&mut first)), panics).unwrap();
        let (done, outcome) = received();
        victim.recv(message(1, 4, span(&mut second)), done).unwrap();
        let panicked = thread::scope(|scope| {
            let waiting = scope.spawn(|| {
                std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                    victim.wait(ticket, Some(PATIENCE))
                }))
            });
            until("the wait", || silent.control().is_progressing(Rank(0)).then_some(()));
            ring.say([1 | 3 << 32, 1, 16, 0], 64);
            waiting.join().unwrap().is_err()
        });
        // If the progress thread was about to check when the wait started, it completes the
        // message, and the test repeats the attempt.
        panicked.then(|| {
            ring.say([1 | 4 << 32, 2, 16, 0], 64);
            until("the second message", &outcome).unwrap();
        })
    });
}
