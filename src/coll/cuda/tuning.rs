//! The thresholds between algorithms: their defaults, their encoding for other ranks, and the
//! user's settings.

use super::workspace::layout::{MAX_LANES, SENTINEL_BLOCKS};
use crate::config::{DefaultChoice, named_choice};
use crate::cta::{CtaOptions, CtaPolicy};
use crate::error::{Error, Result};

static DEFAULT: DefaultChoice<CtaOptions> = DefaultChoice::unset();

/// Returns the options of a group that is created with `policy` and `most`. An empty `policy` and a
/// `most` of 0 stand for `setting`, or in later groups for the default group's options.
///
/// # Errors
/// `Value` if `policy` is not a policy, or `most` is negative.
pub fn chosen_ctas(
    policy: &str,
    most: i32,
    setting: CtaOptions,
    is_default: bool,
) -> Result<CtaOptions> {
    let (named, most) = cta_choice(policy, most)?;
    DEFAULT.choose(setting, is_default, |usual| {
        Ok(CtaOptions { policy: named.unwrap_or(usual.policy), most: most.or(usual.most) })
    })
}

/// Returns the policy and the maximum number of blocks that options name, if they name them.
///
/// # Errors
/// `Value` if `policy` is not the name of a policy or `most` is negative.
pub fn cta_choice(policy: &str, most: i32) -> Result<(Option<CtaPolicy>, Option<usize>)> {
    let named = named_choice("cta_policy", policy, &CtaPolicy::ALL, CtaPolicy::name)?;
    let most = usize::try_from(most)
        .map_err(|_| Error::value(format!("max_ctas={most} is negative; 0 means no limit")))?;
    Ok((named, (most > 0).then_some(most)))
}

/// Maximum number of blocks of a kernel under [`CtaPolicy::Efficiency`] if the user sets none.
const EFFICIENT_CTAS: usize = 32;
/// Upper bound on the number of blocks of any kernel; it stands for no limit.
const MAX_CTAS: usize = 3 * MAX_LANES;

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
    /// Minimum length of a zero-copy message between two ranks, not 0: from this length on it saves
    /// more time than the handshakes of such a call cost.
    pub zero_copy_bytes: usize,
    /// A collective uses LL lines if none of its messages is longer than this.
    pub low_latency_bytes: usize,
    /// Number of units of a piece for each block of a sentinel-slot kernel, up to the maximum
    /// number of blocks.
    pub block_units: usize,
    /// Maximum number of blocks of a sentinel-slot kernel.
    pub blocks: usize,
    /// Maximum number of lanes of long messages; by default one for each processor of the device.
    /// A kernel may use fewer.
    pub lanes: usize,
    /// Number of threads in a block of a lane.
    pub threads: usize,
    /// Not 0 if kernels overlap their set-up with their predecessor in the stream; 0 if set-up
    /// waits until the predecessor has ended.
    pub overlap: usize,
    /// Maximum number of blocks that share a row of a norm.
    pub cluster: usize,
    /// Minimum size of a call that copy engines move.
    pub copy_engine_bytes: usize,
    /// Minimum size of a chunk that a copy engine moves: shorter ones cost more to start than to
    /// move.
    pub copy_chunk_bytes: usize,
    /// Minimum size of a call that waits for all ranks before its kernel starts, if it is meant to
    /// overlap with computation.
    pub arrival_bytes: usize,
    /// Minimum size of a call of two ranks that copy engines may move, whatever the policy, if it
    /// is meant to overlap with computation.
    pub overlapped_bytes: usize,
    /// The group's policy, which decides whether copy engines move all long calls.
    pub policy: CtaPolicy,
    /// Maximum number of blocks of a kernel.
    pub ctas: usize,
}

impl CudaThresholds {
    /// Returns the defaults for this number of `ranks`, measured on H200
    /// (docs/measurements/gpu-h200.md).
    pub fn of(ranks: usize) -> Self {
        let one_shot_bytes = match ranks {
            0..=2 => 1 << 20,
            3..=4 => 192 << 10,
            // Not measured: scaled by the number of bytes that a rank sends.
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
            // More ranks need more registers, and the blocks of all lanes must be resident
            // together.
            threads: if ranks <= 4 { 256 } else { 128 },
            overlap: 1,
            cluster: MAX_CLUSTER,
            copy_engine_bytes: 4 << 20,
            copy_chunk_bytes: 8 << 20,
            arrival_bytes: 4 << 20,
            overlapped_bytes: 64 << 20,
            policy: CtaPolicy::Default,
            ctas: MAX_CTAS,
        }
    }

    /// Returns the thresholds for devices with this number of `processors`; `clusters` is true if
    /// they have clusters.
    pub fn on(self, processors: usize, clusters: bool) -> Self {
        Self {
            lanes: self.lanes.min(processors),
            cluster: if clusters { self.cluster } else { 1 },
            ..self
        }
    }

    /// Returns the thresholds with the group's options.
    pub fn within(self, options: CtaOptions) -> Self {
        let usual = if options.policy == CtaPolicy::Efficiency { EFFICIENT_CTAS } else { MAX_CTAS };
        Self {
            policy: options.policy,
            ctas: options.most.unwrap_or(usual).clamp(1, MAX_CTAS),
            ..self
        }
    }

    /// Length of the encoded thresholds.
    pub const BYTES: usize = 17 * 8;

