//! Layout of the GPU memory of a group. Pure.
//!
//! A rank's memory is divided into channels. Each is complete, so that calls on different channels
//! may run at the same time:
//! ```text
//! epochs | lanes' words (scatter, gather) | lines of handshakes | offers | LL lines |
//!     sentinel slots | staging slots (scatter, gather)
//! ```

use crate::error::{Error, Result};

/// Maximum number of ranks of a group with GPUs; `MAX_WORLD` in `wait.cuh`.
pub const MAX_RANKS: usize = 16;
/// Units of one message that one block carries on LL lines: a unit for each of 256 threads.
pub const LL_UNITS: usize = 256;
/// Maximum number of blocks of a sentinel-slot kernel.
pub const SENTINEL_BLOCKS: usize = 128;
/// Maximum number of lanes of a staged kernel: one for each processor of an H100 or H200.
pub const MAX_LANES: usize = 132;
/// Number of slots of a lane for each source; `SLOTS` in `staging.cuh`.
pub const SLOTS: usize = 4;
/// Number of slots for each source of a call whose bytes copy engines move: one is read while the
/// next is written.
pub const COPY_SLOTS: usize = 2;
/// Size of a unit in bytes.
pub const UNIT: usize = 16;
/// Size of a unit with its flags in bytes.
const LINES: usize = 32;
/// Product of the number of blocks of an LL-line kernel and the number of ranks. Small groups get
/// more blocks, because each block carries fewer messages at once.
const LL_BLOCK_RANKS: usize = 256;
/// Product of the numbers of lanes and ranks if `MIN_STAGE_BYTES` bytes per slot and rank fit into
/// the memory; otherwise the product is halved.
const LANE_RANKS: usize = 4 * MAX_LANES;
/// Minimum and maximum size of a slot, times sources / ranks. If slots would be shorter, a layout
/// has fewer lanes ([`ChannelLayout::few_lanes`]), because short slots lose more than the lanes
/// gain. Longer slots gain nothing (docs/measurements/gpu-h200.md).
const MIN_STAGE_BYTES: usize = 16 << 10;
const MAX_STAGE_BYTES: usize = 24 << 10;
/// Maximum size of the sentinel slots of a channel.
const SENTINEL_BYTES: usize = 17 << 20;
/// Size of `CopyWords` in `copy_words.cuh`.
#[cfg(test)]
const COPY_WORDS_BYTES: usize = 132;
/// Size of a lane's words; `Lane` in `staging.cuh`.
const LANE_WORDS: usize = 4 * MAX_RANKS * 4;
const LL_EPOCHS: usize = 0;
const MESSAGE_WORDS: usize = 512;
/// Size of `MessageWords` in `copy_words.cuh`.
const MESSAGE_WORDS_BYTES: usize = 128;
/// Offset in a channel of the word that is not 0 once a kernel has timed out; `FAILED` in
/// `wait.cuh`. Only kernels use it.
#[cfg(test)]
const FAILED: usize = 768;
const SENTINEL_EPOCHS: usize = 1024;
const COPY_WORDS: usize = 1536;
const ARRIVALS: usize = 1792;
const HANDSHAKE_EPOCHS: usize = 2048;
const HANDSHAKE_COUNTS: usize = 3840;
const WORDS: usize = 4096;
/// Size of the offer of one lane and pair of ranks; `Offer` in `recv_offers.cuh`.
const OFFER: usize = 64;
/// Number of units of one rank in one round of a handshake; `HANDSHAKE_UNITS` in `zero_copy.cuh`.
const HANDSHAKE_UNITS: usize = 2;
/// Alignment of slots: a multiple of a pair of cache lines that divides a page.
const ALIGN: usize = 256;
// Kernels count the starts of chunks in steps of 256 bytes (`START_STEP` in staging.cuh), and a
// chunk may be a whole slot.
const _: () = assert!(ALIGN.is_multiple_of(256));

/// A part of the memory that kernels use independently of the other channels. The program alone
/// determines the channel of a call, so it is the same on all ranks.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Channel {
    /// Collectives on any stream.
    Collectives,
    /// Sends and receives.
    Transfers,
    /// Collectives recorded into a graph.
    CapturedCollectives,
    /// Sends and receives recorded into a graph.
    CapturedTransfers,
}

impl Channel {
    /// Returns the channel of collectives or transfers, captured or not.
    pub fn of(captured: bool, transfers: bool) -> Self {
        match (captured, transfers) {
            (false, false) => Channel::Collectives,
            (false, true) => Channel::Transfers,
            (true, false) => Channel::CapturedCollectives,
            (true, true) => Channel::CapturedTransfers,
        }
    }

