//! A message that was refused on this rank: the peer of another host that waits for it learns so.
//!
//! The rank says so on the link, unless it has made another call within 80 ms. A message of the peer that waits for it asks once whether
//! that still stands: only the rank itself knows whether it has made a call since, and fails the group if it has not. Of a
//! receive from any rank all ranks learn with which this one is connected, and those that connect until it makes another call.

use super::frame::{Frame, Refusal};
use super::pair::Pair;
use super::{Messages, PAUSE};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::hosts::refusal::DELAY;
use crate::rank::Rank;
use crate::watch;
use std::collections::BTreeSet;
use std::sync::Arc;

impl Messages {
    /// Notes that this rank has refused to send to `peer`, or to receive from it, because of `why`; `None`: to receive from any rank.
    pub(in crate::hosts) fn refuse(self: &Arc<Self>, peer: Option<Rank>, send: bool, tag: i32, why: String) {
        if self.check_process().is_err() {
            return;
        }
        let mut state = self.lock();
        let (begun, messages) = (self.around.calls(), Arc::downgrade(self));
        let tell = move || {
            if let Some(messages) = messages.upgrade() {
                let refusal = Refusal { send, tag, why };
                match peer {
                    Some(peer) => messages.tell_refused(peer, begun, refusal),
                    None => messages.tell_all_refused(begun, refusal),
                }
            }
        };
        let timer = watch::after(DELAY, tell).inspect_err(|error| log::warn!("a peer is not told of a refused message: {error}"));
        let replaced = std::mem::replace(&mut state.refusal, timer.ok());
        drop(state);
        drop(replaced);
    }

    /// Tells `peer`, unless this rank has made another call than the first `begun`, or the group has ended.
    fn tell_refused(self: &Arc<Self>, peer: Rank, begun: u64, refusal: Refusal) {
        let mut state = self.lock();
        if self.around.calls() != begun || state.closed.is_some() {
            return;
        }
        let told = self.prepare(&mut state).and_then(|()| self.meet_once(&mut state, peer)).and_then(|()| {
            let Some(pair) = state.pairs.get_mut(&peer) else { return Ok(()) };
            (pair.own, pair.unsaid) = (Some((refusal, begun)), true);
            pair.say_refused(&*self.links)
        });
        drop(state);
        if let Err(error) = told {
            log::debug!("a peer is not told of a refused message: {}", error.message);
        }
    }

    /// Tells all ranks of other hosts that are connected with this one, or want to be, until it makes another call.
    fn tell_all_refused(self: &Arc<Self>, begun: u64, refusal: Refusal) {
        let mut state = self.lock();
        let begins = self.spawn(&mut state, "symm-messages-no", move |this| {
            let mut told = BTreeSet::new();
            while let Some(unmet) = this.unmet(begun) {
                let wants = |&rank: &Rank| this.store.check(&[&this.key(rank, rank)]).unwrap_or(false);
                let wanting: Vec<Rank> = unmet.into_iter().filter(wants).collect();
                let mut state = this.lock();
                let ranks: BTreeSet<Rank> = state.pairs.keys().copied().chain(wanting).collect();
                drop(state);
                ranks.difference(&told).for_each(|&peer| this.tell_refused(peer, begun, refusal.clone()));
                told.extend(ranks);
                state = this.lock();
                drop(this.changed.wait_timeout(state, PAUSE.1));
            }
        });
        drop(state);
        if let Err(error) = begins {
            log::warn!("ranks of other hosts are not told of a refused receive: {}", error.message);
        }
    }

    /// Ranks of other hosts that this one is not connected with; `None` once it has made another call than the first `begun`.
    fn unmet(&self, begun: u64) -> Option<Vec<Rank>> {
        let (state, layout) = (self.lock(), &self.names.layout);
        let away = |rank: &Rank| layout.host(*rank) != layout.host(self.names.me) && !state.pairs.contains_key(rank);
        (self.around.calls() == begun && state.closed.is_none()).then(|| (0..layout.size() as u32).map(Rank).filter(away).collect())
    }

    /// Fails if this rank has refused what the peer of `pair` waits for, as its `frame` says, and has made no call since.
    pub(super) fn check_refused(&self, pair: &Pair, frame: Frame) -> Result<()> {
        let stands = |(refusal, calls): &&(Refusal, u64)| refusal.is_asked(&frame) && *calls == self.around.calls();
        let Some((Refusal { send, tag, why }, _)) = pair.own.as_ref().filter(stands) else { return Ok(()) };
        let waits = if *send { "recv" } else { "send" };
        let what = self.described(waits, frame.bytes, DType::from_torch(i32::from(frame.dtype)).ok(), *tag);
        let (peer, me) = (self.names.layout.describe(pair.peer), self.names.layout.describe(self.names.me));
        Err(Error::mismatch(format!("{me} refused a call and has not made it since; {peer} waits for it in {what}: {why}")))
    }
}
