//! Joining with threads as ranks: who may form a group, what is said to those who may not, and what is left behind.
#![allow(missing_docs, clippy::unwrap_used, clippy::print_stderr)]

use rustix::fd::OwnedFd;
use rustix::net::{AddressFamily, SendFlags, SocketAddrUnix, SocketFlags, SocketType};
use serde_json::{Value, json};
use std::os::fd::AsFd;
use std::process::{Child, Command};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};
use symm::boot::{JoinSpec, Joined, Member, join};
use symm::error::{Error, Kind, Result};
use symm::rank::Rank;
use symm::store::Store;
use symm::store::file::FileStore;
use symm::store::memory::MemoryStore;
use symm::store::request::{Op, Request};
use symm::store::table::Reply;
use symm::store::worker::Worker;
use symm::sys::lock::{Mode, try_lock};
use symm::sys::process::{self, ProcessId};
use symm::sys::socket;
use symm::watch::watch;

const SHORT: Duration = Duration::from_millis(400);
const LONG: Duration = Duration::from_secs(20);

/// One test at a time: they count the descriptors of this process.
static SERIAL: Mutex<()> = Mutex::new(());

/// Fails at its end if descriptors or watcher threads are left that were not there at its start.
struct Flat {
    open: usize,
    _serial: MutexGuard<'static, ()>,
}

impl Flat {
    fn start() -> Self {
        let serial = SERIAL.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        Self { open: process::descriptors().1, _serial: serial }
    }
}

impl Drop for Flat {
    fn drop(&mut self) {
        if !thread::panicking() {
            // A watcher that has not yet taken its name is not seen to end, and ends in a moment.
            let give_up = Instant::now() + Duration::from_secs(1);
            while process::descriptors().1 != self.open && Instant::now() < give_up {
                thread::sleep(Duration::from_millis(1));
            }
            assert_eq!(process::descriptors().1, self.open, "descriptors leaked");
        }
    }
}

fn spec(group: &str, rank: u32, size: u32, timeout: Duration) -> JoinSpec<'_> {
    JoinSpec {
        group,
        rank: Rank(rank),
        size,
        restart: "0",
        timeout,
        segment_bytes: 8192,
        reserved_bytes: 4096,
        keep_membership: false,
        known: None,
    }
}

