//! One call of a group on several nodes: the steps of its program, enqueued on a stream.

use super::super::Internode;
use super::super::traffic::TrafficPath;
use super::backends::BackendScope;
use super::cast::Cast;
use super::sum::PartialsSum;
use super::{CudaInternode, IntraNode, KERNEL_GRACE};
use crate::coll::call::{Call, CallSpec, Span};
use crate::coll::cuda::communicator::CudaTarget;
use crate::coll::two_level::Planning;
use crate::coll::two_level::rules::Rules;
use crate::coll::two_level::step::{Bases, Place, Program, RailOp, Step};
use crate::dtype::SumOrder;
use crate::error::{Error, Result};
use crate::kernels::cuda::driver::{Device, Kernel, Stream};
use crate::node_map::NodeMap;
use std::time::Duration;

impl Internode {
    /// Enqueues one call.
    pub(super) fn enqueue(
        &self,
        inside: &dyn IntraNode,
        cuda: &CudaInternode,
        call: &Call,
        (device, stream): (&Device, Stream),
        target: CudaTarget,
        timeout: Duration,
    ) -> Result<()> {
        let (layout, ordinal, backends) = (&*self.layout, target.device, &cuda.connections);
        let (traffic, rail) = (&self.traffic, TrafficPath::CudaRail(layout.local_rank(self.rank)));
        let chosen = self.chosen();
        let (me, partials, thresholds) = (self.rank, chosen.reduce_dtype, chosen.cuda);
        let program =
            Planning { map: layout, me, reduce_dtype: partials, thresholds, rules: &Rules::CUDA }
                .plan(call, None);
        let temp = if program.temp > 0 { backends.memory(ordinal, program.temp)? } else { 0 };
        let bases = Bases { temp, aside: 0 };
        // Loaded before anything on the device waits for another node, because loading may wait for
        // running kernels and thus for that node.
        let kernels =
            PlanKernels::load(&program, call, self.health.control().order(), device, layout);
        let start = |transfer: &RailOp<Place>, overlap: bool| {
            let transfer = transfer.map(|place| place.at(&bases));
            traffic.add(rail, transfer.bytes(layout.node_of(self.rank), layout.num_nodes()));
            backends.start(&transfer, overlap)
        };
        let spans = |places: &[Place]| -> Vec<Span> {
            places.iter().map(|place| place.at(&bases)).collect()
        };
        let enqueue = |step: &Step, kernels: &PlanKernels| match step {
            Step::Local(calls) => {
                let calls: Vec<Call> =
                    calls.iter().map(|inner| inner.call(call.factor, &bases)).collect();
                inside.gpus(ordinal)?.launch(&calls, target, timeout + KERNEL_GRACE, |_| {})
            }
            // Programs for CUDA tensors lack this step: nodes compare calls while programs run.
            Step::Agree => Ok(()),
            Step::Start(transfer) => start(transfer, true),
            Step::Run(transfer) => start(transfer, false),
            Step::Wait => backends.follow(),
            Step::Exchange { give, take } => {
                let (give, take) = (spans(give), spans(take));
                traffic.add(TrafficPath::CudaAll, (total(&give), total(&take)));
                backends.exchange(BackendScope::All, &give, &take)
            }
            Step::Combine { from, to } => {
                let sum =
                    PartialsSum::of(&spans(from), to.at(&bases), program.partial, call.reduce_op);
                sum.launch(loaded(kernels.sum)?, stream, layout)
            }
            Step::Cast { from, to, widens } => {
                let cast = Cast {
                    from: from.at(&bases),
                    to: to.at(&bases),
                    dtype: call.dtype,
                    widens: *widens,
                };
                cast.launch(loaded(if *widens { kernels.widen } else { kernels.round })?, stream)
            }
            Step::Copy { from, to } => {
                let [from, to] = [from, to].map(|place| place.at(&bases));
                stream.copy(to.addr as u64, from.addr as u64, from.bytes)
            }
        };
        let outcome = kernels
            .and_then(|kernels| program.steps.iter().try_for_each(|step| enqueue(step, &kernels)));
        traffic.ended(&[rail, TrafficPath::CudaAll]);
        backends.finish().and(outcome)
    }
}

/// The kernels of a program. All its sums have one type and operation, and all its casts one type.
#[derive(Default)]
struct PlanKernels {
    sum: Option<Kernel>,
    widen: Option<Kernel>,
    round: Option<Kernel>,
}

impl PlanKernels {
    /// Loads the kernels that `program` for `call` needs, on `device`.
    fn load(
        program: &Program,
        call: &CallSpec,
        order: SumOrder,
        device: &Device,
        layout: &NodeMap,
    ) -> Result<Self> {
        let has = |what: fn(&Step) -> bool| program.steps.iter().any(what);
        let sum = || PartialsSum::kernel(device, program.partial, call.reduce_op, order, layout);
        let cast = |widens| Cast::kernel(device, call.dtype, widens);
        Ok(Self {
            sum: has(|step| matches!(step, Step::Combine { .. })).then(sum).transpose()?,
            widen: has(|step| matches!(step, Step::Cast { widens: true, .. }))
                .then(|| cast(true))
                .transpose()?,
            round: has(|step| matches!(step, Step::Cast { widens: false, .. }))
                .then(|| cast(false))
                .transpose()?,
        })
    }
}

fn loaded(kernel: Option<Kernel>) -> Result<Kernel> {
    kernel.ok_or_else(|| Error::internal("a kernel of the program was not loaded"))
}

/// Returns the total length of `spans`.
fn total(spans: &[Span]) -> usize {
    spans.iter().map(|span| span.bytes).sum()
}
