//! Where a store listens: TCP over IPv4 and IPv6, or a Unix socket.

use super::occupant;
use crate::error::{Error, Result};
use crate::sys::{interrupt, random, socket, thread};
use rustix::fd::{AsFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, Shutdown, SocketAddrAny, SocketAddrUnix, SocketFlags, SocketType, acceptfrom_with, bind, connect, getpeername,
    getsockname, ipproto, listen, shutdown, socket_with, sockopt,
};
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::{Duration, Instant};

const FLAGS: SocketFlags = SocketFlags::CLOEXEC.union(SocketFlags::NONBLOCK);
const BACKLOG: i32 = 4096;

/// An address as a user gives it, resolved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// All addresses of a host name, and a port.
    Inet(Vec<SocketAddr>),
    /// A path, or a name in the abstract namespace, which stands in no directory.
    Unix(UnixName),
}

/// Name of a Unix socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum UnixName {
    /// A path; the socket is removed with its server.
    Path(PathBuf),
    /// `@name`.
    Abstract(String),
}

impl Address {
    /// `host` is a name, an IPv4 or IPv6 address, or `unix:/path` or `unix:@name`, for which `port` means nothing.
    /// A name is looked up on another thread, for at most until `deadline`.
    pub fn resolve(host: &str, port: u16, deadline: Instant) -> Result<Self> {
        if let Some(name) = host.strip_prefix("unix:") {
            // As in URLs: unix:///path.
            let name = name.strip_prefix("//").unwrap_or(name);
            return match name.strip_prefix('@') {
                Some(name) if !name.is_empty() => Ok(Self::Unix(UnixName::Abstract(name.into()))),
                _ if name.starts_with('/') => Ok(Self::Unix(UnixName::Path(name.into()))),
                _ => Err(Error::value(format!("store address {host:?} is neither unix:/absolute/path nor unix:@name"))),
            };
        }
        let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
        if let Ok(ip) = bare.parse::<IpAddr>() {
            return Ok(Self::Inet(vec![SocketAddr::new(ip, port)]));
        }
        let (sender, receiver) = mpsc::channel();
        let name = host.to_owned();
        // getaddrinfo knows no deadline; a late answer goes nowhere.
        let looked_up = thread::spawn("symm-resolve", None, move || {
            sender.send((name.as_str(), port).to_socket_addrs().map(Iterator::collect::<Vec<_>>))
        });
        looked_up.map_err(|error| Error::internal(format!("a thread to look up {host:?}: {error}")))?;
        let answer = loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match receiver.recv_timeout(left.min(interrupt::LOOK)) {
                Err(mpsc::RecvTimeoutError::Timeout) if left > interrupt::LOOK => interrupt::check()?,
                answer => break answer,
            }
        };
        match answer {
            Ok(Ok(mut found)) if !found.is_empty() => {
                found.sort();
                found.dedup();
                Ok(Self::Inet(found))
            }
            Ok(Ok(_)) => Err(Error::network(format!("host {host:?} has no address"))),
            Ok(Err(error)) => Err(Error::network(format!("host {host:?} cannot be resolved: {error}"))),
            Err(_) => Err(Error::network(format!("host {host:?} could not be resolved in time (timeout)"))),
        }
    }

    /// Whether only this host can reach it.
    pub fn local(&self) -> bool {
        match self {
            Self::Inet(all) => all.iter().all(|address| address.ip().is_loopback()),
            Self::Unix(_) => true,
        }
    }

    /// In place of loopback, which all users of a host reach, an abstract Unix socket that is named after the port: its two ends know each
    /// other's user from the kernel. Like the port it is one of the network namespace, and nothing is left behind. Port 0 gets a name that
    /// nobody can guess.
    pub fn for_same_user(self) -> Result<Self> {
        match &self {
            Self::Inet(_) if self.local() => {}
            Self::Inet(_) | Self::Unix(_) => return Ok(self),
        }
        let name = match self.port() {
            0 => random::name("torch-symm:")?,
            port => format!("torch-symm:{port}"),
        };
        Ok(Self::Unix(UnixName::Abstract(name)))
    }

    /// The port, 0 for Unix sockets.
    pub fn port(&self) -> u16 {
        match self {
            Self::Inet(all) => all.first().map_or(0, SocketAddr::port),
            Self::Unix(_) => 0,
        }
    }

    /// Where to connect in order to reach a server that listens here.
    pub fn near(&self) -> Self {
        let reachable = |address: &SocketAddr| match address.ip() {
            IpAddr::V4(ip) if ip.is_unspecified() => SocketAddr::new(std::net::Ipv4Addr::LOCALHOST.into(), address.port()),
            IpAddr::V6(ip) if ip.is_unspecified() => SocketAddr::new(std::net::Ipv6Addr::LOCALHOST.into(), address.port()),
            IpAddr::V4(_) | IpAddr::V6(_) => *address,
        };
        match self {
            Self::Inet(all) => Self::Inet(all.iter().map(reachable).collect()),
            Self::Unix(name) => Self::Unix(name.clone()),
        }
    }

    /// A connection on its way to one of the addresses; each failure is given to `failed`.
    pub fn connect(&self, mut failed: impl FnMut(String, Errno)) -> Option<OwnedFd> {
        let mut attempt = |name: String, outcome: rustix::io::Result<OwnedFd>| outcome.map_err(|errno| failed(name, errno)).ok();
        match self {
            Self::Inet(all) => all.iter().find_map(|address| attempt(address.to_string(), connect_inet(address))),
            Self::Unix(name) => {
                let own = connect_unix(name).and_then(|socket| if ours(&socket) { Ok(socket) } else { Err(Errno::PERM) });
                attempt(self.to_string(), own)
            }
        }
    }
}

