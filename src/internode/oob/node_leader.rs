//! A node leader: a rank that sends the events of its node to other nodes, and reports their events
//! to its node.

use super::connection::OobConnection;
use super::frame::{HEADERS, OobMessage, Token};
use super::launch_history::{LaunchHistory, MAX_HEADERS_PER_POLL};
use super::progress::{PhaseReport, ProgressTable};
use super::rejections::RemoteRejections;
use super::{BlockedCall, CallPosition, LEADERS_PER_NODE, LocalNode, OobTimeouts};
use crate::error::Error;
use crate::internode::header::CallHeader;
use crate::node_map::NodeMap;
use crate::rank::Rank;
use crate::store::tcp::listen::ListeningSockets;
use crate::sys::required::Required;
use rustix::event::PollFlags;
use rustix::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use rustix::io::Errno;
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Maximum number of connections that have not proved that they know the token; beyond it, the
/// oldest is closed.
pub(super) const UNIDENTIFIED: usize = 64;

/// Pause before a hub accepts again after it could not.
const ACCEPT_RETRY: Duration = Duration::from_millis(20);

/// Returns the node leaders of `node`.
pub(super) fn leaders_of(layout: &NodeMap, node: usize) -> &[Rank] {
    let members = layout.ranks_of(node);
    &members[..members.len().min(LEADERS_PER_NODE)]
}

/// The listening sockets of a hub; open until all callers have connected.
pub(super) struct HubListener {
    pub(super) listeners: Arc<ListeningSockets>,
    pub(super) token: Token,
}

/// A connection that ended before its peer announced that it leaves.
struct Disconnected {
    peer: Rank,
    why: String,
    /// Deadline for another connection to deliver the reason.
    due: Instant,
}

/// One rank's part in the out-of-band messages of a group. None of its functions blocks.
pub(super) struct NodeLeader {
    pub(super) group: String,
    pub(super) node_map: Arc<NodeMap>,
    pub(super) me: Rank,
    pub(super) node: Arc<dyn LocalNode>,
    pub(super) times: OobTimeouts,
    pub(super) hub_listener: Option<HubListener>,
    /// Why the hub last could not accept a connection although one waited, and when it tries again.
    accept_failure: Option<(Errno, Instant)>,
    connections: Vec<OobConnection>,
    /// True once the failure of this node has been broadcast.
    failure_announced: bool,
    /// Ranks that have left, with the text that says how.
    exited: BTreeMap<Rank, String>,
    disconnected: Vec<Disconnected>,
    pub(super) rejections: RemoteRejections,
    launches: LaunchHistory,
    progress: ProgressTable,
    next_heartbeat: Instant,
}

impl NodeLeader {
    pub(super) fn new(
        group: &str,
        layout: &Arc<NodeMap>,
        me: Rank,
        node: Arc<dyn LocalNode>,
        times: OobTimeouts,
        hub_listener: Option<HubListener>,
    ) -> Self {
        Self {
            group: group.into(),
            node_map: Arc::clone(layout),
            me,
            node,
            times,
            hub_listener,
            accept_failure: None,
            connections: Vec::new(),
            failure_announced: false,
            exited: BTreeMap::new(),
            disconnected: Vec::new(),
            rejections: RemoteRejections::default(),
            launches: LaunchHistory::default(),
            progress: ProgressTable::default(),
            next_heartbeat: Instant::now() + times.heartbeat_interval,
        }
    }

    /// Takes over a connection to a hub.
    pub(super) fn add_connection(&mut self, connection: OobConnection) {
        self.connections.push(connection);
        self.flush();
    }

    /// Returns the node leaders of other nodes that have not yet connected to this hub; empty on a
    /// rank that is not a hub.
    pub(super) fn missing(&self) -> Vec<Rank> {
        let own = self.node_map.node_of(self.me);
        let others = (0..self.node_map.num_nodes()).filter(|&node| own == 0 && node != own);
        let here = |rank: &Rank| {
            self.connections.iter().any(|connection| connection.peer() == Some(*rank))
        };
        others
            .flat_map(|node| leaders_of(&self.node_map, node))
            .copied()
            .filter(|rank| !here(rank))
            .collect()
    }

    /// Returns an error if a limit keeps this hub from accepting connections.
    pub(super) fn accept_error(&self) -> Option<Error> {
        let limits = |errno: &Errno| matches!(*errno, Errno::MFILE | Errno::NFILE);
        let (errno, _) = self.accept_failure.filter(|(errno, _)| limits(errno))?;
        Some(Required::Accept.failed(errno))
    }

