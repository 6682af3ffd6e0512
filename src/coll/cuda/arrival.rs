//! Waiting for the other ranks of a call before a kernel with many blocks starts. The blocks of
//! such a kernel would wait for a late rank on the processors that computation needs; a kernel of
//! one warp waits instead.
//!
//! Whether a rank waits is its own decision: a rank that does not wait announces itself at the
//! start of the kernel. Both count in the same words (`copy_words.cuh`).

use super::arguments::CopySyncArgs;
use super::copy_engine;
use super::launch::{Launch, LaunchContext};
use super::tuning::CudaThresholds;
use crate::coll::call::{CallSpec, Span};
use crate::cta::CtaPolicy;
use crate::kernels::cuda::driver::Stream;

/// The largest handle of a stream that CUDA itself defines: the legacy default stream has 0 or 1,
/// the default stream of a thread has 2.
const DEFAULT_STREAMS: usize = 2;

/// Returns true if this rank waits for the other ranks before it starts a kernel with lanes for
/// `call`. With the default policy, it does so in calls that are meant to overlap with computation:
/// ones in the `background`, and ones on a stream that is not a default stream. In a capture all
/// streams are such streams, so `recorded` calls wait only if they are in the background.
pub fn waits_first(
    call: &CallSpec<'_>,
    (stream, background): (Stream, bool),
    recorded: bool,
    tuning: &CudaThresholds,
) -> bool {
    let total = |spans: &[Span]| spans.iter().map(|span| span.bytes).sum::<usize>();
    let overlaps = || background || (!recorded && stream.0 > DEFAULT_STREAMS);
    total(&call.inputs).max(total(&call.outputs)) >= tuning.arrival_bytes
        && (tuning.policy != CtaPolicy::Default || overlaps())
}

/// Returns the kernel that announces this rank and waits for all others.
pub fn kernel(context: &LaunchContext<'_>) -> Launch {
    let words = context.layout.arrivals() as u64;
    let args = CopySyncArgs { words, post_arrived: 1, wait_arrived: 1, ..Default::default() };
    copy_engine::sync(context, CopySyncArgs { advance: 1, bare: 1, ..args })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::coll::call::Collective;
    use crate::dtype::DType;

    #[test]
    fn calls_that_overlap_wait_for_the_other_ranks_first() {
        let call = |bytes: usize| CallSpec {
            op: Collective::AllGather,
            dtype: DType::U8,
            inputs: vec![Span { addr: 0, bytes: bytes / 2 }].into(),
            outputs: vec![Span { addr: 0, bytes: bytes / 2 }; 2].into(),
            ..CallSpec::barrier(None)
        };
        let tuning = CudaThresholds { arrival_bytes: 100, ..CudaThresholds::of(2) };
        let few = CudaThresholds { policy: CtaPolicy::Efficiency, ..tuning };
        let on = |stream, background| (Stream(stream), background);
        for (bytes, target, recorded, tuning, expected) in [
            (100, on(0, false), false, &tuning, false),
            (100, on(2, false), false, &tuning, false),
            (100, on(77, false), false, &tuning, true),
            (98, on(77, false), false, &tuning, false),
            (100, on(77, false), true, &tuning, false),
            (100, on(77, true), true, &tuning, true),
            (100, on(0, false), true, &few, true),
            (98, on(0, false), true, &few, false),
        ] {
            let waits = waits_first(&call(bytes), target, recorded, tuning);
            assert_eq!(waits, expected, "{bytes} bytes on {target:?}, recorded {recorded}");
        }
    }
}
