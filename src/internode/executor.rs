//! Executor: a running call on CPU tensors in a multi-node group, and its rank's rail.
#![allow(unsafe_code, reason = "copies between places of a program")]

use super::Internode;
use super::rail_guard::RailGuard;
use super::traffic::TrafficPath;
use crate::coll::call::{Call, CallSpec, Collective, Span};
use crate::coll::cpu::CpuRunner;
use crate::coll::describe::Description;
use crate::coll::two_level::step::{Place, RailOp};
use crate::dtype::ReduceOp;
use crate::error::{Error, Result};
use crate::kernels::cpu::{self, WriteMode};
use crate::node_map::NodeMap;
use crate::rank::Rank;
use crate::sync::timeout::CallTimeout;
use crate::sys::interrupt::Interrupts;
use crate::trace::InternodePhase;
use std::cell::RefCell;
use std::sync::Arc;
use std::time::Duration;

/// Poll interval for this node's failures while a rank waits on its rail.
const INTERNODE_POLL: Duration = Duration::from_millis(20);

/// How long past its deadline a rank that waits on its rail allows for a report that names the
/// missing rank.
pub(super) const INTER_NODE_GRACE: Duration = Duration::from_millis(80);

/// How long past their deadline the ranks of a node allow for a report from the rank that waited
/// for other nodes.
pub(super) const INTRA_NODE_GRACE: Duration = Duration::from_millis(120);

/// A running call of a multi-node group.
pub(super) struct InternodeExecutor<'a> {
    /// Runs collectives of the ranks of this node.
    pub(super) intra: &'a RefCell<CpuRunner>,
    pub(super) internode: &'a Internode,
    pub(super) node_map: &'a NodeMap,
    pub(super) rank: Rank,
    pub(super) call: &'a Call<'a>,
    /// The user's call; `call` may be a part of it.
    pub(super) user_call: &'a Call<'a>,
    pub(super) limit: &'a CallTimeout,
    pub(super) sequence: u64,
    /// Number of the call in the flight recorder.
    pub(super) entry: u64,
}

/// Memory of this process for data in transit.
pub(super) struct Scratch(Vec<u8>);

impl Scratch {
    /// Returns `bytes` zeros.
    ///
    /// # Errors
    /// `Config` if the memory is not available.
    pub(super) fn new(bytes: usize) -> Result<Self> {
        let mut memory = Vec::new();
        memory.try_reserve_exact(bytes).map_err(|error| {
            Error::config(format!(
                "out of memory: a collective of several nodes needs {bytes} bytes for data in \
                 transit: {error}"
            ))
        })?;
        memory.resize(bytes, 0);
        Ok(Self(memory))
    }

    pub(super) fn span(&mut self) -> Span {
        Span { addr: self.0.as_mut_ptr().addr(), bytes: self.0.len() }
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.0
    }
}

/// Copies `from` to `to`, which must have the same length.
pub(super) fn copy_bytes(from: Span, to: Span) {
    assert_eq!(from.bytes, to.bytes, "a copy of unequal lengths");
    if from.bytes > 0 {
        // SAFETY: both are spans of a program, or slots and scratch memory, of this length. The
        // call promises its tensors (`Call::new`), and no step's source overlaps its target
        // (`two_level::check`).
        unsafe { cpu::copy(to.ptr(), from.ptr(), from.bytes, WriteMode::Cached) }
    }
}

impl InternodeExecutor<'_> {
    pub(super) fn node(&self) -> usize {
        self.node_map.node_of(self.rank)
    }

    pub(super) fn local(&self) -> usize {
        self.node_map.local_rank(self.rank)
    }

    /// Returns the number of ranks on this node.
    pub(super) fn local_size(&self) -> usize {
        self.node_map.ranks_of(self.node()).len()
    }

    /// Returns a collective in which the ranks of this node move bytes; its root is the first rank
    /// of this node.
    pub(super) fn intra_node_bytes(
        &self,
        op: Collective,
        inputs: Vec<Span>,
        outputs: Vec<Span>,
    ) -> Call<'static> {
        let (inputs, outputs, factor) = (inputs.into(), outputs.into(), self.call.factor);
        Call::inner(CallSpec {
            op,
            reduce_op: ReduceOp::Sum,
            factor,
            inputs,
            outputs,
            ..CallSpec::barrier(None)
        })
    }

    /// Runs collectives of the ranks of this node. Their memory is staging, or parts of the spans
    /// of this call.
    pub(super) fn run_intra_node(&self, calls: &[Call<'_>]) -> Result<()> {
        self.run_intra_node_within(
            calls,
            self.limit.remaining().unwrap_or_default() + INTRA_NODE_GRACE,
        )
    }

    /// As `run_intra_node`, but waits for at most `limit`.
    pub(super) fn run_intra_node_within(&self, calls: &[Call<'_>], limit: Duration) -> Result<()> {
        self.begin(InternodePhase::IntraNode);
        let (mut inner, limit) = (self.intra.borrow_mut(), CallTimeout::from_first_wait(limit));
        calls.iter().try_for_each(|call| inner.run(call, &limit))
    }

    /// Records in the flight recorder that `phase` starts.
    pub(super) fn begin(&self, phase: InternodePhase) {
        self.internode.health.recorder().phase(self.entry, phase);
        self.internode.current.phase(matches!(phase, InternodePhase::Rail(_)));
    }

    /// Returns the name of the group.
    pub(super) fn group(&self) -> &str {
        self.internode.health.control().name()
    }

    /// Returns the name of the call for error messages.
    pub(super) fn about(&self) -> String {
        format!(
            "{} #{} of group \"{}\"",
            Description::of(self.user_call),
            self.sequence,
            self.group()
        )
    }
}

/// This rank's rail, within a call.
pub(super) struct CallRail<'a> {
    executor: &'a InternodeExecutor<'a>,
    rail: Arc<RailGuard>,
    addr: usize,
    /// Offset of the first byte of staging that a call may use.
    pub(super) begin: usize,
}

