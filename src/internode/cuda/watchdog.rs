//! The watchdog of enqueued calls: ends a call at its deadline, and all calls when the group fails.
//!
//! When the group fails, its own kernels end by themselves. Kernels of a backend such as NCCL would
//! wait forever, so they are aborted.

use super::backends::Connections;
use crate::coll::describe::Description;
use crate::error::{Error, Result};
use crate::health::Health;
use crate::kernels::cuda::driver::{Device, Event, RelaxedCapture, Stream};
use crate::lock::{lock, unpoisoned};
use crate::sys::thread;
use crate::trace::{GroupRecorder, InternodePhase};
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// Poll interval.
const INTERNODE_POLL: Duration = Duration::from_millis(20);
/// Maximum number of events that are kept for later calls.
const SPARE: usize = 64;

/// An enqueued call.
pub(super) struct EnqueuedCall {
    pub(super) begin: Event,
    pub(super) end: Event,
    /// When the thread first saw that the call had started.
    pub(super) since: Option<Instant>,
    pub(super) timeout: Duration,
    /// The description and the number of its first collective; `None` for messages.
    pub(super) call: Option<(Description, u64)>,
    /// The numbers of its collectives in the flight recorder.
    pub(super) entries: Range<u64>,
}

/// The enqueued calls that have not ended, in order, and events for later calls.
#[derive(Default)]
struct EnqueuedCalls {
    open: VecDeque<EnqueuedCall>,
    spare: Vec<Event>,
    /// True once the thread has ended.
    idle: bool,
}

/// The state that the watchdog's thread shares with the threads that enqueue calls.
#[derive(Default)]
pub(super) struct Watchdog {
    calls: Mutex<EnqueuedCalls>,
    changed: Condvar,
    closed: AtomicBool,
}

/// The state that the thread needs.
pub(super) struct WatchdogThread {
    pub(super) device: Device,
    pub(super) health: Arc<Health>,
    pub(super) connections: Arc<Connections>,
    /// The number of this rank's rail, if it has one.
    pub(super) rail: Option<u16>,
    /// The part of error messages that names the group, the rank that waited, and the nodes for
    /// which it waited.
    pub(super) who: String,
}

impl Watchdog {
    fn calls(&self) -> MutexGuard<'_, EnqueuedCalls> {
        lock(&self.calls)
    }

    /// Starts the thread.
    pub(super) fn start(self: &Arc<Self>, watched: WatchdogThread) -> Result<()> {
        let watch = Arc::clone(self);
        let spawned = thread::spawn("symm-cuda-watch", Some(512 << 10), move || {
            if let Err(error) = watch.run(&watched) {
                log::warn!("calls on CUDA tensors are not watched any more: {error}");
            }
            watch.calls().idle = true;
            watch.changed.notify_all();
        });
        spawned.map(|_| ())
    }

    /// Returns an event after the present work of `stream`, whose context must be current.
    pub(super) fn mark(&self, stream: Stream) -> Result<Event> {
        let spare = self.calls().spare.pop();
        let event = spare.map_or_else(Event::new, Ok)?;
        event.record(stream).map(|()| event)
    }

    /// Adds a call to watch.
    pub(super) fn add(&self, call: EnqueuedCall) {
        self.calls().open.push_back(call);
    }

    /// Ends the thread once no call is open, after `limit` at the latest; returns true if no call
    /// is open.
    pub(super) fn close(&self, limit: Duration) -> bool {
        let begun = Instant::now();
        let mut calls = self.calls();
        while !calls.open.is_empty() && !calls.idle {
            let Some(left) = limit.checked_sub(begun.elapsed()) else { break };
            calls = unpoisoned(self.changed.wait_timeout(calls, left)).0;
        }
        self.closed.store(true, Ordering::Release);
        calls.open.is_empty()
    }

    fn run(&self, watched: &WatchdogThread) -> Result<()> {
        // The program may record graphs while this thread runs.
        let _relaxed = RelaxedCapture::begin()?;
        let _entered = watched.device.enter()?;
        while !self.closed.load(Ordering::Acquire) {
            if let Some(late) = self.look(watched, watched.health.recorder())? {
                watched.health.fail(late);
            }
            if watched.health.failure().is_some() {
                watched.connections.abort();
                break;
            }
            std::thread::sleep(INTERNODE_POLL);
        }
        Ok(())
    }

    /// Removes the calls that have ended; returns an error if the oldest remaining call has timed
    /// out.
    fn look(&self, watched: &WatchdogThread, recorder: &GroupRecorder) -> Result<Option<Error>> {
        let mut calls = self.calls();
        while let Some(call) = calls.open.front_mut() {
            if call.end.passed()? {
                let ended = calls.open.pop_front();
                ended
                    .iter()
                    .flat_map(|call| call.entries.clone())
                    .for_each(|entry| recorder.end(entry, &Ok(()), true, "two_level"));
                let events = ended.into_iter().flat_map(|call| [call.begin, call.end]);
                let free = SPARE.saturating_sub(calls.spare.len());
                calls.spare.extend(events.take(free));
                continue;
            }
            if call.since.is_none() && call.begin.passed()? {
                call.since = Some(Instant::now());
                call.entries
                    .clone()
                    .for_each(|entry| recorder.phase(entry, InternodePhase::Running(watched.rail)));
            }
            let waited = call.since.map_or(Duration::ZERO, |since| since.elapsed());
            if waited <= call.timeout {
                return Ok(None);
            }
            let what = call.call.map_or_else(
                || "messages".to_owned(),
                |(call, number)| format!("{call} #{number}"),
            );
            let (seconds, who) = (waited.as_secs_f64(), &watched.who);
            let late = Error::timeout(format!(
                "{what} of CUDA tensors in {who} for {seconds:.1} s (timeout)"
            ));
            call.entries
                .clone()
                .for_each(|entry| recorder.end(entry, &Err(late.clone()), true, "two_level"));
            return Ok(Some(late));
        }
        drop(calls);
        self.changed.notify_all();
        Ok(None)
    }
}
