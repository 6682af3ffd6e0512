//! The multi-node part of a group: shared memory connects the ranks of each node, and backends of torch connect the
//! nodes.
//!
//! The backends, one [`rail`] for each local rank that every node has, only move bytes. This module decides which bytes
//! move and in which order, and computes every sum. `docs/design/several-hosts.md` shows the steps.
//!
//! - [`rail`]: the interface to a backend; [`header`](mod@header): the part of a call that ranks compare
//! - [`partials`](mod@partials): the type of partial sums; [`chosen`](mod@chosen): the choices that all ranks share
//! - [`runner`](mod@runner): runs a group's collectives on CPU tensors; [`cpu`](mod@cpu): runs their programs
//!   ([`two_level`](crate::coll::two_level)); [`executor`](mod@executor): such a call while it runs;
//!   [`opening`](mod@opening): the start of a call; [`short`](mod@short): short calls, which consist of the opening
//! - [`cuda`](mod@cuda): CUDA tensors; [`finding`](mod@finding): whether a group spans nodes; [`joining`](mod@joining):
//!   how it forms
//! - [`traffic`](mod@traffic): bytes by rail and peer; [`monitored`](mod@monitored): arrivals at a monitored barrier
//! - [`host`](mod@host): this node as it is reported to others; [`news`](mod@news): out-of-band messages

pub mod chosen;
mod cpu;
pub mod cuda;
mod executor;
pub mod finding;
mod header;
mod held;
mod host;
pub mod joining;
mod monitored;
mod news;
mod opening;
pub mod partials;
pub mod rail;
mod runner;
mod short;
pub mod traffic;

pub use runner::HostsRunner;

use crate::completion::Observer;
use crate::config::Engines;
use crate::error::{Error, Result};
use crate::health::{Health, Listener};
use crate::host_map::HostMap;
use crate::lock::lock;
use crate::rank::Rank;
use crate::store::Store;
use crate::trace::Recorder;
use chosen::Chosen;
use cuda::Cuda;
use held::Held;
use host::Current;
use news::News;
use rail::{Life, Rail};
use std::sync::atomic::AtomicU64;
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;
use traffic::{Path, Traffic};

/// How long leaving waits for a backend to end.
const RELEASE: Duration = Duration::from_millis(800);
/// The same once the group has failed, when a transfer without a peer may last until its deadline.
const RELEASE_FAILED: Duration = Duration::from_millis(80);

/// One rank's connection to the other nodes of its group.
pub struct Hosts {
    health: Arc<Health>,
    layout: Arc<HostMap>,
    rank: Rank,
    rail: Mutex<Option<Arc<Held>>>,
    news: News,
    current: Arc<Current>,
    traffic: Arc<Traffic>,
    /// Set once all ranks have agreed.
    chosen: OnceLock<Chosen>,
    /// Disconnected when the rail has ended.
    ending: Mutex<Receiver<()>>,
    /// The members' ranks in the default group; empty if they are the same as here.
    globals: Vec<i32>,
    store: Arc<dyn Store>,
    /// CUDA tensors, if a backend for them was chosen.
    cuda: Option<Cuda>,
    /// Number of monitored barriers.
    monitored: AtomicU64,
    life: Life,
}

/// A rank's connections to the other nodes, once they are made.
struct Connections {
    /// This rank's rail, already created, if it has one.
    rail: Option<Arc<dyn Rail>>,
    news: News,
    current: Arc<Current>,
    life: Life,
    engines: Engines,
    /// The group's store, in which two ranks meet later.
    store: Arc<dyn Store>,
    cuda: Option<Cuda>,
    globals: Vec<i32>,
}

/// The number of a message's peer in the flight recorder, and the observer of its end if the peer may be on another
/// node.
pub type Recorded = (Option<Rank>, Option<Arc<dyn Observer>>);

/// Records the end of a message whose peer is known by its rank in the default group.
struct Globals {
    recorder: Arc<Recorder>,
    ranks: Vec<i32>,
}

impl Observer for Globals {
    fn ended(&self, number: u64, outcome: &Result<()>, source: Option<Rank>) {
        self.recorder.ended(number, outcome, source.map(|rank| global(&self.ranks, rank)));
    }
}

/// Returns the number of `rank` in the default group, in which the members have the numbers `globals`.
fn global(globals: &[i32], rank: Rank) -> Rank {
    globals.get(rank.index()).map_or(rank, |&global| Rank(global as u32))
}

impl Listener for Hosts {
    /// Reports the failure to the other nodes, then drops the rail.
    fn failed(&self, failure: &Error) {
        self.news.tell(failure);
        self.let_go(Duration::ZERO);
    }

    fn departure(&self, local: usize) -> Option<Error> {
        self.news.departure(local)
    }
}

