//! Reference results for the kernels, computed as plainly as possible: `f64` and `i128`, one
//! element at a time, rounding by search. Shares no code with the kernels.

use crate::dtype::{DType, ReduceOp, SumOrder};

/// Returns the result of `op` for one element, from each rank's bytes and factor, combined in
/// `order`.
pub(super) fn element(
    order: SumOrder,
    op: ReduceOp,
    dtype: DType,
    values: &[&[u8]],
    factors: &[f64],
) -> Vec<u8> {
    let half = dtype.size() / 2;
    match dtype {
        DType::C64 | DType::C128 => {
            let real = if dtype == DType::C64 { DType::F32 } else { DType::F64 };
            let part = |range: std::ops::Range<usize>| {
                let values: Vec<&[u8]> = values.iter().map(|value| &value[range.clone()]).collect();
                element(order, op, real, &values, factors)
            };
            [part(0..half), part(half..2 * half)].concat()
        }
        DType::F16
        | DType::BF16
        | DType::F32
        | DType::F64
        | DType::F8E5M2
        | DType::F8E4M3FN
        | DType::F8E5M2FNUZ
        | DType::F8E4M3FNUZ => {
            let values: Vec<f64> = values.iter().map(|value| decode(dtype, value)).collect();
            encode(dtype, float(order, op, dtype, &values, factors))
        }
        DType::Bool => vec![u8::from(boolean(op, values))],
        DType::U8
        | DType::I8
        | DType::I16
        | DType::I32
        | DType::I64
        | DType::U16
        | DType::U32
        | DType::U64 => integer(op, dtype, values),
    }
}

/// Rounds to the precision in which `dtype` accumulates. For one `+`, `*` or `/` of two `f32`,
/// rounding to `f64` first never changes the `f32`.
fn accumulated(dtype: DType, value: f64) -> f64 {
    if dtype == DType::F64 { value } else { f64::from(value as f32) }
}

fn float(order: SumOrder, op: ReduceOp, dtype: DType, values: &[f64], factors: &[f64]) -> f64 {
    let round = |value| accumulated(dtype, value);
    let scaled = |(value, factor): (&f64, &f64)| round(value * round(*factor));
    let leaves: Vec<f64> = if op == ReduceOp::PremulSum {
        values.iter().zip(factors).map(scaled).collect()
    } else {
        values.to_vec()
    };
    let both = |acc: f64, value: f64| match op {
        ReduceOp::Sum | ReduceOp::Avg | ReduceOp::PremulSum => round(acc + value),
        ReduceOp::Product => round(acc * value),
        ReduceOp::Min | ReduceOp::Max if acc.is_nan() || value.is_nan() => f64::NAN,
        ReduceOp::Min if value < acc => value,
        ReduceOp::Max if value > acc => value,
        ReduceOp::Min | ReduceOp::Max => acc,
        ReduceOp::BitAnd | ReduceOp::BitOr | ReduceOp::BitXor => unreachable!("refused for floats"),
    };
    let acc = match order {
        SumOrder::Rank => leaves.iter().copied().reduce(both).expect("at least one"),
        SumOrder::Tree => halves(&leaves, &both),
    };
    if op == ReduceOp::Avg { round(acc / values.len() as f64) } else { acc }
}

/// Splits `leaves` at the largest power of two below their number, combines each part in the same
/// way, and then the two results.
fn halves(leaves: &[f64], both: &impl Fn(f64, f64) -> f64) -> f64 {
    match leaves {
        [one] => *one,
        _ => {
            let (first, rest) = leaves.split_at(leaves.len().next_power_of_two() / 2);
            both(halves(first, both), halves(rest, both))
        }
    }
}

fn boolean(op: ReduceOp, values: &[&[u8]]) -> bool {
    let mut values = values.iter().map(|value| value[0] != 0);
    match op {
        ReduceOp::Sum | ReduceOp::Max | ReduceOp::BitOr => values.any(|value| value),
        ReduceOp::Product | ReduceOp::Min | ReduceOp::BitAnd => values.all(|value| value),
        ReduceOp::BitXor => values.filter(|value| *value).count() % 2 == 1,
        ReduceOp::Avg | ReduceOp::PremulSum => unreachable!("refused for bool"),
    }
}

fn integer(op: ReduceOp, dtype: DType, values: &[&[u8]]) -> Vec<u8> {
    let size = dtype.size();
    let bits = 8 * size as u32;
    let signed = matches!(dtype, DType::I8 | DType::I16 | DType::I32 | DType::I64);
    let wrap = |value: i128| {
        let value = value & ((1 << bits) - 1);
        if signed && value >> (bits - 1) == 1 { value - (1 << bits) } else { value }
    };
    let read = |bytes: &[u8]| {
        wrap(bytes.iter().rev().fold(0, |value, &byte| value << 8 | i128::from(byte)))
    };
    let values: Vec<i128> = values.iter().map(|bytes| read(bytes)).collect();
    let folded = values.iter().copied().reduce(|a, b| match op {
        ReduceOp::Sum | ReduceOp::Avg => wrap(a + b),
        ReduceOp::Product => wrap(a.wrapping_mul(b)),
        ReduceOp::Min => a.min(b),
        ReduceOp::Max => a.max(b),
        ReduceOp::BitAnd => a & b,
        ReduceOp::BitOr => a | b,
        ReduceOp::BitXor => a ^ b,
        ReduceOp::PremulSum => unreachable!("refused for integers"),
    });
    let folded = folded.expect("at least one source");
    let result = if op == ReduceOp::Avg { folded / values.len() as i128 } else { folded };
    result.to_le_bytes()[..size].to_vec()
}

