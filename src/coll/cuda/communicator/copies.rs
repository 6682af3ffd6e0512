//! Calls whose bytes copy engines move: the decision, and the enqueueing of their tasks.

use super::{Communicator, CommunicatorState, StreamQueue};
use crate::coll::call::{CallSpec, Collective, Span};
use crate::coll::cuda::agreement::copy_mode::{self, CopyDecision, CopyMode, TensorOffsets};
use crate::coll::cuda::copy_engine::{self, CopyTasks, DirectPeer, Task};
use crate::coll::cuda::launch::LaunchContext;
use crate::coll::cuda::stats;
use crate::cta::CtaPolicy;
use crate::dtype::{DType, ReduceOp};
use crate::error::{Error, Result};
use crate::kernels::cuda::driver::{Event, OwnStream, RelaxedCapture, Stream};
use crate::rank::Rank;
use crate::symm_mem::SegmentPin;
use crate::symm_mem::peers::PeerHeaps;
use std::collections::VecDeque;

/// Streams for copies that run concurrently with the caller's stream, and the events that order
/// them.
pub(super) struct CopyStreams {
    /// By queue, because a call of one queue may wait for a call of another one. Collectives have
    /// more than two only if several captures are open at the same time, messages as many as one
    /// call has needed at the same time.
    streams: [Vec<OwnStream>; 3],
    /// Events at the end of the caller's stream and of the copies' stream: one pair for eager
    /// calls, one for captured calls.
    ends: [[Event; 2]; 2],
    /// Pins of bytes that this rank pulls from an address at which it expects a message, and of the
    /// other ends' tensors in direct messages, held until the event has passed: if the guess is
    /// wrong, nothing else keeps these bytes mapped.
    pulled: VecDeque<(Event, Vec<SegmentPin>)>,
    /// Such pins of captured calls, held as long as the group lives, because a graph may be
    /// replayed at any time.
    captured: Vec<SegmentPin>,
    /// The end of the last eager call that overlaps and [may](Communicator::may_be_overlapped) be
    /// staged, if there was one.
    long: Option<Event>,
}

/// The address at which this rank expects the message of another rank, if mapped here.
type Expected = Option<(u64, Option<SegmentPin>)>;

/// A call that copy engines may move, before the ranks have decided how.
pub(super) struct CopyOffer {
    own: TensorOffsets,
    expected: Vec<Expected>,
    /// The mode that this rank wants.
    wanted: CopyMode,
    /// The mode if the ranks cannot decide; the same on all ranks.
    usual: CopyMode,
}

impl CopyStreams {
    pub(super) fn new() -> Result<Self> {
        let ends = || Ok([Event::new()?, Event::new()?]);
        Ok(Self {
            streams: [vec![OwnStream::urgent()?, OwnStream::urgent()?], Vec::new(), Vec::new()],
            ends: [ends()?, ends()?],
            pulled: VecDeque::new(),
            captured: Vec::new(),
            long: None,
        })
    }

    /// Remembers the end of `stream`'s work, which is a call that may be staged.
    pub(super) fn mark_long(&mut self, stream: Stream) -> Result<()> {
        let event = self.long.take().map_or_else(Event::new, Ok)?;
        event.record(stream)?;
        self.long = Some(event);
        Ok(())
    }

    /// Returns true if the device has yet to complete the last long call: the host then has time
    /// for the many tasks of a staged call.
    pub(super) fn host_is_ahead(&self) -> Result<bool> {
        let Some(event) = &self.long else { return Ok(false) };
        let _relaxed = RelaxedCapture::begin()?;
        event.passed().map(|passed| !passed)
    }

    /// Drops the pins of pulls that have ended.
    pub(super) fn unpin(&mut self) -> Result<()> {
        if !self.pulled.is_empty() {
            let _relaxed = RelaxedCapture::begin()?;
            while let Some((event, _)) = self.pulled.front()
                && event.passed()?
            {
                self.pulled.pop_front();
            }
        }
        Ok(())
    }

    /// Drops the pins of all eager pulls, which have ended.
    pub(super) fn unpin_all(&mut self) {
        self.pulled.clear();
    }

