//! Partials: the type in which hosts give each other what their ranks have reduced.
#![allow(unsafe_code, reason = "loops over the bytes of tensors and scratch memory")]

use super::HostsGroup;
use super::step::{Scratch, Step};
use crate::coll::call::{Call, Op, Span};
use crate::dtype::{DType, ReduceOp};
use crate::error::{Error, Result};
use crate::kernels::cpu;
use crate::rank::Rank;
use crate::sys::fork::PerProcess;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

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
        let mut default = DEFAULT.get().lock().unwrap_or_else(PoisonError::into_inner);
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

    fn name(self) -> &'static str {
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

impl HostsGroup {
    /// Returns once all ranks of all hosts have called it with the same `partials`.
    ///
    /// # Errors
    /// `Config` names a rank that differs from the first.
    pub(super) fn agree_on(&self, partials: Partials, timeout: Option<Duration>) -> Result<()> {
        let (mut own, mut all) = ([partials as u8], vec![0u8; self.layout.size()]);
        let whole = all.as_mut_ptr().addr();
        let inputs = vec![Span { addr: own.as_mut_ptr().addr(), bytes: 1 }];
        let outputs = (0..all.len()).map(|rank| Span { addr: whole + rank, bytes: 1 }).collect();
        self.run(vec![Call { op: Op::AllGather, inputs, outputs, ..Call::barrier(None) }], timeout)?;
        if let Some(other) = all.iter().position(|&code| code != all[0]) {
            let name = |code: u8| if code == Partials::Fp32 as u8 { Partials::Fp32 } else { Partials::Tensor }.name();
            let [first, second] = [0, other].map(|rank| self.layout.describe(Rank(rank as u32)));
            let (group, a, b) = (self.inner.control().name(), name(all[0]), name(all[other]));
            return Err(self.shared.fail(
                &self.inner,
                Error::config(format!(
                    "ranks of group \"{group}\" chose different types for sums between hosts: {first} has partials={a:?}, {second} has \
                     partials={b:?}; give torch_symm.Options(partials=...) the same value on all ranks"
                )),
            ));
        }
        self.shared.choose(partials);
        Ok(())
    }

    /// Refuses those of `calls` on CUDA tensors whose sums are to be rounded once.
    pub(super) fn check_partials(&self, calls: &[Call]) -> Result<()> {
        let rounds = |call: &&Call| {
            (call.op.reduces() || call.op == Op::AllReduceAddRmsNorm)
                && self.shared.partials().dtype(call.reduce_op, call.dtype) != call.dtype
        };
        let Some(call) = calls.iter().find(rounds) else { return Ok(()) };
        let (op, dtype, group) = (call.op.name(), call.dtype.name(), self.inner.control().name());
        Err(Error::not_implemented(format!(
            "{op} of {dtype} on CUDA: group \"{group}\" has partials=\"fp32\", which is for CPU tensors; reduce a float32 copy, or make a \
             group with torch_symm.Options(partials=\"tensor\")"
        )))
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
