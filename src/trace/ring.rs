//! The last calls of a process, in a ring that any thread may write.
//!
//! Each slot has its own lock, held for one copy of an entry: two threads contend for it only if
//! they are a whole lap apart, or if one reads.

use super::entry::TraceEntry;
use crate::lock::lock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};

/// Number of calls that are kept.
pub const KEPT: usize = 2000;

pub(super) struct EntryRing {
    slots: Box<[Mutex<TraceEntry>]>,
    made: AtomicU64,
}

impl EntryRing {
    pub(super) fn new() -> Self {
        Self {
            slots: (0..KEPT).map(|_| Mutex::new(TraceEntry::EMPTY)).collect(),
            made: AtomicU64::new(0),
        }
    }

    /// Reserves numbers for `count` entries and returns the first; the others follow it.
    pub(super) fn take(&self, count: usize) -> u64 {
        self.made.fetch_add(count as u64, Ordering::Relaxed) + 1
    }

    /// Returns the number of entries so far.
    pub(super) fn made(&self) -> u64 {
        self.made.load(Ordering::Relaxed)
    }

    fn slot(&self, number: u64) -> MutexGuard<'_, TraceEntry> {
        lock(&self.slots[(number % KEPT as u64) as usize])
    }

    /// Stores `entry`, whose number is from `take`.
    #[inline(always)]
    pub(super) fn put(&self, entry: TraceEntry) {
        let mut slot = self.slot(entry.number);
        // A thread that slept for a whole lap must not overwrite a younger entry.
        if slot.number < entry.number {
            *slot = entry;
        }
    }

    /// Changes the entry `number`, if it is still kept.
    pub(super) fn change(&self, number: u64, change: impl FnOnce(&mut TraceEntry)) {
        let mut slot = self.slot(number);
        if slot.number == number {
            change(&mut slot);
        }
    }

    /// Returns the entries that are kept, oldest first. Calls continue meanwhile.
    pub(super) fn copy(&self) -> Vec<TraceEntry> {
        let mut all: Vec<TraceEntry> = (0..KEPT as u64)
            .map(|index| *self.slot(index))
            .filter(|entry| entry.number != 0)
            .collect();
        all.sort_unstable_by_key(|entry| entry.number);
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::entry::EntryState;

    fn entry(number: u64) -> TraceEntry {
        TraceEntry { number, ..TraceEntry::EMPTY }
    }

    #[test]
    fn the_last_calls_are_kept_in_order() {
        let ring = EntryRing::new();
        for _ in 0..KEPT + 10 {
            let number = ring.take(1);
            ring.put(entry(number));
        }
        let kept: Vec<u64> = ring.copy().iter().map(|entry| entry.number).collect();
        let expected: Vec<u64> = (11..=KEPT as u64 + 10).collect();
        assert_eq!(kept, expected);
        assert_eq!(ring.made(), KEPT as u64 + 10);
    }

    #[test]
    fn what_was_overwritten_is_neither_changed_nor_put_back() {
        let ring = EntryRing::new();
        let late = ring.take(1);
        ring.put(entry(late + KEPT as u64));
        ring.put(entry(late));
        ring.change(late, |entry| entry.state = EntryState::Completed);
        let kept = ring.copy();
        assert_eq!(
            (kept.len(), kept[0].number, kept[0].state),
            (1, late + KEPT as u64, EntryState::Scheduled)
        );
        ring.change(late + KEPT as u64, |entry| entry.state = EntryState::Completed);
        assert_eq!(ring.copy()[0].state, EntryState::Completed);
    }

    #[test]
    fn threads_write_and_read_at_once() {
        let ring = EntryRing::new();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..5000 {
                        let number = ring.take(1);
                        ring.put(TraceEntry { sequence: number, ..entry(number) });
                        ring.change(number, |entry| entry.ended = number);
                    }
                });
            }
            for _ in 0..20 {
                let kept = ring.copy();
                assert!(kept.windows(2).all(|pair| pair[0].number < pair[1].number));
                assert!(kept.iter().all(|entry| entry.sequence == entry.number
                    && (entry.ended == 0 || entry.ended == entry.number)));
            }
        });
        assert_eq!(ring.copy().len(), KEPT);
    }
}
