//! How the node leaders of a group connect: the hubs publish their addresses in the store, and the
//! others connect to them.

use super::connection::OobConnection;
use super::frame::{ConnectionEnd, Sealer, Token};
use super::node_leader::{HubListener, NodeLeader, leaders_of};
use super::thread::LeaderRegistration;
use super::{LEADERS_PER_NODE, LocalNode, OobEndpoint, OobTimeouts, address};
use crate::error::{Error, ErrorKind, Result};
use crate::internode::rail::Life;
use crate::node_map::NodeMap;
use crate::rank::Rank;
use crate::store::Store;
use crate::store::tcp::address::StoreAddress;
use crate::store::tcp::listen::ListeningSockets;
use crate::store::tcp::proof::{ADMISSION, ClientHello, OPENING};
use crate::sync::timeout::CallTimeout;
use crate::sys::eintr::retry;
use crate::sys::interrupt::Interrupts;
use crate::sys::random;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::{AsFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};
use serde::{Deserialize, Serialize};
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// The first and the longest pause between two polls.
const CONNECT_RETRY_MIN: Duration = Duration::from_millis(1);
const CONNECT_RETRY_MAX: Duration = Duration::from_millis(20);
/// Timeout for a hub's part of an introduction.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(2);
/// Timeout for resolving the name of this node.
const DNS_TIMEOUT: Duration = Duration::from_secs(5);
/// Upper bound on the time that a caller which is about to fail waits until the hubs have met all
/// callers.
const LEADER_JOIN_GRACE: Duration = Duration::from_secs(5);
/// Maximum number of addresses at which a hub listens.
const ADDRESSES: usize = 8;

/// A hub's value in the store: its addresses, and the facts that connecting node leaders need.
#[derive(Serialize, Deserialize)]
pub(super) struct HubAddress {
    pub(super) addresses: Vec<SocketAddr>,
    pub(super) token: Token,
    pub(super) announcement: HubAnnouncement,
}

/// The settings that all node leaders receive from the first hub.
#[derive(Clone, Serialize, Deserialize)]
pub(in crate::internode) struct HubAnnouncement {
    /// Its inter-node backends.
    pub(in crate::internode) backends: String,
    pub(in crate::internode) life: Life,
}

/// The parameters with which a rank takes part in connecting the group's node leaders.
pub(in crate::internode) struct OobConnector<'a> {
    pub(in crate::internode) store: &'a dyn Store,
    pub(in crate::internode) group: &'a str,
    /// Prefix of the hubs' keys: the same on all ranks, and different from that of any group that
    /// forms at the same time.
    pub(in crate::internode) prefix: String,
    pub(in crate::internode) node_map: &'a Arc<NodeMap>,
    pub(in crate::internode) me: Rank,
    pub(in crate::internode) node: Arc<dyn LocalNode>,
    pub(in crate::internode) limit: &'a CallTimeout,
    /// Addresses at which a hub listens; `None` for the address that Gloo uses.
    pub(in crate::internode) addresses: Option<Vec<IpAddr>>,
    pub(in crate::internode) times: OobTimeouts,
    /// The inter-node backends that this rank would use.
    pub(in crate::internode) backends: String,
    /// Called at the timeout: returns an error that names the ranks which keep others of their
    /// nodes waiting, if any are known.
    pub(in crate::internode) late: &'a dyn Fn() -> Option<Error>,
    /// Called in every poll: returns the error of a rank that cannot join, if one is known.
    pub(in crate::internode) failed: &'a dyn Fn() -> Option<Error>,
}

/// Key of a hub in the store. It is deleted once all callers have connected, or the hub abandons
/// the meeting.
struct HubKey<'a> {
    store: &'a dyn Store,
    name: String,
}

impl Drop for HubKey<'_> {
    fn drop(&mut self) {
        // A store that cannot delete keeps the key. A rank that later connects to the address in it
        // is rejected by any process that listens there.
        let _ = self.store.delete(&self.name);
    }
}

