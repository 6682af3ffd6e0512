//! The part of a message on each rail, and its pieces. Pure.

use crate::coll::cost::wire::Thresholds;
use crate::host_map::HostMap;
use crate::mem::span::Span;
use std::ops::Range;

/// Part of the longest piece that a piece has at least, where the slice is longer.
const LEAST_PIECE: usize = 4;

/// Turns that a long slice has at least: the first of them passes before anything is on the wire.
const TURNS: usize = 4;

/// Number of rails that carry a call of `bytes` bytes; the same on all ranks.
pub(crate) fn rails(bytes: usize, layout: &HostMap, thresholds: &Thresholds) -> usize {
    if bytes <= thresholds.one_rail { 1 } else { layout.rails() }
}

/// `bytes` bytes of elements of `size` bytes in `parts` parts, as even as they can be, in order.
pub(crate) fn slices(bytes: usize, size: usize, parts: usize) -> Vec<Range<usize>> {
    let count = bytes / size;
    let (each, more) = (count / parts, count % parts);
    let start = |part: usize| (part * each + part.min(more)) * size;
    (0..parts).map(|part| start(part)..start(part + 1)).collect()
}

/// The turns of a call: each of its slices goes piece by piece, one in each turn.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Turns {
    /// Bytes of the longest piece.
    pub(crate) piece: usize,
    pub(crate) count: usize,
}

impl Turns {
    /// The turns of a call whose longest slice has `longest` bytes.
    pub(crate) fn of(longest: usize, thresholds: &Thresholds) -> Self {
        let most = thresholds.piece;
        Self::at_most(longest, longest.div_ceil(TURNS).next_multiple_of(64).clamp(most / LEAST_PIECE, most))
    }

    /// The turns of a call that brings up to `parts` messages of up to `longest` bytes by each rail.
    pub(crate) fn of_messages(longest: usize, parts: usize, thresholds: &Thresholds) -> Self {
        let whole = Self::of(longest.saturating_mul(parts), thresholds).piece;
        Self::at_most(longest, (whole / parts.max(1)).next_multiple_of(64))
    }

    /// The turns of slices of up to `longest` bytes, in pieces of `piece`.
    pub(crate) fn at_most(longest: usize, piece: usize) -> Self {
        Self { piece: piece.min(longest), count: longest.div_ceil(piece.max(1)).max(1) }
    }

    /// The piece of `slice` in the turn `turn`; empty where it has ended.
    pub(crate) fn piece(&self, slice: &Range<usize>, turn: usize) -> Range<usize> {
        let at = |turn: usize| slice.end.min(slice.start + turn * self.piece);
        at(turn)..at(turn + 1)
    }
}

/// Ranges of spans of `lengths` bytes, one behind the other.
pub(crate) fn ranges(lengths: impl IntoIterator<Item = usize>) -> Vec<Range<usize>> {
    let mut end = 0;
    let mut next = |length| {
        end += length;
        end - length..end
    };
    lengths.into_iter().map(&mut next).collect()
}

/// What is in both ranges; empty at the begin of `b` where nothing is.
pub(crate) fn overlap(a: &Range<usize>, b: &Range<usize>) -> Range<usize> {
    let start = a.start.max(b.start);
    let end = a.end.min(b.end);
    if start < end { start..end } else { b.start..b.start }
}

/// The part `range` of `span`.
pub(crate) fn part(span: Span, range: &Range<usize>) -> Span {
    Span { addr: span.addr + range.start, bytes: range.len() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn slices_and_pieces_cover_everything_once(count in 0usize..100_000_000, size in 0usize..5, parts in 1usize..20, grains in 1usize..300) {
            let (size, mut end) = (1 << size, 0);
            let thresholds = Thresholds { piece: grains * 4096, ..Thresholds::USUAL };
            let slices = slices(count * size, size, parts);
            prop_assert_eq!(slices.len(), parts);
            for slice in &slices {
                prop_assert!(slice.start == end && slice.end.is_multiple_of(size) && slice.len() <= slices[0].len());
                end = slice.end;
            }
            prop_assert_eq!(end, count * size);
            for turns in [Turns::of(slices[0].len(), &thresholds), Turns::of_messages(slices[0].len(), parts, &thresholds)] {
                for slice in &slices {
                    end = slice.start;
                    for piece in (0..turns.count).map(|turn| turns.piece(slice, turn)) {
                        prop_assert!(piece.start == end && piece.len() <= turns.piece && piece.end.is_multiple_of(size));
                        end = piece.end;
                    }
                    prop_assert_eq!(end, slice.end);
                }
            }
        }

        #[test]
        fn overlaps_are_what_both_have(a in 0usize..50, b in 0usize..50, c in 0usize..50, d in 0usize..50) {
            let (one, other) = (a.min(b)..a.max(b), c.min(d)..c.max(d));
            let both = overlap(&one, &other);
            prop_assert!((0..50).all(|at| both.contains(&at) == (one.contains(&at) && other.contains(&at))));
            prop_assert!(both.start >= other.start && both.end <= other.end);
        }
    }
}
