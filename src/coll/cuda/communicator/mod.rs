//! A group's GPUs: all ranks set them up together, then each rank launches on its own.

mod batch;
mod copies;
mod messages;
mod set_up;
mod stream_order;

pub(in crate::coll::cuda) use super::failure::report::KernelReport;

use super::agreement::copy_mode::CopyMode;
use super::agreement::{launch_log, zero_copy};
use super::arguments::{COUNTS, CommonArgs, PerRank};
use super::failure::abort_flag::AbortFlag;
use super::kernels::Kernels;
use super::launch::{self, LaunchContext, SymmetricView};
use super::plan::{self, Conditions, CudaThresholds};
use super::workspace::budget;
use super::workspace::layout::{Channel, ChannelLayout, MAX_RANKS};
use super::workspace::memory::PeerWorkspaces;
use super::{all_reduce_norm, arrival, cube_mesh, stats};
use crate::coll::call::{Call, CallSpec, Span};
use crate::coll::describe::Description;
use crate::control::ControlBlock;
use crate::dtype::ReduceOp;
use crate::error::{Error, ErrorKind, Result};
use crate::kernels::cuda::driver::{Device, Event, OwnStream, Stream, pass};
use crate::lock::lock;
use crate::rank::Rank;
use crate::symm_mem::peers::PeerHeaps;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use stream_order::{Dependency, LastLaunch, StreamOrder, StreamQueue};

/// The stream and the device on which work is enqueued.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CudaTarget {
    /// torch's index of the device.
    pub device: i32,
    /// The `CUstream`.
    pub stream: usize,
    /// True to use one of the group's streams instead of the caller's: one for sends, one for
    /// receives, one for other calls.
    pub background: bool,
}

/// How long kernels may take to notice that they must end.
pub(crate) const KERNEL_ABORT_TIMEOUT: Duration = Duration::from_secs(2);

/// Communicator of a group on one device: workspace, streams, kernels.
pub struct Communicator {
    control: Arc<ControlBlock>,
    layout: ChannelLayout,
    tuning: CudaThresholds,
    /// True if a copy that waits behind a kernel does not hold up other streams. If all streams
    /// share one hardware queue, a call that waits for another rank would hold up the work for
    /// which that rank may wait.
    own_queues: bool,
    state: Mutex<CommunicatorState>,
    report: Arc<KernelReport>,
    stop: AbortFlag,
    symmetric: Option<PeerHeaps>,
    edges: Option<cube_mesh::Edges>,
    memory: PeerWorkspaces,
    /// Start of each channel on each rank.
    peer: [PerRank; Channel::ALL.len()],
    _share: budget::BudgetShare,
    _stream: OwnStream,
    // Last, because everything above is freed in its context.
    device: Device,
}

/// A stage of a call that is being enqueued.
#[derive(Clone, Copy, Debug)]
pub enum CallStage {
    /// The call is the launch with this number.
    Begins(u64),
    /// The algorithm with this name runs the call.
    Served(&'static str),
}

struct CommunicatorState {
    kernels: Kernels,
    copies: copies::CopyStreams,
    order: StreamOrder,
    launched: u64,
    /// Number of receives from each rank, and of sends to it.
    transfers: [[u64; MAX_RANKS]; 2],
    /// Two events per queue, for eager and for captured calls. A call waits on one of them if the
    /// previous call of its queue used another stream.
    behind: Vec<Event>,
    /// True once the group is leaving: its memory is freed when the enqueued work is done.
    closed: bool,
    /// True once a call was recorded into a graph, which may be replayed at any time.
    recorded: bool,
}

impl Communicator {
    /// Returns torch's index of this rank's device.
    pub fn device(&self) -> i32 {
        self.device.ordinal()
    }

