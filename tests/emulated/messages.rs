//! Long messages between two ranks: direct ones, and those whose ends wait for each other before a
//! kernel starts. In these tests one thread acts as the stream of each direct message, and copies
//! its bytes.

use crate::calls::Random;
use crate::copy_engine;
use crate::host::{Host, at_once};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use symm::coll::call::Span;
use symm::coll::cuda::copy_engine::message::{self, MessageEnd, MessageMover};
use symm::coll::cuda::copy_engine::{CopyTasks, Task};
use symm::coll::cuda::plan;
use symm::dtype::{DType, ReduceOp};

/// How a message moves.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Way {
    /// From tensor to tensor, by the sender or by the receiver.
    Direct { by_sender: bool },
    /// By a kernel; both ends count the message's steps.
    Kernel,
}

/// A message, and the tensor that receives it.
struct Message {
    from: usize,
    to: usize,
    way: Way,
    sent: Vec<u8>,
    shift: usize,
    received: Vec<u8>,
}

impl Message {
    fn new(random: &mut Random, (from, to): (usize, usize), way: Way, bytes: usize) -> Self {
        let shift = random.below(3);
        let sent = (0..bytes + shift).map(|_| random.next() as u8).collect();
        Self { from, to, way, sent, shift, received: vec![0xEE; bytes + shift] }
    }

    fn end(&self, send: bool) -> MessageEnd {
        let (peer, tensor) = if send { (self.to, &self.sent) } else { (self.from, &self.received) };
        let addr = tensor.as_ptr() as usize + self.shift;
        MessageEnd { send, peer, span: Span { addr, bytes: tensor.len() - self.shift } }
    }

    /// Returns the mover of a direct message; `None` if a kernel moves the message.
    fn mover(&self, send: bool) -> Option<MessageMover> {
        match self.way {
            Way::Direct { by_sender } if by_sender == send => {
                Some(MessageMover::Here(self.end(!send).span.addr as u64))
            }
            Way::Direct { .. } => Some(MessageMover::Peer),
            Way::Kernel => None,
        }
    }

    fn check(&self, about: &str) {
        let (same, way) = (self.received[self.shift..] == self.sent[self.shift..], self.way);
        let bytes = self.sent.len() - self.shift;
        assert!(same, "{about}: {bytes} bytes from {} to {}, {way:?}", self.from, self.to);
    }
}

/// Runs one end of a message that copy engines move.
fn run(host: &Host, me: usize, end: MessageEnd, mover: MessageMover) {
    let context = host.context(me, 9, None);
    for task in CopyTasks::new(&context, &host.tuning).message(end, mover) {
        match task {
            Task::Kernel { launch, .. } => host.run(me, &launch, DType::U8, ReduceOp::Sum),
            // SAFETY: both ranges belong to tensors or workspaces that outlive the message.
            Task::Copy { to, from, bytes, .. } => unsafe {
                std::ptr::copy_nonoverlapping(from as *const u8, to as *mut u8, bytes)
            },
            Task::Fork | Task::Join => panic!("a message has one stream"),
        }
    }
}

/// Runs the ends of `me`, at most one to and one from each rank, all at once. Those that a kernel
/// moves share one for each direction; a rank `waits` for the other end of a single one.
fn round(host: &Host, me: usize, messages: &[Message], waits: bool) {
    let plan = plan::transfers(&host.layout, &host.tuning);
    std::thread::scope(|scope| {
        for send in [true, false] {
            let mine = messages.iter().filter(|one| me == if send { one.from } else { one.to });
            let (copied, moved): (Vec<_>, Vec<_>) = mine.partition(|one| one.way != Way::Kernel);
            for message in copied {
                let mover = message.mover(send).unwrap();
                scope.spawn(move || run(host, me, message.end(send), mover));
            }
            if moved.is_empty() {
                continue;
            }
            scope.spawn(move || {
                let context = host.context(me, 9, None);
                let ends: Vec<_> = moved.iter().map(|message| message.end(send)).collect();
                let spans: Vec<_> = ends.iter().map(|end| (end.peer, end.span)).collect();
                let mut announced = ends.iter().map(|end| 1 << end.peer).sum();
                if let (true, [end]) = (waits, &ends[..]) {
                    let arrival = message::arrival(&context, *end);
                    host.run(me, &arrival, DType::U8, ReduceOp::Sum);
                    announced = 0;
                }
                let launch = match send {
                    true => context.transfers(&spans, &[], [announced, 0], plan),
                    false => context.transfers(&[], &spans, [0, announced], plan),
                };
                host.run(me, &launch.unwrap(), DType::U8, ReduceOp::Sum);
            });
        }
    });
}

