//! The symmetric memory of a group: every rank's heap, as mapped for this rank's device.

use super::reach::AcceptResult;
use super::{FailureCheck, Heap, HeapAddress, LinkRef, SegmentPin};
use crate::control::ControlBlock;
use crate::error::{Error, ErrorKind, Result};
use crate::mem::span::Span;
use crate::rank::Rank;
use crate::sync::timeout::CallTimeout;
use crate::sys::interrupt::SIGNAL_POLL;
use std::cell::OnceCell;
use std::iter;
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

/// How long the first call on a segment waits for peers to map it; after that the call is staged.
const SEGMENT_MAP_TIMEOUT: Duration = Duration::from_secs(1);
/// How long a rank waits for links that its peers have made, in all attempts together.
const HEAP_LINK_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum number of attempts to link. An attempt fails if the last group at the other end of a
/// link closes the link just as this rank finds it.
const ATTEMPTS: usize = 5;

/// Sends every rank's bytes to every rank, in rank order; all send the same number.
pub type AllGather<'a> = dyn Fn(&[u8]) -> Result<Vec<Vec<u8>>> + 'a;

/// A step that all ranks take: each gives bytes, or the reason why it cannot continue, and gets the
/// bytes of all.
pub type StepFn<'a> = dyn Fn(usize, Result<Vec<u8>>) -> Result<Vec<Vec<u8>>> + 'a;

/// Maximum length of the message of a rank that failed in a step.
const TEXT_BYTES: usize = 400;

/// Takes a step with all ranks: each gives `bytes`, or the reason why it cannot continue. Fails on
/// all ranks or none; `deed` completes the error message "rank … cannot …".
pub fn step(
    gather: &AllGather<'_>,
    control: &ControlBlock,
    deed: &str,
    bytes: usize,
    own: Result<Vec<u8>>,
) -> Result<Vec<Vec<u8>>> {
    let mut message = vec![0u8; 1 + bytes.max(TEXT_BYTES)];
    match &own {
        Ok(messages) => message[1..][..bytes].copy_from_slice(messages),
        Err(error) => {
            message[0] = error.kind as u8;
            let text = error.message.as_bytes();
            let length = text.len().min(TEXT_BYTES);
            message[1..][..length].copy_from_slice(&text[..length]);
        }
    }
    let all = gather(&message)?;
    own?;
    for (rank, message) in control.ranks().zip(&all) {
        if message[0] != 0 {
            let text = String::from_utf8_lossy(&message[1..]);
            let text = format!(
                "{} cannot {deed} group \"{}\": {}",
                control.describe(rank),
                control.name(),
                text.trim_end_matches('\0')
            );
            return Err(Error {
                kind: ErrorKind::from_peer(message[0]).unwrap_or(ErrorKind::Internal),
                message: text,
            });
        }
    }
    Ok(all.into_iter().map(|message| message[1..][..bytes].to_vec()).collect())
}

/// Returns half of the rest of `limit`: all ranks wait for this rank, and if it fails, the reason
/// must reach them before their limit.
pub fn wait_budget(limit: &CallTimeout) -> Duration {
    limit.remaining().unwrap_or_default() / 2
}

/// The reason why the ranks' heaps could not be linked.
pub type UnavailableReason = String;

/// Maximum length of a rank's reason in bytes.
const REASON_BYTES: usize = 200;

/// The symmetric memory of a group: every rank's heap, as mapped for this rank's device.
pub struct PeerHeaps {
    heap: Arc<Heap>,
    /// Links by rank; `None` for ranks of this process.
    holds: Vec<Option<LinkRef>>,
    /// Address at which each rank's heap starts in this process.
    pub bases: Vec<u64>,
}

/// The linked heaps of a group, for code that checks whether the group has any. Set once the
/// group's ranks have linked their heaps; empty again once the group's domains are dropped.
#[derive(Debug, Default)]
pub struct PeerHeapsCell(OnceLock<Weak<PeerHeaps>>);

impl PeerHeapsCell {
    /// Returns the heaps of the group, if its ranks have linked.
    pub fn get(&self) -> Option<Arc<PeerHeaps>> {
        self.0.get().and_then(Weak::upgrade)
    }

    /// Publishes `heaps`.
    pub fn set(&self, heaps: &Arc<PeerHeaps>) {
        self.0.get_or_init(|| Arc::downgrade(heaps));
    }
}

