//! The directory of the cache. Its content runs on the user's device, so only the user may be able
//! to write there.

use super::entry::CacheKey;
use crate::error::{Error, Result};
use crate::sys::owner_only;
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{FileType, Mode, OFlags, fstat, open, openat};
use rustix::io::Errno;
use std::fs::{DirBuilder, File};
use std::io::Read;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

/// Maximum size of a file that is read. Kernels have tens of kilobytes.
const LARGEST: u64 = 64 << 20;

/// Keeps machine code below a path.
///
/// It holds no open file: the cache is used rarely, and a program that closes every file descriptor
/// then does no harm.
#[derive(Debug)]
pub struct Folder {
    path: PathBuf,
}

impl Folder {
    /// Makes a value for the directory at `path`, which need not exist.
    pub fn new(path: &Path) -> Self {
        Self { path: path.into() }
    }

    /// Loads the code stored under `key`; `None` if there is no such entry.
    pub fn load(&self, key: &CacheKey) -> Result<Option<Vec<u8>>> {
        let Some(folder) = self.open()? else { return Ok(None) };
        let name = key.file();
        let about =
            |reason: String| Error::internal(format!("{}/{name} {reason}", self.path.display()));
        // Not blocking, because opening a pipe of this name would wait for a writer.
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = match openat(&folder, name.as_str(), flags, Mode::empty()) {
            Ok(file) => file,
            Err(Errno::NOENT) => return Ok(None),
            Err(Errno::LOOP) => {
                return Err(about("is a symbolic link, which is not followed".into()));
            }
            Err(errno) => return Err(about(format!("cannot be opened: {errno}"))),
        };
        let status =
            fstat(&file).map_err(|errno| about(format!("cannot be looked at: {errno}")))?;
        if FileType::from_raw_mode(status.st_mode) != FileType::RegularFile {
            return Err(about("is not a file".into()));
        }
        owner_only::check_owner(&status).map_err(about)?;
        let mut content = Vec::new();
        let read = File::from(file).take(LARGEST + 1).read_to_end(&mut content);
        read.map_err(|error| about(format!("cannot be read: {error}")))?;
        if content.len() as u64 > LARGEST {
            return Err(about(format!("has more than {LARGEST} bytes")));
        }
        key.unseal(content).map(Some).map_err(about)
    }

    /// Stores `code` under `key` and replaces the previous content. Readers see all of the old
    /// content or all of the new content.
    pub fn store(&self, key: &CacheKey, code: &[u8]) -> Result<()> {
        let about = |what: &str, reason: String| {
            Error::internal(format!("the folder {} {what}: {reason}", self.path.display()))
        };
        let made = DirBuilder::new().recursive(true).mode(0o700).create(&self.path);
        made.map_err(|error| about("cannot be made", error.to_string()))?;
        let folder = self
            .open()?
            .ok_or_else(|| about("cannot be used", "it has just been removed".into()))?;
        // A file that a crash left incomplete fails its checksum.
        owner_only::replace(folder.as_fd(), ".", &key.file(), &key.seal(code)).map_err(|error| {
            about(
                &format!("does not take the {} bytes of {}", code.len(), key.file()),
                error.to_string(),
            )
        })
    }

    /// Opens the directory, if it exists; fails unless the user owns it and no other user may write
    /// to it.
    fn open(&self) -> Result<Option<OwnedFd>> {
        let about =
            |reason: String| Error::config(format!("the folder {} {reason}", self.path.display()));
        let folder = match open(
            &self.path,
            OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC,
            Mode::empty(),
        ) {
            Ok(folder) => folder,
            Err(Errno::NOENT) => return Ok(None),
            Err(errno) => return Err(about(format!("cannot be opened: {errno}"))),
        };
        let status =
            fstat(&folder).map_err(|errno| about(format!("cannot be looked at: {errno}")))?;
        owner_only::check_owner(&status).map_err(about)?;
        Ok(Some(folder))
    }
}
