//! Long collectives whose bytes copy engines move, so that the processors stay free for
//! computation. Pure.
//!
//! Kernels only synchronize (one warp) and add what has arrived. Only the synchronizing kernels
//! wait, each on one processor. A call has one of two modes (`docs/design/copy-engine.md`):
//! - staged: each rank's copy engine pushes chunks to slots in the peers' workspaces, where a
//!   kernel adds them, or a copy takes them to the output. Tensors may be in any memory.
//! - direct: each rank pulls the messages of the others from their tensors. A rank that launches a
//!   call earlier than another does not know the other rank's tensors: it pulls from where it
//!   expects them. If they are elsewhere, the later rank, which knows both, pushes its message.

pub mod message;

use super::arguments::{ArgBytes, CopyPushArgs, CopySumArgs, CopySyncArgs, PerRank};
use super::kernel_spec::{COPY_PUSH, COPY_SUM, COPY_SYNC, KernelSpec};
use super::launch::{Launch, LaunchContext, THREADS};
use super::tuning::CudaThresholds;
use super::workspace::layout::{COPY_SLOTS, MAX_RANKS, UNIT};
use crate::coll::call::{CallSpec, Collective, Span};
use crate::dtype::ReduceOp;
use crate::kernels::cuda::driver::Grid;

/// Number of threads of a kernel that synchronizes: one for each rank.
const SYNC_THREADS: u32 = 32;
/// Minimum number of chunks of a long message. The receiver adds the first chunk, or copies it to
/// its place, while the second one moves. Each further chunk needs more kernels that synchronize,
/// and they may have to wait for a processor.
const CHUNKS: usize = 2;

/// A task of a call; a rank enqueues the tasks in order.
#[derive(Clone, Copy, Debug)]
#[expect(clippy::large_enum_variant, reason = "a call has a few dozen tasks for a short time")]
pub enum Task {
    /// A kernel, on the call's stream or, if `side` is true, on the stream of the copies.
    Kernel {
        /// True for the stream of the copies.
        side: bool,
        /// The kernel.
        launch: Launch,
    },
    /// A copy.
    Copy {
        /// True for the stream of the copies.
        side: bool,
        /// Destination.
        to: u64,
        /// Source.
        from: u64,
        /// Length in bytes.
        bytes: usize,
    },
    /// The stream of the copies waits for the call's stream.
    Fork,
    /// The call's stream waits for the stream of the copies.
    Join,
}

/// The messages that this rank moves between itself and another rank in a direct call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DirectPeer {
    /// The other rank.
    pub rank: usize,
    /// The address from which this rank pulls the other rank's message; `None` if it does not.
    pub pull: Option<u64>,
    /// The start of the other rank's output, if this rank pushes its own message there.
    pub push: Option<u64>,
    /// True if the other rank first pulls wrong bytes to where this rank pushes its message.
    pub repairs: bool,
}

/// Messages that every rank sends to every other, and where the messages to this rank go.
struct Exchange<'a> {
    /// The message for each rank.
    send: [Span; MAX_RANKS],
    /// Destination of the message from each rank, including the message that this rank sends to
    /// itself.
    receive: Receive<'a>,
    /// Length of the longest message of any rank.
    longest: usize,
}

enum Receive<'a> {
    /// Each rank's message goes to its own place.
    Take(&'a [Span]),
    /// The sum of all messages, and of `own`, goes to `to`.
    Sum { own: Span, to: Span },
}

/// Returns true if copy engines can move `call` of a rank of `n`.
pub fn serves(call: &CallSpec, n: usize) -> bool {
    // A sender would have to multiply each message by its factor.
    let sums = call.reduce_op != ReduceOp::PremulSum;
    n > 1
        && match call.op {
            Collective::AllGather => true,
            Collective::AllReduce | Collective::ReduceScatter => sums,
            // Among more ranks, only the root would send, and no rank knows all lengths of an
            // all-to-all.
            Collective::Broadcast | Collective::AllToAll => n == 2,
            Collective::Barrier | Collective::Reduce | Collective::Gather | Collective::Scatter => {
                false
            }
            Collective::AllReduceAddRmsNorm => false,
        }
}

/// Returns true if the bytes of a call of `op` among `n` ranks may go from tensor to tensor.
pub fn may_be_direct(op: Collective, n: usize) -> bool {
    // The output of a reduce-scatter has room for one message.
    matches!(op, Collective::AllGather | Collective::AllReduce)
        || (op == Collective::ReduceScatter && n == 2)
}

