//! A rank other than 0: requests the memory from rank 0.

use super::claim::RankClaim;
use super::collect_records::{RankRecords, RecordStatus, STALE_RECORD_POLL, read};
use super::handshake::{BUFFER, JoinHello, JoinReply};
use super::record::JoinRecord;
use super::{
    Attempt, COORDINATOR_GRACE, JoinedSegment, MemberProcess, PROCESS_EXIT_DELAY, SIGNAL_POLL,
};
use crate::error::{Error, Result};
use crate::rank::Rank;
use crate::sys::required::Required;
use crate::sys::socket;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{FileType, SealFlags, fcntl_get_seals, fstat};
use rustix::io::Errno;
use std::time::{Duration, Instant};

/// The resources that a rank acquires before it publishes its record.
pub(super) struct MemberResources {
    /// Reserves a file descriptor for the memory: without a free one, the kernel would drop the
    /// memory silently.
    place: OwnedFd,
}

impl MemberResources {
    pub(super) fn create(attempt: &Attempt<'_>) -> Result<Self> {
        let place =
            socket::unconnected().map_err(|errno| attempt.refused(Required::Connect, errno))?;
        // Tried before this rank publishes its record. If the system denies the call, the record
        // can report that; rank 0 reads no record once it distributes the memory.
        match socket::receive(&place, &mut [0]) {
            Err(errno) if errno != Errno::NOTCONN => Err(attempt.refused(Required::Receive, errno)),
            Ok(_) | Err(_) => Ok(Self { place }),
        }
    }

    /// Returns once rank 0 has answered.
    pub(super) fn receive(
        self,
        attempt: &Attempt<'_>,
        claim: &RankClaim<'_>,
        ranks: Box<RankRecords>,
    ) -> Result<JoinedSegment> {
        let RankRecords { coordinator: mut leader, mut members } = *ranks;
        let mut place = Some(self.place);
        loop {
            if let Some(segment) = ask(attempt, &leader, &members[0], &mut place)? {
                claim.withdraw();
                return Ok(JoinedSegment { segment, members, token: leader.nonce });
            }
            // No process listens: the record is from an earlier attempt of rank 0, or rank 0 is
            // about to report a failure.
            (leader, members[0]) = next_record(attempt, claim, &leader, &members[0])?;
        }
    }
}

/// Returns rank 0's memory, or `None` if `leader`'s socket is closed.
fn ask(
    attempt: &Attempt<'_>,
    leader: &JoinRecord,
    process: &MemberProcess,
    place: &mut Option<OwnedFd>,
) -> Result<Option<OwnedFd>> {
    let Some(socket) = greet(attempt, leader)? else {
        return Ok(None);
    };
    let answer_by = attempt.clock.deadline + COORDINATOR_GRACE;
    loop {
        attempt.check_interrupt()?;
        let remaining = answer_by.saturating_duration_since(Instant::now());
        if remaining.is_zero() {
            return Err(late(attempt, leader));
        }
        let mut fds = vec![PollFd::from_borrowed_fd(socket.as_fd(), PollFlags::IN)];
        if let Some(pidfd) = &process.pidfd {
            fds.push(PollFd::from_borrowed_fd(pidfd.as_fd(), PollFlags::IN));
        }
        match poll(&mut fds, Timespec::try_from(remaining.min(SIGNAL_POLL)).ok().as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return Err(attempt.refused(Required::Poll, errno)),
        }
        if !fds[0].revents().is_empty() {
            // Frees the reserved descriptor, so that the descriptor that arrives now gets its
            // place.
            drop(place.take());
        }
        let mut buffer = [0; BUFFER];
        match socket::receive(&socket, &mut buffer) {
            Ok(received) if received.length > 0 => {
                if received.fd.is_none() && received.cut {
                    return Err(attempt.refused(Required::Receive, Errno::MFILE));
                }
                let answer = JoinReply::decode(&buffer[..received.length.min(BUFFER)]);
                return accept(attempt, leader, answer, received.fd).map(Some);
            }
            Err(Errno::AGAIN | Errno::INTR) => {
                if let Some(error) = attempt.end_of(Rank(0), process, Duration::ZERO) {
                    return Err(error);
                }
            }
            // Rank 0 has closed the connection without an answer.
            Ok(_) | Err(Errno::CONNRESET) => {
                return attempt.end_of(Rank(0), process, PROCESS_EXIT_DELAY).map_or(Ok(None), Err);
            }
            Err(errno) => return Err(attempt.refused(Required::Receive, errno)),
        }
    }
}

