//! Threads of one process as ranks, with queues in memory as their wires.
#![allow(unsafe_code, reason = "copies between transfers and the memory of tests")]

use super::health;
use crate::coll::call::Span;
use crate::coll::message::{Message, MessageSpec};
use crate::completion::Completion;
use crate::control::{ControlBlock, Identity, ParentGroup};
use crate::dtype::DType;
use crate::error::{Error, Result};
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

/// The key of the bytes in flight: sender, receiver, and tag (the class of traffic).
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
    pub(super) came: HashMap<(Rank, Rank), usize>,
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
        wires
            .sent
            .iter_mut()
            .filter(|((from, to, _), _)| (*from, *to) == (me, peer))
            .for_each(|(_, sent)| sent.clear());
        self.changed.notify_all();
    }
}

/// The transports of rank `me`.
struct ThreadTransports {
    net: Arc<Net>,
    me: Rank,
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

/// Transports whose connections are all clones of one transport.
pub(crate) struct Alike<T>(pub(crate) T);

impl<T: Transport + Clone + 'static> Transports for Alike<T> {
    fn connect(
        &self,
        _name: &str,
        _seat: &Seat,
        _timeout: Duration,
        _patient: bool,
        _given_up: &GivenUp,
    ) -> Result<Arc<dyn Transport>> {
        Ok(Arc::new(self.0.clone()))
    }

    fn allocate(&self, _device: i32, bytes: usize) -> Result<Buffer> {
        Ok(Buffer::in_host_memory(bytes))
    }
}

/// A transfer that has ended.
pub(super) struct Done;

impl Pending for Done {
    fn wait(&self, _limit: Duration) -> Result<bool> {
        Ok(true)
    }
}

impl Transports for ThreadTransports {
    fn connect(
        &self,
        name: &str,
        seat: &Seat,
        _timeout: Duration,
        _patient: bool,
        _given_up: &GivenUp,
    ) -> Result<Arc<dyn Transport>> {
        let pair = name
            .strip_prefix("symm-pair/test/")
            .and_then(|pair| pair.split_once('-'))
            .expect("a name of two ranks");
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
        Ok(Buffer::in_host_memory(bytes))
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
            // SAFETY: `from` is staging that the link has filled.
            let bytes = unsafe { std::slice::from_raw_parts(from.ptr(), from.bytes) };
            wires.sent.entry((*me, *peer, tag)).or_default().push_back(bytes.to_vec());
        }
        net.changed.notify_all();
        Ok(Arc::new(Done))
    }

    fn recv(&self, from: usize, to: Span, tag: i32, keep: &Buffer) -> Result<Work> {
        let Self(net, (me, peer)) = self;
        assert_eq!(from, usize::from(peer > me));
        Ok(Arc::new(Receive {
            net: Arc::clone(net),
            ends: (*me, *peer),
            tag,
            to,
            _keep: keep.clone(),
        }))
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
                // SAFETY: `_keep` owns this staging, which the link does not use before the receive
                // ends.
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
    pub(super) fn start(
        &self,
        send: bool,
        peer: u32,
        tag: i32,
        data: &mut [u8],
        seconds: f64,
    ) -> Result<(u64, Receiver<Outcome>)> {
        let (told, outcome) = channel();
        let completion = Completion::new(move |outcome, source| {
            told.send((outcome, source)).expect("somebody waits")
        });
        let span = Span { addr: data.as_mut_ptr().addr(), bytes: data.len() };
        let message = Message::of(MessageSpec {
            peer: Some(Rank(peer)),
            tag,
            dtype: DType::U8,
            span,
            timeout: None,
        });
        let timeout = Duration::from_secs_f64(seconds);
        let ticket = if send {
            self.messages.send(message, timeout, completion)
        } else {
            self.messages.recv(message, timeout, completion)
        };
        Ok((ticket?, outcome))
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
pub(super) fn alone(
    me: u32,
    layout: &Arc<NodeMap>,
    links: Links,
    store: Arc<MemoryStore>,
) -> Arc<Messages> {
    let bytes = SegmentLayout::new(1).total_bytes();
    let segment = ShmSegment::map(ShmSegment::create(bytes).expect("memfd"), bytes).expect("map");
    let part =
        ParentGroup { node: format!("node{me}"), ranks: vec![Rank(me)], global_ranks: vec![0, 1] };
    let control = ControlBlock::new(
        segment,
        Rank(0),
        "test".into(),
        vec![Identity { pid: 7, global: me }],
        1,
    )
    .named(Some(part));
    let messages = Messages::new(&health(&Arc::new(control)), false);
    let (layout, prefix) = (Arc::clone(layout), "symm-pair/test/".into());
    messages.reach(InternodeLinks {
        links: Arc::new(links),
        store,
        node_map: layout,
        me: Rank(me),
        prefix,
        changed: Condvar::new(),
    });
    messages
}

/// Runs `body` on one rank on each of `size` nodes; the ranks leave normally afterwards.
pub(super) fn on_ranks(size: u32, body: impl Fn(&Member) + Sync) {
    let layout = Arc::new(NodeMap::of(&(0..size).map(place).collect::<Vec<_>>()));
    let (net, store) = (Arc::<Net>::default(), Arc::new(MemoryStore::default()));
    std::thread::scope(|scope| {
        for me in 0..size {
            let (layout, net, store, body) =
                (Arc::clone(&layout), Arc::clone(&net), Arc::clone(&store), &body);
            scope.spawn(move || {
                let (transports, counting) =
                    (ThreadTransports { net: Arc::clone(&net), me: Rank(me) }, Arc::clone(&net));
                let count = move |peer, _, came| {
                    *counting.lock().came.entry((peer, Rank(me))).or_default() += came
                };
                let links = Links::new(Arc::new(transports), Box::new(count));
                let messages = alone(me, &layout, links, store);
                body(&Member { messages: Arc::clone(&messages), net, me });
                let begun = Instant::now();
                messages.say_goodbye(Duration::from_secs(5));
                messages.shut_down(&Error::aborted("the group was destroyed"), "");
                messages.stop();
                assert!(
                    begun.elapsed() < Duration::from_secs(4),
                    "leaving has waited for nothing: {:?}",
                    begun.elapsed()
                );
                assert!(messages.lock().threads.is_empty(), "all threads have ended");
            });
        }
    });
}

pub(super) fn data(seed: usize, bytes: usize) -> Vec<u8> {
    (0..bytes).map(|at| (seed * 31 + at + (at >> 8) * 7 + (at >> 16) * 13) as u8).collect()
}
