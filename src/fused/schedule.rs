//! What a call enqueues, step by step, in the order of the host.
//!
//! A GPU has two streams for it, the caller's and one that copies from peers; a mark and what waits for it order them. On the host all is
//! done in the order in which it stands here. Both streams join at a call's end, which is not among the steps since a failed call ends, too.

use super::{Gather, Shards};
use std::ops::Range;

/// A stream of a call.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stream {
    /// The one on which the operator was called.
    Caller = 0,
    /// One beside it.
    Copying = 1,
}

impl Stream {
    /// Both, in the order of their codes.
    pub const ALL: [Self; 2] = [Caller, Copying];
}

/// Channel of the workspace's signal pads. Each word is set and cleared again within a call.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Channel {
    /// All ranks have come to the call.
    Entry = 0,
    /// All ranks' shards lie in the workspace.
    Ready = 1,
    /// A part lies in the workspace for the rank that is told.
    Part = 2,
    /// All ranks have read what they wanted.
    Exit = 3,
}

impl Channel {
    /// Every channel, in the order of their codes.
    pub const ALL: [Self; 4] = [Self::Entry, Self::Ready, Self::Part, Self::Exit];
}

/// A step of a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Marks what the stream holds by now. Marks are numbered from 0 in each call.
    Mark(Stream, usize),
    /// What is put into the stream from now on begins after the mark.
    After(Stream, usize),
    /// Goes on once all ranks have come so far.
    Barrier(Stream, Channel),
    /// Tells the rank that its part is there. On the caller's stream: beside the next product it would wait for room, perhaps until that
    /// product's end.
    Signal(usize),
    /// Goes on, on the copying stream, once the rank has told that its part is there.
    Wait(usize),
    /// Puts the own shard where peers read it, on the copying stream.
    Share,
    /// Copies what is wanted of the rank's piece, on the copying stream.
    Fetch(usize),
    /// Copies the own rows to the others.
    OwnRows(Stream),
    /// Multiplies the rows of these ranks, on the caller's stream.
    Multiply(Range<usize>),
    /// Adds up all ranks' parts, those that were not fetched from where they lie, on the caller's stream.
    Sum,
}

impl Step {
    /// The stream that it is put into.
    pub fn stream(&self) -> Stream {
        match self {
            &(Mark(stream, _) | After(stream, _) | Barrier(stream, _) | OwnRows(stream)) => stream,
            Wait(_) | Share | Fetch(_) => Copying,
            Signal(_) | Multiply(_) | Sum => Caller,
        }
    }
}

use Step::{After, Barrier, Fetch, Mark, Multiply, OwnRows, Share, Signal, Sum, Wait};
use Stream::{Caller, Copying};

/// Steps, with the number of marks among them.
#[derive(Default)]
struct Steps {
    list: Vec<Step>,
    marks: usize,
}

impl Steps {
    fn add(&mut self, step: Step) {
        self.list.push(step);
    }

    fn mark(&mut self, stream: Stream) -> usize {
        let number = self.marks;
        self.add(Mark(stream, number));
        self.marks += 1;
        number
    }

    /// Makes what `then` is given from now on begin after what `first` holds.
    fn join(&mut self, then: Stream, first: Stream) {
        let mark = self.mark(first);
        self.add(After(then, mark));
    }
}

/// An all-gather and the products of its shards by `plan`, for `rank` of `n`, of which each has its shard in the workspace. `entry`: of the
/// [turn](super::workspace::Turn); `own_rows`: the gathered matrix is wanted as a whole.
pub fn gather(n: usize, rank: usize, plan: &Gather, entry: bool, own_rows: bool) -> Vec<Step> {
    let mut steps = Steps::default();
    // step 1: the own shard, and all ranks'.
    steps.join(Copying, Caller);
    if entry {
        steps.add(Barrier(Copying, Channel::Entry));
    }
    steps.add(Share);
    steps.add(Barrier(Copying, Channel::Ready));
    // A product that fills the device would keep the barrier's kernel from running.
    steps.join(Caller, Copying);
    // step 2: products. Copies go ahead of them by one group, so that the host enqueues them before the link has nothing to do.
    let mut fetched = 0;
    let mut fetch = |steps: &mut Steps, group: &[Shards]| {
        for shard in fetched..group[0].arrived {
            steps.add(Fetch((rank + shard + 1) % n));
        }
        fetched = group[0].arrived;
        steps.mark(Copying)
    };
    let groups: Vec<&[Shards]> = plan.products.chunk_by(|a, b| a.arrived == b.arrived).collect();
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

/// A product whose rows are added up over all `n` ranks, for `rank`, which copies the first `pulled` parts from peers while products run.
/// A piece of the workspace holds a rank's part for each rank.
pub fn scatter(n: usize, rank: usize, pulled: usize, entry: bool) -> Vec<Step> {
    let mut steps = Steps::default();
    // What is copied to may have been in use on the caller's stream until now.
    steps.join(Copying, Caller);
    if entry {
        steps.add(Barrier(Caller, Channel::Entry));
    }
    // The part of the next rank first, the own one last: at each step every rank computes for another one, and receives from another one.
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

/// Ends the steps of a call on the host. It costs nothing beside a product, and a rank may end its group, and with it the workspace, right
/// after the call: what a peer still read there would be zeros. On GPUs what is mapped stays as it was.
pub fn ended_on_host(mut steps: Vec<Step>) -> Vec<Step> {
    steps.push(Barrier(Caller, Channel::Exit));
    steps
}
