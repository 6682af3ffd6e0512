//! How two ranks that have messages for each other connect: they find each other in the store, and leave nothing there.

use super::frame::LONGEST;
use super::links::Traffic;
use super::{DEPTH, Messages, PAUSE};
use crate::config::Config;
use crate::error::Result;
use crate::hosts::rail;
use crate::rank::Rank;
use std::time::Duration;

/// Time in which two ranks that have found each other connect.
const CONNECT: Duration = Duration::from_secs(30);

impl Messages {
    fn pair_name(&self, peer: Rank) -> String {
        let me = self.names.me;
        format!("symm-pair/{}-{}", peer.min(me), peer.max(me))
    }

    /// Key by which `rank`, this one or `peer`, says that it wants to connect with the other.
    pub(super) fn key(&self, peer: Rank, rank: Rank) -> String {
        format!("{}/{}/{}/{rank}", self.pair_name(peer), self.names.group, Config::get().restart)
    }

    /// Connects with `peer` once it has begun a message with this rank: false if the group ends before.
    pub(super) fn meet(&self, peer: Rank) -> Result<bool> {
        let me = self.names.me;
        self.store.set(&self.key(peer, me), b"1")?;
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
        // The peer has seen it, or nobody needs it. A store that cannot delete keeps it.
        let _ = self.store.delete(&self.key(peer, me));
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
        if closed {
            // Whoever closed the group has found no connection.
            self.links.close(peer);
        }
        begun.map(|()| !closed)
    }

    /// Takes back where `peer` could reach this rank: it has.
    pub(super) fn forget_address(&self, peer: Rank) {
        let index = usize::from(self.names.me > peer);
        // A store that cannot delete keeps them.
        rail::keys(&self.pair_name(peer), index).for_each(|key| drop(self.store.delete(&key)));
    }
}
