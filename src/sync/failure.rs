//! The first failure of a group: written once, read by every rank.

use super::atomic::Atomic;
use crate::error::{Error, ErrorKind};
use crate::rank::Rank;
use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};
use std::time::{Duration, Instant};

const NONE: u32 = 0;
const WRITING: u32 = 1;
const WRITTEN: u32 = 2;
const TEXT_BYTES: usize = 3072;

/// The first failure of a group, in shared memory. The first writer wins, and later failures are
/// ignored. The type parameters are for loom.
#[repr(C)]
pub struct FirstFailure<W = AtomicU32, B = AtomicU8, const TEXT: usize = TEXT_BYTES> {
    state: W,
    kind: W,
    author: W,
    bytes: W,
    text: [B; TEXT],
}

/// The state that a reader found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FailureState {
    /// No failure.
    None,
    /// A failure whose author has set `state` to `WRITING` and not yet to `WRITTEN`, or was killed
    /// in between.
    Writing,
    /// The failure.
    Written(Error),
}

impl<W: Atomic<u32>, B: Atomic<u8>, const TEXT: usize> FirstFailure<W, B, TEXT> {
    /// Makes an empty failure record in private words.
    #[cfg(any(test, loom))]
    pub fn blank(word: impl Fn(u32) -> W, byte: impl Fn(u8) -> B) -> Self {
        Self {
            state: word(NONE),
            kind: word(0),
            author: word(0),
            bytes: word(0),
            text: std::array::from_fn(|_| byte(0)),
        }
    }

    /// Records `error` unless a failure is recorded already.
    pub fn record(&self, author: Rank, error: &Error) {
        if self.state.compare_exchange(NONE, WRITING, Ordering::AcqRel, Ordering::Acquire).is_err()
        {
            return;
        }
        let mut bytes = error.message.len().min(TEXT);
        while !error.message.is_char_boundary(bytes) {
            bytes -= 1;
        }
        for (cell, byte) in self.text.iter().zip(&error.message.as_bytes()[..bytes]) {
            cell.store(*byte, Ordering::Relaxed);
        }
        self.kind.store(error.kind as u32, Ordering::Relaxed);
        self.author.store(author.0, Ordering::Relaxed);
        self.bytes.store(bytes as u32, Ordering::Relaxed);
        self.state.store(WRITTEN, Ordering::Release);
    }

    /// Returns true if a failure is recorded: one load of a cache line that no rank writes before a
    /// failure.
    pub fn stands(&self) -> bool {
        self.state.load(Ordering::Relaxed) != NONE
    }

    /// Returns the failure as `reader` sees it: an abort by another rank has the kind `Peer`.
    pub fn read(&self, reader: Rank) -> Option<Error> {
        let start = Instant::now();
        loop {
            match self.look(reader) {
                FailureState::None => return None,
                FailureState::Written(error) => return Some(error),
                // The author may have been stopped or killed between its two stores to `state`.
                FailureState::Writing if start.elapsed() > Duration::from_millis(100) => {
                    return Some(Error::peer(
                        "another rank was reporting a failure and has not finished",
                    ));
                }
                FailureState::Writing => std::thread::yield_now(),
            }
        }
    }

    /// Returns the present state, as `reader` sees it.
    pub fn look(&self, reader: Rank) -> FailureState {
        match self.state.load(Ordering::Acquire) {
            NONE => return FailureState::None,
            WRITTEN => {}
            _ => return FailureState::Writing,
        }
        let bytes = (self.bytes.load(Ordering::Relaxed) as usize).min(TEXT);
        let text: Vec<u8> =
            self.text[..bytes].iter().map(|cell| cell.load(Ordering::Relaxed)).collect();
        let own = self.author.load(Ordering::Relaxed) == reader.0;
        let read = if own { ErrorKind::from_code } else { ErrorKind::from_peer };
        let kind = read(self.kind.load(Ordering::Relaxed) as u8).unwrap_or(ErrorKind::Internal);
        FailureState::Written(Error { kind, message: String::from_utf8_lossy(&text).into_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // proves P10
    #[test]
    fn the_first_failure_stands() {
        let failure: FirstFailure = FirstFailure::blank(AtomicU32::new, AtomicU8::new);
        assert_eq!((failure.stands(), failure.read(Rank(0))), (false, None));
        failure.record(Rank(1), &Error::aborted("rank 1 aborted"));
        failure.record(Rank(2), &Error::peer("later"));
        assert_eq!(failure.read(Rank(1)), Some(Error::aborted("rank 1 aborted")));
        assert_eq!(failure.read(Rank(0)), Some(Error::peer("rank 1 aborted")));
        assert!(failure.stands());
        // Other ranks read a different error only after an abort.
        let failure: FirstFailure = FirstFailure::blank(AtomicU32::new, AtomicU8::new);
        failure.record(Rank(1), &Error::timeout("too late"));
        for reader in [Rank(0), Rank(1)] {
            assert_eq!(failure.read(reader), Some(Error::timeout("too late")));
        }
    }

    #[test]
    fn an_author_who_never_ends_is_given_up() {
        let failure: FirstFailure = FirstFailure::blank(AtomicU32::new, AtomicU8::new);
        failure.state.store(WRITING, Ordering::Relaxed);
        assert_eq!((failure.stands(), failure.look(Rank(0))), (true, FailureState::Writing));
        let start = Instant::now();
        assert_eq!(failure.read(Rank(0)).map(|error| error.kind), Some(ErrorKind::Peer));
        assert!(start.elapsed() >= Duration::from_millis(100));
    }

    #[test]
    fn long_texts_are_cut_between_characters() {
        let failure: FirstFailure = FirstFailure::blank(AtomicU32::new, AtomicU8::new);
        failure.record(Rank(0), &Error::peer("a".to_owned() + &"é".repeat(TEXT_BYTES)));
        let text = failure.read(Rank(0)).expect("recorded").message;
        assert_eq!(text, "a".to_owned() + &"é".repeat(TEXT_BYTES / 2 - 1));
    }
}
