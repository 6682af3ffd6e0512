//! How a failure ends a group on all its hosts.
//!
//! Inside a host the control block tells everybody at once, and its speakers tell the other hosts ([`news`](super::news)). A rank that fails
//! lets go of its rail then; whoever loses a rail because of that soon hears why, and raises the same.

use super::chosen::Chosen;
use super::header::Header;
use super::held::Held;
use super::news::{Host, News, Place, Waiting};
use super::partials::Partials;
use super::rail::Rail;
use super::traffic::Traffic;
use crate::coll::cost::wire::Thresholds;
use crate::error::{Error, Result};
use crate::health::{Health, Listener};
use crate::lock::lock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

/// Time that leaving waits for a backend to end.
const RELEASE: Duration = Duration::from_millis(800);
/// The same once the group has failed: a transfer that nobody answers may go on until its deadline.
const RELEASE_FAILED: Duration = Duration::from_millis(80);

/// What a rank does, as its speaker sees it.
#[derive(Default)]
pub(super) struct Current {
    /// The call that it is in.
    waiting: Mutex<Option<Waiting>>,
    /// Where a call was refused last.
    refused: Mutex<Option<Place>>,
    /// Calls on CUDA tensors that no speaker has told.
    launched: Mutex<Vec<Header>>,
}

impl Current {
    pub(super) fn set(&self, call: Option<Waiting>) {
        *lock(&self.waiting) = call;
    }

    /// Notes that a call was refused after `calls` others were made; returns where that is.
    pub(super) fn refused(&self, calls: u64) -> Place {
        let mut last = lock(&self.refused);
        let times = last.filter(|last| last.calls == calls).map_or(0, |last| last.times) + 1;
        *last.insert(Place { calls, times })
    }

    /// Notes that the call waits on its rail from now on, or inside its host.
    pub(super) fn phase(&self, on_rail: bool) {
        if let Some(waiting) = &mut *lock(&self.waiting) {
            (waiting.phase_since, waiting.on_rail) = (Instant::now(), on_rail);
        }
    }

    /// Notes calls that were launched.
    pub(super) fn launched(&self, headers: impl IntoIterator<Item = Header>) {
        lock(&self.launched).extend(headers);
    }
}

/// The ranks of this host, and what this one does.
pub(super) struct Inner(pub(super) Arc<Health>, pub(super) Arc<Current>);

impl Host for Inner {
    fn failure(&self) -> Option<Error> {
        // Nobody here needs to run into a death before it ends the group.
        self.0.failure().or_else(|| self.0.control().dead().map(|death| self.0.fail(death)))
    }

    fn fail(&self, error: Error) {
        self.0.fail(error);
    }

    fn waiting(&self) -> Option<Waiting> {
        *lock(&self.1.waiting)
    }

    fn refused(&self) -> Option<Place> {
        *lock(&self.1.refused)
    }

    fn note_late(&self, call: u64, hosts: String) {
        self.0.recorder().note_late(call, hosts);
    }

    fn launched(&self) -> Vec<Header> {
        std::mem::take(&mut *lock(&self.1.launched))
    }

    fn departures(&self) -> Vec<(usize, String)> {
        let control = self.0.control();
        control.ranks().filter_map(|rank| Some((rank.index(), control.departure(rank)?))).collect()
    }
}

impl Listener for Shared {
    /// Tells the other hosts, and lets go of the rail.
    fn failed(&self, failure: &Error) {
        self.news.tell(failure);
        self.let_go(Duration::ZERO);
    }

    fn departure(&self, local: usize) -> Option<Error> {
        self.news.departure(local)
    }
}

/// What calls, failures and leaving share.
pub(super) struct Shared {
    rail: Mutex<Option<Arc<Held>>>,
    pub(super) news: News,
    pub(super) current: Arc<Current>,
    pub(super) traffic: Arc<Traffic>,
    /// Set once all ranks have agreed.
    chosen: OnceLock<Chosen>,
    /// Closed when the rail has ended.
    ending: Mutex<Receiver<()>>,
    health: Arc<Health>,
    left: AtomicBool,
}

impl Shared {
    pub(super) fn new(
        health: &Arc<Health>,
        rail: Option<Arc<dyn Rail>>,
        (news, current): (News, Arc<Current>),
        traffic: Arc<Traffic>,
    ) -> Arc<Self> {
        let (ended, ending) = channel();
        let shared = Arc::new(Self {
            rail: Mutex::new(rail.map(|rail| Arc::new(Held::new(rail, ended)))),
            news,
            current,
            traffic,
            chosen: OnceLock::new(),
            ending: Mutex::new(ending),
            health: Arc::clone(health),
            left: AtomicBool::new(false),
        });
        let listener: Arc<dyn Listener> = shared.clone();
        health.listen(Arc::downgrade(&listener));
        shared
    }

    /// What calls go by.
    pub(super) fn chosen(&self) -> &Chosen {
        self.chosen.get().unwrap_or(&Chosen::USUAL)
    }

    /// Type of partial results.
    pub(super) fn partials(&self) -> Partials {
        self.chosen().partials
    }

    /// Lengths from which calls go another way.
    pub(super) fn thresholds(&self) -> &Thresholds {
        &self.chosen().thresholds
    }

    /// Makes the calls that follow go by `chosen`, on all ranks.
    pub(super) fn choose(&self, chosen: Chosen) {
        let _ = self.chosen.set(chosen);
    }

    /// The rail, as long as the group lives.
    pub(super) fn rail(&self) -> Result<Arc<Held>> {
        let rail = lock(&self.rail).clone();
        rail.ok_or_else(|| Error::aborted("the group has left its other hosts"))
    }

    /// Whether this process is a child of the one that made the group. It forgets the rail, which would wait for threads that it has not.
    pub(super) fn is_inherited(&self) -> bool {
        let inherited = self.health.is_inherited();
        if inherited && let Ok(mut rail) = self.rail.try_lock() {
            std::mem::forget(rail.take());
        }
        inherited
    }

    /// Tells the other hosts that this one has failed, unless they have been told.
    pub(super) fn tell(&self, failure: &Error) {
        self.news.tell(failure);
    }

    /// Whether the caller is the first that leaves.
    pub(super) fn leave(&self) -> bool {
        !self.left.swap(true, Ordering::AcqRel)
    }

    /// Tells the other hosts that this rank has left as `how` says, lets go of its rail and waits for the end of that, for a moment.
    pub(super) fn release(&self, how: &str) {
        self.news.leave(how);
        self.let_go(if self.health.failure().is_some() { RELEASE_FAILED } else { RELEASE });
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
