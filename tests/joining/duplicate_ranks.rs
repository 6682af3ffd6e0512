//! Joining with threads as ranks: which process may claim a rank, and the errors of processes that
//! may not.

use crate::threads::{
    Flat, LONG, SHORT, SOON, connect, error, hello, pair, put, receive, record_of,
    record_of_leader, refused, send, sleeper, socket, spec, threads, token,
};
use rustix::fd::OwnedFd;
use rustix::net::{SocketAddrUnix, SocketFlags};
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
    let refused: Vec<_> = outcomes.into_iter().filter_map(Result::err).collect();
    let pid = std::process::id();
    let expected =
        format!("rank 1 of group \"g\" of 2 ranks is claimed twice: by pid {pid} and by pid {pid}");
    assert_eq!(refused, [Error::config(expected)]);
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
    refused(&outcome, ErrorKind::Config, &expected);

    // A later process with the same id is a different process.
    let store = MemoryStore::new();
    record["start_time"] = json!(start_time + 1);
    put(&store, 1, &record);
    pair(&store);

    // The record of an exited process: a new process of the same rank replaces the record, and the
    // other ranks wait for the new record.
    child.kill().unwrap();
    child.wait().unwrap();
    record["start_time"] = json!(start_time);
    for late in [0, 1] {
        let store = MemoryStore::new();
        let mut stale = record.clone();
        stale["rank"] = json!(0);
        stale["socket"] = json!("symm-nobody-listens-here");
        put(&store, 0, &stale);
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
    let pair = || threads(0..2, |rank| join(&store, &placed(rank, LONG)).unwrap());

    let listener = sys::socket::listen_at(&name, 1).unwrap();
    // This makes more attempts than the queue of the listener has entries.
    let expected =
        format!("claimed twice: by pid {} and by pid {}", child.id(), std::process::id());
    for _ in 0..4 {
        let started = Instant::now();
        refused(&join(&store, &placed(1, LONG)), ErrorKind::Config, &expected);
        assert!(started.elapsed() < SOON);
        assert_eq!(store.num_keys().unwrap(), 1, "nothing is left of who was refused");
    }
    // The listener closes while the ranks wait for it.
    let joined = thread::scope(|scope| {
        let waiting = scope.spawn(pair);
        thread::sleep(Duration::from_millis(100));
        drop(listener);
        waiting.join().unwrap()
    });
    assert!(joined.iter().all(|joined| joined.lease.is_some()), "{joined:?}");
    drop(joined);

    // A listener does not prove that the process lives: a forked child may still hold the listener
    // after the process has exited.
    store.set("symm/g/0/1/membership", &serde_json::to_vec(&held).unwrap()).unwrap();
    let _listener = sys::socket::listen_at(&name, 1).unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    pair();
}

#[test]
fn records_of_another_node_and_garbage_are_refused() {
    let Some(_flat) = Flat::start() else { return };
    let mut record = record_of(1, 2);
    record["node"]["boot"] = json!("another-kernel");
    record["host_name"] = json!("elsewhere");
    record["pid"] = json!(4321);
    let store = MemoryStore::new();
    put(&store, 1, &record);
    let outcome = join(&store, &spec("g", 1, 2, LONG));
    refused(&outcome, ErrorKind::Config, "by pid 4321 on node \"elsewhere\"");

    store.set("symm/g/0/1", b"{]").unwrap();
    let message = join(&store, &spec("g", 0, 2, LONG)).unwrap_err().message;
    assert!(message.contains("the record of rank 1 in the store cannot be read"), "{message}");
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
        let record = record_of_leader(store);
        let name = record["socket"].as_str().unwrap();
        let address = SocketAddrUnix::new_abstract_name(name.as_bytes()).unwrap();
        // As many connections as the queue can hold while rank 0 waits for the store.
        let sockets = (0..100).map(|_| socket(SocketFlags::NONBLOCK));
        let silent: Vec<OwnedFd> =
            sockets.take_while(|socket| rustix::net::connect(socket, &address).is_ok()).collect();
        assert!(silent.len() > 30, "{}", silent.len());
        let started = Instant::now();
        join(store, &spec("g", 2, 3, LONG)).unwrap();
        assert!(started.elapsed() < SOON, "{:?}", started.elapsed());
        leader.join().unwrap().unwrap();
        first.join().unwrap().unwrap();
    });
}

#[test]
fn new_connections_do_not_displace_a_rank_that_has_said_hello() {
    let Some(_flat) = Flat::start() else { return };
    let store = MemoryStore::new();
    let store = &store;
    thread::scope(|scope| {
        let leader = scope.spawn(|| join(store, &spec("g", 0, 2, LONG)));
        let record = record_of_leader(store);
        // Rank 1 connects first. Behind it in the queue are more connections than rank 0 accepts at
        // once.
        let rank_1 = connect(&record);
        send(&rank_1, &hello(1, 2, std::process::id(), 8192, &token(&record)));
        let _flood: Vec<OwnedFd> = (0..36).map(|_| connect(&record)).collect();
        // From now on rank 0 accepts connections.
        put(store, 1, &record_of(1, 2));
        let answer = receive(&rank_1);
        assert_eq!((answer.len(), answer[20]), (21, 0), "rank 1 is handed the memory");
        leader.join().unwrap().unwrap();
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
        let record = record_of_leader(store);
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
            let socket = connect(&record);
            send(&socket, &message);
            let answer = receive(&socket);
            // Pending connections get no token.
            assert_eq!(answer[4..20], [0; 16]);
            let text = std::str::from_utf8(&answer[21..]).unwrap();
            assert!(text.contains(expected), "{text}");
            assert!(receive(&socket).is_empty());
        }
        // A valid hello, and then an exit: the group cannot form, and every rank's error names the
        // rank that left.
        send(&connect(&record), &hello(2, 4, pid, 8192, &token));
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
        refused(outcome, ErrorKind::Timeout, "for rank 2 to connect while joining");
    }
}
