//! Messages between threads that are ranks, each on its own node. Their transports reject lengths that do not match.
#![allow(unsafe_code, reason = "staging of links")]

use super::health;
use crate::coll::call::Span;
use crate::coll::message::{Message, MessageSpec};
use crate::completion::Completion;
use crate::control::{ControlBlock, Identity, ParentGroup};
use crate::dtype::DType;
use crate::error::{Error, ErrorKind, Result};
use crate::lock::{lock, unpoisoned};
use crate::mem::layout::SegmentLayout;
use crate::mem::shm::ShmSegment;
use crate::messages::links::Links;
use crate::messages::{InternodeLinks, Messages, TICKET_BIT};
use crate::node_map::{NodeMap, RankLocation};
use crate::rank::Rank;
use crate::store::memory::MemoryStore;
use crate::transport::{Buffer, GivenUp, HOST, Pending, Seat, Transport, Transports, Work};
use std::collections::{HashMap, VecDeque};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// The bytes in flight from one rank to another, of one class of traffic.
pub(super) type LinkKind = (Rank, Rank, i32);

/// All connections of a test.
#[derive(Default)]
pub(super) struct Net {
    pub(super) wires: Mutex<Wires>,
    changed: Condvar,
}

#[derive(Default)]
pub(super) struct Wires {
    pub(super) sent: HashMap<LinkKind, VecDeque<Vec<u8>>>,
    made: Vec<(Rank, Rank)>,
    pub(super) closed: Vec<(Rank, Rank)>,
    /// Ranks whose bytes no longer arrive.
    pub(super) cut: Vec<Rank>,
    /// Ranks that read nothing for now.
    pub(super) slow: Vec<Rank>,
    came: HashMap<(Rank, Rank), usize>,
}

impl Net {
    fn lock(&self) -> MutexGuard<'_, Wires> {
        lock(&self.wires)
    }

    fn sleep<'a>(&self, wires: MutexGuard<'a, Wires>) -> MutexGuard<'a, Wires> {
        unpoisoned(self.changed.wait_timeout(wires, Duration::from_millis(20))).0
    }

    /// Closes the end of rank `me` in its connection with `peer`.
    fn close(&self, (me, peer): (Rank, Rank)) {
        let mut wires = self.lock();
        wires.closed.push((me, peer));
        // Unread bytes are lost, as they may be when a process ends.
        wires.sent.iter_mut().filter(|((from, to, _), _)| (*from, *to) == (me, peer)).for_each(|(_, sent)| sent.clear());
        self.changed.notify_all();
    }
}

/// The transports of rank `me`.
struct ThreadTransports {
    net: Arc<Net>,
    me: Rank,
}

/// Memory of the host.
pub(super) fn memory(bytes: usize) -> Buffer {
    let mut memory = vec![0xeeu8; bytes];
    Buffer { address: memory.as_mut_ptr().addr(), owner: Arc::new(memory), bytes }
}

/// The connection of the first rank with the second.
struct ThreadTransport(Arc<Net>, (Rank, Rank));

/// A receive of the first rank from the second. It ends only while a thread waits for it.
struct Receive {
    net: Arc<Net>,
    ends: (Rank, Rank),
    tag: i32,
    to: Span,
    _keep: Buffer,
}

/// A transfer that has ended.
pub(super) struct Done;

impl Pending for Done {
    fn wait(&self, _limit: Duration) -> Result<bool> {
        Ok(true)
    }
}

impl Transports for ThreadTransports {
    fn connect(&self, name: &str, seat: &Seat, _timeout: Duration, _given_up: &GivenUp) -> Result<Arc<dyn Transport>> {
        let pair = name.strip_prefix("symm-pair/test/").and_then(|pair| pair.split_once('-')).expect("a name of two ranks");
        let [low, high] = [pair.0, pair.1].map(|rank| Rank(rank.parse().expect("a rank")));
        let ends = if self.me == low { (low, high) } else { (high, low) };
        assert!(low < high && ends.0 == self.me, "{name}");
        assert_eq!((seat.rank, seat.size, seat.device), (usize::from(self.me == high), 2, HOST));
        let mut wires = self.net.lock();
        wires.made.push(ends);
        self.net.changed.notify_all();
        while !wires.made.contains(&(ends.1, ends.0)) {
            wires = self.net.sleep(wires);
        }
        Ok(Arc::new(ThreadTransport(Arc::clone(&self.net), ends)))
    }

