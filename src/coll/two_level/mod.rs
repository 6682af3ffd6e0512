//! Multi-node collectives as programs: a list of steps for each rank. Pure; for CPU and for CUDA
//! tensors.
//!
//! An element is combined over the ranks of each node and rounded once, then over the nodes and
//! rounded once, both times in the group's order. If partial results are float32, inputs are
//! widened first and the sum is rounded once. The choice of rails and chunks decides only which
//! rank does the work, so the bits are the same on CPUs and GPUs and at every length.
//!
//! - [`step`]: steps, and where their bytes are; [`check`](mod@check): the invariants of every
//!   program
//! - [`rules`]: the differences between CPU and CUDA; [`planner`]: memory, slices and intra-node
//!   collectives
//! - [`pipeline`]: the order of a long call; [`reductions`], [`movements`], [`carriers`]: the
//!   collectives
//! - [`slices`](mod@slices): the slice of a message on each rail; [`levels`]: the intra-node and
//!   inter-node operations

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

use super::call::{CallSpec, Collective};
use super::cost::network::RailThresholds;
use crate::node_map::NodeMap;
use crate::rank::Rank;
pub use carriers::MessageLengths;
use levels::ReduceDtype;
use planner::Planner;
use rules::Rules;
use step::Program;

/// The values that all programs of one rank share.
#[derive(Clone, Copy, Debug)]
pub struct Planning<'a> {
    /// The nodes of the group's ranks.
    pub map: &'a NodeMap,
    /// This rank.
    pub me: Rank,
    /// The type of partial results, the same on all ranks.
    pub reduce_dtype: ReduceDtype,
    /// The thresholds, the same on all ranks.
    pub thresholds: RailThresholds,
    /// The rules of the tensors' device.
    pub rules: &'static Rules,
}

impl Planning<'_> {
    /// Returns the program of this rank for `call`. `told`: the lengths of an all_to_all of CPU
    /// tensors.
    pub fn plan(&self, call: &CallSpec, told: Option<&MessageLengths>) -> Program {
        let mut planner = Planner::new(*self, call);
        match call.op {
            Collective::Barrier => planner.barrier(),
            Collective::Broadcast => planner.broadcast(),
            Collective::AllReduce | Collective::Reduce => planner.all_reduce(),
            Collective::AllGather => planner.all_gather(),
            Collective::ReduceScatter => planner.reduce_scatter(),
            Collective::Gather | Collective::Scatter | Collective::AllToAll => {
                planner.exchange(told)
            }
            // On CPUs this runs as an all_reduce and a norm; between GPUs of several nodes it is
            // rejected (`reject_multi_node`).
            Collective::AllReduceAddRmsNorm => {}
        }
        planner.program()
    }
}
