//! Host memory for a heap: one unnamed file per process, whose pieces are the segments.
#![allow(unsafe_code, reason = "mappings at chosen addresses")]

use super::addresses::{AddressRange, AddressSpace, Backing};
use crate::error::{Error, Result};
use crate::lock::lock;
use crate::mem::shm::{ShmSegment, reserve};
use crate::sys::eintr::retry;
use crate::sys::required::Required;
use rustix::fd::OwnedFd;
use rustix::fs::{FallocateFlags, SealFlags, fallocate, fcntl_get_seals, fstat};
use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};
use std::ffi::c_void;
use std::sync::{Arc, Mutex};

/// Sizes and offsets are multiples of this, the largest base page size of Linux on this processor.
pub(crate) const PAGE: usize = if cfg!(target_arch = "x86_64") { 4096 } else { 64 << 10 };

/// A process has 2^47 addresses, and a group at most 2^7 ranks.
const MOST_SPAN: usize = 1 << 39;

/// Host memory as the memory of a heap.
pub struct HostMemory {
    span: usize,
}

struct HostRange {
    base: *mut c_void,
    bytes: usize,
    /// File of this process's own heap, once it has a segment.
    file: Mutex<Option<Arc<OwnedFd>>>,
}

// SAFETY: an address range that this value owns; its memory is accessed through the windows of a
// group.
unsafe impl Send for HostRange {}
// SAFETY: as above.
unsafe impl Sync for HostRange {}

struct HostMemoryPart(Arc<OwnedFd>);

impl HostMemory {
    /// Makes host memory with addresses for twice this node's memory; a process has enough
    /// addresses for the heaps of its peers, too.
    pub fn of_this_machine() -> Self {
        let system = rustix::system::sysinfo();
        let memory = (system.totalram as usize).saturating_mul(system.mem_unit as usize);
        Self::with_span(memory.saturating_mul(2).min(MOST_SPAN).next_multiple_of(PAGE))
    }

    pub(super) fn with_span(span: usize) -> Self {
        Self { span }
    }
}

impl AddressSpace for HostMemory {
    fn granularity(&self) -> usize {
        PAGE
    }

    fn span(&self) -> usize {
        self.span
    }

    fn reserve(&self, bytes: usize) -> Result<Box<dyn AddressRange>> {
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a fresh mapping at an address of the kernel's choice touches no memory of this
        // process.
        let base =
            unsafe { mmap_anonymous(std::ptr::null_mut(), bytes, ProtFlags::empty(), flags) };
        let base = base.map_err(|errno| Required::Map.failed(errno))?;
        Ok(Box::new(HostRange { base, bytes, file: Mutex::default() }))
    }

    fn settle(&self) -> Result<()> {
        // Work on host memory is done when its call returns.
        Ok(())
    }

    fn clear(&self, address: u64, bytes: usize) -> Result<()> {
        // SAFETY: the caller passes a part of a segment that is mapped and not in use.
        unsafe { std::ptr::write_bytes(address as *mut u8, 0, bytes) };
        Ok(())
    }
}

/// Frees the pages at once, even if other processes still map them: a peer that keeps reading finds
/// zeros.
fn give_pages_back(file: &OwnedFd, offset: usize, bytes: usize) {
    let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    if let Err(errno) = retry(|| fallocate(file, hole, offset as u64, bytes as u64)) {
        log::warn!("{bytes} bytes of symmetric memory stay taken: {errno}");
    }
}

impl HostRange {
    fn own_file(&self) -> Result<Arc<OwnedFd>> {
        let mut file = lock(&self.file);
        if let Some(file) = &*file {
            return Ok(Arc::clone(file));
        }
        let made = Arc::new(ShmSegment::create(self.bytes)?);
        *file = Some(Arc::clone(&made));
        Ok(made)
    }

    fn map(&self, offset: usize, bytes: usize, file: &OwnedFd) -> Result<()> {
        self.check(offset, bytes);
        let (access, flags) = (
            ProtFlags::READ | ProtFlags::WRITE,
            MapFlags::SHARED | MapFlags::FIXED | MapFlags::NORESERVE,
        );
        // SAFETY: within the range (checked above), which this value owns.
        let mapped =
            unsafe { mmap(self.base.byte_add(offset), bytes, access, flags, file, offset as u64) };
        mapped.map(drop).map_err(|errno| Required::Map.failed(errno))
    }

    fn check(&self, offset: usize, bytes: usize) {
        let inside = offset.checked_add(bytes).is_some_and(|end| end <= self.bytes)
            && offset.is_multiple_of(PAGE);
        assert!(inside, "{bytes} bytes at {offset} leave the range of {}", self.bytes);
    }
}

impl AddressRange for HostRange {
    fn address(&self) -> u64 {
        self.base as u64
    }

    fn create(&self, offset: usize, bytes: usize) -> Result<Arc<dyn Backing>> {
        let file = self.own_file()?;
        self.check(offset, bytes);
        // Peers may have kept an earlier segment at this offset and written to it. Their writes
        // must not appear in the new segment, which is zeroed.
        give_pages_back(&file, offset, bytes);
        let made = reserve(&file, offset, bytes, "symmetric memory of the host")
            .and_then(|()| self.map(offset, bytes, &file));
        made.inspect_err(|_| give_pages_back(&file, offset, bytes))?;
        Ok(Arc::new(HostMemoryPart(file)))
    }

    fn import(&self, offset: usize, bytes: usize, descriptor: OwnedFd) -> Result<()> {
        let size = fstat(&descriptor).map_err(|errno| Required::Look.failed(errno))?.st_size;
        let sealed =
            fcntl_get_seals(&descriptor).is_ok_and(|seals| seals.contains(SealFlags::SHRINK));
        if !offset.is_multiple_of(PAGE) {
            return Err(Error::config(format!(
                "{bytes} bytes at {offset}, which is no multiple of {PAGE}"
            )));
        }
        if !sealed || (size as u64) < (offset + bytes) as u64 {
            return Err(Error::config(format!(
                "{bytes} bytes at {offset} of a file of {size}, sealed: {sealed}"
            )));
        }
        self.map(offset, bytes, &descriptor)
    }

    fn unmap(&self, offset: usize, bytes: usize) {
        self.check(offset, bytes);
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED;
        // SAFETY: within the range, which this value owns; it stays reserved.
        let unmapped =
            unsafe { mmap_anonymous(self.base.byte_add(offset), bytes, ProtFlags::empty(), flags) };
        if let Err(errno) = unmapped {
            log::warn!("{bytes} bytes of symmetric memory stay mapped: {errno}");
        }
        let own = lock(&self.file).clone();
        if let Some(file) = own {
            give_pages_back(&file, offset, bytes);
        }
    }
}

impl Drop for HostRange {
    fn drop(&mut self) {
        // SAFETY: made by `reserve`; its memory is not used any more.
        let _ = unsafe { munmap(self.base, self.bytes) };
    }
}

impl Backing for HostMemoryPart {
    fn export(&self) -> Result<OwnedFd> {
        self.0
            .try_clone()
            .map_err(|error| Error::internal(format!("duplicating a descriptor: {error}")))
    }
}
