//! Fused matmuls for C++: the steps that a call enqueues, and the sum of its parts.
#![allow(unsafe_code, reason = "addresses and objects that C++ hands over")]

use super::guarded;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::fused::schedule::{self, PadChannel, StreamStep};
use crate::fused::sum_parts::{self, PartsSum};
use crate::fused::workspace::{CallStart, MemoryRequest, Workspace};
use crate::fused::{self, DeviceModel, MatmulShape};
use ffi::{
    FusedAction, FusedCall, FusedChannel, FusedStep, FusedStream, ProductSpec, Status, SumSpec,
};

/// See `bridge::ffi`.
#[allow(missing_docs, unreachable_pub)] // cxx generates public items.
#[cxx::bridge(namespace = "symm")]
pub mod ffi {
    /// The action of a step; see `fused::schedule::StreamStep`.
    #[repr(u8)]
    enum FusedAction {
        Mark = 0,
        After = 1,
        Barrier = 2,
        Signal = 3,
        Wait = 4,
        Share = 5,
        Fetch = 6,
        OwnRows = 7,
        Multiply = 8,
        Sum = 9,
    }

    /// `fused::schedule::CallStream`.
    #[repr(u8)]
    enum FusedStream {
        Caller = 0,
        Copying = 1,
    }

    /// `fused::schedule::PadChannel`.
    #[repr(u8)]
    enum FusedChannel {
        Entry = 0,
        Ready = 1,
        Part = 2,
        Exit = 3,
    }

    /// `fused::schedule::StreamStep`; unused fields are 0.
    struct FusedStep {
        action: FusedAction,
        stream: FusedStream,
        channel: FusedChannel,
        /// The number of a mark.
        mark: usize,
        /// The rank, or the first of `count` ranks.
        rank: usize,
        count: usize,
    }

    /// The next action for a call: if `make` is not 0, make memory and retry the call; otherwise
    /// enqueue its steps.
    struct FusedCall {
        status: Status,
        /// Size of the memory that this rank and all others must make together; if `keep` is true,
        /// graphs still use the present memory.
        make: usize,
        keep: bool,
        /// Offset of the call's piece of the workspace in bytes.
        offset: usize,
        /// Distance between two parts.
        part_bytes: usize,
        steps: Vec<FusedStep>,
    }

    /// A fused matmul whose rows are spread over the ranks; see `fused::MatmulShape` for the
    /// fields.
    struct ProductSpec {
        /// Number of the CUDA device; the host if negative.
        device: i32,
        size: usize,
        rank: usize,
        rows: usize,
        columns: usize,
        depth: usize,
        dtype: i32,
    }

    /// `fused::sum_parts::PartsSum`, and where to enqueue it.
    struct SumSpec {
        device: i32,
        stream: usize,
        rank: usize,
        parts: Vec<usize>,
        to: usize,
        bytes: usize,
        dtype: i32,
        mean: bool,
    }

    unsafe extern "C++" {
        include!("symm/src/bridge.rs.h");
        type Status = crate::bridge::ffi::Status;
    }

    extern "Rust" {
        /// `fused::workspace::Workspace`.
        type FusedWorkspace;
        /// Makes the workspace of a group on a device, without memory.
        fn fused_workspace(group: &str, on_host: bool) -> Box<FusedWorkspace>;
        /// Starts an all-gather and the products of its shards. For `capture`, see `capture_of`.
        fn gather(
            self: &mut FusedWorkspace,
            spec: &ProductSpec,
            own_rows: bool,
            capture: u64,
        ) -> FusedCall;
        /// Starts a product followed by a reduce-scatter.
        fn scatter(self: &mut FusedWorkspace, spec: &ProductSpec, capture: u64) -> FusedCall;
        /// Reports that the memory that the last call requested exists.
        fn made(self: &mut FusedWorkspace);
        /// Reports that the call that was started last has failed.
        fn fail(self: &mut FusedWorkspace);
        /// Enqueues the sum of all ranks' parts of a product.
        fn sum_parts(spec: &SumSpec) -> Status;
    }
}

super::outcome::same_codes!(schedule::CallStream, FusedStream: Caller, Copying);
super::outcome::same_codes!(PadChannel, FusedChannel: Entry, Ready, Part, Exit);

/// The workspace slots of a group, and the memory that it requested last.
pub(crate) struct FusedWorkspace {
    group: String,
    turns: Workspace,
    wanted: Option<MemoryRequest>,
}

fn fused_workspace(group: &str, on_host: bool) -> Box<FusedWorkspace> {
    Box::new(FusedWorkspace { group: group.into(), turns: Workspace::new(on_host), wanted: None })
}

