//! Matrix products fused with collectives: their schedules, and the sum of their parts.

use super::ffi::{GatherPlan, ProductSpec, ShardRun, Status, SumSpec};
use super::guarded;
use crate::coll::cuda::sum_parts::{self, Sum};
use crate::coll::fused::{self, Product};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::kernels::cuda::driver::Stream;

/// Ranks, this rank, and the product of one rank's rows.
fn product(spec: &ProductSpec) -> Result<(usize, usize, Product)> {
    if spec.rank >= spec.size {
        return Err(Error::value(format!("there is no rank {} among {}", spec.rank, spec.size)));
    }
    let element = DType::from_torch(spec.dtype)?.size();
    Ok((spec.size, spec.rank, Product { rows: spec.rows, columns: spec.columns, depth: spec.depth, element }))
}

pub(super) fn plan_gather(spec: &ProductSpec) -> GatherPlan {
    let mut products = Vec::new();
    let status = guarded(|| {
        let (n, rank, product) = product(spec)?;
        let plan = fused::gather(n, rank, &product, &fused::of_device(spec.device, DType::from_torch(spec.dtype)?)?);
        products = plan.iter().map(|run| ShardRun { first: run.ranks.start, count: run.ranks.len(), arrived: run.arrived }).collect();
        Ok(())
    });
    GatherPlan { status, products }
}

pub(super) fn plan_scatter(spec: &ProductSpec, pulled: &mut usize) -> Status {
    guarded(|| {
        let (n, _, product) = product(spec)?;
        *pulled = fused::pulled(n, &product, &fused::of_device(spec.device, DType::from_torch(spec.dtype)?)?);
        Ok(())
    })
}

pub(super) fn sum_parts(spec: &SumSpec) -> Status {
    guarded(|| {
        let dtype = DType::from_torch(spec.dtype)?;
        let sum = Sum { rank: spec.rank, parts: &spec.parts, to: spec.to, bytes: spec.bytes, dtype, mean: spec.mean };
        sum_parts::launch(spec.device, spec.stream, &sum)
    })
}

pub(super) fn capture_of(stream: usize) -> u64 {
    let mut found = 0;
    guarded(|| {
        // The driver counts captures from 1.
        found = Stream(stream).capture()?.unwrap_or(0);
        Ok(())
    });
    found
}
