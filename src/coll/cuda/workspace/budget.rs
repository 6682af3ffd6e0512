//! The budget of GPU memory for the groups of a process: the first groups get the requested size,
//! later ones less and less.

use crate::lock::lock;
use std::sync::Mutex;

/// GPU memory of all groups of this process, in bytes.
static TAKEN: Mutex<usize> = Mutex::new(0);

/// Approximate number of groups that get the requested size.
const FULL: usize = 4;
/// Minimum number of bytes offered to a group.
pub(in crate::coll::cuda) const MIN_BYTES: usize = 32 << 20;

/// A share of the budget; a drop returns it to the budget.
#[derive(Debug)]
pub(in crate::coll::cuda) struct BudgetShare(usize);

/// Returns how many of the `requested` bytes a new group may have. The budget is `FULL` times
/// `requested`; the group gets at most half of the budget's unused part, but may have [`MIN_BYTES`]
/// in any case.
pub(in crate::coll::cuda) fn offer(requested: usize) -> usize {
    let left = (FULL * requested).saturating_sub(*lock(&TAKEN));
    requested.min((left / 2).max(MIN_BYTES))
}

impl BudgetShare {
    /// Takes `bytes`.
    pub(in crate::coll::cuda) fn take(bytes: usize) -> Self {
        *lock(&TAKEN) += bytes;
        Self(bytes)
    }
}

impl Drop for BudgetShare {
    fn drop(&mut self) {
        *lock(&TAKEN) -= self.0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // proves P17
    #[test]
    fn fifty_groups_stay_bounded() {
        let requested = 256 << 20;
        let shares: Vec<BudgetShare> =
            (0..50).map(|_| BudgetShare::take(offer(requested))).collect();
        let bytes: Vec<usize> = shares.iter().map(|share| share.0).collect();
        assert_eq!(bytes[0], requested);
        assert!(
            bytes.windows(2).all(|pair| pair[0] >= pair[1]) && bytes[49] == MIN_BYTES,
            "{bytes:?}"
        );
        assert!(bytes.iter().sum::<usize>() <= FULL * requested + 50 * MIN_BYTES);
        drop(shares);
        assert_eq!(offer(requested), requested);
    }
}
