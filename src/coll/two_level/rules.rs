//! What differs between programs for CPU tensors and for CUDA tensors. Each value was measured, or is what the backends between hosts need.

/// Bytes at whose multiples slices of CUDA tensors begin: their kernels load as many at a time.
pub const UNIT: usize = 16;

/// How a program is planned.
#[derive(Debug)]
pub struct Rules {
    /// Bytes of which lengths on the wire are multiples; `None`: of an element.
    pub unit: Option<usize>,
    /// Alignment of the program's memory.
    pub align: usize,
    /// True if each rail's slice of a tensor goes in pieces of adaptive length; otherwise each chunk of a tensor is cut into rails' slices.
    pub slices_first: bool,
    /// True if all hosts compare their calls before the first transfer of data.
    pub agrees: bool,
    /// True if transfers may use tensors, where they are aligned, and any memory of the program; otherwise only memory of their own.
    pub any_memory: bool,
    /// True if two hosts gather in place, with their own part; otherwise each sends the other what it has for it.
    pub pair_gathers: bool,
    /// True if the sums of more than two hosts travel while neighbouring chunks are worked on; otherwise in the order of the steps.
    pub sums_overlap: bool,
    /// True if the root's piece leaves before the ranks of its host get theirs.
    pub root_first: bool,
    /// True if ranks of each rail carry what ranks of two hosts have for each other; otherwise one backend connects all ranks.
    pub carriers: bool,
}

impl Rules {
    /// Those of CPU tensors.
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

    /// Those of CUDA tensors.
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
