//! A signal request: the arguments that its kernel reads, and the report that the kernel writes
//! when the request times out.

use crate::coll::cuda::arguments::{self, MAX_PEERS};
use crate::error::{Error, Result};
use crate::rank::Rank;
use std::fmt;
use std::time::Duration;

/// A signal that a rank sends, waits for, or both, in one slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signal {
    /// Sends a signal to a rank, once that rank has taken the previous one.
    Put(Rank),
    /// Waits for the signal of a rank and takes it.
    Wait(Rank),
    /// Sends a signal to every peer and takes theirs.
    Barrier,
}

/// The peers' pads, and the deadline and report of a signal.
#[derive(Clone, Copy, Debug)]
pub struct SignalTargets<'a> {
    /// This rank's number.
    pub me: Rank,
    /// Pad of each rank, as mapped in this process.
    pub pads: &'a [u64],
    /// Slot in the pads, which is torch's `channel`: signals pair up within a slot.
    pub slot: u32,
    /// How long the kernel waits.
    pub timeout: Duration,
    /// Device address of a word that is not 0 once the group has failed.
    pub stop: u64,
    /// Device address of the report: [`REPORT_WORDS`] words.
    pub report: u64,
}

/// Length of a report: a [`SignalTimeout`], and the milliseconds of the wait.
pub const REPORT_WORDS: usize = 2;
/// Number of slots that a report can name.
const SLOTS: u32 = 1 << (KIND_BIT - SLOT_BIT);
const SLOT_BIT: u32 = MAX_PEERS as u32;
const KIND_BIT: u32 = 30;
/// A report without a signal: the host stores it to make waiting kernels end.
pub(super) const CLOSED: u32 = 1;

impl Signal {
    /// Returns the kernel's arguments, or `None` if there is nothing to do.
    pub fn args(self, place: &SignalTargets<'_>) -> Result<Option<arguments::SignalArgs>> {
        let n = place.pads.len();
        if n > MAX_PEERS {
            return Err(Error::value(format!(
                "{n} ranks cannot signal each other between GPUs; {MAX_PEERS} is the most"
            )));
        }
        if place.slot >= SLOTS {
            return Err(Error::value(format!(
                "channel {} is out of range; the last one is {}",
                place.slot,
                SLOTS - 1
            )));
        }
        let bit = |rank: Rank| {
            if rank.index() < n { Ok(1 << rank.0) } else { Err(out_of_range(rank, n)) }
        };
        let everybody = (1u32 << n) - 1;
        let (kind, put, wait) = match self {
            Signal::Put(peer) => (1, bit(peer)?, 0),
            Signal::Wait(peer) => (2, 0, bit(peer)?),
            Signal::Barrier => (3, everybody & !bit(place.me)?, everybody & !bit(place.me)?),
        };
        let mut pads = [0; MAX_PEERS];
        pads[..n].copy_from_slice(place.pads);
        Ok((put | wait != 0).then_some(arguments::SignalArgs {
            pads,
            stop: place.stop,
            report: place.report,
            timeout: u64::try_from(place.timeout.as_nanos()).unwrap_or(u64::MAX),
            slot: place.slot * n as u32,
            record: kind << KIND_BIT | place.slot << SLOT_BIT,
            put,
            wait,
        }))
    }
}

fn out_of_range(rank: Rank, n: usize) -> Error {
    Error::value(format!("rank {rank} is outside the group of {n} ranks"))
}

/// A signal that timed out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SignalTimeout {
    name: &'static str,
    slot: u32,
    /// Ranks that did not signal in time, or did not take the previous signal.
    pub missing: Vec<Rank>,
}

impl SignalTimeout {
    /// Reads the first word of a report; `None` if no signal has timed out.
    pub fn read(word: u32) -> Option<Self> {
        let name = match word >> KIND_BIT {
            1 => "put_signal",
            2 => "wait_signal",
            3 => "barrier",
            _ => return None,
        };
        let missing =
            (0..MAX_PEERS as u32).filter(|rank| word >> rank & 1 != 0).map(Rank).collect();
        Some(Self { name, slot: word >> SLOT_BIT & (SLOTS - 1), missing })
    }
}

impl fmt::Display for SignalTimeout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} on channel {}", self.name, self.slot)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(pads: &[u64], slot: u32) -> SignalTargets<'_> {
        SignalTargets {
            me: Rank(1),
            pads,
            slot,
            timeout: Duration::from_millis(1500),
            stop: 7,
            report: 9,
        }
    }

    #[test]
    fn a_signal_names_its_words_and_peers() {
        let pads = [10, 20, 30];
        let args = |signal: Signal| {
            signal.args(&place(&pads, 5)).expect("valid").expect("something to do")
        };
        let put = args(Signal::Put(Rank(2)));
        assert_eq!((put.put, put.wait, put.slot, put.timeout), (0b100, 0, 15, 1_500_000_000));
        assert_eq!((&put.pads[..4], put.stop, put.report), (&[10, 20, 30, 0][..], 7, 9));
        let wait = args(Signal::Wait(Rank(0)));
        assert_eq!((wait.put, wait.wait), (0, 1));
        let barrier = args(Signal::Barrier);
        assert_eq!((barrier.put, barrier.wait), (0b101, 0b101));
    }

    #[test]
    fn a_barrier_of_one_has_nothing_to_do() {
        let alone = SignalTargets { me: Rank(0), ..place(&[10], 0) };
        assert!(Signal::Barrier.args(&alone).expect("valid").is_none());
        assert!(Signal::Put(Rank(0)).args(&alone).expect("valid").is_some());
    }

    #[test]
    fn what_is_out_of_range_is_refused_by_name() {
        let many = "9 ranks cannot signal each other between GPUs; 8 is the most";
        let channel = "channel 4194304 is out of range; the last one is 4194303";
        for (signal, ranks, slot, why) in [
            (Signal::Barrier, 9, 0, many),
            (Signal::Put(Rank(3)), 3, 0, "rank 3 is outside the group of 3 ranks"),
            (Signal::Wait(Rank(40)), 3, 0, "rank 40 is outside the group of 3 ranks"),
            (Signal::Barrier, 2, SLOTS, channel),
        ] {
            let error = signal.args(&place(&[1; 9][..ranks], slot)).expect_err("out of range");
            assert_eq!(error.message, why);
        }
    }

    #[test]
    fn a_report_is_read_as_it_was_prepared() {
        for (signal, name) in [
            (Signal::Put(Rank(0)), "put_signal"),
            (Signal::Wait(Rank(0)), "wait_signal"),
            (Signal::Barrier, "barrier"),
        ] {
            for slot in [0, 77, SLOTS - 1] {
                let args =
                    signal.args(&place(&[1; 8], slot)).expect("valid").expect("something to do");
                let gave_up = SignalTimeout::read(args.record | 0b1000_0100).expect("a report");
                assert_eq!(gave_up, SignalTimeout { name, slot, missing: vec![Rank(2), Rank(7)] });
                assert_eq!(gave_up.to_string(), format!("{name} on channel {slot}"));
            }
        }
        assert_eq!((SignalTimeout::read(0), SignalTimeout::read(CLOSED)), (None, None));
    }
}
