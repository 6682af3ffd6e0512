//! Admission: accepts and authenticates connections, and keeps them from using the process's last
//! file descriptors.

use super::connection::{ClientConnection, ClientPhase};
use super::event_loop::EventLoop;
use crate::store::tcp::address::peer_name;
use crate::store::tcp::proof::{self, AuthError, HELLO};
use crate::sys::process;
use bytes::Bytes;
use mio::unix::SourceFd;
use mio::{Interest, Token};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::{AsRawFd, OwnedFd};
use rustix::io::{Errno, fcntl_dupfd_cloexec};
use std::time::{Duration, Instant};

/// Number of connections accepted before other events are handled.
const ACCEPT_TURN: usize = 64;

/// Pause before accepting again when file descriptors have run out.
const ACCEPT_RETRY: Duration = Duration::from_millis(50);

/// Above this number of connections, the process's table of file descriptors grows to
/// [`EXTRA_FDS`].
const RAISE_LIMIT_AT: usize = 16;
const EXTRA_FDS: u64 = 4096;

/// Number of unidentified peers that stay allowed when they have used their share of the file
/// descriptors. Some must stay allowed, because a peer that knows the secret is also unidentified
/// at first.
const MIN_UNIDENTIFIED: usize = 16;

/// The part of the process's file descriptors that unidentified peers must leave free: 1 in 4.
const UNIDENTIFIED_RESERVE: u64 = 4;

/// Number of file descriptors that clients must leave free for the rest of the process, or an
/// eighth of the limit if that is fewer.
const CLIENT_RESERVE: u64 = 32;

/// Moves `socket` to the lowest free file descriptor, if that is lower than its own, so that the
/// numbers do not rise when connections replace others.
fn lowered(socket: OwnedFd) -> OwnedFd {
    match fcntl_dupfd_cloexec(&socket, 0) {
        Ok(copy) if copy.as_raw_fd() < socket.as_raw_fd() => copy,
        Ok(_) | Err(_) => socket,
    }
}

impl EventLoop {
    pub(super) fn accept(&mut self, index: usize) {
        for _ in 0..ACCEPT_TURN {
            match self.listeners.accept(&self.listeners.sockets[index]) {
                Ok(socket) => self.accept_pending(socket),
                Err(Errno::AGAIN) => return,
                // The peer has disconnected already, or a signal interrupted the call.
                Err(Errno::CONNABORTED | Errno::INTR) => {}
                // The rest of the process has taken the last file descriptor.
                Err(Errno::MFILE | Errno::NFILE) if self.evict_oldest() => {}
                Err(errno) => {
                    // The listener stays readable, so no further event announces the connection.
                    self.accept_errors.warn(format_args!(
                        "the store at {} cannot accept a connection: {errno}",
                        self.listeners.address
                    ));
                    self.accept_at = Some(Instant::now() + ACCEPT_RETRY);
                    return;
                }
            }
        }
        self.accept_at = Some(Instant::now());
    }

    fn accept_pending(&mut self, socket: OwnedFd) {
        if !self.listeners.serves(&socket) {
            return self.refuse(&peer_name(&socket), "it is another user's");
        }
        if self.connections.len() >= self.limits.clients {
            return self.refuse(
                &peer_name(&socket),
                &format!("{} clients are connected", self.connections.len()),
            );
        }
        // The kernel assigns the lowest free number. The limits bound this number, so higher
        // numbers remain for the rest of the process.
        let (number, limit) =
            (u64::from(socket.as_raw_fd().unsigned_abs()), process::descriptor_limit());
        let scarce = number >= limit - CLIENT_RESERVE.min(limit / 8);
        let few = number >= limit - limit / UNIDENTIFIED_RESERVE;
        let crowded = self.unidentified.len() >= self.limits.unidentified
            || scarce
            || (few && self.unidentified.len() >= MIN_UNIDENTIFIED);
        if crowded && !self.evict_oldest() && scarce {
            return self.refuse(
                &peer_name(&socket),
                &format!("descriptors up to {number} are open, RLIMIT_NOFILE is {limit}"),
            );
        }
        let socket = if few { lowered(socket) } else { socket };
        let Ok((words, nonce)) = proof::opening(self.secret.is_some()) else {
            return;
        };
        let key = self.next;
        self.next += 1;
        if self
            .poll
            .registry()
            .register(
                &mut SourceFd(&socket.as_raw_fd()),
                Token(key),
                Interest::READABLE | Interest::WRITABLE,
            )
            .is_err()
        {
            return;
        }
        let mut connection = ClientConnection::new(socket, nonce);
        self.deadlines.set(key, &mut connection.deadline, Some(Instant::now() + self.limits.hello));
        self.connections.insert(key, connection);
        self.unidentified.insert(key);
        if self.connections.len() > RAISE_LIMIT_AT
            && !std::mem::replace(&mut self.fd_limit_raised, true)
        {
            raise_fd_limit();
        }
        self.send(key, [Bytes::copy_from_slice(&words)]);
    }

    /// Closes the oldest connection that has not authenticated; returns true if one existed.
    fn evict_oldest(&mut self) -> bool {
        let oldest = self.unidentified.first().copied();
        oldest.into_iter().for_each(|key| self.close(key));
        oldest.is_some()
    }

    pub(super) fn refuse(&self, who: &str, why: &str) {
        self.refused
            .warn(format_args!("the store at {} refused {who}: {why}", self.listeners.address));
    }

    /// Admits connection `key` if its hello is valid.
    pub(super) fn authenticate(&mut self, key: usize, hello: &[u8; HELLO]) {
        let Some(connection) = self.connections.get_mut(&key) else {
            return;
        };
        let ClientPhase::Unidentified(nonce) = connection.phase else {
            return;
        };
        let words = match proof::admit(self.secret.as_deref(), &nonce, hello) {
            Ok(admission) => {
                connection.phase = ClientPhase::Open;
                self.deadlines.set(key, &mut connection.deadline, None);
                Bytes::copy_from_slice(&admission)
            }
            Err(refusal) => {
                let why = match refusal {
                    AuthError::Foreign => "it speaks another protocol",
                    AuthError::Without => {
                        "it was given no secret, and this store has one; all ranks need the same"
                    }
                    AuthError::Wrong => "its secret is not this store's; all ranks need the same",
                    AuthError::Needless => {
                        "it was given a secret, and this store was not; all ranks need the same"
                    }
                };
                connection.phase = ClientPhase::Leaving;
                let who = connection.peer();
                self.refuse(&who, why);
                Bytes::from_static(&[0; proof::ADMISSION])
            }
        };
        self.unidentified.remove(&key);
        self.send(key, [words]);
    }
}

/// Makes the kernel enlarge the process's table of file descriptors, on another thread. The table
/// is full at 256 descriptors and at each higher power of two. The call that enlarges it waits 10
/// ms or more for all processors; on the server's thread, all clients would wait for that call.
fn raise_fd_limit() {
    let grow = || {
        let highest = i32::try_from(process::descriptor_limit().min(EXTRA_FDS).saturating_sub(1))
            .unwrap_or(i32::MAX);
        // If this fails, the table grows later, on the server's thread, and clients wait for that.
        let _ =
            eventfd(0, EventfdFlags::CLOEXEC).and_then(|one| fcntl_dupfd_cloexec(&one, highest));
    };
    let _ = crate::sys::thread::spawn("symm-fd-table", None, grow);
}
