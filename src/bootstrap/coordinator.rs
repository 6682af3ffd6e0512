//! Rank 0: makes the memory and distributes it to the processes that prove that they belong to the
//! group.

use super::claim::RankClaim;
use super::collect_records::{RECORD_POLL_MAX, RECORD_POLL_MIN, RankRecords, read};
use super::handshake::{BUFFER, JoinHello, JoinReply};
use super::{Attempt, JoinedSegment, MemberProcess, PROCESS_EXIT_DELAY, SIGNAL_POLL};
use crate::error::{Error, ErrorKind, Result};
use crate::mem::shm::{ShmSegment, reserve};
use crate::rank::{Rank, name_ranks};
use crate::sys::rate_limit::RateLimit;
use crate::sys::required::Required;
use crate::sys::{random, socket};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::{AsFd, OwnedFd};
use rustix::io::Errno;
use std::time::{Duration, Instant};

/// How long a connection may stay silent before it is closed.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);

/// Maximum number of silent connections; the oldest is closed first.
const MAX_PENDING_CONNECTIONS: usize = 32;

/// Makes `segment_bytes` of zeroed, unnamed memory whose size is sealed.
pub(super) fn segment(attempt: &Attempt<'_>) -> Result<OwnedFd> {
    let file = ShmSegment::create_or(attempt.spec.segment_bytes, |step, errno| {
        attempt.refused(step, errno)
    })?;
    reserve(
        &file,
        0,
        attempt.spec.reserved_bytes,
        format_args!("{}, to join {},", attempt.me(), attempt.group()),
    )?;
    Ok(file)
}

/// The resources that rank 0 acquires before it publishes its record.
pub(super) struct CoordinatorResources {
    /// The name on which rank 0 listens.
    pub(super) name: String,
    listener: OwnedFd,
    segment: OwnedFd,
}

impl CoordinatorResources {
    pub(super) fn create(attempt: &Attempt<'_>) -> Result<Self> {
        let segment = segment(attempt)?;
        let name = random::name("symm-")?;
        let listener =
            socket::listen_at(&name, 2 * attempt.spec.size as i32 + MAX_PENDING_CONNECTIONS as i32)
                .map_err(|errno| attempt.refused(Required::Listen, errno))?;
        Ok(Self { name, listener, segment })
    }

    /// Returns once all other ranks have received the memory. On failure, sends the cause to all
    /// connected ranks.
    pub(super) fn distribute(
        self,
        attempt: &Attempt<'_>,
        claim: &RankClaim<'_>,
        ranks: Box<RankRecords>,
    ) -> Result<JoinedSegment> {
        let RankRecords { coordinator: leader, members } = *ranks;
        let token = leader.nonce;
        let mut reception = SegmentDistribution {
            attempt,
            claim,
            listener: self.listener,
            members: &members,
            token,
            pending: Vec::new(),
            accepted: members.iter().map(|_| None).collect(),
            other_users: RateLimit::new(),
            rejected: RateLimit::new(),
        };
        let outcome = reception.accept_members().and_then(|()| {
            // Every rank has read the key. It is removed before the first answer, because a rank
            // that gets its answer may start the next group of this name.
            claim.withdraw();
            reception.answer_all(&self.segment).inspect_err(|_| claim.restore())
        });
        if let Err(error) = &outcome {
            reception.reject_all(error);
        }
        outcome.map(|()| JoinedSegment { segment: self.segment, members, token })
    }
}

/// A connection that has not identified itself.
struct PendingConnection {
    socket: OwnedFd,
    since: Instant,
}

/// The state of the distribution.
struct SegmentDistribution<'a> {
    attempt: &'a Attempt<'a>,
    claim: &'a RankClaim<'a>,
    listener: OwnedFd,
    members: &'a [MemberProcess],
    token: [u8; 16],
    pending: Vec<PendingConnection>,
    /// Connections that have identified themselves and await an answer, by rank.
    accepted: Vec<Option<OwnedFd>>,
    other_users: RateLimit,
    rejected: RateLimit,
}

/// An event source.
#[derive(Clone, Copy)]
enum ReadySource {
    Listener,
    Pending(usize),
    Connection(Rank),
    Process(Rank),
}

