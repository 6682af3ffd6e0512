//! Files and folders that only their user may write to.

use super::random;
use rustix::fd::BorrowedFd;
use rustix::fs::{AtFlags, Mode, OFlags, RawMode, Stat, openat, renameat, unlinkat};
use std::fs::File;
use std::io::Write;

/// Permission bits that let others write.
const OTHERS_WRITE: RawMode = 0o022;

/// Fails, with the reason, unless it is the user's and nobody else may write to it. That others may read does no harm; and what is wrong is
/// not repaired, for a folder that the user named may be shared on purpose.
pub fn check_owner(status: &Stat) -> Result<(), String> {
    let user = rustix::process::geteuid().as_raw();
    if status.st_uid != user {
        return Err(format!("belongs to user {}, this process to {user}", status.st_uid));
    }
    if status.st_mode & OTHERS_WRITE != 0 {
        return Err(format!("can be written by others (mode {:o}): chmod go-w makes it usable", status.st_mode & 0o7777));
    }
    Ok(())
}

/// Puts a file with `content` in the place of `name` in `folder`. Readers see the old content or the new, never a part. What a killed
/// process leaves is called `<prefix><random>.tmp`.
pub fn replace(folder: BorrowedFd<'_>, prefix: &str, name: &str, content: &[u8]) -> std::io::Result<()> {
    let random = random::bytes().map_err(std::io::Error::other)?;
    // Not the process id: containers that share the folder count their own.
    let temporary = format!("{prefix}{:016x}.tmp", u64::from_ne_bytes(random));
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = openat(folder, temporary.as_str(), flags, Mode::RUSR | Mode::WUSR)?;
    // Without fsync: readers must be able to tell what a crash leaves behind.
    let written = File::from(file).write_all(content);
    written.and_then(|()| Ok(renameat(folder, temporary.as_str(), folder, name)?)).inspect_err(|_| {
        // It may be gone; and if it cannot be removed, nothing more can be done.
        let _ = unlinkat(folder, temporary.as_str(), AtFlags::empty());
    })
}