/// Returns the number of bytes that decides whether `call` of rank `me` of `n` is long; the same on
/// all ranks.
pub fn volume(call: &CallSpec, me: usize, n: usize) -> usize {
    // Two ranks know both messages of an all-to-all, whose lengths may differ.
    let pair = (call.op == Collective::AllToAll && n == 2)
        .then(|| 2 * call.inputs[1 - me].bytes.max(call.outputs[1 - me].bytes));
    pair.unwrap_or(call.agreed_bytes() as usize)
}

/// Returns the messages of a direct call as one span, if all have one length and are consecutive:
/// the output of a gather or the input of a reduce-scatter. The second pass of an all-reduce is
/// such a gather.
pub fn consecutive(call: &CallSpec) -> Option<Span> {
    if call.op == Collective::AllReduce {
        return call.outputs.first().copied();
    }
    let scatters = call.op == Collective::ReduceScatter;
    let messages = if scatters { &call.inputs } else { &call.outputs };
    let first = messages.first()?;
    let follows = |(rank, span): (usize, &Span)| {
        span.bytes == first.bytes && span.addr == first.addr + rank * first.bytes
    };
    messages
        .iter()
        .enumerate()
        .all(follows)
        .then_some(Span { addr: first.addr, bytes: messages.len() * first.bytes })
}

/// Returns true if the output of a reduce-scatter has room for the message of the other rank,
/// because it shares no byte with an input.
pub fn has_room(call: &CallSpec) -> bool {
    !call.inputs.iter().any(|input| input.overlaps(call.outputs[0]))
}

/// Returns the part of `whole` that `rank` of `n` adds in an all-reduce.
pub fn piece(whole: Span, rank: usize, n: usize) -> Span {
    let length = whole.bytes.div_ceil(n * UNIT) * UNIT;
    let start = (rank * length).min(whole.bytes);
    Span { addr: whole.addr + start, bytes: length.min(whole.bytes - start) }
}

/// The tasks of a call of one rank.
#[derive(Debug)]
pub struct CopyTasks<'a> {
    context: &'a LaunchContext<'a>,
    tuning: &'a CudaThresholds,
    tasks: Vec<Task>,
}

impl<'a> CopyTasks<'a> {
    /// Makes an empty list of tasks.
    pub fn new(context: &'a LaunchContext<'a>, tuning: &'a CudaThresholds) -> Self {
        Self { context, tuning, tasks: Vec::new() }
    }

    /// Returns the tasks of `call`. It is direct if `direct` lists its peers, and staged if
    /// `direct` is `None`.
    pub fn of(mut self, call: &CallSpec, direct: Option<&[DirectPeer]>) -> Vec<Task> {
        let (me, n) = (self.context.me, self.context.n);
        match call.op {
            Collective::AllGather => self.gather(call.inputs[0], &call.outputs, direct),
            Collective::ReduceScatter => match direct {
                Some(peers) => self.direct_sum(call, peers),
                None => {
                    let longest = call.inputs.iter().map(|input| input.bytes).max().unwrap_or(0);
                    let receive = Receive::Sum { own: call.inputs[me], to: call.outputs[0] };
                    self.exchange(&Exchange { send: per_rank(&call.inputs), receive, longest });
                }
            },
            Collective::AllReduce => {
                let (input, output) = (call.inputs[0], call.outputs[0]);
                let send: Vec<Span> = (0..n).map(|rank| piece(input, rank, n)).collect();
                let pieces: Vec<Span> = (0..n).map(|rank| piece(output, rank, n)).collect();
                let receive = Receive::Sum { own: send[me], to: pieces[me] };
                self.exchange(&Exchange { send: per_rank(&send), receive, longest: send[0].bytes });
                self.gather(pieces[me], &pieces, direct);
            }
            Collective::Broadcast | Collective::AllToAll => {
                let other = 1 - me;
                let mut send = [Span { addr: 0, bytes: 0 }; MAX_RANKS];
                let mut take = [Span { addr: 0, bytes: 0 }; 2];
                if call.op == Collective::AllToAll {
                    send[other] = call.inputs[other];
                    take[other] = call.outputs[other];
                    self.keep(call.inputs[me], call.outputs[me]);
                } else if let Some(&input) = call.inputs.first() {
                    send[other] = input;
                } else {
                    take[other] = call.outputs[0];
                }
                let longest = send[other].bytes.max(take[other].bytes);
                self.exchange(&Exchange { send, receive: Receive::Take(&take), longest });
            }
            Collective::Barrier
            | Collective::Reduce
            | Collective::Gather
            | Collective::Scatter
            | Collective::AllReduceAddRmsNorm => {
                unreachable!("`serves` excludes them")
            }
        }
        self.tasks
    }

