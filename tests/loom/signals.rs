//! Signal pads on CPU: the next barrier may use a barrier's words at once, and a reused pad is
//! cleared before any rank may set its words.

use super::failure::Thirty2;
use super::{Cell, Word, model};
use loom::sync::Arc;
use loom::sync::atomic::{AtomicU32, Ordering};
use loom::thread;
use symm::error::Result;
use symm::rank::Rank;
use symm::sync::flag::Flag;
use symm::window::signal_host::{Words, meet};

/// Two ranks: a word in each one's pad, data, and the flag that publishes a pad.
struct Pads {
    words: [Thirty2; 2],
    data: [Cell; 2],
    known: [Word; 2],
}

impl Pads {
    fn new(stale: u32) -> Arc<Self> {
        let word = |_| Thirty2(AtomicU32::new(stale));
        Arc::new(Self {
            words: [0, 1].map(word),
            data: [Cell::new(), Cell::new()],
            known: [Word::new(), Word::new()],
        })
    }

    /// Runs `body` as both ranks.
    fn run(stale: u32, body: fn(&Side)) {
        let pads = Self::new(stale);
        let other = Side { pads: Arc::clone(&pads), me: 1 };
        let thread = thread::spawn(move || body(&other));
        body(&Side { pads, me: 0 });
        thread.join().unwrap();
    }
}

struct Side {
    pads: Arc<Pads>,
    me: usize,
}

impl Words for Side {
    type Word = Thirty2;
    fn peers(&self) -> impl Iterator<Item = Rank> {
        std::iter::once(Rank(1 - self.me as u32))
    }
    fn outward(&self, peer: Rank) -> &Thirty2 {
        &self.pads.words[peer.index()]
    }
    fn inward(&self, _: Rank) -> &Thirty2 {
        &self.pads.words[self.me]
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
    model(3, || {
        Pads::run(0, |side| {
            for round in 1..=2 {
                side.pads.data[side.me].write(round);
                meet(side).unwrap();
                assert_eq!(side.pads.data[1 - side.me].read(), round);
                meet(side).unwrap();
            }
        });
    });
}

/// A reused pad may hold an old signal: its owner clears it before the ranks meet, and no rank
/// signals earlier.
#[test]
fn a_pad_is_clear_before_it_is_known() {
    model(3, || {
        Pads::run(1, |side| {
            side.pads.words[side.me].0.store(0, Ordering::Relaxed);
            side.pads.known[side.me].publish(1);
            while side.pads.known[1 - side.me].observe() != 1 {
                thread::yield_now();
            }
            side.pads.data[side.me].write(7);
            meet(side).unwrap();
            assert_eq!(side.pads.data[1 - side.me].read(), 7);
        });
    });
}
