//! The interface of a device to a heap. Host memory implements it, also for tests.

use crate::error::Result;
use crate::kernels::cuda::driver::{Device, OwnStream, RelaxedCapture};
use crate::mem::vmm::{self, DeviceAllocation, DeviceReservation};
use rustix::fd::OwnedFd;
use std::sync::Arc;

/// A device as a source of addresses.
pub trait AddressSpace: Send + Sync {
    /// Sizes and offsets are multiples of this number of bytes.
    fn granularity(&self) -> usize;
    /// Size of a heap's address range: twice the memory, so that holes between segments never use
    /// up the addresses.
    fn span(&self) -> usize;
    /// Reserves addresses for a heap of `bytes`, of this process or of a peer.
    fn reserve(&self, bytes: usize) -> Result<Box<dyn AddressRange>>;
    /// Waits until all work that this process has enqueued on the device is done.
    fn settle(&self) -> Result<()>;
    /// Zeroes `bytes` bytes of a segment at `address` that is not in use, and returns when that is
    /// done.
    fn clear(&self, address: u64, bytes: usize) -> Result<()>;
}

/// A reserved range of addresses. Dropped once nothing is mapped there.
pub trait AddressRange: Send + Sync {
    /// Returns its first address.
    fn address(&self) -> u64;
    /// Creates memory of `bytes` at `offset`.
    fn create(&self, offset: usize, bytes: usize) -> Result<Arc<dyn Backing>>;
    /// Maps a peer's memory of `bytes` at `offset`, from the file descriptor that the peer sent.
    fn import(&self, offset: usize, bytes: usize, descriptor: OwnedFd) -> Result<()>;
    /// Unmaps what `create` or `import` mapped with the same `offset` and `bytes`; no kernel uses
    /// the memory any more.
    fn unmap(&self, offset: usize, bytes: usize);
}

/// Memory that this process created. It lasts while this value exists, or any process has a file
/// descriptor or a mapping of it.
pub trait Backing: Send + Sync {
    /// Returns a new file descriptor of the memory, for one more peer. This value keeps no copy,
    /// because there may be more such pieces of memory than a process may have open files.
    fn export(&self) -> Result<OwnedFd>;
}

/// A GPU.
pub struct GpuAddressSpace {
    device: Arc<Device>,
    granularity: usize,
    span: usize,
}

struct GpuRange {
    // Dropped before `device`, because the addresses belong to the context of the device.
    reservation: DeviceReservation,
    device: Arc<Device>,
}

impl GpuAddressSpace {
    /// Makes the interface of `device`, which must support symmetric memory.
    pub fn new(device: Device) -> Result<Self> {
        let granularity = {
            let _entered = device.enter()?;
            vmm::granularity(&device)?
        };
        let span = (2 * device.memory()?).next_multiple_of(granularity);
        Ok(Self { device: Arc::new(device), granularity, span })
    }
}

impl AddressSpace for GpuAddressSpace {
    fn granularity(&self) -> usize {
        self.granularity
    }

    fn span(&self) -> usize {
        self.span
    }

    fn reserve(&self, bytes: usize) -> Result<Box<dyn AddressRange>> {
        let _entered = self.device.enter()?;
        Ok(Box::new(GpuRange {
            reservation: DeviceReservation::new(bytes)?,
            device: Arc::clone(&self.device),
        }))
    }

    fn settle(&self) -> Result<()> {
        self.device.synchronize()
    }

    fn clear(&self, address: u64, bytes: usize) -> Result<()> {
        let _entered = self.device.enter()?;
        // Uses a separate stream, because other streams may be captured.
        let _relaxed = RelaxedCapture::begin()?;
        let stream = OwnStream::new()?;
        stream.stream().fill(address, 0, bytes)?;
        stream.stream().synchronize()
    }
}

impl AddressRange for GpuRange {
    fn address(&self) -> u64 {
        self.reservation.address()
    }

    fn create(&self, offset: usize, bytes: usize) -> Result<Arc<dyn Backing>> {
        let _entered = self.device.enter()?;
        // Allowed while a stream is captured, because torch's allocator requests segments then,
        // too.
        let _relaxed = RelaxedCapture::begin()?;
        let memory = DeviceAllocation::create(&self.device, bytes)?;
        self.reservation.map(offset, &memory, &self.device)?;
        Ok(Arc::new(memory))
    }

    fn import(&self, offset: usize, bytes: usize, descriptor: OwnedFd) -> Result<()> {
        let _entered = self.device.enter()?;
        let _relaxed = RelaxedCapture::begin()?;
        self.reservation.map(offset, &DeviceAllocation::import(&descriptor, bytes)?, &self.device)
    }

    fn unmap(&self, offset: usize, bytes: usize) {
        let _entered = self.device.enter();
        let _relaxed = RelaxedCapture::begin();
        self.reservation.unmap(offset, bytes);
    }
}

impl Backing for DeviceAllocation {
    fn export(&self) -> Result<OwnedFd> {
        DeviceAllocation::export(self)
    }
}
