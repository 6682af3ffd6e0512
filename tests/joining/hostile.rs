//! Joining with hostile or faulty peers: other users, and a rank 0 that passes the wrong memory.

use crate::process::{alone, fork, status_of};
use crate::stores;
use crate::threads::{self, LONG, connect, hello, receive, record_of_leader, token};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix,
    SocketFlags, SocketType,
};
use serde_json::Value;
use std::io::{IoSlice, Write};
use std::mem::MaybeUninit;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;
use symm::bootstrap::{JoinSpec, join};
use symm::error::{Error, ErrorKind};
use symm::store::Store;
use symm::store::memory::MemoryStore;
use symm::sys::required;

const BYTES: u64 = 8192;
/// A user that owns nothing ("nobody").
const OTHER_USER: u32 = 65534;

fn spec(rank: u32, timeout: Duration) -> JoinSpec<'static> {
    threads::spec("g", rank, 2, timeout)
}

/// Rank 0's answer in the normal case, as `src/bootstrap/handshake.rs` writes it.
fn answer(token: &[u8]) -> Vec<u8> {
    [b"symm", token, &[0]].concat()
}

fn send(socket: &OwnedFd, message: &[u8], fd: Option<BorrowedFd<'_>>) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if let Some(fd) = &fd {
        control.push(SendAncillaryMessage::ScmRights(std::slice::from_ref(fd)));
    }
    rustix::net::sendmsg(socket, &[IoSlice::new(message)], &mut control, SendFlags::NOSIGNAL)
        .unwrap();
}

fn memory(bytes: u64, seals: SealFlags) -> OwnedFd {
    let file =
        rustix::fs::memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&file, bytes).unwrap();
    rustix::fs::fcntl_add_seals(&file, seals).unwrap();
    file
}

/// Lets rank 1 join a group whose rank 0 is the test, which sends it `message` with `fd`; returns
/// why it did not join.
fn handed(number: u32, message: impl Fn(&[u8]) -> Vec<u8>, fd: Option<BorrowedFd<'_>>) -> Error {
    let store = MemoryStore::new();
    // Rank 0 times out and leaves its record; a copy gets the address of another listener.
    join(&store, &spec(0, Duration::from_millis(1))).expect_err("alone");
    let mut forged = record_of_leader(&store);
    let name = format!("symm-test-{}-{number}", std::process::id());
    let listener = threads::socket(SocketFlags::empty());
    rustix::net::bind(&listener, &SocketAddrUnix::new_abstract_name(name.as_bytes()).unwrap())
        .unwrap();
    rustix::net::listen(&listener, 4).unwrap();
    forged["socket"] = name.into();
    forged["failure"] = Value::Null;
    store.set("symm/g/0/0", &serde_json::to_vec(&forged).unwrap()).unwrap();
    thread::scope(|scope| {
        let joining = scope.spawn(|| join(&store, &spec(1, LONG)));
        let connection = rustix::net::accept(&listener).unwrap();
        send(&connection, &message(&token(&forged)), fd);
        joining.join().unwrap().map(drop).expect_err("this is no memory of the group")
    })
}

#[test]
fn p20_only_sealed_memory_of_the_right_size_is_taken() {
    if !alone() {
        return;
    }
    let before = required::descriptors().1;
    {
        let all = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        let (unsealed, growing) =
            (memory(BYTES, SealFlags::empty()), memory(BYTES, SealFlags::GROW));
        let (short, long) = (memory(4096, all), memory(1 << 20, all));
        let (pipe, _other) = rustix::pipe::pipe().unwrap();
        let file: OwnedFd = tempfile::tempfile().unwrap().into();
        let folder: OwnedFd = std::fs::File::open("/").unwrap().into();
        let good = memory(BYTES, all);
        type Message = fn(&[u8]) -> Vec<u8>;
        let cases: [(Option<&OwnedFd>, Message, &str); 10] = [
            (Some(&unsealed), answer, "not sealed memory"),
            (Some(&growing), answer, "not sealed memory"),
            (Some(&short), answer, "4096 bytes of memory, not 8192"),
            (Some(&long), answer, "1048576 bytes of memory, not 8192"),
            (Some(&pipe), answer, "not sealed memory"),
            (Some(&file), answer, "not sealed memory"),
            (Some(&folder), answer, "not sealed memory"),
            (None, answer, "no memory of this group"),
            (Some(&good), |_| answer(&[0; 16]), "no memory of this group"),
            (Some(&good), |_| vec![7; 3000], "not of this protocol"),
        ];
        for (number, (fd, message, expected)) in (0..).zip(cases) {
            let Error { kind, message } = handed(number, message, fd.map(AsFd::as_fd));
            assert!(kind == ErrorKind::Internal && message.contains(expected), "{message}");
            assert!(message.contains("rank 0") && message.contains("rank 1"), "{message}");
        }
    }
    assert_eq!(required::descriptors().1, before, "what came with a message is closed");
}