    fn allocate(&self, _device: i32, bytes: usize) -> Result<Buffer> {
        Ok(memory(bytes))
    }
}

impl Transport for ThreadTransport {
    fn send(&self, to: usize, from: Span, tag: i32, _keep: &Buffer) -> Result<Work> {
        let Self(net, (me, peer)) = self;
        assert_eq!(to, usize::from(peer > me));
        let mut wires = net.lock();
        if wires.closed.contains(&(*peer, *me)) {
            return Err(Error::peer("connection closed"));
        }
        if !wires.cut.contains(me) {
            // SAFETY: the staging that the link has filled.
            let bytes = unsafe { std::slice::from_raw_parts(from.ptr(), from.bytes) };
            wires.sent.entry((*me, *peer, tag)).or_default().push_back(bytes.to_vec());
        }
        net.changed.notify_all();
        Ok(Arc::new(Done))
    }

    fn recv(&self, from: usize, to: Span, tag: i32, keep: &Buffer) -> Result<Work> {
        let Self(net, (me, peer)) = self;
        assert_eq!(from, usize::from(peer > me));
        Ok(Arc::new(Receive { net: Arc::clone(net), ends: (*me, *peer), tag, to, _keep: keep.clone() }))
    }
}

impl Drop for ThreadTransport {
    fn drop(&mut self) {
        self.0.close(self.1);
    }
}

impl Pending for Receive {
    fn wait(&self, _limit: Duration) -> Result<bool> {
        let (mut wires, (me, peer)) = (self.net.lock(), self.ends);
        loop {
            if wires.closed.contains(&self.ends) {
                return Ok(false);
            }
            let slow = wires.slow.contains(&me);
            let sent = wires.sent.entry((peer, me, self.tag)).or_default();
            if let Some(sent) = (!slow).then(|| sent.pop_front()).flatten() {
                assert!(sent.len() <= self.to.bytes, "Gloo would end the process");
                // SAFETY: `_keep` has this staging, which the link does not use until then.
                unsafe { std::ptr::copy_nonoverlapping(sent.as_ptr(), self.to.ptr(), sent.len()) };
                return Ok(true);
            }
            if wires.closed.contains(&(peer, me)) {
                return Err(Error::peer("connection closed"));
            }
            wires = self.net.sleep(wires);
        }
    }

    fn abort(&self) -> Result<()> {
        self.net.close(self.ends);
        Ok(())
    }
}

/// One rank of a test.
pub(super) struct Member {
    pub(super) messages: Arc<Messages>,
    pub(super) net: Arc<Net>,
    pub(super) me: u32,
}

pub(super) type Outcome = (Result<()>, Option<Rank>);

impl Member {
    pub(super) fn start(&self, send: bool, peer: u32, tag: i32, data: &mut [u8], seconds: f64) -> Result<(u64, Receiver<Outcome>)> {
        let (told, outcome) = channel();
        let completion = Completion::new(move |outcome, source| told.send((outcome, source)).expect("somebody waits"));
        let span = Span { addr: data.as_mut_ptr().addr(), bytes: data.len() };
        let message = Message::of(MessageSpec { peer: Some(Rank(peer)), tag, dtype: DType::U8, span, timeout: None });
        let timeout = Duration::from_secs_f64(seconds);
        let ticket = if send { self.messages.send(message, timeout, completion) } else { self.messages.recv(message, timeout, completion) };
        Ok((ticket?, outcome))
    }

    /// Starts a receive with tag 0 from any source.
    pub(super) fn start_any(&self, data: &mut [u8]) -> (u64, Receiver<Outcome>) {
        let (told, outcome) = channel();
        let completion = Completion::new(move |outcome, source| drop(told.send((outcome, source))));
        let span = Span { addr: data.as_mut_ptr().addr(), bytes: data.len() };
        let message = Message::of(MessageSpec { peer: None, tag: 0, dtype: DType::U8, span, timeout: None });
        (self.messages.recv(message, Duration::from_secs(60), completion).expect("starts"), outcome)
    }

    pub(super) fn finish(&self, (ticket, outcome): (u64, Receiver<Outcome>)) -> Outcome {
        assert_ne!(ticket & TICKET_BIT, 0);
        self.messages.wait(ticket, Some(Duration::from_secs(60))).expect("ends");
        outcome.try_recv().expect("was told before wait returned")
    }

