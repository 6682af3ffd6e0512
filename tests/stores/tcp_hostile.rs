//! The store's server against pending connections, clients that break the protocol, and clients
//! that are slow, silent or exited. Each test has a separate process, because the tests count file
//! descriptors and memory, and change limits.

use crate::clients::{
    LONG, SHORT, SOON, eventually, free_port, honest, open, options, refused, server,
};
use crate::process::alone;
use crate::tcp_killed::start_server;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::thread;
use std::time::{Duration, Instant};
use symm::error::ErrorKind;
use symm::store::Store;
use symm::store::request::{Request, StoreOp};
use symm::store::tcp::frame::ClientFrame;
use symm::store::tcp::limits::{ConnectionLimits, MAX_FRAME};
use symm::store::tcp::proof::{ADMISSION, ClientHello, HELLO, OPENING};
use symm::store::tcp::server::Server;
use symm::store::tcp::{TcpOptions, TcpStore};

/// Returns a server, its port and an honest client in a process that runs only the calling test. In
/// any other process it returns `None`, once that process has succeeded.
fn start(limits: ConnectionLimits) -> Option<(Server, u16, TcpStore)> {
    alone().then(|| {
        let (server, port) = server(limits, None);
        (server, port, honest(port, None))
    })
}

/// A connection that has received the server's first message.
fn unidentified(port: u16) -> (TcpStream, [u8; OPENING]) {
    let mut socket = TcpStream::connect(("127.0.0.1", port)).unwrap();
    socket.set_read_timeout(Some(LONG)).unwrap();
    let mut words = [0; OPENING];
    socket.read_exact(&mut words).unwrap();
    (socket, words)
}

/// A connection that the server has admitted.
fn admitted(port: u16) -> TcpStream {
    let (mut socket, words) = unidentified(port);
    let (introduction, hello) = ClientHello::answer(&words, None).unwrap();
    socket.write_all(&hello).unwrap();
    let mut admission = [0; ADMISSION];
    socket.read_exact(&mut admission).unwrap();
    introduction.admitted(&admission, None).unwrap();
    socket
}

/// A connection that the server has admitted, and that has sent `bytes`.
fn sent(port: u16, bytes: &[u8]) -> TcpStream {
    let mut socket = admitted(port);
    socket.write_all(bytes).unwrap();
    socket
}

/// Returns true if the server closes the connection; earlier bytes are skipped.
fn closed(mut socket: TcpStream) -> bool {
    let mut buffer = [0; 4096];
    loop {
        match socket.read(&mut buffer) {
            Ok(0) => return true,
            Ok(_) => {}
            Err(error) => return error.kind() == std::io::ErrorKind::ConnectionReset,
        }
    }
}

fn frame(op: StoreOp, keys: &[&str], values: &[&[u8]]) -> Vec<u8> {
    let mut frame = Vec::new();
    ClientFrame::Call(LONG, Request::new(op, keys.to_vec(), values.to_vec()))
        .encode(&mut frame)
        .unwrap();
    frame
}

fn resident() -> usize {
    let status = std::fs::read_to_string("/proc/self/statm").unwrap();
    status.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() * 4096
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Returns the duration of the longest of many calls of an honest client while `meanwhile` runs.
fn slowest(store: &TcpStore, mut meanwhile: impl FnMut(u32)) -> Duration {
    let mut times: Vec<Duration> = (0..300)
        .map(|round| {
            meanwhile(round);
            let started = Instant::now();
            store.add("honest", 1).unwrap();
            started.elapsed()
        })
        .collect();
    times.sort();
    times[297]
}

#[test]
fn p18_garbage_closes_its_connection_and_no_other() {
    let Some((_server, port, store)) = start(ConnectionLimits::default()) else { return };
    for garbage in
        [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0; 4], &[0xff; 4096], b"symmkv1", b"symmkv0\n"]
    {
        let (mut socket, _) = unidentified(port);
        let _ = socket.write_all(garbage);
        let _ = socket.shutdown(Shutdown::Write);
        assert!(closed(socket));
    }
    for body in [&b""[..], &[1], &[9, 9, 9], &[1, 0, 0, 0, 0, 200], &[0xff; 100]] {
        let length = (body.len() as u32).to_le_bytes();
        assert!(closed(sent(port, &[&length, body].concat())), "{body:?}");
    }
    store.set("key", b"value").unwrap();
}

