//! A client: a pool of connections to one server, each used by one call at a time.

use super::address::StoreAddress;
use super::frame::{ClientFrame, LENGTH, ServerFrame};
use super::limits::MAX_FRAME;
use super::proof::{ADMISSION, ClientHello, OPENING, farewell};
use crate::error::{Error, ErrorKind, Result};
use crate::lock::lock;
use crate::store::request::Request;
use crate::store::table::TableReply;
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
const SERVER_TIMEOUT_GRACE: Duration = Duration::from_millis(80);

/// How long a call spins for its answer before it sleeps, if spinning has paid off recently.
const SPIN: Duration = Duration::from_micros(40);

/// Maximum sleep of a read before it checks the clock and pending signals.
const SIGNAL_POLL: Duration = interrupt::SIGNAL_POLL;

/// Maximum number of idle connections kept. Concurrent calls use one connection each.
const IDLE: usize = 16;

/// First and longest pause between attempts to reach a server that has not started yet.
const CONNECT_RETRY_MIN: Duration = Duration::from_millis(1);
const CONNECT_RETRY_MAX: Duration = Duration::from_millis(50);

/// A connection to the server.
struct ServerConnection {
    socket: OwnedFd,
    frame: Vec<u8>,
    /// Fork generation of the process that made the connection.
    generation: u64,
}

impl Drop for ServerConnection {
    fn drop(&mut self) {
        // Ends the connection even if a forked child holds a copy of the file descriptor, but not
        // in the child.
        if self.generation == fork::generation() {
            let _ = shutdown(&self.socket, Shutdown::Both);
        }
    }
}

/// How long a client that needs another connection retries while the server closes each one at
/// once. A server that is overloaded by unidentified peers may take the client for one of them.
const RECONNECT_WINDOW: Duration = Duration::from_secs(1);

/// Why an exchange ended without an answer.
enum ExchangeError {
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

impl ServerConnection {
    /// Waits until the socket is ready.
    fn ready(&self, what: PollFlags, deadline: Instant) -> std::result::Result<(), ExchangeError> {
        loop {
            let remaining = deadline.saturating_duration_since(Instant::now());
            if remaining.is_zero() {
                return Err(ExchangeError::Late);
            }
            let mut fds = [PollFd::new(&self.socket, what)];
            match poll(&mut fds, Timespec::try_from(remaining.min(SIGNAL_POLL)).ok().as_ref()) {
                Ok(0) | Err(Errno::INTR) => {
                    interrupt::check().map_err(ExchangeError::Interrupted)?
                }
                Ok(_) => return Ok(()),
                Err(errno) => return Err(ExchangeError::Closed(Some(errno))),
            }
        }
    }

    fn send(&self, mut bytes: &[u8], deadline: Instant) -> std::result::Result<(), ExchangeError> {
        while !bytes.is_empty() {
            match send(&self.socket, bytes, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
                Ok(count) => bytes = &bytes[count..],
                Err(Errno::AGAIN | Errno::INTR) => self.ready(PollFlags::OUT, deadline)?,
                Err(errno) => return Err(ExchangeError::Closed(Some(errno))),
            }
        }
        Ok(())
    }

    /// Reads at least one byte, and at most as many as fit into `into`.
    fn read(
        &self,
        into: &mut [u8],
        deadline: Instant,
    ) -> std::result::Result<usize, ExchangeError> {
        loop {
            // Sleeps in a blocking read while more than `SIGNAL_POLL` remains; the last sleep is a
            // poll with a timeout.
            if deadline.saturating_duration_since(Instant::now()) <= SIGNAL_POLL {
                self.ready(PollFlags::IN, deadline)?;
            }
            match recv(&self.socket, &mut *into, RecvFlags::empty()) {
                Ok((0, _)) => return Err(ExchangeError::Closed(None)),
                Ok((count, _)) => return Ok(count),
                Err(Errno::AGAIN | Errno::INTR) => {
                    interrupt::check().map_err(ExchangeError::Interrupted)?
                }
                Err(errno) => return Err(ExchangeError::Closed(Some(errno))),
            }
        }
    }