    /// Returns how calls on this channel run, for error messages.
    pub fn name(self) -> &'static str {
        match self {
            Channel::Collectives | Channel::Transfers => "to run at once",
            Channel::CapturedCollectives | Channel::CapturedTransfers => {
                "to be recorded into a graph"
            }
        }
    }

    /// Every channel.
    pub const ALL: [Channel; 4] = [
        Channel::Collectives,
        Channel::Transfers,
        Channel::CapturedCollectives,
        Channel::CapturedTransfers,
    ];
}

/// The layout of one channel; the same on all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChannelLayout {
    ranks: usize,
    lanes: usize,
    sentinel_units: usize,
    slot_bytes: usize,
    channel_bytes: usize,
}

/// Number of ranks that send to one rank through slots; `SOURCES` in `staging.cuh`.
fn sources(ranks: usize) -> usize {
    (ranks - 1).max(1)
}

/// Size of a slot if there is enough memory.
fn longest_slot(ranks: usize) -> usize {
    MAX_STAGE_BYTES * ranks / sources(ranks) / ALIGN * ALIGN
}

impl ChannelLayout {
    /// Returns the minimum size of the memory on every GPU for a group of `ranks`.
    pub fn least(ranks: usize) -> usize {
        (ranks * (8 << 20)).max(32 << 20)
    }

    /// Returns the size of the memory on every GPU above which a group of `ranks` gains nothing.
    pub fn most(ranks: usize) -> usize {
        let lanes = (LANE_RANKS / ranks).min(MAX_LANES);
        let layout = Self {
            ranks,
            lanes,
            sentinel_units: 0,
            slot_bytes: longest_slot(ranks),
            channel_bytes: 0,
        };
        Channel::ALL.len() * (layout.sentinel() + SENTINEL_BYTES + 2 * layout.stage_bytes() + ALIGN)
    }

    /// Returns the layout of a group of `ranks` with `total` bytes on every GPU.
    pub fn new(ranks: usize, total: usize) -> Result<Self> {
        let channel_bytes = total / Channel::ALL.len() / ALIGN * ALIGN;
        let with = |lanes: usize| {
            let mut layout = Self { ranks, lanes, sentinel_units: 0, slot_bytes: 0, channel_bytes };
            let left = channel_bytes.saturating_sub(layout.sentinel());
            layout.sentinel_units =
                (left / 3).min(SENTINEL_BYTES) / (SENTINEL_BLOCKS * 4 * ranks * UNIT) / 16 * 16;
            let slot = left.saturating_sub(layout.sentinel_bytes())
                / (2 * lanes * sources(ranks) * SLOTS)
                / ALIGN
                * ALIGN;
            layout.slot_bytes = slot.min(longest_slot(ranks));
            layout
        };
        let lanes = (LANE_RANKS / ranks).min(MAX_LANES);
        let mut layout = with(lanes);
        if layout.slot_bytes * sources(ranks) < MIN_STAGE_BYTES * ranks {
            layout = with(layout.few_lanes());
        }
        if layout.sentinel_units == 0 || layout.slot_bytes < 1024 {
            let mebibytes = total >> 20;
            return Err(Error::config(format!(
                "{mebibytes} MiB of GPU memory are too few for a group of {ranks} ranks; raise \
                 SYMM_WORKSPACE_MB"
            )));
        }
        Ok(layout)
    }

    /// Returns the size of a channel in bytes.
    pub fn channel_bytes(self) -> usize {
        self.channel_bytes
    }

    /// Returns the offset of a channel.
    pub fn channel(self, channel: Channel) -> usize {
        channel as usize * self.channel_bytes
    }

    /// Returns the maximum number of blocks of an LL-line kernel.
    pub fn ll_blocks(self) -> usize {
        (LL_BLOCK_RANKS / self.ranks).min(128)
    }

    /// Returns the maximum number of lanes of a staged kernel.
    pub fn lanes(self) -> usize {
        self.lanes
    }

    /// Returns the number of lanes for messages that gain nothing from more lanes.
    pub fn few_lanes(self) -> usize {
        (LANE_RANKS / 2 / self.ranks).min(MAX_LANES).min(self.lanes)
    }

    /// Returns the number of lanes of a layout with enough memory. In every layout the areas before
    /// the slots have room for this number, so their offsets do not depend on the memory's size.
    fn most_lanes(self) -> usize {
        (LANE_RANKS / self.ranks).min(MAX_LANES)
    }

