//! Short calls: the opening carries the data of all ranks, or their sum on each node, and each rank
//! takes the parts that it needs.
#![allow(unsafe_code, reason = "loops over the bytes of slots")]

use super::executor::{InternodeExecutor, Scratch, copy_bytes};
use super::header_exchange::NodeSlots;
use crate::coll::call::{Collective, Span};
use crate::coll::two_level::levels::TwoLevelOps;
use crate::coll::two_level::slices::part;
use crate::dtype::DType;
use crate::error::Result;
use crate::kernels::cpu::{self, InputElements, WriteMode};
use crate::rank::Rank;

impl InternodeExecutor<'_> {
    /// 1. Intra-node: ranks exchange their data. 2. Inter-node: rail 0 exchanges the nodes' data,
    ///    or in a reduction their sums. 3. Intra-node: all ranks receive the data of the other
    ///    nodes, and take the parts that they need.
    pub(super) fn short(&self) -> Result<()> {
        let slots = self.open(1, 0)?.finish()?;
        self.take_short(&slots)
    }

    /// Writes the outputs of a short call.
    pub(super) fn take_short(&self, slots: &NodeSlots) -> Result<()> {
        let records = if self.call.op.reduces() { Vec::new() } else { slots.records(self) };
        let given =
            |rank: Rank| span(records[self.node_map.node_of(rank)][self.node_map.local_rank(rank)]);
        let (outputs, root, me) = (&self.call.outputs, self.call.root, self.rank.index());
        match self.call.op {
            Collective::Barrier => {}
            Collective::AllReduce | Collective::Reduce | Collective::ReduceScatter => {
                let skipped = if self.call.op == Collective::ReduceScatter {
                    self.call.inputs[..me].iter().map(|input| input.bytes).sum()
                } else {
                    0
                };
                return outputs
                    .iter()
                    .try_for_each(|&output| self.combine_slots(slots, skipped, output));
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
        Ok(())
    }

    /// Calls `take` for each output and the rank that fills it.
    fn each(&self, take: impl Fn(Rank, Span)) {
        (0..).map(Rank).zip(&*self.call.outputs).for_each(|(from, &output)| take(from, output));
    }

    /// Returns the type of a reduction's partial sums.
    fn partial_dtype(&self) -> DType {
        self.internode.chosen().reduce_dtype.dtype(self.call.reduce_op, self.call.dtype)
    }

    /// Returns the size in bytes of a node's partial sum in a reduction, to which every rank
    /// contributes as many elements as this rank.
    pub(super) fn partial_bytes(&self) -> usize {
        self.input_bytes(self.rank) / self.call.dtype.size() * self.partial_dtype().size()
    }

    /// Reduces the inputs of this node's ranks, each multiplied by its factor, and writes the
    /// partial sum to `to`. `given` has a pair of factor and input for each rank.
    pub(super) fn sum_records(&self, given: &[(f64, &[u8])], to: &mut [u8]) -> Result<()> {
        let (dtype, wide) = (self.call.dtype, self.partial_dtype());
        let levels = TwoLevelOps::of(self.call.reduce_op, dtype, self.node_map);
        let mut widened = Scratch::new(if wide == dtype { 0 } else { given.len() * to.len() })?;
        let copies = widened.span();
        let source = |(at, (factor, given)): (usize, &(f64, &[u8]))| {
            let mut from = span(given);
            if wide != dtype {
                self.cast(from, nth(copies, at, to.len()), true);
                from = nth(copies, at, to.len());
            }
            InputElements { ptr: from.ptr(), factor: *factor }
        };
        let sources: Vec<InputElements> = given.iter().enumerate().map(source).collect();
        let count = to.len() / wide.size();
        // SAFETY: `to` and all sources have `count` elements: the sources are records of this
        // call, or their copies, which `to` does not overlap.
        unsafe {
            cpu::reduce_in(
                self.internode.health.control().order(),
                levels.inner,
                wide,
                to.as_mut_ptr(),
                &sources,
                count,
                WriteMode::Cached,
            )
        }
        Ok(())
    }

    /// Combines the partial sums of all nodes, from byte `skipped` of the tensor on, into `output`.
    fn combine_slots(&self, slots: &NodeSlots, skipped: usize, output: Span) -> Result<()> {
        let (dtype, wide) = (self.call.dtype, self.partial_dtype());
        let scaled = |bytes: usize| bytes / dtype.size() * wide.size();
        let part = scaled(skipped)..scaled(skipped + output.bytes);
        let partials: Vec<Span> =
            slots.data(self.partial_bytes()).map(|sum| span(&sum[part.clone()])).collect();
        if wide == dtype {
            self.combine(&partials, output, dtype);
            return Ok(());
        }
        let mut sum = Scratch::new(part.len())?;
        self.combine(&partials, sum.span(), wide);
        self.cast(sum.span(), output, false);
        Ok(())
    }
}

fn span(bytes: &[u8]) -> Span {
    Span { addr: bytes.as_ptr().addr(), bytes: bytes.len() }
}

/// Returns part number `n` of `whole`, which consists of parts of `bytes` bytes each.
fn nth(whole: Span, n: usize, bytes: usize) -> Span {
    part(whole, &(n * bytes..(n + 1) * bytes))
}
