//! The server's event loop.
//!
//! In one turn, a connection reads and answers at most one frame, or moves at most 256 KiB of a
//! long one. No client can therefore delay others by more than the time of one request.

use super::connection::{ClientConnection, ClientPhase, Input, Output};
use super::deadlines::DeadlineQueue;
use super::send_pool::SendPool;
use super::{ServerState, WAKER};
use crate::error::Error;
use crate::store::table::KeyTable;
use crate::store::tcp::frame::ServerFrame;
use crate::store::tcp::limits::{ConnectionLimits, MAX_FRAME};
use crate::store::tcp::listen::ListeningSockets;
use crate::sys::rate_limit::RateLimit;
use bytes::Bytes;
use mio::unix::SourceFd;
use mio::{Events, Interest, Poll, Token};
use rustix::fd::AsRawFd;
use rustix::net::{Shutdown, shutdown};
use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// How long the loop polls without sleeping after an event, because the same client often sends its
/// next request soon.
const SERVER_SPIN: Duration = Duration::from_micros(50);

/// Minimum number of queued answers for which other threads help to send.
const MANY: usize = 8;

/// Maximum number of connections with more work that get a turn between two polls for events.
const ROUND: usize = 64;

pub(super) struct EventLoop {
    pub(super) poll: Poll,
    pub(super) listeners: ListeningSockets,
    pub(super) secret: Option<Vec<u8>>,
    pub(super) limits: ConnectionLimits,
    pub(super) shared: Arc<ServerState>,
    pub(super) table: KeyTable,
    /// Connections by token; tokens follow those of the listeners. A token is never reused, because
    /// an event of the same batch may still name a connection that was closed.
    pub(super) connections: HashMap<usize, ClientConnection>,
    /// The token of the next connection.
    pub(super) next: usize,
    /// Clients that wait for each key, in the order of arrival.
    pub(super) waiting: HashMap<String, VecDeque<usize>>,
    pub(super) deadlines: DeadlineQueue,
    /// Connections with queued answers, which are sent together at the end of a round. If clients
    /// were woken one at a time, each would sleep again before the next one wakes, and waking an
    /// idle core costs most.
    pub(super) outbox: Vec<usize>,
    pub(super) senders: SendPool,
    /// Connections with more work that no event announces.
    pub(super) ready: VecDeque<usize>,
    /// Connections whose long frame or answer waits for memory.
    pub(super) paused: VecDeque<usize>,
    /// Size of the memory that all connections have reserved.
    pub(super) in_flight_bytes: usize,
    /// Size of all long requests that wait for keys.
    pub(super) waiting_bytes: usize,
    /// Unidentified peers, the oldest first.
    pub(super) unidentified: BTreeSet<usize>,
    pub(super) accept_at: Option<Instant>,
    /// Rate limits of the log lines about rejected connections, and about connections that could
    /// not be accepted.
    pub(super) refused: RateLimit,
    pub(super) accept_errors: RateLimit,
    /// True once the process's table of file descriptors has been grown.
    pub(super) fd_limit_raised: bool,
}

impl EventLoop {
    pub(super) fn new(
        poll: Poll,
        listeners: ListeningSockets,
        secret: Option<Vec<u8>>,
        limits: ConnectionLimits,
        shared: Arc<ServerState>,
    ) -> std::io::Result<Self> {
        for (index, socket) in listeners.sockets.iter().enumerate() {
            poll.registry().register(
                &mut SourceFd(&socket.as_raw_fd()),
                Token(index),
                Interest::READABLE,
            )?;
        }
        let next = listeners.sockets.len();
        Ok(Self {
            poll,
            listeners,
            secret,
            table: KeyTable::bounded(limits.stored),
            limits,
            shared,
            connections: HashMap::new(),
            next,
            waiting: HashMap::new(),
            deadlines: DeadlineQueue::default(),
            outbox: Vec::new(),
            senders: SendPool::default(),
            ready: VecDeque::new(),
            paused: VecDeque::new(),
            in_flight_bytes: 0,
            waiting_bytes: 0,
            unidentified: BTreeSet::new(),
            accept_at: None,
            refused: RateLimit::new(),
            accept_errors: RateLimit::new(),
            fd_limit_raised: false,
        })
    }

