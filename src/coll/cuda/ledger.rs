//! Each rank's launches, for the others to compare theirs with. No rank waits for another here: whoever launches a call later sees what
//! the others launched under the same number, and does not launch what does not fit.

use crate::coll::call::{Call, Op};
use crate::coll::cuda::layout::MAX_RANKS;
use crate::coll::describe::Description;
use crate::error::{Error, Result};
use crate::mem::layout::LEDGER_BYTES;
use crate::rank::Rank;
use crate::sync::board::Board;
use std::sync::atomic::{AtomicU64, Ordering, fence};

/// Launches that a rank can be ahead of another and still be compared; a stream holds about a thousand launches.
const ENTRIES: usize = 128;

/// In shared memory, written by its rank alone.
#[repr(C)]
struct Ledger {
    launched: AtomicU64,
    entries: [Entry; ENTRIES],
}

#[repr(C)]
struct Entry {
    /// Of the launch, from 1; 0 while the rest is being written.
    number: AtomicU64,
    head: AtomicU64,
    bytes: AtomicU64,
    fingerprint: AtomicU64,
    /// Bytes to each rank and from it, of an all-to-all.
    sends: [AtomicU64; MAX_RANKS],
    receives: [AtomicU64; MAX_RANKS],
}

const _: () = assert!(size_of::<Ledger>() <= LEDGER_BYTES);

/// What a rank said of one launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Said {
    description: Description,
    fingerprint: u64,
    sends: [u64; MAX_RANKS],
    receives: [u64; MAX_RANKS],
}

impl Said {
    fn of(call: &Call) -> Self {
        let description = Description::of(call);
        let (mut sends, mut receives) = ([0; MAX_RANKS], [0; MAX_RANKS]);
        if call.op == Op::AllToAll {
            sends.iter_mut().zip(&call.inputs).for_each(|(bytes, span)| *bytes = span.bytes as u64);
            receives.iter_mut().zip(&call.outputs).for_each(|(bytes, span)| *bytes = span.bytes as u64);
        }
        Self { description, fingerprint: description.fingerprint(call.agreed_lengths()), sends, receives }
    }
}

fn ledger(board: &Board, rank: Rank) -> &Ledger {
    // SAFETY: atomics only; every member uses this area as a ledger.
    unsafe { board.segment().at::<Ledger>(board.layout().ledger(rank)) }
}

/// Reserves the group's ledgers.
pub fn reserve(board: &Board) -> Result<()> {
    let purpose = format_args!("launches of group \"{}\"", board.name());
    board.segment().reserve(board.layout().ledger(board.rank()), LEDGER_BYTES, purpose)
}

/// How many calls `rank` has launched.
pub fn launched(board: &Board, rank: Rank) -> u64 {
    ledger(board, rank).launched.load(Ordering::Acquire)
}

/// Notes that this rank launches `call` as its launch `number`, and compares with those who have launched theirs. Fails the group where
/// they differ.
pub fn compare(board: &Board, number: u64, call: &Call) -> Result<()> {
    let said = Said::of(call);
    note(ledger(board, board.rank()), number, &said);
    for peer in board.peers() {
        let Some(other) = read(ledger(board, peer), number) else {
            // Asked in this order: what it launched before it left is seen.
            if let Some(how) = board.absence(peer)
                && launched(board, peer) < number
            {
                let (them, me, count) = (board.describe(peer), board.describe(board.rank()), launched(board, peer));
                let text = format!("{them} {how} after {count} CUDA collectives; {me} called {} as #{number}", said.description);
                return Err(board.fail(Error::peer(text)));
            }
            continue;
        };
        let (me, them) = (board.rank().index(), peer.index());
        if other.fingerprint != said.fingerprint {
            let (mine, theirs) = (board.describe(board.rank()), board.describe(peer));
            let text = format!(
                "{mine} called {} and {theirs} called {} as CUDA collective #{number} of group \"{}\"{}",
                said.description,
                other.description,
                board.name(),
                if other.description == said.description { ", with other lengths" } else { "" }
            );
            return Err(board.fail(Error::mismatch(text)));
        }
        let pair = |from: Rank, sent: u64, to: Rank, expected: u64| {
            let (from, to, group) = (board.describe(from), board.describe(to), board.name());
            let text = format!(
                "{from} sends {sent} bytes to {to}, which expects {expected}, in all_to_all, CUDA collective #{number} of group \"{group}\""
            );
            Err(board.fail(Error::mismatch(text)))
        };
        if other.sends[me] != said.receives[them] {
            return pair(peer, other.sends[me], board.rank(), said.receives[them]);
        }
        if said.sends[them] != other.receives[me] {
            return pair(board.rank(), said.sends[them], peer, other.receives[me]);
        }
    }
    Ok(())
}

