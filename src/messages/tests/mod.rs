//! Links that fail, reads that end early, and deadlines.

mod links;
pub(crate) mod thread_wires;
mod wire_frames;
mod wires;

use super::frame::RING;
use super::reading::DIRECT_READ_MAX_BYTES;
use super::*;
use crate::control::Identity;
use crate::dtype::DType;
use crate::error::ErrorKind;
use crate::mem::layout::SegmentLayout;
use crate::mem::shm::ShmSegment;
use crate::trace::GroupRecorder;
use std::sync::mpsc::{Receiver, channel};

/// A pid that no process has, so reading its memory fails.
const NOBODY: u32 = i32::MAX as u32;
const PATIENCE: Duration = Duration::from_secs(10);

/// Returns the health of the group of `control`, which has no GPUs.
fn health(control: &Arc<ControlBlock>) -> Arc<Health> {
    Health::new(control, &Arc::default(), &GroupRecorder::new(control, PATIENCE))
}

/// Returns three ranks of this process. Rank 0 believes that it cannot read the memory of rank 1.
fn ranks() -> Vec<Arc<Messages>> {
    let bytes = SegmentLayout::new(3).total_bytes();
    let file = ShmSegment::create(bytes).expect("memfd");
    let rank = |rank| {
        let segment = ShmSegment::map(file.try_clone().expect("dup"), bytes).expect("map");
        let pid = |peer| if rank == 0 && peer == 1 { NOBODY } else { std::process::id() };
        let members = (0..3).map(|global| Identity { pid: pid(global), global }).collect();
        let control = Arc::new(ControlBlock::new(segment, Rank(rank), "test".into(), members, 1));
        Messages::new(&health(&control), true)
    };
    (0..3).map(rank).collect()
}

fn span(bytes: &mut [u8]) -> Span {
    Span { addr: bytes.as_mut_ptr() as usize, bytes: bytes.len() }
}

fn quiet() -> Completion {
    Completion::new(|_, _| {})
}

/// Returns a completion whose outcome goes to the receiver.
fn reported() -> (Completion, Receiver<Result<()>>) {
    let (tell, told) = channel();
    (Completion::new(move |outcome, _| tell.send(outcome).expect("waited for")), told)
}

/// Posts a receive of rank 0 into `to`, for which rank 2 offers `from`. Returns the state of rank
/// 0, the ticket and the outcome.
fn offered<'a>(
    ranks: &'a [Arc<Messages>],
    from: &mut [u8],
    to: &mut [u8],
) -> (MutexGuard<'a, MessageTable>, u64, Receiver<Result<()>>) {
    let (completion, told) = reported();
    let mut state = ranks[0].lock();
    let ticket = state.ticket();
    state.matching.posted.push_back(Posted {
        ticket,
        peer: Some(Rank(2)),
        tag: 3,
        span: span(to),
        limit: CallTimeout::from(Instant::now(), PATIENCE),
        completion,
        dtype: DType::U8,
    });
    ranks[2].send(message(Rank(0), span(from)), PATIENCE, quiet()).expect("begun");
    assert!(ranks[0].advance(&mut state), "an offer");
    (state, ticket, told)
}

fn message(peer: Rank, span: Span) -> Message {
    Message::of(MessageSpec { peer: Some(peer), tag: 3, dtype: DType::U8, span, timeout: None })
}

#[test]
fn a_peer_that_cannot_be_read_is_not_tried_again_and_others_are_read() {
    let ranks = ranks();
    let readable = || {
        [1, 2].map(|peer: usize| {
            ranks[0].lock().peers[peer].ring().expect("it is near").is_readable()
        })
    };
    for (peer, value, expected) in [
        (2, 7u8, [true, true]),
        (1, 8, [false, true]),
        (2, 9, [false, true]),
        (1, 10, [false, true]),
    ] {
        let (mut from, mut to) = (vec![value; RING.eager + 1], vec![0u8; RING.eager + 1]);
        let (source, target) = (span(&mut from), span(&mut to));
        let sent = ranks[peer].send(message(Rank(0), source), PATIENCE, quiet()).expect("begun");
        // The sender does not wait in a call, so the receiver would read the sender's memory.
        let received =
            ranks[0].recv(message(Rank(peer as u32), target), PATIENCE, quiet()).expect("begun");
        ranks[0].wait(received, None).expect("within its time");
        ranks[peer].wait(sent, None).expect("within its time");
        assert_eq!((to, readable()), (from, expected), "{value} from rank {peer}");
    }
    ranks.iter().for_each(|rank| rank.stop());
}

