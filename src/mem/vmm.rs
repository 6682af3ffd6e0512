//! GPU memory that other processes can map: made and shared by the driver's virtual-memory calls.
//!
//! The physical memory lives as long as anybody maps it or holds its descriptor, in whatever process: a rank that ends leaves its
//! peers' mappings valid, and when the last of them goes the memory is free, however its maker ended.
#![allow(unsafe_code, reason = "mappings of GPU memory")]

use crate::error::{Error, Result};
use crate::kernels::cuda::driver::{Device, check};
use cudarc::driver::sys;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// Device addresses that nobody else gets. Nothing need be mapped there.
#[derive(Debug)]
pub struct Reservation {
    address: u64,
    bytes: usize,
}

/// A mapping of physical GPU memory, ours or a peer's, into this device's addresses.
#[derive(Debug)]
pub struct Mapping {
    reservation: Reservation,
}

/// Physical memory on a device, not mapped yet.
#[derive(Debug)]
pub struct Physical {
    handle: sys::CUmemGenericAllocationHandle,
    bytes: usize,
}

const POSIX_FD: sys::CUmemAllocationHandleType = sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

fn location(device: &Device) -> sys::CUmemLocation {
    sys::CUmemLocation { type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: device.ordinal() }
}

fn properties(device: &Device) -> sys::CUmemAllocationProp {
    // SAFETY: all zeroes is a value of this C struct: no compression, no RDMA, no handle.
    let mut properties: sys::CUmemAllocationProp = unsafe { std::mem::zeroed() };
    properties.type_ = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.requestedHandleTypes = POSIX_FD;
    properties.location = location(device);
    properties
}

/// Whether memory of `device` can be made this way and given to other processes.
pub fn supported(device: &Device) -> bool {
    use sys::CUdevice_attribute::{
        CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, CU_DEVICE_ATTRIBUTE_VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED,
    };
    let has = |attribute| device.attribute(attribute).is_ok_and(|value| value != 0);
    has(CU_DEVICE_ATTRIBUTE_VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED) && has(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED)
}

/// Number of bytes that sizes must be multiples of; in the current context.
pub fn granularity(device: &Device) -> Result<usize> {
    let (mut bytes, properties) = (0, properties(device));
    let option = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_RECOMMENDED;
    // SAFETY: valid for a write; the properties are complete.
    check("asking for the granularity of device memory", unsafe {
        sys::cuMemGetAllocationGranularity(&raw mut bytes, &raw const properties, option)
    })?;
    Ok(bytes)
}

impl Physical {
    /// `bytes` (a multiple of the granularity) on `device`.
    pub fn create(device: &Device, bytes: usize) -> Result<Self> {
        let (mut handle, properties) = (0, properties(device));
        // SAFETY: valid for a write; released by `drop`.
        let result = unsafe { sys::cuMemCreate(&raw mut handle, bytes, &raw const properties, 0) };
        check(&format!("allocating {bytes} bytes on cuda:{}", device.ordinal()), result)?;
        Ok(Self { handle, bytes })
    }

    /// A descriptor through which another process can map it.
    pub fn export(&self) -> Result<OwnedFd> {
        let mut fd: i32 = -1;
        // SAFETY: for this type the driver writes an `int`.
        let result = unsafe { sys::cuMemExportToShareableHandle((&raw mut fd).cast(), self.handle, POSIX_FD, 0) };
        check("exporting device memory", result)?;
        // SAFETY: the driver made it for us, and for nobody else.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        rustix::io::fcntl_setfd(&fd, rustix::io::FdFlags::CLOEXEC).map_err(|e| Error::os("closing a descriptor on exec", e))?;
        Ok(fd)
    }

    /// Imports what a peer exported; `bytes` is the length that it told.
    pub fn import(fd: &OwnedFd, bytes: usize) -> Result<Self> {
        let mut handle = 0;
        // SAFETY: for this type the driver takes the descriptor by value, as a pointer; it keeps a reference of its own.
        let result = unsafe { sys::cuMemImportFromShareableHandle(&raw mut handle, fd.as_raw_fd() as usize as *mut _, POSIX_FD) };
        check("importing a peer's device memory", result)?;
        Ok(Self { handle, bytes })
    }

    /// Maps all of it where `device` can read and write it. The mapping keeps the memory.
    pub fn map(&self, device: &Device) -> Result<Mapping> {
        let reservation = Reservation::new(self.bytes)?;
        reservation.map(0, self, device)?;
        Ok(Mapping { reservation })
    }
}

impl Drop for Physical {
    fn drop(&mut self) {
        // SAFETY: made by `create` or `import`; mappings have references of their own.
        let _ = unsafe { sys::cuMemRelease(self.handle) };
    }
}

impl Reservation {
    /// `bytes` (a multiple of the granularity) of addresses.
    pub fn new(bytes: usize) -> Result<Self> {
        let mut address = 0;
        // SAFETY: valid for a write; 0 leaves alignment and address to the driver. Freed by `drop`.
        check(&format!("reserving {bytes} bytes of addresses"), unsafe { sys::cuMemAddressReserve(&raw mut address, bytes, 0, 0, 0) })?;
        Ok(Self { address, bytes })
    }

    /// The first byte, as the device and the driver know it.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Maps all of `memory` at `offset`, where nothing is mapped, readable and writable for `device`. The mapping keeps the memory.
    pub fn map(&self, offset: usize, memory: &Physical, device: &Device) -> Result<()> {
        if offset.checked_add(memory.bytes).is_none_or(|end| end > self.bytes) {
            return Err(Error::internal(format!("{} bytes at {offset} leave a range of {} bytes", memory.bytes, self.bytes)));
        }
        let address = self.address + offset as u64;
        // SAFETY: within what `new` reserved (checked above); the driver refuses what is mapped already; the handle lives.
        check("mapping device memory", unsafe { sys::cuMemMap(address, memory.bytes, 0, memory.handle, 0) })?;
        let flags = sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        let access = sys::CUmemAccessDesc { location: location(device), flags };
        // SAFETY: mapped above.
        let opened = check("opening device memory to access", unsafe { sys::cuMemSetAccess(address, memory.bytes, &raw const access, 1) });
        if opened.is_err() {
            self.unmap(offset, memory.bytes);
        }
        opened
    }

    /// Ends what `map` began with the same `offset` and `bytes`. Whoever calls it has seen to it that no kernel of this process uses it.
    pub fn unmap(&self, offset: usize, bytes: usize) {
        // SAFETY: the driver refuses a range that is not one whole mapping; within what `new` reserved, so it is one of ours.
        let _ = unsafe { sys::cuMemUnmap(self.address + offset as u64, bytes) };
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        // SAFETY: reserved by `new`; whoever mapped something there has unmapped it.
        let _ = unsafe { sys::cuMemAddressFree(self.address, self.bytes) };
    }
}

impl Mapping {
    /// The first byte, as the device and the driver know it.
    pub fn address(&self) -> u64 {
        self.reservation.address
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        self.reservation.unmap(0, self.reservation.bytes);
    }
}
