//! Passes file descriptors from every rank to every other, once a group has met.

use crate::error::{Error, Result};
use crate::sync::timeout::CallTimeout;
use crate::sys::random;
use crate::sys::rate_limit::RateLimit;
use crate::sys::required::Required;
use crate::sys::socket::{self, Received};
use rustix::fd::{BorrowedFd, OwnedFd};
use rustix::io::Errno;
use std::collections::VecDeque;
use std::time::Duration;

/// Length of a listener's name.
pub const NAME_BYTES: usize = 40;

/// Maximum number of connections that have not identified themselves, besides the peers'
/// connections.
const MAX_PENDING_CONNECTIONS: usize = 32;

/// The socket at which a rank receives file descriptors.
#[derive(Debug)]
pub struct Mailbox {
    name: [u8; NAME_BYTES],
    listener: OwnedFd,
}

fn refused(step: Required) -> impl Fn(Errno) -> Error {
    move |errno| {
        let error = step.failed(errno);
        Error { message: format!("passing descriptors: {error}"), ..error }
    }
}

impl Mailbox {
    /// Opens a mailbox for `ranks` ranks under a random name, which only the group's ranks learn.
    pub fn open(ranks: usize) -> Result<Self> {
        let random = random::name("symm-gpu")?;
        let listener =
            socket::listen_at(&random, ranks as i32).map_err(refused(Required::Listen))?;
        let mut name = [0; NAME_BYTES];
        name.copy_from_slice(random.as_bytes());
        Ok(Self { name, listener })
    }

    /// Returns the name, which the peers need.
    pub fn name(&self) -> [u8; NAME_BYTES] {
        self.name
    }

    /// Sends `fd` to every peer and returns the descriptors that the peers sent, by rank (`None`
    /// for this rank). `names` and `pids` list the mailbox names and process ids of all ranks. All
    /// mailboxes must be open before the first rank calls this function. While it waits, it calls
    /// `check` and returns the error of `check`, if any.
    pub fn exchange_fds(
        &self,
        me: usize,
        names: &[[u8; NAME_BYTES]],
        pids: &[u32],
        fd: BorrowedFd<'_>,
        limit: &CallTimeout,
        check: &dyn Fn() -> Result<()>,
    ) -> Result<Vec<Option<OwnedFd>>> {
        let mut sent = Vec::new();
        for name in names.iter().enumerate().filter(|(rank, _)| *rank != me).map(|(_, name)| name) {
            let socket = self.retried(limit, check, Required::Connect, || {
                socket::connect_to(&String::from_utf8_lossy(name))
            })?;
            let peer = socket::peer(&socket).map_err(refused(Required::Identify))?;
            if !peer.is_own_user() {
                return Err(Error::config(format!(
                    "user {} listens where a peer of this group did",
                    peer.uid
                )));
            }
            self.retried(limit, check, Required::Send, || {
                socket::send(&socket, &(me as u32).to_le_bytes(), Some(fd))
            })?;
            // The socket stays open until the end, because an early close would hide the message.
            sent.push(socket);
        }
        let mut inbox = Inbox {
            got: names.iter().map(|_| None).collect(),
            pending: VecDeque::new(),
            me,
            pids,
            rejected: None,
            lines: RateLimit::new(),
        };
        loop {
            inbox.accept_pending(&self.listener)?;
            inbox.receive_pending();
            if inbox.got.iter().filter(|fd| fd.is_none()).count() == 1 {
                return Ok(inbox.got);
            }
            let turned_away = || {
                inbox
                    .rejected
                    .as_ref()
                    .map_or_else(String::new, |who| format!("; {who} was rejected"))
            };
            wait(limit, check).map_err(|error| {
                error.unwrap_or_else(|| late("descriptor from every peer", limit, &turned_away()))
            })?;
        }
    }

    fn retried<T>(
        &self,
        limit: &CallTimeout,
        check: &dyn Fn() -> Result<()>,
        step: Required,
        mut call: impl FnMut() -> rustix::io::Result<T>,
    ) -> Result<T> {
        loop {
            match call() {
                Ok(value) => return Ok(value),
                Err(Errno::AGAIN | Errno::INTR) => wait(limit, check)
                    .map_err(|error| error.unwrap_or_else(|| late(step.purpose(), limit, "")))?,
                Err(errno) => return Err(refused(step)(errno)),
            }
        }
    }
}

