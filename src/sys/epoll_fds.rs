//! Finds the sockets of a library that does not expose them: the sockets that its event loop polls.
//!
//! The kernel lists in `/proc/self/fdinfo` which file descriptors an epoll instance polls (`tfd` in
//! proc(5)).

use super::fork::keep_from_children;
use std::collections::BTreeMap;
use std::path::Path;

/// The descriptors that one epoll instance polls, with their inodes as the kernel writes them.
type Sockets = Vec<(i32, String)>;

/// Calls `make`, and keeps sockets out of children if an epoll instance that `make` created polls
/// them.
pub fn apart_from_children<T>(make: impl FnOnce() -> T) -> T {
    let before = instances();
    let made = make();
    let (Some(before), Some(instances)) = (before, instances()) else { return made };
    for (instance, sockets) in instances {
        // The descriptor may have belonged to another instance before.
        let known = before
            .get(&instance)
            .is_some_and(|before| before.iter().any(|socket| sockets.contains(socket)));
        if !known {
            sockets
                .iter()
                .filter(|(fd, _)| link(*fd).starts_with("socket:"))
                .for_each(|&(fd, _)| keep_from_children(fd));
        }
    }
    made
}

/// Returns the target of the descriptor `fd`, such as `socket:[1]`.
fn link(fd: i32) -> String {
    std::fs::read_link(format!("/proc/self/fd/{fd}"))
        .map_or_else(|_| String::new(), |link| link.to_string_lossy().into_owned())
}

/// Returns the epoll instances of this process by descriptor; `None` if no descriptor is free for
/// the listing.
fn instances() -> Option<BTreeMap<i32, Sockets>> {
    let number = |path: &Path| path.file_name()?.to_str()?.parse().ok();
    let all = std::fs::read_dir("/proc/self/fd")
        .ok()?
        .flatten()
        .filter_map(|entry| number(&entry.path()));
    Some(
        all.filter(|&fd| link(fd) == "anon_inode:[eventpoll]").map(|fd| (fd, polled(fd))).collect(),
    )
}

/// Returns the descriptors that `instance` polls.
fn polled(instance: i32) -> Sockets {
    let text = std::fs::read_to_string(format!("/proc/self/fdinfo/{instance}")).unwrap_or_default();
    let entry = |line: &str| {
        let fd = line.strip_prefix("tfd:")?.split_whitespace().next()?.parse().ok()?;
        Some((fd, line.split_whitespace().find(|word| word.starts_with("ino:"))?.to_owned()))
    };
    text.lines().filter_map(entry).collect()
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
        let ((old, _old_far), (new, new_far), (free, _free_far)) =
            (connect(), connect(), connect());
        let poll = |socket: &TcpStream| {
            let instance = epoll::create(epoll::CreateFlags::CLOEXEC).expect("an instance");
            epoll::add(&instance, socket, epoll::EventData::new_u64(0), epoll::EventFlags::IN)
                .expect("added");
            instance
        };
        let _loop_before = poll(&old);
        // Clear CLOEXEC, because Gloo opens its sockets without it.
        for socket in [&old, &new] {
            rustix::io::fcntl_setfd(socket, rustix::io::FdFlags::empty()).expect("open");
        }
        let _loop_since = apart_from_children(|| poll(&new));
        let closes = |socket: &TcpStream| {
            rustix::io::fcntl_getfd(socket).expect("open").contains(rustix::io::FdFlags::CLOEXEC)
        };
        assert!(
            closes(&new) && !closes(&old),
            "programs that are started get those of others still"
        );
        // SAFETY: the child calls only the fork handler of the code under test, `getpeername`,
        // `raise` and `_exit`.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let connected = |socket: &TcpStream| socket.peer_addr().is_ok();
            let right = connected(&old) && connected(&free) && !connected(&new);
            // SAFETY: stops this process, which is then killed; `_exit` takes any code.
            unsafe {
                if right {
                    libc::raise(libc::SIGSTOP);
                }
                libc::_exit(1)
            };
        }
        let mut status = 0;
        // SAFETY: `status` is valid for a write.
        unsafe { libc::waitpid(child, &raw mut status, libc::WUNTRACED) };
        assert!(libc::WIFSTOPPED(status), "the child saw something else: {status}");
        drop(new);
        let mut far = new_far;
        far.set_read_timeout(Some(Duration::from_secs(10))).expect("a timeout");
        // The end of the connection is visible although the child lives.
        let end = far.read(&mut [0]);
        // SAFETY: `child` is our own; `status` is valid for a write.
        let waited = unsafe {
            libc::kill(child, libc::SIGKILL);
            libc::waitpid(child, &raw mut status, 0)
        };
        assert_eq!((waited, end.ok()), (child, Some(0)));
    }
}
