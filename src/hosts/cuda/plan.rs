//! Plan of a collective on the GPUs of several hosts: its steps in stream order. Pure.
//!
//! The sums are those of `hosts::reduce`: over the ranks of each host in their order, rounded once, then over the hosts in theirs, rounded
//! once; where partial results are float32, inputs are widened before and the sum is rounded once. Which rail carries which part, and in
//! which chunk, only says who does it, so the bits are those of CPU tensors.

use super::backends::Transfer;
use super::cast::Cast;
use super::steps::{Halves, Step, overlapped};
use super::sum::UNIT;
use crate::coll::call::{Call, Op, Span, Spec};
use crate::coll::cost::wire::Thresholds;
use crate::dtype::{DType, ReduceOp};
use crate::host_map::HostMap;
use crate::hosts::chosen::Chosen;
use crate::hosts::slices::{self, Turns, overlap, part, rails, ranges, shifted};
use crate::hosts::step::NOTHING;
use crate::rank::Rank;
use std::ops::Range;

mod movements;
mod reductions;

/// Steps in stream order, and how much memory they need beside the call's.
#[derive(Debug)]
pub(super) struct Plan {
    pub(super) steps: Vec<Step>,
    pub(super) memory: usize,
}

/// The plan of `rank` for `call`, which goes by `chosen`; its memory begins at `base`, a multiple of 16.
pub(super) fn of(call: &Spec, layout: &HostMap, chosen: Chosen, rank: Rank, base: usize) -> Plan {
    let Chosen { partials, cuda: thresholds, .. } = chosen;
    let partial = if call.op.reduces() { partials.dtype(call.reduce_op, call.dtype) } else { call.dtype };
    let mut planner = Planner { call, layout, thresholds, partial, rank, base, used: 0, most: 0, half: 0, steps: Vec::new() };
    match call.op {
        Op::Barrier => planner.barrier(),
        Op::Broadcast => planner.broadcast(),
        Op::AllReduce | Op::Reduce => planner.all_reduce(),
        Op::AllGather => planner.all_gather(),
        Op::ReduceScatter => planner.reduce_scatter(),
        Op::Gather | Op::Scatter | Op::AllToAll => planner.exchange(),
        // Refused before (`refuse_norms`).
        Op::AllReduceAddRmsNorm => {}
    }
    Plan { steps: planner.steps, memory: planner.most }
}

/// Whether a call needs the backend of all ranks; the same on all of them.
pub(super) fn exchanges(op: Op) -> bool {
    match op {
        Op::Gather | Op::Scatter | Op::AllToAll => true,
        Op::Barrier | Op::Broadcast | Op::AllReduce | Op::Reduce | Op::AllGather | Op::ReduceScatter => false,
        Op::AllReduceAddRmsNorm => false,
    }
}

fn padded(bytes: usize) -> usize {
    bytes.next_multiple_of(UNIT)
}

/// `bytes` bytes in `parts` parts, as even as they can be where each begins at a multiple of 16 bytes, in order.
fn slices(bytes: usize, parts: usize) -> Vec<Range<usize>> {
    slices::slices(padded(bytes), UNIT, parts).into_iter().map(|slice| slice.start.min(bytes)..slice.end.min(bytes)).collect()
}

struct Planner<'a> {
    call: &'a Spec<'a>,
    layout: &'a HostMap,
    thresholds: Thresholds,
    /// Type of partial results.
    partial: DType,
    rank: Rank,
    base: usize,
    used: usize,
    most: usize,
    /// Number of the steps up to `halfway`.
    half: usize,
    steps: Vec<Step>,
}

