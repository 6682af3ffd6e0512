//! Calls whose bytes copy engines move: the decision, and the enqueueing of their tasks.

use super::{Communicator, CommunicatorState};
use crate::coll::call::{CallSpec, Collective};
use crate::coll::cuda::agreement::copy_mode::{self, CopyDecision, CopyMode, TensorOffsets};
use crate::coll::cuda::copy_engine::{self, CopyTasks, EarlierRank, Task};
use crate::coll::cuda::launch::LaunchContext;
use crate::cta::CtaPolicy;
use crate::error::{Error, Result};
use crate::kernels::cuda::driver::{Event, OwnStream, RelaxedCapture, Stream};
use crate::rank::Rank;
use crate::symm_mem::peers::PeerHeaps;

/// Streams for copies that run concurrently with the caller's stream, and the events that order
/// them.
pub(super) struct CopyStreams {
    /// More than two only if several captures are open at the same time.
    streams: Vec<OwnStream>,
    /// Events at the end of the caller's stream and of the copies' stream: one pair for eager
    /// calls, one for captured calls.
    ends: [[Event; 2]; 2],
}

impl CopyStreams {
    pub(super) fn new() -> Result<Self> {
        let ends = || Ok([Event::new()?, Event::new()?]);
        Ok(Self {
            streams: vec![OwnStream::urgent()?, OwnStream::urgent()?],
            ends: [ends()?, ends()?],
        })
    }

    /// Returns a stream that is free for eager calls, or for calls of `capture`.
    fn free(&mut self, capture: Option<u64>) -> Result<Stream> {
        for own in &self.streams {
            let recording = own.stream().capture()?;
            if recording.is_none() || recording == capture {
                return Ok(own.stream());
            }
        }
        let _relaxed = RelaxedCapture::begin()?;
        let own = OwnStream::urgent()?;
        let stream = own.stream();
        self.streams.push(own);
        Ok(stream)
    }
}

impl Communicator {
    /// Returns where the tensors of `call` are in symmetric memory, if copy engines move it. `None`
    /// on all ranks or none.
    pub(super) fn copy_offsets(&self, call: &CallSpec<'_>) -> Option<TensorOffsets> {
        let n = self.control.size();
        let long = || {
            copy_engine::volume(call, self.control.rank().index(), n)
                >= self.tuning.copy_engine_bytes
        };
        let moved = self.tuning.policy == CtaPolicy::Zero
            && self.memory.is_direct()
            && copy_engine::serves(call, n)
            && long();
        moved.then(|| self.tensor_offsets(call).unwrap_or(TensorOffsets::ELSEWHERE))
    }

    /// Returns the decision about this rank's launch `number`, which is `call`; copy engines move
    /// it. `own` are its tensors.
    pub(super) fn copy_decision(
        &self,
        call: &CallSpec<'_>,
        number: u64,
        own: TensorOffsets,
    ) -> Result<CopyDecision> {
        let symmetric = own != TensorOffsets::ELSEWHERE;
        let wanted = if symmetric { CopyMode::Direct } else { CopyMode::Staged };
        let decision = copy_mode::decide(&self.control, number, wanted, own);
        // Later ranks need to know where this rank's tensors are.
        let last = decision.earlier.len() + 1 == self.control.size();
        if decision.mode == CopyMode::Direct && !symmetric && !last {
            let (me, group) = (self.control.describe(self.control.rank()), self.control.name());
            return Err(self.control.fail(Error::mismatch(format!(
                "{me} passed tensors outside symmetric memory to {}, CUDA collective #{number} of \
                 group \"{group}\", but the first rank \
                 passed symmetric ones; with cta_policy=\"zero\" and more than two ranks, take \
                 them from the same kind of memory on all",
                call.op.name()
            ))));
        }
        Ok(decision)
    }

