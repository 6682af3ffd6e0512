//! Interface that a heap needs of a device. Memory of the host stands in for it in tests.

use crate::error::Result;
use crate::kernels::cuda::driver::{Device, OwnStream, RelaxedCapture};
use crate::mem::vmm::{self, Physical, Reservation};
use rustix::fd::OwnedFd;
use std::sync::Arc;

/// A device as a source of addresses.
pub trait Addresses: Send + Sync {
    /// Number of bytes that sizes and offsets are multiples of.
    fn granularity(&self) -> usize;
    /// Bytes of addresses that a heap takes: twice the memory there is, so that holes between segments are never all that is left.
    fn span(&self) -> usize;
    /// Addresses for a heap of `bytes`, this process's own or a peer's.
    fn reserve(&self, bytes: usize) -> Result<Box<dyn Range>>;
    /// Waits until all work of the device that was enqueued by this process is done.
    fn settle(&self) -> Result<()>;
    /// Zeroes `bytes` bytes of a segment at `address`, which nobody uses, and returns when that is done.
    fn clear(&self, address: u64, bytes: usize) -> Result<()>;
}

/// A reserved range of addresses. Dropped when nothing is mapped there any more.
pub trait Range: Send + Sync {
    /// The first.
    fn address(&self) -> u64;
    /// New memory of `bytes` at `offset`.
    fn create(&self, offset: usize, bytes: usize) -> Result<Arc<dyn Piece>>;
    /// A peer's memory of `bytes` at `offset`, by the descriptor that it gave.
    fn import(&self, offset: usize, bytes: usize, descriptor: OwnedFd) -> Result<()>;
    /// Ends what `create` or `import` began with the same `offset` and `bytes`, which no kernel uses any more.
    fn unmap(&self, offset: usize, bytes: usize);
}

/// Memory that was made; it lasts as long as this value, a descriptor or a mapping, in whatever process.
pub trait Piece: Send + Sync {
    /// A descriptor for one more peer. Not kept: there may be more pieces than a process may have files open.
    fn export(&self) -> Result<OwnedFd>;
}

/// A GPU.
pub struct Gpu {
    device: Arc<Device>,
    granularity: usize,
    span: usize,
}

struct GpuRange {
    // Before the device, whose addresses they are.
    reservation: Reservation,
    device: Arc<Device>,
}

impl Gpu {
    /// `device`, which must support it.
    pub fn new(device: Device) -> Result<Self> {
        let granularity = {
            let _entered = device.enter()?;
            vmm::granularity(&device)?
        };
        let span = (2 * device.memory()?).next_multiple_of(granularity);
        Ok(Self { device: Arc::new(device), granularity, span })
    }
}

impl Addresses for Gpu {
    fn granularity(&self) -> usize {
        self.granularity
    }

    fn span(&self) -> usize {
        self.span
    }

    fn reserve(&self, bytes: usize) -> Result<Box<dyn Range>> {
        let _entered = self.device.enter()?;
        Ok(Box::new(GpuRange { reservation: Reservation::new(bytes)?, device: Arc::clone(&self.device) }))
    }

    fn settle(&self) -> Result<()> {
        self.device.synchronize()
    }

    fn clear(&self, address: u64, bytes: usize) -> Result<()> {
        let _entered = self.device.enter()?;
        // On a stream of its own: others may be captured.
        let _relaxed = RelaxedCapture::begin()?;
        let stream = OwnStream::new()?;
        stream.stream().fill(address, 0, bytes)?;
        stream.stream().synchronize()
    }
}

impl Range for GpuRange {
    fn address(&self) -> u64 {
        self.reservation.address()
    }

    fn create(&self, offset: usize, bytes: usize) -> Result<Arc<dyn Piece>> {
        let _entered = self.device.enter()?;
        // Also while a stream is captured: torch's allocator asks for segments then.
        let _relaxed = RelaxedCapture::begin()?;
        let memory = Physical::create(&self.device, bytes)?;
        self.reservation.map(offset, &memory, &self.device)?;
        Ok(Arc::new(memory))
    }

    fn import(&self, offset: usize, bytes: usize, descriptor: OwnedFd) -> Result<()> {
        let _entered = self.device.enter()?;
        let _relaxed = RelaxedCapture::begin()?;
        self.reservation.map(offset, &Physical::import(&descriptor, bytes)?, &self.device)
    }

    fn unmap(&self, offset: usize, bytes: usize) {
        let _entered = self.device.enter();
        let _relaxed = RelaxedCapture::begin();
        self.reservation.unmap(offset, bytes);
    }
}

impl Piece for Physical {
    fn export(&self) -> Result<OwnedFd> {
        Physical::export(self)
    }
}
