//! Symmetric memory for torch's pluggable allocator.
#![allow(unsafe_code, reason = "addresses and objects that C++ hands over")]

use super::guarded;
use crate::error::Error;
use crate::lock::lock;
use crate::symm_mem;
use crate::sys::writable;
use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::sync::Mutex;

/// Allocates a segment of at least `bytes` on CUDA device `device`; null on failure, which torch
/// turns into an `OutOfMemoryError` after it has freed its caches. Any thread may call this, even
/// while it holds the lock of torch's allocator.
#[unsafe(no_mangle)]
extern "C" fn symm_alloc(bytes: usize, device: c_int, _stream: *mut c_void) -> *mut c_void {
    let mut address = 0;
    let outcome = guarded(|| {
        // Rejects -1, the number of the host's heap, which does not belong to torch's CUDA pools.
        u32::try_from(device)
            .map_err(|_| Error::value(format!("there is no CUDA device {device}")))?;
        address = symm_mem::allocate(device, bytes)?;
        Ok(())
    });
    if outcome.kind != super::ffi::ErrorKind::None {
        log::warn!(
            "{bytes} bytes of symmetric memory on cuda:{device} cannot be had: {}",
            outcome.message
        );
    }
    // The address is the driver's and has no meaning on the host.
    std::ptr::without_provenance_mut(address as usize)
}

/// Frees a segment that `symm_alloc` has returned; the memory stays while a window on it is held. A
/// failure is only logged, because torch has forgotten the segment already.
#[unsafe(no_mangle)]
extern "C" fn symm_free(segment: *mut c_void, bytes: usize, device: c_int, _stream: *mut c_void) {
    let address = segment.addr() as u64;
    // Otherwise, windows that are cached for a later rendezvous would keep the segment.
    super::ffi::forget_windows(segment.addr(), bytes);
    let outcome = guarded(|| symm_mem::release(address));
    if outcome.kind != super::ffi::ErrorKind::None {
        log::error!(
            "{bytes} bytes of symmetric memory at {address:#x} on cuda:{device} stay taken: {}",
            outcome.message
        );
    }
}

pub(super) fn is_writable(address: usize, bytes: usize) -> bool {
    let mut answer = false;
    guarded(|| {
        answer = writable::is_writable(address, bytes);
        Ok(())
    });
    answer
}

pub(super) fn is_symmetric(address: usize) -> bool {
    let mut answer = false;
    guarded(|| {
        answer = crate::symm_mem::at(address as u64).is_some();
        Ok(())
    });
    answer
}

/// Cached answers, one per device: FSDP2 asks before every buffer, and asking the driver acquires
/// the device's context.
static SHARES: Mutex<BTreeMap<i32, bool>> = Mutex::new(BTreeMap::new());

pub(super) fn supports_symm_mem(device: i32) -> bool {
    let mut answer = false;
    guarded(|| {
        let mut known = lock(&SHARES);
        answer = *known.entry(device).or_insert_with(|| symm_mem::supported(device));
        Ok(())
    });
    answer
}
