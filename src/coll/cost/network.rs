//! Inter-node measurements: the speed of the network, and the thresholds of multi-node calls.

use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};

/// Maximum value of a threshold in bytes.
const MOST_BYTES: usize = 1 << 30;
/// Chunk sizes are multiples of this, and so of every element size.
const GRAIN: usize = 4096;
/// Size of a slot, which contains a header and short data. In every call each rank sends one to the
/// ranks of its node, and each node sends one to the other nodes. At 1 Gb/s a slot takes 33 µs of
/// the roughly 800 µs of a short call.
pub const HEADER_SLOT_BYTES: usize = 4096;

/// The lengths at which a call of a multi-node group changes its algorithm; the same on all ranks
/// of the group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RailThresholds {
    /// Maximum size of a call that uses only one rail: below it the latency of messages dominates,
    /// and more rails would add messages.
    pub multi_rail_bytes: usize,
    /// Maximum number of bytes of a rail that move in one pipeline step of a long call: on CPUs,
    /// bytes of its slice of the tensor; on GPUs, bytes on the wire.
    pub chunk_bytes: usize,
    /// Maximum size of a rail's slice for which each node gets all partial results and sums them
    /// itself: one exchange instead of two.
    pub gather_bytes: usize,
}

impl RailThresholds {
    /// The thresholds of CPU tensors without a measurement.
    pub const DEFAULT: Self =
        Self { multi_rail_bytes: 64 << 10, chunk_bytes: 512 << 10, gather_bytes: 256 << 10 };
    /// The thresholds of CUDA tensors without a measurement.
    pub const DEFAULT_CUDA: Self = Self { chunk_bytes: 16 << 20, ..Self::DEFAULT };

    /// Returns itself if its values are valid.
    ///
    /// # Errors
    /// A message that says what is wrong.
    pub fn checked(self) -> Result<Self> {
        let figures = [
            ("multi_rail_bytes", self.multi_rail_bytes, 0),
            ("chunk_bytes", self.chunk_bytes, GRAIN),
            ("gather_bytes", self.gather_bytes, 0),
        ];
        for (name, bytes, least) in figures {
            if !(least..=MOST_BYTES).contains(&bytes) {
                return Err(Error::value(format!(
                    "{name} is {bytes} bytes; from {least} to {MOST_BYTES} are possible"
                )));
            }
        }
        if !self.chunk_bytes.is_multiple_of(GRAIN) {
            return Err(Error::value(format!(
                "chunk_bytes is {} bytes; it must be a multiple of {GRAIN}",
                self.chunk_bytes
            )));
        }
        Ok(self)
    }
}

/// The speed of a number of rails that all transfer at once.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RailBandwidth {
    /// Number of rails.
    pub rails: usize,
    /// Rate at which a node sends over them, in GB/s.
    pub gb_per_s: f64,
    /// Microseconds of a trip.
    pub us: f64,
}

/// Inter-node measurements.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NetworkProfile {
    /// Date and time of the measurement, ISO 8601.
    pub date: String,
    /// Number of nodes.
    pub nodes: usize,
    /// The torch backend that connected them.
    pub backend: String,
    /// Rate at which a node (for CUDA, a GPU) sends, in GB/s.
    pub gb_per_s: f64,
    /// Microseconds of a trip.
    pub us: f64,
    /// Speeds by number of rails, from one to all.
    pub rails: Vec<RailBandwidth>,
    /// The lengths at which calls change their algorithm.
    pub thresholds: RailThresholds,
}

impl NetworkProfile {
    pub(super) fn check(&self) -> Result<()> {
        let figures = self
            .rails
            .iter()
            .map(|rails| (rails.gb_per_s, rails.us))
            .chain([(self.gb_per_s, self.us)]);
        for (gb_per_s, us) in figures {
            if !(gb_per_s > 0.0 && gb_per_s <= 1e6 && us > 0.0 && us <= 1e9) {
                return Err(Error::value(format!(
                    "{gb_per_s} GB/s and {us} µs are no speed of a wire"
                )));
            }
        }
        self.thresholds.checked().map(drop)
    }
}
