//! Ranks that join as threads, and stores that change the record of a rank.

use crate::process::alone;
use rustix::fd::OwnedFd;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType};
use serde_json::Value;
use std::process::{Child, Command};
use std::thread;
use std::time::{Duration, Instant};
use symm::bootstrap::{JoinSpec, Joined, join};
use symm::dtype::SumOrder;
use symm::error::{Error, ErrorKind, Result};
use symm::rank::Rank;
use symm::store::Store;
use symm::store::memory::MemoryStore;
use symm::store::request::{Request, StoreOp};
use symm::store::table::TableReply;
use symm::sys::required;

pub(crate) const SHORT: Duration = Duration::from_millis(400);
pub(crate) const LONG: Duration = Duration::from_secs(20);
/// Limit for events that happen at once or after SHORT: far below LONG, and long enough on a busy
/// node.
pub(crate) const SOON: Duration = Duration::from_secs(5);

/// Fails when dropped if the number of open file descriptors differs from the number at the start.
pub(crate) struct Flat {
    open: usize,
}

impl Flat {
    /// Starts in a process that runs only this test; returns `None` elsewhere, once that process
    /// has succeeded.
    pub(crate) fn start() -> Option<Self> {
        alone().then(|| Self { open: required::descriptors().1 })
    }
}

impl Drop for Flat {
    fn drop(&mut self) {
        if !thread::panicking() {
            // A watcher thread may end a moment later: a test that waits for watchers by name
            // misses one that has not set its name yet.
            let give_up = Instant::now() + Duration::from_secs(1);
            while required::descriptors().1 != self.open && Instant::now() < give_up {
                thread::sleep(Duration::from_millis(1));
            }
            assert_eq!(required::descriptors().1, self.open, "descriptors leaked");
        }
    }
}

pub(crate) fn spec(group: &str, rank: u32, size: u32, timeout: Duration) -> JoinSpec<'_> {
    JoinSpec {
        group,
        rank: Rank(rank),
        size,
        attempt: "0",
        timeout,
        segment_bytes: 8192,
        reserved_bytes: 4096,
        hold_rank: false,
        global_ranks: &[],
        order: SumOrder::Rank,
        known: None,
    }
}

/// Returns the outcomes of one thread per rank of `ranks`, in order.
pub(crate) fn threads<T: Send>(
    ranks: impl IntoIterator<Item = u32>,
    body: impl Fn(u32) -> T + Sync,
) -> Vec<T> {
    let body = &body;
    thread::scope(|scope| {
        let all: Vec<_> = ranks.into_iter().map(|rank| scope.spawn(move || body(rank))).collect();
        all.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Number of threads of this process whose names begin with `prefix`.
pub(crate) fn threads_named(prefix: &str) -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    // A thread may end between the listing and the read.
    let names =
        tasks.filter_map(|task| std::fs::read_to_string(task.unwrap().path().join("comm")).ok());
    names.filter(|name| name.starts_with(prefix)).count()
}

pub(crate) fn error(outcome: &Result<Joined>) -> &Error {
    outcome.as_ref().expect_err("must not join")
}

/// Asserts that `outcome` is an error of this kind that contains `part`.
pub(crate) fn refused(outcome: &Result<Joined>, kind: ErrorKind, part: &str) {
    let error = error(outcome);
    assert!(error.kind == kind && error.message.contains(part), "{error}");
}

/// Joins both ranks of group "g".
pub(crate) fn pair(store: &MemoryStore) -> Vec<Joined> {
    let outcomes = threads(0..2, |rank| join(store, &spec("g", rank, 2, LONG)));
    outcomes.into_iter().map(|outcome| outcome.unwrap()).collect()
}

/// The record of rank 0 of group "g", as it publishes it.
pub(crate) fn record_of_leader(store: &MemoryStore) -> Value {
    serde_json::from_slice(&store.get("symm/g/0/0", Some(LONG)).unwrap()).unwrap()
}

/// A store in which one rank's record appears changed to the others, but unchanged to the rank
/// itself.
pub(crate) struct Doctored<'a> {
    pub(crate) inner: &'a MemoryStore,
    pub(crate) from: &'a str,
    pub(crate) to: &'a str,
}

fn replace(bytes: &[u8], from: &str, to: &str) -> Vec<u8> {
    String::from_utf8(bytes.to_vec()).unwrap().replace(from, to).into_bytes()
}

impl Store for Doctored<'_> {
    fn call(&self, request: &Request<'_>, limit: Option<Duration>) -> Result<TableReply> {
        let values: Vec<Vec<u8>> =
            request.values.iter().map(|value| replace(value, self.from, self.to)).collect();
        let changed =
            Request { values: values.iter().map(Vec::as_slice).collect(), ..request.clone() };
        let reply = self.inner.call(&changed, limit)?;
        if request.op == StoreOp::CompareSet
            && let TableReply::Value(standing) = &reply
        {
            return Ok(TableReply::Value(replace(standing, self.to, self.from).into()));
        }
        Ok(reply)
    }
}

