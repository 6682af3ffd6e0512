//! Previously compiled machine code, kept in files: compiling takes milliseconds to seconds,
//! reading microseconds.
//!
//! The cache only saves time: an error in the directory or an entry is logged once and costs a
//! compilation. Any number of processes may use a directory at once.

mod entry;
mod folder;

use super::source::{Header, Program};
use crate::config::CacheDir;
use crate::error::{Error, Result};
pub use entry::CacheKey;
pub use folder::Folder;
use std::sync::atomic::{AtomicBool, Ordering};

impl CacheKey {
    /// Returns the key of the code that NVRTC of this `version` compiles from `program` with
    /// `options`, which name the architecture.
    pub fn of(
        version: (i32, i32),
        program: &Program,
        headers: &[Header],
        options: &[String],
    ) -> Self {
        let (version, options) = (format!("{}.{}", version.0, version.1), options.join(" "));
        let headers = headers.iter().flat_map(|header| [header.name, header.text]);
        Self::over(
            [version.as_str(), &options, program.name, program.text].into_iter().chain(headers),
        )
    }
}

/// Returns the machine code under `key`: read from the cache, or made and then stored. It fails
/// only if `make` does.
pub fn kept(
    place: &CacheDir,
    key: &CacheKey,
    make: impl FnOnce() -> Result<Vec<u8>>,
) -> Result<Vec<u8>> {
    let Some(folder) = folder(place) else { return make() };
    if let Some(code) = read(&folder, key) {
        return Ok(code);
    }
    let code = make()?;
    if let Err(error) = folder.store(key, &code) {
        complain(&error);
    }
    Ok(code)
}

/// Returns the machine code under `key`, if it can be read.
pub fn kept_before(place: &CacheDir, key: &CacheKey) -> Option<Vec<u8>> {
    read(&folder(place)?, key)
}

fn read(folder: &Folder, key: &CacheKey) -> Option<Vec<u8>> {
    folder.load(key).unwrap_or_else(|error| {
        complain(&error);
        None
    })
}

fn folder(place: &CacheDir) -> Option<Folder> {
    match place {
        CacheDir::At(path) => Some(Folder::new(path)),
        CacheDir::Off => None,
        CacheDir::Unknown => {
            complain(&Error::config(
                "neither SYMM_CACHE_DIR, XDG_CACHE_HOME nor HOME names a folder",
            ));
            None
        }
    }
}

/// Logs a problem: the first one as a warning, later ones at debug level.
fn complain(error: &Error) {
    static SAID: AtomicBool = AtomicBool::new(false);
    let level =
        if SAID.swap(true, Ordering::Relaxed) { log::Level::Debug } else { log::Level::Warn };
    log::log!(
        level,
        "the cache of compiled CUDA kernels does not serve, which costs time: {error}"
    );
}

#[cfg(test)]
mod tests;
