//! How two ranks that have messages for each other connect: they find each other in the store, and leave nothing there.

use super::frame::LONGEST;
use super::links::Traffic;
use super::{DEPTH, Messages, PAUSE};
use crate::error::Result;
use crate::hosts::rail;
use crate::rank::Rank;
use crate::store::Store;
use std::time::Duration;

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

impl Messages {
    fn pair_name(&self, peer: Rank) -> String {
        let me = self.names.me;
        self.names.life.name("symm-pair", format_args!("{}-{}", peer.min(me), peer.max(me)))
    }

    /// Key by which `rank`, this one or `peer`, says that it wants to connect with the other.
    pub(super) fn key(&self, peer: Rank, rank: Rank) -> String {
        format!("{}/here/{rank}", self.pair_name(peer))
    }

    /// Connects with `peer` once it has begun a message with this rank: false if the group ends before.
    pub(super) fn meet(&self, peer: Rank) -> Result<bool> {
        let me = self.names.me;
        let own = Said { store: &*self.store, keys: vec![self.key(peer, me)] };
        self.store.set(&own.keys[0], b"1")?;
        let mut pause = PAUSE.0;
        let met = loop {
            if self.lock().closed.is_some() {
                break Ok(false);
            }
            if self.store.check(&[&self.key(peer, peer)])? {
                break self.links.make(peer, &self.pair_name(peer), me > peer, CONNECT).map(|()| true);
            }
            std::thread::sleep(pause);
            pause = (2 * pause).min(PAUSE.1);
        };
        drop(own);
        if !met? {
            return Ok(false);
        }
        for _ in 0..DEPTH {
            self.links.listen(peer, Traffic::Frame, LONGEST)?;
        }
        let (mut state, mut finished) = (self.lock(), Vec::new());
        let begun = match state.pairs.get_mut(&peer) {
            Some(pair) => pair.begin(&*self.links, &mut finished),
            None => Ok(()),
        };
        let closed = state.closed.is_some();
        drop(state);
        self.settle(finished);
        begun.map(|()| !closed)
    }

    /// Where `peer` can reach this rank, once it connects with it.
    pub(super) fn address(&self, peer: Rank) -> Said<'_> {
        let index = usize::from(self.names.me > peer);
        Said { store: &*self.store, keys: rail::keys(&self.pair_name(peer), index).collect() }
    }
}
