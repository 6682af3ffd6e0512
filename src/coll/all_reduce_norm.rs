//! All-reduce, residual and RMSNorm in one call: its arguments, and the additional values on which
//! ranks must agree.
//!
//! A call has inputs `[input, residual, weight]`, and a scale if its result is fp8 with one scale.
//! It has outputs `[normed, new residual]`, and one scale for each row if it computes the scales.
//! Its factor is eps. A row has as many elements as the weight.

use crate::coll::call::{Call, CallSpec, Span};
use crate::dtype::DType;
use crate::error::{Error, Result};
pub use crate::rms_norm::{GROUP, MAX_HIDDEN, Norm, Normed};
use std::fmt;

impl Norm {
    /// Returns the norm of `call`, if it has one.
    pub fn of(call: &CallSpec) -> Option<Self> {
        if call.op != crate::coll::call::Collective::AllReduceAddRmsNorm {
            return None;
        }
        let bytes = |spans: &[Span], at: usize| spans.get(at).map_or(0, |span| span.bytes);
        let row = bytes(&call.inputs, 2);
        let normed = match (call.inputs.len(), call.outputs.len()) {
            (4, _) => Normed::Static,
            (_, 3) => Normed::Dynamic,
            _ => Normed::Same,
        };
        let rows = bytes(&call.inputs, 0).checked_div(row).unwrap_or(0);
        Some(Self {
            dtype: call.dtype,
            hidden: row / call.dtype.size(),
            rows,
            eps: call.factor as f32,
            normed,
        })
    }

    /// Packs the values on which ranks must agree, in addition to the input's type and length: eps,
    /// elements of a row, type of the normalised rows.
    pub(super) fn word(&self) -> u64 {
        u64::from(self.eps.to_bits()) | (self.hidden as u64) << 32 | (self.normed as u64) << 56
    }

    /// Writes the description of a call of `bytes` of `dtype`; `word` is as [`Norm::word`] packs
    /// it.
    pub(super) fn describe(
        f: &mut fmt::Formatter<'_>,
        bytes: u64,
        dtype: DType,
        word: u64,
    ) -> fmt::Result {
        let (eps, hidden) = (f32::from_bits(word as u32), word >> 32 & 0xff_ffff);
        let rows = (bytes / dtype.size() as u64).checked_div(hidden).unwrap_or(0);
        let words = Normed::ALL.get((word >> 56) as usize).map_or("", |normed| normed.words());
        write!(
            f,
            "all_reduce_add_rms_norm({rows} × {hidden} × {}, eps {eps:e}{words})",
            dtype.name()
        )
    }

    /// Returns the number of inputs and outputs that `call` must have.
    pub(super) fn spans(call: &CallSpec) -> (usize, usize) {
        match Self::of(call).map(|norm| norm.normed) {
            Some(Normed::Static) => (4, 2),
            Some(Normed::Dynamic) => (3, 3),
            Some(Normed::Same) | None => (3, 2),
        }
    }

    /// Rejects unsupported types, lengths and eps. `call` has the number of spans that
    /// [`Norm::spans`] requires.
    pub(super) fn validate(call: &CallSpec) -> Result<()> {
        let Some(norm) = Self::of(call) else { return Ok(()) };
        let Self { dtype, hidden, rows, eps, .. } = norm;
        let name = call.op.name();
        if !matches!(dtype, DType::F16 | DType::BF16 | DType::F32) {
            let text = format!(
                "{name}: {} is not served; bfloat16, float16 and float32 are",
                dtype.name()
            );
            return Err(Error::not_implemented(text));
        }
        if hidden == 0
            || !hidden.is_multiple_of(GROUP)
            || hidden > MAX_HIDDEN
            || call.inputs[2].bytes != norm.row_bytes()
        {
            let text = format!(
                "{name}: rows of {hidden} elements are not served; multiples of {GROUP} up to \
                 {MAX_HIDDEN} are"
            );
            return Err(Error::value(text));
        }
        if !(eps >= 0.0 && eps.is_finite()) {
            return Err(Error::value(format!(
                "{name}: eps is {}; it must be a finite number, at least 0",
                call.factor
            )));
        }
        if norm.normed != Normed::Same
            && rows > 0
            && call.inputs[1].addr == call.outputs[1].addr
            && call.inputs[1].addr != 0
        {
            return Err(Error::value(format!(
                "{name}: a residual is replaced only where the normed rows are of the input's type"
            )));
        }
        let given =
            [norm.row_bytes() * rows, norm.row_bytes() * rows, norm.row_bytes(), size_of::<f32>()];
        let taken =
            [norm.normed_bytes() * rows, norm.row_bytes() * rows, norm.scale_bytes() * rows];
        let fit = |spans: &[Span], lengths: &[usize]| {
            spans.iter().zip(lengths).all(|(span, &bytes)| span.bytes == bytes)
        };
        if fit(&call.inputs, &given) && fit(&call.outputs, &taken) {
            return Ok(());
        }
        let lengths = |spans: &[Span]| spans.iter().map(|span| span.bytes).collect::<Vec<_>>();
        let (inputs, outputs) = (lengths(&call.inputs), lengths(&call.outputs));
        Err(Error::value(format!(
            "{name}: the lengths of inputs {inputs:?} and outputs {outputs:?} (bytes) do not fit \
             rows of {hidden} × {}",
            dtype.name()
        )))
    }
}

