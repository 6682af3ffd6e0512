//! Receives from any rank: those that wait for a message of another host, and the search for ranks that send.
//!
//! The tables of both kinds of messages, those within this host and those between hosts, have such a receive; the first that has a message
//! for it takes its claim. A link exists once both ranks want it. So a thread looks for ranks that have begun to send to this one while
//! receives from any rank are open.

use super::open::{Open, Wanted};
use super::{Messages, PAUSE, State};
use crate::completion::Completion;
use crate::error::{Error, Result};
use crate::lock::unpoisoned;
use crate::messages::{Claim, Message};
use crate::rank::Rank;
use crate::sync::limit::Limit;
use std::sync::Arc;
use std::time::{Duration, Instant};

impl Messages {
    /// Starts a receive from any rank, which `claim` is for. What has come already fills it.
    pub(in crate::hosts) fn recv_any(
        self: &Arc<Self>,
        message: Message,
        timeout: Duration,
        completion: Completion,
        claim: Claim,
    ) -> Result<u64> {
        let mut state = self.lock();
        self.prepare(&mut state)?;
        if !state.any.seeking {
            self.spawn(&mut state, "symm-messages-any", |this| this.seek())?;
            state.any.seeking = true;
        }
        let ticket = state.ticket();
        let open = Open { ticket, message, limit: Limit::from(Instant::now(), timeout), completion };
        let waiting = state.pairs.values().filter_map(|pair| Some((pair.arrival(message.tag)?, pair.peer)));
        let oldest = waiting.min().map(|(_, peer)| peer);
        let mut finished = Vec::new();
        let mut added = Ok(());
        match oldest.and_then(|peer| state.pairs.get_mut(&peer)) {
            Some(pair) if claim.take() => added = pair.recv(open, &*self.links, &self.names, &mut finished),
            // It was filled within this host meanwhile.
            _ if claim.is_lost() => drop(state.open.remove(&ticket)),
            Some(_) | None => state.any.wanted.push(Wanted { open, claim }),
        }
        self.wake(&mut state);
        drop(state);
        self.changed.notify_all();
        if let (Err(error), Some(peer)) = (added, oldest) {
            self.lose(peer, error);
        }
        self.settle(finished);
        Ok(ticket)
    }

    /// Forgets a receive that was filled within this host.
    pub(in crate::hosts) fn withdraw(&self, ticket: u64) {
        let mut state = self.lock();
        let place = state.any.wanted.iter().position(|wanted| wanted.open.ticket == ticket);
        // Its completion may hold the last handle of something that takes the lock.
        let withdrawn = place.map(|place| state.any.wanted.remove(place));
        state.open.remove(&ticket);
        drop(state);
        drop(withdrawn);
        self.changed.notify_all();
    }

    /// The error of `open`, which waits for any rank.
    pub(super) fn late_for_any(&self, state: &State, open: &Open) -> Error {
        let (me, what, seconds) = (self.names.layout.describe(self.names.me), self.about("recv", open), open.limit.waited().as_secs_f32());
        let blind = state.any.blind.as_ref().map_or_else(String::new, |error| format!(" (the store cannot be asked: {})", error.message));
        Error::timeout(format!("{me} waited {seconds:.1} s until its timeout in {what} for any rank{blind}"))
    }

    /// Connects with ranks of other hosts that have begun a message with this one, while receives from any rank are open.
    fn seek(self: &Arc<Self>) {
        let mut pause = PAUSE.0;
        loop {
            let mut state = self.lock();
            while state.any.wanted.is_empty() && state.closed.is_none() {
                state = unpoisoned(self.changed.wait(state));
                pause = PAUSE.0;
            }
            let layout = &self.names.layout;
            let away = |rank: &Rank| layout.host(*rank) != layout.host(self.names.me) && !state.pairs.contains_key(rank);
            let unmet: Vec<Rank> = (0..layout.size() as u32).map(Rank).filter(away).collect();
            if state.closed.is_some() || unmet.is_empty() {
                return;
            }
            drop(state);
            let found: Result<Vec<bool>> = unmet.iter().map(|&rank| self.store.check(&[&self.key(rank, rank)])).collect();
            let mut state = self.lock();
            let met = found.and_then(|found| {
                let mut senders = unmet.iter().zip(found).filter(|(_, found)| *found);
                senders.try_for_each(|(&rank, _)| self.meet_once(&mut state, rank))
            });
            if let Err(error) = met {
                log::warn!("group \"{}\": ranks of other hosts that send are not looked for any more: {}", self.names.group, error.message);
                state.any.blind = Some(error);
                return;
            }
            drop(state);
            std::thread::sleep(pause);
            pause = (2 * pause).min(PAUSE.1);
        }
    }
}
