//! A message that was refused on this rank: the peer of another host that waits for it learns so.
//!
//! The rank says so on the link, unless it has made another call meanwhile. A message of the peer that waits for it asks once whether
//! that still stands: only the rank itself knows whether it has made a call since, and fails the group if it has not. Of a
//! receive from any rank all ranks learn with which this one is connected, and those that connect until it makes another call.

use super::ending::Pending;
use super::far::LOOK;
use super::frame::Frame;
use super::peer::Peer;
use super::wire::{Refusal, Wire};
use super::{Messages, State};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::rank::Rank;
use std::collections::BTreeSet;
use std::sync::Arc;

impl State {
    /// Asks peers of other hosts, once each, whether their refusals still stand, where a message has waited for one for a while. Returns the
    /// links that were lost by that.
    pub(super) fn ask_whether_refused(&mut self) -> Vec<(Rank, Error)> {
        let refused = |peer: &Peer| Some((peer.wire()?.peer, peer.wire()?.refused.clone()?));
        let refused: Vec<(Rank, Refusal)> = self.peers.iter().filter_map(refused).collect();
        let mut lost = Vec::new();
        for (peer, refusal) in refused {
            let waits = if refusal.send { "recv" } else { "send" };
            let late = |pending: &Pending<'_>| {
                pending.name == waits && pending.peer == Some(peer) && pending.tag == refusal.tag && pending.limit.waited() >= LOOK
            };
            let Some(frame) = self.pending().find(late).map(|pending| refusal.asked(pending.dtype, pending.bytes)) else { continue };
            if let Some(wire) = self.wire(peer) {
                wire.refused = None;
                lost.extend(wire.say(frame, &[]).err().map(|error| (peer, error)));
            }
        }
        lost
    }
}

impl Messages {
    /// Tells `peer`, of another host, that this rank has refused to send to it, or to receive from it, because of `why`, unless it has made
    /// another call than the first `begun`. `None`: to receive from any rank; this goes to all ranks of other
    /// hosts.
    pub fn tell_refused(self: &Arc<Self>, peer: Option<Rank>, begun: u64, send: bool, tag: i32, why: String) {
        let refusal = Refusal { send, tag, why };
        match peer {
            Some(peer) if self.lock().is_far(peer) => self.tell_one_refused(peer, begun, refusal),
            None if self.far.get().is_some() => self.tell_all_refused(begun, refusal),
            Some(_) | None => {}
        }
    }

    /// Tells `peer`, unless this rank has made another call than the first `begun`, or the group has ended.
    fn tell_one_refused(self: &Arc<Self>, peer: Rank, begun: u64, refusal: Refusal) {
        let calls = self.calls();
        let mut state = self.lock();
        if calls != begun || state.closed.is_some() {
            return;
        }
        let told = self.start_worker().and_then(|()| self.meet_once(&mut state, peer)).and_then(|()| {
            let Some(wire) = state.wire(peer) else { return Ok(()) };
            (wire.own, wire.unsaid) = (Some((refusal, begun)), true);
            wire.say_refused()
        });
        drop(state);
        self.flush();
        if let Err(error) = told {
            log::debug!("a peer is not told of a refused message: {}", error.message);
        }
    }

    /// Tells all ranks of other hosts that are connected with this one, or want to be, until it makes another call.
    fn tell_all_refused(self: &Arc<Self>, begun: u64, refusal: Refusal) {
        let mut state = self.lock();
        let begins = self.spawn(&mut state, "symm-messages-no", move |this, far| {
            let mut told = BTreeSet::new();
            while this.calls() == begun && this.lock().closed.is_none() {
                let mut wanting = this.lock().unmet();
                wanting.retain(|&rank| far.store.check(&[&far.key(rank, rank)]).unwrap_or(false));
                let ranks: BTreeSet<Rank> = this.lock().met().map(|wire| wire.peer).chain(wanting).collect();
                ranks.difference(&told).for_each(|&peer| this.tell_one_refused(peer, begun, refusal.clone()));
                told.extend(ranks);
                drop(far.changed.wait_timeout(this.lock(), super::meet::PAUSE.1));
            }
        });
        drop(state);
        if let Err(error) = begins {
            log::warn!("ranks of other hosts are not told of a refused receive: {}", error.message);
        }
    }

    /// Number of calls that the program has made on this rank: collectives and messages.
    fn calls(&self) -> u64 {
        self.health.recorder().calls()
    }

    /// Fails if this rank has refused what the peer of `wire` waits for, as its `frame` says, and has made no call since.
    pub(super) fn check_refused(&self, wire: &Wire, frame: Frame) -> Result<()> {
        let stands = |(refusal, calls): &&(Refusal, u64)| refusal.is_asked(&frame) && *calls == self.calls();
        let Some((Refusal { send, tag, why }, _)) = wire.own.as_ref().filter(stands) else { return Ok(()) };
        let waits = if *send { "recv" } else { "send" };
        let dtype = DType::from_torch(i32::from(frame.dtype)).map_or("unknown", DType::name);
        let what = format!("{waits}({} bytes, {dtype}, tag {tag}) of group \"{}\"", frame.bytes, self.control.name());
        let (peer, me) = (&wire.name, self.control.describe(self.control.rank()));
        Err(Error::mismatch(format!("{me} refused a call and has not made it since; {peer} waits for it in {what}: {why}")))
    }
}
