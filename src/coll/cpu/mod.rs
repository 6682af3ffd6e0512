//! Collectives on tensors in host memory.
//!
//! Every collective begins with an arrival ([`arrival`]): each rank posts what it was asked to do, waits for everybody's post and compares.
//! No user memory is written before. What follows depends on the plan: the data came with the posts, or move through staging in a
//! [`pipeline`], or are read where they lie in symmetric memory ([`direct`]).

mod all_reduce;
mod arrival;
mod direct;
mod exchange;
pub(crate) mod helpers;
mod norm;
pub mod pipeline;
mod reduce_scatter;

use crate::coll::call::{Call, Op};
use crate::coll::norm::Norm;
use crate::coll::plan::{self, Plan, Thresholds};
use crate::control::ControlBlock;
use crate::error::Result;
use crate::symm_mem::peers::{Heaps, Linked};
use crate::sync::limit::Limit;
use helpers::Helpers;
pub(crate) use norm::norm_alone;
use std::sync::Arc;

/// Runs a group's collectives, one at a time.
#[derive(Debug)]
pub struct Runner {
    control: Arc<ControlBlock>,
    seq: u64,
    stage: u64,
    staging_reserved: bool,
    thresholds: Thresholds,
    linked: Arc<Linked>,
    served: &'static str,
}

/// Collective that is under way.
struct Step<'a> {
    control: &'a ControlBlock,
    call: &'a Call,
    limit: &'a Limit,
    /// Symmetric memory of the group, once its ranks have linked.
    heaps: Option<&'a Heaps>,
    seq: u64,
    stage: &'a mut u64,
}

impl Runner {
    /// A runner for a group that has run nothing yet, and whose symmetric memory will be found in `linked`.
    pub fn new(control: Arc<ControlBlock>, thresholds: Thresholds, linked: Arc<Linked>) -> Self {
        Self { control, seq: 0, stage: 0, staging_reserved: false, thresholds, linked, served: "" }
    }

    /// The group's.
    pub fn control(&self) -> &ControlBlock {
        &self.control
    }

    /// Number of collectives begun.
    pub fn sequence(&self) -> u64 {
        self.seq
    }

    /// Name of the algorithm of the last call; empty: none was chosen.
    pub fn served(&self) -> &'static str {
        self.served
    }

    /// Runs `call`, which [`Call::validate`] has passed; returns when its outputs are complete and its inputs may change.
    pub fn run(&mut self, call: &Call, limit: &Limit) -> Result<()> {
        self.served = "";
        let n = self.control.size();
        if let Some(failure) = self.control.failure() {
            return Err(failure);
        }
        self.seq += 1;
        let longest = call.longest();
        let norm = Norm::of(call);
        let choose = |longest| match &norm {
            Some(norm) => plan::choose_rows(norm, n),
            None => plan::choose(call.op, longest, n, &self.thresholds),
        };
        let plan = choose(longest);
        let (control, heaps) = (Arc::clone(&self.control), self.linked.get());
        let mut step = Step { control: &control, call, limit, heaps: heaps.as_deref(), seq: self.seq, stage: &mut self.stage };
        if n == 1 {
            self.served = "alone";
            return step.alone();
        }
        // Only the ranks together know the longest message of an all-to-all.
        let (plan, longest) = if call.op == Op::AllToAll {
            step.arrive_all_to_all()?.map_or((Plan::Inline, 0), |longest| (choose(longest), longest))
        } else {
            step.arrive(plan)?;
            (plan, longest)
        };
        if let Plan::Staged { store, .. } = plan
            && step.all_offered()
        {
            self.served = "direct";
            step.direct(store)?;
            control.finish(self.seq, call.op);
            return Ok(());
        }
        self.served = plan.name();
        if matches!(plan, Plan::Staged { .. }) && !self.staging_reserved {
            let layout = control.layout();
            let purpose = format_args!("group \"{}\"", control.name());
            control.segment().reserve(layout.staging(control.rank()), layout.staging_bytes(), purpose).map_err(|e| control.fail(e))?;
            self.staging_reserved = true;
        }
        match call.op {
            Op::Barrier => {}
            Op::AllReduce | Op::Reduce => step.all_reduce(plan)?,
            Op::ReduceScatter => step.reduce_scatter(plan)?,
            Op::AllReduceAddRmsNorm => norm.map_or(Ok(()), |norm| step.norm(&norm, plan))?,
            Op::Broadcast | Op::AllGather | Op::Gather | Op::Scatter | Op::AllToAll => step.exchange(plan, longest)?,
        }
        control.finish(self.seq, call.op);
        Ok(())
    }
}

impl Step<'_> {
    /// The collective of a single rank.
    fn alone(&self) -> Result<()> {
        match self.call.op {
            Op::Barrier | Op::Broadcast => {}
            Op::AllReduce | Op::Reduce | Op::ReduceScatter => {
                let (input, output) = (self.call.inputs[0], self.call.outputs[0]);
                self.reduce(output.ptr(), &[self.own(0)], input.bytes, crate::kernels::cpu::Store::Cached);
            }
            Op::AllGather | Op::Gather | Op::Scatter | Op::AllToAll => self.keep_own(&Helpers::none()),
            Op::AllReduceAddRmsNorm => norm_alone(self.call),
        }
        Ok(())
    }

    /// Names the call in messages.
    fn about(&self) -> String {
        let description = crate::coll::describe::Description::of(self.call);
        let (seq, group) = (self.seq, self.control.name());
        if self.call.op == Op::AllToAll {
            let sent: usize = self.call.inputs.iter().map(|span| span.bytes).sum();
            return format!("{description} #{seq} of group \"{group}\" (this rank sends {sent} bytes)");
        }
        format!("{description} #{seq} of group \"{group}\"")
    }
}
