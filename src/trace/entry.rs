//! The entry that the recorder keeps of a call.

use crate::coll::call::{CallSpec, Collective, Span};
use crate::coll::describe::Description;
use crate::coll::message::{Message, MessageSpec};
use crate::dtype::{DType, ReduceOp};
use crate::error::{ErrorKind, Result};
use crate::rank::Rank;

/// The operation of the call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CallKind {
    Collective {
        op: Collective,
        reduce_op: ReduceOp,
        root: Rank,
        description: Description,
        even: bool,
    },
    Send {
        peer: Option<Rank>,
        tag: i32,
    },
    /// For a receive from any rank, `peer` is absent until the message has arrived.
    Receive {
        peer: Option<Rank>,
        tag: i32,
    },
}

/// Where a call's tensors are, and where it runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallTarget {
    /// CPU tensors.
    Cpu,
    /// CUDA tensors.
    Cuda {
        /// Index of the device in torch.
        device: i32,
        /// The driver's handle of the stream.
        stream: usize,
        /// True if the call runs on a stream of the group, ordered with the caller's stream.
        background: bool,
    },
}

/// The phase of a multi-node collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InternodePhase {
    /// It runs collectives of the ranks of this node.
    IntraNode,
    /// It waits for data of the other nodes on the rail of this number.
    Rail(u16),
    /// It is enqueued on a GPU and will use the rail of this number, if any.
    Enqueued(Option<u16>),
    /// The GPU has started it; the host does not learn which step it has reached.
    Running(Option<u16>),
}

/// The state of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum EntryState {
    /// Waits in its group's queue behind other calls.
    Scheduled,
    /// Enqueued on CUDA. The host does not learn when it ends.
    Started,
    Completed,
    Failed(ErrorKind),
}

/// The entry of one call of one rank. It holds plain values, so that a slot of the ring is
/// overwritten without freeing anything.
#[derive(Clone, Copy, Debug)]
pub(super) struct TraceEntry {
    /// The number of the call, from 1, in the order in which the process made its calls.
    pub(super) number: u64,
    /// The group's number in this process.
    pub(super) group: u64,
    pub(super) what: CallKind,
    pub(super) dtype: DType,
    pub(super) bytes_in: u64,
    pub(super) bytes_out: u64,
    /// The sequence number in error messages: collectives on CPU tensors and on CUDA tensors are
    /// counted separately, from 1; sends and receives together. 0 before the call has started.
    pub(super) sequence: u64,
    pub(super) place: CallTarget,
    pub(super) asynchronous: bool,
    /// True if the peer is on another node; its number is then its rank in the default group.
    pub(super) internode: bool,
    pub(super) timeout_ms: u64,
    /// Readings of `clock::now`; 0 if not taken yet.
    pub(super) created: u64,
    pub(super) started: u64,
    pub(super) ended: u64,
    pub(super) state: EntryState,
    /// The last phase that has started, and when.
    pub(super) phase: Option<(InternodePhase, u64)>,
    /// The name of the algorithm that ran the call; empty if the call did not run or the algorithm
    /// is unknown.
    pub(super) algorithm: &'static str,
    /// Nanoseconds until the last rank had started, and that rank; only for calls under a profiler.
    pub(super) waited: Option<(u64, Option<Rank>)>,
}

impl TraceEntry {
    /// An unused slot.
    pub(super) const EMPTY: Self = Self {
        number: 0,
        group: 0,
        what: CallKind::Send { peer: None, tag: 0 },
        dtype: DType::U8,
        bytes_in: 0,
        bytes_out: 0,
        sequence: 0,
        place: CallTarget::Cpu,
        asynchronous: false,
        internode: false,
        timeout_ms: 0,
        created: 0,
        started: 0,
        ended: 0,
        state: EntryState::Scheduled,
        phase: None,
        algorithm: "",
        waited: None,
    };

    /// Makes the entry of `call` when it is submitted. Inlined, like every function on the way to
    /// the entry's slot: each copy of an entry takes a third of the time of an arrival.
    #[inline(always)]
    pub(super) fn of_call(call: &CallSpec) -> Self {
        let sum = |spans: &[Span]| spans.iter().map(|span| span.bytes as u64).sum();
        let lengths = call.agreed_lengths();
        let even = lengths.iter().all(|span| span.bytes == lengths[0].bytes);
        let (op, reduce_op, root) = (call.op, call.reduce_op, call.root);
        Self {
            what: CallKind::Collective {
                op,
                reduce_op,
                root,
                description: Description::of(call),
                even,
            },
            dtype: call.dtype,
            bytes_in: sum(&call.inputs),
            bytes_out: sum(&call.outputs),
            ..Self::EMPTY
        }
    }

    /// Makes the entry of a message when it is submitted.
    pub(super) fn of_message(send: bool, message: &Message) -> Self {
        let MessageSpec { peer, tag, dtype, span, .. } = **message;
        let bytes = span.bytes as u64;
        let (what, bytes_in, bytes_out) = if send {
            (CallKind::Send { peer, tag }, bytes, 0)
        } else {
            (CallKind::Receive { peer, tag }, 0, bytes)
        };
        Self { what, dtype, bytes_in, bytes_out, ..Self::EMPTY }
    }

    /// Sets the state to `outcome`.
    pub(super) fn end(&mut self, outcome: &Result<()>, at: u64) {
        self.ended = at;
        self.state = outcome
            .as_ref()
            .map_or_else(|error| EntryState::Failed(error.kind), |()| EntryState::Completed);
    }

    /// Returns the number of elements that ranks agree on, or the length of the message.
    pub(super) fn elements(&self) -> u64 {
        let bytes = match self.what {
            CallKind::Collective { op: Collective::Barrier, .. } => 0,
            CallKind::Collective { op: Collective::AllToAll, .. } => self.bytes_in,
            CallKind::Collective { description, .. } => description.bytes,
            CallKind::Send { .. } | CallKind::Receive { .. } => self.bytes_in.max(self.bytes_out),
        };
        bytes / self.dtype.size() as u64
    }
}
