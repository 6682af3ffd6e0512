//! Opening: the start of every call. Ranks exchange the descriptions of their calls, and with them all data that fit.

use super::executor::{Between, Executor, Scratch, copy};
use super::header::Header;
use crate::coll::call::{Op, Span};
use crate::coll::two_level::Lengths;
use crate::coll::two_level::slices::part;
use crate::coll::two_level::step::Transfer;
use crate::error::{Error, Result};
use crate::rank::Rank;
use std::sync::Arc;

/// Size of a slot, which contains a header and records. In every call each rank sends one to the ranks of its node, and
/// each node sends one to the other nodes.
pub(super) const SLOT: usize = 1024;
/// Maximum number of bytes of records in a slot.
const ROOM: usize = SLOT - Header::BYTES;
/// Size of the rank's factor, with which a record starts.
const FACTOR: usize = 8;

/// An opened call: this rank's rail, and the slots of all nodes, once rail 0 has received them.
pub(super) struct Opening<'a> {
    executor: &'a Executor<'a>,
    /// This rank's rail, if the call uses it.
    pub(super) between: Option<Between<'a>>,
    slots: Scratch,
}

impl Executor<'_> {
    /// Returns the number of bytes that `rank` contributes to this call, if all ranks know it. For an all_to_all it
    /// assumes that every rank contributes as much as this one.
    pub(super) fn given(&self, rank: Rank) -> usize {
        let (n, agreed) = (self.layout.size(), self.call.agreed_bytes() as usize);
        let of_root = |bytes: usize| if rank == self.call.root { bytes } else { 0 };
        match self.call.op {
            Op::Barrier => 0,
            Op::AllReduce | Op::Reduce | Op::Gather | Op::ReduceScatter | Op::AllReduceAddRmsNorm => agreed,
            Op::Broadcast => of_root(agreed),
            Op::Scatter => of_root(n * agreed),
            Op::AllGather => self.call.outputs[rank.index()].bytes,
            Op::AllToAll => self.call.inputs.iter().map(|span| span.bytes).sum(),
        }
    }

    /// Returns the size of the record of `rank` in a slot.
    fn record_bytes(&self, rank: Rank) -> usize {
        let given = self.given(rank);
        if given == 0 { 0 } else { FACTOR + given }
    }

    /// Returns true if the contributions of each node's ranks fit into a slot; they are then exchanged with the
    /// headers.
    pub(super) fn is_short(&self) -> bool {
        let records = |host: usize| self.layout.members(host).iter().map(|&rank| self.record_bytes(rank)).sum::<usize>();
        (0..self.layout.hosts()).all(|host| records(host) <= ROOM)
    }

    /// 1. Intra-node: ranks exchange and compare their headers. 2. Inter-node: rail 0 starts to exchange the headers of
    ///    the nodes; [`Opening::agree`] completes that. Ranks with one of the first `rails` rails get `bytes` bytes of
    ///    staging.
    ///
    /// The first transfer of every call is on rail 0 and has the same length for all calls, because some backends end
    /// the process if lengths differ. It starts only after all ranks of the node were found to run the same call.
    pub(super) fn open(&self, rails: usize, bytes: usize) -> Result<Opening<'_>> {
        let even = self.even();
        let short = self.is_short() && (self.call.op != Op::AllToAll || even.is_some());
        let mut own = [0; SLOT];
        own[..Header::BYTES].copy_from_slice(&Header::of(self.asked, self.sequence).to_bytes(even));
        if short && self.given(self.rank) > 0 {
            self.record(&mut own[Header::BYTES..]);
        }
        let mut shown = Scratch::new(self.locals() * SLOT);
        if self.locals() == 1 {
            copy(Span { addr: own.as_ptr().addr(), bytes: SLOT }, shown.span());
        } else {
            let whole = shown.span();
            let outputs = (0..self.locals()).map(|local| part(whole, &(local * SLOT..(local + 1) * SLOT))).collect();
            let own = Span { addr: own.as_mut_ptr().addr(), bytes: SLOT };
            // A rank that does not arrive by the deadline is missing; no other rank knows more.
            let show = self.inner_bytes(Op::AllGather, vec![own], outputs);
            self.inside_within(&[show], self.limit.left().unwrap_or_default())?;
        }
        let here = self.layout.members(self.host());
        let even = Header::agree(shown.bytes(), SLOT, here, self.layout, self.group())?;
        let opening = self.opened(rails, bytes)?;
        if let Some(between) = opening.between.as_ref().filter(|_| self.local() == 0) {
            let mut slot = [0; SLOT];
            slot[..Header::BYTES].copy_from_slice(&Header::of(self.asked, self.sequence).to_bytes(even));
            let mut end = Header::BYTES;
            for (&rank, shown) in here.iter().zip(shown.bytes().chunks_exact(SLOT)).filter(|_| short) {
                let record = self.record_bytes(rank);
                // If the lengths of an all_to_all are unequal, no rank reads the records, and they may not fit.
                let (Some(to), Some(from)) = (slot.get_mut(end..end + record), shown.get(Header::BYTES..Header::BYTES + record)) else {
                    break;
                };
                to.copy_from_slice(from);
                end += record;
            }
            copy(Span { addr: slot.as_ptr().addr(), bytes: SLOT }, between.staged(0, SLOT));
            let whole = Span { addr: SLOT, bytes: self.layout.hosts() * SLOT };
            between.start(&Transfer::AllGather { from: Span { addr: 0, bytes: SLOT }, to: whole })?;
        }
        Ok(opening)
    }

    /// Returns the result of [`Self::open`] for a call that all nodes were found to run.
    pub(super) fn opened(&self, rails: usize, bytes: usize) -> Result<Opening<'_>> {
        let between = if self.local() < rails { Some(self.between(bytes)?) } else { None };
        Ok(Opening { executor: self, between, slots: Scratch::new(self.layout.hosts() * SLOT) })
    }

    /// Returns this rank's rail, with `bytes` bytes of staging.
    fn between(&self, bytes: usize) -> Result<Between<'_>> {
        let begin = (self.layout.hosts() + 1) * SLOT;
        let rail = self.hosts.rail()?;
        Ok(Between::new(self, rail.staging(begin + bytes)?, begin, Arc::clone(&rail)))
    }

    /// Exchanges the lengths of all ranks; fails if a sender's and its receiver's differ.
    pub(super) fn told_lengths(&self) -> Result<Lengths> {
        let n = self.layout.size();
        let words = self.tell_all(self.call.inputs.iter().chain(&*self.call.outputs).map(|span| span.bytes as u64).collect())?;
        let sent: Vec<usize> = words.chunks_exact(2 * n).flat_map(|row| row[..n].iter().map(|&bytes| bytes as usize)).collect();
        for (from, to) in (0..n).flat_map(|from| (0..n).map(move |to| (from, to))) {
            let (gives, takes) = (words[from * 2 * n + to], words[to * 2 * n + n + from]);
            if gives != takes {
                let [from, to] = [from, to].map(|rank| self.layout.describe(Rank(rank as u32)));
                let (group, sequence) = (self.group(), self.sequence);
                return Err(Error::mismatch(format!(
                    "ranks of group \"{group}\" do not agree: {from} sends {gives} bytes to {to} in all_to_all #{sequence}, which expects \
                     {takes}"
                )));
            }
        }
        Ok(Lengths::Each { sent, n })
    }

    /// Returns the words of all ranks, in rank order; every rank passes the same number of words.
    fn tell_all(&self, mut words: Vec<u64>) -> Result<Vec<u64>> {
        let (host, hosts, row) = (self.host(), self.layout.hosts(), words.len() * 8);
        let most = (0..hosts).map(|host| self.layout.members(host).len()).max().unwrap_or(0) * row;
        let mut all = Scratch::new(hosts * most);
        let whole = all.span();
        let mine = part(whole, &(host * most..host * most + self.locals() * row));
        let own = Span { addr: words.as_mut_ptr().addr(), bytes: row };
        let rows = (0..self.locals()).map(|local| part(mine, &(local * row..(local + 1) * row))).collect();
        self.inside(&[self.inner_bytes(Op::AllGather, vec![own], rows)])?;
        if self.local() == 0 {
            let between = self.between((hosts + 1) * most)?;
            let (from, to) = (Span { addr: between.begin, bytes: most }, Span { addr: between.begin + most, ..whole });
            copy(mine, between.staged(from.addr, mine.bytes));
            between.start(&Transfer::AllGather { from, to })?;
            between.finish()?;
            copy(between.staged(to.addr, whole.bytes), whole);
        }
        let (inputs, outputs) = if self.local() == 0 { (vec![whole], vec![]) } else { (vec![], vec![whole]) };
        self.inside(&[self.inner_bytes(Op::Broadcast, inputs, outputs)])?;
        let at = |rank: Rank| self.layout.host(rank) * most + self.layout.local(rank) * row;
        let rows = (0..self.layout.size() as u32).map(Rank).flat_map(|rank| all.bytes()[at(rank)..at(rank) + row].chunks_exact(8));
        Ok(rows.map(|word| u64::from_le_bytes(word.try_into().unwrap_or_default())).collect())
    }

    /// Writes this rank's record: its factor, then its data.
    fn record(&self, slot: &mut [u8]) {
        slot[..FACTOR].copy_from_slice(&self.call.factor.to_bits().to_le_bytes());
        let mut at = slot.as_mut_ptr().addr() + FACTOR;
        for &input in &*self.call.inputs {
            copy(input, Span { addr: at, ..input });
            at += input.bytes;
        }
    }

    /// Returns the one length of all inputs and outputs of this rank in an all_to_all; `None` if lengths differ.
    fn even(&self) -> Option<usize> {
        let first = self.call.inputs.first().filter(|_| self.call.op == Op::AllToAll)?.bytes;
        self.call.inputs.iter().chain(&*self.call.outputs).all(|span| span.bytes == first).then_some(first)
    }
}

