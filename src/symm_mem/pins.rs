//! Segments that windows of this process still use: after they are freed, they stay until the last
//! of those windows is dropped.

use super::heap::{Heap, HeapState};
use crate::error::{Error, Result};
use std::sync::Arc;

/// A window's claim to memory of this process. While it exists, no segment that contains any of the
/// memory is unmapped, and its offset is not reused.
pub struct OwnPin {
    heap: Arc<Heap>,
    /// The offsets of the segments.
    offsets: Vec<usize>,
}

impl Heap {
    /// Pins the segments that contain the `bytes` bytes at `address`: they stay until the returned
    /// pin is dropped, even if they are freed meanwhile.
    pub fn show(self: &Arc<Self>, address: u64, bytes: usize) -> Result<OwnPin> {
        let gone = || {
            Error::value(format!(
                "the {bytes} bytes at {address:#x} are not symmetric memory, or have \
                 been given back"
            ))
        };
        let offset = address
            .checked_sub(self.base())
            .and_then(|offset| usize::try_from(offset).ok())
            .ok_or_else(gone)?;
        let mut state = self.state();
        let offsets = state.whole(offset, bytes.max(1)).ok_or_else(gone)?;
        for offset in &offsets {
            if let Some(segment) = state.segments.get_mut(offset) {
                segment.shown += 1;
            }
        }
        drop(state);
        Ok(OwnPin { heap: Arc::clone(self), offsets })
    }
}

impl HeapState {
    /// Returns the offsets of the segments that contain `bytes` from `offset`, none of them freed;
    /// `None` if there is a gap.
    fn whole(&self, offset: usize, bytes: usize) -> Option<Vec<usize>> {
        let end = offset.checked_add(bytes)?;
        let (first, _) = self.segments.range(..=offset).next_back()?;
        let mut reached = *first;
        let mut offsets = Vec::with_capacity(1);
        for (start, segment) in self.segments.range(first..) {
            if *start != reached || segment.piece.is_none() || segment.released {
                break;
            }
            offsets.push(*start);
            reached = start + segment.bytes;
            if reached >= end {
                return Some(offsets);
            }
        }
        None
    }
}

impl Drop for OwnPin {
    fn drop(&mut self) {
        let mut state = self.heap.state();
        for offset in &self.offsets {
            if let Some(segment) = state.segments.get_mut(offset) {
                segment.shown = segment.shown.saturating_sub(1);
            }
        }
        drop(state);
        self.heap.free_released();
    }
}
