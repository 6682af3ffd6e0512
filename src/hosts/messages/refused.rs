//! A message that was refused on this rank: the peer of another host that waits for it learns so.
//!
//! The rank says so on the link, unless it has begun another message within 80 ms. Its peer keeps that until something else comes. A receive
//! from any rank is told to all with which this one is connected, and to those that come until it begins another message.

use super::frame::Refusal;
use super::pair::Pair;
use super::{LOOK, Messages, PAUSE};
use crate::error::Error;
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
        let (begun, messages) = (state.next, Arc::downgrade(self));
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

    /// Tells `peer`, unless this rank has begun another message, or the group has ended.
    fn tell_refused(self: &Arc<Self>, peer: Rank, begun: u64, refusal: Refusal) {
        let mut state = self.lock();
        if state.next != begun || state.closed.is_some() {
            return;
        }
        let told = self.prepare(&mut state).and_then(|()| self.meet_once(&mut state, peer)).and_then(|()| {
            let Some(pair) = state.pairs.get_mut(&peer) else { return Ok(()) };
            pair.unsaid = Some(refusal);
            pair.say_refused(&*self.links)
        });
        drop(state);
        if let Err(error) = told {
            log::debug!("a peer is not told of a refused message: {}", error.message);
        }
    }

    /// Tells all ranks of other hosts that are connected with this one, or want to be, until it begins another message.
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

    /// Ranks of other hosts that this one is not connected with; `None` once it has begun another message than the first `begun`.
    fn unmet(&self, begun: u64) -> Option<Vec<Rank>> {
        let (state, layout) = (self.lock(), &self.names.layout);
        let away = |rank: &Rank| layout.host(*rank) != layout.host(self.names.me) && !state.pairs.contains_key(rank);
        (state.next == begun && state.closed.is_none()).then(|| (0..layout.size() as u32).map(Rank).filter(away).collect())
    }

    /// The error of a message that waits for what the peer of `pair` has refused.
    pub(super) fn refused(&self, pair: &Pair) -> Option<Error> {
        let Refusal { send, tag, why } = pair.refused.as_ref()?;
        let waits = if *send { "recv" } else { "send" };
        let mut pending = pair.pending().filter(|(name, open)| *name == waits && open.message.tag == *tag && open.limit.waited() >= LOOK);
        let (name, open) = pending.next()?;
        let (peer, me) = (self.names.layout.describe(pair.peer), self.names.layout.describe(self.names.me));
        Some(Error::mismatch(format!("{peer} refused a call and made no other; {me} waits for it in {}: {why}", self.about(name, open))))
    }
}