#[test]
fn a_completion_that_blocks_delays_neither_messages_nor_deadlines() {
    for waits in [false, true] {
        let ranks = ranks();
        let (mut first, mut missing, mut late) = ([0u8], [0u8], [0u8]);
        let [first, missing, late] = [&mut first, &mut missing, &mut late].map(|bytes| span(bytes));
        let tagged =
            |peer, tag, span| Message::of(MessageSpec { tag, ..*message(Rank(peer), span) });
        // The completion returns only once the other receives have ended. The progress thread calls
        // it, or a thread that waits for the message.
        let ((entered, inside), (release, released)) = (channel(), channel());
        let slow = Completion::new(move |_, _| {
            entered.send(()).expect("waited for");
            released.recv_timeout(2 * PATIENCE).expect("the others have ended");
        });
        let begun = ranks[0].recv(tagged(2, 3, first), PATIENCE, slow).expect("begun");
        std::thread::scope(|scope| {
            if waits {
                scope.spawn(|| ranks[0].wait(begun, None).expect("completed"));
                while ranks[0].lock().waiting_threads == 0 {
                    std::thread::yield_now();
                }
            }
            ranks[2].send(tagged(0, 3, span(&mut [1])), PATIENCE, quiet()).expect("begun");
            inside.recv_timeout(PATIENCE).expect("a thread completes it");
            let ((completion, told), (done, came)) = (reported(), reported());
            let limit = Duration::from_millis(100);
            ranks[0].recv(tagged(2, 5, late), PATIENCE, done).expect("begun");
            ranks[2].send(tagged(0, 5, span(&mut [2])), PATIENCE, quiet()).expect("begun");
            assert_eq!(came.recv_timeout(PATIENCE), Ok(Ok(())), "a thread waits: {waits}");
            ranks[0].recv(tagged(2, 4, missing), limit, completion).expect("begun");
            let error = told.recv_timeout(PATIENCE).expect("completed").expect_err("never sent");
            assert!(error.message.contains("reached its timeout after"), "{error}");
            release.send(()).expect("waited for");
        });
        ranks.iter().for_each(|rank| rank.stop());
    }
}

#[test]
fn a_completion_waits_for_a_message_that_ends_at_the_same_time() {
    // Both messages arrive in one call of `advance`, or both fail, and a thread that waits for the
    // first one calls its completion, or the progress thread does.
    for (fails, waits) in [(false, false), (false, true), (true, false), (true, true)] {
        let ranks = ranks();
        let mut came = [0u8; 2];
        let (one, two) = came.split_at_mut(1);
        let (one, two) = (span(one), span(two));
        let tagged =
            |peer, tag, span| Message::of(MessageSpec { tag, ..*message(Rank(peer), span) });
        let (ticket, second) = channel();
        let (tell, told) = channel();
        let rank = Arc::clone(&ranks[0]);
        let nested = Completion::new(move |_, _| {
            let second = second.recv_timeout(PATIENCE).expect("begun");
            tell.send(rank.wait(second, Some(PATIENCE))).expect("waited for");
        });
        let first = ranks[0].recv(tagged(2, 3, one), 3 * PATIENCE, nested).expect("begun");
        let (done, outcome) = reported();
        ticket
            .send(ranks[0].recv(tagged(2, 4, two), 3 * PATIENCE, done).expect("begun"))
            .expect("waited for");
        std::thread::scope(|scope| {
            if waits {
                scope.spawn(|| ranks[0].wait(first, None).expect("completed"));
                while ranks[0].lock().waiting_threads == 0 {
                    std::thread::yield_now();
                }
            }
            let state = ranks[0].lock();
            if fails {
                drop(state);
                ranks[0].health.fail(Error::aborted("the group ends"));
            } else {
                for tag in [3, 4] {
                    let sent = tagged(0, tag, span(&mut [7]));
                    ranks[2].send(sent, PATIENCE, quiet()).expect("sent");
                }
                drop(state);
            }
            let waited = told.recv_timeout(2 * PATIENCE).expect("the completion returns");
            assert_eq!(waited, Ok(()), "fails: {fails}, a thread waits: {waits}");
            let outcome = outcome.recv_timeout(PATIENCE).expect("the second has ended");
            assert_eq!(outcome.is_err(), fails, "{outcome:?}");
        });
        ranks.iter().for_each(|rank| rank.stop());
    }
}

