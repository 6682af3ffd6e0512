//! Exchanges: data moves bit for bit, whatever its type.
#![allow(unsafe_code, reason = "the bytes of tensors, by their addresses")]

use super::agreement::{ExchangeCall, Operator, OperatorCall};
use super::splits::Splits;
use super::{Inputs, output};
use crate::dtype::ReduceOp;
use crate::error::Result;
use crate::kernels::cpu::{self, WriteMode};
use crate::mem::span::Span;
use crate::rank::Rank;
use crate::window::SymmetricWindow;

/// The rows that a rank sends and receives in an all-to-all.
#[derive(Clone, Copy, Debug)]
pub struct RowExchange {
    /// The value of `c10::ScalarType` of the input and the output.
    pub dtype: i32,
    /// Size of a row in bytes.
    pub row: usize,
    /// This rank's rows, in the order of the ranks that receive them; rows beyond the sum of the
    /// splits are not sent.
    pub input: Span,
    /// Number of rows of the input.
    pub rows: usize,
    /// Number of rows to each rank, as 64-bit integers; also an input.
    pub splits: Span,
    /// Destination of the rows of all ranks, with the rows of rank 0 first.
    pub out: Span,
    /// Capacity of the output in rows.
    pub room: usize,
    /// Receives, as 64-bit integers, the number of rows from each rank, then the index in `out` of
    /// each rank's first row.
    pub layout: Span,
}

impl Inputs<'_> {
    /// Reads the splits of all ranks from the inputs. They are read once, so later writes of a peer
    /// change nothing.
    fn splits(&self) -> Splits {
        let n = self.window.size();
        let length = n * size_of::<i64>();
        let mut counts = vec![0i64; n * n];
        for (from, counts) in (0..).map(Rank).zip(counts.chunks_mut(n)) {
            // SAFETY: `at` found `length` bytes in the window, which keeps them mapped; `counts`
            // has the same size; any bytes are valid integers.
            unsafe {
                cpu::copy(
                    counts.as_mut_ptr().cast(),
                    self.at(from, &(0..length)),
                    length,
                    WriteMode::Cached,
                )
            };
        }
        Splits { n, counts }
    }
}

impl SymmetricWindow {
    /// All-gather: `out` receives the inputs of all ranks, in rank order. The ranks compare
    /// `dtype`, the value of `c10::ScalarType`.
    ///
    /// # Safety
    /// `out` can be written and overlaps no input; nothing else on this rank accesses `out` or an
    /// input meanwhile.
    pub unsafe fn all_gather(&self, dtype: i32, input: Span, out: Span) -> Result<()> {
        let call = OperatorCall {
            operator: Operator::AllGather,
            dtype,
            reduce_op: ReduceOp::Sum,
            bytes: input.bytes,
            row: 0,
            exchange: None,
        };
        self.together(&call, input, || {
            if input.bytes == 0 {
                return Ok(());
            }
            let (inputs, to) = (self.inputs(input)?, output(out, input.bytes * self.size())?);
            for from in self.own_first() {
                let theirs = inputs.at(from, &(0..input.bytes));
                // SAFETY: all ranks are in the call and write to no input; `output` checked the
                // capacity for all.
                unsafe {
                    cpu::copy(
                        to.add(from.index() * input.bytes),
                        theirs,
                        input.bytes,
                        WriteMode::Cached,
                    )
                };
            }
            Ok(())
        })
    }

    /// All-to-all of rows whose counts are also in memory: in `splits`, a window of the same group.
    /// Inconsistent splits are rejected on all ranks before anything is written.
    ///
    /// # Safety
    /// `out` and `layout` can be written and overlap no input; nothing else on this rank accesses
    /// any of the spans meanwhile.
    pub unsafe fn all_to_all_vdev(
        &self,
        splits: &SymmetricWindow,
        exchange: &RowExchange,
    ) -> Result<()> {
        let RowExchange { dtype, row, input, rows, out, room, layout, .. } = *exchange;
        let begin = splits.buffers[self.rank().index()] as usize;
        let call = OperatorCall {
            operator: Operator::AllToAllVdev,
            dtype,
            reduce_op: ReduceOp::Sum,
            bytes: row,
            row: 0,
            exchange: Some(ExchangeCall {
                rows,
                splits_window: splits.pad.number,
                splits_offset: exchange.splits.addr.wrapping_sub(begin),
            }),
        };
        self.together(&call, input, || {
            let (inputs, splits) = (self.inputs(input)?, splits.inputs(exchange.splits)?);
            let to = output(out, room * row)?;
            // step 1: read and check the splits of all ranks
            let received = splits.splits().received(self.rank(), rows, room)?;
            // step 2: write the layout of the output
            let begins = received.iter().map(|rows| rows.received_at);
            let told: Vec<i64> = received
                .iter()
                .map(|rows| rows.count)
                .chain(begins)
                .map(|count| count as i64)
                .collect();
            let bytes = size_of_val(&told[..]);
            // SAFETY: `output` checked the capacity; the rest is the caller's promise.
            unsafe {
                cpu::copy(output(layout, bytes)?, told.as_ptr().cast(), bytes, WriteMode::Cached)
            };
            // step 3: fetch my rows from each rank
            for from in self.own_first() {
                let rows = received[from.index()];
                let theirs = rows.sent_from * row..(rows.sent_from + rows.count) * row;
                // SAFETY: all ranks are in the call and write to no input; `received` checked that
                // the rows fit into the `room` rows of `out`.
                unsafe {
                    cpu::copy(
                        to.add(rows.received_at * row),
                        inputs.at(from, &theirs),
                        theirs.len(),
                        WriteMode::Cached,
                    )
                };
            }
            Ok(())
        })
    }
}
