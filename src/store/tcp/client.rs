//! A client: a pool of connections to one server, each used by one call at a time.

use super::address::Address;
use super::frame::{Answer, LENGTH, Message};
use super::limits::MAX_FRAME;
use super::proof::{ADMISSION, Introduction, OPENING, farewell};
use crate::error::{Error, Kind, Result};
use crate::lock::lock;
use crate::store::request::Request;
use crate::store::table::Reply;
use crate::store::{MAX_TIMEOUT, timed_out};
use crate::sys::{fork, interrupt};
use bytes::Bytes;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{RecvFlags, SendFlags, Shutdown, recv, send, shutdown};
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// Time after a call's limit in which the server's report of the timeout may still arrive.
const GRACE: Duration = Duration::from_millis(80);

/// How long a call spins for its answer before it sleeps, if spinning has paid off recently.
const SPIN: Duration = Duration::from_micros(40);

/// Maximum sleep of a read before it checks the clock and pending signals.
const NAP: Duration = interrupt::LOOK;

/// Maximum number of idle connections kept. Concurrent calls use one connection each.
const IDLE: usize = 16;

/// First and longest pause between attempts to reach a server that has not started yet.
const PAUSE: Duration = Duration::from_millis(1);
const PAUSE_MAX: Duration = Duration::from_millis(50);

/// A connection to the server.
struct Connection {
    socket: OwnedFd,
    frame: Vec<u8>,
    /// Fork generation of the process that made the connection.
    generation: u64,
}

impl Drop for Connection {
    fn drop(&mut self) {
        // Ends the connection even if a forked child holds a copy of the file descriptor, but not in the child.
        if self.generation == fork::generation() {
            let _ = shutdown(&self.socket, Shutdown::Both);
        }
    }
}

/// How long a client that needs another connection retries while the server closes it at once. A server that is
/// overloaded by unidentified peers may take the client for one of them.
const PATIENCE: Duration = Duration::from_secs(1);

/// Why an exchange ended without an answer.
enum Broken {
    /// The exchange failed before anything was sent.
    Unsent(Error),
    /// The program has asked to stop waiting.
    Interrupted(Error),
    /// The deadline has passed.
    Late,
    /// The other end closed the connection; with the error, if there was one.
    Closed(Option<Errno>),
    /// The answer is malformed.
    Garbled(Error),
}

impl Connection {
    /// Waits until the socket is ready.
    fn ready(&self, what: PollFlags, deadline: Instant) -> std::result::Result<(), Broken> {
        loop {
            let remaining = deadline.saturating_duration_since(Instant::now());
            if remaining.is_zero() {
                return Err(Broken::Late);
            }
            let mut fds = [PollFd::new(&self.socket, what)];
            match poll(&mut fds, Timespec::try_from(remaining.min(NAP)).ok().as_ref()) {
                Ok(0) | Err(Errno::INTR) => interrupt::check().map_err(Broken::Interrupted)?,
                Ok(_) => return Ok(()),
                Err(errno) => return Err(Broken::Closed(Some(errno))),
            }
        }
    }

    fn send(&self, mut bytes: &[u8], deadline: Instant) -> std::result::Result<(), Broken> {
        while !bytes.is_empty() {
            match send(&self.socket, bytes, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
                Ok(count) => bytes = &bytes[count..],
                Err(Errno::AGAIN | Errno::INTR) => self.ready(PollFlags::OUT, deadline)?,
                Err(errno) => return Err(Broken::Closed(Some(errno))),
            }
        }
        Ok(())
    }

    /// Reads between one byte and as many as `into` holds.
    fn read(&self, into: &mut [u8], deadline: Instant) -> std::result::Result<usize, Broken> {
        loop {
            // Sleeps in a blocking read while there is time; the last nap polls with a timeout.
            if deadline.saturating_duration_since(Instant::now()) <= NAP {
                self.ready(PollFlags::IN, deadline)?;
            }
            match recv(&self.socket, &mut *into, RecvFlags::empty()) {
                Ok((0, _)) => return Err(Broken::Closed(None)),
                Ok((count, _)) => return Ok(count),
                Err(Errno::AGAIN | Errno::INTR) => interrupt::check().map_err(Broken::Interrupted)?,
                Err(errno) => return Err(Broken::Closed(Some(errno))),
            }
        }
    }

    fn receive(&self, mut into: &mut [u8], deadline: Instant) -> std::result::Result<(), Broken> {
        while !into.is_empty() {
            let count = self.read(into, deadline)?;
            into = &mut into[count..];
        }
        Ok(())
    }

    /// Spins for an answer; returns true if one has started to arrive.
    fn spin(&self) -> bool {
        let until = Instant::now() + SPIN;
        loop {
            let mut byte = [0; 1];
            match recv(&self.socket, &mut byte, RecvFlags::DONTWAIT | RecvFlags::PEEK) {
                Err(Errno::AGAIN) if Instant::now() < until => std::thread::yield_now(),
                outcome => return outcome.is_ok(),
            }
        }
    }

