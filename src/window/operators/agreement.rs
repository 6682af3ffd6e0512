//! The comparison of the ranks' operators, before any rank reads another's memory.
//!
//! In an operator of a window, each rank publishes its call behind the signals of its pad before
//! the first barrier, and compares the calls of all ranks after it. It publishes the next call only
//! after the last barrier of the operator, when all ranks have compared this one. A call that
//! equals the previous one is not written again, so repeated calls find the words of all ranks in
//! their caches.
#![allow(unsafe_code, reason = "words behind the signals of a pad, by their addresses")]

use crate::control::ControlBlock;
use crate::dtype::{DType, ReduceOp};
use crate::error::{Error, Result};
use crate::mem::span::Span;
use crate::rank::Rank;
use crate::window::SymmetricWindow;
use std::fmt::{self, Display};
use std::sync::atomic::{AtomicU64, Ordering};

/// Number of words of a call.
const WORDS: usize = 6;
/// Number of bytes behind the signals of a pad in which its rank publishes a call: a pair of cache
/// lines.
pub(in crate::window) const CALL_BYTES: usize = 128;

const _: () = assert!(WORDS * size_of::<AtomicU64>() <= CALL_BYTES);

/// An operator that reads the memory of other ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Operator {
    OneShotAllReduce = 1,
    TwoShotAllReduce,
    ReduceScatter,
    AllGather,
    AllToAllVdev,
}

impl Operator {
    const ALL: [(Self, &str); 5] = [
        (Self::OneShotAllReduce, "one_shot_all_reduce"),
        (Self::TwoShotAllReduce, "two_shot_all_reduce"),
        (Self::ReduceScatter, "reduce_scatter"),
        (Self::AllGather, "all_gather"),
        (Self::AllToAllVdev, "all_to_all_vdev"),
    ];

    fn from_code(code: u8) -> Option<(Self, &'static str)> {
        Self::ALL.into_iter().find(|&(operator, _)| operator as u8 == code)
    }
}

/// The part of an operator's call on which all ranks must agree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct OperatorCall {
    pub(super) operator: Operator,
    /// The value of `c10::ScalarType`.
    pub(super) dtype: i32,
    pub(super) reduce_op: ReduceOp,
    /// Length of the input; in an all-to-all, length of a row.
    pub(super) bytes: usize,
    /// Length of a row of a reduce-scatter, otherwise 0.
    pub(super) row: usize,
    /// The rows of an all-to-all.
    pub(super) exchange: Option<ExchangeCall>,
}

/// The part of an all-to-all's call that other operators lack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ExchangeCall {
    /// Number of rows of the input.
    pub(super) rows: usize,
    /// Number of the window that contains the splits, the same on all ranks.
    pub(super) splits_window: u64,
    /// Offset of the splits in their window.
    pub(super) splits_offset: usize,
}

impl OperatorCall {
    /// Returns the words of the call with an input at `offset` in the window. Types that are copied
    /// in the same way are equal, as in a collective.
    fn words(&self, offset: usize) -> CallWords {
        let dtype = DType::copied(self.dtype).map_or(self.dtype as u8, |dtype| dtype as u8);
        let head =
            u64::from(self.operator as u8) | u64::from(dtype) << 8 | (self.reduce_op as u64) << 16;
        let [detail, rows, splits_window] = match self.exchange {
            Some(ExchangeCall { rows, splits_window, splits_offset }) => {
                [splits_offset as u64, rows as u64, splits_window]
            }
            None => [self.row as u64, 0, 0],
        };
        CallWords([head, self.bytes as u64, offset as u64, detail, rows, splits_window])
    }
}

/// A call as a rank publishes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct CallWords([u64; WORDS]);

impl Display for CallWords {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [head, bytes, offset, detail, rows, splits_window] = self.0;
        let byte = |shift: u32| (head >> shift) as u8;
        let (Some((operator, name)), Ok(dtype), Ok(reduce_op)) = (
            Operator::from_code(byte(0)),
            DType::copied(byte(8).into()),
            ReduceOp::from_torch(byte(16)),
        ) else {
            return f.write_str("an unreadable operator");
        };
        let dtype_name = dtype.name();
        if operator == Operator::AllToAllVdev {
            return write!(
                f,
                "{name}({rows} rows of {bytes} bytes of {dtype_name} at byte {offset}, splits at \
                 byte {detail} of window {splits_window})"
            );
        }
        let count = bytes / dtype.size() as u64;
        write!(f, "{name}({count} × {dtype_name}, {bytes} bytes at byte {offset}")?;
        if operator == Operator::ReduceScatter {
            write!(f, ", rows of {detail} bytes")?;
        }
        if operator != Operator::AllGather {
            write!(f, ", {}", reduce_op.name())?;
        }
        f.write_str(")")
    }
}

