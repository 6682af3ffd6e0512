//! The server's loop.
//!
//! A turn of a connection reads at most one frame and answers it, or moves at most 256 KiB of a long one; then others
//! have theirs. So no client delays others by more than the time of one request.

use super::calendar::Calendar;
use super::connection::{Connection, Input, Output, Phase};
use super::senders::Senders;
use super::{Shared, WAKER};
use crate::error::Error;
use crate::store::table::Table;
use crate::store::tcp::address::Listeners;
use crate::store::tcp::frame::Answer;
use crate::store::tcp::limits::{Limits, MAX_FRAME};
use crate::store::tcp::proof::{self, HELLO, Nonce, Refusal};
use crate::sys::process;
use bytes::Bytes;
use mio::unix::SourceFd;
use mio::{Events, Interest, Poll, Token};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::{AsRawFd, OwnedFd};
use rustix::io::{Errno, fcntl_dupfd_cloexec};
use rustix::net::{Shutdown, shutdown};
use slab::Slab;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// How long the loop stays awake after something has happened: the next request of the same client tends to follow soon.
const LINGER: Duration = Duration::from_micros(50);

/// From this many answers on, other threads help to send them.
const CROWD: usize = 8;

/// How many connections are accepted before others have their turn.
const ACCEPT_TURN: usize = 64;

/// How many connections that have more to do have their turn before new events are looked at.
const ROUND: usize = 64;

/// From this many connections on, the process gets room for [`ROOM`] descriptors.
const MANY: usize = 16;
const ROOM: u64 = 4096;

/// How long to wait before accepting again when descriptors have run out.
const ACCEPT_AGAIN: Duration = Duration::from_millis(50);

pub(super) struct EventLoop {
    pub(super) poll: Poll,
    pub(super) listeners: Listeners,
    pub(super) secret: Option<Vec<u8>>,
    pub(super) limits: Limits,
    pub(super) shared: Arc<Shared>,
    pub(super) table: Table,
    pub(super) connections: Slab<Connection>,
    /// Who waits for which key, the first comer first.
    pub(super) waiting: HashMap<String, VecDeque<usize>>,
    pub(super) calendar: Calendar,
    /// Connections with something to send, which they do together at the end of a round: woken one by one, clients would
    /// go to sleep again before the next is woken, and waking a core that sleeps is what costs most.
    pub(super) outbox: Vec<usize>,
    pub(super) senders: Senders,
    /// Connections with more to do that no event will announce.
    pub(super) busy: VecDeque<usize>,
    /// Connections for whose long frame or answer there is no room now.
    pub(super) paused: VecDeque<usize>,
    /// Bytes reserved by all connections.
    pub(super) moving: usize,
    /// Strangers, the oldest first.
    pub(super) strangers: VecDeque<usize>,
    pub(super) accept_at: Option<Instant>,
    pub(super) refused: u64,
}

impl EventLoop {
    pub(super) fn new(
        poll: Poll,
        listeners: Listeners,
        secret: Option<Vec<u8>>,
        limits: Limits,
        shared: Arc<Shared>,
    ) -> std::io::Result<Self> {
        for (index, socket) in listeners.sockets.iter().enumerate() {
            poll.registry().register(&mut SourceFd(&socket.as_raw_fd()), Token(index), Interest::READABLE)?;
        }
        Ok(Self {
            poll,
            listeners,
            secret,
            table: Table::bounded(limits.stored),
            limits,
            shared,
            connections: Slab::new(),
            waiting: HashMap::new(),
            calendar: Calendar::default(),
            outbox: Vec::new(),
            senders: Senders::default(),
            busy: VecDeque::new(),
            paused: VecDeque::new(),
            moving: 0,
            strangers: VecDeque::new(),
            accept_at: None,
            refused: 0,
        })
    }

