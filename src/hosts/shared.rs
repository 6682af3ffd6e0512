//! How a failure ends a group on all its hosts.
//!
//! Inside a host the control block tells everybody at once. A rank that fails then says why in the store, and lets go of its rail; whoever
//! loses a rail because of that looks into the store, and raises the same.

use super::rail::Rail;
use crate::config::Config;
use crate::error::{Error, Kind, Result};
use crate::group::Group;
use crate::store::Store;
use crate::store::until::Until;
use crate::store::worker::Worker;
use crate::sync::limit::Limit;
use crate::sys::thread;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Time that a rank which has lost a rail waits to hear why.
const HEAR: Duration = Duration::from_millis(400);
/// Pause between two looks.
const PAUSE: Duration = Duration::from_millis(10);
/// Time that a failing call waits until the store has taken why.
const TOLD: Duration = Duration::from_millis(50);
/// Time that the store has to take it.
const TELL: Duration = Duration::from_secs(2);
/// Time that leaving waits for a backend to end.
const RELEASE: Duration = Duration::from_secs(1);

/// Place in the store where the group's first failure is told.
#[derive(Clone)]
pub(super) struct News {
    store: Arc<dyn Store>,
    store_name: String,
    key: String,
}

impl News {
    pub(super) fn new(store: Arc<dyn Store>, store_name: &str, group: &str) -> Self {
        let key = format!("symm-news/{group}/{}", Config::get().restart);
        Self { store, store_name: store_name.into(), key }
    }

    /// Removes what an earlier group of this name has left.
    pub(super) fn forget(&self, store: &dyn Store) {
        // A store that cannot delete has kept it, too: it is read only where a rail is lost.
        let _ = store.delete(&self.key);
    }

    fn tell(&self, error: &Error) -> Result<()> {
        let worker = Worker::new(Arc::clone(&self.store), self.store_name.clone())?;
        let until = Until::new(&worker, Instant::now() + TELL, "a failure could not be told to the other hosts".into());
        let text = [&[error.kind as u8], error.message.as_bytes()].concat();
        until.compare_set(&self.key, b"", &text).map(|_| ())
    }

    fn hear(&self, inner: &Group, limit: Duration) -> Result<Option<Error>> {
        let worker = Worker::new(Arc::clone(&self.store), self.store_name.clone())?;
        let deadline = Instant::now() + limit;
        let until = Until::new(&worker, deadline, "why a rail was lost could not be read".into());
        loop {
            if let Some(failure) = inner.error() {
                return Ok(Some(failure));
            }
            if until.check(&[&self.key])? {
                let text = until.get(&self.key, None)?;
                let Some((&code, message)) = text.split_first() else { return Ok(None) };
                let kind = Kind::from_code(code).unwrap_or(Kind::Peer);
                return Ok(Some(Error { kind, message: String::from_utf8_lossy(message).into_owned() }));
            }
            if Instant::now() >= deadline {
                return Ok(None);
            }
            std::thread::sleep(PAUSE);
        }
    }
}

/// What calls, failures and leaving share.
pub(super) struct Shared {
    rail: Mutex<Option<Arc<dyn Rail>>>,
    news: News,
    failed: AtomicBool,
    left: AtomicBool,
}

impl Shared {
    pub(super) fn new(rail: Option<Box<dyn Rail>>, news: News) -> Self {
        Self { rail: Mutex::new(rail.map(Arc::from)), news, failed: AtomicBool::new(false), left: AtomicBool::new(false) }
    }

    /// The rail, as long as the group lives.
    pub(super) fn rail(&self) -> Result<Arc<dyn Rail>> {
        let rail = self.rail.lock().unwrap_or_else(PoisonError::into_inner).clone();
        rail.ok_or_else(|| Error::aborted("the group has left its other hosts"))
    }

    /// Fails the group because of `error` on this host at once, and on the others; returns the failure that stands here.
    pub(super) fn fail(&self, inner: &Group, error: Error) -> Error {
        let stands = inner.fail(error);
        if !self.failed.swap(true, Ordering::AcqRel) {
            self.tell(&stands);
            self.let_go(Duration::ZERO);
        }
        stands
    }

    /// Says `error` in the store, unless somebody has said another. Waits for the store for a moment only.
    pub(super) fn tell(&self, error: &Error) {
        let (news, error) = (self.news.clone(), error.clone());
        aside("symm-news", TOLD, move || {
            if let Err(failure) = news.tell(&error) {
                log::info!("{failure}");
            }
        });
    }

    /// What has failed on another host, if it is said soon.
    pub(super) fn news_of_failure(&self, inner: &Group, limit: &Limit) -> Option<Error> {
        self.news.hear(inner, limit.left().unwrap_or_default().min(HEAR)).unwrap_or_else(|error| {
            log::info!("{error}");
            None
        })
    }

    /// Whether the caller is the first that leaves.
    pub(super) fn leave(&self) -> bool {
        !self.left.swap(true, Ordering::AcqRel)
    }

    /// Lets go of the rail and waits for its end, for a moment.
    pub(super) fn release(&self) {
        self.let_go(RELEASE);
    }

    /// A backend may end only when its last transfer does: no caller waits for that longer than `limit`.
    fn let_go(&self, limit: Duration) {
        let rail = self.rail.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(rail) = rail {
            aside("symm-rail-end", limit, move || drop(rail));
        }
    }
}

/// Runs `work` on a thread of its own, and waits for its end for at most `limit`.
fn aside(name: &str, limit: Duration, work: impl FnOnce() + Send + 'static) {
    let (done, ended) = channel();
    let thread = thread::spawn(name, None, move || {
        work();
        let _ = done.send(());
    });
    match thread {
        Ok(_) if limit.is_zero() => {}
        Ok(_) => drop(ended.recv_timeout(limit)),
        Err(error) => log::warn!("a thread could not be started to end a group: {error}"),
    }
}
