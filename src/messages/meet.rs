//! How two ranks of different hosts that have messages for each other connect: they find each other in the store, and leave nothing there. A
//! link exists once both ranks want it, so a thread looks for ranks that have begun to send to this one while receives from any rank are open.

use super::far::Far;
use super::links::{Traffic, addresses};
use super::wire::{LONGEST, Phase};
use super::{Messages, State};
use crate::error::Result;
use crate::lock::unpoisoned;
use crate::rank::Rank;
use crate::store::Store;
use std::sync::Arc;
use std::time::Duration;

/// Pauses between two looks for a peer in the store.
pub(super) const PAUSE: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(50));
/// Frames that may come before this rank has read the first.
const DEPTH: usize = 8;
/// Time in which two ranks that have found each other connect.
const CONNECT: Duration = Duration::from_secs(30);

/// Keys of this rank, in the store until this is dropped: the peer has read them, or no rank needs them.
pub(super) struct Said<'a> {
    store: &'a dyn Store,
    keys: Vec<String>,
}

impl Drop for Said<'_> {
    fn drop(&mut self) {
        // A store that cannot delete keeps them.
        self.keys.iter().for_each(|key| drop(self.store.delete(key)));
    }
}

impl Far {
    fn pair_name(&self, peer: Rank) -> String {
        format!("{}{}-{}", self.prefix, peer.min(self.me), peer.max(self.me))
    }

    /// Key by which `rank`, this one or `peer`, says that it wants to connect with the other.
    pub(super) fn key(&self, peer: Rank, rank: Rank) -> String {
        format!("{}/here/{rank}", self.pair_name(peer))
    }

    /// Where `peer` can reach this rank, once it connects with it.
    pub(super) fn address(&self, peer: Rank) -> Said<'_> {
        let index = usize::from(self.me > peer);
        Said { store: &*self.store, keys: addresses(&self.pair_name(peer), index).collect() }
    }
}

impl Messages {
    /// Connects with `peer` once it has begun a message with this rank: false if the group ends before.
    pub(super) fn meet(&self, far: &Far, peer: Rank) -> Result<bool> {
        let own = Said { store: &*far.store, keys: vec![far.key(peer, far.me)] };
        far.store.set(&own.keys[0], b"1")?;
        let mut pause = PAUSE.0;
        let met = loop {
            if self.lock().closed.is_some() {
                break Ok(false);
            }
            if far.store.check(&[&far.key(peer, peer)])? {
                break far.links.make(peer, &far.pair_name(peer), far.me > peer, CONNECT).map(|()| true);
            }
            std::thread::sleep(pause);
            pause = (2 * pause).min(PAUSE.1);
        };
        drop(own);
        if !met? {
            return Ok(false);
        }
        for _ in 0..DEPTH {
            far.links.listen(peer, Traffic::Frame, LONGEST)?;
        }
        let mut state = self.lock();
        let (begun, closed) = (state.connected(peer), state.closed.is_some());
        self.settle(state);
        begun.map(|()| !closed)
    }

    /// Connects with ranks of other hosts that have begun a message with this one, while receives from any rank are open.
    pub(super) fn seek(self: &Arc<Self>, far: &Far) {
        let mut pause = PAUSE.0;
        loop {
            let mut state = self.lock();
            while state.matching.posted.iter().all(|posted| posted.peer.is_some()) && state.closed.is_none() {
                state = unpoisoned(far.changed.wait(state));
                pause = PAUSE.0;
            }
            let unmet = state.unmet();
            if state.closed.is_some() || unmet.is_empty() {
                return;
            }
            drop(state);
            let found: Result<Vec<bool>> = unmet.iter().map(|&rank| far.store.check(&[&far.key(rank, rank)])).collect();
            let mut state = self.lock();
            let met = found.and_then(|found| {
                let mut senders = unmet.iter().zip(found).filter(|(_, found)| *found);
                senders.try_for_each(|(&rank, _)| self.meet_once(&mut state, rank))
            });
            if let Err(error) = met {
                let group = self.control.name();
                log::warn!("group \"{group}\": ranks of other hosts that send are not looked for any more: {}", error.message);
                state.blind = Some(error);
                return;
            }
            drop(state);
            std::thread::sleep(pause);
            pause = (2 * pause).min(PAUSE.1);
        }
    }
}

impl State {
    /// The link with `peer` exists from now on: begins the sends that came before.
    fn connected(&mut self, peer: Rank) -> Result<()> {
        let Some(wire) = self.wire(peer) else { return Ok(()) };
        wire.phase = Phase::Open;
        let waiting: Vec<u64> = self.sends.iter().filter(|(_, send)| send.peer == peer).map(|(&ticket, _)| ticket).collect();
        waiting.into_iter().try_for_each(|ticket| self.begin_send(ticket))?;
        self.wire(peer).map_or(Ok(()), |wire| wire.say_refused())
    }
}
