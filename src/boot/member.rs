//! The side of every rank but 0: greet, receive the memory.

use super::message::{self, Answer, Greeting};
use super::record::Record;
use super::{Attempt, Joined, Member};
use crate::error::{Error, Result};
use crate::rank::Rank;
use crate::sys::pidfd;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

/// Before looking whether rank 0 has replaced a record that leads nowhere.
const RETRY: Duration = Duration::from_millis(20);

impl Attempt<'_> {
    pub(super) fn follow(&self, records: Vec<Record>) -> Result<Joined> {
        let mut leader = records.into_iter().next().ok_or_else(|| Error::internal("no record of rank 0"))?;
        let handle = pidfd::open_own();
        loop {
            if let Some(connection) = message::connect(&leader.socket)? {
                let failure = handle.as_ref().err().map(|error| error.message.clone());
                self.greet(&connection, &leader, handle.as_ref().ok(), failure)?;
                match self.await_answer(&connection, &leader) {
                    // It listened, but for another attempt.
                    Err(error) if error.message.contains("is not the group") && self.limit.left().is_some() => {}
                    outcome => return outcome,
                }
            }
            if self.limit.left().is_none() {
                return Err(self.missing(&[Rank(0)]));
            }
            std::thread::sleep(RETRY);
            let key = &self.keys[..1];
            if self.store.check(key)?
                && let [bytes] = &self.store.multi_get(key)?[..]
            {
                leader = Record::decode(bytes)?;
            }
        }
    }

    fn greet(&self, connection: &OwnedFd, leader: &Record, handle: Option<&OwnedFd>, failure: Option<String>) -> Result<()> {
        message::check_user(connection)?;
        let greeting = Greeting {
            purpose: "join".into(),
            token: leader.nonce.clone(),
            rank: self.spec.rank.0,
            size: self.spec.size,
            segment_bytes: self.spec.segment_bytes,
            pid: self.record.pid,
            start_time: self.record.start_time,
            failure,
        };
        let handles: Vec<_> = handle.into_iter().map(AsFd::as_fd).collect();
        message::send(connection, &greeting, &handles)
    }

    fn await_answer(&self, connection: &OwnedFd, leader: &Record) -> Result<Joined> {
        let (answer, mut descriptors) = loop {
            match message::receive::<Answer>(connection) {
                Ok(Some(received)) => break received,
                // Rank 0 gives up at its own deadline and says who is missing: a moment longer than ours.
                Ok(None) if self.limit.waited() > self.spec.timeout + Duration::from_millis(500) => return Err(self.missing(&[Rank(0)])),
                Ok(None) => message::wait_readable(&[connection.as_fd()], Duration::from_millis(100)),
                Err(error) if error.kind == crate::error::Kind::Peer => {
                    let text = format!("rank 0 (pid {}) died while group \"{}\" was being made", leader.pid, self.spec.group);
                    return Err(Error::peer(text));
                }
                Err(error) => return Err(error),
            }
        };
        if let Some(reason) = answer.refusal {
            let timed_out = reason.contains(" to join group ");
            return Err(if timed_out { Error::timeout(reason) } else { Error::config(reason) });
        }
        let size = self.spec.size;
        if descriptors.len() != size + 1 || answer.processes.len() != size {
            return Err(Error::config(format!("rank 0 sent {} descriptors, {} were due", descriptors.len(), size + 1)));
        }
        let segment = descriptors.remove(0);
        check_memory(&segment, self.spec.segment_bytes)?;
        let members: Vec<Member> =
            answer.processes.iter().zip(descriptors).map(|(&process, handle)| self.member(process, handle)).collect();
        Ok(Joined { segment, members })
    }
}

/// The memory must be of the agreed size and sealed, so that no access to it can fault.
fn check_memory(segment: &OwnedFd, bytes: usize) -> Result<()> {
    use rustix::fs::{SealFlags, fcntl_get_seals, fstat};
    let size = fstat(segment).map_err(|e| Error::os("reading the size of the group's memory", e))?.st_size;
    let seals = fcntl_get_seals(segment).map_err(|e| Error::os("reading the seals of the group's memory", e))?;
    if size as usize == bytes && seals.contains(SealFlags::SHRINK) {
        return Ok(());
    }
    Err(Error::config(format!("rank 0 sent memory of {size} bytes with seals {seals:?}; {bytes} bytes sealed against shrinking were due")))
}