    fn receive(
        &self,
        mut into: &mut [u8],
        deadline: Instant,
    ) -> std::result::Result<(), ExchangeError> {
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
    fn exchange(
        &mut self,
        message: &ClientFrame<'_>,
        deadline: Instant,
        eager: &SpinHistory,
    ) -> std::result::Result<ServerFrame, ExchangeError> {
        message.encode(&mut self.frame).map_err(ExchangeError::Unsent)?;
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
            return Err(ExchangeError::Garbled(Error::network(format!(
                "an answer of {length} bytes"
            ))));
        }
        let mut body = vec![0; length];
        let have = count - LENGTH;
        body[..have].copy_from_slice(&start[LENGTH..count]);
        self.receive(&mut body[have..], deadline)?;
        if self.frame.capacity() > 1 << 20 {
            self.frame = Vec::new();
        }
        ServerFrame::decode(&Bytes::from(body)).map_err(ExchangeError::Garbled)
    }
}

/// Records whether spinning for answers has been worthwhile recently. Shared by all connections of
/// a client.
#[derive(Default)]
struct SpinHistory(std::sync::atomic::AtomicI32);

impl SpinHistory {
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
    address: StoreAddress,
    secret: Option<Vec<u8>>,
    idle: Mutex<Vec<ServerConnection>>,
    eager: SpinHistory,
    /// Fork generation of the process that made the client; a forked child must not use its
    /// parent's connections.
    generation: u64,
}

impl Client {
    /// Makes a client that has reached its server, retrying until `deadline`.
    pub(super) fn connect(
        address: StoreAddress,
        secret: Option<Vec<u8>>,
        deadline: Instant,
    ) -> Result<Self> {
        let client = Self {
            address,
            secret,
            idle: Mutex::default(),
            eager: SpinHistory::default(),
            generation: fork::generation(),
        };
        let started = Instant::now();
        let (mut pause, mut interrupts) = (CONNECT_RETRY_MIN, interrupt::Interrupts::new());
        loop {
            match client.reach(deadline, false) {
                Ok(connection) => {
                    lock(&client.idle).push(connection);
                    return Ok(client);
                }
                Err((error, false)) => return Err(error),
                Err((error, true)) if Instant::now() + pause >= deadline => {
                    let waited = started.elapsed().as_secs_f64();
                    return Err(Error::network(format!(
                        "{}, for {waited:.1} s (timeout)",
                        error.message
                    )));
                }
                Err((_, true)) => {
                    std::thread::sleep(pause);
                    interrupts.check()?;
                    pause = (pause * 2).min(CONNECT_RETRY_MAX);
                }
            }
        }
    }

