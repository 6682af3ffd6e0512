//! Symmetric memory that programs allocated explicitly, apart from torch's pools.
#![allow(unsafe_code, reason = "words of signal pads and the bytes of tensors, by their addresses")]

use crate::error::{Error, Result};
use crate::lock::lock;
use crate::symm_mem::{self, HOST};
use crate::sys::fork::PerProcess;
use std::collections::HashMap;
use std::sync::Mutex;

/// Properties of an allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct WindowAllocation {
    /// The requested length.
    pub(super) bytes: usize,
    /// Sequence number among this process's allocations on this device.
    pub(super) number: u64,
}

#[derive(Default)]
struct AllocationTable {
    by_address: HashMap<u64, WindowAllocation>,
    made: HashMap<i32, u64>,
}

static KNOWN: PerProcess<Mutex<AllocationTable>> = PerProcess::new(Mutex::default);

/// Returns the address of `bytes` of zeroed symmetric memory of a CUDA device, or of the host
/// ([`HOST`]).
pub fn allocate(device: i32, bytes: usize) -> Result<u64> {
    let address = symm_mem::allocate(device, bytes)?;
    if device != HOST {
        // The host's pages are new and therefore zero.
        let heap = symm_mem::of(device)?;
        heap.clear(address, bytes).inspect_err(|_| drop(heap.release(address)))?;
    }
    let mut known = lock(KNOWN.get());
    let count = known.made.entry(device).or_default();
    *count += 1;
    let number = *count;
    known.by_address.insert(address, WindowAllocation { bytes, number });
    Ok(address)
}

/// Frees what `allocate` returned, as [`symm_mem::release`] does.
pub fn free(address: u64) -> Result<()> {
    if lock(KNOWN.get()).by_address.remove(&address).is_none() {
        return Err(Error::value(format!("no symmetric memory was allocated at {address:#x}")));
    }
    symm_mem::release(address)
}

/// Returns the properties of the allocation that starts at `address`.
pub(super) fn find(address: u64) -> Option<WindowAllocation> {
    lock(KNOWN.get()).by_address.get(&address).copied()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    #[test]
    fn the_hosts_memory_is_zeroed_known_by_its_size_and_gone_when_given_back() {
        let address = allocate(HOST, 10_000).expect("room");
        // SAFETY: 10 000 bytes were allocated there.
        let bytes = unsafe { std::slice::from_raw_parts_mut(address as *mut u8, 10_000) };
        assert!(bytes.iter().all(|&byte| byte == 0));
        bytes.fill(7);
        let other = allocate(HOST, 1).expect("room");
        let (one, two) = (find(address).expect("known"), find(other).expect("known"));
        assert_eq!((one.bytes, two.bytes), (10_000, 1));
        assert!(two.number > one.number);
        free(address).expect("known");
        assert_eq!(find(address), None);
        assert_eq!(free(address).expect_err("twice").kind, ErrorKind::Value);
        free(other).expect("known");
    }

    // proves P16
    #[test]
    fn memory_without_end_is_refused() {
        let error = allocate(HOST, usize::MAX / 2).expect_err("nobody has it");
        error.assert_says(ErrorKind::Config, &["out of memory"]);
    }
}
