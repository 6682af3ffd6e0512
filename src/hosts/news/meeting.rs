//! How the node leaders of a group connect: the hubs publish their addresses in the store, and the others connect to
//! them.

use super::connection::Connection;
use super::frame::{End, Sealer, Token};
use super::speaker::{Door, Speaker, speakers};
use super::thread::Seat;
use super::{Host, News, SPEAKERS, Times, address};
use crate::error::{Error, Result};
use crate::host_map::HostMap;
use crate::hosts::rail::Life;
use crate::rank::Rank;
use crate::store::Store;
use crate::store::tcp::address::Address;
use crate::store::tcp::listen::Listeners;
use crate::store::tcp::proof::{ADMISSION, Introduction, OPENING};
use crate::sync::limit::Limit;
use crate::sys::again::retry;
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
const PAUSE: Duration = Duration::from_millis(1);
const PAUSE_MAX: Duration = Duration::from_millis(20);
/// Timeout for a hub's part of an introduction.
const INTRODUCTION: Duration = Duration::from_secs(2);
/// Timeout for resolving the name of this node.
const RESOLVE: Duration = Duration::from_secs(5);
/// Upper bound on the time that a caller which is about to fail waits until the hubs have met all callers.
const OTHERS: Duration = Duration::from_secs(5);
/// Maximum number of addresses at which a hub listens.
const ADDRESSES: usize = 8;

/// A hub's value in the store: its addresses, and what its callers must know.
#[derive(Serialize, Deserialize)]
pub(super) struct Entry {
    pub(super) addresses: Vec<SocketAddr>,
    pub(super) token: Token,
    pub(super) told: Told,
}

/// The settings that all node leaders receive from the first hub.
#[derive(Clone, Serialize, Deserialize)]
pub(in crate::hosts) struct Told {
    /// Its inter-node backends.
    pub(in crate::hosts) engines: String,
    pub(in crate::hosts) life: Life,
}

/// A rank's view of the connection of a group's node leaders.
pub(in crate::hosts) struct Meeting<'a> {
    pub(in crate::hosts) store: &'a dyn Store,
    pub(in crate::hosts) group: &'a str,
    /// Prefix of the hubs' keys: the same on all ranks, and different from that of any group that forms at the same
    /// time.
    pub(in crate::hosts) prefix: String,
    pub(in crate::hosts) layout: &'a Arc<HostMap>,
    pub(in crate::hosts) me: Rank,
    pub(in crate::hosts) host: Arc<dyn Host>,
    pub(in crate::hosts) limit: &'a Limit,
    /// Addresses at which a hub listens; `None` for the address that Gloo uses.
    pub(in crate::hosts) addresses: Option<Vec<IpAddr>>,
    pub(in crate::hosts) times: Times,
    /// The inter-node backends that this rank would use.
    pub(in crate::hosts) engines: String,
    /// Called at the timeout: returns an error that names the ranks which keep others of their nodes waiting, if any
    /// are known.
    pub(in crate::hosts) late: &'a dyn Fn() -> Option<Error>,
}

/// Key of a hub in the store. It is deleted once all callers have connected, or the hub abandons the meeting.
struct Key<'a> {
    store: &'a dyn Store,
    name: String,
}

impl Drop for Key<'_> {
    fn drop(&mut self) {
        // A store that cannot delete keeps the key. A later reader of it is rejected by any process that listens at the
        // address.
        let _ = self.store.delete(&self.name);
    }
}

