//! The steps of a program, and where their bytes are.

use super::slices;
use crate::coll::call::{Call, CallSpec, Collective, Span};
use crate::dtype::{DType, ReduceOp};
use crate::rank::Rank;
use std::ops::Range;

/// The memory that contains a place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProgramMemory {
    /// The memory of the call's tensors.
    Given,
    /// Memory of the program that transfers may use.
    Temp,
    /// Memory of the program that no transfer uses. Programs for CUDA tensors have only
    /// [`Self::Temp`].
    Aside,
}

/// A piece of memory of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The memory that contains it.
    pub memory: ProgramMemory,
    /// Address and length; in the program's memory the address counts from the first byte.
    pub span: Span,
}

/// The empty span.
pub(crate) const EMPTY: Span = Span { addr: 0, bytes: 0 };

/// The empty place.
pub(super) const NOWHERE: Place = Place { memory: ProgramMemory::Given, span: EMPTY };

/// The addresses of a program's memory.
#[derive(Clone, Copy, Debug, Default)]
pub struct Bases {
    /// The first byte of [`ProgramMemory::Temp`].
    pub temp: usize,
    /// The first byte of [`ProgramMemory::Aside`].
    pub aside: usize,
}

impl Place {
    pub(super) fn given(span: Span) -> Self {
        Self { memory: ProgramMemory::Given, span }
    }

    /// Number of bytes.
    pub fn bytes(&self) -> usize {
        self.span.bytes
    }

    /// Returns the part `range`.
    pub(super) fn part(self, range: &Range<usize>) -> Self {
        Self { span: slices::part(self.span, range), ..self }
    }

    /// Returns the part at `range`, which counts from `start` bytes before this place.
    pub(super) fn shifted(self, range: &Range<usize>, start: usize) -> Self {
        self.part(&(range.start - start..range.end - start))
    }

    /// Returns a place with the same first byte and a length of `bytes`.
    pub(super) fn sized(self, bytes: usize) -> Self {
        Self { span: Span { bytes, ..self.span }, ..self }
    }

    /// Returns the one place that `places` form, if each starts where the previous one ends.
    pub(super) fn joined(places: &[Self]) -> Option<Self> {
        let first = places.iter().find(|place| place.bytes() > 0).or(places.first())?;
        let same = places.iter().all(|place| place.memory == first.memory || place.bytes() == 0);
        let spans: Vec<Span> = places.iter().map(|place| place.span).collect();
        Some(Self { span: Span::joined(&spans).filter(|_| same)?, ..*first })
    }

    /// Returns the memory of the place, if the program's memory is at `bases`.
    pub fn at(&self, bases: &Bases) -> Span {
        let base = match self.memory {
            ProgramMemory::Given => 0,
            ProgramMemory::Temp => bases.temp,
            ProgramMemory::Aside => bases.aside,
        };
        Span { addr: self.span.addr + base, ..self.span }
    }
}

/// An intra-node collective.
#[derive(Clone, Debug, PartialEq)]
pub struct InnerCall {
    /// The collective.
    pub op: Collective,
    /// The type of the elements.
    pub dtype: DType,
    /// The operation that combines elements.
    pub reduce_op: ReduceOp,
    /// The local rank of the root.
    pub root: usize,
    /// The memory from which this rank sends.
    pub inputs: Vec<Place>,
    /// The memory into which this rank receives.
    pub outputs: Vec<Place>,
}

impl InnerCall {
    /// Returns the call of a rank with this `factor`, if the program's memory is at `bases`.
    pub(crate) fn call(&self, factor: f64, bases: &Bases) -> Call<'static> {
        let Self { op, dtype, reduce_op, root, .. } = *self;
        let [inputs, outputs] = [&self.inputs, &self.outputs]
            .map(|places| places.iter().map(|place| place.at(bases)).collect());
        Call::inner(CallSpec {
            op,
            dtype,
            reduce_op,
            root: Rank(root as u32),
            factor,
            inputs,
            outputs,
            call_site: None,
            compares: None,
        })
    }
}

/// A transfer between the ranks of a rail; the parts of several nodes are in node order. `P` is the
/// type of a place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RailOp<P> {
    /// The bytes at `from` on every node are concatenated at `to`.
    AllGather {
        /// This node's bytes; the same number on every node.
        from: P,
        /// Where the bytes of all nodes arrive.
        to: P,
    },
    /// `from` holds `sent[h]` bytes for each node `h`, in order; `to` receives `received[h]` bytes
    /// from each node `h`, in order.
    AllToAll {
        /// The bytes to send.
        from: P,
        /// Number of bytes for each node.
        sent: Vec<usize>,
        /// Where the received bytes arrive.
        to: P,
        /// Number of bytes from each node.
        received: Vec<usize>,
    },
    /// The bytes at `at` on node `root` reach `at` on all nodes.
    Broadcast {
        /// The node that has the bytes.
        root: usize,
        /// The bytes on this rank.
        at: P,
    },
}

impl<P> RailOp<P> {
    /// Returns the same transfer with `place` applied to each of its places.
    pub fn map<Q>(&self, place: impl Fn(&P) -> Q) -> RailOp<Q> {
        match self {
            Self::AllGather { from, to } => RailOp::AllGather { from: place(from), to: place(to) },
            Self::AllToAll { from, sent, to, received } => RailOp::AllToAll {
                from: place(from),
                sent: sent.clone(),
                to: place(to),
                received: received.clone(),
            },
            Self::Broadcast { root, at } => RailOp::Broadcast { root: *root, at: place(at) },
        }
    }

