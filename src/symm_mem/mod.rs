//! Symmetric memory: in every process one heap of addresses per device, and one for the host, which
//! all its peers map at the same offsets.
//!
//! An offset in a peer's heap is the same offset in a range that this process reserved for that
//! peer. So a kernel that gets an offset needs no table, and calls register nothing. [`heap`]
//! creates segments and advertises them. [`remote_heap`] maps the segments that peers advertise,
//! over a heap [`link`]. The process's one thread ([`service`]) serves the links once two heaps
//! [`connect`]. [`addresses`] is the interface of a device.

mod address;
mod addresses;
mod connect;
mod frame;
#[cfg(fuzzing)]
pub mod fuzz;
mod heap;
mod host;
mod link;
pub mod peers;
mod pins;
mod reach;
mod remote_heap;
mod service;
mod service_thread;
#[cfg(test)]
pub(crate) mod tests;

pub use address::HeapAddress;
pub use addresses::{AddressRange, AddressSpace, Backing, GpuAddressSpace};
pub use frame::HeapKey;
pub use heap::Heap;
pub use host::HostMemory;
pub use link::{FailureCheck, LinkRef, SegmentPin};
pub use pins::OwnPin;
pub use service_thread::ServiceThread;

use crate::config::Config;
use crate::error::{Error, Result};
use crate::kernels::cuda::driver::Device;
use crate::lock::lock;
use crate::mem::vmm;
use crate::sys::fork::PerProcess;
use std::collections::HashMap;
use std::sync::{Arc, Mutex};

/// The device number that denotes the host.
pub const HOST: i32 = -1;

/// The heaps of this process, by device. They are never dropped, because linked peers keep their
/// addresses.
static HEAPS: PerProcess<Mutex<HashMap<i32, Arc<Heap>>>> = PerProcess::new(Mutex::default);

/// Returns the heap of this process on a device, or of the host; it is created on first use.
pub fn of(device: i32) -> Result<Arc<Heap>> {
    let mut heaps = lock(HEAPS.get());
    if let Some(heap) = heaps.get(&device) {
        return Ok(Arc::clone(heap));
    }
    if device == HOST {
        let heap = Heap::new(Arc::new(HostMemory::of_this_machine()))?;
        heaps.insert(device, Arc::clone(&heap));
        return Ok(heap);
    }
    let opened = Device::open(device)?;
    if !vmm::supported(&opened) {
        return Err(Error::config(format!(
            "cuda:{device} cannot share memory with other processes"
        )));
    }
    let heap = Heap::new(Arc::new(GpuAddressSpace::new(opened)?))?;
    heaps.insert(device, Arc::clone(&heap));
    Ok(heap)
}

/// Returns the heap of this process that contains `address`.
pub fn at(address: u64) -> Option<Arc<Heap>> {
    let heaps = lock(HEAPS.get());
    heaps.values().find(|heap| heap.contains(address)).cloned()
}

/// Allocates a segment of at least `bytes` of symmetric memory of `device`, or of the host
/// ([`HOST`]), and returns its address. Fails with `Config` if memory or addresses are exhausted.
pub fn allocate(device: i32, bytes: usize) -> Result<u64> {
    if device != HOST && !Config::get().p2p {
        return Err(Error::config(
            "SYMM_P2P=0 keeps GPUs from mapping each other's memory, so there is none \
             that is symmetric",
        ));
    }
    of(device)?.allocate(bytes)
}

/// Releases the segment at `address`, which `allocate` returned. Waits for the device's work first,
/// as `cudaFree` does, and then up to a second for the peers to unmap it.
pub fn release(address: u64) -> Result<()> {
    let none = || Error::value(format!("no symmetric memory lies at {address:#x}"));
    at(address).ok_or_else(none)?.release(address)
}

/// Returns true if `device` can have symmetric memory at all.
pub fn supported(device: i32) -> bool {
    Config::get().p2p && Device::open(device).is_ok_and(|device| vmm::supported(&device))
}