impl Opening<'_> {
    /// Waits until all nodes were found to run the same call: on local rank 0, and on all ranks if there are several
    /// `rails`. With one rail the other ranks learn it when they next meet local rank 0.
    pub(super) fn agree(&mut self, rails: usize) -> Result<()> {
        self.compare()?;
        let executor = self.executor;
        if rails > 1 && executor.locals() > 1 {
            executor.inside(&[executor.inner_bytes(Op::Barrier, vec![], vec![])])?;
        }
        Ok(())
    }

    /// Returns the slots of all nodes on every rank, once all nodes were found to run the same call.
    pub(super) fn told(mut self) -> Result<Slots> {
        self.compare()?;
        let Self { executor, mut slots, .. } = self;
        if executor.locals() > 1 {
            let spans = vec![slots.span()];
            let (inputs, outputs) = if executor.local() == 0 { (spans, vec![]) } else { (vec![], spans) };
            executor.inside(&[executor.inner_bytes(Op::Broadcast, inputs, outputs)])?;
        }
        Ok(Slots { even: Header::common(slots.bytes(), SLOT), bytes: slots })
    }

    /// On local rank 0: waits for the slots of all nodes and compares them.
    fn compare(&mut self) -> Result<()> {
        let executor = self.executor;
        let Some(between) = self.between.as_ref().filter(|_| executor.local() == 0) else { return Ok(()) };
        between.finish()?;
        let whole = self.slots.span();
        copy(between.staged(SLOT, whole.bytes), whole);
        let ranks: Vec<Rank> = (0..executor.layout.hosts()).map(|host| executor.layout.members(host)[0]).collect();
        Header::agree(self.slots.bytes(), SLOT, &ranks, executor.layout, executor.group()).map(drop)
    }
}

/// The slots of all nodes.
pub(super) struct Slots {
    bytes: Scratch,
    /// The one length of all inputs and outputs in an all_to_all; `None` if lengths differ.
    pub(super) even: Option<usize>,
}

impl Slots {
    /// Returns the factor and the data of each rank in a short call, by node and local rank.
    pub(super) fn records<'a>(&'a self, executor: &'a Executor<'_>) -> Vec<Vec<(f64, &'a [u8])>> {
        let of_host = |(host, slot): (usize, &'a [u8])| {
            let mut rest = &slot[Header::BYTES..];
            let mut next = |&rank: &Rank| {
                let (record, others) = rest.split_at(executor.record_bytes(rank));
                rest = others;
                let (factor, given) = record.split_at(FACTOR.min(record.len()));
                (f64::from_bits(u64::from_le_bytes(factor.try_into().unwrap_or_default())), given)
            };
            executor.layout.members(host).iter().map(&mut next).collect()
        };
        self.bytes.bytes().chunks_exact(SLOT).enumerate().map(of_host).collect()
    }
}
