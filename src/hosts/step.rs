//! Step: one collective that is under way on several hosts, and what every collective is made of.
#![allow(unsafe_code, reason = "copies between staging and the bytes of tensors")]

use super::Shared;
use super::held::Held;
use super::rail::Transfer;
use super::traffic::Path;
use crate::coll::call::{Call, Op, Span, Spec};
use crate::coll::cost::wire::Thresholds;
use crate::coll::describe::Description;
use crate::coll::two_level::slices;
use crate::dtype::{DType, ReduceOp};
use crate::error::{Error, Result};
use crate::group::Group;
use crate::host_map::HostMap;
use crate::kernels::cpu::{self, Store};
use crate::rank::Rank;
use crate::sync::limit::Limit;
use crate::sys::interrupt::Interrupts;
use crate::trace::Phase;
use std::sync::Arc;
use std::time::Duration;

/// Time between two looks at the own host while a rail is waited for.
const LOOK: Duration = Duration::from_millis(20);

/// Time past the deadline in which who waits for another host still hears from there who is missing.
pub(super) const HEAR: Duration = Duration::from_millis(80);

/// Time past the deadline in which ranks of a host still hear from the one among them that waited for the other hosts, and knows more.
pub(super) const GRACE: Duration = Duration::from_millis(120);

pub(super) struct Step<'a> {
    pub(super) inner: &'a Group,
    pub(super) layout: &'a HostMap,
    pub(super) shared: &'a Shared,
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
        // SAFETY: both are spans of tensors, of staging or of scratch memory, of this length; none of a step's sources overlaps its target:
        // tensors overlap in place only, where the caller copies nothing, and staging and scratch are apart from all.
        unsafe { cpu::copy(to.ptr(), from.ptr(), from.bytes, Store::Cached) }
    }
}

/// Copies `from` into `spans`, one after the other.
pub(super) fn spread(from: Span, spans: &[Span]) {
    let mut at = 0;
    for &span in spans {
        copy(slices::part(from, &(at..at + span.bytes)), span);
        at += span.bytes;
    }
}

/// `spans` as one: where they do not follow each other, a copy of them in `scratch`.
pub(super) fn contiguous(spans: &[Span], scratch: &mut Vec<Scratch>) -> Span {
    Span::joined(spans).unwrap_or_else(|| {
        let mut copied = Scratch::new(spans.iter().map(|span| span.bytes).sum());
        let whole = copied.span();
        let mut at = 0;
        for &span in spans {
            copy(span, slices::part(whole, &(at..at + span.bytes)));
            at += span.bytes;
        }
        scratch.push(copied);
        whole
    })
}

impl Step<'_> {
    /// Runs the call.
    pub(super) fn run(&self) -> Result<()> {
        match self.call.op {
            Op::AllToAll => self.all_to_all(),
            Op::Barrier => self.short(),
            Op::Broadcast | Op::AllReduce | Op::Reduce | Op::AllGather | Op::Gather | Op::Scatter | Op::ReduceScatter
                if self.is_short() =>
            {
                self.short()
            }
            Op::Broadcast => self.broadcast(),
            Op::AllReduce | Op::Reduce => self.all_reduce(),
            Op::AllGather => self.all_gather(),
            Op::ReduceScatter => self.reduce_scatter(),
            Op::Gather | Op::Scatter => self.gather_or_scatter(),
            Op::AllReduceAddRmsNorm => self.norm(),
        }
    }

    /// Thresholds that all ranks go by.
    pub(super) fn thresholds(&self) -> &Thresholds {
        self.shared.thresholds()
    }

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

    /// A collective of the ranks of this host on elements of the call's type, with its operation.
    pub(super) fn inner_call(&self, op: Op, inputs: Vec<Span>, outputs: Vec<Span>) -> Spec<'static> {
        let Spec { dtype, reduce_op, factor, .. } = **self.call;
        let (inputs, outputs) = (inputs.into(), outputs.into());
        Spec { op, dtype, reduce_op, root: Rank(0), factor, inputs, outputs, call_site: None }
    }

    /// A collective of the ranks of this host that moves bytes.
    pub(super) fn inner_bytes(&self, op: Op, inputs: Vec<Span>, outputs: Vec<Span>) -> Spec<'static> {
        Spec { dtype: DType::U8, reduce_op: ReduceOp::Sum, ..self.inner_call(op, inputs, outputs) }
    }

    /// Runs collectives of the ranks of this host. Their memory is staging, or parts of the spans of this call.
    pub(super) fn inside(&self, calls: Vec<Spec<'static>>) -> Result<()> {
        self.begin(Phase::Inside);
        let left = self.limit.left().unwrap_or_default() + GRACE;
        self.inner.run(&calls.into_iter().map(Call::inner).collect::<Vec<_>>(), Some(left))
    }

    /// Notes in the flight recorder that `phase` begins.
    pub(super) fn begin(&self, phase: Phase) {
        self.inner.recorder().phase(self.entry, phase);
        self.shared.current.phase(matches!(phase, Phase::Rail(_)));
    }

    /// The name of the call in messages.
    pub(super) fn about(&self) -> String {
        format!("{} #{} of group \"{}\"", Description::of(self.asked), self.sequence, self.inner.control().name())
    }
}

