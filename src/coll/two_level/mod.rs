//! Multi-node collectives as programs: a list of steps for each rank. Pure; for CPU and for CUDA tensors.
//!
//! An element is combined over the ranks of each node in order and rounded once, then over the nodes in order and
//! rounded once. If partial results are float32, inputs are widened first and the sum is rounded once. The choice of
//! rails and chunks decides only which rank does the work, so the bits are the same on CPUs and GPUs and at every
//! length.
//!
//! - [`step`]: steps, and where their bytes are; [`check`](mod@check): the invariants of every program
//! - [`rules`]: the differences between CPU and CUDA; [`planner`]: memory, slices and intra-node collectives
//! - [`pipeline`]: the order of a long call; [`reductions`], [`movements`], [`carriers`]: the collectives
//! - [`slices`](mod@slices): the slice of a message on each rail; [`levels`]: the intra-node and inter-node operations

mod carriers;
pub mod check;
pub mod levels;
mod movements;
mod pipeline;
mod planner;
mod reductions;
pub mod rules;
pub(crate) mod slices;
pub mod step;
#[cfg(test)]
pub(crate) mod tests;

use super::call::{Op, Spec};
use super::cost::wire::Thresholds;
use crate::host_map::HostMap;
use crate::rank::Rank;
pub use carriers::Lengths;
use levels::Partials;
use planner::Planner;
use rules::Rules;
use step::Program;

/// The values that all programs of one rank share.
#[derive(Clone, Copy, Debug)]
pub struct Planning<'a> {
    /// The nodes of the group's ranks.
    pub map: &'a HostMap,
    /// This rank.
    pub me: Rank,
    /// The type of partial results, the same on all ranks.
    pub partials: Partials,
    /// The thresholds, the same on all ranks.
    pub thresholds: Thresholds,
    /// The rules of the tensors' device.
    pub rules: &'static Rules,
}

impl Planning<'_> {
    /// Returns the program of this rank for `call`. `told`: the lengths of an all_to_all of CPU tensors.
    pub fn plan(&self, call: &Spec, told: Option<&Lengths>) -> Program {
        let mut planner = Planner::new(*self, call);
        match call.op {
            Op::Barrier => planner.barrier(),
            Op::Broadcast => planner.broadcast(),
            Op::AllReduce | Op::Reduce => planner.all_reduce(),
            Op::AllGather => planner.all_gather(),
            Op::ReduceScatter => planner.reduce_scatter(),
            Op::Gather | Op::Scatter | Op::AllToAll => planner.exchange(told),
            // On CPUs this runs as an all_reduce and a norm; between GPUs of several nodes it is rejected
            // (`refuse_between_hosts`).
            Op::AllReduceAddRmsNorm => {}
        }
        planner.program()
    }
}
