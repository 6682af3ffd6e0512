//! Steps of a program, and the places of their bytes.

use super::slices;
use crate::coll::call::{Call, Op, Span, Spec};
use crate::dtype::{DType, ReduceOp};
use crate::rank::Rank;
use std::ops::Range;

/// The memory that a place is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Memory {
    /// The memory of the call's tensors.
    Given,
    /// Memory of the program that transfers may use.
    Temp,
    /// Memory of the program that no transfer uses. Programs for CUDA tensors have only the other.
    Aside,
}

/// A piece of memory of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The memory that it is in.
    pub memory: Memory,
    /// Bytes and length; in the program's memory the address counts from its first byte.
    pub span: Span,
}

/// The empty span.
pub(crate) const NOTHING: Span = Span { addr: 0, bytes: 0 };

/// The empty place.
pub(super) const NOWHERE: Place = Place { memory: Memory::Given, span: NOTHING };

/// Addresses of a program's memory.
#[derive(Clone, Copy, Debug, Default)]
pub struct Bases {
    /// First byte of [`Memory::Temp`].
    pub temp: usize,
    /// First byte of [`Memory::Aside`].
    pub aside: usize,
}

impl Place {
    pub(super) fn given(span: Span) -> Self {
        Self { memory: Memory::Given, span }
    }

    /// Number of bytes.
    pub fn bytes(&self) -> usize {
        self.span.bytes
    }

    /// The part `range`.
    pub(super) fn part(self, range: &Range<usize>) -> Self {
        Self { span: slices::part(self.span, range), ..self }
    }

    /// The part at `range`, which counts from `start` before this place.
    pub(super) fn shifted(self, range: &Range<usize>, start: usize) -> Self {
        self.part(&(range.start - start..range.end - start))
    }

    /// The first `bytes` bytes, or as many from the same first byte on.
    pub(super) fn sized(self, bytes: usize) -> Self {
        Self { span: Span { bytes, ..self.span }, ..self }
    }

    /// The one place that `places` are, if each begins where the one before ends.
    pub(super) fn joined(places: &[Self]) -> Option<Self> {
        let first = places.iter().find(|place| place.bytes() > 0).or(places.first())?;
        let same = places.iter().all(|place| place.memory == first.memory || place.bytes() == 0);
        let spans: Vec<Span> = places.iter().map(|place| place.span).collect();
        Some(Self { span: Span::joined(&spans).filter(|_| same)?, ..*first })
    }

    /// Its memory, where the program's is at `bases`.
    pub fn at(&self, bases: &Bases) -> Span {
        let base = match self.memory {
            Memory::Given => 0,
            Memory::Temp => bases.temp,
            Memory::Aside => bases.aside,
        };
        Span { addr: self.span.addr + base, ..self.span }
    }
}

/// A collective of the ranks of one host.
#[derive(Clone, Debug, PartialEq)]
pub struct InnerCall {
    /// The collective.
    pub op: Op,
    /// Type of the elements.
    pub dtype: DType,
    /// Operation by which elements combine.
    pub reduce_op: ReduceOp,
    /// Local index of the root.
    pub root: usize,
    /// Memory that this rank gives.
    pub inputs: Vec<Place>,
    /// Memory that this rank receives into.
    pub outputs: Vec<Place>,
}

impl InnerCall {
    /// The call of a rank with this `factor`, where the program's memory is at `bases`.
    pub(crate) fn call(&self, factor: f64, bases: &Bases) -> Call<'static> {
        let Self { op, dtype, reduce_op, root, .. } = *self;
        let [inputs, outputs] = [&self.inputs, &self.outputs].map(|places| places.iter().map(|place| place.at(bases)).collect());
        Call::inner(Spec { op, dtype, reduce_op, root: Rank(root as u32), factor, inputs, outputs, call_site: None })
    }
}

/// Transfer of bytes between the ranks of a rail; hosts in their order. `P`: how places are given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Transfer<P> {
    /// What is at `from` on every host reaches `to`, one behind the other.
    AllGather {
        /// This host's bytes; as many as every other's.
        from: P,
        /// Place of the bytes of all hosts.
        to: P,
    },
    /// The first `sent[h]` bytes behind those for earlier hosts at `from` go to host `h`; `received[h]` bytes of host `h` come to `to`.
    AllToAll {
        /// The place of the sent bytes.
        from: P,
        /// Number of bytes for each host.
        sent: Vec<usize>,
        /// The place of the received bytes.
        to: P,
        /// Number of bytes from each host.
        received: Vec<usize>,
    },
    /// What is at `at` on host `root` reaches `at` on all hosts.
    Broadcast {
        /// Host that has the bytes.
        root: usize,
        /// Place of the bytes, on this rank.
        at: P,
    },
}

impl<P> Transfer<P> {
    /// The same transfer of other places.
    pub fn map<Q>(&self, place: impl Fn(&P) -> Q) -> Transfer<Q> {
        match self {
            Self::AllGather { from, to } => Transfer::AllGather { from: place(from), to: place(to) },
            Self::AllToAll { from, sent, to, received } => {
                Transfer::AllToAll { from: place(from), sent: sent.clone(), to: place(to), received: received.clone() }
            }
            Self::Broadcast { root, at } => Transfer::Broadcast { root: *root, at: place(at) },
        }
    }

