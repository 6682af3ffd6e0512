//! A node leader: a rank that sends the events of its node to other nodes, and reports their events to its node.

use super::connection::Connection;
use super::frame::{HEADERS, Message, Token};
use super::launches::{Launches, TOLD};
use super::progress::{Progress, Report};
use super::refusals::Refusals;
use super::{Host, Place, SPEAKERS, Times, Waiting};
use crate::error::Error;
use crate::host_map::HostMap;
use crate::hosts::header::Header;
use crate::rank::Rank;
use crate::store::tcp::listen::Listeners;
use rustix::event::PollFlags;
use rustix::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use rustix::io::Errno;
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Maximum number of connections that have not proved that they know the token; beyond it, the oldest is closed.
pub(super) const UNIDENTIFIED: usize = 64;

/// The node leaders of `host`.
pub(super) fn speakers(layout: &HostMap, host: usize) -> &[Rank] {
    let members = layout.members(host);
    &members[..members.len().min(SPEAKERS)]
}

/// The listening sockets of a hub; open until all callers have connected.
pub(super) struct Door {
    pub(super) listeners: Arc<Listeners>,
    pub(super) token: Token,
}

/// A connection that ended before its peer announced that it leaves.
struct Lost {
    peer: Rank,
    why: String,
    /// Deadline for another connection to deliver the reason.
    due: Instant,
}

/// One rank's part in the out-of-band messages of a group. None of its functions blocks.
pub(super) struct Speaker {
    pub(super) group: String,
    pub(super) layout: Arc<HostMap>,
    pub(super) me: Rank,
    pub(super) host: Arc<dyn Host>,
    pub(super) times: Times,
    pub(super) door: Option<Door>,
    connections: Vec<Connection>,
    /// True once the failure of this node has been broadcast.
    told: bool,
    /// Ranks that have left, with the text that says how.
    left: BTreeMap<Rank, String>,
    lost: Vec<Lost>,
    pub(super) refusals: Refusals,
    launches: Launches,
    progress: Progress,
    next_beat: Instant,
}

impl Speaker {
    pub(super) fn new(group: &str, layout: &Arc<HostMap>, me: Rank, host: Arc<dyn Host>, times: Times, door: Option<Door>) -> Self {
        Self {
            group: group.into(),
            layout: Arc::clone(layout),
            me,
            host,
            times,
            door,
            connections: Vec::new(),
            told: false,
            left: BTreeMap::new(),
            lost: Vec::new(),
            refusals: Refusals::default(),
            launches: Launches::default(),
            progress: Progress::default(),
            next_beat: Instant::now() + times.beat,
        }
    }

    /// Takes over a connection to a hub.
    pub(super) fn adopt(&mut self, connection: Connection) {
        self.connections.push(connection);
        self.flush();
    }

    /// Node leaders of other nodes that have not yet connected to this hub; empty on a rank that is not a hub.
    pub(super) fn missing(&self) -> Vec<Rank> {
        let own = self.layout.host(self.me);
        let others = (0..self.layout.hosts()).filter(|&host| own == 0 && host != own);
        let here = |rank: &Rank| self.connections.iter().any(|connection| connection.peer() == Some(*rank));
        others.flat_map(|host| speakers(&self.layout, host)).copied().filter(|rank| !here(rank)).collect()
    }

    /// Returns the departure of a rank of another node as an error, if one is known; a rank of local rank `local` is
    /// preferred.
    pub(super) fn departure(&self, local: usize) -> Option<Error> {
        let own = self.layout.host(self.me);
        let mut others = self.left.iter().filter(|(rank, _)| self.layout.host(**rank) != own);
        let nearest = others.clone().find(|(rank, _)| self.layout.local(**rank) == local);
        let (rank, how) = nearest.or_else(|| others.next())?;
        Some(Error::peer(format!("{} of group \"{}\" {how}", self.layout.describe(*rank), self.group)))
    }