    pub(super) fn run(mut self) {
        let linger = std::thread::available_parallelism().is_ok_and(|cores| cores.get() > 1);
        let mut events = Events::with_capacity(1024);
        let mut awake_until = Instant::now();
        loop {
            let now = Instant::now();
            let nap = if !self.ready.is_empty() || (linger && now < awake_until) {
                Some(Duration::ZERO)
            } else {
                [self.deadlines.first(), self.accept_at]
                    .into_iter()
                    .flatten()
                    .min()
                    .map(|next| next.saturating_duration_since(now))
            };
            match self.poll.poll(&mut events, nap) {
                Ok(()) => {}
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => {
                    log::error!("the store at {} ends: epoll: {error}", self.listeners.address);
                    return;
                }
            }
            if self.shared.stop.load(Ordering::Acquire) {
                let keys: Vec<usize> = self.connections.keys().copied().collect();
                return keys.into_iter().for_each(|key| self.close(key));
            }
            if self.round(&events) {
                awake_until = Instant::now() + SERVER_SPIN;
            } else {
                // A loop that polls without sleeping must not keep a client off its core.
                std::thread::yield_now();
            }
        }
    }

    /// Handles `events`, due deadlines and pending work; returns true if there was any.
    pub(super) fn round(&mut self, events: &Events) -> bool {
        let idle = events.is_empty() && self.ready.is_empty();
        for event in events {
            match event.token() {
                WAKER => {}
                Token(index) if index < self.listeners.sockets.len() => self.accept(index),
                Token(key) => self.event(key, event.is_error() || event.is_read_closed()),
            }
        }
        // Work that a turn adds waits for the next round, and new events are polled between rounds.
        for _ in 0..self.ready.len().min(ROUND) {
            if let Some(key) = self.ready.pop_front() {
                self.turn(key);
            }
        }
        let now = Instant::now();
        while let Some(key) = self.deadlines.expired(now) {
            self.expire(key);
        }
        if self.accept_at.is_some_and(|at| at <= now) {
            self.accept_at = None;
            for index in 0..self.listeners.sockets.len() {
                self.accept(index);
            }
        }
        self.flush_all();
        !idle
    }

    pub(super) fn close(&mut self, key: usize) {
        let Some(mut connection) = self.connections.remove(&key) else {
            return;
        };
        self.deadlines.set(key, &mut connection.deadline, None);
        match &connection.phase {
            ClientPhase::Unidentified(_) => {
                self.unidentified.remove(&key);
            }
            ClientPhase::Waiting { key: name } => self.stop_waiting(key, name),
            ClientPhase::Open | ClientPhase::Leaving => {}
        }
        let _ = self.poll.registry().deregister(&mut SourceFd(&connection.socket.as_raw_fd()));
        // Closing is not enough, because a forked child may hold a copy of the file descriptor.
        let _ = shutdown(&connection.socket, Shutdown::Both);
        drop(connection.socket);
        self.waiting_bytes -= connection.parked;
        self.release(connection.reserved);
    }

    /// Handles an event of a socket. If the other end sends no more, the server still serves its
    /// earlier requests, unless the connection waits for a key or is being closed.
    fn event(&mut self, key: usize, ended: bool) {
        if let Some(connection) = self.connections.get_mut(&key) {
            connection.drained = false;
            connection.ended |= ended;
            if ended
                && matches!(connection.phase, ClientPhase::Waiting { .. } | ClientPhase::Leaving)
            {
                self.close(key);
            } else if ended {
                // Deferred: a thousand clients that disconnect at once would delay new requests by
                // 10 ms.
                self.ready.push_back(key);
            } else {
                self.turn(key);
            }
        }
    }

