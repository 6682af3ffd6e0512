//! Ranks of several nodes as threads of one process, with rails in memory.

use crate::coll::call::Span;
use crate::coll::two_level::step::RailOp;
use crate::coll::two_level::tests::ranks::{moved, write};
use crate::control::{Identity, ParentGroup};
use crate::error::{Error, Result};
use crate::group::join::control_block;
use crate::group::{Group, GroupTuning};
use crate::internode::join::among_threads;
use crate::internode::rail::Rail;
use crate::lock::{lock, unpoisoned};
use crate::mem::layout::SegmentLayout as Memory;
use crate::mem::shm::ShmSegment;
use crate::messages::tests::thread_wires::Alike;
use crate::node_map::{NodeMap, RankLocation};
use crate::rank::Rank;
use crate::store::{self, memory::MemoryStore};
use crate::transport::{Buffer, Manner, Pending, Transport, Work};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

/// The bytes that the nodes of one rail have sent, transfer by transfer.
#[derive(Default)]
struct Wire {
    rounds: Mutex<Vec<Vec<Option<Sent>>>>,
    /// Set with `rounds` locked, once a rank has dropped its end.
    broken: AtomicBool,
    changed: Condvar,
    /// Number of transfers that end; all later transfers stay pending. 0 means that all end.
    most: usize,
}

/// The bytes that one node sends to each node. All nodes must have the same `kind`: the kind of the
/// transfer and its length.
#[derive(Clone)]
struct Sent {
    parts: Vec<Vec<u8>>,
    kind: (u8, usize),
}

/// One rank's end of a rail.
struct ThreadRail {
    wire: Arc<Wire>,
    node: usize,
    nodes: usize,
    /// Number of transfers begun.
    begun: AtomicUsize,
}

/// A transfer, its number, and the memory that receives the bytes from each node.
struct Round {
    wire: Arc<Wire>,
    node: usize,
    number: usize,
    wanted: Vec<Span>,
    _keep: Buffer,
}

/// A transport that no test uses, because the rails are connected.
#[derive(Clone)]
struct Unused;

impl Transport for Unused {}

impl ThreadRail {
    fn start(&self, transfer: &RailOp<Span>, manner: Manner<'_>) -> Result<Work> {
        let kind = match transfer {
            RailOp::AllGather { from, .. } => (0, from.bytes),
            RailOp::AllToAll { .. } => (1, 0),
            RailOp::Broadcast { at, .. } => (2, at.bytes),
        };
        let (parts, wanted) = moved(transfer, self.node, self.nodes);
        let keep = manner.keep.expect("a rail moves its staging").clone();
        assert!(manner.overlap && manner.timeout.is_some());
        let number = self.begun.fetch_add(1, Ordering::Relaxed);
        let mut rounds = lock(&self.wire.rounds);
        while rounds.len() <= number {
            rounds.push(vec![None; self.nodes]);
        }
        rounds[number][self.node] = Some(Sent { parts, kind });
        self.wire.changed.notify_all();
        Ok(Arc::new(Round {
            wire: Arc::clone(&self.wire),
            node: self.node,
            number,
            wanted,
            _keep: keep,
        }))
    }
}

impl Transport for ThreadRail {
    fn all_gather(&self, from: Span, to: Span, manner: Manner<'_>) -> Result<Work> {
        self.start(&RailOp::AllGather { from, to }, manner)
    }

    fn all_to_all(
        &self,
        from: Span,
        sent: &[usize],
        to: Span,
        received: &[usize],
        manner: Manner<'_>,
    ) -> Result<Work> {
        let (sent, received) = (sent.to_vec(), received.to_vec());
        self.start(&RailOp::AllToAll { from, sent, to, received }, manner)
    }

    fn broadcast(&self, root: usize, at: Span, manner: Manner<'_>) -> Result<Work> {
        self.start(&RailOp::Broadcast { root, at }, manner)
    }
}

