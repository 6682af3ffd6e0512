//! Each rank's launches, for the others to compare theirs with. No rank waits for another here: whoever launches a call later sees what
//! the others launched under the same number, and does not launch what does not fit.

use crate::coll::call::{Call, Op};
use crate::coll::cuda::workspace::layout::{Channel, MAX_RANKS};
use crate::coll::describe::Description;
use crate::control::Board;
use crate::error::{Error, Result};
use crate::mem::layout::LEDGER_BYTES;
use crate::rank::Rank;
use crate::sync::call_site::{Inscription, Site};
use std::sync::atomic::{AtomicU64, Ordering, fence};

/// Launches that a rank can be ahead of another and still be compared; a stream holds about a thousand launches.
const ENTRIES: usize = 128;
/// The same of sends and receives, for each other rank.
const PARCELS: usize = 16;

/// In shared memory, written by its rank alone but for the gate.
#[repr(C)]
struct Ledger {
    launched: AtomicU64,
    entries: [Entry; ENTRIES],
    /// What is sent to each rank, and what is received from it.
    sent: [[Parcel; PARCELS]; MAX_RANKS],
    received: [[Parcel; PARCELS]; MAX_RANKS],
    gate: Gate,
}

/// Written by any rank; in use on rank 0 alone. On lines of its own: every launch reads it.
#[repr(C, align(128))]
struct Gate(AtomicU64);

#[repr(C)]
struct Entry {
    /// Of the launch, from 1; 0 while the rest is being written.
    number: AtomicU64,
    head: AtomicU64,
    bytes: AtomicU64,
    fingerprint: AtomicU64,
    /// `Channel`.
    channel: AtomicU64,
    /// Bytes to each rank and from it, of an all-to-all.
    sends: [AtomicU64; MAX_RANKS],
    receives: [AtomicU64; MAX_RANKS],
    /// Where the call stands, if the description says that it matters.
    site: Inscription,
}

/// One end of a send or receive.
#[repr(C)]
struct Parcel {
    /// Of the messages in this direction between the two ranks, from 1; 0 while the rest is being written.
    number: AtomicU64,
    bytes: AtomicU64,
}

const _: () = assert!(size_of::<Ledger>() <= LEDGER_BYTES);

/// What a rank said of one launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Said {
    description: Description,
    fingerprint: u64,
    channel: u64,
    sends: [u64; MAX_RANKS],
    receives: [u64; MAX_RANKS],
}

