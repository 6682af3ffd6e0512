//! Description of one collective call in plain values.

use crate::dtype::{DType, ReduceOp};
pub use crate::mem::span::Span;
pub use crate::op::Op;
use crate::rank::Rank;
use crate::sync::call_site::CallSite;

/// Collective call of one rank.
///
/// | op | `inputs` | `outputs` |
/// |---|---|---|
/// | barrier | – | – |
/// | broadcast | root: 1 | others: 1 (root: none) |
/// | all_reduce | 1 | 1 |
/// | reduce | 1 | root: 1 |
/// | all_gather | 1 | n, entry `r` of the length that rank `r` sends |
/// | gather | 1 | root: n, all of the input's length |
/// | scatter | root: n, all of the output's length | 1 |
/// | reduce_scatter | n, entry `r` of the length that rank `r` receives | 1 |
/// | all_to_all | n | n |
/// | all_reduce_add_rms_norm | input, residual, weight; to static fp8: scale | normed, new residual; to dynamic fp8: scales |
///
/// An output may be the very same span as the input that it replaces (in place); any other overlap is undefined.
#[derive(Clone, Debug)]
pub struct Call {
    /// Collective that is called.
    pub op: Op,
    /// Type of the elements.
    pub dtype: DType,
    /// Operation by which elements combine; ignored unless the collective reduces.
    pub reduce_op: ReduceOp,
    /// The distinguished rank; ignored unless the collective has one.
    pub root: Rank,
    /// Factor of this rank under PREMUL_SUM, eps of a norm; ignored otherwise.
    pub factor: f64,
    /// Memory that this rank gives.
    pub inputs: Vec<Span>,
    /// Memory that this rank receives into.
    pub outputs: Vec<Span>,
    /// Call site in the user's program, if that is to be compared too.
    pub call_site: Option<&'static CallSite>,
}

impl Call {
    /// A barrier.
    pub fn barrier(call_site: Option<&'static CallSite>) -> Self {
        Self {
            op: Op::Barrier,
            dtype: DType::U8,
            reduce_op: ReduceOp::Sum,
            root: Rank(0),
            factor: 1.0,
            inputs: Vec::new(),
            outputs: Vec::new(),
            call_site,
        }
    }
}
