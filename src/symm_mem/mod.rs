//! Symmetric memory: a heap of addresses per device, and one of the host, in every process, mapped by all its peers at the same offsets.
//!
//! What lies at an offset of a peer's heap lies at that offset of a range that this process reserved for that peer. So a kernel that is
//! told an offset needs no table, and no call registers anything. [`local`] makes segments and offers them, [`remote`] maps what peers
//! offer, over a [`link`] that the process's one thread ([`service`]) serves once two heaps [`connect`]; [`addresses`] is what they need of
//! a device.

mod address;
mod addresses;
mod attention;
mod connect;
mod frame;
#[cfg(fuzzing)]
pub mod fuzz;
mod host;
mod link;
mod local;
pub mod peers;
mod pins;
mod remote;
mod service;
#[cfg(test)]
pub(crate) mod tests;

pub use address::Address;
pub use addresses::{Addresses, Gpu, Piece, Range};
pub use attention::Attention;
pub use frame::Key;
pub use host::HostMemory;
pub use link::{Failed, Hold, Pin};
pub use local::Heap;
pub use pins::OwnPin;

use crate::config::Config;
use crate::error::{Error, Result};
use crate::kernels::cuda::driver::Device;
use crate::lock::lock;
use crate::mem::vmm;
use crate::sys::fork::PerProcess;
use std::collections::HashMap;
use std::sync::{Arc, Mutex};

/// Stands for the host in the place of a device.
pub const HOST: i32 = -1;

/// The heaps of this process, by device. They stay: whoever links to one keeps its addresses.
static HEAPS: PerProcess<Mutex<HashMap<i32, Arc<Heap>>>> = PerProcess::new(Mutex::default);

/// Heap of this process on a device, or of the host, made when it is first asked for.
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
        return Err(Error::config(format!("cuda:{device} cannot share memory with other processes")));
    }
    let heap = Heap::new(Arc::new(Gpu::new(opened)?))?;
    heaps.insert(device, Arc::clone(&heap));
    Ok(heap)
}

/// The heap of this process that `address` lies in.
pub fn at(address: u64) -> Option<Arc<Heap>> {
    let heaps = lock(HEAPS.get());
    heaps.values().find(|heap| heap.contains(address)).cloned()
}

/// Address of a new segment of at least `bytes` of symmetric memory of `device`, or of the host ([`HOST`]). An error of kind
/// `Config` where none is left.
pub fn allocate(device: i32, bytes: usize) -> Result<u64> {
    if device != HOST && !Config::get().p2p {
        return Err(Error::config("SYMM_P2P=0 keeps GPUs from mapping each other's memory, so there is none that is symmetric"));
    }
    of(device)?.allocate(bytes)
}

/// Gives back the segment at `address`, which `allocate` returned. Waits for the device's work first, as `cudaFree` does, and then,
/// for at most a second, for the peers to let go of it.
pub fn release(address: u64) -> Result<()> {
    let none = || Error::value(format!("no symmetric memory lies at {address:#x}"));
    at(address).ok_or_else(none)?.release(address)
}

/// Whether `device` can have symmetric memory at all.
pub fn supported(device: i32) -> bool {
    Config::get().p2p && Device::open(device).is_ok_and(|device| vmm::supported(&device))
}
