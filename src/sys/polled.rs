//! Sockets of a library that shows none: those that its event loop polls.
//!
//! The kernel lists in `/proc/self/fdinfo` which descriptors an epoll instance polls (`tfd` in proc(5)).

use super::fork::Unshared;
use std::collections::BTreeSet;
use std::path::Path;

/// The epoll instances of this process at one moment.
pub struct Polled {
    before: BTreeSet<i32>,
}

impl Polled {
    /// Those of now.
    pub fn now() -> Self {
        Self { before: instances() }
    }

    /// Guards of the sockets that instances poll which were made since: forked children do not get these sockets.
    pub fn guard_new(&self) -> Vec<Unshared> {
        let made = instances().into_iter().filter(|instance| !self.before.contains(instance));
        made.flat_map(polled).filter(|&fd| link(fd).starts_with("socket:")).filter_map(Unshared::of).collect()
    }
}

/// What the descriptor `fd` stands for.
fn link(fd: i32) -> String {
    std::fs::read_link(format!("/proc/self/fd/{fd}")).map_or_else(|_| String::new(), |link| link.to_string_lossy().into_owned())
}

/// Descriptors of epoll instances; none where no descriptor is free to look.
fn instances() -> BTreeSet<i32> {
    let number = |path: &Path| path.file_name()?.to_str()?.parse().ok();
    let entries = std::fs::read_dir("/proc/self/fd").into_iter().flatten().flatten();
    entries.filter_map(|entry| number(&entry.path())).filter(|&fd| link(fd) == "anon_inode:[eventpoll]").collect()
}

/// Descriptors that `instance` polls.
fn polled(instance: i32) -> Vec<i32> {
    let text = std::fs::read_to_string(format!("/proc/self/fdinfo/{instance}")).unwrap_or_default();
    text.lines().filter_map(|line| line.strip_prefix("tfd:")?.split_whitespace().next()?.parse().ok()).collect()
}

#[cfg(test)]
#[allow(unsafe_code, reason = "fork and epoll")]
mod tests {
    use super::*;
    use rustix::event::epoll;
    use std::io::Read;
    use std::net::{Ipv4Addr, TcpListener, TcpStream};
    use std::time::Duration;

    #[test]
    fn a_child_gets_the_sockets_of_a_new_loop_no_more_and_others_still() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
        let connect = || {
            let near = TcpStream::connect(listener.local_addr().expect("bound")).expect("connects");
            (near, listener.accept().expect("accepted").0)
        };
        let ((old, _old_far), (new, new_far), (free, _free_far)) = (connect(), connect(), connect());
        let poll = |socket: &TcpStream| {
            let instance = epoll::create(epoll::CreateFlags::CLOEXEC).expect("an instance");
            epoll::add(&instance, socket, epoll::EventData::new_u64(0), epoll::EventFlags::IN).expect("added");
            instance
        };
        let _loop_before = poll(&old);
        let polled = Polled::now();
        let _loop_since = poll(&new);
        let guards = polled.guard_new();
        // Other tests may make loops at the same time.
        assert!(!guards.is_empty());
        // SAFETY: the child calls nothing but the code under test's hook, `getpeername`, `pause` and `_exit`.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let connected = |socket: &TcpStream| socket.peer_addr().is_ok();
            let right = connected(&old) && connected(&free) && !connected(&new);
            if !right {
                // SAFETY: `_exit` takes any code.
                unsafe { libc::_exit(1) };
            }
            // Lives on until it is killed.
            // SAFETY: waits for a signal.
            unsafe { libc::pause() };
        }
        drop(new);
        let mut far = new_far;
        far.set_read_timeout(Some(Duration::from_secs(10))).expect("a timeout");
        // Its end is seen although the child lives.
        let end = far.read(&mut [0]);
        let mut status = 0;
        // SAFETY: `child` is our own; `status` is valid for a write.
        let waited = unsafe {
            libc::kill(child, libc::SIGKILL);
            libc::waitpid(child, &raw mut status, 0)
        };
        assert_eq!((waited, end.ok()), (child, Some(0)));
        assert!(libc::WIFSIGNALED(status), "the child saw something else: {status}");
    }

    #[test]
    fn a_number_that_was_used_again_is_left_to_children() {
        let (first, _far) = std::os::unix::net::UnixStream::pair().expect("sockets");
        let fd = std::os::fd::AsRawFd::as_raw_fd(&first);
        let guard = Unshared::of(fd).expect("a slot");
        let (second, _other) = std::os::unix::net::UnixStream::pair().expect("sockets");
        // SAFETY: both are open, and own their numbers.
        unsafe { libc::dup2(std::os::fd::AsRawFd::as_raw_fd(&second), fd) };
        // SAFETY: the child calls nothing but `getsockname` and `_exit`.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let code = i32::from(first.local_addr().is_err());
            // SAFETY: `_exit` takes any code.
            unsafe { libc::_exit(code) };
        }
        let mut status = 0;
        // SAFETY: `status` is valid for a write; `child` is our own.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0);
        drop(guard);
    }
}
