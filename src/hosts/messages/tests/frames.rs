//! Tests of single frames, of leaving and of refused messages.

use super::super::frame::{self, Frame};
use super::super::open::{self, AnySource, Open};
use super::super::pair::Pair;
use super::*;
use crate::completion::Finished;
use crate::sync::limit::Limit;

#[test]
fn a_wait_may_end_before_its_message() {
    on_ranks(2, |member| {
        if member.me == 0 {
            let mut into = [0; 4];
            let (ticket, outcome) = member.start(false, 1, 0, &mut into, 60.0).expect("starts");
            let error = member.messages.wait(ticket, Some(Duration::from_millis(50))).expect_err("nothing has come");
            assert_eq!(error.kind, Kind::WaitTimeout);
            member.send(1, 1, &mut [0]);
            assert_eq!(member.finish((ticket, outcome)), (Ok(()), Some(Rank(1))));
            assert_eq!(into, [7; 4]);
        } else {
            member.recv(0, 1, 1);
            member.send(0, 0, &mut [7; 4]);
        }
    });
}

/// Links that keep the head of each frame that was sent.
#[derive(Default)]
struct Sent(Mutex<Vec<Frame>>);

impl Sent {
    fn kinds(&self) -> Vec<frame::Kind> {
        self.0.lock().expect("no panic").iter().map(|frame| frame.kind).collect()
    }
}

impl Links for Sent {
    fn make(&self, _peer: Rank, _name: &str, _second: bool, _timeout: Duration) -> Result<()> {
        Ok(())
    }

    fn send(&self, _peer: Rank, frame: &[u8], _traffic: Traffic, _payload: &[u8]) -> Result<()> {
        let frame = frame.first_chunk().and_then(Frame::decode).expect("a frame");
        self.0.lock().expect("no panic").push(frame);
        Ok(())
    }

    fn confirm(&self, _peer: Rank, _sends: u64) {}

    fn listen(&self, _peer: Rank, _traffic: Traffic, _bytes: usize) -> Result<()> {
        Ok(())
    }

    fn wait(&self, _peer: Rank, _traffic: Traffic) -> Result<Option<usize>> {
        Ok(None)
    }

    fn release(&self, _peer: Rank, _traffic: Traffic) {}

    fn close(&self, _peer: Rank) {}
}

/// A connected pair, and the state that its frames change.
struct Alone {
    pair: Pair,
    sent: Sent,
    names: Names,
    any: AnySource,
    finished: Vec<Finished>,
}

impl Alone {
    fn new() -> Self {
        let layout = Arc::new(HostMap::of(&(0..2).map(place).collect::<Vec<_>>()));
        let names = Names { layout, me: Rank(0), group: "test".into(), life: <_>::default(), globals: Vec::new() };
        let (mut pair, sent, mut finished) = (Pair::new(Rank(1)), Sent::default(), Vec::new());
        pair.begin(&sent, &mut finished).expect("nothing is sent");
        Self { pair, sent, names, any: AnySource::default(), finished }
    }

    fn react(&mut self, frame: Frame, payload: &[u8]) -> Result<()> {
        self.pair.react(frame, payload, &self.sent, &self.names, &mut self.any, &mut self.finished)
    }

    /// The receive `ticket`, into `data`.
    fn open(ticket: u64, data: &mut [u8]) -> Open {
        let span = Span { addr: data.as_mut_ptr().addr(), bytes: data.len() };
        let message = Message::of(MessageSpec { peer: None, tag: 0, dtype: DType::U8, span, timeout: None });
        let completion = Completion::new(|_, _| {});
        Open { ticket, message, limit: Limit::from(Instant::now(), Duration::from_secs(60)), completion }
    }

    fn recv(&mut self, ticket: u64, data: &mut [u8]) {
        self.pair.recv(Self::open(ticket, data), &self.sent, &self.names, &mut self.finished).expect("begins");
    }

    /// The tickets of messages that have ended since.
    fn ended(&mut self) -> Vec<u64> {
        self.finished.drain(..).map(|finished| finished.ticket).collect()
    }
}

fn eager(bytes: usize) -> Frame {
    Frame { dtype: DType::U8 as u8, bytes: bytes as u64, ..Frame::bare(frame::Kind::Eager) }
}

#[test]
fn a_peer_that_has_read_or_matched_what_it_cannot_have_is_not_believed() {
    // Two frames of 10 bytes each have been sent; the peer has read one, which found its receive.
    let one = 10 + 64;
    for (read, matched, believed) in
        [(1, one, true), (2, 2 * one, true), (2, one, true), (0, one, false), (3, one, false), (1, 0, false), (2, 2 * one + 1, false)]
    {
        let (mut alone, mut data) = (Alone::new(), [7; 10]);
        for ticket in 0..2 {
            let open = Alone::open(ticket, &mut data);
            alone.pair.send(open, &alone.sent, &mut alone.finished).expect("sent");
        }
        let credit = |read, matched| Frame { read, matched, ..Frame::bare(frame::Kind::Credit) };
        alone.react(credit(1, one), &[]).expect("it may have");
        let answer = alone.react(credit(read, matched), &[]);
        assert_eq!(answer.is_ok(), believed, "{read}, {matched}: {answer:?}");
    }
}

