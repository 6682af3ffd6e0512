//! Which type of partial results a group chooses, and copies in it.
#![allow(unsafe_code, reason = "loops over the bytes of tensors and scratch memory")]

use super::step::{Scratch, Step};
use crate::coll::call::Span;
pub use crate::coll::two_level::levels::Partials;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::kernels::cpu;
use crate::lock::lock;
use crate::sys::fork::PerProcess;
use std::sync::Mutex;

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
