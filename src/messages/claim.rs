//! Claim: the right to fill a receive for which messages of this host and of others compete.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

const FREE: u8 = 0;

/// One side's claim on a receive that two sides look for messages for. The first that asks has it for good.
#[derive(Clone, Debug)]
pub struct Claim {
    owner: Arc<AtomicU8>,
    side: u8,
}

impl Claim {
    /// Claims of the two sides of one receive.
    pub fn pair() -> [Self; 2] {
        let owner = Arc::new(AtomicU8::new(FREE));
        [1, 2].map(|side| Self { owner: Arc::clone(&owner), side })
    }

    /// Takes the receive, unless the other side has it; returns whether this side has it now.
    pub fn take(&self) -> bool {
        let taken = self.owner.compare_exchange(FREE, self.side, Ordering::AcqRel, Ordering::Acquire);
        taken.map_or_else(|owner| owner == self.side, |_| true)
    }

    /// Whether the other side has it.
    pub fn is_lost(&self) -> bool {
        ![FREE, self.side].contains(&self.owner.load(Ordering::Acquire))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_side_has_it() {
        let [here, away] = Claim::pair();
        assert!(!here.is_lost() && !away.is_lost());
        assert!(away.take() && away.take() && !here.take());
        assert!(here.is_lost() && !away.is_lost());
        let [here, _] = Claim::pair();
        assert!(here.take());
    }
}