    /// Returns the departure of a rank of another node as an error, if one is known; a rank with
    /// local rank `local` is preferred.
    pub(super) fn departure(&self, local: usize) -> Option<Error> {
        let own = self.node_map.node_of(self.me);
        let mut others =
            self.exited.iter().filter(|(rank, _)| self.node_map.node_of(**rank) != own);
        let nearest = others.clone().find(|(rank, _)| self.node_map.local_rank(**rank) == local);
        let (rank, how) = nearest.or_else(|| others.next())?;
        Some(Error::peer(format!(
            "{} of group \"{}\" {how}",
            self.node_map.describe(*rank),
            self.group
        )))
    }

    /// Adds the file descriptors to poll to `found`.
    pub(super) fn descriptors(&self, found: &mut Vec<(Descriptor, PollFlags)>) {
        // A connection that cannot be accepted keeps the listener readable, so `poll` would return
        // at once.
        let paused = self.accept_failure.is_some_and(|(_, again)| Instant::now() < again);
        if let Some(door) = self.hub_listener.as_ref().filter(|_| !paused) {
            found.extend((0..door.listeners.sockets.len()).map(|at| {
                (Descriptor::HubListener(Arc::clone(&door.listeners), at), PollFlags::IN)
            }));
        }
        found.extend(self.connections.iter().map(|connection| {
            let output = if connection.unsent() { PollFlags::OUT } else { PollFlags::empty() };
            (Descriptor::Connection(Arc::clone(connection.socket())), PollFlags::IN | output)
        }));
    }

    /// Broadcasts, once, that this node has failed.
    pub(super) fn broadcast_failure(&mut self, failure: &Error) {
        if !std::mem::replace(&mut self.failure_announced, true) {
            self.broadcast(&OobMessage::Failed(failure.clone()));
        }
    }

    /// Records that `rank` has left, and broadcasts it once.
    pub(super) fn broadcast_exit(&mut self, rank: Rank, how: &str) {
        if let Entry::Vacant(entry) = self.exited.entry(rank) {
            entry.insert(how.into());
            self.broadcast(&OobMessage::Left(rank, how.into()));
        }
    }

    /// Broadcasts, once, which ranks of this node have left.
    pub(super) fn broadcast_exits(&mut self, departures: &[(usize, String)]) {
        let (layout, own) = (Arc::clone(&self.node_map), self.node_map.node_of(self.me));
        for (local, how) in departures {
            self.broadcast_exit(layout.ranks_of(own)[*local], how);
        }
    }

    /// Records that `rank` has rejected a call at `place`, and broadcasts it once.
    pub(super) fn broadcast_rejection(&mut self, rank: Rank, place: CallPosition, why: &str) {
        if rank.index() < self.node_map.size() && self.rejections.rejected(rank, place, why) {
            self.broadcast(&OobMessage::Rejected(rank, place, why.into()));
        }
    }

    /// Records that `rank` makes a call after a rejection, and broadcasts it once.
    pub(super) fn broadcast_resumed(&mut self, rank: Rank, call: u64) {
        if rank.index() < self.node_map.size() && self.rejections.resumed(rank, call) {
            self.broadcast(&OobMessage::Resumed(rank, call));
        }
    }

    /// Broadcasts, once, what `rank` has reported about the call in which it waits.
    fn broadcast_progress(&mut self, rank: Rank, report: PhaseReport) {
        if rank.index() < self.node_map.size() && self.progress.told(rank, report) {
            self.broadcast(&OobMessage::Waiting(rank, report));
        }
    }

    /// Broadcasts a report if this rank has waited for long in one phase of the call `waiting`. If
    /// the call waits on its rail, returns its number and the late nodes, if [`Self::late`] knows
    /// them.
    pub(super) fn report_blocked(&mut self, waiting: Option<BlockedCall>) -> Option<(u64, String)> {
        if let Some(report) = self.progress.due(&self.node_map, self.me, waiting, Instant::now()) {
            self.broadcast(&OobMessage::Waiting(self.me, report));
        }
        let BlockedCall { number, .. } = waiting.filter(|waiting| waiting.on_rail)?;
        Some((number, self.late(number)?))
    }

    /// Returns the names of the nodes that have not reported that they wait in this call, if at
    /// least one other node has.
    pub(super) fn late(&self, call: u64) -> Option<String> {
        let late = self.progress.late(&self.node_map, self.me, call);
        let names: Vec<String> = late.iter().map(|&node| self.node_map.name_node(node)).collect();
        (!late.is_empty() && late.len() + 1 < self.node_map.num_nodes()).then(|| names.join(", "))
    }

