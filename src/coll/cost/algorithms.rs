//! Names of the algorithms that run a group's collectives. Pure.

use super::hardware::DeviceKind;
use crate::coll::call::{CallSpec, Collective, Span};
use crate::coll::cuda;
use crate::coll::cuda::workspace::layout::ChannelLayout;
use crate::coll::plan::{self, CpuThresholds};
use crate::dtype::DType;
use crate::topo::cost::LinkCost;

/// The code that chooses an algorithm, with the settings that it uses in addition to the call.
#[derive(Clone, Copy, Debug)]
pub(super) enum Algorithms {
    /// `coll::plan`.
    Cpu(CpuThresholds),
    /// `coll::cuda::plan`.
    Cuda(ChannelLayout, cuda::plan::CudaThresholds),
    /// Groups that this crate does not support: too many ranks, or several nodes.
    Foreign,
}

/// Microseconds that Python, the dispatcher and c10d add to a call on CPU tensors (README,
/// 2026-11-21: 4 to 5 µs); the launch latency of a kernel on a GPU; torch's constant.
const CPU_BASE_US: f64 = 4.0;
const CUDA_BASE_US: f64 = 2.0;
const FOREIGN_BASE_US: f64 = 6.6;

impl Algorithms {
    /// Returns the algorithms on `device` in groups of `ranks` with a workspace of `workspace`
    /// bytes.
    pub(super) fn of(
        device: DeviceKind,
        ranks: usize,
        workspace: usize,
        thresholds: CpuThresholds,
        tuning: cuda::plan::CudaThresholds,
    ) -> Self {
        match device {
            DeviceKind::Cpu if ranks <= crate::mem::layout::MAX_RANKS => Self::Cpu(thresholds),
            DeviceKind::Cuda if ranks <= cuda::workspace::layout::MAX_RANKS => {
                ChannelLayout::new(ranks, workspace.max(ChannelLayout::least(ranks)))
                    .map_or(Self::Foreign, |layout| Self::Cuda(layout, tuning))
            }
            DeviceKind::Cpu | DeviceKind::Cuda => Self::Foreign,
        }
    }

    /// Returns the algorithm for `op` on tensors of `bytes` among `ranks`.
    pub(super) fn name(&self, op: Collective, bytes: f64, ranks: usize) -> &'static str {
        let longest = longest(op, bytes, ranks);
        match self {
            Self::Cpu(thresholds) => plan::choose(op, longest, ranks, thresholds, false).name(),
            Self::Cuda(layout, tuning) => {
                let spans = vec![Span { addr: 0, bytes: longest }; ranks];
                let call = CallSpec {
                    op,
                    dtype: DType::F32,
                    inputs: (&spans).into(),
                    outputs: (&spans).into(),
                    ..CallSpec::barrier(None)
                };
                let conditions = cuda::plan::Conditions {
                    me: 0,
                    n: ranks,
                    layout,
                    tuning,
                    cube_mesh: false,
                    zero_copy: false,
                };
                cuda::plan::choose(&call, &conditions).name()
            }
            Self::Foreign => "ring",
        }
    }

    /// Estimates a call's time over `link` without measurements: a fixed cost, a trip for each time
    /// that ranks wait for each other, and the bytes that a rank sends
    /// (`docs/design/cpu-collectives.md`, `docs/design/cuda-kernels.md`).
    pub(super) fn estimate(&self, op: Collective, bytes: f64, ranks: usize, link: LinkCost) -> f64 {
        let name = self.name(op, bytes, ranks);
        let n = ranks as f64;
        let share = (n - 1.0) / n;
        let received = match op {
            Collective::AllReduce | Collective::AllReduceAddRmsNorm => 2.0 * share,
            Collective::AllGather
            | Collective::ReduceScatter
            | Collective::AllToAll
            | Collective::Scatter => share,
            Collective::Broadcast | Collective::Reduce | Collective::Gather => 1.0,
            Collective::Barrier => 0.0,
        };
        let (trips, sent) = match name {
            "exchange_low_latency" if op == Collective::Broadcast => (1.0, 2.0 * (n - 1.0)),
            "exchange_low_latency" | "exchange_mixed" => (1.0, 2.0 * received),
            "one_shot" => (1.0, n - 1.0),
            "reduce_low_latency" if op == Collective::AllReduce => (1.0, 2.0 * (n - 1.0)),
            "reduce_low_latency" => (1.0, 2.0 * received),
            "inline" | "reduce_staged" | "exchange_staged" => (1.0, received),
            "ring" if op == Collective::AllReduce => (2.0 * (n - 1.0), received),
            "ring" => (n - 1.0, received),
            _ => (2.0, received),
        };
        let base = match self {
            Self::Cpu(_) => CPU_BASE_US,
            Self::Cuda(..) => CUDA_BASE_US,
            Self::Foreign => FOREIGN_BASE_US,
        };
        // 1 GB/s is 1000 bytes in a microsecond.
        base + trips * link.us + sent * bytes / (link.gb_per_s * 1e3)
    }
}