impl Meeting<'_> {
    /// Connects this rank, if it is a node leader, to all its peers, and then accepts no further connections. A node
    /// leader also receives the settings of the first hub.
    ///
    /// # Errors
    /// `Timeout` names the ranks that did not connect. Any failure on this node meanwhile is an error, too.
    pub(in crate::hosts) fn meet(self) -> Result<(News, Told)> {
        if self.layout.local(self.me) >= SPEAKERS {
            return Ok((News(Mutex::new(None)), Told { engines: self.engines, life: Life::default() }));
        }
        let met = if self.layout.host(self.me) == 0 { self.wait_for_callers() } else { self.call_hubs() };
        met.map(|(seat, told)| (News(Mutex::new(Some(seat))), told))
    }

    fn speaker(&self, door: Option<Door>) -> Result<Seat> {
        Seat::new(Speaker::new(self.group, self.layout, self.me, Arc::clone(&self.host), self.times, door))
    }

    fn key(&self, hub: Rank) -> String {
        format!("{}/{hub}", self.prefix)
    }

    /// Fails if the program was interrupted or the group has failed on this node.
    fn check(&self, interrupts: &mut Interrupts) -> Result<()> {
        interrupts.check()?;
        self.host.failure().map_or(Ok(()), Err)
    }

    fn wait_for_callers(&self) -> Result<(Seat, Told)> {
        let (me, group) = (self.layout.describe(self.me), self.group);
        let addresses =
            self.addresses.clone().map_or_else(|| address::own(Instant::now() + self.limit.left().unwrap_or_default().min(RESOLVE)), Ok)?;
        let addresses = addresses.into_iter().take(ADDRESSES).map(|ip| SocketAddr::new(ip, 0)).collect();
        let listeners = Listeners::at(&Address::Inet(addresses))
            .map_err(|error| Error::config(format!("{me} cannot listen for the other hosts of group \"{group}\": {}", error.message)))?;
        let addresses = match &listeners.address {
            Address::Inet(all) => all.clone(),
            Address::Unix(_) => Vec::new(),
        };
        let at = listeners.address.to_string();
        let token: Token = random::bytes()?;
        let seat = self.speaker(Some(Door { listeners: Arc::new(listeners), token }))?;
        let told = Told { engines: self.engines.clone(), life: Life::new()? };
        let entry = Entry { addresses, token, told: told.clone() };
        let entry = serde_json::to_vec(&entry).map_err(|error| Error::internal(format!("an address cannot be written: {error}")))?;
        let key = Key { store: self.store, name: self.key(self.me) };
        self.store.set(&key.name, &entry)?;
        self.wait_at(&seat, &at).inspect_err(|error| {
            seat.with(|speaker| speaker.tell(error));
        })?;
        Ok((seat, told))
    }

    /// Waits until all callers have connected to the hub of `seat`, which listens `at`.
    fn wait_at(&self, seat: &Seat, at: &str) -> Result<()> {
        let (me, group) = (self.layout.describe(self.me), self.group);
        let (mut pause, mut interrupts) = (PAUSE, Interrupts::new());
        loop {
            let missing = seat.with(|speaker| speaker.missing()).unwrap_or_default();
            if missing.is_empty() {
                return Ok(());
            }
            self.check(&mut interrupts)?;
            let Some(left) = self.limit.left() else {
                let (missing, seconds): (Vec<String>, _) =
                    (missing.iter().map(|&rank| self.layout.describe(rank)).collect(), self.limit.waited().as_secs_f64());
                let unheard = || {
                    Error::timeout(format!(
                        "{me} listened at {at} for {seconds:.1} s, to join group \"{group}\", and did not hear from {} (timeout); \
                     GLOO_SOCKET_IFNAME names the network",
                        missing.join(", ")
                    ))
                };
                return Err((self.late)().unwrap_or_else(unheard));
            };
            std::thread::sleep(pause.min(left));
            pause = (pause * 2).min(PAUSE_MAX);
        }
    }

    fn call_hubs(&self) -> Result<(Seat, Told)> {
        let (seat, mut told) = (self.speaker(None)?, None);
        for &hub in speakers(self.layout, 0) {
            let called = self.call_hub(hub).inspect_err(|error| {
                seat.with(|speaker| speaker.tell(error));
            });
            let (connection, of_hub) = called?;
            seat.with(|speaker| speaker.adopt(connection));
            told.get_or_insert(of_hub);
        }
        let told = told.ok_or_else(|| Error::internal("the first host has no hub"))?;
        if told.engines != self.engines {
            self.wait_for_others()?;
        }
        Ok((seat, told))
    }

    /// Waits until the hubs have met all callers, for [`OTHERS`] at most. If this rank failed earlier, the ranks that
    /// have not connected would not learn why.
    fn wait_for_others(&self) -> Result<()> {
        let until = Instant::now() + OTHERS.min(self.limit.left().unwrap_or_default());
        let (mut pause, mut interrupts) = (PAUSE, Interrupts::new());
        for key in speakers(self.layout, 0).iter().map(|&hub| self.key(hub)) {
            while Instant::now() < until && self.store.check(&[&key])? {
                self.check(&mut interrupts)?;
                std::thread::sleep(pause);
                pause = (pause * 2).min(PAUSE_MAX);
            }
        }
        Ok(())
    }

    /// Returns a connection to `hub` and that hub's settings. Retries until the timeout, because the store may still
    /// contain the entry of an earlier group.
    pub(super) fn call_hub(&self, hub: Rank) -> Result<(Connection, Told)> {
        let (key, mut pause, mut interrupts) = (self.key(hub), PAUSE, Interrupts::new());
        let mut reason = "it does not say where it listens".to_owned();
        loop {
            self.check(&mut interrupts)?;
            let Some(left) = self.limit.left() else {
                let (me, hub, seconds) = (self.layout.describe(self.me), self.layout.describe(hub), self.limit.waited().as_secs_f64());
                let unreached = || {
                    Error::timeout(format!(
                        "{me} did not reach {hub} within {seconds:.1} s, to join group \"{}\": {reason} (timeout)",
                        self.group
                    ))
                };
                return Err((self.late)().unwrap_or_else(unreached));
            };
            if self.store.check(&[&key])? {
                match self.store.get(&key, Some(left)).and_then(|entry| self.introduce(&entry, hub)) {
                    Ok(met) => return Ok(met),
                    Err(error) => reason = error.message,
                }
            }
            std::thread::sleep(pause.min(left));
            pause = (pause * 2).min(PAUSE_MAX);
        }
    }

    fn introduce(&self, entry: &[u8], hub: Rank) -> Result<(Connection, Told)> {
        let unreadable = |error| Error::network(format!("where it listens cannot be read: {error}"));
        let Entry { mut addresses, token, told } = serde_json::from_slice(entry).map_err(unreadable)?;
        addresses.truncate(ADDRESSES);
        let mut reasons = Vec::new();
        let socket = Address::Inet(addresses).connect(|address, errno| reasons.push(format!("{address}: {errno}")));
        let socket = socket.ok_or_else(|| Error::network(format!("{}; GLOO_SOCKET_IFNAME names the network", reasons.join(", "))))?;
        let deadline = Instant::now() + INTRODUCTION;
        let mut opening = [0; OPENING];
        receive(&socket, &mut opening, deadline)?;
        let (introduction, hello) = Introduction::answer(&opening, Some(&token))?;
        transmit(&socket, &hello, deadline)?;
        let mut admission = [0; ADMISSION];
        receive(&socket, &mut admission, deadline)?;
        introduction.admitted(&admission, Some(&token))?;
        Ok((Connection::made(socket, Sealer::new(&token, &opening, &hello, End::Caller), self.me, hub), told))
    }
}

/// Waits until `socket` is readable or writable.
pub(super) fn ready(socket: &impl AsFd, flags: PollFlags, deadline: Instant) -> Result<()> {
    let left = deadline.saturating_duration_since(Instant::now());
    let mut fds = [PollFd::new(socket, flags)];
    match retry(|| poll(&mut fds, Timespec::try_from(left).ok().as_ref())) {
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
