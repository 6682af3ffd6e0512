//! Host memory that a GPU reads and writes.
#![allow(unsafe_code, reason = "page-locked words that kernels write, too")]

use crate::error::Result;
use crate::kernels::cuda::driver::check;
use cudarc::driver::sys;
use std::any::Any;
use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;

/// Zeroed words, read and written by this process and the GPU.
#[derive(Debug)]
pub struct PinnedWords {
    words: *mut c_void,
    device: u64,
    count: usize,
}

// SAFETY: all accesses to the memory are atomic.
unsafe impl Send for PinnedWords {}
// SAFETY: as above.
unsafe impl Sync for PinnedWords {}

impl PinnedWords {
    /// Allocates `count` words in the current context.
    pub fn new(count: usize) -> Result<Self> {
        let bytes = count * size_of::<u32>();
        let flags = sys::CU_MEMHOSTALLOC_DEVICEMAP | sys::CU_MEMHOSTALLOC_PORTABLE;
        let mut words = Self { words: std::ptr::null_mut(), device: 0, count };
        // SAFETY: valid for a write; freed by `drop`.
        check("allocating pinned memory", unsafe {
            sys::cuMemHostAlloc(&raw mut words.words, bytes, flags)
        })?;
        // SAFETY: the allocation is `bytes` long, and no other thread has its address yet.
        unsafe { std::ptr::write_bytes(words.words.cast::<u8>(), 0, bytes) };
        // SAFETY: valid for a write; the memory was allocated for mapping.
        check("mapping pinned memory", unsafe {
            sys::cuMemHostGetDevicePointer_v2(&raw mut words.device, words.words, 0)
        })?;
        Ok(words)
    }

    /// Returns the device address of the words.
    pub fn device(&self) -> u64 {
        self.device
    }

    /// Returns the words.
    pub fn get(&self) -> &[AtomicU32] {
        // SAFETY: allocated for `count` words, aligned to a page, zeroed; lives as long as `self`;
        // the GPU writes whole words.
        unsafe { std::slice::from_raw_parts(self.words.cast(), self.count) }
    }
}

impl Drop for PinnedWords {
    fn drop(&mut self) {
        if !self.words.is_null() {
            // SAFETY: made by `new`; no kernel uses it after its owner drops it.
            let _ = unsafe { sys::cuMemFreeHost(self.words) };
        }
    }
}

/// Host memory that is mapped for the GPU.
pub struct RegisteredMemory {
    // Dropped before `_keeper`, because the memory must still be mapped when it is unregistered.
    registration: Registration,
    _keeper: Arc<dyn Any + Send + Sync>,
}

#[derive(Debug)]
struct Registration {
    host: *mut c_void,
    device: u64,
}

// SAFETY: an address and a handle; nothing is read or written through them here.
unsafe impl Send for Registration {}
// SAFETY: as above.
unsafe impl Sync for Registration {}

impl RegisteredMemory {
    /// Maps `bytes` bytes at `host` (both multiples of a page) for the GPU, in the current context.
    ///
    /// # Safety
    /// The range is mapped and its pages are reserved as long as `keeper` lives.
    pub unsafe fn new(
        host: *mut u8,
        bytes: usize,
        keeper: Arc<dyn Any + Send + Sync>,
    ) -> Result<Self> {
        let host = host.cast::<c_void>();
        let flags = sys::CU_MEMHOSTREGISTER_DEVICEMAP | sys::CU_MEMHOSTREGISTER_PORTABLE;
        // SAFETY: mapped, by the caller's promise.
        check("opening shared memory to the GPU", unsafe {
            sys::cuMemHostRegister_v2(host, bytes, flags)
        })?;
        let mut registration = Registration { host, device: 0 };
        // SAFETY: valid for a write; registered above.
        check("mapping shared memory", unsafe {
            sys::cuMemHostGetDevicePointer_v2(&raw mut registration.device, host, 0)
        })?;
        Ok(Self { registration, _keeper: keeper })
    }

    /// Returns the device address of the memory.
    pub fn device(&self) -> u64 {
        self.registration.device
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        // SAFETY: registered by `new`; no kernel uses it after its owner drops it.
        let _ = unsafe { sys::cuMemHostUnregister(self.host) };
    }
}
