//! Sends and receives: how each message moves, and the enqueueing of its tasks.

use super::batch::{IndexedSpan, first_of_each, take_own};
use super::copies::served_as;
use super::{Communicator, CommunicatorState, CudaTarget, StreamQueue};
use crate::coll::call::Span;
use crate::coll::cuda::agreement::copy_mode::CopyMode;
use crate::coll::cuda::agreement::launch_log::{self, MessageLaunch};
use crate::coll::cuda::agreement::message_mode::{self, MessageMode};
use crate::coll::cuda::copy_engine::message::{self, MessageEnd, MessageMover};
use crate::coll::cuda::copy_engine::{CopyTasks, Task};
use crate::coll::cuda::kernel_spec::{COPY_PUSH, MESSAGE_SYNC, TRANSFERS};
use crate::coll::cuda::launch::LaunchContext;
use crate::coll::cuda::plan::{self, CudaPlan};
use crate::coll::cuda::workspace::layout::Channel;
use crate::coll::cuda::{arrival, stats};
use crate::dtype::{DType, ReduceOp};
use crate::error::{Error, Result};
use crate::kernels::cuda::driver::Stream;
use crate::rank::Rank;
use crate::symm_mem::SegmentPin;
use std::time::Duration;

/// One end of a message on this rank.
struct Message {
    end: MessageEnd,
    /// `None` if a kernel moves the message.
    mover: Option<MessageMover>,
    /// Keeps the other end's tensor mapped until the message has moved.
    pin: Option<SegmentPin>,
}

/// The messages of one launch, at most one to and one from each rank.
struct Round {
    /// The tasks for each stream; the first entry is for the call's own.
    lists: Vec<Vec<Task>>,
    pins: Vec<SegmentPin>,
}

/// What all messages of a call have in common.
struct Setting<'a> {
    context: LaunchContext<'a>,
    plan: CudaPlan,
    channel: Channel,
    /// True if the call is meant to overlap with computation.
    overlaps: bool,
}

impl Communicator {
    /// Enqueues `sends` (the other rank, and the bytes to send) and `receives` (the other rank, and
    /// their destination); messages between the same two ranks keep their order.
    pub fn transfer(
        &self,
        sends: &[(Rank, Span)],
        receives: &[(Rank, Span)],
        target: CudaTarget,
        timeout: Duration,
    ) -> Result<()> {
        let by_index = |messages: &[(Rank, Span)]| -> Vec<_> {
            messages.iter().map(|&(rank, span)| (rank.index(), span)).collect()
        };
        let (mut sends, mut receives) = (by_index(sends), by_index(receives));
        let queues: &[StreamQueue] = match (sends.is_empty(), receives.is_empty()) {
            (false, true) => &[StreamQueue::Sends],
            (true, false) => &[StreamQueue::Receives],
            _ => &[StreamQueue::Sends, StreamQueue::Receives],
        };
        self.enqueue(target, timeout, queues, |communicator, state, stream, channel, context| {
            let recorded = channel == Channel::CapturedTransfers;
            let on = (stream, target.background);
            let reachable = |span| communicator.reachable(span);
            let symmetric = communicator.symmetric(channel, &reachable);
            let setting = Setting {
                context: LaunchContext { symmetric, ..context },
                plan: plan::transfers(&communicator.layout, &communicator.tuning),
                channel,
                overlaps: arrival::overlaps(on, recorded, &communicator.tuning),
            };
            for (from, to) in take_own(communicator.control.rank(), &mut sends, &mut receives)? {
                stream.copy(to.addr as u64, from.addr as u64, from.bytes)?;
            }
            let mut decided = |send: bool, spans: &[IndexedSpan]| -> Result<Vec<Message>> {
                let end = |&(peer, span): &IndexedSpan| MessageEnd { send, peer, span };
                spans.iter().map(end).map(|end| communicator.decide(state, &setting, end)).collect()
            };
            let mut messages = [decided(true, &sends)?, decided(false, &receives)?];
            let mut rounds = Vec::new();
            while messages.iter().any(|messages| !messages.is_empty()) {
                let first = |messages: &mut Vec<Message>| {
                    first_of_each(messages, |message| message.end.peer)
                };
                let first = messages.iter_mut().flat_map(first).collect();
                rounds.push(communicator.round(&setting, first)?);
            }
            // All kernels of a long message are loaded first: loading one may wait for the kernels
            // on the device, and those wait for peers. Which of them the message needs depends on
            // the other end.
            let tuning = &communicator.tuning;
            let least = tuning.arrival_bytes.min(tuning.overlapped_bytes);
            if sends.iter().chain(&receives).any(|(_, span)| span.bytes >= least) {
                for kernel in [&MESSAGE_SYNC, &COPY_PUSH, &TRANSFERS] {
                    state.kernels.load_untyped(&communicator.device, kernel)?;
                }
            }
            for round in rounds {
                // A call of both queues follows all earlier calls of either.
                communicator.enqueue_round(state, round, (queues[0], stream))?;
            }
            Ok(())
        })
    }

