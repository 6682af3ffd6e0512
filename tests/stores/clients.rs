//! Servers and clients of stores.
#![allow(dead_code, reason = "each program uses its part")]

use std::sync::atomic::{AtomicU16, Ordering};
use std::time::{Duration, Instant};
use symm::error::Error;
use symm::store::tcp::address::StoreAddress;
use symm::store::tcp::limits::ConnectionLimits;
use symm::store::tcp::listen::ListeningSockets;
use symm::store::tcp::server::Server;
use symm::store::tcp::{TcpOptions, TcpStore};

pub(crate) const LONG: Duration = Duration::from_secs(30);
pub(crate) const SHORT: Duration = Duration::from_millis(100);
/// Limit for events that happen at once or after SHORT: far below LONG, and long enough on a busy
/// node.
pub(crate) const SOON: Duration = Duration::from_secs(5);

/// Options of a client; `is_master` makes it a server.
pub(crate) fn options(host: &str, port: u16) -> TcpOptions {
    TcpOptions {
        host: host.into(),
        port,
        world_size: None,
        is_master: false,
        timeout: LONG,
        wait_for_workers: false,
        multi_tenant: false,
        listen_fd: None,
        secret: None,
        require_same_user: false,
    }
}

pub(crate) fn open(options: TcpOptions) -> TcpStore {
    TcpStore::open(options).unwrap()
}

/// The error of a store that cannot be opened.
pub(crate) fn refused(options: TcpOptions) -> Error {
    TcpStore::open(options).err().unwrap()
}

fn bytes_of(secret: Option<&str>) -> Option<Vec<u8>> {
    secret.map(|secret| secret.as_bytes().to_vec())
}

pub(crate) fn master(host: &str, secret: Option<&str>) -> TcpStore {
    open(TcpOptions { is_master: true, secret: bytes_of(secret), ..options(host, 0) })
}

pub(crate) fn client(of: &TcpStore, secret: Option<&str>) -> TcpStore {
    open(TcpOptions { secret: bytes_of(secret), ..options(of.host(), of.port()) })
}

/// A client of the server at this port of loopback.
pub(crate) fn honest(port: u16, secret: Option<&str>) -> TcpStore {
    open(TcpOptions { secret: bytes_of(secret), ..options("127.0.0.1", port) })
}

/// A port without a listener that the kernel assigns to no process which requests a free port.
pub(crate) fn free_port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    loop {
        let offset = NEXT.fetch_add(1, Ordering::Relaxed);
        let port =
            10_000 + (std::process::id() as u16).wrapping_mul(31).wrapping_add(offset) % 20_000;
        if std::net::TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}

/// A server on loopback with its own limits, and its port.
pub(crate) fn server(limits: ConnectionLimits, secret: Option<&str>) -> (Server, u16) {
    let address = StoreAddress::resolve("127.0.0.1", 0, Instant::now() + LONG).unwrap();
    let sockets = ListeningSockets::at(&address).unwrap();
    let server = Server::start(sockets, bytes_of(secret), limits).unwrap();
    let port = server.address().port();
    (server, port)
}

/// Waits until `happened` is true.
pub(crate) fn eventually(what: &str, mut happened: impl FnMut() -> bool) {
    let started = Instant::now();
    while !happened() {
        assert!(started.elapsed() < LONG, "{what} did not happen in {LONG:?}");
        std::thread::sleep(Duration::from_millis(2));
    }
}