    fn gather(&mut self, own: Span, outputs: &[Span], direct: Option<&[DirectPeer]>) {
        let me = self.context.me;
        self.keep(own, outputs[me]);
        if let Some(peers) = direct {
            // The outputs of each other rank are consecutive; the outputs of this rank need not be.
            let offset = outputs[..me].iter().map(|output| output.bytes as u64).sum();
            let own = Span { bytes: outputs[me].bytes, ..own };
            return self.direct(
                |_| own,
                offset,
                peers,
                |tasks, rank, from| {
                    let to = outputs[rank];
                    tasks.copy(false, to.addr as u64, from, to.bytes);
                },
            );
        }
        let mut send = [own; MAX_RANKS];
        send[me].bytes = 0;
        let longest = outputs.iter().map(|output| output.bytes).max().unwrap_or(0);
        self.exchange(&Exchange { send, receive: Receive::Take(outputs), longest });
    }

    /// Copies the message that this rank sends to itself.
    fn keep(&mut self, from: Span, to: Span) {
        if from.addr != to.addr {
            self.copy(false, to.addr as u64, from.addr as u64, from.bytes.min(to.bytes));
        }
    }

    /// Adds the tasks of a reduce-scatter of two ranks from tensor to tensor. The output takes the
    /// other rank's message, to which this rank then adds its own. An output without room for it
    /// gets the sum at once, by a kernel that reads the other rank's tensor; only a rank that
    /// launches after the other one has such an output.
    fn direct_sum(&mut self, call: &CallSpec, peers: &[DirectPeer]) {
        let me = self.context.me;
        let (own, to, room) = (call.inputs[me], call.outputs[0], has_room(call));
        let sum = |tasks: &mut Self, theirs: u64| {
            let mut from = [0; MAX_RANKS];
            (from[me], from[1 - me]) = (own.addr as u64, theirs);
            tasks.sum(from, to);
        };
        self.direct(
            |rank| call.inputs[rank],
            0,
            peers,
            |tasks, _, from| {
                if room {
                    tasks.copy(false, to.addr as u64, from, to.bytes)
                } else {
                    sum(tasks, from)
                }
            },
        );
        if room {
            sum(self, to.addr as u64);
        }
    }

    /// Adds the tasks of a call from tensor to tensor. `send` is the message for a rank; it starts
    /// at `offset` in that rank's output. `pull` adds the task that takes the message of a rank
    /// from an address. All copies are on the call's stream, since a second stream gains nothing:
    /// a GPU makes all its copies from and to a peer with one engine if the peer's memory is mapped
    /// as symmetric memory is (`cuMemMap`).
    fn direct(
        &mut self,
        send: impl Fn(usize) -> Span,
        offset: u64,
        peers: &[DirectPeer],
        pull: impl Fn(&mut Self, usize, u64),
    ) {
        let push = |tasks: &mut Self, repairs: bool| {
            for peer in peers.iter().filter(|peer| peer.repairs == repairs) {
                if let Some(output) = peer.push {
                    let message = send(peer.rank);
                    tasks.push(output + offset, message.addr as u64, message.bytes);
                }
            }
        };
        // All inputs are ready and all outputs may be written once every rank has arrived.
        self.sync(false, CopySyncArgs { post_arrived: 1, wait_arrived: 1, ..Default::default() });
        for peer in peers {
            if let Some(from) = peer.pull {
                pull(self, peer.rank, from);
            }
        }
        push(self, false);
        if peers.iter().any(|peer| peer.repairs) {
            // Every rank posts credit 1 or 2 after its pulls, before it waits, so this wait ends.
            self.sync(false, CopySyncArgs { post_credit: 1, wait_credit: 1, ..Default::default() });
            push(self, true);
        }
        self.sync(
            false,
            CopySyncArgs { post_credit: 2, wait_credit: 2, advance: 2, ..Default::default() },
        );
    }

