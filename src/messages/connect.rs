//! Connecting two ranks of different nodes that have messages for each other: they find each other
//! in the store, and leave no key there.
//!
//! A link exists once both ranks want it. While receives from any source are pending, a thread
//! therefore looks for ranks that have started to send to this one.

use super::internode::InternodeLinks;
use super::links::{Traffic, addresses};
use super::wire::{LinkPhase, MAX_FRAME_BYTES};
use super::{MessageTable, Messages};
use crate::error::{Error, ErrorKind, Result};
use crate::lock::unpoisoned;
use crate::rank::Rank;
use crate::store::Store;
use std::sync::Arc;
use std::time::Duration;

/// Minimum and maximum poll interval of the store.
pub(super) const STORE_POLL: (Duration, Duration) =
    (Duration::from_millis(1), Duration::from_millis(50));
/// Number of frames that may arrive before this rank has read the first.
const DEPTH: usize = 8;
/// Maximum time in which two ranks connect once each has the address of the other.
const LINK_CONNECT_TIMEOUT: Duration = Duration::from_secs(30);

/// Keys of this rank that stay in the store until this value is dropped. The owner drops it once
/// the peer has read the keys, or no rank needs them any more.
pub(super) struct PublishedKeys<'a> {
    store: &'a dyn Store,
    keys: Vec<String>,
}

impl Drop for PublishedKeys<'_> {
    fn drop(&mut self) {
        // A store that does not support deletion keeps the keys.
        self.keys.iter().for_each(|key| drop(self.store.delete(key)));
    }
}

impl InternodeLinks {
    fn pair_name(&self, peer: Rank) -> String {
        format!("{}{}-{}", self.prefix, peer.min(self.me), peer.max(self.me))
    }

    /// Returns the key with which `rank`, which is this rank or `peer`, announces that it wants to
    /// connect with the other one.
    pub(super) fn key(&self, peer: Rank, rank: Rank) -> String {
        format!("{}/here/{rank}", self.pair_name(peer))
    }

    /// Returns `error`, the reason why no link with `peer` was made, with both ranks if this node
    /// lacks something. The whole group then fails with it.
    fn named(&self, peer: Rank, error: Error) -> Error {
        if error.kind != ErrorKind::Config {
            return error;
        }
        let (me, peer) = (self.node_map.describe(self.me), self.node_map.describe(peer));
        let text = format!("{me} could not connect with {peer} for messages: {}", error.message);
        Error { message: text, ..error }
    }

    /// Returns the keys at which `peer` finds the address of this rank.
    pub(super) fn address(&self, peer: Rank) -> PublishedKeys<'_> {
        let index = usize::from(self.me > peer);
        PublishedKeys {
            store: &*self.store,
            keys: addresses(&self.pair_name(peer), index).collect(),
        }
    }
}

impl Messages {
    /// Connects with `peer` once `peer` has started a message with this rank. Returns false if the
    /// group ends first.
    pub(super) fn meet(&self, far: &InternodeLinks, peer: Rank) -> Result<bool> {
        let own = PublishedKeys { store: &*far.store, keys: vec![far.key(peer, far.me)] };
        far.store.set(&own.keys[0], b"1")?;
        let mut pause = STORE_POLL.0;
        let met = loop {
            if self.lock().closed.is_some() {
                break Ok(false);
            }
            if far.store.check(&[&far.key(peer, peer)])? {
                break far
                    .links
                    .make(peer, &far.pair_name(peer), far.me > peer, LINK_CONNECT_TIMEOUT)
                    .map(|()| true)
                    .map_err(|error| far.named(peer, error));
            }
            std::thread::sleep(pause);
            pause = (2 * pause).min(STORE_POLL.1);
        };
        drop(own);
        if !met? {
            return Ok(false);
        }
        for _ in 0..DEPTH {
            far.links.listen(peer, Traffic::Frame, MAX_FRAME_BYTES)?;
        }
        let mut state = self.lock();
        let (begun, closed) = (state.connected(peer), state.closed.is_some());
        self.defer_completions(state);
        begun.map(|()| !closed)
    }

    /// Connects with ranks of other nodes that have started a message with this rank, while
    /// receives from any source are pending.
    pub(super) fn seek(self: &Arc<Self>, far: &InternodeLinks) {
        let mut pause = STORE_POLL.0;
        loop {
            let mut state = self.lock();
            while state.matching.posted.iter().all(|posted| posted.peer.is_some())
                && state.closed.is_none()
            {
                state = unpoisoned(far.changed.wait(state));
                pause = STORE_POLL.0;
            }
            let unmet = state.unmet();
            if state.closed.is_some() || unmet.is_empty() {
                return;
            }
            drop(state);
            let found: Result<Vec<bool>> =
                unmet.iter().map(|&rank| far.store.check(&[&far.key(rank, rank)])).collect();
            let mut state = self.lock();
            let met = found.and_then(|found| {
                let mut senders = unmet.iter().zip(found).filter(|(_, found)| *found);
                senders.try_for_each(|(&rank, _)| self.meet_once(&mut state, rank))
            });
            if let Err(error) = met {
                let group = self.control.name();
                log::warn!(
                    "group \"{group}\": ranks of other nodes that send are not looked \
                     for any more: {}",
                    error.message
                );
                state.blind = Some(error);
                return;
            }
            drop(state);
            std::thread::sleep(pause);
            pause = (2 * pause).min(STORE_POLL.1);
        }
    }
}

impl MessageTable {
    /// Starts the sends that waited for the link with `peer`, which now exists.
    fn connected(&mut self, peer: Rank) -> Result<()> {
        let Some(wire) = self.wire(peer) else { return Ok(()) };
        wire.phase = LinkPhase::Open;
        let waiting: Vec<u64> = self
            .sends
            .iter()
            .filter(|(_, send)| send.peer == peer)
            .map(|(&ticket, _)| ticket)
            .collect();
        waiting.into_iter().try_for_each(|ticket| self.begin_send(ticket))?;
        self.wire(peer).map_or(Ok(()), |wire| wire.send_rejection())
    }
}
