//! Threads that help to send, started when many answers are first due at once.

use rayon_core::{ThreadPool, ThreadPoolBuilder};

/// Maximum number of sending threads. More do not pay off, because the clients need cores as well.
const MOST: usize = 3;

/// A pool of threads, made on first use.
#[derive(Default)]
pub(super) struct SendPool(Option<Option<ThreadPool>>);

impl SendPool {
    /// Returns the pool, unless there is only one core or no thread can be started.
    pub(super) fn get(&mut self) -> Option<&ThreadPool> {
        let make = || {
            let cores = std::thread::available_parallelism().map_or(1, usize::from);
            let builder = ThreadPoolBuilder::new()
                .num_threads(MOST.min(cores - 1))
                .thread_name(|index| format!("symm-send-{index}"));
            if cores > 1 { builder.build().ok() } else { None }
        };
        self.0.get_or_insert_with(make).as_ref()
    }
}
