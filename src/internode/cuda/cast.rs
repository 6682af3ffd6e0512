//! Conversion of floats to float32 and back on a GPU: `src/kernels/cuda/internode/cast.cu`.

use super::sum::{BLOCKS, THREADS};
use crate::coll::cuda::arguments::bytes_of;
use crate::coll::cuda::kernels::load;
use crate::coll::two_level::rules::UNIT;
use crate::dtype::{DType, SumOrder};
use crate::error::Result;
use crate::kernels::cuda::compile::Variant;
use crate::kernels::cuda::driver::{Device, Grid, Kernel, Stream};
use crate::mem::span::Span;

/// Names of the program and of its kernels that widen and round.
pub const NAMES: (&str, [&str; 2]) = ("internode/cast", ["widen_floats", "round_floats"]);

/// The kernel's `CastArgs`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CastArgs {
    /// Address of the elements.
    pub from: u64,
    /// Destination of the copies.
    pub to: u64,
    /// Number of elements.
    pub count: u64,
}

/// A copy of elements in another type.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cast {
    /// The elements.
    pub from: Span,
    /// Destination of the copies.
    pub to: Span,
    /// The narrower type; the other is float32.
    pub dtype: DType,
    /// True if `from` is the narrower type and `to` is float32, false if `from` is float32 and the
    /// copies are rounded to the narrower type.
    pub widens: bool,
}

impl Cast {
    /// Returns the arguments of the kernel.
    pub fn args(&self) -> CastArgs {
        let narrow = if self.widens { self.from } else { self.to };
        CastArgs {
            from: self.from.addr as u64,
            to: self.to.addr as u64,
            count: (narrow.bytes / self.dtype.size()) as u64,
        }
    }

    /// Loads the kernel that widens elements of `dtype`, or rounds to it, on `device`, whose
    /// context must be current. The first load may wait for running kernels of the device.
    pub(super) fn kernel(device: &Device, dtype: DType, widens: bool) -> Result<Kernel> {
        let variant = Variant {
            program: NAMES.0,
            world: 2,
            rank: 0,
            dtype: Some(dtype),
            op: None,
            zero_copy: false,
            order: SumOrder::Rank,
        };
        load(device, &variant, NAMES.1[usize::from(!widens)])
    }

    /// Enqueues this copy on `stream`; `kernel` executes it.
    pub(super) fn launch(&self, kernel: Kernel, stream: Stream) -> Result<()> {
        let args = self.args();
        let units = (args.count as usize * self.dtype.size()).div_ceil(UNIT);
        if units == 0 {
            return Ok(());
        }
        kernel.launch(
            stream,
            Grid::new(units.div_ceil(THREADS as usize).min(BLOCKS) as u32, THREADS),
            false,
            bytes_of(&args),
        )
    }
}