    /// Keeps `pins` until `stream` has completed the work that is enqueued so far; if that work is
    /// `captured`, as long as the group lives.
    pub(super) fn keep(
        &mut self,
        pins: Vec<SegmentPin>,
        stream: Stream,
        captured: bool,
    ) -> Result<()> {
        if pins.is_empty() {
            return Ok(());
        }
        if captured {
            self.captured.extend(pins);
            return Ok(());
        }
        let event = Event::new()?;
        event.record(stream)?;
        self.pulled.push_back((event, pins));
        Ok(())
    }

    /// Returns a stream that is free for eager calls, or for calls of `capture`.
    fn free(&mut self, capture: Option<u64>) -> Result<Stream> {
        Ok(self.sides(StreamQueue::Collectives, 1, capture)?[0])
    }

    /// Returns `count` streams of `queue` that are free for eager calls, or for calls of `capture`.
    pub(super) fn sides(
        &mut self,
        queue: StreamQueue,
        count: usize,
        capture: Option<u64>,
    ) -> Result<Vec<Stream>> {
        let streams = &mut self.streams[queue as usize];
        let mut free = Vec::with_capacity(count);
        for own in &*streams {
            if free.len() == count {
                break;
            }
            let recording = own.stream().capture()?;
            if recording.is_none() || recording == capture {
                free.push(own.stream());
            }
        }
        while free.len() < count {
            let _relaxed = RelaxedCapture::begin()?;
            let own = OwnStream::urgent()?;
            free.push(own.stream());
            streams.push(own);
        }
        Ok(free)
    }

    /// Makes all but the first of `streams` wait for the first.
    pub(super) fn fork(&self, streams: &[Stream], captured: bool) -> Result<()> {
        let forked = &self.ends[usize::from(captured)][0];
        if streams.len() > 1 {
            forked.record(streams[0])?;
        }
        streams[1..].iter().try_for_each(|side| side.wait(forked))
    }

    /// Makes the first of `streams` wait for all others.
    pub(super) fn join(&self, streams: &[Stream], captured: bool) -> Result<()> {
        let joined = &self.ends[usize::from(captured)][1];
        let one = |side: &Stream| joined.record(*side).and_then(|()| streams[0].wait(joined));
        streams[1..].iter().map(one).fold(Ok(()), Result::and)
    }
}

impl Communicator {
    /// Returns true if copy engines may move `call` whatever the policy, if it overlaps with
    /// computation; the same on all ranks. There are two ranks only: a rank whose tensors are in
    /// other memory than those of the first rank can then make a direct call, too.
    pub(super) fn may_be_overlapped(&self, call: &CallSpec<'_>) -> bool {
        let (me, n) = (self.control.rank().index(), self.control.size());
        n == 2
            && matches!(call.op, Collective::AllGather | Collective::ReduceScatter)
            && copy_engine::volume(call, me, n) >= self.tuning.overlapped_bytes
    }

    /// Returns where the tensors of `call` are, and where the peers' tensors are expected, if
    /// copy engines may move the call. All ranks get `None`, or no rank does. `overlaps` is true if
    /// the call is meant to overlap with computation on this rank, and `stages` if this rank then
    /// wants to move bytes through the workspace unless they can go from tensor to tensor.
    pub(super) fn copy_offer(
        &self,
        call: &CallSpec<'_>,
        overlaps: bool,
        stages: bool,
    ) -> Option<CopyOffer> {
        let (me, n) = (self.control.rank().index(), self.control.size());
        let zero = self.tuning.policy == CtaPolicy::Zero;
        let direct = copy_engine::may_be_direct(call.op, n);
        let long = if zero {
            copy_engine::volume(call, me, n) >= self.tuning.copy_engine_bytes
        } else {
            self.may_be_overlapped(call)
        };
        if !self.memory.is_direct() || !copy_engine::serves(call, n) || !long {
            return None;
        }
        let usual = if zero { CopyMode::Staged } else { CopyMode::Kernels };
        let symmetric = self.symmetric.as_ref().filter(|_| direct);
        let found = symmetric.and_then(|heaps| self.tensors(call, heaps));
        let ordinary = symmetric
            .is_none_or(|heaps| !heaps.holds_any(call.inputs.iter().chain(&*call.outputs)));
        let wanted = match &found {
            Some(_) if zero || overlaps && in_place(call, me) => CopyMode::Direct,
            None if stages && ordinary => CopyMode::Staged,
            _ => usual,
        };
        let (own, expected) = found.unwrap_or((TensorOffsets::ELSEWHERE, Vec::new()));
        Some(CopyOffer { own, expected, wanted, usual })
    }

