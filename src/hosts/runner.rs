//! Runs a multi-node group's collectives on CPU tensors; the runner of the node's ranks runs intra-node steps directly.

use super::Hosts;
use super::executor::Executor;
use super::news::Waiting;
use super::traffic::Path;
use crate::coll::call::Call;
use crate::coll::cpu::Runner;
use crate::error::Result;
use crate::sync::limit::Limit;
use std::cell::RefCell;
use std::sync::Arc;
use std::time::Instant;

/// Runs a multi-node group's collectives, one at a time.
pub struct HostsRunner {
    inner: RefCell<Runner>,
    hosts: Arc<Hosts>,
    sequence: u64,
}

impl HostsRunner {
    /// Creates a runner for a group of `hosts` that has run nothing yet. `inner` runs collectives of the ranks of this
    /// node.
    pub fn new(inner: Runner, hosts: Arc<Hosts>) -> Self {
        Self { inner: RefCell::new(inner), hosts, sequence: 0 }
    }

    /// Returns the number of collectives started.
    pub fn sequence(&self) -> u64 {
        self.sequence
    }

    /// Runs `call`, which has the number `entry` in the flight recorder; returns when its outputs are complete and its
    /// inputs may change.
    pub fn run(&mut self, call: &Call<'_>, limit: &Limit, entry: u64) -> Result<()> {
        let hosts = &*self.hosts;
        let (health, layout, rank) = (&*hosts.health, &*hosts.layout, hosts.rank);
        if let Some(failure) = health.control().failure() {
            return Err(failure);
        }
        self.sequence += 1;
        limit.start();
        let executor = Executor { inner: &self.inner, hosts, layout, rank, call, asked: call, limit, sequence: self.sequence, entry };
        health.control().run_for(executor.about());
        let since = Instant::now();
        let waiting = Waiting { number: self.sequence, name: call.op.name(), since, phase_since: since, on_rail: false };
        hosts.current.set(Some(waiting));
        let outcome = executor.run();
        hosts.current.set(None);
        hosts.traffic.ended(&[Path::Rail(layout.local(rank))]);
        outcome.map_err(|error| health.fail(error))
    }

    /// Runs `calls` of the ranks of this node.
    pub fn run_inside(&self, calls: &[Call<'_>], limit: &Limit) -> Result<()> {
        let mut inner = self.inner.borrow_mut();
        calls.iter().try_for_each(|call| inner.run(call, limit))
    }
}
