//! Short calls: the opening carries the data of all ranks, and each rank takes the parts that it
//! needs.
#![allow(unsafe_code, reason = "loops over the bytes of slots")]

use super::executor::{InternodeExecutor, Scratch, copy_bytes};
use super::header_exchange::NodeSlots;
use crate::coll::call::{Collective, Span};
use crate::coll::two_level::levels::TwoLevelOps;
use crate::coll::two_level::slices::part;
use crate::error::Result;
use crate::kernels::cpu::{self, InputElements, WriteMode};
use crate::rank::Rank;

impl InternodeExecutor<'_> {
    /// 1. Intra-node: ranks exchange their data. 2. Inter-node: rail 0 exchanges the nodes' data.
    ///    3. Intra-node: all ranks receive the data of the other nodes, and take the parts that
    ///    they need.
    pub(super) fn short(&self) -> Result<()> {
        let slots = self.open(1, 0)?.finish()?;
        self.take_short(&slots);
        Ok(())
    }

    /// Writes the outputs of a short call.
    pub(super) fn take_short(&self, slots: &NodeSlots) {
        let records = slots.records(self);
        let given = |rank: Rank| {
            span(records[self.node_map.node_of(rank)][self.node_map.local_rank(rank)].1)
        };
        let (outputs, root, me) = (&self.call.outputs, self.call.root, self.rank.index());
        match self.call.op {
            Collective::Barrier => {}
            Collective::AllReduce | Collective::Reduce | Collective::ReduceScatter => {
                let skipped = if self.call.op == Collective::ReduceScatter {
                    self.call.inputs[..me].iter().map(|input| input.bytes).sum()
                } else {
                    0
                };
                outputs.iter().for_each(|&output| self.combine_records(&records, skipped, output));
            }
            Collective::Broadcast => {
                outputs.iter().for_each(|&output| copy_bytes(given(root), output))
            }
            Collective::Scatter => copy_bytes(nth(given(root), me, outputs[0].bytes), outputs[0]),
            Collective::AllGather | Collective::Gather => {
                self.each(|from, output| copy_bytes(given(from), output))
            }
            Collective::AllReduceAddRmsNorm => unreachable!("what runs is its all_reduce"),
            Collective::AllToAll => {
                self.each(|from, output| copy_bytes(nth(given(from), me, output.bytes), output))
            }
        }
    }

    /// Calls `take` for each output and the rank that fills it.
    fn each(&self, take: impl Fn(Rank, Span)) {
        (0..).map(Rank).zip(&*self.call.outputs).for_each(|(from, &output)| take(from, output));
    }

    /// Combines the data of all ranks from offset `skipped` on, in two levels, into `output`.
    fn combine_records(&self, records: &[Vec<(f64, &[u8])>], skipped: usize, output: Span) {
        let (levels, dtype) =
            (TwoLevelOps::of(self.call.reduce_op, self.call.dtype, self.node_map), self.call.dtype);
        let order = self.internode.health.control().order();
        let wide = self.internode.chosen().reduce_dtype.dtype(self.call.reduce_op, dtype);
        let bytes = output.bytes / dtype.size() * wide.size();
        let mut partials = Scratch::new((records.len() + 1) * bytes);
        let whole = partials.span();
        let partial = |(node, given): (usize, &Vec<(f64, &[u8])>)| {
            let to = nth(whole, node, bytes);
            let mut widened = Scratch::new(if wide == dtype { 0 } else { given.len() * bytes });
            let copies = widened.span();
            let source = |(at, (factor, given)): (usize, &(f64, &[u8]))| {
                let mut from = span(&given[skipped..skipped + output.bytes]);
                if wide != dtype {
                    self.cast(from, nth(copies, at, bytes), true);
                    from = nth(copies, at, bytes);
                }
                InputElements { ptr: from.ptr(), factor: *factor }
            };
            let sources: Vec<InputElements> = given.iter().enumerate().map(source).collect();
            // SAFETY: `to` and all sources have `bytes` bytes, in the slices above or in copies;
            // `to` overlaps none of them.
            unsafe {
                cpu::reduce_in(
                    order,
                    levels.inner,
                    wide,
                    to.ptr(),
                    &sources,
                    to.bytes / wide.size(),
                    WriteMode::Cached,
                )
            }
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
