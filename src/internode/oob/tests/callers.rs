//! Callers that are not, or not yet, known as ranks.

use super::super::LocalNode;
use super::super::OobTimeouts;
use super::super::connect::{ready, receive, transmit};
use super::super::frame::{ConnectionEnd, OobMessage, Sealer, Token};
use super::super::node_leader::{Descriptor, HubListener, NodeLeader, UNIDENTIFIED};
use super::{Job, QUICK, Shared, call, soon};
use crate::error::{Error, ErrorKind};
use crate::rank::Rank;
use crate::store::tcp::address::StoreAddress;
use crate::store::tcp::listen::ListeningSockets;
use crate::store::tcp::proof::{ADMISSION, ClientHello, OPENING};
use crate::sys::fork;
use rustix::event::PollFlags;
use rustix::fd::AsRawFd;
use rustix::fd::OwnedFd;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The introduction of a caller that knows the token.
type Words = dyn Fn(&mut Sealer) -> Vec<u8>;

/// Waits until the other end closes `socket`, and discards its bytes; returns false if it does not.
fn is_closed(socket: &OwnedFd) -> bool {
    let mut byte = [0];
    while receive(socket, &mut byte, Instant::now() + Duration::from_secs(3)).is_ok() {}
    receive(socket, &mut byte, Instant::now()).expect_err("nothing comes").message
        != "what listens there does not answer"
}

#[test]
fn unidentified_callers_are_refused_and_nobody_waits_for_them() {
    let job = Job::new(&[0, 1], QUICK);
    std::thread::scope(|scope| {
        let hub = scope.spawn(|| job.meet([Rank(0)]));
        let hub_rank = Rank(0);
        let (silent, entry) = job.connect(hub_rank);
        let (garbled, _) = job.connect(hub_rank);
        transmit(&garbled, b"GET / HTTP/1.1\r\n\r\n", soon()).expect("sent");
        assert!(is_closed(&garbled), "another protocol");
        let introduce = |token: &[u8; 16], speak: &Words| {
            let (socket, _) = job.connect(hub_rank);
            let mut opening = [0; OPENING];
            receive(&socket, &mut opening, soon()).expect("it opens");
            let (introduction, hello) =
                ClientHello::answer(&opening, Some(token)).expect("it wants a proof");
            transmit(&socket, &hello, soon()).expect("sent");
            let mut admission = [0; ADMISSION];
            receive(&socket, &mut admission, soon())?;
            introduction.admitted(&admission, Some(token))?;
            let mut sealer = Sealer::new(token, &opening, &hello, ConnectionEnd::Leader);
            transmit(&socket, &speak(&mut sealer), soon()).expect("sent");
            if is_closed(&socket) { Err(Error::network("closed")) } else { Ok(()) }
        };
        let hello = |sealer: &mut Sealer| sealer.seal(&OobMessage::Hello(Rank(1)));
        assert!(introduce(&[0; 16], &hello).is_err(), "a wrong token");
        let wrong: [&Words; 6] = [
            &|sealer| sealer.seal(&OobMessage::Hello(Rank(0))),
            &|sealer| sealer.seal(&OobMessage::Hello(Rank(77))),
            &|sealer| sealer.seal(&OobMessage::Failed(Error::peer("mine"))),
            &|_| u32::MAX.to_le_bytes().to_vec(),
            &|_| vec![5; 100],
            &|_| Vec::new(),
        ];
        for (which, speak) in wrong.iter().enumerate() {
            assert!(introduce(&entry.token, speak).is_err(), "{which}");
        }
        assert!(is_closed(&silent), "it had its time");
        let many: Vec<OwnedFd> = (0..2 * UNIDENTIFIED).map(|_| job.connect(hub_rank).0).collect();
        let caller = job.meet([Rank(1)]);
        let hub = hub.join().expect("no panic");
        assert!(call(&StoreAddress::Inet(entry.addresses)).is_none(), "the hub still listens");
        assert!(many.iter().all(is_closed));
        assert!(job.nodes.iter().all(|node| node.failure().is_none()));
        drop((caller, hub));
    });
}

#[test]
fn of_many_unidentified_peers_at_once_the_oldest_go_first() {
    let job = Job::new(
        &[0, 1],
        OobTimeouts { handshake_timeout: Duration::from_secs(600), ..OobTimeouts::default() },
    );
    std::thread::scope(|scope| {
        let hub = scope.spawn(|| job.meet([Rank(0)]));
        let open = |socket: &OwnedFd| receive(socket, &mut [0; OPENING], soon()).is_ok();
        let callers: Vec<OwnedFd> = (0..UNIDENTIFIED).map(|_| job.connect(Rank(0)).0).collect();
        assert!(callers.iter().all(open));
        let more: Vec<OwnedFd> = (0..3).map(|_| job.connect(Rank(0)).0).collect();
        assert!(more.iter().all(open));
        assert!(callers[..3].iter().all(is_closed), "as many as have come since");
        let left = |socket: &OwnedFd| {
            receive(socket, &mut [0], Instant::now())
                .is_err_and(|error| error.message.contains("does not answer"))
        };
        assert!(callers[3..].iter().all(left));
        drop((job.meet([Rank(1)]), hub.join()));
    });
}

