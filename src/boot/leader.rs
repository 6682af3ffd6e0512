//! Rank 0's side: collect greetings, hand out the memory.

use super::message::{self, Answer, Greeting};
use super::record::Record;
use super::{Attempt, Joined, Member};
use crate::error::{Error, Result};
use crate::mem::shm::Segment;
use crate::rank::{Rank, name_ranks};
use crate::sys::pidfd::{self, Process};
use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

/// A member that has greeted.
struct Guest {
    connection: OwnedFd,
    process: Process,
    handle: OwnedFd,
}

/// A connection whose greeting has not come.
struct Stranger {
    connection: OwnedFd,
    since: Instant,
}

/// A connection that says nothing is closed after this.
const SILENCE: Duration = Duration::from_secs(5);
/// Between looks at whether the missing still live.
const LOOK: Duration = Duration::from_millis(100);

impl Attempt<'_> {
    pub(super) fn lead(&self, listener: &OwnedFd, records: &[Record]) -> Result<Joined> {
        // A dead process's record was left by an earlier run: its successor is still to come.
        let alive: Vec<bool> = records.iter().map(|record| pidfd::runs(record.process())).collect();
        let segment = Segment::create(self.spec.segment_bytes);
        let mut guests = BTreeMap::new();
        let outcome = segment.and_then(|segment| {
            self.collect(listener, records, &alive, &mut guests)?;
            self.hand_out(&segment, &guests)?;
            Ok(segment)
        });
        match outcome {
            Ok(segment) => {
                let mut members = vec![Member { process: self.record.process(), handle: None }];
                members.extend(guests.into_values().map(|guest| self.member(guest.process, guest.handle)));
                Ok(Joined { segment, members })
            }
            Err(error) => {
                for guest in guests.values() {
                    refuse(&guest.connection, &error.message);
                }
                Err(error)
            }
        }
    }

    fn collect(&self, listener: &OwnedFd, records: &[Record], alive: &[bool], guests: &mut BTreeMap<Rank, Guest>) -> Result<()> {
        let mut strangers: Vec<Stranger> = Vec::new();
        while guests.len() + 1 < self.spec.size {
            let sockets: Vec<BorrowedFd<'_>> =
                strangers.iter().map(|stranger| message::borrow(&stranger.connection)).chain([listener.as_fd()]).collect();
            message::wait_readable(&sockets, self.left().min(LOOK));
            while let Ok(connection) =
                rustix::net::accept_with(listener, rustix::net::SocketFlags::CLOEXEC | rustix::net::SocketFlags::NONBLOCK)
            {
                match message::check_user(&connection) {
                    Ok(()) => strangers.push(Stranger { connection, since: Instant::now() }),
                    Err(error) => refuse(&connection, &error.message),
                }
            }
            let mut silent = Vec::new();
            for stranger in strangers {
                match message::receive::<Greeting>(&stranger.connection) {
                    Ok(None) if stranger.since.elapsed() < SILENCE => silent.push(stranger),
                    Ok(None) => {}
                    Ok(Some((greeting, handles))) => self.welcome(stranger.connection, greeting, handles, guests)?,
                    Err(error) => refuse(&stranger.connection, &error.message),
                }
            }
            strangers = silent;
            let missing = self.absent(guests);
            if missing.is_empty() {
                break;
            }
            if self.limit.left().is_none() {
                return Err(self.missing(&missing));
            }
            let died = |rank: &Rank| alive[rank.index()] && !pidfd::runs(records[rank.index()].process());
            if let Some(rank) = missing.iter().find(|rank| died(rank)) {
                // It may have greeted just before it ended.
                let pid = records[rank.index()].pid;
                return Err(Error::peer(format!("rank {rank} (pid {pid}) died while group \"{}\" was being made", self.spec.group)));
            }
        }
        Ok(())
    }

    fn absent(&self, guests: &BTreeMap<Rank, Guest>) -> Vec<Rank> {
        (1..self.spec.size as u32).map(Rank).filter(|rank| !guests.contains_key(rank)).collect()
    }

    /// A greeting of this run makes a guest; another is refused, and so is a second one for the same rank.
    fn welcome(&self, connection: OwnedFd, greeting: Greeting, handles: Vec<OwnedFd>, guests: &mut BTreeMap<Rank, Guest>) -> Result<()> {
        let Greeting { purpose, token, rank, size, segment_bytes, pid, start_time, failure } = greeting;
        if purpose != "join" || token != self.record.nonce || rank == 0 || rank as usize >= self.spec.size {
            refuse(&connection, &format!("this is not the group that rank {rank} (pid {pid}) looks for"));
            return Ok(());
        }
        if let Some(failure) = failure {
            return Err(Error::config(format!("rank {rank} (pid {pid}) cannot join group \"{}\": {failure}", self.spec.group)));
        }
        if (size, segment_bytes) != (self.spec.size, self.spec.segment_bytes) {
            return Err(Error::config(format!(
                "rank {rank} (pid {pid}) expects {size} members sharing {segment_bytes} bytes, rank 0 {} sharing {}",
                self.spec.size, self.spec.segment_bytes
            )));
        }
        if let Some(twin) = guests.get(&Rank(rank)) {
            return Err(Error::config(format!(
                "{} is taken: pid {} claims it, and so does pid {pid}",
                name_ranks(&[Rank(rank)]),
                twin.process.0
            )));
        }
        let handle =
            handles.into_iter().next().ok_or_else(|| Error::config(format!("rank {rank} (pid {pid}) sent no handle of its process")))?;
        guests.insert(Rank(rank), Guest { connection, process: (pid, start_time), handle });
        Ok(())
    }

    fn hand_out(&self, segment: &OwnedFd, guests: &BTreeMap<Rank, Guest>) -> Result<()> {
        let own = pidfd::open_own()?;
        let mut processes = vec![self.record.process()];
        processes.extend(guests.values().map(|guest| guest.process));
        let mut descriptors = vec![segment.as_fd(), own.as_fd()];
        descriptors.extend(guests.values().map(|guest| guest.handle.as_fd()));
        let answer = Answer { refusal: None, segment_bytes: self.spec.segment_bytes, processes };
        for guest in guests.values() {
            // A guest that has died meanwhile is found by whoever waits for it first.
            let _ = message::send(&guest.connection, &answer, &descriptors);
        }
        Ok(())
    }
}

fn refuse(connection: &OwnedFd, reason: &str) {
    let answer = Answer { refusal: Some(reason.into()), segment_bytes: 0, processes: Vec::new() };
    let _ = message::send(connection, &answer, &[]);
}
