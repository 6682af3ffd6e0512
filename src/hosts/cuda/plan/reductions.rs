//! Plans of reductions. Pure.

use super::{Planner, padded, slices};
use crate::coll::call::{Call, Op, Span, Spec};
use crate::dtype::ReduceOp;
use crate::hosts::cuda::backends::Transfer;
use crate::hosts::cuda::steps::Step;
use crate::hosts::cuda::sum::{Sum, UNIT};
use crate::hosts::slices::{Levels, Turns, overlap, part, rails, ranges, shifted};
use crate::hosts::step::NOTHING;
use crate::rank::Rank;
use std::ops::Range;

/// A transfer of partial results.
struct Swap {
    /// Addresses of this host's, for each host.
    places: Vec<usize>,
    transfer: Option<Transfer>,
    /// Address of those of the first host that this one is to add up.
    from: usize,
    /// Bytes between those of two hosts.
    stride: usize,
}

impl Planner<'_> {
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
        let call = |(inputs, output): (Vec<Span>, Span)| {
            Call::inner(Spec {
                op: Op::ReduceScatter,
                dtype: self.partial,
                reduce_op,
                root: Rank(0),
                factor: self.call.factor,
                inputs: self.for_locals(inputs).into(),
                outputs: vec![output].into(),
                call_site: None,
            })
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

    /// Chunk by chunk: 1. Inside: each rail gets its slice of the host's partial result. 2. Between: the hosts' slices are combined.
    /// 3. Inside: everybody, or the root, gets all slices.
    pub(super) fn all_reduce(&mut self) {
        let bytes = self.call.inputs[0].bytes;
        if bytes > 0 {
            let (turns, rails) = self.turns(bytes, self.growth());
            self.in_chunks(turns, |planner, turn| planner.all_reduce_chunk(&turns.piece(&(0..bytes), turn), rails));
        }
    }

    fn all_reduce_chunk(&mut self, within: &Range<usize>, rails: usize) {
        let place =
            |whole: Span, slices: &[Range<usize>]| -> Vec<Span> { slices.iter().map(|slice| part(part(whole, within), slice)).collect() };
        let (slices, alone) = (slices(within.len(), rails), self.locals() == 1);
        let own = slices.get(self.local()).map_or(0, Range::len);
        let give = place(self.call.inputs[0], &slices);
        let direct = alone
            && self.growth() == 1
            && Levels::of(self.call.reduce_op, self.call.dtype, self.layout).inner != ReduceOp::PremulSum
            && give[0].addr.is_multiple_of(UNIT)
            && own.is_multiple_of(UNIT);
        let partial = if direct { give[0] } else { self.take_partial(own) };
        if !direct {
            self.reduce_inside(vec![(give, partial)]);
        }
        let take = self.call.outputs.first().map_or_else(Vec::new, |&whole| place(whole, &slices));
        let sum = self.combine(partial, take.first().copied().filter(|_| alone));
        if alone {
            return;
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

    /// Combines the hosts' partial results, of which `own` is this one's; returns where the result is: at `to`, if that is given. The first
    /// half of the chunk ends with the first transfer.
    fn combine(&mut self, own: Span, to: Option<Span>) -> Span {
        let (hosts, growth) = (self.layout.hosts(), self.growth());
        // In a tensor; a partial result has room for as many elements.
        let own = Span { bytes: own.bytes / growth, ..own };
        let bytes = padded(own.bytes);
        if own.bytes == 0 {
            self.halfway();
            return NOTHING;
        }
        if hosts == 2 || bytes * growth <= self.thresholds.gathered {
            let received = self.take(hosts * bytes * growth).addr;
            self.rail(Transfer::AllGather { from: Span { bytes: bytes * growth, ..own }, to: received });
            self.halfway();
            let result = to.unwrap_or_else(|| self.take(own.bytes));
            self.sum(received, bytes * growth, result);
            return result;
        }
        // Each host combines a piece. The first piece is the longest: the others are padded to it when they are gathered.
        let pieces = slices(bytes, hosts);
        let sent: Vec<usize> = pieces.iter().map(|piece| piece.len() * growth).collect();
        let (mine, longest) = (pieces[self.host()].len(), pieces[0].len());
        let received = self.take(hosts * mine * growth).addr;
        self.rail(Transfer::AllToAll { from: own.addr, sent, to: received, received: vec![mine * growth; hosts] });
        self.halfway();
        let summed = self.take(longest);
        self.sum(received, mine * growth, Span { bytes: mine, ..summed });
        let gathered = self.take(hosts * longest);
        self.rail(Transfer::AllGather { from: summed, to: gathered.addr });
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

    /// Chunk by chunk: 1. Inside: each rail gets its slice of what each host is to have. 2. Between: slices go to their hosts, and are
    /// combined there. 3. Inside: ranks get what is theirs of the slices.
    pub(super) fn reduce_scatter(&mut self) {
        let (layout, hosts) = (self.layout, self.layout.hosts());
        let blocks = |host: usize| -> Vec<Span> { layout.members(host).iter().map(|rank| self.call.inputs[rank.index()]).collect() };
        let rails = rails(self.call.inputs.iter().map(|span| span.bytes).sum(), layout, &self.thresholds);
        let blocks: Vec<Vec<Span>> = (0..hosts).map(blocks).collect();
        let slices: Vec<Vec<Range<usize>>> = blocks.iter().map(|block| slices(block.iter().map(|span| span.bytes).sum(), rails)).collect();
        let longest = slices.iter().map(|slices| slices[0].len()).max().unwrap_or(0);
        let turns = Turns::at_most(longest, self.chunk(self.growth() * hosts));
        self.in_chunks(turns, |planner, turn| {
            let within = |slices: &Vec<Range<usize>>| slices.iter().map(|slice| turns.piece(slice, turn)).collect();
            planner.reduce_scatter_chunk(&blocks, &slices.iter().map(within).collect::<Vec<_>>());
        });
    }

    /// How this rank's rail brings every host what is for it: `sent[h]` bytes of this one's partial results go to host `h`.
    fn swap(&mut self, sent: Vec<usize>) -> Swap {
        let (host, hosts) = (self.host(), self.layout.hosts());
        let each = sent[host];
        if hosts == 2 && sent[0] == sent[1] {
            // Two hosts gather what each has for the other, in place, which NCCL does faster than messages. What each keeps lies beside
            // that so that the two to be added up are in their order, with the bytes given away between them.
            let base = self.take(3 * each).addr;
            let mut places = vec![base + each; 2];
            places[host] = base + 2 * host * each;
            let from = Span { addr: base + each, bytes: each };
            let transfer = (each > 0).then_some(Transfer::AllGather { from, to: base + (1 - host) * each });
            return Swap { places, transfer, from: base, stride: 2 * each };
        }
        let partials = self.take(sent.iter().sum());
        let places = ranges(sent.iter().copied()).iter().map(|place| partials.addr + place.start).collect();
        let to = self.take(hosts * each).addr;
        let received = vec![each; hosts];
        let transfer = (partials.bytes > 0).then_some(Transfer::AllToAll { from: partials.addr, sent, to, received });
        Swap { places, transfer, from: to, stride: each }
    }

    /// One chunk: `pieces[h][r]` of `blocks[h]`, which the ranks of host `h` are to have, goes by rail `r`.
    fn reduce_scatter_chunk(&mut self, blocks: &[Vec<Span>], pieces: &[Vec<Range<usize>>]) {
        let (host, local, hosts, growth) = (self.host(), self.local(), self.layout.hosts(), self.growth());
        let sent: Vec<usize> = pieces.iter().map(|pieces| pieces.get(local).map_or(0, |piece| padded(piece.len()) * growth)).collect();
        let Swap { places, transfer, from, stride } = self.swap(sent);
        let parts: Vec<(Vec<Span>, Span)> = (0..hosts)
            .map(|to| {
                let length = pieces[to].get(local).map_or(0, Range::len) * growth;
                let give = pieces[to].iter().map(|piece| self.contiguous(&blocks[to], piece)).collect();
                (give, Span { addr: places[to], bytes: length })
            })
            .collect();
        self.reduce_inside(parts);

        let (mine, output) = (&pieces[host], self.call.outputs[0]);
        let own = mine.get(local).cloned().unwrap_or_default();
        let alone = self.locals() == 1;
        let mut sum = NOTHING;
        if let Some(transfer) = transfer {
            self.rail(transfer);
        }
        self.halfway();
        if !own.is_empty() {
            sum = if alone { part(output, &own) } else { self.take(own.len()) };
            self.sum(from, stride, sum);
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
}
