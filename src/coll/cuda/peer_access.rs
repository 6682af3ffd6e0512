//! Pairs of GPUs that were found to access each other's memory, remembered for the life of this
//! process.

use crate::lock::lock;
use std::collections::HashSet;
use std::sync::{Mutex, MutexGuard, OnceLock};

/// The UUIDs of this rank's GPU and of a peer's GPU.
pub(super) type Pair = ([u8; 16], [u8; 16]);

fn pairs() -> MutexGuard<'static, HashSet<Pair>> {
    static PAIRS: OnceLock<Mutex<HashSet<Pair>>> = OnceLock::new();
    lock(PAIRS.get_or_init(Mutex::default))
}

/// Returns true if all of `requested` have been noted.
pub(super) fn know(requested: &[Pair]) -> bool {
    let known = pairs();
    requested.iter().all(|pair| known.contains(pair))
}

/// Notes that the two GPUs of each pair in `found` can access each other's memory.
pub(super) fn note(found: &[Pair]) {
    pairs().extend(found);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_found_is_known_and_nothing_else() {
        let pair = |a: u8, b: u8| ([a; 16], [b; 16]);
        assert!(!know(&[pair(201, 202)]));
        note(&[pair(201, 202), pair(201, 203)]);
        assert!(know(&[pair(201, 203), pair(201, 202)]));
        assert!(
            !know(&[pair(201, 202), pair(202, 201)]),
            "the other way round is the other's to find out"
        );
    }
}