impl std::fmt::Display for Address {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Inet(all) => {
                let all: Vec<String> = all.iter().map(SocketAddr::to_string).collect();
                f.write_str(&all.join(", "))
            }
            Self::Unix(UnixName::Path(path)) => write!(f, "unix:{}", path.display()),
            Self::Unix(UnixName::Abstract(name)) => write!(f, "unix:@{name}"),
        }
    }
}

fn connect_inet(address: &SocketAddr) -> rustix::io::Result<OwnedFd> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    // Blocking while it connects: the kernel's own limit applies where nobody answers, and a refusal comes at once.
    let socket = socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    attend(&socket)?;
    connect_within(&socket, || connect(&socket, address))?;
    // A socket that connects to a free port of its own range may meet itself.
    let own = getsockname(&socket).ok().and_then(|own| SocketAddr::try_from(own).ok());
    if own == Some(*address) { Err(Errno::CONNREFUSED) } else { Ok(socket) }
}

/// Sends at once, and notices within two minutes that the other host has vanished.
fn attend(socket: &OwnedFd) -> rustix::io::Result<()> {
    sockopt::set_tcp_nodelay(socket, true)?;
    sockopt::set_tcp_keepidle(socket, Duration::from_secs(60))?;
    sockopt::set_tcp_keepintvl(socket, Duration::from_secs(10))?;
    sockopt::set_tcp_keepcnt(socket, 6)?;
    sockopt::set_socket_keepalive(socket, true)
}

/// Connects within two seconds, so that whoever waits sees its deadline.
fn connect_within(socket: &OwnedFd, connect: impl FnOnce() -> rustix::io::Result<()>) -> rustix::io::Result<()> {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    rustix::io::ioctl_fionbio(socket, true)?;
    match connect() {
        Err(Errno::INPROGRESS) => {
            let mut fds = [PollFd::new(socket, PollFlags::OUT)];
            if poll(&mut fds, Some(&Timespec { tv_sec: 2, tv_nsec: 0 }))? == 0 {
                return Err(Errno::TIMEDOUT);
            }
            sockopt::socket_error(socket)?
        }
        outcome => outcome,
    }
}

fn unix_address(name: &UnixName) -> rustix::io::Result<SocketAddrUnix> {
    match name {
        UnixName::Path(path) => SocketAddrUnix::new(path),
        UnixName::Abstract(name) => SocketAddrUnix::new_abstract_name(name.as_bytes()),
    }
}

/// Connects to whoever listens there.
pub(super) fn connect_unix(name: &UnixName) -> rustix::io::Result<OwnedFd> {
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, FLAGS, None)?;
    connect(&socket, &unix_address(name)?)?;
    Ok(socket)
}

/// Whether the other end of a Unix socket belongs to this process's user, or to root.
fn ours(socket: &OwnedFd) -> bool {
    let own = rustix::process::geteuid().as_raw();
    socket::peer(socket).is_ok_and(|peer| peer.uid == own || peer.uid == 0)
}

/// Who is at the other end of an accepted connection, for people.
pub fn peer_name(connection: &OwnedFd) -> String {
    let inet = getpeername(connection).ok().flatten().and_then(|peer| SocketAddr::try_from(peer).ok());
    match (inet, socket::peer(connection)) {
        (Some(address), _) => address.to_string(),
        (None, Ok(peer)) => format!("pid {} of user {}", peer.pid, peer.uid),
        (None, Err(_)) => "a connection that has ended".into(),
    }
}

