//! A mapping of anonymous shared memory.
#![allow(unsafe_code, reason = "mappings of shared memory")]

use super::memory_limit::tightest;
use crate::error::{Error, Result};
use crate::lock::lock;
use crate::sys::eintr::retry;
use crate::sys::process;
use crate::sys::required::Required;
use crate::sys::thread::BlockedSignals;
use rustix::fs::FallocateFlags;
use rustix::io::Errno;
use rustix::mm::{MapFlags, MremapFlags, ProtFlags};
use std::fmt::Display;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// A mapping of a group's memory file. Pages that no rank has touched or reserved cost nothing.
/// Clones share the mapping: ranks that are threads of one process may use the same addresses,
/// which lets ThreadSanitizer see their races.
#[derive(Clone, Debug)]
pub struct ShmSegment {
    /// The base of `mapping`, copied to save an indirection on every access.
    base: NonNull<u8>,
    bytes: usize,
    mapping: Arc<ShmMapping>,
}

/// The mapping itself, unmapped on drop.
#[derive(Debug)]
struct ShmMapping {
    base: NonNull<u8>,
    bytes: usize,
    identity: u64,
    /// The group's memory file; `None` after [`ShmSegment::leave_file`].
    file: Mutex<Option<OwnedFd>>,
}

// SAFETY: the mapping is plain memory; the protocols in `sync` and `coll` decide which thread may
// touch which byte when.
unsafe impl Send for ShmSegment {}
// SAFETY: as above.
unsafe impl Sync for ShmSegment {}
// SAFETY: as above; only `drop` uses it, when no segment is left.
unsafe impl Send for ShmMapping {}
// SAFETY: as above.
unsafe impl Sync for ShmMapping {}

/// Addresses reserved for a future segment, so that mapping it cannot fail for lack of addresses.
#[derive(Debug)]
pub struct HostReservation {
    base: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the addresses are inaccessible, so no thread can read or write through them.
unsafe impl Send for HostReservation {}
// SAFETY: as above.
unsafe impl Sync for HostReservation {}

impl HostReservation {
    /// Reserves `bytes` bytes of addresses, which cost no memory.
    pub fn reserve(bytes: usize, purpose: impl Display) -> Result<Self> {
        // SAFETY: a fresh mapping at an address of the kernel's choice touches no memory of ours.
        let base = unsafe {
            rustix::mm::mmap_anonymous(
                std::ptr::null_mut(),
                bytes,
                ProtFlags::empty(),
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )
        };
        let base = base.map_err(|errno| {
            let free =
                process::address_space().map_or_else(String::new, |space| format!(", {space}"));
            Error::config(format!(
                "out of address space: {purpose} needs {bytes} bytes{free}: {errno}"
            ))
        })?;
        let base = NonNull::new(base.cast())
            .ok_or_else(|| Error::internal("mmap returned the null page"))?;
        Ok(Self { base, bytes })
    }
}

impl Drop for HostReservation {
    fn drop(&mut self) {
        // SAFETY: base and bytes come from mmap; code that maps a segment here forgets this value.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.bytes) };
    }
}

impl ShmSegment {
    /// Creates an unnamed file of `bytes` bytes whose size is sealed, so no access within it can
    /// fault.
    pub fn create(bytes: usize) -> Result<OwnedFd> {
        Self::create_or(bytes as u64, Required::failed)
    }

    /// Creates a segment like `create`; `error` builds the error of a failed step.
    pub fn create_or(bytes: u64, error: impl Fn(Required, Errno) -> Error) -> Result<OwnedFd> {
        use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        // Kernels before 6.3 reject NOEXEC_SEAL; later ones may require it.
        let file =
            memfd_create("symm", flags | MemfdFlags::NOEXEC_SEAL)
                .or_else(|errno| {
                    if errno == Errno::INVAL { memfd_create("symm", flags) } else { Err(errno) }
                })
                .map_err(|errno| error(Required::Memory, errno))?;
        ftruncate(&file, bytes).map_err(|errno| {
            let error = error(Required::Size, errno);
            Error { message: format!("{}; {bytes} bytes are needed", error.message), ..error }
        })?;
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)
            .map_err(|errno| error(Required::Seal, errno))?;
        Ok(file)
    }

    /// Maps the first `bytes` bytes of `file`.
    pub fn map(file: OwnedFd, bytes: usize) -> Result<Self> {
        Self::map_at(file, HostReservation::reserve(bytes, "the group's memory")?)
    }

