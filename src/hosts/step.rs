//! Step: one collective that is under way on several hosts, and what every collective is made of.
#![allow(unsafe_code, reason = "copies between staging and the bytes of tensors")]

use super::header::Header;
use super::rail::{Rail, Transfer};
use super::slices::joined;
use super::{Shared, slices};
use crate::boot::hosts::Layout;
use crate::coll::call::{Call, Op, Span};
use crate::coll::describe::Description;
use crate::dtype::{DType, ReduceOp};
use crate::error::{Error, Result};
use crate::group::Group;
use crate::kernels::cpu::{self, Store};
use crate::rank::Rank;
use crate::sync::limit::Limit;
use crate::sys::interrupt::Interrupts;
use std::sync::Arc;
use std::time::Duration;

/// Time between two looks at the own host while a rail is waited for.
const LOOK: Duration = Duration::from_millis(20);

/// Time past the deadline in which ranks of a host still hear from the one among them that waited for the other hosts, and knows more.
const GRACE: Duration = Duration::from_millis(40);

pub(super) struct Step<'a> {
    pub(super) inner: &'a Group,
    pub(super) layout: &'a Layout,
    pub(super) shared: &'a Shared,
    pub(super) rank: Rank,
    pub(super) call: &'a Call,
    pub(super) limit: &'a Limit,
    pub(super) sequence: u64,
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

/// The empty span.
pub(super) const NOTHING: Span = Span { addr: 0, bytes: 0 };

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
    joined(spans).unwrap_or_else(|| {
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
    pub(super) fn inner_call(&self, op: Op, inputs: Vec<Span>, outputs: Vec<Span>) -> Call {
        Call { op, root: Rank(0), inputs, outputs, call_site: None, ..*self.call }
    }

    /// A collective of the ranks of this host that moves bytes.
    pub(super) fn inner_bytes(&self, op: Op, inputs: Vec<Span>, outputs: Vec<Span>) -> Call {
        Call { dtype: DType::U8, reduce_op: ReduceOp::Sum, ..self.inner_call(op, inputs, outputs) }
    }

    /// Runs collectives of the ranks of this host.
    pub(super) fn inside(&self, calls: Vec<Call>) -> Result<()> {
        let left = self.limit.left().unwrap_or_default() + GRACE;
        self.inner.run(calls, Some(left))
    }

    /// The name of the call in messages.
    fn about(&self) -> String {
        format!("{} #{} of group \"{}\"", Description::of(self.call), self.sequence, self.inner.control().name())
    }

    /// Returns once all ranks of this host were found to run the same call.
    pub(super) fn agree_inside(&self) -> Result<()> {
        if self.locals() == 1 {
            return Ok(());
        }
        let mut own = Header::of(self.call, self.sequence).to_bytes();
        let mut all = Scratch::new(self.locals() * Header::BYTES);
        let whole = all.span();
        let outputs = (0..self.locals()).map(|local| slices::part(whole, &(local * Header::BYTES..(local + 1) * Header::BYTES))).collect();
        let own = Span { addr: own.as_mut_ptr().addr(), bytes: Header::BYTES };
        self.inside(vec![self.inner_bytes(Op::AllGather, vec![own], outputs)])?;
        Header::agree(all.bytes(), self.layout.members(self.host()), self.layout, self.inner.control().name())
    }

    /// Rail of this rank, if it is among the first `rails`, once its ranks were found to run the same call. It has `bytes` bytes of
    /// staging, which begin at the returned place: headers come before.
    ///
    /// Every call begins on every rail that it uses with one message of one length, whatever the call is: backends may end the process
    /// where lengths differ.
    pub(super) fn agree_between(&self, rails: usize, bytes: usize) -> Result<Option<Between<'_>>> {
        if self.local() >= rails {
            return Ok(None);
        }
        let hosts = self.layout.hosts();
        let begin = ((hosts + 1) * Header::BYTES).next_multiple_of(64);
        let rail = self.shared.rail()?;
        let between = Between { step: self, addr: rail.staging(begin + bytes)?, begin, rail };
        let own = Header::of(self.call, self.sequence).to_bytes();
        let header = Span { addr: own.as_ptr().addr(), bytes: own.len() };
        copy(header, Span { addr: between.addr, ..header });
        between.run(&Transfer::AllGather { from: 0, each: Header::BYTES, to: Header::BYTES })?;
        let mut shown = Scratch::new(hosts * Header::BYTES);
        copy(Span { addr: between.addr + Header::BYTES, bytes: hosts * Header::BYTES }, shown.span());
        let ranks: Vec<Rank> = (0..hosts).map(|host| self.layout.members(host)[self.local()]).collect();
        Header::agree(shown.bytes(), &ranks, self.layout, self.inner.control().name())?;
        Ok(Some(between))
    }
}

/// This rank's rail, within a call on which all ranks agree.
pub(super) struct Between<'a> {
    pub(super) step: &'a Step<'a>,
    rail: Arc<dyn Rail>,
    addr: usize,
    /// Place of the first byte that a call may use.
    pub(super) begin: usize,
}

impl Between<'_> {
    /// Staging from place `at` on.
    pub(super) fn staged(&self, at: usize, bytes: usize) -> Span {
        Span { addr: self.addr + at, bytes }
    }

    /// Runs `transfer`, watching this host meanwhile.
    pub(super) fn run(&self, transfer: &Transfer<'_>) -> Result<()> {
        let (step, shared) = (self.step, self.step.shared);
        let late = || {
            let (waited, local) = (step.limit.waited().as_secs_f64(), step.local());
            Error::timeout(format!(
                "{}: {} waited {waited:.1} s on rail {local} for {} (timeout)",
                step.about(),
                step.layout.describe(step.rank),
                step.layout.name_others(step.host())
            ))
        };
        let broken = |error: Error| {
            // A host says why it failed before its rails close.
            shared.cause(step.inner, step.local(), step.limit.left().unwrap_or_default()).unwrap_or_else(|| {
                let others = step.layout.name_others(step.host());
                let (about, me, local) = (step.about(), step.layout.describe(step.rank), step.local());
                Error::peer(format!("{about}: {me} lost rail {local} to {others}: {}", error.message))
            })
        };
        self.rail.start(transfer, step.limit.left().ok_or_else(late)?).map_err(broken)?;
        let mut interrupts = Interrupts::new();
        loop {
            interrupts.check()?;
            let left = step.limit.left().ok_or_else(late)?;
            if self.rail.wait(left.min(LOOK)).map_err(|error| if step.limit.left().is_none() { late() } else { broken(error) })? {
                return Ok(());
            }
            step.inner.error().map_or(Ok(()), Err)?;
        }
    }
}
