//! Advisory locks on single bytes of a file. They belong to the open file, not to the process: threads that open it each
//! for themselves exclude one another, closing another descriptor of it releases nothing, and a killed holder lets go.

use rustix::fd::{AsRawFd, BorrowedFd};
use rustix::io::{Errno, Result};

/// With whom a lock can be held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// With others that are shared.
    Shared,
    /// With nobody.
    Exclusive,
}

/// Locks `byte` of `file`, in place of a lock that this open file has there; whether it could. Where not, nothing changes.
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

/// Lets go of `byte`.
pub fn unlock(file: BorrowedFd<'_>, byte: u64) -> Result<()> {
    set(file, byte, libc::F_UNLCK)
}

fn set(file: BorrowedFd<'_>, byte: u64, kind: i32) -> Result<()> {
    let start = i64::try_from(byte).map_err(|_| Errno::OVERFLOW)?;
    // SAFETY: all-zero is a value of this structure of integers.
    let mut range: libc::flock = unsafe { std::mem::zeroed() };
    // These constants are small; their type differs from that of the field.
    range.l_type = kind as libc::c_short;
    range.l_whence = libc::SEEK_SET as libc::c_short;
    range.l_start = start;
    range.l_len = 1;
    rustix::io::retry_on_intr(|| {
        // SAFETY: `file` is open while it is borrowed, and the request reads a `flock`, which `range` is.
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
        let lock = |file: &std::fs::File, byte, mode| try_lock(file.as_fd(), byte, mode).expect("locks are offered");
        assert!(lock(&first, 7, Mode::Shared) && lock(&second, 7, Mode::Shared));
        assert!(!lock(&first, 7, Mode::Exclusive), "shared by two");
        assert!(lock(&second, 8, Mode::Exclusive), "another byte");
        unlock(second.as_fd(), 7).expect("unlocked");
        assert!(lock(&first, 7, Mode::Exclusive), "by the last one");
        assert!(!lock(&second, 7, Mode::Shared));
        drop(first);
        assert!(lock(&second, 7, Mode::Shared));
    }
}
