//! The folder of the cache. What is in it is run on the user's device: only the user may be able to write there.

use super::entry::Key;
use crate::error::{Error, Result};
use crate::sys::random;
use rustix::fd::OwnedFd;
use rustix::fs::{AtFlags, FileType, Mode, OFlags, RawMode, Stat, fstat, open, openat, renameat, unlinkat};
use rustix::io::Errno;
use std::fs::{DirBuilder, File};
use std::io::{Read, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

/// The largest file that is read. Kernels have tens of kilobytes.
const LARGEST: u64 = 64 << 20;

/// Who else may write.
const OTHERS_WRITE: RawMode = 0o022;

/// Keeps machine code below a path.
///
/// It holds no open file: what is used so seldom need not, and a program that closes every descriptor does no harm.
#[derive(Debug)]
pub struct Folder {
    path: PathBuf,
}

impl Folder {
    /// The folder at `path`, which need not exist.
    pub fn new(path: &Path) -> Self {
        Self { path: path.into() }
    }

    /// What was stored under `key`; `None` if nothing was.
    pub fn load(&self, key: &Key) -> Result<Option<Vec<u8>>> {
        let Some(folder) = self.open()? else { return Ok(None) };
        let name = key.file();
        let about = |reason: String| Error::internal(format!("{}/{name} {reason}", self.path.display()));
        // Not blocking: a pipe in the place of the file would wait for a writer.
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = match openat(&folder, name.as_str(), flags, Mode::empty()) {
            Ok(file) => file,
            Err(Errno::NOENT) => return Ok(None),
            Err(Errno::LOOP) => return Err(about("is a symbolic link, which is not followed".into())),
            Err(errno) => return Err(about(format!("cannot be opened: {errno}"))),
        };
        let status = fstat(&file).map_err(|errno| about(format!("cannot be looked at: {errno}")))?;
        if FileType::from_raw_mode(status.st_mode) != FileType::RegularFile {
            return Err(about("is not a file".into()));
        }
        check_owner(&status).map_err(about)?;
        let mut content = Vec::new();
        let read = File::from(file).take(LARGEST + 1).read_to_end(&mut content);
        read.map_err(|error| about(format!("cannot be read: {error}")))?;
        if content.len() as u64 > LARGEST {
            return Err(about(format!("has more than {LARGEST} bytes")));
        }
        key.unseal(content).map(Some).map_err(about)
    }

    /// Keeps `code` under `key`, in place of what was there. Readers see the old content or the new, never a part.
    pub fn store(&self, key: &Key, code: &[u8]) -> Result<()> {
        let about = |what: &str, reason: String| Error::internal(format!("the folder {} {what}: {reason}", self.path.display()));
        let made = DirBuilder::new().recursive(true).mode(0o700).create(&self.path);
        made.map_err(|error| about("cannot be made", error.to_string()))?;
        let folder = self.open()?.ok_or_else(|| about("cannot be used", "it has just been removed".into()))?;
        let random = random::bytes()?;
        // Not the process id: containers that share the folder count their own.
        let temporary = format!(".{:016x}.tmp", u64::from_ne_bytes(random));
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = openat(&folder, temporary.as_str(), flags, Mode::RUSR | Mode::WUSR);
        let file = file.map_err(|errno| about("takes no file", errno.to_string()))?;
        // Without fsync: what a crash leaves behind fails its checksum.
        let written = File::from(file).write_all(&key.seal(code));
        let moved = written.and_then(|()| Ok(renameat(&folder, temporary.as_str(), &folder, key.file())?));
        moved.map_err(|error| {
            // It may be gone; and if it cannot be removed, nothing more can be done.
            let _ = unlinkat(&folder, temporary.as_str(), AtFlags::empty());
            about(&format!("does not take the {} bytes of {}", code.len(), key.file()), error.to_string())
        })
    }

    /// The folder, if it exists, is the user's and nobody else may write in it.
    fn open(&self) -> Result<Option<OwnedFd>> {
        let about = |reason: String| Error::config(format!("the folder {} {reason}", self.path.display()));
        let folder = match open(&self.path, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty()) {
            Ok(folder) => folder,
            Err(Errno::NOENT) => return Ok(None),
            Err(errno) => return Err(about(format!("cannot be opened: {errno}"))),
        };
        let status = fstat(&folder).map_err(|errno| about(format!("cannot be looked at: {errno}")))?;
        check_owner(&status).map_err(about)?;
        Ok(Some(folder))
    }
}

/// Fails, with the reason, unless it is the user's and nobody else may write to it. That others may read does no harm; and what is wrong is
/// not repaired, for a folder that the user named may be shared on purpose.
fn check_owner(status: &Stat) -> std::result::Result<(), String> {
    let user = rustix::process::geteuid().as_raw();
    if status.st_uid != user {
        return Err(format!("belongs to user {}, this process to {user}", status.st_uid));
    }
    if status.st_mode & OTHERS_WRITE != 0 {
        return Err(format!("can be written by others (mode {:o}): chmod go-w makes it usable", status.st_mode & 0o7777));
    }
    Ok(())
}
