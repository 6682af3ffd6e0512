//! A group whose ranks are on several hosts: shared memory inside each, a backend of torch between them.
//!
//! Inside a host it is a [`Group`]. Between hosts there are [`rail`]s, one for each local index that every host has, which move bytes and
//! nothing else: what is exchanged, in which order, and every sum is decided here. `docs/design/several-hosts.md` shows the steps.
//!
//! - [`rail`]: what a backend does; [`header`](mod@header): what ranks compare
//! - [`partials`](mod@partials): the type in which sums travel; [`chosen`](mod@chosen): what all ranks go by alike
//! - [`cpu`](mod@cpu): carries out the programs of [`two_level`](crate::coll::two_level) for CPU tensors; [`executor`](mod@executor):
//!   such a call under way; [`opening`](mod@opening): how it begins; [`short`](mod@short): all of it, if it is short
//! - [`cuda`](mod@cuda): CUDA tensors; [`finding`](mod@finding): whether a group is on several hosts; [`joining`](mod@joining): how it forms
//! - [`messages`](mod@messages): sends and receives between hosts; [`any_source`](mod@any_source): receives from any rank
//! - [`traffic`](mod@traffic): bytes by rail and peer
//! - [`shared`](mod@shared): how a failure ends the group on all hosts; [`news`](mod@news): how they hear of it

mod any_source;
pub mod chosen;
mod cpu;
pub mod cuda;
mod executor;
pub mod finding;
mod header;
mod held;
pub mod joining;
pub mod messages;
mod monitored;
mod news;
mod opening;
pub mod partials;
pub mod rail;
mod refusal;
mod shared;
mod short;
#[cfg(test)]
mod tests;
pub mod traffic;

use crate::coll::call::Call;
use crate::completion::Completion;
use crate::control::ControlBlock;
use crate::engine::{Engine, Run};
use crate::error::{Error, Result};
use crate::group::Group;
use crate::host_map::HostMap;
use crate::messages::{self as near, Message};
use crate::rank::Rank;
use crate::store::Store;
use crate::sync::limit::Limit;
use any_source::Twofold;
use cuda::Cuda;
use executor::Executor;
use messages::links::Links;
use messages::{Around, Messages, Names};
use news::Waiting;
use rail::Life;
use refusal::Refusals;
use shared::Shared;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};
use traffic::Path;

/// A joined group on several hosts.
pub struct HostsGroup {
    inner: Arc<Group>,
    layout: Arc<HostMap>,
    rank: Rank,
    engine: Arc<Engine<Runner>>,
    shared: Arc<Shared>,
    refusals: Arc<Refusals>,
    /// Messages between hosts, where there are links for them.
    messages: OnceLock<Arc<Messages>>,
    twofold: Twofold,
    /// CUDA tensors, where there are backends for them.
    cuda: Option<Cuda>,
    /// Number of monitored barriers.
    monitored: AtomicU64,
    life: Life,
}

/// What messages between hosts know of their group.
struct Whole {
    inner: Arc<Group>,
    layout: Arc<HostMap>,
    shared: Arc<Shared>,
    engine: Arc<Engine<Runner>>,
}

impl Around for Whole {
    fn calls(&self) -> u64 {
        self.engine.sequence() + self.inner.recorder().messages()
    }

    fn error(&self) -> Option<Error> {
        self.inner.error()
    }

    fn fail(&self, error: Error) -> Error {
        self.shared.fail(&self.inner, error)
    }

    fn cause(&self, peer: Rank) -> Option<Error> {
        self.shared.cause(&self.inner, self.layout.local(peer), Duration::MAX)
    }
}

/// Runs a group's collectives, one at a time.
struct Runner {
    inner: Arc<Group>,
    layout: Arc<HostMap>,
    shared: Arc<Shared>,
    rank: Rank,
    sequence: u64,
}

impl Run for Runner {
    fn control(&self) -> &ControlBlock {
        self.inner.control()
    }

    fn sequence(&self) -> u64 {
        self.sequence
    }

    fn served(&self) -> &'static str {
        "two_level"
    }

    fn inside(&self) -> bool {
        false
    }

    fn run(&mut self, call: &Call<'_>, limit: &Limit, entry: u64) -> Result<()> {
        if let Some(failure) = self.control().failure() {
            return Err(failure);
        }
        self.sequence += 1;
        limit.start();
        let Self { inner, layout, shared, .. } = &*self;
        let executor = Executor { inner, layout, shared, rank: self.rank, call, asked: call, limit, sequence: self.sequence, entry };
        inner.control().run_for(executor.about());
        let since = Instant::now();
        let waiting = Waiting { number: self.sequence, name: call.op.name(), since, phase_since: since, on_rail: false };
        shared.current.set(Some(waiting));
        let outcome = executor.run();
        shared.current.set(None);
        shared.traffic.ended(&[Path::Rail(layout.local(self.rank))]);
        outcome.map_err(|error| shared.fail(inner, error))
    }
}

