//! Servers in processes of their own.

use crate::clients::{LONG, SHORT, SOON, eventually, free_port, honest, open, options};
use crate::process::{alone, process, role};
use rustix::process::{Resource, Rlimit, Signal, kill_process, setrlimit};
use std::io::{BufRead, BufReader};
use std::process::{Child, Stdio};
use std::thread;
use std::time::{Duration, Instant};
use symm::error::{Error, ErrorKind};
use symm::store::Store;
use symm::store::request::{Request, StoreOp};
use symm::store::tcp::TcpOptions;

/// Runs as a server if the test program was started as one; otherwise does nothing. The server
/// exits once its process cannot open a file, because it has reached its limit of descriptors.
#[test]
#[ignore = "the other tests start it"]
fn server_process() {
    let Some((port, descriptors)) = role::<(u16, Option<u64>)>() else { return };
    if let Some(limit) = descriptors {
        setrlimit(Resource::Nofile, Rlimit { current: Some(limit), maximum: Some(limit) }).unwrap();
    }
    let _store = open(TcpOptions { is_master: true, ..options("127.0.0.1", port) });
    println!("serving");
    let started = Instant::now();
    while started.elapsed() < LONG && std::fs::File::open("/proc/self/stat").is_ok() {
        thread::sleep(Duration::from_millis(5));
    }
}

pub(super) fn start_server(port: u16, descriptors: Option<u64>) -> Child {
    let mut child = process("tcp_killed::server_process", &(port, descriptors))
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stdout.as_mut().unwrap()).lines();
    assert!(lines.map_while(Result::ok).any(|line| line.contains("serving")));
    child
}

#[test]
fn a_killed_server_is_noticed_at_once_and_a_stopped_one_at_the_limit() {
    if !alone() {
        return;
    }
    let port = free_port();
    let mut child = start_server(port, None);
    let pid = rustix::process::Pid::from_child(&child);
    let store = honest(port, None);
    store.set("key", b"value").unwrap();
    kill_process(pid, Signal::STOP).unwrap();
    let stat = format!("/proc/{}/stat", child.id());
    eventually("the server's stop", || std::fs::read_to_string(&stat).unwrap().contains(") T "));
    let started = Instant::now();
    for op in [StoreOp::Get, StoreOp::Add] {
        let request = Request::new(op, vec!["key"], vec![]);
        let Error { kind, message } =
            store.call(&request, Some(Duration::from_millis(300))).unwrap_err();
        assert!(kind == ErrorKind::Timeout && message.contains("did not answer"), "{message}");
    }
    assert!(started.elapsed() < SOON, "{:?}", started.elapsed());
    kill_process(pid, Signal::CONT).unwrap();
    assert_eq!(store.get("key", Some(LONG)).unwrap(), "value");
    thread::scope(|scope| {
        let waiter = scope.spawn(|| store.get("never", Some(LONG)).unwrap_err());
        thread::sleep(SHORT);
        let killed = Instant::now();
        kill_process(pid, Signal::KILL).unwrap();
        let error = waiter.join().unwrap();
        assert!(error.kind == ErrorKind::Network && killed.elapsed() < SOON, "{error}");
    });
    child.wait().unwrap();
    // A new server at the same address is a different store.
    let mut child = start_server(port, None);
    assert_eq!(store.num_keys().unwrap(), 0);
    child.kill().unwrap();
    child.wait().unwrap();
}
