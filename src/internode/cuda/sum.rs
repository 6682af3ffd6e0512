//! The ordered sum of all nodes' partial sums on a GPU:
//! `src/kernels/cuda/internode/sum_partials.cu`.

use crate::coll::cuda::arguments::bytes_of;
use crate::coll::cuda::kernels::load;
use crate::coll::two_level::levels::TwoLevelOps;
use crate::coll::two_level::rules::UNIT;
use crate::dtype::{DType, ReduceOp, SumOrder};
use crate::error::{Error, Result};
use crate::kernels::cuda::compile::Variant;
use crate::kernels::cuda::driver::{Device, Grid, Kernel, Stream};
use crate::mem::span::Span;
use crate::node_map::NodeMap;

/// Number of threads per block: `LANE_THREADS` of `device.cuh`.
pub(super) const THREADS: u32 = 256;
/// Maximum number of blocks.
pub(super) const BLOCKS: usize = 512;
/// Maximum number of nodes of a group with CUDA tensors: `MAX_NODES` of the kernel.
pub const MAX_NODES: usize = 128;
/// Names of the program and of its kernel.
pub const NAMES: (&str, &str) = ("internode/sum_partials", "sum_partials");

/// The kernel's `SumPartialsArgs`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct SumPartials {
    /// Address of the first node's partial sum.
    pub from: u64,
    /// Distance in bytes from one partial sum to the next.
    pub stride: u64,
    /// Destination of the result.
    pub to: u64,
    /// Length of a partial sum in bytes.
    pub bytes: u64,
    /// Number of nodes.
    pub nodes: u32,
    /// Divisor of an average.
    pub divisor: u32,
    /// Factor of each node under PREMUL_SUM.
    pub factor: [f64; MAX_NODES],
}

/// A sum over nodes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PartialsSum {
    /// Address of the first node's partial sum.
    pub from: usize,
    /// Distance in bytes from one partial sum to the next.
    pub stride: usize,
    /// Destination of the result.
    pub to: Span,
    /// Type of the elements.
    pub dtype: DType,
    /// Operation of the call.
    pub op: ReduceOp,
}

impl PartialsSum {
    /// Creates the sum of `from`, which contains one partial sum per node, at equal distances.
    pub fn of(from: &[Span], to: Span, dtype: DType, op: ReduceOp) -> Self {
        let (first, second) = (from[0].addr, from.get(1).unwrap_or(&from[0]).addr);
        Self { from: first, stride: second - first, to, dtype, op }
    }

    /// Returns the operation for which the kernel is compiled, and its arguments.
    ///
    /// # Errors
    /// [`Internal`](crate::error::ErrorKind::Internal) if partial sums are not aligned.
    pub fn args(&self, layout: &NodeMap) -> Result<(ReduceOp, SumPartials)> {
        let (levels, nodes) = (TwoLevelOps::of(self.op, self.dtype, layout), layout.num_nodes());
        if !self.from.is_multiple_of(UNIT) || !self.stride.is_multiple_of(UNIT) || nodes > MAX_NODES
        {
            return Err(Error::internal(format!(
                "partials at {:#x}, {} bytes apart, of {nodes} nodes",
                self.from, self.stride
            )));
        }
        let mut factor = [1.0; MAX_NODES];
        factor
            .iter_mut()
            .zip(0..nodes)
            .for_each(|(factor, node)| *factor = levels.factor(node, layout));
        let (from, stride, to, bytes) =
            (self.from as u64, self.stride as u64, self.to.addr as u64, self.to.bytes as u64);
        let (nodes, divisor) = (nodes as u32, levels.divisor as u32);
        Ok((levels.outer, SumPartials { from, stride, to, bytes, nodes, divisor, factor }))
    }

    /// Loads the kernel on `device`, whose context must be current. It sums elements of `dtype` in
    /// `order`, for a call with the operation `op`. The first load may wait for running kernels of
    /// the device.
    pub(super) fn kernel(
        device: &Device,
        dtype: DType,
        op: ReduceOp,
        order: SumOrder,
        layout: &NodeMap,
    ) -> Result<Kernel> {
        // The number of nodes is an argument, so one kernel serves every number of nodes.
        let op = TwoLevelOps::of(op, dtype, layout).outer;
        let order = order.of(op, dtype, layout.num_nodes());
        let variant = Variant {
            program: NAMES.0,
            world: 2,
            rank: 0,
            dtype: Some(dtype),
            op: Some(op),
            zero_copy: false,
            order,
        };
        load(device, &variant, NAMES.1)
    }

    /// Enqueues this sum on `stream`; `kernel` computes it.
    pub(super) fn launch(&self, kernel: Kernel, stream: Stream, layout: &NodeMap) -> Result<()> {
        if self.to.bytes == 0 {
            return Ok(());
        }
        let (_, args) = self.args(layout)?;
        let blocks = self.to.bytes.div_ceil(UNIT * THREADS as usize).min(BLOCKS);
        kernel.launch(stream, Grid::new(blocks as u32, THREADS), false, bytes_of(&args))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node_map::RankLocation;

    #[test]
    fn sums_over_integers_divide_by_all_ranks_and_weigh_uneven_nodes() {
        let layout = NodeMap::of(&["a", "a", "a", "b"].map(RankLocation::on));
        let sum = |dtype, op| PartialsSum {
            from: 32,
            stride: 48,
            to: Span { addr: 5, bytes: 40 },
            dtype,
            op,
        };
        let (op, args) = sum(DType::I32, ReduceOp::Avg).args(&layout).expect("aligned");
        assert_eq!(
            (op, args.divisor, args.nodes, args.bytes, args.to),
            (ReduceOp::Avg, 4, 2, 40, 5)
        );
        let (op, args) = sum(DType::F32, ReduceOp::Avg).args(&layout).expect("aligned");
        assert_eq!((op, &args.factor[..3]), (ReduceOp::PremulSum, &[0.75, 0.25, 1.0][..]));
        assert_eq!(size_of::<SumPartials>(), 40 + 8 * MAX_NODES);
        let unaligned = PartialsSum { from: 33, ..sum(DType::F32, ReduceOp::Sum) };
        assert!(unaligned.args(&layout).is_err());
    }

    #[test]
    fn sums_of_places_know_the_distance_between_them() {
        let span = |addr| Span { addr, bytes: 40 };
        let sum =
            PartialsSum::of(&[span(32), span(80), span(128)], span(5), DType::F32, ReduceOp::Sum);
        assert_eq!((sum.from, sum.stride, sum.to), (32, 48, span(5)));
    }
}
