//! Element types and reduce operations. Each has one table, from which everything else is derived.

use crate::error::{Error, Result};

macro_rules! dtypes {
    ($($name:ident, $label:literal, $size:literal, $torch:literal;)*) => {
        /// The type of a tensor's elements.
        #[repr(u8)]
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum DType { $(#[doc = $label] $name = $torch),* }

        impl DType {
            /// Every element type, in table order.
            pub const ALL: &[DType] = &[$(DType::$name),*];

            /// Returns the size of one element in bytes.
            pub const fn size(self) -> usize {
                match self { $(DType::$name => $size),* }
            }

            /// Returns the name that torch prints after `torch.`.
            pub const fn name(self) -> &'static str {
                match self { $(DType::$name => $label),* }
            }

            /// Returns the type with this `c10::ScalarType` code.
            pub fn from_torch(code: i32) -> Result<Self> {
                match code {
                    $($torch => Ok(DType::$name),)*
                    other => Err(unlisted(other)),
                }
            }
        }
    };
}

// The last column is the value of `c10::ScalarType`, which torch serialises and therefore never
// renumbers.
dtypes! {
    U8, "uint8", 1, 0;
    I8, "int8", 1, 1;
    I16, "int16", 2, 2;
    I32, "int32", 4, 3;
    I64, "int64", 8, 4;
    F16, "float16", 2, 5;
    F32, "float32", 4, 6;
    F64, "float64", 8, 7;
    C64, "complex64", 8, 9;
    C128, "complex128", 16, 10;
    Bool, "bool", 1, 11;
    BF16, "bfloat16", 2, 15;
    F8E5M2, "float8_e5m2", 1, 23;
    F8E4M3FN, "float8_e4m3fn", 1, 24;
    F8E5M2FNUZ, "float8_e5m2fnuz", 1, 25;
    F8E4M3FNUZ, "float8_e4m3fnuz", 1, 26;
    U16, "uint16", 2, 27;
    U32, "uint32", 4, 28;
    U64, "uint64", 8, 29;
}

/// torch's code of complex32, pairs of [`DType::F16`].
const COMPLEX32: i32 = 8;
/// torch's code of bcomplex32, pairs of [`DType::BF16`].
const BCOMPLEX32: i32 = 46;

/// Types of torch that the table lacks.
const UNLISTED: &[(i32, &str)] = &[
    (COMPLEX32, "complex32"),
    (12, "qint8"),
    (13, "quint8"),
    (14, "qint32"),
    (16, "quint4x2"),
    (17, "quint2x4"),
    (18, "bits1x8"),
    (19, "bits2x4"),
    (20, "bits4x2"),
    (21, "bits8"),
    (22, "bits16"),
    (30, "uint1"),
    (31, "uint2"),
    (32, "uint3"),
    (33, "uint4"),
    (34, "uint5"),
    (35, "uint6"),
    (36, "uint7"),
    (37, "int1"),
    (38, "int2"),
    (39, "int3"),
    (40, "int4"),
    (41, "int5"),
    (42, "int6"),
    (43, "int7"),
    (44, "float8_e8m0fnu"),
    (45, "float4_e2m1fn_x2"),
    (BCOMPLEX32, "bcomplex32"),
];

/// Returns the error of a call that does not support the `c10::ScalarType` code, with the nearest
/// supported form.
#[cold]
fn unlisted(code: i32) -> Error {
    let name = UNLISTED
        .iter()
        .find(|&&(listed, _)| listed == code)
        .map_or_else(|| format!("torch dtype code {code}"), |&(_, name)| name.to_owned());
    let nearest = match code {
        COMPLEX32 | BCOMPLEX32 => "pass its parts, with torch.view_as_real",
        12..=14 | 16 | 17 => "dequantize() the tensor",
        _ => "convert the tensor to a numeric dtype, for example float32",
    };
    Error::not_implemented(format!("{name} is not served by this call; {nearest}"))
}

impl DType {
    /// Returns how a call that only copies treats the `c10::ScalarType` code: a type that the table
    /// lacks is copied as bytes, if its elements are whole bytes.
    pub fn copied(code: i32) -> Result<Self> {
        match code {
            COMPLEX32 => Ok(DType::F16),
            BCOMPLEX32 => Ok(DType::BF16),
            // bits1x8 to bits16; uint1 to uint7, int1 to int7, float8_e8m0fnu and float4_e2m1fn_x2.
            18..=22 | 30..=45 => Ok(DType::U8),
            listed => Self::from_torch(listed),
        }
    }

    /// Returns how a call that reduces treats the code: complex numbers that the table lacks are
    /// reduced by their parts.
    pub fn combined(code: i32, op: ReduceOp) -> Result<Self> {
        let (parts, name) = match code {
            COMPLEX32 => (DType::F16, "complex32"),
            BCOMPLEX32 => (DType::BF16, "bcomplex32"),
            listed => return Self::from_torch(listed),
        };
        match op {
            ReduceOp::Sum | ReduceOp::Avg | ReduceOp::PremulSum => Ok(parts),
            ReduceOp::Product
            | ReduceOp::Min
            | ReduceOp::Max
            | ReduceOp::BitAnd
            | ReduceOp::BitOr
            | ReduceOp::BitXor => Err(Error::not_implemented(format!(
                "reduce op {} is not defined for {name}; use SUM, AVG or PREMUL_SUM, or reduce its \
                 parts as {} with \
                     torch.view_as_real",
                op.name(),
                parts.name()
            ))),
        }
    }
}

macro_rules! reduce_ops {
    ($($name:ident, $label:literal, $torch:literal;)*) => {
        /// The operation that combines elements of different ranks.
        #[repr(u8)]
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum ReduceOp { $(#[doc = $label] $name = $torch),* }

        impl ReduceOp {
            /// Every operation, in table order.
            pub const ALL: &[ReduceOp] = &[$(ReduceOp::$name),*];

            /// Returns the name that torch prints after `ReduceOp.`.
            pub const fn name(self) -> &'static str {
                match self { $(ReduceOp::$name => $label),* }
            }

            /// Returns the operation with this `c10d::ReduceOp::RedOpType` code.
            pub fn from_torch(code: u8) -> Result<Self> {
                match code {
                    $($torch => Ok(ReduceOp::$name),)*
                    other => Err(Error::value(format!(
                        "reduce op code {other} is unknown; use ReduceOp.SUM, AVG, PRODUCT, MIN, \
                         MAX, BAND, BOR, BXOR or PREMUL_SUM"
                    ))),
                }
            }
        }
    };
}

// The last column is the value of `c10d::ReduceOp::RedOpType`.
reduce_ops! {
    Sum, "SUM", 0;
    Avg, "AVG", 1;
    Product, "PRODUCT", 2;
    Min, "MIN", 3;
    Max, "MAX", 4;
    BitAnd, "BAND", 5;
    BitOr, "BOR", 6;
    BitXor, "BXOR", 7;
    PremulSum, "PREMUL_SUM", 8;
}

impl DType {
    /// Returns true for integers and booleans, whose sums are exact.
    pub const fn is_integer(self) -> bool {
        match self {
            DType::U8
            | DType::I8
            | DType::I16
            | DType::I32
            | DType::I64
            | DType::Bool
            | DType::U16
            | DType::U32
            | DType::U64 => true,
            DType::F16 | DType::F32 | DType::F64 | DType::C64 | DType::C128 | DType::BF16 => false,
            DType::F8E5M2 | DType::F8E4M3FN | DType::F8E5M2FNUZ | DType::F8E4M3FNUZ => false,
        }
    }
}

impl ReduceOp {
    /// Returns true if the operation rounds on floats, so that its result depends on the order of
    /// its operands.
    pub const fn rounds(self) -> bool {
        match self {
            ReduceOp::Sum | ReduceOp::Avg | ReduceOp::Product | ReduceOp::PremulSum => true,
            ReduceOp::Min
            | ReduceOp::Max
            | ReduceOp::BitAnd
            | ReduceOp::BitOr
            | ReduceOp::BitXor => false,
        }
    }
}

/// The order in which a reduction combines the ranks' elements; the same on all ranks of a group.
#[repr(u8)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum SumOrder {
    /// Rank order: `((x0 + x1) + x2) + x3`.
    #[default]
    Rank = 0,
    /// Pairwise, such as `(x0 + x1) + (x2 + x3)`. With `h` the largest power of two below the
    /// number of ranks, it adds the tree of the first `h` ranks and the tree of the others.
    Tree = 1,
}

impl SumOrder {
    /// Both orders.
    pub const ALL: [SumOrder; 2] = [SumOrder::Rank, SumOrder::Tree];
    /// Maximum number of sources for which both orders are the same.
    const SAME: usize = 3;

    /// Returns the name in options and settings.
    pub const fn name(self) -> &'static str {
        match self {
            SumOrder::Rank => "rank",
            SumOrder::Tree => "tree",
        }
    }

    /// Returns the order with this name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|order| order.name() == name)
    }

    /// Returns the order in which `op` combines `n` elements of `dtype`: [`SumOrder::Rank`] unless
    /// the bits differ.
    pub const fn of(self, op: ReduceOp, dtype: DType, n: usize) -> Self {
        if n > Self::SAME && op.rounds() && !dtype.is_integer() { self } else { SumOrder::Rank }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    #[test]
    fn orders_differ_for_rounded_reductions_of_four_or_more() {
        let of = |op, dtype, n| SumOrder::Tree.of(op, dtype, n);
        assert_eq!(of(ReduceOp::Sum, DType::BF16, 4), SumOrder::Tree);
        assert_eq!(of(ReduceOp::Product, DType::C64, 5), SumOrder::Tree);
        for (op, dtype, n) in [
            (ReduceOp::Sum, DType::F32, 3),
            (ReduceOp::Max, DType::F32, 8),
            (ReduceOp::Avg, DType::I8, 8),
        ] {
            assert_eq!(of(op, dtype, n), SumOrder::Rank);
        }
        assert_eq!(SumOrder::Rank.of(ReduceOp::Sum, DType::F32, 8), SumOrder::Rank);
        assert_eq!(
            ["rank", "tree", "ring"].map(SumOrder::named),
            [Some(SumOrder::Rank), Some(SumOrder::Tree), None]
        );
    }

    #[test]
    fn torch_codes_round_trip() {
        for &dtype in DType::ALL {
            assert_eq!(DType::from_torch(dtype as i32), Ok(dtype));
        }
        for &op in ReduceOp::ALL {
            assert_eq!(ReduceOp::from_torch(op as u8), Ok(op));
        }
        assert!(DType::from_torch(12).is_err(), "qint8 is not numeric");
    }

    #[test]
    fn types_without_a_row_are_copied_as_bytes_and_complex_ones_summed_by_parts() {
        for &dtype in DType::ALL {
            assert_eq!(DType::copied(dtype as i32), Ok(dtype));
            assert_eq!(DType::combined(dtype as i32, ReduceOp::BitOr), Ok(dtype));
        }
        for code in [18, 22, 30, 44, 45] {
            assert_eq!(DType::copied(code), Ok(DType::U8));
            let error = DType::combined(code, ReduceOp::Sum).expect_err("only copied");
            error.assert_says(ErrorKind::NotImplemented, &["is not served", "float32"]);
        }
        for code in [12, 13, 14, 16, 17, 47, -1] {
            let error = DType::copied(code).expect_err("quantized or unknown");
            let nearest = if (12..=17).contains(&code) { "dequantize()" } else { "float32" };
            error.assert_says(ErrorKind::NotImplemented, &["is not served", nearest]);
        }
        let name = |code| unlisted(code).message;
        assert!(name(44).starts_with("float8_e8m0fnu "));
        assert!(name(47).starts_with("torch dtype code 47 "), "unknown");
        for (code, parts) in [(COMPLEX32, DType::F16), (BCOMPLEX32, DType::BF16)] {
            assert_eq!(
                (DType::copied(code), DType::combined(code, ReduceOp::Avg)),
                (Ok(parts), Ok(parts))
            );
            assert!(
                DType::combined(code, ReduceOp::Product)
                    .expect_err("a product of parts is not that of the numbers")
                    .to_string()
                    .contains("torch.view_as_real")
            );
        }
    }
}