/// Fails, with the same error on all ranks, unless the `calls` of all ranks, in rank order, are
/// equal.
pub(crate) fn agree<T: PartialEq + Display>(
    control: &ControlBlock,
    calls: impl IntoIterator<Item = T>,
) -> Result<()> {
    let mut calls = control.ranks().zip(calls);
    let Some((zero, first)) = calls.next() else { return Ok(()) };
    let Some((rank, other)) = calls.find(|(_, call)| *call != first) else { return Ok(()) };
    let (first, other) = (first.to_string(), other.to_string());
    let hidden = if first == other { "; they differ in a part that is not shown" } else { "" };
    Err(Error::mismatch(format!(
        "ranks of group \"{}\" do not agree: {} called {first}, {} called {other}{hidden}",
        control.name(),
        control.describe(zero),
        control.describe(rank)
    )))
}

impl SymmetricWindow {
    /// Publishes this rank's call on `input`, for `compare_calls` of all ranks after a barrier.
    pub(super) fn publish_call(&self, call: &OperatorCall, input: Span) -> Result<()> {
        self.check_process()?;
        if self.gpu().is_some() {
            return Err(Error::value("an operator of the host on a window of a GPU".to_owned()));
        }
        // An input outside the window is rejected later.
        let begin = self.buffers[self.rank().index()] as usize;
        let offset = if input.bytes == 0 { 0 } else { input.addr.wrapping_sub(begin) };
        for (word, value) in self.call_words(self.rank()).iter().zip(call.words(offset).0) {
            if word.load(Ordering::Relaxed) != value {
                word.store(value, Ordering::Relaxed);
            }
        }
        Ok(())
    }

    /// Fails, on all ranks, unless all have published the same call. They must have met since, and
    /// must meet again before one of them publishes another call.
    pub(super) fn compare_calls(&self) -> Result<()> {
        let published = |rank: Rank| {
            let words = self.call_words(rank);
            CallWords(std::array::from_fn(|index| words[index].load(Ordering::Relaxed)))
        };
        agree(&self.control, self.control.ranks().map(published))
    }

    /// Returns the words in which `rank` publishes its calls; the window must be on the host.
    fn call_words(&self, rank: Rank) -> &[AtomicU64; WORDS] {
        let address = self.pads[rank.index()] as usize + self.pad.signal_bytes();
        // SAFETY: a pad has `CALL_BYTES` bytes behind its signals, aligned to cache lines; they
        // were cleared before the ranks met, only these atomics access them, and the window keeps
        // them mapped.
        unsafe { &*(address as *const [AtomicU64; WORDS]) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::tests::controls;
    use crate::error::ErrorKind;

    #[test]
    fn calls_are_shown_as_users_made_them() {
        let call = |operator| OperatorCall {
            operator,
            dtype: 6,
            reduce_op: ReduceOp::Sum,
            bytes: 40,
            row: 8,
            exchange: (operator == Operator::AllToAllVdev).then_some(ExchangeCall {
                rows: 5,
                splits_window: 3,
                splits_offset: 16,
            }),
        };
        for (operator, text) in [
            (
                Operator::OneShotAllReduce,
                "one_shot_all_reduce(10 × float32, 40 bytes at byte 12, SUM)",
            ),
            (
                Operator::ReduceScatter,
                "reduce_scatter(10 × float32, 40 bytes at byte 12, rows of 8 bytes, SUM)",
            ),
            (Operator::AllGather, "all_gather(10 × float32, 40 bytes at byte 12)"),
            (
                Operator::AllToAllVdev,
                "all_to_all_vdev(5 rows of 40 bytes of float32 at byte 12, splits at byte 16 of \
                 window 3)",
            ),
        ] {
            assert_eq!(call(operator).words(12).to_string(), text);
        }
        assert_eq!(CallWords([0; WORDS]).to_string(), "an unreadable operator");
    }

    #[test]
    fn types_that_are_copied_in_the_same_way_agree() {
        let words = |dtype: i32| {
            let (operator, reduce_op) = (Operator::AllGather, ReduceOp::Sum);
            OperatorCall { operator, dtype, reduce_op, bytes: 8, row: 0, exchange: None }.words(0)
        };
        let (complex32, float16, float8_e8m0fnu, uint8) = (8, 5, 44, 0);
        assert_eq!(words(complex32), words(float16));
        assert_eq!(words(float8_e8m0fnu), words(uint8));
        assert_ne!(words(float16), words(uint8));
        assert_eq!(words(complex32).to_string(), "all_gather(4 × float16, 8 bytes at byte 0)");
    }

    #[test]
    fn the_first_rank_that_differs_from_rank_0_is_named() {
        let controls = controls(3);
        for control in &controls {
            assert_eq!(agree(control, ["a", "a", "a"]), Ok(()));
            let error = agree(control, ["a", "b", "c"]).expect_err("they differ");
            error.assert_says(ErrorKind::Mismatch, &["rank 0", "called a,", "rank 1", "called b"]);
            assert!(!error.message.contains("rank 2"), "{error}");
        }
    }
}
