//! A call that was refused on this rank alone: other hosts that wait for it learn so.
//!
//! Within a host the rank that refused looks who waits for it. Of other hosts it sees nothing: it tells them that it has refused, unless it
//! has made another call within 80 ms, and tells them when it makes one. They look who waits.

use super::Runner;
use super::shared::Shared;
use crate::engine::Engine;
use crate::lock::lock;
use crate::messages::REFUSAL_DELAY;
use crate::watch::{self, Subscription};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

/// Refusals of this rank.
pub(super) struct Refusals {
    shared: Arc<Shared>,
    engine: Arc<Engine<Runner>>,
    timer: Mutex<Option<Subscription>>,
    /// Whether other hosts know of a refusal that this rank has not made up for.
    told: AtomicBool,
}

impl Refusals {
    pub(super) fn new(shared: &Arc<Shared>, engine: &Arc<Engine<Runner>>) -> Arc<Self> {
        let (shared, engine) = (Arc::clone(shared), Arc::clone(engine));
        Arc::new(Self { shared, engine, timer: Mutex::new(None), told: AtomicBool::new(false) })
    }

    /// Notes that a call was refused because of `text`.
    pub(super) fn add(self: &Arc<Self>, text: String) {
        let (calls, refusals) = (self.engine.sequence(), Arc::downgrade(self));
        let place = self.shared.current.refused(calls);
        let tell = move || {
            if let Some(refusals) = refusals.upgrade()
                && refusals.engine.sequence() == calls
            {
                refusals.told.store(true, Ordering::Release);
                refusals.shared.news.refuse(place, &text);
                // A call that began in between has not seen that there is something to make up for.
                if refusals.engine.sequence() != calls {
                    refusals.make_up();
                }
            }
        };
        let timer =
            watch::after(REFUSAL_DELAY, tell).inspect_err(|error| log::warn!("other hosts are not told of a refused call: {error}"));
        *lock(&self.timer) = timer.ok();
    }

    /// Tells other hosts, if they know of a refusal, that this rank makes a call.
    pub(super) fn make_up(&self) {
        if self.told.load(Ordering::Relaxed) && self.told.swap(false, Ordering::AcqRel) {
            self.shared.news.resume(self.engine.sequence() + 1);
        }
    }
}