    pub(super) fn isend(&self, peer: u32, tag: i32, data: &mut [u8]) -> (u64, Receiver<Outcome>) {
        self.start(true, peer, tag, data, 60.0).expect("starts")
    }

    pub(super) fn send(&self, peer: u32, tag: i32, data: &mut [u8]) {
        let started = self.isend(peer, tag, data);
        assert_eq!(self.finish(started), (Ok(()), None));
    }

    pub(super) fn recv(&self, peer: u32, tag: i32, bytes: usize) -> Vec<u8> {
        let mut data = vec![0xee; bytes];
        let started = self.start(false, peer, tag, &mut data, 60.0).expect("starts");
        assert_eq!(self.finish(started), (Ok(()), Some(Rank(peer))));
        data
    }
}

pub(super) fn place(rank: u32) -> RankLocation {
    RankLocation::on(&format!("node{rank}"))
}

/// Returns the messages of rank `me`, which is alone on its node, over `links`.
pub(super) fn alone(me: u32, layout: &Arc<NodeMap>, links: Links, store: Arc<MemoryStore>) -> Arc<Messages> {
    let bytes = SegmentLayout::new(1).total_bytes();
    let segment = ShmSegment::map(ShmSegment::create(bytes).expect("memfd"), bytes).expect("map");
    let part = ParentGroup { node: format!("node{me}"), ranks: vec![Rank(me)] };
    let control = ControlBlock::new(segment, Rank(0), "test".into(), vec![Identity { pid: 7, global: me }], 1).named(Some(part));
    let messages = Messages::new(&health(&Arc::new(control)), false);
    let (layout, prefix) = (Arc::clone(layout), "symm-pair/test/".into());
    messages.reach(InternodeLinks { links: Arc::new(links), store, node_map: layout, me: Rank(me), prefix, changed: Condvar::new() });
    messages
}

/// Runs `body` on one rank on each of `size` nodes; the ranks leave normally afterwards.
pub(super) fn on_ranks(size: u32, body: impl Fn(&Member) + Sync) {
    let layout = Arc::new(NodeMap::of(&(0..size).map(place).collect::<Vec<_>>()));
    let (net, store) = (Arc::<Net>::default(), Arc::new(MemoryStore::default()));
    std::thread::scope(|scope| {
        for me in 0..size {
            let (layout, net, store, body) = (Arc::clone(&layout), Arc::clone(&net), Arc::clone(&store), &body);
            scope.spawn(move || {
                let (transports, counting) = (ThreadTransports { net: Arc::clone(&net), me: Rank(me) }, Arc::clone(&net));
                let count = move |peer, _, came| *counting.lock().came.entry((peer, Rank(me))).or_default() += came;
                let links = Links::new(Arc::new(transports), Box::new(count));
                let messages = alone(me, &layout, links, store);
                body(&Member { messages: Arc::clone(&messages), net, me });
                let begun = Instant::now();
                messages.say_goodbye(Duration::from_secs(5));
                messages.shut_down(&Error::aborted("the group was destroyed"), "");
                messages.stop();
                assert!(begun.elapsed() < Duration::from_millis(900), "leaving has waited for nothing: {:?}", begun.elapsed());
                assert!(messages.lock().threads.is_empty(), "all threads have ended");
            });
        }
    });
}

pub(super) fn data(seed: usize, bytes: usize) -> Vec<u8> {
    (0..bytes).map(|at| (seed * 31 + at + (at >> 8) * 7 + (at >> 16) * 13) as u8).collect()
}

/// Lengths: 0, eager ones, the longest in one frame, and offers of several chunks, all but the last of them
/// unrequested, or more.
const LENGTHS: [usize; 8] = [0, 1, 977, 262_144, 262_145, 1_048_577, 1_179_648, 7_340_035];

#[test]
fn every_length_comes_as_it_was() {
    on_ranks(2, |member| {
        for (seed, bytes) in LENGTHS.into_iter().enumerate() {
            if member.me == 0 {
                member.send(1, 5, &mut data(seed, bytes));
                continue;
            }
            assert!(member.recv(0, 5, bytes) == data(seed, bytes), "{bytes} bytes");
            assert!(member.net.wires.lock().expect("no panic").came[&(Rank(0), Rank(1))] > LENGTHS[..=seed].iter().sum(), "counted");
        }
    });
}