#[test]
fn p18_a_length_of_four_gigabytes_is_refused_and_costs_nothing() {
    let Some((_server, port, store)) = start(ConnectionLimits::default()) else { return };
    let before = resident();
    for length in [u32::MAX, MAX_FRAME as u32 + 1] {
        assert!(closed(sent(port, &length.to_le_bytes())));
    }
    // Valid lengths of frames that never arrive.
    let length = (MAX_FRAME as u32).to_le_bytes();
    let dripping: Vec<TcpStream> = (0..64).map(|_| sent(port, &length)).collect();
    let slow = slowest(&store, |_| {});
    assert!(resident() < before + (32 << 20), "{} MB more", (resident() - before) >> 20);
    println!("slowest call beside 64 dripping clients: {slow:?}");
    drop(dripping);
}

#[test]
fn p18_bytes_in_flight_and_at_rest_are_bounded() {
    const MB: usize = 1 << 20;
    let limits = ConnectionLimits { stored: 32 * MB, moving: 1, ..ConnectionLimits::default() };
    let Some((_server, port, store)) = start(limits) else { return };
    let before = resident();
    // However many values are set, the server keeps at most 32 MB.
    let value = vec![1; 5 * MB];
    let refused =
        (0..60).filter(|index| store.set(&format!("key {index}"), &value).is_err()).count();
    assert_eq!(refused, 54);
    // Clients that request large values and never read them: together eight times the maximum
    // number of bytes in flight.
    let get = |index| frame(StoreOp::Get, &[&format!("key {}", index % 6)], &[]);
    let deaf: Vec<TcpStream> = (0..96).map(|index| sent(port, &get(index))).collect();
    thread::sleep(SHORT);
    assert!(resident() < before + 200 * MB, "{} MB more", (resident() - before) >> 20);
    // Short calls overtake these requests; long calls wait until there is space.
    store.add("honest", 1).unwrap();
    drop(deaf);
    assert_eq!(store.get("key 0", Some(LONG)).unwrap().len(), 5 * MB);
}

#[test]
fn p18_requests_that_wait_leave_their_room_to_what_moves() {
    const MB: usize = 1 << 20;
    let limits = ConnectionLimits { moving: 1, ..ConnectionLimits::default() };
    let Some((_server, port, store)) = start(limits) else { return };
    let keys: Vec<String> = (0..1000).map(|index| format!("{index:060000}")).collect();
    let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
    let waiting = sent(port, &frame(StoreOp::Wait, &keys, &[]));
    // A value for which the 60 MB of the waiting request would leave no space.
    let value = vec![1; 20 * MB];
    let set = Request::new(StoreOp::Set, vec!["key"], vec![&value]);
    store.call(&set, Some(LONG / 3)).unwrap();
    // A second request of this size may not wait: it is rejected, and blocks no other client.
    let error = store.wait(&keys, Some(LONG / 3)).unwrap_err();
    assert!(error.kind == ErrorKind::Config && error.message.contains("cannot wait"), "{error}");
    assert_eq!(store.get("key", Some(LONG / 3)).unwrap().len(), value.len());
    drop(waiting);
    eventually("room for another", || {
        store.wait(&keys, Some(Duration::ZERO)).unwrap_err().kind == ErrorKind::Timeout
    });
}

#[test]
fn p18_a_thousand_idle_connections_and_as_many_unidentified_peers_delay_nobody() {
    let limits = ConnectionLimits {
        unidentified: 100,
        hello: Duration::from_secs(2),
        ..ConnectionLimits::default()
    };
    let Some((_server, port, store)) = start(limits) else { return };
    let before = descriptors();
    let idle: Vec<TcpStream> = (0..1000).map(|_| admitted(port)).collect();
    let unidentified: Vec<TcpStream> =
        (0..1000).map(|_| TcpStream::connect(("127.0.0.1", port)).unwrap()).collect();
    println!("slowest call beside them: {:?}", slowest(&store, |_| {}));
    // The oldest pending connections were closed to make space; the others are closed at their
    // deadline.
    let mut ends = unidentified;
    assert!(closed(ends.remove(0)));
    let started = Instant::now();
    assert!(ends.into_iter().all(closed));
    assert!(started.elapsed() < Duration::from_secs(10));
    for mut socket in idle {
        socket.write_all(&frame(StoreOp::Add, &["idle"], &[])).unwrap();
        assert!(socket.read(&mut [0; 64]).unwrap() > 0);
    }
    eventually("the server closing its side", || descriptors() <= before + 2);
}

