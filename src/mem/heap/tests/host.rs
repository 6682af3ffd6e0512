//! Memory of the host in place of a GPU's.

use crate::error::{Error, Result};
use crate::mem::heap::{Addresses, Piece, Range};
use crate::mem::shm::Segment;
use rustix::fd::OwnedFd;
use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};
use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

pub(crate) const PAGE: usize = 4096;

/// A device with room for so many pages.
pub(crate) struct Host {
    pages: usize,
    /// Nothing can be made.
    pub(super) exhausted: Arc<AtomicBool>,
    /// It cannot be waited for.
    pub(super) busy: AtomicBool,
    /// Nothing of peers can be mapped.
    pub(super) alone: Arc<AtomicBool>,
}

struct HostRange {
    base: *mut c_void,
    bytes: usize,
    exhausted: Arc<AtomicBool>,
    alone: Arc<AtomicBool>,
}

// SAFETY: an address; what lies there is reached by volatile accesses of the tests alone.
unsafe impl Send for HostRange {}
// SAFETY: as above.
unsafe impl Sync for HostRange {}

struct File(OwnedFd);

impl Host {
    pub(crate) fn new(pages: usize) -> Self {
        Self { pages, exhausted: Arc::default(), busy: AtomicBool::new(false), alone: Arc::default() }
    }
}

impl Addresses for Host {
    fn granularity(&self) -> usize {
        PAGE
    }

    fn span(&self) -> usize {
        self.pages * PAGE
    }

    fn reserve(&self, bytes: usize) -> Result<Box<dyn Range>> {
        // SAFETY: a fresh mapping at an address of the kernel's choice.
        let base = unsafe { mmap_anonymous(std::ptr::null_mut(), bytes, ProtFlags::empty(), MapFlags::PRIVATE | MapFlags::NORESERVE) };
        let base = base.map_err(|errno| Error::os("reserve", errno))?;
        Ok(Box::new(HostRange { base, bytes, exhausted: Arc::clone(&self.exhausted), alone: Arc::clone(&self.alone) }))
    }

    fn settle(&self) -> Result<()> {
        if self.busy.load(Ordering::Relaxed) { Err(Error::internal("a stream is being captured")) } else { Ok(()) }
    }
}

impl HostRange {
    fn map(&self, offset: usize, bytes: usize, file: &OwnedFd) -> Result<()> {
        assert!(offset + bytes <= self.bytes, "outside the range");
        let size = rustix::fs::fstat(file).map_err(|errno| Error::os("stat", errno))?.st_size;
        if size != bytes as i64 || !offset.is_multiple_of(PAGE) {
            return Err(Error::internal(format!("{bytes} bytes at {offset} of a file of {size}")));
        }
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: within the range (checked above), which is ours.
        let mapped = unsafe { mmap(self.base.byte_add(offset), bytes, access, MapFlags::SHARED | MapFlags::FIXED, file, 0) };
        mapped.map(drop).map_err(|errno| Error::os("map", errno))
    }
}

impl Range for HostRange {
    fn address(&self) -> u64 {
        self.base as u64
    }

    fn create(&self, offset: usize, bytes: usize) -> Result<Arc<dyn Piece>> {
        if self.exhausted.load(Ordering::Relaxed) {
            return Err(Error::config("out of memory"));
        }
        let file = Segment::create(bytes)?;
        self.map(offset, bytes, &file)?;
        Ok(Arc::new(File(file)))
    }

    fn import(&self, offset: usize, bytes: usize, descriptor: OwnedFd) -> Result<()> {
        if self.alone.load(Ordering::Relaxed) {
            return Err(Error::internal("out of reach"));
        }
        self.map(offset, bytes, &descriptor)
    }

    fn unmap(&self, offset: usize, bytes: usize) {
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED;
        // SAFETY: within the range, which is ours; it stays reserved.
        unsafe { mmap_anonymous(self.base.byte_add(offset), bytes, ProtFlags::empty(), flags) }.expect("unmapped");
    }
}

impl Drop for HostRange {
    fn drop(&mut self) {
        // SAFETY: made by `reserve`.
        unsafe { munmap(self.base, self.bytes) }.expect("given back");
    }
}

impl Piece for File {
    fn export(&self) -> Result<OwnedFd> {
        self.0.try_clone().map_err(|error| Error::internal(error.to_string()))
    }
}

pub(crate) fn write(address: u64, value: u64) {
    // SAFETY: the tests pass addresses of mapped, aligned words.
    unsafe { (address as *mut u64).write_volatile(value) };
}

pub(crate) fn read(address: u64) -> u64 {
    // SAFETY: as above.
    unsafe { (address as *const u64).read_volatile() }
}
