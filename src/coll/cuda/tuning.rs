//! The thresholds between algorithms: defaults, what the ranks exchange, and what a user sets.

use super::workspace::layout::{MAX_LANES, SENTINEL_BLOCKS};

/// Maximum number of blocks in a cluster, on every device that has clusters.
const MAX_CLUSTER: usize = 8;

/// The thresholds between algorithms; the same on all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CudaThresholds {
    /// Maximum size of a one-shot all-reduce.
    pub one_shot_bytes: usize,
    /// Maximum size of a two-shot all-reduce.
    pub two_shot_bytes: usize,
    /// Maximum size of a two-shot all-reduce in a zero-copy call.
    pub zero_copy_two_shot_bytes: usize,
    /// Minimum length of a zero-copy message between two ranks, not 0: from this length on it saves more time than the
    /// handshakes of such a call cost.
    pub zero_copy_bytes: usize,
    /// Maximum length of a single message that uses LL lines.
    pub low_latency_bytes: usize,
    /// Units of a piece for each block of a sentinel-slot kernel.
    pub block_units: usize,
    /// Maximum number of blocks of a sentinel-slot kernel.
    pub blocks: usize,
    /// Maximum number of lanes of long messages; by default one for each processor of the device. Each kernel uses a
    /// fraction of them.
    pub lanes: usize,
    /// Number of threads in a block of a lane.
    pub threads: usize,
    /// Not 0 if kernels overlap their set-up with their predecessor in the stream; 0 if set-up waits for its end.
    pub overlap: usize,
    /// Maximum number of blocks that share a row of a norm.
    pub cluster: usize,
}

impl CudaThresholds {
    /// Measured on H200 (docs/measurements/gpu-h200.md).
    pub fn of(ranks: usize) -> Self {
        let one_shot_bytes = match ranks {
            0..=2 => 1 << 20,
            3..=4 => 192 << 10,
            // In proportion to the bytes sent; not measured.
            _ => 64 << 10,
        };
        Self {
            one_shot_bytes,
            two_shot_bytes: 4 << 20,
            zero_copy_two_shot_bytes: 4 << 20,
            zero_copy_bytes: (4 << 20) / ranks.max(1),
            low_latency_bytes: (512 << 10) / ranks.saturating_sub(1).max(1),
            block_units: 128,
            blocks: SENTINEL_BLOCKS,
            lanes: MAX_LANES,
            // More ranks need more registers, and the blocks of all lanes must be resident together.
            threads: if ranks <= 4 { 256 } else { 128 },
            overlap: 1,
            cluster: MAX_CLUSTER,
        }
    }

    /// Returns the thresholds for devices with this number of `processors`; `clusters` is true if they have clusters.
    pub fn on(self, processors: usize, clusters: bool) -> Self {
        Self { lanes: self.lanes.min(processors), cluster: if clusters { self.cluster } else { 1 }, ..self }
    }

    /// Length of the encoded thresholds.
    pub const BYTES: usize = 11 * 8;

    /// Encodes the thresholds, which the other ranks compare with theirs.
    pub fn encode(&self) -> Vec<u8> {
        let Self { one_shot_bytes, two_shot_bytes, zero_copy_two_shot_bytes, zero_copy_bytes, low_latency_bytes, .. } = *self;
        let Self { block_units, blocks, lanes, threads, overlap, cluster, .. } = *self;
        let sizes = [one_shot_bytes, two_shot_bytes, zero_copy_two_shot_bytes, zero_copy_bytes, low_latency_bytes];
        let fields = sizes.into_iter().chain([block_units, blocks, lanes, threads, overlap, cluster]);
        fields.flat_map(|field| (field as u64).to_le_bytes()).collect()
    }

    /// Decodes the thresholds of another rank.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let fields: Vec<usize> =
            bytes.chunks_exact(8).filter_map(|word| Some(u64::from_le_bytes(word.try_into().ok()?) as usize)).collect();
        let [one_shot_bytes, two_shot_bytes, zero_copy_two_shot_bytes, zero_copy_bytes, low_latency_bytes, rest @ ..] =
            <[usize; 11]>::try_from(fields).ok()?;
        let [block_units, blocks, lanes, threads, overlap, cluster] = rest;
        (bytes.len() == Self::BYTES).then_some(Self {
            one_shot_bytes,
            two_shot_bytes,
            zero_copy_two_shot_bytes,
            zero_copy_bytes,
            low_latency_bytes,
            block_units,
            blocks,
            lanes,
            threads,
            overlap,
            cluster,
        })
    }

    /// Applies `text` (`"lanes=16,one_shot_bytes=65536"`) to the thresholds; fails with a message if it cannot be read.
    pub fn overlaid(mut self, text: &str) -> Result<Self, String> {
        for pair in text.split(',').filter(|pair| !pair.trim().is_empty()) {
            let (name, value) = pair.split_once('=').ok_or_else(|| format!("{pair:?} is not name=number"))?;
            let value = value.trim().parse::<usize>().map_err(|_| format!("{pair:?} is not name=number"))?;
            let field = match name.trim() {
                "one_shot_bytes" => &mut self.one_shot_bytes,
                "two_shot_bytes" => &mut self.two_shot_bytes,
                "zero_copy_two_shot_bytes" => &mut self.zero_copy_two_shot_bytes,
                "zero_copy_bytes" => &mut self.zero_copy_bytes,
                "low_latency_bytes" => &mut self.low_latency_bytes,
                "block_units" => &mut self.block_units,
                "blocks" => &mut self.blocks,
                "lanes" => &mut self.lanes,
                "threads" => &mut self.threads,
                "overlap" => &mut self.overlap,
                "cluster" => &mut self.cluster,
                other => return Err(format!("{other:?} is no name of a setting")),
            };
            *field = value;
        }
        self.blocks = self.blocks.clamp(1, SENTINEL_BLOCKS);
        self.lanes = self.lanes.clamp(1, MAX_LANES);
        self.threads = (self.threads / 32 * 32).clamp(32, 256);
        self.cluster = self.cluster.clamp(1, MAX_CLUSTER);
        self.block_units = self.block_units.max(1);
        self.zero_copy_bytes = self.zero_copy_bytes.max(1);
        Ok(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tunings_are_read() {
        let tuning = CudaThresholds::of(4).overlaid("lanes=8, one_shot_bytes=123").expect("read");
        assert_eq!((tuning.lanes, tuning.one_shot_bytes), (8, 123));
        assert_eq!(CudaThresholds::of(4).overlaid("lanes=0,").expect("read").lanes, 1);
        assert_eq!(CudaThresholds::of(4).overlaid("zero_copy_bytes=0").expect("read").zero_copy_bytes, 1);
        let on = CudaThresholds::of(4).on(108, false);
        assert_eq!((on.lanes, on.cluster), (108, 1));
        assert_eq!(CudaThresholds::of(4).on(1000, true), CudaThresholds::of(4));
        for bad in ["lanes", "lanes=x", "colour=3"] {
            assert!(CudaThresholds::of(4).overlaid(bad).is_err(), "{bad}");
        }
    }
}