/// A small float format. `next` is the code after the largest finite one; results that overflow to
/// it become `overflow`.
struct Format {
    mantissa: i32,
    bias: i32,
    sign: u32,
    next: u32,
    overflow: u32,
    nan: u32,
}

fn format(dtype: DType) -> Format {
    let (mantissa, bias, sign, next, overflow, nan) = match dtype {
        DType::F16 => (10, 15, 0x8000, 0x7c00, 0x7c00, 0x7e00),
        DType::BF16 => (7, 127, 0x8000, 0x7f80, 0x7f80, 0x7fc0),
        DType::F8E5M2 => (2, 15, 0x80, 0x7c, 0x7c, 0x7f),
        DType::F8E4M3FN => (3, 7, 0x80, 0x7f, 0x7f, 0x7f),
        DType::F8E5M2FNUZ => (2, 16, 0x80, 0x80, 0x80, 0x80),
        DType::F8E4M3FNUZ => (3, 8, 0x80, 0x80, 0x80, 0x80),
        DType::F32
        | DType::F64
        | DType::C64
        | DType::C128
        | DType::Bool
        | DType::U8
        | DType::I8
        | DType::I16
        | DType::I32
        | DType::I64
        | DType::U16
        | DType::U32
        | DType::U64 => unreachable!("{} is no small float", dtype.name()),
    };
    Format { mantissa, bias, sign, next, overflow, nan }
}

impl Format {
    /// Returns the magnitude of `code`, as if no codes were special.
    fn magnitude(&self, code: u32) -> f64 {
        let fraction = f64::from(code & ((1 << self.mantissa) - 1)) / f64::from(1 << self.mantissa);
        match (code >> self.mantissa) as i32 {
            0 => fraction * 2f64.powi(1 - self.bias),
            exponent => (1.0 + fraction) * 2f64.powi(exponent - self.bias),
        }
    }

    fn decode(&self, code: u32) -> f64 {
        let without_sign = code & (self.sign - 1);
        let fnuz = self.nan == self.sign;
        if (fnuz && code == self.nan) || (!fnuz && without_sign > self.next) {
            return f64::NAN;
        }
        let magnitude = match without_sign {
            code if code == self.next && self.overflow == self.nan => return f64::NAN,
            code if code == self.next => f64::INFINITY,
            code => self.magnitude(code),
        };
        if code & self.sign != 0 { -magnitude } else { magnitude }
    }

    fn encode(&self, value: f64) -> u32 {
        if value.is_nan() {
            return self.nan;
        }
        let magnitude = value.abs();
        let (mut low, mut high) = (0, self.next);
        while high - low > 1 {
            let middle = (low + high) / 2;
            if self.magnitude(middle) <= magnitude { low = middle } else { high = middle }
        }
        let middle = (self.magnitude(low) + self.magnitude(high)) / 2.0;
        let code =
            if magnitude > middle || (magnitude == middle && low % 2 == 1) { high } else { low };
        let code = if code == self.next { self.overflow } else { code };
        let fnuz = self.nan == self.sign;
        let sign = if value.is_sign_negative() && !(fnuz && code == 0) { self.sign } else { 0 };
        code | sign
    }
}

/// Returns the number in one element.
pub(super) fn decode(dtype: DType, bytes: &[u8]) -> f64 {
    match *bytes {
        [code] => format(dtype).decode(code.into()),
        [a, b] => format(dtype).decode(u16::from_le_bytes([a, b]).into()),
        [a, b, c, d] => f32::from_le_bytes([a, b, c, d]).into(),
        [a, b, c, d, e, f, g, h] => f64::from_le_bytes([a, b, c, d, e, f, g, h]),
        [..] => unreachable!("no float has {} bytes", bytes.len()),
    }
}

/// Returns the element nearest to a number.
pub(super) fn encode(dtype: DType, value: f64) -> Vec<u8> {
    match dtype {
        DType::F64 if value.is_nan() => 0x7ff8_0000_0000_0000_u64.to_le_bytes().to_vec(),
        DType::F64 => value.to_le_bytes().to_vec(),
        DType::F32 if value.is_nan() => 0x7fc0_0000_u32.to_le_bytes().to_vec(),
        DType::F32 => (value as f32).to_le_bytes().to_vec(),
        DType::F16
        | DType::BF16
        | DType::F8E5M2
        | DType::F8E4M3FN
        | DType::F8E5M2FNUZ
        | DType::F8E4M3FNUZ
        | DType::C64
        | DType::C128
        | DType::Bool
        | DType::U8
        | DType::I8
        | DType::I16
        | DType::I32
        | DType::I64
        | DType::U16
        | DType::U32
        | DType::U64 => format(dtype).encode(value).to_le_bytes()[..dtype.size()].to_vec(),
    }
}