impl Said {
    fn of(call: &Call, channel: Channel) -> Self {
        let description = Description::of(call);
        let (mut sends, mut receives) = ([0; MAX_RANKS], [0; MAX_RANKS]);
        if call.op == Op::AllToAll {
            sends.iter_mut().zip(&call.inputs).for_each(|(bytes, span)| *bytes = span.bytes as u64);
            receives.iter_mut().zip(&call.outputs).for_each(|(bytes, span)| *bytes = span.bytes as u64);
        }
        let fingerprint = description.fingerprint(call);
        Self { description, fingerprint, channel: channel as u64, sends, receives }
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

/// The word of [`super::zero_copy`].
pub(in crate::coll::cuda) fn gate(board: &Board) -> &AtomicU64 {
    &ledger(board, Rank(0)).gate.0
}

/// How many calls `rank` has launched.
pub fn launched(board: &Board, rank: Rank) -> u64 {
    ledger(board, rank).launched.load(Ordering::Acquire)
}

/// What `rank` has launched last; `None` also while it launches the next.
pub fn last(board: &Board, rank: Rank) -> Option<Description> {
    let number = launched(board, rank);
    read(ledger(board, rank), number).filter(|_| number > 0).map(|said| said.description)
}

/// "17 CUDA collectives launched, the last all_reduce of ..."
pub fn progress(board: &Board, rank: Rank) -> String {
    let last = last(board, rank).map_or_else(String::new, |last| format!(", the last {last}"));
    format!("{} CUDA collectives launched{last}", launched(board, rank))
}

/// Notes that this rank launches `call` as its launch `number`, and compares with those who have launched theirs. Fails the group where
/// they differ.
pub fn compare(board: &Board, number: u64, call: &Call, channel: Channel) -> Result<()> {
    let said = Said::of(call, channel);
    note(ledger(board, board.rank()), number, &said, call.site);
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
            let (place, place_of_peer) = (site_of(board, board.rank(), number, &said), site_of(board, peer, number, &other));
            let alike = other.description.unsited() == said.description.unsited();
            let how = match (other.description.is_sited(), said.description.is_sited()) {
                (sited, also) if alike && sited != also => "; one of them was started with SYMM_DEBUG=site, the other was not",
                _ if alike && place == place_of_peer => ", with other lengths",
                _ => "",
            };
            let text = format!(
                "{mine} called {}{place} and {theirs} called {}{place_of_peer} as CUDA collective #{number} of group \"{}\"{how}",
                said.description,
                other.description,
                board.name(),
            );
            return Err(board.fail(Error::mismatch(text)));
        }
        if other.channel != said.channel {
            let name = |channel: u64| Channel::ALL.get(channel as usize).map_or("in a way of its own", |channel| channel.name());
            let (mine, theirs) = (board.describe(board.rank()), board.describe(peer));
            let text = format!(
                "{mine} called {} {} and {theirs} {}, as CUDA collective #{number} of group \"{}\"; all ranks must do alike",
                said.description,
                name(said.channel),
                name(other.channel),
                board.name()
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

/// " at train.py:12", where sites are compared.
fn site_of(board: &Board, rank: Rank, number: u64, said: &Said) -> String {
    let entry = &ledger(board, rank).entries[number as usize % ENTRIES];
    if said.description.is_sited() { format!(" at {}", entry.site.read()) } else { String::new() }
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

/// A send or receive that is about to be launched.
#[derive(Clone, Copy, Debug)]
pub struct Transfer {
    /// A send; else a receive.
    pub send: bool,
    /// The other end.
    pub peer: Rank,
    /// Of the messages in this direction between the two ranks, from 1.
    pub number: u64,
    /// Length of the message.
    pub bytes: u64,
}

/// Notes `transfer`, and compares it with its other end if that has been launched. Fails the group where the lengths differ: each end
/// would count other chunks.
pub fn compare_transfer(board: &Board, transfer: Transfer) -> Result<()> {
    let Transfer { send, peer, number, bytes } = transfer;
    let me = board.rank();
    let (own, other) = (ledger(board, me), ledger(board, peer));
    let place = number as usize % PARCELS;
    let (mine, theirs) = if send {
        (&own.sent[peer.index()][place], &other.received[me.index()][place])
    } else {
        (&own.received[peer.index()][place], &other.sent[me.index()][place])
    };
    mine.number.store(0, Ordering::Relaxed);
    fence(Ordering::Release);
    mine.bytes.store(bytes, Ordering::Relaxed);
    mine.number.store(number, Ordering::Release);
    // Of two ends that are noted at the same time, at least one reads the other.
    fence(Ordering::SeqCst);
    if theirs.number.load(Ordering::Acquire) != number {
        return Ok(());
    }
    let found = theirs.bytes.load(Ordering::Relaxed);
    fence(Ordering::Acquire);
    if theirs.number.load(Ordering::Relaxed) != number || found == bytes {
        return Ok(());
    }
    let (from, to) = if send { (me, peer) } else { (peer, me) };
    let (sent, expected) = if send { (bytes, found) } else { (found, bytes) };
    let (from, to, group) = (board.describe(from), board.describe(to), board.name());
    let text =
        format!("{from} sends {sent} bytes to {to}, which expects {expected}, as CUDA message #{number} between them in group \"{group}\"");
    Err(board.fail(Error::mismatch(text)))
}

fn note(ledger: &Ledger, number: u64, said: &Said, site: Option<&Site>) {
    let entry = &ledger.entries[number as usize % ENTRIES];
    entry.number.store(0, Ordering::Relaxed);
    fence(Ordering::Release);
    entry.head.store(said.description.head, Ordering::Relaxed);
    entry.bytes.store(said.description.bytes, Ordering::Relaxed);
    entry.fingerprint.store(said.fingerprint, Ordering::Relaxed);
    entry.channel.store(said.channel, Ordering::Relaxed);
    for (word, bytes) in entry.sends.iter().zip(said.sends).chain(entry.receives.iter().zip(said.receives)) {
        word.store(bytes, Ordering::Relaxed);
    }
    if let Some(site) = site {
        entry.site.write(site);
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
    let said = Said { description, fingerprint: load(&entry.fingerprint), channel: load(&entry.channel), sends, receives };
    fence(Ordering::Acquire);
    (entry.number.load(Ordering::Relaxed) == number).then_some(said)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::coll::call::Span;
    use crate::control;
    use crate::dtype::{DType, ReduceOp};
    use crate::error::Kind;

    fn boards() -> [Board; 2] {
        control::tests::boards(2).try_into().expect("two")
    }

    fn sum(bytes: usize) -> Call {
        let spans = vec![Span { addr: 0, bytes }];
        let (op, dtype, reduce_op) = (Op::AllReduce, DType::F32, ReduceOp::Sum);
        Call { op, dtype, reduce_op, root: Rank(0), factor: 1.0, inputs: spans.clone(), outputs: spans, site: None }
    }

    #[test]
    fn ranks_that_disagree_on_recording_hear_of_it() {
        let [one, two] = boards();
        compare(&one, 1, &sum(4), Channel::CapturedCollectives).expect("alone so far");
        let error = compare(&two, 1, &sum(4), Channel::Collectives).expect_err("on another channel");
        assert_eq!(error.kind, Kind::Mismatch);
        assert!(error.message.contains("to run at once") && error.message.contains("to be recorded into a graph"), "{error}");
        assert_eq!(one.failure().map(|failure| failure.kind), Some(Kind::Mismatch));
    }

    #[test]
    fn ranks_that_call_from_different_lines_hear_of_it_if_they_ask() {
        let at = |text: &str| Call { site: Site::known(Site::number(text)), ..sum(4) };
        let disagree = |first: Call, second: Call| {
            let [one, two] = boards();
            compare(&one, 1, &first, Channel::Collectives).expect("alone so far");
            compare(&two, 1, &second, Channel::Collectives).map_err(|error| error.message)
        };
        disagree(at("a.py:1"), at("a.py:1")).expect("the same line");
        let text = disagree(at("a.py:1"), at("a.py:2")).expect_err("other lines");
        assert!(text.contains("SUM) at a.py:1 ") && text.contains("SUM) at a.py:2 ") && text.ends_with("\"test\""), "{text}");
        let text = disagree(sum(4), at("a.py:2")).expect_err("one asks");
        assert!(text.contains("one of them was started with SYMM_DEBUG=site"), "{text}");
    }

    #[test]
    fn what_a_rank_launched_last_is_known() {
        let [one, two] = boards();
        assert_eq!(last(&two, Rank(0)), None);
        compare(&one, 1, &sum(4), Channel::Collectives).expect("alone so far");
        compare(&one, 2, &sum(8), Channel::Collectives).expect("alone so far");
        assert_eq!(last(&two, Rank(0)), Some(Description::of(&sum(8))));
    }

    #[test]
    fn p3_a_death_that_kernels_wait_through_says_how_far_both_ranks_had_come() {
        let [one, two] = boards();
        compare(&one, 1, &sum(4), Channel::Collectives).expect("alone so far");
        compare(&two, 1, &sum(4), Channel::Collectives).expect("the same");
        compare(&one, 2, &sum(8), Channel::Collectives).expect("alone so far");
        one.note_gone(Rank(1), "has ended (killed by signal 9 (SIGKILL))".into());
        assert_eq!(one.failure(), None, "no kernel waits");
        one.wait_unattended(progress);
        let error = one.failure().expect("told at once");
        assert_eq!(error.kind, Kind::Peer);
        for part in [
            "rank 1 (pid ",
            "SIGKILL)), 1 CUDA collectives launched, the last all_reduce",
            "is alive, 2 CUDA collectives launched, the last all_reduce",
        ] {
            assert!(error.message.contains(part), "{error}");
        }
    }

    #[test]
    fn both_ends_of_a_message_are_compared_whoever_comes_first() {
        let end = |send: bool, number: u64, bytes: u64| Transfer { send, peer: Rank(u32::from(send)), number, bytes };
        for sender_first in [true, false] {
            let [one, two] = boards();
            for number in 1..=40 {
                compare_transfer(&one, end(true, number, number * 8)).expect("the other end has not come");
                compare_transfer(&two, end(false, number, number * 8)).expect("the same length");
            }
            let error = if sender_first {
                compare_transfer(&one, end(true, 41, 8)).expect("the other end has not come");
                compare_transfer(&two, end(false, 41, 12)).expect_err("another length")
            } else {
                compare_transfer(&two, end(false, 41, 12)).expect("the other end has not come");
                compare_transfer(&one, end(true, 41, 8)).expect_err("another length")
            };
            assert_eq!(error.kind, Kind::Mismatch);
            assert!(error.message.contains("sends 8 bytes") && error.message.contains("expects 12, as CUDA message #41"), "{error}");
        }
    }

    #[test]
    fn a_sender_far_ahead_is_not_compared() {
        let [one, two] = boards();
        let end = |send: bool, number: u64, bytes: u64| Transfer { send, peer: Rank(u32::from(send)), number, bytes };
        (1..=100).for_each(|number| compare_transfer(&one, end(true, number, number)).expect("alone so far"));
        compare_transfer(&two, end(false, 1, 9)).expect("what stood there is gone");
        compare_transfer(&two, end(false, 100, 9)).expect_err("another length");
    }

    #[test]
    fn a_rank_that_leaves_what_others_have_launched_fails_the_group() {
        let [one, two] = boards();
        compare(&one, 1, &sum(4), Channel::Collectives).expect("alone so far");
        compare(&two, 1, &sum(4), Channel::Collectives).expect("the same");
        compare(&one, 2, &sum(8), Channel::Collectives).expect("alone so far");
        two.depart();
        abandon(&two);
        let error = one.failure().expect("rank 0 waits in vain");
        assert_eq!(error.kind, Kind::Peer);
        assert!(error.message.contains("rank 1") && error.message.contains("after 1 CUDA collectives"), "{error}");
    }

    #[test]
    fn a_launch_without_a_rank_that_has_left_is_refused() {
        let [one, two] = boards();
        compare(&two, 1, &sum(4), Channel::Collectives).expect("alone so far");
        two.depart();
        abandon(&two);
        compare(&one, 1, &sum(4), Channel::Collectives).expect("it launched that before it left");
        let error = compare(&one, 2, &sum(4), Channel::Collectives).expect_err("it never will");
        assert_eq!(error.kind, Kind::Peer);
        assert!(error.message.contains("left the group") && error.message.contains("#2"), "{error}");
    }

    #[test]
    fn a_rank_that_leaves_when_all_is_launched_fails_nothing() {
        let [one, two] = boards();
        compare(&one, 1, &sum(4), Channel::Collectives).expect("alone so far");
        compare(&two, 1, &sum(4), Channel::Collectives).expect("the same");
        one.depart();
        abandon(&one);
        assert_eq!(two.failure(), None);
    }
}