/// This rank's rail, within a call.
pub(super) struct Between<'a> {
    pub(super) step: &'a Step<'a>,
    rail: Arc<Held>,
    addr: usize,
    /// Place of the first byte that a call may use.
    pub(super) begin: usize,
}

impl<'a> Between<'a> {
    /// The rail of `step`'s rank, whose staging is at `addr`; calls may use it from `begin` on.
    pub(super) fn new(step: &'a Step<'a>, addr: usize, begin: usize, rail: Arc<Held>) -> Self {
        Self { step, rail, addr, begin }
    }

    /// Staging from place `at` on; slots are before `begin`.
    pub(super) fn staged(&self, at: usize, bytes: usize) -> Span {
        Span { addr: self.addr + at, bytes }
    }

    /// Runs `transfer`, watching this host meanwhile.
    pub(super) fn run(&self, transfer: &Transfer<'_>) -> Result<()> {
        self.start(transfer)?;
        self.finish()
    }

    /// Begins to bring `lengths[h]` bytes of each host `h` to all others, the own ones from `from`; [`Self::shared`] says where they come.
    pub(super) fn share(&self, from: usize, lengths: &[usize], to: usize) -> Result<()> {
        let Ok([a, b]) = <[usize; 2]>::try_from(lengths) else {
            return self.start(&Transfer::AllGather { from, each: lengths.iter().copied().max().unwrap_or(0), to });
        };
        // Nothing goes to the own host, as it would in an all_gather.
        let (sent, received) = if self.step.host() == 0 { ([0, a], [0, b]) } else { ([b, 0], [a, 0]) };
        self.start(&Transfer::AllToAll { from, sent: &sent, to, received: &received })
    }

    /// What a [`Self::share`] of `lengths` has brought of `host`.
    pub(super) fn shared(&self, from: usize, lengths: &[usize], to: usize, host: usize) -> Span {
        let at = match lengths.len() {
            2 if host == self.step.host() => from,
            2 => to,
            _ => to + host * lengths.iter().copied().max().unwrap_or(0),
        };
        self.staged(at, lengths[host])
    }

    /// Begins `transfer`.
    pub(super) fn start(&self, transfer: &Transfer<'_>) -> Result<()> {
        let left = self.step.limit.left().ok_or_else(|| self.late())?;
        let step = self.step;
        step.shared.traffic.add(Path::Rail(step.local()), transfer.bytes(step.host(), step.layout.hosts()));
        self.rail.start(transfer, left).map_err(|error| self.broken(error))
    }

    /// Waits for the end of the oldest transfer that is under way, watching this host meanwhile.
    pub(super) fn finish(&self) -> Result<()> {
        let step = self.step;
        step.begin(Phase::Rail(step.local() as u16));
        let mut interrupts = Interrupts::new();
        loop {
            interrupts.check()?;
            let left = step.limit.left().ok_or_else(|| self.missed())?;
            let failed = |error| if step.limit.left().is_none() { self.missed() } else { self.broken(error) };
            if self.rail.wait(left.min(LOOK)).map_err(failed)? {
                return Ok(());
            }
            step.inner.error().map_or(Ok(()), Err)?;
        }
    }

    /// The deadline has passed. The host that knows more says who is missing.
    fn missed(&self) -> Error {
        let step = self.step;
        step.shared.cause(step.inner, step.local(), HEAR).unwrap_or_else(|| self.late())
    }

    fn late(&self) -> Error {
        let step = self.step;
        let (waited, local) = (step.limit.waited().as_secs_f64(), step.local());
        let (about, me) = (step.about(), step.layout.describe(step.rank));
        let others = step.shared.news.late(step.sequence).unwrap_or_else(|| step.layout.name_others(step.host()));
        Error::timeout(format!("{about}: {me} waited {waited:.1} s until its timeout on rail {local} for {others}"))
    }

    /// A host says why it failed before its rails close. Its deadline may have passed just before this one's.
    fn broken(&self, error: Error) -> Error {
        let step = self.step;
        step.shared.cause(step.inner, step.local(), step.limit.left().unwrap_or_default().max(HEAR)).unwrap_or_else(|| {
            let (about, me, others) = (step.about(), step.layout.describe(step.rank), step.layout.name_others(step.host()));
            let local = step.local();
            Error::peer(format!("{about}: {me} lost rail {local} to {others}: {}", error.message))
        })
    }
}
