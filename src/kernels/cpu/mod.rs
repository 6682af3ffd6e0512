//! CPU kernels: reduce, copy, convert; the best instruction set of this CPU is chosen at run time.
//!
//! Guarantee: an output element depends only on the input elements, the order of the sources and
//! the [`SumOrder`]. It does not depend on the instruction set, the alignment, the count, the way a
//! range is split or the [`WriteMode`]. Floats narrower than 32 bits and `f32` accumulate in `f32`,
//! `f64` in `f64`, and round once; integers wrap. A NaN result is always the format's canonical
//! quiet NaN. Subnormals are kept, even if the calling thread flushes them.
//!
//! - [`element`]: numbers and how they add, multiply, compare
//! - [`cast`]: narrow floats to float32 and back
//! - [`convert`]: float16, bfloat16 and the float8 formats
//! - [`vector`]: operations that have special instructions in some instruction sets
//! - [`fp_mode`]: the calling thread's rounding and flushing
//! - [`norm`]: residual and RMSNorm of summed rows
//! - [`reduce_op`]: the reduce operations
//! - [`reduce`](mod@reduce): the one loop, compiled for each instruction set
//! - [`tree`]: pairwise combination
//! - [`dispatch`]: which compiled loop runs a call
//! - [`copy`](mod@copy): memory to memory
#![allow(
    unsafe_code,
    reason = "loops over the bytes of tensors, whose addresses torch vouches for"
)]

mod cast;
mod convert;
mod copy;
mod dispatch;
mod element;
mod fp_mode;
mod norm;
mod reduce;
mod reduce_op;
#[cfg(test)]
mod reference;
#[cfg(test)]
mod tests;
mod tree;
mod vector;

use crate::dtype::{DType, ReduceOp, SumOrder};
use crate::error::{Error, Result};
use dispatch::Isa;
pub use norm::{NormRows, add_rms_norm};

/// The elements of one rank, as a kernel reads them.
#[derive(Clone, Copy, Debug)]
pub struct InputElements {
    /// Address of the first element; any alignment.
    pub ptr: *const u8,
    /// Factor of each element under PREMUL_SUM; ignored otherwise.
    pub factor: f64,
}

/// How a kernel writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteMode {
    /// Stores through the cache.
    Cached,
    /// Stores past the cache, for destinations that no thread reads soon. Fenced before the kernel
    /// returns.
    Streaming,
}

/// Checks that `op` is defined for `dtype`; the error names the nearest supported form.
pub fn supports(op: ReduceOp, dtype: DType) -> Result<()> {
    if dispatch::kernel(op, dtype, SumOrder::Rank, Isa::Portable).is_some() {
        return Ok(());
    }
    Err(Error::not_implemented(format!(
        "reduce op {} is not defined for {}; {}",
        op.name(),
        dtype.name(),
        instead(dtype)
    )))
}

/// Returns the advice in an error of [`supports`].
fn instead(dtype: DType) -> String {
    let float = |integer: &str| {
        format!("use SUM, AVG, PRODUCT, MIN, MAX or PREMUL_SUM, or view the tensor as {integer}")
    };
    let integer = |float: &str| {
        format!("use SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR or BXOR, or cast the tensor to {float}")
    };
    let complex = |float: &str| {
        format!(
            "use SUM, AVG or PREMUL_SUM, or reduce its parts as {float} with torch.view_as_real"
        )
    };
    match dtype {
        DType::F64 => float("int64"),
        DType::F32 => float("int32"),
        DType::F16 | DType::BF16 => float("int16"),
        DType::F8E5M2 | DType::F8E4M3FN | DType::F8E5M2FNUZ | DType::F8E4M3FNUZ => float("uint8"),
        DType::C64 => complex("float32"),
        DType::C128 => complex("float64"),
        DType::U8 | DType::I8 | DType::I16 | DType::U16 => integer("float32"),
        DType::I32 | DType::U32 | DType::I64 | DType::U64 => integer("float64"),
        DType::Bool => {
            "use SUM, PRODUCT, MIN, MAX, BAND, BOR or BXOR, or cast the tensor to float32"
                .to_owned()
        }
    }
}

/// Computes `dst[i] = op(sources[0][i], .., sources[n-1][i])` for `i < count`, combined in the
/// order of `sources`. Without sources nothing is written.
///
/// # Panics
/// If [`supports`] rejects `op` for `dtype`.
///
/// # Safety
/// Each source and `dst` must be valid for `count` elements of `dtype`, at any alignment; `dst` is
/// the same as a source or overlaps none. Under `Bool` every byte is 0 or 1.
pub unsafe fn reduce(
    op: ReduceOp,
    dtype: DType,
    dst: *mut u8,
    sources: &[InputElements],
    count: usize,
    store: WriteMode,
) {
    // SAFETY: the caller's contract.
    unsafe { reduce_in(SumOrder::Rank, op, dtype, dst, sources, count, store) }
}

