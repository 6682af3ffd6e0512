//! The log of a process and of its forked children, each with its own filter: a logger can be set
//! only once, and a child inherits it.
//!
//! Lines go to standard error or into a queue, from which another logging system takes them on its
//! own thread. The thread that logs may hold locks of this crate, so it must never wait for another
//! system's locks.

use super::fork::PerProcess;
use crate::lock::{lock, unpoisoned};
use env_logger::{Builder, Logger};
use log::{Level, Log, Metadata, Record};
use std::collections::VecDeque;
use std::io::Write;
use std::sync::{Arc, Condvar, Mutex, OnceLock};
use std::time::{Duration, SystemTime};

/// Maximum number of queued lines; further lines go to standard error.
const MOST: usize = 10_000;

/// A line of the log.
#[derive(Clone, Debug)]
pub struct LogLine {
    /// The level.
    pub level: Level,
    /// Path of the module that wrote it, such as `symm::bootstrap::claim`.
    pub target: String,
    /// The text.
    pub text: String,
    /// When it was written, as the time since 1970.
    pub at: Duration,
}

#[derive(Default)]
struct LogQueue {
    state: Mutex<LogState>,
    /// Wakes the thread that takes lines.
    added: Condvar,
}

#[derive(Default)]
struct LogState {
    lines: VecDeque<LogLine>,
    /// Filter of the lines that go into the queue; without one, lines go to standard error.
    filter: Option<Arc<Logger>>,
}

impl LogQueue {
    fn filter(&self) -> Option<Arc<Logger>> {
        lock(&self.state).filter.clone()
    }

    /// Queues `line`; false if the queue is full or no longer in use.
    fn add(&self, line: LogLine) -> bool {
        let mut state = lock(&self.state);
        let room = state.filter.is_some() && state.lines.len() < MOST;
        if room {
            state.lines.push_back(line);
            self.added.notify_one();
        }
        room
    }

    fn take(&self, limit: Duration) -> Vec<LogLine> {
        let state = lock(&self.state);
        let idle = |state: &mut LogState| state.lines.is_empty() && state.filter.is_some();
        let (mut state, _) = unpoisoned(self.added.wait_timeout_while(state, limit, idle));
        state.lines.drain(..).collect()
    }
}

static LOGGER: PerProcess<OnceLock<Logger>> = PerProcess::new(OnceLock::new);
static QUEUE: PerProcess<LogQueue> = PerProcess::new(LogQueue::default);

/// Forwards to the logger of the current process.
struct Current;

impl Log for Current {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        match QUEUE.get().filter() {
            Some(filter) => filter.enabled(metadata),
            None => LOGGER.get().get().is_some_and(|logger| logger.enabled(metadata)),
        }
    }

    fn log(&self, record: &Record<'_>) {
        let queue = QUEUE.get();
        if let Some(filter) = queue.filter() {
            let at = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
            let line = || LogLine {
                level: record.level(),
                target: record.target().into(),
                text: record.args().to_string(),
                at,
            };
            if !filter.matches(record) || queue.add(line()) {
                return;
            }
        }
        if let Some(logger) = LOGGER.get().get() {
            logger.log(record);
        }
    }

    fn flush(&self) {}
}

fn filtered(filter: &str) -> Logger {
    Builder::new().parse_filters(filter).build()
}

/// Creates a logger to standard error. Its lines name `rank`, or the pid if `rank` is `None`.
fn written(filter: &str, rank: Option<u32>) -> Logger {
    let author =
        rank.map_or_else(|| format!("pid {}", std::process::id()), |rank| format!("rank {rank}"));
    let line = move |record: &Record<'_>| {
        format!("[{:<5} {} {author}] {}", record.level(), record.target(), record.args())
    };
    Builder::new()
        .parse_filters(filter)
        .format(move |buffer, record| writeln!(buffer, "{}", line(record)))
        .build()
}

/// Starts this process's log to standard error, with `filter` in the syntax of `env_logger`; its
/// lines name `rank`. A logger that the program has set before takes precedence.
pub fn start(filter: &str, rank: Option<u32>) {
    static OURS: OnceLock<bool> = OnceLock::new();
    if *OURS.get_or_init(|| log::set_logger(&Current).is_ok()) {
        let logger = LOGGER.get().get_or_init(|| written(filter, rank));
        log::set_max_level(logger.filter());
    }
}

/// From now on, queues the lines that pass `filter`, instead of writing them to standard error. A
/// forked child starts without a queue.
pub fn to_queue(filter: &str) {
    let logger = filtered(filter);
    log::set_max_level(logger.filter());
    lock(&QUEUE.get().state).filter = Some(Arc::new(logger));
}

/// Writes lines to standard error again. Queued lines stay in the queue.
pub fn to_standard_error() {
    let queue = QUEUE.get();
    lock(&queue.state).filter = None;
    queue.added.notify_all();
    log::set_max_level(LOGGER.get().get().map_or(log::LevelFilter::Off, Logger::filter));
}

/// Takes the queued lines. While lines go to the queue, waits up to `limit` for the first.
pub fn take_lines(limit: Duration) -> Vec<LogLine> {
    QUEUE.get().take(limit)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(text: &str) -> LogLine {
        LogLine { level: Level::Info, target: "symm".into(), text: text.into(), at: Duration::ZERO }
    }

    #[test]
    fn lines_wait_until_somebody_takes_them() {
        let queue = LogQueue::default();
        assert!(!queue.add(line("nobody wants it")));
        assert!(queue.take(Duration::MAX).is_empty(), "nothing comes any more");
        lock(&queue.state).filter = Some(Arc::new(filtered("info")));
        assert!(queue.add(line("one")) && queue.add(line("two")));
        lock(&queue.state).filter = None;
        let taken: Vec<_> = queue.take(Duration::ZERO).into_iter().map(|line| line.text).collect();
        assert_eq!(taken, ["one", "two"]);
    }

    #[test]
    fn a_full_queue_takes_no_more() {
        let queue = LogQueue::default();
        lock(&queue.state).filter = Some(Arc::new(filtered("info")));
        let added = (0..MOST + 10).filter(|_| queue.add(line("one"))).count();
        assert_eq!(
            (added, queue.take(Duration::ZERO).len(), queue.add(line("again"))),
            (MOST, MOST, true)
        );
    }

    #[test]
    fn who_waits_is_woken_by_a_line_and_by_the_end() {
        let queue = LogQueue::default();
        lock(&queue.state).filter = Some(Arc::new(filtered("info")));
        std::thread::scope(|scope| {
            let taker =
                scope.spawn(|| (queue.take(Duration::MAX).len(), queue.take(Duration::MAX).len()));
            queue.add(line("one"));
            while !lock(&queue.state).lines.is_empty() {
                std::thread::yield_now();
            }
            lock(&queue.state).filter = None;
            queue.added.notify_all();
            assert_eq!(taker.join().expect("no panic"), (1, 0));
        });
    }
}
