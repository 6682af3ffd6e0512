//! Plan of a collective on the GPUs of several hosts: its steps in stream order. Pure.
//!
//! The sums are those of `hosts::reduce`: over the ranks of each host in their order, rounded once, then over the hosts in theirs, rounded
//! once; where partial results are float32, inputs are widened before and the sum is rounded once. Which rail carries which part only says who does it, so the bits are those of CPU tensors.

use super::backends::Transfer;
use super::cast::Cast;
use super::sum::{Sum, UNIT};
use crate::boot::hosts::Layout;
use crate::coll::call::{Call, Op, Span};
use crate::coll::cost::wire::Thresholds;
use crate::dtype::{DType, ReduceOp};
use crate::hosts::chosen::Chosen;
use crate::hosts::slices::{self, Levels, Turns, overlap, part, rails, ranges, shifted};
use crate::hosts::step::NOTHING;
use crate::rank::Rank;
use std::ops::Range;

/// Bytes of a rail's slice that are under way at a time.
const CHUNK: usize = 64 << 20;

/// One step of a plan.
#[derive(Clone, Debug)]
pub(super) enum Step {
    /// Collectives of the ranks of this host.
    Inside(Vec<Call>),
    /// A transfer on this rank's rail.
    Rail(Transfer),
    /// Messages with ranks of other hosts.
    Exchange { give: Vec<Span>, take: Vec<Span> },
    /// Sum of the hosts' partial results.
    Sum(Sum),
    /// Copy in another type.
    Cast(Cast),
    /// Copy within the device.
    Copy { from: Span, to: Span },
}

/// Steps in stream order, and how much memory they need beside the call's.
#[derive(Debug)]
pub(super) struct Plan {
    pub(super) steps: Vec<Step>,
    pub(super) memory: usize,
}

/// The plan of `rank` for `call`, which goes by `chosen`; its memory begins at `base`, a multiple of 16.
pub(super) fn of(call: &Call, layout: &Layout, chosen: Chosen, rank: Rank, base: usize) -> Plan {
    let Chosen { partials, thresholds } = chosen;
    let partial = if call.op.reduces() { partials.dtype(call.reduce_op, call.dtype) } else { call.dtype };
    let mut planner = Planner { call, layout, thresholds, partial, rank, base, used: 0, most: 0, steps: Vec::new() };
    match call.op {
        Op::Barrier => planner.barrier(),
        Op::Broadcast => planner.broadcast(),
        Op::AllReduce | Op::Reduce => planner.all_reduce(),
        Op::AllGather => planner.all_gather(),
        Op::ReduceScatter => planner.reduce_scatter(),
        Op::Gather | Op::Scatter | Op::AllToAll => planner.exchange(),
        // Refused before (`refuse_norms`).
        Op::AllReduceAddRmsNorm => {}
    }
    Plan { steps: planner.steps, memory: planner.most }
}

/// Whether a call needs the backend of all ranks; the same on all of them.
pub(super) fn exchanges(op: Op) -> bool {
    match op {
        Op::Gather | Op::Scatter | Op::AllToAll => true,
        Op::Barrier | Op::Broadcast | Op::AllReduce | Op::Reduce | Op::AllGather | Op::ReduceScatter => false,
        Op::AllReduceAddRmsNorm => false,
    }
}

fn padded(bytes: usize) -> usize {
    bytes.next_multiple_of(UNIT)
}

/// `bytes` bytes in `parts` parts, as even as they can be where each begins at a multiple of 16 bytes, in order.
fn slices(bytes: usize, parts: usize) -> Vec<Range<usize>> {
    slices::slices(padded(bytes), UNIT, parts).into_iter().map(|slice| slice.start.min(bytes)..slice.end.min(bytes)).collect()
}

struct Planner<'a> {
    call: &'a Call,
    layout: &'a Layout,
    thresholds: Thresholds,
    /// Type of partial results.
    partial: DType,
    rank: Rank,
    base: usize,
    used: usize,
    most: usize,
    steps: Vec<Step>,
}

