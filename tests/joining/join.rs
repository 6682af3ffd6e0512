//! Joining with threads as ranks: the resources that they share, the errors on failure, and the
//! leftovers.

use crate::threads::{
    Doctored, Flat, LONG, SHORT, SOON, error, refused, sleeper, spec, threads, threads_named,
};
use rustix::fs::SealFlags;
use std::collections::BTreeSet;
use std::os::fd::AsFd;
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};
use symm::bootstrap::{Discovered, JoinSpec, Joined, MemberProcess, find, join};
use symm::error::{Error, ErrorKind, Result};
use symm::exit_watch::watch;
use symm::store::Store;
use symm::store::file::FileStore;
use symm::store::memory::MemoryStore;
use symm::store::offload::OffloadedStore;
use symm::store::request::Request;
use symm::store::table::TableReply;
use symm::sys::byte_lock::{Mode, try_lock};
use symm::sys::process::{self, ProcessId};

// proves P20
#[test]
fn all_ranks_share_sealed_memory_token_and_members() {
    let Some(_flat) = Flat::start() else { return };
    for size in 1..=8 {
        let store = MemoryStore::new();
        let all: Vec<Joined> =
            threads(0..size, |rank| join(&store, &spec("g", rank, size, LONG)).unwrap());
        assert!(store.is_empty());
        rustix::io::pwrite(&all[0].segment, b"hello", 100).unwrap();
        for joined in &all {
            let mut bytes = [0; 5];
            rustix::io::pread(&joined.segment, &mut bytes, 100).unwrap();
            assert_eq!(&bytes, b"hello");
            assert_eq!(rustix::fs::fstat(&joined.segment).unwrap().st_size, 8192);
            let seals = rustix::fs::fcntl_get_seals(&joined.segment).unwrap();
            assert!(seals.contains(SealFlags::SHRINK | SealFlags::SEAL), "{seals:?}");
            assert!(rustix::fs::ftruncate(&joined.segment, 4096).is_err());
            assert!(rustix::fs::ftruncate(&joined.segment, 1 << 20).is_err());
            let flags = rustix::io::fcntl_getfd(&joined.segment).unwrap();
            assert!(flags.contains(rustix::io::FdFlags::CLOEXEC));
            assert_eq!(joined.token, all[0].token);
            assert_eq!(joined.members.len(), size as usize);
            for member in &joined.members {
                assert_eq!(member.pid, std::process::id());
                assert!(member.pidfd.is_none());
            }
        }
    }
}

/// Counts how often each operation is requested.
#[derive(Default)]
struct Counted {
    inner: MemoryStore,
    keys: Mutex<BTreeSet<String>>,
}

impl Store for Counted {
    fn call(&self, request: &Request<'_>, limit: Option<Duration>) -> Result<TableReply> {
        self.keys.lock().unwrap().insert(format!("{:?} {:?}", request.op, request.keys));
        self.inner.call(request, limit)
    }
}

#[test]
fn ranks_of_one_node_say_no_more_where_nodes_may_be_connected() {
    let Some(_flat) = Flat::start() else { return };
    let [strict, open] = [false, true].map(|several| {
        let store = Counted::default();
        threads(0..4, |rank| {
            let spec = spec("g", rank, 4, LONG);
            let joined = if several {
                match find(&store, &spec).unwrap() {
                    Discovered::SingleNode(joined) => joined,
                    Discovered::MultiNode(apart) => panic!("on one node: {apart:?}"),
                }
            } else {
                join(&store, &spec).unwrap()
            };
            assert_eq!(joined.members.len(), 4);
        });
        assert!(store.inner.is_empty());
        store.keys.into_inner().unwrap()
    });
    assert_eq!(strict, open);
}

#[test]
fn ranks_that_do_not_exist_and_more_than_one_node_can_have_are_refused() {
    let Some(_flat) = Flat::start() else { return };
    let store = MemoryStore::new();
    // The ranks are rejected once they know that all of them are on one node.
    let errors = threads(0..129, |rank| {
        let all = spec("g", rank, 129, LONG);
        find(&store, &JoinSpec { segment_bytes: 0, reserved_bytes: 0, ..all }).err().unwrap()
    });
    let expected = "129 ranks is larger than torch-symm supports on one node (128)";
    for error in errors {
        assert!(error.kind == ErrorKind::Config && error.message.contains(expected), "{error}");
    }
    let store = MemoryStore::new();
    let outcome = join(&store, &spec("g", 4, 4, LONG));
    assert_eq!(*error(&outcome), Error::value("rank 4 does not exist in group \"g\" of 4 ranks"));
    assert_eq!(error(&join(&store, &spec("g", 0, 0, LONG))).kind, ErrorKind::Value);
    assert_eq!(error(&join(&store, &spec("g", 0, 129, LONG))).kind, ErrorKind::Config);
    assert!(store.is_empty());
}

