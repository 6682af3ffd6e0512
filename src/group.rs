//! A group of ranks: ties the crate together; the only thing the bridge talks to.
#![allow(unsafe_code, reason = "a word of a peer's memory, read to learn whether that is possible")]

pub mod device;
pub mod monitored;
mod refusal;

use crate::boot::{self, Found, JoinSpec, Joined, Member};
use crate::coll::call::Call;
use crate::coll::cost::hardware::Device;
use crate::coll::cost::profile;
use crate::coll::cpu::{Runner, helpers};
use crate::coll::cuda::agreement::launch_log;
use crate::coll::message::Message;
use crate::coll::plan::Thresholds;
use crate::completion::{Completion, Observer};
use crate::config::Config;
use crate::control::{ControlBlock, Identity, Part};
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::health::{DeviceSlot, Health};
use crate::lock::lock;
use crate::mem::layout::{Layout, MAX_RANKS};
use crate::mem::shm::Segment;
use crate::messages::{self, Messages};
use crate::rank::Rank;
use crate::store::Store;
use crate::symm_mem::peers::Linked;
use crate::sync::limit::Limit;
use crate::sys::remote;
use crate::trace::{self, Recorder};
use crate::watch;
use crate::window;
use refusal::{Refusals, Refused};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Options of joining a group.
#[derive(Clone, Debug)]
pub struct JoinOptions {
    /// The group's name, the same on all members.
    pub group: String,
    /// Number of this rank in the group; checked by `join`.
    pub rank: i32,
    /// Number of members; checked by `join`.
    pub size: i32,
    /// Ranks of the members in the default group; empty: the same as here.
    pub global_ranks: Vec<i32>,
    /// Whether this is the job's first group, of which a rank that is taken is refused also once it has formed (`boot::Membership`).
    pub is_default: bool,
    /// Limit of joining, and of every later call that brings none; absent: 30 minutes.
    pub timeout: Option<Duration>,
    /// Place of the group in a larger one on several hosts, if it is a part of one.
    pub part: Option<Part>,
}

/// Settings that a user may choose for a group; the same on all its ranks.
#[derive(Clone, Copy, Debug)]
pub struct Tuning {
    /// Whether receivers of long messages may read the sender's memory where the system permits it.
    pub direct: bool,
    /// Turns a waiting thread spins before it gives its core away; absent: by the number of cores.
    pub spins: Option<u32>,
    /// Thresholds between one way of moving data and the next; they need not be the same on all ranks.
    pub thresholds: Thresholds,
}

impl Default for Tuning {
    fn default() -> Self {
        Self { direct: true, spins: None, thresholds: Thresholds::default() }
    }
}

/// A joined group.
pub struct Group {
    control: Arc<ControlBlock>,
    engine: Arc<Engine>,
    messages: Arc<Messages>,
    refusals: Arc<Refusals>,
    recorder: Arc<Recorder>,
    timeout_ms: AtomicU64,
    closed: AtomicBool,
    watching: Mutex<Option<watch::Subscription>>,
    membership: Mutex<Option<boot::Membership>>,
    /// Communicator, made by the first call on a GPU.
    communicator: Arc<DeviceSlot>,
    health: Arc<Health>,
    /// Held by whoever sets the communicator up.
    setting_up: Mutex<()>,
    domains: window::Domains,
    /// Symmetric memory of the host, for collectives.
    linked: Arc<Linked>,
}

/// The limit of calls where nobody chose one; torch's own default.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(30 * 60);
/// Turns of spinning, some 40 ns each, where every rank can have a core.
const SPINS: u32 = 512;
/// Turns where ranks share cores: the peer that is waited for may need this one.
const SPINS_CROWDED: u32 = 64;

/// Name of the group that `options` name, the same on all members; torch calls the default group "0".
fn group_name(options: &JoinOptions) -> &str {
    if options.is_default { "default" } else { options.group.as_str() }
}