    pub(super) fn run(mut self) {
        let linger = std::thread::available_parallelism().is_ok_and(|cores| cores.get() > 1);
        let mut events = Events::with_capacity(1024);
        let mut awake_until = Instant::now();
        loop {
            let now = Instant::now();
            let nap = if !self.busy.is_empty() || (linger && now < awake_until) {
                Some(Duration::ZERO)
            } else {
                [self.calendar.first(), self.accept_at].into_iter().flatten().min().map(|next| next.saturating_duration_since(now))
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
                let keys: Vec<usize> = self.connections.iter().map(|(key, _)| key).collect();
                return keys.into_iter().for_each(|key| self.close(key));
            }
            let idle = events.is_empty() && self.busy.is_empty();
            for event in &events {
                match event.token() {
                    WAKER => {}
                    Token(index) if index < self.listeners.sockets.len() => self.accept(index),
                    Token(token) => {
                        let key = token - self.listeners.sockets.len();
                        self.event(key, event.is_error() || event.is_read_closed());
                    }
                }
            }
            // Those who come in meanwhile have their turn in the next round, and new events are looked at between rounds.
            for _ in 0..self.busy.len().min(ROUND) {
                if let Some(key) = self.busy.pop_front() {
                    self.turn(key);
                }
            }
            let now = Instant::now();
            while let Some(key) = self.calendar.expired(now) {
                self.expire(key);
            }
            if self.accept_at.is_some_and(|at| at <= now) {
                self.accept_at = None;
                for index in 0..self.listeners.sockets.len() {
                    self.accept(index);
                }
            }
            self.flush_all();
            if idle {
                // Lingering must not keep a client off its core.
                std::thread::yield_now();
            } else {
                awake_until = now + LINGER;
            }
        }
    }

    fn accept(&mut self, index: usize) {
        for _ in 0..ACCEPT_TURN {
            match self.listeners.accept(&self.listeners.sockets[index]) {
                Ok(socket) => self.welcome(socket),
                Err(Errno::AGAIN) => return,
                Err(Errno::PERM) => self.refuse("it is another user's"),
                // It has gone again.
                Err(Errno::CONNABORTED | Errno::INTR) => {}
                Err(errno) => {
                    // Descriptors have run out, as a rule. The listener stays readable, and no further event says so.
                    log::warn!("the store at {} cannot accept a connection: {errno}", self.listeners.address);
                    self.accept_at = Some(Instant::now() + ACCEPT_AGAIN);
                    return;
                }
            }
        }
        self.accept_at = Some(Instant::now());
    }

    fn welcome(&mut self, socket: OwnedFd) {
        if self.connections.len() >= self.limits.clients {
            self.refuse("too many clients");
            return;
        }
        if self.strangers.len() >= self.limits.strangers
            && let Some(oldest) = self.strangers.front().copied()
        {
            self.close(oldest);
        }
        let Ok((words, nonce)) = proof::opening(self.secret.is_some()) else {
            return;
        };
        let entry = self.connections.vacant_entry();
        let key = entry.key();
        let token = Token(self.listeners.sockets.len() + key);
        if self.poll.registry().register(&mut SourceFd(&socket.as_raw_fd()), token, Interest::READABLE | Interest::WRITABLE).is_err() {
            return;
        }
        let connection = entry.insert(Connection::new(socket, nonce));
        if key == MANY {
            make_room();
        }
        self.strangers.push_back(key);
        self.calendar.set(key, &mut connection.deadline, Some(Instant::now() + self.limits.hello));
        self.send(key, [Bytes::copy_from_slice(&words)]);
    }

    pub(super) fn refuse(&mut self, why: &str) {
        // Enough to see that somebody tries, too few to fill a disk.
        self.refused += 1;
        if self.refused <= 10 || self.refused.is_power_of_two() {
            log::warn!("the store at {} refused a connection ({} so far): {why}", self.listeners.address, self.refused);
        }
    }

    pub(super) fn close(&mut self, key: usize) {
        let Some(mut connection) = self.connections.try_remove(key) else {
            return;
        };
        self.calendar.set(key, &mut connection.deadline, None);
        match &connection.phase {
            Phase::Stranger(_) => self.strangers.retain(|&other| other != key),
            Phase::Waiting { key: name } => self.stop_waiting(key, name),
            Phase::Open | Phase::Leaving => {}
        }
        let _ = self.poll.registry().deregister(&mut SourceFd(&connection.socket.as_raw_fd()));
        // Not by closing alone: a forked child may hold a copy of the descriptor.
        let _ = shutdown(&connection.socket, Shutdown::Both);
        drop(connection.socket);
        self.release(connection.reserved);
    }