impl Hosts {
    /// Creates the multi-node part of the group with this `health` and node map `layout`, for `rank` with these
    /// connections.
    fn new(health: &Arc<Health>, layout: &Arc<HostMap>, rank: Rank, connections: Connections) -> Arc<Self> {
        let (ended, ending) = channel();
        let Connections { rail, news, current, life, engines, store, cuda, globals } = connections;
        let hosts = Arc::new(Self {
            health: Arc::clone(health),
            layout: Arc::clone(layout),
            rank,
            rail: Mutex::new(rail.map(|rail| Arc::new(Held::new(rail, ended)))),
            news,
            current,
            traffic: Traffic::of(health.control().name(), &engines),
            chosen: OnceLock::new(),
            ending: Mutex::new(ending),
            globals,
            store,
            cuda,
            monitored: AtomicU64::new(0),
            life,
        });
        health.recorder().note_hosts(layout.name_others(layout.host(rank)));
        let listener: Arc<dyn Listener> = hosts.clone();
        health.listen(Arc::downgrade(&listener));
        hosts
    }

    /// Returns this rank, and the number of ranks.
    pub fn place(&self) -> (Rank, usize) {
        (self.rank, self.layout.size())
    }

    /// Returns true if `peer` is on another node.
    fn is_far(&self, peer: Rank) -> bool {
        self.layout.host(peer) != self.layout.host(self.rank)
    }

    fn global(&self, rank: Rank) -> Rank {
        global(&self.globals, rank)
    }

    /// Returns the choices that calls use.
    fn chosen(&self) -> &Chosen {
        self.chosen.get().unwrap_or(&Chosen::USUAL)
    }

    /// Returns the rail, as long as the group lives.
    fn rail(&self) -> Result<Arc<Held>> {
        let rail = lock(&self.rail).clone();
        rail.ok_or_else(|| Error::aborted("the group has left its other hosts"))
    }

    /// Returns the number of `peer` in the flight recorder for a message `what`: its local rank if it is on this node;
    /// otherwise its rank in the default group, with the observer of the message's end. `reach` is true if messages can
    /// travel between nodes.
    ///
    /// # Errors
    /// `Value` for a rank outside the group, `NotImplemented` if messages do not reach it.
    pub fn recorded_as(&self, what: &str, peer: Option<Rank>, reach: bool) -> Result<Recorded> {
        let layout = &self.layout;
        if let Some(peer) = peer.filter(|peer| peer.index() >= layout.size()) {
            return Err(Error::value(format!("rank {peer} is outside the group of {} ranks", layout.size())));
        }
        if let Some(peer) = peer.filter(|&peer| !self.is_far(peer)) {
            return Ok((Some(Rank(layout.local(peer) as u32)), None));
        }
        if !reach {
            let (me, name) = (layout.describe(self.rank), self.health.control().name());
            return Err(Error::not_implemented(match peer {
                Some(peer) => format!("{what}: nothing carries messages between {me} and {}", layout.describe(peer)),
                None => {
                    format!("{what}: {me} cannot receive from any rank of group \"{name}\": nothing carries messages between its hosts")
                }
            }));
        }
        let shown = peer.map(|peer| self.global(peer));
        shown.into_iter().for_each(|peer| self.traffic.message(Path::Link(peer)));
        let globals = Globals { recorder: Arc::clone(self.health.recorder()), ranks: self.globals.clone() };
        Ok((shown, Some(Arc::new(globals))))
    }

    /// Returns the error for a feature `what` that multi-node groups lack.
    pub fn lacks(&self, what: &str) -> Error {
        let hosts: Vec<String> = (0..self.layout.hosts()).map(|host| self.layout.name_host(host)).collect();
        let (name, hosts) = (self.health.control().name(), hosts.join(", "));
        Error::config(format!(
            "group \"{name}\" is on several hosts: {hosts}; {what} within one host only, and torch_symm.host_group(group) is the part on \
             this one"
        ))
    }

    /// Records that a call was rejected after `calls` others were made.
    pub fn note_refused(&self, calls: u64) {
        self.current.note_refused(calls);
    }

    /// Notifies the other nodes of the last rejected call, with the reason `text`.
    pub fn tell_refused(&self, text: &str) {
        self.current.refused().into_iter().for_each(|place| self.news.refuse(place, text));
    }

    /// Notifies the other nodes that this rank makes the call of this number after a rejection.
    pub fn tell_resumed(&self, call: u64) {
        self.news.resume(call);
    }

    /// Leaves the other nodes, after this rank has left its own: closes its connections, after `limit` for CUDA tensors
    /// at the latest, and reports how it has left.
    pub fn leave(&self, limit: Duration) {
        if let Some(cuda) = &self.cuda {
            cuda.close(limit);
        }
        let failure = self.health.failure();
        failure.iter().for_each(|failure| self.news.tell(failure));
        let control = self.health.control();
        self.news.leave(&control.departure(control.rank()).unwrap_or_default());
        self.let_go(if failure.is_some() { RELEASE_FAILED } else { RELEASE });
    }

    /// Forgets the rail of this process's parent, because dropping it would wait for threads that do not exist here.
    pub fn forget(&self) {
        if let Ok(mut rail) = self.rail.try_lock() {
            std::mem::forget(rail.take());
        }
    }

    /// Releases the rail, and waits for at most `limit` until it has ended: calls that use it may still have to see
    /// that the group has failed.
    fn let_go(&self, limit: Duration) {
        drop(lock(&self.rail).take());
        if !limit.is_zero() {
            let _ = lock(&self.ending).recv_timeout(limit);
        }
    }
}