    /// Sends the calls that this rank has launched to the first rank of the first node, which
    /// compares them. Launches within a node are compared on that node.
    pub(super) fn report_launches(&mut self, headers: &[CallHeader]) {
        let first = self.node_map.ranks_of(0)[0];
        if self.me == first {
            self.launches.launched(headers);
            return;
        }
        let mut reader = self
            .connections
            .iter_mut()
            .filter(|connection| connection.peer() == Some(first) && !connection.unsent());
        if let Some(connection) = reader.next() {
            headers[..headers.len().min(MAX_HEADERS_PER_POLL)].chunks(HEADERS).for_each(
                |headers| connection.queue(&OobMessage::Launched(self.me, headers.to_vec())),
            );
        }
    }

    /// Broadcasts that this rank has left, and closes its connections.
    pub(super) fn leave(&mut self, how: &str) {
        self.broadcast_exit(self.me, how);
        self.hub_listener = None;
        self.connections.drain(..).for_each(OobConnection::close);
    }

    fn broadcast(&mut self, message: &OobMessage) {
        self.connections.iter_mut().for_each(|connection| connection.queue(message));
        self.flush();
    }

    fn flush(&mut self) {
        self.connections.iter_mut().for_each(OobConnection::write);
    }

    fn on_disconnect(&mut self, ended: &OobConnection, why: String) {
        let Some(peer) = ended.peer() else {
            log::debug!("{}: a caller was refused: {why}", self.group);
            return;
        };
        // Only another leader of the peer's node can know the reason.
        let alone = leaders_of(&self.node_map, self.node_map.node_of(peer)).len() == 1;
        let due = Instant::now() + if alone { Duration::ZERO } else { self.times.disconnect_grace };
        self.disconnected.push(Disconnected { peer, why, due });
    }

    /// Handles the `ready` file descriptors and everything that is due. Returns a failure that the
    /// caller must report to this node.
    pub(super) fn poll(&mut self, ready: &HashSet<RawFd>) -> Option<Error> {
        // Read first, so that new connections do not displace a caller whose proof has arrived.
        let heard = self.read(ready);
        self.accept(ready);
        let mut failure = None;
        for message in heard {
            match message {
                OobMessage::Failed(error) => failure = failure.or(Some(error)),
                // Forwarded, because the other nodes may have no connection to that rank.
                OobMessage::Left(rank, how) if rank.index() < self.node_map.size() => {
                    self.broadcast_exit(rank, &how)
                }
                OobMessage::Rejected(rank, place, why) => {
                    self.broadcast_rejection(rank, place, &why)
                }
                OobMessage::Resumed(rank, call) => self.broadcast_resumed(rank, call),
                OobMessage::Waiting(rank, report) => self.broadcast_progress(rank, report),
                OobMessage::Launched(rank, headers) if rank.index() < self.node_map.size() => {
                    self.launches.told(rank, headers)
                }
                OobMessage::Launched(..)
                | OobMessage::Left(..)
                | OobMessage::Hello(_)
                | OobMessage::Heartbeat => {}
            }
        }
        let now = Instant::now();
        if now >= self.next_heartbeat {
            self.next_heartbeat = now + self.times.heartbeat_interval;
            self.connections.iter_mut().for_each(|connection| connection.missed += 1);
            self.broadcast(&OobMessage::Heartbeat);
        }
        self.flush();
        let failure = failure
            .or_else(|| self.disconnect_error(now))
            .or_else(|| self.heartbeat_error(now))
            .or_else(|| self.rejection_error(now));
        let failure =
            failure.or_else(|| self.launches.compare(&self.node_map, self.me, &self.group));
        // Other nodes are notified first, because the program may end this process once its node
        // has failed.
        failure.inspect(|error| self.broadcast_failure(error))
    }

    /// Returns an error if a rank of another node has rejected the call that this rank is in.
    fn rejection_error(&self, now: Instant) -> Option<Error> {
        self.rejections.end(&self.node_map, self.me, &self.group, now).map(Error::mismatch)
    }

    /// Returns an error for the first lost connection whose grace period passed without a reason.
    fn disconnect_error(&mut self, now: Instant) -> Option<Error> {
        self.disconnected.retain(|lost| !self.exited.contains_key(&lost.peer));
        let at = self.disconnected.iter().position(|lost| lost.due <= now)?;
        let lost = self.disconnected.swap_remove(at);
        let (layout, me, group) = (&self.node_map, self.node_map.describe(self.me), &self.group);
        let node = layout.node_of(lost.peer);
        let others = leaders_of(layout, node).iter().filter(|&&rank| rank != lost.peer);
        let mut others = others.filter(|rank| !self.exited.contains_key(rank)).peekable();
        let all = others.peek().is_some()
            && others.all(|&rank| self.disconnected.iter().any(|lost| lost.peer == rank));
        let why = &lost.why;
        Some(Error::peer(if all {
            format!(
                "{} of group \"{group}\" is gone: all its connections with {me} have ended ({why})",
                layout.name_node(node)
            )
        } else {
            format!(
                "{} of group \"{group}\" is gone: its connection with {me} has ended ({why})",
                layout.describe(lost.peer)
            )
        }))
    }