#[test]
fn a_thread_that_reports_a_failure_calls_no_completion() {
    let ranks = ranks();
    let (tell, told) = channel();
    let who = Completion::new(move |outcome, _| {
        tell.send((std::thread::current().id(), outcome)).expect("waited for");
    });
    ranks[0].recv(message(Rank(2), span(&mut [])), PATIENCE, who).expect("begun");
    let waited = ranks[0].recv(message(Rank(1), span(&mut [])), PATIENCE, quiet()).expect("begun");
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| ranks[0].wait(waited, Some(PATIENCE)));
        while ranks[0].lock().waiting_threads == 0 {
            std::thread::yield_now();
        }
        ranks[0].health.fail(Error::aborted("the group ends"));
        assert_eq!(waiting.join().expect("no panic"), Ok(()), "a thread that waits is woken");
    });
    let (thread, outcome) = told.recv_timeout(PATIENCE).expect("another thread calls it");
    assert_ne!(thread, std::thread::current().id());
    assert_eq!(outcome, Err(Error::aborted("the group ends")));
    ranks.iter().for_each(|rank| rank.stop());
}

#[test]
fn a_read_succeeds_only_if_its_offer_stands_after_the_last_byte() {
    // Events between the last byte and the end of the read. Arguments: receiver, sender.
    type Event = fn(&Messages, &Messages);
    let nothing: Event = |_, _| ();
    let fails: Event = |receiver, sender| {
        receiver.close(&sender.control.fail(Error::timeout("the send's time is up")))
    };
    let departs: Event = |_, sender| sender.shut_down(&Error::aborted("the sender leaves"), "");
    let closes: Event = |receiver, _| receiver.shut_down(&Error::aborted("this rank leaves"), "");
    for (what, event, freed) in [
        ("nothing", nothing, false),
        ("the send fails", fails, false),
        ("the send fails", fails, true),
        ("the sender leaves", departs, false),
        ("the sender leaves", departs, true),
        ("the receiver leaves", closes, false),
    ] {
        let ranks = ranks();
        let [mut from, mut to] = [7u8, 0].map(|value| vec![value; DIRECT_READ_MAX_BYTES + 1]);
        let (mut state, _, told) = offered(&ranks, &mut from, &mut to);
        for last in [false, true] {
            let step = state.next_step().expect("a step");
            assert!(!state.is_reading_due() && state.next_step().is_none(), "one thread reads it");
            drop(state);
            // A reading thread holds no lock that another wait needs.
            let other =
                ranks[0].recv(message(Rank(1), span(&mut [])), PATIENCE, quiet()).expect("begun");
            assert!(
                ranks[0]
                    .wait(other, Some(Duration::from_millis(1)))
                    .is_err_and(|error| error.message.contains("gave up"))
            );
            let mut read = step.read(&ranks[0].control);
            if last {
                if freed {
                    read.1 = Err(Error::internal("bad address"));
                }
                event(&ranks[0], &ranks[2]);
                // The receive stays pending while its memory is being written.
                assert!(told.try_recv().is_err(), "{what}");
            }
            state = ranks[0].lock();
            state.end_step(&ranks[0].control, step, read).expect("no link is lost");
            assert_eq!(state.is_reading_due(), !last, "{what}");
        }
        assert!(
            state.peers[2].ring().expect("it is near").is_readable(),
            "{what}: no warning that messages come in pieces"
        );
        ranks[0].run_completions(state);
        let outcome = told.try_recv().ok();
        match what {
            "nothing" => assert!(outcome == Some(Ok(())) && to == from),
            "the sender leaves" => {
                // The receive requests the rest, and ends once the exit is detected.
                assert!(outcome.is_none_or(|outcome| outcome.is_err()));
                ranks[2]
                    .send(message(Rank(0), span(&mut from)), PATIENCE, quiet())
                    .expect_err("a receiver would not know when its memory is the owner's again");
            }
            _ => assert!(outcome.is_some_and(|outcome| outcome.is_err()), "{what}"),
        }
        ranks.iter().for_each(|rank| rank.stop());
    }
}

