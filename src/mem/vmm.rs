//! GPU memory that other processes can map, made and shared through the driver's virtual-memory
//! calls.
//!
//! The physical memory lives as long as any process maps it or holds its descriptor. Mappings
//! therefore stay valid when the rank that made the memory exits. The memory is freed when the last
//! mapping and descriptor are gone, however the process that made it ended.
#![allow(unsafe_code, reason = "mappings of GPU memory")]

use crate::error::{Error, Result};
use crate::kernels::cuda::driver::{Device, check};
use cudarc::driver::sys;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// Reserved device addresses. Nothing need be mapped there.
#[derive(Debug)]
pub struct DeviceReservation {
    address: u64,
    bytes: usize,
}

/// A mapping of physical GPU memory, of this process or a peer, into this device's address space.
#[derive(Debug)]
pub struct DeviceMapping {
    reservation: DeviceReservation,
}

/// Physical memory on a device.
#[derive(Debug)]
pub struct DeviceAllocation {
    handle: sys::CUmemGenericAllocationHandle,
    bytes: usize,
}

const POSIX_FD: sys::CUmemAllocationHandleType =
    sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

fn location(device: &Device) -> sys::CUmemLocation {
    sys::CUmemLocation {
        type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
        id: device.ordinal(),
    }
}

fn properties(device: &Device) -> sys::CUmemAllocationProp {
    // SAFETY: all zeroes is a valid value of this C struct: no compression, no RDMA, no handle.
    let mut properties: sys::CUmemAllocationProp = unsafe { std::mem::zeroed() };
    properties.type_ = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.requestedHandleTypes = POSIX_FD;
    properties.location = location(device);
    properties
}

/// Returns true if memory of `device` can be made this way and shared with other processes.
pub fn supported(device: &Device) -> bool {
    use sys::CUdevice_attribute::{
        CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
        CU_DEVICE_ATTRIBUTE_VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED,
    };
    let has = |attribute| device.attribute(attribute).is_ok_and(|value| value != 0);
    has(CU_DEVICE_ATTRIBUTE_VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED)
        && has(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED)
}

/// Returns the granularity in bytes that every size must be a multiple of. Needs a current context.
pub fn granularity(device: &Device) -> Result<usize> {
    let (mut bytes, properties) = (0, properties(device));
    let option = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_RECOMMENDED;
    // SAFETY: valid for a write; the properties are complete.
    check("asking for the granularity of device memory", unsafe {
        sys::cuMemGetAllocationGranularity(&raw mut bytes, &raw const properties, option)
    })?;
    Ok(bytes)
}

impl DeviceAllocation {
    /// Allocates `bytes` (a multiple of the granularity) on `device`.
    pub fn create(device: &Device, bytes: usize) -> Result<Self> {
        let (mut handle, properties) = (0, properties(device));
        // SAFETY: valid for a write; released by `drop`.
        let result = unsafe { sys::cuMemCreate(&raw mut handle, bytes, &raw const properties, 0) };
        check(&format!("allocating {bytes} bytes on cuda:{}", device.ordinal()), result)?;
        Ok(Self { handle, bytes })
    }

    /// Returns a file descriptor through which another process can map the memory.
    pub fn export(&self) -> Result<OwnedFd> {
        let mut fd: i32 = -1;
        // SAFETY: for this handle type, the driver writes an `int`.
        let result = unsafe {
            sys::cuMemExportToShareableHandle((&raw mut fd).cast(), self.handle, POSIX_FD, 0)
        };
        check("exporting device memory", result)?;
        // SAFETY: the driver made the descriptor for this call; it has no other owner.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        rustix::io::fcntl_setfd(&fd, rustix::io::FdFlags::CLOEXEC)
            .map_err(|e| Error::os("closing a descriptor on exec", e))?;
        Ok(fd)
    }

    /// Imports memory that a peer exported; `bytes` is the length that the peer sent.
    pub fn import(fd: &OwnedFd, bytes: usize) -> Result<Self> {
        let mut handle = 0;
        // SAFETY: for this handle type, the driver takes the descriptor by value, as a pointer, and
        // keeps its own reference.
        let result = unsafe {
            sys::cuMemImportFromShareableHandle(
                &raw mut handle,
                fd.as_raw_fd() as usize as *mut _,
                POSIX_FD,
            )
        };
        check("importing a peer's device memory", result)?;
        Ok(Self { handle, bytes })
    }

    /// Maps the whole memory, readable and writable for `device`. The mapping keeps the memory
    /// alive.
    pub fn map(&self, device: &Device) -> Result<DeviceMapping> {
        let reservation = DeviceReservation::new(self.bytes)?;
        reservation.map(0, self, device)?;
        Ok(DeviceMapping { reservation })
    }
}

impl Drop for DeviceAllocation {
    fn drop(&mut self) {
        // SAFETY: made by `create` or `import`; mappings hold their own references.
        let _ = unsafe { sys::cuMemRelease(self.handle) };
    }
}

impl DeviceReservation {
    /// Reserves `bytes` (a multiple of the granularity) of addresses.
    pub fn new(bytes: usize) -> Result<Self> {
        let mut address = 0;
        // SAFETY: valid for a write; 0 leaves alignment and address to the driver. Freed by `drop`.
        check(&format!("reserving {bytes} bytes of addresses"), unsafe {
            sys::cuMemAddressReserve(&raw mut address, bytes, 0, 0, 0)
        })?;
        Ok(Self { address, bytes })
    }

    /// Returns the device address of the first byte.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Maps the whole `memory` at `offset`, readable and writable for `device`. Nothing may be
    /// mapped there yet. The mapping keeps the memory alive.
    pub fn map(&self, offset: usize, memory: &DeviceAllocation, device: &Device) -> Result<()> {
        if offset.checked_add(memory.bytes).is_none_or(|end| end > self.bytes) {
            return Err(Error::internal(format!(
                "{} bytes at {offset} leave a range of {} bytes",
                memory.bytes, self.bytes
            )));
        }
        let address = self.address + offset as u64;
        // SAFETY: within the reservation of `new` (checked above); the driver rejects a range that
        // is already mapped; the handle lives.
        check("mapping device memory", unsafe {
            sys::cuMemMap(address, memory.bytes, 0, memory.handle, 0)
        })?;
        let flags = sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        let access = sys::CUmemAccessDesc { location: location(device), flags };
        // SAFETY: mapped above.
        let opened = check("opening device memory to access", unsafe {
            sys::cuMemSetAccess(address, memory.bytes, &raw const access, 1)
        });
        if opened.is_err() {
            self.unmap(offset, memory.bytes);
        }
        opened
    }

    /// Unmaps what `map` mapped with the same `offset` and `bytes`. The caller ensures that no
    /// kernel of this process uses it.
    pub fn unmap(&self, offset: usize, bytes: usize) {
        // SAFETY: the driver rejects a range that is not one whole mapping; the range is within the
        // reservation of `new`, so the mapping is ours.
        let _ = unsafe { sys::cuMemUnmap(self.address + offset as u64, bytes) };
    }
}

impl Drop for DeviceReservation {
    fn drop(&mut self) {
        // SAFETY: reserved by `new`; every mapping there has been unmapped.
        let _ = unsafe { sys::cuMemAddressFree(self.address, self.bytes) };
    }
}

impl DeviceMapping {
    /// Returns the device address of the first byte.
    pub fn address(&self) -> u64 {
        self.reservation.address
    }
}

impl Drop for DeviceMapping {
    fn drop(&mut self) {
        self.reservation.unmap(0, self.reservation.bytes);
    }
}
