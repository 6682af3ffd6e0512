//! Description of one send or receive in plain values.

use crate::coll::call::Span;
use crate::dtype::DType;
use crate::rank::Rank;
use std::time::Duration;

/// Send or receive of one rank.
#[derive(Clone, Copy, Debug)]
pub struct Message {
    /// The other rank; `None` receives from any.
    pub peer: Option<Rank>,
    /// Matches the other side's.
    pub tag: i32,
    /// Element type, for messages about a mismatch.
    pub dtype: DType,
    /// Memory that is sent or filled.
    pub span: Span,
    /// Limit of the call; `None`: the group's.
    pub timeout: Option<Duration>,
}
