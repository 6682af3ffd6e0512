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
use crate::group::Group;
use crate::lock::lock;
use crate::sys::fork;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::{Duration, Instant};

/// Time that a rank which has lost a rail waits to hear why.
const HEAR: Duration = Duration::from_millis(400);
/// Time after which a rail is taken to be lost because somebody has left, in order or not: a failure that others tell comes sooner.
const SURE: Duration = Duration::from_millis(150);
/// Pause between two looks.
const PAUSE: Duration = Duration::from_millis(10);
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

/// The ranks of this host, until their group goes, and what this one does.
pub(super) struct Inner(pub(super) Weak<Group>, pub(super) Arc<Current>);

impl Host for Inner {
    fn failure(&self) -> Option<Error> {
        let inner = self.0.upgrade()?;
        // Nobody here needs to run into a death before it ends the group.
        inner.failure().or_else(|| inner.control().dead().map(|death| inner.fail(death)))
    }

    fn fail(&self, error: Error) {
        if let Some(inner) = self.0.upgrade() {
            inner.fail(error);
        }
    }

    fn waiting(&self) -> Option<Waiting> {
        *lock(&self.1.waiting)
    }

    fn refused(&self) -> Option<Place> {
        *lock(&self.1.refused)
    }

    fn note_late(&self, call: u64, hosts: String) {
        if let Some(inner) = self.0.upgrade() {
            inner.recorder().note_late(call, hosts);
        }
    }

    fn launched(&self) -> Vec<Header> {
        std::mem::take(&mut *lock(&self.1.launched))
    }

    fn departures(&self) -> Vec<(usize, String)> {
        let inner = self.0.upgrade();
        let control = inner.as_ref().map(|inner| inner.control());
        control.map_or_else(Vec::new, |control| control.ranks().filter_map(|rank| Some((rank.index(), control.departure(rank)?))).collect())
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
    generation: u64,
    failed: AtomicBool,
    left: AtomicBool,
}

impl Shared {
    pub(super) fn new(rail: Option<Arc<dyn Rail>>, news: News, current: Arc<Current>, traffic: Arc<Traffic>) -> Self {
        let (ended, ending) = channel();
        Self {
            rail: Mutex::new(rail.map(|rail| Arc::new(Held::new(rail, ended)))),
            news,
            current,
            traffic,
            chosen: OnceLock::new(),
            ending: Mutex::new(ending),
            generation: fork::generation(),
            failed: AtomicBool::new(false),
            left: AtomicBool::new(false),
        }
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

    /// Fails the group because of `error` on this host at once, and on the others; returns the failure that stands here.
    pub(super) fn fail(&self, inner: &Group, error: Error) -> Error {
        let stands = inner.fail(error);
        if !self.failed.swap(true, Ordering::AcqRel) {
            self.news.tell(&stands);
            self.let_go(Duration::ZERO);
        }
        stands
    }

    /// Whether this process is a child of the one that made the group. It forgets the rail, which would wait for threads that it has not.
    pub(super) fn is_inherited(&self) -> bool {
        let inherited = self.generation != fork::generation();
        if inherited && let Ok(mut rail) = self.rail.try_lock() {
            std::mem::forget(rail.take());
        }
        inherited
    }

    /// Tells the other hosts that this one has failed, unless they have been told.
    pub(super) fn tell(&self, failure: &Error) {
        self.news.tell(failure);
    }

    /// What has failed on another host, or who has left it, if that is told soon, within `limit`, to the rank with this `local` index.
    pub(super) fn cause(&self, inner: &Group, local: usize, limit: Duration) -> Option<Error> {
        let (begun, most) = (Instant::now(), limit.min(HEAR));
        loop {
            let over = begun.elapsed() >= most;
            let departure = || if over || begun.elapsed() >= SURE { self.news.departure(local) } else { None };
            let told = inner.error().or_else(departure);
            if told.is_some() || over {
                return told;
            }
            std::thread::sleep(PAUSE);
        }
    }

    /// Whether the caller is the first that leaves.
    pub(super) fn leave(&self) -> bool {
        !self.left.swap(true, Ordering::AcqRel)
    }

    /// Tells the other hosts that this rank has left as `how` says, lets go of its rail and waits for the end of that, for a moment.
    pub(super) fn release(&self, how: &str) {
        self.news.leave(how);
        self.let_go(if self.failed.load(Ordering::Acquire) { RELEASE_FAILED } else { RELEASE });
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