#[test]
fn both_ranks_send_first() {
    on_ranks(2, |member| {
        let other = 1 - member.me;
        for bytes in LENGTHS {
            let mut own = data(member.me as usize, bytes);
            let sent = member.isend(other, 0, &mut own);
            assert!(member.recv(other, 0, bytes) == data(other as usize, bytes), "{bytes} bytes");
            assert_eq!(member.finish(sent), (Ok(()), None));
        }
        // Eager messages need no receiver.
        member.send(other, 1, &mut [member.me as u8; 600]);
        assert_eq!(member.recv(other, 1, 600), [other as u8; 600]);
    });
}

#[test]
fn rings_in_which_everybody_sends_first_go_round() {
    on_ranks(4, |member| {
        let (next, before) = ((member.me + 1) % 4, (member.me + 3) % 4);
        for round in 0..10 {
            for bytes in [8, 3_000_000] {
                let mut own = data(round + member.me as usize, bytes);
                let sent = member.isend(next, round as i32, &mut own);
                assert!(member.recv(before, round as i32, bytes) == data(round + before as usize, bytes));
                assert_eq!(member.finish(sent), (Ok(()), None));
            }
        }
    });
}

#[test]
fn tags_may_be_received_in_any_order_and_equal_ones_keep_theirs() {
    on_ranks(2, |member| {
        let lengths = [70_000, 30, 2_000_000, 5];
        if member.me == 0 {
            let mut all: Vec<Vec<u8>> = (0..12).map(|number| data(number, lengths[number % 4])).collect();
            let sent: Vec<_> = all.iter_mut().enumerate().map(|(number, data)| member.isend(1, number as i32 % 4, data)).collect();
            sent.into_iter().for_each(|sent| assert_eq!(member.finish(sent), (Ok(()), None)));
        } else {
            for (number, tag) in [3, 2, 1, 0].into_iter().flat_map(|tag| [(tag, tag), (tag + 4, tag), (tag + 8, tag)]) {
                assert!(member.recv(0, tag as i32, lengths[tag]) == data(number, lengths[tag]), "message {number} of tag {tag}");
            }
        }
    });
}

#[test]
fn receives_from_any_rank_match_in_their_order() {
    on_ranks(3, |member| {
        if member.me > 0 {
            member.recv(0, 1, 1);
            (0..3).for_each(|number| member.send(0, 0, &mut data(number, 70_000)));
            return;
        }
        (1..3).for_each(|peer| member.send(peer, 1, &mut [0]));
        let mut last = [0; 3];
        for _ in 0..6 {
            let mut into = vec![0xee; 70_000];
            let started = member.start_any(&mut into);
            let (outcome, source) = member.finish(started);
            let source = source.expect("somebody sent").index();
            assert_eq!(outcome, Ok(()));
            assert!(into == data(last[source], into.len()), "message {} of rank {source}", last[source]);
            last[source] += 1;
        }
    });
}

#[test]
fn a_flood_that_nobody_receives_yet_is_held_back_and_comes_later() {
    on_ranks(2, |member| {
        const COUNT: usize = 200;
        if member.me == 0 {
            let mut all: Vec<Vec<u8>> = (0..COUNT).map(|number| data(number, 60_000)).collect();
            let sent: Vec<_> = all.iter_mut().map(|data| member.isend(1, 0, data)).collect();
            let mut word = [0];
            member.send(1, 1, &mut word);
            // Messages that arrived before the connection complete all at once, on its thread.
            let unfinished = || member.messages.lock().open.len();
            while unfinished() == COUNT {
                std::thread::sleep(Duration::from_millis(1));
            }
            let open = unfinished();
            assert!((100..COUNT).contains(&open), "{open} wait for a receive: 4 MiB are on their way");
            member.send(1, 2, &mut word);
            sent.into_iter().for_each(|sent| assert_eq!(member.finish(sent), (Ok(()), None)));
        } else {
            member.recv(0, 1, 1);
            member.recv(0, 2, 1);
            (0..COUNT).for_each(|number| assert!(member.recv(0, 0, 60_000) == data(number, 60_000), "message {number}"));
        }
    });
}