/// What a server listens at. The path of a Unix socket goes with it.
pub struct Listeners {
    /// The sockets.
    pub sockets: Vec<OwnedFd>,
    /// With the port that was chosen.
    pub address: Address,
    path: Option<(PathBuf, u64)>,
}

impl Drop for Listeners {
    fn drop(&mut self) {
        for socket in &self.sockets {
            // Frees the port even if a forked child holds a copy of the descriptor.
            let _ = shutdown(socket, Shutdown::Both);
        }
        if let Some((path, inode)) = &self.path
            && std::fs::symlink_metadata(path).is_ok_and(|now| now.ino() == *inode)
        {
            let _ = std::fs::remove_file(path);
        }
    }
}

impl Listeners {
    /// Listens at all of `address`; port 0 picks a free one. `Network` if it cannot.
    pub fn at(address: &Address) -> Result<Self> {
        match address {
            Address::Inet(all) => inet(all),
            Address::Unix(name) => unix(name),
        }
    }

    /// Takes over a TCP socket that is bound already.
    pub fn adopt(socket: OwnedFd) -> Result<Self> {
        let fail = |errno| Error::network(format!("the socket that was handed over cannot listen: {errno}"));
        rustix::io::ioctl_fionbio(&socket, true).map_err(fail)?;
        listen(&socket, BACKLOG).map_err(fail)?;
        let address = bound(&socket).map_err(fail)?;
        Ok(Self { sockets: vec![socket], address: Address::Inet(vec![address]), path: None })
    }

    /// The next connection to `socket`: `AGAIN` if there is none.
    pub fn accept(&self, socket: &OwnedFd) -> rustix::io::Result<OwnedFd> {
        let (connection, _) = acceptfrom_with(socket.as_fd(), FLAGS)?;
        match &self.address {
            Address::Inet(_) => attend(&connection)?,
            Address::Unix(_) => {}
        }
        Ok(connection)
    }

    /// Whether whoever is at the other end of `connection` may speak: at a Unix socket this user and root.
    pub fn serves(&self, connection: &OwnedFd) -> bool {
        match &self.address {
            Address::Inet(_) => true,
            Address::Unix(_) => ours(connection),
        }
    }
}

fn bound(socket: &OwnedFd) -> rustix::io::Result<SocketAddr> {
    let address: SocketAddrAny = getsockname(socket)?;
    SocketAddr::try_from(address)
}

fn inet(all: &[SocketAddr]) -> Result<Listeners> {
    let mut sockets = Vec::new();
    let mut addresses: Vec<SocketAddr> = Vec::new();
    let mut absent = None;
    for wanted in all {
        let mut wanted = *wanted;
        if wanted.port() == 0
            && let Some(first) = addresses.first()
        {
            wanted.set_port(first.port());
        }
        match listen_inet(&wanted) {
            Ok((socket, address)) => {
                sockets.push(socket);
                addresses.push(address);
            }
            // A name may stand for addresses that this machine does not have, such as ::1 without IPv6.
            Err(errno @ (Errno::ADDRNOTAVAIL | Errno::AFNOSUPPORT)) => absent = Some((wanted, errno)),
            Err(Errno::ADDRINUSE) => {
                let occupant = occupant::described(&Address::Inet(vec![wanted]));
                return Err(Error::network(format!("the store cannot listen at {wanted}, which is in use: {occupant}")));
            }
            Err(errno) => return Err(Error::network(format!("the store cannot listen at {wanted}: {errno}"))),
        }
    }
    match absent {
        Some((wanted, errno)) if sockets.is_empty() => {
            Err(Error::network(format!("the store cannot listen at {wanted}, which is no address of this machine: {errno}")))
        }
        _ => Ok(Listeners { sockets, address: Address::Inet(addresses), path: None }),
    }
}

fn listen_inet(address: &SocketAddr) -> rustix::io::Result<(OwnedFd, SocketAddr)> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let socket = socket_with(family, SocketType::STREAM, FLAGS, Some(ipproto::TCP))?;
    // A server that has just ended leaves connections behind that would hold the port for a minute.
    sockopt::set_socket_reuseaddr(&socket, true)?;
    if address.is_ipv6() {
        // "::" stands for all addresses, IPv4 included; any other for itself.
        sockopt::set_ipv6_v6only(&socket, !address.ip().is_unspecified())?;
    }
    bind(&socket, address)?;
    listen(&socket, BACKLOG)?;
    let address = bound(&socket)?;
    Ok((socket, address))
}

