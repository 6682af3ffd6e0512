//! The runner of a queue's calls, one at a time, on one node or on several.

use crate::coll::call::Call;
use crate::coll::cpu::CpuRunner;
use crate::error::Result;
use crate::internode::InternodeRunner;
use crate::sync::timeout::CallTimeout;
use std::cell::RefCell;

/// The runner of a queue's calls, one at a time.
pub struct Executor {
    /// The runner of collectives of this node's ranks.
    pub(super) inner: RefCell<CpuRunner>,
    /// The runner of the group's collectives, if its ranks are on several nodes.
    pub(super) internode: Option<InternodeRunner>,
}

impl Executor {
    /// Returns the number of collectives that have started.
    pub(super) fn sequence(&mut self) -> u64 {
        self.internode
            .as_ref()
            .map_or_else(|| self.inner.get_mut().sequence(), InternodeRunner::sequence)
    }

    /// Returns the name of the last call's algorithm; empty if the call did not choose one.
    pub(super) fn last_algorithm(&mut self) -> &'static str {
        if self.internode.is_some() { "two_level" } else { self.inner.get_mut().last_algorithm() }
    }

    /// Posts `call`, which must be the next call to run, without waiting for a peer, and returns
    /// true. Returns false, without an effect, if the peers need more from this rank than a post.
    /// In both cases `run` then completes the call. `begins` is called with the number of the call
    /// before peers can see it.
    pub(super) fn post(&mut self, call: &Call<'_>, begins: &dyn Fn(u64)) -> bool {
        self.internode.is_none() && self.inner.get_mut().post(call, begins)
    }

    /// Runs `call`, whose entry in the flight recorder is `entry`. Returns when its outputs are
    /// complete and its inputs may change.
    pub(super) fn run(&mut self, call: &Call<'_>, limit: &CallTimeout, entry: u64) -> Result<()> {
        match &mut self.internode {
            None => self.inner.get_mut().run(call, limit),
            Some(internode) => internode.run(&self.inner, call, limit, entry),
        }
    }

    /// Runs `calls` of the ranks of this node.
    pub(super) fn run_intra_node(&mut self, calls: &[Call<'_>], limit: &CallTimeout) -> Result<()> {
        calls.iter().try_for_each(|call| self.inner.get_mut().run(call, limit))
    }
}
