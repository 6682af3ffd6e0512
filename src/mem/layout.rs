//! The layout of a group's shared memory. Pure.
//!
//! ```text
//! header | member 0 .. n-1 | post (0,even) (0,odd) .. (n-1,odd) | ring 0->0, 0->1 .. n-1->n-1 |
//!     staging 0 .. n-1 | launch log 0 .. n-1
//! ```
//! The pages before the rings are reserved when the group is made; rings, staging and launch logs
//! are reserved on first use.

use crate::rank::Rank;

/// Maximum size of a message that travels next to the arrival flag.
pub const INLINE_BYTES: usize = 8192 - POST_HEAD;
/// Size of the flag, fingerprint, factor and common length before the inline data: together with
/// them, an 8-byte message fits in one cache line.
pub const POST_HEAD: usize = 32;
/// Size of an input slot; a rank has [`INPUT_SLOTS`].
pub const SLOT_BYTES: usize = 256 << 10;
/// Number of input slots of a rank: one being written, one being read, and one that the slowest
/// peer may still be reading (`docs/design/memory-model.md`).
pub const INPUT_SLOTS: usize = 3;
/// Number of result slots of a rank: a result is read one stage after it was written.
pub const RESULT_SLOTS: usize = 2;
/// Size of the data of all rings that one rank writes, within the limits [`MIN_RING_BYTES`] and
/// [`MAX_RING_BYTES`] per ring.
const RINGS_BYTES: usize = 16 << 20;
/// Minimum size of a ring's data, a power of two. Rings are reserved in steps of this size.
pub const MIN_RING_BYTES: usize = 512 << 10;
/// Maximum size of a ring's data: twice a second-level cache, so that written lines have left the
/// reader's cache. Writing lines that another core still holds takes four times as long
/// (`docs/measurements/cpu.md`).
const MAX_RING_BYTES: usize = 4 << 20;
/// Size of the area with a ring's head and tail, and the count of its matched messages, each on its
/// own pair of cache lines.
pub const RING_HEAD: usize = 4 * LINE_PAIR;
/// Alignment that separates words of different writers: 128, not 64, because adjacent-line prefetch
/// pairs lines on x86.
pub const LINE_PAIR: usize = 128;
/// Size of the header, including the text of the first failure.
pub const HEADER_BYTES: usize = 4096;
/// Size of one member's words.
pub const MEMBER_BYTES: usize = 5 * LINE_PAIR;
/// Size of a rank's launch log; a multiple of a page.
pub const LAUNCH_LOG_BYTES: usize = 96 << 10;
/// Maximum number of members: one SCM_RIGHTS message carries at most 253 descriptors, and the
/// number of rings is the square of the number of members.
pub const MAX_RANKS: usize = 128;

/// Offsets for a group of `n` members.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentLayout {
    n: usize,
}

impl SegmentLayout {
    /// Returns the layout for `n` members, `1 <= n <= MAX_RANKS`.
    pub fn new(n: usize) -> Self {
        assert!((1..=MAX_RANKS).contains(&n), "{n} ranks");
        Self { n }
    }

    /// Returns the number of members.
    pub fn ranks(self) -> usize {
        self.n
    }

    /// Returns the offset of a member's words.
    pub fn member(self, rank: Rank) -> usize {
        HEADER_BYTES + rank.index() * MEMBER_BYTES
    }

    /// Returns the offset of the post of `rank` for calls of parity `seq % 2`.
    pub fn post(self, rank: Rank, seq: u64) -> usize {
        self.posts() + (rank.index() * 2 + (seq % 2) as usize) * self.post_bytes()
    }

    /// Returns the number of words in the table behind a post's inline data: 8 for the description,
    /// then lengths sent, lengths received and addresses.
    pub fn table_words(self) -> usize {
        8 + 3 * self.n
    }

    /// Returns the size of a post: head, inline data, table.
    pub fn post_bytes(self) -> usize {
        (POST_HEAD + INLINE_BYTES + self.table_words() * 8).next_multiple_of(LINE_PAIR)
    }

    /// Returns the offset of the ring that carries messages from `from` to `to`.
    pub fn ring(self, from: Rank, to: Rank) -> usize {
        self.rings() + (from.index() * self.n + to.index()) * self.ring_bytes()
    }

    /// Returns the size of a ring with its counters.
    pub fn ring_bytes(self) -> usize {
        RING_HEAD + self.ring_data_bytes()
    }

    /// Returns the size of a ring's data, a power of two.
    pub fn ring_data_bytes(self) -> usize {
        (RINGS_BYTES / self.n.next_power_of_two()).clamp(MIN_RING_BYTES, MAX_RING_BYTES)
    }

