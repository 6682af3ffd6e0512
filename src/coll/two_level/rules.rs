//! The differences between programs for CPU tensors and for CUDA tensors. Each value was measured,
//! or the inter-node backends need it.

/// The unit of slices of CUDA tensors in bytes, which is the size of the kernels' loads.
pub const UNIT: usize = 16;

/// The rules by which a program is planned.
#[derive(Debug)]
pub struct Rules {
    /// Lengths on the wire are multiples of this number of bytes; `None`: of the element size.
    pub unit: Option<usize>,
    /// The alignment of the program's memory.
    pub align: usize,
    /// True if each rail's slice of a tensor moves in chunks of adaptive length; otherwise each
    /// chunk of a tensor is cut into the rails' slices.
    pub slices_first: bool,
    /// True if all nodes compare their calls before the first transfer of data.
    pub agrees: bool,
    /// True if transfers may use aligned tensors and any memory of the program; otherwise they use
    /// only [`ProgramMemory::Temp`](super::step::ProgramMemory::Temp).
    pub any_memory: bool,
    /// True if two nodes gather in place, including their own part; otherwise each sends only the
    /// part that the other node needs.
    pub pair_gathers: bool,
    /// True if the sums of three or more nodes travel while the ranks work on neighbouring chunks;
    /// otherwise a rank waits for them.
    pub sums_overlap: bool,
    /// True if the root's piece leaves before the other ranks of its node get theirs.
    pub root_first: bool,
    /// True if a message between ranks of two nodes travels over a rail, whose ranks forward it
    /// within their nodes; false if one backend connects all ranks, so that it travels directly.
    pub carriers: bool,
}

impl Rules {
    /// The rules of CPU tensors.
    pub const CPU: Self = Self {
        unit: None,
        align: 64,
        slices_first: true,
        agrees: true,
        any_memory: false,
        pair_gathers: false,
        sums_overlap: true,
        root_first: true,
        carriers: true,
    };

    /// The rules of CUDA tensors.
    pub const CUDA: Self = Self {
        unit: Some(UNIT),
        align: UNIT,
        slices_first: false,
        agrees: false,
        any_memory: true,
        pair_gathers: true,
        sums_overlap: false,
        root_first: false,
        carriers: false,
    };
}
