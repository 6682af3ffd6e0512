//! Node leaders of several nodes, as threads of one process, over loopback.

mod callers;

use super::LEADERS_PER_NODE;
use super::connect::{HubAddress, HubAnnouncement};
use super::connection::OobConnection;
use super::frame::{ConnectionEnd, OobMessage, Sealer};
use super::node_leader::NodeLeader;
use super::{LocalNode, OobConnector, OobEndpoint, OobTimeouts};
use crate::coll::call::{CallSpec, Collective};
use crate::error::{Error, ErrorKind, Result};
use crate::internode::header::CallHeader;
use crate::node_map::{NodeMap, RankLocation};
use crate::rank::Rank;
use crate::store::Store;
use crate::store::memory::MemoryStore;
use crate::store::tcp::address::StoreAddress;
use crate::store::tcp::listen::ListeningSockets;
use crate::store::tcp::proof::{HELLO, OPENING};
use crate::sync::timeout::CallTimeout;
use rustix::fd::OwnedFd;
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use std::collections::{HashMap, HashSet};
use std::net::Ipv4Addr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const LAYOUTS: [&[u8]; 5] =
    [&[0, 0, 1, 1], &[0, 1, 2], &[0, 0, 0, 1], &[0, 1, 1, 1], &[0, 0, 1, 2, 2]];

/// Short intervals. Tests in which no interval may expire use the defaults.
const QUICK: OobTimeouts = OobTimeouts {
    heartbeat_interval: Duration::from_millis(100),
    max_missed_heartbeats: 5,
    disconnect_grace: Duration::from_millis(60),
    handshake_timeout: Duration::from_millis(300),
};

/// The state that the ranks of a node share.
#[derive(Default)]
struct Shared {
    failure: Mutex<Option<Error>>,
    departures: Mutex<HashMap<usize, String>>,
    launched: Mutex<Vec<CallHeader>>,
}

impl LocalNode for Shared {
    fn failure(&self) -> Option<Error> {
        self.failure.lock().expect("no panic").clone()
    }

    fn fail(&self, error: Error) {
        self.failure.lock().expect("no panic").get_or_insert(error);
    }

    /// All node leaders of a node share this state, so the first leader that asks gets the calls.
    fn launched(&self) -> Vec<CallHeader> {
        std::mem::take(&mut *self.launched.lock().expect("no panic"))
    }

    fn departures(&self) -> Vec<(usize, String)> {
        self.departures
            .lock()
            .expect("no panic")
            .iter()
            .map(|(local, how)| (*local, how.clone()))
            .collect()
    }
}

/// A group whose node leaders meet through a store.
struct Job {
    layout: Arc<NodeMap>,
    nodes: Vec<Arc<Shared>>,
    store: MemoryStore,
    times: OobTimeouts,
}

impl Job {
    fn new(nodes: &[u8], times: OobTimeouts) -> Self {
        let place = |(pid, node): (u32, &u8)| RankLocation {
            pid,
            ..RankLocation::on(&format!("node{node}"))
        };
        let layout = NodeMap::of(&(100..).zip(nodes).map(place).collect::<Vec<_>>());
        Self {
            nodes: (0..layout.num_nodes()).map(|_| Arc::default()).collect(),
            layout: Arc::new(layout),
            store: MemoryStore::default(),
            times,
        }
    }

    fn ranks(&self) -> impl Iterator<Item = Rank> + use<> {
        (0..self.layout.size() as u32).map(Rank)
    }

    fn node(&self, rank: Rank) -> &Arc<Shared> {
        &self.nodes[self.layout.node_of(rank)]
    }

    fn meeting<'a>(&'a self, rank: Rank, limit: &'a CallTimeout) -> OobConnector<'a> {
        OobConnector {
            store: &self.store,
            group: "test",
            prefix: "news".into(),
            node_map: &self.layout,
            me: rank,
            node: self.node(rank).clone(),
            limit,
            addresses: Some(vec![Ipv4Addr::LOCALHOST.into()]),
            times: self.times,
            backends: "cpu:gloo".into(),
            late: &|| None,
            failed: &|| None,
        }
    }

    fn meet_within(&self, rank: Rank, time: Duration) -> Result<OobEndpoint> {
        self.meeting(rank, &CallTimeout::from(Instant::now(), time)).connect().map(|(news, _)| news)
    }

    /// Returns the [`OobEndpoint`] of `ranks`, once all are connected.
    fn meet(&self, ranks: impl IntoIterator<Item = Rank>) -> Vec<(Rank, OobEndpoint)> {
        std::thread::scope(|scope| {
            let meet =
                |rank| (rank, scope.spawn(move || self.meet_within(rank, Duration::from_secs(20))));
            let all: Vec<_> = ranks.into_iter().map(meet).collect();
            all.into_iter()
                .map(|(rank, met)| (rank, met.join().expect("no panic").expect("all meet")))
                .collect()
        })
    }

