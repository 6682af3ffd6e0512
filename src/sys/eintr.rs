//! Retries system calls that a signal has interrupted.

use rustix::io::{Errno, Result};

/// Maximum number of interruptions in a row. Signals do not interrupt one call more often than
/// that, so a tracer or a system-call filter is making every try fail.
const TRIES: usize = 100;

/// Repeats `call` while it is interrupted, at most `TRIES` times; then returns its `INTR`.
pub fn retry<T>(mut call: impl FnMut() -> Result<T>) -> Result<T> {
    for _ in 1..TRIES {
        match call() {
            Err(Errno::INTR) => {}
            outcome => return outcome,
        }
    }
    call()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interrupted_calls_are_done_again_and_given_up_at_last() {
        let mut tries = 0;
        let mut after = |count| {
            retry(|| {
                tries += 1;
                if tries < count { Err(Errno::INTR) } else { Ok(tries) }
            })
        };
        assert_eq!(after(3), Ok(3));
        assert_eq!(after(usize::MAX), Err(Errno::INTR));
        assert_eq!(retry(|| Err::<(), _>(Errno::IO)), Err(Errno::IO));
    }
}
