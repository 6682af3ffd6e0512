//! The multi-node part of a group: shared memory connects the ranks of each node, and backends of
//! torch connect the nodes.
//!
//! The backends, one [`rail`] for each local rank that every node has, only move bytes. This module
//! decides which bytes move and in which order, and computes every sum. `docs/design/multi-node.md`
//! shows the steps.
//!
//! - [`rail`]: a backend and its transfers; [`header`](mod@header): the part of a call that ranks
//!   compare
//! - [`reduce_dtype`](mod@reduce_dtype): the type of partial sums;
//!   [`agreed_settings`](mod@agreed_settings): the choices that all ranks share
//! - [`runner`](mod@runner): runs a group's collectives on CPU tensors; [`cpu`](mod@cpu): runs
//!   their programs ([`two_level`](crate::coll::two_level)); [`executor`](mod@executor): such a
//!   call while it runs; [`header_exchange`](mod@header_exchange): the start of a call;
//!   [`inline`](mod@inline): short calls, which consist of the header exchange
//! - [`cuda`](mod@cuda): CUDA tensors; [`discovery`](mod@discovery): whether a group spans nodes;
//!   [`join`](mod@join): how it forms
//! - [`traffic`](mod@traffic): bytes by rail and peer;
//!   [`monitored_barrier`](mod@monitored_barrier): arrivals at a monitored barrier
//! - [`local_node`](mod@local_node): this node as it is reported to others; [`oob`](mod@oob):
//!   out-of-band messages

pub mod agreed_settings;
mod cpu;
pub mod cuda;
pub mod discovery;
mod executor;
mod header;
mod header_exchange;
mod inline;
pub mod join;
mod local_node;
mod monitored_barrier;
mod oob;
pub mod rail;
mod rail_guard;
pub mod reduce_dtype;
mod runner;
pub mod traffic;

pub use runner::InternodeRunner;

use crate::completion::Observer;
use crate::config::InterNodeBackends;
use crate::error::{Error, Result};
use crate::health::{FailureListener, Health};
use crate::lock::lock;
use crate::node_map::NodeMap;
use crate::rank::Rank;
use crate::store::Store;
use crate::trace::GroupRecorder;
use agreed_settings::AgreedSettings;
use cuda::CudaInternode;
use local_node::LocalCallState;
use oob::OobEndpoint;
use rail::{Life, Rail};
use rail_guard::RailGuard;
use std::sync::atomic::AtomicU64;
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;
use traffic::{GroupTraffic, TrafficPath};

/// How long leaving waits for a backend to end.
const RAIL_CLOSE_TIMEOUT: Duration = Duration::from_millis(800);
/// Replaces [`RAIL_CLOSE_TIMEOUT`] once the group has failed, when a transfer without a peer may
/// last until its deadline.
const FAILED_RAIL_CLOSE_TIMEOUT: Duration = Duration::from_millis(80);

/// One rank's connection to the other nodes of its group.
pub struct Internode {
    health: Arc<Health>,
    layout: Arc<NodeMap>,
    rank: Rank,
    rail: Mutex<Option<Arc<RailGuard>>>,
    oob: OobEndpoint,
    current: Arc<LocalCallState>,
    traffic: Arc<GroupTraffic>,
    /// Set once all ranks have agreed.
    chosen: OnceLock<AgreedSettings>,
    /// Disconnected when the rail has ended.
    ending: Mutex<Receiver<()>>,
    /// The members' ranks in the default group; empty if they equal the ranks in this group.
    globals: Vec<i32>,
    store: Arc<dyn Store>,
    /// CUDA tensors, if a backend for them was chosen.
    cuda: Option<CudaInternode>,
    /// Number of monitored barriers.
    monitored: AtomicU64,
    life: Life,
}

/// A rank's connections to the other nodes, once they are made.
struct InternodeParts {
    /// This rank's rail, if it has one.
    rail: Option<Rail>,
    oob: OobEndpoint,
    current: Arc<LocalCallState>,
    life: Life,
    backends: InterNodeBackends,
    /// The group's store, in which two ranks meet later.
    store: Arc<dyn Store>,
    cuda: Option<CudaInternode>,
    globals: Vec<i32>,
}

/// The number of a message's peer in the flight recorder, and the observer of the message's end if
/// the peer may be on another node.
pub type Recorded = (Option<Rank>, Option<Arc<dyn Observer>>);

/// Records the end of a message whose peer is known by its rank in the default group.
struct Globals {
    recorder: Arc<GroupRecorder>,
    ranks: Vec<i32>,
}

impl Observer for Globals {
    fn ended(&self, number: u64, outcome: &Result<()>, source: Option<Rank>) {
        self.recorder.ended(number, outcome, source.map(|rank| global(&self.ranks, rank)));
    }
}

/// Returns the number of `rank` in the default group, in which the members have the numbers
/// `globals`.
fn global(globals: &[i32], rank: Rank) -> Rank {
    globals.get(rank.index()).map_or(rank, |&global| Rank(global as u32))
}

impl FailureListener for Internode {
    /// Reports the failure to the other nodes, then drops the rail.
    fn failed(&self, failure: &Error) {
        self.oob.broadcast_failure(failure);
        self.release_rail(Duration::ZERO);
    }

    fn departure(&self, local: usize) -> Option<Error> {
        self.oob.departure(local)
    }
}

