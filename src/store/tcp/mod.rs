//! A store on a server that many processes reach, over TCP or a Unix socket.
#![allow(unsafe_code, reason = "a socket that its owner hands over")]

pub mod address;
mod address_owner;
mod client;
pub mod frame;
pub mod limits;
pub mod listen;
pub mod proof;
pub mod server;

use super::request::Request;
use super::table::TableReply;
use super::{DEFAULT_TIMEOUT, MAX_TIMEOUT, Store};
use crate::config::Config;
use crate::error::{Error, Result};
use crate::lock::lock;
use crate::sys::fork::PerProcess;
use address::StoreAddress;
use client::Client;
use limits::ConnectionLimits;
use listen::ListeningSockets;
use rustix::fd::{FromRawFd, OwnedFd, RawFd};
use server::Server;
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

/// A server that several stores of this process may share, with the options under which they find
/// it.
struct SharedServer {
    host: String,
    port: u16,
    require_same_user: bool,
    server: Weak<Server>,
}

impl SharedServer {
    fn requested(&self, options: &TcpOptions) -> bool {
        (self.host.as_str(), self.port, self.require_same_user)
            == (options.host.as_str(), options.port, options.require_same_user)
    }
}

static SERVERS: PerProcess<Mutex<Vec<SharedServer>>> = PerProcess::new(|| Mutex::new(Vec::new()));

/// Options of a store, with the semantics of torch's `TCPStore`.
#[derive(Clone)]
pub struct TcpOptions {
    /// Host name, IPv4 or IPv6 address, `unix:/path` or `unix:@name`. A master listens only there.
    pub host: String,
    /// Port; 0 lets a master choose. Ignored for Unix sockets.
    pub port: u16,
    /// Number of workers, including this one.
    pub world_size: Option<u32>,
    /// True if this store runs the server.
    pub is_master: bool,
    /// Limit for opening the store.
    pub timeout: Duration,
    /// True if a master should return only when all workers have joined.
    pub wait_for_workers: bool,
    /// True if masters of this process with the same host and port share a server.
    pub multi_tenant: bool,
    /// A bound TCP socket to listen on; the store takes ownership of it.
    pub listen_fd: Option<RawFd>,
    /// The secret that clients must know.
    pub secret: Option<Vec<u8>>,
    /// True to serve only processes of this user if there is no secret and `host` is loopback; see
    /// [`StoreAddress::for_same_user`].
    pub require_same_user: bool,
}

/// A client, and on the master also the server.
pub struct TcpStore {
    host: String,
    port: u16,
    client: Client,
    /// The server; declared after `client`, so that it ends after the client's connections.
    _server: Option<Arc<Server>>,
}

impl TcpStore {
    /// Opens the store. `Value` for invalid arguments, `Network` if the server cannot be started or
    /// reached in time, `Config` if the secrets differ, `Timeout` if workers are missing.
    pub fn open(options: TcpOptions) -> Result<Self> {
        let started = Instant::now();
        let deadline = started + options.timeout.min(MAX_TIMEOUT);
        if options.world_size == Some(0) {
            return Err(Error::value("TCPStore world size cannot be 0"));
        }
        if options.secret.as_ref().is_some_and(Vec::is_empty) {
            return Err(Error::value("the secret of a store cannot be empty"));
        }
        // Reads the settings and starts logging.
        Config::get();
        let server = if options.is_master { Some(serve(&options, deadline)?) } else { None };
        let address = match &server {
            Some(server) => server.address().near(),
            None if options.port == 0 && !options.host.starts_with("unix:") => {
                return Err(Error::value("port 0 is for the master, which chooses one"));
            }
            None => endpoint(&options, deadline)?,
        };
        let port = address.port();
        let host = match &address {
            StoreAddress::Inet(_) => options.host,
            StoreAddress::Unix(_) => address.to_string(),
        };
        let client = Client::connect(address, options.secret, deadline)?;
        if let Some(size) = options.world_size.filter(|_| options.wait_for_workers) {
            client.join(deadline)?;
            if let Some(server) = &server
                && let joined = server.await_workers(size, deadline)?
                && joined < size
            {
                return Err(Error::timeout(format!(
                    "timed out after {:.1} s waiting for workers: {joined} of {size} joined the \
                     store at {} (timeout)",
                    started.elapsed().as_secs_f64(),
                    server.address()
                )));
            }
        }
        Ok(Self { host, port, client, _server: server })
    }

    /// Returns the host as given, or the Unix socket.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// Returns the port; 0 for Unix sockets.
    pub fn port(&self) -> u16 {
        self.port
    }
}

impl Store for TcpStore {
    fn call(&self, request: &Request<'_>, limit: Option<Duration>) -> Result<TableReply> {
        self.client.call(request, limit.unwrap_or(DEFAULT_TIMEOUT))
    }
}

/// Returns the address of the server.
fn endpoint(options: &TcpOptions, deadline: Instant) -> Result<StoreAddress> {
    let address = StoreAddress::resolve(&options.host, options.port, deadline)?;
    if options.require_same_user && options.secret.is_none() {
        address.for_same_user()
    } else {
        Ok(address)
    }
}

/// Returns the server that this process already has for such `options`.
fn known(servers: &mut Vec<SharedServer>, options: &TcpOptions) -> Result<Option<Arc<Server>>> {
    servers.retain(|tenancy| tenancy.server.strong_count() > 0);
    let known = servers.iter().find(|tenancy| tenancy.requested(options));
    let Some(server) = known.and_then(|tenancy| tenancy.server.upgrade()) else { return Ok(None) };
    if !server.has_secret(options.secret.as_deref()) {
        return Err(Error::config(format!(
            "the store that this process serves at {} has another secret",
            server.address()
        )));
    }
    Ok(Some(server))
}

fn start(options: &TcpOptions, listeners: ListeningSockets) -> Result<Arc<Server>> {
    let mut limits = ConnectionLimits::default();
    if let Some(bytes) = Config::get().store_bytes {
        limits.stored = bytes;
    }
    Ok(Arc::new(Server::start(listeners, options.secret.clone(), limits)?))
}

fn serve(options: &TcpOptions, deadline: Instant) -> Result<Arc<Server>> {
    if let Some(fd) = options.listen_fd {
        // SAFETY: the caller transfers ownership of the descriptor, as `TcpOptions::listen_fd`
        // requires; it is taken at most once.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        return start(options, ListeningSockets::adopt(fd)?);
    }
    let shared = options.multi_tenant && options.port != 0;
    if shared && let Some(server) = known(&mut lock(SERVERS.get()), options)? {
        return Ok(server);
    }
    // Without the lock, because a resolver may take long.
    let address = endpoint(options, deadline)?;
    let mut servers = lock(SERVERS.get());
    if shared && let Some(server) = known(&mut servers, options)? {
        return Ok(server);
    }
    let server = start(options, ListeningSockets::at(&address)?)?;
    if shared {
        servers.push(SharedServer {
            host: options.host.clone(),
            port: options.port,
            require_same_user: options.require_same_user,
            server: Arc::downgrade(&server),
        });
    }
    Ok(server)
}
