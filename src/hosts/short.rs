//! Short calls: the opening carries the data of all ranks, and each rank takes the parts that it needs.
#![allow(unsafe_code, reason = "loops over the bytes of slots")]

use super::executor::{Executor, Scratch, copy};
use super::opening::Slots;
use crate::coll::call::{Op, Span};
use crate::coll::two_level::levels::Levels;
use crate::coll::two_level::slices::part;
use crate::error::Result;
use crate::kernels::cpu::{self, Source, Store};
use crate::rank::Rank;

impl Executor<'_> {
    /// 1. Intra-node: ranks exchange their data. 2. Inter-node: rail 0 exchanges the nodes' data. 3. Intra-node: all
    ///    ranks receive the data of the other nodes, and take the parts that they need.
    pub(super) fn short(&self) -> Result<()> {
        let slots = self.open(1, 0)?.told()?;
        self.take_short(&slots);
        Ok(())
    }

    /// Writes the outputs of a short call.
    pub(super) fn take_short(&self, slots: &Slots) {
        let records = slots.records(self);
        let given = |rank: Rank| span(records[self.layout.host(rank)][self.layout.local(rank)].1);
        let (outputs, root, me) = (&self.call.outputs, self.call.root, self.rank.index());
        match self.call.op {
            Op::Barrier => {}
            Op::AllReduce | Op::Reduce | Op::ReduceScatter => {
                let skipped =
                    if self.call.op == Op::ReduceScatter { self.call.inputs[..me].iter().map(|input| input.bytes).sum() } else { 0 };
                outputs.iter().for_each(|&output| self.combine_records(&records, skipped, output));
            }
            Op::Broadcast => outputs.iter().for_each(|&output| copy(given(root), output)),
            Op::Scatter => copy(nth(given(root), me, outputs[0].bytes), outputs[0]),
            Op::AllGather | Op::Gather => self.each(|from, output| copy(given(from), output)),
            Op::AllReduceAddRmsNorm => unreachable!("what runs is its all_reduce"),
            Op::AllToAll => self.each(|from, output| copy(nth(given(from), me, output.bytes), output)),
        }
    }

    /// Calls `take` for each output and the rank that fills it.
    fn each(&self, take: impl Fn(Rank, Span)) {
        (0..).map(Rank).zip(&*self.call.outputs).for_each(|(from, &output)| take(from, output));
    }

    /// Combines the data of all ranks from offset `skipped` on, in two levels, into `output`.
    fn combine_records(&self, records: &[Vec<(f64, &[u8])>], skipped: usize, output: Span) {
        let (levels, dtype) = (Levels::of(self.call.reduce_op, self.call.dtype, self.layout), self.call.dtype);
        let wide = self.hosts.chosen().partials.dtype(self.call.reduce_op, dtype);
        let bytes = output.bytes / dtype.size() * wide.size();
        let mut partials = Scratch::new((records.len() + 1) * bytes);
        let whole = partials.span();
        let partial = |(host, given): (usize, &Vec<(f64, &[u8])>)| {
            let to = nth(whole, host, bytes);
            let mut widened = Scratch::new(if wide == dtype { 0 } else { given.len() * bytes });
            let copies = widened.span();
            let source = |(at, (factor, given)): (usize, &(f64, &[u8]))| {
                let mut from = span(&given[skipped..skipped + output.bytes]);
                if wide != dtype {
                    self.cast(from, nth(copies, at, bytes), true);
                    from = nth(copies, at, bytes);
                }
                Source { ptr: from.ptr(), factor: *factor }
            };
            let sources: Vec<Source> = given.iter().enumerate().map(source).collect();
            // SAFETY: `to` and all sources have `bytes` bytes, in the slices above or in copies; `to` overlaps none of
            // them.
            unsafe { cpu::reduce(levels.inner, wide, to.ptr(), &sources, to.bytes / wide.size(), Store::Cached) }
            to
        };
        let partials: Vec<Span> = records.iter().enumerate().map(partial).collect();
        if wide == dtype {
            return self.combine(&partials, output, dtype);
        }
        let sum = nth(whole, records.len(), bytes);
        self.combine(&partials, sum, wide);
        self.cast(sum, output, false);
    }
}

fn span(bytes: &[u8]) -> Span {
    Span { addr: bytes.as_ptr().addr(), bytes: bytes.len() }
}

/// Returns the `n`th part of `bytes` bytes.
fn nth(whole: Span, n: usize, bytes: usize) -> Span {
    part(whole, &(n * bytes..(n + 1) * bytes))
}
