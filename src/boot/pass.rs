//! Descriptors from every rank to every other, once a group has met.

use crate::error::{Error, Kind, Result};
use crate::sync::limit::Limit;
use crate::sys::random;
use crate::sys::rate_limit::RateLimit;
use crate::sys::socket::{self, Received};
use rustix::fd::{BorrowedFd, OwnedFd};
use rustix::io::Errno;
use std::time::Duration;

/// Bytes of a listener's name.
pub const NAME_BYTES: usize = 40;

/// Where a rank receives.
#[derive(Debug)]
pub struct Mailbox {
    name: [u8; NAME_BYTES],
    listener: OwnedFd,
}

fn os(what: &str) -> impl Fn(Errno) -> Error {
    move |errno| Error::os(&format!("passing descriptors: {what}"), errno)
}

impl Mailbox {
    /// Under a random name that only those know whom it is told, for `ranks` ranks.
    pub fn open(ranks: usize) -> Result<Self> {
        let random = random::bytes::<16>()?;
        let mut name = *b"symm-gpu00000000000000000000000000000000";
        for (pair, byte) in name[8..].chunks_exact_mut(2).zip(random) {
            pair.copy_from_slice(format!("{byte:02x}").as_bytes());
        }
        let listener = socket::listen_at(&String::from_utf8_lossy(&name), ranks as i32).map_err(os("listen"))?;
        Ok(Self { name, listener })
    }

    /// What the peers must be told.
    pub fn name(&self) -> [u8; NAME_BYTES] {
        self.name
    }

    /// Gives `fd` to every peer and returns what each gave, by rank (nothing from this one). `names` and `pids` are those of all ranks.
    /// All mailboxes must be open before the first rank calls it. Ends early with the error of `hope`, which is asked while it waits.
    pub fn exchange(
        &self,
        me: usize,
        names: &[[u8; NAME_BYTES]],
        pids: &[u32],
        fd: BorrowedFd<'_>,
        limit: &Limit,
        hope: &dyn Fn() -> Result<()>,
    ) -> Result<Vec<Option<OwnedFd>>> {
        let own = rustix::process::geteuid().as_raw();
        let mut sent = Vec::new();
        for name in names.iter().enumerate().filter(|(rank, _)| *rank != me).map(|(_, name)| name) {
            let socket = self.patiently(limit, hope, "connect", || socket::connect_to(&String::from_utf8_lossy(name)))?;
            let peer = socket::peer(&socket).map_err(os("identify a peer"))?;
            if peer.uid != own {
                return Err(Error::config(format!("user {} listens where a peer of this group did", peer.uid)));
            }
            self.patiently(limit, hope, "send", || socket::send(&socket, &(me as u32).to_le_bytes(), Some(fd)))?;
            // Kept until all is done: closing it would be read as an end before the message.
            sent.push(socket);
        }
        let mut got: Vec<Option<OwnedFd>> = names.iter().map(|_| None).collect();
        let mut left = names.len() - 1;
        let other_users = RateLimit::new();
        while left > 0 {
            let socket = self.patiently(limit, hope, "wait for a peer", || socket::accept(&self.listener))?;
            let peer = socket::peer(&socket).map_err(os("identify a peer"))?;
            // Abstract names stand in /proc/net/unix for everybody: strangers may knock, and are not listened to.
            if peer.uid != own {
                other_users.warn(format_args!("user {} (process {}) knocked at the mailbox of this rank; refused", peer.uid, peer.pid));
                continue;
            }
            let mut buffer = [0; 8];
            let received: Received = self.patiently(limit, hope, "receive", || socket::receive(&socket, &mut buffer))?;
            let rank = u32::from_le_bytes([buffer[0], buffer[1], buffer[2], buffer[3]]) as usize;
            // A process in another pid namespace shows as 0 here, and its own id is another there.
            let known = rank < pids.len() && (peer.pid == 0 || peer.pid == pids[rank] || !pids.contains(&peer.pid));
            let whole = received.length == 4 && !received.cut && received.fd.is_some();
            if !known || !whole || rank == me || got[rank].is_some() {
                return Err(Error::config(format!("process {} of user {} sent no descriptor of this group", peer.pid, peer.uid)));
            }
            got[rank] = received.fd;
            left -= 1;
        }
        Ok(got)
    }