/// What joining a group of at most `most` ranks needs to know. One that is too large for one host needs no memory.
fn join_spec(options: &JoinOptions, most: usize) -> Result<JoinSpec<'_>> {
    let size = usize::try_from(options.size).ok().filter(|size| (1..=most).contains(size));
    let size =
        size.ok_or_else(|| Error::config(format!("a group of {} ranks cannot be made; there must be 1 to {MAX_RANKS}", options.size)))?;
    let rank = u32::try_from(options.rank).ok().filter(|&rank| (rank as usize) < size).map(Rank);
    let rank = rank.ok_or_else(|| Error::config(format!("rank {} is outside the group of {size} ranks", options.rank)))?;
    let layout = (size <= MAX_RANKS).then(|| Layout::new(size));
    Ok(JoinSpec {
        group: group_name(options),
        rank,
        size: size as u32,
        restart: &Config::get().restart,
        timeout: options.timeout.unwrap_or(DEFAULT_TIMEOUT),
        segment_bytes: layout.map_or(0, Layout::total_bytes) as u64,
        reserved_bytes: layout.map_or(0, Layout::control_bytes),
        keep_membership: options.is_default,
        global_ranks: &options.global_ranks,
        // A job that starts anew has the same ranks in other processes.
        known: (!options.is_default).then_some(boot::Known { ended: trace::ended }),
    })
}

impl Group {
    /// Joins the group that `options` name, meeting its other members through `store`.
    pub fn join(store: &dyn Store, options: &JoinOptions) -> Result<Self> {
        Self::of(boot::join(store, &join_spec(options, MAX_RANKS)?)?, options)
    }

    /// Joins the group as `join` does if its members are on one host, and else tells where they are.
    pub fn find(store: &dyn Store, options: &JoinOptions) -> Result<Found<Self>> {
        Ok(match boot::find(store, &join_spec(options, usize::MAX)?)? {
            Found::Together(joined) => Found::Together(Self::of(joined, options)?),
            Found::Apart(apart) => Found::Apart(apart),
        })
    }

    fn of(joined: Joined, options: &JoinOptions) -> Result<Self> {
        let config = Config::get();
        let (size, rank, group) = (joined.members.len(), Rank(options.rank as u32), group_name(options));
        let global = |r: usize| options.global_ranks.get(r).map_or(r as u32, |&g| g as u32);
        let identity = |(r, member): (usize, &Member)| Identity { pid: member.pid, global: global(r) };
        let members = joined.members.iter().enumerate().map(identity).collect();
        let thresholds = profile::settings(Device::Cpu, size).map(|measured| measured.thresholds()).unwrap_or_default();
        let tuning = Tuning { direct: config.cma, spins: config.spin, thresholds };
        let segment = Segment::map_at(joined.segment, joined.addresses)?;
        let control = control_block(segment, group, rank, members, tuning).named(options.part.clone());
        let mut made = Self::with_watched(control, &joined.members, options.timeout.unwrap_or(DEFAULT_TIMEOUT), tuning)?;
        made.membership = Mutex::new(joined.membership);
        Ok(made)
    }

    /// A group in memory that its members already share. `members` in rank order; their processes are not watched.
    pub fn assemble(segment: Segment, name: &str, rank: Rank, members: Vec<Identity>, timeout: Duration, tuning: Tuning) -> Result<Self> {
        segment.reserve(0, Layout::new(members.len()).control_bytes(), format_args!("group \"{name}\""))?;
        Self::with_watched(control_block(segment, name, rank, members, tuning), &[], timeout, tuning)
    }

