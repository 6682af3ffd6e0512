//! Collectives on symmetric memory of the host: each rank reads the others' buffers and writes only
//! to its own memory.
//!
//! - [`reductions`]: one-shot and two-shot all-reduce, reduce-scatter
//! - [`exchanges`]: all-gather, all-to-all
//! - [`splits`]: how many rows of an all-to-all each rank sends to each other rank; pure
//! - [`agreement`]: compares the ranks' calls before any rank reads another's memory
//!
//! A collective starts and ends with a barrier, so its input may be written before the call and
//! after it. An input is a tensor in this rank's buffer, and the others' inputs are at the same
//! offset in their buffers. No byte outside of the window is read, whatever the peers write. If the
//! ranks' calls differ, all ranks fail with the same error before they reduce anything.
#![allow(unsafe_code, reason = "the bytes of tensors, by their addresses")]

pub(crate) mod agreement;
pub mod exchanges;
pub mod reductions;
mod splits;

use super::SymmetricWindow;
use crate::error::{Error, Result};
use crate::mem::span::Span;
use crate::rank::Rank;
use agreement::OperatorCall;
use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering};

/// The channel of the barriers, as in torch's operators.
const CHANNEL: i32 = 0;

/// The inputs of all ranks: the same byte range of each buffer, mapped while the window lives.
struct Inputs<'a> {
    window: &'a SymmetricWindow,
    offset: usize,
    bytes: usize,
}

impl Inputs<'_> {
    /// Returns the address of `range` in the input of `rank`.
    fn at(&self, rank: Rank, range: &Range<usize>) -> *mut u8 {
        assert!(
            range.start <= range.end && range.end <= self.bytes,
            "bytes {range:?} of an input of {}",
            self.bytes
        );
        (self.window.buffers[rank.index()] as usize + self.offset + range.start) as *mut u8
    }
}

/// Returns the first byte of `out`, which must have capacity for `bytes`.
fn output(out: Span, bytes: usize) -> Result<*mut u8> {
    if out.bytes < bytes {
        return Err(Error::value(format!(
            "{bytes} bytes do not fit into an output of {}",
            out.bytes
        )));
    }
    Ok(out.ptr())
}

impl SymmetricWindow {
    /// Returns the inputs of all ranks, given this rank's `own`. Fails if `own` is not in the
    /// window or not on the host, or in a forked child.
    fn inputs(&self, own: Span) -> Result<Inputs<'_>> {
        self.check_process()?;
        let Span { addr, bytes } = own;
        let begin = self.buffers[self.rank().index()] as usize;
        let offset = if bytes == 0 { Some(0) } else { addr.checked_sub(begin) };
        let inside =
            |&offset: &usize| offset.checked_add(bytes).is_some_and(|end| end <= self.bytes);
        let offset = offset.filter(inside).filter(|_| self.gpu().is_none()).ok_or_else(|| {
            Error::value(format!(
                "{bytes} bytes at {addr:#x} are not in a window of the host of {} at {begin:#x}",
                self.bytes
            ))
        })?;
        Ok(Inputs { window: self, offset, bytes })
    }

    /// Number of ranks.
    fn size(&self) -> usize {
        self.buffers.len()
    }

    /// Returns all ranks, starting with this one, so that the ranks do not all read the same buffer
    /// at once.
    fn own_first(&self) -> impl Iterator<Item = Rank> + use<> {
        let (me, n) = (self.rank().0, self.size() as u32);
        (0..n).map(move |step| Rank((me + step) % n))
    }

    /// Returns once all ranks have called it.
    fn meet(&self) -> Result<()> {
        self.barrier(CHANNEL, None, 0)
    }

    /// Runs `steps` of `call` on `input` between two barriers: all ranks have made the same call
    /// before they start, and no rank returns before all have finished. A rank whose steps fail
    /// still enters the second barrier, because the others may succeed.
    fn together<T>(
        &self,
        call: &OperatorCall,
        input: Span,
        steps: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        self.publish_call(call, input)?;
        self.meet()?;
        let outcome = self.compare_calls().and_then(|()| steps());
        self.meet()?;
        outcome
    }
}

/// Stores `value` to the word at `address` with release ordering: a thread that loads it with
/// acquire ordering sees this thread's earlier writes.
///
/// # Safety
/// A word exists at `address`, and all concurrent accesses to it are atomic.
pub unsafe fn publish_word(address: usize, value: u32) -> Result<()> {
    let word = address as *const AtomicU32;
    if !word.is_aligned() {
        return Err(Error::value(format!(
            "a word at {address:#x} cannot be stored at once: its address is not a multiple of 4"
        )));
    }
    // SAFETY: aligned, as checked above; the rest is the caller's promise.
    unsafe { &*word }.store(value, Ordering::Release);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    #[test]
    fn words_are_stored_at_once_or_not_at_all() {
        let words = [AtomicU32::new(0), AtomicU32::new(0)];
        let address = words.as_ptr() as usize;
        // SAFETY: the words belong to this test and no other thread knows them.
        unsafe {
            publish_word(address + 4, u32::MAX).expect("aligned");
            assert_eq!(
                publish_word(address + 1, 7).expect_err("across two words").kind,
                ErrorKind::Value
            );
        }
        assert_eq!(words.map(AtomicU32::into_inner), [0, u32::MAX]);
    }

    #[test]
    fn outputs_have_room() {
        let out = Span { addr: 64, bytes: 8 };
        assert_eq!(output(out, 8), Ok(out.ptr()));
        assert!(
            output(out, 9)
                .expect_err("too much")
                .message
                .contains("9 bytes do not fit into an output of 8")
        );
    }
}