impl Internode {
    /// Creates the multi-node part of the group with this `health` and node map `layout`, for
    /// `rank` with these connections.
    fn new(
        health: &Arc<Health>,
        layout: &Arc<NodeMap>,
        rank: Rank,
        connections: InternodeParts,
    ) -> Arc<Self> {
        let (ended, ending) = channel();
        let InternodeParts { rail, oob: news, current, life, backends, store, cuda, globals } =
            connections;
        let nodes = Arc::new(Self {
            health: Arc::clone(health),
            layout: Arc::clone(layout),
            rank,
            rail: Mutex::new(rail.map(|rail| Arc::new(RailGuard::new(rail, ended)))),
            oob: news,
            current,
            traffic: GroupTraffic::of(health.control().name(), &backends),
            chosen: OnceLock::new(),
            ending: Mutex::new(ending),
            globals,
            store,
            cuda,
            monitored: AtomicU64::new(0),
            life,
        });
        let others = layout.name_others(layout.node_of(rank));
        health.recorder().note_nodes(life.id(), others);
        let listener: Arc<dyn FailureListener> = nodes.clone();
        health.listen(Arc::downgrade(&listener));
        nodes
    }

    /// Returns this rank, and the number of ranks.
    pub fn place(&self) -> (Rank, usize) {
        (self.rank, self.layout.size())
    }

    /// Returns true if `peer` is on another node.
    fn is_internode(&self, peer: Rank) -> bool {
        self.layout.node_of(peer) != self.layout.node_of(self.rank)
    }

    fn global(&self, rank: Rank) -> Rank {
        global(&self.globals, rank)
    }

    /// Returns the choices that calls use.
    fn chosen(&self) -> &AgreedSettings {
        self.chosen.get().unwrap_or(&AgreedSettings::DEFAULT)
    }

    /// Returns the rail, as long as the group lives.
    fn rail(&self) -> Result<Arc<RailGuard>> {
        let rail = lock(&self.rail).clone();
        rail.ok_or_else(|| Error::aborted("the group has left its other nodes"))
    }

    /// Returns the number under which the flight recorder lists `peer` in a message: its local rank
    /// if it is on this node; otherwise its rank in the default group, with the observer of the
    /// message's end. Errors call the message `what`. `reach` is true if messages can travel
    /// between nodes.
    ///
    /// # Errors
    /// `Value` for a rank outside the group, `NotImplemented` if messages do not reach it.
    pub fn recorded_as(&self, what: &str, peer: Option<Rank>, reach: bool) -> Result<Recorded> {
        let layout = &self.layout;
        if let Some(peer) = peer.filter(|peer| peer.index() >= layout.size()) {
            return Err(Error::value(format!(
                "rank {peer} is outside the group of {} ranks",
                layout.size()
            )));
        }
        if let Some(peer) = peer.filter(|&peer| !self.is_internode(peer)) {
            return Ok((Some(Rank(layout.local_rank(peer) as u32)), None));
        }
        if !reach {
            let (me, name) = (layout.describe(self.rank), self.health.control().name());
            return Err(Error::not_implemented(match peer {
                Some(peer) => format!(
                    "{what}: nothing carries messages between {me} and {}",
                    layout.describe(peer)
                ),
                None => {
                    format!(
                        "{what}: {me} cannot receive from any rank of group \"{name}\": nothing \
                         carries messages between its nodes"
                    )
                }
            }));
        }
        let shown = peer.map(|peer| self.global(peer));
        shown.into_iter().for_each(|peer| self.traffic.message(TrafficPath::Link(peer)));
        let globals =
            Globals { recorder: Arc::clone(self.health.recorder()), ranks: self.globals.clone() };
        Ok((shown, Some(Arc::new(globals))))
    }

    /// Returns the error for a feature `what` that multi-node groups lack.
    pub fn unsupported(&self, what: &str) -> Error {
        let nodes: Vec<String> =
            (0..self.layout.num_nodes()).map(|node| self.layout.name_node(node)).collect();
        let (name, nodes) = (self.health.control().name(), nodes.join(", "));
        Error::config(format!(
            "group \"{name}\" is on several nodes: {nodes}; {what} within one node only, and \
             torch_symm.intra_node_group(group) is the part on \
             this one"
        ))
    }

    /// Records that a call was rejected after `calls` others were made, `on_host` of them on CPU
    /// tensors.
    pub fn note_rejected(&self, calls: u64, on_host: u64) {
        self.current.note_rejected(calls, on_host);
    }

    /// Notifies the other nodes of the last rejected call, with the reason `text`.
    pub fn broadcast_rejection(&self, text: &str) {
        self.current
            .rejected()
            .into_iter()
            .for_each(|place| self.oob.broadcast_rejection(place, text));
    }

    /// Notifies the other nodes that this rank makes the call of this number after a rejection.
    pub fn broadcast_resumed(&self, call: u64) {
        self.oob.resume(call);
    }

    /// Leaves the other nodes, after this rank has left its own node: closes its connections and
    /// reports how it has left. The connections for CUDA tensors are closed after `limit` at the
    /// latest.
    pub fn leave(&self, limit: Duration) {
        if let Some(cuda) = &self.cuda {
            cuda.close(limit);
        }
        let failure = self.health.failure();
        failure.iter().for_each(|failure| self.oob.broadcast_failure(failure));
        let control = self.health.control();
        self.oob.leave(&control.departure(control.rank()).unwrap_or_default());
        self.release_rail(if failure.is_some() {
            FAILED_RAIL_CLOSE_TIMEOUT
        } else {
            RAIL_CLOSE_TIMEOUT
        });
    }

    /// Forgets the rail of this process's parent, because dropping it would wait for threads that
    /// do not exist here.
    pub fn forget(&self) {
        if let Ok(mut rail) = self.rail.try_lock() {
            std::mem::forget(rail.take());
        }
    }

    /// Releases the rail, and waits for at most `limit` until it has ended, because calls that use
    /// it may still have to notice that the group has failed.
    fn release_rail(&self, limit: Duration) {
        drop(lock(&self.rail).take());
        if !limit.is_zero() {
            let _ = lock(&self.ending).recv_timeout(limit);
        }
    }
}