    /// Sends `message` and returns the answer.
    fn exchange(&mut self, message: &Message<'_>, deadline: Instant, eager: &Eagerness) -> std::result::Result<Answer, Broken> {
        message.encode(&mut self.frame).map_err(Broken::Unsent)?;
        self.send(&self.frame, deadline)?;
        if eager.worthwhile() {
            eager.learn(self.spin());
        }
        // Most answers fit in one read.
        let mut start = [0; 512];
        let count = self.read(&mut start, deadline)?;
        if count < LENGTH {
            self.receive(&mut start[count..LENGTH], deadline)?;
        }
        let count = count.max(LENGTH);
        let length = u32::from_le_bytes([start[0], start[1], start[2], start[3]]) as usize;
        if length > MAX_FRAME || count > LENGTH + length {
            return Err(Broken::Garbled(Error::network(format!("an answer of {length} bytes"))));
        }
        let mut body = vec![0; length];
        let have = count - LENGTH;
        body[..have].copy_from_slice(&start[LENGTH..count]);
        self.receive(&mut body[have..], deadline)?;
        if self.frame.capacity() > 1 << 20 {
            self.frame = Vec::new();
        }
        Answer::decode(&Bytes::from(body)).map_err(Broken::Garbled)
    }
}

/// Whether spinning for answers has paid off recently. Shared by all connections of a client.
#[derive(Default)]
struct Eagerness(std::sync::atomic::AtomicI32);

impl Eagerness {
    /// Returns true if a call should spin. After failures, one call in 32 tries again.
    fn worthwhile(&self) -> bool {
        use std::sync::atomic::Ordering::Relaxed;
        self.0.load(Relaxed) >= 0 || self.0.fetch_add(1, Relaxed) == -1
    }

    fn learn(&self, paid: bool) {
        self.0.store(if paid { 0 } else { -32 }, std::sync::atomic::Ordering::Relaxed);
    }
}

/// The client of a server.
pub(super) struct Client {
    address: Address,
    secret: Option<Vec<u8>>,
    idle: Mutex<Vec<Connection>>,
    eager: Eagerness,
    /// Fork generation of the process that made the client; a forked child must not use its parent's connections.
    generation: u64,
}

impl Client {
    /// Makes a client that has reached its server, retrying until `deadline`.
    pub(super) fn connect(address: Address, secret: Option<Vec<u8>>, deadline: Instant) -> Result<Self> {
        let client = Self { address, secret, idle: Mutex::default(), eager: Eagerness::default(), generation: fork::generation() };
        let started = Instant::now();
        let (mut pause, mut interrupts) = (PAUSE, interrupt::Interrupts::new());
        loop {
            match client.reach(deadline, false) {
                Ok(connection) => {
                    lock(&client.idle).push(connection);
                    return Ok(client);
                }
                Err((error, false)) => return Err(error),
                Err((error, true)) if Instant::now() + pause >= deadline => {
                    let waited = started.elapsed().as_secs_f64();
                    return Err(Error::network(format!("{}, for {waited:.1} s (timeout)", error.message)));
                }
                Err((_, true)) => {
                    std::thread::sleep(pause);
                    interrupts.check()?;
                    pause = (pause * 2).min(PAUSE_MAX);
                }
            }
        }
    }

    /// Makes a new connection that the server has admitted. On failure, returns the error and true if a retry makes
    /// sense. `known` is true if the server has been reached before; if it refuses connections now, it has ended.
    fn reach(&self, deadline: Instant, known: bool) -> std::result::Result<Connection, (Error, bool)> {
        let address = &self.address;
        let mut refusals = Vec::new();
        let refused = |name: String, errno: Errno| {
            refusals.push(match (errno, address) {
                (Errno::PERM, Address::Unix(_)) => {
                    format!("{name} is another user's; ranks of several users need a secret, or to say that there is none (secret=none)")
                }
                _ => format!("{name}: {errno}"),
            });
        };
        let Some(socket) = address.connect(refused) else {
            return Err((Error::network(format!("the store cannot be reached: {}", refusals.join("; "))), !known));
        };
        let blocking = rustix::io::ioctl_fionbio(&socket, false).and_then(|()| set_socket_timeout(&socket, Timeout::Recv, Some(NAP)));
        blocking.map_err(|errno| (Error::os("a socket that waits", errno), false))?;
        let connection = Connection { socket, frame: Vec::new(), generation: fork::generation() };
        let secret = self.secret.as_deref();
        let broken = |broken: Broken| match broken {
            Broken::Late if known => (self.broken("a new connection", Broken::Late), false),
            Broken::Late => (Error::network(format!("what listens at {address} says nothing; a torch-symm store would (timeout)")), false),
            // A server that is shutting down accepts and closes.
            Broken::Closed(_) => {
                let whose = match address {
                    Address::Unix(_) => "; a store there serves its own user only",
                    Address::Inet(_) => "",
                };
                (Error::network(format!("what listens at {address} closed the connection{whose}")), true)
            }
            Broken::Unsent(error) | Broken::Interrupted(error) | Broken::Garbled(error) => (error, false),
        };
        let wrong = |error: Error| (Error { message: format!("the store at {address}: {}", error.message), ..error }, false);
        let mut opening = [0; OPENING];
        connection.receive(&mut opening, deadline).map_err(broken)?;
        let (introduction, hello) = Introduction::answer(&opening, secret).map_err(|error| {
            if error.kind == Kind::Config {
                // Only for the server's log.
                let _ = connection.send(&farewell(secret.is_some()), deadline);
            }
            wrong(error)
        })?;
        connection.send(&hello, deadline).map_err(broken)?;
        let mut admission = [0; ADMISSION];
        connection.receive(&mut admission, deadline).map_err(broken)?;
        introduction.admitted(&admission, secret).map_err(wrong)?;
        Ok(connection)
    }