impl SegmentDistribution<'_> {
    fn others(&self) -> impl Iterator<Item = Rank> + use<> {
        (1..self.attempt.spec.size).map(Rank)
    }

    /// Returns once every other rank is connected.
    fn accept_members(&mut self) -> Result<()> {
        let keys: Vec<String> = (0..self.attempt.spec.size).map(Attempt::key).collect();
        let mut look = RECORD_POLL_MIN;
        let mut next_look = Instant::now() + look;
        loop {
            let missing: Vec<Rank> =
                self.others().filter(|rank| self.accepted[rank.index()].is_none()).collect();
            if missing.is_empty() {
                // All ranks are connected; fail if one has left since.
                let mut ready = self.poll(Duration::ZERO)?;
                ready.retain(|source| {
                    matches!(source, ReadySource::Connection(_) | ReadySource::Process(_))
                });
                return self.serve(&ready);
            }
            self.attempt.check_interrupt()?;
            let clock = &self.attempt.clock;
            if clock.remaining().is_zero() {
                return Err(Error::timeout(format!(
                    "{} waited {:.1} s for {} to connect while joining {}",
                    self.attempt.me(),
                    clock.waited(),
                    name_ranks(&missing),
                    self.attempt.group()
                )));
            }
            let now = Instant::now();
            if now >= next_look {
                // A rank that cannot join reports it in its record.
                read(self.attempt, self.claim, &keys, false)?;
                look = (look * 2).min(RECORD_POLL_MAX);
                next_look = now + look;
            }
            self.pending
                .retain(|guest| now.saturating_duration_since(guest.since) < HANDSHAKE_TIMEOUT);
            let until = self
                .pending
                .iter()
                .map(|guest| guest.since + HANDSHAKE_TIMEOUT)
                .fold(clock.deadline.min(next_look).min(now + SIGNAL_POLL), Instant::min);
            let ready = self.poll(until.saturating_duration_since(now))?;
            self.serve(&ready)?;
        }
    }

    /// Returns the sources that are ready, after at most `limit`.
    fn poll(&self, limit: Duration) -> Result<Vec<ReadySource>> {
        let mut sources = vec![ReadySource::Listener];
        let mut fds = vec![self.listener.as_fd()];
        for (index, guest) in self.pending.iter().enumerate() {
            sources.push(ReadySource::Pending(index));
            fds.push(guest.socket.as_fd());
        }
        for rank in self.others() {
            if let Some(socket) = &self.accepted[rank.index()] {
                sources.push(ReadySource::Connection(rank));
                fds.push(socket.as_fd());
            }
            if let Some(pidfd) = &self.members[rank.index()].pidfd {
                sources.push(ReadySource::Process(rank));
                fds.push(pidfd.as_fd());
            }
        }
        let mut fds: Vec<PollFd<'_>> =
            fds.into_iter().map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
        match poll(&mut fds, Timespec::try_from(limit).ok().as_ref()) {
            Ok(_) => {}
            Err(Errno::INTR) => return Ok(Vec::new()),
            Err(errno) => return Err(self.attempt.refused(Required::Poll, errno)),
        }
        let ready = sources.into_iter().zip(&fds).filter(|(_, fd)| !fd.revents().is_empty());
        Ok(ready.map(|(source, _)| source).collect())
    }

    fn serve(&mut self, ready: &[ReadySource]) -> Result<()> {
        // Processes first, because the exit of a rank's process says more than the end of its
        // connection.
        for source in ready {
            if let ReadySource::Process(rank) = source {
                return Err(self.left(*rank));
            }
        }
        let mut received = Vec::new();
        for source in ready {
            match *source {
                ReadySource::Connection(rank) => return Err(self.left(rank)),
                ReadySource::Pending(index) => received.push(index),
                ReadySource::Listener | ReadySource::Process(_) => {}
            }
        }
        // From the back, so that lower indices stay valid.
        for index in received.into_iter().rev() {
            let guest = self.pending.remove(index);
            self.receive_hello(guest)?;
        }
        if ready.iter().any(|source| matches!(source, ReadySource::Listener)) {
            self.accept_some()?;
        }
        Ok(())
    }

    /// Returns why a connected rank has left: its process ended, or it stopped joining.
    fn left(&self, rank: Rank) -> Error {
        let member = &self.members[rank.index()];
        self.attempt.end_of(rank, member, PROCESS_EXIT_DELAY).unwrap_or_else(|| {
            let group = self.attempt.group();
            Error::peer(format!("rank {rank} (pid {}) left while joining {group}", member.pid))
        })
    }

    /// Accepts pending connections, up to a limit: a flood of them must not keep rank 0 from
    /// reading greetings, and a connection whose greeting has arrived is read before later ones can
    /// displace it.
    fn accept_some(&mut self) -> Result<()> {
        for _ in 0..MAX_PENDING_CONNECTIONS {
            let socket = match socket::accept(&self.listener) {
                Ok(socket) => socket,
                // No connection is left, or a signal interrupted the call; the listener then stays
                // readable.
                Err(Errno::AGAIN | Errno::INTR) => return Ok(()),
                Err(Errno::CONNABORTED) => continue,
                Err(errno) => return Err(self.attempt.refused(Required::Accept, errno)),
            };
            match socket::peer(&socket) {
                Ok(peer) if peer.is_own_user() => {}
                Ok(peer) => {
                    let me = self.attempt.me();
                    self.other_users
                        .warn(format_args!("{me} rejected pid {} of user {}", peer.pid, peer.uid));
                    continue;
                }
                Err(errno) => {
                    self.forbidden(Required::Identify, errno)?;
                    continue;
                }
            }
            if self.pending.len() >= MAX_PENDING_CONNECTIONS + self.members.len() {
                self.pending.remove(0);
            }
            self.pending.push(PendingConnection { socket, since: Instant::now() });
        }
        Ok(())
    }

    /// Fails if the system denies `step` to this rank, whichever process is at the other end.
    fn forbidden(&self, step: Required, errno: Errno) -> Result<()> {
        let error = self.attempt.refused(step, errno);
        if error.kind == ErrorKind::Config { Err(error) } else { Ok(()) }
    }

    /// Keeps a connection with a valid greeting as the connection of its rank, and closes any
    /// other.
    fn receive_hello(&mut self, guest: PendingConnection) -> Result<()> {
        let mut buffer = [0; BUFFER];
        let received = match socket::receive(&guest.socket, &mut buffer) {
            Ok(received) => received,
            Err(Errno::AGAIN | Errno::INTR) => {
                self.pending.push(guest);
                return Ok(());
            }
            Err(errno) => return self.forbidden(Required::Receive, errno),
        };
        if received.length == 0 {
            return Ok(());
        }
        match self.check(&guest.socket, &buffer[..received.length.min(BUFFER)]) {
            Ok(rank) => self.accepted[rank.index()] = Some(guest.socket),
            Err(reason) => {
                let message = format!("{} turned a connection away: {reason}", self.attempt.me());
                self.rejected.warn(format_args!("{message}"));
                self.reject(&guest.socket, &Error::config(message));
            }
        }
        Ok(())
    }

    /// Returns the rank of the process that sent `message`, if it belongs to the group.
    fn check(&self, socket: &OwnedFd, message: &[u8]) -> std::result::Result<Rank, String> {
        let hello = JoinHello::decode(message).ok_or("its message is not one of this protocol")?;
        // The token is compared before anything about the group is revealed.
        if hello.token != self.token {
            return Err("its token is not this group's".into());
        }
        let spec = self.attempt.spec;
        let rank = Rank(hello.rank);
        if hello.size != spec.size || hello.segment_bytes != spec.segment_bytes {
            return Err(format!(
                "it expects {} ranks and {} bytes, not {} and {}",
                hello.size, hello.segment_bytes, spec.size, spec.segment_bytes
            ));
        }
        if rank == Rank(0) || rank.0 >= spec.size {
            return Err(format!("it says to be rank {rank} of {}", spec.size));
        }
        let pid = self.members[rank.index()].pid;
        let peer = socket::peer(socket).map_err(|errno| errno.to_string())?;
        if hello.pid != pid || peer.pid != pid {
            return Err(format!("rank {rank} is pid {pid}, not pid {}", peer.pid));
        }
        if self.accepted[rank.index()].is_some() {
            return Err(format!("rank {rank} (pid {pid}) is here already"));
        }
        Ok(rank)
    }

    fn answer_all(&mut self, segment: &OwnedFd) -> Result<()> {
        let answer = JoinReply { token: self.token, failure: None }.encode();
        for rank in self.others() {
            let Some(socket) = &self.accepted[rank.index()] else {
                continue;
            };
            loop {
                match socket::send(socket, &answer, Some(segment.as_fd())) {
                    Ok(()) => break,
                    // Too many descriptors are in flight to this user's processes, which are about
                    // to receive them.
                    Err(Errno::TOOMANYREFS | Errno::AGAIN | Errno::INTR)
                        if !self.attempt.clock.remaining().is_zero() =>
                    {
                        self.attempt.check_interrupt()?;
                        std::thread::sleep(Duration::from_millis(1));
                    }
                    Err(Errno::PIPE | Errno::CONNRESET) => return Err(self.left(rank)),
                    Err(errno) => return Err(self.attempt.refused(Required::Send, errno)),
                }
            }
            self.accepted[rank.index()] = None;
        }
        Ok(())
    }

    fn reject_all(&self, error: &Error) {
        for socket in
            self.accepted.iter().flatten().chain(self.pending.iter().map(|guest| &guest.socket))
        {
            self.reject(socket, error);
        }
    }

    fn reject(&self, socket: &OwnedFd, error: &Error) {
        // Unidentified peers must not learn the group's token, so a failure is sent without it.
        let answer = JoinReply { token: [0; 16], failure: Some(error.clone()) };
        // Best effort: a rank that misses the answer finds the connection closed, and the cause in
        // rank 0's record.
        let _ = socket::send(socket, &answer.encode(), None);
    }
}
