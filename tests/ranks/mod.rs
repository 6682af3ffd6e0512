//! Ranks as threads of the test process, over memory that they share.

use std::time::Duration;
use symm::coll::call::Span;
use symm::control::Identity;
use symm::group::{Group, Tuning};
use symm::mem::layout::Layout;
use symm::mem::shm::Segment;
use symm::rank::Rank;

/// Runs `body` on `n` ranks, each in a thread of its own.
#[allow(dead_code, reason = "not every test that needs spans runs groups this way")]
pub(crate) fn with_ranks(n: u32, tuning: Tuning, body: impl Fn(&Group, u32) + Sync) {
    let bytes = Layout::new(n as usize).total_bytes();
    let file = Segment::create(bytes).expect("memfd");
    std::thread::scope(|scope| {
        for rank in 0..n {
            let (file, body) = (file.try_clone().expect("dup"), &body);
            scope.spawn(move || {
                let segment = Segment::map(file, bytes).expect("map");
                let members = (0..n).map(|global| Identity { pid: std::process::id(), global }).collect();
                let group = Group::assemble(segment, "test", Rank(rank), members, Duration::from_secs(60), tuning).expect("assemble");
                body(&group, rank);
            });
        }
    });
}

/// The whole of `data`.
#[allow(dead_code, reason = "not every test that runs groups this way has its tensors in slices")]
pub(crate) fn span<T>(data: &mut [T]) -> Span {
    Span { addr: data.as_mut_ptr() as usize, bytes: size_of_val(data) }
}