    /// Makes a new connection that the server has admitted. On failure, returns the error and true
    /// if a retry makes sense. `known` is true if the server has been reached before; if it refuses
    /// connections now, it has ended.
    fn reach(
        &self,
        deadline: Instant,
        known: bool,
    ) -> std::result::Result<ServerConnection, (Error, bool)> {
        let address = &self.address;
        let mut refusals = Vec::new();
        let refused = |name: String, errno: Errno| {
            refusals.push(match (errno, address) {
                (Errno::PERM, StoreAddress::Unix(_)) => {
                    format!(
                        "{name} is another user's; ranks of several users need a secret, or to \
                        say that there is none (secret=none)"
                    )
                }
                _ => format!("{name}: {errno}"),
            });
        };
        let socket = address.connect(deadline, refused).map_err(|error| (error, false))?;
        let Some(socket) = socket else {
            return Err((
                Error::network(format!("the store cannot be reached: {}", refusals.join("; "))),
                !known,
            ));
        };
        let blocking = rustix::io::ioctl_fionbio(&socket, false)
            .and_then(|()| set_socket_timeout(&socket, Timeout::Recv, Some(SIGNAL_POLL)));
        blocking.map_err(|errno| (Error::os("a socket that waits", errno), false))?;
        let connection =
            ServerConnection { socket, frame: Vec::new(), generation: fork::generation() };
        let secret = self.secret.as_deref();
        let broken = |broken: ExchangeError| match broken {
            ExchangeError::Late if known => {
                (self.broken("a new connection", ExchangeError::Late), false)
            }
            ExchangeError::Late => (
                Error::network(format!(
                    "what listens at {address} says nothing; a torch-symm store would (timeout)"
                )),
                false,
            ),
            // A server that is shutting down accepts connections and closes them.
            ExchangeError::Closed(_) => {
                let whose = match address {
                    StoreAddress::Unix(_) => "; a store there serves its own user only",
                    StoreAddress::Inet(_) => "",
                };
                (
                    Error::network(format!(
                        "what listens at {address} closed the connection{whose}"
                    )),
                    true,
                )
            }
            ExchangeError::Unsent(error)
            | ExchangeError::Interrupted(error)
            | ExchangeError::Garbled(error) => (error, false),
        };
        let wrong = |error: Error| {
            (
                Error { message: format!("the store at {address}: {}", error.message), ..error },
                false,
            )
        };
        let mut opening = [0; OPENING];
        connection.receive(&mut opening, deadline).map_err(broken)?;
        let (introduction, hello) = ClientHello::answer(&opening, secret).map_err(|error| {
            if error.kind == ErrorKind::Config {
                // This message is only for the server's log.
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

    fn take(&self, deadline: Instant) -> Result<ServerConnection> {
        if self.generation == fork::generation()
            && let Some(connection) = lock(&self.idle).pop()
        {
            return Ok(connection);
        }
        let patience = deadline.min(Instant::now() + RECONNECT_WINDOW);
        let mut pause = CONNECT_RETRY_MIN;
        loop {
            match self.reach(deadline, true) {
                Err((_, true)) if Instant::now() + pause < patience => std::thread::sleep(pause),
                outcome => return outcome.map_err(|(error, _)| error),
            }
            pause = (pause * 2).min(CONNECT_RETRY_MAX);
        }
    }

    fn give_back(&self, connection: ServerConnection) {
        if self.generation == fork::generation() {
            let mut idle = lock(&self.idle);
            if idle.len() < IDLE {
                idle.push(connection);
            }
        }
    }

    /// Reports to the server that this worker has joined.
    pub(super) fn join(&self, deadline: Instant) -> Result<()> {
        match self.exchange(&ClientFrame::Join, deadline)? {
            Ok(_) => Ok(()),
            Err(broken) => Err(self.broken("joining", broken)),
        }
    }

    /// Executes `request`.
    pub(super) fn call(&self, request: &Request<'_>, limit: Duration) -> Result<TableReply> {
        let limit = limit.min(MAX_TIMEOUT);
        let message = ClientFrame::Call(limit, request.clone());
        let answer = match self.exchange(&message, Instant::now() + limit + SERVER_TIMEOUT_GRACE)? {
            Ok(answer) => answer,
            Err(ExchangeError::Late) if request.op.waits() => {
                let all: Vec<usize> = (0..request.keys.len()).collect();
                let error = timed_out(request, Some(limit), &all);
                return Err(Error::timeout(format!(
                    "{}; the store at {} did not answer either",
                    error.message, self.address
                )));
            }
            Err(broken) => {
                let keys =
                    request.keys.first().map_or(String::new(), |key| format!(" of key {key:?}"));
                return Err(self.broken(&format!("{:?}{keys}", request.op), broken));
            }
        };
        match answer {
            ServerFrame::Done(reply) => Ok(reply),
            ServerFrame::Missing(indices)
                if indices.iter().all(|&index| index < request.keys.len()) =>
            {
                let error = timed_out(request, Some(limit), &indices);
                Err(Error::timeout(format!("{} at {}", error.message, self.address)))
            }
            ServerFrame::Missing(_) => Err(Error::internal(format!(
                "the store at {} missed keys that were not asked for",
                self.address
            ))),
            ServerFrame::Failed(error)
                if matches!(error.kind, ErrorKind::Value | ErrorKind::QueueEmpty) =>
            {
                Err(error)
            }
            ServerFrame::Failed(error) => Err(Error {
                message: format!("the store at {}: {}", self.address, error.message),
                ..error
            }),
        }
    }

    fn exchange(
        &self,
        message: &ClientFrame<'_>,
        deadline: Instant,
    ) -> Result<std::result::Result<ServerFrame, ExchangeError>> {
        let mut connection = self.take(deadline)?;
        let outcome = connection.exchange(message, deadline, &self.eager);
        // After any other failure, the connection may hold part of an answer and is not used again.
        if let Ok(_) | Err(ExchangeError::Unsent(_)) = &outcome {
            self.give_back(connection);
        }
        Ok(outcome)
    }

    fn broken(&self, what: &str, broken: ExchangeError) -> Error {
        let address = &self.address;
        match broken {
            ExchangeError::Unsent(error) | ExchangeError::Interrupted(error) => error,
            ExchangeError::Late => Error::timeout(format!(
                "the store at {address} did not answer {what} in time (timeout): its process is \
                 stopped or overloaded"
            )),
            ExchangeError::Closed(reason) => {
                let reason = reason.map_or_else(String::new, |errno| format!(" ({errno})"));
                Error::network(format!(
                    "the store at {address} closed the connection during {what}{reason}: its \
                     process has probably ended"
                ))
            }
            ExchangeError::Garbled(error) => Error::network(format!(
                "the store at {address} answered {what} with {}",
                error.message
            )),
        }
    }
}