    /// Returns an error for a node that has been silent for too long on all connections.
    fn heartbeat_error(&self, now: Instant) -> Option<Error> {
        let limit = self.times.heartbeat_interval * self.times.max_missed_heartbeats;
        let silent = |connection: &&OobConnection| {
            connection.missed >= self.times.max_missed_heartbeats
                && now.saturating_duration_since(connection.heard) >= limit
        };
        let of = |node: usize| {
            let of_node = move |connection: &&OobConnection| {
                connection.peer().is_some_and(|peer| self.node_map.node_of(peer) == node)
            };
            self.connections.iter().filter(of_node)
        };
        let lost = |node: usize| {
            self.disconnected.iter().any(|lost| self.node_map.node_of(lost.peer) == node)
        };
        let node = (0..self.node_map.num_nodes()).find(|&node| {
            of(node).next().is_some() && of(node).all(|one| silent(&one)) && !lost(node)
        })?;
        let seconds = of(node)
            .map(|connection| now.saturating_duration_since(connection.heard))
            .min()
            .unwrap_or_default()
            .as_secs_f64();
        let (node, group) = (self.node_map.name_node(node), &self.group);
        Some(Error::peer(format!(
            "{node} of group \"{group}\" has not answered for {seconds:.1} s"
        )))
    }

    fn read(&mut self, ready: &HashSet<RawFd>) -> Vec<OobMessage> {
        let token = self.hub_listener.as_ref().map(|door| door.token);
        let hello = self.times.handshake_timeout;
        let expected = if self.hub_listener.is_some() { self.missing() } else { Vec::new() };
        let mut heard = Vec::new();
        let mut read = |connection: &mut OobConnection| {
            if connection.peer().is_none() && connection.heard.elapsed() > hello {
                return Err(Error::network("it did not say who it is"));
            }
            if !ready.contains(&connection.socket().as_raw_fd()) {
                return Ok(());
            }
            connection.read(token.as_ref(), |connection, message| {
                match (connection.peer(), &message) {
                    (None, OobMessage::Hello(rank)) if expected.contains(rank) => {
                        connection.set_peer(*rank)
                    }
                    (None, _) | (Some(_), OobMessage::Hello(_)) => {
                        return Err(Error::network("it is not expected"));
                    }
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
                    // The connections stay in the order of their arrival.
                    let ended = self.connections.remove(at);
                    self.on_disconnect(&ended, error.message);
                    ended.close();
                }
            }
        }
        if self.hub_listener.is_some() && self.missing().is_empty() {
            // All callers have connected; further connections are not accepted.
            self.hub_listener = None;
            self.connections.retain(|connection| connection.peer().is_some());
        }
        heard
    }

    fn accept(&mut self, ready: &HashSet<RawFd>) {
        let Some(door) = &self.hub_listener else { return };
        let listeners = Arc::clone(&door.listeners);
        for socket in listeners.sockets.iter().filter(|socket| ready.contains(&socket.as_raw_fd()))
        {
            for _ in 0..UNIDENTIFIED {
                let accepted = match listeners.accept(socket) {
                    Ok(accepted) => OobConnection::accepted(accepted),
                    Err(Errno::INTR | Errno::CONNABORTED) => continue,
                    Err(Errno::AGAIN) => break,
                    Err(errno) => {
                        log::debug!("{}: a caller was not accepted: {errno}", self.group);
                        self.accept_failure = Some((errno, Instant::now() + ACCEPT_RETRY));
                        break;
                    }
                };
                let Ok(accepted) = accepted else { break };
                self.accept_failure = None;
                let mut unidentified =
                    (0..self.connections.len()).filter(|&at| !self.connections[at].identified());
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
    HubListener(Arc<ListeningSockets>, usize),
    Connection(Arc<OwnedFd>),
}

impl Descriptor {
    pub(super) fn as_fd(&self) -> BorrowedFd<'_> {
        use rustix::fd::AsFd;
        match self {
            Self::HubListener(listeners, at) => listeners.sockets[*at].as_fd(),
            Self::Connection(socket) => socket.as_fd(),
        }
    }
}
