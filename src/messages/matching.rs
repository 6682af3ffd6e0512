//! Matching of messages and receives: for each sender, the oldest message and the oldest receive
//! with an equal tag belong together.

use crate::coll::call::Span;
use crate::completion::Completion;
use crate::dtype::DType;
use crate::rank::Rank;
use crate::sync::timeout::CallTimeout;
use std::collections::VecDeque;

/// A receive that waits for its message.
pub(super) struct Posted {
    pub ticket: u64,
    /// The sender; `None` for any source.
    pub peer: Option<Rank>,
    pub tag: i32,
    pub dtype: DType,
    pub span: Span,
    pub limit: CallTimeout,
    pub completion: Completion,
}

/// A message that waits for its receive.
#[derive(Debug)]
pub(super) struct UnmatchedMessage {
    pub from: Rank,
    pub tag: i32,
    /// torch's code of its element type.
    pub dtype: u8,
    pub bytes: u64,
    pub content: MessageBody,
}

/// The content of a message; the variant says where its bytes are.
#[derive(Debug)]
pub(super) enum MessageBody {
    /// The bytes of an eager message.
    Eager(Box<[u8]>),
    /// The message is only offered; `id` and `value` are those of the offer. `first` has the bytes
    /// that have arrived without a request.
    Rts { id: u64, value: u64, first: Vec<u8> },
    /// Bytes of a send of this rank to itself, with this ticket.
    Own { ticket: u64 },
}

/// Queues of messages and of receives, the oldest first. At most one of a matching pair is queued.
pub(super) struct Matching {
    pub posted: VecDeque<Posted>,
    unexpected: VecDeque<UnmatchedMessage>,
    /// Number of bytes that the unmatched messages of each rank occupy here.
    backlog: Vec<usize>,
}

impl UnmatchedMessage {
    fn footprint(&self) -> usize {
        let content = match &self.content {
            MessageBody::Eager(bytes) => bytes.len(),
            MessageBody::Rts { .. } | MessageBody::Own { .. } => 0,
        };
        size_of::<Self>() + content
    }
}

impl Matching {
    /// Creates the queues of a group of `size` ranks.
    pub(super) fn new(size: usize) -> Self {
        Self { posted: VecDeque::new(), unexpected: VecDeque::new(), backlog: vec![0; size] }
    }

    /// Keeps a message until a receive takes it.
    pub(super) fn keep(&mut self, message: UnmatchedMessage) {
        self.backlog[message.from.index()] += message.footprint();
        self.unexpected.push_back(message);
    }

    /// Returns the number of bytes that unmatched messages from `rank` occupy.
    pub(super) fn backlog(&self, rank: Rank) -> usize {
        self.backlog[rank.index()]
    }

    /// Removes and returns the message for a receive from `peer` with `tag`, if it has arrived.
    pub(super) fn take_message(
        &mut self,
        peer: Option<Rank>,
        tag: i32,
    ) -> Option<UnmatchedMessage> {
        let fits = |message: &UnmatchedMessage| {
            message.tag == tag && peer.is_none_or(|peer| peer == message.from)
        };
        let place = self.unexpected.iter().position(fits)?;
        self.unexpected
            .remove(place)
            .inspect(|message| self.backlog[message.from.index()] -= message.footprint())
    }

    /// Returns the receive that [`Self::take_receive`] would return, if no message of another rank
    /// can take it meanwhile.
    pub(super) fn sure_receive(&self, from: Rank, tag: i32) -> Option<&Posted> {
        let fits =
            |posted: &&Posted| posted.tag == tag && posted.peer.is_none_or(|peer| peer == from);
        self.posted.iter().find(fits).filter(|posted| posted.peer == Some(from))
    }

    /// Keeps `piece` if it is the next part of the offered message `id` that arrives without a
    /// request: its offset `at` must be the end of the bytes kept so far. Returns true if it was
    /// kept.
    pub(super) fn keep_start(&mut self, from: Rank, id: u64, at: usize, piece: &[u8]) -> bool {
        let first =
            self.unexpected.iter_mut().filter(|message| message.from == from).find_map(|message| {
                match &mut message.content {
                    MessageBody::Rts { id: offered, value, first } => {
                        (*offered == id && first.len() == at && *value as usize >= at + piece.len())
                            .then_some(first)
                    }
                    MessageBody::Eager(_) | MessageBody::Own { .. } => None,
                }
            });
        first.map(|first| first.extend_from_slice(piece)).is_some()
    }