impl<'a> CallRail<'a> {
    /// Creates the rail of `executor`'s rank, whose staging is at `addr`; calls may use it from
    /// `begin` on.
    pub(super) fn new(
        executor: &'a InternodeExecutor<'a>,
        addr: usize,
        begin: usize,
        rail: Arc<RailGuard>,
    ) -> Self {
        Self { executor, rail, addr, begin }
    }

    /// Returns `bytes` bytes of the staging from offset `at` on. The slots of the header exchange
    /// are before `begin`.
    pub(super) fn staged(&self, at: usize, bytes: usize) -> Span {
        Span { addr: self.addr + at, bytes }
    }

    /// Starts a transfer of a program, whose memory is the staging from `begin` on.
    pub(super) fn start_at(&self, transfer: &RailOp<Place>) -> Result<()> {
        self.start(
            &transfer.map(|place| self.staged(self.begin + place.span.addr, place.span.bytes)),
        )
    }

    /// Starts `transfer`, whose spans are in the staging.
    pub(super) fn start(&self, transfer: &RailOp<Span>) -> Result<()> {
        let left = self.executor.limit.remaining().ok_or_else(|| self.missing_ranks())?;
        let executor = self.executor;
        executor.internode.traffic.add(
            TrafficPath::Rail(executor.local()),
            transfer.bytes(executor.node(), executor.node_map.num_nodes()),
        );
        self.rail.start(transfer, left).map_err(|error| self.lost_error(error))
    }

    /// Waits until the oldest pending transfer has ended; fails if this node fails meanwhile.
    pub(super) fn finish(&self) -> Result<()> {
        let control = self.executor.internode.health.control();
        control.set_waits_for_nodes(true);
        let outcome = self.wait();
        control.set_waits_for_nodes(false);
        outcome
    }

    fn wait(&self) -> Result<()> {
        let executor = self.executor;
        executor.begin(InternodePhase::Rail(executor.local() as u16));
        let (control, mut interrupts) = (executor.internode.health.control(), Interrupts::new());
        let about = || executor.about();
        loop {
            interrupts.check().map_err(|_| control.interrupted(&about()))?;
            control.warn_once(executor.limit, &about, &|| self.late_nodes());
            let left = executor.limit.remaining().ok_or_else(|| self.missing_ranks())?;
            let failed = |error| {
                if executor.limit.remaining().is_none() {
                    self.missing_ranks()
                } else {
                    self.lost_error(error)
                }
            };
            if self.rail.wait(left.min(INTERNODE_POLL)).map_err(failed)? {
                return Ok(());
            }
            executor.internode.health.error().map_or(Ok(()), Err)?;
        }
    }

    /// Returns the error of a wait that has passed its deadline: the group's failure, which may
    /// name the missing rank, if it becomes known in time; otherwise this rank's timeout error.
    fn missing_ranks(&self) -> Error {
        let executor = self.executor;
        executor
            .internode
            .health
            .cause(executor.local(), INTER_NODE_GRACE)
            .unwrap_or_else(|| self.timeout_error())
    }

    /// Returns the names of the nodes that are late for this call; of all other nodes if this rank
    /// does not know which are late.
    fn late_nodes(&self) -> String {
        let executor = self.executor;
        executor
            .internode
            .oob
            .late(executor.sequence)
            .unwrap_or_else(|| executor.node_map.name_others(executor.node()))
    }

    fn timeout_error(&self) -> Error {
        let executor = self.executor;
        let (waited, local) = (executor.limit.elapsed().as_secs_f64(), executor.local());
        let (about, me) = (executor.about(), executor.node_map.describe(executor.rank));
        let others = self.late_nodes();
        Error::timeout(format!(
            "{about}: {me} reached its timeout after {waited:.1} s on rail {local}, \
             waiting for {others}"
        ))
    }

    /// Returns the error for a lost rail: the reason that the failed node reports, or this rank's
    /// own error if [`Health::cause`](crate::health::Health::cause) finds no reason. Waits even if
    /// the deadline has passed, because the failed node may have reached its deadline just before
    /// this rank.
    fn lost_error(&self, error: Error) -> Error {
        let executor = self.executor;
        executor
            .internode
            .health
            .cause(
                executor.local(),
                executor.limit.remaining().unwrap_or_default().max(INTER_NODE_GRACE),
            )
            .unwrap_or_else(|| {
                let (about, me, others) = (
                    executor.about(),
                    executor.node_map.describe(executor.rank),
                    executor.node_map.name_others(executor.node()),
                );
                let local = executor.local();
                Error::peer(format!(
                    "{about}: {me} lost rail {local} to {others}: {}",
                    error.message
                ))
            })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    #[test]
    fn memory_that_is_refused_is_an_error() {
        assert_eq!(Scratch::new(5).expect("a few bytes").bytes(), [0; 5]);
        let refused = Scratch::new(isize::MAX as usize).err().expect("more than there is");
        refused.assert_says(
            ErrorKind::Config,
            &["out of memory: a collective of several nodes needs 9223372036854775807 bytes"],
        );
    }
}
