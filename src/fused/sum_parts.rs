//! The sum of all ranks' parts, on the host or by `src/kernels/cuda/fused/sum_parts.cu` on any
//! stream.
#![allow(unsafe_code, reason = "adds up the bytes of tensors, whose addresses torch vouches for")]

use crate::coll::cuda::arguments::{PerRank, bytes_of};
use crate::coll::cuda::kernels::load;
use crate::coll::cuda::workspace::layout::MAX_RANKS;
use crate::dtype::{DType, ReduceOp, SumOrder};
use crate::error::{Error, Result};
use crate::kernels::cpu::{self, InputElements, WriteMode};
use crate::kernels::cuda::compile::Variant;
use crate::kernels::cuda::driver::{Device, Grid, Stream};
use crate::lock::lock;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::Mutex;

/// Threads of a block: `LANE_THREADS` of `device.cuh`.
const THREADS: u32 = 256;
/// Blocks per processor. With 4, an H200 sums two parts of 33.5 MB in 24 µs, at 4.2 TB/s.
const BLOCKS: usize = 4;
/// Number of bytes that a thread loads at a time; parts and the sum start at multiples of it.
const UNIT: usize = 16;
/// The program and its kernel.
pub const NAMES: (&str, &str) = ("fused/sum_parts", "sum_parts");

/// The kernel's argument struct, `SumPartsArgs`.
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

/// The sum that one rank computes.
#[derive(Clone, Copy, Debug)]
pub struct PartsSum<'a> {
    /// This rank's number; the kernels of different ranks start with different peers.
    pub rank: usize,
    /// Address of every rank's part, as mapped in this process.
    pub parts: &'a [usize],
    /// Destination of the sum; must not overlap a part.
    pub to: usize,
    /// Length of a part in bytes.
    pub bytes: usize,
    /// Type of the elements.
    pub dtype: DType,
    /// True if the sum is divided by the number of ranks before it is rounded.
    pub mean: bool,
}

impl PartsSum<'_> {
    /// The operation that the kernel is compiled for.
    fn op(&self) -> ReduceOp {
        if self.mean { ReduceOp::Avg } else { ReduceOp::Sum }
    }

    fn check(&self) -> Result<()> {
        cpu::supports(self.op(), self.dtype)?;
        if !self.bytes.is_multiple_of(self.dtype.size()) {
            return Err(Error::value(format!(
                "{} bytes are no whole number of {}",
                self.bytes,
                self.dtype.name()
            )));
        }
        Ok(())
    }

    /// Computes the sum on the host.
    ///
    /// # Safety
    /// Meanwhile the parts may be read but not written, and no other thread accesses the
    /// destination.
    unsafe fn on_host(&self) -> Result<()> {
        self.check()?;
        let sources: Vec<InputElements> = self
            .parts
            .iter()
            .map(|&part| InputElements { ptr: part as *const u8, factor: 1.0 })
            .collect();
        // SAFETY: by the caller's promise; `check` accepted the types, and `to` overlaps no part.
        unsafe {
            cpu::reduce(
                self.op(),
                self.dtype,
                self.to as *mut u8,
                &sources,
                self.bytes / self.dtype.size(),
                WriteMode::Cached,
            )
        };
        Ok(())
    }

    /// Returns the arguments of the kernel.
    ///
    /// # Errors
    /// [`Value`](crate::error::ErrorKind::Value) if the kernel cannot compute this sum.
    pub fn args(&self) -> Result<SumParts> {
        self.check()?;
        let &PartsSum { rank, parts, to, bytes, .. } = self;
        let n = parts.len();
        if !(2..=MAX_RANKS).contains(&n) || rank >= n {
            return Err(Error::value(format!(
                "parts of {n} ranks for rank {rank} cannot be added up; from 2 to \
                 {MAX_RANKS} ranks can"
            )));
        }
        if let Some(at) = parts.iter().chain([&to]).find(|address| !address.is_multiple_of(UNIT)) {
            return Err(Error::value(format!("a part at {at:#x} is not aligned to {UNIT} bytes")));
        }
        let mut from = [0; MAX_RANKS];
        from.iter_mut().zip(parts).for_each(|(from, &part)| *from = part as u64);
        Ok(SumParts { from, to: to as u64, bytes: bytes as u64 })
    }
}

