//! The signal pads that this rank gives its windows.

use super::facts::Facts;
use crate::error::Result;
use crate::mem::heap::Heap;
use std::collections::{HashMap, VecDeque};

/// Pads are cut from segments of at least so many bytes.
const SEGMENT: usize = 64 << 10;
/// Pads begin on a pair of cache lines.
const ALIGNMENT: usize = 128;
/// Windows that a rank reports as dropped in one rendezvous.
pub(super) const REPORTED: usize = 4;

/// A pad of this rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Pad {
    /// Number of its window, the same on all ranks; 0 before there is one.
    number: u64,
    pub(super) address: u64,
    pub(super) bytes: usize,
}

/// Numbers of windows that a rank has let go of; 0: none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Dropped(pub(super) [u64; REPORTED]);

/// Pads in use and pads to be used again: those whose windows all ranks have let go of, for until then a peer may still signal there.
#[derive(Default)]
pub(super) struct Pads {
    /// By size.
    free: HashMap<usize, Vec<u64>>,
    /// What is left of the last segment: address, bytes.
    rest: (u64, usize),
    windows: u64,
    /// Windows that some ranks have let go of, with how many have not.
    leaving: HashMap<u64, (Option<Pad>, usize)>,
    /// What this rank has to report.
    dropped: VecDeque<Pad>,
}

impl Pads {
    /// A pad of at least `bytes` bytes from the heap; not necessarily clear.
    pub(super) fn take(&mut self, heap: &Heap, bytes: usize) -> Result<Pad> {
        let bytes = bytes.max(1).next_multiple_of(ALIGNMENT);
        if let Some(address) = self.free.get_mut(&bytes).and_then(Vec::pop) {
            return Ok(Pad { number: 0, address, bytes });
        }
        if self.rest.1 < bytes {
            let segment = bytes.max(SEGMENT);
            self.rest = (heap.allocate(segment)?, segment);
        }
        let address = self.rest.0;
        self.rest = (address + bytes as u64, self.rest.1 - bytes);
        Ok(Pad { number: 0, address, bytes })
    }

    /// No window came of what was taken last.
    pub(super) fn put_back(&mut self, base: u64, own: &Facts) {
        self.free.entry(own.pad_bytes as usize).or_default().push(base + own.pad);
    }

    /// What this rank reports next. It is told again until a window opens.
    pub(super) fn dropped(&self) -> Dropped {
        let mut numbers = [0; REPORTED];
        numbers.iter_mut().zip(&self.dropped).for_each(|(number, pad)| *number = pad.number);
        Dropped(numbers)
    }

    /// A window has been opened by all ranks, who said `all` of it, this rank `own`: its pad.
    pub(super) fn opened(&mut self, all: &[Facts], base: u64, own: &Facts) -> Pad {
        for number in all.iter().flat_map(|facts| facts.dropped.0).filter(|&number| number != 0) {
            self.leaving.entry(number).or_insert((None, all.len())).1 -= 1;
        }
        for number in own.dropped.0.into_iter().filter(|&number| number != 0) {
            if let Some(pad) = self.dropped.pop_front() {
                self.leaving.entry(number).or_insert((None, all.len())).0 = Some(pad);
            }
        }
        let free = &mut self.free;
        self.leaving.retain(|_, (pad, missing)| {
            let done = *missing == 0;
            if let Some(pad) = pad.filter(|_| done) {
                free.entry(pad.bytes).or_default().push(pad.address);
            }
            !done
        });
        self.windows += 1;
        Pad { number: self.windows, address: base + own.pad, bytes: own.pad_bytes as usize }
    }

    /// This rank has let go of the window with this pad.
    pub(super) fn note_dropped(&mut self, pad: Pad) {
        self.dropped.push_back(pad);
    }
}