/// Returns the length of the longest message between two ranks when `op` works on tensors of
/// `bytes`.
fn longest(op: Collective, bytes: f64, ranks: usize) -> usize {
    let message = match op {
        Collective::AllGather
        | Collective::Gather
        | Collective::Scatter
        | Collective::ReduceScatter
        | Collective::AllToAll => bytes / ranks as f64,
        Collective::Barrier
        | Collective::Broadcast
        | Collective::AllReduce
        | Collective::Reduce
        | Collective::AllReduceAddRmsNorm => bytes,
    };
    message.ceil() as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(device: DeviceKind, ranks: usize) -> Algorithms {
        let (cpu, cuda) = (CpuThresholds::default(), cuda::plan::CudaThresholds::of(ranks));
        let workspace = if device == DeviceKind::Cpu { 0 } else { 256 << 20 };
        Algorithms::of(device, ranks, workspace, cpu, cuda)
    }

    #[test]
    fn names_are_those_of_the_plans() {
        let cpu = of(DeviceKind::Cpu, 4);
        for (op, bytes, expected) in [
            (Collective::AllReduce, 4096.0, "inline"),
            (Collective::AllReduce, 1e6, "staged"),
            (Collective::AllReduce, 256e6, "staged_streaming"),
            (Collective::AllToAll, 4096.0, "inline"),
            (Collective::AllGather, 16384.0, "inline"),
            (Collective::ReduceScatter, 16384.0, "staged"),
        ] {
            assert_eq!(cpu.name(op, bytes, 4), expected, "{op:?} {bytes}");
        }
        let cuda = of(DeviceKind::Cuda, 8);
        let name = |bytes: usize| cuda.name(Collective::AllReduce, bytes as f64, 8);
        assert_eq!([1 << 10, 1 << 20, 64 << 20].map(name), ["one_shot", "two_shot", "rsag_staged"]);
        assert_eq!(cuda.name(Collective::AllToAll, 1e3, 8), "exchange_mixed");
        assert_eq!(of(DeviceKind::Cuda, 32).name(Collective::AllReduce, 1e3, 32), "ring");
    }

    #[test]
    fn estimates_follow_bytes_and_trips() {
        let link = LinkCost { gb_per_s: 370.0, us: 0.6 };
        for (op, bytes, us) in [
            // An all-reduce without data still has the latency of two stages.
            (Collective::AllReduce, 0.0, 2.0 + 2.0 * 0.6),
            (Collective::AllReduce, 1024.0, 2.0 + 0.6 + 3.0 * 1024.0 / 370e3),
            (Collective::AllReduce, 64e6, 2.0 + 1.2 + 1.5 * 64e6 / 370e3),
            (Collective::AllGather, 64e6, 2.0 + 0.6 + 0.75 * 64e6 / 370e3),
        ] {
            assert_eq!(of(DeviceKind::Cuda, 4).estimate(op, bytes, 4, link), us, "{op:?} {bytes}");
        }
        let foreign = Algorithms::Foreign.estimate(Collective::AllReduce, 0.0, 4, link);
        assert_eq!(foreign, 6.6 + 6.0 * 0.6);
    }
}