    /// Returns where the tensors of this rank are, and for each rank where its message is expected,
    /// if all tensors of this rank are in symmetric memory.
    fn tensors(
        &self,
        call: &CallSpec<'_>,
        heaps: &PeerHeaps,
    ) -> Option<(TensorOffsets, Vec<Expected>)> {
        let mut own = self.tensor_offsets(call, heaps)?;
        let (me, n) = (self.control.rank().index(), self.control.size());
        let mine = message(call, me, n).0;
        let mut expected: Vec<_> = (0..n).map(|_| None).collect();
        for peer in self.control.peers() {
            let (theirs, bytes) = message(call, peer.index(), n);
            let from = own.expected(mine, theirs) + skipped(call, me);
            expected[peer.index()] = heaps.reach(peer, from, bytes);
            own.pulls |= u16::from(expected[peer.index()].is_some()) << peer.index();
        }
        Some((own, expected))
    }

    /// Returns the decision about this rank's launch `number`, which is `call`.
    pub(super) fn copy_decision(
        &self,
        call: &CallSpec<'_>,
        number: u64,
        offer: &CopyOffer,
    ) -> Result<CopyDecision> {
        if !copy_engine::may_be_direct(call.op, self.control.size()) {
            return Ok(CopyDecision { mode: offer.usual, earlier: Vec::new() });
        }
        let symmetric = offer.own != TensorOffsets::ELSEWHERE;
        let modes = (offer.wanted, offer.usual);
        let decision = copy_mode::decide(&self.control, number, modes, offer.own);
        // Unless this rank is the last to launch the call, later ranks must be able to find its
        // tensors.
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

    /// Returns where the tensors of a direct call are in symmetric memory, if all of them are.
    fn tensor_offsets(&self, call: &CallSpec<'_>, heaps: &PeerHeaps) -> Option<TensorOffsets> {
        let whole = heaps.offset(copy_engine::consecutive(call)?)?;
        let (input, output) = if call.op == Collective::AllReduce {
            // The second pass gathers pieces of the outputs.
            (whole + message(call, self.control.rank().index(), self.control.size()).0, whole)
        } else if call.op == Collective::ReduceScatter {
            (whole, heaps.offset(call.outputs[0]).filter(|_| copy_engine::has_room(call))?)
        } else {
            (heaps.offset(call.inputs[0])?, whole)
        };
        Some(TensorOffsets { input, output, pulls: 0 })
    }

    /// Returns the messages that this rank moves in a direct call, one entry for each peer.
    fn direct_peers(
        &self,
        call: &CallSpec<'_>,
        decision: &CopyDecision,
        offer: &CopyOffer,
    ) -> Result<Vec<DirectPeer>> {
        let (me, n) = (self.control.rank().index(), self.control.size());
        let total: usize = call.outputs.iter().map(|output| output.bytes).sum();
        let reach = |heaps: &PeerHeaps, rank, offset, bytes| {
            heaps.reach(rank, offset, bytes).map(|(address, _)| address)
        };
        let earlier = |rank: Rank, theirs: TensorOffsets| {
            let heaps = self.symmetric.as_ref()?;
            let (start, bytes) = message(call, rank.index(), n);
            let pulls = theirs.pulls >> me & 1 == 1;
            let right = pulls && offer.own.input == theirs.expected(start, message(call, me, n).0);
            let output = reach(heaps, rank, theirs.output, total)?;
            Some(DirectPeer {
                rank: rank.index(),
                pull: Some(reach(heaps, rank, theirs.input + skipped(call, me), bytes)?),
                push: (!right).then_some(output),
                repairs: pulls && !right,
            })
        };
        let of = |rank: Rank| {
            let Some((_, theirs)) = decision.earlier.iter().find(|(earlier, _)| *earlier == rank)
            else {
                let expected = offer.expected.get(rank.index()).and_then(Option::as_ref);
                let pull = expected.map(|(address, _)| *address);
                return Ok(DirectPeer { rank: rank.index(), pull, push: None, repairs: false });
            };
            earlier(rank, *theirs).ok_or_else(|| {
                let (them, me) =
                    (self.control.describe(rank), self.control.describe(self.control.rank()));
                Error::internal(format!(
                    "{me} has not mapped the tensors that {them} passed to {}",
                    call.op.name()
                ))
            })
        };
        self.control.peers().map(of).collect()
    }

    /// Enqueues `call` as decided.
    pub(super) fn enqueue_copies(
        &self,
        state: &mut CommunicatorState,
        context: &LaunchContext<'_>,
        call: &CallSpec<'_>,
        decision: &CopyDecision,
        offer: CopyOffer,
        stream: Stream,
    ) -> Result<()> {
        let direct = if decision.mode == CopyMode::Direct {
            Some(self.direct_peers(call, decision, &offer)?)
        } else {
            None
        };
        if direct.iter().flatten().any(|peer| peer.repairs) {
            stats::count(Some(call.op), "copy_engine_repaired");
        }
        let tasks = CopyTasks::new(context, &self.tuning).of(call, direct.as_deref());
        // All kernels are loaded first: loading one may wait for the kernels on the device, and the
        // kernels of the first tasks wait for peers.
        for task in &tasks {
            if let Task::Kernel { launch, .. } = task {
                state.kernels.ready(&self.device, launch, call.dtype, call.reduce_op)?;
            }
        }
        let capture = stream.capture()?;
        let copies = state.copies.free(capture)?;
        let unknown = |rank: usize| {
            direct.is_some() && !decision.earlier.iter().any(|(earlier, _)| earlier.index() == rank)
        };
        let pins = offer.expected.into_iter().enumerate().filter(|&(rank, _)| unknown(rank));
        let pins = pins.filter_map(|(_, expected)| expected?.1).collect();
        let of = (call.dtype, call.reduce_op);
        let enqueued = self.enqueue_tasks(state, of, tasks, [stream, copies], capture.is_some());
        if enqueued.is_err() && capture.is_none() {
            // The copies that are already enqueued run. The call's stream waits for them, so that
            // the release of the workspace, which waits for this stream, follows them.
            _ = state.copies.join(&[stream, copies], false);
        }
        // Also after an error, because a pull may have been enqueued.
        let kept = state.copies.keep(pins, stream, capture.is_some());
        enqueued.and(kept)
    }

    /// Enqueues `tasks` of a call with this element type and operation on `stream` and, for copies
    /// at its side, on `copies`; `captured` is true if a graph records them.
    pub(super) fn enqueue_tasks(
        &self,
        state: &mut CommunicatorState,
        (dtype, op): (DType, ReduceOp),
        tasks: Vec<Task>,
        [stream, copies]: [Stream; 2],
        captured: bool,
    ) -> Result<()> {
        for task in tasks {
            let on = |side: bool| if side { copies } else { stream };
            match task {
                Task::Kernel { side, launch } => {
                    state.kernels.launch(&self.device, &launch, dtype, op, on(side))?
                }
                Task::Copy { side, to, from, bytes } => on(side).copy(to, from, bytes)?,
                Task::Fork => state.copies.fork(&[stream, copies], captured)?,
                Task::Join => state.copies.join(&[stream, copies], captured)?,
            }
        }
        Ok(())
    }
}

/// Returns where the message of `rank` of `n` starts in an output, and its length.
fn message(call: &CallSpec<'_>, rank: usize, n: usize) -> (u64, usize) {
    if call.op == Collective::AllReduce {
        let whole = Span { addr: 0, ..call.outputs[0] };
        let piece = copy_engine::piece(whole, rank, n);
        return (piece.addr as u64, piece.bytes);
    }
    if call.op == Collective::ReduceScatter {
        return (0, call.outputs[0].bytes);
    }
    let start: usize = call.outputs[..rank].iter().map(|output| output.bytes).sum();
    (start as u64, call.outputs[rank].bytes)
}

/// Returns where the message for rank `me` starts in the input of another rank.
fn skipped(call: &CallSpec<'_>, me: usize) -> u64 {
    let scatters = call.op == Collective::ReduceScatter;
    if scatters { (me * call.outputs[0].bytes) as u64 } else { 0 }
}

/// Returns true if rank `me` need not copy its own message within its memory.
fn in_place(call: &CallSpec<'_>, me: usize) -> bool {
    call.op != Collective::AllGather || call.inputs[0].addr == call.outputs[me].addr
}

/// Returns the name of a mode in `torch_symm.stats()`.
pub(super) fn served_as(mode: CopyMode) -> &'static str {
    match mode {
        CopyMode::Staged => "copy_engine_staged",
        CopyMode::Direct => "copy_engine_direct",
        CopyMode::Kernels => unreachable!("the plan names the kernels"),
    }
}
