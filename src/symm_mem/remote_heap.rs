//! A peer's heap as mapped in this process.

use super::addresses::AddressRange;
use crate::lock::{lock, unpoisoned};
use crate::sys::required::Required;
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use std::collections::HashMap;
use std::sync::Mutex;

/// The segments of one peer's heap, at the same offsets of a range of this process's addresses.
pub(super) struct RemoteHeap {
    span: usize,
    segments: Mutex<HashMap<u64, RemoteSegment>>,
    range: Box<dyn AddressRange>,
}

struct RemoteSegment {
    offset: usize,
    bytes: usize,
    phase: SegmentState,
    /// Number of windows that use it.
    pins: usize,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum SegmentState {
    Mapped,
    /// The owner has withdrawn the segment while a window uses it, or while a kernel of a failed
    /// group may still be using it.
    Kept,
    /// The segment was never mapped. The owner knows that, and withdraws it like any other.
    Refused,
}

/// The result of a peer's message. An error describes a violation of the protocol, after which the
/// link is not trusted.
pub(super) type ProtocolResult<T = ()> = std::result::Result<T, String>;

impl RemoteHeap {
    /// Makes a heap of `span` bytes with nothing mapped.
    pub(super) fn new(range: Box<dyn AddressRange>, span: usize) -> Self {
        Self { span, segments: Mutex::default(), range }
    }

    /// Returns the address at which the heap starts in this process.
    pub(super) fn base(&self) -> u64 {
        self.range.address()
    }

    /// Maps a segment that the peer advertises; returns whether that succeeded. `descriptor` is
    /// `None` if this process had no free number for it.
    pub(super) fn accept(
        &self,
        id: u64,
        offset: u64,
        bytes: u64,
        descriptor: Option<OwnedFd>,
    ) -> ProtocolResult<bool> {
        let inside = usize::try_from(offset).ok().zip(usize::try_from(bytes).ok());
        let inside = inside.filter(|(offset, bytes)| {
            *bytes > 0 && offset.checked_add(*bytes).is_some_and(|end| end <= self.span)
        });
        let Some((offset, bytes)) = inside else {
            return Err(format!("offered {bytes} bytes at {offset} of a heap of {}", self.span));
        };
        let mut segments = lock(&self.segments);
        if segments.contains_key(&id) {
            return Err(format!("offered segment {id} twice"));
        }
        let meets = |other: &RemoteSegment| {
            offset < other.offset + other.bytes && other.offset < offset + bytes
        };
        let overlaps = |phase| segments.values().any(|other| other.phase == phase && meets(other));
        if overlaps(SegmentState::Mapped) {
            return Err(format!("offered {bytes} bytes at {offset}, where it has offered others"));
        }
        let descriptor = descriptor.ok_or_else(|| Required::Receive.failed(Errno::MFILE));
        let mapped = !overlaps(SegmentState::Kept)
            && descriptor
                .and_then(|descriptor| self.range.import(offset, bytes, descriptor))
                .inspect_err(|error| {
                    log::warn!("a segment of a peer's symmetric memory cannot be mapped: {error}")
                })
                .is_ok();
        segments.insert(
            id,
            RemoteSegment {
                offset,
                bytes,
                phase: if mapped { SegmentState::Mapped } else { SegmentState::Refused },
                pins: 0,
            },
        );
        Ok(mapped)
    }

    /// Unmaps a segment, unless it must be `kept` for kernels that may still use it.
    pub(super) fn withdraw(&self, id: u64, kept: bool) -> ProtocolResult {
        let mut segments = lock(&self.segments);
        match segments.get_mut(&id).map(|segment| (segment.phase, segment)) {
            None | Some((SegmentState::Kept, _)) => {
                return Err(format!("withdrew segment {id}, which it has not offered"));
            }
            Some((SegmentState::Mapped, segment)) if kept || segment.pins > 0 => {
                segment.phase = SegmentState::Kept;
                return Ok(());
            }
            Some((SegmentState::Mapped, segment)) => {
                self.range.unmap(segment.offset, segment.bytes)
            }
            Some((SegmentState::Refused, _)) => {}
        }
        segments.remove(&id);
        Ok(())
    }

    /// Pins the segment that contains the `bytes` bytes at `offset`: it stays mapped until `unpin`.
    /// Returns the segment's number, or `None` if no mapped segment contains them.
    pub(super) fn pin(&self, offset: usize, bytes: usize) -> Option<u64> {
        let mut segments = lock(&self.segments);
        let holds = |segment: &RemoteSegment| {
            let within =
                offset.checked_sub(segment.offset).and_then(|start| start.checked_add(bytes));
            segment.phase == SegmentState::Mapped && within.is_some_and(|end| end <= segment.bytes)
        };
        let (id, segment) = segments.iter_mut().find(|(_, segment)| holds(segment))?;
        segment.pins += 1;
        Some(*id)
    }

    /// Ends a `pin`; returns true if only the pin kept the segment.
    pub(super) fn unpin(&self, id: u64) -> bool {
        lock(&self.segments).get_mut(&id).is_some_and(|segment| {
            segment.pins = segment.pins.saturating_sub(1);
            segment.pins == 0 && segment.phase == SegmentState::Kept
        })
    }

    /// Unmaps all segments that were kept and are not pinned.
    pub(super) fn unmap(&self) {
        self.unmap_unpinned(|phase| phase == SegmentState::Kept);
    }

    /// Unmaps all segments that are not pinned, because the peer has exited.
    pub(super) fn release_dead(&self) {
        self.unmap_unpinned(|phase| phase != SegmentState::Refused);
    }

    fn unmap_unpinned(&self, chosen: impl Fn(SegmentState) -> bool) {
        lock(&self.segments).retain(|_, segment| {
            let free = chosen(segment.phase) && segment.pins == 0;
            if free {
                self.range.unmap(segment.offset, segment.bytes);
            }
            !free
        });
    }

    /// Number of segments that are mapped here.
    #[cfg(test)]
    pub(super) fn mapped(&self) -> usize {
        lock(&self.segments)
            .values()
            .filter(|segment| segment.phase != SegmentState::Refused)
            .count()
    }
}

impl Drop for RemoteHeap {
    fn drop(&mut self) {
        let segments = unpoisoned(self.segments.get_mut());
        for segment in segments.values().filter(|segment| segment.phase != SegmentState::Refused) {
            self.range.unmap(segment.offset, segment.bytes);
        }
    }
}
