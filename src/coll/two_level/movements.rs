//! Programs of calls that move bytes. Pure.

use super::carriers::MessageLengths;
use super::planner::{Planner, parts};
use super::step::{NOWHERE, Place, RailOp, Step};
use crate::coll::call::{Collective, Span};
use std::ops::Range;

impl Planner<'_> {
    /// 1. Intra-node: all ranks arrive. 2. Inter-node: one rank signals that its node has arrived.
    ///    3. Intra-node: all ranks learn that every node has arrived.
    pub(super) fn barrier(&mut self) {
        self.move_intra_node(Collective::Barrier, 0, vec![], vec![]);
        if self.local() == 0 {
            let (from, to) = (
                self.take(self.rules.align),
                self.take(self.rules.align * self.layout.num_nodes()),
            );
            self.steps.push(Step::Run(RailOp::AllGather { from, to }));
        }
        self.move_intra_node(Collective::Barrier, 0, vec![], vec![]);
    }

    /// For each chunk: 1. Intra-node, on the root's node: all ranks get the whole chunk. 2.
    /// Inter-node: each rail sends its slice to the other nodes. 3. Intra-node, on the other nodes:
    /// all ranks get all slices.
    pub(super) fn broadcast(&mut self) {
        self.agree();
        let whole = Place::given(if self.rank == self.call.root {
            self.call.inputs[0]
        } else {
            self.call.outputs[0]
        });
        let growth = if self.without_rails() { None } else { Some(1) };
        let chunks = self.cut(whole.bytes(), growth).chunks;
        self.chunked(chunks.len(), |planner, chunk| planner.broadcast_chunk(whole, &chunks[chunk]));
    }

    /// Plans one chunk: `pieces[r]` of `whole` travels over rail `r`.
    fn broadcast_chunk(&mut self, whole: Place, pieces: &[Range<usize>]) {
        let root = self.layout.node_of(self.call.root);
        let here = root == self.node();
        let pieces: Vec<Place> = pieces.iter().map(|piece| whole.part(piece)).collect();
        let piece = pieces.get(self.local()).copied().unwrap_or(NOWHERE);
        let at = if self.rules.any_memory { piece } else { self.take(piece.bytes()) };
        // The root's own piece is on the wire while the other ranks of its node get theirs.
        let last = here && self.rules.root_first && self.rank == self.call.root;
        if here && !last {
            self.broadcast_intra_node(&pieces);
        }
        if at.bytes() > 0 {
            if here {
                self.copy(piece, at);
            }
            self.start(RailOp::Broadcast { root, at });
        }
        if last {
            self.broadcast_intra_node(&pieces);
        }
        self.next_stage();
        if !here {
            let take = self.for_locals(pieces);
            self.move_intra_node(Collective::AllGather, 0, vec![at], take);
        }
    }

    /// On the root's node: every rank gets `pieces`.
    fn broadcast_intra_node(&mut self, pieces: &[Place]) {
        let pieces = Place::joined(pieces).map_or_else(|| pieces.to_vec(), |whole| vec![whole]);
        let own = self.rank == self.call.root;
        let call = |piece| if own { (vec![piece], vec![]) } else { (vec![], vec![piece]) };
        self.all_intra_node(
            Collective::Broadcast,
            self.layout.local_rank(self.call.root),
            pieces.into_iter().map(call).collect(),
        );
    }

    /// First, intra-node: all ranks gather the inputs of their own node. Then for each chunk of the
    /// gathered inputs: 1. Inter-node: each rail sends its slice to the other nodes. 2. Intra-node:
    /// all ranks get the slices of each other node.
    pub(super) fn all_gather(&mut self) {
        let (node, nodes) = (self.node(), self.layout.num_nodes());
        let outputs: Vec<Vec<Place>> =
            (0..nodes).map(|node| self.of_node(&self.call.outputs, node)).collect();
        let equal = outputs.iter().all(|places| places[0].bytes() == outputs[0][0].bytes());
        if self.rules.any_memory && self.without_rails() && equal {
            return self.all_gather_alone(&outputs.concat());
        }
        let lengths: Vec<usize> =
            outputs.iter().map(|places| places.iter().map(Place::bytes).sum()).collect();
        self.choose_rails(lengths.iter().sum());
        let chunks = self.cut_each(&lengths, 1);
        self.agree();
        let own = self.call.inputs.iter().map(|&span| Place::given(span)).collect();
        self.move_intra_node(Collective::AllGather, 0, own, outputs[node].clone());
        self.chunked(chunks.len(), |planner, chunk| {
            planner.all_gather_chunk(&outputs, &chunks[chunk])
        });
    }

    /// Plans the case that each node has one rank and all inputs have the same length: only the
    /// rail moves data. `outputs` has one place for each rank.
    fn all_gather_alone(&mut self, outputs: &[Place]) {
        let from = Place::given(self.call.inputs[0]);
        if from.bytes() == 0 {
            return;
        }
        // No other rank knows whether this rank's outputs are contiguous, so the transfer is the
        // same in both cases.
        let to = Place::joined(outputs).unwrap_or_else(|| self.take(outputs.len() * from.bytes()));
        self.steps.push(Step::Run(RailOp::AllGather { from, to }));
        self.scatter_into(to, outputs);
    }

    /// Plans one chunk: `pieces[h][r]` of the inputs of node `h` travels over rail `r` to
    /// `outputs[h]` on the other nodes.
    fn all_gather_chunk(&mut self, outputs: &[Vec<Place>], pieces: &[Vec<Range<usize>>]) {
        let (node, local, nodes) = (self.node(), self.local(), self.layout.num_nodes());
        let lengths: Vec<usize> =
            pieces.iter().map(|pieces| pieces.get(local).map_or(0, Range::len)).collect();
        let received = self.take(self.shared_bytes(&lengths));
        let mut shared = vec![NOWHERE; nodes];
        if lengths.iter().any(|&bytes| bytes > 0) {
            let (own, bytes) = (&outputs[node], self.given_bytes(&lengths));
            let from = self.on_the_wire(own, &pieces[node][local], bytes);
            shared = self.share(from, &lengths, received);
        }
        self.next_stage();
        for other in (0..nodes).filter(|&other| other != node) {
            // A piece that is in several outputs arrives in memory of its own.
            let places: Vec<Vec<Place>> =
                pieces[other].iter().map(|piece| parts(&outputs[other], piece)).collect();
            let mut whole = |(places, piece): (&Vec<Place>, &Range<usize>)| {
                Place::joined(places).unwrap_or_else(|| self.take_aside(piece.len()))
            };
            let wholes: Vec<Place> = places.iter().zip(&pieces[other]).map(&mut whole).collect();
            let take = self.for_locals(wholes.clone());
            self.move_intra_node(Collective::AllGather, 0, vec![shared[other]], take);
            wholes.iter().zip(&places).for_each(|(&from, to)| self.scatter_into(from, to));
        }
    }

    /// gather, scatter and all_to_all: messages within a node move intra-node, all others between
    /// ranks of two nodes.
    pub(super) fn exchange(&mut self, told: Option<&MessageLengths>) {
        let (n, root, node) = (self.layout.size(), self.call.root, self.node());
        let places = |spans: &[Span]| -> Vec<Place> {
            if spans.is_empty() {
                vec![NOWHERE; n]
            } else {
                spans.iter().map(|&span| Place::given(span)).collect()
            }
        };
        let of_root = |spans: &[Span]| {
            let mut all = vec![NOWHERE; n];
            all[root.index()] = Place::given(spans[0]);
            all
        };
        let (inputs, outputs) = (&self.call.inputs, &self.call.outputs);
        let (mut give, mut take) = match self.call.op {
            Collective::Gather => (of_root(inputs), places(outputs)),
            Collective::Scatter => (places(inputs), of_root(outputs)),
            Collective::AllToAll
            | Collective::Barrier
            | Collective::Broadcast
            | Collective::AllReduce
            | Collective::Reduce
            | Collective::AllGather
            | Collective::ReduceScatter
            | Collective::AllReduceAddRmsNorm => (places(inputs), places(outputs)),
        };
        let me = self.rank.index();
        if give[me] == take[me] {
            (give[me], take[me]) = (NOWHERE, NOWHERE);
        }
        let here = |places: &mut Vec<Place>| -> Vec<Place> {
            self.layout
                .ranks_of(node)
                .iter()
                .map(|rank| std::mem::replace(&mut places[rank.index()], NOWHERE))
                .collect()
        };
        let (near_give, near_take) = (here(&mut give), here(&mut take));
        let near = (self.call.op == Collective::AllToAll || self.layout.node_of(root) == node)
            .then_some((near_give, near_take));
        if self.rules.carriers {
            return self.carry(told, &give, &take, near);
        }
        if let Some((give, take)) = near {
            self.move_intra_node(Collective::AllToAll, 0, give, take);
        }
        if give.iter().chain(&take).any(|place| place.bytes() > 0) {
            self.steps.push(Step::Exchange { give, take });
        }
    }
}
