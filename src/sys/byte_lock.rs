//! Advisory locks on single bytes of a file. They belong to the open file, not to the process:
//! threads that each open the file exclude each other, closing another descriptor of the file
//! releases nothing, and the kernel releases the locks of a killed process.
#![allow(unsafe_code, reason = "system calls that have no safe form")]

use super::eintr::retry;
use rustix::fd::{AsRawFd, BorrowedFd};
use rustix::io::{Errno, Result};
use std::time::{Duration, Instant};

/// Limit for the search for a lock's holder.
const LOCK_OWNER_SEARCH: Duration = Duration::from_millis(100);

/// The mode in which a lock is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Compatible with other shared locks.
    Shared,
    /// Excludes all other locks.
    Exclusive,
}

/// Locks `byte` of `file`, replacing a lock that this open file has there. If another open file has
/// a conflicting lock, returns false and changes nothing.
pub fn try_lock(file: BorrowedFd<'_>, byte: u64, mode: Mode) -> Result<bool> {
    let kind = match mode {
        Mode::Shared => libc::F_RDLCK,
        Mode::Exclusive => libc::F_WRLCK,
    };
    match set(file, byte, kind) {
        Ok(()) => Ok(true),
        Err(Errno::AGAIN | Errno::ACCESS) => Ok(false),
        Err(errno) => Err(errno),
    }
}

/// Releases `byte`.
pub fn unlock(file: BorrowedFd<'_>, byte: u64) -> Result<()> {
    set(file, byte, libc::F_UNLCK)
}

/// Returns a process that holds `byte` of `file`, if /proc shows it: the kernel does not report the
/// owner of a lock that belongs to an open file.
pub fn holder(file: BorrowedFd<'_>, byte: u64) -> Option<u32> {
    let give_up = Instant::now() + LOCK_OWNER_SEARCH;
    let own = std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd())).ok()?;
    let range = format!(" {byte} {byte}");
    for process in std::fs::read_dir("/proc").ok()?.flatten() {
        let Some(pid) = process.file_name().to_str().and_then(|name| name.parse().ok()) else {
            continue;
        };
        let Ok(open) = std::fs::read_dir(process.path().join("fd")) else { continue };
        for one in open.flatten() {
            if Instant::now() >= give_up {
                return None;
            }
            if std::fs::read_link(one.path()).is_ok_and(|path| path == own)
                && let Ok(info) =
                    std::fs::read_to_string(process.path().join("fdinfo").join(one.file_name()))
                && info.lines().any(|line| line.starts_with("lock:") && line.ends_with(&range))
            {
                return Some(pid);
            }
        }
    }
    None
}

fn set(file: BorrowedFd<'_>, byte: u64, kind: i32) -> Result<()> {
    let start = i64::try_from(byte).map_err(|_| Errno::OVERFLOW)?;
    // SAFETY: all-zero is a value of this structure of integers.
    let mut range: libc::flock = unsafe { std::mem::zeroed() };
    // These constants are small; their type differs from the field's.
    range.l_type = kind as libc::c_short;
    range.l_whence = libc::SEEK_SET as libc::c_short;
    range.l_start = start;
    range.l_len = 1;
    retry(|| {
        // SAFETY: `file` is open while it is borrowed, and the request reads a `flock`, which
        // `range` is.
        let status = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const range) };
        if status == 0 {
            return Ok(());
        }
        Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    #[test]
    fn open_files_exclude_one_another_and_let_go_when_closed() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        let [first, second] = [(); 2].map(|()| file.reopen().expect("opened again"));
        let lock = |file: &std::fs::File, byte, mode| {
            try_lock(file.as_fd(), byte, mode).expect("locks are offered")
        };
        assert!(lock(&first, 7, Mode::Shared) && lock(&second, 7, Mode::Shared));
        assert!(!lock(&first, 7, Mode::Exclusive), "shared by two");
        assert!(lock(&second, 8, Mode::Exclusive), "another byte");
        assert_eq!(
            [holder(first.as_fd(), 8), holder(first.as_fd(), 9)],
            [Some(std::process::id()), None]
        );
        unlock(second.as_fd(), 7).expect("unlocked");
        assert!(lock(&first, 7, Mode::Exclusive), "by the last one");
        assert!(!lock(&second, 7, Mode::Shared));
        drop(first);
        // A child that another test has just forked also holds the file, until it ends.
        let begun = std::time::Instant::now();
        while !lock(&second, 7, Mode::Shared) {
            assert!(begun.elapsed().as_secs() < 20, "the file is closed");
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
    }
}
