//! Plans of calls that move bytes. Pure.

use super::{Planner, padded, slices};
use crate::coll::call::{Op, Span};
use crate::hosts::cuda::backends::Transfer;
use crate::hosts::cuda::steps::Step;
use crate::hosts::cuda::sum::UNIT;
use crate::hosts::slices::{Turns, part, rails, ranges};
use crate::hosts::step::NOTHING;
use std::ops::Range;

impl Planner<'_> {
    /// 1. Inside: everybody has come. 2. Between: one rank of each host says so. 3. Inside: it has heard of all.
    pub(super) fn barrier(&mut self) {
        self.move_inside(Op::Barrier, 0, vec![], vec![]);
        if self.local() == 0 {
            let (from, to) = (self.take(UNIT), self.take(UNIT * self.layout.hosts()).addr);
            self.rail(Transfer::AllGather { from, to });
        }
        self.move_inside(Op::Barrier, 0, vec![], vec![]);
    }

    /// Chunk by chunk: 1. Inside, on the root's host: everybody gets all. 2. Between: each rail brings its slice to the other hosts.
    /// 3. Inside, on those: everybody gets all slices.
    pub(super) fn broadcast(&mut self) {
        let whole = if self.rank == self.call.root { self.call.inputs[0] } else { self.call.outputs[0] };
        let (turns, rails) = self.turns(whole.bytes, 1);
        let turns = if self.all_alone() { Turns::at_most(whole.bytes, usize::MAX) } else { turns };
        self.in_chunks(turns, |planner, turn| planner.broadcast_chunk(part(whole, &turns.piece(&(0..whole.bytes), turn)), rails));
    }

    fn broadcast_chunk(&mut self, whole: Span, rails: usize) {
        let (root, own) = (self.layout.host(self.call.root), self.rank == self.call.root);
        let here = root == self.host();
        let slices = slices(whole.bytes, rails);
        if here {
            let (inputs, outputs) = if own { (vec![whole], vec![]) } else { (vec![], vec![whole]) };
            self.move_inside(Op::Broadcast, self.layout.local(self.call.root), inputs, outputs);
        }
        let at = slices.get(self.local()).map_or(NOTHING, |range| part(whole, range));
        if at.bytes > 0 {
            self.rail(Transfer::Broadcast { root, at });
        }
        self.halfway();
        if !here {
            let take = self.for_locals(slices.iter().map(|range| part(whole, range)).collect());
            self.move_inside(Op::AllGather, 0, vec![at], take);
        }
    }

    /// Inside, everybody gets what the ranks of the own host give. Then, chunk by chunk: 1. Between: each rail brings its slice of that to
    /// the other hosts. 2. Inside: everybody gets the slices of each other host.
    pub(super) fn all_gather(&mut self) {
        let (layout, host, hosts) = (self.layout, self.host(), self.layout.hosts());
        let outputs = |host: usize| -> Vec<Span> { layout.members(host).iter().map(|rank| self.call.outputs[rank.index()]).collect() };
        let outputs: Vec<Vec<Span>> = (0..hosts).map(outputs).collect();
        if self.all_alone() && outputs.iter().all(|spans| spans[0].bytes == outputs[0][0].bytes) {
            return self.all_gather_alone(outputs.concat());
        }
        let lengths: Vec<usize> = outputs.iter().map(|spans| spans.iter().map(|span| span.bytes).sum()).collect();
        let rails = rails(lengths.iter().sum(), layout, &self.thresholds);
        let slices: Vec<Vec<Range<usize>>> = lengths.iter().map(|&bytes| slices(bytes, rails)).collect();
        let mut apart: Vec<(Span, usize)> = Vec::new();
        let mut whole = |(other, spans): (usize, &Vec<Span>)| {
            Span::joined(spans).unwrap_or_else(|| {
                // Of the own host nothing comes by the wire.
                let whole = if other == host { NOTHING } else { self.take(lengths[other]) };
                apart.push((whole, other));
                whole
            })
        };
        let wholes: Vec<Span> = outputs.iter().enumerate().map(&mut whole).collect();
        let longest = slices.iter().map(|slices| slices[0].len()).max().unwrap_or(0);
        let turns = Turns::at_most(longest, self.chunk(hosts));
        self.move_inside(Op::AllGather, 0, self.call.inputs.to_vec(), outputs[host].clone());
        self.in_chunks(turns, |planner, turn| {
            let within = |slices: &Vec<Range<usize>>| slices.iter().map(|slice| turns.piece(slice, turn)).collect();
            planner.all_gather_chunk(&outputs[host], &wholes, &slices.iter().map(within).collect::<Vec<_>>());
        });
        for (whole, other) in apart.into_iter().filter(|&(_, other)| other != host) {
            let parts = ranges(outputs[other].iter().map(|span| span.bytes));
            outputs[other].iter().zip(parts).for_each(|(&output, range)| self.copy(part(whole, &range), output));
        }
    }

    /// Where each host has one rank and all give as much, the rail alone; `outputs`: one of each.
    fn all_gather_alone(&mut self, outputs: Vec<Span>) {
        let own = self.call.inputs[0];
        if own.bytes == 0 {
            return;
        }
        // Whether this rank's outputs follow each other nobody else knows: the transfer is the same.
        let whole = Span::joined(&outputs).unwrap_or_else(|| self.take(outputs.len() * own.bytes));
        self.rail(Transfer::AllGather { from: own, to: whole.addr });
        let places = ranges(outputs.iter().map(|span| span.bytes));
        outputs.into_iter().zip(places).for_each(|(output, place)| self.copy(part(whole, &place), output));
    }

    /// One chunk: `pieces[h][r]` of what the ranks of host `h` give goes by rail `r`, to `wholes[h]` on the other hosts. `own`: what this one's
    /// give.
    fn all_gather_chunk(&mut self, own: &[Span], wholes: &[Span], pieces: &[Vec<Range<usize>>]) {
        let (host, local, hosts) = (self.host(), self.local(), self.layout.hosts());
        let longest = padded(pieces.iter().filter_map(|pieces| pieces.get(local)).map(Range::len).max().unwrap_or(0));
        let received = self.take(hosts * longest);
        if longest > 0 {
            let slice = self.contiguous(own, &pieces[host][local]);
            let from = if slice.bytes == longest { slice } else { self.take(longest) };
            self.copy(slice, Span { bytes: slice.bytes, ..from });
            self.rail(Transfer::AllGather { from, to: received.addr });
        }
        self.halfway();
        for other in (0..hosts).filter(|&other| other != host) {
            let slice = pieces[other].get(local).map_or(NOTHING, |piece| part(received, &(other * longest..other * longest + piece.len())));
            let take = self.for_locals(pieces[other].iter().map(|range| part(wholes[other], range)).collect());
            self.move_inside(Op::AllGather, 0, vec![slice], take);
        }
    }

    /// gather, scatter and all_to_all. 1. Inside: what ranks of the own host have for each other. 2. Between: all else goes straight to
    /// its rank, so that nobody needs to know what others send.
    pub(super) fn exchange(&mut self) {
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