/// Runs `body`, which may only make system calls, in a process of another user, and returns its
/// result. Returns `None` if this process may not change its user.
fn as_unidentified(body: impl FnOnce() -> bool) -> Option<bool> {
    if !rustix::process::geteuid().is_root() {
        let _ = writeln!(std::io::stderr(), "skipped: only root can become another user");
        return None;
    }
    let status = status_of(fork(|| {
        // SAFETY: plain system calls on values.
        let changed = unsafe {
            libc::setgroups(0, std::ptr::null()) == 0
                && libc::setresgid(OTHER_USER, OTHER_USER, OTHER_USER) == 0
                && libc::setresuid(OTHER_USER, OTHER_USER, OTHER_USER) == 0
        };
        if changed { i32::from(!body()) } else { 9 }
    }));
    assert_ne!(libc::WEXITSTATUS(status), 9, "root cannot become another user here");
    Some(status == 0)
}

/// Returns true if the other end of `socket` closes it within some seconds without sending
/// anything.
fn is_turned_away(socket: &OwnedFd) -> bool {
    let mut buffer = [0u8; 4096];
    let mut ready = libc::pollfd { fd: socket.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: one structure, and a buffer of the given length.
    unsafe {
        libc::poll(&raw mut ready, 1, 10_000) == 1
            && libc::recv(socket.as_raw_fd(), buffer.as_mut_ptr().cast(), buffer.len(), 0) <= 0
    }
}

#[test]
fn p19_another_user_is_not_let_into_a_group_even_with_the_right_words() {
    if !alone() {
        return;
    }
    let store = MemoryStore::new();
    thread::scope(|scope| {
        let leader = scope.spawn(|| join(&store, &spec(0, LONG)));
        let record = record_of_leader(&store);
        let name = record["socket"].as_str().unwrap();
        let address = SocketAddrUnix::new_abstract_name(name.as_bytes()).unwrap();
        let hello = hello(1, 2, std::process::id(), BYTES, &token(&record));
        let unidentified = scope.spawn(move || {
            as_unidentified(|| {
                let socket = threads::socket(SocketFlags::empty());
                rustix::net::connect(&socket, &address).is_ok()
                    && (rustix::net::send(&socket, &hello, SendFlags::NOSIGNAL).is_err()
                        || is_turned_away(&socket))
            })
        });
        // Rank 0 listens once all records exist.
        thread::sleep(Duration::from_millis(100));
        let joined = join(&store, &spec(1, LONG));
        assert!(unidentified.join().unwrap().unwrap_or(true), "an unidentified peer was answered");
        assert!(joined.is_ok() && leader.join().unwrap().is_ok(), "nobody else is disturbed");
    });
}

/// Counts the log lines about rejected connections.
struct Lines(AtomicUsize);

static LINES: Lines = Lines(AtomicUsize::new(0));

impl log::Log for Lines {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &log::Record<'_>) {
        if record.args().to_string().contains("turned a connection away") {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn flush(&self) {}
}

// proves P15
#[test]
fn who_knocks_again_and_again_does_not_fill_the_log() {
    if !alone() {
        return;
    }
    // Installed before the library installs its own logger.
    log::set_logger(&LINES).unwrap();
    log::set_max_level(log::LevelFilter::Warn);
    let store = MemoryStore::new();
    thread::scope(|scope| {
        let leader = scope.spawn(|| join(&store, &spec(0, LONG)));
        let record = record_of_leader(&store);
        let mut member = record.clone();
        // A rank 1 that has a record but does not connect.
        member["rank"] = 1.into();
        store.set("symm/g/0/1", &serde_json::to_vec(&member).unwrap()).unwrap();
        for _ in 0..500 {
            let socket = connect(&record);
            threads::send(&socket, b"let me in");
            assert!(!receive(&socket).is_empty(), "it hears why");
        }
        member["failure"] = serde_json::json!({"kind": 0, "message": "enough"});
        store.set("symm/g/0/1", &serde_json::to_vec(&member).unwrap()).unwrap();
        leader.join().unwrap().map(drop).expect_err("rank 1 never came");
    });
    let lines = LINES.0.load(Ordering::Relaxed);
    assert!((1..100).contains(&lines), "{lines} lines for 500 knocks");
}

#[test]
fn p19_another_user_is_not_served_by_a_store_and_cannot_open_its_file() {
    if !alone() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    // The directory admits all users, so the socket and the file must reject others themselves.
    std::fs::set_permissions(folder.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755))
        .unwrap();
    let path = folder.path().join("socket");
    let named = stores::master(&format!("unix:{}", path.display()), None);
    let hidden = format!("symm-test-store-{}", std::process::id());
    let abstract_one = stores::master(&format!("unix:@{hidden}"), None);
    let connect = |address: SocketAddrUnix| {
        as_unidentified(move || {
            let kind = SocketType::STREAM;
            let socket =
                rustix::net::socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None)
                    .unwrap();
            rustix::net::connect(&socket, &address).is_err() || is_turned_away(&socket)
        })
    };
    for address in
        [SocketAddrUnix::new(&*path), SocketAddrUnix::new_abstract_name(hidden.as_bytes())]
    {
        let address = address.unwrap();
        assert!(connect(address.clone()).unwrap_or(true), "served at {address:?}");
    }
    let file = folder.path().join("file");
    let _open = symm::store::file::FileStore::open(&file, 1).unwrap();
    let name = std::ffi::CString::new(file.to_str().unwrap()).unwrap();
    // SAFETY: a path that ends with a zero.
    let refused = as_unidentified(|| unsafe { libc::open(name.as_ptr(), libc::O_RDONLY) < 0 });
    assert!(refused.unwrap_or(true), "another user reads the store");
    for store in [&named, &abstract_one] {
        store.add("honest", 1).unwrap();
    }
}