    /// Runs one turn of connection `key`.
    fn turn(&mut self, key: usize) {
        let Some(connection) = self.connections.get_mut(&key) else {
            return;
        };
        if connection.unsent() {
            return self.flush(key);
        }
        match connection.phase {
            ClientPhase::Waiting { .. } => return,
            ClientPhase::Leaving => return self.close(key),
            ClientPhase::Unidentified(_) | ClientPhase::Open => {}
        }
        if connection.request.is_some() {
            return self.resume(key).into_iter().for_each(|body| self.serve(key, body));
        }
        match connection.read() {
            // The end of the stream is still to be read.
            Input::Nothing if connection.ended => self.ready.push_back(key),
            Input::Nothing => {
                if connection.midway() && connection.deadline.is_none() {
                    self.deadlines.set(
                        key,
                        &mut connection.deadline,
                        Some(Instant::now() + self.limits.frame),
                    );
                }
            }
            Input::More => self.ready.push_back(key),
            Input::Closed => {
                if matches!(connection.phase, ClientPhase::Unidentified(_)) && connection.midway() {
                    let who = connection.peer();
                    self.refuse(&who, "it speaks another protocol");
                }
                self.close(key);
            }
            Input::Hello(hello) => self.authenticate(key, &hello),
            Input::Long(length) => {
                if self.reserve(key, length) {
                    self.ready.push_back(key);
                }
            }
            Input::TooLong(length) => {
                let error = Error::value(format!(
                    "a frame of {length} bytes; this store takes at most {MAX_FRAME}"
                ));
                connection.phase = ClientPhase::Leaving;
                self.answer(key, &ServerFrame::Failed(error));
            }
            Input::Frame(body) => {
                self.deadlines.set(key, &mut connection.deadline, None);
                self.serve(key, body);
            }
        }
    }

    /// Queues `pieces` for the end of the round.
    pub(super) fn send(&mut self, key: usize, pieces: impl IntoIterator<Item = Bytes>) {
        if let Some(connection) = self.connections.get_mut(&key) {
            connection.queue(pieces);
            self.outbox.push(key);
        }
    }

    /// Sends the queued answers of the round. Sending is three quarters of the work, nearly all of
    /// it in the kernel, which wakes the clients; many answers are therefore shared with other
    /// threads.
    fn flush_all(&mut self) {
        let outbox = std::mem::take(&mut self.outbox);
        let pool = if outbox.len() < MANY { None } else { self.senders.get() };
        let Some(pool) = pool else {
            return outbox.into_iter().for_each(|key| self.flush(key));
        };
        let mut due: Vec<(usize, &mut ClientConnection, Output)> = self
            .connections
            .iter_mut()
            .filter(|(_, connection)| connection.unsent())
            .map(|(&key, connection)| (key, connection, Output::Blocked))
            .collect();
        let share = due.len().div_ceil(pool.current_num_threads() + 1).max(1);
        let write = |part: &mut [(usize, &mut ClientConnection, Output)]| {
            part.iter_mut().for_each(|(_, connection, output)| *output = connection.write())
        };
        pool.in_place_scope(|scope| {
            let mut parts = due.chunks_mut(share);
            let own = parts.next();
            parts.for_each(|part| scope.spawn(move |_| write(part)));
            own.into_iter().for_each(write);
        });
        let outputs: Vec<(usize, Output)> =
            due.into_iter().map(|(key, _, output)| (key, output)).collect();
        outputs.into_iter().for_each(|(key, output)| self.flushed(key, output));
    }

    fn flush(&mut self, key: usize) {
        if let Some(connection) = self.connections.get_mut(&key) {
            let output = connection.write();
            self.flushed(key, output);
        }
    }

    /// Handles the result of sending, and continues with the requests that the client has sent
    /// meanwhile.
    fn flushed(&mut self, key: usize, output: Output) {
        let Some(connection) = self.connections.get_mut(&key) else {
            return;
        };
        let deadline = match output {
            Output::Closed => return self.close(key),
            Output::Sent => {
                let reserved = std::mem::take(&mut connection.reserved);
                let unidentified = matches!(connection.phase, ClientPhase::Unidentified(_));
                // An unidentified peer keeps its deadline, because it has received the opening but
                // has not sent its hello.
                let deadline = if unidentified { connection.deadline } else { None };
                self.deadlines.set(key, &mut connection.deadline, deadline);
                if connection.pending() {
                    self.ready.push_back(key);
                }
                return self.release(reserved);
            }
            Output::More => {
                self.ready.push_back(key);
                Some(Instant::now() + self.limits.frame)
            }
            Output::Blocked => {
                Some(connection.deadline.unwrap_or_else(|| Instant::now() + self.limits.frame))
            }
        };
        self.deadlines.set(key, &mut connection.deadline, deadline);
    }

