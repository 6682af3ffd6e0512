//! The steps that a call enqueues, in the order in which the host enqueues them.
//!
//! On a GPU a call has two streams, the caller's and one that copies from peers; marks order them.
//! On the host the steps run in the order of the list. Both streams join at the end of a call; this
//! is not one of the steps, because a failed call ends as well.

use super::{GatherPlan, ShardBatch};
use std::ops::Range;

/// A stream of a call.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallStream {
    /// The stream on which the operator was called.
    Caller = 0,
    /// The stream that copies from peers.
    Copying = 1,
}

impl CallStream {
    /// Both streams, in the order of their codes.
    pub const ALL: [Self; 2] = [Caller, Copying];
}

/// A channel of the workspace's signal pads. Each word is set and cleared within one call.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PadChannel {
    /// All ranks have entered the call.
    Entry = 0,
    /// All ranks' shards are in the workspace.
    Ready = 1,
    /// The sender's workspace holds a finished part for the receiver of the signal.
    Part = 2,
    /// All ranks have finished their reads.
    Exit = 3,
}

impl PadChannel {
    /// Every channel, in the order of their codes.
    pub const ALL: [Self; 4] = [Self::Entry, Self::Ready, Self::Part, Self::Exit];
}

/// A step of a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StreamStep {
    /// Marks the current end of the stream. Marks are numbered from 0 in each call.
    Mark(CallStream, usize),
    /// Work enqueued on the stream from now on starts after the mark.
    After(CallStream, usize),
    /// Waits until all ranks have reached this point.
    Barrier(CallStream, PadChannel),
    /// Signals the rank that its part is ready. This is on the caller's stream: on another stream,
    /// the signal's kernel would compete with the next product for processors and perhaps wait
    /// until that product ends.
    Signal(usize),
    /// Waits, on the copying stream, until the rank has signalled that its part is ready.
    Wait(usize),
    /// Copies this rank's shard to where peers read it, on the copying stream.
    Share,
    /// Copies the needed bytes of the rank's piece, on the copying stream.
    Fetch(usize),
    /// Copies this rank's rows to the gathered matrix.
    OwnRows(CallStream),
    /// Multiplies the rows of these ranks, on the caller's stream.
    Multiply(Range<usize>),
    /// Sums all ranks' parts on the caller's stream; parts that were not fetched are read from
    /// their rank's memory.
    Sum,
}

impl StreamStep {
    /// The stream on which the step is enqueued.
    pub fn stream(&self) -> CallStream {
        match self {
            &(Mark(stream, _) | After(stream, _) | Barrier(stream, _) | OwnRows(stream)) => stream,
            Wait(_) | Share | Fetch(_) => Copying,
            Signal(_) | Multiply(_) | Sum => Caller,
        }
    }
}

use CallStream::{Caller, Copying};
use StreamStep::{After, Barrier, Fetch, Mark, Multiply, OwnRows, Share, Signal, Sum, Wait};

/// A list of steps, with the number of marks in it.
#[derive(Default)]
struct StreamSteps {
    list: Vec<StreamStep>,
    marks: usize,
}

impl StreamSteps {
    fn add(&mut self, step: StreamStep) {
        self.list.push(step);
    }

    fn mark(&mut self, stream: CallStream) -> usize {
        let number = self.marks;
        self.add(Mark(stream, number));
        self.marks += 1;
        number
    }

    /// Orders everything that `then` gets from now on after everything that `first` holds.
    fn join(&mut self, then: CallStream, first: CallStream) {
        let mark = self.mark(first);
        self.add(After(then, mark));
    }
}

/// Returns the steps of an all-gather and its products by `plan`, for `rank` of `n`. `entry` is the
/// field of the call's [`WorkspaceSlot`](super::workspace::WorkspaceSlot); `own_rows` is true if
/// the caller wants the whole gathered matrix.
pub fn gather(
    n: usize,
    rank: usize,
    plan: &GatherPlan,
    entry: bool,
    own_rows: bool,
) -> Vec<StreamStep> {
    let mut steps = StreamSteps::default();
    // step 1: share this rank's shard and wait for all others
    steps.join(Copying, Caller);
    if entry {
        steps.add(Barrier(Copying, PadChannel::Entry));
    }
    steps.add(Share);
    steps.add(Barrier(Copying, PadChannel::Ready));
    // A product that fills the device would keep the barrier's kernel from running.
    steps.join(Caller, Copying);
    // step 2: multiply. The copies run one group ahead, so that the host enqueues them before the
    // link is idle.
    let mut fetched = 0;
    let mut fetch = |steps: &mut StreamSteps, group: &[ShardBatch]| {
        for shard in fetched..group[0].arrived {
            steps.add(Fetch((rank + shard + 1) % n));
        }
        fetched = group[0].arrived;
        steps.mark(Copying)
    };
    let groups: Vec<&[ShardBatch]> =
        plan.products.chunk_by(|a, b| a.arrived == b.arrived).collect();
    let mut arrived = groups.first().map(|group| fetch(&mut steps, group));
    steps.add(Multiply(rank..rank + 1));
    if own_rows && plan.own_early {
        steps.add(OwnRows(Caller));
    }
    for (at, group) in groups.iter().enumerate() {
        if let Some(mark) = arrived {
            steps.add(After(Caller, mark));
        }
        arrived = groups.get(at + 1).map(|next| fetch(&mut steps, next));
        for product in *group {
            steps.add(Multiply(product.ranks.clone()));
        }
    }
    if own_rows && !plan.own_early {
        steps.add(OwnRows(Copying));
    }
    steps.list
}

/// Returns the steps of a product whose rows are summed over all `n` ranks, for `rank`, which
/// copies the first `pulled` parts from peers while products run. A rank's piece of its workspace
/// holds its parts for all ranks.
pub fn scatter(n: usize, rank: usize, pulled: usize, entry: bool) -> Vec<StreamStep> {
    let mut steps = StreamSteps::default();
    // The target of the copies may have been in use on the caller's stream until now.
    steps.join(Copying, Caller);
    if entry {
        steps.add(Barrier(Caller, PadChannel::Entry));
    }
    // Compute the next rank's part first and this rank's own part last: in each step every rank
    // computes for a different rank.
    for step in 1..n {
        let (to, from) = ((rank + step) % n, (rank + n - step) % n);
        steps.add(Multiply(to..to + 1));
        steps.add(Signal(to));
        steps.add(Wait(from));
        if step <= pulled {
            steps.add(Fetch(from));
        }
    }
    steps.add(Multiply(rank..rank + 1));
    steps.join(Caller, Copying);
    steps.add(Sum);
    steps.list
}

/// Adds the end of a call on the host: a barrier. A rank may destroy its group, and with it the
/// workspace, right after the call, and a peer that still reads there would find zeros. The barrier
/// costs little compared with a product. On GPUs mapped memory stays mapped.
pub fn ended_on_host(mut steps: Vec<StreamStep>) -> Vec<StreamStep> {
    steps.push(Barrier(Caller, PadChannel::Exit));
    steps
}
