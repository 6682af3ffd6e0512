//! The row operation of an all-reduce with residual and RMSNorm.

use crate::dtype::DType;

/// Maximum number of elements of a row.
pub const MAX_HIDDEN: usize = 16384;
/// A row's number of elements must be a multiple of this: squares are first summed in groups of
/// this size.
pub const GROUP: usize = 8;

/// The type of the returned normed rows.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Normed {
    /// The type of the input.
    Same = 0,
    /// float8_e4m3fn, divided by one scale from the caller.
    Static = 1,
    /// float8_e4m3fn, divided by a scale per row, which is returned.
    Dynamic = 2,
}

impl Normed {
    /// All values, in the order of their codes.
    pub(crate) const ALL: [Self; 3] = [Self::Same, Self::Static, Self::Dynamic];

    /// Returns the words that follow a call's name in messages.
    pub(crate) const fn words(self) -> &'static str {
        match self {
            Self::Same => "",
            Self::Static => ", to float8_e4m3fn by one scale",
            Self::Dynamic => ", to float8_e4m3fn by a scale of each row",
        }
    }
}

/// The norm of a call's rows.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Norm {
    /// The type of input, residual, weight and the sum.
    pub dtype: DType,
    /// Number of elements of a row.
    pub hidden: usize,
    /// Number of rows.
    pub rows: usize,
    /// The number added to the mean of the squares.
    pub eps: f32,
    /// The type of the normed rows.
    pub normed: Normed,
}

impl Norm {
    /// Returns the size of a row of the input.
    pub fn row_bytes(&self) -> usize {
        self.hidden * self.dtype.size()
    }

    /// Returns the size of a normed row.
    pub fn normed_bytes(&self) -> usize {
        if self.normed == Normed::Same { self.row_bytes() } else { self.hidden }
    }

    /// Returns the size of the scale of a row, if one is returned.
    pub fn scale_bytes(&self) -> usize {
        if self.normed == Normed::Dynamic { size_of::<f32>() } else { 0 }
    }
}
