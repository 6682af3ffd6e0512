//! The store on a server: what clients see of each other, how they wait, and what the server's exit
//! causes.

use crate::clients::{
    LONG, SHORT, SOON, client, eventually, free_port, master, open, options, refused,
};
use crate::process::{alone, fork, status_of};
use crate::programs::answer_as_one_store;
use std::thread;
use std::time::{Duration, Instant};
use symm::error::ErrorKind;
use symm::store::Store;
use symm::store::memory::MemoryStore;
use symm::store::prefix::PrefixStore;
use symm::store::tcp::TcpOptions;

#[test]
fn at_loopback_without_a_secret_a_unix_socket_can_take_the_ports_place() {
    let port = free_port();
    let own = |host: &str, port| TcpOptions { require_same_user: true, ..options(host, port) };
    let store = open(TcpOptions { is_master: true, ..own("127.0.0.1", port) });
    assert_eq!((store.host(), store.port()), (format!("unix:@torch-symm:{port}").as_str(), 0));
    assert!(
        std::net::TcpStream::connect(("127.0.0.1", port)).is_err(),
        "nobody listens at the port"
    );
    let other = open(own("localhost", port));
    store.set("key", b"value").unwrap();
    assert_eq!(other.get("key", Some(LONG)).unwrap(), "value");
    let error = refused(TcpOptions { is_master: true, ..own("::1", port) });
    assert!(error.message.contains("in use: this process"), "{error}");
    // With a secret, the server listens at the port itself. Two servers that choose their own
    // addresses get different addresses.
    let secret = Some(b"secret".to_vec());
    let public = open(TcpOptions { is_master: true, secret, ..own("127.0.0.1", port) });
    assert_eq!((public.host(), public.port()), ("127.0.0.1", port));
    let chosen = [(); 2].map(|()| open(TcpOptions { is_master: true, ..own("127.0.0.1", 0) }));
    assert_ne!(chosen[0].host(), chosen[1].host());
}

#[test]
fn large_values_pass_and_too_large_ones_are_refused_by_the_sender() {
    let store = master("127.0.0.1", None);
    let large: Vec<u8> = (0..64 << 20).map(|index: u32| (index >> 7) as u8).collect();
    store.set("large", &large).unwrap();
    let other = client(&store, None);
    assert!(other.get("large", Some(LONG)).unwrap() == large);
    let error = store.set("larger", &vec![0; 80 << 20]).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Value, "{error}");
    // Together the two values are larger than one reply may be.
    let error = other.multi_get(&["large", "large"], Some(LONG)).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Value, "{error}");
    for index in 0..3 {
        store.set(&format!("more {index}"), &large[..50 << 20]).unwrap();
    }
    let error = store.set("last straw", &large).unwrap_err();
    assert!(error.kind == ErrorKind::Config && error.message.contains("full"), "{error}");
    store.delete("large").unwrap();
    store.set("last straw", &large).unwrap();
}

#[test]
fn masters_of_one_process_share_a_server_if_they_say_so() {
    let port = free_port();
    let tenant =
        || TcpOptions { is_master: true, multi_tenant: true, ..options("127.0.0.1", port) };
    let first = open(tenant());
    let second = open(tenant());
    first.set("key", b"1").unwrap();
    drop(first);
    assert_eq!(second.get("key", Some(LONG)).unwrap(), "1");
    let error = refused(TcpOptions { multi_tenant: false, ..tenant() });
    assert!(error.kind == ErrorKind::Network && error.message.contains("in use"), "{error}");
    let error = refused(TcpOptions { secret: Some(b"s".to_vec()), ..tenant() });
    assert_eq!(error.kind, ErrorKind::Config, "{error}");
    drop(second);
    // The port is free again, and the new server has none of the old keys.
    assert_eq!(open(tenant()).num_keys().unwrap(), 0);
}

#[test]
fn a_client_that_comes_before_its_server_waits_for_it() {
    let port = free_port();
    thread::scope(|scope| {
        let early = scope.spawn(move || open(options("127.0.0.1", port)).get("key", Some(LONG)));
        thread::sleep(SHORT);
        let store = open(TcpOptions { is_master: true, ..options("127.0.0.1", port) });
        store.set("key", b"late").unwrap();
        assert_eq!(early.join().unwrap().unwrap(), "late");
    });
    let started = Instant::now();
    let error = refused(TcpOptions { timeout: SHORT, ..options("127.0.0.1", port) });
    assert!(error.kind == ErrorKind::Network && error.message.contains("refused"), "{error}");
    assert!(started.elapsed() < SOON);
}

#[test]
fn the_end_of_the_server_ends_calls_at_once() {
    let store = master("127.0.0.1", None);
    let other = client(&store, None);
    thread::scope(|scope| {
        let waiter = scope.spawn(|| other.get("never", Some(LONG)).unwrap_err());
        thread::sleep(SHORT);
        let ended = Instant::now();
        drop(store);
        let error = waiter.join().unwrap();
        assert!(error.kind == ErrorKind::Network, "{error}");
        assert!(error.message.contains("Get of key \"never\""), "{error}");
        assert_eq!(other.add("key", 1).unwrap_err().kind, ErrorKind::Network);
        assert!(ended.elapsed() < SOON);
    });
}

#[test]
fn any_program_of_several_clients_means_what_it_means_to_a_map() {
    answer_as_one_store(300, || {
        let server = master("127.0.0.1", Some("secret"));
        move || client(&server, Some("secret"))
    });
}

#[test]
fn prefixes_nest_and_see_only_their_own() {
    let store = MemoryStore::new();
    let outer = PrefixStore::new("outer", &store);
    let inner = PrefixStore::new("inner", &outer);
    inner.set("key", b"1").unwrap();
    outer.set("key", b"2").unwrap();
    assert_eq!(store.get("outer/inner/key", None).unwrap(), "1");
    assert_eq!(inner.list_keys().unwrap(), ["key"]);
    assert_eq!(outer.list_keys().unwrap().len(), 2);
    assert_eq!(inner.num_keys().unwrap(), 2);
    let error = inner.wait(&["absent"], Some(Duration::ZERO)).unwrap_err();
    assert!(error.message.contains("outer/inner/absent"), "{error}");
}

#[test]
fn a_forked_child_speaks_on_connections_of_its_own() {
    if !alone() {
        return;
    }
    let store = master("127.0.0.1", None);
    store.set("key", b"parent").unwrap();
    // The child uses only the store, which takes no lock in a forked child and makes a new
    // connection.
    let child = fork(|| match store.get("key", Some(LONG)) {
        Ok(value) if value == "parent" => i32::from(store.set("child", b"was here").is_err()),
        _ => 2,
    });
    for round in 0..100 {
        assert_eq!(store.add("round", 1).unwrap(), round + 1);
    }
    assert_eq!(status_of(child), 0);
    eventually("the child's key", || store.check(&["child"]).unwrap());
}
