//! The collectives.

/// A collective of c10d, reduced to its data movement, or one that also computes on the moved data.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Collective {
    /// Every rank arrives; no data moves.
    Barrier = 0,
    /// The root's input reaches every output.
    Broadcast = 1,
    /// Every output holds the reduction of all inputs.
    AllReduce = 2,
    /// The root's output holds the reduction of all inputs.
    Reduce = 3,
    /// Output `r` holds rank `r`'s input.
    AllGather = 4,
    /// The root's output `r` holds rank `r`'s input.
    Gather = 5,
    /// The output holds the root's input for this rank.
    Scatter = 6,
    /// The output holds the reduction of every rank's input for this rank.
    ReduceScatter = 7,
    /// Output `r` holds rank `r`'s input for this rank.
    AllToAll = 8,
    /// Every output holds rows of the sum of all inputs, added to a residual and normed.
    AllReduceAddRmsNorm = 9,
}

impl Collective {
    /// Every collective, in code order.
    pub const ALL: &[Collective] = &[
        Collective::Barrier,
        Collective::Broadcast,
        Collective::AllReduce,
        Collective::Reduce,
        Collective::AllGather,
        Collective::Gather,
        Collective::Scatter,
        Collective::ReduceScatter,
        Collective::AllToAll,
        Collective::AllReduceAddRmsNorm,
    ];

    /// The collectives of c10d, which only move or combine elements.
    pub const C10D: &[Collective] = Self::ALL.split_at(9).0;

    /// Returns the collective with this code, which is used in the bridge and shared memory.
    pub fn from_code(code: u8) -> Option<Self> {
        Self::ALL.get(usize::from(code)).copied()
    }

    /// Returns torch's function name, for error messages and traces.
    pub const fn name(self) -> &'static str {
        match self {
            Collective::Barrier => "barrier",
            Collective::Broadcast => "broadcast",
            Collective::AllReduce => "all_reduce",
            Collective::Reduce => "reduce",
            Collective::AllGather => "all_gather",
            Collective::Gather => "gather",
            Collective::Scatter => "scatter",
            Collective::ReduceScatter => "reduce_scatter",
            Collective::AllToAll => "all_to_all",
            Collective::AllReduceAddRmsNorm => "all_reduce_add_rms_norm",
        }
    }

    /// Returns true if the collective combines elements with an operation that the caller chooses.
    pub const fn reduces(self) -> bool {
        matches!(self, Collective::AllReduce | Collective::Reduce | Collective::ReduceScatter)
    }

    /// Returns true if the collective has a root.
    pub const fn rooted(self) -> bool {
        matches!(
            self,
            Collective::Broadcast | Collective::Reduce | Collective::Gather | Collective::Scatter
        )
    }
}