fn unix(name: &UnixName) -> Result<Listeners> {
    let address = Address::Unix(name.clone());
    let fail = |errno: Errno| match (name, errno) {
        (UnixName::Path(path), Errno::NAMETOOLONG) => {
            Error::value(format!("the store cannot listen at {address}: the path has {} bytes, at most 107 fit", path.as_os_str().len()))
        }
        (_, Errno::ADDRINUSE) => {
            Error::network(format!("the store cannot listen at {address}, which is in use: {}", occupant::described(&address)))
        }
        _ => Error::network(format!("the store cannot listen at {address}: {errno}")),
    };
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, FLAGS, None).map_err(fail)?;
    let target = unix_address(name).map_err(fail)?;
    let outcome = match (bind(&socket, &target), name) {
        (Err(Errno::ADDRINUSE), UnixName::Path(path)) if abandoned(path, name) => {
            std::fs::remove_file(path).map_err(|error| Error::network(format!("{}: {error}", path.display())))?;
            bind(&socket, &target)
        }
        (outcome, _) => outcome,
    };
    outcome.map_err(fail)?;
    let path = match name {
        UnixName::Path(path) => {
            // Before it listens, so nobody of another user slips in; `accept` looks at the user again.
            let metadata =
                std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600)).and_then(|()| std::fs::symlink_metadata(path));
            let metadata = metadata.map_err(|error| Error::network(format!("{}: {error}", path.display())))?;
            Some((path.clone(), metadata.ino()))
        }
        UnixName::Abstract(_) => None,
    };
    listen(&socket, BACKLOG).map_err(fail)?;
    Ok(Listeners { sockets: vec![socket], address, path })
}

/// Whether `path` is a socket of this user that nobody serves any more.
fn abandoned(path: &Path, name: &UnixName) -> bool {
    let own = std::fs::symlink_metadata(path)
        .is_ok_and(|metadata| metadata.file_type().is_socket() && metadata.uid() == rustix::process::geteuid().as_raw());
    own && matches!(connect_unix(name), Err(Errno::CONNREFUSED))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resolve(host: &str) -> Result<Address> {
        Address::resolve(host, 7, Instant::now() + Duration::from_secs(5))
    }

    #[test]
    fn addresses_read_as_users_write_them() -> Result<()> {
        assert_eq!(resolve("127.0.0.1")?.to_string(), "127.0.0.1:7");
        assert_eq!(resolve("[::1]")?, resolve("::1")?);
        assert_eq!(resolve("unix:///tmp/a")?, resolve("unix:/tmp/a")?);
        assert_eq!(resolve("unix:@a")?.to_string(), "unix:@a");
        assert!(resolve("localhost")?.local());
        assert!(!resolve("0.0.0.0")?.local() && !resolve("10.1.2.3")?.local());
        assert_eq!(resolve("0.0.0.0")?.near(), resolve("127.0.0.1")?);
        for wrong in ["unix:", "unix:a", "unix:@", "unix://a"] {
            assert!(resolve(wrong).is_err(), "{wrong}");
        }
        Ok(())
    }

    #[test]
    fn a_port_has_one_listener_and_a_path_is_free_after_it() -> Result<()> {
        let first = Listeners::at(&resolve("127.0.0.1")?.near())
            .or_else(|_| Listeners::at(&Address::Inet(vec![SocketAddr::from(([127, 0, 0, 1], 0))])))?;
        assert!(Listeners::at(&first.address).is_err_and(|error| error.message.contains("in use")));
        assert!(first.address.port() != 0);
        let place = std::env::temp_dir().join(format!("symm-address-{}", std::process::id()));
        let name = Address::Unix(UnixName::Path(place.clone()));
        let listeners = Listeners::at(&name)?;
        assert!(Listeners::at(&name).is_err_and(|error| error.message.contains("in use")));
        drop(listeners);
        assert!(!place.exists());
        // Left behind by a server that was killed.
        drop(std::os::unix::net::UnixListener::bind(&place));
        assert!(place.exists());
        drop(Listeners::at(&name)?);
        assert!(!place.exists());
        let long = Address::Unix(UnixName::Path(format!("/tmp/{}", "x".repeat(200)).into()));
        assert!(Listeners::at(&long).is_err_and(|error| error.message.contains("107")));
        Ok(())
    }
}