#[test]
fn a_message_fills_the_older_of_a_named_receive_and_one_from_any_rank() {
    for (named, any, first) in [(4, 6, 4), (6, 4, 4)] {
        let (mut alone, mut data) = (Alone::new(), [[0]; 2]);
        let [of_peer, of_any] = &mut data;
        alone.recv(named, of_peer);
        alone.any.wanted.push(open::Wanted { open: Alone::open(any, of_any), claim: Claim::pair()[1].clone() });
        alone.react(eager(1), &[9]).expect("it fits");
        assert_eq!(alone.ended(), [first]);
        alone.react(eager(1), &[9]).expect("it fits");
        assert_eq!(alone.ended(), [named + any - first]);
    }
}

#[test]
fn credit_is_given_for_many_frames_and_for_many_bytes() {
    for (bytes, due) in [(0, 64), (250_000, 5)] {
        let (mut alone, mut into, payload) = (Alone::new(), vec![0; bytes], vec![3; bytes]);
        for number in 1..=due {
            assert_eq!(alone.sent.kinds(), [], "message {number} of {bytes} bytes");
            alone.recv(number, &mut into);
            alone.react(eager(bytes), &payload).expect("it fits");
        }
        assert_eq!(alone.sent.kinds(), [frame::Kind::Credit], "{due} messages of {bytes} bytes");
    }
}

#[test]
fn what_a_rank_has_sent_is_read_before_its_connection_ends() {
    on_ranks(2, |member| {
        if member.me == 0 {
            member.send(1, 0, &mut [1]);
            member.recv(1, 0, 1);
            member.net.wires.lock().expect("no panic").slow.push(Rank(1));
            (0..20).for_each(|number| member.send(1, 1, &mut data(number, 1000)));
            return;
        }
        member.recv(0, 0, 1);
        member.send(0, 0, &mut [1]);
        // Rank 0 leaves. It has not closed the connection.
        until(|| {
            let wires = member.net.wires.lock().expect("no panic");
            let wire = wires.wires.get(&(Rank(0), Rank(1), 0));
            let bye = wire.and_then(|wire| wire.sent.back()).is_some_and(|frame| frame[0] == frame::Kind::Bye as u8);
            bye || wires.closed.contains(&(Rank(0), Rank(1)))
        });
        std::thread::sleep(Duration::from_millis(50));
        member.net.wires.lock().expect("no panic").slow.clear();
        (0..20).for_each(|number| assert!(member.recv(0, 1, 1000) == data(number, 1000), "message {number}"));
    });
}

#[test]
fn a_receive_that_this_host_has_filled_is_not_waited_for() {
    on_ranks(2, |member| {
        let mut never = [0xee; 4];
        // Filled before it begins here, and after.
        for before in [true, false] {
            let ([within, between], (told, outcome)) = (Claim::pair(), channel());
            let completion = Completion::new(move |outcome, source| drop(told.send((outcome, source))));
            let span = Span { addr: never.as_mut_ptr().addr(), bytes: 4 };
            let message = Message::of(MessageSpec { peer: None, tag: 0, dtype: DType::U8, span, timeout: None });
            assert!(!before || within.take());
            let ticket = member.messages.recv_any(message, Duration::from_millis(50), completion, between).expect("begins");
            assert!(before || within.take());
            std::thread::sleep(Duration::from_millis(200));
            let wanted = member.messages.lock().any.wanted.len();
            assert_eq!((wanted, member.failure.0.lock().expect("no panic").clone()), (usize::from(!before), None));
            member.messages.withdraw(ticket);
            member.messages.wait(ticket, None).expect("it is over");
            assert!(outcome.try_recv().is_err() && never == [0xee; 4]);
        }
    });
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
    // The other call is made before the peer learns of the refusal, after that, or never.
    for (before, after) in [(true, false), (false, true), (false, false)] {
        on_ranks(2, |member| {
            let other = 1 - member.me;
            member.send(other, 0, &mut [1]);
            member.recv(other, 0, 1);
            if member.me == 0 {
                let own = || member.messages.lock().pairs[&Rank(other)].own.is_some();
                let call = || member.failure.1.fetch_add(1, Ordering::Relaxed);
                member.messages.refuse(Some(Rank(1)), true, 3, "it is wrong".into());
                if before {
                    call();
                    std::thread::sleep(Duration::from_millis(300));
                    assert!(!own(), "the peer does not learn of it");
                } else {
                    until(own);
                }
                if after {
                    call();
                }
                // Rank 1 begins now.
                member.net.wires.lock().expect("no panic").slow.push(Rank(7));
                if before || after {
                    std::thread::sleep(Duration::from_millis(100));
                    member.send(1, 3, &mut [5]);
                } else {
                    until(|| member.failure.0.lock().expect("no panic").is_some());
                }
                return;
            }
            until(|| member.net.wires.lock().expect("no panic").slow.contains(&Rank(7)));
            let mut into = [0];
            let started = member.start(false, 0, 3, &mut into, 60.0).expect("starts");
            // It waits for longer than it takes to ask whether the refusal stands.
            let (outcome, _) = member.finish(started);
            assert_eq!((outcome.is_ok(), into[0]), if before || after { (true, 5) } else { (false, 0) }, "{outcome:?}");
        });
    }
}