    /// Returns the offset of a rank's input slot.
    pub fn input(self, rank: Rank, slot: usize) -> usize {
        self.staging(rank) + slot * SLOT_BYTES
    }

    /// Returns the offset of a rank's result slot.
    pub fn result(self, rank: Rank, slot: usize) -> usize {
        self.staging(rank) + INPUT_SLOTS * SLOT_BYTES + slot * self.result_bytes()
    }

    /// Returns the size of a result slot: a rank's share of one chunk.
    pub fn result_bytes(self) -> usize {
        (SLOT_BYTES / self.n + LINE_PAIR).next_multiple_of(4096)
    }

    /// Returns the offset of a rank's staging area.
    pub fn staging(self, rank: Rank) -> usize {
        (self.rings() + self.n * self.n * self.ring_bytes()).next_multiple_of(4096)
            + rank.index() * self.staging_bytes()
    }

    /// Returns the size of a rank's staging area.
    pub fn staging_bytes(self) -> usize {
        INPUT_SLOTS * SLOT_BYTES + RESULT_SLOTS * self.result_bytes()
    }

    /// Returns the size of the part that is reserved when the group is made.
    pub fn control_bytes(self) -> usize {
        self.rings()
    }

    /// Returns the offset of the pages in which a rank logs the calls that it has launched on its
    /// GPU.
    pub fn launch_log(self, rank: Rank) -> usize {
        self.staging(Rank(self.n as u32)).next_multiple_of(4096) + rank.index() * LAUNCH_LOG_BYTES
    }

    /// Returns the size of the whole segment.
    pub fn total_bytes(self) -> usize {
        self.launch_log(Rank(self.n as u32))
    }

    fn posts(self) -> usize {
        HEADER_BYTES + self.n * MEMBER_BYTES
    }

    fn rings(self) -> usize {
        (self.posts() + self.n * 2 * self.post_bytes()).next_multiple_of(4096)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns every area as (offset, bytes).
    fn areas(layout: SegmentLayout) -> Vec<(usize, usize)> {
        let n = layout.ranks() as u32;
        let mut list = vec![(0, HEADER_BYTES)];
        for a in (0..n).map(Rank) {
            list.push((layout.member(a), MEMBER_BYTES));
            list.extend((0..2).map(|seq| (layout.post(a, seq), layout.post_bytes())));
            list.extend((0..n).map(|b| (layout.ring(a, Rank(b)), layout.ring_bytes())));
            list.extend((0..INPUT_SLOTS).map(|slot| (layout.input(a, slot), SLOT_BYTES)));
            list.push((layout.launch_log(a), LAUNCH_LOG_BYTES));
            list.extend(
                (0..RESULT_SLOTS).map(|slot| (layout.result(a, slot), layout.result_bytes())),
            );
        }
        list
    }

    #[test]
    fn areas_are_aligned_disjoint_and_inside() {
        for n in 1..=MAX_RANKS {
            let layout = SegmentLayout::new(n);
            let mut list = areas(layout);
            assert_eq!(
                layout.control_bytes(),
                layout.ring(Rank(0), Rank(0)),
                "{n} ranks: the reserved part ends where rings begin"
            );
            list.sort_unstable();
            for pair in list.windows(2) {
                assert!(pair[0].0 + pair[0].1 <= pair[1].0, "{n} ranks: {pair:?} overlap");
            }
            assert!(
                list.iter().all(|(offset, _)| offset % LINE_PAIR == 0),
                "{n} ranks: misaligned"
            );
            let (offset, bytes) = list[list.len() - 1];
            assert!(offset + bytes <= layout.total_bytes(), "{n} ranks: outside");
        }
    }

    #[test]
    fn a_share_of_a_chunk_fits_its_result_slot_and_all_lengths_their_table() {
        for n in 1..=MAX_RANKS {
            let layout = SegmentLayout::new(n);
            // `coll::cpu::all_reduce` divides a chunk of `SLOT_BYTES` in this way.
            let share = SLOT_BYTES.div_ceil(n).next_multiple_of(64);
            assert!(
                share <= layout.result_bytes(),
                "{n} ranks: {share} bytes in a slot of {}",
                layout.result_bytes()
            );
            assert!(
                POST_HEAD + INLINE_BYTES + layout.table_words() * 8 <= layout.post_bytes(),
                "{n} ranks"
            );
            assert!(layout.table_words() >= 8 + 2 * n, "{n} ranks");
        }
    }
}
