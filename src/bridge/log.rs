//! The log for C++ (lines from Python, and lines for Python), and the version.

use super::guarded;
use crate::config::Config;
use crate::sys::logging;
use std::time::Duration;

pub(super) fn inform(text: &str) {
    guarded(|| {
        // The first access to the settings starts the log.
        Config::get();
        log::info!("{text}");
        Ok(())
    });
}

pub(super) fn log_to_queue(filter: &str, on: bool) {
    guarded(|| {
        let usual = &Config::get().log;
        if on {
            logging::to_queue(if filter.is_empty() { usual } else { filter });
        } else {
            logging::to_standard_error();
        }
        Ok(())
    });
}

pub(super) fn log_lines(limit_ms: u64) -> String {
    let mut lines = Vec::new();
    guarded(|| {
        let taken = logging::take_lines(Duration::from_millis(limit_ms));
        lines = taken
            .into_iter()
            .map(|line| (line.level.as_str(), line.target, line.text, line.at.as_secs_f64()))
            .collect();
        Ok(())
    });
    serde_json::json!(lines).to_string()
}

pub(super) fn version() -> String {
    env!("TORCH_SYMM_VERSION").into()
}
