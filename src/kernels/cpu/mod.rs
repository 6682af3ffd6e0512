//! CPU kernels: reduce, copy, convert; the best instruction set of this machine is chosen at run time.

use crate::dtype::{DType, ReduceOp};
use crate::error::Result;

/// One rank's elements, as a kernel reads them.
#[derive(Clone, Copy, Debug)]
pub struct Source {
    /// First element; any alignment.
    pub ptr: *const u8,
    /// Multiplied into each element under PREMUL_SUM; ignored otherwise.
    pub factor: f64,
}

/// How a kernel writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Store {
    /// Through the cache.
    Cached,
    /// Past the cache, for destinations that nobody reads soon. Fenced before the kernel returns.
    Streaming,
}

/// Whether `op` means something for `dtype`; the error names the nearest supported form.
pub fn supports(_op: ReduceOp, _dtype: DType) -> Result<()> {
    Ok(())
}

/// `dst[i] = op(sources[0][i], .., sources[n-1][i])` for `i < count`, combined in the order of `sources`.
///
/// # Safety
/// Each source and `dst` must be valid for `count` elements of `dtype`; `dst` is the same as a source or overlaps none.
pub unsafe fn reduce(_op: ReduceOp, _dtype: DType, _dst: *mut u8, _sources: &[Source], _count: usize, _store: Store) {
    unimplemented!("written in kernels/cpu")
}

/// How shared staging is written.
pub const STAGING: Store = Store::Cached;

/// Copies `bytes` bytes from `src` to `dst`.
///
/// # Safety
/// `src` must be valid for reads and `dst` for writes of `bytes` bytes; they do not overlap.
pub unsafe fn copy(dst: *mut u8, src: *const u8, bytes: usize, _store: Store) {
    // SAFETY: the caller's contract is this function's.
    unsafe { std::ptr::copy_nonoverlapping(src, dst, bytes) }
}
