//! How calls end when they fail: one failure wins, and no rank that arrived is missed.

use super::{Word, model};
use loom::sync::Arc;
use loom::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};
use loom::thread;
use symm::error::Error;
use symm::rank::Rank;
use symm::sync::atomic::Atomic;
use symm::sync::failure::{FailureState, FirstFailure};
use symm::sync::final_check::lost;
use symm::sync::flag::Flag;

pub(super) struct Thirty2(pub(super) AtomicU32);
pub(super) struct SixtyFour(pub(super) AtomicU64);
struct Eight(AtomicU8);

macro_rules! atomic {
    ($name:ty => $value:ty) => {
        impl Atomic<$value> for $name {
            fn load(&self, order: Ordering) -> $value {
                self.0.load(order)
            }
            fn store(&self, value: $value, order: Ordering) {
                self.0.store(value, order);
            }
            fn compare_exchange(
                &self,
                current: $value,
                new: $value,
                success: Ordering,
                failure: Ordering,
            ) -> Result<$value, $value> {
                self.0.compare_exchange(current, new, success, failure)
            }
        }
    };
}

atomic!(Thirty2 => u32);
atomic!(SixtyFour => u64);
atomic!(Eight => u8);

type Record = FirstFailure<Thirty2, Eight, 2>;

fn record() -> Record {
    FirstFailure::blank(|value| Thirty2(AtomicU32::new(value)), |value| Eight(AtomicU8::new(value)))
}

fn read(record: &Record, reader: u32) -> Option<Error> {
    loop {
        match record.look(Rank(reader)) {
            FailureState::None => return None,
            FailureState::Writing => thread::yield_now(),
            FailureState::Written(error) => return Some(error),
        }
    }
}

/// Two ranks fail at once: they and a third rank read the same complete message.
#[test]
fn of_two_failures_one_stands() {
    model(3, || {
        let shared = Arc::new(record());
        let fail = |rank: u32, text: &'static str| {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                shared.record(Rank(rank), &Error::peer(text));
                shared.look(Rank(rank))
            })
        };
        let (one, other) = (fail(1, "ab"), fail(2, "cd"));
        let early = shared.look(Rank(0));
        let looks = [early, one.join().unwrap(), other.join().unwrap()];
        let stands = read(&shared, 0).unwrap();
        assert!(stands.message == "ab" || stands.message == "cd", "torn: {stands}");
        assert!(
            looks
                .into_iter()
                .all(|look| !matches!(look, FailureState::Written(error) if error != stands))
        );
    });
}

/// A rank aborts while its peer's last post is in progress. The waiter succeeds with the post or
/// fails with the abort. Later readers of the record find the abort: another rank's success does
/// not remove it.
#[test]
fn a_call_ends_by_its_peer_or_by_the_abort() {
    model(3, || {
        let shared = Arc::new((Word::new(), record()));
        let (poster, aborter) = (Arc::clone(&shared), Arc::clone(&shared));
        let post = thread::spawn(move || poster.0.publish(1));
        let abort = thread::spawn(move || aborter.1.record(Rank(2), &Error::aborted("ab")));
        let missing = || shared.0.observe() != 1;
        let outcome = loop {
            if !missing() {
                break Ok(());
            }
            if let Some(error) = lost(missing, || read(&shared.1, 0)) {
                break Err(error);
            }
            thread::yield_now();
        };
        post.join().unwrap();
        abort.join().unwrap();
        if let Err(error) = outcome {
            assert_eq!(error, Error::peer("ab"));
        }
        assert_eq!(read(&shared.1, 0), Some(Error::peer("ab")));
    });
}

/// A peer posts, then leaves or exits: a rank that waits for the post gets it, even if it sees the
/// absence first. The next post never arrives, and the absence ends that wait.
#[test]
fn a_peer_that_came_before_it_left_is_not_missed() {
    model(3, || {
        let shared = Arc::new((Word::new(), Word::new()));
        let peer = Arc::clone(&shared);
        let leaving = thread::spawn(move || {
            peer.0.publish(1);
            peer.1.publish(1);
        });
        let wait = |call: u64| {
            loop {
                let missing = || shared.0.observe() < call;
                if !missing() {
                    return Ok(());
                }
                if let Some(gone) = lost(missing, || (shared.1.observe() == 1).then_some("gone")) {
                    return Err(gone);
                }
                thread::yield_now();
            }
        };
        assert_eq!(wait(1), Ok(()));
        assert_eq!(wait(2), Err("gone"));
        leaving.join().unwrap();
    });
}