    /// Maps the file over `addresses`, for their whole length.
    pub fn map_at(file: OwnedFd, addresses: HostReservation) -> Result<Self> {
        let (base, bytes) = (addresses.base, addresses.bytes);
        let stat = rustix::fs::fstat(&file).map_err(|errno| Required::Look.failed(errno))?;
        if (stat.st_size as u64) < bytes as u64 {
            return Err(Error::config(format!(
                "the group's memory has {} bytes, {bytes} are needed",
                stat.st_size
            )));
        }
        // SAFETY: the range belongs to `addresses` and holds nothing else; this mapping replaces
        // the reservation.
        unsafe {
            rustix::mm::mmap(
                base.as_ptr().cast(),
                bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED | MapFlags::NORESERVE | MapFlags::FIXED,
                &file,
                0,
            )
        }
        .map_err(|errno| Required::Map.failed(errno))?;
        // The segment owns the range from here on.
        std::mem::forget(addresses);
        Ok(Self {
            base,
            bytes,
            mapping: Arc::new(ShmMapping {
                base,
                bytes,
                identity: stat.st_ino,
                file: Mutex::new(Some(file)),
            }),
        })
    }

    /// Returns a number that all mappings of one file share; the kernel does not reuse it soon.
    pub fn identity(&self) -> u64 {
        self.mapping.identity
    }

    /// Allocates the pages of a range, as [`reserve`] does.
    pub fn reserve(&self, offset: usize, bytes: usize, purpose: impl Display) -> Result<()> {
        self.check(offset, bytes);
        match &*lock(&self.mapping.file) {
            Some(file) => reserve(file, offset, bytes, purpose),
            None => Err(Error::internal(format!(
                "{purpose} needs {bytes} bytes of a segment that has left its file"
            ))),
        }
    }

    /// Returns a clone for a holder that passes the memory's addresses to a device: while the clone
    /// lives, the segment does not leave its file.
    pub fn hold(&self) -> Result<Self> {
        let file = lock(&self.mapping.file);
        file.as_ref()
            .map(|_| self.clone())
            .ok_or_else(|| Error::aborted("the group of this memory was destroyed"))
    }

    /// Closes the file and releases its memory. The same addresses then hold private memory whose
    /// first `kept` bytes are copied from the file; peers do not see later writes to it. Does
    /// nothing while a clone shares the mapping.
    pub fn leave_file(&self, kept: usize) -> rustix::io::Result<()> {
        self.check(0, kept);
        let ShmMapping { base, bytes, file, .. } = &*self.mapping;
        let mut file = lock(file);
        if file.is_none() || Arc::strong_count(&self.mapping) > 1 {
            return Ok(());
        }
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping at an address of the kernel's choice touches no memory of ours.
        let own = unsafe {
            rustix::mm::mmap_anonymous(
                std::ptr::null_mut(),
                *bytes,
                protection,
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )
        }?;
        for word in 0..kept / size_of::<AtomicU64>() {
            // SAFETY: both mappings are page-aligned and hold `kept` bytes (checked above). Peers
            // and threads change the words of the old one atomically, and no other thread has the
            // address of the new one.
            unsafe {
                let value = (*base.as_ptr().cast::<AtomicU64>().add(word)).load(Ordering::Acquire);
                *own.cast::<u64>().add(word) = value;
            }
        }
        // SAFETY: the old range belongs to this mapping, and the new memory replaces it in one
        // step, readable and writable as before.
        let moved = unsafe {
            rustix::mm::mremap_fixed(
                own,
                *bytes,
                *bytes,
                MremapFlags::MAYMOVE,
                base.as_ptr().cast(),
            )
        };
        if let Err(errno) = moved {
            // SAFETY: mapped above, and no other thread has its address.
            let _ = unsafe { rustix::mm::munmap(own, *bytes) };
            return Err(errno);
        }
        *file = None;
        Ok(())
    }

    /// Returns the address of a range within the mapping; valid while `self` lives.
    pub fn ptr(&self, offset: usize, bytes: usize) -> *mut u8 {
        self.check(offset, bytes);
        // SAFETY: `check` verified that the range lies within the mapping.
        unsafe { self.base.as_ptr().add(offset) }
    }

