//! Heaps of two processes: forked children have a separate thread and separate links.
#![allow(unsafe_code, reason = "tests write where a heap says that memory lies, and fork")]

use super::host::{PAGE, read, write};
use super::*;
use crate::symm_mem::service_thread;
use crate::sys::fork::tests::{forked, status_of};
use crate::sys::socket;
use rustix::fd::{AsRawFd, OwnedFd};
use rustix::net::{SocketAddrUnix, connect};
use rustix::pipe::pipe;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::io::Write as _;

fn tell(pipe: &OwnedFd, bytes: &[u8]) {
    assert_eq!(rustix::io::write(pipe, bytes), Ok(bytes.len()));
}

fn reported<const N: usize>(pipe: &OwnedFd) -> [u8; N] {
    let mut bytes = [0; N];
    assert_eq!(rustix::io::read(pipe, &mut bytes), Ok(N), "told nothing");
    bytes
}

fn threads() -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").expect("readable");
    let name = |task: std::io::Result<std::fs::DirEntry>| {
        std::fs::read_to_string(task.ok()?.path().join("comm")).ok()
    };
    tasks.filter_map(name).filter(|name| name.trim() == "symm-heap").count()
}

/// Returns a socket that is not connected yet, and the name at which `heap` listens.
fn caller_of(heap: &Heap) -> (OwnedFd, SocketAddrUnix) {
    let name = heap.address().name();
    let name = SocketAddrUnix::new_abstract_name(name.as_bytes()).expect("a name");
    (socket::unconnected().expect("a socket"), name)
}

#[test]
fn a_peer_that_is_killed_leaves_its_memory_to_those_who_use_it() {
    let ((from_child, to_parent), (from_parent, to_child)) =
        (pipe().expect("pipe"), pipe().expect("pipe"));
    let child = forked(|| {
        let (own, _) = heap(16);
        let address = own.allocate(PAGE).expect("room");
        write(address, 42);
        tell(&to_parent, &own.address().encode());
        let parent = HeapAddress::decode(&reported(&from_parent));
        let (hold, number) =
            own.connect(&parent, &healthy(), Instant::now() + PATIENCE).expect("connects");
        assert!(reachable(&own, address, PAGE, &hold));
        tell(&to_parent, &number.to_le_bytes());
        loop {
            std::thread::sleep(PATIENCE);
        }
    });
    // Without this end, a child that fails ends the parent's wait.
    drop(to_parent);
    let (own, _) = heap(16);
    let _attention = own.attend().expect("runs");
    let peer = HeapAddress::decode(&reported(&from_child));
    tell(&to_child, &own.address().encode());
    let number = u64::from_le_bytes(reported(&from_child));
    let hold = own
        .meet(&peer, number, &healthy(), Instant::now() + PATIENCE)
        .expect("runs")
        .expect("came");
    assert_eq!((mapped(&hold), read(hold.base())), (1, 42));
    let address = own.allocate(PAGE).expect("room");
    assert!(reachable(&own, address, 8, &hold));
    // SAFETY: this process forked the child.
    assert_eq!(unsafe { libc::kill(child, libc::SIGKILL) }, 0);
    status_of(child);
    until("the link closed", || hold.link().is_closed());
    assert_eq!(
        (mapped(&hold), read(hold.base())),
        (1, 42),
        "a kernel of a failed group may be in it"
    );
    let begun = Instant::now();
    assert!(!reachable(&own, address, 8, &hold));
    own.release(address).expect("known");
    assert!(begun.elapsed() < PATIENCE / 2, "nobody waits for the dead: {:?}", begun.elapsed());
    let link = Arc::downgrade(hold.link());
    drop(hold);
    until("its memory was let go", || link.upgrade().is_none());
}

#[test]
fn the_thread_ends_with_the_last_group() {
    let child = forked(|| {
        let ((one, _), (other, _)) = (heap(16), heap(16));
        let before = threads();
        let holds = link(&one, &other, &healthy());
        let address = one.allocate(PAGE).expect("room");
        let served = reachable(&one, address, 8, &holds.0) && threads() == 1;
        let links = [&holds.0, &holds.1].map(|hold| Arc::downgrade(hold.link()));
        drop(holds);
        until("the thread ended", || threads() == 0);
        let gone =
            links.iter().all(|link| link.upgrade().is_none()) && service_thread::claims() == 0;
        let again = link(&one, &other, &healthy());
        before == 0 && served && gone && reachable(&one, address, 8, &again.0)
    });
    assert_eq!(status_of(child), 0);
}