    /// Enqueues `calls` in order; returns at once. `noted` gets the stages of each call before it
    /// is enqueued.
    pub fn launch(
        &self,
        calls: &[Call<'_>],
        target: CudaTarget,
        timeout: Duration,
        mut noted: impl FnMut(CallStage),
    ) -> Result<()> {
        self.enqueue(
            target,
            timeout,
            &[StreamQueue::Collectives],
            |communicator, state, stream, channel, context| {
                let recorded = channel == Channel::CapturedCollectives;
                let on = (stream, target.background);
                for call in calls {
                    state.launched += 1;
                    noted(CallStage::Begins(state.launched));
                    // Made before the call is published, because from then on the other ranks may
                    // decide.
                    let overlaps = arrival::overlaps(on, recorded, &communicator.tuning);
                    let copies = overlaps && communicator.own_queues;
                    let long = copies && !recorded && communicator.may_be_overlapped(call);
                    let stages = long && state.copies.host_is_ahead()?;
                    let offer = communicator.copy_offer(call, copies, stages);
                    launch_log::compare(&communicator.control, state.launched, call, channel)?;
                    communicator.report.remember(state.launched, Description::of(call));
                    let decide = |offer| {
                        let decision = communicator.copy_decision(call, state.launched, &offer)?;
                        Ok::<_, Error>((decision, offer))
                    };
                    let decided = offer.map(decide).transpose()?;
                    if let Some((decision, offer)) =
                        decided.filter(|(decision, _)| decision.mode != CopyMode::Kernels)
                    {
                        stats::count(Some(call.op), copies::served_as(decision.mode));
                        noted(CallStage::Served(copies::served_as(decision.mode)));
                        let context = LaunchContext {
                            common: CommonArgs { call: state.launched, ..context.common },
                            ..context
                        };
                        communicator
                            .enqueue_copies(state, &context, call, &decision, offer, stream)?;
                        if long {
                            state.copies.mark_long(stream)?;
                        }
                        continue;
                    }
                    let zero_copy = communicator.zero_copy(call, state.launched, timeout)?;
                    let plan = plan::choose(call, &communicator.conditions(zero_copy));
                    stats::count(Some(call.op), plan.served_as(zero_copy));
                    noted(CallStage::Served(plan.served_as(zero_copy)));
                    let reachable = |span| communicator.reachable(span);
                    let symmetric =
                        communicator.symmetric(channel, &reachable).filter(|_| zero_copy);
                    let sum = matches!(plan, plan::CudaPlan::NormRows { .. }).then(|| {
                        let sum = all_reduce_norm::reduction(call);
                        let plan = plan::choose(&sum, &communicator.conditions(false));
                        (sum, plan)
                    });
                    let first = sum.as_ref().map_or(plan, |(_, plan)| *plan);
                    let waits = first.has_lanes()
                        && context.n > 1
                        && overlaps
                        && arrival::is_long(call, &communicator.tuning);
                    let context = LaunchContext {
                        common: CommonArgs { call: state.launched, ..context.common },
                        symmetric,
                        announces: context.n > 1 && !waits,
                        ..context
                    };
                    let arrival = waits.then(|| (arrival::kernel(&context), call.reduce_op));
                    let sum = sum.and_then(|(sum, plan)| {
                        Some((context.prepare(&sum, plan)?, ReduceOp::Sum))
                    });
                    let last = context.prepare(call, plan).map(|launch| (launch, call.reduce_op));
                    let launches = || arrival.iter().chain(&sum).chain(&last);
                    let (kernels, device) = (&mut state.kernels, &communicator.device);
                    if launches().count() > 1 {
                        // Loading may wait for the kernels on the device, and the first one waits
                        // for peers.
                        for (launch, op) in launches() {
                            kernels.ready(device, launch, call.dtype, *op)?;
                        }
                    }
                    for (launch, op) in launches() {
                        kernels.launch(device, launch, call.dtype, *op, stream)?;
                    }
                    if long {
                        state.copies.mark_long(stream)?;
                    }
                }
                Ok(())
            },
        )
    }

    fn conditions(&self, zero_copy: bool) -> Conditions<'_> {
        let (me, n, cube_mesh) =
            (self.control.rank().index(), self.control.size(), self.edges.is_some());
        Conditions { me, n, layout: &self.layout, tuning: &self.tuning, cube_mesh, zero_copy }
    }