    /// Returns where the tensors of a gather are in symmetric memory, if all of them are.
    fn tensor_offsets(&self, call: &CallSpec<'_>) -> Option<TensorOffsets> {
        let heaps = self.symmetric.as_ref()?;
        let whole = copy_engine::consecutive(call)?;
        let output = heaps.offset(whole)?;
        let input = if call.op == Collective::AllReduce {
            // The second pass gathers pieces of the outputs.
            let piece = copy_engine::piece(whole, self.control.rank().index(), self.control.size());
            output + (piece.addr - whole.addr) as u64
        } else {
            heaps.offset(call.inputs[0])?
        };
        Some(TensorOffsets { input, output })
    }

    /// Returns the tensors of the ranks that launched a direct gather earlier, as mapped here.
    fn earlier_ranks(
        &self,
        call: &CallSpec<'_>,
        decision: &CopyDecision,
    ) -> Result<Vec<EarlierRank>> {
        let n = self.control.size();
        let reach = |heaps: &PeerHeaps, rank, offset, bytes| {
            heaps.reach(rank, offset, bytes).map(|(address, _)| address)
        };
        let found = |&(rank, offsets): &(Rank, TensorOffsets)| {
            let heaps = self.symmetric.as_ref()?;
            let pieces = call.op == Collective::AllReduce;
            let message = if pieces {
                copy_engine::piece(call.outputs[0], rank.index(), n)
            } else {
                call.outputs[rank.index()]
            }
            .bytes;
            let total: usize = call.outputs.iter().map(|output| output.bytes).sum();
            let (input, output) = (
                reach(heaps, rank, offsets.input, message)?,
                reach(heaps, rank, offsets.output, total)?,
            );
            Some(EarlierRank { rank: rank.index(), input, output })
        };
        let all = decision.earlier.iter().map(|earlier| {
            let missing = || {
                let (them, me) =
                    (self.control.describe(earlier.0), self.control.describe(self.control.rank()));
                Error::internal(format!(
                    "{me} has not mapped the tensors that {them} passed to {}",
                    call.op.name()
                ))
            };
            found(earlier).ok_or_else(missing)
        });
        all.collect()
    }

    /// Enqueues `call` as decided.
    pub(super) fn enqueue_copies(
        &self,
        state: &mut CommunicatorState,
        context: &LaunchContext<'_>,
        call: &CallSpec<'_>,
        decision: &CopyDecision,
        stream: Stream,
    ) -> Result<()> {
        let earlier = if decision.mode == CopyMode::Direct {
            Some(self.earlier_ranks(call, decision)?)
        } else {
            None
        };
        let tasks = CopyTasks::new(context, &self.tuning).of(call, earlier.as_deref());
        // Loading a kernel may wait for the kernels on the device, and those of the first tasks
        // wait for peers.
        for task in &tasks {
            if let Task::Kernel { launch, .. } = task {
                state.kernels.ready(&self.device, launch, call.dtype, call.reduce_op)?;
            }
        }
        let capture = stream.capture()?;
        let copies = state.copies.free(capture)?;
        for task in tasks {
            let on = |side: bool| if side { copies } else { stream };
            let [forked, joined] = &state.copies.ends[usize::from(capture.is_some())];
            match task {
                Task::Kernel { side, launch } => state.kernels.launch(
                    &self.device,
                    &launch,
                    call.dtype,
                    call.reduce_op,
                    on(side),
                )?,
                Task::Copy { side, to, from, bytes } => on(side).copy(to, from, bytes)?,
                Task::Fork => {
                    forked.record(stream)?;
                    copies.wait(forked)?;
                }
                Task::Join => {
                    joined.record(copies)?;
                    stream.wait(joined)?;
                }
            }
        }
        Ok(())
    }
}

/// Returns the name of a mode in `torch_symm.stats()`.
pub(super) fn served_as(mode: CopyMode) -> &'static str {
    match mode {
        CopyMode::Staged => "copy_engine_staged",
        CopyMode::Direct => "copy_engine_direct",
    }
}
