//! A peer's frames in its ring to this rank: no bytes may make a receiver panic, write outside a
//! receive's memory, or hang.
#![no_main]

#[path = "../peer.rs"]
mod peer;

use libfuzzer_sys::fuzz_target;
use peer::{CANARY, ME, PEER, blank, control};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use symm::coll::call::Span;
use symm::coll::message::{Message, MessageSpec};
use symm::completion::Completion;
use symm::dtype::DType;
use symm::health::Health;
use symm::mem::layout::{HEADER_BYTES, LINE_PAIR, RING_HEAD};
use symm::messages::Messages;
use symm::trace::GroupRecorder;

/// Sizes of the receive: a message that its sender publishes at once, or in parts.
const WANTED: [usize; 2] = [64, 20 << 10];

fuzz_target!(|data: &[u8]| {
    let Some((&[tail, flags, place], frames)) = data.split_first_chunk::<3>() else { return };
    let control = Arc::new(control());
    for (from, to) in [(ME, PEER), (PEER, ME)] {
        blank(&control, control.layout().ring(from, to), RING_HEAD);
    }
    blank(&control, 0, HEADER_BYTES);
    let (segment, ring) = (control.segment(), control.layout().ring(PEER, ME));
    let (capacity, wanted) =
        (control.layout().ring_data_bytes(), WANTED[usize::from(flags & 8 != 0)]);
    // Frames start at the ring's start or just before its end; the rest of the ring is zero.
    let begin = if place < 128 { 0 } else { capacity - 32 * (usize::from(place) - 127) };
    let bytes = frames.len().min(capacity - begin);
    let start = ring + RING_HEAD;
    // SAFETY: within the segment, which only this thread uses.
    unsafe {
        segment.ptr(start, capacity).write_bytes(0, 8192);
        segment.ptr(start + capacity - 8192, 8192).write_bytes(0, 8192);
        segment.ptr(start + begin, bytes).copy_from_nonoverlapping(frames.as_ptr(), bytes);
    }
    let recorder = GroupRecorder::new(&control, Duration::from_secs(60));
    let messages = Messages::new(&Health::new(&control, &Arc::default(), &recorder), false);
    let mut memory = vec![CANARY; 3 * wanted];
    let span = Span { addr: memory.as_mut_ptr() as usize + wanted, bytes: wanted };
    let message = |span| {
        // SAFETY: `memory` and `frames` outlive `messages`, which ends every open message.
        unsafe {
            Message::new(MessageSpec {
                peer: Some(PEER),
                tag: 0,
                dtype: DType::U8,
                span,
                timeout: None,
            })
        }
    };
    let source = Span { addr: frames.as_ptr() as usize, bytes };
    let counter = |index: usize| {
        // SAFETY: the counters at the head of the ring are atomics.
        unsafe { segment.at::<AtomicU64>(ring + index * LINE_PAIR) }
    };
    let quiet = || Completion::new(|_, _| {});
    if flags & 1 != 0 {
        let _ = messages.send(message(source), Duration::from_secs(60), quiet());
    }
    let _ = messages.recv(message(span), Duration::from_secs(60), quiet());
    // A valid tail, or one that no producer can have.
    let tail =
        if flags & 2 != 0 { u64::from(tail) << 56 | u64::from(tail) } else { 32 * u64::from(tail) };
    if flags & 4 != 0 {
        counter(1).store(tail.wrapping_mul(3), Ordering::Relaxed);
    }
    counter(0).store(tail, Ordering::Release);
    for _ in 0..64 {
        if !messages.progress() {
            break;
        }
    }
    messages.stop();
    recorder.leave();
    drop(messages);
    assert!(
        memory[..wanted].iter().chain(&memory[2 * wanted..]).all(|&byte| byte == CANARY),
        "written outside the receive"
    );
});
