//! Reductions: elements combine in the group's order, so all ranks get the same bits.
#![allow(unsafe_code, reason = "the bytes of tensors, by their addresses")]

use super::agreement::{Operator, OperatorCall};
use super::{Inputs, output};
use crate::dtype::{DType, ReduceOp};
use crate::error::{Error, Result};
use crate::kernels::cpu::{self, InputElements, WriteMode};
use crate::mem::span::Span;
use crate::rank::Rank;
use crate::window::SymmetricWindow;
use std::ops::Range;

/// Size of a cache line in bytes. Ranks' parts start at multiples of it relative to the input.
const LINE: usize = 64;

/// Returns the part of an input of `bytes` that rank `rank` of `n` reduces for all: whole lines,
/// except at the end of the input. The parts of the last ranks may be empty.
fn part(bytes: usize, rank: Rank, n: usize) -> Range<usize> {
    let share = bytes.div_ceil(LINE * n) * LINE;
    let begin = (share * rank.index()).min(bytes);
    begin..(begin + share).min(bytes)
}

/// Returns the pieces of an input of `bytes` that rank `rank` of `n` gets: the `rank`th of `n`
/// pieces of each row.
fn pieces(
    bytes: usize,
    row: usize,
    rank: Rank,
    n: usize,
) -> Result<impl Iterator<Item = Range<usize>>> {
    if row == 0 || !row.is_multiple_of(n) || !bytes.is_multiple_of(row) {
        return Err(Error::value(format!(
            "{bytes} bytes in rows of {row} cannot be divided among {n} ranks"
        )));
    }
    let piece = row / n;
    Ok((0..bytes)
        .step_by(row)
        .map(move |begin| begin + piece * rank.index())
        .map(move |begin| begin..begin + piece))
}

/// Returns the call of a reduction.
fn called(
    operator: Operator,
    dtype: DType,
    reduce_op: ReduceOp,
    input: Span,
    row: usize,
) -> OperatorCall {
    OperatorCall {
        operator,
        dtype: dtype as i32,
        reduce_op,
        bytes: input.bytes,
        row,
        exchange: None,
    }
}

impl Inputs<'_> {
    /// Writes to `out` the reduction with `op`, in the group's order, of `range` of all ranks'
    /// inputs.
    ///
    /// # Safety
    /// `out` is valid for writes of `range.len()` bytes, and is `range` of this rank's input or
    /// overlaps no rank's input; no other writes to `range` of any input happen meanwhile.
    unsafe fn reduce(
        &self,
        dtype: DType,
        op: ReduceOp,
        range: &Range<usize>,
        out: *mut u8,
    ) -> Result<()> {
        cpu::supports(op, dtype)?;
        let (bytes, size) = (range.len(), dtype.size());
        if !bytes.is_multiple_of(size) {
            return Err(Error::value(format!(
                "{bytes} bytes are not whole elements of {}",
                dtype.name()
            )));
        }
        let ranks = (0..self.window.size() as u32).map(Rank);
        let sources: Vec<InputElements> =
            ranks.map(|rank| InputElements { ptr: self.at(rank, range), factor: 1.0 }).collect();
        // SAFETY: `at` found the sources in the window, which keeps them mapped; the rest is the
        // caller's promise.
        unsafe {
            cpu::reduce_in(
                self.window.order(),
                op,
                dtype,
                out,
                &sources,
                bytes / size,
                WriteMode::Cached,
            )
        };
        Ok(())
    }
}

impl SymmetricWindow {
    /// One-shot all-reduce: each rank reduces everything itself. First `local` is copied to the
    /// start of this rank's input.
    ///
    /// # Safety
    /// `local` can be read and `out` be written; `out` overlaps no input; nothing else on this rank
    /// accesses them meanwhile.
    pub unsafe fn one_shot_all_reduce(
        &self,
        dtype: DType,
        op: ReduceOp,
        input: Span,
        local: Span,
        out: Span,
    ) -> Result<()> {
        // step 1: copy `local` to where the other ranks read; they have left the previous call
        // SAFETY: the caller's promise.
        let filled = unsafe { self.fill(input, local) };
        let call = called(Operator::OneShotAllReduce, dtype, op, input, 0);
        self.together(&call, input, || {
            filled?;
            if input.bytes == 0 {
                return Ok(());
            }
            // step 2: reduce all
            let to = output(out, input.bytes)?;
            // SAFETY: all ranks are in the call and write to no input; `output` checked the
            // capacity; the rest is the caller's promise.
            unsafe { self.inputs(input)?.reduce(dtype, op, &(0..input.bytes), to) }
        })
    }

    /// Writes `local` to the start of `input`.
    ///
    /// # Safety
    /// `local` can be read, and no other access to `input` happens meanwhile.
    unsafe fn fill(&self, input: Span, local: Span) -> Result<()> {
        self.inputs(input)?;
        let to = output(input, local.bytes)?;
        if local.bytes > 0 {
            // SAFETY: `inputs` found the input in this rank's buffer, and `output` checked the
            // capacity; `local` is the caller's promise; they may overlap.
            unsafe { local.ptr().copy_to(to, local.bytes) };
        }
        Ok(())
    }