    fn patiently<T>(
        &self,
        limit: &Limit,
        hope: &dyn Fn() -> Result<()>,
        what: &str,
        step: impl FnMut() -> rustix::io::Result<T>,
    ) -> Result<T> {
        let mut step = step;
        loop {
            match step() {
                Ok(value) => return Ok(value),
                Err(Errno::AGAIN | Errno::INTR) if limit.left().is_some() => {
                    hope()?;
                    std::thread::sleep(Duration::from_micros(100));
                }
                Err(Errno::AGAIN) => {
                    let text = format!("passing descriptors of GPU memory: could not {what} within {:.1} s", limit.waited().as_secs_f32());
                    return Err(Error { kind: Kind::Timeout, message: text });
                }
                Err(errno) => return Err(os(what)(errno)),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
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
                    let limit = Limit::from(Instant::now(), Duration::from_secs(10));
                    let got = mailbox.exchange(me, names, pids, file.as_fd(), &limit, &|| Ok(())).expect("exchanged");
                    for (rank, fd) in got.iter().enumerate() {
                        let size = fd.as_ref().map(|fd| rustix::fs::fstat(fd).expect("stat").st_size);
                        assert_eq!(size, (rank != me).then_some(rank as i64 * 10));
                    }
                });
            }
        });
    }

    #[test]
    fn a_peer_that_never_sends_is_a_timeout() {
        let (one, other) = (Mailbox::open(2).expect("opens"), Mailbox::open(2).expect("opens"));
        let file = tempfile::tempfile().expect("a file");
        let limit = Limit::from(Instant::now(), Duration::from_millis(50));
        let names = [one.name(), other.name()];
        let pids = [std::process::id(); 2];
        let error = one.exchange(0, &names, &pids, file.as_fd(), &limit, &|| Ok(())).expect_err("nobody sends");
        assert_eq!(error.kind, Kind::Timeout, "{error}");
    }

    #[test]
    fn a_peer_that_has_died_ends_the_wait() {
        let (one, other) = (Mailbox::open(2).expect("opens"), Mailbox::open(2).expect("opens"));
        let file = tempfile::tempfile().expect("a file");
        let limit = Limit::from(Instant::now(), Duration::from_secs(60));
        let (names, pids) = ([one.name(), other.name()], [std::process::id(); 2]);
        let looks = std::cell::Cell::new(0);
        let hope = || {
            looks.set(looks.get() + 1);
            if looks.get() < 10 { Ok(()) } else { Err(Error::peer("rank 1 has ended")) }
        };
        let error = one.exchange(0, &names, &pids, file.as_fd(), &limit, &hope).expect_err("nobody sends");
        assert_eq!(error, Error::peer("rank 1 has ended"));
    }

    #[test]
    fn a_message_without_a_descriptor_is_refused() {
        let (one, other) = (Mailbox::open(2).expect("opens"), Mailbox::open(2).expect("opens"));
        let file = tempfile::tempfile().expect("a file");
        let limit = Limit::from(Instant::now(), Duration::from_secs(10));
        let (names, pids) = ([one.name(), other.name()], [std::process::id(); 2]);
        let socket = socket::connect_to(&String::from_utf8_lossy(&one.name())).expect("connects");
        socket::send(&socket, &1u32.to_le_bytes(), None).expect("sent");
        let error = one.exchange(0, &names, &pids, file.as_fd(), &limit, &|| Ok(())).expect_err("no descriptor");
        assert_eq!(error.kind, Kind::Config, "{error}");
    }
}