    /// Returns the failure of each node once all except `but` have failed, and how long that took.
    fn failures(&self, but: Option<usize>) -> (Vec<Option<Error>>, Duration) {
        let begun = Instant::now();
        loop {
            let found: Vec<Option<Error>> = self.nodes.iter().map(|node| node.failure()).collect();
            if found
                .iter()
                .enumerate()
                .all(|(node, failure)| failure.is_some() || but == Some(node))
            {
                return (found, begun.elapsed());
            }
            assert!(begun.elapsed() < Duration::from_secs(20), "{found:?}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn address(&self, hub: Rank) -> HubAddress {
        let entry = self
            .store
            .get(&format!("news/{hub}"), Some(Duration::from_secs(20)))
            .expect("it listens");
        serde_json::from_slice(&entry).expect("an entry")
    }

    fn connect(&self, hub: Rank) -> (OwnedFd, HubAddress) {
        let entry = self.address(hub);
        let socket = call(&StoreAddress::Inet(entry.addresses.clone())).expect("it listens");
        (socket, entry)
    }
}

/// Connects to what listens at `address`.
fn call(address: &StoreAddress) -> Option<OwnedFd> {
    address.connect(soon(), |_, _| {}).expect("not interrupted")
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(10)
}

#[test]
fn a_failure_reaches_every_node_and_the_first_stands() {
    for nodes in LAYOUTS {
        for culprit in 0..usize::from(*nodes.iter().max().expect("ranks")) {
            let job = Job::new(nodes, OobTimeouts::default());
            let news = job.meet(job.ranks());
            assert_eq!(job.store.num_keys(), Ok(0), "the hubs' keys are gone");
            // No rank reports the failure; the leaders of the failed node detect it.
            let error = Error::mismatch(format!("host {culprit} has failed"));
            job.nodes[culprit].fail(error.clone());
            let (failures, took) = job.failures(None);
            assert!(
                failures.iter().all(|failure| failure.as_ref() == Some(&error)),
                "{failures:?}"
            );
            assert!(took < Duration::from_secs(1), "{took:?}");
            job.nodes.iter().for_each(|node| node.fail(Error::peer("a later one")));
            news[0].1.broadcast_failure(&Error::peer("a later one"));
            assert_eq!(job.failures(None).0, failures);
        }
    }
}

// proves P7 on CUDA
#[test]
fn calls_that_nodes_launch_are_compared_after_the_fact() {
    for nodes in [&[0, 1, 2][..], &[0, 1]] {
        let job = Job::new(nodes, OobTimeouts::default());
        let _news = job.meet(job.ranks());
        let launch = |node: usize, call: &CallSpec, number| {
            job.nodes[node].launched.lock().expect("no panic").push(CallHeader::of(call, number))
        };
        for number in 1..=200 {
            (0..nodes.len()).for_each(|node| launch(node, &CallSpec::barrier(None), number));
        }
        std::thread::sleep(Duration::from_millis(100));
        assert!(
            job.nodes.iter().all(|node| node.failure().is_none()),
            "{:?}",
            job.nodes[0].failure()
        );
        let last = nodes.len() - 1;
        let [usual, other] = [Collective::Barrier, Collective::AllToAll]
            .map(|op| CallSpec { op, ..CallSpec::barrier(None) });
        (0..=last).for_each(|node| launch(node, if node == last { &other } else { &usual }, 201));
        let (failures, took) = job.failures(None);
        for failure in failures.iter().flatten() {
            assert_eq!(failure.kind, ErrorKind::Mismatch);
            let text =
                format!("rank {last} (node \"node{last}\", pid {}) called all_to_all", 100 + last);
            assert!(
                failure.message.contains("called barrier as #201")
                    && failure.message.contains(&text),
                "{failure}"
            );
        }
        assert!(took < Duration::from_secs(1), "{took:?}");
    }
}

#[test]
fn who_leaves_is_known_to_all_and_fails_nobody() {
    for nodes in LAYOUTS {
        let job = Job::new(nodes, OobTimeouts::default());
        let mut news = job.meet(job.ranks());
        // The last rank, which need not be a node leader, leaves first, and then the hub leaves.
        let last = Rank(nodes.len() as u32 - 1);
        let local = job.layout.local_rank(last);
        job.node(last).departures.lock().expect("no panic").insert(local, "left the group".into());
        news.pop().expect("ranks").1.leave("left the group");
        let text = format!("{} of group \"test\" left the group", job.layout.describe(last));
        let begun = Instant::now();
        for (rank, news) in
            news.iter().filter(|(rank, _)| job.layout.node_of(*rank) != job.layout.node_of(last))
        {
            if job.layout.local_rank(*rank) >= LEADERS_PER_NODE {
                continue;
            }
            while news.departure(local).is_none_or(|told| told.message != text) {
                assert!(
                    begun.elapsed() < Duration::from_secs(10),
                    "rank {rank}: {:?}",
                    news.departure(local)
                );
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        news.remove(0).1.leave("left the group");
        // Longer than the grace period of a connection that has ended.
        std::thread::sleep(8 * job.times.disconnect_grace);
        assert!(
            job.nodes.iter().all(|node| node.failure().is_none()),
            "{:?}",
            job.nodes[0].failure()
        );
    }
}

#[test]
fn the_end_of_a_connection_is_the_end_of_its_rank() {
    for nodes in LAYOUTS {
        for victim in 0..nodes.len() as u32 {
            let job = Job::new(nodes, OobTimeouts::default());
            let (victim, node) = (Rank(victim), job.layout.node_of(Rank(victim)));
            if job.layout.local_rank(victim) >= LEADERS_PER_NODE {
                continue;
            }
            let mut news = job.meet(job.ranks());
            let at = news.iter().position(|(rank, _)| *rank == victim).expect("is there");
            // Its process ends, and so do its connections.
            let begun = Instant::now();
            drop(news.remove(at));
            let alone = job.layout.ranks_of(node).len() == 1;
            let (failures, _) = job.failures(alone.then_some(node));
            let took = begun.elapsed();
            // The missed heartbeats would take longer.
            assert!(
                took >= if alone { Duration::ZERO } else { job.times.disconnect_grace }
                    && took < 4 * job.times.heartbeat_interval,
                "{took:?}"
            );
            let begin = format!(
                "{} of group \"test\" is gone: its connection with rank ",
                job.layout.describe(victim)
            );
            for failure in failures.iter().flatten() {
                assert!(
                    failure.kind == ErrorKind::Peer && failure.message.starts_with(&begin),
                    "{failure}"
                );
            }
        }
    }
}

#[test]
fn somebody_who_knows_more_is_waited_for() {
    let patient =
        OobTimeouts { disconnect_grace: Duration::from_secs(20), ..OobTimeouts::default() };
    for victim in [0, 2] {
        let job = Job::new(&[0, 0, 1, 1], patient);
        let mut news = job.meet(job.ranks());
        let node = job.layout.node_of(Rank(victim));
        drop(news.remove(victim as usize));
        std::thread::sleep(Duration::from_millis(50));
        let error = Error::peer("killed by signal 9");
        job.nodes[node].fail(error.clone());
        let (failures, took) = job.failures(None);
        assert!(
            failures.iter().all(|failure| failure.as_ref() == Some(&error))
                && took < Duration::from_secs(1),
            "{failures:?}"
        );
    }
}

/// Checks that all other nodes name the node of rank `silent` once it has missed its heartbeats.
/// The rank was heard at `since` or later.
fn names_the_silent(job: &Job, silent: usize, since: Instant) {
    let (failures, _) = job.failures(Some(silent));
    let took = since.elapsed();
    assert!(took > QUICK.heartbeat_interval * 3 && took < Duration::from_secs(10), "{took:?}");
    let begin =
        format!("node \"node{silent}\" (rank {silent}) of group \"test\" has not answered for ");
    for failure in failures.iter().flatten() {
        assert!(failure.message.starts_with(&begin), "{failure}");
    }
}

#[test]
fn a_node_without_signs_of_life_is_named() {
    let job = Job::new(&[0, 1, 2], QUICK);
    let limit = CallTimeout::from(Instant::now(), Duration::from_secs(20));
    std::thread::scope(|scope| {
        let others = scope.spawn(|| job.meet([Rank(0), Rank(2)]));
        let mut silent =
            job.meeting(Rank(1), &limit).connect_to_hub(Rank(0)).expect("the hub answers").0;
        let since = Instant::now();
        silent.write();
        let _news = others.join().expect("no panic");
        names_the_silent(&job, 1, since);
    });
}

#[test]
fn a_silent_hub_is_named_too() {
    let job = Job::new(&[0, 1, 2], QUICK);
    let listeners =
        ListeningSockets::at(&StoreAddress::Inet(vec![(Ipv4Addr::LOCALHOST, 0).into()]))
            .expect("listens");
    let StoreAddress::Inet(addresses) = listeners.address.clone() else {
        panic!("an address of the network")
    };
    let told = HubAnnouncement { backends: "cpu:gloo".into(), life: <_>::default() };
    let entry = HubAddress { addresses, token: [5; 16], announcement: told.clone() };
    // The caller must not trust what an earlier group has left in the store.
    let gone = HubAddress {
        addresses: vec![(Ipv4Addr::LOCALHOST, 1).into()],
        token: [6; 16],
        announcement: told,
    };
    job.store.set("news/0", &serde_json::to_vec(&gone).expect("written")).expect("set");
    std::thread::scope(|scope| {
        let callers = scope.spawn(|| job.meet([Rank(1), Rank(2)]));
        std::thread::sleep(Duration::from_millis(30));
        job.store.set("news/0", &serde_json::to_vec(&entry).expect("written")).expect("set");
        let mut accepted: Vec<OobConnection> = Vec::new();
        let begun = Instant::now();
        let mut met = 0;
        while met < 2 {
            assert!(begun.elapsed() < Duration::from_secs(20));
            accepted.extend(
                listeners
                    .accept(&listeners.sockets[0])
                    .ok()
                    .map(|socket| OobConnection::accepted(socket).expect("random")),
            );
            for connection in &mut accepted {
                let hello = |_: &mut OobConnection, message: OobMessage| {
                    met += usize::from(matches!(message, OobMessage::Hello(_)));
                    Ok(())
                };
                connection.read(Some(&entry.token), hello).expect("they stay");
                connection.write();
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        let _news = callers.join().expect("no panic");
        names_the_silent(&job, 0, begun);
    });
}

#[test]
fn beats_are_counted_in_turns() {
    let layout = Job::new(&[0, 1], QUICK).layout;
    let times = OobTimeouts {
        heartbeat_interval: Duration::from_millis(1),
        max_missed_heartbeats: 5,
        ..OobTimeouts::default()
    };
    let (near, _far) = rustix::net::socketpair(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC,
        None,
    )
    .expect("sockets");
    let sealer = Sealer::new(&[0; 16], &[0; OPENING], &[0; HELLO], ConnectionEnd::Leader);
    let mut connection = OobConnection::connected(near, sealer, Rank(1), Rank(0));
    // As if this rank had been stopped for a minute: it has missed heartbeats that it could have
    // received.
    connection.heard = Instant::now().checked_sub(Duration::from_secs(60)).expect("a minute ago");
    let mut leader =
        NodeLeader::new("test", &layout, Rank(1), Arc::<Shared>::default(), times, None);
    leader.add_connection(connection);
    for turn in 1..=times.max_missed_heartbeats {
        std::thread::sleep(2 * times.heartbeat_interval);
        let silent = leader.poll(&HashSet::new());
        assert_eq!(
            silent.is_some(),
            turn == times.max_missed_heartbeats,
            "turn {turn}: {silent:?}"
        );
    }
}

#[test]
fn whoever_does_not_come_is_named() {
    let job = Job::new(&[0, 1, 1, 1], QUICK);
    std::thread::scope(|scope| {
        let hub = scope.spawn(|| {
            job.meet_within(Rank(0), Duration::from_millis(300)).err().expect("one is missing")
        });
        let caller = job.meet_within(Rank(2), Duration::from_secs(10)).expect("the hub is there");
        let error = hub.join().expect("no panic");
        error.assert_says(
            ErrorKind::Timeout,
            &["did not hear from rank 1 (node \"node1\", pid 101) (timeout)"],
        );
        assert_eq!(job.store.num_keys(), Ok(0));
        let (failures, _) = job.failures(Some(0));
        assert_eq!(
            failures[1].as_ref(),
            Some(&error),
            "who has met the hub hears why that gives up"
        );
        drop(caller);
    });
    let job = Job::new(&[0, 1], QUICK);
    let error = job.meet_within(Rank(1), Duration::from_millis(100)).err().expect("nobody listens");
    assert!(
        error.message.contains("did not reach rank 0 (node \"node0\", pid 100) within 0.1 s"),
        "{error}"
    );
    job.nodes[0].fail(Error::peer("a rank of this node is dead"));
    let error = job.meet_within(Rank(0), Duration::from_secs(20)).err().expect("it makes no sense");
    assert_eq!(error.message, "a rank of this node is dead");
    let job = Job::new(&[0, 1, 1], QUICK);
    std::thread::scope(|scope| {
        let hub = scope.spawn(|| job.meet_within(Rank(0), Duration::from_secs(20)).err());
        let caller = job.meet_within(Rank(1), Duration::from_secs(20)).expect("the hub is there");
        let dead = Some(Error::peer("a rank of the first node is dead"));
        dead.iter().for_each(|dead| job.nodes[0].fail(dead.clone()));
        assert_eq!(hub.join().expect("no panic"), dead);
        assert_eq!(job.failures(None).0, [dead.clone(), dead], "who has met the hub hears of it");
        drop(caller);
    });
}
