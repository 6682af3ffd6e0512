//! The intra-node and inter-node operations, and the type of partial results. Pure.

use crate::dtype::{DType, ReduceOp};
use crate::kernels::cpu;
use crate::node_map::NodeMap;

/// The type of partial results; the same on all ranks of a group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ReduceDtype {
    /// The tensor's type: an element is rounded once on each node and once more between nodes.
    #[default]
    Tensor,
    /// float32 if the tensor's floats are narrower: an element is rounded once.
    Fp32,
}

impl ReduceDtype {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Tensor => "tensor",
            Self::Fp32 => "float32",
        }
    }

    /// Returns the type of partial results of a reduction with `op` of elements of `dtype`.
    pub(crate) fn dtype(self, op: ReduceOp, dtype: DType) -> DType {
        if self == Self::Fp32 && op.rounds() && cpu::is_narrow(dtype) { DType::F32 } else { dtype }
    }
}

/// The two levels of a reduction: over the ranks of a node, rounded once, then over the nodes,
/// rounded once.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct TwoLevelOps {
    /// The intra-node operation.
    pub(crate) inner: ReduceOp,
    /// The inter-node operation.
    pub(crate) outer: ReduceOp,
    /// The divisor of an inter-node AVG.
    pub(crate) divisor: usize,
    /// True if an inter-node PREMUL_SUM weights each node by its share of the ranks.
    weighted: bool,
}

impl TwoLevelOps {
    pub(crate) fn of(op: ReduceOp, dtype: DType, layout: &NodeMap) -> Self {
        let same = |op| Self { inner: op, outer: op, divisor: layout.num_nodes(), weighted: false };
        match op {
            ReduceOp::Sum
            | ReduceOp::Product
            | ReduceOp::Min
            | ReduceOp::Max
            | ReduceOp::BitAnd
            | ReduceOp::BitOr
            | ReduceOp::BitXor => same(op),
            ReduceOp::PremulSum => Self { inner: op, ..same(ReduceOp::Sum) },
            // Integers wrap, so the sum equals the single-node sum; it is divided once.
            ReduceOp::Avg if dtype.is_integer() => {
                Self { inner: ReduceOp::Sum, outer: op, divisor: layout.size(), weighted: false }
            }
            // Averages of averages, which do not overflow where the sum of a node's ranks would.
            ReduceOp::Avg
                if (0..layout.num_nodes())
                    .all(|node| layout.ranks_of(node).len() == layout.ranks_of(0).len()) =>
            {
                same(op)
            }
            ReduceOp::Avg => Self {
                inner: op,
                outer: ReduceOp::PremulSum,
                divisor: layout.num_nodes(),
                weighted: true,
            },
        }
    }

    /// Returns the factor of `node` under an inter-node PREMUL_SUM.
    pub(crate) fn factor(&self, node: usize, layout: &NodeMap) -> f64 {
        if self.weighted { layout.ranks_of(node).len() as f64 / layout.size() as f64 } else { 1.0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_rounds_travels_wider() {
        let of = |op, dtype| ReduceDtype::Fp32.dtype(op, dtype);
        assert_eq!(of(ReduceOp::Sum, DType::BF16), DType::F32);
        assert_eq!(of(ReduceOp::Avg, DType::F8E4M3FN), DType::F32);
        assert_eq!(of(ReduceOp::Max, DType::F16), DType::F16);
        assert_eq!(of(ReduceOp::Sum, DType::F64), DType::F64);
        assert_eq!(of(ReduceOp::Sum, DType::I8), DType::I8);
        assert_eq!(ReduceDtype::Tensor.dtype(ReduceOp::Sum, DType::BF16), DType::BF16);
    }
}