// proves P15
#[test]
fn missing_ranks_are_named_by_all() {
    let Some(_flat) = Flat::start() else { return };
    let store = MemoryStore::new();
    let started = Instant::now();
    let outcomes = threads([0, 1], |rank| join(&store, &spec("g", rank, 4, SHORT)));
    assert!(started.elapsed() < SOON);
    let expected = "waited 0.4 s for ranks 2 and 3 to join group \"g\" of 4 ranks";
    for outcome in &outcomes {
        refused(outcome, ErrorKind::Timeout, expected);
    }
    // Each rank leaves its record with the cause. The record does not affect a group of another
    // name.
    let keys = ["symm/g/0/0", "symm/g/0/1"];
    let stands = |key: &str| {
        String::from_utf8(store.get(key, None).unwrap().to_vec())
            .unwrap()
            .contains("for ranks 2 and 3 to join")
    };
    assert!(keys.into_iter().all(stands) && store.num_keys() == Ok(2));
    threads(0..2, |rank| join(&store, &spec("h", rank, 2, LONG)).unwrap());
    assert!(keys.into_iter().all(stands) && store.num_keys() == Ok(2));
    // The next attempt of all ranks succeeds in spite of the records of the failed attempt.
    let tokens = threads(0..4, |rank| join(&store, &spec("g", rank, 4, LONG)).unwrap().token);
    assert!(tokens.iter().all(|token| *token == tokens[0]));
    assert!(store.is_empty());
}

#[test]
fn a_name_that_torch_derives_from_other_groups_is_explained_to_who_waits() {
    let Some(_flat) = Flat::start() else { return };
    let store = MemoryStore::new();
    for (group, explained) in [("0123456789abcdef0123456789abcdef01234567", true), ("g", false)] {
        let outcome = join(&store, &spec(group, 0, 2, SHORT));
        refused(&outcome, ErrorKind::Timeout, "for rank 1 to join");
        let message = &error(&outcome).message;
        assert_eq!(message.contains("joins under another name"), explained, "{message}");
    }
}

#[test]
fn a_late_rank_learns_why_the_others_left() {
    let Some(_flat) = Flat::start() else { return };
    let store = MemoryStore::new();
    error(&join(&store, &spec("g", 0, 2, Duration::from_millis(1))));
    let started = Instant::now();
    let outcome = join(&store, &spec("g", 1, 2, LONG));
    assert!(started.elapsed() < SOON);
    refused(&outcome, ErrorKind::Timeout, "for rank 1 to join");
}

/// A store in which a request that writes blocks until the test releases it, whatever the timeout
/// of the request.
struct Stopped {
    inner: MemoryStore,
    go: Mutex<Receiver<()>>,
}

impl Store for Stopped {
    fn call(&self, request: &Request<'_>, limit: Option<Duration>) -> Result<TableReply> {
        if request.op.writes() {
            let _ = self.go.lock().unwrap().recv();
        }
        self.inner.call(request, limit)
    }
}

#[test]
fn a_store_that_does_not_answer_is_named_at_the_deadline() {
    let Some(_flat) = Flat::start() else { return };
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store");
    let file = FileStore::open(&path, 2).unwrap();
    let lock = std::fs::OpenOptions::new().read(true).write(true).open(&path).unwrap();
    assert!(try_lock(lock.as_fd(), 1 << 62, Mode::Exclusive).unwrap());
    let (go, stopped) = channel();
    let worker = OffloadedStore::new(
        Arc::new(Stopped { inner: MemoryStore::new(), go: Mutex::new(stopped) }),
        "the store at x:1".into(),
    )
    .unwrap();
    let holder = format!("is held by process {} (alive, ", std::process::id());
    let cases: [(&dyn Store, &str); 2] =
        [(&file, &holder), (&worker, "the store at x:1 did not answer CompareSet within ")];
    for (store, expected) in cases {
        let started = Instant::now();
        let outcome = join(store, &spec("g", 1, 2, SHORT));
        assert!(started.elapsed() < SOON, "{:?}", started.elapsed());
        let Error { kind, message } = error(&outcome);
        assert_eq!(*kind, ErrorKind::Timeout);
        let begin = format!(
            "rank 1 (pid {}) could not join group \"g\" of 2 ranks: CompareSet \
             of \"symm/g/0/1\" was not",
            std::process::id()
        );
        assert!(message.starts_with(&begin) && message.contains(expected), "{message}");
    }
    drop((go, worker, lock));
    drop(file);
}