#[test]
fn p18_only_those_who_know_the_secret_are_served() {
    if !alone() {
        return;
    }
    let (_server, port) = server(ConnectionLimits::default(), Some("right"));
    let store = honest(port, Some("right"));
    store.set("key", b"value").unwrap();
    for secret in [None, Some(b"wrong".to_vec()), Some(b"right ".to_vec())] {
        let error = refused(TcpOptions { secret, ..options("127.0.0.1", port) });
        assert!(error.kind == ErrorKind::Config && error.message.contains("secret"), "{error}");
    }
    // A complete hello that was valid for another connection, with requests right behind it.
    let (mut first, words) = unidentified(port);
    let (_, hello) = ClientHello::answer(&words, Some(b"right")).unwrap();
    first.write_all(&hello).unwrap();
    let mut admission = [0; ADMISSION];
    first.read_exact(&mut admission).unwrap();
    assert_eq!(admission[0], 1);
    let (mut second, _) = unidentified(port);
    second
        .write_all(&[&hello[..], &frame(StoreOp::Set, &["key"], &[b"replayed"])].concat())
        .unwrap();
    let mut admission = [1; ADMISSION];
    second.read_exact(&mut admission).unwrap();
    assert_eq!(admission, [0; ADMISSION]);
    assert!(closed(second));
    assert_eq!(store.get("key", Some(LONG)).unwrap(), "value");
}

#[test]
fn a_client_refuses_what_is_not_the_store_it_means() {
    if !alone() {
        return;
    }
    let (_open, open) = server(ConnectionLimits::default(), None);
    let secret = || Some(b"secret".to_vec());
    let error = refused(TcpOptions { secret: secret(), ..options("127.0.0.1", open) });
    assert!(error.kind == ErrorKind::Config && error.message.contains("does not ask"), "{error}");
    // A server that speaks the protocol and does not know the secret.
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let meet = |speech: Vec<u8>, timeout: Duration| {
        thread::scope(|scope| {
            let server = scope.spawn(|| {
                let (mut socket, _) = listener.accept().unwrap();
                socket.write_all(&speech).unwrap();
                let _ = socket.read_exact(&mut [0; HELLO]);
                let _ = socket.write_all(&[1; ADMISSION]);
                socket.set_read_timeout(Some(timeout)).unwrap();
                let _ = socket.read(&mut [0]);
            });
            let outcome = TcpStore::open(TcpOptions {
                secret: secret(),
                timeout,
                ..options("127.0.0.1", port)
            });
            server.join().unwrap();
            outcome.err().unwrap()
        })
    };
    let opening = symm::store::tcp::proof::opening(true).unwrap().0;
    assert!(meet(opening.to_vec(), LONG).message.contains("does not know the secret"));
    assert!(
        meet(b"HTTP/1.1 400 Bad Request and so on, and on".to_vec(), LONG)
            .message
            .contains("not a torch-symm store")
    );
    let started = Instant::now();
    let error = meet(Vec::new(), SHORT);
    assert!(error.kind == ErrorKind::Network && error.message.contains("says nothing"), "{error}");
    assert!(started.elapsed() < SOON);
}

#[test]
fn a_client_that_is_taken_for_one_unidentified_peer_too_many_comes_again() {
    if !alone() {
        return;
    }
    let (_server, port) = server(ConnectionLimits::default(), None);
    let door = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let store_port = door.local_addr().unwrap().port();
    thread::spawn(move || {
        for (index, near) in door.incoming().map_while(Result::ok).enumerate() {
            // The second and third connections are closed before the server has admitted them.
            if index != 1 && index != 2 {
                let far = TcpStream::connect(("127.0.0.1", port)).unwrap();
                for (mut from, mut to) in
                    [(near.try_clone().unwrap(), far.try_clone().unwrap()), (far, near)]
                {
                    thread::spawn(move || std::io::copy(&mut from, &mut to));
                }
            }
        }
    });
    let store = honest(store_port, None);
    thread::scope(|scope| {
        let waiter = scope.spawn(|| store.get("late", Some(LONG)));
        thread::sleep(SHORT);
        store.set("late", b"value").unwrap();
        assert_eq!(waiter.join().unwrap().unwrap(), "value");
    });
}

