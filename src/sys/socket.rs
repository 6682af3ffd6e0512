//! Unix sockets that keep message boundaries, and the file descriptors sent over them. Nothing here
//! blocks.
#![allow(unsafe_code, reason = "system calls that have no safe form")]

use rustix::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use rustix::io::{Errno, IoSlice, IoSliceMut, Result};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
    accept_with, bind, connect, listen, recvmsg, sendmsg, socket_with,
};
use std::mem::MaybeUninit;

const FLAGS: SocketFlags = SocketFlags::CLOEXEC.union(SocketFlags::NONBLOCK);

/// Makes a socket that is not connected; receiving from it fails with `NOTCONN`.
pub fn unconnected() -> Result<OwnedFd> {
    socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, FLAGS, None)
}

/// Makes a listening socket under an abstract name, which has no file and disappears with the
/// socket's last descriptor.
pub fn listen_at(name: &str, backlog: i32) -> Result<OwnedFd> {
    let socket = unconnected()?;
    bind(&socket, &SocketAddrUnix::new_abstract_name(name.as_bytes())?)?;
    listen(&socket, backlog)?;
    Ok(socket)
}

/// Connects to the socket that listens on `name`; `CONNREFUSED` if no socket does, `AGAIN` if its
/// queue is full.
pub fn connect_to(name: &str) -> Result<OwnedFd> {
    let socket = unconnected()?;
    connect(&socket, &SocketAddrUnix::new_abstract_name(name.as_bytes())?)?;
    Ok(socket)
}

/// Accepts the next connection; `AGAIN` if no connection is waiting.
pub fn accept(listener: &OwnedFd) -> Result<OwnedFd> {
    accept_with(listener, FLAGS)
}

/// The process that made the other end, as the kernel knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerCredentials {
    /// Process id; 0 if the process lives in a pid namespace that is not visible from here.
    pub pid: u32,
    /// User of the process.
    pub uid: u32,
}

impl PeerCredentials {
    /// Returns true if the process belongs to the same user as this one. Every user can read
    /// abstract names in /proc/net/unix.
    pub fn is_own_user(&self) -> bool {
        self.uid == rustix::process::geteuid().as_raw()
    }
}

/// Returns the process that made the other end of `socket` by `connect` or `listen`.
pub fn peer(socket: &OwnedFd) -> Result<PeerCredentials> {
    // rustix's `socket_peercred` is not used, because it requires a process id other than 0, and an
    // unidentified peer can make the id 0.
    let mut credentials = libc::ucred { pid: 0, uid: u32::MAX, gid: u32::MAX };
    let mut length = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: `credentials` is valid for writes of `length` bytes, its own size.
    let status = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut credentials).cast(),
            &raw mut length,
        )
    };
    if status != 0 {
        return Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::INVAL));
    }
    Ok(PeerCredentials { pid: credentials.pid.max(0).unsigned_abs(), uid: credentials.uid })
}

/// Sends one message, with `fd` if given.
pub fn send(socket: &OwnedFd, message: &[u8], fd: Option<BorrowedFd<'_>>) -> Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if let Some(fd) = &fd {
        control.push(SendAncillaryMessage::ScmRights(std::slice::from_ref(fd)));
    }
    let sent = sendmsg(socket, &[IoSlice::new(message)], &mut control, SendFlags::NOSIGNAL)?;
    if sent == message.len() { Ok(()) } else { Err(Errno::MSGSIZE) }
}

/// A received message.
#[derive(Debug)]
pub struct Received {
    /// Length of the message; 0 if the other end was closed.
    pub length: usize,
    /// The file descriptor in the message.
    pub fd: Option<OwnedFd>,
    /// True if bytes or file descriptors were lost: the message was too long, had more than one
    /// descriptor, or this process had no free descriptor number.
    pub cut: bool,
}

/// Receives one message into `buffer`; `AGAIN` if no message is waiting. Keeps at most one file
/// descriptor, closed on `exec`.
pub fn receive(socket: &OwnedFd, buffer: &mut [u8]) -> Result<Received> {
    // Space for one descriptor; the kernel closes the others.
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let message = recvmsg(
        socket.as_fd(),
        &mut [IoSliceMut::new(buffer)],
        &mut control,
        RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT,
    )?;
    let mut fds: Vec<OwnedFd> = control
        .drain()
        .filter_map(
            |item| if let RecvAncillaryMessage::ScmRights(fds) = item { Some(fds) } else { None },
        )
        .flatten()
        .collect();
    let cut = message.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC) || fds.len() > 1;
    Ok(Received { length: message.bytes, fd: fds.pop(), cut })
}

#[cfg(test)]
mod tests {
    use super::*;

    // proves P20
    #[test]
    fn messages_and_descriptors_arrive_whole() {
        let name = format!("symm-test-{}", std::process::id());
        assert_eq!(connect_to(&name).expect_err("nobody listens"), Errno::CONNREFUSED);
        let listener = listen_at(&name, 1).expect("listens");
        assert_eq!(accept(&listener).expect_err("nobody came"), Errno::AGAIN);
        let near = connect_to(&name).expect("connects");
        let far = accept(&listener).expect("came");
        let own =
            PeerCredentials { pid: std::process::id(), uid: rustix::process::geteuid().as_raw() };
        assert_eq!((peer(&near), peer(&far)), (Ok(own), Ok(own)));
        assert!(own.is_own_user() && !PeerCredentials { uid: own.uid ^ 1, ..own }.is_own_user());

        let mut buffer = [0; 8];
        assert_eq!(receive(&far, &mut buffer).expect_err("nothing sent"), Errno::AGAIN);
        send(&near, b"abc", None).expect("sent");
        send(&near, b"defg", Some(listener.as_fd())).expect("sent");
        send(&near, b"too long for it", None).expect("sent");
        let first = receive(&far, &mut buffer).expect("arrived");
        assert_eq!(
            (&buffer[..first.length], first.fd.is_some(), first.cut),
            (&b"abc"[..], false, false)
        );
        let second = receive(&far, &mut buffer).expect("arrived");
        assert_eq!(
            (&buffer[..second.length], second.fd.is_some(), second.cut),
            (&b"defg"[..], true, false)
        );
        assert!(receive(&far, &mut buffer).expect("arrived").cut);
        drop(near);
        assert_eq!(receive(&far, &mut buffer).expect("closed").length, 0);
    }
}
