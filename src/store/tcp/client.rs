//! A client: connections to one server, each used by one call at a time.

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

/// Time after a call's limit within which the server's own word that it has passed may come.
const GRACE: Duration = Duration::from_millis(80);

/// Time that a call looks for its answer before it sleeps, if that has paid of late.
const SPIN: Duration = Duration::from_micros(40);

/// Longest sleep of a read; then it looks at the clock, and for signals.
const NAP: Duration = interrupt::LOOK;

/// Most idle connections kept; each is one thread's that has called at the same time as others.
const IDLE: usize = 16;

/// First and longest pause between attempts to reach a server that is not there yet.
const PAUSE: Duration = Duration::from_millis(1);
const PAUSE_MAX: Duration = Duration::from_millis(50);

/// Connection: one side of a conversation.
struct Connection {
    socket: OwnedFd,
    frame: Vec<u8>,
    /// Generation of the process that made the connection.
    generation: u64,
}

impl Drop for Connection {
    fn drop(&mut self) {
        // Ends the conversation even if a forked child holds a copy of the descriptor, and not if this is the child.
        if self.generation == fork::generation() {
            let _ = shutdown(&self.socket, Shutdown::Both);
        }
    }
}

/// Time for which a client whose calls need one more connection tries again while the server closes it at once. A server that is beset by
/// unidentified peers may take the client for one of them.
const PATIENCE: Duration = Duration::from_secs(1);

/// Failure of an exchange that has ended without an answer.
enum Broken {
    /// The exchange failed before anything was sent.
    Unsent(Error),
    /// The program wants to wait no longer.
    Interrupted(Error),
    /// The time is over.
    Late,
    /// Closed by the other end, with the system's reason if there is one.
    Closed(Option<Errno>),
    /// An answer that is none.
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

    /// Reads something, at most `into` and at least a byte.
    fn read(&self, into: &mut [u8], deadline: Instant) -> std::result::Result<usize, Broken> {
        loop {
            // Asleep in one call while there is time; the last nap is measured.
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

    /// Looks for an answer without sleeping; whether one has begun to come.
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
        // Most answers fit one read.
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

/// Whether spinning for answers has paid of late. Shared by all connections of a client.
#[derive(Default)]
struct Eagerness(std::sync::atomic::AtomicI32);

impl Eagerness {
    /// Says whether to try again: after failures only one call in 32 does.
    fn worthwhile(&self) -> bool {
        use std::sync::atomic::Ordering::Relaxed;
        self.0.load(Relaxed) >= 0 || self.0.fetch_add(1, Relaxed) == -1
    }

    fn learn(&self, paid: bool) {
        self.0.store(if paid { 0 } else { -32 }, std::sync::atomic::Ordering::Relaxed);
    }
}

/// Calls a server.
pub(super) struct Client {
    address: Address,
    secret: Option<Vec<u8>>,
    idle: Mutex<Vec<Connection>>,
    eager: Eagerness,
    /// Generation of the process that made the client; a forked child must not speak on its parent's connections.
    generation: u64,
}

impl Client {
    /// A client that has reached its server, for which it waits until `deadline`.
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

    /// A new connection that the server has admitted; else why not, and whether to try again makes sense.
    /// `known`: whether it has been reached before; if it is not there now, it has gone.
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
            // A server that is about to end accepts and closes.
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

    /// Tells the server that one more worker has come.
    pub(super) fn join(&self, deadline: Instant) -> Result<()> {
        match self.exchange(&Message::Join, deadline)? {
            Ok(_) => Ok(()),
            Err(broken) => Err(self.broken("joining", broken)),
        }
    }

    /// Does what `request` says.
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
        // After anything else the conversation is out of step.
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
