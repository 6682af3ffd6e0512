//! Each rank's launches, which the other ranks compare with theirs. No rank waits here: a rank that
//! launches a call later sees what the others launched under the same number, and rejects a call
//! that does not match.
#![allow(unsafe_code, reason = "words that lie in shared or page-locked memory")]

use crate::coll::call::{CallSpec, Collective, Span};
use crate::coll::cuda::workspace::layout::{Channel, MAX_RANKS};
use crate::coll::describe::Description;
use crate::control::ControlBlock;
use crate::error::{Error, Result};
use crate::mem::layout::LAUNCH_LOG_BYTES;
use crate::rank::Rank;
use crate::sync::shared_text::SharedText;
use std::sync::atomic::{AtomicU64, Ordering, fence};

/// Maximum number of launches by which a rank can be ahead of another while their calls are still
/// compared. A rank can get further ahead, because a stream holds about a thousand launches.
const ENTRIES: usize = 128;
/// Number of sends, and of receives, that a rank records for each other rank.
pub(super) const MESSAGE_RECORDS: usize = 16;

/// The launch log of one rank, in shared memory. Only this rank writes it, except for the zero-copy
/// word and the decisions about copies and messages.
#[repr(C)]
struct LaunchLog {
    launched: AtomicU64,
    entries: [LaunchEntry; ENTRIES],
    /// Messages sent to each rank, and messages received from it.
    sent: [[MessageRecord; MESSAGE_RECORDS]; MAX_RANKS],
    received: [[MessageRecord; MESSAGE_RECORDS]; MAX_RANKS],
    /// Number of messages sent to each rank, and received from it.
    messages: [[AtomicU64; MAX_RANKS]; 2],
    /// Decisions about messages sent to each rank, written by either end.
    message_modes: [[MessageSlot; MESSAGE_RECORDS]; MAX_RANKS],
    zero_copy: ZeroCopyWord,
    /// Decisions about launches, written by any rank; only the slots of rank 0 are used.
    copies: [CopySlot; COPY_SLOTS],
}

/// A word that any rank writes; only the word of rank 0 is used. It has its own cache lines,
/// because every launch reads it.
#[repr(C, align(128))]
struct ZeroCopyWord(AtomicU64);

/// Number of launches whose decision about copies is kept.
const COPY_SLOTS: usize = 64;

/// The decision about a launch whose bytes copy engines move, and the offsets of each rank's
/// tensors ([`super::copy_mode`]).
#[repr(C)]
pub(super) struct CopySlot {
    /// Number of the launch, the mode, and a bit for each rank that has launched it.
    pub(super) word: AtomicU64,
    pub(super) input: [AtomicU64; MAX_RANKS],
    pub(super) output: [AtomicU64; MAX_RANKS],
}

/// One launch in the log. The words that every launch compares share one cache line, because the
/// core of each peer has to fetch them.
#[repr(C, align(64))]
struct LaunchEntry {
    /// Number of the launch, from 1; 0 while the other words are being written.
    number: AtomicU64,
    head: AtomicU64,
    bytes: AtomicU64,
    detail: AtomicU64,
    fingerprint: AtomicU64,
    /// The code of a `Channel`.
    channel: AtomicU64,
    /// For an all-to-all, the bytes to each rank and from it.
    sends: [AtomicU64; MAX_RANKS],
    receives: [AtomicU64; MAX_RANKS],
    /// Call site, if the description includes it.
    call_site: SharedText,
}

/// The decision about a long message ([`super::message_mode`]).
#[repr(C)]
pub(super) struct MessageSlot {
    /// Twice the number of the message, and 1 more if it is direct.
    pub(super) word: AtomicU64,
    /// Offset and length of the receiver's tensor, and of the sender's.
    pub(super) offset: [AtomicU64; 2],
    pub(super) bytes: [AtomicU64; 2],
}

/// The record of one end of a send or receive.
#[repr(C)]
struct MessageRecord {
    /// Number of the message in this direction between the two ranks, from 1; 0 while the other
    /// words are being written.
    number: AtomicU64,
    bytes: AtomicU64,
    /// The code of a `Channel`.
    channel: AtomicU64,
}

const _: () = assert!(size_of::<LaunchLog>() <= LAUNCH_LOG_BYTES);

/// The record of one launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct LaunchRecord {
    description: Description,
    fingerprint: u64,
    channel: u64,
}

impl LaunchRecord {
    fn of(call: &CallSpec, channel: Channel) -> Self {
        let description = Description::of(call);
        Self { description, fingerprint: description.fingerprint(call), channel: channel as u64 }
    }
}

