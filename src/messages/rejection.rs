//! Rejected messages: the peer on another node that waits for a message which this rank has
//! rejected learns of the rejection.
//!
//! This rank reports the rejection on the link, unless it has made another call meanwhile. If a
//! message of the peer waits for the rejected one, the peer asks once whether the rejection still
//! holds. Only the rejecting rank knows whether it has made a call since; if not, it fails the
//! group. A rejected receive from any source is reported to all connected ranks, and to those that
//! connect before this rank makes another call.

use super::ending::TransferLabel;
use super::frame::Frame;
use super::internode::INTERNODE_POLL;
use super::peer::Peer;
use super::wire::{Rejection, WireLink};
use super::{MessageTable, Messages};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::rank::Rank;
use std::collections::BTreeSet;
use std::sync::Arc;

impl MessageTable {
    /// Asks each peer on another node, once, whether its rejection still holds, if a message of
    /// this rank has waited for the rejected message for `INTERNODE_POLL`. Returns the links that
    /// failed.
    pub(super) fn ask_whether_rejected(&mut self) -> Vec<(Rank, Error)> {
        let refused = |peer: &Peer| Some((peer.wire()?.peer, peer.wire()?.rejected.clone()?));
        let refused: Vec<(Rank, Rejection)> = self.peers.iter().filter_map(refused).collect();
        let mut lost = Vec::new();
        for (peer, refusal) in refused {
            let waits = if refusal.send { "recv" } else { "send" };
            let late = |pending: &TransferLabel<'_>| {
                pending.name == waits
                    && pending.peer == Some(peer)
                    && pending.tag == refusal.tag
                    && pending.limit.elapsed() >= INTERNODE_POLL
            };
            let Some(frame) = self
                .pending()
                .find(late)
                .map(|pending| refusal.asked(pending.dtype, pending.bytes))
            else {
                continue;
            };
            if let Some(wire) = self.wire(peer) {
                wire.rejected = None;
                lost.extend(wire.send_frame(frame, &[]).err().map(|error| (peer, error)));
            }
        }
        lost
    }
}

impl Messages {
    /// Notifies `peer`, of another node, that this rank has rejected a send to it or a receive from
    /// it because of `why`, unless this rank has made more calls than `begun`. `None` stands for a
    /// receive from any source, which is reported to all ranks of other nodes.
    pub fn notify_rejected(
        self: &Arc<Self>,
        peer: Option<Rank>,
        begun: u64,
        send: bool,
        tag: i32,
        why: String,
    ) {
        let refusal = Rejection { send, tag, why };
        match peer {
            Some(peer) if self.lock().is_internode(peer) => {
                self.notify_one_rejected(peer, begun, refusal)
            }
            None if self.internode.get().is_some() => self.notify_all_rejected(begun, refusal),
            Some(_) | None => {}
        }
    }

    /// Notifies `peer`, unless this rank has made more calls than `begun`, or the group has ended.
    fn notify_one_rejected(self: &Arc<Self>, peer: Rank, begun: u64, refusal: Rejection) {
        let calls = self.calls();
        let mut state = self.lock();
        if calls != begun || state.closed.is_some() {
            return;
        }
        let told = self
            .ensure_worker(&mut state)
            .and_then(|()| self.meet_once(&mut state, peer))
            .and_then(|()| {
                let Some(wire) = state.wire(peer) else { return Ok(()) };
                (wire.own, wire.unsent_rejection) = (Some((refusal, begun)), true);
                wire.send_rejection()
            });
        drop(state);
        self.flush();
        if let Err(error) = told {
            log::debug!("could not notify a peer of a rejected message: {}", error.message);
        }
    }

    /// Notifies all ranks of other nodes that are connected with this rank, or want to be, until it
    /// makes another call.
    fn notify_all_rejected(self: &Arc<Self>, begun: u64, refusal: Rejection) {
        let mut state = self.lock();
        let begins = self.spawn(&mut state, "symm-p2p-reject", move |this, far| {
            let mut told = BTreeSet::new();
            while this.calls() == begun && this.lock().closed.is_none() {
                let mut wanting = this.lock().unmet();
                wanting.retain(|&rank| far.store.check(&[&far.key(rank, rank)]).unwrap_or(false));
                let ranks: BTreeSet<Rank> =
                    this.lock().met().map(|wire| wire.peer).chain(wanting).collect();
                ranks
                    .difference(&told)
                    .for_each(|&peer| this.notify_one_rejected(peer, begun, refusal.clone()));
                told.extend(ranks);
                drop(far.changed.wait_timeout(this.lock(), super::connect::STORE_POLL.1));
            }
        });
        drop(state);
        if let Err(error) = begins {
            log::warn!("could not notify other nodes of a rejected receive: {}", error.message);
        }
    }

    /// Returns how many calls the program has made on this rank: collectives and messages.
    fn calls(&self) -> u64 {
        self.health.recorder().calls()
    }

    /// Fails if this rank has rejected the message for which the peer of `wire` waits, as the
    /// peer's `frame` says, and has made no call since.
    pub(super) fn check_rejected(&self, wire: &WireLink, frame: Frame) -> Result<()> {
        let stands = |(refusal, calls): &&(Rejection, u64)| {
            refusal.is_asked(&frame) && *calls == self.calls()
        };
        let Some((Rejection { send, tag, why }, _)) = wire.own.as_ref().filter(stands) else {
            return Ok(());
        };
        let waits = if *send { "recv" } else { "send" };
        let dtype = DType::from_torch(i32::from(frame.dtype)).map_or("unknown", DType::name);
        let what = format!(
            "{waits}({} bytes, {dtype}, tag {tag}) of group \"{}\"",
            frame.bytes,
            self.control.name()
        );
        let (peer, me) = (&wire.name, self.control.describe(self.control.rank()));
        Err(Error::mismatch(format!(
            "{me} rejected a call and has not repeated it since; {peer} is blocked in {what}: {why}"
        )))
    }
}