/// Makes a hub of two nodes that waits long for handshakes, and returns its address.
fn hub(token: Token) -> (NodeLeader, StoreAddress) {
    let layout = Job::new(&[0, 1], QUICK).layout;
    let listeners =
        ListeningSockets::at(&StoreAddress::Inet(vec![(Ipv4Addr::LOCALHOST, 0).into()]))
            .expect("it listens");
    let address = listeners.address.clone();
    let times =
        OobTimeouts { handshake_timeout: Duration::from_secs(600), ..OobTimeouts::default() };
    let door = HubListener { listeners: Arc::new(listeners), token };
    let hub =
        NodeLeader::new("test", &layout, Rank(0), Arc::<Shared>::default(), times, Some(door));
    (hub, address)
}

/// Returns the descriptors that `hub` polls.
fn descriptors(hub: &NodeLeader) -> Vec<Descriptor> {
    let mut found = Vec::new();
    hub.descriptors(&mut found);
    found.into_iter().map(|(descriptor, _)| descriptor).collect()
}

/// Lets `hub` handle all its descriptors once.
fn turn(hub: &mut NodeLeader) {
    let ready = descriptors(hub).iter().map(|descriptor| descriptor.as_fd().as_raw_fd()).collect();
    assert_eq!(hub.poll(&ready), None);
}

/// Receives from `socket`, a connection with `hub`, while the hub runs.
fn hear(hub: &mut NodeLeader, socket: &OwnedFd, into: &mut [u8]) {
    let until = soon();
    while let Err(error) = receive(socket, into, Instant::now()) {
        assert!(error.message.contains("does not answer") && Instant::now() < until, "{error}");
        turn(hub);
    }
}

#[test]
fn the_oldest_go_first_after_others_have_left() {
    let (mut hub, address) = hub([7; 16]);
    let called = |hub: &mut NodeLeader| {
        let caller = call(&address).expect("it listens");
        hear(hub, &caller, &mut [0; OPENING]);
        caller
    };
    let mut callers: Vec<OwnedFd> = (0..UNIDENTIFIED).map(|_| called(&mut hub)).collect();
    let (all, until) = (descriptors(&hub).len(), soon());
    drop(callers.remove(0));
    while descriptors(&hub).len() == all {
        assert!(Instant::now() < until, "the hub notices that the first caller has left");
        turn(&mut hub);
    }
    let _more = [called(&mut hub), called(&mut hub)];
    assert!(is_closed(&callers.remove(0)), "the oldest of those that have stayed");
    for (at, caller) in callers.iter().enumerate() {
        let error = receive(caller, &mut [0], Instant::now()).expect_err("nothing comes").message;
        assert!(error.contains("does not answer"), "{at}: {error}");
    }
}

#[test]
fn new_callers_do_not_displace_a_caller_that_has_answered() {
    let token = [7; 16];
    let (mut hub, address) = hub(token);
    let connect = || call(&address).expect("it listens");
    // Returns once the caller's bytes have reached the hub, whose first connection is the caller's.
    let arrived = |hub: &NodeLeader| {
        let all = descriptors(hub);
        let is_connection =
            |descriptor: &&Descriptor| matches!(descriptor, Descriptor::Connection(_));
        let first = all.iter().find(is_connection).expect("it is connected");
        ready(&first.as_fd(), PollFlags::IN, soon()).expect("the bytes arrive");
    };
    let (caller, mut opening, mut admission) = (connect(), [0; OPENING], [0; ADMISSION]);
    hear(&mut hub, &caller, &mut opening);
    let (introduction, hello) =
        ClientHello::answer(&opening, Some(&token)).expect("it wants a proof");
    let mut sealer = Sealer::new(&token, &opening, &hello, ConnectionEnd::Leader);
    transmit(&caller, &hello, soon()).expect("sent");
    arrived(&hub);
    let _flood: Vec<OwnedFd> = (0..2 * UNIDENTIFIED).map(|_| connect()).collect();
    hear(&mut hub, &caller, &mut admission);
    introduction.admitted(&admission, Some(&token)).expect("it is admitted");
    // The caller has proved that it knows the token, but has not sent its rank.
    let _flood_again: Vec<OwnedFd> = (0..2 * UNIDENTIFIED).map(|_| connect()).collect();
    (0..4).for_each(|_| turn(&mut hub));
    transmit(&caller, &sealer.seal(&OobMessage::Hello(Rank(1))), soon()).expect("sent");
    arrived(&hub);
    turn(&mut hub);
    assert_eq!(hub.missing(), []);
}

#[test]
fn a_hub_without_free_descriptors_pauses_and_says_why() {
    // In a child, because the limit applies to all threads of the process.
    let child = fork::tests::forked(|| {
        let (mut hub, address) = hub([5; 16]);
        let _caller = call(&address).expect("it listens");
        let usual = getrlimit(Resource::Nofile);
        let limit = |limit| setrlimit(Resource::Nofile, limit).expect("may be lowered");
        limit(Rlimit { current: Some(0), ..usual });
        turn(&mut hub);
        let error = hub.accept_error().expect("it cannot accept");
        assert_eq!(error.kind, ErrorKind::Config);
        assert!(error.message.contains("RLIMIT_NOFILE is 0"), "{error}");
        assert!(descriptors(&hub).is_empty(), "the listener would wake the thread at once");
        limit(usual);
        std::thread::sleep(Duration::from_millis(25));
        turn(&mut hub);
        hub.accept_error().is_none() && descriptors(&hub).len() == 2
    });
    assert_eq!(fork::tests::status_of(child), 0);
}