#[test]
fn a_receive_from_any_source_ends_when_the_rank_leaves_that_has_offered_its_message() {
    let ranks = ranks();
    let [mut from, mut to] = [7u8, 0].map(|value| vec![value; DIRECT_READ_MAX_BYTES + 1]);
    ranks[2].send(message(Rank(0), span(&mut from)), PATIENCE, quiet()).expect("begun");
    ranks[2].shut_down(&Error::aborted("the sender leaves"), "");
    let (completion, told) = reported();
    // Rank 1 stays, but the message of rank 2 already belongs to this receive.
    assert!(ranks[0].advance(&mut ranks[0].lock()), "an offer");
    let any = Message::of(MessageSpec { peer: None, ..*message(Rank(2), span(&mut to)) });
    let received = ranks[0].recv(any, PATIENCE, completion).expect("begun");
    ranks[0].wait(received, None).expect("completed");
    let error = told.try_recv().expect("the receive has ended").expect_err("it is not complete");
    error.assert_says(ErrorKind::Peer, &["rank 2", "left the group"]);
    ranks.iter().for_each(|rank| rank.stop());
}

#[test]
fn a_rank_that_has_left_gets_no_message_and_ends_those_of_others_only_if_it_failed() {
    let code = |code| format!("has ended (exited with code {code})");
    for (farewell, ended, text, fails) in [
        ("", None, "left the group", false),
        ("", Some(code(0)), "left the group", false),
        ("", Some("has ended (killed by signal 9 (SIGKILL))".into()), "left the group", false),
        ("", Some(code(3)), "exited with code 3", true),
        ("KeyError: 'x'", Some(code(1)), "left the group after KeyError", true),
    ] {
        let ranks = ranks();
        ranks[2].send(message(Rank(0), span(&mut [7])), PATIENCE, quiet()).expect("sent");
        ranks[2].shut_down(&Error::aborted("it leaves"), farewell);
        ranks[2].control.note_departure(farewell);
        if let Some(how) = ended.clone() {
            ranks[0].control.note_exit(Rank(2), how);
        }
        let mut came = [0u8];
        let received =
            ranks[0].recv(message(Rank(2), span(&mut came)), PATIENCE, quiet()).expect("begun");
        ranks[0].wait(received, None).expect("completed");
        assert_eq!(came, [7], "{farewell} {ended:?}: it was sent before");
        if fails {
            // A receive from a live rank and one from any source end.
            for peer in [Some(Rank(1)), None] {
                let ((completion, told), ranks) = (reported(), &ranks);
                let spec = MessageSpec { peer, tag: 9, ..*message(Rank(1), span(&mut [])) };
                if let Ok(ticket) = ranks[0].recv(Message::of(spec), PATIENCE, completion) {
                    ranks[0].wait(ticket, None).expect("completed");
                    let error = told.try_recv().expect("ended").expect_err("the group has failed");
                    error.assert_says(ErrorKind::Peer, &["rank 2", text]);
                }
            }
        }
        let refused = ranks[0].send(message(Rank(2), span(&mut [8])), PATIENCE, quiet());
        refused.expect_err("it has left").assert_says(ErrorKind::Peer, &["rank 2", text]);
        assert_eq!(ranks[0].control.failure().is_some(), fails, "{farewell} {ended:?}");
        if !fails {
            ranks[0].send(message(Rank(1), span(&mut [8])), PATIENCE, quiet()).expect("sent");
        }
        ranks.iter().for_each(|rank| rank.stop());
    }
}

#[test]
fn more_empty_messages_than_may_go_unasked_arrive() {
    let ranks = ranks();
    let empty = |peer| message(Rank(peer), span(&mut []));
    let done = || Completion::new(|outcome, _| outcome.expect("delivered"));
    let sent: Vec<u64> =
        (0..1030).map(|_| ranks[2].send(empty(0), PATIENCE, done()).expect("begun")).collect();
    for _ in 0..sent.len() {
        let received = ranks[0].recv(empty(2), PATIENCE, done()).expect("begun");
        ranks[0].wait(received, None).expect("within its time");
    }
    sent.into_iter().for_each(|sent| ranks[2].wait(sent, None).expect("within its time"));
    ranks.iter().for_each(|rank| rank.stop());
}

/// Fills the ring from rank 0 to rank 2 with eager messages, as the lock of rank 2 is held.
fn fill_ring(ranks: &[Arc<Messages>]) {
    let (mut state, mut bytes) = (ranks[0].lock(), vec![0u8; RING.eager]);
    for length in [RING.eager, 4096, 256, 0] {
        loop {
            let frame = Frame {
                bytes: length as u64,
                id: state.new_ticket(),
                ..Frame::bare(FrameKind::Eager)
            };
            let ring = state.ring(Rank(2)).expect("it is near");
            if !ring.send_now(frame, span(&mut bytes[..length])).expect("a ring") {
                break;
            }
        }
    }
}