/// The outcomes of `ranks` threads, in their order, each given its number.
fn threads<T: Send>(ranks: impl IntoIterator<Item = u32>, body: impl Fn(u32) -> T + Sync) -> Vec<T> {
    let body = &body;
    thread::scope(|scope| {
        let all: Vec<_> = ranks.into_iter().map(|rank| scope.spawn(move || body(rank))).collect();
        all.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn error(outcome: &Result<Joined>) -> &Error {
    outcome.as_ref().expect_err("must not join")
}

/// A store through which one rank shows a changed record to the others, and sees its own as it wrote it.
struct Doctored<'a> {
    inner: &'a MemoryStore,
    from: &'a str,
    to: &'a str,
}

fn replace(bytes: &[u8], from: &str, to: &str) -> Vec<u8> {
    String::from_utf8(bytes.to_vec()).unwrap().replace(from, to).into_bytes()
}

impl Store for Doctored<'_> {
    fn call(&self, request: &Request<'_>, limit: Option<Duration>) -> Result<Reply> {
        let values: Vec<Vec<u8>> = request.values.iter().map(|value| replace(value, self.from, self.to)).collect();
        let changed = Request { values: values.iter().map(Vec::as_slice).collect(), ..request.clone() };
        let reply = self.inner.call(&changed, limit)?;
        if request.op == Op::CompareSet
            && let Reply::Value(standing) = &reply
        {
            return Ok(Reply::Value(replace(standing, self.to, self.from).into()));
        }
        Ok(reply)
    }
}

/// A record as the rank `rank` of group "g" publishes it, by letting it fail to find the others.
fn record_of(rank: u32, size: u32) -> Value {
    let store = MemoryStore::new();
    join(&store, &spec("g", rank, size, Duration::from_millis(1))).expect_err("alone");
    let bytes = store.get(&format!("symm/g/0/{rank}"), None).unwrap();
    let mut record: Value = serde_json::from_slice(&bytes).unwrap();
    record["failure"] = Value::Null;
    record
}

fn put(store: &MemoryStore, rank: u32, record: &Value) {
    let bytes = serde_json::to_vec(record).unwrap();
    store.compare_set(&format!("symm/g/0/{rank}"), b"", &bytes).unwrap();
}

fn sleeper() -> (Child, u64) {
    let child = Command::new("sleep").arg("60").spawn().unwrap();
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", child.id())).unwrap();
    let start = stat.rsplit_once(')').unwrap().1.split_whitespace().nth(19).unwrap();
    (child, start.parse().unwrap())
}

#[test]
fn all_ranks_share_memory_token_and_members() {
    let _flat = Flat::start();
    for size in 1..=8 {
        let store = MemoryStore::new();
        let all: Vec<Joined> =
            threads(0..size, |rank| join(&store, &spec("g", rank, size, LONG))).into_iter().map(|outcome| outcome.unwrap()).collect();
        assert!(store.is_empty());
        rustix::io::pwrite(&all[0].segment, b"hello", 100).unwrap();
        for joined in &all {
            let mut bytes = [0; 5];
            rustix::io::pread(&joined.segment, &mut bytes, 100).unwrap();
            assert_eq!(&bytes, b"hello");
            assert_eq!(rustix::fs::fstat(&joined.segment).unwrap().st_size, 8192);
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

#[test]
fn ranks_that_do_not_exist_are_refused() {
    let _flat = Flat::start();
    let store = MemoryStore::new();
    let outcome = join(&store, &spec("g", 4, 4, LONG));
    assert_eq!(*error(&outcome), Error::value("rank 4 does not exist in group \"g\" of 4 ranks"));
    assert_eq!(error(&join(&store, &spec("g", 0, 0, LONG))).kind, Kind::Value);
    assert_eq!(error(&join(&store, &spec("g", 0, 129, LONG))).kind, Kind::Config);
    assert!(store.is_empty());
}

#[test]
fn missing_ranks_are_named_by_all() {
    let _flat = Flat::start();
    let store = MemoryStore::new();
    let started = Instant::now();
    let outcomes = threads([0, 1], |rank| join(&store, &spec("g", rank, 4, SHORT)));
    assert!(started.elapsed() < SHORT + Duration::from_secs(1));
    for outcome in &outcomes {
        let error = error(outcome);
        assert_eq!(error.kind, Kind::Timeout);
        assert!(error.message.contains("waited 0.4 s for ranks 2 and 3 to join group \"g\" of 4 ranks"), "{error}");
    }
    // The next attempt of all of them works, with what the failed one has left.
    let outcomes = threads(0..4, |rank| join(&store, &spec("g", rank, 4, LONG)).map(|joined| joined.token));
    assert!(outcomes.iter().all(|outcome| outcome.is_ok() && *outcome == outcomes[0]), "{outcomes:?}");
    assert!(store.is_empty());
}

#[test]
fn a_late_rank_learns_why_the_others_left() {
    let _flat = Flat::start();
    let store = MemoryStore::new();
    error(&join(&store, &spec("g", 0, 2, Duration::from_millis(1))));
    let started = Instant::now();
    let outcome = join(&store, &spec("g", 1, 2, LONG));
    assert!(started.elapsed() < Duration::from_millis(1500));
    assert_eq!(error(&outcome).kind, Kind::Timeout);
    assert!(error(&outcome).message.contains("for rank 1 to join"), "{outcome:?}");
}

/// Does not answer what would write, whatever the limit, until it is let go.
struct Stopped {
    inner: MemoryStore,
    go: Mutex<Receiver<()>>,
}

impl Store for Stopped {
    fn call(&self, request: &Request<'_>, limit: Option<Duration>) -> Result<Reply> {
        if request.op.writes() {
            let _ = self.go.lock().unwrap().recv();
        }
        self.inner.call(request, limit)
    }
}

#[test]
fn a_store_that_does_not_answer_is_named_at_the_deadline() {
    let _flat = Flat::start();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store");
    let file = FileStore::open(&path, 2).unwrap();
    let lock = std::fs::OpenOptions::new().read(true).write(true).open(&path).unwrap();
    assert!(try_lock(lock.as_fd(), 1 << 62, Mode::Exclusive).unwrap());
    let (go, stopped) = channel();
    let worker = Worker::new(Arc::new(Stopped { inner: MemoryStore::new(), go: Mutex::new(stopped) }), "the store at x:1".into()).unwrap();
    let holder = format!("is held by process {} (alive, ", std::process::id());
    let cases: [(&dyn Store, &str); 2] = [(&file, &holder), (&worker, "the store at x:1 did not answer CompareSet within ")];
    for (store, expected) in cases {
        let started = Instant::now();
        let outcome = join(store, &spec("g", 1, 2, SHORT));
        assert!(started.elapsed() < SHORT + Duration::from_secs(1), "{:?}", started.elapsed());
        let Error { kind, message } = error(&outcome);
        assert_eq!(*kind, Kind::Timeout);
        let begin =
            format!("rank 1 (pid {}) could not join group \"g\" of 2 ranks: CompareSet of \"symm/g/0/1\" was not", std::process::id());
        assert!(message.starts_with(&begin) && message.contains(expected), "{message}");
    }
    drop((go, worker, lock));
    drop(file);
}

#[test]
fn disagreeing_ranks_all_raise_the_same() {
    let _flat = Flat::start();
    let version = format!("\"version\":\"{}\"", env!("TORCH_SYMM_VERSION"));
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
    let uid = format!("\"uid\":{}", rustix::process::geteuid().as_raw());
    let cases = [
        (version.as_str(), "\"version\":\"9.9.9\"", "ranks 0 and 2 run different versions of torch-symm"),
        ("\"protocol\":1", "\"protocol\":77", "ranks 0 and 2 run different versions of torch-symm"),
        (boot.trim(), "another-kernel", "ranks 0 and 2 run on different hosts"),
        (uid.as_str(), "\"uid\":54321", "ranks 0 and 2 run as different users"),
        ("\"segment_bytes\":8192", "\"segment_bytes\":1", "ranks 0 and 2 disagree on the shared memory"),
        ("\"size\":3", "\"size\":5", "ranks 0 and 2 disagree on the size"),
    ];
    for (from, to, expected) in cases {
        let store = MemoryStore::new();
        let started = Instant::now();
        let outcomes = threads(0..3, |rank| {
            let doctored = Doctored { inner: &store, from, to };
            let store: &dyn Store = if rank == 2 { &doctored } else { &store };
            join(store, &spec("g", rank, 3, LONG))
        });
        assert!(started.elapsed() < Duration::from_secs(2));
        for outcome in &outcomes {
            assert_eq!(error(outcome).kind, Kind::Config);
            assert!(error(outcome).message.contains(expected), "{outcome:?}");
        }
    }
}

#[test]
fn ranks_told_different_sizes_do_not_wait_for_their_deadline() {
    let _flat = Flat::start();
    let store = MemoryStore::new();
    let started = Instant::now();
    // Rank 1 waits for ranks 2 and 3, who will never come.
    let outcomes = threads(0..2, |rank| join(&store, &spec("g", rank, if rank == 0 { 2 } else { 4 }, LONG)));
    assert!(started.elapsed() < Duration::from_secs(3));
    for outcome in &outcomes {
        assert!(error(outcome).message.contains("rank 0 says 2 ranks, rank 1 4"), "{outcome:?}");
    }
}

#[test]
fn memory_that_rank_0_cannot_have_is_told_to_all_with_what_is_free() {
    let _flat = Flat::start();
    let store = MemoryStore::new();
    let started = Instant::now();
    let outcomes = threads(0..3, |rank| join(&store, &JoinSpec { reserved_bytes: 1 << 60, ..spec("g", rank, 3, LONG) }));
    assert!(started.elapsed() < Duration::from_secs(3));
    let expected =
        format!("out of memory: rank 0 (pid {}), to join group \"g\" of 3 ranks, needs {} bytes, ", std::process::id(), 1u64 << 60);
    for outcome in &outcomes {
        let error = error(outcome);
        assert!(error.kind == Kind::Config && error.message.starts_with(&expected) && error.message.contains(" are free "), "{error}");
    }
}

#[test]
fn one_of_two_threads_that_claim_a_rank_is_refused() {
    let _flat = Flat::start();
    let store = MemoryStore::new();
    let outcomes = threads([1, 1, 0], |rank| {
        if rank == 0 {
            thread::sleep(Duration::from_millis(200));
        }
        join(&store, &spec("g", rank, 2, LONG))
    });
    assert!(outcomes[2].is_ok());
    let refused: Vec<_> = outcomes.iter().filter_map(|outcome| outcome.as_ref().err()).collect();
    assert_eq!(refused.len(), 1);
    assert_eq!(refused[0].kind, Kind::Config);
    let pid = std::process::id();
    let expected = format!("rank 1 of group \"g\" of 2 ranks is claimed twice: by pid {pid} and by pid {pid}");
    assert_eq!(refused[0].message, expected);
    assert!(store.is_empty());
}

#[test]
fn a_record_counts_as_long_as_its_process_lives() {
    let _flat = Flat::start();
    let (mut child, start_time) = sleeper();
    let mut record = record_of(1, 2);
    record["pid"] = json!(child.id());
    record["start_time"] = json!(start_time);
    let store = MemoryStore::new();
    put(&store, 1, &record);
    let outcome = join(&store, &spec("g", 1, 2, LONG));
    let expected = format!("claimed twice: by pid {} and by pid {}", child.id(), std::process::id());
    assert!(error(&outcome).message.contains(&expected), "{outcome:?}");

    // A later process with the same id is another one.
    let store = MemoryStore::new();
    record["start_time"] = json!(start_time + 1);
    put(&store, 1, &record);
    let outcomes = threads(0..2, |rank| join(&store, &spec("g", rank, 2, LONG)));
    assert!(outcomes.iter().all(Result::is_ok), "{outcomes:?}");

    // Of an ended process: replaced by its own rank, waited for by the others.
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
            if rank == late {
                thread::sleep(Duration::from_millis(100));
            }
            join(&store, &spec("g", rank, 2, LONG))
        });
        assert!(outcomes.iter().all(Result::is_ok), "{outcomes:?}");
        assert!(store.is_empty());
    }

    // Nobody replaces it: named at the deadline.
    let store = MemoryStore::new();
    put(&store, 1, &record);
    let outcome = join(&store, &spec("g", 0, 2, SHORT));
    assert_eq!(error(&outcome).kind, Kind::Timeout);
    let expected = format!("; rank 1 (pid {}) had come before this rank, and has ended since", child.id());
    assert!(error(&outcome).message.ends_with(&expected), "{outcome:?}");

    // With what it had to say.
    let store = MemoryStore::new();
    record["failure"] = json!({ "kind": Kind::Config as u8, "message": "no room here" });
    put(&store, 1, &record);
    let outcome = join(&store, &spec("g", 0, 2, SHORT));
    assert!(error(&outcome).message.ends_with(", and has failed: no room here"), "{outcome:?}");
}

#[test]
fn a_place_counts_as_long_as_a_living_process_keeps_it() {
    let _flat = Flat::start();
    let (mut child, start_time) = sleeper();
    let name = format!("symm-test-place-{}", std::process::id());
    let store = MemoryStore::new();
    let held = json!({ "host": record_of(1, 2)["host"], "pid": child.id(), "start_time": start_time, "socket": name });
    store.set("symm/g/0/1/membership", &serde_json::to_vec(&held).unwrap()).unwrap();
    let placed = |rank, timeout| JoinSpec { keep_membership: true, ..spec("g", rank, 2, timeout) };
    let pair = || threads(0..2, |rank| join(&store, &placed(rank, LONG)));

    let listener = socket::listen_at(&name, 1).unwrap();
    // More often than its queue has room.
    for _ in 0..4 {
        let started = Instant::now();
        let outcome = join(&store, &placed(1, LONG));
        let expected =
            format!("rank 1 of group \"g\" of 2 ranks is claimed twice: by pid {} and by pid {}", child.id(), std::process::id());
        assert_eq!(*error(&outcome), Error::config(expected));
        assert!(started.elapsed() < Duration::from_secs(1));
        assert_eq!(store.num_keys().unwrap(), 1, "nothing is left of who was refused");
    }
    // Left while somebody waits for it.
    let outcomes = thread::scope(|scope| {
        let waiting = scope.spawn(pair);
        thread::sleep(Duration::from_millis(100));
        drop(listener);
        waiting.join().unwrap()
    });
    assert!(outcomes.iter().all(|outcome| outcome.as_ref().is_ok_and(|joined| joined.membership.is_some())), "{outcomes:?}");
    drop(outcomes);

    // A listener alone does not count: a forked child may have it still, when the process has ended.
    store.set("symm/g/0/1/membership", &serde_json::to_vec(&held).unwrap()).unwrap();
    let _listener = socket::listen_at(&name, 1).unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(pair().iter().all(Result::is_ok));
}

#[test]
fn another_host_cannot_claim_a_rank_unnoticed() {
    let _flat = Flat::start();
    let mut record = record_of(1, 2);
    record["host"]["boot"] = json!("another-kernel");
    record["host_name"] = json!("elsewhere");
    record["pid"] = json!(4321);
    let store = MemoryStore::new();
    put(&store, 1, &record);
    let outcome = join(&store, &spec("g", 1, 2, LONG));
    assert!(error(&outcome).message.contains("by pid 4321 on host \"elsewhere\""), "{outcome:?}");
}

#[test]
fn garbage_in_the_store_is_refused_by_rank() {
    let _flat = Flat::start();
    let store = MemoryStore::new();
    store.compare_set("symm/g/0/1", b"", b"{]").unwrap();
    let outcome = join(&store, &spec("g", 0, 2, LONG));
    assert!(error(&outcome).message.contains("the record of rank 1 in the store cannot be read"), "{outcome:?}");
}

fn connect(name: &str) -> OwnedFd {
    let kind = SocketType::SEQPACKET;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None).unwrap();
    rustix::net::connect(&socket, &SocketAddrUnix::new_abstract_name(name.as_bytes()).unwrap()).unwrap();
    socket
}

