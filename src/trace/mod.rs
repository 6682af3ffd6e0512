//! The flight recorder: the last calls of this process. It is always on, and its contents are
//! dumped when a group fails or on request (`docs/design/trace.md`).
//!
//! An entry costs two clock readings and two uncontended locks. Nothing here fails a call: entries
//! that cannot be kept or written cause a log line. Ranks may be threads of one process; they share
//! the ring, and each entry knows its group and thereby its rank. A forked child starts with an
//! empty ring.

mod clock;
mod dump;
pub mod dump_dir;
mod entry;
mod registry;
mod ring;
mod totals;

pub use entry::{CallTarget, InternodePhase};
pub use ring::KEPT;

use crate::coll::call::{Call, CallSpec};
use crate::coll::message::Message;
use crate::completion::Observer;
use crate::config::Config;
use crate::control::ControlBlock;
use crate::error::{Error, ErrorKind, Result};
use crate::lock::lock;
use crate::rank::Rank;
use crate::sys::fork::{self, PerProcess};
use entry::{CallKind, EntryState, TraceEntry};
use registry::Registry;
use ring::EntryRing;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use totals::Totals;

/// How long a failed call waits for its dump. The program may exit right after the call, and an
/// unfinished dump would be lost.
const DUMP_WAIT: Duration = Duration::from_millis(20);
/// How long leaving a group waits for its dump.
const DUMP_WAIT_ON_EXIT: Duration = Duration::from_millis(300);

/// The journal of a process.
struct FlightRecorder {
    ring: EntryRing,
    groups: Mutex<Registry>,
    /// Counts of all calls, if `SYMM_STATS_INTERVAL` requests them.
    totals: Option<Totals>,
}

static JOURNAL: PerProcess<FlightRecorder> =
    PerProcess::new(|| FlightRecorder::new(Config::get().stats_seconds > 0));

impl FlightRecorder {
    fn new(counts: bool) -> Self {
        Self { ring: EntryRing::new(), groups: Mutex::default(), totals: counts.then(Totals::new) }
    }
}

/// Renders the journal of this process as JSON.
pub fn render() -> Result<String> {
    dump::render(JOURNAL.get())
}

/// Returns how the process of a global rank has ended, as a sentence without a full stop, if an
/// open group of this process knows it.
pub fn ended(global: u32) -> Option<String> {
    lock(&JOURNAL.get().groups).ended(global)
}

/// Returns the open groups of this process that have failed because of a peer: the name of each,
/// the ranks of its members in the default group, and the failure.
pub fn peer_failures() -> Vec<(String, Vec<u32>, Error)> {
    lock(&JOURNAL.get().groups).peer_failures()
}

/// Records the calls of one rank in one group.
pub struct GroupRecorder {
    journal: &'static FlightRecorder,
    group: u64,
    control: Arc<ControlBlock>,
    collectives: AtomicU64,
    /// Number of `collectives` on CPU tensors.
    on_host: AtomicU64,
    messages: AtomicU64,
    cuda: AtomicBool,
    failed: AtomicBool,
    /// True while a profiler watches the group's calls; then the rank for which a call waited is
    /// recorded.
    watched: AtomicBool,
    /// Number of ranks of the group, on all nodes.
    world: usize,
    /// Fork generation of the process that owns the journal.
    generation: u64,
    /// Receives a value once the dump has been written.
    writing: Mutex<Option<Receiver<()>>>,
}

impl GroupRecorder {
    /// Makes the recorder of the group of `control`, whose calls have `timeout` unless they pass
    /// their own.
    pub fn new(control: &Arc<ControlBlock>, timeout: Duration) -> Arc<Self> {
        Self::in_journal(JOURNAL.get(), control, timeout)
    }

    fn in_journal(
        journal: &'static FlightRecorder,
        control: &Arc<ControlBlock>,
        timeout: Duration,
    ) -> Arc<Self> {
        let group = lock(&journal.groups).add(control, timeout);
        Arc::new(Self {
            journal,
            group,
            control: Arc::clone(control),
            collectives: AtomicU64::new(0),
            on_host: AtomicU64::new(0),
            messages: AtomicU64::new(0),
            cuda: AtomicBool::new(false),
            failed: AtomicBool::new(false),
            watched: AtomicBool::new(false),
            world: control.global_ranks().len(),
            generation: fork::generation(),
            writing: Mutex::new(None),
        })
    }

    #[inline(always)]
    fn entry(&self, call: &CallSpec, timeout: Duration) -> TraceEntry {
        TraceEntry {
            group: self.group,
            timeout_ms: milliseconds(timeout),
            created: clock::now(),
            ..TraceEntry::of_call(call)
        }
    }

