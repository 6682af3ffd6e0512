//! Maps an op and a dtype to the loop compiled for this CPU. If no such loop exists,
//! [`super::supports`] returns an error.

use super::convert::{BF16, E4M3Fn, E4M3Fnuz, E5M2, E5M2Fnuz, F16};
use super::element::{Bits, Element};
use super::reduce::{self, ReduceKernel};
use super::reduce_op::{And, Avg, Max, Min, Or, Paired, PremulSum, Product, ReduceFn, Sum, Xor};
use crate::dtype::{DType, ReduceOp, SumOrder};

/// An instruction set for which the loops are compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Isa {
    Portable,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl Isa {
    /// The instruction sets of this CPU, with the best last.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn available() -> &'static [Isa] {
        const ALL: &[Isa] = &[Isa::Portable, Isa::Avx2, Isa::Avx512];
        // The standard library caches the result of `cpuid`: each of these is one load and a test.
        let avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c");
        let avx512 = avx2
            && is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512dq");
        &ALL[..1 + usize::from(avx2) + usize::from(avx512)]
    }

    /// The instruction sets of this CPU, with the best last.
    #[cfg(not(target_arch = "x86_64"))]
    pub(super) fn available() -> &'static [Isa] {
        &[Isa::Portable]
    }

    /// Returns the widest instruction set of this CPU.
    pub(super) fn best() -> Isa {
        Isa::available().last().copied().unwrap_or(Isa::Portable)
    }

    fn kernel<E: Element, O: ReduceFn<E::Acc>, const T: usize>(self) -> ReduceKernel {
        match self {
            Isa::Portable => reduce::portable::<E, O, T>,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => reduce::avx2::<E, O, T>,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => reduce::avx512::<E, O, T>,
        }
    }
}

/// Returns how many numbers the loops see in one element: a complex number is two, and every op
/// supported for complex numbers acts on each part separately.
pub(super) fn parts(dtype: DType) -> usize {
    if matches!(dtype, DType::C64 | DType::C128) { 2 } else { 1 }
}

/// Returns the loop for `op` over `dtype` in `order`, if the combination is supported. Integers
/// have one loop for both orders, which give the same bits.
// Tiles are 256 bytes of accumulators: four AVX-512 or eight AVX2 registers.
pub(super) fn kernel(
    op: ReduceOp,
    dtype: DType,
    order: SumOrder,
    isa: Isa,
) -> Option<ReduceKernel> {
    match dtype {
        DType::F32 => float::<f32, 64>(op, order, isa),
        DType::F64 => float::<f64, 32>(op, order, isa),
        DType::F16 => float::<F16, 64>(op, order, isa),
        DType::BF16 => float::<BF16, 64>(op, order, isa),
        DType::F8E5M2 => float::<E5M2, 64>(op, order, isa),
        DType::F8E4M3FN => float::<E4M3Fn, 64>(op, order, isa),
        DType::F8E5M2FNUZ => float::<E5M2Fnuz, 64>(op, order, isa),
        DType::F8E4M3FNUZ => float::<E4M3Fnuz, 64>(op, order, isa),
        DType::C64 => complex::<f32, 64>(op, order, isa),
        DType::C128 => complex::<f64, 32>(op, order, isa),
        DType::U8 => integer::<u8, u8, 256>(op, isa),
        DType::I8 => integer::<i8, u8, 256>(op, isa),
        DType::U16 => integer::<u16, u16, 128>(op, isa),
        DType::I16 => integer::<i16, u16, 128>(op, isa),
        DType::U32 => integer::<u32, u32, 64>(op, isa),
        DType::I32 => integer::<i32, u32, 64>(op, isa),
        DType::U64 => integer::<u64, u64, 32>(op, isa),
        DType::I64 => integer::<i64, u64, 32>(op, isa),
        DType::Bool => boolean(op, isa),
    }
}

fn float<E: Element, const T: usize>(
    op: ReduceOp,
    order: SumOrder,
    isa: Isa,
) -> Option<ReduceKernel> {
    if order == SumOrder::Tree && op.rounds() {
        return paired::<E, T>(op, isa);
    }
    match op {
        ReduceOp::Sum => Some(isa.kernel::<E, Sum, T>()),
        ReduceOp::Avg => Some(isa.kernel::<E, Avg, T>()),
        ReduceOp::Product => Some(isa.kernel::<E, Product, T>()),
        ReduceOp::Min => Some(isa.kernel::<E, Min, T>()),
        ReduceOp::Max => Some(isa.kernel::<E, Max, T>()),
        ReduceOp::PremulSum => Some(isa.kernel::<E, PremulSum, T>()),
        ReduceOp::BitAnd | ReduceOp::BitOr | ReduceOp::BitXor => None,
    }
}

fn paired<E: Element, const T: usize>(op: ReduceOp, isa: Isa) -> Option<ReduceKernel> {
    match op {
        ReduceOp::Sum => Some(isa.kernel::<E, Paired<Sum>, T>()),
        ReduceOp::Avg => Some(isa.kernel::<E, Paired<Avg>, T>()),
        ReduceOp::Product => Some(isa.kernel::<E, Paired<Product>, T>()),
        ReduceOp::PremulSum => Some(isa.kernel::<E, Paired<PremulSum>, T>()),
        ReduceOp::Min | ReduceOp::Max | ReduceOp::BitAnd | ReduceOp::BitOr | ReduceOp::BitXor => {
            None
        }
    }
}

fn complex<E: Element, const T: usize>(
    op: ReduceOp,
    order: SumOrder,
    isa: Isa,
) -> Option<ReduceKernel> {
    match op {
        ReduceOp::Sum | ReduceOp::Avg | ReduceOp::PremulSum => float::<E, T>(op, order, isa),
        ReduceOp::Product
        | ReduceOp::Min
        | ReduceOp::Max
        | ReduceOp::BitAnd
        | ReduceOp::BitOr
        | ReduceOp::BitXor => None,
    }
}

/// `W` is the unsigned integer of `E`'s size, for which wrapping and bit operations give the same
/// bits, so only half the loops are compiled.
fn integer<E, W, const T: usize>(op: ReduceOp, isa: Isa) -> Option<ReduceKernel>
where
    E: Element,
    W: Element<Acc: Bits>,
{
    match op {
        ReduceOp::Sum => Some(isa.kernel::<W, Sum, T>()),
        ReduceOp::Avg => Some(isa.kernel::<E, Avg, T>()),
        ReduceOp::Product => Some(isa.kernel::<W, Product, T>()),
        ReduceOp::Min => Some(isa.kernel::<E, Min, T>()),
        ReduceOp::Max => Some(isa.kernel::<E, Max, T>()),
        ReduceOp::BitAnd => Some(isa.kernel::<W, And, T>()),
        ReduceOp::BitOr => Some(isa.kernel::<W, Or, T>()),
        ReduceOp::BitXor => Some(isa.kernel::<W, Xor, T>()),
        ReduceOp::PremulSum => None,
    }
}

/// A bool is a byte 0 or 1, and its arithmetic is torch's: `True + True` is `True`.
fn boolean(op: ReduceOp, isa: Isa) -> Option<ReduceKernel> {
    match op {
        ReduceOp::Sum | ReduceOp::Max | ReduceOp::BitOr => Some(isa.kernel::<u8, Or, 256>()),
        ReduceOp::Product | ReduceOp::Min | ReduceOp::BitAnd => Some(isa.kernel::<u8, And, 256>()),
        ReduceOp::BitXor => Some(isa.kernel::<u8, Xor, 256>()),
        ReduceOp::Avg | ReduceOp::PremulSum => None,
    }
}