#[test]
fn unidentified_peers_neither_enter_nor_stall() {
    let _flat = Flat::start();
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
                // As many as the queue holds while rank 0 waits for the store.
                let kind = SocketType::SEQPACKET;
                let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
                let socket = rustix::net::socket_with(AddressFamily::UNIX, kind, flags, None).unwrap();
                let address = SocketAddrUnix::new_abstract_name(name.as_bytes()).unwrap();
                rustix::net::connect(&socket, &address).is_ok().then_some(socket)
            })
            .collect();
        assert!(silent.len() > 30, "{}", silent.len());
        let started = Instant::now();
        let second = join(store, &spec("g", 2, 3, LONG));
        assert!(started.elapsed() < Duration::from_secs(1), "{:?}", started.elapsed());
        assert!(second.is_ok(), "{second:?}");
        assert!(leader.join().unwrap().is_ok());
        assert!(first.join().unwrap().is_ok());
    });
}

/// A hello as `src/boot/wire.rs` writes it.
fn hello(rank: u32, size: u32, pid: u32, bytes: u64, token: &[u8]) -> Vec<u8> {
    let mut message = Vec::from(*b"symm");
    for word in [1, rank, size, pid] {
        message.extend(u32::to_le_bytes(word));
    }
    message.extend(bytes.to_le_bytes());
    message.extend(token);
    message
}