/// Returns how calls on the channel with this code run, for error messages.
fn channel_name(code: u64) -> &'static str {
    Channel::ALL.get(code as usize).map_or("on an unknown channel", |channel| channel.name())
}

fn launch_log(control: &ControlBlock, rank: Rank) -> &LaunchLog {
    // SAFETY: atomics only; every member uses this area as a launch log.
    unsafe { control.segment().at::<LaunchLog>(control.layout().launch_log(rank)) }
}

/// Reserves this rank's launch log.
pub fn reserve(control: &ControlBlock) -> Result<()> {
    let purpose = format_args!("launches of group \"{}\"", control.name());
    control.segment().reserve(
        control.layout().launch_log(control.rank()),
        LAUNCH_LOG_BYTES,
        purpose,
    )
}

/// Returns the word through which the ranks agree in [`super::zero_copy`].
pub(in crate::coll::cuda) fn zero_copy_word(control: &ControlBlock) -> &AtomicU64 {
    &launch_log(control, Rank(0)).zero_copy.0
}

/// Returns the slot of launch `number`.
pub(super) fn copy_slot(control: &ControlBlock, number: u64) -> &CopySlot {
    &launch_log(control, Rank(0)).copies[number as usize % COPY_SLOTS]
}

/// Returns the slot of the decision about `message`.
pub(super) fn message_slot<'a>(
    control: &'a ControlBlock,
    message: &MessageLaunch,
) -> &'a MessageSlot {
    let (me, peer) = (control.rank(), message.peer);
    let (from, to) = if message.send { (me, peer) } else { (peer, me) };
    let slots = &launch_log(control, from).message_modes[to.index()];
    &slots[message.number as usize % MESSAGE_RECORDS]
}

/// Returns how many of the messages in the direction of `message` the other end has launched.
pub(super) fn launched_by_other_end(control: &ControlBlock, message: &MessageLaunch) -> u64 {
    let counts = &launch_log(control, message.peer).messages[usize::from(message.send)];
    counts[control.rank().index()].load(Ordering::Acquire)
}

/// Returns the number of calls that `rank` has launched.
pub fn launched(control: &ControlBlock, rank: Rank) -> u64 {
    launch_log(control, rank).launched.load(Ordering::Acquire)
}

/// Returns the description of the last call that `rank` has launched. `None` if it has launched no
/// call, or if it launches `ENTRIES` more calls during the read.
pub fn last(control: &ControlBlock, rank: Rank) -> Option<Description> {
    let number = launched(control, rank);
    read(launch_log(control, rank), number).filter(|_| number > 0).map(|record| record.description)
}

/// Describes a rank's launches: "17 CUDA collectives launched, the last all_reduce of ..."
pub fn progress(control: &ControlBlock, rank: Rank) -> String {
    let last = last(control, rank).map_or_else(String::new, |last| format!(", the last {last}"));
    format!("{} CUDA collectives launched{last}", launched(control, rank))
}

