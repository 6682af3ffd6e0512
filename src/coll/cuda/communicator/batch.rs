//! Division of a batch of sends and receives into launches. Pure.

use crate::coll::call::Span;
use crate::coll::cuda::workspace::layout::MAX_RANKS;
use crate::error::{Error, Result};
use crate::rank::Rank;

/// The rank at the other end, and the bytes on this rank.
pub(super) type IndexedSpan = (usize, Span);

/// Removes this rank's messages to itself, and pairs each with its destination; both must be in the
/// same batch. The driver's copy requires that they do not overlap; a message to its own place is
/// left out.
pub(super) fn take_own(
    me: Rank,
    sends: &mut Vec<IndexedSpan>,
    receives: &mut Vec<IndexedSpan>,
) -> Result<Vec<(Span, Span)>> {
    let own = |messages: &mut Vec<IndexedSpan>| -> Vec<Span> {
        let (own, rest) =
            messages.drain(..).partition::<Vec<_>, _>(|(rank, _)| *rank == me.index());
        *messages = rest;
        own.into_iter().map(|(_, span)| span).collect()
    };
    let (out, incoming) = (own(sends), own(receives));
    if out.len() != incoming.len()
        || out.iter().zip(&incoming).any(|(from, to)| from.bytes != to.bytes)
    {
        return Err(Error::value(format!(
            "rank {me} sends {} messages to itself and receives {} of its own; they must match \
             within one batch",
            out.len(),
            incoming.len()
        )));
    }
    let moved = |&(from, to): &(Span, Span)| from.addr != to.addr;
    let own: Vec<_> = out.into_iter().zip(incoming).filter(moved).collect();
    if own.iter().any(|&(from, to)| from.overlaps(to)) {
        return Err(Error::value(format!(
            "rank {me} sends itself a tensor that overlaps the tensor which receives it; send a \
             copy"
        )));
    }
    Ok(own)
}

/// Removes the first message for each rank, which `rank` returns; a launch carries one message per
/// rank.
pub(super) fn first_of_each<T>(messages: &mut Vec<T>, rank: impl Fn(&T) -> usize) -> Vec<T> {
    let mut seen = [false; MAX_RANKS];
    let (first, rest) =
        messages.drain(..).partition(|one| !std::mem::replace(&mut seen[rank(one)], true));
    *messages = rest;
    first
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    fn message(rank: usize, bytes: usize) -> IndexedSpan {
        message_at(0x1000, rank, bytes)
    }

    fn message_at(addr: usize, rank: usize, bytes: usize) -> IndexedSpan {
        (rank, Span { addr, bytes })
    }

    fn lengths(messages: &[IndexedSpan]) -> Vec<(usize, usize)> {
        messages.iter().map(|(rank, span)| (*rank, span.bytes)).collect()
    }

    #[test]
    fn messages_to_oneself_are_paired_in_their_order() {
        let mut sends = vec![message(1, 5), message(2, 8), message(1, 6)];
        let to = |rank, bytes| message_at(0x2000, rank, bytes);
        let mut receives = vec![to(1, 5), to(1, 6), message(0, 7)];
        let own = take_own(Rank(1), &mut sends, &mut receives).expect("they match");
        assert_eq!(
            own.iter().map(|(from, to)| (from.bytes, to.bytes)).collect::<Vec<_>>(),
            [(5, 5), (6, 6)]
        );
        assert_eq!((lengths(&sends), lengths(&receives)), (vec![(2, 8)], vec![(0, 7)]));
    }

    #[test]
    fn messages_to_oneself_that_do_not_match_are_refused() {
        for (sends, receives) in
            [(vec![message(1, 5)], vec![]), (vec![message(1, 5)], vec![message(1, 6)])]
        {
            let error =
                take_own(Rank(1), &mut sends.clone(), &mut receives.clone()).expect_err("no match");
            error.assert_says(ErrorKind::Value, &["rank 1 sends 1 messages to itself"]);
        }
    }

    #[test]
    fn messages_to_oneself_may_not_overlap_their_destination() {
        let pairs = |to| {
            take_own(Rank(1), &mut vec![message(1, 5)], &mut vec![message_at(to, 1, 5)])
                .map(|pairs| pairs.len())
        };
        assert_eq!([0x0ffb, 0x1000, 0x1005].map(|to| pairs(to).expect("apart or same")), [1, 0, 1]);
        for to in [0x0ffc, 0x1004] {
            let error = pairs(to).expect_err("they overlap");
            error.assert_says(ErrorKind::Value, &["rank 1 sends itself", "send a copy"]);
        }
    }

    #[test]
    fn each_launch_takes_one_message_for_each_rank_in_order() {
        let mut messages =
            vec![message(0, 1), message(2, 2), message(0, 3), message(0, 4), message(2, 5)];
        let launches: Vec<_> = std::iter::from_fn(|| {
            Some(first_of_each(&mut messages, |message| message.0))
                .filter(|first| !first.is_empty())
        })
        .collect();
        let launches: Vec<_> = launches.iter().map(|launch| lengths(launch)).collect();
        assert_eq!(launches, [vec![(0, 1), (2, 2)], vec![(0, 3), (2, 5)], vec![(0, 4)]]);
    }
}
