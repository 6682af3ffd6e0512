//! Statistics of this process: how many calls each algorithm served.

use crate::coll::call::Op;
use crate::lock::lock;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, Weak};

/// Counts the calls of a communicator whose kernels loaded or stored peers' tensors directly.
pub(super) trait DirectCalls: Send + Sync {
    /// Number of calls that went direct so far.
    fn direct(&self) -> u64;
}

/// How many calls of a collective (`None`: sends and receives) an algorithm has served.
struct Served {
    op: Option<Op>,
    algorithm: &'static str,
    calls: u64,
}

static SERVED: Mutex<Vec<Served>> = Mutex::new(Vec::new());

/// Counts a call of `op` (`None`: sends and receives) served by `algorithm`. Names are found by where they lie: comparing text would take
/// as long as the rest of a call's bookkeeping; one that lies at two places is added up where it is asked for.
pub(super) fn count(op: Option<Op>, algorithm: &'static str) {
    let mut all = lock(&SERVED);
    match all.iter_mut().find(|served| served.op == op && std::ptr::eq(served.algorithm, algorithm)) {
        Some(served) => served.calls += 1,
        None => all.push(Served { op, algorithm, calls: 1 }),
    }
}

/// `{collective: {algorithm: calls}}`, of CUDA tensors.
pub fn served() -> BTreeMap<&'static str, BTreeMap<&'static str, u64>> {
    let mut all = BTreeMap::<_, BTreeMap<_, _>>::new();
    for &Served { op, algorithm, calls } in lock(&SERVED).iter() {
        *all.entry(op.map_or("send_recv", Op::name)).or_default().entry(algorithm).or_insert(0) += calls;
    }
    all
}

/// Counters of the calls that went direct, which kernels write.
struct Direct {
    living: Vec<Weak<dyn DirectCalls>>,
    /// Count of groups that are gone.
    past: u64,
}

static DIRECT: Mutex<Direct> = Mutex::new(Direct { living: Vec::new(), past: 0 });

/// Counts what `report` counts from now on.
pub(super) fn add(report: &Arc<impl DirectCalls + 'static>) {
    let mut counts = lock(&DIRECT);
    counts.living.retain(|report| report.strong_count() > 0);
    let report: Weak<_> = Arc::downgrade(report);
    counts.living.push(report);
}

/// Keeps what `report` has counted; `end` then makes it count nothing.
pub(super) fn retire(report: &dyn DirectCalls, end: impl FnOnce()) {
    let mut counts = lock(&DIRECT);
    counts.past += report.direct();
    end();
}

/// Calls of this process, replays of graphs included, in which this rank's kernels loaded or stored tensors of peers directly.
pub fn direct() -> u64 {
    let counts = lock(&DIRECT);
    counts.past + counts.living.iter().filter_map(Weak::upgrade).map(|report| report.direct()).sum::<u64>()
}
