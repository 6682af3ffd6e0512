//! Runs a multi-node group's collectives on CPU tensors; the runner of the node's ranks runs
//! intra-node steps directly.

use super::Internode;
use super::executor::InternodeExecutor;
use super::oob::BlockedCall;
use super::traffic::TrafficPath;
use crate::coll::call::Call;
use crate::coll::cpu::CpuRunner;
use crate::error::Result;
use crate::sync::timeout::CallTimeout;
use std::cell::RefCell;
use std::sync::Arc;
use std::time::Instant;

/// Runs a multi-node group's collectives, one at a time.
pub struct InternodeRunner {
    internode: Arc<Internode>,
    sequence: u64,
}

impl InternodeRunner {
    /// Creates a runner for a group of `internode` that has run nothing yet.
    pub fn new(internode: Arc<Internode>) -> Self {
        Self { internode, sequence: 0 }
    }

    /// Returns the number of collectives started.
    pub fn sequence(&self) -> u64 {
        self.sequence
    }

    /// Runs `call`, which has the number `entry` in the flight recorder; returns when its outputs
    /// are complete and its inputs may change. `intra` runs collectives of the ranks of this node.
    pub fn run(
        &mut self,
        intra: &RefCell<CpuRunner>,
        call: &Call<'_>,
        limit: &CallTimeout,
        entry: u64,
    ) -> Result<()> {
        let internode = &*self.internode;
        let (health, layout, rank) = (&*internode.health, &*internode.layout, internode.rank);
        if let Some(failure) = health.control().failure() {
            return Err(failure);
        }
        self.sequence += 1;
        limit.start();
        let executor = InternodeExecutor {
            intra,
            internode,
            node_map: layout,
            rank,
            call,
            user_call: call,
            limit,
            sequence: self.sequence,
            entry,
        };
        health.control().set_parent_call(executor.about());
        let since = Instant::now();
        let waiting = BlockedCall {
            number: self.sequence,
            name: call.op.name(),
            since,
            phase_since: since,
            on_rail: false,
        };
        internode.current.set(Some(waiting));
        let outcome = executor.run();
        internode.current.set(None);
        internode.traffic.ended(&[TrafficPath::Rail(layout.local_rank(rank))]);
        outcome.map_err(|error| health.fail(error))
    }
}
