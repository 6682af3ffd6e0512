//! Messages that are not complete, and receives among them that any rank may fill.

use super::Finished;
use crate::completion::Completion;
use crate::error::{Error, Result};
use crate::messages::{Claim, Message};
use crate::rank::Rank;
use crate::sync::limit::Limit;
use std::time::Duration;

/// A send or receive that is not complete.
pub(super) struct Open {
    pub(super) ticket: u64,
    pub(super) message: Message,
    pub(super) limit: Limit,
    pub(super) completion: Completion,
}

impl Open {
    /// The end of it, with the rank that sent, if it was received.
    pub(super) fn ends(self, outcome: Result<()>, source: Option<Rank>) -> Finished {
        Finished { ticket: self.ticket, completion: self.completion, outcome, source }
    }

    /// Its end with `error`.
    pub(super) fn fails(self, error: &Error) -> Finished {
        self.ends(Err(error.clone()), None)
    }
}

/// A receive from any rank that has no message yet.
pub(super) struct Wanted {
    pub(super) open: Open,
    pub(super) claim: Claim,
}

/// Receives from any rank, oldest first, and what is known of those who may send.
#[derive(Default)]
pub(super) struct AnySource {
    pub(super) wanted: Vec<Wanted>,
    /// Flag of a thread that looks for them.
    pub(super) seeking: bool,
    /// Why nobody looks for senders any more.
    pub(super) blind: Option<Error>,
}

impl AnySource {
    /// The receive for a message with `tag`, if one is older than `ticket` and this side gets it.
    pub(super) fn take(&mut self, tag: i32, ticket: u64) -> Option<Open> {
        let fits = |wanted: &Wanted| wanted.open.message.tag == tag && wanted.open.ticket < ticket && wanted.claim.take();
        let place = self.wanted.iter().position(fits)?;
        Some(self.wanted.remove(place).open)
    }

    /// The receive whose deadline is the next, with the time that is left.
    pub(super) fn most_urgent(&self) -> Option<(Duration, &Open)> {
        let waiting = self.wanted.iter().filter(|wanted| !wanted.claim.is_lost());
        waiting.map(|Wanted { open, .. }| (open.limit.left().unwrap_or_default(), open)).min_by_key(|(left, _)| *left)
    }
}
