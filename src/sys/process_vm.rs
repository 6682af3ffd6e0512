//! Reads other processes' memory.
#![allow(unsafe_code, reason = "system calls that have no safe form")]

use super::process;
use crate::error::{Error, Result};
use rustix::io::Errno;
use std::sync::atomic::{Ordering, fence};

/// Copies `bytes` bytes at address `from` of process `pid` to `to`, without help of that process.
/// Later reads by this thread are ordered after the copy.
///
/// # Errors
/// The memory cannot be read, or the process known as `pid` has ended, so that another process's
/// memory may have been read.
///
/// # Safety
/// `to` must be valid for writes of `bytes` bytes, which no other thread may access meanwhile.
pub unsafe fn read_memory(pid: u32, from: usize, to: *mut u8, bytes: usize) -> Result<()> {
    let mut done = 0;
    while done < bytes {
        let local = libc::iovec { iov_base: to.wrapping_add(done).cast(), iov_len: bytes - done };
        let remote =
            libc::iovec { iov_base: from.wrapping_add(done) as *mut _, iov_len: bytes - done };
        // A peer may have sent `from`: an end that wraps is a bad address like any other. SAFETY:
        // `local` lies within the caller's range; a bad remote address is an error, not a fault.
        let copied = unsafe { libc::process_vm_readv(pid as i32, &local, 1, &remote, 1, 0) };
        match copied {
            ..=0 => {
                let errno =
                    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO);
                return Err(failed(pid, bytes, errno));
            }
            copied => done += copied as usize,
        }
    }
    // If the process has not ended by now, no other process had its id during the read.
    if process::has_ended(pid) {
        return Err(failed(pid, bytes, Errno::SRCH));
    }
    fence(Ordering::Acquire);
    Ok(())
}

/// Returns the error for a read that failed. `ESRCH` means that the process has exited or is
/// exiting and has freed its memory, so the error has the kind `Peer`.
fn failed(pid: u32, bytes: usize, errno: Errno) -> Error {
    let text = format!("reading {bytes} bytes of process {pid}: {errno}");
    if errno == Errno::SRCH { Error::peer(text) } else { Error::internal(text) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;
    use rustix::process::{Pid, PidfdFlags, pidfd_open};
    use std::process::Command;
    use std::sync::Arc;

    #[test]
    fn own_memory_can_be_read_and_bad_addresses_are_errors() {
        let (pid, from) = (std::process::id(), [1u8, 2, 3, 4]);
        let mut to = [0u8; 4];
        // SAFETY: `to` is a local array of 4 bytes.
        unsafe { read_memory(pid, from.as_ptr() as usize, to.as_mut_ptr(), 4) }
            .expect("own memory");
        assert_eq!(to, from);
        // SAFETY: as above.
        assert!(unsafe { read_memory(pid, 8, to.as_mut_ptr(), 4) }.is_err());
    }
    #[test]
    fn memory_of_whoever_has_the_number_of_an_ended_process_is_not_taken_for_its() {
        let mut living = Command::new("sleep").arg("60").spawn().expect("sleep");
        let mut ended = Command::new("true").spawn().expect("true");
        let fd = Arc::new(
            pidfd_open(Pid::from_child(&ended), PidfdFlags::empty()).expect("a descriptor"),
        );
        ended.wait().expect("its child");
        let maps =
            std::fs::read_to_string(format!("/proc/{}/maps", living.id())).expect("its maps");
        let start = usize::from_str_radix(maps.split('-').next().expect("a mapping"), 16)
            .expect("an address");
        let mut to = [0u8; 4];
        // SAFETY: `to` is a local array of 4 bytes.
        let mut read = || unsafe { read_memory(living.id(), start, to.as_mut_ptr(), 4) };
        assert_eq!(read(), Ok(()), "nobody else had the number");
        process::know(process::ProcessId { pid: living.id(), start_time: 0 }, &fd);
        assert!(read().is_err_and(|error| error.kind == ErrorKind::Peer));
        living.kill().expect("its child");
        living.wait().expect("its child");
    }
}
