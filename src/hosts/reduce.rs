//! all_reduce, reduce and reduce_scatter on several hosts.
//!
//! Whatever the size and the rails, an element is combined over the ranks of each host in their order, rounded once, then over the hosts in
//! theirs, rounded once: every rank gets the same bits, and the bits do not depend on the length of the message.
#![allow(unsafe_code, reason = "loops over the bytes of staging")]

use super::rail::Transfer;
use super::slices::{CHUNK, GATHERED, Levels, chunks, overlap, part, rails, ranges, slices};
use super::step::{Between, NOTHING, Step, contiguous, copy};
use crate::coll::call::{Call, Op, Span};
use crate::error::Result;
use crate::kernels::cpu::{self, Source};

impl Step<'_> {
    /// `partials`, one of each host in order, combined into `to`.
    fn combine(&self, partials: &[Span], to: Span) {
        let levels = Levels::of(self.call.reduce_op, self.call.dtype, self.layout);
        let source = |(host, span): (usize, &Span)| Source { ptr: span.ptr(), factor: levels.factor(host, self.layout) };
        let sources: Vec<Source> = partials.iter().enumerate().map(source).collect();
        let dtype = self.call.dtype;
        // SAFETY: all are spans of staging of `to.bytes` bytes, which do not overlap.
        unsafe { cpu::reduce_partials(levels.outer, dtype, to.ptr(), &sources, to.bytes / dtype.size(), levels.divisor) }
    }

    /// A reduction of the ranks of this host.
    fn inner_reduction(&self, inputs: Vec<Span>, output: Span) -> Call {
        let levels = Levels::of(self.call.reduce_op, self.call.dtype, self.layout);
        Call { reduce_op: levels.inner, ..self.inner_call(Op::ReduceScatter, inputs, vec![output]) }
    }

    /// One span for each rank of this host: `spans`, and nothing for the others.
    pub(super) fn padded(&self, mut spans: Vec<Span>) -> Vec<Span> {
        spans.resize(self.locals(), NOTHING);
        spans
    }

    /// 1. Inside: each rail gets its slice of the host's partial result. 2. Between: the hosts' slices are combined. 3. Inside: everybody,
    ///    or the root, gets all slices.
    pub(super) fn all_reduce(&self) -> Result<()> {
        let (input, output) = (self.call.inputs[0], self.call.outputs.first().copied());
        let (rails, size) = (rails(input.bytes, self.layout), self.call.dtype.size());
        let longest = input.bytes.min(CHUNK).div_ceil(size).div_ceil(rails) * size;
        self.agree_inside()?;
        let between = self.agree_between(rails, staging(longest, size, self.layout.hosts()))?;
        for chunk in chunks(input.bytes) {
            let slices = slices(chunk.len(), size, rails);
            let own = slices.get(self.local()).map_or(0, std::ops::Range::len);
            let partial = between.as_ref().map_or(NOTHING, |between| between.staged(between.begin, own));
            let give = slices.iter().map(|slice| part(part(input, &chunk), slice)).collect();
            self.inside(vec![self.inner_reduction(self.padded(give), partial)])?;
            let sum = between.as_ref().map_or(Ok(NOTHING), |between| between.combine(own))?;
            let place = |whole: Span| slices.iter().map(|slice| part(part(whole, &chunk), slice)).collect();
            match self.call.op {
                Op::Reduce if self.layout.host(self.call.root) != self.host() => {}
                Op::Reduce => {
                    let mut give = vec![NOTHING; self.locals()];
                    give[self.layout.local(self.call.root)] = sum;
                    let take = output.map_or_else(Vec::new, place);
                    self.inside(vec![self.inner_bytes(Op::AllToAll, give, self.padded(take))])?;
                }
                Op::AllReduce
                | Op::Barrier
                | Op::Broadcast
                | Op::AllGather
                | Op::Gather
                | Op::Scatter
                | Op::ReduceScatter
                | Op::AllToAll => {
                    let take = output.map_or_else(Vec::new, place);
                    self.inside(vec![self.inner_bytes(Op::AllGather, vec![sum], self.padded(take))])?;
                }
            }
        }
        Ok(())
    }

    /// 1. Inside: each rail gets its slice of what each host is to have. 2. Between: slices go to their hosts, and are combined there.
    /// 3. Inside: ranks get what is theirs of the slices.
    pub(super) fn reduce_scatter(&self) -> Result<()> {
        let (host, local, size) = (self.host(), self.local(), self.call.dtype.size());
        let lengths = |host: usize| self.layout.members(host).iter().map(|rank| self.call.inputs[rank.index()].bytes);
        let rails = rails(self.call.inputs.iter().map(|span| span.bytes).sum(), self.layout);
        let slices: Vec<_> = (0..self.layout.hosts()).map(|host| slices(lengths(host).sum(), size, rails)).collect();
        let sent: Vec<usize> = slices.iter().map(|slices| slices.get(local).map_or(0, std::ops::Range::len)).collect();
        let (all, own): (usize, usize) = (sent.iter().sum(), sent[host]);
        self.agree_inside()?;
        let between = self.agree_between(rails, all + (self.layout.hosts() + 1) * own)?;

        let mut copies = Vec::new();
        let mut calls = Vec::new();
        let mut at = 0;
        for (to, slices) in slices.iter().enumerate() {
            let spans: Vec<Span> = self.layout.members(to).iter().map(|rank| self.call.inputs[rank.index()]).collect();
            let block = contiguous(&spans, &mut copies);
            let partial = between.as_ref().map_or(NOTHING, |between| between.staged(between.begin + at, sent[to]));
            at += sent[to];
            calls.push(self.inner_reduction(self.padded(slices.iter().map(|slice| part(block, slice)).collect()), partial));
        }
        self.inside(calls)?;

        let mut sum = NOTHING;
        if let Some(between) = &between {
            let (from, to) = (between.begin, between.begin + all);
            sum = between.staged(to + self.layout.hosts() * own, own);
            if sent.iter().any(|&bytes| bytes > 0) {
                between.run(&Transfer::AllToAll { from, sent: &sent, to, received: &vec![own; self.layout.hosts()] })?;
                let partials: Vec<Span> = (0..self.layout.hosts()).map(|host| between.staged(to + host * own, own)).collect();
                self.combine(&partials, sum);
            }
        }

        let (mine, wanted) = (&slices[host], ranges(lengths(host)));
        let give = match mine.get(local) {
            None => vec![NOTHING; self.locals()],
            Some(slice) => wanted.iter().map(|want| overlap(want, slice)).map(|both| shifted(sum, &both, slice.start)).collect(),
        };
        let want = &wanted[local];
        let take = mine.iter().map(|slice| overlap(slice, want)).map(|both| shifted(self.call.outputs[0], &both, want.start)).collect();
        self.inside(vec![self.inner_bytes(Op::AllToAll, give, self.padded(take))])
    }
}