impl Planner<'_> {
    fn host(&self) -> usize {
        self.layout.host(self.rank)
    }

    fn local(&self) -> usize {
        self.layout.local(self.rank)
    }

    fn locals(&self) -> usize {
        self.layout.members(self.host()).len()
    }

    /// Memory for `bytes` bytes, which may be used to the end of a unit.
    fn take(&mut self, bytes: usize) -> Span {
        let addr = self.base + self.used;
        self.used += padded(bytes);
        self.most = self.most.max(self.used);
        Span { addr, bytes }
    }

    /// Number by which the bytes of a partial result are more than those of its elements in a tensor.
    fn growth(&self) -> usize {
        self.partial.size() / self.call.dtype.size()
    }

    /// Memory for a partial result of elements that take `bytes` bytes in a tensor.
    fn take_partial(&mut self, bytes: usize) -> Span {
        let growth = self.growth();
        Span { bytes: bytes * growth, ..self.take(padded(bytes) * growth) }
    }

    fn cast(&mut self, from: Span, to: Span, widens: bool) {
        if from.bytes > 0 {
            self.steps.push(Step::Cast(Cast { from, to, dtype: self.call.dtype, widens }));
        }
    }

    /// `input` of a tensor as partial results have it: a copy where that is another type.
    fn widened(&mut self, input: Span) -> Span {
        if self.growth() == 1 || input.bytes == 0 {
            return input;
        }
        let wide = self.take_partial(input.bytes);
        self.cast(input, wide, true);
        wide
    }

    fn copy(&mut self, from: Span, to: Span) {
        if from.bytes > 0 && from.addr != to.addr {
            self.steps.push(Step::Copy { from, to });
        }
    }

    /// One span for each rank of this host: `spans`, and nothing for the others.
    fn for_locals(&self, mut spans: Vec<Span>) -> Vec<Span> {
        spans.resize(self.locals(), NOTHING);
        spans
    }

    /// A collective of the ranks of this host that moves bytes; what a rank alone would do is a copy.
    fn move_inside(&mut self, op: Op, root: usize, inputs: Vec<Span>, outputs: Vec<Span>) {
        if self.locals() > 1 {
            let (dtype, reduce_op, root) = (DType::U8, ReduceOp::Sum, Rank(root as u32));
            self.steps.push(Step::Inside(vec![Call { op, dtype, reduce_op, root, inputs, outputs, call_site: None, ..*self.call }]));
        } else if let ([from], [to]) = (&*inputs, &*outputs) {
            self.copy(*from, *to);
        }
    }

    /// Reductions of the ranks of this host, of which each has inputs for the rails.
    fn reduce_inside(&mut self, parts: Vec<(Vec<Span>, Span)>) {
        let reduce_op = Levels::of(self.call.reduce_op, self.call.dtype, self.layout).inner;
        if self.locals() == 1 && reduce_op != ReduceOp::PremulSum {
            // What one rank gives is its host's partial result.
            let copies = self.growth() == 1;
            return parts.into_iter().for_each(
                |(inputs, output)| {
                    if copies { self.copy(inputs[0], output) } else { self.cast(inputs[0], output, true) }
                },
            );
        }
        let widen = |(inputs, output): (Vec<Span>, Span)| (inputs.into_iter().map(|input| self.widened(input)).collect(), output);
        let parts: Vec<(Vec<Span>, Span)> = parts.into_iter().map(widen).collect();
        let call = |(inputs, output): (Vec<Span>, Span)| Call {
            op: Op::ReduceScatter,
            dtype: self.partial,
            reduce_op,
            root: Rank(0),
            inputs: self.for_locals(inputs),
            outputs: vec![output],
            call_site: None,
            ..*self.call
        };
        let calls = parts.into_iter().map(call).collect();
        self.steps.push(Step::Inside(calls));
    }

    /// Adds up partial results, and rounds the sum to the tensor's type.
    fn sum(&mut self, from: usize, stride: usize, to: Span) {
        let (dtype, op, narrow) = (self.partial, self.call.reduce_op, to);
        let to = if self.growth() == 1 { narrow } else { self.take_partial(narrow.bytes) };
        self.steps.push(Step::Sum(Sum { from, stride, to, dtype, op }));
        if self.growth() > 1 {
            self.cast(to, narrow, false);
        }
    }

    /// 1. Inside: everybody has come. 2. Between: one rank of each host says so. 3. Inside: it has heard of all.
    fn barrier(&mut self) {
        self.move_inside(Op::Barrier, 0, vec![], vec![]);
        if self.local() == 0 {
            let (from, to) = (self.take(UNIT), self.take(UNIT * self.layout.hosts()).addr);
            self.steps.push(Step::Rail(Transfer::AllGather { from, to }));
        }
        self.move_inside(Op::Barrier, 0, vec![], vec![]);
    }

    /// 1. Inside, on the root's host: everybody gets all. 2. Between: each rail brings its slice to the other hosts. 3. Inside, on those:
    ///    everybody gets all slices.
    fn broadcast(&mut self) {
        let (root, own) = (self.layout.host(self.call.root), self.rank == self.call.root);
        let here = root == self.host();
        let whole = if own { self.call.inputs[0] } else { self.call.outputs[0] };
        let slices = slices(whole.bytes, rails(whole.bytes, self.layout, &self.thresholds));
        if here {
            let (inputs, outputs) = if own { (vec![whole], vec![]) } else { (vec![], vec![whole]) };
            self.move_inside(Op::Broadcast, self.layout.local(self.call.root), inputs, outputs);
        }
        let at = slices.get(self.local()).map_or(NOTHING, |range| part(whole, range));
        if at.bytes > 0 {
            self.steps.push(Step::Rail(Transfer::Broadcast { root, at }));
        }
        if !here {
            let take = self.for_locals(slices.iter().map(|range| part(whole, range)).collect());
            self.move_inside(Op::AllGather, 0, vec![at], take);
        }
    }

    /// 1. Inside: each rail gets its slice of the host's partial result. 2. Between: the hosts' slices are combined. 3. Inside: everybody,
    ///    or the root, gets all slices.
    fn all_reduce(&mut self) {
        let (input, output) = (self.call.inputs[0], self.call.outputs.first().copied());
        let (rails, alone) = (rails(input.bytes, self.layout, &self.thresholds), self.locals() == 1);
        let levels = Levels::of(self.call.reduce_op, self.call.dtype, self.layout);
        let chunk = CHUNK / self.growth() * rails;
        for begin in (0..input.bytes).step_by(chunk) {
            self.used = 0;
            let within = begin..input.bytes.min(begin + chunk);
            let slices = slices(within.len(), rails);
            let own = slices.get(self.local()).map_or(0, Range::len);
            let give: Vec<Span> = slices.iter().map(|slice| part(part(input, &within), slice)).collect();
            let direct = alone
                && self.growth() == 1
                && levels.inner != ReduceOp::PremulSum
                && give[0].addr.is_multiple_of(UNIT)
                && own.is_multiple_of(UNIT);
            let partial = if direct { give[0] } else { self.take_partial(own) };
            if !direct {
                self.reduce_inside(vec![(give, partial)]);
            }
            let place = |whole: Span| -> Vec<Span> { slices.iter().map(|slice| part(part(whole, &within), slice)).collect() };
            let take = output.map_or_else(Vec::new, place);
            let sum = self.combine(partial, take.first().copied().filter(|_| alone));
            if alone {
                continue;
            }
            if self.call.op != Op::Reduce {
                let take = self.for_locals(take);
                self.move_inside(Op::AllGather, 0, vec![sum], take);
            } else if self.layout.host(self.call.root) == self.host() {
                let mut give = vec![NOTHING; self.locals()];
                give[self.layout.local(self.call.root)] = sum;
                let take = self.for_locals(take);
                self.move_inside(Op::AllToAll, 0, give, take);
            }
        }
    }

    /// Combines the hosts' partial results, of which `own` is this one's; returns where the result is: at `to`, if that is given.
    fn combine(&mut self, own: Span, to: Option<Span>) -> Span {
        let (hosts, growth) = (self.layout.hosts(), self.growth());
        // In a tensor; a partial result has room for as many elements.
        let own = Span { bytes: own.bytes / growth, ..own };
        let bytes = padded(own.bytes);
        if own.bytes == 0 {
            return NOTHING;
        }
        if hosts == 2 || bytes * growth <= self.thresholds.gathered {
            let received = self.take(hosts * bytes * growth).addr;
            self.steps.push(Step::Rail(Transfer::AllGather { from: Span { bytes: bytes * growth, ..own }, to: received }));
            let result = to.unwrap_or_else(|| self.take(own.bytes));
            self.sum(received, bytes * growth, result);
            return result;
        }
        // Each host combines a piece. The first piece is the longest: the others are padded to it when they are gathered.
        let pieces = slices(bytes, hosts);
        let sent: Vec<usize> = pieces.iter().map(|piece| piece.len() * growth).collect();
        let (mine, longest) = (pieces[self.host()].len(), pieces[0].len());
        let received = self.take(hosts * mine * growth).addr;
        self.steps.push(Step::Rail(Transfer::AllToAll { from: own.addr, sent, to: received, received: vec![mine * growth; hosts] }));
        let summed = self.take(longest);
        self.sum(received, mine * growth, Span { bytes: mine, ..summed });
        let gathered = self.take(hosts * longest);
        self.steps.push(Step::Rail(Transfer::AllGather { from: summed, to: gathered.addr }));
        if to.is_none() && pieces.iter().all(|piece| piece.len() == longest) {
            return Span { bytes: own.bytes, ..gathered };
        }
        let result = to.unwrap_or_else(|| self.take(own.bytes));
        for (host, piece) in pieces.iter().enumerate() {
            let piece = piece.start..piece.end.min(own.bytes);
            self.copy(part(gathered, &(host * longest..host * longest + piece.len())), part(result, &piece));
        }
        result
    }

    /// The bytes `range` of `spans`, which count as one behind the other: where they do not follow each other, a copy of them.
    fn contiguous(&mut self, spans: &[Span], range: &Range<usize>) -> Span {
        let places = ranges(spans.iter().map(|span| span.bytes));
        let parts: Vec<Span> = spans.iter().zip(places).map(|(&span, place)| shifted(span, &overlap(range, &place), place.start)).collect();
        Span::joined(&parts).unwrap_or_else(|| {
            let whole = self.take(range.len());
            let places = ranges(parts.iter().map(|span| span.bytes));
            parts.iter().zip(places).for_each(|(&span, place)| self.copy(span, part(whole, &place)));
            whole
        })
    }

    /// Chunk by chunk: 1. Inside: each rail gets its slice of what each host is to have. 2. Between: slices go to their hosts, and are
    /// combined there. 3. Inside: ranks get what is theirs of the slices.
    fn reduce_scatter(&mut self) {
        let (layout, hosts) = (self.layout, self.layout.hosts());
        let blocks = |host: usize| -> Vec<Span> { layout.members(host).iter().map(|rank| self.call.inputs[rank.index()]).collect() };
        let rails = rails(self.call.inputs.iter().map(|span| span.bytes).sum(), layout, &self.thresholds);
        let blocks: Vec<Vec<Span>> = (0..hosts).map(blocks).collect();
        let slices: Vec<Vec<Range<usize>>> = blocks.iter().map(|block| slices(block.iter().map(|span| span.bytes).sum(), rails)).collect();
        let longest = slices.iter().map(|slices| slices[0].len()).max().unwrap_or(0);
        let chunks = Turns::at_most(longest, (CHUNK / self.growth() / hosts).next_multiple_of(UNIT));
        for chunk in 0..chunks.count {
            self.used = 0;
            let within = |slices: &Vec<Range<usize>>| slices.iter().map(|slice| chunks.piece(slice, chunk)).collect();
            self.reduce_scatter_chunk(&blocks, &slices.iter().map(within).collect::<Vec<_>>());
        }
    }

    /// One chunk: `pieces[h][r]` of `blocks[h]`, which the ranks of host `h` are to have, goes by rail `r`.
    fn reduce_scatter_chunk(&mut self, blocks: &[Vec<Span>], pieces: &[Vec<Range<usize>>]) {
        let (host, local, hosts, growth) = (self.host(), self.local(), self.layout.hosts(), self.growth());
        let sent: Vec<usize> = pieces.iter().map(|pieces| pieces.get(local).map_or(0, |piece| padded(piece.len()) * growth)).collect();
        let partials = self.take(sent.iter().sum());
        let places = ranges(sent.iter().copied());
        let parts: Vec<(Vec<Span>, Span)> = (0..hosts)
            .map(|to| {
                let length = pieces[to].get(local).map_or(0, Range::len) * growth;
                let give = pieces[to].iter().map(|piece| self.contiguous(&blocks[to], piece)).collect();
                (give, part(partials, &(places[to].start..places[to].start + length)))
            })
            .collect();
        self.reduce_inside(parts);

        let (mine, output) = (&pieces[host], self.call.outputs[0]);
        let own = mine.get(local).cloned().unwrap_or_default();
        let alone = self.locals() == 1;
        let mut sum = NOTHING;
        if partials.bytes > 0 {
            let (stride, from) = (sent[host], partials.addr);
            let received = self.take(hosts * stride).addr;
            self.steps.push(Step::Rail(Transfer::AllToAll { from, sent, to: received, received: vec![stride; hosts] }));
            sum = if alone { part(output, &own) } else { self.take(own.len()) };
            if !own.is_empty() {
                self.sum(received, stride, sum);
            }
        }
        if alone {
            return;
        }
        let wanted = ranges(blocks[host].iter().map(|span| span.bytes));
        let give = match mine.get(local) {
            None => vec![NOTHING; self.locals()],
            Some(piece) => wanted.iter().map(|want| shifted(sum, &overlap(want, piece), piece.start)).collect(),
        };
        let want = &wanted[local];
        let take = mine.iter().map(|piece| shifted(output, &overlap(piece, want), want.start)).collect();
        let take = self.for_locals(take);
        self.move_inside(Op::AllToAll, 0, give, take);
    }

    /// 1. Inside: everybody gets what the ranks of the own host give. 2. Between: each rail brings its slice of that to the other hosts.
    /// 3. Inside: everybody gets the slices of each other host.
    fn all_gather(&mut self) {
        let (layout, host, local, hosts) = (self.layout, self.host(), self.local(), self.layout.hosts());
        let outputs = |host: usize| -> Vec<Span> { layout.members(host).iter().map(|rank| self.call.outputs[rank.index()]).collect() };
        let outputs: Vec<Vec<Span>> = (0..hosts).map(outputs).collect();
        let lengths: Vec<usize> = outputs.iter().map(|spans| spans.iter().map(|span| span.bytes).sum()).collect();
        let rails = rails(lengths.iter().sum(), layout, &self.thresholds);
        let slices: Vec<Vec<Range<usize>>> = lengths.iter().map(|&bytes| slices(bytes, rails)).collect();
        let longest = padded(slices.iter().filter_map(|slices| slices.get(local)).map(Range::len).max().unwrap_or(0));
        self.move_inside(Op::AllGather, 0, self.call.inputs.clone(), outputs[host].clone());

        let received = self.take(hosts * longest);
        if longest > 0 {
            let slice = self.contiguous(&outputs[host], &slices[host][local]);
            let from = if slice.bytes == longest { slice } else { self.take(longest) };
            self.copy(slice, Span { bytes: slice.bytes, ..from });
            self.steps.push(Step::Rail(Transfer::AllGather { from, to: received.addr }));
        }

        let mut apart: Vec<(Span, usize)> = Vec::new();
        for other in (0..hosts).filter(|&other| other != host) {
            let whole = Span::joined(&outputs[other]).unwrap_or_else(|| {
                let whole = self.take(lengths[other]);
                apart.push((whole, other));
                whole
            });
            let slice = slices[other].get(local).map_or(NOTHING, |slice| part(received, &(other * longest..other * longest + slice.len())));
            let take = self.for_locals(slices[other].iter().map(|range| part(whole, range)).collect());
            self.move_inside(Op::AllGather, 0, vec![slice], take);
        }
        for (whole, other) in apart {
            let parts = ranges(outputs[other].iter().map(|span| span.bytes));
            outputs[other].iter().zip(parts).for_each(|(&output, range)| self.copy(part(whole, &range), output));
        }
    }

    /// gather, scatter and all_to_all. 1. Inside: what ranks of the own host have for each other. 2. Between: all else goes straight to
    /// its rank, so that nobody needs to know what others send.
    fn exchange(&mut self) {
        let (n, root, host) = (self.layout.size(), self.call.root, self.host());
        let one = |spans: &[Span]| {
            let mut all = vec![NOTHING; n];
            all[root.index()] = spans[0];
            all
        };
        let all = |spans: &[Span]| if spans.is_empty() { vec![NOTHING; n] } else { spans.to_vec() };
        let (inputs, outputs) = (&self.call.inputs, &self.call.outputs);
        let (mut give, mut take) = match self.call.op {
            Op::Gather => (one(inputs), all(outputs)),
            Op::Scatter => (all(inputs), one(outputs)),
            Op::AllToAll
            | Op::Barrier
            | Op::Broadcast
            | Op::AllReduce
            | Op::Reduce
            | Op::AllGather
            | Op::ReduceScatter
            | Op::AllReduceAddRmsNorm => (all(inputs), all(outputs)),
        };
        let me = self.rank.index();
        if give[me] == take[me] {
            (give[me], take[me]) = (NOTHING, NOTHING);
        }
        let here = |spans: &mut Vec<Span>| -> Vec<Span> {
            self.layout.members(host).iter().map(|rank| std::mem::replace(&mut spans[rank.index()], NOTHING)).collect()
        };
        let (near_give, near_take) = (here(&mut give), here(&mut take));
        if self.call.op == Op::AllToAll || self.layout.host(root) == host {
            self.move_inside(Op::AllToAll, 0, near_give, near_take);
        }
        if give.iter().chain(&take).any(|span| span.bytes > 0) {
            self.steps.push(Step::Exchange { give, take });
        }
    }
}