/// Sleeps briefly. Fails with the error of `check`, or with `None` if the time is over.
fn wait(
    limit: &CallTimeout,
    check: &dyn Fn() -> Result<()>,
) -> std::result::Result<(), Option<Error>> {
    if limit.remaining().is_none() {
        return Err(None);
    }
    check()?;
    std::thread::sleep(Duration::from_micros(100));
    Ok(())
}

fn late(missing: &str, limit: &CallTimeout, remark: &str) -> Error {
    let waited = limit.elapsed().as_secs_f32();
    Error::timeout(format!(
        "passing descriptors of GPU memory: no {missing} within {waited:.1} s{remark}"
    ))
}

/// The descriptors that one rank has received.
struct Inbox<'a> {
    /// Descriptors by rank.
    got: Vec<Option<OwnedFd>>,
    /// Connections that have not sent anything; they delay no other. If there are too many, the
    /// oldest is closed.
    pending: VecDeque<(OwnedFd, socket::PeerCredentials)>,
    me: usize,
    pids: &'a [u32],
    /// The last sender that was rejected. Every process can read abstract names in /proc/net/unix,
    /// so a stranger that connects must not stop the exchange.
    rejected: Option<String>,
    lines: RateLimit,
}

impl Inbox<'_> {
    fn accept_pending(&mut self, listener: &OwnedFd) -> Result<()> {
        // Limited, so that this rank still reads the other connections if one process connects
        // without end.
        for _ in 0..MAX_PENDING_CONNECTIONS {
            let socket = match socket::accept(listener) {
                Ok(socket) => socket,
                Err(Errno::AGAIN | Errno::INTR) => return Ok(()),
                Err(Errno::CONNABORTED) => continue,
                Err(errno) => return Err(refused(Required::Accept)(errno)),
            };
            match socket::peer(&socket) {
                Ok(peer) if peer.is_own_user() => self.pending.push_back((socket, peer)),
                Ok(peer) => self.reject(peer),
                Err(_) => {}
            }
            if self.pending.len() > MAX_PENDING_CONNECTIONS + self.pids.len() {
                self.pending.pop_front();
            }
        }
        Ok(())
    }

    fn receive_pending(&mut self) {
        for _ in 0..self.pending.len() {
            let Some((socket, peer)) = self.pending.pop_front() else { return };
            let mut buffer = [0; 8];
            match socket::receive(&socket, &mut buffer) {
                Ok(received) => self.take(received, buffer, peer),
                Err(Errno::AGAIN | Errno::INTR) => self.pending.push_back((socket, peer)),
                Err(_) => self.reject(peer),
            }
        }
    }

    fn take(&mut self, received: Received, buffer: [u8; 8], peer: socket::PeerCredentials) {
        let rank = u32::from_le_bytes([buffer[0], buffer[1], buffer[2], buffer[3]]) as usize;
        // For a peer in another pid namespace, the kernel reports pid 0 or a pid that differs from
        // the pid that the peer published.
        let known = rank < self.pids.len()
            && (peer.pid == 0 || peer.pid == self.pids[rank] || !self.pids.contains(&peer.pid));
        let whole = received.length == 4 && !received.cut && received.fd.is_some();
        if known && whole && rank != self.me && self.got[rank].is_none() {
            self.got[rank] = received.fd;
        } else {
            self.reject(peer);
        }
    }

    fn reject(&mut self, peer: socket::PeerCredentials) {
        let who = format!(
            "process {} of user {}, which sent no descriptor of this group,",
            peer.pid, peer.uid
        );
        self.lines.warn(format_args!("{who} knocked at the mailbox of this rank and was rejected"));
        self.rejected = Some(who);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;
    use rustix::fd::AsFd;
    use std::time::Instant;

    #[test]
    fn everybody_gets_everybodys() {
        let boxes: Vec<Mailbox> = (0..4).map(|_| Mailbox::open(4).expect("opens")).collect();
        let names: Vec<_> = boxes.iter().map(Mailbox::name).collect();
        let pids = vec![std::process::id(); 4];
        std::thread::scope(|scope| {
            for (me, mailbox) in boxes.iter().enumerate() {
                let (names, pids) = (&names, &pids);
                scope.spawn(move || {
                    let file = tempfile::tempfile().expect("a file");
                    rustix::fs::ftruncate(&file, me as u64 * 10).expect("sized");
                    let limit = CallTimeout::from(Instant::now(), Duration::from_secs(10));
                    let got = mailbox
                        .exchange_fds(me, names, pids, file.as_fd(), &limit, &|| Ok(()))
                        .expect("exchanged");
                    for (rank, fd) in got.iter().enumerate() {
                        let size =
                            fd.as_ref().map(|fd| rustix::fs::fstat(fd).expect("stat").st_size);
                        assert_eq!(size, (rank != me).then_some(rank as i64 * 10));
                    }
                });
            }
        });
    }

    #[test]
    fn a_peer_that_has_died_ends_the_wait() {
        let (one, other) = (Mailbox::open(2).expect("opens"), Mailbox::open(2).expect("opens"));
        let file = tempfile::tempfile().expect("a file");
        let limit = CallTimeout::from(Instant::now(), Duration::from_secs(60));
        let (names, pids) = ([one.name(), other.name()], [std::process::id(); 2]);
        let looks = std::cell::Cell::new(0);
        let check = || {
            looks.set(looks.get() + 1);
            if looks.get() < 10 { Ok(()) } else { Err(Error::peer("rank 1 has ended")) }
        };
        let error = one
            .exchange_fds(0, &names, &pids, file.as_fd(), &limit, &check)
            .expect_err("nobody sends");
        assert_eq!(error, Error::peer("rank 1 has ended"));
    }

    // proves P20
    #[test]
    fn who_knocks_without_a_descriptor_keeps_nobody_from_meeting() {
        let (one, other) = (Mailbox::open(2).expect("opens"), Mailbox::open(2).expect("opens"));
        let file = tempfile::tempfile().expect("a file");
        let limit = |seconds| CallTimeout::from(Instant::now(), Duration::from_secs_f32(seconds));
        let (names, pids) = ([one.name(), other.name()], [std::process::id(); 2]);
        let knock = || socket::connect_to(&String::from_utf8_lossy(&one.name())).expect("connects");
        let (_silent, wrong) = (knock(), knock());
        socket::send(&wrong, &1u32.to_le_bytes(), None).expect("sent");
        let error = one
            .exchange_fds(0, &names, &pids, file.as_fd(), &limit(0.05), &|| Ok(()))
            .expect_err("the peer sends nothing");
        error.assert_says(ErrorKind::Timeout, &["sent no descriptor of this group, was rejected"]);
        let wrong = knock();
        socket::send(&wrong, &[7; 8], None).expect("sent");
        std::thread::scope(|scope| {
            // The thread borrows `other`, so that this mailbox stays open when the thread ends. The
            // thread may end early, because the first attempt has already sent it a descriptor.
            let (names, pids, file, other) = (&names, &pids, &file, &other);
            let there = scope.spawn(move || {
                other.exchange_fds(1, names, pids, file.as_fd(), &limit(10.0), &|| Ok(()))
            });
            let got = one
                .exchange_fds(0, names, pids, file.as_fd(), &limit(10.0), &|| Ok(()))
                .expect("exchanged");
            assert!(
                got[1].is_some()
                    && there.join().expect("no panic").expect("exchanged")[0].is_some()
            );
        });
    }

    #[test]
    fn a_limit_holds_whatever_is_in_the_way() {
        let mailbox = Mailbox::open(1).expect("opens");
        for errno in [Errno::AGAIN, Errno::INTR] {
            let limit = CallTimeout::from(Instant::now(), Duration::from_millis(20));
            let error = mailbox
                .retried(&limit, &|| Ok(()), Required::Connect, || Err::<(), _>(errno))
                .expect_err("never");
            assert_eq!(error.kind, ErrorKind::Timeout, "{errno}: {error}");
        }
    }
}
