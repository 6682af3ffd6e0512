//! Other hosts of a group: what a group has only if its ranks are on several. Inside each host there is shared memory, and between hosts are
//! backends of torch.
//!
//! There are [`rail`]s, one for each local index that every host has, which move bytes and nothing else: what is exchanged, in which order,
//! and every sum is decided here. `docs/design/several-hosts.md` shows the steps.
//!
//! - [`rail`]: what a backend does; [`header`](mod@header): what ranks compare
//! - [`partials`](mod@partials): the type in which sums travel; [`chosen`](mod@chosen): what all ranks go by alike
//! - [`runner`](mod@runner): runs a group's collectives on CPU tensors; [`cpu`](mod@cpu): carries out their programs
//!   ([`two_level`](crate::coll::two_level)); [`executor`](mod@executor): such a call under way; [`opening`](mod@opening): how it begins;
//!   [`short`](mod@short): all of it, if it is short
//! - [`cuda`](mod@cuda): CUDA tensors; [`finding`](mod@finding): whether a group is on several hosts; [`joining`](mod@joining): how it forms
//! - [`traffic`](mod@traffic): bytes by rail and peer; [`monitored`](mod@monitored): who has come to a monitored barrier
//! - [`host`](mod@host): this host as others hear of it; [`news`](mod@news): how hosts hear of failures

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

/// Time that leaving waits for a backend to end.
const RELEASE: Duration = Duration::from_millis(800);
/// The same once the group has failed: a transfer that nobody answers may go on until its deadline.
const RELEASE_FAILED: Duration = Duration::from_millis(80);

/// The other hosts of a group, as one rank is connected with them.
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
    /// Closed when the rail has ended.
    ending: Mutex<Receiver<()>>,
    /// Ranks of the members in the default group; empty: the same as here.
    globals: Vec<i32>,
    store: Arc<dyn Store>,
    /// CUDA tensors, where there are backends for them.
    cuda: Option<Cuda>,
    /// Number of monitored barriers.
    monitored: AtomicU64,
    life: Life,
}

/// Connections of a rank with the other hosts, once it has met them.
struct Connections {
    /// This rank's rail, if it gets one, which is made.
    rail: Option<Arc<dyn Rail>>,
    news: News,
    current: Arc<Current>,
    life: Life,
    engines: Engines,
    /// Store of the group, in which two ranks meet later.
    store: Arc<dyn Store>,
    cuda: Option<Cuda>,
    globals: Vec<i32>,
}

/// The number of a message's peer in the flight recorder, and the observer of its end if the peer may be on another host.
pub type Recorded = (Option<Rank>, Option<Arc<dyn Observer>>);

/// The record of a message whose peer it knows by its rank in the default group.
struct Globals {
    recorder: Arc<Recorder>,
    ranks: Vec<i32>,
}

impl Observer for Globals {
    fn ended(&self, number: u64, outcome: &Result<()>, source: Option<Rank>) {
        self.recorder.ended(number, outcome, source.map(|rank| global(&self.ranks, rank)));
    }
}

/// The number of `rank` in the default group, where the members have the numbers `globals`.
fn global(globals: &[i32], rank: Rank) -> Rank {
    globals.get(rank.index()).map_or(rank, |&global| Rank(global as u32))
}

impl Listener for Hosts {
    /// Reports the failure to the other hosts, then drops the rail.
    fn failed(&self, failure: &Error) {
        self.news.tell(failure);
        self.let_go(Duration::ZERO);
    }

    fn departure(&self, local: usize) -> Option<Error> {
        self.news.departure(local)
    }
}

impl Hosts {
    /// The other hosts of the group with this `health`, whose ranks are where `layout` says, as `rank` has met them.
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

    /// This rank, and the number of ranks.
    pub fn place(&self) -> (Rank, usize) {
        (self.rank, self.layout.size())
    }

    /// Whether `peer` is a rank of another host.
    fn is_far(&self, peer: Rank) -> bool {
        self.layout.host(peer) != self.layout.host(self.rank)
    }

    fn global(&self, rank: Rank) -> Rank {
        global(&self.globals, rank)
    }

    /// What calls go by.
    fn chosen(&self) -> &Chosen {
        self.chosen.get().unwrap_or(&Chosen::USUAL)
    }

    /// The rail, as long as the group lives.
    fn rail(&self) -> Result<Arc<Held>> {
        let rail = lock(&self.rail).clone();
        rail.ok_or_else(|| Error::aborted("the group has left its other hosts"))
    }

    /// Returns how the flight recorder names the `peer` of a message, `what`: inside the host by its number there, otherwise by its number in
    /// the default group, with the observer of the message's end. `reach`: messages travel to other hosts.
    ///
    /// # Errors
    /// `Value` for a rank outside the group, `NotImplemented` where messages do not reach it.
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

    /// The error of something that groups on several hosts do not have yet.
    pub fn lacks(&self, what: &str) -> Error {
        let hosts: Vec<String> = (0..self.layout.hosts()).map(|host| self.layout.name_host(host)).collect();
        let (name, hosts) = (self.health.control().name(), hosts.join(", "));
        Error::config(format!(
            "group \"{name}\" is on several hosts: {hosts}; {what} within one host only, and torch_symm.host_group(group) is the part on \
             this one"
        ))
    }

    /// Notes that a call was refused after `calls` others were made.
    pub fn note_refused(&self, calls: u64) {
        self.current.note_refused(calls);
    }

    /// Tells the other hosts of the call that was refused last, because of `text`.
    pub fn tell_refused(&self, text: &str) {
        self.current.refused().into_iter().for_each(|place| self.news.refuse(place, text));
    }

    /// Tells the other hosts that this rank makes the call of this number after all.
    pub fn tell_resumed(&self, call: u64) {
        self.news.resume(call);
    }

    /// Leaves the other hosts, once this rank has left its host: drops its connections with them, at most after `limit`, and reports how it
    /// has left.
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

    /// Forgets the rail of the parent of this process: it would wait for threads that do not exist here.
    pub fn forget(&self) {
        if let Ok(mut rail) = self.rail.try_lock() {
            std::mem::forget(rail.take());
        }
    }

    /// Lets go of the rail, and waits for at most `limit` until it has ended: calls that use it may still have to see that the group has
    /// failed.
    fn let_go(&self, limit: Duration) {
        drop(lock(&self.rail).take());
        if !limit.is_zero() {
            let _ = lock(&self.ending).recv_timeout(limit);
        }
    }
}