/// The part of `span` at `range`, which counts from `begin` before the span.
fn shifted(span: Span, range: &std::ops::Range<usize>, begin: usize) -> Span {
    part(span, &(range.start - begin..range.end - begin))
}

/// Bytes of staging that [`Between::combine`] needs for a slice of up to `bytes`.
fn staging(bytes: usize, size: usize, hosts: usize) -> usize {
    // The own partial and the result; what comes from the hosts; with rounding, the own piece of the sum and everybody's.
    2 * bytes + hosts * bytes + (hosts + 2) * (bytes.div_ceil(hosts) + size)
}

impl Between<'_> {
    /// Combines the slices of `bytes` bytes of all hosts, of which the own one begins the staging; returns where the result is.
    fn combine(&self, bytes: usize) -> Result<Span> {
        let (step, hosts, begin) = (self.step, self.step.layout.hosts(), self.begin);
        let (result, received) = (self.staged(begin + bytes, bytes), begin + 2 * bytes);
        if bytes == 0 {
            return Ok(result);
        }
        if hosts == 2 || bytes <= GATHERED {
            self.run(&Transfer::AllGather { from: begin, each: bytes, to: received })?;
            let partials: Vec<Span> = (0..hosts).map(|host| self.staged(received + host * bytes, bytes)).collect();
            step.combine(&partials, result);
            return Ok(result);
        }
        // Each host combines a piece. The first piece is the longest: the others are padded to it when they are gathered.
        let pieces = slices(bytes, step.call.dtype.size(), hosts);
        let sent: Vec<usize> = pieces.iter().map(std::ops::Range::len).collect();
        let (own, longest) = (sent[step.host()], sent[0]);
        self.run(&Transfer::AllToAll { from: begin, sent: &sent, to: received, received: &vec![own; hosts] })?;
        let partials: Vec<Span> = (0..hosts).map(|host| self.staged(received + host * own, own)).collect();
        let summed = received + hosts * longest;
        step.combine(&partials, self.staged(summed, own));
        let gathered = summed + longest;
        self.run(&Transfer::AllGather { from: summed, each: longest, to: gathered })?;
        for (host, piece) in pieces.iter().enumerate() {
            copy(self.staged(gathered + host * longest, piece.len()), part(result, piece));
        }
        Ok(result)
    }
}
