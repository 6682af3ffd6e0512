//! The listening sockets of a server.

use super::address::{FLAGS, StoreAddress, UnixName, attend, connect_unix, ours, unix_address};
use super::address_owner;
use crate::error::{Error, Result};
use rustix::fd::{AsFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, Shutdown, SocketAddrAny, SocketType, acceptfrom_with, bind, getsockname,
    ipproto, listen, shutdown, socket_with, sockopt,
};
use std::net::SocketAddr;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

const BACKLOG: i32 = 4096;

/// The sockets on which a server listens. Dropping this value also removes the path of a Unix
/// socket.
pub struct ListeningSockets {
    /// The sockets.
    pub sockets: Vec<OwnedFd>,
    /// The address, with the port that was chosen.
    pub address: StoreAddress,
    path: Option<(PathBuf, u64)>,
}

impl Drop for ListeningSockets {
    fn drop(&mut self) {
        for socket in &self.sockets {
            // Frees the port even if a forked child holds a copy of the file descriptor.
            let _ = shutdown(socket, Shutdown::Both);
        }
        if let Some((path, inode)) = &self.path
            && std::fs::symlink_metadata(path).is_ok_and(|now| now.ino() == *inode)
        {
            let _ = std::fs::remove_file(path);
        }
    }
}

impl ListeningSockets {
    /// Listens on all addresses of `address`; port 0 picks a free port. `Network` on failure.
    pub fn at(address: &StoreAddress) -> Result<Self> {
        match address {
            StoreAddress::Inet(all) => inet(all),
            StoreAddress::Unix(name) => unix(name),
        }
    }

    /// Takes over a TCP socket that is already bound.
    pub fn adopt(socket: OwnedFd) -> Result<Self> {
        let fail = |errno| {
            Error::network(format!("the socket that was handed over cannot listen: {errno}"))
        };
        rustix::io::ioctl_fionbio(&socket, true).map_err(fail)?;
        listen(&socket, BACKLOG).map_err(fail)?;
        let address = bound(&socket).map_err(fail)?;
        Ok(Self { sockets: vec![socket], address: StoreAddress::Inet(vec![address]), path: None })
    }

    /// Accepts the next connection to `socket`; `AGAIN` if no connection is waiting.
    pub fn accept(&self, socket: &OwnedFd) -> rustix::io::Result<OwnedFd> {
        let (connection, _) = acceptfrom_with(socket.as_fd(), FLAGS)?;
        match &self.address {
            StoreAddress::Inet(_) => attend(&connection)?,
            StoreAddress::Unix(_) => {}
        }
        Ok(connection)
    }

    /// Returns true if the peer of `connection` may use the store: on a Unix socket, only this user
    /// and root.
    pub fn serves(&self, connection: &OwnedFd) -> bool {
        match &self.address {
            StoreAddress::Inet(_) => true,
            StoreAddress::Unix(_) => ours(connection),
        }
    }
}

fn bound(socket: &OwnedFd) -> rustix::io::Result<SocketAddr> {
    let address: SocketAddrAny = getsockname(socket)?;
    SocketAddr::try_from(address)
}

fn inet(all: &[SocketAddr]) -> Result<ListeningSockets> {
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
            // A name may resolve to addresses that this machine does not have, such as ::1 without
            // IPv6.
            Err(errno @ (Errno::ADDRNOTAVAIL | Errno::AFNOSUPPORT)) => {
                absent = Some((wanted, errno))
            }
            Err(Errno::ADDRINUSE) => {
                let occupant = address_owner::described(&StoreAddress::Inet(vec![wanted]));
                return Err(Error::network(format!(
                    "the store cannot listen at {wanted}, which is in use: {occupant}"
                )));
            }
            Err(errno) => {
                return Err(Error::network(format!(
                    "the store cannot listen at {wanted}: {errno}"
                )));
            }
        }
    }
    match absent {
        Some((wanted, errno)) if sockets.is_empty() => Err(Error::network(format!(
            "cannot listen on {wanted}: not an address of this machine: {errno}"
        ))),
        _ => Ok(ListeningSockets { sockets, address: StoreAddress::Inet(addresses), path: None }),
    }
}