    /// Records `calls`, which start later, under consecutive numbers, and returns the first.
    pub fn schedule(
        &self,
        calls: &[Call<'_>],
        timeout: Duration,
        asynchronous: bool,
        place: CallTarget,
    ) -> u64 {
        // Multi-node calls are not in the launch log of this node's part of the group.
        if place != CallTarget::Cpu
            && !self.control.has_parent()
            && !self.cuda.swap(true, Ordering::Relaxed)
        {
            lock(&self.journal.groups).note_cuda(self.group);
        }
        let first = self.journal.ring.take(calls.len());
        for (number, call) in (first..).zip(calls) {
            self.journal.ring.put(TraceEntry {
                number,
                asynchronous,
                place,
                ..self.entry(call, timeout)
            });
            self.count(number);
        }
        first
    }

    /// Records that the entry `number` starts as collective `sequence`.
    pub fn start(&self, number: u64, sequence: u64) {
        self.start_child(number, sequence, "");
    }

    /// Records a start like `start`, with `algorithm` known in advance.
    pub fn start_child(&self, number: u64, sequence: u64, algorithm: &'static str) {
        let started = clock::now();
        self.journal.ring.change(number, |entry| {
            (entry.sequence, entry.started, entry.state, entry.algorithm) =
                (sequence, started, EntryState::Started, algorithm);
            if entry.place == CallTarget::Cpu {
                self.log_start(sequence, started);
            }
        });
    }

    /// Publishes to peers when this rank started collective `sequence`.
    fn log_start(&self, sequence: u64, at: u64) {
        if !self.is_multi_node() {
            // The post of the call publishes this word.
            self.control.start(self.control.rank(), sequence).store(at, Ordering::Relaxed);
        }
    }

    /// Returns how long `entry`, which has succeeded, waited for the last rank to start, and that
    /// rank. Reads a word of each peer in shared memory.
    fn waited(&self, entry: &TraceEntry) -> (u64, Option<Rank>) {
        let begun = |rank| self.control.start(rank, entry.sequence).load(Ordering::Relaxed);
        let last = self.control.peers().max_by_key(|&rank| begun(rank));
        let late = last.map_or(0, begun).min(entry.ended).saturating_sub(entry.started);
        (late, last.filter(|_| late > 0))
    }

    /// Turns on or off the recording of the rank that starts a call last.
    pub fn watch(&self, on: bool) {
        // Calls set the flag one at a time and seldom change it, so it is stored only on a change.
        if self.watched.load(Ordering::Relaxed) != on {
            self.watched.store(on, Ordering::Relaxed);
        }
    }

    /// Records a CPU call that starts at once, as collective `sequence`, and returns its number.
    pub fn begin(&self, call: &CallSpec, timeout: Duration, sequence: u64) -> u64 {
        let (number, entry) = (self.journal.ring.take(1), self.entry(call, timeout));
        self.journal.ring.put(TraceEntry {
            number,
            sequence,
            started: entry.created,
            state: EntryState::Started,
            ..entry
        });
        self.count(number);
        self.log_start(sequence, entry.created);
        number
    }

    /// Counts the entry `number`, which was just put. The entry is read again from the ring,
    /// because another copy would slow down calls that are not counted.
    #[inline(always)]
    fn count(&self, number: u64) {
        if let Some(totals) = &self.journal.totals {
            self.journal.ring.change(number, |entry| totals.made(entry, self.world));
        }
    }

    /// Adds the time of `entry`, which has ended, to the counts.
    #[inline(always)]
    fn count_time(&self, entry: &TraceEntry) {
        if let Some(totals) = &self.journal.totals {
            totals.ended(entry, self.world);
        }
    }

    /// Records the other nodes of the group, as messages name them, and the id `life` that all its
    /// ranks share.
    pub fn note_nodes(&self, life: u64, others: String) {
        lock(&self.journal.groups).note_nodes(self.group, life, others);
    }

    /// Records the timeout of the group's calls.
    pub fn set_timeout(&self, timeout: Duration) {
        lock(&self.journal.groups).set_timeout(self.group, timeout);
    }

    /// Returns true if the group is on several nodes. The ranks of a node then do not publish when
    /// they started its collectives.
    fn is_multi_node(&self) -> bool {
        self.world > self.control.size()
    }

    /// Records which `nodes`, as messages name them, are late for collective `sequence`, in which
    /// this rank waits for other nodes.
    pub fn note_late(&self, sequence: u64, nodes: String) {
        lock(&self.journal.groups).note_late(self.group, sequence, nodes);
    }

    /// Records that `phase` of the entry `number` starts.
    pub fn phase(&self, number: u64, phase: InternodePhase) {
        let at = clock::now();
        self.journal.ring.change(number, |entry| entry.phase = Some((phase, at)));
    }

    /// Records how the entry `number` ended, and the `algorithm` that ran it. `begun` is true if
    /// the call took part in the group's sequence.
    pub fn end(&self, number: u64, outcome: &Result<()>, begun: bool, algorithm: &'static str) {
        let at = clock::now();
        let watched = self.watched.load(Ordering::Relaxed) && !self.is_multi_node();
        self.journal.ring.change(number, |entry| {
            entry.end(outcome, at);
            entry.algorithm = algorithm;
            if watched && begun && outcome.is_ok() && entry.place == CallTarget::Cpu {
                entry.waited = Some(self.waited(entry));
            }
            if !begun {
                entry.sequence = 0;
            }
            self.count_time(entry);
        });
    }

    /// Records that the entries of `numbers` which have not started never will, because of `error`.
    pub fn abandon(&self, numbers: Range<u64>, error: &Error) {
        let (at, outcome) = (clock::now(), Err(error.clone()));
        for number in numbers {
            self.journal.ring.change(number, |entry| {
                if entry.state == EntryState::Scheduled {
                    entry.end(&outcome, at);
                }
            });
        }
    }

    /// Counts collectives on CUDA tensors that the program calls.
    pub fn ask(&self, calls: usize) {
        self.collectives.fetch_add(calls as u64, Ordering::Relaxed);
    }

    /// Counts collectives on CPU tensors that the program calls.
    pub fn ask_on_host(&self, calls: usize) {
        self.on_host.fetch_add(calls as u64, Ordering::Relaxed);
        self.ask(calls);
    }

    /// Returns the number of collectives that the program has called.
    pub fn collectives(&self) -> u64 {
        self.collectives.load(Ordering::Relaxed)
    }

    /// Returns the number of collectives on CPU tensors that the program has called.
    pub fn on_host(&self) -> u64 {
        self.on_host.load(Ordering::Relaxed)
    }

    /// Returns the number of collectives, sends and receives that the program has called.
    pub fn calls(&self) -> u64 {
        self.collectives() + self.messages.load(Ordering::Relaxed)
    }

    /// Records a send or receive that starts now, and returns its number. `far` is true if its peer
    /// is a rank of another node, which is then a global rank.
    pub fn message(
        &self,
        send: bool,
        message: &Message,
        timeout: Duration,
        place: CallTarget,
        far: bool,
    ) -> u64 {
        let (number, created) = (self.journal.ring.take(1), clock::now());
        let sequence = self.messages.fetch_add(1, Ordering::Relaxed) + 1;
        let (group, asynchronous, timeout_ms) = (self.group, true, milliseconds(timeout));
        let entry = TraceEntry::of_message(send, message);
        let entry = TraceEntry {
            number,
            group,
            sequence,
            timeout_ms,
            created,
            started: created,
            asynchronous,
            place,
            internode: far,
            ..entry
        };
        self.journal.ring.put(TraceEntry { state: EntryState::Started, ..entry });
        self.count(number);
        number
    }

    /// Fails the group because a signal handler has raised on a thread that waited for a call of
    /// another thread.
    pub fn interrupted(&self) {
        self.control
            .interrupted(&format!("a wait for a collective of group {:?}", self.control.name()));
    }

    /// Writes the dump if `error` is the first group failure that this rank sees. Errors of
    /// arguments, and errors that this rank caused itself, do not count.
    pub fn note_failure(&self, error: &Error) {
        let failure = match error.kind {
            ErrorKind::Peer | ErrorKind::Timeout | ErrorKind::Mismatch | ErrorKind::Internal => {
                self.control.failure().is_some()
            }
            ErrorKind::Config
            | ErrorKind::Aborted
            | ErrorKind::Value
            | ErrorKind::Type
            | ErrorKind::NotImplemented
            | ErrorKind::WaitTimeout
            | ErrorKind::Network
            | ErrorKind::QueueEmpty => false,
        };
        // A forked child may query its parent's group for a failure, but must not take the group's
        // locks, which may be held forever in the child.
        if !failure
            || self.generation != fork::generation()
            || self.failed.swap(true, Ordering::AcqRel)
        {
            return;
        }
        lock(&self.journal.groups).note_failure(self.group, &self.control, error);
        let global = self.control.global(self.control.rank());
        let written = dump::begin(self.journal, global, error);
        let late = written.as_ref().is_some_and(|written| written.recv_timeout(DUMP_WAIT).is_err());
        if late {
            *lock(&self.writing) = written;
        }
    }

    /// Records that the group was left; no call of it starts any more.
    pub fn leave(&self) {
        lock(&self.journal.groups).leave(self.group);
        let writing = lock(&self.writing).take();
        if let Some(writing) = writing {
            let _ = writing.recv_timeout(DUMP_WAIT_ON_EXIT);
        }
    }
}

fn milliseconds(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

impl Observer for GroupRecorder {
    fn ended(&self, number: u64, outcome: &Result<()>, source: Option<Rank>) {
        let at = clock::now();
        self.journal.ring.change(number, |entry| {
            entry.end(outcome, at);
            if let CallKind::Receive { peer, .. } = &mut entry.what
                && peer.is_none()
            {
                *peer = source;
            }
            self.count_time(entry);
        });
        if let Err(error) = outcome {
            self.note_failure(error);
        }
    }
}

#[cfg(test)]
mod tests;
