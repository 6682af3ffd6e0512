//! Which algorithm served how many calls of this process.

use crate::coll::call::Op;
use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

static SERVED: Mutex<BTreeMap<(&'static str, &'static str), u64>> = Mutex::new(BTreeMap::new());

/// Counts a call of `op` (`None`: sends and receives) served by `algorithm`.
pub(super) fn count(op: Option<Op>, algorithm: &'static str) {
    *SERVED.lock().unwrap_or_else(PoisonError::into_inner).entry((op.map_or("send_recv", Op::name), algorithm)).or_insert(0) += 1;
}

/// `{collective: {algorithm: calls}}`, of CUDA tensors.
pub fn served() -> BTreeMap<&'static str, BTreeMap<&'static str, u64>> {
    let mut all = BTreeMap::<_, BTreeMap<_, _>>::new();
    for (&(op, algorithm), &calls) in SERVED.lock().unwrap_or_else(PoisonError::into_inner).iter() {
        all.entry(op).or_default().insert(algorithm, calls);
    }
    all
}
