//! What was measured between hosts: the speed of what connects them, and lengths from which calls there had better go another way.

use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};

/// Most bytes that a threshold may be.
const MOST_BYTES: usize = 1 << 30;
/// Pieces are multiples of it, and so of every element's size.
const GRAIN: usize = 4096;

/// Lengths from which a call of a group on several hosts goes another way. All its ranks have the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Thresholds {
    /// Bytes of a call up to which one rail carries everything: more rails would add messages where the time is that of a message.
    pub one_rail: usize,
    /// Most bytes of a rail's slice that go in one turn of a long call, on GPUs in a chunk.
    pub piece: usize,
    /// Bytes of a rail's slice up to which each host gets all partial results and adds them up itself: one exchange in place of two.
    pub gathered: usize,
}

impl Thresholds {
    /// Those of CPU tensors in groups for which nothing was measured.
    pub const USUAL: Self = Self { one_rail: 64 << 10, piece: 512 << 10, gathered: 256 << 10 };
    /// Those of CUDA tensors there.
    pub const USUAL_CUDA: Self = Self { piece: 16 << 20, ..Self::USUAL };

    /// Itself, if its figures are possible.
    ///
    /// # Errors
    /// A sentence that says what is wrong.
    pub fn checked(self) -> Result<Self> {
        let figures = [("one_rail", self.one_rail, 0), ("piece", self.piece, GRAIN), ("gathered", self.gathered, 0)];
        for (name, bytes, least) in figures {
            if !(least..=MOST_BYTES).contains(&bytes) {
                return Err(Error::value(format!("{name} is {bytes} bytes; from {least} to {MOST_BYTES} are possible")));
            }
        }
        if !self.piece.is_multiple_of(GRAIN) {
            return Err(Error::value(format!("piece is {} bytes; it must be a multiple of {GRAIN}", self.piece)));
        }
        Ok(self)
    }
}

/// Speed of a number of rails, all at work at once.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rails {
    /// Number of the rails.
    pub rails: usize,
    /// What a host sends by them, in GB/s.
    pub gb_per_s: f64,
    /// Microseconds of a trip.
    pub us: f64,
}

/// What was measured between hosts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Wire {
    /// Date and time of the measurement, ISO 8601.
    pub date: String,
    /// Number of hosts.
    pub hosts: usize,
    /// Backend of torch that connected them.
    pub engine: String,
    /// What a host sends, in GB/s; of CUDA: a GPU.
    pub gb_per_s: f64,
    /// Microseconds of a trip.
    pub us: f64,
    /// By number of rails, from one to all.
    pub rails: Vec<Rails>,
    /// Lengths from which calls go another way.
    pub thresholds: Thresholds,
}

impl Wire {
    pub(super) fn check(&self) -> Result<()> {
        let figures = self.rails.iter().map(|rails| (rails.gb_per_s, rails.us)).chain([(self.gb_per_s, self.us)]);
        for (gb_per_s, us) in figures {
            if !(gb_per_s > 0.0 && gb_per_s <= 1e6 && us > 0.0 && us <= 1e9) {
                return Err(Error::value(format!("{gb_per_s} GB/s and {us} µs are no speed of a wire")));
            }
        }
        self.thresholds.checked().map(drop)
    }
}