#[test]
fn wrong_words_are_answered_with_a_reason() {
    let _flat = Flat::start();
    let store = MemoryStore::new();
    let store = &store;
    thread::scope(|scope| {
        let leader = scope.spawn(|| join(store, &spec("g", 0, 4, LONG)));
        let first = scope.spawn(|| join(store, &spec("g", 1, 4, LONG)));
        // Stand for ranks 2 and 3, so that rank 0 listens.
        put(store, 2, &record_of(2, 4));
        put(store, 3, &record_of(3, 4));
        let bytes = store.get("symm/g/0/0", None).unwrap();
        let record: Value = serde_json::from_slice(&bytes).unwrap();
        let name = record["socket"].as_str().unwrap();
        let token: Vec<u8> = record["nonce"].as_array().unwrap().iter().map(|byte| byte.as_u64().unwrap() as u8).collect();
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
            let (_, length) = rustix::net::recv(&socket, &mut answer, rustix::net::RecvFlags::empty()).unwrap();
            // No token for unidentified peers.
            assert_eq!(answer[4..20], [0; 16]);
            let text = std::str::from_utf8(&answer[21..length]).unwrap();
            assert!(text.contains(expected), "{text}");
            assert_eq!(rustix::net::recv(&socket, &mut answer, rustix::net::RecvFlags::empty()).unwrap().1, 0);
        }
        // The right words, and then nothing: the group cannot form, and who left is told to all.
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
    let _flat = Flat::start();
    let store = MemoryStore::new();
    put(&store, 2, &record_of(2, 3));
    let started = Instant::now();
    let outcomes = threads(0..2, |rank| join(&store, &spec("g", rank, 3, SHORT)));
    assert!(started.elapsed() < SHORT + Duration::from_secs(1));
    for outcome in &outcomes {
        assert_eq!(error(outcome).kind, Kind::Timeout);
        assert!(error(outcome).message.contains("for rank 2 to connect while joining"), "{outcome:?}");
    }
}

#[test]
fn two_hundred_groups_at_once_leave_nothing() {
    let _flat = Flat::start();
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

#[test]
fn a_thousand_groups_of_one_name_leave_nothing() {
    let _flat = Flat::start();
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

/// Threads of this process that watch.
fn watchers() -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let names = tasks.map(|task| std::fs::read_to_string(task.unwrap().path().join("comm")));
    names.filter(|name| name.as_ref().is_ok_and(|name| name.trim() == "symm-watch")).count()
}

#[test]
fn one_watcher_serves_all_groups_and_ends_with_the_last() {
    let _flat = Flat::start();
    let (mut child, start_time) = sleeper();
    let pid = child.id();
    let pidfd = process::open(ProcessId { pid, start_time }).unwrap();
    let member = Member { pid, start_time, pidfd };
    for cycle in 0..100 {
        let groups = if cycle == 0 { 200 } else { 1 };
        let watches: Vec<_> = (0..groups).map(|_| watch(std::slice::from_ref(&member), Arc::new(|_, _| ())).unwrap()).collect();
        if cycle == 0 {
            // It gives itself its name, a moment after it starts.
            let started = Instant::now();
            while watchers() != 1 {
                assert!(started.elapsed() < Duration::from_secs(1), "{} watchers", watchers());
            }
        }
        drop(watches);
    }
    let started = Instant::now();
    while watchers() > 0 {
        assert!(started.elapsed() < Duration::from_secs(1), "a watcher thread is left");
        thread::sleep(Duration::from_millis(1));
    }
    drop(member);
    child.kill().unwrap();
    child.wait().unwrap();
}