impl PeerHeaps {
    /// Links `heap` with the heaps of all ranks, at `addresses`, if every rank has one and linking
    /// succeeds within half of `limit`. Otherwise returns the reason. The result is the same on all
    /// ranks. `failed` reports failures of the group.
    pub fn link(
        control: &ControlBlock,
        step: &StepFn<'_>,
        heap: Option<&Arc<Heap>>,
        addresses: &[Option<HeapAddress>],
        failed: &FailureCheck,
        limit: &CallTimeout,
    ) -> Result<std::result::Result<Self, UnavailableReason>> {
        let known: Option<Vec<HeapAddress>> = addresses.iter().copied().collect();
        let (Some(addresses), Some(heap)) = (known, heap) else {
            let without = control.ranks().zip(addresses).find(|(_, address)| address.is_none());
            let without =
                without.map_or_else(|| "this rank".into(), |(rank, _)| control.describe(rank));
            return Ok(Err(format!("{without} has none to give")));
        };
        // One budget for all attempts: a retry replaces a link that was closing when it was found,
        // and this needs no wait. The steps, which wait for ranks that are late, do not use it up.
        let patience = wait_budget(limit).min(HEAP_LINK_TIMEOUT);
        let (mut left, first) = (patience, OnceCell::new());
        for _ in 0..ATTEMPTS {
            match Self::attempt(control, step, heap, &addresses, failed, &mut left)? {
                Ok(heaps) => return Ok(Ok(heaps)),
                Err(reason) => drop(first.set(reason)),
            }
        }
        Ok(Err(format!(
            "{} (waited {:.1} s at most)",
            first.into_inner().unwrap_or_default(),
            patience.as_secs_f32()
        )))
    }

    fn attempt(
        control: &ControlBlock,
        step: &StepFn<'_>,
        heap: &Arc<Heap>,
        addresses: &[HeapAddress],
        failed: &FailureCheck,
        patience: &mut Duration,
    ) -> Result<std::result::Result<Self, UnavailableReason>> {
        let me = control.rank().index();
        // The end with the lower key connects, and sends the link's number.
        let own = addresses[me].key;
        let mut holds: Vec<Option<LinkRef>> = addresses.iter().map(|_| None).collect();
        let mut numbers = vec![0u64; addresses.len()];
        // The reason why the first missing link is missing.
        let why = OnceCell::new();
        let noted = |error: &Error| drop(why.set(error.message.clone()));
        let attention = heap.attend().inspect_err(noted);
        let deadline = Instant::now() + *patience;
        for (rank, address) in addresses.iter().enumerate().filter(|(_, address)| own < address.key)
        {
            if let Ok((hold, number)) = heap.connect(address, failed, deadline).inspect_err(noted) {
                (holds[rank], numbers[rank]) = (Some(hold), number);
            }
        }
        *patience = deadline.saturating_duration_since(Instant::now());
        let messages = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
        let messages = step(8 * addresses.len(), Ok(messages))?;
        let deadline = Instant::now() + *patience;
        for (rank, address) in addresses.iter().enumerate().filter(|(_, address)| own > address.key)
        {
            let number = messages[rank]
                .chunks_exact(8)
                .nth(me)
                .and_then(|word| word.try_into().ok())
                .map_or(0, u64::from_le_bytes);
            if number != 0 && attention.is_ok() {
                holds[rank] =
                    heap.meet(address, number, failed, deadline).inspect_err(noted).ok().flatten();
                if holds[rank].is_none() {
                    drop(why.set("its peer's has not come, or has closed".into()));
                }
            }
        }
        *patience = deadline.saturating_duration_since(Instant::now());
        // For each rank a flag, set if this rank has no link to it; then the reason.
        let n = addresses.len();
        let mut lacking: Vec<u8> = (0..n)
            .map(|rank| u8::from(addresses[rank].key != own && holds[rank].is_none()))
            .collect();
        let why = why.into_inner().unwrap_or_else(|| "its peer made none".into());
        lacking.extend(why.bytes().chain(std::iter::repeat(0)).take(REASON_BYTES));
        let messages = step(n + REASON_BYTES, Ok(lacking))?;
        let first = control.ranks().zip(&messages).find_map(|(rank, messages)| {
            let (lacking, why) = messages.split_at(n);
            let other = control.ranks().zip(lacking).find(|(_, lacking)| **lacking == 1)?.0;
            let why = String::from_utf8_lossy(why);
            Some(format!(
                "{} has no link with {}: {}",
                control.describe(rank),
                control.describe(other),
                why.trim_end_matches('\0')
            ))
        });
        if let Some(reason) = first {
            log::info!("group \"{}\": {reason}", control.name());
            // Abandon each link that the peer on its other end does not have; the next attempt
            // makes a new one.
            let dead =
                holds.into_iter().zip(&messages).filter(|(_, lacking)| lacking.get(me) == Some(&1));
            dead.filter_map(|(hold, _)| hold).for_each(LinkRef::abandon);
            return Ok(Err(reason));
        }
        let bases =
            holds.iter().map(|hold| hold.as_ref().map_or(heap.base(), LinkRef::base)).collect();
        Ok(Ok(Self { heap: Arc::clone(heap), holds, bases }))
    }

