//! The address of a store: TCP over IPv4 and IPv6, or a Unix socket.

use crate::error::{Error, Result};
use crate::sys::{interrupt, random, socket, thread};
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, getpeername, getsockname,
    socket_with, sockopt,
};
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::path::PathBuf;
use std::sync::mpsc;
use std::time::{Duration, Instant};

pub(super) const FLAGS: SocketFlags = SocketFlags::CLOEXEC.union(SocketFlags::NONBLOCK);

/// A resolved address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StoreAddress {
    /// The addresses of a host name, with a port.
    Inet(Vec<SocketAddr>),
    /// A path, or a name in the abstract namespace, which has no file.
    Unix(UnixName),
}

/// The name of a Unix socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum UnixName {
    /// A path; the server removes the socket when it ends.
    Path(PathBuf),
    /// The name of an abstract socket, which users write as `@name`.
    Abstract(String),
}

impl StoreAddress {
    /// Resolves `host`, which is a name, an IPv4 or IPv6 address, or `unix:/path` or `unix:@name`,
    /// which ignore `port`. A name is resolved on another thread, until `deadline` at the latest.
    pub fn resolve(host: &str, port: u16, deadline: Instant) -> Result<Self> {
        if let Some(name) = host.strip_prefix("unix:") {
            // As in URLs: unix:///path.
            let name = name.strip_prefix("//").unwrap_or(name);
            return match name.strip_prefix('@') {
                Some(name) if !name.is_empty() => Ok(Self::Unix(UnixName::Abstract(name.into()))),
                _ if name.starts_with('/') => Ok(Self::Unix(UnixName::Path(name.into()))),
                _ => Err(Error::value(format!(
                    "store address {host:?} is neither unix:/absolute/path nor unix:@name"
                ))),
            };
        }
        let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
        if let Ok(ip) = bare.parse::<IpAddr>() {
            return Ok(Self::Inet(vec![SocketAddr::new(ip, port)]));
        }
        let (sender, receiver) = mpsc::channel();
        let name = host.to_owned();
        // getaddrinfo has no timeout; a late answer is dropped.
        let looked_up = thread::spawn("symm-resolve", None, move || {
            sender.send((name.as_str(), port).to_socket_addrs().map(Iterator::collect::<Vec<_>>))
        });
        looked_up?;
        let answer = loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match receiver.recv_timeout(left.min(interrupt::SIGNAL_POLL)) {
                Err(mpsc::RecvTimeoutError::Timeout) if left > interrupt::SIGNAL_POLL => {
                    interrupt::check()?
                }
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
            Ok(Err(error)) => {
                Err(Error::network(format!("host {host:?} cannot be resolved: {error}")))
            }
            Err(_) => Err(Error::network(format!(
                "host {host:?} could not be resolved in time (timeout)"
            ))),
        }
    }

    /// Returns true if only this node can reach the address.
    pub fn local(&self) -> bool {
        match self {
            Self::Inet(all) => all.iter().all(|address| address.ip().is_loopback()),
            Self::Unix(_) => true,
        }
    }

    /// Replaces a loopback address, which all users of a node can reach, by an abstract Unix socket
    /// named after the port. The system tells each end of such a socket the user of the other end.
    /// Like the port, the name belongs to the network namespace, and no file remains of it. Port 0
    /// yields a name that other processes cannot guess.
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

    /// Returns the port; 0 for Unix sockets.
    pub fn port(&self) -> u16 {
        match self {
            Self::Inet(all) => all.first().map_or(0, SocketAddr::port),
            Self::Unix(_) => 0,
        }
    }

    /// Returns the address to connect to in order to reach a server that listens at this one.
    pub fn near(&self) -> Self {
        let reachable = |address: &SocketAddr| match address.ip() {
            IpAddr::V4(ip) if ip.is_unspecified() => {
                SocketAddr::new(std::net::Ipv4Addr::LOCALHOST.into(), address.port())
            }
            IpAddr::V6(ip) if ip.is_unspecified() => {
                SocketAddr::new(std::net::Ipv6Addr::LOCALHOST.into(), address.port())
            }
            IpAddr::V4(_) | IpAddr::V6(_) => *address,
        };
        match self {
            Self::Inet(all) => Self::Inet(all.iter().map(reachable).collect()),
            Self::Unix(name) => Self::Unix(name.clone()),
        }
    }

