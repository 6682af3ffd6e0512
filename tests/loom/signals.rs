//! Signal pads on CPU: a barrier may reuse the words of the previous barrier at once, and a reused
//! pad is cleared before any rank may set its words.

use super::failure::Thirty2;
use super::{Cell, Word, both, cells, words};
use loom::sync::atomic::{AtomicU32, Ordering};
use loom::thread;
use symm::error::Result;
use symm::rank::Rank;
use symm::sync::flag::Flag;
use symm::window::signal_host::{Words, meet};

/// For each of two ranks: a word of its pad, its data, and the flag that publishes its pad.
struct Pads {
    words: [Thirty2; 2],
    data: [Cell; 2],
    known: [Word; 2],
}

impl Pads {
    fn new(stale: u32) -> Self {
        let word = |()| Thirty2(AtomicU32::new(stale));
        Self { words: [(); 2].map(word), data: cells(), known: words() }
    }

    fn meet(&self, me: usize) {
        meet(&Side { inward: &self.words[me], outward: &self.words[1 - me], me }).unwrap();
    }
}

/// The words of a rank's pad and of its peer's pad.
pub(super) struct Side<'a> {
    pub(super) inward: &'a Thirty2,
    pub(super) outward: &'a Thirty2,
    pub(super) me: usize,
}

impl Words for Side<'_> {
    type Word = Thirty2;
    fn peers(&self) -> impl Iterator<Item = Rank> {
        std::iter::once(Rank(1 - self.me as u32))
    }
    fn outward(&self, _: Rank) -> &Thirty2 {
        self.outward
    }
    fn inward(&self, _: Rank) -> &Thirty2 {
        self.inward
    }
    fn wait(&self, missing: impl Fn(Rank) -> bool) -> Result<()> {
        while self.peers().any(&missing) {
            thread::yield_now();
        }
        Ok(())
    }
    fn wake(&self) {}
}

#[test]
fn a_barrier_s_words_serve_the_next_one_at_once() {
    both(
        3,
        || Pads::new(0),
        |pads, me| {
            for round in 1..=2 {
                pads.data[me].write(round);
                pads.meet(me);
                assert_eq!(pads.data[1 - me].read(), round);
                pads.meet(me);
            }
        },
    );
}

/// A reused pad may hold an old signal: its owner clears it before the ranks meet, and no rank
/// signals earlier.
#[test]
fn a_pad_is_clear_before_it_is_known() {
    both(
        3,
        || Pads::new(1),
        |pads, me| {
            pads.words[me].0.store(0, Ordering::Relaxed);
            pads.known[me].publish(1);
            while pads.known[1 - me].observe() != 1 {
                thread::yield_now();
            }
            pads.data[me].write(7);
            pads.meet(me);
            assert_eq!(pads.data[1 - me].read(), 7);
        },
    );
}