#[test]
fn long_messages_that_nobody_receives_yet_come_unasked_as_far_as_there_is_room() {
    on_ranks(2, |member| {
        let length = |number: usize| 700_000 + number;
        if member.me == 0 {
            let mut all: Vec<Vec<u8>> = (0..20).map(|number| data(number, length(number))).collect();
            let sent: Vec<_> = all.iter_mut().map(|data| member.isend(1, 0, data)).collect();
            member.send(1, 1, &mut [0]);
            assert_eq!(member.recv(1, 2, 1), [7]);
            // Their last chunks are requested.
            assert_eq!(member.messages.lock().open.len(), sent.len());
            member.send(1, 3, &mut [0]);
            sent.into_iter().for_each(|sent| assert_eq!(member.finish(sent), (Ok(()), None)));
        } else {
            member.recv(0, 1, 1);
            member.send(0, 2, &mut [7]);
            member.recv(0, 3, 1);
            (0..20).for_each(|number| assert!(member.recv(0, 0, length(number)) == data(number, length(number)), "message {number}"));
        }
    });
}

#[test]
fn lengths_that_differ_are_an_error_at_the_receiver() {
    for bytes in [4, 5000, 3_000_000] {
        on_ranks(2, |member| {
            if member.me == 0 {
                let mut own = data(0, bytes);
                let sent = member.isend(1, 3, &mut own);
                let (outcome, _) = member.finish(sent);
                // An eager message has left its sender by then.
                assert!(if bytes > 262_144 { outcome.is_err() } else { outcome.is_ok() }, "{outcome:?}");
            } else {
                let mut into = vec![0xee; bytes + 4];
                let started = member.start(false, 0, 3, &mut into, 60.0).expect("starts");
                let error = member.finish(started).0.expect_err("they differ");
                assert_eq!(error.kind, ErrorKind::Mismatch, "{error}");
                let text = format!(
                    "rank 0 (node \"node0\", pid 7) sent {bytes} bytes (uint8, tag 3) to rank 1 (node \"node1\", pid 7) in group \"test\", \
                     whose recv expects {} (uint8)",
                    bytes + 4
                );
                assert_eq!(error.message, text);
                assert!(into.iter().all(|&byte| byte == 0xee), "nothing was written");
                assert_eq!(member.messages.health.failure(), Some(error), "the group has failed");
            }
        });
    }
}

#[test]
fn a_deadline_names_the_peer_and_ends_the_group() {
    on_ranks(2, |member| {
        if member.me == 1 {
            std::thread::sleep(Duration::from_millis(600));
            return;
        }
        let (begun, mut into) = (Instant::now(), [0xee; 12]);
        let started = member.start(false, 1, 9, &mut into, 0.2).expect("starts");
        let error = member.finish(started).0.expect_err("nobody comes");
        let took = begun.elapsed();
        assert_eq!(error.kind, ErrorKind::Timeout, "{error}");
        let text = "s in recv(12 bytes, uint8, tag 9) of group \"test\", waiting for rank 1 (node \"node1\", pid 7), \
                    which has begun no message with it";
        assert!(error.message.ends_with(text), "{error}");
        assert!((200..500).contains(&took.as_millis()), "{took:?}");
        let again = member.start(true, 1, 0, &mut into, 5.0).expect_err("it has failed");
        assert_eq!(again, error);
    });
}

#[test]
fn abort_and_the_groups_failure_release_who_waits() {
    for by_failure in [false, true] {
        on_ranks(2, |member| {
            if member.me == 1 {
                std::thread::sleep(Duration::from_millis(400));
                return;
            }
            let mut into = [0; 4];
            let started = member.start(false, 1, 0, &mut into, 60.0).expect("starts");
            let begun = Instant::now();
            let error = Error::aborted("it is over");
            if by_failure {
                member.messages.control.fail(error.clone());
            } else {
                member.messages.close(&error);
            }
            assert_eq!(member.finish(started).0, Err(error));
            assert!(begun.elapsed() < Duration::from_millis(300), "{:?}", begun.elapsed());
        });
    }
}

#[test]
fn who_leaves_has_been_read_and_who_needs_it_then_hears_of_it() {
    on_ranks(2, |member| {
        if member.me == 0 {
            (0..20).for_each(|number| member.send(1, 0, &mut data(number, 1000 * number)));
            return;
        }
        std::thread::sleep(Duration::from_millis(100));
        (0..20).for_each(|number| assert!(member.recv(0, 0, 1000 * number) == data(number, 1000 * number)));
        let mut into = [0; 4];
        let started = member.start(false, 0, 0, &mut into, 60.0).expect("starts");
        let error = member.finish(started).0.expect_err("nobody is there");
        assert_eq!(error.kind, ErrorKind::Peer, "{error}");
        assert!(error.message.contains("lost its connection to rank 0 (node \"node0\", pid 7)"), "{error}");
    });
}