    /// Returns the places of the transfer.
    fn places_mut(&mut self) -> Vec<&mut P> {
        match self {
            Self::AllGather { from, to } | Self::AllToAll { from, to, .. } => vec![from, to],
            Self::Broadcast { at, .. } => vec![at],
        }
    }
}

impl RailOp<Span> {
    /// Returns how many bytes the rank of node `node` sends to the other ranks of a rail over
    /// `nodes` nodes, and how many it receives from them.
    pub(crate) fn bytes(&self, node: usize, nodes: usize) -> (usize, usize) {
        let others = nodes.saturating_sub(1);
        let without = |lengths: &[usize]| {
            lengths.iter().sum::<usize>() - lengths.get(node).copied().unwrap_or(0)
        };
        match self {
            Self::AllGather { from, .. } => (others * from.bytes, others * from.bytes),
            Self::AllToAll { sent, received, .. } => (without(sent), without(received)),
            Self::Broadcast { root, at } if *root == node => (others * at.bytes, 0),
            Self::Broadcast { at, .. } => (0, at.bytes),
        }
    }
}

/// One step of a program.
#[derive(Clone, Debug, PartialEq)]
pub enum Step {
    /// Intra-node collectives, one after another.
    Local(Vec<InnerCall>),
    /// All nodes agree that they run this call.
    Agree,
    /// Starts a transfer on this rank's rail; the next steps do not wait for it.
    Start(RailOp<Place>),
    /// Waits for the oldest transfer that was started.
    Wait,
    /// Runs a transfer on this rank's rail to its end.
    Run(RailOp<Place>),
    /// Exchanges messages with ranks of other nodes; both lists have one entry for each rank.
    Exchange {
        /// The bytes for each rank.
        give: Vec<Place>,
        /// Where the bytes of each rank arrive.
        take: Vec<Place>,
    },
    /// Combines the nodes' partial results, in node order.
    Combine {
        /// The partial result of each node; on CUDA they are evenly spaced.
        from: Vec<Place>,
        /// Destination of the result.
        to: Place,
    },
    /// Converts elements to another type.
    Cast {
        /// The elements.
        from: Place,
        /// Destination of the converted elements.
        to: Place,
        /// True if the result has the type of partial results; otherwise it is rounded to the
        /// tensor's type.
        widens: bool,
    },
    /// Copies bytes.
    Copy {
        /// The bytes.
        from: Place,
        /// Destination of the copy.
        to: Place,
    },
}

impl Step {
    /// Returns the places of the step.
    pub(super) fn places_mut(&mut self) -> Vec<&mut Place> {
        match self {
            Self::Local(calls) => calls
                .iter_mut()
                .flat_map(|call| call.inputs.iter_mut().chain(&mut call.outputs))
                .collect(),
            Self::Agree | Self::Wait => vec![],
            Self::Start(transfer) | Self::Run(transfer) => transfer.places_mut(),
            Self::Exchange { give, take } => give.iter_mut().chain(take).collect(),
            Self::Combine { from, to } => from.iter_mut().chain([to]).collect(),
            Self::Cast { from, to, .. } | Self::Copy { from, to } => vec![from, to],
        }
    }
}

/// The steps of one rank in order, and the memory that they need.
#[derive(Clone, Debug, PartialEq)]
pub struct Program {
    /// The steps.
    pub steps: Vec<Step>,
    /// Size of [`ProgramMemory::Temp`] in bytes.
    pub temp: usize,
    /// Size of [`ProgramMemory::Aside`] in bytes.
    pub aside: usize,
    /// Number of rails that the call uses.
    pub rails: usize,
    /// The type of partial results.
    pub partial: DType,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_stays_on_the_node_is_not_counted() {
        let span = |addr, bytes| Span { addr, bytes };
        assert_eq!(RailOp::AllGather { from: span(0, 8), to: span(8, 24) }.bytes(1, 3), (16, 16));
        let (sent, received) = (vec![1, 2, 4], vec![8, 16, 32]);
        assert_eq!(
            RailOp::AllToAll { from: span(0, 7), sent, to: span(8, 56), received }.bytes(1, 3),
            (5, 40)
        );
        assert_eq!(RailOp::Broadcast { root: 1, at: span(0, 8) }.bytes(1, 3), (16, 0));
        assert_eq!(RailOp::Broadcast { root: 1, at: span(0, 8) }.bytes(2, 3), (0, 8));
    }

    #[test]
    fn only_places_of_one_memory_are_one() {
        let place = |memory, addr, bytes| Place { memory, span: Span { addr, bytes } };
        let [temp, aside] = [ProgramMemory::Temp, ProgramMemory::Aside]
            .map(|memory| move |addr, bytes| place(memory, addr, bytes));
        assert_eq!(Place::joined(&[temp(8, 4), temp(12, 2)]), Some(temp(8, 6)));
        assert_eq!(Place::joined(&[NOWHERE, temp(8, 4), aside(1, 0)]), Some(temp(8, 4)));
        assert_eq!(Place::joined(&[temp(8, 4), aside(12, 2)]), None);
        assert_eq!(Place::joined(&[]), None);
        assert_eq!(temp(8, 4).at(&Bases { temp: 100, aside: 1000 }), Span { addr: 108, bytes: 4 });
    }
}
