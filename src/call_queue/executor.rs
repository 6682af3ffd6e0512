//! What runs the calls of a queue, one at a time: on one node, or on several.

use crate::coll::call::Call;
use crate::coll::cpu::CpuRunner;
use crate::error::Result;
use crate::internode::InternodeRunner;
use crate::sync::timeout::CallTimeout;

/// What runs the calls of a queue, one at a time.
pub enum Executor {
    /// All ranks are on this host.
    Local(CpuRunner),
    /// Ranks are on several nodes.
    Internode(Box<InternodeRunner>),
}

impl Executor {
    /// Number of collectives begun.
    pub(super) fn sequence(&self) -> u64 {
        match self {
            Self::Local(runner) => runner.sequence(),
            Self::Internode(runner) => runner.sequence(),
        }
    }

    /// Name of the algorithm of the last call; empty: none was chosen.
    pub(super) fn last_algorithm(&self) -> &'static str {
        match self {
            Self::Local(runner) => runner.last_algorithm(),
            Self::Internode(_) => "two_level",
        }
    }

    /// Begins `call`, the next to run, without waiting for anybody, if peers need nothing else of this rank; what is left is for `run`.
    /// `begins` gets the number of the call before peers see it.
    pub(super) fn post(&mut self, call: &Call<'_>, begins: &dyn Fn(u64)) -> bool {
        match self {
            Self::Local(runner) => runner.post(call, begins),
            Self::Internode(_) => false,
        }
    }

    /// Runs `call`, which is `entry` in the flight recorder; returns when its outputs are complete and its inputs may change.
    pub(super) fn run(&mut self, call: &Call<'_>, limit: &CallTimeout, entry: u64) -> Result<()> {
        match self {
            Self::Local(runner) => runner.run(call, limit),
            Self::Internode(runner) => runner.run(call, limit, entry),
        }
    }

    /// Runs `calls` of the ranks of this host.
    pub(super) fn run_intra_node(&mut self, calls: &[Call<'_>], limit: &CallTimeout) -> Result<()> {
        match self {
            Self::Local(runner) => calls.iter().try_for_each(|call| runner.run(call, limit)),
            Self::Internode(runner) => runner.run_intra_node(calls, limit),
        }
    }
}