    /// Removes and returns the receive for a message from `from` with `tag`, if it is posted.
    pub(super) fn take_receive(&mut self, from: Rank, tag: i32) -> Option<Posted> {
        let fits =
            |posted: &Posted| posted.tag == tag && posted.peer.is_none_or(|peer| peer == from);
        let place = self.posted.iter().position(fits)?;
        self.posted.remove(place)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn posted(ticket: u64, peer: Option<u32>, tag: i32) -> Posted {
        let limit = CallTimeout::from_first_wait(Duration::from_secs(1));
        Posted {
            ticket,
            peer: peer.map(Rank),
            tag,
            span: Span { addr: 0, bytes: 0 },
            limit,
            dtype: DType::U8,
            completion: Completion::new(|_, _| {}),
        }
    }

    #[test]
    fn receives_match_in_order_by_tag_and_sender() {
        let mut queues = Matching::new(4);
        queues.posted.extend([posted(1, Some(2), 7), posted(2, None, 7), posted(3, Some(1), 7)]);
        let ticket = |taken: Option<Posted>| taken.map(|posted| posted.ticket);
        assert_eq!(ticket(queues.take_receive(Rank(1), 8)), None, "other tag");
        assert_eq!(ticket(queues.take_receive(Rank(1), 7)), Some(2), "any source was posted first");
        assert_eq!(ticket(queues.take_receive(Rank(1), 7)), Some(3));
        assert_eq!(ticket(queues.take_receive(Rank(1), 7)), None);
        assert_eq!(ticket(queues.take_receive(Rank(2), 7)), Some(1));
    }

    #[test]
    fn a_receive_is_sure_if_no_other_rank_can_fill_it() {
        let mut queues = Matching::new(4);
        let sure = |queues: &Matching, from, tag| {
            queues.sure_receive(Rank(from), tag).map(|posted| posted.ticket)
        };
        queues.posted.extend([posted(1, Some(2), 7), posted(2, None, 7), posted(3, Some(1), 7)]);
        assert_eq!((sure(&queues, 2, 7), sure(&queues, 2, 8)), (Some(1), None));
        assert_eq!(sure(&queues, 1, 7), None, "one from anybody comes first");
    }

    #[test]
    fn messages_match_in_order_of_arrival() {
        let mut queues = Matching::new(4);
        for (from, tag, ticket) in [(1, 0, 10), (2, 0, 11), (1, 0, 12)] {
            queues.keep(UnmatchedMessage {
                from: Rank(from),
                tag,
                dtype: 0,
                bytes: 0,
                content: MessageBody::Own { ticket },
            });
        }
        let from = |message: Option<UnmatchedMessage>| {
            message.map(|m| (m.from.0, matches!(m.content, MessageBody::Own { ticket: 12 })))
        };
        assert_eq!(from(queues.take_message(Some(Rank(2)), 0)), Some((2, false)));
        assert_eq!(from(queues.take_message(None, 0)), Some((1, false)));
        assert_eq!(from(queues.take_message(None, 0)), Some((1, true)));
        assert_eq!(from(queues.take_message(None, 0)), None);
    }

    #[test]
    fn what_is_kept_is_counted_for_its_sender_until_it_is_taken() {
        let mut queues = Matching::new(2);
        let head = size_of::<UnmatchedMessage>();
        queues.keep(UnmatchedMessage {
            from: Rank(1),
            tag: 0,
            dtype: 0,
            bytes: 5,
            content: MessageBody::Eager([0; 5].into()),
        });
        queues.keep(UnmatchedMessage {
            from: Rank(1),
            tag: 1,
            dtype: 0,
            bytes: 1 << 30,
            content: MessageBody::Rts { id: 1, value: 0, first: Vec::new() },
        });
        assert_eq!((queues.backlog(Rank(0)), queues.backlog(Rank(1))), (0, 2 * head + 5));
        assert!(queues.take_message(None, 0).is_some());
        assert_eq!(queues.backlog(Rank(1)), head);
    }
}
