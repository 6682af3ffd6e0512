//! Joining with threads as ranks: which process may claim a rank, and the errors of those that may
//! not.

use crate::threads::{
    Flat, LONG, SHORT, SOON, connect, error, hello, put, record_of, sleeper, socket, spec, threads,
    token,
};
use rustix::fd::OwnedFd;
use rustix::net::{SendFlags, SocketAddrUnix, SocketFlags};
use serde_json::{Value, json};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};
use symm::bootstrap::{JoinSpec, join};
use symm::error::{Error, ErrorKind};
use symm::store::Store;
use symm::store::memory::MemoryStore;
use symm::sys;

#[test]
fn one_of_two_threads_that_claim_a_rank_is_refused() {
    let Some(_flat) = Flat::start() else { return };
    let store = MemoryStore::new();
    let one_is_refused = AtomicBool::new(false);
    let outcomes = threads([1, 1, 0], |rank| {
        while rank == 0 && !one_is_refused.load(Ordering::Relaxed) {
            thread::sleep(Duration::from_millis(1));
        }
        let outcome = join(&store, &spec("g", rank, 2, LONG));
        one_is_refused.fetch_or(outcome.is_err(), Ordering::Relaxed);
        outcome
    });
    assert!(outcomes[2].is_ok());
    let refused: Vec<_> = outcomes.iter().filter_map(|outcome| outcome.as_ref().err()).collect();
    assert_eq!(refused.len(), 1);
    assert_eq!(refused[0].kind, ErrorKind::Config);
    let pid = std::process::id();
    let expected =
        format!("rank 1 of group \"g\" of 2 ranks is claimed twice: by pid {pid} and by pid {pid}");
    assert_eq!(refused[0].message, expected);
    assert!(store.is_empty());
}

#[test]
fn a_record_counts_as_long_as_its_process_lives() {
    let Some(_flat) = Flat::start() else { return };
    let (mut child, start_time) = sleeper();
    let mut record = record_of(1, 2);
    record["pid"] = json!(child.id());
    record["start_time"] = json!(start_time);
    let store = MemoryStore::new();
    put(&store, 1, &record);
    let outcome = join(&store, &spec("g", 1, 2, LONG));
    let expected =
        format!("claimed twice: by pid {} and by pid {}", child.id(), std::process::id());
    assert!(error(&outcome).message.contains(&expected), "{outcome:?}");

    // A later process with the same id is a different process.
    let store = MemoryStore::new();
    record["start_time"] = json!(start_time + 1);
    put(&store, 1, &record);
    let outcomes = threads(0..2, |rank| join(&store, &spec("g", rank, 2, LONG)));
    assert!(outcomes.iter().all(Result::is_ok), "{outcomes:?}");

    // The record of an exited process: a new process of the same rank replaces the record, and the
    // other ranks wait for the new record.
    child.kill().unwrap();
    child.wait().unwrap();
    record["start_time"] = json!(start_time);
    for late in [0, 1] {
        let store = MemoryStore::new();
        put(&store, 0, &{
            let mut stale = record.clone();
            stale["rank"] = json!(0);
            stale["socket"] = json!("symm-nobody-listens-here");
            stale
        });
        put(&store, 1, &record);
        let outcomes = threads(0..2, |rank| {
            let other = format!("symm/g/0/{}", 1 - late);
            let replaced = |record: &[u8]| {
                serde_json::from_slice::<Value>(record).unwrap()["pid"] == json!(std::process::id())
            };
            while rank == late && !replaced(&store.get(&other, None).unwrap()) {
                thread::sleep(Duration::from_millis(1));
            }
            join(&store, &spec("g", rank, 2, LONG))
        });
        assert!(outcomes.iter().all(Result::is_ok), "{outcomes:?}");
        assert!(store.is_empty());
    }

    // No process replaces the record: the error at the deadline names the record's process.
    let store = MemoryStore::new();
    put(&store, 1, &record);
    let outcome = join(&store, &spec("g", 0, 2, SHORT));
    assert_eq!(error(&outcome).kind, ErrorKind::Timeout);
    let expected =
        format!("; rank 1 (pid {}) had come before this rank, and has ended since", child.id());
    assert!(error(&outcome).message.ends_with(&expected), "{outcome:?}");

    // If the record has a failure, the error has the failure's text.
    let store = MemoryStore::new();
    record["failure"] = json!({ "kind": ErrorKind::Config as u8, "message": "no room here" });
    put(&store, 1, &record);
    let outcome = join(&store, &spec("g", 0, 2, SHORT));
    assert!(error(&outcome).message.ends_with(", and has failed: no room here"), "{outcome:?}");
}

