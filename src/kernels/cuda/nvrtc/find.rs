//! Search for the compiler's library.

use super::Nvrtc;
use crate::config::Config;
use crate::error::{Error, Result};
use crate::lock::lock;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock};

/// Names of the library, newest first; the number is the version of its interface.
const NAMES: [&str; 3] = ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so.11.2"];

/// Directories given by the caller.
static FOLDERS: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// Sets the directories to search for the library, replacing those of the last call. No effect once
/// the library is open.
pub fn search_in(folders: Vec<PathBuf>) {
    *lock(&FOLDERS) = folders;
}

/// Returns the compiler of this process: opened at the first call that finds it, and never closed.
/// Fails with `Config` if it is not found.
pub fn nvrtc() -> Result<&'static Nvrtc> {
    static OPENED: OnceLock<Nvrtc> = OnceLock::new();
    match OPENED.get() {
        Some(opened) => Ok(opened),
        // Several threads may open the library at once; the system counts the references.
        None => find().map(|found| OPENED.get_or_init(|| found)),
    }
}

fn find() -> Result<Nvrtc> {
    let found = match &Config::get().nvrtc {
        Some(path) if path.is_dir() => in_folder(path).unwrap_or_else(|| {
            Err(Error::config(format!(
                "SYMM_NVRTC_PATH={} is a folder without any of {}",
                path.display(),
                NAMES.join(", ")
            )))
        }),
        Some(path) => Nvrtc::open(path.as_os_str(), 0),
        None => search(),
    }?;
    log::info!("found NVRTC {}.{} at {}", found.version.0, found.version.1, found.path.display());
    Ok(found)
}

/// Searches the caller's directories, then the libraries open in this process, then the system's
/// linker paths.
pub(super) fn search() -> Result<Nvrtc> {
    let folders = lock(&FOLDERS).clone();
    if let Some(found) = folders.iter().find_map(|folder| in_folder(folder)) {
        return found;
    }
    let attempts = [libc::RTLD_NOLOAD, 0]
        .into_iter()
        .flat_map(|flag| NAMES.into_iter().map(move |name| (name, flag)));
    let mut opened = attempts.map(|(name, flag)| Nvrtc::open(OsStr::new(name), flag));
    opened.find_map(Result::ok).ok_or_else(|| {
        Error::config(format!(
            "no CUDA kernel can be compiled: none of {} was found in {} folders of Python's \
             packages or by the system's linker; \
             SYMM_NVRTC_PATH may name it",
            NAMES.join(", "),
            folders.len()
        ))
    })
}

/// Returns `None` if the library is not in `folder`.
pub(super) fn in_folder(folder: &Path) -> Option<Result<Nvrtc>> {
    NAMES
        .iter()
        .map(|name| folder.join(name))
        .find(|path| path.exists())
        .map(|path| Nvrtc::open(path.as_os_str(), 0))
}
