//! Executor: a running call on CPU tensors in a multi-node group, and its rank's rail.
#![allow(unsafe_code, reason = "copies between places of a program")]

use super::Hosts;
use super::held::Held;
use super::traffic::Path;
use crate::coll::call::{Call, Op, Span, Spec};
use crate::coll::cpu::Runner;
use crate::coll::describe::Description;
use crate::coll::two_level::step::{Place, Transfer};
use crate::dtype::ReduceOp;
use crate::error::{Error, Result};
use crate::host_map::HostMap;
use crate::kernels::cpu::{self, Store};
use crate::rank::Rank;
use crate::sync::limit::Limit;
use crate::sys::interrupt::Interrupts;
use crate::trace::Phase;
use std::cell::RefCell;
use std::sync::Arc;
use std::time::Duration;

/// Poll interval for this node's failures while a rank waits on its rail.
const LOOK: Duration = Duration::from_millis(20);

/// How much longer than its deadline a rank on a rail waits for a report that names the missing rank.
pub(super) const HEAR: Duration = Duration::from_millis(80);

/// How long past their deadline the ranks of a node allow for a report from the rank that waited for other nodes.
pub(super) const GRACE: Duration = Duration::from_millis(120);

/// A running call of a multi-node group.
pub(super) struct Executor<'a> {
    /// Runs collectives of the ranks of this node.
    pub(super) inner: &'a RefCell<Runner>,
    pub(super) hosts: &'a Hosts,
    pub(super) layout: &'a HostMap,
    pub(super) rank: Rank,
    pub(super) call: &'a Call<'a>,
    /// The user's call; `call` may be a part of it.
    pub(super) asked: &'a Call<'a>,
    pub(super) limit: &'a Limit,
    pub(super) sequence: u64,
    /// Number of the call in the flight recorder.
    pub(super) entry: u64,
}

/// Memory of this process for data in transit.
pub(super) struct Scratch(Vec<u8>);

impl Scratch {
    pub(super) fn new(bytes: usize) -> Self {
        Self(vec![0; bytes])
    }

    pub(super) fn span(&mut self) -> Span {
        Span { addr: self.0.as_mut_ptr().addr(), bytes: self.0.len() }
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.0
    }
}

/// Copies `from` to `to`, which must have the same length.
pub(super) fn copy(from: Span, to: Span) {
    assert_eq!(from.bytes, to.bytes, "a copy of unequal lengths");
    if from.bytes > 0 {
        // SAFETY: both are spans of a program, or slots and scratch memory, of this length. The call promises its
        // tensors (`Call::new`), and no step's source overlaps its target (`two_level::check`).
        unsafe { cpu::copy(to.ptr(), from.ptr(), from.bytes, Store::Cached) }
    }
}

impl Executor<'_> {
    pub(super) fn host(&self) -> usize {
        self.layout.host(self.rank)
    }

    pub(super) fn local(&self) -> usize {
        self.layout.local(self.rank)
    }

    /// Number of ranks on this node.
    pub(super) fn locals(&self) -> usize {
        self.layout.members(self.host()).len()
    }

    /// Returns a collective of the ranks of this node that moves bytes; the first of them is its root.
    pub(super) fn inner_bytes(&self, op: Op, inputs: Vec<Span>, outputs: Vec<Span>) -> Call<'static> {
        let (inputs, outputs, factor) = (inputs.into(), outputs.into(), self.call.factor);
        Call::inner(Spec { op, reduce_op: ReduceOp::Sum, factor, inputs, outputs, ..Spec::barrier(None) })
    }

    /// Runs collectives of the ranks of this node. Their memory is staging, or parts of the spans of this call.
    pub(super) fn inside(&self, calls: &[Call<'_>]) -> Result<()> {
        self.inside_within(calls, self.limit.left().unwrap_or_default() + GRACE)
    }

    /// As `inside`, but waits for at most `limit`, because no rank could report more after that.
    pub(super) fn inside_within(&self, calls: &[Call<'_>], limit: Duration) -> Result<()> {
        self.begin(Phase::Inside);
        let (mut inner, limit) = (self.inner.borrow_mut(), Limit::from_first_wait(limit));
        calls.iter().try_for_each(|call| inner.run(call, &limit))
    }

    /// Records in the flight recorder that `phase` starts.
    pub(super) fn begin(&self, phase: Phase) {
        self.hosts.health.recorder().phase(self.entry, phase);
        self.hosts.current.phase(matches!(phase, Phase::Rail(_)));
    }

    /// The name of the group.
    pub(super) fn group(&self) -> &str {
        self.hosts.health.control().name()
    }

    /// The name of the call in messages.
    pub(super) fn about(&self) -> String {
        format!("{} #{} of group \"{}\"", Description::of(self.asked), self.sequence, self.group())
    }
}

/// This rank's rail, within a call.
pub(super) struct Between<'a> {
    executor: &'a Executor<'a>,
    rail: Arc<Held>,
    addr: usize,
    /// Offset of the first byte of staging that a call may use.
    pub(super) begin: usize,
}