/// After this rank has departed: fails the group if a peer has launched what this rank never will, and waits for it in vain.
pub fn abandon(board: &Board) {
    // With the one in `note`: this rank sees the peer's launch, or the peer that this rank has departed.
    fence(Ordering::SeqCst);
    let own = launched(board, board.rank());
    if let Some((peer, count)) = board.peers().map(|peer| (peer, launched(board, peer))).find(|(_, count)| *count > own) {
        let (me, them) = (board.describe(board.rank()), board.describe(peer));
        let text = format!("{me} left group \"{}\" after {own} CUDA collectives; {them} has launched {count}", board.name());
        board.fail(Error::aborted(text));
    }
}

fn note(ledger: &Ledger, number: u64, said: &Said) {
    let entry = &ledger.entries[number as usize % ENTRIES];
    entry.number.store(0, Ordering::Relaxed);
    fence(Ordering::Release);
    entry.head.store(said.description.head, Ordering::Relaxed);
    entry.bytes.store(said.description.bytes, Ordering::Relaxed);
    entry.fingerprint.store(said.fingerprint, Ordering::Relaxed);
    for (word, bytes) in entry.sends.iter().zip(said.sends).chain(entry.receives.iter().zip(said.receives)) {
        word.store(bytes, Ordering::Relaxed);
    }
    entry.number.store(number, Ordering::Release);
    ledger.launched.store(number, Ordering::Release);
    // Of two ranks that note the same number, at least one reads the other's note.
    fence(Ordering::SeqCst);
}

fn read(ledger: &Ledger, number: u64) -> Option<Said> {
    let entry = &ledger.entries[number as usize % ENTRIES];
    if entry.number.load(Ordering::Acquire) != number {
        return None;
    }
    let load = |word: &AtomicU64| word.load(Ordering::Relaxed);
    let description = Description { head: load(&entry.head), bytes: load(&entry.bytes) };
    let (sends, receives) = (std::array::from_fn(|r| load(&entry.sends[r])), std::array::from_fn(|r| load(&entry.receives[r])));
    let said = Said { description, fingerprint: load(&entry.fingerprint), sends, receives };
    fence(Ordering::Acquire);
    (entry.number.load(Ordering::Relaxed) == number).then_some(said)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::coll::call::Span;
    use crate::dtype::{DType, ReduceOp};
    use crate::error::Kind;
    use crate::mem::layout::Layout;
    use crate::mem::shm::Segment;
    use crate::sync::board::Identity;

    fn boards() -> [Board; 2] {
        let bytes = Layout::new(2).total_bytes();
        let file = Segment::create(bytes).expect("memfd");
        [0, 1].map(|rank| {
            let segment = Segment::map(file.try_clone().expect("dup"), bytes).expect("map");
            let members = (0..2).map(|global| Identity { pid: std::process::id(), global }).collect();
            Board::new(segment, Rank(rank), "test".into(), members, 1)
        })
    }

    fn sum(bytes: usize) -> Call {
        let spans = vec![Span { addr: 0, bytes }];
        let (op, dtype, reduce_op) = (Op::AllReduce, DType::F32, ReduceOp::Sum);
        Call { op, dtype, reduce_op, root: Rank(0), factor: 1.0, inputs: spans.clone(), outputs: spans }
    }

    #[test]
    fn a_rank_that_leaves_what_others_have_launched_fails_the_group() {
        let [one, two] = boards();
        compare(&one, 1, &sum(4)).expect("alone so far");
        compare(&two, 1, &sum(4)).expect("the same");
        compare(&one, 2, &sum(8)).expect("alone so far");
        two.depart();
        abandon(&two);
        let error = one.failure().expect("rank 0 waits in vain");
        assert_eq!(error.kind, Kind::Peer);
        assert!(error.message.contains("rank 1") && error.message.contains("after 1 CUDA collectives"), "{error}");
    }

    #[test]
    fn a_launch_without_a_rank_that_has_left_is_refused() {
        let [one, two] = boards();
        compare(&two, 1, &sum(4)).expect("alone so far");
        two.depart();
        abandon(&two);
        compare(&one, 1, &sum(4)).expect("it launched that before it left");
        let error = compare(&one, 2, &sum(4)).expect_err("it never will");
        assert_eq!(error.kind, Kind::Peer);
        assert!(error.message.contains("left the group") && error.message.contains("#2"), "{error}");
    }

    #[test]
    fn a_rank_that_leaves_when_all_is_launched_fails_nothing() {
        let [one, two] = boards();
        compare(&one, 1, &sum(4)).expect("alone so far");
        compare(&two, 1, &sum(4)).expect("the same");
        one.depart();
        abandon(&one);
        assert_eq!(two.failure(), None);
    }
}
