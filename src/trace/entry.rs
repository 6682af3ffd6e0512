//! Entry that is kept of a call.

use crate::coll::call::{Op, Span, Spec};
use crate::coll::describe::Description;
use crate::dtype::{DType, ReduceOp};
use crate::error::{Kind, Result};
use crate::messages::{Message, MessageSpec};
use crate::rank::Rank;

/// Operation of the call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum What {
    Collective {
        op: Op,
        reduce_op: ReduceOp,
        root: Rank,
        description: Description,
        even: bool,
    },
    Send {
        peer: Option<Rank>,
        tag: i32,
    },
    /// `peer` is absent until a message came, where any rank's would do.
    Receive {
        peer: Option<Rank>,
        tag: i32,
    },
}

/// Target: where a call's tensors are, and what runs it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// Tensors in the host's memory.
    Host,
    /// Tensors on a GPU.
    Cuda {
        /// Index of the device in torch.
        device: i32,
        /// The driver's handle.
        stream: usize,
        /// The stream is the group's own, beside its caller's.
        background: bool,
    },
}

/// Phase of a collective on several hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// It runs collectives of the ranks of this host.
    Inside,
    /// It waits for what the other hosts send on the rail of this number.
    Rail(u16),
    /// It is enqueued on a GPU, behind others, and will use the rail of this number, if any.
    Enqueued(Option<u16>),
    /// The GPU has begun it: which step it has come to nobody tells the host.
    Running(Option<u16>),
}

/// State that a call has come to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// Queued behind others in its group's queue.
    Scheduled,
    /// Enqueued on CUDA. Nobody tells the host when it ends.
    Started,
    Completed,
    Failed(Kind),
}

/// Entry of one call of one rank. It has plain values: a slot of the ring is overwritten without freeing anything.
#[derive(Clone, Copy, Debug)]
pub(super) struct Entry {
    /// Number of the call, from 1, in the order in which the process made them.
    pub(super) number: u64,
    /// The group's number in this process.
    pub(super) group: u64,
    pub(super) what: What,
    pub(super) dtype: DType,
    pub(super) bytes_in: u64,
    pub(super) bytes_out: u64,
    /// Sequence number, as error messages print it: of collectives on the host and on CUDA each, from 1; of sends and receives together. 0:
    /// not begun.
    pub(super) sequence: u64,
    pub(super) place: Target,
    pub(super) asynchronous: bool,
    /// The peer is on another host: its number is that in the default group.
    pub(super) far: bool,
    /// The call serves one of the group on several hosts whose part on this host has made it; it is counted among those of the part.
    pub(super) inside: bool,
    pub(super) timeout_ms: u64,
    /// Readings of `clock::now`; 0: not yet.
    pub(super) created: u64,
    pub(super) started: u64,
    pub(super) ended: u64,
    pub(super) state: State,
    /// Last phase that has begun, and when.
    pub(super) phase: Option<(Phase, u64)>,
    /// Name of the algorithm that served it; empty: none did, or it is not known.
    pub(super) algorithm: &'static str,
    /// Nanoseconds until the last rank had begun, and that rank; of calls that a profiler saw.
    pub(super) waited: Option<(u64, Option<Rank>)>,
}

impl Entry {
    /// A slot that nobody has used.
    pub(super) const EMPTY: Self = Self {
        number: 0,
        group: 0,
        what: What::Send { peer: None, tag: 0 },
        dtype: DType::U8,
        bytes_in: 0,
        bytes_out: 0,
        sequence: 0,
        place: Target::Host,
        asynchronous: false,
        far: false,
        inside: false,
        timeout_ms: 0,
        created: 0,
        started: 0,
        ended: 0,
        state: State::Scheduled,
        phase: None,
        algorithm: "",
        waited: None,
    };

    /// Entry of `call` when it is asked for. Inlined, as all on its way to its slot: each copy of it takes as long as a third of an arrival.
    #[inline(always)]
    pub(super) fn of_call(call: &Spec) -> Self {
        let sum = |spans: &[Span]| spans.iter().map(|span| span.bytes as u64).sum();
        let lengths = call.agreed_lengths();
        let even = lengths.iter().all(|span| span.bytes == lengths[0].bytes);
        let (op, reduce_op, root) = (call.op, call.reduce_op, call.root);
        Self {
            what: What::Collective { op, reduce_op, root, description: Description::of(call), even },
            dtype: call.dtype,
            bytes_in: sum(&call.inputs),
            bytes_out: sum(&call.outputs),
            ..Self::EMPTY
        }
    }

    /// Entry of a message when it is asked for.
    pub(super) fn of_message(send: bool, message: &Message) -> Self {
        let MessageSpec { peer, tag, dtype, span, .. } = **message;
        let bytes = span.bytes as u64;
        let (what, bytes_in, bytes_out) = if send { (What::Send { peer, tag }, bytes, 0) } else { (What::Receive { peer, tag }, 0, bytes) };
        Self { what, dtype, bytes_in, bytes_out, ..Self::EMPTY }
    }

    /// The state after `outcome`.
    pub(super) fn end(&mut self, outcome: &Result<()>, at: u64) {
        self.ended = at;
        self.state = outcome.as_ref().map_or_else(|error| State::Failed(error.kind), |()| State::Completed);
    }

    /// Elements of this rank's share: what ranks agree on, or the message.
    pub(super) fn elements(&self) -> u64 {
        let bytes = match self.what {
            What::Collective { op: Op::Barrier, .. } => 0,
            What::Collective { op: Op::AllToAll, .. } => self.bytes_in,
            What::Collective { description, .. } => description.bytes,
            What::Send { .. } | What::Receive { .. } => self.bytes_in.max(self.bytes_out),
        };
        bytes / self.dtype.size() as u64
    }
}
