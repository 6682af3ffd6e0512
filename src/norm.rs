//! What an all-reduce with residual and RMSNorm does with rows.

use crate::dtype::DType;

/// Most elements of a row.
pub const MAX_HIDDEN: usize = 16384;
/// Number that a row's elements are a multiple of: a group of squares that are added up first.
pub const GROUP: usize = 8;

/// Type in which normed rows are returned.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Normed {
    /// That of the input.
    Same = 0,
    /// float8_e4m3fn, divided by one scale that the caller gives.
    Static = 1,
    /// float8_e4m3fn, divided by a scale of each row, which is returned.
    Dynamic = 2,
}

impl Normed {
    /// Every one, by its code.
    pub(crate) const ALL: [Self; 3] = [Self::Same, Self::Static, Self::Dynamic];

    /// Words behind a call's name in messages.
    pub(crate) const fn words(self) -> &'static str {
        match self {
            Self::Same => "",
            Self::Static => ", to float8_e4m3fn by one scale",
            Self::Dynamic => ", to float8_e4m3fn by a scale of each row",
        }
    }
}

/// Norm of a call's rows.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Norm {
    /// Type of input, residual, weight and the sum.
    pub dtype: DType,
    /// Elements of a row.
    pub hidden: usize,
    /// Number of rows.
    pub rows: usize,
    /// Number added to the mean of the squares.
    pub eps: f32,
    /// Type of the normed rows.
    pub normed: Normed,
}

impl Norm {
    /// Bytes of a row of the input.
    pub fn row_bytes(&self) -> usize {
        self.hidden * self.dtype.size()
    }

    /// Bytes of a normed row.
    pub fn normed_bytes(&self) -> usize {
        if self.normed == Normed::Same { self.row_bytes() } else { self.hidden }
    }

    /// Bytes of the scale of a row, where one is returned.
    pub fn scale_bytes(&self) -> usize {
        if self.normed == Normed::Dynamic { size_of::<f32>() } else { 0 }
    }
}