    /// Moves all messages of `exchange` through slots.
    fn exchange(&mut self, exchange: &Exchange<'_>) {
        let LaunchContext { me, n, layout, common, .. } = *self.context;
        let peers = (1..n).map(|k| (me + k) % n);
        let chunk = self.chunk_of(exchange.longest);
        let steps = exchange.longest.div_ceil(chunk);
        let part = |message: Span, step: usize| {
            let start = (step * chunk).min(message.bytes);
            Span { addr: message.addr + start, bytes: chunk.min(message.bytes - start) }
        };
        let slot = |step: usize, from: usize, to: usize| {
            common.peer[to] + layout.copy_slot(step, from, to) as u64
        };
        let word = |step: usize| step as u32;
        // Step s (from 1) may be sent once its slot, which step s - COPY_SLOTS used, has been read.
        self.sync(false, CopySyncArgs { post_credit: word(COPY_SLOTS), ..Default::default() });
        self.tasks.push(Task::Fork);
        self.sync(true, CopySyncArgs { wait_credit: 1, ..Default::default() });
        for step in 0..steps {
            for peer in peers.clone() {
                let from = part(exchange.send[peer], step);
                self.copy(true, slot(step, me, peer), from.addr as u64, from.bytes);
            }
            let next = if step + 1 < steps { word(step + 2) } else { 0 };
            self.sync(
                true,
                CopySyncArgs {
                    post_arrived: word(step + 1),
                    wait_credit: next,
                    ..Default::default()
                },
            );
            // The slots of the previous step have been read.
            let credit = if step > 0 { word(step + COPY_SLOTS) } else { 0 };
            self.sync(
                false,
                CopySyncArgs {
                    post_credit: credit,
                    wait_arrived: word(step + 1),
                    ..Default::default()
                },
            );
            match &exchange.receive {
                Receive::Take(to) => {
                    for peer in peers.clone().filter(|&peer| peer < to.len()) {
                        let to = part(to[peer], step);
                        self.copy(false, to.addr as u64, slot(step, peer, me), to.bytes);
                    }
                }
                Receive::Sum { own, to } => {
                    let mut from = [0; MAX_RANKS];
                    peers.clone().for_each(|peer| from[peer] = slot(step, peer, me));
                    from[me] = part(*own, step).addr as u64;
                    self.sum(from, part(*to, step));
                }
            }
        }
        self.tasks.push(Task::Join);
        // The call ends when all that this rank has sent has been read: a later kernel may then use
        // the slots.
        let last = word(steps + COPY_SLOTS);
        self.sync(
            false,
            CopySyncArgs {
                post_credit: last,
                wait_credit: last,
                advance: last,
                ..Default::default()
            },
        );
    }

    /// Returns the size of a chunk of messages of up to `longest` bytes.
    fn chunk_of(&self, longest: usize) -> usize {
        let slot = self.context.layout.copy_slot_bytes();
        longest.div_ceil(CHUNKS).max(self.tuning.copy_chunk_bytes).next_multiple_of(UNIT).min(slot)
    }

    fn copy(&mut self, side: bool, to: u64, from: u64, bytes: usize) {
        if bytes > 0 {
            self.tasks.push(Task::Copy { side, to, from, bytes });
        }
    }

    fn sync(&mut self, side: bool, args: CopySyncArgs) {
        let words = self.context.layout.copy_words() as u64;
        self.tasks.push(Task::Kernel {
            side,
            launch: sync(self.context, CopySyncArgs { words, ..args }),
        });
    }

    fn sum(&mut self, from: PerRank, to: Span) {
        if to.bytes == 0 {
            return;
        }
        let common = self.context.common;
        let args = CopySumArgs { common, from, to: to.addr as u64, bytes: to.bytes as u64 };
        self.wide(&COPY_SUM, to.bytes, ArgBytes::of(&args));
    }

    /// Adds a kernel that copies a message to a peer's tensor unless the call has timed out.
    fn push(&mut self, to: u64, from: u64, bytes: usize) {
        if bytes > 0 {
            let args = CopyPushArgs { common: self.context.common, from, to, bytes: bytes as u64 };
            self.wide(&COPY_PUSH, bytes, ArgBytes::of(&args));
        }
    }

    /// Adds a kernel on the call's stream that has a thread for each unit of `bytes`, up to the
    /// maximum number of blocks.
    fn wide(&mut self, kernel: &'static KernelSpec, bytes: usize, args: ArgBytes) {
        let most = self.tuning.lanes.min(self.tuning.ctas);
        let blocks = bytes.div_ceil(UNIT * THREADS as usize).min(most) as u32;
        let grid = Grid::new(blocks, THREADS);
        let launch = Launch { kernel, grid, zero_copy: false, args };
        self.tasks.push(Task::Kernel { side: false, launch });
    }
}

/// Returns the kernel that synchronizes with the peers as `args` says.
pub(super) fn sync(context: &LaunchContext<'_>, args: CopySyncArgs) -> Launch {
    let args = CopySyncArgs { common: context.common, ..args };
    let grid = Grid::new(1, SYNC_THREADS);
    Launch { kernel: &COPY_SYNC, grid, zero_copy: false, args: ArgBytes::of(&args) }
}

fn per_rank(spans: &[Span]) -> [Span; MAX_RANKS] {
    std::array::from_fn(|rank| spans.get(rank).copied().unwrap_or(Span { addr: 0, bytes: 0 }))
}
