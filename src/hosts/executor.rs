//! Executor: a call on CPU tensors that is under way on several hosts, and its rank's rail.
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

/// Time between two looks at the own host while a rail is waited for.
const LOOK: Duration = Duration::from_millis(20);

/// Time past the deadline in which who waits for another host still hears from there who is missing.
pub(super) const HEAR: Duration = Duration::from_millis(80);

/// Time past the deadline in which ranks of a host still hear from the one among them that waited for the other hosts, and knows more.
pub(super) const GRACE: Duration = Duration::from_millis(120);

/// A call that is under way on several hosts.
pub(super) struct Executor<'a> {
    /// Runs collectives of the ranks of this host.
    pub(super) inner: &'a RefCell<Runner>,
    pub(super) hosts: &'a Hosts,
    pub(super) layout: &'a HostMap,
    pub(super) rank: Rank,
    pub(super) call: &'a Call<'a>,
    /// Call of the user, of which `call` may be a part.
    pub(super) asked: &'a Call<'a>,
    pub(super) limit: &'a Limit,
    pub(super) sequence: u64,
    /// Number of the call in the flight recorder.
    pub(super) entry: u64,
}

/// Bytes of this process that hold what is on its way.
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

/// Copies `from` to `to`, which is as long.
pub(super) fn copy(from: Span, to: Span) {
    assert_eq!(from.bytes, to.bytes, "a copy of unequal lengths");
    if from.bytes > 0 {
        // SAFETY: both are places of a program, or slots and scratch memory, of this length. The call promises its tensors (`Call::new`), and
        // no step's source overlaps its target (`two_level::check`).
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

    /// Number of ranks on this host.
    pub(super) fn locals(&self) -> usize {
        self.layout.members(self.host()).len()
    }

    /// A collective of the ranks of this host that moves bytes; the first of them is its root.
    pub(super) fn inner_bytes(&self, op: Op, inputs: Vec<Span>, outputs: Vec<Span>) -> Call<'static> {
        let (inputs, outputs, factor) = (inputs.into(), outputs.into(), self.call.factor);
        Call::inner(Spec { op, reduce_op: ReduceOp::Sum, factor, inputs, outputs, ..Spec::barrier(None) })
    }

    /// Runs collectives of the ranks of this host. Their memory is staging, or parts of the spans of this call.
    pub(super) fn inside(&self, calls: &[Call<'_>]) -> Result<()> {
        self.inside_within(calls, self.limit.left().unwrap_or_default() + GRACE)
    }

    /// As `inside`, but for at most `limit`: no other rank knows more after that.
    pub(super) fn inside_within(&self, calls: &[Call<'_>], limit: Duration) -> Result<()> {
        self.begin(Phase::Inside);
        let (mut inner, limit) = (self.inner.borrow_mut(), Limit::from_first_wait(limit));
        calls.iter().try_for_each(|call| inner.run(call, &limit))
    }

    /// Notes in the flight recorder that `phase` begins.
    pub(super) fn begin(&self, phase: Phase) {
        self.hosts.health.recorder().phase(self.entry, phase);
        self.hosts.current.phase(matches!(phase, Phase::Rail(_)));
    }

    /// Name of the group.
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
    /// Place of the first byte that a call may use.
    pub(super) begin: usize,
}

impl<'a> Between<'a> {
    /// The rail of `executor`'s rank, whose staging is at `addr`; calls may use it from `begin` on.
    pub(super) fn new(executor: &'a Executor<'a>, addr: usize, begin: usize, rail: Arc<Held>) -> Self {
        Self { executor, rail, addr, begin }
    }

    /// Staging from place `at` on; slots are before `begin`.
    pub(super) fn staged(&self, at: usize, bytes: usize) -> Span {
        Span { addr: self.addr + at, bytes }
    }

    /// Begins a transfer of a program, whose memory is the staging behind `begin`.
    pub(super) fn start_at(&self, transfer: &Transfer<Place>) -> Result<()> {
        self.start(&transfer.map(|place| Span { addr: self.begin + place.span.addr, ..place.span }))
    }

    /// Begins `transfer`.
    pub(super) fn start(&self, transfer: &Transfer<Span>) -> Result<()> {
        let left = self.executor.limit.left().ok_or_else(|| self.late())?;
        let executor = self.executor;
        executor.hosts.traffic.add(Path::Rail(executor.local()), transfer.bytes(executor.host(), executor.layout.hosts()));
        self.rail.start(transfer, left).map_err(|error| self.broken(error))
    }

    /// Waits for the end of the oldest transfer that is under way, watching this host meanwhile.
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

    /// The deadline has passed. The host that knows more says who is missing.
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

    /// A host says why it failed before its rails close. Its deadline may have passed just before this one's.
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