/// Random messages of all kinds between `host`'s ranks, which do not wait for each other between
/// two rounds.
fn program(host: &Host, rounds: usize) {
    let n = host.n;
    let mut random = Random(n as u64 + 40);
    let ways = [Way::Direct { by_sender: true }, Way::Direct { by_sender: false }, Way::Kernel];
    let pairs = || (0..n).flat_map(|from| (0..n).map(move |to| (from, to)));
    let all: Vec<Vec<Message>> = (0..rounds)
        .map(|_| {
            let chosen: Vec<_> = pairs().filter(|(from, to)| from != to).collect();
            let chosen = chosen.into_iter().filter(|_| random.below(3) > 0).collect::<Vec<_>>();
            let one = |pair| {
                let way = random.of(&ways);
                let bytes = random.of(&[1, 200, 300, 800, 5003]);
                Message::new(&mut random, pair, way, bytes)
            };
            chosen.into_iter().map(one).collect()
        })
        .collect();
    at_once(0..n, |me| {
        for (number, messages) in all.iter().enumerate() {
            round(host, me, messages, (me + number).is_multiple_of(2));
        }
    });
    host.assert_well();
    for (number, messages) in all.iter().enumerate() {
        messages.iter().for_each(|message| message.check(&format!("round {number} of {n} ranks")));
    }
}

#[test]
fn messages_of_all_kinds_in_any_order() {
    for (n, rounds) in [(2, 40), (3, 16), (4, 8)] {
        program(&copy_engine::host(n), rounds);
    }
}

/// Counts that are about to wrap, as after about four billion steps.
#[test]
fn counts_wrap() {
    let mut host = copy_engine::host(2);
    host.age();
    program(&host, 12);
}

/// Each end in turn arrives later; the other one does not start its lanes before.
#[test]
fn no_lane_starts_before_the_other_end_has_arrived() {
    let host = copy_engine::host(2);
    for late in [0, 1] {
        let message = Message::new(&mut Random(7), (0, 1), Way::Kernel, 5000);
        let arrived = AtomicBool::new(false);
        at_once(0..2, |me| {
            if me == late {
                std::thread::sleep(Duration::from_millis(100));
                arrived.store(true, Ordering::SeqCst);
            } else {
                let arrival = message::arrival(&host.context(me, 9, None), message.end(me == 0));
                host.run(me, &arrival, DType::U8, ReduceOp::Sum);
                assert!(arrived.load(Ordering::SeqCst), "rank {me} did not wait");
            }
            let context = host.context(me, 9, None);
            let (end, plan) = (message.end(me == 0), plan::transfers(&host.layout, &host.tuning));
            let (spans, announced) = ([(end.peer, end.span)], u32::from(me == late) << end.peer);
            let launch = match me {
                0 => context.transfers(&spans, &[], [announced, 0], plan),
                _ => context.transfers(&[], &spans, [0, announced], plan),
            };
            host.run(me, &launch.unwrap(), DType::U8, ReduceOp::Sum);
        });
        message.check(&format!("rank {late} is late"));
    }
    host.assert_well();
}

/// The other end never arrives. It is named, and the sender writes nothing to its tensor.
#[test]
fn p1_an_end_that_never_comes_is_named() {
    for (way, send) in (0..3).flat_map(|way| [(way, true), (way, false)]) {
        let mut host = copy_engine::host(2);
        host.timeout = Duration::from_millis(300);
        let message = Message::new(&mut Random(5), (0, 1), Way::Kernel, 1000);
        let (me, end) = (usize::from(!send), message.end(send));
        match way {
            0 => {
                let arrival = message::arrival(&host.context(me, 9, None), end);
                host.run(me, &arrival, DType::U8, ReduceOp::Sum);
            }
            1 => run(&host, me, end, MessageMover::Peer),
            _ => {
                let other = message.end(!send).span.addr as u64;
                run(&host, me, end, MessageMover::Here(other));
            }
        }
        host.assert_names(me, 9, 1 - me);
        assert!(!send || message.received.iter().all(|&byte| byte == 0xEE), "way {way}");
    }
}

/// The receiver launches first, posts that its tensor is ready, and gives up. The sender's stream
/// comes later.
#[test]
fn nothing_is_pushed_to_an_end_that_has_given_up() {
    let mut host = copy_engine::host(2);
    host.timeout = Duration::from_millis(300);
    let message = Message::new(&mut Random(5), (0, 1), Way::Kernel, 1000);
    run(&host, 1, message.end(false), MessageMover::Peer);
    host.assert_names(1, 9, 0);
    host.stop(0);
    let other = message.end(false).span.addr as u64;
    run(&host, 0, message.end(true), MessageMover::Here(other));
    assert!(message.received.iter().all(|&byte| byte == 0xEE));
}
