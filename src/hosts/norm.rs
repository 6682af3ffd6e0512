//! All-reduce, residual and RMSNorm on several hosts: an all_reduce, then each rank norms all rows.

use super::step::{Scratch, Step};
use crate::coll::call::{Call, Op, Spec};
use crate::coll::cpu;
use crate::coll::norm::{Norm, Normed};
use crate::error::Result;

impl Step<'_> {
    /// 1. An all_reduce into the place of the normed rows, or beside where those are shorter. 2. The norm of what has come.
    pub(super) fn norm(&self) -> Result<()> {
        let (Some(norm), input) = (Norm::of(self.call), self.call.inputs[0]) else { return Ok(()) };
        let mut beside = Scratch::new(if norm.normed == Normed::Same { 0 } else { input.bytes });
        let summed = if norm.normed == Normed::Same { self.call.outputs[0] } else { beside.span() };
        let reduce =
            Spec { op: Op::AllReduce, factor: 1.0, inputs: vec![input].into(), outputs: vec![summed].into(), ..(**self.call).clone() };
        Step { call: &Call::inner(reduce), ..*self }.run()?;
        let mut inputs = self.call.inputs.to_vec();
        inputs[0] = summed;
        cpu::norm_alone(&Spec { inputs: inputs.into(), ..(**self.call).clone() });
        Ok(())
    }
}