// proves P15
#[test]
fn a_rank_without_a_free_descriptor_for_its_peer_names_the_limit() {
    let child = forked(|| {
        let (own, peer) = (heap(16).0, heap(16).0);
        let _attention = own.attend().expect("runs");
        let (caller, name) = caller_of(&own);
        let met = || own.meet(&peer.address(), 1, &healthy(), Instant::now());
        // Lower the limit to the first free descriptor.
        let limit = getrlimit(Resource::Nofile);
        let free = rustix::io::dup(&caller).expect("a descriptor").as_raw_fd() as u64;
        let without = Rlimit { current: Some(free), ..limit };
        setrlimit(Resource::Nofile, without).expect("lowered");
        connect(&caller, &name).expect("it listens");
        until("the error named the limit", || {
            met().is_err_and(|error| error.message.contains(&format!("RLIMIT_NOFILE is {free}")))
        });
        setrlimit(Resource::Nofile, limit).expect("as before");
        until("the peer was accepted", || met().is_ok());
        true
    });
    assert_eq!(status_of(child), 0);
}

#[test]
fn the_last_free_descriptor_leaves_no_error_of_later_connections() {
    let child = forked(|| {
        let (own, peer) = (heap(16).0, heap(16).0);
        let _attention = own.attend().expect("runs");
        let (caller, name) = caller_of(&own);
        let limit = getrlimit(Resource::Nofile);
        let free = rustix::io::dup(&caller).expect("a descriptor").as_raw_fd();
        setrlimit(Resource::Nofile, Rlimit { current: Some(free as u64 + 1), ..limit })
            .expect("lowered");
        connect(&caller, &name).expect("it listens");
        // SAFETY: a query of a number, which need not be a descriptor.
        until("the connection was accepted", || unsafe { libc::fcntl(free, libc::F_GETFD) } >= 0);
        // The thread then accepts once more, which fails.
        std::thread::sleep(Duration::from_millis(100));
        let met = own.meet(&peer.address(), 1, &healthy(), Instant::now());
        assert!(met.is_ok_and(|link| link.is_none()));
        true
    });
    assert_eq!(status_of(child), 0);
}

// proves P14
#[test]
fn a_forked_child_harms_nothing_of_its_parents() {
    let ((one, _), (other, _)) = (heap(16), heap(16));
    let address = one.allocate(PAGE).expect("room");
    let mut holds = Some(link(&one, &other, &healthy()));
    assert!(holds.as_ref().is_some_and(|(near, _)| reachable(&one, address, 8, near)));
    let child = forked(|| {
        // Drops the child's copies; the links belong to the parent.
        drop(holds.take());
        threads() == 0 && service_thread::claims() == 0
    });
    assert_eq!(status_of(child), 0);
    let (near, far) = holds.expect("the parent's");
    let second = one.allocate(PAGE).expect("room");
    assert!(reachable(&one, second, 8, &near) && !far.link().is_closed());
    drop(near);
    until("the other end heard of it", || far.link().is_closed());
}

// proves P19
#[test]
fn another_user_is_turned_away() {
    if !rustix::process::geteuid().is_root() {
        let _ = writeln!(std::io::stderr(), "skipped: only root can become another user");
        return;
    }
    let (own, _) = heap(16);
    let _attention = own.attend().expect("runs");
    let address = own.address();
    let child = forked(|| {
        // SAFETY: `setuid` accepts any user id, and this child has no other threads.
        assert_eq!(unsafe { libc::setuid(65534) }, 0);
        let (unidentified, _) = heap(16);
        let Ok((hold, _)) = unidentified.connect(&address, &healthy(), Instant::now() + PATIENCE)
        else {
            // The connecting end also checks the listener's user.
            return true;
        };
        until("it was turned away", || hold.link().is_closed());
        true
    });
    assert_eq!(status_of(child), 0);
    let other = heap(16).0;
    let (near, _far) = link(&other, &own, &healthy());
    assert!(!near.link().is_closed());
}
