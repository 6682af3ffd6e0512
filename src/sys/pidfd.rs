//! Handles of processes: they cannot come to mean another process, as numbers can.

use crate::error::{Error, Result};
use rustix::process::{Pid, PidfdFlags};
use std::collections::BTreeMap;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// A process, told from an earlier one of the same number by its start time (clock ticks since boot).
pub type Process = (u32, u64);

/// This process.
pub fn own() -> Result<Process> {
    let pid = std::process::id();
    let start = start_time(pid).ok_or_else(|| Error::config("reading this process's start time from /proc/self/stat failed"))?;
    Ok((pid, start))
}

/// When the process started, in clock ticks since boot; `None` if there is no such process, or it has ended.
pub fn start_time(pid: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // Field 3 is the state, field 22 the start; the name before may contain anything.
    let mut fields = stat.rsplit_once(") ")?.1.split(' ');
    let state = fields.next()?;
    if matches!(state, "Z" | "X") {
        return None;
    }
    fields.nth(18)?.parse().ok()
}

/// Whether the process still runs.
pub fn runs(process: Process) -> bool {
    start_time(process.0) == Some(process.1)
}

/// A handle of this process, for sending to others.
pub fn open_own() -> Result<OwnedFd> {
    rustix::process::pidfd_open(rustix::process::getpid(), PidfdFlags::empty()).map_err(|e| Error::os("pidfd_open", e))
}

/// A handle of another process of this PID namespace.
pub fn open(process: Process) -> Result<OwnedFd> {
    let pid = Pid::from_raw(process.0 as i32).ok_or_else(|| Error::internal("process id 0"))?;
    let fd = rustix::process::pidfd_open(pid, PidfdFlags::empty()).map_err(|e| Error::os(&format!("pidfd_open({})", process.0), e))?;
    // The number may have passed to another process before the handle was made, not after.
    if runs(process) { Ok(fd) } else { Err(Error::peer(format!("process {} has ended", process.0))) }
}

/// One handle per process, however many groups share it.
pub fn shared(process: Process, handle: OwnedFd) -> Arc<OwnedFd> {
    static KNOWN: Mutex<BTreeMap<Process, Weak<OwnedFd>>> = Mutex::new(BTreeMap::new());
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    known.retain(|_, handle| handle.strong_count() > 0);
    if let Some(handle) = known.get(&process).and_then(Weak::upgrade) {
        return handle;
    }
    let handle = Arc::new(handle);
    known.insert(process, Arc::downgrade(&handle));
    handle
}

/// `struct pidfd_info` of linux/pidfd.h, first version.
#[repr(C)]
#[derive(Default)]
struct PidfdInfo {
    mask: u64,
    cgroup: u64,
    ids: [u32; 11],
    exit_code: i32,
}

const PIDFD_INFO_EXIT: u64 = 1 << 3;
/// `_IOWR(0xFF, 11, struct pidfd_info)`.
const PIDFD_GET_INFO: libc::c_ulong = 3 << 30 | (size_of::<PidfdInfo>() as libc::c_ulong) << 16 | 0xff << 8 | 11;

/// How a process ended, where the kernel tells (Linux 6.15, once its parent has collected it).
pub fn how_it_ended(handle: &OwnedFd) -> Option<String> {
    let mut info = PidfdInfo { mask: PIDFD_INFO_EXIT, ..Default::default() };
    // SAFETY: the kernel writes at most the size that the request encodes, which is that of `info`.
    let outcome = unsafe { libc::ioctl(handle.as_raw_fd(), PIDFD_GET_INFO, &raw mut info) };
    if outcome != 0 || info.mask & PIDFD_INFO_EXIT == 0 {
        return None;
    }
    let status = info.exit_code;
    if libc::WIFSIGNALED(status) {
        let signal = libc::WTERMSIG(status);
        let name = match signal {
            libc::SIGKILL => " (SIGKILL)",
            libc::SIGSEGV => " (SIGSEGV)",
            libc::SIGABRT => " (SIGABRT)",
            libc::SIGTERM => " (SIGTERM)",
            libc::SIGINT => " (SIGINT)",
            libc::SIGBUS => " (SIGBUS)",
            _ => "",
        };
        return Some(format!("was killed by signal {signal}{name}"));
    }
    Some(format!("exited with code {}", libc::WEXITSTATUS(status)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_runs_and_one_like_it_does_not() {
        let own = own().expect("own");
        assert!(runs(own));
        assert!(!runs((own.0, own.1 + 1)));
        let first = shared(own, open_own().expect("pidfd"));
        assert!(Arc::ptr_eq(&first, &shared(own, open(own).expect("pidfd"))));
    }

    #[test]
    fn an_ended_process_does_not_run() {
        let mut child = std::process::Command::new("true").spawn().expect("spawn");
        let pid = child.id();
        child.wait().expect("wait");
        assert_eq!(start_time(pid), None);
    }
}
