//! Budget of GPU memory for the groups of a process: the first ones get what was asked for, later ones ever less.

use crate::lock::lock;
use std::sync::Mutex;

/// Bytes that all groups of this process have on its GPU.
static TAKEN: Mutex<usize> = Mutex::new(0);

/// Groups that get what was asked for, about.
const FULL: usize = 4;
/// Least bytes that a group is offered.
pub(in crate::coll::cuda) const LEAST: usize = 32 << 20;

/// A share, given back when dropped.
#[derive(Debug)]
pub(in crate::coll::cuda) struct Share(usize);

/// Bytes that a group may have if `requested` bytes are the usual share: at most half of what is left of `FULL` shares, but no less than
/// the least.
pub(in crate::coll::cuda) fn offer(requested: usize) -> usize {
    let left = (FULL * requested).saturating_sub(*lock(&TAKEN));
    requested.min((left / 2).max(LEAST))
}

impl Share {
    /// Takes `bytes`.
    pub(in crate::coll::cuda) fn take(bytes: usize) -> Self {
        *lock(&TAKEN) += bytes;
        Self(bytes)
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        *lock(&TAKEN) -= self.0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fifty_groups_stay_bounded() {
        let requested = 256 << 20;
        let shares: Vec<Share> = (0..50).map(|_| Share::take(offer(requested))).collect();
        let bytes: Vec<usize> = shares.iter().map(|share| share.0).collect();
        assert_eq!(bytes[0], requested);
        assert!(bytes.windows(2).all(|pair| pair[0] >= pair[1]) && bytes[49] == LEAST, "{bytes:?}");
        assert!(bytes.iter().sum::<usize>() <= FULL * requested + 50 * LEAST);
        drop(shares);
        assert_eq!(offer(requested), requested);
    }
}
