//! A byte ring with one producer and one consumer: the offsets of the next frame and of the oldest
//! one.
//!
//! Positions only grow; the offset of a position is its remainder modulo the capacity. Frames are
//! multiples of [`UNIT`] bytes and never wrap: if a frame does not fit before the end, the producer
//! skips to the start. The caller owns the bytes.

use crate::sync::flag::Flag;

/// Frames start and end at multiples of this many bytes, so a frame's head always fits before the
/// end.
pub const UNIT: u64 = 32;

/// The two counters of a ring. `tail`: bytes produced so far; `head`: bytes consumed so far.
#[derive(Clone, Copy, Debug)]
pub struct ByteRing<'a, F> {
    /// Written by the producer.
    pub tail: &'a F,
    /// Written by the consumer.
    pub head: &'a F,
    /// Size of the data in bytes; a multiple of `UNIT`.
    pub capacity: u64,
}

/// Free space in a ring for a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reservation {
    /// Offset of the bytes to skip at the end of the ring, if any; the producer marks them as
    /// padding.
    pub padding: Option<u64>,
    /// Offset of the frame.
    pub place: u64,
    /// The tail after the frame.
    pub tail: u64,
}

impl<F: Flag> ByteRing<'_, F> {
    /// Reserves space for a frame of `bytes` bytes (a multiple of `UNIT`), given the producer's own
    /// `tail`; `None` while the ring is too full.
    pub fn reserve(&self, tail: u64, bytes: u64) -> Option<Reservation> {
        let place = tail % self.capacity;
        let skip = if place + bytes > self.capacity { self.capacity - place } else { 0 };
        let end = tail + skip + bytes;
        // Acquires the consumer's last reads of the bytes that will be overwritten. The subtraction
        // wraps, so that an impossible head grants no space.
        (end.wrapping_sub(self.head.observe()) <= self.capacity).then_some(Reservation {
            padding: (skip > 0).then_some(place),
            place: (tail + skip) % self.capacity,
            tail: end,
        })
    }

    /// Publishes everything up to `tail` to the consumer.
    pub fn publish(&self, tail: u64) {
        self.tail.publish(tail);
    }

    /// Returns the offset of the oldest frame, given the consumer's own `head`; `None` while the
    /// ring is empty.
    pub fn oldest(&self, head: u64) -> Option<u64> {
        (self.tail.observe() != head).then_some(head % self.capacity)
    }

    /// Releases the bytes up to `head` to the producer.
    pub fn release(&self, head: u64) {
        self.head.publish(head);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU64;

    #[test]
    fn frames_never_wrap_and_never_overtake() {
        let (tail, head) = (AtomicU64::new(0), AtomicU64::new(0));
        let ring = ByteRing { tail: &tail, head: &head, capacity: 4 * UNIT };
        let first = ring.reserve(0, 3 * UNIT).expect("empty");
        assert_eq!(first, Reservation { padding: None, place: 0, tail: 3 * UNIT });
        assert_eq!(ring.oldest(0), None);
        ring.publish(first.tail);
        assert_eq!(ring.oldest(0), Some(0));
        assert_eq!(ring.reserve(first.tail, 2 * UNIT), None, "one unit is free");
        ring.release(3 * UNIT);
        let second = ring.reserve(first.tail, 2 * UNIT).expect("all is free");
        assert_eq!(second, Reservation { padding: Some(3 * UNIT), place: 0, tail: 6 * UNIT });
        ring.publish(second.tail);
        assert_eq!(ring.oldest(4 * UNIT), Some(0));
        assert_eq!(ring.oldest(5 * UNIT), Some(UNIT));
        assert_eq!(ring.oldest(6 * UNIT), None);
    }

    #[test]
    fn a_frame_may_end_where_the_ring_does() {
        let (tail, head) = (AtomicU64::new(0), AtomicU64::new(9 * UNIT));
        let ring = ByteRing { tail: &tail, head: &head, capacity: 4 * UNIT };
        let room = |from, units| {
            ring.reserve(from * UNIT, units * UNIT)
                .map(|room| (room.padding, room.place / UNIT, room.tail / UNIT))
        };
        assert_eq!(room(9, 3), Some((None, 1, 12)));
        assert_eq!(room(9, 4), None, "with the padding it would take seven");
        assert_eq!(room(10, 2), Some((None, 2, 12)));
        assert_eq!(room(12, 1), Some((None, 0, 13)));
        assert_eq!(room(12, 2), None, "three are taken");
    }
}
