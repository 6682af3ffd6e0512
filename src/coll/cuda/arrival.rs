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

/// Returns true if a call is meant to overlap with computation. With the default policy, these are
/// calls in the `background`, and calls on a stream that is not a default stream. In a capture all
/// streams are such streams, so `recorded` calls overlap only if they are in the background.
pub fn overlaps(
    (stream, background): (Stream, bool),
    recorded: bool,
    tuning: &CudaThresholds,
) -> bool {
    tuning.policy != CtaPolicy::Default || background || (!recorded && stream.0 > DEFAULT_STREAMS)
}

/// Returns true if this rank waits for the other ranks before it starts a kernel with lanes for
/// `call`, provided that `call` overlaps with computation.
pub fn is_long(call: &CallSpec<'_>, tuning: &CudaThresholds) -> bool {
    let total = |spans: &[Span]| spans.iter().map(|span| span.bytes).sum::<usize>();
    total(&call.inputs).max(total(&call.outputs)) >= tuning.arrival_bytes
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
            let waits = overlaps(target, recorded, tuning) && is_long(&call(bytes), tuning);
            assert_eq!(waits, expected, "{bytes} bytes on {target:?}, recorded {recorded}");
        }
    }
}
