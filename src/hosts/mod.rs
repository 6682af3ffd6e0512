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
//! - [`traffic`](mod@traffic): bytes by rail and peer
//! - [`shared`](mod@shared): how a failure ends the group on all hosts; [`news`](mod@news): how they hear of it

pub mod chosen;
mod cpu;
pub mod cuda;
mod executor;
pub mod finding;
mod header;
mod held;
pub mod joining;
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
use crate::coll::message::Message;
use crate::completion::{Completion, Observer};
use crate::control::ControlBlock;
use crate::engine::{Engine, Run};
use crate::error::{Error, Result};
use crate::group::Group;
use crate::host_map::HostMap;
use crate::messages::links::Links;
use crate::messages::{Far, TICKET_BIT};
use crate::rank::Rank;
use crate::store::Store;
use crate::sync::limit::Limit;
use crate::trace::Recorder;
use cuda::Cuda;
use executor::Executor;
use news::Waiting;
use rail::Life;
use refusal::Refusals;
use shared::Shared;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Condvar};
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
    /// Ranks of the members in the default group; empty: the same as here.
    globals: Vec<i32>,
    /// CUDA tensors, where there are backends for them.
    cuda: Option<Cuda>,
    /// Number of monitored barriers.
    monitored: AtomicU64,
    life: Life,
}

/// The record of a message whose peer it knows by its rank in the default group.
struct Globals {
    recorder: Arc<Recorder>,
    ranks: Vec<i32>,
}

impl Observer for Globals {
    fn ended(&self, number: u64, outcome: &Result<()>, source: Option<Rank>) {
        self.recorder.ended(number, outcome, source.map(|rank| global(&self.ranks, rank)));
    }
}

/// The number of `rank` in the default group, where the members have the numbers `globals`.
fn global(globals: &[i32], rank: Rank) -> Rank {
    globals.get(rank.index()).map_or(rank, |&global| Rank(global as u32))
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
        outcome.map_err(|error| inner.health().fail(error))
    }
}

impl HostsGroup {
    /// Makes messages between hosts go by `links`, whose ranks meet through `store`.
    fn send_by(&self, links: Arc<dyn Links>, store: Arc<dyn Store>) {
        let (recorder, engine) = (self.inner.recorder(), Arc::downgrade(&self.engine));
        let calls = Box::new(move || engine.upgrade().map_or(0, |engine| engine.sequence()) + recorder.messages());
        let (layout, me, prefix) = (Arc::clone(&self.layout), self.rank, self.life.name("symm-pair", ""));
        self.inner.messages().reach(Far { links, calls, store, layout, me, prefix, changed: Condvar::new() });
    }

    fn global(&self, rank: Rank) -> Rank {
        global(&self.globals, rank)
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
        let (what, messages) = (if send { "send" } else { "recv" }, self.inner.messages());
        let host = self.layout.host(self.rank);
        if let Some(peer) = message.peer.filter(|peer| peer.index() >= self.layout.size()) {
            return Err(Error::value(format!("rank {peer} is outside the group of {} ranks", self.layout.size())));
        }
        let near = message.peer.filter(|&peer| self.layout.host(peer) == host);
        if near.is_none() && messages.far().is_none() {
            let (me, name) = (self.layout.describe(self.rank), self.inner.control().name());
            return Err(Error::not_implemented(match message.peer {
                Some(peer) => format!("{what}: nothing carries messages between {me} and {}", self.layout.describe(peer)),
                None => {
                    format!("{what}: {me} cannot receive from any rank of group \"{name}\": nothing carries messages between its hosts")
                }
            }));
        }
        // What is recorded of a message within the host has the numbers of its ranks.
        let (shown, observer) = match near {
            Some(peer) => (Some(Rank(self.layout.local(peer) as u32)), None),
            None => {
                let globals = Globals { recorder: self.inner.recorder(), ranks: self.globals.clone() };
                (message.peer.map(|peer| self.global(peer)), Some(Arc::new(globals) as Arc<dyn Observer>))
            }
        };
        if let (Some(peer), None) = (shown, near) {
            self.shared.traffic.message(Path::Link(peer));
        }
        self.inner.recorded(send, &message.with_peer(shown), observer, completion, |timeout, completion| {
            if send { messages.send(message, timeout, completion) } else { messages.recv(message, timeout, completion) }
        })
    }

    /// Returns once the completion of `ticket` has been called; fails with `WaitTimeout` after `timeout`.
    pub fn wait(&self, ticket: u64, timeout: Option<Duration>) -> Result<()> {
        if ticket & TICKET_BIT != 0 {
            self.inner.wait(ticket, timeout)
        } else {
            self.inner.check_process().and_then(|()| self.engine.wait(ticket, timeout))
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
        if far && self.inner.check_process().is_ok() {
            self.inner.messages().refuse(peer, send, tag, text.clone());
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
        self.inner.abort();
    }

    /// Leaves the group once what was submitted is done; what is not after `limit` fails, here and on its peers. Idempotent.
    pub fn leave(&self, limit: Duration, farewell: &str) {
        if self.shared.is_inherited() {
            std::mem::forget(Arc::clone(self.inner.messages()));
            return;
        }
        if !self.shared.leave() {
            return;
        }
        let since = Instant::now();
        if !self.engine.drain(limit) {
            let (me, name) = (self.layout.describe(self.rank), self.inner.control().name());
            self.inner.health().fail(Error::aborted(format!("{me} left group \"{name}\" with calls under way")));
        }
        self.forget_keys();
        self.inner.messages().say_goodbye(limit.saturating_sub(since.elapsed()));
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
