//! Programs of reductions. Pure.

use super::planner::Planner;
use super::slices::{overlap, ranges};
use super::step::{InnerCall, NOWHERE, Place, RailOp, Step};
use crate::coll::call::Collective;
use crate::dtype::ReduceOp;
use std::ops::Range;

/// A transfer of partial results.
struct PartialExchange {
    /// Where this node writes its partial results for each node.
    places: Vec<Place>,
    transfer: Option<RailOp<Place>>,
    /// Where the partial results that this node combines arrive, one per node.
    from: Vec<Place>,
}

impl Planner<'_> {
    /// Plans one intra-node reduction for each of `parts`. A part has this rank's input for each
    /// rail, and the place where this rank gets the result for its own rail.
    fn reduce_intra_node(&mut self, parts: Vec<(Vec<Place>, Place)>) {
        let reduce_op = self.levels().inner;
        if self.local_size() == 1 && reduce_op != ReduceOp::PremulSum {
            // The input of a single rank is its node's partial result.
            let copies = self.size_ratio() == 1;
            return parts.into_iter().for_each(|(inputs, output)| {
                if copies {
                    self.copy(inputs[0], output)
                } else {
                    self.cast(inputs[0], output, true)
                }
            });
        }
        let widen = |(inputs, output): (Vec<Place>, Place)| {
            (inputs.into_iter().map(|input| self.widen(input)).collect(), output)
        };
        let parts: Vec<(Vec<Place>, Place)> = parts.into_iter().map(widen).collect();
        let call = |(inputs, output): (Vec<Place>, Place)| {
            let (inputs, outputs) = (self.for_locals(inputs), vec![output]);
            InnerCall {
                op: Collective::ReduceScatter,
                dtype: self.partial,
                reduce_op,
                root: 0,
                inputs,
                outputs,
            }
        };
        let calls = parts.into_iter().map(call).collect();
        self.steps.push(Step::Local(calls));
    }

    /// Returns `input` in the type of partial results: a copy if that is not the tensor's type.
    fn widen(&mut self, input: Place) -> Place {
        if self.size_ratio() == 1 || input.bytes() == 0 {
            return input;
        }
        let bytes = input.bytes() * self.size_ratio();
        let wide = self.take_aside(self.padded(input.bytes()) * self.size_ratio()).sized(bytes);
        self.cast(input, wide, true);
        wide
    }

    /// Combines partial results and rounds the result to the tensor's type.
    fn sum(&mut self, from: &[Place], to: Place) {
        if to.bytes() == 0 {
            return;
        }
        let narrow = to;
        let to = if self.size_ratio() == 1 { narrow } else { self.take_partial(narrow.bytes()) };
        let from = from.iter().map(|from| from.sized(to.bytes())).collect();
        self.steps.push(Step::Combine { from, to });
        if self.size_ratio() > 1 {
            self.cast(to, narrow, false);
        }
    }

    /// For each chunk: 1. Intra-node: each rail gets its slice of the node's partial result. 2.
    /// Inter-node: the nodes' slices are combined. 3. Intra-node: all ranks, or the root, get all
    /// slices.
    pub(super) fn all_reduce(&mut self) {
        let bytes = self.call.inputs[0].bytes;
        if bytes > 0 {
            let cut = self.cut(bytes, Some(self.size_ratio()));
            self.chunked(cut.chunks.len(), |planner, chunk| {
                planner.all_reduce_chunk(&cut.chunks[chunk], cut.longest)
            });
        }
    }

    /// Plans one chunk: `pieces[r]` travels over rail `r`. `longest` is `Cut::longest` of the whole
    /// call.
    fn all_reduce_chunk(&mut self, pieces: &[Range<usize>], longest: usize) {
        let place =
            |whole: Place| -> Vec<Place> { pieces.iter().map(|piece| whole.part(piece)).collect() };
        let (alone, own) = (self.local_size() == 1, pieces.get(self.local()).map_or(0, Range::len));
        let give = place(Place::given(self.call.inputs[0]));
        let direct = self.rules.any_memory
            && alone
            && self.size_ratio() == 1
            && self.levels().inner != ReduceOp::PremulSum
            && give[0].span.addr.is_multiple_of(self.rules.align)
            && own.is_multiple_of(self.rules.align);
        let partial = if direct { give[0] } else { self.take_partial(own) };
        if !direct {
            self.reduce_intra_node(vec![(give, partial)]);
        }
        self.agree();
        let take =
            self.call.outputs.first().map_or_else(Vec::new, |&whole| place(Place::given(whole)));
        let sum = self.combine(partial, take.first().copied().filter(|_| alone), longest);
        if alone {
            return;
        }
        if self.call.op != Collective::Reduce {
            let take = self.for_locals(take);
            self.move_intra_node(Collective::AllGather, 0, vec![sum], take);
        } else if self.layout.node_of(self.call.root) == self.node() {
            let mut give = vec![NOWHERE; self.local_size()];
            give[self.layout.local_rank(self.call.root)] = sum;
            let take = self.for_locals(take);
            self.move_intra_node(Collective::AllToAll, 0, give, take);
        }
    }

    /// Combines the nodes' partial results, of which `own` is this node's. Returns where the result
    /// is: at `to`, if given. The first stage of the chunk ends with the first transfer.
    fn combine(&mut self, own: Place, to: Option<Place>, longest: usize) -> Place {
        let (nodes, growth) = (self.layout.num_nodes(), self.size_ratio());
        // Length in the tensor's type; a partial result has capacity for the same number of
        // elements.
        let own = own.sized(own.bytes() / growth);
        let bytes = self.padded(own.bytes());
        // All chunks of a call must have the same number of stages.
        let length = if self.rules.sums_overlap { longest } else { bytes };
        let gathers = nodes == 2 || length * growth <= self.thresholds.gather_bytes;
        if own.bytes() == 0 {
            self.next_stage();
            if !gathers && self.rules.sums_overlap {
                self.next_stage();
            }
            return NOWHERE;
        }
        if gathers {
            let lengths = vec![bytes * growth; nodes];
            let received = self.take(self.shared_bytes(&lengths));
            let partials = self.share(own.sized(bytes * growth), &lengths, received);
            self.next_stage();
            let result = to.unwrap_or_else(|| self.take(own.bytes()));
            self.sum(&partials, result);
            return result;
        }
        // Each node combines a piece. The first piece is the longest: the others are padded to its
        // length when they are gathered.
        let pieces = self.slices(bytes, nodes);
        let sent: Vec<usize> = pieces.iter().map(|piece| piece.len() * growth).collect();
        let (mine, longest) = (pieces[self.node()].len(), pieces[0].len());
        let each = mine * growth;
        let received = self.take(nodes * each);
        self.start(RailOp::AllToAll {
            from: own.sized(bytes * growth),
            sent,
            to: received,
            received: vec![each; nodes],
        });
        self.next_stage();
        let summed = self.take(longest);
        let partials: Vec<Place> =
            (0..nodes).map(|node| received.part(&(node * each..(node + 1) * each))).collect();
        self.sum(&partials, summed.sized(mine));
        let gathered = self.take(nodes * longest);
        let transfer = RailOp::AllGather { from: summed, to: gathered };
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
        for (node, piece) in pieces.iter().enumerate() {
            let piece = piece.start..piece.end.min(own.bytes());
            self.copy(
                gathered.part(&(node * longest..node * longest + piece.len())),
                result.part(&piece),
            );
        }
        result
    }

    /// For each chunk: 1. Intra-node: each rail gets its slice of the partial results for each
    /// node. 2. Inter-node: slices move to their nodes and are combined there. 3. Intra-node: ranks
    /// get their parts of the slices.
    pub(super) fn reduce_scatter(&mut self) {
        self.choose_rails(self.call.inputs.iter().map(|span| span.bytes).sum());
        let blocks: Vec<Vec<Place>> = (0..self.layout.num_nodes())
            .map(|node| self.of_node(&self.call.inputs, node))
            .collect();
        let lengths: Vec<usize> =
            blocks.iter().map(|block| block.iter().map(Place::bytes).sum()).collect();
        let chunks = self.cut_each(&lengths, self.size_ratio());
        self.chunked(chunks.len(), |planner, chunk| {
            planner.reduce_scatter_chunk(&blocks, &chunks[chunk])
        });
    }

    /// Plans how this rank's rail sends partial results: `sent[h]` bytes of this node's results go
    /// to node `h`.
    fn swap(&mut self, sent: Vec<usize>) -> PartialExchange {
        let (node, nodes) = (self.node(), self.layout.num_nodes());
        let each = sent[node];
        let nth = |base: Place, at: usize| base.part(&(at * each..(at + 1) * each));
        if nodes == 2 && sent[0] == sent[1] && self.rules.pair_gathers {
            // Two nodes swap parts by an in-place all_gather, which NCCL runs faster than send and
            // receive. The memory has three parts. The middle one is sent. The part that this node
            // keeps and the part that it receives are on either side of it, in node order, and are
            // combined.
            let base = self.take(3 * each);
            let mut places = vec![nth(base, 1); 2];
            places[node] = nth(base, 2 * node);
            let to = base.part(&((1 - node) * each..(3 - node) * each));
            let transfer = (each > 0).then_some(RailOp::AllGather { from: nth(base, 1), to });
            return PartialExchange {
                places,
                transfer,
                from: vec![base.sized(each), nth(base, 2)],
            };
        }
        let partials = self.take(sent.iter().sum());
        let places =
            ranges(sent.iter().copied()).iter().map(|place| partials.part(place)).collect();
        let to = self.take(nodes * each);
        let received = vec![each; nodes];
        let transfer = (partials.bytes() > 0).then_some(RailOp::AllToAll {
            from: partials,
            sent,
            to,
            received,
        });
        PartialExchange { places, transfer, from: (0..nodes).map(|node| nth(to, node)).collect() }
    }

    /// Plans one chunk: `pieces[h][r]` of `blocks[h]`, the results for the ranks of node `h`,
    /// travels over rail `r`.
    fn reduce_scatter_chunk(&mut self, blocks: &[Vec<Place>], pieces: &[Vec<Range<usize>>]) {
        let (node, local, nodes, growth) =
            (self.node(), self.local(), self.layout.num_nodes(), self.size_ratio());
        let length = |to: usize| pieces[to].get(local).map_or(0, Range::len);
        let PartialExchange { places, transfer, from } =
            self.swap((0..nodes).map(|to| self.padded(length(to)) * growth).collect());
        let parts: Vec<(Vec<Place>, Place)> = (0..nodes)
            .map(|to| {
                let give = pieces[to]
                    .iter()
                    .map(|piece| self.gather_contiguous(&blocks[to], piece))
                    .collect();
                (give, places[to].sized(length(to) * growth))
            })
            .collect();
        self.reduce_intra_node(parts);
        self.agree();

        let (mine, output) = (&pieces[node], Place::given(self.call.outputs[0]));
        let own = mine.get(local).cloned().unwrap_or_default();
        let alone = self.local_size() == 1;
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
        let wanted = ranges(blocks[node].iter().map(Place::bytes));
        let give = match mine.get(local) {
            None => vec![NOWHERE; self.local_size()],
            Some(piece) => {
                wanted.iter().map(|want| sum.shifted(&overlap(want, piece), piece.start)).collect()
            }
        };
        let want = &wanted[local];
        let take =
            mine.iter().map(|piece| output.shifted(&overlap(piece, want), want.start)).collect();
        let take = self.for_locals(take);
        self.move_intra_node(Collective::AllToAll, 0, give, take);
    }
}
