//! The building blocks of all programs: memory, slices, transfers and intra-node collectives. Pure.

use super::Planning;
use super::levels::TwoLevelOps;
use super::rules::Rules;
use super::slices::{self, ChunkSchedule, overlap, rails, ranges};
use super::step::{InnerCall, NOWHERE, Place, Program, ProgramMemory, RailOp, Step};
use crate::coll::call::{CallSpec, Collective, Span};
use crate::coll::cost::network::RailThresholds;
use crate::dtype::{DType, ReduceOp};
use crate::node_map::NodeMap;
use crate::rank::Rank;
use std::ops::Range;

/// Sizes of the program's memory in bytes.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Room {
    pub(super) temp: usize,
    pub(super) aside: usize,
}

impl Room {
    pub(super) fn each(self, other: Self, of: impl Fn(usize, usize) -> usize) -> Self {
        Self { temp: of(self.temp, other.temp), aside: of(self.aside, other.aside) }
    }

    pub(super) fn most(self, other: Self) -> Self {
        self.each(other, usize::max)
    }
}

pub(super) struct Planner<'a> {
    pub(super) call: &'a CallSpec<'a>,
    pub(super) layout: &'a NodeMap,
    pub(super) thresholds: RailThresholds,
    pub(super) rules: &'static Rules,
    /// The type of partial results.
    pub(super) partial: DType,
    pub(super) rank: Rank,
    /// The memory in use, and its maximum so far.
    pub(super) used: Room,
    pub(super) most: Room,
    /// The finished stages of the chunk being planned; `steps` has the steps of the current stage.
    pub(super) stages: Vec<Vec<Step>>,
    pub(super) steps: Vec<Step>,
    pub(super) rails: usize,
    agreed: bool,
}

/// The pieces of a tensor.
pub(super) struct Cut {
    /// For each chunk, the piece of each rail.
    pub(super) chunks: Vec<Vec<Range<usize>>>,
    /// Length of the longest slice of any rail under [`Rules::slices_first`], otherwise 0.
    pub(super) longest: usize,
}

impl<'a> Planner<'a> {
    pub(super) fn new(planning: Planning<'a>, call: &'a CallSpec<'a>) -> Self {
        let Planning { map: layout, me: rank, reduce_dtype: partials, thresholds, rules } =
            planning;
        let partial =
            if call.op.reduces() { partials.dtype(call.reduce_op, call.dtype) } else { call.dtype };
        let (used, most, stages, steps) =
            (Room::default(), Room::default(), Vec::new(), Vec::new());
        Self {
            call,
            layout,
            thresholds,
            rules,
            partial,
            rank,
            used,
            most,
            stages,
            steps,
            rails: 1,
            agreed: false,
        }
    }

    pub(super) fn program(self) -> Program {
        let Self { steps, most, rails, partial, .. } = self;
        Program { steps, temp: most.temp, aside: most.aside, rails, partial }
    }
}

