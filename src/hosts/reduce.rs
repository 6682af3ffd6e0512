//! all_reduce, reduce and reduce_scatter on several hosts.
//!
//! Whatever the size and the rails, an element is combined over the ranks of each host in their order, rounded once, then over the hosts in
//! theirs, rounded once: every rank gets the same bits, and the bits do not depend on the length of the message. Partial results may have a
//! wider type than tensors ([`partials`](super::partials)): then an element is rounded once in all. Lengths of partial results are those of
//! their elements in a tensor times [`Step::growth`].
#![allow(unsafe_code, reason = "loops over the bytes of staging")]

use super::rail::Transfer;
use super::step::{Between, Scratch, Step, contiguous, copy};
use crate::coll::call::{Op, Span, Spec};
use crate::coll::two_level::levels::Levels;
use crate::coll::two_level::slices::{LAG, Turns, overlap, part, rails, ranges, shifted, slices};
use crate::coll::two_level::step::NOTHING;
use crate::error::Result;
use crate::kernels::cpu::{self, Source};
use std::ops::Range;

impl Step<'_> {
    /// `partials`, one of each host in order, combined at `to`, which is as long as they are; the result, rounded, is at its begin.
    pub(super) fn combine(&self, partials: &[Span], to: Span) -> Span {
        let levels = Levels::of(self.call.reduce_op, self.call.dtype, self.layout);
        let source = |(host, span): (usize, &Span)| Source { ptr: span.ptr(), factor: levels.factor(host, self.layout) };
        let sources: Vec<Source> = partials.iter().enumerate().map(source).collect();
        let dtype = self.partial_type();
        // SAFETY: all are spans of `to.bytes` bytes: partials of staging or scratch memory, `to` of staging or a tensor; they do not overlap.
        unsafe { cpu::reduce_partials(levels.outer, dtype, to.ptr(), &sources, to.bytes / dtype.size(), levels.divisor) }
        self.rounded(to)
    }

    /// A reduction of the ranks of this host to its partial result; copies of `inputs` in another type are in `kept`.
    fn inner_reduction(&self, inputs: Vec<Span>, output: Span, kept: &mut Vec<Scratch>) -> Spec<'static> {
        let levels = Levels::of(self.call.reduce_op, self.call.dtype, self.layout);
        let inputs = self.padded(self.widened(inputs, kept));
        Spec { dtype: self.partial_type(), reduce_op: levels.inner, ..self.inner_call(Op::ReduceScatter, inputs, vec![output]) }
    }

    /// One span for each rank of this host: `spans`, and nothing for the others.
    pub(super) fn padded(&self, mut spans: Vec<Span>) -> Vec<Span> {
        spans.resize(self.locals(), NOTHING);
        spans
    }

    /// In each turn: 1. Inside: each rail gets its piece of the host's partial result. 2. Between: the hosts' pieces are combined. 3. Inside:
    ///    everybody, or the root, gets all pieces.
    pub(super) fn all_reduce(&self) -> Result<()> {
        let (input, size, hosts) = (self.call.inputs[0], self.call.dtype.size(), self.layout.hosts());
        let slices = slices(input.bytes, size, rails(input.bytes, self.layout, self.thresholds()));
        let turns = Turns::of(slices[0].len(), self.thresholds());
        let growth = self.growth();
        let gathers = hosts == 2 || slices[0].len() * growth <= self.thresholds().gathered;
        let (middle, end) = if gathers { (LAG, LAG) } else { (LAG, 2 * LAG) };
        let area = staging(turns.piece * growth, size * growth, hosts).next_multiple_of(64);
        let mut opening = self.open(slices.len(), (end + 1) * area)?;
        let pieces = |turn: usize| slices.iter().map(move |slice| turns.piece(slice, turn));
        let own = |turn: usize| pieces(turn).nth(self.local()).map_or(0, |piece| piece.len());
        let sum = |turn: usize| Sum { at: turn % (end + 1) * area, bytes: own(turn) * growth, longest: turns.piece * growth, gathers };
        for turn in 0..turns.count + end {
            if turn < turns.count {
                let partial = opening.between.as_ref().map_or(NOTHING, |between| sum(turn).partial(between));
                let give = pieces(turn).map(|piece| part(input, &piece)).collect();
                let mut kept = Vec::new();
                self.inside(vec![self.inner_reduction(give, partial, &mut kept)])?;
                if turn == 0 {
                    opening.agree(slices.len())?;
                }
                opening.between.as_ref().map_or(Ok(()), |between| sum(turn).begin(between))?;
            }
            if let Some(turn) = turn.checked_sub(middle).filter(|&turn| !gathers && turn < turns.count) {
                opening.between.as_ref().map_or(Ok(()), |between| sum(turn).combine(between))?;
            }
            if let Some(turn) = turn.checked_sub(end) {
                let sum = opening.between.as_ref().map_or(Ok(NOTHING), |between| sum(turn).result(between))?;
                self.give_sum(sum, pieces(turn))?;
            }
        }
        Ok(())
    }

    /// Inside: everybody, or the root, gets all `pieces`, of which this rank has `sum`.
    fn give_sum(&self, sum: Span, pieces: impl Iterator<Item = Range<usize>>) -> Result<()> {
        let take = self.call.outputs.first().map_or_else(Vec::new, |&output| pieces.map(|piece| part(output, &piece)).collect());
        if self.call.op == Op::AllReduce {
            return self.inside(vec![self.inner_bytes(Op::AllGather, vec![sum], self.padded(take))]);
        }
        if self.layout.host(self.call.root) != self.host() {
            return Ok(());
        }
        let mut give = vec![NOTHING; self.locals()];
        give[self.layout.local(self.call.root)] = sum;
        self.inside(vec![self.inner_bytes(Op::AllToAll, give, self.padded(take))])
    }

    /// In each turn: 1. Inside: each rail gets its piece of what each host is to have. 2. Between: pieces go to their hosts, and are combined
    /// there. 3. Inside: ranks get what is theirs of the pieces.
    pub(super) fn reduce_scatter(&self) -> Result<()> {
        let (host, local, hosts, size) = (self.host(), self.local(), self.layout.hosts(), self.call.dtype.size());
        let lengths = |host: usize| self.layout.members(host).iter().map(|rank| self.call.inputs[rank.index()].bytes);
        let rails = rails(self.call.inputs.iter().map(|span| span.bytes).sum(), self.layout, self.thresholds());
        let slices: Vec<_> = (0..hosts).map(|host| slices(lengths(host).sum(), size, rails)).collect();
        let turns = Turns::of(slices.iter().map(|slices| slices[0].len()).max().unwrap_or(0), self.thresholds());
        // What goes to each host, what comes from each, and the sum.
        let longest = turns.piece * self.growth();
        let area = ((2 * hosts + 1) * longest).next_multiple_of(64);
        let mut opening = self.open(rails, (LAG + 1) * area)?;
        let mut copies = Vec::new();
        let block = |host: usize| self.layout.members(host).iter().map(|rank| self.call.inputs[rank.index()]).collect::<Vec<Span>>();
        let blocks: Vec<Span> = (0..hosts).map(|host| contiguous(&block(host), &mut copies)).collect();
        let wanted = ranges(lengths(host));
        let piece = |host: usize, local: usize, turn: usize| slices[host].get(local).map(|slice| turns.piece(slice, turn));
        let bytes = |host: usize, turn: usize| piece(host, local, turn).map_or(0, |piece| piece.len() * self.growth());
        for turn in 0..turns.count + LAG {
            if turn < turns.count {
                let sent: Vec<usize> = (0..hosts).map(|host| bytes(host, turn)).collect();
                let from = opening.between.as_ref().map_or(0, |between| between.begin + turn % (LAG + 1) * area);
                let mut at = from;
                let (mut calls, mut kept) = (Vec::new(), Vec::new());
                for to in 0..hosts {
                    let partial = opening.between.as_ref().map_or(NOTHING, |between| between.staged(at, sent[to]));
                    at += sent[to];
                    let give = (0..rails).filter_map(|rail| piece(to, rail, turn)).map(|piece| part(blocks[to], &piece)).collect();
                    calls.push(self.inner_reduction(give, partial, &mut kept));
                }
                self.inside(calls)?;
                if turn == 0 {
                    opening.agree(rails)?;
                }
                if let Some(between) = opening.between.as_ref().filter(|_| sent.iter().any(|&bytes| bytes > 0)) {
                    let to = from + hosts * longest;
                    between.start(&Transfer::AllToAll { from, sent: &sent, to, received: &vec![sent[host]; hosts] })?;
                }
            }
            let Some(turn) = turn.checked_sub(LAG) else { continue };
            let mut sum = NOTHING;
            if let Some(between) = opening.between.as_ref().filter(|_| (0..hosts).any(|host| bytes(host, turn) > 0)) {
                let (own, received) = (bytes(host, turn), between.begin + turn % (LAG + 1) * area + hosts * longest);
                between.finish()?;
                let partials: Vec<Span> = (0..hosts).map(|host| between.staged(received + host * own, own)).collect();
                sum = self.combine(&partials, between.staged(received + hosts * longest, own));
            }
            let give = match piece(host, local, turn) {
                None => vec![NOTHING; self.locals()],
                Some(piece) => wanted.iter().map(|want| overlap(want, &piece)).map(|both| shifted(sum, &both, piece.start)).collect(),
            };
            let want = &wanted[local];
            let mine = (0..rails).filter_map(|rail| piece(host, rail, turn)).map(|piece| overlap(&piece, want));
            let take = mine.map(|both| shifted(self.call.outputs[0], &both, want.start)).collect();
            self.inside(vec![self.inner_bytes(Op::AllToAll, give, self.padded(take))])?;
        }
        Ok(())
    }
}