    /// Adds the file descriptors to poll to `found`.
    pub(super) fn descriptors(&self, found: &mut Vec<(Descriptor, PollFlags)>) {
        if let Some(door) = &self.door {
            found.extend((0..door.listeners.sockets.len()).map(|at| (Descriptor::Door(Arc::clone(&door.listeners), at), PollFlags::IN)));
        }
        found.extend(self.connections.iter().map(|connection| {
            let output = if connection.unsent() { PollFlags::OUT } else { PollFlags::empty() };
            (Descriptor::Connection(Arc::clone(connection.socket())), PollFlags::IN | output)
        }));
    }

    /// Broadcasts, once, that this node has failed.
    pub(super) fn tell(&mut self, failure: &Error) {
        if !std::mem::replace(&mut self.told, true) {
            self.broadcast(&Message::Failed(failure.clone()));
        }
    }

    /// Records that `rank` has left, and broadcasts it once.
    pub(super) fn tell_left(&mut self, rank: Rank, how: &str) {
        if let Entry::Vacant(entry) = self.left.entry(rank) {
            entry.insert(how.into());
            self.broadcast(&Message::Left(rank, how.into()));
        }
    }

    /// Broadcasts, once, which ranks of this node have left.
    pub(super) fn tell_departures(&mut self, departures: &[(usize, String)]) {
        let (layout, own) = (Arc::clone(&self.layout), self.layout.host(self.me));
        for (local, how) in departures {
            self.tell_left(layout.members(own)[*local], how);
        }
    }

    /// Records that `rank` has rejected a call at `place`, and broadcasts it once.
    pub(super) fn tell_refused(&mut self, rank: Rank, place: Place, why: &str) {
        if rank.index() < self.layout.size() && self.refusals.refused(rank, place, why) {
            self.broadcast(&Message::Refused(rank, place, why.into()));
        }
    }

    /// Records that `rank` makes a call after a rejection, and broadcasts it once.
    pub(super) fn tell_resumed(&mut self, rank: Rank, call: u64) {
        if rank.index() < self.layout.size() && self.refusals.resumed(rank, call) {
            self.broadcast(&Message::Resumed(rank, call));
        }
    }

    /// Broadcasts, once, what `rank` has reported about the call in which it waits.
    fn tell_progress(&mut self, rank: Rank, report: Report) {
        if rank.index() < self.layout.size() && self.progress.told(rank, report) {
            self.broadcast(&Message::Waiting(rank, report));
        }
    }

    /// Broadcasts that this rank has waited for long in `waiting`, if so. If it waits on its rail, returns the call's
    /// number and the late nodes, if [`Self::late`] knows them.
    pub(super) fn tell_waiting(&mut self, waiting: Option<Waiting>) -> Option<(u64, String)> {
        if let Some(report) = self.progress.due(&self.layout, self.me, waiting, Instant::now()) {
            self.broadcast(&Message::Waiting(self.me, report));
        }
        let Waiting { number, .. } = waiting.filter(|waiting| waiting.on_rail)?;
        Some((number, self.late(number)?))
    }

    /// Returns the names of the nodes that have not reported that they wait in this call, if at least one other node
    /// has.
    pub(super) fn late(&self, call: u64) -> Option<String> {
        let late = self.progress.late(&self.layout, self.me, call);
        let names: Vec<String> = late.iter().map(|&host| self.layout.name_host(host)).collect();
        (!late.is_empty() && late.len() + 1 < self.layout.hosts()).then(|| names.join(", "))
    }

    /// Sends the calls that this rank has launched to the first rank of the first node, which compares them. Launches
    /// within a node are compared on that node.
    pub(super) fn tell_launched(&mut self, headers: &[Header]) {
        let first = self.layout.members(0)[0];
        if self.me == first {
            self.launches.launched(headers);
            return;
        }
        let mut reader = self.connections.iter_mut().filter(|connection| connection.peer() == Some(first) && !connection.unsent());
        if let Some(connection) = reader.next() {
            headers[..headers.len().min(TOLD)]
                .chunks(HEADERS)
                .for_each(|headers| connection.queue(&Message::Launched(self.me, headers.to_vec())));
        }
    }

