//! Partials: the type in which hosts give each other what their ranks have reduced.
#![allow(unsafe_code, reason = "loops over the bytes of tensors and scratch memory")]

use super::step::{Scratch, Step};
use crate::coll::call::Span;
use crate::dtype::{DType, ReduceOp};
use crate::error::{Error, Result};
use crate::kernels::cpu;
use crate::lock::lock;
use crate::sys::fork::PerProcess;
use std::sync::Mutex;

/// Type of partial results; the same on all ranks of a group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Partials {
    /// That of the tensor: an element is rounded on each host, and once more.
    #[default]
    Tensor,
    /// float32 where the tensor's floats are narrower: an element is rounded once.
    Fp32,
}

/// What the default group has chosen.
static DEFAULT: PerProcess<Mutex<Partials>> = PerProcess::new(Mutex::default);

impl Partials {
    /// What a group chooses by `named`; one that does not choose has its default group's.
    ///
    /// # Errors
    /// `Value` where there is no choice of that name.
    pub fn chosen(named: &str, is_default: bool) -> Result<Self> {
        let mut default = lock(DEFAULT.get());
        let chosen = match named {
            "" if is_default => Self::default(),
            "" => *default,
            "tensor" => Self::Tensor,
            "fp32" => Self::Fp32,
            _ => return Err(Error::value(format!("partials={named:?} is none of \"tensor\", \"fp32\""))),
        };
        if is_default {
            *default = chosen;
        }
        Ok(chosen)
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Tensor => "tensor",
            Self::Fp32 => "fp32",
        }
    }

    /// Type of partial results of a reduction with `op` of elements of `dtype`.
    pub(super) fn dtype(self, op: ReduceOp, dtype: DType) -> DType {
        let rounds = match op {
            ReduceOp::Sum | ReduceOp::Avg | ReduceOp::Product | ReduceOp::PremulSum => true,
            ReduceOp::Min | ReduceOp::Max | ReduceOp::BitAnd | ReduceOp::BitOr | ReduceOp::BitXor => false,
        };
        if self == Self::Fp32 && rounds && cpu::is_narrow(dtype) { DType::F32 } else { dtype }
    }
}

impl Step<'_> {
    /// Type of partial results of this call.
    pub(super) fn partial_type(&self) -> DType {
        self.shared.partials().dtype(self.call.reduce_op, self.call.dtype)
    }

    /// Number by which the bytes of a partial result are more than those of its elements in a tensor.
    pub(super) fn growth(&self) -> usize {
        self.partial_type().size() / self.call.dtype.size()
    }

    /// `spans` of tensors as partial results have them: copies in `kept` where that is another type.
    pub(super) fn widened(&self, spans: Vec<Span>, kept: &mut Vec<Scratch>) -> Vec<Span> {
        if self.growth() == 1 {
            return spans;
        }
        let widen = |span: Span| {
            let mut wide = Scratch::new(span.bytes * self.growth());
            let to = wide.span();
            let count = span.bytes / self.call.dtype.size();
            if count > 0 {
                // SAFETY: `span` is one of a tensor or slot, `to` of scratch memory, of `count` elements each.
                unsafe { cpu::widen(self.call.dtype, to.ptr(), span.ptr(), count) }
            }
            kept.push(wide);
            to
        };
        spans.into_iter().map(widen).collect()
    }

    /// Rounds `wide`, a combined partial result, to the call's type; the result is at its begin.
    pub(super) fn rounded(&self, wide: Span) -> Span {
        if self.growth() == 1 {
            return wide;
        }
        let count = wide.bytes / self.partial_type().size();
        if count > 0 {
            // SAFETY: `wide` is one of staging or scratch memory, of `count` float32.
            unsafe { cpu::narrow(self.call.dtype, wide.ptr(), wide.ptr(), count) }
        }
        Span { bytes: wide.bytes / self.growth(), ..wide }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_rounds_travels_wider() {
        let of = |op, dtype| Partials::Fp32.dtype(op, dtype);
        assert_eq!(of(ReduceOp::Sum, DType::BF16), DType::F32);
        assert_eq!(of(ReduceOp::Avg, DType::F8E4M3FN), DType::F32);
        assert_eq!(of(ReduceOp::Max, DType::F16), DType::F16);
        assert_eq!(of(ReduceOp::Sum, DType::F64), DType::F64);
        assert_eq!(of(ReduceOp::Sum, DType::I8), DType::I8);
        assert_eq!(Partials::Tensor.dtype(ReduceOp::Sum, DType::BF16), DType::BF16);
    }

    #[test]
    fn later_groups_choose_as_the_default_one_did() {
        assert_eq!(Partials::chosen("fp32", true), Ok(Partials::Fp32));
        assert_eq!(Partials::chosen("", false), Ok(Partials::Fp32));
        assert_eq!(Partials::chosen("tensor", false), Ok(Partials::Tensor));
        assert_eq!(Partials::chosen("", false), Ok(Partials::Fp32));
        let error = Partials::chosen("float", false).expect_err("there is none");
        assert_eq!(error.message, "partials=\"float\" is none of \"tensor\", \"fp32\"");
        assert_eq!(Partials::chosen("", true), Ok(Partials::Tensor));
        assert_eq!(Partials::chosen("", false), Ok(Partials::Tensor));
    }
}
