//! The core on which a thread runs.

use rustix::thread::{CpuSet, sched_getaffinity, sched_getcpu, sched_setaffinity};

/// Returns the number of the core on which this thread runs.
pub fn current() -> usize {
    sched_getcpu()
}

/// Moves this thread to another allowed core that is not `taken`, and keeps its affinity; false if
/// no such core exists. Picks the nearest number, which is rarely on another socket.
pub fn leave(taken: impl Fn(usize) -> bool) -> bool {
    let Ok(allowed) = sched_getaffinity(None) else { return false };
    let here = current();
    let free = |&core: &usize| core != here && allowed.is_set(core) && !taken(core);
    let Some(target) = (0..CpuSet::MAX_CPU).filter(free).min_by_key(|core| core.abs_diff(here))
    else {
        return false;
    };
    let mut only = CpuSet::new();
    only.set(target);
    if sched_setaffinity(None, &only).is_err() {
        return false;
    }
    restore(&allowed);
    true
}

/// Restores the affinity of this thread to `allowed`. If `allowed` was the thread's whole cpuset,
/// this function requests all cores: the system remembers the request, and would otherwise confine
/// the thread to the present cores if the cpuset grew.
fn restore(allowed: &CpuSet) {
    let mut everything = CpuSet::new();
    (0..CpuSet::MAX_CPU).for_each(|core| everything.set(core));
    // Both calls can fail only if the cpuset has just shrunk; then the system has corrected the
    // mask itself.
    let _ = sched_setaffinity(None, &everything);
    if sched_getaffinity(None).as_ref() != Ok(allowed) {
        let _ = sched_setaffinity(None, allowed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moves_where_there_is_a_free_core_and_keeps_the_mask() {
        let before = sched_getaffinity(None).expect("affinity");
        let cores = before.count() as usize;
        assert_eq!(leave(|_| false), cores > 1);
        assert!(!leave(|_| true), "all taken");
        assert_eq!(sched_getaffinity(None).expect("affinity"), before);
        // A mask that was chosen explicitly stays, too.
        let mut two = CpuSet::new();
        (0..CpuSet::MAX_CPU)
            .filter(|&core| before.is_set(core))
            .take(2)
            .for_each(|core| two.set(core));
        sched_setaffinity(None, &two).expect("a part of what is allowed");
        leave(|_| false);
        assert_eq!(sched_getaffinity(None).expect("affinity"), two);
    }
}
