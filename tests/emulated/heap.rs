//! Symmetric memory of one emulated rank, which every rank sees at an address of its own, as GPUs do.

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::sync::atomic::{AtomicUsize, Ordering};

pub(crate) struct Heap {
    me: usize,
    bytes: usize,
    /// Where each rank has it mapped.
    views: Vec<usize>,
    /// Up to where it is taken.
    taken: AtomicUsize,
}

impl Heap {
    /// Of rank `me` of `n`.
    pub(crate) fn new(me: usize, n: usize, bytes: usize) -> Self {
        let file = memfd_create("symm-emulated-heap", MemfdFlags::CLOEXEC).expect("memfd");
        ftruncate(&file, bytes as u64).expect("a length");
        let view = |_| {
            // SAFETY: a new mapping where the system finds room.
            let at = unsafe { mmap(std::ptr::null_mut(), bytes, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, &file, 0) };
            at.expect("mapped") as usize
        };
        // Ranks' tensors lie at different offsets.
        Self { me, bytes, views: (0..n).map(view).collect(), taken: AtomicUsize::new(4096 * (me + 1) + 256 * me) }
    }

    /// Where `rank` has it.
    pub(crate) fn seen_by(&self, rank: usize) -> usize {
        self.views[rank]
    }

    /// `bytes` bytes at a multiple of 16, where its rank has them.
    ///
    /// # Panics
    /// If nothing is left.
    pub(crate) fn take(&self, bytes: usize) -> *mut u8 {
        let at = self.taken.fetch_add(bytes.next_multiple_of(16), Ordering::Relaxed);
        assert!(at + bytes <= self.bytes, "an emulated heap is full");
        (self.views[self.me] + at) as *mut u8
    }
}

impl Drop for Heap {
    fn drop(&mut self) {
        for view in &self.views {
            // SAFETY: mapped in `new`; kernels and tensors that use it are gone before their heap.
            unsafe { munmap(*view as *mut _, self.bytes) }.expect("mapped");
        }
    }
}