#[test]
fn p18_slow_and_dead_clients_are_let_go() {
    let limits =
        ConnectionLimits { frame: Duration::from_millis(300), ..ConnectionLimits::default() };
    let Some((_server, port, store)) = start(limits) else { return };
    let before = descriptors();
    let set = frame(StoreOp::Set, &["half"], &[&[7; 100_000]]);
    for length in [1, 3, 4, 20, 5000, set.len() - 1] {
        // A client that exited in the middle of a frame.
        drop(sent(port, &set[..length]));
        // A client that lives, but sends nothing more.
        let slow = sent(port, &set[..length]);
        let started = Instant::now();
        assert!(closed(slow), "{length}");
        assert!(started.elapsed() < Duration::from_secs(5));
    }
    assert!(!store.check(&["half"]).unwrap());
    eventually("the server closing its side", || descriptors() <= before + 1);
}

#[test]
fn p18_clients_that_ask_for_what_is_not_there_and_go_are_let_go_at_once() {
    let Some((_server, port, store)) = start(ConnectionLimits::default()) else { return };
    let before = descriptors();
    for _ in 0..50 {
        // The request and the end of the connection usually arrive together, so the end causes no
        // event of its own.
        drop(sent(port, &frame(StoreOp::Get, &["never"], &[])));
    }
    let started = Instant::now();
    eventually("the server closing its side", || descriptors() <= before);
    assert!(started.elapsed() < LONG / 2, "not when their time was over");
    store.set("never", b"value").unwrap();
}

#[test]
fn p18_running_out_of_descriptors_is_survived() {
    let Some((_server, port, store)) = start(ConnectionLimits::default()) else { return };
    let limit = getrlimit(Resource::Nofile);
    let before = descriptors();
    setrlimit(Resource::Nofile, Rlimit { current: Some(before as u64 + 40), ..limit }).unwrap();
    let many: Vec<TcpStream> =
        (0..80).map_while(|_| TcpStream::connect(("127.0.0.1", port)).ok()).collect();
    thread::sleep(SHORT);
    assert_eq!(store.add("honest", 1).unwrap(), 1);
    drop(many);
    setrlimit(Resource::Nofile, limit).unwrap();
    assert_eq!(honest(port, None).add("honest", 1).unwrap(), 2);
    eventually("the server closing its side", || descriptors() <= before);
}

#[test]
fn p18_unidentified_peers_leave_descriptors_to_ranks_and_to_the_process() {
    if !alone() {
        return;
    }
    let port = free_port();
    let mut child = start_server(port, Some(64));
    let idle: Vec<TcpStream> =
        (0..300).map(|_| TcpStream::connect(("127.0.0.1", port)).unwrap()).collect();
    // Ranks are admitted before the five seconds expire in which pending connections must introduce
    // themselves.
    let timeout = Duration::from_secs(3);
    let ranks: Vec<TcpStore> =
        (0..8).map(|_| open(TcpOptions { timeout, ..options("127.0.0.1", port) })).collect();
    assert_eq!(ranks.iter().map(|rank| rank.add("came", 1).unwrap()).max(), Some(8));
    thread::sleep(SHORT);
    assert_eq!(child.try_wait().unwrap(), None, "it found no descriptor");
    drop(idle);
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn p18_a_server_raises_the_limit_on_descriptors() {
    if !alone() {
        return;
    }
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: Some(512), ..limit }).unwrap();
    let _server = server(ConnectionLimits::default(), None);
    let raised = getrlimit(Resource::Nofile).current;
    setrlimit(Resource::Nofile, limit).unwrap();
    let wanted = limit.maximum.map_or(16 * 1024, |most| most.min(16 * 1024));
    assert!(raised.is_none_or(|raised| raised >= wanted), "{raised:?}");
}
