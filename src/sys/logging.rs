//! Log of a process and of those that it forks, each with its own filter: a logger can be set once, and a child inherits it.

use super::fork::PerProcess;
use env_logger::{Builder, Logger};
use log::{Log, Metadata, Record};
use std::sync::OnceLock;

static LOGGER: PerProcess<OnceLock<Logger>> = PerProcess::new(OnceLock::new);

/// Passes on to the logger of the process at hand.
struct Current;

impl Log for Current {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        LOGGER.get().get().is_some_and(|logger| logger.enabled(metadata))
    }

    fn log(&self, record: &Record<'_>) {
        if let Some(logger) = LOGGER.get().get() {
            logger.log(record);
        }
    }

    fn flush(&self) {}
}

/// Starts this process's log, to standard error, with `filter` as `env_logger` reads it. Where the program around us has set a logger, that
/// one is used.
pub fn start(filter: &str) {
    static OURS: OnceLock<bool> = OnceLock::new();
    if *OURS.get_or_init(|| log::set_logger(&Current).is_ok()) {
        let logger = LOGGER.get().get_or_init(|| Builder::new().parse_filters(filter).build());
        log::set_max_level(logger.filter());
    }
}