impl OobConnector<'_> {
    /// Connects this rank, if it is a node leader, to all its peers, and then accepts no further
    /// connections. A node leader also receives the settings of the first hub.
    ///
    /// # Errors
    /// `Timeout` names the ranks that did not connect. Any failure on this node meanwhile is an
    /// error, too.
    pub(in crate::internode) fn connect(self) -> Result<(OobEndpoint, HubAnnouncement)> {
        if self.node_map.local_rank(self.me) >= LEADERS_PER_NODE {
            return Ok((
                OobEndpoint(Mutex::new(None)),
                HubAnnouncement { backends: self.backends, life: Life::default() },
            ));
        }
        let met = if self.node_map.node_of(self.me) == 0 {
            self.accept_leaders()
        } else {
            self.connect_to_hubs()
        };
        met.map(|(seat, told)| (OobEndpoint(Mutex::new(Some(seat))), told))
    }

    fn leader(&self, door: Option<HubListener>) -> Result<LeaderRegistration> {
        LeaderRegistration::new(NodeLeader::new(
            self.group,
            self.node_map,
            self.me,
            Arc::clone(&self.node),
            self.times,
            door,
        ))
    }

    fn key(&self, hub: Rank) -> String {
        format!("{}/{hub}", self.prefix)
    }

    /// Fails if the program was interrupted or the group has failed on this node.
    fn check(&self, interrupts: &mut Interrupts) -> Result<()> {
        interrupts.check().map_err(|_| {
            Error::aborted(format!(
                "{} was interrupted by a signal while it joined group \"{}\"",
                self.node_map.describe(self.me),
                self.group
            ))
        })?;
        self.node.failure().or_else(self.failed).map_or(Ok(()), Err)
    }

    fn accept_leaders(&self) -> Result<(LeaderRegistration, HubAnnouncement)> {
        let (me, group) = (self.node_map.describe(self.me), self.group);
        let deadline = Instant::now() + self.limit.remaining().unwrap_or_default().min(DNS_TIMEOUT);
        let addresses = self.addresses.clone().map_or_else(|| address::own(deadline), Ok);
        let listen = |addresses: Vec<IpAddr>| {
            let all = addresses.into_iter().take(ADDRESSES).map(|ip| SocketAddr::new(ip, 0));
            ListeningSockets::at(&StoreAddress::Inet(all.collect()))
        };
        let listeners = addresses.and_then(listen).map_err(|error| {
            Error::config(format!(
                "{me} cannot listen for the other nodes of group \"{group}\": {}",
                error.message
            ))
        })?;
        let addresses = match &listeners.address {
            StoreAddress::Inet(all) => all.clone(),
            StoreAddress::Unix(_) => Vec::new(),
        };
        let at = listeners.address.to_string();
        let token: Token = random::bytes()?;
        let seat = self.leader(Some(HubListener { listeners: Arc::new(listeners), token }))?;
        let told = HubAnnouncement { backends: self.backends.clone(), life: Life::new()? };
        let entry = HubAddress { addresses, token, announcement: told.clone() };
        let entry = serde_json::to_vec(&entry)
            .map_err(|error| Error::internal(format!("an address cannot be written: {error}")))?;
        let key = HubKey { store: self.store, name: self.key(self.me) };
        self.store.set(&key.name, &entry)?;
        self.poll_accept(&seat, &at).inspect_err(|error| {
            seat.with(|leader| leader.broadcast_failure(error));
        })?;
        Ok((seat, told))
    }

    /// Waits until all callers have connected to the hub of `seat`, which listens at the address
    /// `at`.
    fn poll_accept(&self, seat: &LeaderRegistration, at: &str) -> Result<()> {
        let (me, group) = (self.node_map.describe(self.me), self.group);
        let (mut pause, mut interrupts) = (CONNECT_RETRY_MIN, Interrupts::new());
        loop {
            let state = seat.with(|leader| (leader.missing(), leader.accept_error()));
            let (missing, refused) = state.unwrap_or_default();
            if missing.is_empty() {
                return Ok(());
            }
            self.check(&mut interrupts)?;
            if let Some(error) = refused {
                let text = format!(
                    "{me} cannot accept the connections of other nodes of group \"{group}\": {}",
                    error.message
                );
                return Err(Error { message: text, ..error });
            }
            let Some(left) = self.limit.remaining() else {
                let (missing, seconds): (Vec<String>, _) = (
                    missing.iter().map(|&rank| self.node_map.describe(rank)).collect(),
                    self.limit.elapsed().as_secs_f64(),
                );
                let unheard = || {
                    Error::timeout(format!(
                        "{me} listened at {at} for {seconds:.1} s, to join group \"{group}\", and \
                         did not hear from {} (timeout); \
                     GLOO_SOCKET_IFNAME names the network",
                        missing.join(", ")
                    ))
                };
                return Err((self.late)().unwrap_or_else(unheard));
            };
            std::thread::sleep(pause.min(left));
            pause = (pause * 2).min(CONNECT_RETRY_MAX);
        }
    }

    fn connect_to_hubs(&self) -> Result<(LeaderRegistration, HubAnnouncement)> {
        let (seat, mut told) = (self.leader(None)?, None);
        for &hub in leaders_of(self.node_map, 0) {
            let called = self.connect_to_hub(hub).inspect_err(|error| {
                seat.with(|leader| leader.broadcast_failure(error));
            });
            let (connection, of_hub) = called?;
            seat.with(|leader| leader.add_connection(connection));
            told.get_or_insert(of_hub);
        }
        let told = told.ok_or_else(|| Error::internal("the first node has no hub"))?;
        if told.backends != self.backends {
            self.wait_for_leaders()?;
        }
        Ok((seat, told))
    }

    /// Waits until the hubs have met all callers, for [`LEADER_JOIN_GRACE`] at most. If this rank
    /// failed before that, the ranks that have not connected would not learn why.
    fn wait_for_leaders(&self) -> Result<()> {
        let until =
            Instant::now() + LEADER_JOIN_GRACE.min(self.limit.remaining().unwrap_or_default());
        let (mut pause, mut interrupts) = (CONNECT_RETRY_MIN, Interrupts::new());
        for key in leaders_of(self.node_map, 0).iter().map(|&hub| self.key(hub)) {
            while Instant::now() < until && self.store.check(&[&key])? {
                self.check(&mut interrupts)?;
                std::thread::sleep(pause);
                pause = (pause * 2).min(CONNECT_RETRY_MAX);
            }
        }
        Ok(())
    }

    /// Returns a connection to `hub` and that hub's settings. Retries until the timeout, because
    /// the store may still contain the entry of an earlier group.
    pub(super) fn connect_to_hub(&self, hub: Rank) -> Result<(OobConnection, HubAnnouncement)> {
        let (key, mut pause, mut interrupts) =
            (self.key(hub), CONNECT_RETRY_MIN, Interrupts::new());
        let mut reason = "it does not say where it listens".to_owned();
        loop {
            self.check(&mut interrupts)?;
            let Some(left) = self.limit.remaining() else {
                let (me, hub, seconds) = (
                    self.node_map.describe(self.me),
                    self.node_map.describe(hub),
                    self.limit.elapsed().as_secs_f64(),
                );
                let unreached = || {
                    Error::timeout(format!(
                        "{me} did not reach {hub} within {seconds:.1} s, to join group \"{}\": \
                         {reason} (timeout)",
                        self.group
                    ))
                };
                return Err((self.late)().unwrap_or_else(unreached));
            };
            if self.store.check(&[&key])? {
                match self.store.get(&key, Some(left)).and_then(|entry| self.handshake(&entry, hub))
                {
                    Ok(met) => return Ok(met),
                    // The program has asked to stop waiting.
                    Err(error) if error.kind == ErrorKind::Aborted => return Err(error),
                    Err(error) => reason = error.message,
                }
            }
            std::thread::sleep(pause.min(left));
            pause = (pause * 2).min(CONNECT_RETRY_MAX);
        }
    }

    fn handshake(&self, entry: &[u8], hub: Rank) -> Result<(OobConnection, HubAnnouncement)> {
        let unreadable =
            |error| Error::network(format!("where it listens cannot be read: {error}"));
        let HubAddress { mut addresses, token, announcement: told } =
            serde_json::from_slice(entry).map_err(unreadable)?;
        addresses.truncate(ADDRESSES);
        let mut reasons = Vec::new();
        let deadline = Instant::now() + self.limit.remaining().unwrap_or_default();
        let socket = StoreAddress::Inet(addresses).connect(deadline, |address, errno| {
            reasons.push(format!("{address}: {errno}"));
        })?;
        let socket = socket.ok_or_else(|| {
            Error::network(format!("{}; GLOO_SOCKET_IFNAME names the network", reasons.join(", ")))
        })?;
        let deadline = Instant::now() + HANDSHAKE_TIMEOUT;
        let mut opening = [0; OPENING];
        receive(&socket, &mut opening, deadline)?;
        let (introduction, hello) = ClientHello::answer(&opening, Some(&token))?;
        transmit(&socket, &hello, deadline)?;
        let mut admission = [0; ADMISSION];
        receive(&socket, &mut admission, deadline)?;
        introduction.admitted(&admission, Some(&token))?;
        Ok((
            OobConnection::connected(
                socket,
                Sealer::new(&token, &opening, &hello, ConnectionEnd::Leader),
                self.me,
                hub,
            ),
            told,
        ))
    }
}