    /// Two-shot all-reduce: each rank reduces one part and fetches the others' parts. `out` may be
    /// the input; a part of the input is overwritten in any case.
    ///
    /// # Safety
    /// `out` can be written, and is the input or overlaps no input; nothing else on this rank
    /// accesses `out` or an input meanwhile.
    pub unsafe fn two_shot_all_reduce(
        &self,
        dtype: DType,
        op: ReduceOp,
        input: Span,
        out: Span,
    ) -> Result<()> {
        let (me, n) = (self.rank(), self.size());
        // step 1: reduce my part in place in my input
        let call = called(Operator::TwoShotAllReduce, dtype, op, input, 0);
        let (inputs, to) = self.together(&call, input, || {
            let (inputs, to) = (self.inputs(input)?, output(out, input.bytes)?);
            let mine = part(input.bytes, me, n);
            // SAFETY: all ranks are in the call, and only this one reads or writes its part of its
            // input.
            unsafe { inputs.reduce(dtype, op, &mine, inputs.at(me, &mine))? };
            Ok((inputs, to))
        })?;
        if input.bytes == 0 {
            return Ok(());
        }
        // step 2: fetch each part from the rank that has reduced it; skip my own if the call is in
        // place
        let in_place = out.addr == input.addr;
        for from in self.own_first().skip(usize::from(in_place)) {
            let theirs = part(input.bytes, from, n);
            // SAFETY: a part is within the input, and `output` checked the capacity; no rank writes
            // to this part of the input any more.
            unsafe {
                cpu::copy(
                    to.add(theirs.start),
                    inputs.at(from, &theirs),
                    theirs.len(),
                    WriteMode::Cached,
                )
            };
        }
        // step 3: wait until all ranks have fetched my part
        self.meet()
    }

    /// Reduce-scatter: this rank reduces its piece of each row of `row` bytes. `out` receives the
    /// pieces one after another.
    ///
    /// # Safety
    /// `out` can be written and overlaps no input; nothing else on this rank accesses `out` or an
    /// input meanwhile.
    pub unsafe fn reduce_scatter(
        &self,
        dtype: DType,
        op: ReduceOp,
        input: Span,
        row: usize,
        out: Span,
    ) -> Result<()> {
        let call = called(Operator::ReduceScatter, dtype, op, input, row);
        self.together(&call, input, || {
            if input.bytes == 0 {
                return Ok(());
            }
            let (inputs, mut to) = (self.inputs(input)?, output(out, input.bytes / self.size())?);
            for piece in pieces(input.bytes, row, self.rank(), self.size())? {
                // SAFETY: all ranks are in the call and write to no input; `output` checked the
                // capacity for all pieces.
                unsafe {
                    inputs.reduce(dtype, op, &piece, to)?;
                    to = to.add(piece.len());
                }
            }
            Ok(())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_whole_lines_and_cover_an_input_once() {
        for n in [1, 2, 3, 7, 64] {
            for bytes in [0, 1, 63, 64, 65, 128, 4095, 4096, 4097, 1_000_003] {
                let parts: Vec<_> = (0..n as u32).map(|rank| part(bytes, Rank(rank), n)).collect();
                assert_eq!(
                    (parts[0].start, parts[n - 1].end),
                    (0, bytes),
                    "{bytes} bytes, {n} ranks"
                );
                for pair in parts.windows(2) {
                    assert_eq!(pair[0].end, pair[1].start, "{bytes} bytes, {n} ranks");
                    assert!(
                        pair[1].start.is_multiple_of(LINE) || pair[1].is_empty(),
                        "{bytes} bytes, {n} ranks: {pair:?}"
                    );
                }
            }
        }
        let parts = [0, 1, 2].map(|rank| part(130, Rank(rank), 3));
        assert_eq!(parts, [0..64, 64..128, 128..130]);
        assert_eq!([0, 1, 2].map(|rank| part(64, Rank(rank), 3)), [0..64, 64..64, 64..64]);
    }

    #[test]
    fn pieces_are_one_of_each_row() {
        let pieces = |bytes, row, rank, n| {
            let found = pieces(bytes, row, Rank(rank), n)?;
            Ok::<_, Error>(found.map(|piece| (piece.start, piece.end)).collect::<Vec<_>>())
        };
        assert_eq!(pieces(24, 24, 1, 3), Ok(vec![(8, 16)]));
        assert_eq!(pieces(24, 6, 2, 3), Ok(vec![(4, 6), (10, 12), (16, 18), (22, 24)]));
        assert_eq!(pieces(0, 6, 2, 3), Ok(vec![]));
        for (bytes, row, n) in [(24, 0, 3), (24, 8, 3), (23, 6, 3)] {
            let error = pieces(bytes, row, 0, n).expect_err("nobody can divide that");
            assert!(error.message.contains("cannot be divided among 3 ranks"), "{error}");
        }
    }
}