    /// Connects to the first address that works, until `deadline`, and passes each failure to
    /// `failed`. Tries at least one address. Fails if the thread must stop waiting.
    pub fn connect(
        &self,
        deadline: Instant,
        mut failed: impl FnMut(String, Errno),
    ) -> Result<Option<OwnedFd>> {
        match self {
            Self::Inet(all) => {
                for (tried, address) in all.iter().enumerate() {
                    if tried > 0 && Instant::now() >= deadline {
                        break;
                    }
                    match connect_inet(address, deadline) {
                        Ok(socket) => return Ok(Some(socket)),
                        Err(ConnectError::Failed(errno)) => failed(address.to_string(), errno),
                        Err(ConnectError::Interrupted(error)) => return Err(error),
                    }
                }
                Ok(None)
            }
            Self::Unix(name) => {
                let own = connect_unix(name)
                    .and_then(|socket| if ours(&socket) { Ok(socket) } else { Err(Errno::PERM) });
                Ok(own.map_err(|errno| failed(self.to_string(), errno)).ok())
            }
        }
    }
}

/// Why a connection to one address was not made.
#[derive(Debug, PartialEq)]
enum ConnectError {
    Failed(Errno),
    /// The program has asked to stop waiting.
    Interrupted(Error),
}

impl From<Errno> for ConnectError {
    fn from(errno: Errno) -> Self {
        Self::Failed(errno)
    }
}

impl std::fmt::Display for StoreAddress {
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

fn connect_inet(
    address: &SocketAddr,
    deadline: Instant,
) -> std::result::Result<OwnedFd, ConnectError> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let socket = socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    attend(&socket)?;
    connect_within(&socket, deadline, || connect(&socket, address))?;
    // A socket that connects to an unused port in the ephemeral range may connect to itself.
    let own = getsockname(&socket).ok().and_then(|own| SocketAddr::try_from(own).ok());
    if own == Some(*address) { Err(Errno::CONNREFUSED.into()) } else { Ok(socket) }
}

/// Disables Nagle's algorithm, and detects within two minutes that the other node has vanished,
/// unless it vanishes before it has acknowledged data: then after some 15 minutes.
pub(super) fn attend(socket: &OwnedFd) -> rustix::io::Result<()> {
    sockopt::set_tcp_nodelay(socket, true)?;
    sockopt::set_tcp_keepidle(socket, Duration::from_secs(60))?;
    sockopt::set_tcp_keepintvl(socket, Duration::from_secs(10))?;
    sockopt::set_tcp_keepcnt(socket, 6)?;
    sockopt::set_socket_keepalive(socket, true)
}

/// Maximum time for one address, so that a silent address leaves time for the next.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// Waits while it connects, until `deadline` and at most [`CONNECT_TIMEOUT`]; a refusal arrives at
/// once.
fn connect_within(
    socket: &OwnedFd,
    deadline: Instant,
    connect: impl FnOnce() -> rustix::io::Result<()>,
) -> std::result::Result<(), ConnectError> {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    rustix::io::ioctl_fionbio(socket, true)?;
    match connect() {
        Err(Errno::INPROGRESS) => {
            let deadline = deadline.min(Instant::now() + CONNECT_TIMEOUT);
            let mut fds = [PollFd::new(socket, PollFlags::OUT)];
            loop {
                let left = deadline.saturating_duration_since(Instant::now());
                let pause = left.min(interrupt::SIGNAL_POLL);
                match poll(&mut fds, Timespec::try_from(pause).ok().as_ref()) {
                    Ok(0) | Err(Errno::INTR) if !left.is_zero() => {
                        interrupt::check().map_err(ConnectError::Interrupted)?
                    }
                    Ok(0) => return Err(Errno::TIMEDOUT.into()),
                    Ok(_) => return Ok(sockopt::socket_error(socket)??),
                    Err(errno) => return Err(errno.into()),
                }
            }
        }
        outcome => Ok(outcome?),
    }
}

pub(super) fn unix_address(name: &UnixName) -> rustix::io::Result<SocketAddrUnix> {
    match name {
        UnixName::Path(path) => SocketAddrUnix::new(path),
        UnixName::Abstract(name) => SocketAddrUnix::new_abstract_name(name.as_bytes()),
    }
}