impl Planner<'_> {
    fn host(&self) -> usize {
        self.layout.host(self.rank)
    }

    fn local(&self) -> usize {
        self.layout.local(self.rank)
    }

    fn locals(&self) -> usize {
        self.layout.members(self.host()).len()
    }

    /// Memory for `bytes` bytes, which may be used to the end of a unit.
    fn take(&mut self, bytes: usize) -> Span {
        let addr = self.base + self.used;
        self.used += padded(bytes);
        self.most = self.most.max(self.used);
        Span { addr, bytes }
    }

    fn rail(&mut self, transfer: Transfer) {
        self.steps.push(Step::Rail { transfer, beside: false });
    }

    /// Ends the first half of a chunk's steps: what it has put on the wire is needed from here on.
    fn halfway(&mut self) {
        self.half = self.steps.len();
    }

    /// Plans a call in `turns`, by `chunk` of each; one alone goes step by step.
    fn in_chunks(&mut self, turns: Turns, chunk: impl Fn(&mut Self, usize)) {
        if turns.count == 1 {
            return chunk(self, 0);
        }
        let (mut steps, before) = (std::mem::take(&mut self.steps), self.used);
        // What the longest needs is not known before all are planned.
        self.halves(turns, before, 0, &chunk);
        let apart = padded(self.most - before);
        steps.extend(overlapped(self.halves(turns, before, apart, &chunk)));
        self.steps = steps;
    }

    /// The steps of all chunks; the memory of every second begins `apart` bytes behind that of the others, at `before`.
    fn halves(&mut self, turns: Turns, before: usize, apart: usize, chunk: &impl Fn(&mut Self, usize)) -> Vec<Halves> {
        let one = |turn: usize| {
            self.used = before + turn % 2 * apart;
            chunk(self, turn);
            let after = self.steps.split_off(self.half);
            [std::mem::take(&mut self.steps), after]
        };
        (0..turns.count).map(one).collect()
    }

    /// Bytes of a tensor that go in a chunk, where they become `growth` times as many on the wire.
    fn chunk(&self, growth: usize) -> usize {
        padded(self.thresholds.piece / growth).max(UNIT)
    }

    /// Whether no host has two ranks: then there is nothing inside to overlap with.
    fn all_alone(&self) -> bool {
        self.layout.size() == self.layout.hosts()
    }

    /// The turns of a call of `bytes` bytes in a tensor, of which every rail carries an even slice, and the number of these rails; on the
    /// wire they are `growth` times as many.
    fn turns(&self, bytes: usize, growth: usize) -> (Turns, usize) {
        let rails = rails(bytes, self.layout, &self.thresholds);
        (Turns::at_most(bytes, self.chunk(growth) * rails), rails)
    }

    /// Number by which the bytes of a partial result are more than those of its elements in a tensor.
    fn growth(&self) -> usize {
        self.partial.size() / self.call.dtype.size()
    }

    /// Memory for a partial result of elements that take `bytes` bytes in a tensor.
    fn take_partial(&mut self, bytes: usize) -> Span {
        let growth = self.growth();
        Span { bytes: bytes * growth, ..self.take(padded(bytes) * growth) }
    }

    fn cast(&mut self, from: Span, to: Span, widens: bool) {
        if from.bytes > 0 {
            self.steps.push(Step::Cast(Cast { from, to, dtype: self.call.dtype, widens }));
        }
    }

    /// `input` of a tensor as partial results have it: a copy where that is another type.
    fn widened(&mut self, input: Span) -> Span {
        if self.growth() == 1 || input.bytes == 0 {
            return input;
        }
        let wide = self.take_partial(input.bytes);
        self.cast(input, wide, true);
        wide
    }

    fn copy(&mut self, from: Span, to: Span) {
        if from.bytes > 0 && from.addr != to.addr {
            self.steps.push(Step::Copy { from, to });
        }
    }

    /// One span for each rank of this host: `spans`, and nothing for the others.
    fn for_locals(&self, mut spans: Vec<Span>) -> Vec<Span> {
        spans.resize(self.locals(), NOTHING);
        spans
    }

    /// A collective of the ranks of this host that moves bytes; what a rank alone would do is a copy.
    fn move_inside(&mut self, op: Op, root: usize, inputs: Vec<Span>, outputs: Vec<Span>) {
        if self.locals() > 1 {
            let (dtype, reduce_op, root) = (DType::U8, ReduceOp::Sum, Rank(root as u32));
            let (inputs, outputs, factor) = (inputs.into(), outputs.into(), self.call.factor);
            let call = Spec { op, dtype, reduce_op, root, factor, inputs, outputs, call_site: None };
            self.steps.push(Step::Inside(vec![Call::inner(call)]));
        } else if let ([from], [to]) = (&*inputs, &*outputs) {
            self.copy(*from, *to);
        }
    }

    /// The bytes `range` of `spans`, which count as one behind the other: where they do not follow each other, a copy of them.
    fn contiguous(&mut self, spans: &[Span], range: &Range<usize>) -> Span {
        let places = ranges(spans.iter().map(|span| span.bytes));
        let parts: Vec<Span> = spans.iter().zip(places).map(|(&span, place)| shifted(span, &overlap(range, &place), place.start)).collect();
        Span::joined(&parts).unwrap_or_else(|| {
            let whole = self.take(range.len());
            let places = ranges(parts.iter().map(|span| span.bytes));
            parts.iter().zip(places).for_each(|(&span, place)| self.copy(span, part(whole, &place)));
            whole
        })
    }
}