    /// Records one end of a message, compares it with the other end, and returns how it moves.
    fn decide(
        &self,
        state: &mut CommunicatorState,
        setting: &Setting<'_>,
        end: MessageEnd,
    ) -> Result<Message> {
        let number = &mut state.transfers[usize::from(end.send)][end.peer];
        *number += 1;
        let (peer, bytes) = (Rank(end.peer as u32), end.span.bytes);
        let launch = MessageLaunch {
            send: end.send,
            peer,
            number: *number,
            bytes: bytes as u64,
            channel: setting.channel,
        };
        // Both ends decide, or neither does; found before the message is published, because from
        // then on the other end may decide.
        let decides = self.memory.is_direct() && bytes >= self.tuning.overlapped_bytes;
        let symmetric = self.symmetric.as_ref().filter(|_| decides);
        let offset = symmetric
            .filter(|_| setting.overlaps && self.own_queues)
            .and_then(|heaps| heaps.offset(end.span));
        launch_log::compare_transfer(&self.control, launch)?;
        let Some(heaps) = symmetric else { return Ok(Message { end, mover: None, pin: None }) };
        let (mover, pin) = match message_mode::decide(&self.control, &launch, offset)? {
            MessageMode::Kernel => (None, None),
            MessageMode::First => (Some(MessageMover::Peer), None),
            MessageMode::Later(theirs) => {
                let (address, pin) = heaps.reach(peer, theirs, bytes).ok_or_else(|| {
                    let (them, me) =
                        (self.control.describe(peer), self.control.describe(self.control.rank()));
                    let call = if end.send { "recv" } else { "send" };
                    let text =
                        format!("{me} has not mapped the tensor that {them} passed to {call}");
                    Error::internal(text)
                })?;
                (Some(MessageMover::Here(address)), pin)
            }
        };
        if mover.is_some() {
            stats::count(None, served_as(CopyMode::Direct));
        }
        Ok(Message { end, mover, pin })
    }

    /// Returns the tasks of `messages`, at most one to and one from each rank. No message waits for
    /// another one: direct ones, and those that wait for the other end before their kernel starts,
    /// have a stream each.
    fn round(&self, setting: &Setting<'_>, messages: Vec<Message>) -> Result<Round> {
        let context = &setting.context;
        let (mut lists, mut pins) = (Vec::new(), Vec::new());
        let mut by_kernel: [Vec<IndexedSpan>; 2] = Default::default();
        for Message { end, mover, pin } in messages {
            match mover {
                Some(mover) => {
                    lists.push(CopyTasks::new(context, &self.tuning).message(end, mover));
                    pins.extend(pin);
                }
                None => by_kernel[usize::from(!end.send)].push((end.peer, end.span)),
            }
        }
        let long = |span: Span| span.bytes >= self.tuning.arrival_bytes;
        let CudaPlan::Exchange { lanes, .. } = setting.plan else {
            unreachable!("transfers are exchanges")
        };
        let unread = self.layout.unread_bytes(lanes as usize);
        // A message among several does not wait, because the others would wait with it.
        let waits = |send: bool| match by_kernel[usize::from(!send)][..] {
            [(peer, span)] if setting.overlaps && long(span) && !(send && span.bytes <= unread) => {
                Some(MessageEnd { send, peer, span })
            }
            _ => None,
        };
        let waiting = [waits(true), waits(false)];
        let announced = [0, 1].map(|way: usize| {
            let all = by_kernel[way].iter().filter(|(_, span)| long(*span));
            let ranks = all.map(|(peer, _)| 1 << peer).sum::<u32>();
            if waiting[way].is_some() { 0 } else { ranks }
        });
        let [sends, receives] = &by_kernel;
        let kernel = |sends: &[_], receives: &[_], announced| {
            stats::count(None, setting.plan.name());
            let launch = context.transfers(sends, receives, announced, setting.plan)?;
            Ok::<_, Error>(Task::Kernel { side: false, launch })
        };
        if waiting == [None, None] {
            if !sends.is_empty() || !receives.is_empty() {
                lists.insert(0, vec![kernel(sends, receives, announced)?]);
            }
        } else {
            for (way, end) in waiting.into_iter().enumerate() {
                if by_kernel[way].is_empty() {
                    continue;
                }
                let mut tasks = Vec::new();
                if let Some(end) = end {
                    let launch = message::arrival(context, end);
                    tasks.push(Task::Kernel { side: false, launch });
                }
                tasks.push(match way {
                    0 => kernel(sends, &[], [announced[0], 0])?,
                    _ => kernel(&[], receives, [0, announced[1]])?,
                });
                lists.push(tasks);
            }
        }
        Ok(Round { lists, pins })
    }

    fn enqueue_round(
        &self,
        state: &mut CommunicatorState,
        round: Round,
        (queue, stream): (StreamQueue, Stream),
    ) -> Result<()> {
        let (capture, sides) = (stream.capture()?, round.lists.len().saturating_sub(1));
        let mut streams = vec![stream];
        streams.extend(state.copies.sides(queue, sides, capture)?);
        state.copies.fork(&streams, capture.is_some())?;
        let mut enqueued = Ok(());
        // The first tasks of all messages, then the second ones: in a hardware queue that streams
        // share, a task that waits would hold up what another message posts.
        let mut lists: Vec<_> = round.lists.into_iter().map(Vec::into_iter).collect();
        while lists.iter().any(|tasks| tasks.len() > 0) {
            for (tasks, on) in lists.iter_mut().zip(&streams) {
                let next = tasks.next().into_iter().collect();
                enqueued = enqueued.and_then(|()| {
                    let of = (DType::U8, ReduceOp::Sum);
                    self.enqueue_tasks(state, of, next, [*on, *on], capture.is_some())
                });
            }
        }
        // Also after an error: the copies that are already enqueued run, and the release of the
        // workspace, which waits for the call's stream, must follow them.
        let joined = state.copies.join(&streams, capture.is_some());
        let kept = state.copies.keep(round.pins, stream, capture.is_some());
        enqueued.and(joined).and(kept)
    }
}