/// Connects to the process that listens at `name`.
pub(super) fn connect_unix(name: &UnixName) -> rustix::io::Result<OwnedFd> {
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, FLAGS, None)?;
    connect(&socket, &unix_address(name)?)?;
    Ok(socket)
}

/// Returns true if the other end of a Unix socket belongs to this process's user or to root.
pub(super) fn ours(socket: &OwnedFd) -> bool {
    let own = rustix::process::geteuid().as_raw();
    socket::peer(socket).is_ok_and(|peer| peer.uid == own || peer.uid == 0)
}

/// Returns a readable name of the peer of an accepted connection.
pub fn peer_name(connection: &OwnedFd) -> String {
    let inet =
        getpeername(connection).ok().flatten().and_then(|peer| SocketAddr::try_from(peer).ok());
    match (inet, socket::peer(connection)) {
        (Some(address), _) => address.to_string(),
        (None, Ok(peer)) => format!("pid {} of user {}", peer.pid, peer.uid),
        (None, Err(_)) => "a connection that has ended".into(),
    }
}

#[cfg(test)]
#[allow(unsafe_code, reason = "a test sends a signal to a thread")]
mod tests {
    use super::*;
    use rustix::net::{RecvFlags, SendFlags, bind, listen, recv, send, socketpair};

    extern "C" fn handler(_signal: libc::c_int) {}

    #[test]
    fn a_signal_does_not_end_a_connection_that_is_being_made() {
        let (near, far) =
            socketpair(AddressFamily::UNIX, SocketType::STREAM, FLAGS, None).expect("a pair");
        // A socket that cannot be written looks as if it still connects.
        let buffer = [0; 1 << 16];
        while send(&near, &buffer, SendFlags::empty()).is_ok() {}
        let (thread, threads) = mpsc::channel();
        std::thread::scope(|scope| {
            let connecting = scope.spawn(move || {
                // SAFETY: `pthread_self` has no precondition.
                thread.send(unsafe { libc::pthread_self() }).expect("awaited");
                let deadline = Instant::now() + Duration::from_secs(600);
                connect_within(&near, deadline, || Err(Errno::INPROGRESS))
            });
            let thread = threads.recv().expect("it runs");
            // SAFETY: `handler` does nothing, and the thread has not been joined.
            unsafe { libc::signal(libc::SIGURG, handler as *const () as libc::sighandler_t) };
            for _ in 0..20 {
                // SAFETY: as above.
                unsafe { libc::pthread_kill(thread, libc::SIGURG) };
                std::thread::sleep(Duration::from_millis(5));
            }
            let mut buffer = [0; 1 << 16];
            while recv(&far, &mut buffer, RecvFlags::DONTWAIT).is_ok_and(|(count, _)| count > 0) {}
            assert_eq!(connecting.join().expect("no panic"), Ok(()));
        });
    }

    #[test]
    fn addresses_that_do_not_answer_cost_no_more_than_the_time_that_is_left() {
        let listener =
            socket_with(AddressFamily::INET, SocketType::STREAM, FLAGS, None).expect("a socket");
        bind(&listener, &SocketAddr::from(([127, 0, 0, 1], 0))).expect("bound");
        listen(&listener, 0).expect("it listens");
        let name = getsockname(&listener).expect("a name");
        let silent = SocketAddr::try_from(name).expect("an address");
        // A listener whose queue is full does not answer.
        let queue: Vec<OwnedFd> = (0..4)
            .map(|_| {
                let socket = socket_with(AddressFamily::INET, SocketType::STREAM, FLAGS, None)
                    .expect("a socket");
                let _ = connect(&socket, &silent);
                socket
            })
            .collect();
        let (start, mut failures) = (Instant::now(), Vec::new());
        let socket = StoreAddress::Inet(vec![silent; 8])
            .connect(start + Duration::from_millis(100), |_, errno| failures.push(errno))
            .expect("not interrupted");
        // One address that does not answer may take two seconds if there is time.
        assert!(start.elapsed() < 4 * CONNECT_TIMEOUT, "{:?}", start.elapsed());
        assert!(socket.is_none() && failures == [Errno::TIMEDOUT], "{failures:?}");
        drop(queue);
    }

    fn resolve(host: &str) -> Result<StoreAddress> {
        StoreAddress::resolve(host, 7, Instant::now() + Duration::from_secs(5))
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
}