// proves P15
#[test]
fn a_place_counts_as_long_as_a_living_process_keeps_it() {
    let Some(_flat) = Flat::start() else { return };
    let (mut child, start_time) = sleeper();
    let name = format!("symm-test-place-{}", std::process::id());
    let store = MemoryStore::new();
    let held = json!({
        "node": record_of(1, 2)["node"], "pid": child.id(), "start_time": start_time, "socket": name
    });
    store.set("symm/g/0/1/membership", &serde_json::to_vec(&held).unwrap()).unwrap();
    let placed = |rank, timeout| JoinSpec { hold_rank: true, ..spec("g", rank, 2, timeout) };
    let pair = || threads(0..2, |rank| join(&store, &placed(rank, LONG)));

    let listener = sys::socket::listen_at(&name, 1).unwrap();
    // More attempts than the queue of the listener has entries.
    for _ in 0..4 {
        let started = Instant::now();
        let outcome = join(&store, &placed(1, LONG));
        let expected = format!(
            "rank 1 of group \"g\" of 2 ranks is claimed twice: by pid {} and by pid {}",
            child.id(),
            std::process::id()
        );
        assert_eq!(*error(&outcome), Error::config(expected));
        assert!(started.elapsed() < SOON);
        assert_eq!(store.num_keys().unwrap(), 1, "nothing is left of who was refused");
    }
    // The listener closes while the ranks wait for it.
    let outcomes = thread::scope(|scope| {
        let waiting = scope.spawn(pair);
        thread::sleep(Duration::from_millis(100));
        drop(listener);
        waiting.join().unwrap()
    });
    assert!(
        outcomes.iter().all(|outcome| outcome.as_ref().is_ok_and(|joined| joined.lease.is_some())),
        "{outcomes:?}"
    );
    drop(outcomes);

    // A listener does not suffice: a forked child may still hold it after the process has exited.
    store.set("symm/g/0/1/membership", &serde_json::to_vec(&held).unwrap()).unwrap();
    let _listener = sys::socket::listen_at(&name, 1).unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(pair().iter().all(Result::is_ok));
}

#[test]
fn another_node_cannot_claim_a_rank_unnoticed() {
    let Some(_flat) = Flat::start() else { return };
    let mut record = record_of(1, 2);
    record["node"]["boot"] = json!("another-kernel");
    record["host_name"] = json!("elsewhere");
    record["pid"] = json!(4321);
    let store = MemoryStore::new();
    put(&store, 1, &record);
    let outcome = join(&store, &spec("g", 1, 2, LONG));
    assert!(error(&outcome).message.contains("by pid 4321 on node \"elsewhere\""), "{outcome:?}");
}

#[test]
fn garbage_in_the_store_is_refused_by_rank() {
    let Some(_flat) = Flat::start() else { return };
    let store = MemoryStore::new();
    store.compare_set("symm/g/0/1", b"", b"{]").unwrap();
    let outcome = join(&store, &spec("g", 0, 2, LONG));
    assert!(
        error(&outcome).message.contains("the record of rank 1 in the store cannot be read"),
        "{outcome:?}"
    );
}

// proves P15
#[test]
fn unidentified_peers_neither_enter_nor_stall() {
    let Some(_flat) = Flat::start() else { return };
    let store = MemoryStore::new();
    let store = &store;
    thread::scope(|scope| {
        let leader = scope.spawn(|| join(store, &spec("g", 0, 3, LONG)));
        let first = scope.spawn(|| join(store, &spec("g", 1, 3, LONG)));
        store.wait(&["symm/g/0/0"], Some(LONG)).unwrap();
        let bytes = store.get("symm/g/0/0", None).unwrap();
        let record: Value = serde_json::from_slice(&bytes).unwrap();
        let name = record["socket"].as_str().unwrap();
        let silent: Vec<OwnedFd> = (0..100)
            .map_while(|_| {
                // As many connections as the queue can hold while rank 0 waits for the store.
                let socket = socket(SocketFlags::NONBLOCK);
                let address = SocketAddrUnix::new_abstract_name(name.as_bytes()).unwrap();
                rustix::net::connect(&socket, &address).is_ok().then_some(socket)
            })
            .collect();
        assert!(silent.len() > 30, "{}", silent.len());
        let started = Instant::now();
        let second = join(store, &spec("g", 2, 3, LONG));
        assert!(started.elapsed() < SOON, "{:?}", started.elapsed());
        assert!(second.is_ok(), "{second:?}");
        assert!(leader.join().unwrap().is_ok());
        assert!(first.join().unwrap().is_ok());
    });
}