    /// Returns true if `span` is in this rank's symmetric memory and all peers have mapped it.
    fn reachable(&self, span: Span) -> bool {
        self.symmetric.as_ref().is_some_and(|heaps| heaps.reachable(span))
    }

    /// Returns the group's symmetric memory, if it has any, for kernels of `channel`.
    fn symmetric<'a>(
        &self,
        channel: Channel,
        reachable: &'a dyn Fn(Span) -> bool,
    ) -> Option<SymmetricView<'a>> {
        let least = u32::try_from(self.tuning.zero_copy_bytes).unwrap_or(u32::MAX);
        let count = (COUNTS * channel as usize) as u32;
        self.symmetric.as_ref().map(|heaps| SymmetricView {
            heap: per_rank(&heaps.bases),
            count,
            least,
            reachable,
        })
    }

    /// Returns true if this rank's launch `number`, which is `call`, is zero-copy; the same on all
    /// ranks.
    fn zero_copy(&self, call: &CallSpec<'_>, number: u64, timeout: Duration) -> Result<bool> {
        let Some(heaps) = &self.symmetric else { return Ok(false) };
        let worth = plan::worth_zero_copy(
            call,
            self.control.rank().index(),
            self.control.size(),
            &self.tuning,
        );
        // An all-to-all with only short messages does not start zero-copy calls.
        let long = worth && call.longest() >= self.tuning.zero_copy_bytes;
        let wanted = long
            && heaps.holds_any(call.inputs.iter().chain(&*call.outputs))
            && plan::choose(call, &self.conditions(false)).has_lanes();
        let agreed = zero_copy::decide(
            &zero_copy::ControlBlockWords { control: &self.control, number, timeout },
            self.control.rank().0,
            number,
            wanted,
        )?;
        Ok(agreed && worth)
    }

    fn context(&self, channel: Channel, timeout: Duration) -> LaunchContext<'_> {
        let me = self.control.rank().index();
        let peer = self.peer[channel as usize];
        let timeout = u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX);
        let common = CommonArgs {
            peer,
            stop: self.stop.device(),
            report: self.report.device(),
            timeout,
            call: 0,
        };
        let edges = self.edges.as_ref().map(|edges| launch::CubeMeshView {
            mesh: &edges.mesh,
            peer: edges.reach(me, channel, &peer),
        });
        LaunchContext {
            me,
            n: self.control.size(),
            layout: &self.layout,
            edges,
            threads: self.tuning.threads as u32,
            ctas: self.tuning.ctas,
            common,
            symmetric: None,
            announces: false,
        }
    }

    fn enqueue(
        &self,
        target: CudaTarget,
        timeout: Duration,
        queues: &[StreamQueue],
        body: impl FnOnce(
            &Self,
            &mut CommunicatorState,
            Stream,
            Channel,
            LaunchContext<'_>,
        ) -> Result<()>,
    ) -> Result<()> {
        let stream = Stream(target.stream);
        let entered = self.device.enter()?;
        let mut state = lock(&self.state);
        // Checked under the lock: `release_dead` takes the lock after the group has failed, and
        // then finds everything that was enqueued.
        if let Some(error) = self.failure() {
            return Err(error);
        }
        if state.closed {
            return Err(self.control.destroyed());
        }
        state.copies.unpin()?;
        let capture = stream.capture()?;
        state.recorded |= capture.is_some();
        let channel = Channel::of(capture.is_some(), queues != [StreamQueue::Collectives]);
        // Calls of one queue run one after another on the device, whichever streams they use.
        for &queue in queues {
            let before = state.order.next(queue, stream, capture, Stream::capture)?;
            let behind = &state.behind[stream_order::slot(queue, capture)];
            if let Dependency::EventOf(last) = before {
                behind.record(last)?;
            }
            if before != Dependency::Nothing {
                stream.wait(behind)?;
            }
        }
        let mut outcome = body(self, &mut state, stream, channel, self.context(channel, timeout));
        if outcome.is_ok() && target.background {
            // The event is recorded now, not when a later call of this queue uses another stream.
            // By then this stream may also have calls of other queues, which wait for other ranks.
            for &queue in queues {
                outcome = outcome
                    .and_then(|()| state.behind[stream_order::slot(queue, capture)].record(stream));
                state.order.mark(queue, capture);
            }
        }
        drop(state);
        drop(entered);
        // Peers would wait for a kernel that never runs, so the group fails. A bad argument was
        // rejected before peers could see the call.
        outcome.map_err(|error| {
            if error.kind == ErrorKind::Value { error } else { self.control.fail(error) }
        })
    }

    /// Returns why the group has failed, on the host or in a kernel of this rank.
    pub fn failure(&self) -> Option<Error> {
        self.report.failure()
    }

    /// Waits up to `limit` until the enqueued kernels are done, then makes the remaining kernels
    /// end. Returns false if some have still not ended; the memory that they use must then be kept.
    /// Nothing can be enqueued afterwards.
    #[must_use = "memory that kernels use must not be given back"]
    pub fn drain(&self, limit: Duration) -> bool {
        lock(&self.state).closed = true;
        let Ok(_entered) = self.device.enter() else { return false };
        let events = lock(&self.state).ends();
        if !pass(&events, limit) {
            let text = format!(
                "{} left group \"{}\" with CUDA work under way",
                self.control.describe(self.control.rank()),
                self.control.name()
            );
            self.control.fail(Error::aborted(text));
            return pass(&events, KERNEL_ABORT_TIMEOUT);
        }
        true
    }

    /// Unmaps the GPU memory of `rank` after the group has failed because `rank` exited: the driver
    /// keeps that memory until all peers have unmapped it. Memory that kernels may still use stays
    /// mapped: the memory of a group with recorded calls, and memory that windows map.
    pub fn release_dead(&self, rank: Rank) {
        let Ok(_entered) = self.device.enter() else { return };
        let events = {
            let state = lock(&self.state);
            if state.closed
                || state.recorded
                || state.order.last().any(is_captured)
                || self.failure().is_none()
            {
                return;
            }
            state.ends()
        };
        if !pass(&events, KERNEL_ABORT_TIMEOUT) {
            return;
        }
        lock(&self.state).copies.unpin_all();
        self.memory.release_dead(rank);
        if let Some((memory, _)) = self.edges.as_ref().and_then(|edges| edges.apart.as_ref()) {
            memory.release_dead(rank);
        }
        if let Some(heaps) = &self.symmetric {
            heaps.release_dead(rank);
        }
        log::info!(
            "group \"{}\": released the GPU memory of {}",
            self.control.name(),
            self.control.describe(rank)
        );
    }

    /// Frees everything. Called after `drain`.
    pub fn release(self) {
        let Self { device, state, report, stop, symmetric, memory, _stream: stream, .. } = self;
        // A thread that leaves a group may have no current context, and without a current context
        // the driver would not free the memory.
        let entered = device.enter();
        report.retire();
        drop((state, stop, symmetric, memory, stream));
        drop(entered);
    }
}

impl CommunicatorState {
    /// Returns events that complete when the enqueued work is done.
    fn ends(&self) -> Vec<Event> {
        // A stream under capture does not run the group's kernels.
        let runs = |last: &&LastLaunch| last.capture.is_none() && !is_captured(last);
        let mark = |last: &LastLaunch| {
            Event::new().and_then(|event| event.record(last.stream).map(|()| event)).ok()
        };
        self.order.last().filter(runs).filter_map(mark).collect()
    }
}

/// Returns true if a graph now records the stream of `last`. Recording an event in that stream
/// would add to the caller's graph.
fn is_captured(last: &LastLaunch) -> bool {
    last.stream.capture().ok().flatten().is_some()
}

fn per_rank(addresses: &[u64]) -> PerRank {
    std::array::from_fn(|rank| addresses.get(rank).copied().unwrap_or(0))
}
