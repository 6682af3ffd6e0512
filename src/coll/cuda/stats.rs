//! Statistics of this process: how many calls each algorithm ran.

use crate::coll::call::Collective;
use crate::lock::lock;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, Weak};

/// Counts the calls of a communicator whose kernels loaded or stored peers' tensors directly
/// (zero-copy).
pub(super) trait DirectCalls: Send + Sync {
    /// Number of zero-copy calls so far.
    fn direct(&self) -> u64;
}

/// How many calls of a collective (`None`: sends and receives) an algorithm has run.
struct Served {
    op: Option<Collective>,
    algorithm: &'static str,
    calls: u64,
}

static SERVED: Mutex<Vec<Served>> = Mutex::new(Vec::new());

/// Counts a call of `op` (`None`: sends and receives) that `algorithm` ran. Names are compared by
/// address, because a comparison of text would take as long as the other bookkeeping of a call;
/// [`served`] adds up names with two addresses.
pub(super) fn count(op: Option<Collective>, algorithm: &'static str) {
    let mut all = lock(&SERVED);
    match all.iter_mut().find(|served| served.op == op && std::ptr::eq(served.algorithm, algorithm))
    {
        Some(served) => served.calls += 1,
        None => all.push(Served { op, algorithm, calls: 1 }),
    }
}

/// Returns `{collective: {algorithm: calls}}` for CUDA tensors.
pub fn served() -> BTreeMap<&'static str, BTreeMap<&'static str, u64>> {
    let mut all = BTreeMap::<_, BTreeMap<_, _>>::new();
    for &Served { op, algorithm, calls } in lock(&SERVED).iter() {
        *all.entry(op.map_or("send_recv", Collective::name))
            .or_default()
            .entry(algorithm)
            .or_insert(0) += calls;
    }
    all
}

/// The counters of zero-copy calls, which kernels write.
struct Direct {
    living: Vec<Weak<dyn DirectCalls>>,
    /// Sum over destroyed groups.
    past: u64,
}

static DIRECT: Mutex<Direct> = Mutex::new(Direct { living: Vec::new(), past: 0 });

/// Adds `report` to the counters.
pub(super) fn add(report: &Arc<impl DirectCalls + 'static>) {
    let mut counts = lock(&DIRECT);
    counts.living.retain(|report| report.strong_count() > 0);
    let report: Weak<_> = Arc::downgrade(report);
    counts.living.push(report);
}

/// Adds the final count of `report` to the past counts, then calls `end`, after which `report` no
/// longer counts.
pub(super) fn retire(report: &dyn DirectCalls, end: impl FnOnce()) {
    let mut counts = lock(&DIRECT);
    counts.past += report.direct();
    end();
}

/// Returns the number of calls of this process, including replays of graphs, in which this rank's
/// kernels loaded or stored tensors of peers directly.
pub fn direct() -> u64 {
    let counts = lock(&DIRECT);
    counts.past
        + counts.living.iter().filter_map(Weak::upgrade).map(|report| report.direct()).sum::<u64>()
}
