//! A message that was refused on this rank: the peer of another host that waits for it learns so.
//!
//! The rank says so on the link, unless it has begun another message within 80 ms. Its peer keeps that until something else comes.

use super::frame::Refusal;
use super::pair::Pair;
use super::{LOOK, Messages};
use crate::error::Error;
use crate::hosts::refusal::DELAY;
use crate::rank::Rank;
use crate::watch;
use std::sync::Arc;

impl Messages {
    /// Notes that this rank has refused to send to `peer`, or to receive from it, because of `why`.
    pub(in crate::hosts) fn refuse(self: &Arc<Self>, peer: Rank, send: bool, tag: i32, why: String) {
        if self.check_process().is_err() {
            return;
        }
        let mut state = self.lock();
        let (begun, messages) = (state.next, Arc::downgrade(self));
        let tell = move || {
            if let Some(messages) = messages.upgrade() {
                messages.tell_refused(peer, begun, Refusal { send, tag, why });
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
