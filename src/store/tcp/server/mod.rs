//! The server: one thread, which never blocks on a client.
//!
//! It uses mio, the thinnest well-maintained event loop, which offers socket readiness and nothing
//! more. A runtime such as tokio would add tasks, timers and threads to one loop over one table.

mod admission;
mod connection;
mod deadlines;
mod event_loop;
mod send_pool;
mod service;

use super::address::StoreAddress;
use super::limits::ConnectionLimits;
use super::listen::ListeningSockets;
use crate::error::{Error, Result};
use crate::lock::{lock, unpoisoned};
use crate::sys::{fork, interrupt, process, thread};
use event_loop::EventLoop;
use mio::{Poll, Token, Waker};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::Instant;

/// The token of the waker; listeners and connections have lower ones.
const WAKER: Token = Token(usize::MAX);

/// Number of file descriptors that the rest of the process may need.
const SPARE_DESCRIPTORS: u64 = 4096;

/// The state that the loop shares with the threads of the process.
#[derive(Default)]
struct ServerState {
    stop: AtomicBool,
    joined: Mutex<u32>,
    more: Condvar,
}

impl ServerState {
    fn join(&self) {
        let mut joined = lock(&self.joined);
        *joined += 1;
        self.more.notify_all();
    }
}

/// A running server, which ends when this is dropped.
pub struct Server {
    address: StoreAddress,
    secret: Option<Vec<u8>>,
    shared: Arc<ServerState>,
    waker: Waker,
    thread: Option<JoinHandle<()>>,
    /// Fork generation of the process in which the thread runs.
    generation: u64,
}

impl Server {
    /// Starts a server on `listeners`. If there is a `secret`, it serves only clients that know it.
    pub fn start(
        listeners: ListeningSockets,
        secret: Option<Vec<u8>>,
        limits: ConnectionLimits,
    ) -> Result<Self> {
        let fail = |error: std::io::Error| Error::internal(format!("the store's server: {error}"));
        let address = listeners.address.clone();
        if !address.local() && secret.is_none() {
            log::warn!(
                "the store listens at {address}, open to the network, without a secret: whoever \
                 reaches it can read and change every key; \
                 give it a secret, or a loopback address"
            );
        }
        process::raise_descriptor_limit(
            (limits.clients + limits.unidentified) as u64 + SPARE_DESCRIPTORS,
        );
        let poll = Poll::new().map_err(fail)?;
        let waker = Waker::new(poll.registry(), WAKER).map_err(fail)?;
        let shared = Arc::<ServerState>::default();
        let event_loop = EventLoop::new(poll, listeners, secret.clone(), limits, shared.clone())
            .map_err(fail)?;
        let thread = thread::spawn("symm-store", None, move || event_loop.run())?;
        Ok(Self {
            address,
            secret,
            shared,
            waker,
            thread: Some(thread),
            generation: fork::generation(),
        })
    }

    /// Returns the address on which the server listens.
    pub fn address(&self) -> &StoreAddress {
        &self.address
    }

    /// Returns true if the server requires exactly this secret.
    pub fn has_secret(&self, secret: Option<&[u8]>) -> bool {
        self.secret.as_deref() == secret
    }

    /// Waits until `count` workers have joined or the deadline has passed, and returns how many
    /// have joined.
    pub fn await_workers(&self, count: u32, deadline: Instant) -> Result<u32> {
        loop {
            let remaining = deadline.saturating_duration_since(Instant::now());
            let joined = lock(&self.shared.joined);
            let few = |joined: &mut u32| *joined < count;
            let wait = self.shared.more.wait_timeout_while(
                joined,
                remaining.min(interrupt::SIGNAL_POLL),
                few,
            );
            let joined = *unpoisoned(wait).0;
            if joined >= count || remaining.is_zero() {
                return Ok(joined);
            }
            interrupt::check()?;
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if self.generation != fork::generation() {
            // In a forked child: the thread belongs to the parent.
            std::mem::forget(self.thread.take());
            return;
        }
        self.shared.stop.store(true, Ordering::Release);
        if let (Ok(()), Some(thread)) = (self.waker.wake(), self.thread.take())
            && thread.join().is_err()
        {
            log::error!("the store's server at {} had panicked", self.address);
        }
    }
}
