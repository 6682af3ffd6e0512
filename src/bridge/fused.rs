//! Matrix products fused with collectives: their schedules, and the sum of their parts.

use super::ffi::{GatherPlan, ProductSpec, ShardRun, Status, SumSpec};
use super::guarded;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::fused::sum_parts::{self, Sum};
use crate::fused::{self, DeviceModel, Product};

/// The product of one rank's rows, and what multiplies it.
fn product(spec: &ProductSpec) -> Result<(Product, DeviceModel)> {
    if spec.rank >= spec.size {
        return Err(Error::value(format!("there is no rank {} among {}", spec.rank, spec.size)));
    }
    let dtype = DType::from_torch(spec.dtype)?;
    let product = Product { rows: spec.rows, columns: spec.columns, depth: spec.depth, element: dtype.size() };
    Ok((product, fused::of_device(spec.device, dtype)?))
}

pub(super) fn plan_gather(spec: &ProductSpec) -> GatherPlan {
    let (mut own_early, mut products) = (false, Vec::new());
    let status = guarded(|| {
        let (product, model) = product(spec)?;
        let plan = fused::gather(spec.size, spec.rank, &product, &model);
        own_early = plan.own_early;
        products =
            plan.products.iter().map(|run| ShardRun { first: run.ranks.start, count: run.ranks.len(), arrived: run.arrived }).collect();
        Ok(())
    });
    GatherPlan { status, own_early, products }
}

pub(super) fn plan_scatter(spec: &ProductSpec, pulled: &mut usize) -> Status {
    guarded(|| {
        let (product, model) = product(spec)?;
        *pulled = fused::pulled(spec.size, &product, &model);
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