/// [`reduce`], combined in `order`.
///
/// # Panics
/// As [`reduce`].
///
/// # Safety
/// As [`reduce`].
pub unsafe fn reduce_in(
    order: SumOrder,
    op: ReduceOp,
    dtype: DType,
    dst: *mut u8,
    sources: &[InputElements],
    count: usize,
    store: WriteMode,
) {
    let _mode = fp_mode::DefaultFpMode::enter();
    // SAFETY: the caller's contract; `best` returns an instruction set of this CPU.
    unsafe { reduce_on(Isa::best(), order, op, dtype, dst, sources, count, sources.len(), store) }
}

/// [`reduce_in`] of sources that together represent `ranks` ranks: an AVG is divided by that
/// number.
///
/// # Safety
/// As [`reduce`].
pub unsafe fn reduce_partials(
    order: SumOrder,
    op: ReduceOp,
    dtype: DType,
    dst: *mut u8,
    sources: &[InputElements],
    count: usize,
    ranks: usize,
) {
    let _mode = fp_mode::DefaultFpMode::enter();
    // SAFETY: the caller's contract; `best` returns an instruction set of this CPU.
    unsafe {
        reduce_on(Isa::best(), order, op, dtype, dst, sources, count, ranks, WriteMode::Cached)
    }
}

/// [`reduce_partials`] with a named instruction set and store.
///
/// # Safety
/// As [`reduce`], on a CPU that has `isa`.
#[allow(clippy::too_many_arguments, reason = "the arguments of `reduce`, and two more")]
unsafe fn reduce_on(
    isa: Isa,
    order: SumOrder,
    op: ReduceOp,
    dtype: DType,
    dst: *mut u8,
    sources: &[InputElements],
    count: usize,
    ranks: usize,
    store: WriteMode,
) {
    assert!(
        order == SumOrder::Rank || sources.len() <= tree::MOST,
        "{} sources are too many for a tree",
        sources.len()
    );
    let Some(kernel) = dispatch::kernel(op, dtype, order.of(op, dtype, sources.len()), isa) else {
        panic!("reduce op {} was let through for {}", op.name(), dtype.name());
    };
    if sources.is_empty() || count == 0 {
        return;
    }
    let parts = dispatch::parts(dtype);
    let job = reduce::ReduceJob { dst, sources, count: count * parts, ranks, store };
    // SAFETY: the caller's contract; `kernel` was looked up for this dtype, whose parts the job
    // counts.
    unsafe { reduce::run(kernel, dtype.size() / parts, &job) }
}

/// Returns true if `dtype` is a float narrower than 32 bits, which [`widen`] and [`narrow`]
/// convert.
pub fn is_narrow(dtype: DType) -> bool {
    cast::casts(dtype, Isa::Portable).is_some()
}

/// Converts `count` elements of `dtype` at `src` to float32 at `dst`, exactly.
///
/// # Panics
/// Unless [`is_narrow`].
///
/// # Safety
/// `src` must be valid for reads and `dst` for writes of `count` elements, at any alignment; they
/// do not overlap.
pub unsafe fn widen(dtype: DType, dst: *mut u8, src: *const u8, count: usize) {
    let Some((widen, _)) = cast::casts(dtype, Isa::best()) else {
        panic!("{} is not narrow", dtype.name())
    };
    let _mode = fp_mode::DefaultFpMode::enter();
    // SAFETY: the caller's contract; `best` returns an instruction set of this CPU.
    unsafe { widen(dst, src, count) }
}

/// Rounds `count` float32 at `src` to `dtype` at `dst`, to nearest even, each NaN to the canonical
/// one.
///
/// # Panics
/// Unless [`is_narrow`].
///
/// # Safety
/// As [`widen`]; `dst` may be `src`.
pub unsafe fn narrow(dtype: DType, dst: *mut u8, src: *const u8, count: usize) {
    let Some((_, narrow)) = cast::casts(dtype, Isa::best()) else {
        panic!("{} is not narrow", dtype.name())
    };
    let _mode = fp_mode::DefaultFpMode::enter();
    // SAFETY: the caller's contract; `best` returns an instruction set of this CPU.
    unsafe { narrow(dst, src, count) }
}

/// How shared staging is written.
pub const STAGING: WriteMode = WriteMode::Cached;

/// Copies `bytes` bytes from `src` to `dst`.
///
/// # Safety
/// `src` must be valid for reads and `dst` for writes of `bytes` bytes; they do not overlap.
pub unsafe fn copy(dst: *mut u8, src: *const u8, bytes: usize, store: WriteMode) {
    // SAFETY: each callee has this function's contract, which the caller upholds.
    unsafe {
        match store {
            WriteMode::Cached => copy::cached(dst, src, bytes),
            WriteMode::Streaming => {
                copy::stream(dst, src, bytes);
                copy::fence();
            }
        }
    }
}