/// Records that this rank launches `call` as its launch `number`, and compares it with launch
/// `number` of every rank that has reached it. Fails the group if they differ.
pub fn compare(
    control: &ControlBlock,
    number: u64,
    call: &CallSpec,
    channel: Channel,
) -> Result<()> {
    let record = LaunchRecord::of(call, channel);
    note(launch_log(control, control.rank()), number, &record, call);
    let me = (call.op == Collective::AllToAll).then_some(control.rank());
    for peer in control.peers() {
        let Some((other, lengths)) = read_with(launch_log(control, peer), number, me) else {
            // The count is read after the exit, so that it includes every launch of the peer.
            if let Some(how) = control.exit_reason(peer)
                && launched(control, peer) < number
            {
                let (them, me, count) = (
                    control.describe(peer),
                    control.describe(control.rank()),
                    launched(control, peer),
                );
                let text = format!(
                    "{them} {how} after {count} CUDA collectives; {me} called {} as #{number}",
                    record.description
                );
                return Err(control.fail(Error::peer(text)));
            }
            continue;
        };
        if other.fingerprint != record.fingerprint {
            let (mine, theirs) = (control.describe(control.rank()), control.describe(peer));
            let (place, place_of_peer) = (
                call_site_of(control, control.rank(), number, &record),
                call_site_of(control, peer, number, &other),
            );
            let alike =
                other.description.without_call_site() == record.description.without_call_site();
            let how = match (other.description.has_call_site(), record.description.has_call_site())
            {
                (with_call_site, also) if alike && with_call_site != also => {
                    "; one of them was started with SYMM_DEBUG=call_site, the other was not"
                }
                _ if alike && place == place_of_peer => ", with other lengths",
                _ => "",
            };
            let text = format!(
                "{mine} called {}{place} and {theirs} called {}{place_of_peer} as CUDA collective \
                 #{number} of group \"{}\"{how}",
                record.description,
                other.description,
                control.name(),
            );
            return Err(control.fail(Error::mismatch(text)));
        }
        if other.channel != record.channel {
            let (mine, theirs) = (control.describe(control.rank()), control.describe(peer));
            let text = format!(
                "{mine} called {} {} and {theirs} {}, as CUDA collective #{number} of \
                 group \"{}\"; all ranks must do alike",
                record.description,
                channel_name(record.channel),
                channel_name(other.channel),
                control.name()
            );
            return Err(control.fail(Error::mismatch(text)));
        }
        let pair = |from: Rank, sent: u64, to: Rank, expected: u64| {
            let (from, to, group) = (control.describe(from), control.describe(to), control.name());
            let text = format!(
                "{from} sends {sent} bytes to {to}, which expects {expected}, in all_to_all, CUDA \
                 collective #{number} of group \"{group}\""
            );
            Err(control.fail(Error::mismatch(text)))
        };
        let Some((sent, expected)) = lengths else { continue };
        let of = |spans: &[Span]| spans.get(peer.index()).map_or(0, |span| span.bytes as u64);
        let (to_it, from_it) = (of(&call.inputs), of(&call.outputs));
        if sent != from_it {
            return pair(peer, sent, control.rank(), from_it);
        }
        if to_it != expected {
            return pair(control.rank(), to_it, peer, expected);
        }
    }
    // Peers have read the cache line of the next entry. A write to it now, while no launch waits
    // for it, moves the line to this core.
    let next = &launch_log(control, control.rank()).entries[(number + 1) as usize % ENTRIES];
    next.number.store(0, Ordering::Relaxed);
    Ok(())
}

/// Returns the location of a call as text, such as " at train.py:12", if call sites are compared.
fn call_site_of(control: &ControlBlock, rank: Rank, number: u64, record: &LaunchRecord) -> String {
    let entry = &launch_log(control, rank).entries[number as usize % ENTRIES];
    if record.description.has_call_site() {
        format!(" at {}", entry.call_site.read())
    } else {
        String::new()
    }
}

/// Fails the group if a peer has launched a call that this rank, which has left, will never launch:
/// the peer would wait until its timeout.
pub fn abandon(control: &ControlBlock) {
    // Pairs with the fence in `note`: this rank sees the peer's launch, or the peer sees that this
    // rank has left.
    fence(Ordering::SeqCst);
    let own = launched(control, control.rank());
    if let Some((peer, count)) =
        control.peers().map(|peer| (peer, launched(control, peer))).find(|(_, count)| *count > own)
    {
        let (me, them) = (control.describe(control.rank()), control.describe(peer));
        let text = format!(
            "{me} left group \"{}\" after {own} CUDA collectives; {them} has launched {count}",
            control.name()
        );
        control.fail(Error::aborted(text));
    }
}

/// A send or receive that is about to be launched.
#[derive(Clone, Copy, Debug)]
pub struct MessageLaunch {
    /// True for a send, false for a receive.
    pub send: bool,
    /// The rank at the other end.
    pub peer: Rank,
    /// Number of the message in this direction between the two ranks, from 1.
    pub number: u64,
    /// Length of the message.
    pub bytes: u64,
    /// The channel of this end.
    pub channel: Channel,
}