#[test]
fn new_connections_do_not_displace_a_rank_that_has_said_hello() {
    let Some(_flat) = Flat::start() else { return };
    let store = MemoryStore::new();
    let store = &store;
    thread::scope(|scope| {
        let leader = scope.spawn(|| join(store, &spec("g", 0, 2, LONG)));
        let record: Value =
            serde_json::from_slice(&store.get("symm/g/0/0", Some(LONG)).unwrap()).unwrap();
        let name = record["socket"].as_str().unwrap();
        let token = token(&record);
        // Rank 1, and behind it in the queue, more connections than rank 0 accepts at once.
        let rank_1 = connect(name);
        rustix::net::send(
            &rank_1,
            &hello(1, 2, std::process::id(), 8192, &token),
            SendFlags::NOSIGNAL,
        )
        .unwrap();
        let _flood: Vec<OwnedFd> = (0..36).map(|_| connect(name)).collect();
        // From now on rank 0 accepts connections.
        put(store, 1, &record_of(1, 2));
        let mut answer = [0; 4096];
        let (_, length) =
            rustix::net::recv(&rank_1, &mut answer, rustix::net::RecvFlags::empty()).unwrap();
        assert_eq!((length, answer[20]), (21, 0), "rank 1 is handed the memory");
        assert!(leader.join().unwrap().is_ok());
    });
}

#[test]
fn wrong_words_are_answered_with_a_reason() {
    let Some(_flat) = Flat::start() else { return };
    let store = MemoryStore::new();
    let store = &store;
    thread::scope(|scope| {
        let leader = scope.spawn(|| join(store, &spec("g", 0, 4, LONG)));
        let first = scope.spawn(|| join(store, &spec("g", 1, 4, LONG)));
        // Records for ranks 2 and 3, so that rank 0 listens.
        put(store, 2, &record_of(2, 4));
        put(store, 3, &record_of(3, 4));
        let bytes = store.get("symm/g/0/0", None).unwrap();
        let record: Value = serde_json::from_slice(&bytes).unwrap();
        let name = record["socket"].as_str().unwrap();
        let token = token(&record);
        thread::sleep(Duration::from_millis(200));
        let pid = std::process::id();
        let cases = [
            (b"GET / HTTP/1.0".to_vec(), "not one of this protocol"),
            (vec![0; 5000], "not one of this protocol"),
            (hello(2, 4, pid, 8192, &[0; 16]), "its token is not this group's"),
            (hello(2, 5, pid, 8192, &token), "it expects 5 ranks and 8192 bytes, not 4 and 8192"),
            (hello(2, 4, pid, 4096, &token), "it expects 4 ranks and 4096 bytes, not 4 and 8192"),
            (hello(0, 4, pid, 8192, &token), "it says to be rank 0 of 4"),
            (hello(4, 4, pid, 8192, &token), "it says to be rank 4 of 4"),
            (hello(2, 4, 1, 8192, &token), "rank 2 is pid"),
            (hello(1, 4, pid, 8192, &token), "is here already"),
        ];
        for (message, expected) in cases {
            let socket = connect(name);
            rustix::net::send(&socket, &message, SendFlags::NOSIGNAL).unwrap();
            let mut answer = [0; 4096];
            let (_, length) =
                rustix::net::recv(&socket, &mut answer, rustix::net::RecvFlags::empty()).unwrap();
            // Pending connections get no token.
            assert_eq!(answer[4..20], [0; 16]);
            let text = std::str::from_utf8(&answer[21..length]).unwrap();
            assert!(text.contains(expected), "{text}");
            assert_eq!(
                rustix::net::recv(&socket, &mut answer, rustix::net::RecvFlags::empty()).unwrap().1,
                0
            );
        }
        // A valid hello, and then an exit: the group cannot form, and every rank's error names the
        // rank that left.
        let socket = connect(name);
        rustix::net::send(&socket, &hello(2, 4, pid, 8192, &token), SendFlags::NOSIGNAL).unwrap();
        drop(socket);
        for outcome in [leader.join().unwrap(), first.join().unwrap()] {
            let expected = format!("rank 2 (pid {pid}) left while joining group \"g\" of 4 ranks");
            assert_eq!(*error(&outcome), Error::peer(expected));
        }
    });
}

#[test]
fn a_rank_that_publishes_and_never_connects_is_named_by_all() {
    let Some(_flat) = Flat::start() else { return };
    let store = MemoryStore::new();
    put(&store, 2, &record_of(2, 3));
    let started = Instant::now();
    let outcomes = threads(0..2, |rank| join(&store, &spec("g", rank, 3, SHORT)));
    assert!(started.elapsed() < SOON);
    for outcome in &outcomes {
        assert_eq!(error(outcome).kind, ErrorKind::Timeout);
        assert!(
            error(outcome).message.contains("for rank 2 to connect while joining"),
            "{outcome:?}"
        );
    }
}