    /// Places in it.
    fn places_mut(&mut self) -> Vec<&mut P> {
        match self {
            Self::AllGather { from, to } | Self::AllToAll { from, to, .. } => vec![from, to],
            Self::Broadcast { at, .. } => vec![at],
        }
    }
}

impl Transfer<Span> {
    /// Returns how many bytes the rank of `host`, of `hosts`, sends to others and receives from them.
    pub(crate) fn bytes(&self, host: usize, hosts: usize) -> (usize, usize) {
        let others = hosts.saturating_sub(1);
        let without = |lengths: &[usize]| lengths.iter().sum::<usize>() - lengths.get(host).copied().unwrap_or(0);
        match self {
            Self::AllGather { from, .. } => (others * from.bytes, others * from.bytes),
            Self::AllToAll { sent, received, .. } => (without(sent), without(received)),
            Self::Broadcast { root, at } if *root == host => (others * at.bytes, 0),
            Self::Broadcast { at, .. } => (0, at.bytes),
        }
    }
}

/// One step of a program.
#[derive(Clone, Debug, PartialEq)]
pub enum Step {
    /// Collectives of the ranks of this host, one after the other.
    Local(Vec<InnerCall>),
    /// All hosts were found to run this call.
    Agree,
    /// A transfer on this rank's rail begins; the next steps do not wait for it.
    Start(Transfer<Place>),
    /// The oldest transfer that was started has ended.
    Wait,
    /// A transfer on this rank's rail begins, and has ended before the next step.
    Run(Transfer<Place>),
    /// Messages with ranks of other hosts, by rank.
    Exchange {
        /// The bytes for each rank.
        give: Vec<Place>,
        /// The places for the bytes of each rank.
        take: Vec<Place>,
    },
    /// Sum of the hosts' partial results, in their order.
    Combine {
        /// The partial result of each host; on CUDA they are evenly spaced.
        from: Vec<Place>,
        /// Place of the sum.
        to: Place,
    },
    /// Copy of elements in another type.
    Cast {
        /// The elements.
        from: Place,
        /// Place of the copies.
        to: Place,
        /// True if the copies have the type of partial results; otherwise they are rounded to the tensors'.
        widens: bool,
    },
    /// Copy of bytes.
    Copy {
        /// The bytes.
        from: Place,
        /// Place of the copy.
        to: Place,
    },
}

impl Step {
    /// Places in it.
    pub(super) fn places_mut(&mut self) -> Vec<&mut Place> {
        match self {
            Self::Local(calls) => calls.iter_mut().flat_map(|call| call.inputs.iter_mut().chain(&mut call.outputs)).collect(),
            Self::Agree | Self::Wait => vec![],
            Self::Start(transfer) | Self::Run(transfer) => transfer.places_mut(),
            Self::Exchange { give, take } => give.iter_mut().chain(take).collect(),
            Self::Combine { from, to } => from.iter_mut().chain([to]).collect(),
            Self::Cast { from, to, .. } | Self::Copy { from, to } => vec![from, to],
        }
    }
}

/// Steps of one rank in their order, and what they need.
#[derive(Clone, Debug, PartialEq)]
pub struct Program {
    /// The steps.
    pub steps: Vec<Step>,
    /// Bytes of [`Memory::Temp`].
    pub temp: usize,
    /// Bytes of [`Memory::Aside`].
    pub aside: usize,
    /// Number of rails that the call uses.
    pub rails: usize,
    /// Type of partial results.
    pub partial: DType,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_stays_on_the_host_is_not_counted() {
        let span = |addr, bytes| Span { addr, bytes };
        assert_eq!(Transfer::AllGather { from: span(0, 8), to: span(8, 24) }.bytes(1, 3), (16, 16));
        let (sent, received) = (vec![1, 2, 4], vec![8, 16, 32]);
        assert_eq!(Transfer::AllToAll { from: span(0, 7), sent, to: span(8, 56), received }.bytes(1, 3), (5, 40));
        assert_eq!(Transfer::Broadcast { root: 1, at: span(0, 8) }.bytes(1, 3), (16, 0));
        assert_eq!(Transfer::Broadcast { root: 1, at: span(0, 8) }.bytes(2, 3), (0, 8));
    }

    #[test]
    fn only_places_of_one_memory_are_one() {
        let place = |memory, addr, bytes| Place { memory, span: Span { addr, bytes } };
        let [temp, aside] = [Memory::Temp, Memory::Aside].map(|memory| move |addr, bytes| place(memory, addr, bytes));
        assert_eq!(Place::joined(&[temp(8, 4), temp(12, 2)]), Some(temp(8, 6)));
        assert_eq!(Place::joined(&[NOWHERE, temp(8, 4), aside(1, 0)]), Some(temp(8, 4)));
        assert_eq!(Place::joined(&[temp(8, 4), aside(12, 2)]), None);
        assert_eq!(Place::joined(&[]), None);
        assert_eq!(temp(8, 4).at(&Bases { temp: 100, aside: 1000 }), Span { addr: 108, bytes: 4 });
    }
}