/// Bytes of staging that a [`Sum`] of pieces of up to `bytes` needs.
fn staging(bytes: usize, size: usize, hosts: usize) -> usize {
    // The own partial and the result; what comes from the hosts; with rounding, the own part of the sum and everybody's.
    2 * bytes + hosts * bytes + (hosts + 2) * (bytes.div_ceil(hosts) + size)
}

/// Pieces of all hosts that become one, in an area of the staging.
struct Sum {
    /// Place of the area behind the first that a call may use.
    at: usize,
    /// Length of the piece, and of the longest of all, as partial results.
    bytes: usize,
    longest: usize,
    /// Whether each host gets all partial results and adds them up; otherwise each adds up its part, and gets the others'.
    gathers: bool,
}

impl Sum {
    fn partial(&self, between: &Between<'_>) -> Span {
        between.staged(between.begin + self.at, self.bytes)
    }

    /// Places of the result and of what is received.
    fn places(&self, between: &Between<'_>) -> (usize, usize) {
        let result = between.begin + self.at + self.longest;
        (result, result + self.longest)
    }

    /// Parts of the piece, one for each host. The first is the longest: the others are padded to it when they are gathered.
    fn parts(&self, between: &Between<'_>) -> Vec<Range<usize>> {
        slices(self.bytes, between.step.partial_type().size(), between.step.layout.hosts())
    }

