//! Symmetric memory of one emulated rank, mapped at a different address for every rank, as on GPUs.

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::sync::atomic::{AtomicUsize, Ordering};

pub(crate) struct Heap {
    me: usize,
    bytes: usize,
    /// Address of each rank's mapping.
    views: Vec<usize>,
    /// End of the allocated part.
    taken: AtomicUsize,
}

impl Heap {
    /// Makes the memory of rank `me` of `n`.
    pub(crate) fn new(me: usize, n: usize, bytes: usize) -> Self {
        let file = memfd_create("symm-emulated-heap", MemfdFlags::CLOEXEC).expect("memfd");
        ftruncate(&file, bytes as u64).expect("a length");
        let view = |_| {
            // SAFETY: a new mapping at an address of the system's choice.
            let at = unsafe {
                mmap(
                    std::ptr::null_mut(),
                    bytes,
                    ProtFlags::READ | ProtFlags::WRITE,
                    MapFlags::SHARED,
                    &file,
                    0,
                )
            };
            at.expect("mapped") as usize
        };
        // Allocation starts at a different offset on each rank, so that the ranks' tensors have
        // different offsets.
        Self {
            me,
            bytes,
            views: (0..n).map(view).collect(),
            taken: AtomicUsize::new(4096 * (me + 1) + 256 * me),
        }
    }

    /// Returns the address at which `rank` has this memory mapped.
    pub(crate) fn seen_by(&self, rank: usize) -> usize {
        self.views[rank]
    }

    /// Allocates `bytes` bytes at a multiple of 16, and returns the owner's address.
    ///
    /// # Panics
    /// If the memory is exhausted.
    pub(crate) fn take(&self, bytes: usize) -> *mut u8 {
        let at = self.taken.fetch_add(bytes.next_multiple_of(16), Ordering::Relaxed);
        assert!(at + bytes <= self.bytes, "an emulated heap is full");
        (self.views[self.me] + at) as *mut u8
    }
}

impl Drop for Heap {
    fn drop(&mut self) {
        for view in &self.views {
            // SAFETY: mapped in `new`; the kernels and tensors that use it end before their heap.
            unsafe { munmap(*view as *mut _, self.bytes) }.expect("mapped");
        }
    }
}