    /// Reserves memory for `length` bytes and returns true, or queues the connection until memory
    /// is free.
    pub(super) fn reserve(&mut self, key: usize, length: usize) -> bool {
        let Some(connection) = self.connections.get_mut(&key) else {
            return false;
        };
        let more = length.saturating_sub(connection.reserved);
        if self.in_flight_bytes + more > self.limits.moving.max(MAX_FRAME) {
            self.deadlines.set(key, &mut connection.deadline, None);
            self.paused.push_back(key);
            return false;
        }
        self.in_flight_bytes += more;
        connection.reserved += more;
        self.deadlines.set(key, &mut connection.deadline, Some(Instant::now() + self.limits.frame));
        true
    }

    pub(super) fn release(&mut self, bytes: usize) {
        self.in_flight_bytes -= bytes;
        if bytes > 0 {
            self.ready.extend(self.paused.drain(..));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::tcp::address::StoreAddress;
    use rustix::event::{PollFd, PollFlags};
    use rustix::fd::OwnedFd;
    use std::net::{Shutdown, SocketAddr, TcpStream};

    /// A server's event loop whose rounds the test runs one by one.
    struct Rig {
        event_loop: EventLoop,
        events: Events,
        at: SocketAddr,
    }

    impl Rig {
        fn new(limits: ConnectionLimits) -> std::io::Result<Self> {
            let address = StoreAddress::Inet(vec![SocketAddr::from(([127, 0, 0, 1], 0))]);
            let listeners = ListeningSockets::at(&address).map_err(std::io::Error::other)?;
            let at = SocketAddr::from(([127, 0, 0, 1], listeners.address.port()));
            let event_loop = EventLoop::new(Poll::new()?, listeners, None, limits, Arc::default())?;
            Ok(Self { event_loop, events: Events::with_capacity(64), at })
        }

        /// Runs one round and returns the tokens of its events.
        fn turn(&mut self) -> std::io::Result<Vec<usize>> {
            self.event_loop.poll.poll(&mut self.events, Some(Duration::from_millis(20)))?;
            self.event_loop.round(&self.events);
            Ok(self.events.iter().map(|event| event.token().0).collect())
        }

        /// Runs rounds until no event is left.
        fn settle(&mut self) -> std::io::Result<()> {
            while !self.turn()?.is_empty() {}
            Ok(())
        }
    }

    /// Waits until a socket is readable, and leaves its event to the event loop.
    fn readable(socket: &OwnedFd) -> std::io::Result<()> {
        rustix::event::poll(&mut [PollFd::new(socket, PollFlags::IN)], None)?;
        Ok(())
    }

    #[test]
    fn the_end_of_one_that_made_room_is_not_taken_for_the_end_of_the_next() -> std::io::Result<()> {
        let mut rig =
            Rig::new(ConnectionLimits { unidentified: 1, ..ConnectionLimits::default() })?;
        let first = TcpStream::connect(rig.at)?;
        rig.settle()?;
        let old = *rig.event_loop.connections.keys().next().expect("the first is there");
        // Both arrive in one batch, in this order: the second connection, which displaces the
        // first, and the first one's hang-up. Loopback may deliver them after the calls return.
        let _second = TcpStream::connect(rig.at)?;
        readable(&rig.event_loop.listeners.sockets[0])?;
        first.shutdown(Shutdown::Both)?;
        drop(first);
        readable(&rig.event_loop.connections[&old].socket)?;
        assert_eq!(rig.turn()?, [0, old]);
        rig.settle()?;
        let connections: Vec<(&usize, &ClientConnection)> =
            rig.event_loop.connections.iter().collect();
        assert!(
            matches!(connections[..], [(&key, connection)] if key != old && !connection.ended),
            "it is another, and has not ended"
        );
        assert!(rig.event_loop.ready.is_empty(), "nothing is left to do for it");
        Ok(())
    }

    #[test]
    fn who_was_refused_is_no_unidentified_peer_any_more() -> std::io::Result<()> {
        use std::io::Write;
        let mut rig = Rig::new(ConnectionLimits::default())?;
        rig.event_loop.secret = Some(b"secret".to_vec());
        let mut wrong = TcpStream::connect(rig.at)?;
        wrong.write_all(&crate::store::tcp::proof::farewell(false))?;
        rig.settle()?;
        assert!(rig.event_loop.unidentified.is_empty() && rig.event_loop.connections.is_empty());
        Ok(())
    }
}
