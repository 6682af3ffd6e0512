//! Programs of reductions. Pure.

use super::planner::Planner;
use super::slices::{overlap, ranges};
use super::step::{InnerCall, NOWHERE, Place, Step, Transfer};
use crate::coll::call::Op;
use crate::dtype::ReduceOp;
use std::ops::Range;

/// A transfer of partial results.
struct Swap {
    /// The places of this host's partial results, for each host.
    places: Vec<Place>,
    transfer: Option<Transfer<Place>>,
    /// The places of the partial results that this host adds up, one of each host.
    from: Vec<Place>,
}

impl Planner<'_> {
    /// Reductions of the ranks of this host, of which each has inputs for the rails.
    fn reduce_inside(&mut self, parts: Vec<(Vec<Place>, Place)>) {
        let reduce_op = self.levels().inner;
        if self.locals() == 1 && reduce_op != ReduceOp::PremulSum {
            // What one rank gives is its host's partial result.
            let copies = self.growth() == 1;
            return parts.into_iter().for_each(
                |(inputs, output)| {
                    if copies { self.copy(inputs[0], output) } else { self.cast(inputs[0], output, true) }
                },
            );
        }
        let widen = |(inputs, output): (Vec<Place>, Place)| (inputs.into_iter().map(|input| self.widened(input)).collect(), output);
        let parts: Vec<(Vec<Place>, Place)> = parts.into_iter().map(widen).collect();
        let call = |(inputs, output): (Vec<Place>, Place)| {
            let (inputs, outputs) = (self.for_locals(inputs), vec![output]);
            InnerCall { op: Op::ReduceScatter, dtype: self.partial, reduce_op, root: 0, inputs, outputs }
        };
        let calls = parts.into_iter().map(call).collect();
        self.steps.push(Step::Local(calls));
    }

    /// `input` of a tensor as partial results have it: a copy where that is another type.
    fn widened(&mut self, input: Place) -> Place {
        if self.growth() == 1 || input.bytes() == 0 {
            return input;
        }
        let bytes = input.bytes() * self.growth();
        let wide = self.take_aside(self.padded(input.bytes()) * self.growth()).sized(bytes);
        self.cast(input, wide, true);
        wide
    }

    /// Adds up partial results, and rounds the sum to the tensor's type.
    fn sum(&mut self, from: &[Place], to: Place) {
        if to.bytes() == 0 {
            return;
        }
        let narrow = to;
        let to = if self.growth() == 1 { narrow } else { self.take_partial(narrow.bytes()) };
        let from = from.iter().map(|from| from.sized(to.bytes())).collect();
        self.steps.push(Step::Combine { from, to });
        if self.growth() > 1 {
            self.cast(to, narrow, false);
        }
    }

    /// Chunk by chunk: 1. Inside: each rail gets its slice of the host's partial result. 2. Between: the hosts' slices are combined.
    /// 3. Inside: everybody, or the root, gets all slices.
    pub(super) fn all_reduce(&mut self) {
        let bytes = self.call.inputs[0].bytes;
        if bytes > 0 {
            let cut = self.cut(bytes, Some(self.growth()));
            self.in_chunks(cut.chunks.len(), |planner, chunk| planner.all_reduce_chunk(&cut.chunks[chunk], cut.longest));
        }
    }

    /// One chunk: `pieces[r]` travels over rail `r`; `longest`: the length of the longest slice, where slices are cut into pieces.
    fn all_reduce_chunk(&mut self, pieces: &[Range<usize>], longest: usize) {
        let place = |whole: Place| -> Vec<Place> { pieces.iter().map(|piece| whole.part(piece)).collect() };
        let (alone, own) = (self.locals() == 1, pieces.get(self.local()).map_or(0, Range::len));
        let give = place(Place::given(self.call.inputs[0]));
        let direct = self.rules.any_memory
            && alone
            && self.growth() == 1
            && self.levels().inner != ReduceOp::PremulSum
            && give[0].span.addr.is_multiple_of(self.rules.align)
            && own.is_multiple_of(self.rules.align);
        let partial = if direct { give[0] } else { self.take_partial(own) };
        if !direct {
            self.reduce_inside(vec![(give, partial)]);
        }
        self.agree();
        let take = self.call.outputs.first().map_or_else(Vec::new, |&whole| place(Place::given(whole)));
        let sum = self.combine(partial, take.first().copied().filter(|_| alone), longest);
        if alone {
            return;
        }
        if self.call.op != Op::Reduce {
            let take = self.for_locals(take);
            self.move_inside(Op::AllGather, 0, vec![sum], take);
        } else if self.layout.host(self.call.root) == self.host() {
            let mut give = vec![NOWHERE; self.locals()];
            give[self.layout.local(self.call.root)] = sum;
            let take = self.for_locals(take);
            self.move_inside(Op::AllToAll, 0, give, take);
        }
    }

    /// Combines the hosts' partial results, of which `own` is this one's; returns where the result is: at `to`, if that is given. The first
    /// stage of the chunk ends with the first transfer.
    fn combine(&mut self, own: Place, to: Option<Place>, longest: usize) -> Place {
        let (hosts, growth) = (self.layout.hosts(), self.growth());
        // In a tensor; a partial result has room for as many elements.
        let own = own.sized(own.bytes() / growth);
        let bytes = self.padded(own.bytes());
        // All chunks of a call have equally many stages.
        let length = if self.rules.sums_overlap { longest } else { bytes };
        let gathers = hosts == 2 || length * growth <= self.thresholds.gathered;
        if own.bytes() == 0 {
            self.next_stage();
            if !gathers && self.rules.sums_overlap {
                self.next_stage();
            }
            return NOWHERE;
        }
        if gathers {
            let lengths = vec![bytes * growth; hosts];
            let received = self.take(self.shared_bytes(&lengths));
            let partials = self.share(own.sized(bytes * growth), &lengths, received);
            self.next_stage();
            let result = to.unwrap_or_else(|| self.take(own.bytes()));
            self.sum(&partials, result);
            return result;
        }
        // Each host combines a piece. The first piece is the longest: the others are padded to it when they are gathered.
        let pieces = self.slices(bytes, hosts);
        let sent: Vec<usize> = pieces.iter().map(|piece| piece.len() * growth).collect();
        let (mine, longest) = (pieces[self.host()].len(), pieces[0].len());
        let each = mine * growth;
        let received = self.take(hosts * each);
        self.start(Transfer::AllToAll { from: own.sized(bytes * growth), sent, to: received, received: vec![each; hosts] });
        self.next_stage();
        let summed = self.take(longest);
        let partials: Vec<Place> = (0..hosts).map(|host| received.part(&(host * each..(host + 1) * each))).collect();
        self.sum(&partials, summed.sized(mine));
        let gathered = self.take(hosts * longest);
        let transfer = Transfer::AllGather { from: summed, to: gathered };
        if self.rules.sums_overlap {
            self.start(transfer);
            self.next_stage();
        } else {
            self.steps.push(Step::Run(transfer));
        }
        if to.is_none() && pieces.iter().all(|piece| piece.len() == longest) {
            return gathered.sized(own.bytes());
        }
        let result = to.unwrap_or_else(|| self.take(own.bytes()));
        for (host, piece) in pieces.iter().enumerate() {
            let piece = piece.start..piece.end.min(own.bytes());
            self.copy(gathered.part(&(host * longest..host * longest + piece.len())), result.part(&piece));
        }
        result
    }

    /// Chunk by chunk: 1. Inside: each rail gets its slice of what each host is to have. 2. Between: slices go to their hosts, and are
    /// combined there. 3. Inside: ranks get what is theirs of the slices.
    pub(super) fn reduce_scatter(&mut self) {
        self.choose_rails(self.call.inputs.iter().map(|span| span.bytes).sum());
        let blocks: Vec<Vec<Place>> = (0..self.layout.hosts()).map(|host| self.of_host(&self.call.inputs, host)).collect();
        let lengths: Vec<usize> = blocks.iter().map(|block| block.iter().map(Place::bytes).sum()).collect();
        let chunks = self.cut_each(&lengths, self.growth());
        self.in_chunks(chunks.len(), |planner, chunk| planner.reduce_scatter_chunk(&blocks, &chunks[chunk]));
    }

    /// How this rank's rail brings every host what is for it: `sent[h]` bytes of this one's partial results go to host `h`.
    fn swap(&mut self, sent: Vec<usize>) -> Swap {
        let (host, hosts) = (self.host(), self.layout.hosts());
        let each = sent[host];
        let nth = |base: Place, at: usize| base.part(&(at * each..(at + 1) * each));
        if hosts == 2 && sent[0] == sent[1] && self.rules.pair_gathers {
            // Two hosts gather what each has for the other, in place, which NCCL does faster than messages. What each keeps lies beside
            // that so that the two to be added up are in their order, with the bytes given away between them.
            let base = self.take(3 * each);
            let mut places = vec![nth(base, 1); 2];
            places[host] = nth(base, 2 * host);
            let to = base.part(&((1 - host) * each..(3 - host) * each));
            let transfer = (each > 0).then_some(Transfer::AllGather { from: nth(base, 1), to });
            return Swap { places, transfer, from: vec![base.sized(each), nth(base, 2)] };
        }
        let partials = self.take(sent.iter().sum());
        let places = ranges(sent.iter().copied()).iter().map(|place| partials.part(place)).collect();
        let to = self.take(hosts * each);
        let received = vec![each; hosts];
        let transfer = (partials.bytes() > 0).then_some(Transfer::AllToAll { from: partials, sent, to, received });
        Swap { places, transfer, from: (0..hosts).map(|host| nth(to, host)).collect() }
    }

    /// One chunk: `pieces[h][r]` of `blocks[h]`, which the ranks of host `h` are to have, goes by rail `r`.
    fn reduce_scatter_chunk(&mut self, blocks: &[Vec<Place>], pieces: &[Vec<Range<usize>>]) {
        let (host, local, hosts, growth) = (self.host(), self.local(), self.layout.hosts(), self.growth());
        let length = |to: usize| pieces[to].get(local).map_or(0, Range::len);
        let Swap { places, transfer, from } = self.swap((0..hosts).map(|to| self.padded(length(to)) * growth).collect());
        let parts: Vec<(Vec<Place>, Place)> = (0..hosts)
            .map(|to| {
                let give = pieces[to].iter().map(|piece| self.contiguous(&blocks[to], piece)).collect();
                (give, places[to].sized(length(to) * growth))
            })
            .collect();
        self.reduce_inside(parts);
        self.agree();

        let (mine, output) = (&pieces[host], Place::given(self.call.outputs[0]));
        let own = mine.get(local).cloned().unwrap_or_default();
        let alone = self.locals() == 1;
        let mut sum = NOWHERE;
        if let Some(transfer) = transfer {
            self.start(transfer);
        }
        self.next_stage();
        if !own.is_empty() {
            sum = if alone { output.part(&own) } else { self.take(own.len()) };
            self.sum(&from, sum);
        }
        if alone {
            return;
        }
        let wanted = ranges(blocks[host].iter().map(Place::bytes));
        let give = match mine.get(local) {
            None => vec![NOWHERE; self.locals()],
            Some(piece) => wanted.iter().map(|want| sum.shifted(&overlap(want, piece), piece.start)).collect(),
        };
        let want = &wanted[local];
        let take = mine.iter().map(|piece| output.shifted(&overlap(piece, want), want.start)).collect();
        let take = self.for_locals(take);
        self.move_inside(Op::AllToAll, 0, give, take);
    }
}
