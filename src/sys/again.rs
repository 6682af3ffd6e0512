//! System calls that a signal has interrupted.

use rustix::io::{Errno, Result};

/// Most interruptions in a row. More often no real signals come: a call that never succeeds is refused by what traces or filters this
/// process.
const TRIES: usize = 100;

/// Does `call` again while it is interrupted, but not for ever: then its `INTR` is the answer.
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
