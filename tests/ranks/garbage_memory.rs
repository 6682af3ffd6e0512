//! Garbage in the shared memory of a group.

use crate::hostile_memory::{PATIENCE, group_memory, message, pair, received, until};
use crate::threads::{Dice, call, run, span};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};
use symm::coll::call::{Collective, Span};
use symm::dtype::DType;
use symm::error::{Error, ErrorKind, Result};
use symm::group::Group;
use symm::mem::layout::{INLINE_BYTES, LINE_PAIR, POST_HEAD, RING_HEAD, SegmentLayout};
use symm::mem::shm::ShmSegment;
use symm::rank::Rank;

/// Runs several calls of two ranks on tensors in `room`.
fn calls(group: &Group, me: usize, room: &mut [i32]) -> Result<()> {
    let words = room.len();
    let part = |index: usize, count: usize| Span {
        addr: room.as_ptr() as usize + 4 * 1024 * index,
        bytes: 4 * count,
    };
    assert!(words >= 8 * 1024);
    let collective = |op, inputs, outputs| run(group, call(op, DType::I32, inputs, outputs), None);
    for count in [1, 300, 1000] {
        collective(Collective::AllReduce, vec![part(0, count)], vec![part(0, count)])?;
        let outputs = vec![part(2 + me, if me == 0 { count } else { 1 }); 2];
        collective(Collective::AllToAll, vec![part(0, count), part(1, 1)], outputs)?;
        let outputs = vec![part(4, count), part(5, count)];
        collective(Collective::AllGather, vec![part(0, count)], outputs)?;
        let (done, outcome) = received();
        let peer = 1 - me as u32;
        let ticket = if me == 0 {
            group.send(message(peer, 1, part(6, count)), done)?
        } else {
            group.recv(message(peer, 1, part(7, count)), done)?
        };
        group.wait(ticket, Some(Duration::from_secs(2)))?;
        outcome().unwrap_or(Ok(()))?;
    }
    Ok(())
}

/// Writes rank 1's part of the first collective. It matches rank 0's call, but rank 1 sends
/// `longest` bytes to itself and claims to have finished all stages.
fn forge_an_all_to_all(forger: &ShmSegment, bytes: u64, longest: u64) {
    let layout = SegmentLayout::new(2);
    let word = |offset: usize| {
        // SAFETY: atomics may be written anywhere within the segment.
        unsafe { forger.at::<AtomicU64>(offset) }
    };
    let [real, forged] = [Rank(0), Rank(1)].map(|rank| layout.post(rank, 1));
    until("the post of rank 0", || (word(real).load(Ordering::Acquire) == 1).then_some(()));
    let table = |place: usize| word(forged + POST_HEAD + INLINE_BYTES + 8 * place);
    // From word 8 on, the table holds the lengths that rank 1 sends to each rank, and then the
    // lengths that it expects.
    for (place, length) in [bytes, longest, bytes, longest].into_iter().enumerate() {
        table(8 + place).store(length, Ordering::Relaxed);
    }
    word(layout.member(Rank(1))).store(u64::MAX, Ordering::Relaxed);
    for place in [8, 16] {
        word(forged + place).store(word(real + place).load(Ordering::Relaxed), Ordering::Relaxed);
    }
    word(forged).store(1, Ordering::Release);
}

