//! Counts of all calls of a process, by operation and size, which `SYMM_STATS_INTERVAL` shows at
//! the end of a job.
//!
//! Size classes are powers of two, so the memory is bounded, however long the job runs and however
//! many sizes it uses. Nothing is counted unless `SYMM_STATS_INTERVAL` requests it.

use super::clock::{self, WallClock};
use super::entry::{CallKind, CallTarget, EntryState, TraceEntry};
use crate::op::Collective;
use serde::Serialize;
use std::sync::atomic::{AtomicU64, Ordering};

/// Number of operations: the collectives, send and receive.
const OPS: usize = Collective::ALL.len() + 2;
/// Number of size classes: 0 bytes, and 1 byte to 2^64.
const CLASSES: usize = 66;

/// Counts of one operation, size class and device type.
#[derive(Default)]
struct Cell {
    calls: AtomicU64,
    bytes: AtomicU64,
    /// Number of calls whose time is known, and their total time in nanoseconds.
    timed: AtomicU64,
    spent: AtomicU64,
    longest: AtomicU64,
}

/// The counts of a process.
pub(super) struct Totals {
    cells: Box<[Cell]>,
    begun: u64,
}

/// A cell with a count above 0, as listed in the dump.
#[derive(Serialize)]
struct TotalsLine {
    op: &'static str,
    device: &'static str,
    /// Upper bound of the size class.
    size: u64,
    calls: u64,
    bytes: u64,
    timed: u64,
    ns: u64,
    longest_ns: u64,
}

/// All counts, as in the dump.
#[derive(Serialize)]
pub(super) struct TotalsReport {
    since_ns: Option<u64>,
    lines: Vec<TotalsLine>,
}

/// Returns the class of a size: 0 for no bytes, 1 for one byte, and n above 1 for sizes from
/// 2^(n-2) + 1 to 2^(n-1).
fn class(size: u64) -> usize {
    size.checked_sub(1).map_or(0, |below| 1 + (u64::BITS - below.leading_zeros()) as usize)
}

fn name(op: usize) -> &'static str {
    Collective::ALL
        .get(op)
        .map_or(if op == Collective::ALL.len() { "send" } else { "recv" }, |op| op.name())
}

impl Totals {
    pub(super) fn new() -> Self {
        Self {
            cells: (0..OPS * CLASSES * 2).map(|_| Cell::default()).collect(),
            begun: clock::now(),
        }
    }

    /// Returns the cell of `entry`, of a group of `world` ranks, and the call's size as nccl-tests
    /// counts it.
    fn cell(&self, entry: &TraceEntry, world: usize) -> (&Cell, u64) {
        let (op, shards) = match entry.what {
            CallKind::Collective { op, .. } => (
                op as usize,
                if matches!(op, Collective::Gather | Collective::Scatter) {
                    world as u64
                } else {
                    1
                },
            ),
            CallKind::Send { .. } => (Collective::ALL.len(), 1),
            CallKind::Receive { .. } => (Collective::ALL.len() + 1, 1),
        };
        let size = (entry.elements() * entry.dtype.size() as u64).saturating_mul(shards);
        let cuda = usize::from(entry.place != CallTarget::Cpu);
        (&self.cells[(op * CLASSES + class(size)) * 2 + cuda], size)
    }

    /// Counts a new call.
    pub(super) fn made(&self, entry: &TraceEntry, world: usize) {
        let (cell, size) = self.cell(entry, world);
        cell.calls.fetch_add(1, Ordering::Relaxed);
        cell.bytes.fetch_add(size, Ordering::Relaxed);
    }

    /// Adds the time of a call that has ended. Failed calls and calls on a GPU have no time.
    pub(super) fn ended(&self, entry: &TraceEntry, world: usize) {
        let known = entry.state == EntryState::Completed
            && entry.started != 0
            && entry.place == CallTarget::Cpu;
        if known {
            let (cell, _) = self.cell(entry, world);
            let spent = entry.ended.saturating_sub(entry.started);
            cell.timed.fetch_add(1, Ordering::Relaxed);
            cell.spent.fetch_add(spent, Ordering::Relaxed);
            cell.longest.fetch_max(spent, Ordering::Relaxed);
        }
    }

    /// Returns the counts so far. Calls continue meanwhile.
    pub(super) fn report(&self, day: WallClock) -> TotalsReport {
        let line = |(index, cell): (usize, &Cell)| {
            let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
            let (op, class) = (index / 2 / CLASSES, index / 2 % CLASSES);
            TotalsLine {
                op: name(op),
                device: if index % 2 == 1 { "cuda" } else { "cpu" },
                size: class
                    .checked_sub(1)
                    .map_or(0, |bits| 1u64.checked_shl(bits as u32).unwrap_or(u64::MAX)),
                calls: read(&cell.calls),
                bytes: read(&cell.bytes),
                timed: read(&cell.timed),
                ns: read(&cell.spent),
                longest_ns: read(&cell.longest),
            }
        };
        let lines = self.cells.iter().enumerate().map(line).filter(|line| line.calls > 0).collect();
        TotalsReport { since_ns: day.of(self.begun), lines }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_are_powers_of_two() {
        let classes = [0, 1, 2, 3, 4, 5, 8, 9, 1 << 20, (1 << 20) + 1, u64::MAX].map(class);
        assert_eq!(classes, [0, 1, 2, 3, 3, 4, 4, 5, 21, 22, CLASSES - 1]);
    }

    #[test]
    fn operations_have_names() {
        let names: Vec<&str> = (0..OPS).map(name).collect();
        assert_eq!(
            (names[0], names[Collective::ALL.len() - 1]),
            ("barrier", "all_reduce_add_rms_norm")
        );
        assert_eq!(names[Collective::ALL.len()..], ["send", "recv"]);
    }
}
