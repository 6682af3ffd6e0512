//! Receives from any rank, of this host or another.
//!
//! Such a receive stands in two tables: that of the messages within this host, and that of those between hosts. Each message is in one of
//! them, and finds the oldest receive there that wants it; a claim decides where both have a message for the same receive. So the messages
//! of one sender come in their order, and receives from it in theirs, whether they name it or not.

use super::HostsGroup;
use super::messages::Messages;
use crate::completion::Completion;
use crate::error::Result;
use crate::lock::lock;
use crate::messages::{Claim, Message, Messages as Near};
use crate::rank::Rank;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Tickets of the receives that stand in both tables: those between hosts, by those within this one, by which users wait.
pub(super) type Twofold = Arc<Mutex<BTreeMap<u64, u64>>>;

/// What the two tables know of one receive.
#[derive(Default)]
struct Tickets {
    here: Option<u64>,
    away: Option<u64>,
    /// Its completion has been called.
    complete: bool,
}

/// One receive from any rank.
struct Receive {
    completion: Completion,
    tickets: Mutex<Tickets>,
    twofold: Twofold,
    transfers: Arc<Near>,
    messages: Arc<Messages>,
}

impl Receive {
    /// Completion for the table that has `claim`; `source` makes its sender a global rank. What fails in one table while the other fills
    /// the receive is not its end.
    fn completion(self: &Arc<Self>, claim: Claim, source: impl Fn(Rank) -> Rank + Send + 'static) -> Completion {
        let this = Arc::clone(self);
        Completion::new(move |outcome, from| {
            if claim.take() {
                this.completion.call(outcome, from.map(source));
                this.settle(|tickets| tickets.complete = true);
            }
        })
    }

    /// Notes what `change` says; forgets the receive in both tables once it is complete.
    fn settle(&self, change: impl FnOnce(&mut Tickets)) {
        let mut tickets = lock(&self.tickets);
        change(&mut tickets);
        if !tickets.complete {
            return;
        }
        let (here, away) = (tickets.here.take(), tickets.away.take());
        drop(tickets);
        if let Some(ticket) = here {
            self.transfers.withdraw(ticket);
        }
        if let Some(ticket) = away {
            self.messages.withdraw(ticket);
        }
        if let Some(ticket) = here {
            lock(&self.twofold).remove(&ticket);
        }
    }
}

impl HostsGroup {
    /// Starts a receive from any rank; its source is one of this group.
    pub(super) fn recv_any(&self, messages: &Arc<Messages>, message: Message, completion: Completion) -> Result<u64> {
        let everyone: Vec<Rank> = (0..self.layout.size() as u32).map(|rank| messages.global(Rank(rank))).collect();
        let here: Vec<Rank> = self.layout.members(self.layout.host(self.rank)).iter().map(|&rank| messages.global(rank)).collect();
        let names = everyone.clone();
        let member = move |global: Rank| names.iter().position(|&other| other == global).map(|place| Rank(place as u32));
        let completion = Completion::new(move |outcome, source| completion.call(outcome, source.and_then(&member)));
        self.inner.recorded(false, &message, true, completion, |timeout, completion| {
            let transfers = Arc::clone(self.inner.messages());
            let (tickets, twofold, messages) = (Mutex::default(), Arc::clone(&self.twofold), Arc::clone(messages));
            let receive = Arc::new(Receive { completion, tickets, twofold, transfers, messages });
            let [within, between] = Claim::pair();
            let done = receive.completion(within.clone(), move |local| here[local.index()]);
            let ticket = receive.transfers.recv_claimed(message, timeout, done, Some(within))?;
            lock(&self.twofold).insert(ticket, 0);
            receive.settle(|tickets| tickets.here = Some(ticket));
            let done = receive.completion(between.clone(), move |rank| everyone[rank.index()]);
            match receive.messages.recv_any(message, timeout, done, between) {
                Ok(away) => {
                    if let Some(other) = lock(&self.twofold).get_mut(&ticket) {
                        *other = away;
                    }
                    receive.settle(|tickets| tickets.away = Some(away));
                }
                // The group has ended meanwhile, which ends the receive in the other table.
                Err(error) => log::debug!("a receive from any rank began in an ended group: {}", error.message),
            }
            Ok(ticket)
        })
    }

    /// Waits for a receive that stands in both tables and has ended in that of this host.
    pub(super) fn wait_away(&self, ticket: u64, timeout: Option<Duration>) -> Result<()> {
        let away = lock(&self.twofold).get(&ticket).copied();
        match (away, self.messages.get()) {
            (Some(away), Some(messages)) if away != 0 => messages.wait(away, timeout),
            _ => Ok(()),
        }
    }
}
