//! The signal pads that this rank assigns to its windows.

use super::rendezvous_request::{DroppedWindows, REPORTED, RendezvousRequest};
use crate::error::Result;
use crate::mem::layout::MAX_RANKS;
use crate::symm_mem::Heap;
use crate::window::operators::agreement::CALL_BYTES;
use std::collections::{HashMap, VecDeque};

/// Minimum size of a segment from which pads are cut.
const SEGMENT: usize = 64 << 10;
/// Pads start at multiples of this, the size of a pair of cache lines.
const ALIGNMENT: usize = 128;

/// A pad of this rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Pad {
    /// Number of the window, the same on all ranks; 0 before the window is open.
    pub(super) number: u64,
    pub(super) address: u64,
    /// Size of the pad, whose last [`CALL_BYTES`] contain the rank's call.
    pub(super) bytes: usize,
}

impl Pad {
    /// Returns the size of the part of the pad that has the signals.
    pub(super) fn signal_bytes(&self) -> usize {
        self.bytes - CALL_BYTES
    }
}

/// The pads in use and the free pads. A pad is free once all ranks have dropped its window, because
/// a peer may signal there until then.
#[derive(Default)]
pub(super) struct Pads {
    /// The segments from which all pads were cut.
    segments: Vec<u64>,
    /// Free pads by size.
    free: HashMap<usize, Vec<u64>>,
    /// Unused end of the last segment: its address and size.
    rest: (u64, usize),
    windows: u64,
    /// Windows that some rank still uses, by number.
    living: HashMap<u64, OpenWindow>,
    /// Pads of windows that this rank has dropped but not yet reported.
    dropped: VecDeque<Pad>,
}

/// A window that some rank still uses.
#[derive(Default)]
struct OpenWindow {
    /// This rank's pad, once this rank has reported the drop.
    pad: Option<Pad>,
    /// A bit for each rank that has reported the drop. Repeated reports, and reports of unknown
    /// windows, change nothing.
    gone: u128,
}

// A bit for each rank.
const _: () = assert!(MAX_RANKS <= u128::BITS as usize);

impl Pads {
    /// Returns a pad with at least `bytes` bytes for signals from the heap; not necessarily clear.
    pub(super) fn take(&mut self, heap: &Heap, bytes: usize) -> Result<Pad> {
        let bytes = bytes.max(1).next_multiple_of(ALIGNMENT) + CALL_BYTES;
        if let Some(address) = self.free.get_mut(&bytes).and_then(Vec::pop) {
            return Ok(Pad { number: 0, address, bytes });
        }
        if self.rest.1 < bytes {
            let segment = bytes.max(SEGMENT);
            self.rest = (heap.allocate(segment)?, segment);
            self.segments.push(self.rest.0);
        }
        let address = self.rest.0;
        self.rest = (address + bytes as u64, self.rest.1 - bytes);
        Ok(Pad { number: 0, address, bytes })
    }

    /// Adds the pad that was taken last, whose window did not open, to the free pads again.
    pub(super) fn return_pad(&mut self, base: u64, own: &RendezvousRequest) {
        self.free.entry(own.pad_bytes as usize).or_default().push(base + own.pad);
    }

    /// Returns the dropped windows that this rank reports next. They are reported again until a
    /// window opens.
    pub(super) fn dropped(&self) -> DroppedWindows {
        let mut numbers = [0; REPORTED];
        numbers.iter_mut().zip(&self.dropped).for_each(|(number, pad)| *number = pad.number);
        DroppedWindows(numbers)
    }

    /// Notes that all ranks have opened a window with the offers `all`, this rank with `own`.
    /// Returns the window's pad.
    pub(super) fn opened(
        &mut self,
        all: &[RendezvousRequest],
        base: u64,
        own: &RendezvousRequest,
    ) -> Pad {
        for (rank, offer) in all.iter().enumerate() {
            for number in offer.dropped.0 {
                if let Some(living) = self.living.get_mut(&number) {
                    living.gone |= 1 << rank;
                }
            }
        }
        for number in own.dropped.0.into_iter().filter(|&number| number != 0) {
            if let Some((pad, living)) = self.dropped.pop_front().zip(self.living.get_mut(&number))
            {
                living.pad = Some(pad);
            }
        }
        let free = &mut self.free;
        self.living.retain(|_, living| {
            let pad = living.pad.filter(|_| living.gone.count_ones() as usize == all.len());
            if let Some(pad) = pad {
                free.entry(pad.bytes).or_default().push(pad.address);
            }
            pad.is_none()
        });
        self.windows += 1;
        self.living.insert(self.windows, OpenWindow::default());
        Pad { number: self.windows, address: base + own.pad, bytes: own.pad_bytes as usize }
    }

    /// Returns the segments from which the pads were cut, for the caller to release.
    pub(super) fn into_segments(self) -> Vec<u64> {
        self.segments
    }

    /// Notes that this rank has dropped the window with this pad.
    pub(super) fn record_dropped(&mut self, pad: Pad) {
        self.dropped.push_back(pad);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::symm_mem::{HOST, HeapAddress, of};

    const BYTES: usize = 512;

    /// The offer of a rank that has dropped the windows with these numbers.
    fn offer(pad: u64, dropped: [u64; REPORTED]) -> RendezvousRequest {
        let heap = HeapAddress { key: [0; 16], listener: [0; 16], span: 1 };
        let pad_bytes = (BYTES + CALL_BYTES) as u64;
        let dropped = DroppedWindows(dropped);
        RendezvousRequest {
            host: true,
            linked: true,
            exact: true,
            number: 1,
            bytes: 1,
            buffer: 0,
            pad,
            pad_bytes,
            segment: 1,
            dropped,
            heap,
        }
    }

    /// A rank with its pads, in a group of three.
    struct PadRank {
        heap: std::sync::Arc<Heap>,
        pads: Pads,
    }

    impl PadRank {
        /// Opens a window while the peers report these numbers, and returns its pad.
        fn open(&mut self, peers: [[u64; REPORTED]; 2]) -> Pad {
            let taken = self.pads.take(&self.heap, BYTES).expect("room");
            let own = offer(taken.address - self.heap.base(), self.pads.dropped().0);
            self.pads.opened(&[offer(0, peers[0]), own, offer(0, peers[1])], self.heap.base(), &own)
        }
    }

    #[test]
    fn a_pad_is_free_once_every_rank_has_let_go_however_often_one_says_so() {
        let mut rank = PadRank { heap: of(HOST).expect("the host has one"), pads: Pads::default() };
        let first = rank.open([[0; 4]; 2]);
        assert_eq!(first.number, 1);
        rank.pads.record_dropped(first);
        // This rank reports its own drop; one peer repeats itself and reports windows that never
        // existed.
        let mut held = vec![rank.open([[1, 1, 1, 1], [u64::MAX, 2, 3, 0]])];
        for _ in 0..3 {
            held.push(rank.open([[1, 1, 9, 0], [0; 4]]));
        }
        assert!(held.iter().all(|pad| pad.address != first.address), "rank 2 has it still");
        assert_eq!(rank.pads.living.len(), 5, "what never was is not remembered");
        let next = rank.open([[0; 4], [1, 0, 0, 0]]);
        assert_ne!(next.address, first.address, "taken before the ranks met");
        assert_eq!(rank.open([[1; 4], [1; 4]]).address, first.address);
        for segment in rank.pads.into_segments() {
            crate::symm_mem::release(segment).expect("its own");
        }
    }
}