    /// Returns the offset in the channel of the epochs of blocks that use LL lines.
    pub fn ll_epochs(self) -> usize {
        LL_EPOCHS
    }

    /// Returns the maximum number of blocks of a zero-copy kernel: three roles per lane.
    pub fn handshake_blocks(self) -> usize {
        3 * self.most_lanes()
    }

    /// Returns the offset in the channel of the epochs of the blocks of zero-copy kernels.
    pub fn handshake_epochs(self) -> usize {
        HANDSHAKE_EPOCHS
    }

    /// Returns the offset in the channel of the counts of zero-copy kernels.
    pub fn handshake_counts(self) -> usize {
        HANDSHAKE_COUNTS
    }

    /// Returns the offset in the channel of the words of calls whose bytes copy engines move;
    /// `CopyWords` in `copy_words.cuh`.
    pub fn copy_words(self) -> usize {
        COPY_WORDS
    }

    /// Returns the offset in the channel of the `CopyWords` that count the ranks' arrivals at calls
    /// whose kernels have lanes.
    pub fn arrivals(self) -> usize {
        ARRIVALS
    }

    /// Returns the offset in the channel of the `MessageWords` of the messages that this rank sends
    /// or, if `send` is false, receives.
    pub fn message_words(self, send: bool) -> usize {
        MESSAGE_WORDS + if send { 0 } else { MESSAGE_WORDS_BYTES }
    }

    /// Returns the number of bytes of a message that the slots of `lanes` lanes hold: its kernel
    /// can send as many before the message is received.
    pub fn unread_bytes(self, lanes: usize) -> usize {
        lanes * SLOTS * self.slot_bytes
    }

    /// Returns the size of a slot of a call whose bytes copy engines move: the staging slots of
    /// both passes together, divided into [`COPY_SLOTS`] slots for each source.
    pub fn copy_slot_bytes(self) -> usize {
        2 * self.stage_bytes() / (COPY_SLOTS * sources(self.ranks)) / ALIGN * ALIGN
    }

    /// Returns the offset in the channel of the slot of step `step` for the messages of `from` to
    /// `to`.
    pub fn copy_slot(self, step: usize, from: usize, to: usize) -> usize {
        let source = if from < to { from } else { from - 1 };
        self.slots(StagingPass::Scatter)
            + (step % COPY_SLOTS * sources(self.ranks) + source) * self.copy_slot_bytes()
    }

    /// Returns the offset in the channel of the LL lines of handshakes.
    pub fn handshake_lines(self) -> usize {
        (self.words(StagingPass::Gather) + self.most_lanes() * LANE_WORDS).next_multiple_of(ALIGN)
    }

    fn handshake_bytes(self) -> usize {
        self.handshake_blocks() * 2 * self.ranks * HANDSHAKE_UNITS * LINES
    }

    /// Returns the offset in the channel of the receivers' offers.
    pub fn offers(self) -> usize {
        (self.handshake_lines() + self.handshake_bytes()).next_multiple_of(ALIGN)
    }

    fn offers_bytes(self) -> usize {
        self.most_lanes() * self.ranks * OFFER
    }

    /// Returns the offset in the channel of the LL lines.
    pub fn ll_lines(self) -> usize {
        (self.offers() + self.offers_bytes()).next_multiple_of(ALIGN)
    }

    /// Returns the offset in the channel of the epochs of blocks that use sentinel slots.
    pub fn sentinel_epochs(self) -> usize {
        SENTINEL_EPOCHS
    }

    /// Returns the offset in the channel of the sentinel slots.
    pub fn sentinel(self) -> usize {
        self.ll_lines() + self.ll_blocks() * 2 * self.ranks * LL_UNITS * LINES
    }

    /// Returns the size of all sentinel slots of a channel, which must be filled with ones before
    /// the first call.
    pub fn sentinel_bytes(self) -> usize {
        SENTINEL_BLOCKS * 4 * self.ranks * self.sentinel_units * UNIT
    }

    /// Returns the number of units of one source in one stage of one block with sentinel slots.
    pub fn sentinel_units(self) -> usize {
        self.sentinel_units
    }

    /// Returns the offset in the channel of the words of a stage's lanes.
    pub fn words(self, stage: StagingPass) -> usize {
        WORDS + stage as usize * self.most_lanes() * LANE_WORDS
    }

    /// Returns the offset in the channel of the slots of a stage.
    pub fn slots(self, stage: StagingPass) -> usize {
        self.sentinel() + self.sentinel_bytes() + stage as usize * self.stage_bytes()
    }

