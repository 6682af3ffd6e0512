//! The slice of a message on each rail, and its chunks. Pure.

use crate::coll::cost::network::RailThresholds;
use crate::mem::span::Span;
use crate::node_map::NodeMap;
use std::ops::Range;

/// A chunk has at least 1/4 of the maximum length of chunks, unless its whole slice is shorter.
const MIN_CHUNK_FRACTION: usize = 4;

/// Minimum number of pipeline steps of a long slice; nothing is on the wire during the first step.
const MIN_STEPS: usize = 4;

/// Returns the number of rails that carry a call of `bytes` bytes; the same on all ranks.
pub(crate) fn rails(bytes: usize, layout: &NodeMap, thresholds: &RailThresholds) -> usize {
    if bytes <= thresholds.multi_rail_bytes { 1 } else { layout.num_rails() }
}

/// Divides `bytes` bytes of elements of `size` bytes into `parts` ranges in order, as evenly as
/// possible.
pub(crate) fn slices(bytes: usize, size: usize, parts: usize) -> Vec<Range<usize>> {
    let count = bytes / size;
    let (each, more) = (count / parts, count % parts);
    let start = |part: usize| (part * each + part.min(more)) * size;
    (0..parts).map(|part| start(part)..start(part + 1)).collect()
}

/// The pipeline steps of a call: one chunk of each slice moves in each step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ChunkSchedule {
    /// Length of the longest chunk in bytes.
    pub(crate) piece: usize,
    pub(crate) count: usize,
}

impl ChunkSchedule {
    /// Returns the steps of a call whose longest slice has `longest` bytes.
    pub(crate) fn of(longest: usize, thresholds: &RailThresholds) -> Self {
        let most = thresholds.chunk_bytes;
        Self::at_most(
            longest,
            longest.div_ceil(MIN_STEPS).next_multiple_of(64).clamp(most / MIN_CHUNK_FRACTION, most),
        )
    }

    /// Returns the steps of a call that moves up to `parts` messages of up to `longest` bytes over
    /// each rail.
    pub(crate) fn of_messages(longest: usize, parts: usize, thresholds: &RailThresholds) -> Self {
        let whole = Self::of(longest.saturating_mul(parts), thresholds).piece;
        Self::at_most(longest, (whole / parts.max(1)).next_multiple_of(64))
    }

    /// Returns the steps of slices of up to `longest` bytes, in chunks of up to `piece` bytes.
    pub(crate) fn at_most(longest: usize, piece: usize) -> Self {
        Self { piece: piece.min(longest), count: longest.div_ceil(piece.max(1)).max(1) }
    }

    /// Returns the chunk of `slice` in step `turn`; empty after the end of the slice.
    pub(crate) fn piece(&self, slice: &Range<usize>, turn: usize) -> Range<usize> {
        let at = |turn: usize| slice.end.min(slice.start + turn * self.piece);
        at(turn)..at(turn + 1)
    }
}

/// Returns the ranges of parts with these `lengths` that follow each other, from 0.
pub(crate) fn ranges(lengths: impl IntoIterator<Item = usize>) -> Vec<Range<usize>> {
    let mut end = 0;
    let mut next = |length| {
        end += length;
        end - length..end
    };
    lengths.into_iter().map(&mut next).collect()
}

/// Returns the intersection of both ranges, or an empty range at the start of `b`.
pub(crate) fn overlap(a: &Range<usize>, b: &Range<usize>) -> Range<usize> {
    let start = a.start.max(b.start);
    let end = a.end.min(b.end);
    if start < end { start..end } else { b.start..b.start }
}

/// Returns the part `range` of `span`.
pub(crate) fn part(span: Span, range: &Range<usize>) -> Span {
    Span { addr: span.addr + range.start, bytes: range.len() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn slices_and_pieces_cover_everything_once(
            count in 0usize..100_000_000, size in 0usize..5, parts in 1usize..20,
            grains in 1usize..300
        ) {
            let (size, mut end) = (1 << size, 0);
            let thresholds =
                RailThresholds { chunk_bytes: grains * 4096, ..RailThresholds::DEFAULT };
            let slices = slices(count * size, size, parts);
            prop_assert_eq!(slices.len(), parts);
            for slice in &slices {
                prop_assert!(slice.start == end && slice.end.is_multiple_of(size));
                prop_assert!(slice.len() <= slices[0].len());
                end = slice.end;
            }
            prop_assert_eq!(end, count * size);
            for turns in [
                ChunkSchedule::of(slices[0].len(), &thresholds),
                ChunkSchedule::of_messages(slices[0].len(), parts, &thresholds),
            ] {
                for slice in &slices {
                    end = slice.start;
                    for piece in (0..turns.count).map(|turn| turns.piece(slice, turn)) {
                        prop_assert!(piece.start == end && piece.len() <= turns.piece);
                        prop_assert!(piece.end.is_multiple_of(size));
                        end = piece.end;
                    }
                    prop_assert_eq!(end, slice.end);
                }
            }
        }

        #[test]
        fn overlaps_are_what_both_have(
            a in 0usize..50, b in 0usize..50, c in 0usize..50, d in 0usize..50
        ) {
            let (one, other) = (a.min(b)..a.max(b), c.min(d)..c.max(d));
            let both = overlap(&one, &other);
            let in_both = |at: &usize| one.contains(at) && other.contains(at);
            prop_assert!((0..50).all(|at| both.contains(&at) == in_both(&at)));
            prop_assert!(both.start >= other.start && both.end <= other.end);
        }
    }
}