    /// Something happened at a socket. Of an end that sends no more, what it has sent before is still served, unless it
    /// was waiting for an answer.
    fn event(&mut self, key: usize, ended: bool) {
        if let Some(connection) = self.connections.get_mut(key) {
            connection.drained = false;
            connection.ended |= ended;
            if ended && matches!(connection.phase, Phase::Waiting { .. } | Phase::Leaving) {
                self.close(key);
            } else if ended {
                // Not now: a thousand that leave at once would keep who has come meanwhile waiting for 10 ms.
                self.busy.push_back(key);
            } else {
                self.turn(key);
            }
        }
    }

    /// Lets connection `key` have its turn.
    fn turn(&mut self, key: usize) {
        let Some(connection) = self.connections.get_mut(key) else {
            return;
        };
        if connection.unsent() {
            return self.flush(key);
        }
        match connection.phase {
            Phase::Waiting { .. } => return,
            Phase::Leaving => return self.close(key),
            Phase::Stranger(_) | Phase::Open => {}
        }
        if let Some(body) = connection.request.take() {
            return self.serve(key, body);
        }
        match connection.read() {
            // The end itself is still to be read.
            Input::Nothing if connection.ended => self.busy.push_back(key),
            Input::Nothing => {
                if connection.midway() && connection.deadline.is_none() {
                    self.calendar.set(key, &mut connection.deadline, Some(Instant::now() + self.limits.frame));
                }
            }
            Input::More => self.busy.push_back(key),
            Input::Closed => {
                if matches!(connection.phase, Phase::Stranger(_)) && connection.midway() {
                    self.refuse("it speaks another protocol");
                }
                self.close(key);
            }
            Input::Hello(hello) => self.meet(key, &hello),
            Input::Long(length) => {
                if self.reserve(key, length) {
                    self.busy.push_back(key);
                }
            }
            Input::TooLong(length) => {
                let error = Error::value(format!("a frame of {length} bytes; this store takes at most {MAX_FRAME}"));
                connection.phase = Phase::Leaving;
                self.answer(key, &Answer::Failed(error));
            }
            Input::Frame(body) => {
                self.calendar.set(key, &mut connection.deadline, None);
                self.serve(key, body);
            }
        }
    }

    fn meet(&mut self, key: usize, hello: &[u8; HELLO]) {
        let Some(connection) = self.connections.get_mut(key) else {
            return;
        };
        let Phase::Stranger(nonce) = connection.phase else {
            return;
        };
        match self.judge(&nonce, hello) {
            Ok(admission) => {
                if let Some(connection) = self.connections.get_mut(key) {
                    connection.phase = Phase::Open;
                    self.calendar.set(key, &mut connection.deadline, None);
                }
                self.strangers.retain(|&other| other != key);
                self.send(key, [admission]);
            }
            Err(refusal) => {
                let why = match refusal {
                    Refusal::Foreign => "it speaks another protocol",
                    Refusal::Unproven => "it does not know the secret",
                };
                self.refuse(why);
                if let Some(connection) = self.connections.get_mut(key) {
                    connection.phase = Phase::Leaving;
                }
                self.send(key, [Bytes::from_static(&[0; proof::ADMISSION])]);
            }
        }
    }

    fn judge(&self, nonce: &Nonce, hello: &[u8; HELLO]) -> std::result::Result<Bytes, Refusal> {
        proof::admit(self.secret.as_deref(), nonce, hello).map(|admission| Bytes::copy_from_slice(&admission))
    }

    /// Queues what is to be sent at the end of the round.
    pub(super) fn send(&mut self, key: usize, pieces: impl IntoIterator<Item = Bytes>) {
        if let Some(connection) = self.connections.get_mut(key) {
            connection.queue(pieces);
            self.outbox.push(key);
        }
    }

