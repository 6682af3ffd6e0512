//! Symmetric memory, as torch's pluggable allocator asks for it.
#![allow(unsafe_code, reason = "addresses and objects that C++ hands over")]

use super::guarded;
use crate::error::Error;
use crate::lock::lock;
use crate::symm_mem;
use crate::sys::writable;
use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::sync::Mutex;

/// A new segment of at least `bytes` on CUDA device `device`; null if there is none, which torch makes an `OutOfMemoryError` of once it
/// has given back what it caches. Any thread may call it, also while it holds the lock of torch's allocator.
#[unsafe(no_mangle)]
extern "C" fn symm_alloc(bytes: usize, device: c_int, _stream: *mut c_void) -> *mut c_void {
    let mut address = 0;
    let outcome = guarded(|| {
        // The host's heap goes by -1, but is none of torch's CUDA pools.
        u32::try_from(device).map_err(|_| Error::value(format!("there is no CUDA device {device}")))?;
        address = symm_mem::allocate(device, bytes)?;
        Ok(())
    });
    if outcome.kind != super::ffi::Kind::None {
        log::warn!("{bytes} bytes of symmetric memory on cuda:{device} cannot be had: {}", outcome.message);
    }
    // The address is the driver's and means nothing to the host.
    std::ptr::without_provenance_mut(address as usize)
}

/// Gives a segment of `symm_alloc` back; it stays while somebody holds a window on it. A failure is only logged: torch has forgotten the
/// segment already.
#[unsafe(no_mangle)]
extern "C" fn symm_free(segment: *mut c_void, bytes: usize, device: c_int, _stream: *mut c_void) {
    let address = segment.addr() as u64;
    // Else the windows that are kept for a later rendezvous would keep it.
    super::ffi::forget_windows(segment.addr(), bytes);
    let outcome = guarded(|| symm_mem::release(address));
    if outcome.kind != super::ffi::Kind::None {
        log::error!("{bytes} bytes of symmetric memory at {address:#x} on cuda:{device} stay taken: {}", outcome.message);
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

/// Answers that are kept: FSDP2 asks before every buffer, and asking the driver takes hold of the device's context: each device is asked
/// once.
static SHARES: Mutex<BTreeMap<i32, bool>> = Mutex::new(BTreeMap::new());

pub(super) fn shares(device: i32) -> bool {
    let mut answer = false;
    guarded(|| {
        let mut known = lock(&SHARES);
        answer = *known.entry(device).or_insert_with(|| symm_mem::supported(device));
        Ok(())
    });
    answer
}