impl HostsGroup {
    /// Makes messages between hosts go by `links`, whose ranks meet through `store`.
    fn send_by(&self, links: Arc<dyn Links>, store: Arc<dyn Store>, globals: Vec<i32>) {
        let (inner, layout, shared) = (Arc::clone(&self.inner), Arc::clone(&self.layout), Arc::clone(&self.shared));
        let whole = Whole { inner, layout, shared, engine: Arc::clone(&self.engine) };
        let names = Names {
            layout: Arc::clone(&self.layout),
            me: self.rank,
            group: self.inner.control().name().to_owned(),
            life: self.life,
            globals,
        };
        let _ = self.messages.set(Messages::new(links, Box::new(whole), store, names));
    }

    /// Runs `calls` in order behind everything submitted before, and returns when they are done.
    pub fn run(&self, calls: &[Call<'_>], timeout: Option<Duration>) -> Result<()> {
        self.check()?;
        self.engine.run(calls, timeout.unwrap_or_else(|| self.inner.timeout()))
    }

    /// Queues `calls`; `completion` gets the outcome. The ticket is for `wait`.
    pub fn submit(&self, calls: &[Call<'_>], timeout: Option<Duration>, completion: Completion) -> Result<u64> {
        self.check()?;
        self.engine.submit(calls, timeout.unwrap_or_else(|| self.inner.timeout()), completion)
    }

    /// Refuses a group that this process may not use any more.
    fn check(&self) -> Result<()> {
        self.inner.check_open()?;
        self.refusals.make_up();
        Ok(())
    }

    /// Starts a send.
    pub fn send(&self, message: Message, completion: Completion) -> Result<u64> {
        self.start(true, message, completion)
    }

    /// Starts a receive.
    pub fn recv(&self, message: Message, completion: Completion) -> Result<u64> {
        self.start(false, message, completion)
    }

    fn start(&self, send: bool, message: Message, completion: Completion) -> Result<u64> {
        if let Some((peer, messages)) = self.far(&message) {
            let global = messages.global(peer);
            self.shared.traffic.message(Path::Link(global));
            let shown = message.with_peer(Some(global));
            return self.inner.recorded(send, &shown, true, completion, |timeout, completion| {
                if send { messages.send(peer, message, timeout, completion) } else { messages.recv(peer, message, timeout, completion) }
            });
        }
        if let (false, None, Some(messages)) = (send, message.peer, self.messages.get()) {
            return self.recv_any(messages, message, completion);
        }
        let (message, completion) = self.on_this_host(if send { "send" } else { "recv" }, message, completion)?;
        if send { self.inner.send(message, completion) } else { self.inner.recv(message, completion) }
    }

    /// The other rank of a message between hosts, and what carries it.
    fn far(&self, message: &Message) -> Option<(Rank, &Arc<Messages>)> {
        let away = |peer: &Rank| peer.index() < self.layout.size() && self.layout.host(*peer) != self.layout.host(self.rank);
        Some((message.peer.filter(away)?, self.messages.get()?))
    }

    /// `message` and `completion` in the numbers of this host's ranks.
    fn on_this_host(&self, what: &str, message: Message, completion: Completion) -> Result<(Message, Completion)> {
        let host = self.layout.host(self.rank);
        let me = || self.layout.describe(self.rank);
        let Some(peer) = message.peer else {
            let name = self.inner.control().name();
            return Err(Error::not_implemented(format!(
                "{what}: {} cannot receive from any rank of group \"{name}\": nothing carries messages between its hosts",
                me()
            )));
        };
        if peer.index() >= self.layout.size() {
            return Err(Error::value(format!("rank {peer} is outside the group of {} ranks", self.layout.size())));
        }
        if self.layout.host(peer) != host {
            let peer = self.layout.describe(peer);
            return Err(Error::not_implemented(format!("{what}: nothing carries messages between {} and {peer}", me())));
        }
        let peer = Some(Rank(self.layout.local(peer) as u32));
        let layout = Arc::clone(&self.layout);
        let member = move |local: Rank| layout.members(host)[local.index()];
        let completion = Completion::new(move |outcome, source| completion.call(outcome, source.map(member)));
        Ok((message.with_peer(peer), completion))
    }

    /// Returns once the completion of `ticket` has been called; fails with `WaitTimeout` after `timeout`.
    pub fn wait(&self, ticket: u64, timeout: Option<Duration>) -> Result<()> {
        self.inner.check_process()?;
        match self.messages.get() {
            _ if ticket & near::TICKET_BIT != 0 => {
                let since = Instant::now();
                self.inner.wait(ticket, timeout)?;
                self.wait_away(ticket, timeout.map(|limit| limit.saturating_sub(since.elapsed())))
            }
            Some(messages) if ticket & messages::TICKET_BIT != 0 => messages.wait(ticket, timeout),
            Some(_) | None => self.engine.wait(ticket, timeout),
        }
    }

    /// Moves transfers and calls along without blocking.
    pub fn progress(&self) {
        if !self.shared.is_inherited() {
            self.engine.hurry();
        }
        self.inner.progress();
    }

    /// A collective was refused on this rank: ranks that wait for it are told, on this host and on others.
    pub fn refuse(&self, text: String) {
        if self.inner.check_open().is_ok() {
            self.refusals.add(text.clone());
            self.inner.refuse(text);
        }
    }

    /// Has nothing to do: no window is on several hosts.
    pub fn refuse_operator(&self, _text: String) {}

    /// Refuses a send to `peer`, or a receive from it; `None`: from any rank. Who waits for that learns so.
    pub fn refuse_message(&self, send: bool, peer: Option<Rank>, tag: i32, text: String) {
        if peer.is_some_and(|peer| peer.index() >= self.layout.size()) {
            return;
        }
        let far = peer.is_none_or(|peer| self.layout.host(peer) != self.layout.host(self.rank));
        if let Some(messages) = self.messages.get().filter(|_| far) {
            messages.refuse(peer, send, tag, text.clone());
        }
        if peer.is_none() || !far {
            self.inner.refuse_message(send, peer.map(|peer| Rank(self.layout.local(peer) as u32)), tag, text);
        }
    }

    /// The limit of calls that bring none.
    pub fn timeout(&self) -> Duration {
        self.inner.timeout()
    }

    /// Changes the limit of calls that bring none.
    pub fn set_timeout(&self, timeout: Duration) {
        self.inner.set_timeout(timeout);
    }

    /// The first failure, or the death of a rank of this host that no call has run into yet.
    pub fn error(&self) -> Option<Error> {
        self.inner.error()
    }

    /// The first failure.
    pub fn failure(&self) -> Option<Error> {
        self.inner.failure()
    }

    /// Leaves the group once what was submitted is done, at the latest after the timeout. Idempotent.
    pub fn shutdown(&self) {
        self.leave(self.timeout(), "");
    }

    /// The error of something that groups on several hosts do not have yet.
    pub fn lacks(&self, what: &str) -> Error {
        let hosts: Vec<String> = (0..self.layout.hosts()).map(|host| self.layout.name_host(host)).collect();
        let (name, hosts) = (self.inner.control().name(), hosts.join(", "));
        Error::config(format!(
            "group \"{name}\" is on several hosts: {hosts}; {what} within one host only, and torch_symm.host_group(group) is the part on \
             this one"
        ))
    }

    /// Fails the group on every rank; blocked calls return at once.
    pub fn abort(&self) {
        if self.inner.check_process().is_err() {
            return;
        }
        self.inner.abort();
        if let Some(failure) = self.inner.control().failure() {
            if let Some(messages) = self.messages.get() {
                messages.close(&failure);
            }
            self.shared.fail(&self.inner, failure);
        }
    }

    /// Leaves the group once what was submitted is done; what is not after `limit` fails, here and on its peers. Idempotent.
    pub fn leave(&self, limit: Duration, farewell: &str) {
        if self.shared.is_inherited() {
            std::mem::forget(self.messages.get().map(Arc::clone));
            return;
        }
        if !self.shared.leave() {
            return;
        }
        let since = Instant::now();
        if !self.engine.drain(limit) {
            let (me, name) = (self.layout.describe(self.rank), self.inner.control().name());
            self.shared.fail(&self.inner, Error::aborted(format!("{me} left group \"{name}\" with calls under way")));
        }
        self.forget_keys();
        if let Some(messages) = self.messages.get() {
            messages.leave(limit.saturating_sub(since.elapsed()));
        }
        self.inner.leave(limit.saturating_sub(since.elapsed()).max(Duration::from_millis(1)), farewell);
        self.engine.stop();
        if let Some(cuda) = &self.cuda {
            cuda.close(limit.saturating_sub(since.elapsed()));
        }
        if let Some(failure) = self.inner.failure() {
            self.shared.tell(&failure);
        }
        self.shared.release(&self.inner.control().departure(Rank(self.layout.local(self.rank) as u32)).unwrap_or_default());
    }

    /// This rank, and the number of ranks.
    pub fn place(&self) -> (Rank, usize) {
        (self.rank, self.layout.size())
    }

    /// Number of collectives asked for.
    pub fn sequence(&self) -> u64 {
        self.engine.sequence()
    }

    /// The ranks of this host.
    pub fn inner(&self) -> &Group {
        &self.inner
    }
}

impl Drop for HostsGroup {
    fn drop(&mut self) {
        self.shutdown();
    }
}