    /// Makes the heaps of a group of one rank, which has no links.
    pub fn single_rank(heap: &Arc<Heap>) -> Self {
        Self { heap: Arc::clone(heap), holds: vec![None], bases: vec![heap.base()] }
    }

    /// Unmaps the segments of `rank`, whose process has exited, once all groups have called this.
    /// No kernel of this group may use them any more. Segments that a window uses stay mapped until
    /// it is dropped.
    pub fn release_dead(&self, rank: Rank) {
        if let Some(hold) = self.holds.get(rank.index()).and_then(Option::as_ref) {
            hold.release_dead();
        }
    }

    /// Returns this rank's heap.
    pub fn heap(&self) -> &Arc<Heap> {
        &self.heap
    }

    /// Pins the `bytes` bytes at `offset` in the heap of `rank`: they stay mapped while the
    /// returned pin exists. Returns `Some(None)` for a rank of this process, which needs no pin,
    /// and `None` if the bytes are not mapped.
    pub fn pin(&self, rank: usize, offset: u64, bytes: usize) -> Option<Option<SegmentPin>> {
        match self.holds.get(rank)? {
            Some(hold) => hold.pin(offset, bytes).map(Some),
            None => Some(None),
        }
    }

    /// Returns the offset of `span` in this rank's heap, if all of it is in one segment that every
    /// peer has mapped; waits as `reachable` does.
    pub fn offset(&self, span: Span) -> Option<u64> {
        let (heap, begin) = (&self.heap, span.addr as u64);
        if heap.is_empty() || !heap.contains(begin) {
            return None;
        }
        let (_, left) = heap.segment(begin)?;
        (span.bytes <= left && self.reachable(span)).then(|| begin - heap.base())
    }

    /// Returns the local address of the `bytes` bytes at `offset` in the heap of `rank`; they stay
    /// mapped while the pin exists. `None` if they are not in one mapped segment.
    pub fn reach(
        &self,
        rank: Rank,
        offset: u64,
        bytes: usize,
    ) -> Option<(u64, Option<SegmentPin>)> {
        let pin = self.pin(rank.index(), offset, bytes)?;
        let address = self.bases[rank.index()].checked_add(offset)?;
        let held =
            pin.is_some() || self.heap.segment(address).is_some_and(|(_, left)| bytes <= left);
        held.then_some((address, pin))
    }

    /// Returns true if any of `spans` starts in this rank's heap. Costs one relaxed load if nothing
    /// is allocated there.
    pub fn holds_any<'a>(&self, mut spans: impl Iterator<Item = &'a Span>) -> bool {
        !self.heap.is_empty()
            && spans.any(|span| span.bytes > 0 && self.heap.contains(span.addr as u64))
    }

    /// Returns true if all of `span` is in memory of this rank that every peer has mapped. Waits
    /// briefly, and only once, for peers that have not answered yet.
    pub fn reachable(&self, span: Span) -> bool {
        !self.heap.is_empty()
            && self.heap.reachable(
                span.addr as u64,
                span.bytes,
                self.holds.iter().flatten(),
                SEGMENT_MAP_TIMEOUT,
            )
    }

    /// Returns the ranks that have not mapped `span` by `deadline`; a window cannot do without any
    /// of them. Returns at once if a rank refuses. Calls `check` at least every [`SIGNAL_POLL`],
    /// and fails when it fails.
    pub fn unmapped_by(
        &self,
        span: Span,
        deadline: Instant,
        check: &dyn Fn() -> Result<()>,
    ) -> Result<Vec<Rank>> {
        let (address, bytes) = (span.addr as u64, span.bytes);
        let holds = || self.holds.iter().flatten();
        if holds().next().is_none() {
            return Ok(Vec::new());
        }
        let wanted = loop {
            check()?;
            let left = deadline.saturating_duration_since(Instant::now());
            match self.heap.await_answer(address, bytes, holds(), left.min(SIGNAL_POLL)) {
                AcceptResult::Yes => return Ok(Vec::new()),
                AcceptResult::Pending if !left.is_zero() => {}
                answer @ (AcceptResult::No | AcceptResult::Pending) => break answer,
            }
        };
        let answers = |hold: &LinkRef| {
            self.heap.await_answer(address, bytes, iter::once(hold), Duration::ZERO) == wanted
        };
        let without =
            self.holds.iter().enumerate().filter(|(_, hold)| hold.as_ref().is_some_and(answers));
        Ok(without.map(|(rank, _)| Rank(rank as u32)).collect())
    }
}

#[cfg(test)]
mod tests;
