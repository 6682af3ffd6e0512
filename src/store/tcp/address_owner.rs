//! Finds the process that already listens at the address that a store wants.

use super::address::{StoreAddress, UnixName, connect_unix};
use crate::sys::socket;
use std::net::SocketAddr;
use std::path::Path;

/// The state of a listening socket in `/proc/net/tcp`.
const LISTENS: &str = "0A";

/// Returns the end of an error message: which process listens at `address`, if it is visible, and
/// the remedy.
pub(super) fn described(address: &StoreAddress) -> String {
    let own = rustix::process::geteuid().as_raw();
    let (uid, pid) = match address {
        StoreAddress::Inet(all) => match all.iter().find_map(listener) {
            Some((uid, inode)) => (Some(uid), if uid == own { holder(inode) } else { None }),
            None => (None, None),
        },
        StoreAddress::Unix(name) => {
            match connect_unix(name).and_then(|socket| socket::peer(&socket)) {
                Ok(peer) => (Some(peer.uid), Some(peer.pid).filter(|&pid| pid != 0)),
                Err(_) => (None, None),
            }
        }
    };
    let other = match address {
        StoreAddress::Inet(_) | StoreAddress::Unix(UnixName::Abstract(_)) => {
            "choose another port (MASTER_PORT, torchrun's --master-port)"
        }
        StoreAddress::Unix(UnixName::Path(_)) => "choose another path",
    };
    match (pid, uid) {
        (Some(pid), _) if pid == std::process::id() => {
            format!("this process, pid {pid}, listens there already; {other}")
        }
        (Some(pid), Some(uid)) if uid == own => {
            let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
            format!("pid {pid} ({}) listens there; `kill {pid}` ends it, or {other}", name.trim())
        }
        (_, Some(uid)) => format!("a process of user {uid} listens there; {other}"),
        (_, None) => other.into(),
    }
}

/// Returns the user and the inode of a socket that listens at the port of `address`.
fn listener(address: &SocketAddr) -> Option<(u32, u64)> {
    let port = format!("{:04X}", address.port());
    let tables = ["/proc/net/tcp", "/proc/net/tcp6"]
        .map(|table| std::fs::read_to_string(table).unwrap_or_default());
    tables.iter().flat_map(|table| table.lines()).find_map(|line| listening(line, &port))
}

/// Returns the user and the inode if the line of `/proc/net/tcp` shows a socket that listens at
/// `port`. The columns are number, local address, remote address, state, queues, timer,
/// retransmits, user, timeout, inode.
fn listening(line: &str, port: &str) -> Option<(u32, u64)> {
    let fields: Vec<&str> = line.split_ascii_whitespace().collect();
    let (_, at) = fields.get(1)?.rsplit_once(':')?;
    if at != port || *fields.get(3)? != LISTENS {
        return None;
    }
    Some((fields.get(7)?.parse().ok()?, fields.get(9)?.parse().ok()?))
}

/// Returns a process of this user that has the socket `inode` open.
fn holder(inode: u64) -> Option<u32> {
    let wanted = format!("socket:[{inode}]");
    let has = |folder: &Path| {
        let open = std::fs::read_dir(folder.join("fd")).into_iter().flatten().flatten();
        open.into_iter().any(|entry| {
            std::fs::read_link(entry.path())
                .is_ok_and(|target| target.as_os_str() == wanted.as_str())
        })
    };
    let processes = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let pid = |entry: &std::fs::DirEntry| {
        entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok())
    };
    processes.into_iter().find_map(|entry| pid(&entry).filter(|_| has(&entry.path())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_holder_of_a_port_is_found() {
        let line = "   0: 0100007F:733C 00000000:0000 0A 00000000:00000000 00:00000000 \
            00000000  1000        0 4711 1 0";
        assert_eq!(listening(line, "733C"), Some((1000, 4711)));
        assert_eq!(listening(line, "733D"), None);
        assert_eq!(listening(&line.replace(" 0A ", " 01 "), "733C"), None);
        let socket = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = StoreAddress::Inet(vec![socket.local_addr().expect("bound")]);
        let own = std::process::id();
        assert!(
            described(&address).starts_with(&format!("this process, pid {own}, listens")),
            "{}",
            described(&address)
        );
    }
}
