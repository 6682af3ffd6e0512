//! Tests of single frames, of leaving, and of rejected messages between nodes.
#![allow(unsafe_code, reason = "staging of links")]

use super::thread_wires::{Alike, Done, Member, alone, data, on_ranks, place};
use crate::coll::call::Span;
use crate::coll::message::{Message, MessageSpec};
use crate::completion::Completion;
use crate::dtype::DType;
use crate::error::{Error, ErrorKind, Result};
use crate::messages::Messages;
use crate::messages::frame::{self, Frame};
use crate::messages::links::Links;
use crate::messages::wire::{Counters, HEADER_BYTES, LinkPhase, decode};
use crate::node_map::NodeMap;
use crate::rank::Rank;
use crate::transport::{Buffer, Transport, Work};
use std::collections::VecDeque;
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const PEER: Rank = Rank(1);

#[test]
fn a_wait_may_end_before_its_message() {
    on_ranks(2, |member: &Member| {
        if member.me == 0 {
            let mut into = [0; 4];
            let (ticket, outcome) = member.start(false, 1, 0, &mut into, 60.0).expect("starts");
            let error = member
                .messages
                .wait(ticket, Some(Duration::from_millis(50)))
                .expect_err("nothing has come");
            assert_eq!(error.kind, ErrorKind::WaitTimeout);
            member.send(1, 1, &mut [0]);
            assert_eq!(member.finish((ticket, outcome)), (Ok(()), Some(Rank(1))));
            assert_eq!(into, [7; 4]);
        } else {
            member.recv(0, 1, 1);
            member.send(0, 0, &mut [7; 4]);
        }
    });
}

/// A connection that records the header of each sent frame.
#[derive(Clone, Default)]
struct Sent(Arc<Mutex<Vec<Frame>>>);

impl Sent {
    fn kinds(&self) -> Vec<frame::FrameKind> {
        self.0.lock().expect("no panic").iter().map(|frame| frame.kind).collect()
    }
}

impl Transport for Sent {
    fn send(&self, _to: usize, from: Span, _tag: i32, _keep: &Buffer) -> Result<Work> {
        // SAFETY: this is the staging that the link has filled with a frame.
        let frame = unsafe { &*from.ptr().cast::<[u8; HEADER_BYTES]>() };
        self.0.lock().expect("no panic").push(decode(frame).expect("a frame").0);
        Ok(Arc::new(Done))
    }
}

/// The messages of rank 0, which is connected with `PEER`.
struct Alone {
    messages: Arc<Messages>,
    sent: Sent,
}

impl Alone {
    fn new() -> Self {
        let layout = Arc::new(NodeMap::of(&(0..2).map(place).collect::<Vec<_>>()));
        let sent = Sent::default();
        let links = Links::new(Arc::new(Alike(sent.clone())), Box::new(|_, _, _| {}));
        links.make(PEER, "0-1", false, Duration::from_secs(1)).expect("made");
        let messages = alone(0, &layout, links, Arc::default());
        messages.lock().wire(PEER).expect("it is far").phase = LinkPhase::Open;
        Self { messages, sent }
    }

    fn hear(&self, frame: Frame, counters: Counters, payload: &[u8]) -> Result<()> {
        let mut state = self.messages.lock();
        let heard = state.take_in(&self.messages, PEER, (frame, counters), payload);
        self.messages.run_completions(state);
        heard
    }

    fn message(data: &mut [u8]) -> Message {
        let span = Span { addr: data.as_mut_ptr().addr(), bytes: data.len() };
        Message::of(MessageSpec { peer: Some(PEER), tag: 0, dtype: DType::U8, span, timeout: None })
    }
}

impl Drop for Alone {
    fn drop(&mut self) {
        self.messages.stop();
    }
}

fn eager(bytes: usize) -> Frame {
    Frame { dtype: DType::U8 as u8, bytes: bytes as u64, ..Frame::bare(frame::FrameKind::Eager) }
}

#[test]
fn a_peer_that_has_read_or_matched_what_it_cannot_have_is_not_believed() {
    // Two frames of 10 bytes each have been sent. The peer has read one, and has matched this one
    // with a receive.
    let one = 10 + 64;
    for (read, matched, believed) in [
        (1, one, true),
        (2, 2 * one, true),
        (2, one, true),
        (0, one, false),
        (3, one, false),
        (1, 0, false),
        (2, 2 * one + 1, false),
    ] {
        let (alone, mut data) = (Alone::new(), [7; 10]);
        for _ in 0..2 {
            let message = Alone::message(&mut data);
            alone
                .messages
                .send(message, Duration::from_secs(60), Completion::new(|_, _| {}))
                .expect("sent");
        }
        let credit = |read, matched| {
            alone.hear(Frame::bare(frame::FrameKind::Credit), Counters { read, matched }, &[])
        };
        credit(1, one).expect("it may have");
        let answer = credit(read, matched);
        assert_eq!(answer.is_ok(), believed, "{read}, {matched}: {answer:?}");
    }
}

#[test]
fn credit_is_given_for_many_frames_and_for_many_bytes() {
    for (bytes, due) in [(0, 64), (250_000, 5)] {
        let (alone, mut into, payload) = (Alone::new(), vec![0; bytes], vec![3; bytes]);
        for number in 1..=due {
            assert_eq!(alone.sent.kinds(), [], "message {number} of {bytes} bytes");
            let message = Alone::message(&mut into);
            alone
                .messages
                .recv(message, Duration::from_secs(60), Completion::new(|_, _| {}))
                .expect("begins");
            alone.hear(eager(bytes), Counters::default(), &payload).expect("it fits");
        }
        assert_eq!(
            alone.sent.kinds(),
            [frame::FrameKind::Credit],
            "{due} messages of {bytes} bytes"
        );
    }
}