    /// Broadcasts that this rank has left, and closes its connections.
    pub(super) fn leave(&mut self, how: &str) {
        self.tell_left(self.me, how);
        self.door = None;
        self.connections.drain(..).for_each(Connection::close);
    }

    fn broadcast(&mut self, message: &Message) {
        self.connections.iter_mut().for_each(|connection| connection.queue(message));
        self.flush();
    }

    fn flush(&mut self) {
        self.connections.iter_mut().for_each(Connection::write);
    }

    fn lose(&mut self, ended: &Connection, why: String) {
        let Some(peer) = ended.peer() else {
            log::debug!("{}: a caller was refused: {why}", self.group);
            return;
        };
        // Only another leader of the peer's node can know the reason.
        let alone = speakers(&self.layout, self.layout.host(peer)).len() == 1;
        let due = Instant::now() + if alone { Duration::ZERO } else { self.times.grace };
        self.lost.push(Lost { peer, why, due });
    }

    /// Handles the `ready` file descriptors and everything that is due. Returns a failure that the caller must report
    /// to this node.
    pub(super) fn turn(&mut self, ready: &HashSet<RawFd>) -> Option<Error> {
        // Read first, so that new connections do not displace a caller whose proof has arrived.
        let heard = self.read(ready);
        self.accept(ready);
        let mut failure = None;
        for message in heard {
            match message {
                Message::Failed(error) => failure = failure.or(Some(error)),
                // Forwarded, because the other nodes may have no connection to that rank.
                Message::Left(rank, how) if rank.index() < self.layout.size() => self.tell_left(rank, &how),
                Message::Refused(rank, place, why) => self.tell_refused(rank, place, &why),
                Message::Resumed(rank, call) => self.tell_resumed(rank, call),
                Message::Waiting(rank, report) => self.tell_progress(rank, report),
                Message::Launched(rank, headers) if rank.index() < self.layout.size() => self.launches.told(rank, headers),
                Message::Launched(..) | Message::Left(..) | Message::Hello(_) | Message::Alive => {}
            }
        }
        let now = Instant::now();
        if now >= self.next_beat {
            self.next_beat = now + self.times.beat;
            self.connections.iter_mut().for_each(|connection| connection.missed += 1);
            self.broadcast(&Message::Alive);
        }
        self.flush();
        let failure = failure.or_else(|| self.ended(now)).or_else(|| self.silent(now)).or_else(|| self.refused(now));
        let failure = failure.or_else(|| self.launches.compare(&self.layout, self.me, &self.group));
        // Other nodes are notified first, because the program may end this process once its node has failed.
        failure.inspect(|error| self.tell(error))
    }

    /// Returns an error if a rank of another node has rejected the call that this rank is in.
    fn refused(&self, now: Instant) -> Option<Error> {
        self.refusals.end(&self.layout, self.me, &self.group, now).map(Error::mismatch)
    }

    /// Returns an error for the first lost connection whose grace period passed without a reason.
    fn ended(&mut self, now: Instant) -> Option<Error> {
        self.lost.retain(|lost| !self.left.contains_key(&lost.peer));
        let at = self.lost.iter().position(|lost| lost.due <= now)?;
        let lost = self.lost.swap_remove(at);
        let (layout, me, group) = (&self.layout, self.layout.describe(self.me), &self.group);
        let host = layout.host(lost.peer);
        let others = speakers(layout, host).iter().filter(|&&rank| rank != lost.peer);
        let mut others = others.filter(|rank| !self.left.contains_key(rank)).peekable();
        let all = others.peek().is_some() && others.all(|&rank| self.lost.iter().any(|lost| lost.peer == rank));
        let why = &lost.why;
        Some(Error::peer(if all {
            format!("{} of group \"{group}\" is gone: all its connections with {me} have ended ({why})", layout.name_host(host))
        } else {
            format!("{} of group \"{group}\" is gone: its connection with {me} has ended ({why})", layout.describe(lost.peer))
        }))
    }