#[test]
fn an_acknowledgement_for_which_the_ring_has_no_space_is_sent_after_the_receive_and_on_leaving() {
    // The offered message is empty if this rank has unmatched eager ones.
    for (eager, bytes, leaves) in
        [(0, RING.eager + 1, false), (0, RING.eager + 1, true), (1024, 0, false), (1024, 0, true)]
    {
        let ranks = ranks();
        let [mut from, mut to] = [7u8, 0].map(|value| vec![value; bytes]);
        let tagged = |peer, span| Message::of(MessageSpec { tag: 4, ..*message(Rank(peer), span) });
        // The first receive starts the progress thread, which then sleeps.
        let empty = |peer| message(Rank(peer), span(&mut []));
        let first = ranks[0].recv(empty(2), PATIENCE, quiet()).expect("begun");
        ranks[2].send(empty(0), PATIENCE, quiet()).expect("sent");
        ranks[0].wait(first, None).expect("within its time");
        for _ in 0..eager {
            ranks[2].send(empty(0), PATIENCE, quiet()).expect("sent");
        }
        let (completion, told) = reported();
        ranks[2].send(tagged(0, span(&mut from)), PATIENCE, completion).expect("begun");
        while !ranks[0].lock().idle {
            std::thread::sleep(Duration::from_millis(1));
        }
        let stopped = ranks[2].lock();
        ranks[0].progress();
        fill_ring(&ranks);
        let received = ranks[0].recv(tagged(2, span(&mut to)), PATIENCE, quiet()).expect("begun");
        ranks[0].wait(received, None).expect("within its time");
        assert!(ranks[0].lock().has_acknowledgement(&ranks[0].control), "the ring is full");
        if leaves {
            ranks[0].stop();
        }
        drop(stopped);
        if leaves {
            while !ranks[0].lock().has_work() {
                std::thread::sleep(Duration::from_millis(1));
            }
            ranks[0].say_goodbye(PATIENCE);
            ranks[0].shut_down(&Error::aborted("the receiver leaves"), "");
            ranks[0].control.note_departure("");
        }
        assert_eq!(told.recv_timeout(2 * PATIENCE), Ok(Ok(())), "{bytes} bytes, leaves: {leaves}");
        assert_eq!(to, from);
        ranks.iter().for_each(|rank| rank.stop());
    }
}

#[test]
fn a_panic_in_a_read_fails_the_group_and_the_receive() {
    let ranks = ranks();
    let [mut from, mut to] = [7u8, 0].map(|value| vec![value; DIRECT_READ_MAX_BYTES + 1]);
    let (mut state, ticket, told) = offered(&ranks, &mut from, &mut to);
    let step = state.next_step().expect("a step");
    drop(state);
    ranks[0].carry_out(step, |_, _| panic!("in the middle of it"));
    let error = told.try_recv().expect("the receive has ended").expect_err("it is not complete");
    assert!(error.message.contains("in the middle of it"), "{error}");
    assert_eq!((ranks[2].control.failure(), ranks[0].wait(ticket, None)), (Some(error), Ok(())));
    ranks.iter().for_each(|rank| rank.stop());
}

#[test]
fn a_read_that_no_thread_waits_for_goes_on_while_others_sleep() {
    let ranks = ranks();
    let [mut from, mut to] = [7u8, 0].map(|value| vec![value; 8 * DIRECT_READ_MAX_BYTES]);
    let (source, target, mut missing) = (span(&mut from), span(&mut to), [0]);
    let never =
        ranks[0].recv(message(Rank(1), span(&mut missing)), 3 * PATIENCE, quiet()).expect("begun");
    std::thread::scope(|scope| {
        let sleeping = scope.spawn(|| ranks[0].wait(never, None));
        while ranks[0].lock().waiting_threads == 0 {
            std::thread::yield_now();
        }
        ranks[2].send(message(Rank(0), source), PATIENCE, quiet()).expect("begun");
        let (done, told) = reported();
        ranks[0].recv(message(Rank(2), target), 3 * PATIENCE, done).expect("begun");
        assert_eq!(told.recv_timeout(PATIENCE), Ok(Ok(())));
        ranks[0].close(&Error::aborted("the test is over"));
        sleeping.join().expect("no panic").expect("completed");
    });
    assert!(to == from);
    ranks.iter().for_each(|rank| rank.stop());
}