fn listen_inet(address: &SocketAddr) -> rustix::io::Result<(OwnedFd, SocketAddr)> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let socket = socket_with(family, SocketType::STREAM, FLAGS, Some(ipproto::TCP))?;
    // Without this option, connections of a recently ended server would block the port for a
    // minute.
    sockopt::set_socket_reuseaddr(&socket, true)?;
    if address.is_ipv6() {
        // "::" stands for all addresses including IPv4; any other address only for itself.
        sockopt::set_ipv6_v6only(&socket, !address.ip().is_unspecified())?;
    }
    bind(&socket, address)?;
    listen(&socket, BACKLOG)?;
    let address = bound(&socket)?;
    Ok((socket, address))
}

fn unix(name: &UnixName) -> Result<ListeningSockets> {
    let address = StoreAddress::Unix(name.clone());
    let fail = |errno: Errno| match (name, errno) {
        (UnixName::Path(path), Errno::NAMETOOLONG) => Error::value(format!(
            "the store cannot listen at {address}: the path has {} bytes, at most 107 fit",
            path.as_os_str().len()
        )),
        (_, Errno::ADDRINUSE) => Error::network(format!(
            "the store cannot listen at {address}, which is in use: {}",
            address_owner::described(&address)
        )),
        _ => Error::network(format!("the store cannot listen at {address}: {errno}")),
    };
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, FLAGS, None).map_err(fail)?;
    let target = unix_address(name).map_err(fail)?;
    let outcome = match (bind(&socket, &target), name) {
        (Err(Errno::ADDRINUSE), UnixName::Path(path)) if abandoned(path, name) => {
            std::fs::remove_file(path)
                .map_err(|error| Error::network(format!("{}: {error}", path.display())))?;
            bind(&socket, &target)
        }
        (outcome, _) => outcome,
    };
    outcome.map_err(fail)?;
    let path = match name {
        UnixName::Path(path) => {
            // Set before the socket listens, so that no other user can connect in between; `serves`
            // checks the user again.
            let metadata = std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))
                .and_then(|()| std::fs::symlink_metadata(path));
            let metadata =
                metadata.map_err(|error| Error::network(format!("{}: {error}", path.display())))?;
            Some((path.clone(), metadata.ino()))
        }
        UnixName::Abstract(_) => None,
    };
    listen(&socket, BACKLOG).map_err(fail)?;
    Ok(ListeningSockets { sockets: vec![socket], address, path })
}

/// Returns true if `path` is a socket of this user on which no server listens any more.
fn abandoned(path: &Path, name: &UnixName) -> bool {
    let own = std::fs::symlink_metadata(path).is_ok_and(|metadata| {
        metadata.file_type().is_socket() && metadata.uid() == rustix::process::geteuid().as_raw()
    });
    own && matches!(connect_unix(name), Err(Errno::CONNREFUSED))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, Instant};

    fn resolve(host: &str) -> Result<StoreAddress> {
        StoreAddress::resolve(host, 7, Instant::now() + Duration::from_secs(5))
    }

    // proves P19
    #[test]
    fn a_port_has_one_listener_and_a_path_is_free_after_it() -> Result<()> {
        let first = ListeningSockets::at(&resolve("127.0.0.1")?.near()).or_else(|_| {
            ListeningSockets::at(&StoreAddress::Inet(vec![SocketAddr::from(([127, 0, 0, 1], 0))]))
        })?;
        assert!(
            ListeningSockets::at(&first.address)
                .is_err_and(|error| error.message.contains("in use"))
        );
        assert!(first.address.port() != 0);
        let place = std::env::temp_dir().join(format!("symm-address-{}", std::process::id()));
        let name = StoreAddress::Unix(UnixName::Path(place.clone()));
        let listeners = ListeningSockets::at(&name)?;
        assert!(ListeningSockets::at(&name).is_err_and(|error| error.message.contains("in use")));
        drop(listeners);
        assert!(!place.exists());
        // A path that a killed server left behind.
        drop(std::os::unix::net::UnixListener::bind(&place));
        assert!(place.exists());
        drop(ListeningSockets::at(&name)?);
        assert!(!place.exists());
        let long = StoreAddress::Unix(UnixName::Path(format!("/tmp/{}", "x".repeat(200)).into()));
        assert!(ListeningSockets::at(&long).is_err_and(|error| error.message.contains("107")));
        Ok(())
    }
}