/// The devices used so far, with their number of processors.
static DEVICES: Mutex<BTreeMap<i32, (Device, usize)>> = Mutex::new(BTreeMap::new());

/// Enqueues `sum` on `stream` of `device`, or computes it at once if `device` is negative, which is
/// the host.
///
/// # Safety
/// The addresses belong to memory of this device. From the moment the stream reaches the sum until
/// the sum is done, nothing else writes the parts or accesses the destination.
pub unsafe fn launch(device: i32, stream: usize, sum: &PartsSum<'_>) -> Result<()> {
    if device < 0 {
        // SAFETY: by the caller's promise.
        return unsafe { sum.on_host() };
    }
    let args = sum.args()?;
    if sum.bytes == 0 {
        return Ok(());
    }
    let mut devices = lock(&DEVICES);
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
    let variant = Variant {
        program: NAMES.0,
        world,
        rank,
        dtype: Some(sum.dtype),
        op: Some(sum.op()),
        zero_copy: false,
        order: SumOrder::Rank,
    };
    let kernel = load(device, &variant, NAMES.1)?;
    let wanted = sum.bytes.div_ceil(UNIT * THREADS as usize);
    kernel.launch(
        Stream(stream),
        Grid::new(wanted.min(BLOCKS * *processors) as u32, THREADS),
        false,
        bytes_of(&args),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    fn sum(parts: &[usize]) -> PartsSum<'_> {
        PartsSum { rank: 1, parts, to: 0x9000, bytes: 64, dtype: DType::BF16, mean: false }
    }

    #[test]
    fn what_the_kernel_is_told() {
        let args = sum(&[0x1000, 0x2000]).args().expect("can be added up");
        assert_eq!(
            (size_of::<SumParts>(), args.from[..3].to_vec(), args.to, args.bytes),
            (144, vec![0x1000, 0x2000, 0], 0x9000, 64)
        );
    }

    #[test]
    fn what_cannot_be_added_up_is_refused() {
        let many = vec![0x1000; MAX_RANKS + 1];
        let refused = [
            (sum(&[0x1000]), "parts of 1 ranks for rank 1"),
            (sum(&many), "parts of 17 ranks"),
            (sum(&[0x1000, 0x2008]), "0x2008"),
            (PartsSum { bytes: 63, ..sum(&[0x1000, 0x2000]) }, "63 bytes"),
            (PartsSum { dtype: DType::Bool, mean: true, ..sum(&[0x1000, 0x2000]) }, ""),
        ];
        for (sum, words) in refused {
            let error = sum.args().expect_err("refused");
            assert!(
                error.kind != ErrorKind::Internal && error.message.contains(words),
                "{:?}: {error}",
                error.kind
            );
        }
        // SAFETY: this device does not exist, so nothing is accessed.
        assert!(unsafe { launch(4711, 0, &sum(&[0x1000, 0x2000])) }.is_err());
    }

    #[test]
    fn parts_are_added_up_on_the_host_in_the_order_of_the_ranks() {
        let parts = [[1e8f32, 1.0], [1.0, 2.0], [-1e8, 6.0]];
        let addresses = parts.each_ref().map(|part| part.as_ptr() as usize);
        for (mean, expected) in [(false, [0.0f32, 9.0]), (true, [0.0, 3.0])] {
            let mut to = [7.0f32; 2];
            let sum = PartsSum {
                rank: 0,
                parts: &addresses,
                to: to.as_mut_ptr() as usize,
                bytes: 8,
                dtype: DType::F32,
                mean,
            };
            // SAFETY: all memory belongs to this test and has the stated length.
            unsafe { launch(-1, 0, &sum) }.expect("added up");
            assert_eq!(to, expected);
            // SAFETY: as above; the call is rejected before it writes.
            assert!(unsafe { launch(-1, 0, &PartsSum { bytes: 7, ..sum }) }.is_err());
        }
    }
}