#[test]
fn after_a_late_message_nothing_reaches_its_tensor() {
    on_ranks(2, |member| {
        member.send(1 - member.me, 0, &mut [1]);
        member.recv(1 - member.me, 0, 1);
        if member.me == 1 {
            member.net.wires.lock().expect("no panic").cut.push(Rank(1));
            let mut own = data(1, 3_000_000);
            let sent = member.isend(0, 4, &mut own);
            assert!(member.finish(sent).0.is_err(), "the other has closed the connection");
            return;
        }
        let mut into = vec![0xee; 3_000_000];
        let started = member.start(false, 1, 4, &mut into, 0.2).expect("starts");
        let error = member.finish(started).0.expect_err("nothing comes");
        assert!(
            error.message.ends_with("for rank 1 (node \"node1\", pid 7), which did not send it"),
            "{error}"
        );
        assert!(into.iter().all(|&byte| byte == 0xee));
    });
}

#[test]
fn what_a_rank_has_sent_is_read_before_its_connection_ends() {
    on_ranks(2, |member: &Member| {
        if member.me == 0 {
            member.send(1, 0, &mut [1]);
            member.recv(1, 0, 1);
            member.net.wires.lock().expect("no panic").slow.push(Rank(1));
            (0..20).for_each(|number| member.send(1, 1, &mut data(number, 1000)));
            return;
        }
        member.recv(0, 0, 1);
        member.send(0, 0, &mut [1]);
        // Rank 0 leaves, but has not closed the connection.
        until(|| {
            let wires = member.net.wires.lock().expect("no panic");
            let sent = wires.sent.get(&(Rank(0), Rank(1), 0));
            let bye = sent
                .and_then(VecDeque::back)
                .is_some_and(|frame| frame[0] == frame::FrameKind::Bye as u8);
            bye || wires.closed.contains(&(Rank(0), Rank(1)))
        });
        std::thread::sleep(Duration::from_millis(50));
        member.net.wires.lock().expect("no panic").slow.clear();
        (0..20).for_each(|number| {
            assert!(member.recv(0, 1, 1000) == data(number, 1000), "message {number}")
        });
        let mut into = [0; 4];
        let started = member.start(false, 0, 0, &mut into, 60.0).expect("starts");
        let error = member.finish(started).0.expect_err("rank 0 has left");
        assert_eq!(error.kind, ErrorKind::Peer, "{error}");
        let text = "lost its connection to rank 0 (node \"node0\", pid 7)";
        assert!(error.message.contains(text), "{error}");
    });
}

#[test]
fn the_end_of_a_connection_is_a_failure_only_if_a_message_needs_it() {
    let (alone, mut data) = (Alone::new(), [0; 10]);
    // A send to a peer that has left and a receive from it both report the end.
    for _ in 0..2 {
        alone.messages.fail_peer(PEER, Error::peer("closed"));
        assert_eq!(alone.messages.health.error(), None);
    }
    let (told, outcome) = channel();
    let completion = Completion::new(move |outcome, _| told.send(outcome).expect("awaited"));
    alone
        .messages
        .recv(Alone::message(&mut data), Duration::from_secs(60), completion)
        .expect("begun");
    let error = outcome.recv().expect("called").expect_err("the peer has left");
    error.assert_says(ErrorKind::Peer, &["has lost its connection to rank 1", "closed"]);
    assert_eq!(alone.messages.health.error(), Some(error));
}

/// Returns once `seen` is true.
fn until(seen: impl Fn() -> bool) {
    let begun = Instant::now();
    while !seen() {
        assert!(begun.elapsed() < Duration::from_secs(20), "it takes too long");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_refusal_counts_until_its_rank_makes_another_call() {
    // The other call is made before the peer learns of the rejection, after that, or never.
    for (before, after) in [(true, false), (false, true), (false, false)] {
        on_ranks(2, |member: &Member| {
            let other = 1 - member.me;
            member.send(other, 0, &mut [1]);
            member.recv(other, 0, 1);
            if member.me == 0 {
                let own = || {
                    member.messages.lock().wire(Rank(other)).is_some_and(|wire| wire.own.is_some())
                };
                let recorder = member.messages.health.recorder();
                let begun = recorder.calls();
                if before {
                    recorder.ask(1);
                }
                member.messages.notify_rejected(
                    Some(Rank(1)),
                    begun,
                    true,
                    3,
                    "it is wrong".into(),
                );
                assert_eq!(
                    own(),
                    !before,
                    "the peer does not learn of it once its rank has made another call"
                );
                if after {
                    recorder.ask(1);
                }
                // This entry, which has no other effect, makes rank 1 start.
                member.net.wires.lock().expect("no panic").slow.push(Rank(7));
                if before || after {
                    std::thread::sleep(Duration::from_millis(100));
                    member.send(1, 3, &mut [5]);
                } else {
                    until(|| member.messages.health.failure().is_some());
                }
                return;
            }
            until(|| member.net.wires.lock().expect("no panic").slow.contains(&Rank(7)));
            let mut into = [0];
            let started = member.start(false, 0, 3, &mut into, 60.0).expect("starts");
            // Rank 1 waits longer than the time after which it asks whether the rejection still
            // holds.
            let (outcome, _) = member.finish(started);
            assert_eq!(
                (outcome.is_ok(), into[0]),
                if before || after { (true, 5) } else { (false, 0) },
                "{outcome:?}"
            );
        });
    }
}