impl<'a> Between<'a> {
    /// Creates the rail of `executor`'s rank, whose staging is at `addr`; calls may use it from `begin` on.
    pub(super) fn new(executor: &'a Executor<'a>, addr: usize, begin: usize, rail: Arc<Held>) -> Self {
        Self { executor, rail, addr, begin }
    }

    /// Returns the staging from offset `at` on; slots are before `begin`.
    pub(super) fn staged(&self, at: usize, bytes: usize) -> Span {
        Span { addr: self.addr + at, bytes }
    }

    /// Starts a transfer of a program, whose memory is the staging from `begin` on.
    pub(super) fn start_at(&self, transfer: &Transfer<Place>) -> Result<()> {
        self.start(&transfer.map(|place| Span { addr: self.begin + place.span.addr, ..place.span }))
    }

    /// Starts `transfer`.
    pub(super) fn start(&self, transfer: &Transfer<Span>) -> Result<()> {
        let left = self.executor.limit.left().ok_or_else(|| self.late())?;
        let executor = self.executor;
        executor.hosts.traffic.add(Path::Rail(executor.local()), transfer.bytes(executor.host(), executor.layout.hosts()));
        self.rail.start(transfer, left).map_err(|error| self.broken(error))
    }

    /// Waits until the oldest pending transfer has ended; fails if this node fails meanwhile.
    pub(super) fn finish(&self) -> Result<()> {
        let executor = self.executor;
        executor.begin(Phase::Rail(executor.local() as u16));
        let mut interrupts = Interrupts::new();
        loop {
            interrupts.check()?;
            let left = executor.limit.left().ok_or_else(|| self.missed())?;
            let failed = |error| if executor.limit.left().is_none() { self.missed() } else { self.broken(error) };
            if self.rail.wait(left.min(LOOK)).map_err(failed)? {
                return Ok(());
            }
            executor.hosts.health.error().map_or(Ok(()), Err)?;
        }
    }

    /// Returns the error after the deadline. Another rank or node may know which rank is missing.
    fn missed(&self) -> Error {
        let executor = self.executor;
        executor.hosts.health.cause(executor.local(), HEAR).unwrap_or_else(|| self.late())
    }

    fn late(&self) -> Error {
        let executor = self.executor;
        let (waited, local) = (executor.limit.waited().as_secs_f64(), executor.local());
        let (about, me) = (executor.about(), executor.layout.describe(executor.rank));
        let others = executor.hosts.news.late(executor.sequence).unwrap_or_else(|| executor.layout.name_others(executor.host()));
        Error::timeout(format!("{about}: {me} waited {waited:.1} s until its timeout on rail {local} for {others}"))
    }

    /// Returns the error for a lost rail. A node reports why it failed before its rails close; its deadline may have
    /// passed just before this one's.
    fn broken(&self, error: Error) -> Error {
        let executor = self.executor;
        executor.hosts.health.cause(executor.local(), executor.limit.left().unwrap_or_default().max(HEAR)).unwrap_or_else(|| {
            let (about, me, others) =
                (executor.about(), executor.layout.describe(executor.rank), executor.layout.name_others(executor.host()));
            let local = executor.local();
            Error::peer(format!("{about}: {me} lost rail {local} to {others}: {}", error.message))
        })
    }
}
