//! The flight recorder: the last calls of this process, always on, written down where a group fails or somebody asks (`docs/design/trace.md`).
//!
//! An entry costs two looks at the clock and two uncontended locks. Nothing here fails a call: what cannot be kept or written is a line in
//! the log. Ranks may be threads of one process: they share the ring, and each entry knows its group and with it its rank. A forked child
//! starts with an empty one.

mod clock;
mod dump;
mod entry;
pub mod folder;
mod registry;
mod ring;
mod totals;

pub use entry::{Phase, Target};
pub use ring::KEPT;

use crate::coll::call::{Call, Spec};
use crate::completion::Observer;
use crate::config::Config;
use crate::control::ControlBlock;
use crate::error::{Error, Kind, Result};
use crate::lock::lock;
use crate::messages::Message;
use crate::rank::Rank;
use crate::sys::fork::{self, PerProcess};
use entry::{Entry, State, What};
use registry::Registry;
use ring::Ring;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use totals::Totals;

/// Time that a call that failed waits for its dump. A program may end right after it, and take an unfinished one along.
const PATIENCE: Duration = Duration::from_millis(20);
/// Time that leaving a group waits for its dump.
const FAREWELL: Duration = Duration::from_millis(300);

/// Journal of a process.
struct Journal {
    ring: Ring,
    groups: Mutex<Registry>,
    /// Counts of all calls, if `SYMM_STATS` asks for them.
    totals: Option<Totals>,
}

static JOURNAL: PerProcess<Journal> = PerProcess::new(|| Journal::new(Config::get().stats_seconds > 0));

impl Journal {
    fn new(counts: bool) -> Self {
        Self { ring: Ring::new(), groups: Mutex::default(), totals: counts.then(Totals::new) }
    }
}

/// Journal of this process as JSON.
pub fn render() -> Result<String> {
    dump::render(JOURNAL.get())
}

/// Says that the process of a rank of the job has ended, as a sentence without its end, if a group knows of which this process is a member.
pub fn ended(global: u32) -> Option<String> {
    lock(&JOURNAL.get().groups).ended(global)
}

/// Keeps the calls of one rank of one group.
pub struct Recorder {
    journal: &'static Journal,
    group: u64,
    control: Arc<ControlBlock>,
    messages: AtomicU64,
    cuda: AtomicBool,
    failed: AtomicBool,
    /// A profiler sees the group's calls: who was waited for is noted.
    watched: AtomicBool,
    /// The group's collectives are those of several hosts and of this one, which have the same numbers.
    twofold: AtomicBool,
    /// Generation of the process whose journal it is.
    generation: u64,
    /// Receiver of a value that comes once the dump has been written.
    writing: Mutex<Option<Receiver<()>>>,
}

impl Recorder {
    /// Record of the group of `control`, whose calls have `timeout` unless they bring their own.
    pub fn new(control: &Arc<ControlBlock>, timeout: Duration) -> Arc<Self> {
        Self::in_journal(JOURNAL.get(), control, timeout)
    }

    fn in_journal(journal: &'static Journal, control: &Arc<ControlBlock>, timeout: Duration) -> Arc<Self> {
        let group = lock(&journal.groups).add(control, timeout);
        Arc::new(Self {
            journal,
            group,
            control: Arc::clone(control),
            messages: AtomicU64::new(0),
            cuda: AtomicBool::new(false),
            failed: AtomicBool::new(false),
            watched: AtomicBool::new(false),
            twofold: AtomicBool::new(false),
            generation: fork::generation(),
            writing: Mutex::new(None),
        })
    }

    #[inline(always)]
    fn entry(&self, call: &Spec, timeout: Duration) -> Entry {
        Entry { group: self.group, timeout_ms: milliseconds(timeout), created: clock::now(), ..Entry::of_call(call) }
    }