    /// Sends what the round has queued. Sending is three quarters of the work, nearly all of it in the kernel, which wakes the
    /// clients: a crowd of them is shared with other threads.
    fn flush_all(&mut self) {
        let outbox = std::mem::take(&mut self.outbox);
        let pool = if outbox.len() < CROWD { None } else { self.senders.get() };
        let Some(pool) = pool else {
            return outbox.into_iter().for_each(|key| self.flush(key));
        };
        let mut due: Vec<(usize, &mut Connection, Output)> = self
            .connections
            .iter_mut()
            .filter(|(_, connection)| connection.unsent())
            .map(|(key, connection)| (key, connection, Output::Blocked))
            .collect();
        let share = due.len().div_ceil(pool.current_num_threads() + 1).max(1);
        let write = |part: &mut [(usize, &mut Connection, Output)]| {
            part.iter_mut().for_each(|(_, connection, output)| *output = connection.write())
        };
        pool.in_place_scope(|scope| {
            let mut parts = due.chunks_mut(share);
            let own = parts.next();
            parts.for_each(|part| scope.spawn(move |_| write(part)));
            own.into_iter().for_each(write);
        });
        let outputs: Vec<(usize, Output)> = due.into_iter().map(|(key, _, output)| (key, output)).collect();
        outputs.into_iter().for_each(|(key, output)| self.flushed(key, output));
    }

    fn flush(&mut self, key: usize) {
        if let Some(connection) = self.connections.get_mut(key) {
            let output = connection.write();
            self.flushed(key, output);
        }
    }

    /// Goes on after sending, with whatever the connection has sent meanwhile.
    fn flushed(&mut self, key: usize, output: Output) {
        let Some(connection) = self.connections.get_mut(key) else {
            return;
        };
        let deadline = match output {
            Output::Closed => return self.close(key),
            Output::Sent => {
                let reserved = std::mem::take(&mut connection.reserved);
                let stranger = matches!(connection.phase, Phase::Stranger(_));
                // A stranger keeps its deadline: it has been sent words, and has said none.
                let deadline = if stranger { connection.deadline } else { None };
                self.calendar.set(key, &mut connection.deadline, deadline);
                if connection.pending() {
                    self.busy.push_back(key);
                }
                return self.release(reserved);
            }
            Output::More => {
                self.busy.push_back(key);
                Some(Instant::now() + self.limits.frame)
            }
            Output::Blocked => Some(connection.deadline.unwrap_or_else(|| Instant::now() + self.limits.frame)),
        };
        self.calendar.set(key, &mut connection.deadline, deadline);
    }

    /// Reserves room for `length` bytes, or puts the connection in line for it.
    pub(super) fn reserve(&mut self, key: usize, length: usize) -> bool {
        let Some(connection) = self.connections.get_mut(key) else {
            return false;
        };
        let more = length.saturating_sub(connection.reserved);
        if self.moving + more > self.limits.moving.max(MAX_FRAME) {
            self.calendar.set(key, &mut connection.deadline, None);
            self.paused.push_back(key);
            return false;
        }
        self.moving += more;
        connection.reserved += more;
        self.calendar.set(key, &mut connection.deadline, Some(Instant::now() + self.limits.frame));
        true
    }

    fn release(&mut self, bytes: usize) {
        self.moving -= bytes;
        if bytes > 0 {
            self.busy.extend(self.paused.drain(..));
        }
    }
}

/// Lets the kernel make the process's table of descriptors longer on another thread. Whoever opens the one for which it is too short, the 256th
/// and each power of two after it, waits for all processors to notice, 10 ms and more; here that would be all clients.
fn make_room() {
    let grow = || {
        crate::sys::thread::block_signals();
        let allowed = process::descriptors().0.unwrap_or(ROOM);
        let highest = i32::try_from(allowed.min(ROOM).saturating_sub(1)).unwrap_or(i32::MAX);
        // Where it cannot be had, clients wait.
        let _ = eventfd(0, EventfdFlags::CLOEXEC).and_then(|one| fcntl_dupfd_cloexec(&one, highest));
    };
    let _ = std::thread::Builder::new().name("symm-room".into()).spawn(grow);
}