#[test]
fn disagreeing_ranks_all_raise_the_same() {
    let Some(_flat) = Flat::start() else { return };
    let store = MemoryStore::new();
    let started = Instant::now();
    // The tests of `src/bootstrap/record.rs` have the other disagreements.
    let doctored = |rank, size| {
        let doctored = Doctored { inner: &store, from: "\"protocol\":3", to: "\"protocol\":77" };
        let store: &dyn Store = if rank >= 2 { &doctored } else { &store };
        join(store, &spec(&format!("{size} ranks"), rank, size, LONG))
    };
    let outcomes = threads(0..4, |rank| {
        if rank == 3 {
            // The others have read the records of three ranks before rank 3 joins.
            let keys = [0, 1, 2].map(|rank| format!("symm/4 ranks/0/{rank}"));
            store.wait(&keys.each_ref().map(String::as_str), Some(LONG)).expect("published");
            thread::sleep(Duration::from_millis(100));
        }
        doctored(rank, 4)
    });
    assert!(started.elapsed() < SOON);
    for outcome in &outcomes {
        refused(
            outcome,
            ErrorKind::Config,
            "ranks 0, 2 and 3 run different versions of torch-symm",
        );
        assert!(!error(outcome).message.contains("had not joined"), "{outcome:?}");
    }
    for outcome in threads(0..3, |rank| doctored(rank, 5)) {
        refused(&outcome, ErrorKind::Config, "ranks 0 and 2 run different versions of torch-symm");
        assert!(error(&outcome).message.ends_with("; 2 of 5 ranks had not joined by then"));
    }
    let store = MemoryStore::new();
    let started = Instant::now();
    // Rank 1 waits for ranks 2 and 3, which never arrive.
    let outcomes =
        threads(0..2, |rank| join(&store, &spec("g", rank, if rank == 0 { 2 } else { 4 }, LONG)));
    assert!(started.elapsed() < SOON);
    for outcome in &outcomes {
        assert!(error(outcome).message.contains("rank 0 says 2 ranks, rank 1 4"), "{outcome:?}");
    }
}

// proves P16
#[test]
fn memory_that_rank_0_cannot_have_is_told_to_all_with_what_is_free() {
    let Some(_flat) = Flat::start() else { return };
    let store = MemoryStore::new();
    let started = Instant::now();
    let outcomes = threads(0..3, |rank| {
        join(&store, &JoinSpec { reserved_bytes: 1 << 60, ..spec("g", rank, 3, LONG) })
    });
    assert!(started.elapsed() < SOON);
    let expected = format!(
        "out of memory: rank 0 (pid {}), to join group \"g\" of 3 ranks, needs {} bytes, ",
        std::process::id(),
        1u64 << 60
    );
    for outcome in &outcomes {
        refused(outcome, ErrorKind::Config, " are free ");
        assert!(error(outcome).message.starts_with(&expected), "{outcome:?}");
    }
}

// proves P17
#[test]
fn two_hundred_groups_at_once_leave_nothing() {
    let Some(_flat) = Flat::start() else { return };
    let store = MemoryStore::new();
    let (groups, size) = (200, 3);
    let started = Instant::now();
    let outcomes = threads(0..groups * size, |index| {
        let group = format!("group-{}", index / size);
        join(&store, &spec(&group, index % size, size, LONG))
    });
    eprintln!("{groups} groups of {size} threads at once: {:?}", started.elapsed());
    assert!(outcomes.iter().all(Result::is_ok));
    assert!(store.is_empty());
}

// proves P11
#[test]
fn a_thousand_groups_of_one_name_leave_nothing() {
    let Some(_flat) = Flat::start() else { return };
    let store = MemoryStore::new();
    let (cycles, size) = (1000, 4);
    let started = Instant::now();
    let tokens = threads(0..size, |rank| {
        let cycle = |_| join(&store, &spec("g", rank, size, LONG)).unwrap().token;
        (0..cycles).map(cycle).collect::<Vec<_>>()
    });
    eprintln!("{cycles} joins of {size} threads: {:?} each", started.elapsed() / cycles);
    assert!(tokens.iter().all(|others| *others == tokens[0]));
    assert!(store.is_empty());
}

/// Number of threads of this process that watch other processes.
fn watchers() -> usize {
    threads_named("symm-exit-watch")
}

// proves P17
#[test]
fn one_watcher_serves_all_groups_and_ends_with_the_last() {
    let Some(_flat) = Flat::start() else { return };
    let (mut child, start_time) = sleeper();
    let pid = child.id();
    let pidfd = process::open(ProcessId { pid, start_time }).unwrap();
    let member = MemberProcess { pid, start_time, pidfd };
    for cycle in 0..100 {
        let groups = if cycle == 0 { 200 } else { 1 };
        let watches: Vec<_> = (0..groups)
            .map(|_| watch(std::slice::from_ref(&member), Arc::new(|_, _| ())).unwrap())
            .collect();
        if cycle == 0 {
            // The thread sets its name a moment after it starts.
            let started = Instant::now();
            while watchers() != 1 {
                assert!(started.elapsed() < SOON, "{} watchers", watchers());
            }
        }
        drop(watches);
    }
    let started = Instant::now();
    while watchers() > 0 {
        assert!(started.elapsed() < SOON, "a watcher thread is left");
        thread::sleep(Duration::from_millis(1));
    }
    drop(member);
    child.kill().unwrap();
    child.wait().unwrap();
}