/// Rejects a norm among `calls` on CUDA tensors of a multi-node group.
pub fn reject_multi_node(calls: &[Call<'_>]) -> Result<()> {
    let Some(call) = calls.iter().find(|call| Norm::of(call).is_some()) else { return Ok(()) };
    let name = call.op.name();
    Err(Error::not_implemented(format!(
        "{name}: CUDA tensors of a group on several nodes are not served; call all_reduce, add and \
         torch.nn.functional.rms_norm instead"
    )))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::coll::call::Collective;
    use crate::coll::describe::Description;
    use crate::rank::Rank;

    /// Makes a call of `rows` rows without memory.
    pub(crate) fn call(
        dtype: DType,
        rows: usize,
        hidden: usize,
        eps: f64,
        normed: Normed,
    ) -> CallSpec<'static> {
        let norm = Norm { dtype, hidden, rows, eps: eps as f32, normed };
        let spans = |lengths: &[usize]| {
            lengths.iter().map(|&bytes| Span { addr: 0, bytes }).collect::<Vec<_>>()
        };
        let (row, all) = (norm.row_bytes(), norm.row_bytes() * rows);
        let inputs = if normed == Normed::Static {
            spans(&[all, all, row, 4])
        } else {
            spans(&[all, all, row])
        };
        let (quantized, scales) = (norm.normed_bytes() * rows, norm.scale_bytes() * rows);
        let outputs = if normed == Normed::Dynamic {
            spans(&[quantized, all, scales])
        } else {
            spans(&[quantized, all])
        };
        let (op, inputs, outputs) =
            (Collective::AllReduceAddRmsNorm, inputs.into(), outputs.into());
        CallSpec { op, dtype, factor: eps, inputs, outputs, ..CallSpec::barrier(None) }
    }

    #[test]
    fn what_differs_is_told_apart_and_read() {
        let print = |call: &CallSpec| Description::of(call).fingerprint(call);
        let base = call(DType::BF16, 2, 4096, 1e-6, Normed::Same);
        assert_eq!(
            Description::of(&base).to_string(),
            "all_reduce_add_rms_norm(2 × 4096 × bfloat16, eps 1e-6)"
        );
        for other in [
            call(DType::F16, 2, 4096, 1e-6, Normed::Same),
            call(DType::BF16, 4, 2048, 1e-6, Normed::Same),
            call(DType::BF16, 3, 4096, 1e-6, Normed::Same),
            call(DType::BF16, 2, 4096, 1e-5, Normed::Same),
            call(DType::BF16, 2, 4096, 1e-6, Normed::Static),
            call(DType::BF16, 2, 4096, 1e-6, Normed::Dynamic),
        ] {
            other.validate(Rank(0), 2).expect("it is served");
            assert_ne!(print(&base), print(&other), "{}", Description::of(&other));
        }
    }

    #[test]
    fn what_is_not_served_is_refused() {
        for (call, why) in [
            (call(DType::F64, 2, 4096, 1e-6, Normed::Same), "float64 is not served"),
            (call(DType::F32, 2, 4, 1e-6, Normed::Same), "rows of 4 elements"),
            (call(DType::F32, 2, 16392, 1e-6, Normed::Same), "rows of 16392 elements"),
            (call(DType::F32, 2, 0, 1e-6, Normed::Same), "rows of 0 elements"),
            (call(DType::F32, 2, 64, f64::NAN, Normed::Same), "eps is NaN"),
            (call(DType::F32, 2, 64, -1.0, Normed::Same), "eps is -1"),
        ] {
            let error = call.validate(Rank(0), 2).expect_err(why);
            assert!(error.message.contains(why), "{error}");
        }
        let mut short = call(DType::F32, 2, 64, 0.0, Normed::Same);
        short.outputs.to_mut()[1].bytes -= 4;
        assert!(short.validate(Rank(0), 2).is_err(), "a residual of another length");
    }
}