    /// Returns a control structure within the mapping.
    ///
    /// # Safety
    /// `T` consists of atomics only, and every member uses the same type at `offset`.
    pub unsafe fn at<T>(&self, offset: usize) -> &T {
        let ptr = self.ptr(offset, size_of::<T>()).cast::<T>();
        assert!(ptr.is_aligned(), "offset {offset} is misaligned");
        // SAFETY: in bounds and aligned (checked above), initialised (the file starts zeroed, and
        // atomics accept zero), and lives as long as `self`; by the caller's promise, concurrent
        // changes are atomic.
        unsafe { &*ptr }
    }

    fn check(&self, offset: usize, bytes: usize) {
        assert!(
            offset.checked_add(bytes).is_some_and(|end| end <= self.bytes),
            "{bytes} bytes at {offset} leave the segment of {} bytes",
            self.bytes
        );
    }
}

/// Allocates missing pages of `file` in advance. If the machine is out of memory, this is an error
/// instead of a SIGBUS at the first touch; if a control group is full, it is an error instead of
/// the kernel killing a process.
pub(crate) fn reserve(
    file: &OwnedFd,
    offset: usize,
    bytes: usize,
    purpose: impl Display,
) -> Result<()> {
    let limit = tightest();
    let none = |reason: &str| {
        let free = limit.as_ref().map_or_else(String::new, |limit| format!(", {limit}"));
        Error::config(format!("out of memory: {purpose} needs {bytes} bytes{free}{reason}"))
    };
    if limit.as_ref().is_some_and(|limit| limit.free < bytes as u64) {
        return Err(none(""));
    }
    // A signal undoes the allocation so far, and a periodic timer would do so forever.
    let _undisturbed = BlockedSignals::new();
    let allocate =
        || rustix::fs::fallocate(file, FallocateFlags::KEEP_SIZE, offset as u64, bytes as u64);
    retry(allocate).map_err(|errno| match errno {
        Errno::NOMEM | Errno::NOSPC => none(&format!(": {errno}")),
        errno => {
            let error = Required::Pages.failed(errno);
            Error { message: format!("{purpose} needs {bytes} bytes: {error}"), ..error }
        }
    })
}

impl Drop for ShmMapping {
    fn drop(&mut self) {
        // SAFETY: base and bytes come from mmap; every reference borrows a segment, and no segment
        // is left.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.bytes) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_segment_that_leaves_its_file_keeps_addresses_and_the_first_bytes() {
        let file = ShmSegment::create(8192).expect("memfd");
        let peer = ShmSegment::map(file.try_clone().expect("dup"), 8192).expect("map");
        let segment = ShmSegment::map(file, 8192).expect("map");
        let words = |segment: &ShmSegment| {
            // SAFETY: atomics only, within the mappings.
            [0, 4096].map(|at| unsafe { std::ptr::from_ref(segment.at::<AtomicU64>(at)) })
        };
        // SAFETY: the segments live until the end, and only this thread uses them.
        let (own, its) = (
            words(&segment).map(|word| unsafe { &*word }),
            words(&peer).map(|word| unsafe { &*word }),
        );
        own.iter().for_each(|word| word.store(7, Ordering::Relaxed));
        segment.reserve(0, 8192, "a test").expect("reserved");
        let held = segment.hold().expect("open");
        segment.leave_file(4096).expect("nothing to do");
        its[0].store(8, Ordering::Relaxed);
        assert_eq!(own[0].load(Ordering::Relaxed), 8, "a clone holds the file");
        drop(held);
        let identity = segment.identity();
        segment.leave_file(4096).expect("left");
        assert_eq!(own.map(|word| word.load(Ordering::Relaxed)), [8, 0]);
        own[0].store(9, Ordering::Relaxed);
        assert_eq!(
            its.map(|word| word.load(Ordering::Relaxed)),
            [8, 7],
            "the peer's memory is its own"
        );
        assert_eq!(segment.identity(), identity);
        assert!(segment.hold().is_err() && segment.reserve(0, 4096, "a test").is_err());
        segment.leave_file(4096).expect("nothing to do");
    }

    // proves P20
    #[test]
    fn the_size_is_final_and_checked() {
        let file = ShmSegment::create(4096).expect("memfd");
        assert!(rustix::fs::ftruncate(&file, 0).is_err(), "sealed against shrinking");
        let error = ShmSegment::map(file, 8192).expect_err("too small");
        assert!(error.message.contains("4096") && error.message.contains("8192"), "{error}");
    }
}