/// Returns the product of one rank's rows, and the model of the device that computes it.
fn product(spec: &ProductSpec) -> Result<(MatmulShape, DeviceModel)> {
    if spec.rank >= spec.size {
        return Err(Error::value(format!("there is no rank {} among {}", spec.rank, spec.size)));
    }
    let dtype = DType::from_torch(spec.dtype)?;
    let product = MatmulShape {
        rows: spec.rows,
        columns: spec.columns,
        depth: spec.depth,
        element: dtype.size(),
    };
    Ok((product, fused::of_device(spec.device, dtype)?))
}

/// Returns a call without any results yet.
fn nothing() -> FusedCall {
    let status = Status { kind: super::ffi::ErrorKind::None, message: String::new() };
    FusedCall { status, make: 0, keep: false, offset: 0, part_bytes: 0, steps: Vec::new() }
}

impl FusedWorkspace {
    fn gather(&mut self, spec: &ProductSpec, own_rows: bool, capture: u64) -> FusedCall {
        let mut call = nothing();
        call.status = guarded(|| {
            let (product, model) = product(spec)?;
            self.begin(
                spec,
                "all_gather_matmul",
                product.shard_bytes()?,
                capture,
                &mut call,
                |entry| {
                    let plan = fused::gather(spec.size, spec.rank, &product, &model);
                    schedule::gather(spec.size, spec.rank, &plan, entry, own_rows)
                },
            )
        });
        call
    }

    fn scatter(&mut self, spec: &ProductSpec, capture: u64) -> FusedCall {
        let mut call = nothing();
        call.status = guarded(|| {
            let (product, model) = product(spec)?;
            let (part_bytes, bytes) = product.part_bytes(spec.size)?;
            call.part_bytes = part_bytes;
            self.begin(spec, "matmul_reduce_scatter", bytes, capture, &mut call, |entry| {
                schedule::scatter(
                    spec.size,
                    spec.rank,
                    fused::pulled(spec.size, &product, &model),
                    entry,
                )
            })
        });
        call
    }

    /// Finds the call's slot of the workspace and its steps, or the memory that must be made first.
    fn begin(
        &mut self,
        spec: &ProductSpec,
        op: &str,
        bytes: usize,
        capture: u64,
        call: &mut FusedCall,
        steps: impl FnOnce(bool) -> Vec<StreamStep>,
    ) -> Result<()> {
        match self.turns.begin(&format!("{op}: group \"{}\"", self.group), bytes, capture)? {
            CallStart::Turn(turn) => {
                let steps = steps(turn.entry);
                let steps = if spec.device < 0 { schedule::ended_on_host(steps) } else { steps };
                call.offset = turn.offset;
                call.steps = steps.iter().map(shared).collect();
            }
            CallStart::Make(memory) => {
                (call.make, call.keep) = (memory.bytes, memory.keep);
                self.wanted = Some(memory);
            }
        }
        Ok(())
    }

    fn made(&mut self) {
        if let Some(memory) = self.wanted.take() {
            self.turns.made(&memory);
        }
    }

    fn fail(&mut self) {
        self.turns.fail();
    }
}

fn shared(step: &StreamStep) -> FusedStep {
    let stream = FusedStream { repr: step.stream() as u8 };
    let none = FusedStep {
        action: FusedAction::Mark,
        stream,
        channel: FusedChannel::Part,
        mark: 0,
        rank: 0,
        count: 0,
    };
    match step {
        &StreamStep::Mark(_, mark) => FusedStep { mark, ..none },
        &StreamStep::After(_, mark) => FusedStep { action: FusedAction::After, mark, ..none },
        &StreamStep::Barrier(_, channel) => FusedStep {
            action: FusedAction::Barrier,
            channel: FusedChannel { repr: channel as u8 },
            ..none
        },
        &StreamStep::Signal(rank) => FusedStep { action: FusedAction::Signal, rank, ..none },
        &StreamStep::Wait(rank) => FusedStep { action: FusedAction::Wait, rank, ..none },
        StreamStep::Share => FusedStep { action: FusedAction::Share, ..none },
        &StreamStep::Fetch(rank) => FusedStep { action: FusedAction::Fetch, rank, ..none },
        StreamStep::OwnRows(_) => FusedStep { action: FusedAction::OwnRows, ..none },
        StreamStep::Multiply(ranks) => FusedStep {
            action: FusedAction::Multiply,
            rank: ranks.start,
            count: ranks.len(),
            ..none
        },
        StreamStep::Sum => FusedStep { action: FusedAction::Sum, ..none },
    }
}

fn sum_parts(spec: &SumSpec) -> Status {
    guarded(|| {
        let dtype = DType::from_torch(spec.dtype)?;
        let sum = PartsSum {
            rank: spec.rank,
            parts: &spec.parts,
            to: spec.to,
            bytes: spec.bytes,
            dtype,
            mean: spec.mean,
        };
        // SAFETY: C++ passes tensors that it holds, after the steps that order their accesses.
        unsafe { sum_parts::launch(spec.device, spec.stream, &sum) }
    })
}