    /// Begins to exchange partial results.
    fn begin(&self, between: &Between<'_>) -> Result<()> {
        let (hosts, from, (_, to)) = (between.step.layout.hosts(), between.begin + self.at, self.places(between));
        if self.bytes == 0 {
            return Ok(());
        }
        if self.gathers {
            return between.share(from, &vec![self.bytes; hosts], to);
        }
        let sent: Vec<usize> = self.parts(between).iter().map(Range::len).collect();
        between.start(&Transfer::AllToAll { from, sent: &sent, to, received: &vec![sent[between.step.host()]; hosts] })
    }

    /// Where each host adds up its part: waits for what the others give to it, adds it up and begins to gather the parts.
    fn combine(&self, between: &Between<'_>) -> Result<()> {
        let (step, hosts, (_, received)) = (between.step, between.step.layout.hosts(), self.places(between));
        if self.bytes == 0 {
            return Ok(());
        }
        between.finish()?;
        let parts = self.parts(between);
        let (own, longest) = (parts[step.host()].len(), parts[0].len());
        let partials: Vec<Span> = (0..hosts).map(|host| between.staged(received + host * own, own)).collect();
        let from = received + hosts * longest;
        step.combine(&partials, between.staged(from, own));
        between.start(&Transfer::AllGather { from, each: longest / step.growth(), to: from + longest })
    }

    /// The result, once it is there.
    fn result(&self, between: &Between<'_>) -> Result<Span> {
        let (step, hosts, (result, received)) = (between.step, between.step.layout.hosts(), self.places(between));
        let result = between.staged(result, self.bytes);
        if self.bytes == 0 {
            return Ok(result);
        }
        between.finish()?;
        if self.gathers {
            let lengths = vec![self.bytes; hosts];
            let shared = |host| between.shared(between.begin + self.at, &lengths, received, host);
            return Ok(step.combine(&(0..hosts).map(shared).collect::<Vec<_>>(), result));
        }
        // What is gathered has been rounded.
        let (parts, growth) = (self.parts(between), step.growth());
        let (gathered, longest) = (received + (hosts + 1) * parts[0].len(), parts[0].len() / growth);
        for (host, piece) in parts.iter().enumerate() {
            let piece = piece.start / growth..piece.end / growth;
            copy(between.staged(gathered + host * longest, piece.len()), part(result, &piece));
        }
        Ok(Span { bytes: result.bytes / growth, ..result })
    }
}
