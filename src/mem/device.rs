//! Small arrays in a GPU's own memory.
#![allow(unsafe_code, reason = "memory of a GPU by its address")]

use crate::error::Result;
use crate::kernels::cuda::driver::{Device, OwnStream, RelaxedCapture, check};
use cudarc::driver::sys;
use std::sync::Arc;

/// An array that kernels read, such as pointers or ranks. Dropping it frees the memory after all
/// work that was enqueued on the device before.
#[derive(Debug)]
pub struct DeviceTable {
    address: u64,
    device: Arc<Device>,
}

impl DeviceTable {
    /// Copies `bytes` to `device` and returns when the copy is complete. Uses `stream`; other
    /// streams may be captured meanwhile.
    pub fn new(device: &Arc<Device>, stream: &OwnStream, bytes: &[u8]) -> Result<Self> {
        let _relaxed = RelaxedCapture::begin()?;
        let _entered = device.enter()?;
        let mut table = Self { address: 0, device: Arc::clone(device) };
        // SAFETY: valid for a write; freed by `drop`. An allocation of 0 bytes would fail.
        check("allocating a table", unsafe {
            sys::cuMemAlloc_v2(&raw mut table.address, bytes.len().max(1))
        })?;
        if !bytes.is_empty() {
            stream.stream().copy(table.address, bytes.as_ptr() as u64, bytes.len())?;
            stream.stream().synchronize()?;
        }
        Ok(table)
    }

    /// Returns the device address of the memory.
    pub fn address(&self) -> u64 {
        self.address
    }
}

impl Drop for DeviceTable {
    fn drop(&mut self) {
        if self.address == 0 {
            return;
        }
        // If one of these calls fails, as in a forked child, this process must not free the memory.
        if let (Ok(_relaxed), Ok(_entered)) = (RelaxedCapture::begin(), self.device.enter()) {
            // SAFETY: made by `new`; the driver waits for kernels that may read it.
            let _ = unsafe { sys::cuMemFree_v2(self.address) };
        }
    }
}