    /// Returns the size of a staging slot in bytes.
    pub fn slot_bytes(self) -> usize {
        self.slot_bytes
    }

    fn stage_bytes(self) -> usize {
        self.lanes() * sources(self.ranks) * SLOTS * self.slot_bytes
    }
}

/// The two passes of staged calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StagingPass {
    /// Each rank's pieces move to the ranks that need them.
    Scatter,
    /// Each rank's result moves to every rank.
    Gather,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::coll::cuda::arguments::COUNTS;

    #[test]
    fn areas_are_aligned_disjoint_and_inside() {
        for ranks in 1..=MAX_RANKS {
            for mebibytes in [64, 256, 1024] {
                let layout = ChannelLayout::new(ranks, mebibytes << 20).expect("fits");
                let ll = layout.ll_blocks() * 2 * ranks * LL_UNITS * LINES;
                let areas = [
                    (layout.ll_epochs(), 4 * layout.ll_blocks()),
                    (layout.message_words(true), 2 * MESSAGE_WORDS_BYTES),
                    (FAILED, 4),
                    (layout.sentinel_epochs(), 4 * SENTINEL_BLOCKS),
                    (layout.copy_words(), COPY_WORDS_BYTES),
                    (layout.arrivals(), COPY_WORDS_BYTES),
                    (layout.handshake_epochs(), 4 * layout.handshake_blocks()),
                    (layout.handshake_counts(), 4 * COUNTS),
                    (layout.words(StagingPass::Scatter), layout.lanes() * LANE_WORDS),
                    (layout.words(StagingPass::Gather), layout.lanes() * LANE_WORDS),
                    (layout.handshake_lines(), layout.handshake_bytes()),
                    (layout.offers(), layout.offers_bytes()),
                    (layout.ll_lines(), ll),
                    (layout.sentinel(), layout.sentinel_bytes()),
                    (layout.slots(StagingPass::Scatter), layout.stage_bytes()),
                    (layout.slots(StagingPass::Gather), layout.stage_bytes()),
                ];
                for pair in areas.windows(2) {
                    assert!(
                        pair[0].0 + pair[0].1 <= pair[1].0,
                        "{ranks} ranks, {mebibytes} MiB: {pair:?} overlap"
                    );
                }
                assert!(
                    areas.iter().all(|(offset, _)| offset % ALIGN == 0),
                    "{ranks} ranks: misaligned {areas:?}"
                );
                for step in 0..COPY_SLOTS {
                    let slot = layout.copy_slot(step, sources(ranks), 0);
                    assert!(
                        slot >= layout.slots(StagingPass::Scatter)
                            && slot + layout.copy_slot_bytes() <= layout.channel_bytes()
                    );
                }
                let (offset, bytes) = areas[areas.len() - 1];
                assert!(
                    offset + bytes <= layout.channel_bytes(),
                    "{ranks} ranks, {mebibytes} MiB: outside"
                );
                let end = layout.channel(Channel::CapturedTransfers) + layout.channel_bytes();
                assert!(end <= mebibytes << 20);
            }
        }
    }

    #[test]
    fn memory_beyond_the_most_changes_nothing() {
        for ranks in 2..=MAX_RANKS {
            let most = ChannelLayout::new(ranks, ChannelLayout::most(ranks)).expect("fits");
            let more = ChannelLayout::new(ranks, 2 * ChannelLayout::most(ranks)).expect("fits");
            assert_eq!(
                ChannelLayout { channel_bytes: most.channel_bytes, ..more },
                most,
                "{ranks} ranks"
            );
            assert!(
                most.slot_bytes == longest_slot(ranks) && ChannelLayout::most(ranks) <= 512 << 20,
                "{ranks} ranks: {most:?}"
            );
        }
    }

    #[test]
    fn little_memory_means_fewer_lanes_before_short_slots_and_an_error_below_the_least() {
        let lanes = |mebibytes: usize| {
            ChannelLayout::new(4, mebibytes << 20).map(|layout| layout.lanes()).expect("fits")
        };
        assert_eq!((lanes(128), lanes(256), lanes(512)), (66, 66, 132));
        for ranks in 1..=MAX_RANKS {
            let least = ChannelLayout::least(ranks);
            assert!(ChannelLayout::new(ranks, least).is_ok(), "{ranks} ranks");
        }
        let error = ChannelLayout::new(8, 4 << 20).expect_err("too little");
        assert!(error.message.contains("4 MiB") && error.message.contains("8 ranks"), "{error}");
    }
}
