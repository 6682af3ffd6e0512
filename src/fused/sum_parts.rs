//! Arguments of `src/kernels/cuda/fused/sum_parts.cu`, and its launch on any stream.

use crate::coll::cuda::arguments::{PerRank, bytes_of};
use crate::coll::cuda::kernels::load;
use crate::coll::cuda::workspace::layout::MAX_RANKS;
use crate::dtype::{DType, ReduceOp};
use crate::error::{Error, Result};
use crate::kernels::cpu;
use crate::kernels::cuda::compile::Variant;
use crate::kernels::cuda::driver::{Device, Stream};
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::{Mutex, PoisonError};

/// Threads of a block: `LANE_THREADS` of `device.cuh`.
const THREADS: u32 = 256;
/// Blocks for each processor: two parts of 33.5 MB are added up in 24 µs on an H200 then, at 4.2 TB/s.
const BLOCKS: usize = 4;
/// Bytes that a thread loads at a time; parts and the sum begin at multiples of it.
const UNIT: usize = 16;
/// Program and kernel.
pub const NAMES: (&str, &str) = ("fused/sum_parts", "sum_parts");

/// `SumPartsArgs`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct SumParts {
    /// Address of each rank's part.
    pub from: PerRank,
    /// Destination of the sum.
    pub to: u64,
    /// Length of a part.
    pub bytes: u64,
}

/// The sum that one rank wants.
#[derive(Clone, Copy, Debug)]
pub struct Sum<'a> {
    /// Number of the rank: its kernel begins with another peer than the others'.
    pub rank: usize,
    /// Address of every rank's part, as mapped here.
    pub parts: &'a [usize],
    /// Destination of the sum; not over a part.
    pub to: usize,
    /// Bytes of a part.
    pub bytes: usize,
    /// The elements' type.
    pub dtype: DType,
    /// Divided by the number of ranks, before it is rounded.
    pub mean: bool,
}

impl Sum<'_> {
    /// The operation that the kernel is compiled for.
    fn op(&self) -> ReduceOp {
        if self.mean { ReduceOp::Avg } else { ReduceOp::Sum }
    }

    /// Arguments of the kernel.
    ///
    /// # Errors
    /// [`Value`](crate::error::Kind::Value) where it cannot be added up so.
    pub fn args(&self) -> Result<SumParts> {
        let &Sum { rank, parts, to, bytes, dtype, .. } = self;
        let n = parts.len();
        if !(2..=MAX_RANKS).contains(&n) || rank >= n {
            return Err(Error::value(format!("parts of {n} ranks for rank {rank} cannot be added up; from 2 to {MAX_RANKS} ranks can")));
        }
        cpu::supports(self.op(), dtype)?;
        if let Some(at) = parts.iter().chain([&to]).find(|address| !address.is_multiple_of(UNIT)) {
            return Err(Error::value(format!("a part at {at:#x} is not aligned to {UNIT} bytes")));
        }
        if !bytes.is_multiple_of(dtype.size()) {
            return Err(Error::value(format!("{bytes} bytes are no whole number of {}", dtype.name())));
        }
        let mut from = [0; MAX_RANKS];
        from.iter_mut().zip(parts).for_each(|(from, &part)| *from = part as u64);
        Ok(SumParts { from, to: to as u64, bytes: bytes as u64 })
    }
}

/// Devices that were used, and how many processors they have.
static DEVICES: Mutex<BTreeMap<i32, (Device, usize)>> = Mutex::new(BTreeMap::new());

/// Enqueues `sum` on `stream` of `device`. What is loaded must be complete once the stream has come so far.
pub fn launch(device: i32, stream: usize, sum: &Sum<'_>) -> Result<()> {
    let args = sum.args()?;
    if sum.bytes == 0 {
        return Ok(());
    }
    let mut devices = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
    let (device, processors) = match devices.entry(device) {
        Entry::Occupied(there) => there.into_mut(),
        Entry::Vacant(place) => {
            let opened = Device::open(device)?;
            let processors = opened.processors()?;
            place.insert((opened, processors))
        }
    };
    let _entered = device.enter()?;
    let (world, rank) = (sum.parts.len() as u32, sum.rank as u32);
    let variant = Variant { program: NAMES.0, world, rank, dtype: Some(sum.dtype), op: Some(sum.op()), zero_copy: false };
    let kernel = load(device, &variant, NAMES.1)?;
    let wanted = sum.bytes.div_ceil(UNIT * THREADS as usize);
    kernel.launch(Stream(stream), wanted.min(BLOCKS * *processors) as u32, THREADS, false, bytes_of(&args))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Kind;

    fn sum(parts: &[usize]) -> Sum<'_> {
        Sum { rank: 1, parts, to: 0x9000, bytes: 64, dtype: DType::BF16, mean: false }
    }

    #[test]
    fn what_the_kernel_is_told() {
        let args = sum(&[0x1000, 0x2000]).args().expect("can be added up");
        assert_eq!((size_of::<SumParts>(), args.from[..3].to_vec(), args.to, args.bytes), (144, vec![0x1000, 0x2000, 0], 0x9000, 64));
    }

    #[test]
    fn what_cannot_be_added_up_is_refused() {
        let many = vec![0x1000; MAX_RANKS + 1];
        let refused = [
            (sum(&[0x1000]), "parts of 1 ranks for rank 1"),
            (sum(&many), "parts of 17 ranks"),
            (sum(&[0x1000, 0x2008]), "0x2008"),
            (Sum { bytes: 63, ..sum(&[0x1000, 0x2000]) }, "63 bytes"),
            (Sum { dtype: DType::Bool, mean: true, ..sum(&[0x1000, 0x2000]) }, ""),
        ];
        for (sum, words) in refused {
            let error = sum.args().expect_err("refused");
            assert!(error.kind != Kind::Internal && error.message.contains(words), "{:?}: {error}", error.kind);
        }
        assert!(launch(4711, 0, &sum(&[0x1000, 0x2000])).is_err());
    }
}