/// Records `transfer`, and compares it with its other end if that has been launched. Fails the
/// group if the lengths differ, because the two ends would count different numbers of chunks, or if
/// the channels differ, because one end would receive another message on its channel.
pub fn compare_transfer(control: &ControlBlock, transfer: MessageLaunch) -> Result<()> {
    let MessageLaunch { send, peer, number, bytes, channel } = transfer;
    let me = control.rank();
    let (own, other) = (launch_log(control, me), launch_log(control, peer));
    let place = number as usize % MESSAGE_RECORDS;
    let (mine, theirs) = if send {
        (&own.sent[peer.index()][place], &other.received[me.index()][place])
    } else {
        (&own.received[peer.index()][place], &other.sent[me.index()][place])
    };
    mine.number.store(0, Ordering::Relaxed);
    fence(Ordering::Release);
    mine.bytes.store(bytes, Ordering::Relaxed);
    mine.channel.store(channel as u64, Ordering::Relaxed);
    mine.number.store(number, Ordering::Release);
    own.messages[usize::from(!send)][peer.index()].store(number, Ordering::Release);
    // If both ends are recorded at the same time, at least one reads the other's record.
    fence(Ordering::SeqCst);
    if theirs.number.load(Ordering::Acquire) != number {
        return Ok(());
    }
    let found = theirs.bytes.load(Ordering::Relaxed);
    let their_channel = theirs.channel.load(Ordering::Relaxed);
    fence(Ordering::Acquire);
    let same = (found, their_channel) == (bytes, channel as u64);
    if theirs.number.load(Ordering::Relaxed) != number || same {
        return Ok(());
    }
    let (sends, receives) =
        if send { (channel as u64, their_channel) } else { (their_channel, channel as u64) };
    if sends == receives {
        return Err(lengths_differ(control, &transfer, found));
    }
    let (from, to) = ends_of(control, &transfer);
    let what = message_name(control, number);
    let (sends, receives) = (channel_name(sends), channel_name(receives));
    let text = format!("{from} sends {what} {sends}, {to} receives it {receives}");
    Err(control.fail(Error::mismatch(text)))
}

/// Fails the group because the other end of `transfer` has a tensor of `found` bytes.
pub(super) fn lengths_differ(
    control: &ControlBlock,
    transfer: &MessageLaunch,
    found: u64,
) -> Error {
    let (sent, expected) =
        if transfer.send { (transfer.bytes, found) } else { (found, transfer.bytes) };
    let (from, to) = ends_of(control, transfer);
    let what = message_name(control, transfer.number);
    control.fail(Error::mismatch(format!(
        "{from} sends {sent} bytes to {to}, which expects {expected}, as {what}"
    )))
}

/// Returns the sender and the receiver of a message, for error messages.
fn ends_of(control: &ControlBlock, transfer: &MessageLaunch) -> (String, String) {
    let (me, peer) = (control.describe(control.rank()), control.describe(transfer.peer));
    if transfer.send { (me, peer) } else { (peer, me) }
}

fn message_name(control: &ControlBlock, number: u64) -> String {
    format!("CUDA message #{number} between them in group \"{}\"", control.name())
}

fn note(launch_log: &LaunchLog, number: u64, record: &LaunchRecord, call: &CallSpec) {
    let entry = &launch_log.entries[number as usize % ENTRIES];
    entry.number.store(0, Ordering::Relaxed);
    fence(Ordering::Release);
    entry.head.store(record.description.head, Ordering::Relaxed);
    entry.bytes.store(record.description.bytes, Ordering::Relaxed);
    entry.detail.store(record.description.detail, Ordering::Relaxed);
    entry.fingerprint.store(record.fingerprint, Ordering::Relaxed);
    entry.channel.store(record.channel, Ordering::Relaxed);
    if call.op == Collective::AllToAll {
        for (word, span) in
            entry.sends.iter().zip(&*call.inputs).chain(entry.receives.iter().zip(&*call.outputs))
        {
            word.store(span.bytes as u64, Ordering::Relaxed);
        }
    }
    if let Some(call_site) = call.call_site {
        entry.call_site.write_end(call_site.text());
    }
    entry.number.store(number, Ordering::Release);
    launch_log.launched.store(number, Ordering::Release);
    // If two ranks record the same number at the same time, at least one reads the other's record.
    fence(Ordering::SeqCst);
}

fn read(launch_log: &LaunchLog, number: u64) -> Option<LaunchRecord> {
    read_with(launch_log, number, None).map(|(record, _)| record)
}

/// Returns the record of launch `number`; for an all-to-all also the number of bytes to `rank` and
/// from it.
fn read_with(
    launch_log: &LaunchLog,
    number: u64,
    rank: Option<Rank>,
) -> Option<(LaunchRecord, Option<(u64, u64)>)> {
    let entry = &launch_log.entries[number as usize % ENTRIES];
    if entry.number.load(Ordering::Acquire) != number {
        return None;
    }
    let load = |word: &AtomicU64| word.load(Ordering::Relaxed);
    let description = Description {
        head: load(&entry.head),
        bytes: load(&entry.bytes),
        detail: load(&entry.detail),
    };
    let record = LaunchRecord {
        description,
        fingerprint: load(&entry.fingerprint),
        channel: load(&entry.channel),
    };
    let lengths =
        rank.map(|rank| (load(&entry.sends[rank.index()]), load(&entry.receives[rank.index()])));
    fence(Ordering::Acquire);
    (entry.number.load(Ordering::Relaxed) == number).then_some((record, lengths))
}

#[cfg(test)]
pub(crate) mod tests;