    fn with_watched(control: ControlBlock, watched: &[Member], timeout: Duration, tuning: Tuning) -> Result<Self> {
        let control = Arc::new(control);
        let (name, rank) = (control.name(), control.rank());
        let communicator = Arc::<DeviceSlot>::default();
        let watching = if watched.is_empty() {
            None
        } else {
            // The control block does not outlive the group because somebody watches its members.
            let (listener, slot) = (Arc::downgrade(&control), Arc::downgrade(&communicator));
            let on_exit: watch::OnExit = Arc::new(move |rank, how| {
                let Some(control) = listener.upgrade() else { return };
                let _ = control.contain(|| {
                    control.note_gone(rank, format!("has ended ({how})"));
                    slot.upgrade().inspect(|slot| device::release_dead(slot, rank));
                    Ok(())
                });
            });
            let reported = |error: Error| {
                let (me, size) = (control.describe(rank), control.size());
                control.fail(Error { message: format!("{me} cannot join group \"{name}\" of {size} ranks: {error}"), ..error })
            };
            Some(watch::watch(watched, on_exit).map_err(reported)?)
        };
        let limit = Limit::from(Instant::now(), timeout);
        let direct = meet(&control, &limit, tuning.direct)?;
        let long = if direct { "reads long messages from the sender's memory" } else { "receives long messages in pieces" };
        log::info!("{} joined group \"{name}\" of {} ranks and {long}", control.describe(rank), control.size());
        let recorder = Recorder::new(&control, timeout);
        let linked = Arc::<Linked>::default();
        let runner = Runner::new(Arc::clone(&control), tuning.thresholds, Arc::clone(&linked)).reading(direct);
        let engine = Engine::new(runner, Arc::clone(&recorder));
        let health = Health::new(&control, &communicator, &recorder);
        let messages = Messages::new(&health, direct);
        Ok(Self {
            refusals: Refusals::new(&control, &engine, &messages),
            engine,
            messages,
            control,
            recorder,
            timeout_ms: AtomicU64::new(timeout.as_millis() as u64),
            closed: AtomicBool::new(false),
            watching: Mutex::new(watching),
            membership: Mutex::default(),
            communicator,
            health,
            setting_up: Mutex::new(()),
            domains: window::Domains::default(),
            linked,
        })
    }