    /// Notes `calls`, which begin later: the number of the first entry, which the others follow. `inside`: they serve a group on several
    /// hosts, of which this one is a part.
    pub fn schedule(&self, calls: &[Call<'_>], timeout: Duration, asynchronous: bool, place: Target, inside: bool) -> u64 {
        // Calls of a group on several hosts are not in the launch log of the part that it has here.
        if place != Target::Host && inside == self.control.is_part() && !self.cuda.swap(true, Ordering::Relaxed) {
            lock(&self.journal.groups).note_cuda(self.group);
        }
        let first = self.journal.ring.take(calls.len());
        for (number, call) in (first..).zip(calls) {
            self.journal.ring.put(Entry { number, asynchronous, place, inside, ..self.entry(call, timeout) });
            self.count(number);
        }
        first
    }

    /// Notes that the entry `number` begins as collective `sequence`.
    pub fn start(&self, number: u64, sequence: u64) {
        self.start_as(number, sequence, "");
    }

    /// Notes, as `start` does, that `algorithm` serves the entry from its begin.
    pub fn start_as(&self, number: u64, sequence: u64, algorithm: &'static str) {
        let started = clock::now();
        self.journal.ring.change(number, |entry| {
            (entry.sequence, entry.started, entry.state, entry.algorithm) = (sequence, started, State::Started, algorithm);
            if entry.place == Target::Host {
                self.tell_start(sequence, started);
            }
        });
    }

    /// Tells peers when this rank began collective `sequence`.
    fn tell_start(&self, sequence: u64, at: u64) {
        if !self.twofold.load(Ordering::Relaxed) {
            // Published with the post of the call.
            self.control.start(self.control.rank(), sequence).store(at, Ordering::Relaxed);
        }
    }

    /// Time that `entry`, which has ended well, waited for the last rank to begin, and that rank. Costs a look at each peer's memory.
    fn waited(&self, entry: &Entry) -> (u64, Option<Rank>) {
        let begun = |rank| self.control.start(rank, entry.sequence).load(Ordering::Relaxed);
        let last = self.control.peers().max_by_key(|&rank| begun(rank));
        let late = last.map_or(0, begun).min(entry.ended).saturating_sub(entry.started);
        (late, last.filter(|_| late > 0))
    }

    /// Notes from now on, or no longer, who was waited for.
    pub fn watch(&self, on: bool) {
        // Calls ask for it one after the other, and seldom change it.
        if self.watched.load(Ordering::Relaxed) != on {
            self.watched.store(on, Ordering::Relaxed);
        }
    }

    /// Notes a call on the host that begins at once, as collective `sequence`; returns its number. `inside`: as in `schedule`.
    pub fn begin(&self, call: &Spec, timeout: Duration, sequence: u64, inside: bool) -> u64 {
        let (number, entry) = (self.journal.ring.take(1), self.entry(call, timeout));
        self.journal.ring.put(Entry { number, sequence, started: entry.created, state: State::Started, inside, ..entry });
        self.count(number);
        self.tell_start(sequence, entry.created);
        number
    }

    /// Counts the entry `number`, which was just put. It is read again, since another copy of it would cost calls that are not counted.
    #[inline(always)]
    fn count(&self, number: u64) {
        if let Some(totals) = &self.journal.totals {
            self.journal.ring.change(number, |entry| totals.made(entry, self.control.size()));
        }
    }

    /// Adds the time of `entry`, which has ended, to the counts.
    #[inline(always)]
    fn count_time(&self, entry: &Entry) {
        if let Some(totals) = &self.journal.totals {
            totals.ended(entry, self.control.size());
        }
    }

    /// Notes which hosts the group has beside this one, as messages name them.
    pub fn note_hosts(&self, others: String) {
        self.twofold.store(true, Ordering::Relaxed);
        lock(&self.journal.groups).note_hosts(self.group, others);
    }

    /// Notes which `hosts`, as messages name them, have not come to collective `sequence`, in which this rank waits for other hosts.
    pub fn note_late(&self, sequence: u64, hosts: String) {
        lock(&self.journal.groups).note_late(self.group, sequence, hosts);
    }

    /// Notes that `phase` of the entry `number` begins.
    pub fn phase(&self, number: u64, phase: Phase) {
        let at = clock::now();
        self.journal.ring.change(number, |entry| entry.phase = Some((phase, at)));
    }

    /// Notes how the entry `number` ended, which `algorithm` served. `begun`: whether the call took part in the group's sequence.
    pub fn end(&self, number: u64, outcome: &Result<()>, begun: bool, algorithm: &'static str) {
        let at = clock::now();
        let watched = self.watched.load(Ordering::Relaxed) && !self.twofold.load(Ordering::Relaxed);
        self.journal.ring.change(number, |entry| {
            entry.end(outcome, at);
            entry.algorithm = algorithm;
            if watched && begun && outcome.is_ok() && entry.place == Target::Host {
                entry.waited = Some(self.waited(entry));
            }
            if !begun {
                entry.sequence = 0;
            }
            self.count_time(entry);
        });
    }

    /// Notes that those entries of `numbers` which have not begun never will, because of `error`.
    pub fn abandon(&self, numbers: Range<u64>, error: &Error) {
        let (at, outcome) = (clock::now(), Err(error.clone()));
        for number in numbers {
            self.journal.ring.change(number, |entry| {
                if entry.state == State::Scheduled {
                    entry.end(&outcome, at);
                }
            });
        }
    }

    /// Number of sends and receives of this group that have begun.
    pub fn messages(&self) -> u64 {
        self.messages.load(Ordering::Relaxed)
    }

    /// Notes a send or receive that begins now; returns its number.
    pub fn message(&self, send: bool, message: &Message, timeout: Duration, place: Target) -> u64 {
        self.add_message(send, message, timeout, place, false)
    }

    /// Notes, as `message` does, one with a rank of another host; its peer is a global rank.
    pub fn far_message(&self, send: bool, message: &Message, timeout: Duration) -> u64 {
        self.add_message(send, message, timeout, Target::Host, true)
    }

    fn add_message(&self, send: bool, message: &Message, timeout: Duration, place: Target, far: bool) -> u64 {
        let (number, created) = (self.journal.ring.take(1), clock::now());
        let sequence = self.messages.fetch_add(1, Ordering::Relaxed) + 1;
        let (group, asynchronous, timeout_ms) = (self.group, true, milliseconds(timeout));
        let entry = Entry::of_message(send, message);
        let entry = Entry { number, group, sequence, timeout_ms, created, started: created, asynchronous, place, far, ..entry };
        self.journal.ring.put(Entry { state: State::Started, ..entry });
        self.count(number);
        number
    }

    /// Fails the group because a signal's handler has raised on a thread that waited for a call which another thread runs.
    pub fn interrupted(&self) {
        self.control.interrupted(&format!("a wait for a collective of group {:?}", self.control.name()));
    }

    /// Writes the dump if `error` is the group's first failure that this rank sees: not what an argument, or this rank itself, is to
    /// blame for.
    pub fn saw(&self, error: &Error) {
        let failure = match error.kind {
            Kind::Peer | Kind::Timeout | Kind::Mismatch | Kind::Internal => self.control.failure().is_some(),
            Kind::Config
            | Kind::Aborted
            | Kind::Value
            | Kind::Type
            | Kind::NotImplemented
            | Kind::WaitTimeout
            | Kind::Network
            | Kind::QueueEmpty => false,
        };
        // A forked child may ask its parent's group what failed: whose locks may be held for ever here.
        if !failure || self.generation != fork::generation() || self.failed.swap(true, Ordering::AcqRel) {
            return;
        }
        lock(&self.journal.groups).note_failure(self.group, &self.control, error);
        let global = self.control.global(self.control.rank());
        let written = dump::begin(self.journal, global, error);
        let late = written.as_ref().is_some_and(|written| written.recv_timeout(PATIENCE).is_err());
        if late {
            *lock(&self.writing) = written;
        }
    }

    /// The group is left: no call of it begins any more.
    pub fn leave(&self) {
        lock(&self.journal.groups).leave(self.group);
        let writing = lock(&self.writing).take();
        if let Some(writing) = writing {
            let _ = writing.recv_timeout(FAREWELL);
        }
    }
}

fn milliseconds(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

impl Observer for Recorder {
    fn ended(&self, number: u64, outcome: &Result<()>, source: Option<Rank>) {
        let at = clock::now();
        self.journal.ring.change(number, |entry| {
            entry.end(outcome, at);
            if let What::Receive { peer, .. } = &mut entry.what
                && source.is_some()
                && (!entry.far || peer.is_none())
            {
                *peer = source;
            }
            self.count_time(entry);
        });
        if let Err(error) = outcome {
            self.saw(error);
        }
    }
}

#[cfg(test)]
mod tests;