impl Planner<'_> {
    pub(super) fn node(&self) -> usize {
        self.layout.node_of(self.rank)
    }

    pub(super) fn local(&self) -> usize {
        self.layout.local_rank(self.rank)
    }

    pub(super) fn local_size(&self) -> usize {
        self.layout.ranks_of(self.node()).len()
    }

    /// Returns the places of those `spans` that belong to ranks of `node`; `spans` has one for each
    /// rank of the group.
    pub(super) fn of_node(&self, spans: &[Span], node: usize) -> Vec<Place> {
        self.layout.ranks_of(node).iter().map(|rank| Place::given(spans[rank.index()])).collect()
    }

    /// Allocates `bytes` bytes that transfers may use.
    pub(super) fn take(&mut self, bytes: usize) -> Place {
        let addr = self.used.temp;
        self.used.temp += bytes.next_multiple_of(self.rules.align);
        self.most = self.most.most(self.used);
        Place { memory: ProgramMemory::Temp, span: Span { addr, bytes } }
    }

    /// Allocates `bytes` bytes that no transfer uses.
    pub(super) fn take_aside(&mut self, bytes: usize) -> Place {
        if self.rules.any_memory {
            return self.take(bytes);
        }
        let addr = self.used.aside;
        self.used.aside += bytes.next_multiple_of(self.rules.align);
        self.most = self.most.most(self.used);
        Place { memory: ProgramMemory::Aside, span: Span { addr, bytes } }
    }

    /// Allocates a partial result of elements that occupy `bytes` bytes in a tensor.
    pub(super) fn take_partial(&mut self, bytes: usize) -> Place {
        let growth = self.size_ratio();
        self.take(self.padded(bytes) * growth).sized(bytes * growth)
    }

    /// Returns the length on the wire of `bytes` bytes.
    pub(super) fn padded(&self, bytes: usize) -> usize {
        self.rules.unit.map_or(bytes, |unit| bytes.next_multiple_of(unit))
    }

    /// Divides `bytes` bytes into `parts` ranges in order, as evenly as possible; each starts at a
    /// multiple of an element, or of the rules' unit.
    pub(super) fn slices(&self, bytes: usize, parts: usize) -> Vec<Range<usize>> {
        let unit = self.rules.unit.unwrap_or(self.call.dtype.size());
        slices::slices(self.padded(bytes), unit, parts)
            .into_iter()
            .map(|slice| slice.start.min(bytes)..slice.end.min(bytes))
            .collect()
    }

    /// Chooses the number of rails for a call of `bytes` bytes, and records it in the program.
    pub(super) fn choose_rails(&mut self, bytes: usize) -> usize {
        self.rails = rails(bytes, self.layout, &self.thresholds);
        self.rails
    }

    /// Returns how many bytes of a tensor a chunk has, if they take `growth` times as many bytes on
    /// the wire.
    fn chunk(&self, growth: usize) -> usize {
        (self.thresholds.chunk_bytes / growth)
            .next_multiple_of(self.rules.align)
            .max(self.rules.align)
    }

    /// Returns the pipeline steps of slices of up to `longest` bytes. `growth` is the ratio of the
    /// bytes that all nodes together put on the wire to the bytes of a slice.
    fn turns(&self, longest: usize, growth: usize) -> ChunkSchedule {
        if self.rules.slices_first {
            ChunkSchedule::of(longest, &self.thresholds)
        } else {
            ChunkSchedule::at_most(longest, self.chunk(growth))
        }
    }

    /// Cuts `bytes` bytes into chunks and these into the rails' pieces. `growth` is the ratio of
    /// the length on the wire to the length in a tensor; `None` means one chunk. Under
    /// [`Rules::slices_first`] it is ignored.
    pub(super) fn cut(&mut self, bytes: usize, growth: Option<usize>) -> Cut {
        let rails = self.choose_rails(bytes);
        if self.rules.slices_first {
            let slices = self.slices(bytes, rails);
            let turns = ChunkSchedule::of(slices[0].len(), &self.thresholds);
            let chunks = (0..turns.count)
                .map(|turn| slices.iter().map(|slice| turns.piece(slice, turn)).collect())
                .collect();
            return Cut { chunks, longest: slices[0].len() };
        }
        let turns = ChunkSchedule::at_most(
            bytes,
            growth.map_or(usize::MAX, |growth| self.chunk(growth) * rails),
        );
        let chunk = |turn: usize| {
            let within = turns.piece(&(0..bytes), turn);
            self.slices(within.len(), rails)
                .iter()
                .map(|slice| slice.start + within.start..slice.end + within.start)
                .collect()
        };
        Cut { chunks: (0..turns.count).map(chunk).collect(), longest: 0 }
    }

    /// Cuts `lengths[h]` bytes of each node `h`; returns, for each chunk and node, the piece of
    /// each rail.
    pub(super) fn cut_each(
        &mut self,
        lengths: &[usize],
        growth: usize,
    ) -> Vec<Vec<Vec<Range<usize>>>> {
        let slices: Vec<Vec<Range<usize>>> =
            lengths.iter().map(|&bytes| self.slices(bytes, self.rails)).collect();
        let longest = slices.iter().map(|slices| slices[0].len()).max().unwrap_or(0);
        let turns = self.turns(longest, growth * lengths.len());
        let pieces = |slices: &Vec<Range<usize>>, turn| {
            slices.iter().map(|slice| turns.piece(slice, turn)).collect()
        };
        (0..turns.count)
            .map(|turn| slices.iter().map(|slices| pieces(slices, turn)).collect())
            .collect()
    }

    /// Returns true if no node has two ranks, so that there is no intra-node work to overlap with.
    pub(super) fn without_rails(&self) -> bool {
        self.layout.size() == self.layout.num_nodes()
    }

    /// Returns the ratio of the size of a partial result to the size of its elements in a tensor.
    pub(super) fn size_ratio(&self) -> usize {
        self.partial.size() / self.call.dtype.size()
    }

    /// Returns the two levels of the call's reduction.
    pub(super) fn levels(&self) -> TwoLevelOps {
        TwoLevelOps::of(self.call.reduce_op, self.call.dtype, self.layout)
    }

    /// Adds the step in which all nodes agree that they run this call, unless it exists already.
    pub(super) fn agree(&mut self) {
        if self.rules.agrees && !std::mem::replace(&mut self.agreed, true) {
            self.steps.push(Step::Agree);
        }
    }

    pub(super) fn start(&mut self, transfer: RailOp<Place>) {
        self.steps.push(Step::Start(transfer));
    }

    /// Returns how many bytes a [`Self::share`] of `lengths` receives.
    pub(super) fn shared_bytes(&self, lengths: &[usize]) -> usize {
        if self.sends_to_other() {
            lengths[1 - self.node()]
        } else {
            lengths.len() * self.longest(lengths)
        }
    }

    fn sends_to_other(&self) -> bool {
        self.layout.num_nodes() == 2 && !self.rules.pair_gathers
    }

    /// Returns the length on the wire of the longest of `lengths`.
    pub(super) fn longest(&self, lengths: &[usize]) -> usize {
        self.padded(lengths.iter().copied().max().unwrap_or(0))
    }

    /// Starts a step in which each node `h` sends `lengths[h]` bytes to all other nodes. This node
    /// sends the bytes at `from`, which has [`Self::given_bytes`] bytes, and receives at `to`.
    /// Returns where the bytes of each node are.
    pub(super) fn share(&mut self, from: Place, lengths: &[usize], to: Place) -> Vec<Place> {
        let node = self.node();
        if self.sends_to_other() {
            // Unlike an all_gather, this sends no bytes to this node itself.
            let (mut sent, mut received, mut places) = (vec![0; 2], vec![0; 2], vec![to; 2]);
            (sent[1 - node], received[1 - node], places[node]) =
                (lengths[node], lengths[1 - node], from);
            self.start(RailOp::AllToAll { from, sent, to, received });
            return places;
        }
        let each = self.longest(lengths);
        self.start(RailOp::AllGather { from, to });
        lengths
            .iter()
            .enumerate()
            .map(|(node, length)| to.part(&(node * each..node * each + length)))
            .collect()
    }

    /// Returns the number of bytes that this node provides in a [`Self::share`] of `lengths`.
    pub(super) fn given_bytes(&self, lengths: &[usize]) -> usize {
        if self.sends_to_other() { lengths[self.node()] } else { self.longest(lengths) }
    }

    pub(super) fn cast(&mut self, from: Place, to: Place, widens: bool) {
        if from.bytes() > 0 {
            self.steps.push(Step::Cast { from, to, widens });
        }
    }

    pub(super) fn copy(&mut self, from: Place, to: Place) {
        if from.bytes() > 0 && from != to {
            self.steps.push(Step::Copy { from, to });
        }
    }

    /// Copies the concatenation of `parts` to the first bytes of `to`.
    pub(super) fn copy_all(&mut self, parts: &[Place], to: Place) {
        let places = ranges(parts.iter().map(Place::bytes));
        parts.iter().zip(places).for_each(|(&part, place)| self.copy(part, to.part(&place)));
    }

    /// Copies `from` to `parts`, which together have its length.
    pub(super) fn scatter_into(&mut self, from: Place, parts: &[Place]) {
        let places = ranges(parts.iter().map(Place::bytes));
        parts.iter().zip(places).for_each(|(&part, place)| self.copy(from.part(&place), part));
    }

    /// Returns the bytes `range` of the concatenation of `places`: in place if they are contiguous,
    /// otherwise a copy.
    pub(super) fn gather_contiguous(&mut self, places: &[Place], range: &Range<usize>) -> Place {
        let parts = parts(places, range);
        Place::joined(&parts).unwrap_or_else(|| {
            let whole = self.take_aside(range.len());
            self.copy_all(&parts, whole);
            whole
        })
    }

    /// Returns a place of `bytes` bytes from which a transfer may send: the bytes `range` of the
    /// concatenation of `places`, followed by padding.
    pub(super) fn on_the_wire(
        &mut self,
        places: &[Place],
        range: &Range<usize>,
        bytes: usize,
    ) -> Place {
        if !self.rules.any_memory {
            let from = self.take(bytes);
            self.copy_all(&parts(places, range), from);
            return from;
        }
        let slice = self.gather_contiguous(places, range);
        let from = if slice.bytes() == bytes { slice } else { self.take(bytes) };
        self.copy(slice, from.sized(slice.bytes()));
        from
    }

    /// Returns one position for each rank of this node: `places`, padded with empty ones.
    pub(super) fn for_locals(&self, mut places: Vec<Place>) -> Vec<Place> {
        places.resize(self.local_size(), NOWHERE);
        places
    }

    /// Plans an intra-node collective that moves bytes.
    pub(super) fn move_intra_node(
        &mut self,
        op: Collective,
        root: usize,
        inputs: Vec<Place>,
        outputs: Vec<Place>,
    ) {
        self.all_intra_node(op, root, vec![(inputs, outputs)]);
    }

    /// Plans intra-node collectives that move bytes, one for each pair of inputs and outputs; with
    /// one rank they are copies.
    pub(super) fn all_intra_node(
        &mut self,
        op: Collective,
        root: usize,
        calls: Vec<(Vec<Place>, Vec<Place>)>,
    ) {
        if self.local_size() == 1 {
            return calls.iter().for_each(|call| {
                if let ([from], [to]) = (&*call.0, &*call.1) {
                    self.copy(*from, *to);
                }
            });
        }
        if !calls.is_empty() {
            let call = |(inputs, outputs)| InnerCall {
                op,
                dtype: DType::U8,
                reduce_op: ReduceOp::Sum,
                root,
                inputs,
                outputs,
            };
            self.steps.push(Step::Local(calls.into_iter().map(call).collect()));
        }
    }
}

/// Returns the parts of `places` that hold the bytes `range` of their concatenation.
pub(super) fn parts(places: &[Place], range: &Range<usize>) -> Vec<Place> {
    let whole = ranges(places.iter().map(Place::bytes));
    places
        .iter()
        .zip(whole)
        .map(|(&place, within)| place.shifted(&overlap(range, &within), within.start))
        .collect()
}
