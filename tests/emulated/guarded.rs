//! Tensors at any address, between canaries.

use crate::calls::Random;
use crate::heap::Heap;
use symm::coll::call::Span;
use symm::dtype::DType;

/// The bytes around every tensor, and the initial content of outputs.
pub(crate) const CANARY: u8 = 0xA5;
pub(crate) const MARGIN: usize = 48;

/// A tensor at any address, between canaries.
pub(crate) struct Guarded {
    /// The whole allocation including canaries: owned, or part of a heap that outlives it.
    pub(crate) data: *mut u8,
    pub(crate) length: usize,
    pub(crate) own: bool,
    pub(crate) start: usize,
    pub(crate) bytes: usize,
}

// SAFETY: plain memory; kernels on other threads use it only while no other code does.
unsafe impl Send for Guarded {}
// SAFETY: as above.
unsafe impl Sync for Guarded {}

/// How many of a call's tensors are in symmetric memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Symmetry {
    None,
    /// Some of them, and some of these are not aligned.
    Some,
    /// All of them, aligned.
    All,
}

/// Where a rank's tensors are allocated.
#[derive(Clone, Copy)]
pub(crate) struct Ground<'a> {
    pub(crate) heap: Option<&'a Heap>,
    pub(crate) symmetry: Symmetry,
}

impl Guarded {
    pub(crate) fn new(random: &mut Random, ground: Ground<'_>, dtype: DType, bytes: usize) -> Self {
        let (aligned, some) = (random.below(2) == 0, random.below(4) > 0);
        let length = bytes + 3 * MARGIN;
        let heap = ground.heap.filter(|_| {
            ground.symmetry == Symmetry::All || (ground.symmetry == Symmetry::Some && some)
        });
        let data = heap.map_or_else(
            || Box::into_raw(vec![CANARY; length].into_boxed_slice()).cast(),
            |heap| heap.take(length),
        );
        let aligned = aligned || (heap.is_some() && ground.symmetry == Symmetry::All);
        let beyond = if aligned { 0 } else { random.below(16) };
        let start = 32 - data as usize % 16 + beyond;
        let size = dtype.size();
        // SAFETY: `length` bytes, just allocated and not shared yet.
        let all = unsafe { std::slice::from_raw_parts_mut(data, length) };
        all.fill(CANARY);
        for (i, byte) in all[start..][..bytes].iter_mut().enumerate() {
            // No NaN and no infinity: the highest exponent bit of a float is 0.
            *byte = random.below(256) as u8
                & if size > 1 && i % size == size - 1 { 0xBF } else { 0xFF };
        }
        Self { data, length, own: heap.is_none(), start, bytes }
    }

    pub(crate) fn span(&self) -> Span {
        Span { addr: self.data as usize + self.start, bytes: self.bytes }
    }

    pub(crate) fn get(&self) -> &[u8] {
        &self.all()[self.start..][..self.bytes]
    }

    pub(crate) fn all(&self) -> &[u8] {
        // SAFETY: `length` bytes, owned or taken from the heap, which lives longer; no kernel
        // writes during the borrow.
        unsafe { std::slice::from_raw_parts(self.data, self.length) }
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        if self.own {
            // SAFETY: made by `new` from a boxed slice of this length.
            drop(unsafe {
                Box::from_raw(std::ptr::slice_from_raw_parts_mut(self.data, self.length))
            });
        }
    }
}