// proves P1
#[test]
fn stages_without_end_end_at_the_deadline_or_with_the_group() {
    for (timeout, aborted) in [(Duration::from_secs(2), false), (6 * PATIENCE, true)] {
        let (file, forger) = group_memory();
        let [victim, _silent] = pair(&file, timeout, false);
        let mut room = vec![0u8; 4 * 4096];
        let parts: Vec<Span> = room.chunks_mut(4096).map(span).collect();
        let (inputs, outputs) = (parts[..2].to_vec(), parts[2..].to_vec());
        let error = thread::scope(|scope| {
            let running = scope.spawn(|| {
                run(&victim, call(Collective::AllToAll, DType::I32, inputs, outputs), None)
            });
            forge_an_all_to_all(&forger, 4096, 1 << 60);
            if aborted {
                // SAFETY: atomics; the first word of a member is its stage.
                let stage =
                    unsafe { forger.at::<AtomicU64>(SegmentLayout::new(2).member(Rank(0))) };
                until("the 1000th stage of rank 0", || {
                    (stage.load(Ordering::Acquire) >= 1000).then_some(())
                });
                victim.abort();
            }
            let waiting = Instant::now() + PATIENCE;
            while !running.is_finished() && Instant::now() < waiting {
                thread::sleep(Duration::from_millis(5));
            }
            let ended = running.is_finished();
            victim.abort();
            let error = running.join().unwrap().expect_err("it never ends");
            assert!(ended, "the call outlasts its deadline or the group: {error}");
            error
        });
        let expected = if aborted { ErrorKind::Aborted } else { ErrorKind::Timeout };
        assert_eq!(error.kind, expected, "{error}");
        assert!(aborted || error.message.contains("s in all_to_all"), "{error}");
    }
}

#[test]
fn garbage_in_the_shared_memory_never_harms_a_rank() {
    let mut dice = Dice(0x9E37_79B9_7F4A_7C15);
    let layout = SegmentLayout::new(2);
    for round in 0..60 {
        let (file, forger) = group_memory();
        let groups = pair(&file, Duration::from_millis(150), round % 2 == 0);
        let stop = Arc::new(AtomicBool::new(false));
        thread::scope(|scope| {
            let ranks = [0, 1].map(|me| {
                let group = &groups[me];
                scope.spawn(move || -> Error {
                    let mut room = vec![0x5A5A_5A5Ai32; 10 * 1024];
                    // The next call may overwrite some garbage, so an error may take long, but it
                    // must come.
                    let error =
                        until("an error", || calls(group, me, &mut room[1024..9 * 1024]).err());
                    let mut around = room[..1024].iter().chain(&room[9 * 1024..]);
                    assert!(around.all(|&word| word == 0x5A5A_5A5A), "beside its tensors");
                    error
                })
            });
            let stopping = Arc::clone(&stop);
            let seed = dice.next() | 1;
            let vandal = scope.spawn(move || {
                let mut dice = Dice(seed);
                let values = [0, 1, 8, 9, 255, 1 << 20, 1 << 40, u64::MAX, u64::MAX - 7];
                while !stopping.load(Ordering::Relaxed) {
                    // Most writes hit structures: the header, the members' words, headers and
                    // tables of posts, counters of rings.
                    let rank = Rank(dice.below(2) as u32);
                    let areas = [
                        (0, 4096),
                        (layout.member(rank), 512),
                        (layout.post(rank, 0), 32),
                        (layout.post(rank, 1), layout.post_bytes()),
                        (layout.ring(rank, Rank(1 - rank.0)), 4 * LINE_PAIR),
                        (layout.ring(rank, Rank(1 - rank.0)) + RING_HEAD, 4096),
                    ];
                    let (offset, bytes) = areas[dice.below(areas.len() as u64) as usize];
                    let place = offset + 8 * dice.below(bytes as u64 / 8) as usize;
                    let value = match dice.below(3) {
                        0 => dice.next(),
                        1 => dice.below(1 << 12),
                        _ => values[dice.below(values.len() as u64) as usize],
                    };
                    // SAFETY: atomics may be written anywhere within the segment.
                    unsafe { forger.at::<AtomicU64>(place) }.store(value, Ordering::Relaxed);
                    if dice.below(4) == 0 {
                        thread::sleep(Duration::from_micros(dice.below(300)));
                    }
                }
            });
            let errors = ranks.map(thread::ScopedJoinHandle::join);
            stop.store(true, Ordering::Relaxed);
            vandal.join().unwrap();
            for error in errors {
                let error = error.expect("no rank panics");
                assert!(!error.message.contains("panicked"), "{error}");
            }
        });
    }
}
