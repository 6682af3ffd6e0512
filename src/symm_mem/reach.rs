//! Waiting for peers to map memory of this process's heap.

use super::heap::{Heap, HeapState};
use super::link::{HeapLink, LinkRef};
use crate::lock::unpoisoned;
use std::sync::{Arc, MutexGuard};
use std::time::{Duration, Instant};

/// The answer of peers to a range of memory.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum AcceptResult {
    Yes,
    No,
    Pending,
}

impl Heap {
    /// Returns true if all of `bytes` at `address` are in segments that the peers of all `holds`
    /// have accepted. Waits up to `patience` for outstanding answers, but only once for a peer that
    /// does not answer.
    pub fn reachable<'a>(
        &self,
        address: u64,
        bytes: usize,
        holds: impl Iterator<Item = &'a LinkRef> + Clone,
        patience: Duration,
    ) -> bool {
        let links = || holds.clone().map(LinkRef::link);
        let answer = |state: &HeapState| self.answer(state, address, bytes, links());
        let first = answer(&self.state());
        if first != AcceptResult::Pending || patience.is_zero() {
            return first == AcceptResult::Yes;
        }
        self.wait(Instant::now() + patience, |state| {
            let pending = |link: &&Arc<HeapLink>| {
                let link = std::iter::once(*link);
                self.answer(state, address, bytes, link) == AcceptResult::Pending
            };
            links().filter(pending).cloned().collect()
        });
        answer(&self.state()) == AcceptResult::Yes
    }

    /// Returns the answer of the peers of all `holds` to the `bytes` at `address`. If an answer is
    /// outstanding, waits up to `limit` for news of any segment, also for peers that were late
    /// before.
    pub(super) fn await_answer<'a>(
        &self,
        address: u64,
        bytes: usize,
        holds: impl Iterator<Item = &'a LinkRef> + Clone,
        limit: Duration,
    ) -> AcceptResult {
        let answer = |state: &MutexGuard<'_, HeapState>| {
            self.answer(state, address, bytes, holds.clone().map(LinkRef::link))
        };
        let state = self.state();
        match answer(&state) {
            AcceptResult::Pending => answer(&unpoisoned(self.changed.wait_timeout(state, limit)).0),
            known @ (AcceptResult::Yes | AcceptResult::No) => known,
        }
    }

    /// Returns the answer of the peers at the other ends of `links`. A closed link is a refusal.
    fn answer<'a>(
        &self,
        state: &HeapState,
        address: u64,
        bytes: usize,
        links: impl Iterator<Item = &'a Arc<HeapLink>> + Clone,
    ) -> AcceptResult {
        if !self.contains(address) || links.clone().any(|link| link.is_closed()) {
            return AcceptResult::No;
        }
        state.accepted((address - self.base()) as usize, bytes, links)
    }
}

impl HeapState {
    /// Returns whether the peers at the other ends of `links` have accepted the whole range.
    fn accepted<'a>(
        &self,
        offset: usize,
        bytes: usize,
        links: impl Iterator<Item = &'a Arc<HeapLink>>,
    ) -> AcceptResult {
        let Some(end) = offset.checked_add(bytes) else { return AcceptResult::No };
        // Follow the segments without a gap, from the one that contains the first byte.
        let start = self.segments.range(..=offset).next_back().map_or(offset, |(start, _)| *start);
        let mut held = Vec::with_capacity(1);
        let mut reached = start;
        for (start, segment) in self.segments.range(start..) {
            if *start != reached || segment.piece.is_none() || segment.is_complete() {
                break;
            }
            held.push(segment);
            reached = start + segment.bytes;
            if reached >= end {
                break;
            }
        }
        if reached < end || held.is_empty() {
            return AcceptResult::No;
        }
        let mut answer = AcceptResult::Yes;
        for link in links {
            for segment in &held {
                match segment.answers.get(&link.number) {
                    Some(true) => {}
                    Some(false) => return AcceptResult::No,
                    None => answer = AcceptResult::Pending,
                }
            }
        }
        answer
    }
}