    /// Runs `calls` in order behind everything submitted before, and returns when they are done.
    pub fn run(&self, calls: &[Call<'_>], timeout: Option<Duration>) -> Result<()> {
        self.check_open()?;
        self.health.check_kernels()?;
        self.engine.run(calls, timeout.unwrap_or_else(|| self.timeout()))
    }

    /// Queues `calls`; `completion` gets the outcome. The ticket is for `wait`.
    pub fn submit(&self, calls: &[Call<'_>], timeout: Option<Duration>, completion: Completion) -> Result<u64> {
        self.check_open()?;
        self.health.check_kernels()?;
        self.engine.submit(calls, timeout.unwrap_or_else(|| self.timeout()), completion)
    }

    /// Starts a send.
    pub fn send(&self, message: Message, completion: Completion) -> Result<u64> {
        self.recorded(true, &message, None, completion, |timeout, completion| self.messages.send(message, timeout, completion))
    }

    /// Starts a receive.
    pub fn recv(&self, message: Message, completion: Completion) -> Result<u64> {
        self.recorded(false, &message, None, completion, |timeout, completion| self.messages.recv(message, timeout, completion))
    }

    /// Sends and receives between the ranks of this group.
    pub fn messages(&self) -> &Arc<Messages> {
        &self.messages
    }

    /// Starts a message as `start` does, if the group lives, and keeps it in the record. `far` is the record of one whose peer may be on
    /// another host, and is a global rank.
    pub fn recorded(
        &self,
        send: bool,
        message: &Message,
        far: Option<Arc<dyn Observer>>,
        completion: Completion,
        start: impl FnOnce(Duration, Completion) -> Result<u64>,
    ) -> Result<u64> {
        self.check_alive()?;
        let timeout = message.timeout.unwrap_or_else(|| self.timeout());
        let number = if far.is_some() {
            self.recorder.far_message(send, message, timeout)
        } else {
            self.recorder.message(send, message, timeout, trace::Target::Host)
        };
        let completion = completion.observed(far.unwrap_or_else(|| Arc::clone(&self.recorder) as Arc<dyn Observer>), number);
        start(timeout, completion).inspect_err(|error| self.recorder.end(number, &Err(error.clone()), false, ""))
    }

    /// Returns once the completion of `ticket` has been called; fails with `WaitTimeout` after `timeout`.
    pub fn wait(&self, ticket: u64, timeout: Option<Duration>) -> Result<()> {
        self.check_process()?;
        if ticket & messages::TICKET_BIT != 0 { self.messages.wait(ticket, timeout) } else { self.engine.wait(ticket, timeout) }
    }

    /// A collective was refused on this rank, because of `text`, before anything was exchanged. If peers wait for it, and this rank makes
    /// no other call within 80 ms, the group fails: they learn so within 100 ms of their call or of this one, whichever is later.
    pub fn refuse(&self, text: String) {
        if self.check_alive().and_then(|()| self.health.check_kernels()).is_ok() {
            self.refusals.add(text, Refused::Collective { on_device: self.health.communicator().is_some() });
        }
    }

    /// Refuses, as `refuse` does, an operator on symmetric memory of the host, before this rank came to its first barrier.
    pub fn refuse_operator(&self, text: String) {
        if self.check_alive().is_ok() {
            self.refusals.add(text, Refused::Operator);
        }
    }

    /// Refuses, as `refuse` does, a send to `peer` or a receive from it, or from anybody. Only a peer that is blocked in its part of it
    /// learns of that.
    pub fn refuse_message(&self, send: bool, peer: Option<Rank>, tag: i32, text: String) {
        if self.check_alive().is_ok() {
            self.refusals.add(text, Refused::Message { send, peer, tag });
        }
    }

    /// Moves transfers and calls along without blocking: somebody asks for their end who does not wait for it.
    pub fn progress(&self) {
        if self.check_process().is_ok() {
            self.engine.hurry();
            let _ = self.messages.progress();
        }
    }

    /// Fails the group on every rank; blocked calls return at once.
    pub fn abort(&self) {
        if self.check_process().is_err() || self.closed.load(Ordering::Acquire) {
            return;
        }
        let me = self.control.describe(self.control.rank());
        self.health.fail(Error::aborted(format!("{me} aborted group \"{}\"", self.control.name())));
    }

    /// Leaves the group once what was submitted is done, at the latest after the timeout. Idempotent.
    pub fn shutdown(&self) {
        self.leave(self.timeout(), "");
    }

    /// Leaves the group once what was submitted is done; what is not after `limit` fails, here and on its peers. Idempotent.
    /// A call in which another thread is blocked gets 50 ms.
    /// `farewell` is the error because of which this rank leaves, for its peers; empty if there is none.
    pub fn leave(&self, limit: Duration, farewell: &str) {
        if self.check_process().is_err() || self.closed.swap(true, Ordering::AcqRel) {
            return;
        }
        let (name, since) = (self.control.name(), Instant::now());
        self.refusals.forget();
        let launched = self.disconnect(limit);
        if !self.engine.drain(limit.saturating_sub(since.elapsed())) {
            let (me, seconds) = (self.control.describe(self.control.rank()), since.elapsed().as_secs_f32());
            self.control.fail(Error::aborted(format!("{me} left group \"{name}\" with calls under way after {seconds:.1} s")));
        }
        self.messages.leave(&Error::aborted(format!("group \"{name}\" was destroyed before this transfer was complete")), farewell);
        self.messages.stop();
        self.engine.stop();
        // Whoever is blocked in a rendezvous has been released by now.
        self.domains.drain(limit.saturating_sub(since.elapsed()));
        self.control.depart(farewell);
        if launched {
            launch_log::abandon(&self.control);
        }
        drop(lock(&self.watching).take());
        drop(lock(&self.membership).take());
        self.recorder.leave();
        // Who still refers to the group may ask for its failure, which lies in the part that is kept.
        let left = self.control.segment().leave_file(self.control.layout().control_bytes());
        left.unwrap_or_else(|errno| log::debug!("group \"{name}\" keeps its memory: {errno}"));
    }

    /// The group's control block.
    pub fn control(&self) -> &ControlBlock {
        &self.control
    }

    /// The group's first failure, and who hears of it.
    pub(crate) fn health(&self) -> &Arc<Health> {
        &self.health
    }

    /// Record of the group's calls.
    pub fn recorder(&self) -> Arc<Recorder> {
        Arc::clone(&self.recorder)
    }

    /// Notes in the flight recorder who was waited for, from now on or no longer.
    pub fn watch(&self, on: bool) {
        self.recorder.watch(on);
    }

    /// This rank, and the number of ranks.
    pub fn place(&self) -> (Rank, usize) {
        (self.control.rank(), self.control.size())
    }

    /// Number of collectives asked for.
    pub fn sequence(&self) -> u64 {
        self.engine.sequence()
    }

    /// The limit of calls that bring none.
    pub fn timeout(&self) -> Duration {
        Duration::from_millis(self.timeout_ms.load(Ordering::Relaxed))
    }

    /// Changes the limit of calls that bring none.
    pub fn set_timeout(&self, timeout: Duration) {
        self.timeout_ms.store(timeout.as_millis() as u64, Ordering::Relaxed);
    }

    /// The group's first failure, or a member's death that no call has run into yet.
    pub fn error(&self) -> Option<Error> {
        self.health.error()
    }

    /// The group's first failure, on the host or a device.
    pub fn failure(&self) -> Option<Error> {
        self.health.failure()
    }

    /// Runs `body`. A panic in it fails the group on all ranks, unless this process is a forked child, which must not touch it.
    pub fn contain<T>(&self, body: impl FnOnce() -> Result<T>) -> Result<T> {
        if self.check_process().is_ok() { self.control.contain(body) } else { body() }
    }

    /// Rejects a group that belongs to the parent of this process.
    pub fn check_process(&self) -> Result<()> {
        if !self.health.is_inherited() {
            return Ok(());
        }
        let (name, maker) = (self.control.name(), self.control.pid(self.control.rank()));
        Err(Error::config(format!(
            "group \"{name}\" was made by process {maker}, of which process {} is a forked child; make a new group in the child",
            std::process::id()
        )))
    }

    /// Refuses a group that this process may not use any more.
    pub fn check_open(&self) -> Result<()> {
        self.check_process()?;
        if self.closed.load(Ordering::Acquire) {
            return Err(Error::aborted(format!("group \"{}\" was destroyed", self.control.name())));
        }
        Ok(())
    }

    fn check_alive(&self) -> Result<()> {
        self.check_open()?;
        self.control.failure().map_or(Ok(()), Err).inspect_err(|error| self.recorder.saw(error))
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        self.shutdown();
        if self.check_process().is_err() {
            self.forget_communicator();
            self.domains.forget();
        }
    }
}

fn control_block(segment: Segment, name: &str, rank: Rank, members: Vec<Identity>, tuning: Tuning) -> ControlBlock {
    helpers::note_ranks(members.len());
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let spins = tuning.spins.unwrap_or(if cores >= members.len() { SPINS } else { SPINS_CROWDED });
    ControlBlock::new(segment, rank, name.into(), members, spins)
}

/// Waits for all members in the shared memory; returns whether every rank may read every other's private memory.
fn meet(control: &ControlBlock, limit: &Limit, try_direct: bool) -> Result<bool> {
    let me = control.rank();
    let about = || format!("joining group \"{}\"", control.name());
    let arrive = |phase: u32| {
        control.phase(me).store(phase, Ordering::Release);
        control.wake_sleepers();
        control.wait_together(limit, &about, |peer| control.phase(peer).load(Ordering::Acquire) < phase)
    };
    let word = std::hint::black_box(Box::new(PROBE));
    control.probe(me).store(std::ptr::from_ref(&*word) as u64, Ordering::Relaxed);
    arrive(1)?;
    let readable = |peer: Rank| {
        let mut copy = [0u8; 8];
        let from = control.probe(peer).load(Ordering::Relaxed) as usize;
        // SAFETY: `copy` is a local array of 8 bytes.
        let read = unsafe { remote::read_memory(control.pid(peer), from, copy.as_mut_ptr(), copy.len()) };
        read.is_ok() && copy == PROBE.to_ne_bytes()
    };
    control.capable(me).store(u32::from(try_direct && control.peers().all(readable)), Ordering::Relaxed);
    arrive(2)?;
    Ok(control.ranks().all(|rank| control.capable(rank).load(Ordering::Relaxed) == 1))
}

/// Value that a rank expects to find at a peer's probe address.
const PROBE: u64 = 0x746f_7263_6873_796d;

#[cfg(test)]
mod tests;