    /// Returns an error for a node that has been silent for too long on all connections.
    fn silent(&self, now: Instant) -> Option<Error> {
        let limit = self.times.beat * self.times.beats;
        let silent =
            |connection: &&Connection| connection.missed >= self.times.beats && now.saturating_duration_since(connection.heard) >= limit;
        let of = |host: usize| {
            let of_host = move |connection: &&Connection| connection.peer().is_some_and(|peer| self.layout.host(peer) == host);
            self.connections.iter().filter(of_host)
        };
        let lost = |host: usize| self.lost.iter().any(|lost| self.layout.host(lost.peer) == host);
        let host = (0..self.layout.hosts()).find(|&host| of(host).next().is_some() && of(host).all(|one| silent(&one)) && !lost(host))?;
        let seconds = of(host).map(|connection| now.saturating_duration_since(connection.heard)).min().unwrap_or_default().as_secs_f64();
        let (host, group) = (self.layout.name_host(host), &self.group);
        Some(Error::peer(format!("{host} of group \"{group}\" has not answered for {seconds:.1} s")))
    }

    fn read(&mut self, ready: &HashSet<RawFd>) -> Vec<Message> {
        let token = self.door.as_ref().map(|door| door.token);
        let hello = self.times.hello;
        let expected = if self.door.is_some() { self.missing() } else { Vec::new() };
        let mut heard = Vec::new();
        let mut read = |connection: &mut Connection| {
            if connection.peer().is_none() && connection.heard.elapsed() > hello {
                return Err(Error::network("it did not say who it is"));
            }
            if !ready.contains(&connection.socket().as_raw_fd()) {
                return Ok(());
            }
            connection.read(token.as_ref(), |connection, message| {
                match (connection.peer(), &message) {
                    (None, Message::Hello(rank)) if expected.contains(rank) => connection.meet(*rank),
                    (None, _) | (Some(_), Message::Hello(_)) => return Err(Error::network("it is not expected")),
                    (Some(_), _) => heard.push(message),
                }
                Ok(())
            })
        };
        let mut at = 0;
        while let Some(connection) = self.connections.get_mut(at) {
            match read(connection) {
                Ok(()) => at += 1,
                Err(error) => {
                    let ended = self.connections.swap_remove(at);
                    self.lose(&ended, error.message);
                    ended.close();
                }
            }
        }
        if self.door.is_some() && self.missing().is_empty() {
            // All callers have connected; further connections are not accepted.
            self.door = None;
            self.connections.retain(|connection| connection.peer().is_some());
        }
        heard
    }

    fn accept(&mut self, ready: &HashSet<RawFd>) {
        let Some(door) = &self.door else { return };
        let listeners = Arc::clone(&door.listeners);
        for socket in listeners.sockets.iter().filter(|socket| ready.contains(&socket.as_raw_fd())) {
            for _ in 0..UNIDENTIFIED {
                let accepted = match listeners.accept(socket) {
                    Ok(accepted) => Connection::accepted(accepted),
                    Err(Errno::INTR | Errno::CONNABORTED) => continue,
                    Err(errno) => {
                        if errno != Errno::AGAIN {
                            log::debug!("{}: a caller was not accepted: {errno}", self.group);
                        }
                        break;
                    }
                };
                let Ok(accepted) = accepted else { break };
                let mut unidentified = (0..self.connections.len()).filter(|&at| !self.connections[at].identified());
                if unidentified.clone().count() >= UNIDENTIFIED
                    && let Some(oldest) = unidentified.next()
                {
                    self.connections.remove(oldest).close();
                }
                self.connections.push(accepted);
            }
        }
    }
}

/// A file descriptor that stays open while it is polled.
pub(super) enum Descriptor {
    Door(Arc<Listeners>, usize),
    Connection(Arc<OwnedFd>),
}

impl Descriptor {
    pub(super) fn as_fd(&self) -> BorrowedFd<'_> {
        use rustix::fd::AsFd;
        match self {
            Self::Door(listeners, at) => listeners.sockets[*at].as_fd(),
            Self::Connection(socket) => socket.as_fd(),
        }
    }
}
