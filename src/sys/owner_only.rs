//! Files and directories that only their user may write.

use super::random;
use rustix::fd::BorrowedFd;
use rustix::fs::{AtFlags, Mode, OFlags, RawMode, Stat, openat, renameat, unlinkat};
use std::fs::File;
use std::io::Write;

/// Permission bits that let others write.
const OTHERS_WRITE: RawMode = 0o022;

/// Fails, with the reason, unless the file belongs to this user and no other user may write to it.
/// Other users may read it. The permissions are not repaired, because a directory that the user
/// named may be shared on purpose.
pub fn check_owner(status: &Stat) -> Result<(), String> {
    let user = rustix::process::geteuid().as_raw();
    if status.st_uid != user {
        return Err(format!("belongs to user {}, this process to {user}", status.st_uid));
    }
    if status.st_mode & OTHERS_WRITE != 0 {
        return Err(format!(
            "can be written by others (mode {:o}): chmod go-w makes it usable",
            status.st_mode & 0o7777
        ));
    }
    Ok(())
}

/// Atomically replaces `name` in `folder` by a file with `content`, so readers see the old or the
/// new content. A process that is killed meanwhile leaves a file `<prefix><random>.tmp`.
pub fn replace(
    folder: BorrowedFd<'_>,
    prefix: &str,
    name: &str,
    content: &[u8],
) -> std::io::Result<()> {
    let random = random::bytes().map_err(std::io::Error::other)?;
    // A random name, not the process id: containers that share the directory may have equal process
    // ids.
    let temporary = format!("{prefix}{:016x}.tmp", u64::from_ne_bytes(random));
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = openat(folder, temporary.as_str(), flags, Mode::RUSR | Mode::WUSR)?;
    // Without fsync: readers must detect what a crash leaves behind.
    let written = File::from(file).write_all(content);
    written.and_then(|()| Ok(renameat(folder, temporary.as_str(), folder, name)?)).inspect_err(
        |_| {
            // The temporary file may already be removed, and if removing it fails, nothing more can
            // be done.
            let _ = unlinkat(folder, temporary.as_str(), AtFlags::empty());
        },
    )
}
