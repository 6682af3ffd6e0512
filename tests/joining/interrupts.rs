//! A signal ends a join, whichever rank or event the join waits for.

use crate::process::{alone, fork, status_of};
use crate::threads::{self, put, record_of, sleeper, spec};
use rustix::fd::OwnedFd;
use rustix::net::{SocketAddrUnix, SocketFlags};
use serde_json::Value;
use std::sync::OnceLock;
use std::time::{Duration, Instant};
use symm::bootstrap::join;
use symm::error::{Error, ErrorKind};
use symm::store::memory::MemoryStore;
use symm::sys::interrupt;

/// When the process of a rank started to join.
static STARTED: OnceLock<Instant> = OnceLock::new();

/// Returns true if a signal ends the join of `rank` of two after 300 ms. The store has `other`, the
/// record of the other rank, if given. The join runs in a separate process, because signals concern
/// only the first thread of a process.
fn interrupted(rank: u32, other: Option<&Value>) -> bool {
    let status = status_of(fork(|| {
        STARTED.get_or_init(Instant::now);
        let store = MemoryStore::new();
        other.into_iter().for_each(|record| put(&store, 1 - rank, record));
        match join(&store, &spec("g", rank, 2, threads::LONG)) {
            Err(Error { kind: ErrorKind::Aborted, message }) => {
                i32::from(!message.contains(&format!("rank {rank} (pid")))
            }
            Ok(_) | Err(_) => 2,
        }
    }));
    status == 0
}

#[test]
fn a_signal_ends_a_join_while_other_ranks_or_their_records_are_awaited() {
    if !alone() {
        return;
    }
    interrupt::ask_with(|| {
        STARTED.get().is_some_and(|started| started.elapsed() > Duration::from_millis(300))
    });
    assert!(interrupted(0, None), "no other rank has announced itself");
    let mut record = record_of(1, 2);
    assert!(interrupted(0, Some(&record)), "rank 1 does not connect");
    let (mut child, start) = sleeper();
    child.kill().unwrap();
    child.wait().unwrap();
    (record["pid"], record["start_time"]) = (child.id().into(), start.into());
    assert!(interrupted(0, Some(&record)), "the process of rank 1 has ended");

    let mut record = record_of(0, 2);
    assert!(interrupted(1, Some(&record)), "rank 0 does not listen");
    let name = format!("symm-test-{}", std::process::id());
    let address = SocketAddrUnix::new_abstract_name(name.as_bytes()).unwrap();
    let listener = threads::socket(SocketFlags::empty());
    rustix::net::bind(&listener, &address).unwrap();
    rustix::net::listen(&listener, 2).unwrap();
    record["socket"] = name.into();
    assert!(interrupted(1, Some(&record)), "rank 0 does not answer");
    let sockets = (0..100).map(|_| threads::socket(SocketFlags::NONBLOCK));
    let _queue: Vec<OwnedFd> =
        sockets.take_while(|socket| rustix::net::connect(socket, &address).is_ok()).collect();
    assert!(interrupted(1, Some(&record)), "rank 0 does not accept");
}
