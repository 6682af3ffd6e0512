//! Threads that help to send; there are none until many clients have come.

use rayon_core::{ThreadPool, ThreadPoolBuilder};

/// Most threads that send; more do not pay: the clients need cores as well.
const MOST: usize = 3;

/// A pool that is made when it is first asked for.
#[derive(Default)]
pub(super) struct Senders(Option<Option<ThreadPool>>);

impl Senders {
    /// The pool, unless there is one core only or no thread to be had.
    pub(super) fn get(&mut self) -> Option<&ThreadPool> {
        let make = || {
            let cores = std::thread::available_parallelism().map_or(1, usize::from);
            let builder = ThreadPoolBuilder::new().num_threads(MOST.min(cores - 1)).thread_name(|index| format!("symm-send-{index}"));
            if cores > 1 { builder.build().ok() } else { None }
        };
        self.0.get_or_insert_with(make).as_ref()
    }
}