    fn take(&self, deadline: Instant) -> Result<Connection> {
        if self.generation == fork::generation()
            && let Some(connection) = lock(&self.idle).pop()
        {
            return Ok(connection);
        }
        let patience = deadline.min(Instant::now() + PATIENCE);
        let mut pause = PAUSE;
        loop {
            match self.reach(deadline, true) {
                Err((_, true)) if Instant::now() + pause < patience => std::thread::sleep(pause),
                outcome => return outcome.map_err(|(error, _)| error),
            }
            pause = (pause * 2).min(PAUSE_MAX);
        }
    }

    fn give_back(&self, connection: Connection) {
        if self.generation == fork::generation() {
            let mut idle = lock(&self.idle);
            if idle.len() < IDLE {
                idle.push(connection);
            }
        }
    }

    /// Reports to the server that this worker has joined.
    pub(super) fn join(&self, deadline: Instant) -> Result<()> {
        match self.exchange(&Message::Join, deadline)? {
            Ok(_) => Ok(()),
            Err(broken) => Err(self.broken("joining", broken)),
        }
    }

    /// Executes `request`.
    pub(super) fn call(&self, request: &Request<'_>, limit: Duration) -> Result<Reply> {
        let limit = limit.min(MAX_TIMEOUT);
        let message = Message::Call(limit, request.clone());
        let answer = match self.exchange(&message, Instant::now() + limit + GRACE)? {
            Ok(answer) => answer,
            Err(Broken::Late) if request.op.waits() => {
                let all: Vec<usize> = (0..request.keys.len()).collect();
                let error = timed_out(request, Some(limit), &all);
                return Err(Error::timeout(format!("{}; the store at {} did not answer either", error.message, self.address)));
            }
            Err(broken) => {
                let keys = request.keys.first().map_or(String::new(), |key| format!(" of key {key:?}"));
                return Err(self.broken(&format!("{:?}{keys}", request.op), broken));
            }
        };
        match answer {
            Answer::Done(reply) => Ok(reply),
            Answer::Missing(indices) if indices.iter().all(|&index| index < request.keys.len()) => {
                let error = timed_out(request, Some(limit), &indices);
                Err(Error::timeout(format!("{} at {}", error.message, self.address)))
            }
            Answer::Missing(_) => Err(Error::internal(format!("the store at {} missed keys that were not asked for", self.address))),
            Answer::Failed(error) if matches!(error.kind, Kind::Value | Kind::QueueEmpty) => Err(error),
            Answer::Failed(error) => Err(Error { message: format!("the store at {}: {}", self.address, error.message), ..error }),
        }
    }

    fn exchange(&self, message: &Message<'_>, deadline: Instant) -> Result<std::result::Result<Answer, Broken>> {
        let mut connection = self.take(deadline)?;
        let outcome = connection.exchange(message, deadline, &self.eager);
        // After any other failure, the connection may hold part of an answer.
        if let Ok(_) | Err(Broken::Unsent(_)) = &outcome {
            self.give_back(connection);
        }
        Ok(outcome)
    }

    fn broken(&self, what: &str, broken: Broken) -> Error {
        let address = &self.address;
        match broken {
            Broken::Unsent(error) | Broken::Interrupted(error) => error,
            Broken::Late => Error::timeout(format!(
                "the store at {address} did not answer {what} in time (timeout): its process is stopped or overloaded"
            )),
            Broken::Closed(reason) => {
                let reason = reason.map_or_else(String::new, |errno| format!(" ({errno})"));
                Error::network(format!(
                    "the store at {address} closed the connection during {what}{reason}: its process has probably ended"
                ))
            }
            Broken::Garbled(error) => Error::network(format!("the store at {address} answered {what} with {}", error.message)),
        }
    }
}
