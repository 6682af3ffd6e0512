//! Lines of Python in the log, as C++ sees them.

use super::guarded;
use crate::config::Config;

pub(super) fn inform(text: &str) {
    guarded(|| {
        // The first to ask for the settings starts the log.
        Config::get();
        log::info!("{text}");
        Ok(())
    });
}