/// The record that rank `rank` of group "g" publishes, obtained from a join that fails to find the
/// others.
pub(crate) fn record_of(rank: u32, size: u32) -> Value {
    let store = MemoryStore::new();
    join(&store, &spec("g", rank, size, Duration::from_millis(1))).expect_err("alone");
    let bytes = store.get(&format!("symm/g/0/{rank}"), None).unwrap();
    let mut record: Value = serde_json::from_slice(&bytes).unwrap();
    record["failure"] = Value::Null;
    record
}

pub(crate) fn put(store: &MemoryStore, rank: u32, record: &Value) {
    let bytes = serde_json::to_vec(record).unwrap();
    store.compare_set(&format!("symm/g/0/{rank}"), b"", &bytes).unwrap();
}

/// A living process, and its start time.
pub(crate) fn sleeper() -> (Child, u64) {
    let child = Command::new("sleep").arg("60").spawn().unwrap();
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", child.id())).unwrap();
    let start = stat.rsplit_once(')').unwrap().1.split_whitespace().nth(19).unwrap();
    (child, start.parse().unwrap())
}

/// The token of the group whose rank published `record`.
pub(crate) fn token(record: &Value) -> Vec<u8> {
    record["nonce"].as_array().unwrap().iter().map(|byte| byte.as_u64().unwrap() as u8).collect()
}

/// The first message of a rank to rank 0, as `src/bootstrap/handshake.rs` writes it.
pub(crate) fn hello(rank: u32, size: u32, pid: u32, bytes: u64, token: &[u8]) -> Vec<u8> {
    let mut message = Vec::from(*b"symm");
    for word in [3, rank, size, pid] {
        message.extend(u32::to_le_bytes(word));
    }
    message.extend(bytes.to_le_bytes());
    message.extend(token);
    message
}

pub(crate) fn socket(flags: SocketFlags) -> OwnedFd {
    rustix::net::socket_with(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        flags | SocketFlags::CLOEXEC,
        None,
    )
    .unwrap()
}

/// A connection to the rank 0 that published `record`.
pub(crate) fn connect(record: &Value) -> OwnedFd {
    let name = record["socket"].as_str().unwrap();
    let address = SocketAddrUnix::new_abstract_name(name.as_bytes()).unwrap();
    let socket = socket(SocketFlags::empty());
    rustix::net::connect(&socket, &address).unwrap();
    socket
}

pub(crate) fn send(socket: &OwnedFd, message: &[u8]) {
    rustix::net::send(socket, message, SendFlags::NOSIGNAL).unwrap();
}

/// The next message; empty if the other end has closed the connection.
pub(crate) fn receive(socket: &OwnedFd) -> Vec<u8> {
    let mut answer = vec![0; 4096];
    let (_, length) = rustix::net::recv(socket, &mut answer[..], RecvFlags::empty()).unwrap();
    answer.truncate(length);
    answer
}