    /// Returns the thresholds that [`Self::overlaid`] can set, by name, in the order in which they
    /// are encoded.
    fn named(&mut self) -> [(&'static str, &mut usize); 15] {
        [
            ("one_shot_bytes", &mut self.one_shot_bytes),
            ("two_shot_bytes", &mut self.two_shot_bytes),
            ("zero_copy_two_shot_bytes", &mut self.zero_copy_two_shot_bytes),
            ("zero_copy_bytes", &mut self.zero_copy_bytes),
            ("low_latency_bytes", &mut self.low_latency_bytes),
            ("block_units", &mut self.block_units),
            ("blocks", &mut self.blocks),
            ("lanes", &mut self.lanes),
            ("threads", &mut self.threads),
            ("overlap", &mut self.overlap),
            ("cluster", &mut self.cluster),
            ("copy_engine_bytes", &mut self.copy_engine_bytes),
            ("copy_chunk_bytes", &mut self.copy_chunk_bytes),
            ("arrival_bytes", &mut self.arrival_bytes),
            ("overlapped_bytes", &mut self.overlapped_bytes),
        ]
    }

    /// Encodes the thresholds, which the other ranks compare with theirs.
    pub fn encode(&self) -> Vec<u8> {
        let mut own = *self;
        let options = [self.policy as usize, self.ctas];
        let fields = own.named().map(|(_, field)| *field).into_iter().chain(options);
        fields.flat_map(|field| (field as u64).to_le_bytes()).collect()
    }

    /// Decodes the thresholds of another rank.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let words: &[u8; Self::BYTES] = bytes.try_into().ok()?;
        let words = words.as_chunks::<8>().0;
        let mut fields = words.iter().map(|word| u64::from_le_bytes(*word) as usize);
        // Every field of these defaults is replaced.
        let mut read = Self::of(1);
        for ((_, field), value) in read.named().into_iter().zip(&mut fields) {
            *field = value;
        }
        read.policy = *CtaPolicy::ALL.get(fields.next()?)?;
        read.ctas = fields.next()?;
        Some(read)
    }

    /// Applies `text` (`"lanes=16,one_shot_bytes=65536"`) to the thresholds; fails with a message
    /// if it cannot be read.
    pub fn overlaid(mut self, text: &str) -> std::result::Result<Self, String> {
        for pair in text.split(',').filter(|pair| !pair.trim().is_empty()) {
            let (name, value) =
                pair.split_once('=').ok_or_else(|| format!("{pair:?} is not name=number"))?;
            let value = value
                .trim()
                .parse::<usize>()
                .map_err(|_| format!("{pair:?} is not name=number"))?;
            let fields = self.named();
            let known = fields.into_iter().find(|(known, _)| *known == name.trim());
            let (_, field) =
                known.ok_or_else(|| format!("{:?} is no name of a setting", name.trim()))?;
            *field = value;
        }
        self.blocks = self.blocks.clamp(1, SENTINEL_BLOCKS);
        self.lanes = self.lanes.clamp(1, MAX_LANES);
        self.threads = (self.threads / 32 * 32).clamp(32, 256);
        self.cluster = self.cluster.clamp(1, MAX_CLUSTER);
        self.block_units = self.block_units.max(1);
        self.zero_copy_bytes = self.zero_copy_bytes.max(1);
        self.copy_engine_bytes = self.copy_engine_bytes.max(1);
        Ok(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn later_groups_have_the_policy_of_the_default_one() {
        let (none, zero) =
            (CtaOptions::default(), CtaOptions { policy: CtaPolicy::Zero, most: Some(8) });
        assert_eq!(chosen_ctas("", 0, none, false), Ok(none));
        assert_eq!(chosen_ctas("zero", 8, none, true), Ok(zero));
        assert_eq!(chosen_ctas("", 0, none, false), Ok(zero));
        assert_eq!(
            chosen_ctas("default", 0, none, false),
            Ok(CtaOptions { policy: CtaPolicy::Default, ..zero })
        );
        assert_eq!(chosen_ctas("", 0, none, true), Ok(none));
        let error = chosen_ctas("few", 0, none, false).expect_err("there is none");
        assert_eq!(
            error.message,
            "cta_policy=\"few\" is not one of \"default\", \"efficiency\", \"zero\""
        );
        assert!(
            chosen_ctas("", -1, none, false).expect_err("negative").message.contains("max_ctas=-1")
        );
    }

    #[test]
    fn tunings_are_read() {
        let tuning = CudaThresholds::of(4).overlaid("lanes=8, one_shot_bytes=123").expect("read");
        assert_eq!((tuning.lanes, tuning.one_shot_bytes), (8, 123));
        assert_eq!(CudaThresholds::of(4).overlaid("lanes=0,").expect("read").lanes, 1);
        assert_eq!(
            CudaThresholds::of(4).overlaid("zero_copy_bytes=0").expect("read").zero_copy_bytes,
            1
        );
        let on = CudaThresholds::of(4).on(108, false);
        assert_eq!((on.lanes, on.cluster), (108, 1));
        assert_eq!(CudaThresholds::of(4).on(1000, true), CudaThresholds::of(4));
        let zero =
            CudaThresholds::of(4).within(CtaOptions { policy: CtaPolicy::Zero, most: Some(0) });
        assert_eq!(
            (zero.policy, zero.ctas, CudaThresholds::decode(&zero.encode())),
            (CtaPolicy::Zero, 1, Some(zero))
        );
        assert_eq!(
            zero.within(CtaOptions { policy: CtaPolicy::Efficiency, most: None }).ctas,
            EFFICIENT_CTAS
        );
        for bad in ["lanes", "lanes=x", "colour=3"] {
            assert!(CudaThresholds::of(4).overlaid(bad).is_err(), "{bad}");
        }
    }
}
