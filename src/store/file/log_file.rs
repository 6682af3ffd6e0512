//! The open file: reads, writes and locks.

use super::backoff::Backoff;
use super::log::LogSource;
use super::path::{StorePath, is_coherent};
use crate::error::{Error, Result};
use crate::sys::byte_lock::{self, Mode};
use crate::sys::fork::CloseInChild;
use crate::sys::{eintr::retry, process};
use rustix::fs::{fstat, ftruncate};
use rustix::io::{Errno, pread, pwrite};
use std::fs::File;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

/// The byte that is locked during an operation. It lies far behind the data, because some network
/// file systems cannot read a locked byte.
const OPERATION: u64 = 1 << 62;

/// The byte that each user keeps locked until it leaves.
const USERS: u64 = OPERATION + 1;

/// Pause between two attempts at a lock that is usually held for microseconds.
pub(super) const LOCK_RETRY: Duration = Duration::from_micros(200);

/// The open file at a path.
pub(super) struct LogFile {
    /// Prevents forked children from sharing the file. This field precedes `file`, because it must
    /// be dropped first.
    _unshared: Option<CloseInChild>,
    pub(super) file: File,
    pub(super) path: StorePath,
    pub(super) coherent: bool,
}

impl LogFile {
    pub(super) fn new(file: File, path: StorePath) -> Self {
        let coherent = is_coherent(&file);
        Self { _unshared: CloseInChild::new(file.as_fd()), file, path, coherent }
    }

    fn os(&self, what: &str, errno: Errno) -> Error {
        self.path.os(what, errno)
    }

    pub(super) fn write(&self, mut bytes: &[u8], mut at: u64) -> Result<()> {
        let (whole, start) = (bytes.len(), at);
        while !bytes.is_empty() {
            // A file never accepts 0 bytes, so a count of 0 is an error.
            let count = retry(|| pwrite(&self.file, bytes, at))
                .and_then(|count| if count > 0 { Ok(count) } else { Err(Errno::IO) });
            let count = count.map_err(|errno| {
                self.os(&format!("write {whole} bytes at byte {start} of"), errno)
            })?;
            (bytes, at) = (&bytes[count..], at + count as u64);
        }
        Ok(())
    }

    pub(super) fn empty(&self) -> Result<()> {
        ftruncate(&self.file, 0).map_err(|errno| self.os("empty", errno))
    }

    fn lock(&self, byte: u64, mode: Mode) -> Result<bool> {
        byte_lock::try_lock(self.file.as_fd(), byte, mode).map_err(|errno| self.os("lock", errno))
    }

    /// Takes the lock to read or write until the value is dropped; `None` if another process holds
    /// it.
    pub(super) fn try_hold(&self, mode: Mode) -> Result<Option<OperationLock<'_>>> {
        Ok(self.lock(OPERATION, mode)?.then_some(OperationLock(self)))
    }

    /// Takes the lock, waiting for it until `deadline`.
    pub(super) fn hold(&self, mode: Mode, deadline: Instant) -> Result<OperationLock<'_>> {
        self.hold_with(mode, deadline, |pauses| {
            pauses.pause(deadline);
            Ok(())
        })
    }

    /// Takes the lock as [`hold`](Self::hold) does, and fails if the program has asked to stop
    /// waiting.
    pub(super) fn hold_or_stop(&self, mode: Mode, deadline: Instant) -> Result<OperationLock<'_>> {
        self.hold_with(mode, deadline, |pauses| pauses.pause_or_stop(deadline))
    }

    fn hold_with(
        &self,
        mode: Mode,
        deadline: Instant,
        pause: impl Fn(&mut Backoff) -> Result<()>,
    ) -> Result<OperationLock<'_>> {
        let mut pauses = Backoff::new(LOCK_RETRY);
        loop {
            if let Some(held) = self.try_hold(mode)? {
                return Ok(held);
            }
            if Instant::now() >= deadline {
                return Err(self.locked_by_another());
            }
            pause(&mut pauses)?;
        }
    }

    pub(super) fn locked_by_another(&self) -> Error {
        let holder = byte_lock::holder(self.file.as_fd(), OPERATION).map_or_else(
            || "another process".into(),
            |pid| {
                format!("process {pid} ({})", process::state(pid).unwrap_or("which has just ended"))
            },
        );
        Error::timeout(format!(
            "the lock of the file store {:?} is held by {holder}",
            self.path.given
        ))
    }

    /// Tries to become the only user; false if there are others.
    pub(super) fn try_alone(&self) -> Result<bool> {
        self.lock(USERS, Mode::Exclusive)
    }

    /// Becomes one of the users. This fails only during another process's
    /// [`try_alone`](Self::try_alone), which holds the operation lock.
    pub(super) fn share(&self) -> Result<()> {
        match self.lock(USERS, Mode::Shared)? {
            true => Ok(()),
            false => Err(self.locked_by_another()),
        }
    }

    /// Stops being a user. Closing the file may not suffice: a concurrently forked child may hold
    /// the same open file.
    pub(super) fn leave(&self) -> Result<()> {
        byte_lock::unlock(self.file.as_fd(), USERS).map_err(|errno| self.os("unlock", errno))
    }
}

impl LogSource for LogFile {
    fn name(&self) -> String {
        format!("the file store {:?}", self.path.given)
    }

    fn size(&self) -> Result<u64> {
        let status = fstat(&self.file).map_err(|errno| self.os("look at", errno))?;
        Ok(u64::try_from(status.st_size).unwrap_or(0))
    }

    fn read(&self, buffer: &mut [u8], at: u64) -> Result<usize> {
        let mut count = 0;
        while count < buffer.len() {
            match retry(|| pread(&self.file, &mut buffer[count..], at + count as u64)) {
                Ok(0) => break,
                Ok(more) => count += more,
                Err(errno) => return Err(self.os(&format!("read byte {at} of"), errno)),
            }
        }
        Ok(count)
    }
}

/// The operation lock.
pub(super) struct OperationLock<'a>(&'a LogFile);

impl Drop for OperationLock<'_> {
    fn drop(&mut self) {
        if let Err(errno) = byte_lock::unlock(self.0.file.as_fd(), OPERATION) {
            log::error!("{}", self.0.os("unlock", errno));
        }
    }
}