/// Waits until `socket` is readable or writable.
pub(super) fn ready(socket: &impl AsFd, flags: PollFlags, deadline: Instant) -> Result<()> {
    let mut fds = [PollFd::new(socket, flags)];
    let polled = retry(|| {
        let left = deadline.saturating_duration_since(Instant::now());
        poll(&mut fds, Timespec::try_from(left).ok().as_ref())
    });
    match polled {
        Ok(0) => Err(Error::network("what listens there does not answer")),
        Ok(_) => Ok(()),
        Err(errno) => Err(Error::network(errno.to_string())),
    }
}

pub(super) fn transmit(socket: &OwnedFd, mut bytes: &[u8], deadline: Instant) -> Result<()> {
    while !bytes.is_empty() {
        match send(socket, bytes, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
            Ok(count) => bytes = &bytes[count..],
            Err(Errno::AGAIN | Errno::INTR) => ready(socket, PollFlags::OUT, deadline)?,
            Err(errno) => return Err(Error::network(errno.to_string())),
        }
    }
    Ok(())
}

pub(super) fn receive(socket: &OwnedFd, mut into: &mut [u8], deadline: Instant) -> Result<()> {
    while !into.is_empty() {
        match recv(socket, &mut *into, RecvFlags::DONTWAIT) {
            Ok((0, _)) => return Err(Error::network("what listens there has refused this rank")),
            Ok((count, _)) => into = &mut into[count..],
            Err(Errno::AGAIN | Errno::INTR) => ready(socket, PollFlags::IN, deadline)?,
            Err(errno) => return Err(Error::network(errno.to_string())),
        }
    }
    Ok(())
}
