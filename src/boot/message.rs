//! Datagrams between rank 0 and the others: JSON, with descriptors beside it.

use crate::error::{Error, Result};
use crate::sys::host;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::{Errno, IoSlice, IoSliceMut};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    SocketAddrUnix, SocketFlags, SocketType,
};
use serde::{Deserialize, Serialize};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

/// From a rank to rank 0.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Greeting {
    /// "join", so that a socket of another use is told apart.
    pub purpose: String,
    pub token: String,
    pub rank: u32,
    pub size: usize,
    pub segment_bytes: usize,
    pub pid: u32,
    pub start_time: u64,
    /// Why this rank cannot join, if so.
    pub failure: Option<String>,
}

/// From rank 0 to a rank: the memory and one pidfd per member come along, unless it is a refusal.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Answer {
    pub refusal: Option<String>,
    pub segment_bytes: usize,
    pub processes: Vec<(u32, u64)>,
}

const BYTES: usize = 32 << 10;
/// Linux passes at most 253 descriptors with one message.
const DESCRIPTORS: usize = 253;

fn socket() -> Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).map_err(|e| Error::os("making a unix socket", e))
}

/// A listening socket with a random abstract name: no file stands for it, and it ends with its last descriptor.
pub(super) fn listen(backlog: usize) -> Result<(OwnedFd, String)> {
    let (socket, name) = (socket()?, format!("symm-{}", host::random_name()?));
    let address = SocketAddrUnix::new_abstract_name(name.as_bytes()).map_err(|e| Error::os("naming a unix socket", e))?;
    rustix::net::bind(&socket, &address).map_err(|e| Error::os("binding a unix socket", e))?;
    rustix::net::listen(&socket, backlog as i32 + 16).map_err(|e| Error::os("listening on a unix socket", e))?;
    Ok((socket, name))
}

/// A connection to `name`; `None` if nobody listens there.
pub(super) fn connect(name: &str) -> Result<Option<OwnedFd>> {
    let socket = socket()?;
    let address = SocketAddrUnix::new_abstract_name(name.as_bytes()).map_err(|e| Error::os("naming a unix socket", e))?;
    match rustix::net::connect(&socket, &address) {
        Ok(()) => Ok(Some(socket)),
        Err(Errno::CONNREFUSED | Errno::NOENT | Errno::AGAIN) => Ok(None),
        Err(e) => Err(Error::os("connecting to rank 0", e)),
    }
}

/// Fails unless the process at the other end runs as this user.
pub(super) fn check_user(socket: &OwnedFd) -> Result<()> {
    let peer = rustix::net::sockopt::socket_peercred(socket).map_err(|e| Error::os("SO_PEERCRED", e))?;
    let own = rustix::process::geteuid();
    if peer.uid == own {
        return Ok(());
    }
    Err(Error::config(format!("process {} of user {} is not of user {}", peer.pid.as_raw_nonzero(), peer.uid.as_raw(), own.as_raw())))
}

/// Waits until one of `sockets` has something to read, at most `limit`.
pub(super) fn wait_readable(sockets: &[BorrowedFd<'_>], limit: Duration) {
    let mut fds: Vec<PollFd<'_>> = sockets.iter().map(|fd| PollFd::from_borrowed_fd(*fd, PollFlags::IN)).collect();
    let limit = rustix::time::Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: limit.subsec_nanos().into() };
    // Interrupted or not, the caller looks again.
    let _ = poll(&mut fds, Some(&limit));
}

/// Sends `message` and `descriptors`.
pub(super) fn send(socket: &OwnedFd, message: &impl Serialize, descriptors: &[BorrowedFd<'_>]) -> Result<()> {
    let text = serde_json::to_vec(message).map_err(|e| Error::internal(format!("writing a message: {e}")))?;
    let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(Error::config(format!("{} descriptors do not fit one message", descriptors.len())));
    }
    rustix::net::sendmsg(socket, &[IoSlice::new(&text)], &mut control, SendFlags::NOSIGNAL)
        .map(|_| ())
        .map_err(|e| Error::os("sending to another rank", e))
}

/// The next message and its descriptors; `None` if none has come yet. The end of the connection is an error.
pub(super) fn receive<M: for<'a> Deserialize<'a>>(socket: &OwnedFd) -> Result<Option<(M, Vec<OwnedFd>)>> {
    let mut bytes = vec![0u8; BYTES];
    let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = match rustix::net::recvmsg(socket, &mut [IoSliceMut::new(&mut bytes)], &mut control, RecvFlags::CMSG_CLOEXEC) {
        Ok(received) => received,
        Err(Errno::AGAIN | Errno::INTR) => return Ok(None),
        Err(e) => return Err(Error::os("receiving from another rank", e)),
    };
    let mut descriptors = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            descriptors.extend(rights);
        }
    }
    if received.bytes == 0 {
        return Err(Error::peer("the other rank closed the connection"));
    }
    if received.flags.contains(rustix::net::ReturnFlags::CTRUNC) {
        let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current.unwrap_or(0);
        return Err(Error::config(format!(
            "the group's descriptors did not fit: RLIMIT_NOFILE is {limit} in process {}, raise it (ulimit -n)",
            std::process::id()
        )));
    }
    let message =
        serde_json::from_slice(&bytes[..received.bytes]).map_err(|e| Error::config(format!("a message that makes no sense: {e}")))?;
    Ok(Some((message, descriptors)))
}

/// For `wait_readable`.
pub(super) fn borrow(socket: &OwnedFd) -> BorrowedFd<'_> {
    socket.as_fd()
}