impl Pending for Round {
    fn wait(&self, limit: Duration) -> Result<bool> {
        let deadline = Instant::now() + limit;
        let mut rounds = lock(&self.wire.rounds);
        let stuck = self.wire.most > 0 && self.number >= self.wire.most;
        while stuck || !rounds[self.number].iter().all(Option::is_some) {
            if self.wire.broken.load(Ordering::Relaxed) {
                return Err(Error::peer("connection closed"));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(false);
            }
            rounds = unpoisoned(self.wire.changed.wait_timeout(rounds, left)).0;
        }
        let all: Vec<Sent> = rounds[self.number].iter().flatten().cloned().collect();
        drop(rounds);
        for (sent, wanted) in all.iter().zip(&self.wanted) {
            assert_eq!(sent.kind, all[0].kind, "Gloo would end the process");
            // The rail's staging, which nothing else uses until the transfer ends.
            write(&sent.parts[self.node], *wanted);
        }
        Ok(true)
    }
}

impl Drop for ThreadRail {
    fn drop(&mut self) {
        let _rounds = lock(&self.wire.rounds);
        self.wire.broken.store(true, Ordering::Relaxed);
        self.wire.changed.notify_all();
    }
}

/// Runs `body` on the ranks of a layout, where rank `r` is on node `nodes[r]`.
pub(super) fn on_nodes(nodes: &[u8], body: impl Fn(&Group, usize) + Sync) {
    on_nodes_until(0, nodes, body);
}

/// Runs [`on_nodes`] with rails that complete only their first `most` transfers, or all transfers
/// if `most` is 0.
pub(super) fn on_nodes_until(most: usize, nodes: &[u8], body: impl Fn(&Group, usize) + Sync) {
    let place = |node: &u8| RankLocation::on(&format!("node{node}"));
    let layout = Arc::new(NodeMap::of(&nodes.iter().map(place).collect::<Vec<_>>()));
    let store: Arc<dyn store::Store> = Arc::new(MemoryStore::default());
    let bytes = |node: usize| Memory::new(layout.ranks_of(node).len()).total_bytes();
    let files: Vec<_> = (0..layout.num_nodes())
        .map(|node| ShmSegment::create(bytes(node)).expect("memfd"))
        .collect();
    let wires: Vec<Arc<Wire>> =
        (0..layout.num_rails()).map(|_| Arc::new(Wire { most, ..Wire::default() })).collect();
    let joined = std::sync::Barrier::new(nodes.len());
    std::thread::scope(|scope| {
        for rank in 0..nodes.len() {
            let (layout, store, body, wires, joined) =
                (Arc::clone(&layout), &store, &body, &wires, &joined);
            let (node, local) =
                (layout.node_of(Rank(rank as u32)), layout.local_rank(Rank(rank as u32)));
            let (file, bytes) = (files[node].try_clone().expect("dup"), bytes(node));
            scope.spawn(move || {
                let segment = ShmSegment::map(file, bytes).expect("map");
                let members = layout
                    .ranks_of(node)
                    .iter()
                    .map(|rank| Identity { pid: std::process::id(), global: rank.0 })
                    .collect();
                let part = ParentGroup {
                    node: layout.node_name(node).into(),
                    ranks: layout.ranks_of(node).to_vec(),
                    global_ranks: (0..layout.size() as u32).collect(),
                };
                let (limit, tuning) = (Duration::from_secs(60), GroupTuning::default());
                let control = control_block(segment, "test", Rank(local as u32), members, tuning)
                    .named(Some(part));
                let mut group =
                    Group::with_watched(control, &[], limit, tuning).expect("assembles");
                let rail = wires.get(local).map(|wire| {
                    let end = ThreadRail {
                        wire: Arc::clone(wire),
                        node,
                        nodes: layout.num_nodes(),
                        begun: AtomicUsize::new(0),
                    };
                    Rail::new(Arc::new(Alike(Unused)), Arc::new(end))
                });
                let me = Rank(rank as u32);
                group
                    .connect_nodes(|health, _, _| {
                        Ok((among_threads(health, &layout, me, rail, store), ()))
                    })
                    .expect("all meet");
                joined.wait();
                body(&group, rank);
            });
        }
    });
}