/// Connects and sends the greeting to rank 0; `None` if no process listens there.
fn greet(attempt: &Attempt<'_>, leader: &JoinRecord) -> Result<Option<OwnedFd>> {
    let socket = loop {
        match socket::connect_to(&leader.socket) {
            Ok(socket) => break socket,
            Err(Errno::CONNREFUSED | Errno::NOENT) => return Ok(None),
            Err(Errno::AGAIN | Errno::INTR) => {
                if attempt.clock.remaining().is_zero() {
                    return Err(late(attempt, leader));
                }
                attempt.check_interrupt()?;
                std::thread::sleep(Duration::from_millis(1));
            }
            Err(errno) => return Err(attempt.refused(Required::Connect, errno)),
        }
    };
    let peer = socket::peer(&socket).map_err(|errno| attempt.refused(Required::Identify, errno))?;
    if peer.pid != leader.pid || !peer.is_own_user() {
        // Once rank 0 has exited, any process may take the name.
        return Ok(None);
    }
    let spec = attempt.spec;
    let hello = JoinHello {
        rank: spec.rank.0,
        size: spec.size,
        pid: attempt.own.pid,
        segment_bytes: spec.segment_bytes,
        token: leader.nonce,
    };
    match socket::send(&socket, &hello.encode(), None) {
        Ok(()) => Ok(Some(socket)),
        // Rank 0 may have answered before it closed, and the answer stays readable.
        Err(Errno::PIPE | Errno::CONNRESET) => Ok(Some(socket)),
        Err(errno) => Err(attempt.refused(Required::Send, errno)),
    }
}

/// Checks that rank 0 has sent memory of the agreed size that cannot be truncated.
fn accept(
    attempt: &Attempt<'_>,
    leader: &JoinRecord,
    answer: Option<JoinReply>,
    fd: Option<OwnedFd>,
) -> Result<OwnedFd> {
    let wrong = |what: &str| {
        Err(Error::internal(format!(
            "rank 0 (pid {}) sent {what} to {} while joining {}",
            leader.pid,
            attempt.me(),
            attempt.group()
        )))
    };
    let Some(answer) = answer else {
        return wrong("a message not of this protocol");
    };
    if let Some(error) = answer.failure {
        return Err(error);
    }
    let Some(fd) = fd.filter(|_| answer.token == leader.nonce) else {
        return wrong("no memory of this group");
    };
    let stat = fstat(&fd).map_err(|errno| attempt.refused(Required::Look, errno))?;
    let seals = fcntl_get_seals(&fd).unwrap_or(SealFlags::empty());
    let size = u64::try_from(stat.st_size).unwrap_or(0);
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile
        || !seals.contains(SealFlags::SHRINK)
    {
        return wrong("a descriptor that is not sealed memory");
    }
    if size != attempt.spec.segment_bytes {
        return wrong(&format!("{size} bytes of memory, not {},", attempt.spec.segment_bytes));
    }
    Ok(fd)
}

/// Returns rank 0's record, once it differs from `seen`.
fn next_record(
    attempt: &Attempt<'_>,
    claim: &RankClaim<'_>,
    seen: &JoinRecord,
    process: &MemberProcess,
) -> Result<(JoinRecord, MemberProcess)> {
    let key = [Attempt::key(0)];
    loop {
        let present = attempt.wait_for_keys(&key, attempt.clock.remaining(), || false)?;
        if present
            && let Some(Some(RecordStatus::Live(record, member))) =
                read(attempt, claim, &key, true)?.pop()
            && record.nonce != seen.nonce
        {
            return Ok((*record, member));
        }
        // Rank 0 was alive when its record was read, so this rank fails if rank 0 has ended since.
        if let Some(error) = attempt.end_of(Rank(0), process, Duration::ZERO) {
            return Err(error);
        }
        if attempt.clock.remaining().is_zero() {
            return Err(late(attempt, seen));
        }
        std::thread::sleep(STALE_RECORD_POLL.min(attempt.clock.remaining()));
    }
}

fn late(attempt: &Attempt<'_>, leader: &JoinRecord) -> Error {
    Error::timeout(format!(
        "{} waited {:.1} s for rank 0 (pid {}) to hand over the shared memory of {}",
        attempt.me(),
        attempt.clock.waited(),
        leader.pid,
        attempt.group()
    ))
}
