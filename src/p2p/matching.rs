//! Which message goes to which receive: the oldest of equal tag, per sender.

use crate::coll::call::Span;
use crate::done::Done;
use crate::rank::Rank;
use crate::sync::limit::Limit;
use std::collections::VecDeque;

/// A receive that waits for its message.
pub(super) struct Posted {
    pub ticket: u64,
    /// `None`: from anybody.
    pub peer: Option<Rank>,
    pub tag: i32,
    pub span: Span,
    pub limit: Limit,
    pub done: Done,
}

/// A message that waits for its receive.
#[derive(Debug)]
pub(super) struct Unexpected {
    pub from: Rank,
    pub tag: i32,
    pub bytes: u64,
    pub content: Content,
}

/// Where a message's bytes are.
#[derive(Debug)]
pub(super) enum Content {
    /// Here.
    Eager(Box<[u8]>),
    /// In the sender's memory.
    Offer { id: u64, addr: u64 },
    /// In this process: the send with this ticket goes to its own rank.
    Own { ticket: u64 },
}

/// Both queues, oldest first. At most one of a matching pair is in them.
#[derive(Default)]
pub(super) struct Matching {
    pub posted: VecDeque<Posted>,
    pub unexpected: VecDeque<Unexpected>,
}

impl Matching {
    /// The message for a receive from `peer` with `tag`, if it has come.
    pub(super) fn take_message(&mut self, peer: Option<Rank>, tag: i32) -> Option<Unexpected> {
        let fits = |message: &Unexpected| message.tag == tag && peer.is_none_or(|peer| peer == message.from);
        let place = self.unexpected.iter().position(fits)?;
        self.unexpected.remove(place)
    }

    /// The receive for a message from `from` with `tag`, if it is posted.
    pub(super) fn take_receive(&mut self, from: Rank, tag: i32) -> Option<Posted> {
        let fits = |posted: &Posted| posted.tag == tag && posted.peer.is_none_or(|peer| peer == from);
        let place = self.posted.iter().position(fits)?;
        self.posted.remove(place)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn posted(ticket: u64, peer: Option<u32>, tag: i32) -> Posted {
        let limit = Limit::from_first_wait(Duration::from_secs(1));
        Posted { ticket, peer: peer.map(Rank), tag, span: Span { addr: 0, bytes: 0 }, limit, done: Done::new(|_, _| {}) }
    }

    #[test]
    fn receives_match_in_order_by_tag_and_sender() {
        let mut queues = Matching::default();
        queues.posted.extend([posted(1, Some(2), 7), posted(2, None, 7), posted(3, Some(1), 7)]);
        let ticket = |taken: Option<Posted>| taken.map(|posted| posted.ticket);
        assert_eq!(ticket(queues.take_receive(Rank(1), 8)), None, "other tag");
        assert_eq!(ticket(queues.take_receive(Rank(1), 7)), Some(2), "any source was posted first");
        assert_eq!(ticket(queues.take_receive(Rank(1), 7)), Some(3));
        assert_eq!(ticket(queues.take_receive(Rank(1), 7)), None);
        assert_eq!(ticket(queues.take_receive(Rank(2), 7)), Some(1));
    }

    #[test]
    fn messages_match_in_order_of_arrival() {
        let mut queues = Matching::default();
        for (from, tag, ticket) in [(1, 0, 10), (2, 0, 11), (1, 0, 12)] {
            queues.unexpected.push_back(Unexpected { from: Rank(from), tag, bytes: 0, content: Content::Own { ticket } });
        }
        let from = |message: Option<Unexpected>| message.map(|m| (m.from.0, matches!(m.content, Content::Own { ticket: 12 })));
        assert_eq!(from(queues.take_message(Some(Rank(2)), 0)), Some((2, false)));
        assert_eq!(from(queues.take_message(None, 0)), Some((1, false)));
        assert_eq!(from(queues.take_message(None, 0)), Some((1, true)));
        assert_eq!(from(queues.take_message(None, 0)), None);
    }
}
