//! Ranks as threads of the test process, over memory that they share.
#![allow(dead_code, reason = "each program uses its part")]

use std::os::fd::OwnedFd;
use std::time::Duration;
use symm::coll::call::{Call, CallSpec, Collective, Span};
use symm::control::Identity;
use symm::dtype::{DType, ReduceOp};
use symm::error::Result;
use symm::group::{Group, GroupTuning};
use symm::kernels::cpu::{self, InputElements, WriteMode};
use symm::mem::layout::SegmentLayout;
use symm::mem::shm::ShmSegment;
use symm::rank::Rank;

/// Runs `body` on `n` ranks, each in a separate thread.
pub(crate) fn with_ranks(n: u32, body: impl Fn(&Group, u32) + Sync) {
    let file = memory(n);
    std::thread::scope(|scope| {
        for rank in 0..n {
            let (file, body) = (&file, &body);
            scope.spawn(move || {
                let timeout = Duration::from_secs(60);
                body(&assemble(file, rank, n, timeout, GroupTuning::default()), rank)
            });
        }
    });
}

/// The memory of a group of `n`.
pub(crate) fn memory(n: u32) -> OwnedFd {
    ShmSegment::create(SegmentLayout::new(n as usize).total_bytes()).expect("memfd")
}

/// Maps the memory of a group of `n`.
pub(crate) fn map(file: &OwnedFd, n: u32) -> ShmSegment {
    let bytes = SegmentLayout::new(n as usize).total_bytes();
    ShmSegment::map(file.try_clone().expect("dup"), bytes).expect("map")
}

/// Rank `rank` of the group of `n` that shares `file`.
pub(crate) fn assemble(
    file: &OwnedFd,
    rank: u32,
    n: u32,
    timeout: Duration,
    tuning: GroupTuning,
) -> Group {
    let members = (0..n).map(|global| Identity { pid: std::process::id(), global }).collect();
    let segment = map(file, n);
    Group::from_joined(segment, "test", Rank(rank), members, timeout, tuning).expect("assemble")
}

/// A generator of the same numbers in every run.
pub(crate) struct Dice(pub(crate) u64);

impl Dice {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }
}

/// The whole of `data`.
pub(crate) fn span<T>(data: &mut [T]) -> Span {
    Span { addr: data.as_mut_ptr() as usize, bytes: size_of_val(data) }
}

/// A call with root 0.
pub(crate) fn call(
    op: Collective,
    dtype: DType,
    inputs: Vec<Span>,
    outputs: Vec<Span>,
) -> CallSpec<'static> {
    CallSpec {
        op,
        dtype,
        inputs: inputs.into(),
        outputs: outputs.into(),
        ..CallSpec::barrier(None)
    }
}

/// Runs one call of `group`.
pub(crate) fn run(group: &Group, spec: CallSpec<'_>, timeout: Option<Duration>) -> Result<()> {
    let (me, n) = group.place();
    // SAFETY: tests keep the memory of `spec` until the call has ended, each rank its own.
    group.run(&[unsafe { Call::new(spec, me, n) }?], timeout)
}

pub(crate) fn barrier(group: &Group, timeout: Option<Duration>) -> Result<()> {
    group.run(&[Call::barrier(None)], timeout)
}

/// The input of rank `from` for rank `to` (`to` is 0 if all get the same): any bits, but only 0 and
/// 1 for bool.
pub(crate) fn input(dtype: DType, from: u32, to: u32, bytes: usize) -> Vec<u8> {
    let mut dice = Dice(u64::from(from) << 32 | u64::from(to) << 8 | dtype as u64 | 1 << 63);
    let mask = if dtype == DType::Bool { 1 } else { 0xff };
    (0..bytes).map(|_| (dice.next() >> 24) as u8 & mask).collect()
}

/// The expected reduction of `inputs`, one per rank.
pub(crate) fn reduced(dtype: DType, op: ReduceOp, inputs: &[Vec<u8>]) -> Vec<u8> {
    let mut output = vec![0u8; inputs[0].len()];
    let sources: Vec<InputElements> = inputs
        .iter()
        .enumerate()
        .map(|(rank, data)| InputElements { ptr: data.as_ptr(), factor: rank as f64 + 0.5 })
        .collect();
    let (to, count) = (output.as_mut_ptr(), output.len() / dtype.size());
    // SAFETY: all buffers are of the same length, a multiple of the element size.
    unsafe { cpu::reduce(op, dtype, to, &sources, count, WriteMode::Cached) };
    output
}
