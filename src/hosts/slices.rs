//! Which part of a message goes by which rail, and with which operation hosts combine their partial results. Pure.

use crate::coll::cost::wire::Thresholds;
use crate::dtype::{DType, ReduceOp};
use crate::host_map::HostMap;
use crate::mem::span::Span;
use std::ops::Range;

/// Part of the longest piece that a piece has at least, where the slice is longer.
const LEAST_PIECE: usize = 4;

/// Turns that a long slice has at least: the first of them passes before anything is on the wire.
const TURNS: usize = 4;

/// Turns by which what is inside comes before, and after, what is between: so many pieces are on the wire meanwhile.
pub(super) const LAG: usize = 1;

/// Number of rails that carry a call of `bytes` bytes; the same on all ranks.
pub(super) fn rails(bytes: usize, layout: &HostMap, thresholds: &Thresholds) -> usize {
    if bytes <= thresholds.one_rail { 1 } else { layout.rails() }
}

/// `bytes` bytes of elements of `size` bytes in `parts` parts, as even as they can be, in order.
pub(super) fn slices(bytes: usize, size: usize, parts: usize) -> Vec<Range<usize>> {
    let count = bytes / size;
    let (each, more) = (count / parts, count % parts);
    let start = |part: usize| (part * each + part.min(more)) * size;
    (0..parts).map(|part| start(part)..start(part + 1)).collect()
}

/// The turns of a call: each of its slices goes piece by piece, one in each turn.
#[derive(Clone, Copy, Debug)]
pub(super) struct Turns {
    /// Bytes of the longest piece.
    pub(super) piece: usize,
    pub(super) count: usize,
}

impl Turns {
    /// The turns of a call whose longest slice has `longest` bytes.
    pub(super) fn of(longest: usize, thresholds: &Thresholds) -> Self {
        let most = thresholds.piece;
        Self::at_most(longest, longest.div_ceil(TURNS).next_multiple_of(64).clamp(most / LEAST_PIECE, most))
    }

    /// The turns of a call that brings up to `parts` messages of up to `longest` bytes by each rail.
    pub(super) fn of_messages(longest: usize, parts: usize, thresholds: &Thresholds) -> Self {
        let whole = Self::of(longest.saturating_mul(parts), thresholds).piece;
        Self::at_most(longest, (whole / parts.max(1)).next_multiple_of(64))
    }

    /// The turns of slices of up to `longest` bytes, in pieces of `piece`.
    pub(super) fn at_most(longest: usize, piece: usize) -> Self {
        Self { piece: piece.min(longest), count: longest.div_ceil(piece).max(1) }
    }

    /// The piece of `slice` in the turn `turn`; empty where it has ended.
    pub(super) fn piece(&self, slice: &Range<usize>, turn: usize) -> Range<usize> {
        let at = |turn: usize| slice.end.min(slice.start + turn * self.piece);
        at(turn)..at(turn + 1)
    }
}

/// Ranges of spans of `lengths` bytes, one behind the other.
pub(super) fn ranges(lengths: impl IntoIterator<Item = usize>) -> Vec<Range<usize>> {
    let mut end = 0;
    let mut next = |length| {
        end += length;
        end - length..end
    };
    lengths.into_iter().map(&mut next).collect()
}

/// What is in both ranges; empty at the begin of `b` where nothing is.
pub(super) fn overlap(a: &Range<usize>, b: &Range<usize>) -> Range<usize> {
    let start = a.start.max(b.start);
    let end = a.end.min(b.end);
    if start < end { start..end } else { b.start..b.start }
}

/// The part `range` of `span`.
pub(super) fn part(span: Span, range: &Range<usize>) -> Span {
    Span { addr: span.addr + range.start, bytes: range.len() }
}

/// The part of `span` at `range`, which counts from `begin` before the span.
pub(super) fn shifted(span: Span, range: &Range<usize>, begin: usize) -> Span {
    part(span, &(range.start - begin..range.end - begin))
}

/// The two levels of a reduction: the ranks of a host in their order, rounded once, then the hosts in theirs, rounded once.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Levels {
    /// Operation inside a host.
    pub(super) inner: ReduceOp,
    /// Operation between hosts.
    pub(super) outer: ReduceOp,
    /// Number by which an outer AVG divides.
    pub(super) divisor: usize,
    /// Whether an outer PREMUL_SUM weighs each host by its share of the ranks.
    weighted: bool,
}

impl Levels {
    pub(super) fn of(op: ReduceOp, dtype: DType, layout: &HostMap) -> Self {
        let same = |op| Self { inner: op, outer: op, divisor: layout.hosts(), weighted: false };
        match op {
            ReduceOp::Sum | ReduceOp::Product | ReduceOp::Min | ReduceOp::Max | ReduceOp::BitAnd | ReduceOp::BitOr | ReduceOp::BitXor => {
                same(op)
            }
            ReduceOp::PremulSum => Self { inner: op, ..same(ReduceOp::Sum) },
            // Integers wrap: the sum is that of one host, and is divided once.
            ReduceOp::Avg if is_integer(dtype) => Self { inner: ReduceOp::Sum, outer: op, divisor: layout.size(), weighted: false },
            // Averages of averages, which do not overflow where the sum of a host's ranks would.
            ReduceOp::Avg if (0..layout.hosts()).all(|host| layout.members(host).len() == layout.members(0).len()) => same(op),
            ReduceOp::Avg => Self { inner: op, outer: ReduceOp::PremulSum, divisor: layout.hosts(), weighted: true },
        }
    }

    /// Factor of `host` under an outer PREMUL_SUM.
    pub(super) fn factor(&self, host: usize, layout: &HostMap) -> f64 {
        if self.weighted { layout.members(host).len() as f64 / layout.size() as f64 } else { 1.0 }
    }
}

fn is_integer(dtype: DType) -> bool {
    match dtype {
        DType::U8 | DType::I8 | DType::I16 | DType::I32 | DType::I64 | DType::Bool | DType::U16 | DType::U32 | DType::U64 => true,
        DType::F16
        | DType::F32
        | DType::F64
        | DType::C64
        | DType::C128
        | DType::BF16
        | DType::F8E5M2
        | DType::F8E4M3FN
        | DType::F8E5M2FNUZ
        | DType::F8E4M3FNUZ => false,
    }
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
