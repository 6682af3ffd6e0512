//! Programs for CPU tensors: intra-node steps are collectives of the node's ranks, and transfers
//! use the rank's rail.
#![allow(unsafe_code, reason = "loops over the bytes of tensors and of a program's memory")]

use super::executor::{InternodeExecutor, Scratch, copy_bytes};
use super::header_exchange::HeaderExchange;
use crate::coll::all_reduce_norm::{Norm, Normed};
use crate::coll::call::{Call, CallSpec, Collective, Span};
use crate::coll::cpu::norm_alone;
use crate::coll::two_level::levels::TwoLevelOps;
use crate::coll::two_level::rules::Rules;
use crate::coll::two_level::step::{Bases, Place, Program, Step};
use crate::coll::two_level::{MessageLengths, Planning};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::kernels::cpu::{self, InputElements};

impl InternodeExecutor<'_> {
    /// Runs the call.
    pub(super) fn run(&self) -> Result<()> {
        match self.call.op {
            Collective::AllToAll => self.all_to_all(),
            Collective::AllReduceAddRmsNorm => self.norm(),
            Collective::Barrier => self.short(),
            Collective::Broadcast
            | Collective::AllReduce
            | Collective::Reduce
            | Collective::AllGather
            | Collective::Gather
            | Collective::Scatter
            | Collective::ReduceScatter
                if self.is_short() =>
            {
                self.short()
            }
            Collective::Broadcast
            | Collective::AllReduce
            | Collective::Reduce
            | Collective::AllGather
            | Collective::Gather
            | Collective::Scatter
            | Collective::ReduceScatter => {
                let program = self.planning().plan(self.call, None);
                self.walk(&program, self.open(program.rails, program.temp)?)
            }
        }
    }

    /// Runs an all_to_all; if lengths differ, every rank first sends all others the lengths that it
    /// sends and expects.
    fn all_to_all(&self) -> Result<()> {
        let slots = self.open(1, 0)?.finish()?;
        let lengths = match slots.common_length {
            Some(_) if self.is_short() => {
                return self.take_short(&slots);
            }
            Some(bytes) => MessageLengths::Even(bytes),
            None => self.exchange_lengths()?,
        };
        let program = self.planning().plan(self.call, Some(&lengths));
        self.walk(&program, self.opened(program.rails, program.temp)?)
    }

    /// Runs an all-reduce with residual and RMSNorm: 1. An all_reduce into the output of the normed
    /// rows, or into scratch memory if that output is too short. 2. Each rank norms all rows.
    fn norm(&self) -> Result<()> {
        let (Some(norm), input) = (Norm::of(self.call), self.call.inputs[0]) else { return Ok(()) };
        let mut beside = Scratch::new(if norm.normed == Normed::Same { 0 } else { input.bytes })?;
        let summed = if norm.normed == Normed::Same { self.call.outputs[0] } else { beside.span() };
        let reduce = CallSpec {
            op: Collective::AllReduce,
            factor: 1.0,
            inputs: vec![input].into(),
            outputs: vec![summed].into(),
            ..(**self.call).clone()
        };
        InternodeExecutor { call: &Call::inner(reduce), ..*self }.run()?;
        let mut inputs = self.call.inputs.to_vec();
        inputs[0] = summed;
        norm_alone(&CallSpec { inputs: inputs.into(), ..(**self.call).clone() });
        Ok(())
    }

    fn planning(&self) -> Planning<'_> {
        let (map, me, partials, thresholds) = (
            self.node_map,
            self.rank,
            self.internode.chosen().reduce_dtype,
            self.internode.chosen().thresholds,
        );
        Planning { map, me, reduce_dtype: partials, thresholds, rules: &Rules::CPU }
    }

    /// Runs the steps of `program`, whose memory for transfers is the staging of the rail that
    /// `opening` has.
    fn walk(&self, program: &Program, mut opening: HeaderExchange<'_>) -> Result<()> {
        let mut aside = Scratch::new(program.aside)?;
        let temp =
            opening.call_rail.as_ref().map_or(0, |between| between.staged(between.begin, 0).addr);
        let bases = Bases { temp, aside: aside.span().addr };
        let at = |place: &Place| place.at(&bases);
        for step in &program.steps {
            let rail = || {
                opening
                    .call_rail
                    .as_ref()
                    .ok_or_else(|| Error::internal("a transfer of a rank without a rail"))
            };
            match step {
                Step::Local(calls) => self.run_intra_node(
                    &calls
                        .iter()
                        .map(|inner| inner.call(self.call.factor, &bases))
                        .collect::<Vec<_>>(),
                )?,
                Step::Agree => opening.agree(program.rails)?,
                Step::Start(transfer) => rail()?.start_at(transfer)?,
                Step::Wait => rail()?.finish()?,
                Step::Run(transfer) => {
                    rail()?.start_at(transfer)?;
                    rail()?.finish()?;
                }
                Step::Exchange { .. } => {
                    return Err(Error::internal("a step that only programs for CUDA tensors have"));
                }
                Step::Combine { from, to } => {
                    self.combine(&from.iter().map(at).collect::<Vec<_>>(), at(to), program.partial)
                }
                Step::Cast { from, to, widens } => self.cast(at(from), at(to), *widens),
                Step::Copy { from, to } => copy_bytes(at(from), at(to)),
            }
        }
        Ok(())
    }

    /// Combines `partials`, one per node in node order and of type `dtype`, into `to`.
    pub(super) fn combine(&self, partials: &[Span], to: Span, dtype: DType) {
        let levels = TwoLevelOps::of(self.call.reduce_op, self.call.dtype, self.node_map);
        let source = |(node, span): (usize, &Span)| InputElements {
            ptr: span.ptr(),
            factor: levels.factor(node, self.node_map),
        };
        let sources: Vec<InputElements> = partials.iter().enumerate().map(source).collect();
        let order = self.internode.health.control().order();
        // SAFETY: all spans have `to.bytes` bytes. They belong to a `Combine` step, for which
        // `two_level::check` ensures that `to` overlaps no partial, or are scratch memory;
        // `Call::new` promises that the call's tensors are valid.
        unsafe {
            cpu::reduce_partials(
                order,
                levels.outer,
                dtype,
                to.ptr(),
                &sources,
                to.bytes / dtype.size(),
                levels.divisor,
            )
        }
    }

    /// Converts elements between the call's type and float32, the type of partial sums: widens them
    /// if `widens` is true, otherwise rounds them.
    pub(super) fn cast(&self, from: Span, to: Span, widens: bool) {
        let (kernel, narrow): (unsafe fn(DType, *mut u8, *const u8, usize), _) =
            if widens { (cpu::widen, from) } else { (cpu::narrow, to) };
        let count = narrow.bytes / self.call.dtype.size();
        if count > 0 {
            // SAFETY: as in `copy_bytes`; both have `count` elements.
            unsafe { kernel(self.call.dtype, to.ptr(), from.ptr(), count) }
        }
    }
}
