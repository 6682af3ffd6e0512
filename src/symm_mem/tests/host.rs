//! Host memory with injected failures.
#![allow(unsafe_code, reason = "tests write where a heap says that memory lies, and fork")]

use crate::error::{Error, Result};
pub(crate) use crate::symm_mem::host::PAGE;
use crate::symm_mem::{AddressRange, AddressSpace, Backing, HostMemory};
use rustix::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// A device with a given number of pages.
pub(crate) struct Host {
    memory: HostMemory,
    /// True if allocations fail.
    pub(super) exhausted: Arc<AtomicBool>,
    /// True if waiting for the device fails.
    pub(super) busy: AtomicBool,
    /// True if mapping peers' memory fails.
    pub(super) alone: Arc<AtomicBool>,
    /// True if exporting memory to peers fails.
    pub(super) private: Arc<AtomicBool>,
}

struct Fallible {
    range: Box<dyn AddressRange>,
    exhausted: Arc<AtomicBool>,
    alone: Arc<AtomicBool>,
    private: Arc<AtomicBool>,
}

struct FallibleBacking(Arc<dyn Backing>, Arc<AtomicBool>);

impl Backing for FallibleBacking {
    fn export(&self) -> Result<OwnedFd> {
        if self.1.load(Ordering::Relaxed) {
            return Err(Error::config("no free descriptor"));
        }
        self.0.export()
    }
}

impl Host {
    pub(crate) fn new(pages: usize) -> Self {
        let memory = HostMemory::with_span(pages * PAGE);
        Self {
            memory,
            exhausted: Arc::default(),
            busy: AtomicBool::new(false),
            alone: Arc::default(),
            private: Arc::default(),
        }
    }
}

impl AddressSpace for Host {
    fn granularity(&self) -> usize {
        self.memory.granularity()
    }

    fn span(&self) -> usize {
        self.memory.span()
    }

    fn reserve(&self, bytes: usize) -> Result<Box<dyn AddressRange>> {
        let range = self.memory.reserve(bytes)?;
        Ok(Box::new(Fallible {
            range,
            exhausted: Arc::clone(&self.exhausted),
            alone: Arc::clone(&self.alone),
            private: Arc::clone(&self.private),
        }))
    }

    fn settle(&self) -> Result<()> {
        if self.busy.load(Ordering::Relaxed) {
            Err(Error::internal("a stream is being captured"))
        } else {
            self.memory.settle()
        }
    }

    fn clear(&self, address: u64, bytes: usize) -> Result<()> {
        self.memory.clear(address, bytes)
    }
}

impl AddressRange for Fallible {
    fn address(&self) -> u64 {
        self.range.address()
    }

    fn create(&self, offset: usize, bytes: usize) -> Result<Arc<dyn Backing>> {
        if self.exhausted.load(Ordering::Relaxed) {
            return Err(Error::config("out of memory"));
        }
        let backing = self.range.create(offset, bytes)?;
        Ok(Arc::new(FallibleBacking(backing, Arc::clone(&self.private))))
    }

    fn import(&self, offset: usize, bytes: usize, descriptor: OwnedFd) -> Result<()> {
        if self.alone.load(Ordering::Relaxed) {
            return Err(Error::internal("out of reach"));
        }
        self.range.import(offset, bytes, descriptor)
    }

    fn unmap(&self, offset: usize, bytes: usize) {
        self.range.unmap(offset, bytes);
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
