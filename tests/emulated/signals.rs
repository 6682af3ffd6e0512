//! Signals between GPUs on host threads: no signal is lost, pads are zero afterwards, and a missing
//! rank is named in time.

use crate::host::at_once;
use crate::program::Program;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};
use symm::kernels::cuda::driver::Grid;
use symm::rank::Rank;
use symm::window::signal_cuda::{REPORT_WORDS, Signal, SignalTargets, SignalTimeout};

const SLOTS: usize = 8;
/// Longer than any test takes on a busy node.
const PATIENCE: Duration = Duration::from_secs(60);
/// Timeout of tests in which a rank is missing.
const SHORT: Duration = Duration::from_millis(300);

/// A group whose GPUs are threads.
struct Host {
    n: usize,
    program: Program,
    pads: Vec<Vec<AtomicU32>>,
    reports: Vec<[AtomicU32; REPORT_WORDS]>,
    stop: AtomicU32,
    timeout: Duration,
}

impl Host {
    fn new(n: usize, timeout: Duration) -> Self {
        let program = Program::build("signal/signal", n as u32, None, None);
        let pads = (0..n).map(|_| (0..SLOTS * n).map(|_| AtomicU32::new(0)).collect()).collect();
        Self {
            n,
            program,
            pads,
            reports: (0..n).map(|_| Default::default()).collect(),
            stop: AtomicU32::new(0),
            timeout,
        }
    }

    /// Returns when the kernel has ended.
    fn run(&self, me: usize, signal: Signal, slot: u32) {
        let pads: Vec<u64> = self.pads.iter().map(|pad| pad.as_ptr() as u64).collect();
        let (stop, report) = (self.stop.as_ptr() as u64, self.reports[me].as_ptr() as u64);
        let place = SignalTargets {
            me: Rank(me as u32),
            pads: &pads,
            slot,
            timeout: self.timeout,
            stop,
            report,
        };
        let args = signal.args(&place).unwrap().expect("something to do");
        // SAFETY: pads, reports and the stop word outlive the launch and are written only as
        // atomics.
        unsafe { self.program.launch("signal", me as u32, Grid::new(1, 8), args.bytes()) };
    }

    /// The word that `source` sets in the pad of `rank`.
    fn word(&self, rank: usize, slot: usize, source: usize) -> &AtomicU32 {
        &self.pads[rank][slot * self.n + source]
    }

    fn reported(&self, me: usize) -> Option<SignalTimeout> {
        SignalTimeout::read(self.reports[me][0].load(Ordering::Acquire))
    }

    /// Returns true if no kernel has timed out and no signal is left.
    fn is_well(&self) -> bool {
        let zero = |words: &[AtomicU32]| words.iter().all(|word| word.load(Ordering::Acquire) == 0);
        self.pads.iter().all(|pad| zero(pad)) && self.reports.iter().all(|report| zero(report))
    }
}

#[test]
fn ping_pong_carries_what_was_written_before() {
    const ROUNDS: u32 = 200;
    let (host, ball) = (&Host::new(2, PATIENCE), &AtomicU32::new(0));
    at_once(0..2, |rank| {
        let me = rank as u32;
        let peer = Rank(1 - me);
        for round in 0..ROUNDS {
            if me == 1 {
                host.run(1, Signal::Wait(peer), 3);
            }
            assert_eq!(ball.load(Ordering::Relaxed), 2 * round + me);
            ball.store(2 * round + me + 1, Ordering::Relaxed);
            host.run(rank, Signal::Put(peer), 3);
            if me == 0 {
                host.run(0, Signal::Wait(peer), 3);
            }
        }
    });
    assert!(host.is_well());
}

#[test]
fn a_put_waits_until_the_last_one_was_taken() {
    let (host, taking) = (&Host::new(2, PATIENCE), &AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(move || {
            host.run(0, Signal::Put(Rank(1)), 0);
            // A different slot is not delayed.
            host.run(0, Signal::Put(Rank(1)), 1);
            host.run(0, Signal::Put(Rank(1)), 0);
            assert!(taking.load(Ordering::Relaxed), "the second put overtook the first wait");
        });
        std::thread::sleep(Duration::from_millis(50));
        taking.store(true, Ordering::Relaxed);
        for slot in [0, 0, 1] {
            host.run(1, Signal::Wait(Rank(0)), slot);
        }
    });
    assert!(host.is_well());
}

#[test]
fn a_rank_may_signal_itself() {
    let host = Host::new(1, PATIENCE);
    for _ in 0..3 {
        host.run(0, Signal::Put(Rank(0)), 2);
        assert_eq!(host.word(0, 2, 0).load(Ordering::Acquire), 1);
        host.run(0, Signal::Wait(Rank(0)), 2);
    }
    assert!(host.is_well());
}

/// Barriers in two slots at the same time, as on two streams; ranks run ahead and fall behind.
fn barriers(n: usize, rounds: u32) {
    let host = &Host::new(n, PATIENCE);
    let arrived: &Vec<[AtomicU32; 2]> = &(0..n).map(|_| Default::default()).collect();
    at_once(0..2 * n, |thread| {
        let (me, stream) = (thread / 2, thread % 2);
        for round in 1..=rounds {
            if (round as usize * 7 + me * 3 + stream).is_multiple_of(11) {
                std::thread::sleep(Duration::from_millis(2));
            }
            arrived[me][stream].store(round, Ordering::Relaxed);
            host.run(me, Signal::Barrier, [0, 5][stream]);
            for (peer, arrived) in arrived.iter().enumerate() {
                let seen = arrived[stream].load(Ordering::Relaxed);
                assert!(
                    seen == round || seen == round + 1,
                    "rank {me} left barrier {round}, rank {peer} is in {seen}, of {n}"
                );
            }
        }
    });
    assert!(host.is_well(), "{n} ranks");
}

tests! {
    barriers_of_two_ranks: barriers(2, 150),
    barriers_of_three_ranks: barriers(3, 100),
    barriers_of_four_ranks: barriers(4, 60),
    barriers_of_eight_ranks: barriers(8, 20),
}

/// Other kernels may change the words of the same slot by compare-exchange.
#[test]
fn a_slot_is_shared_with_whoever_swaps_its_words() {
    let host = &Host::new(2, PATIENCE);
    let swap = |word: &AtomicU32, from: u32| {
        let begun = Instant::now();
        while word.compare_exchange(from, 1 - from, Ordering::AcqRel, Ordering::Relaxed).is_err() {
            assert!(begun.elapsed() < PATIENCE, "the word does not become {from}");
            std::thread::yield_now();
        }
    };
    at_once(0..2, |me| {
        let peer = 1 - me;
        for round in 0..60 {
            if (round / (me + 1)) % 2 == 0 {
                host.run(me, Signal::Barrier, 4);
            } else {
                swap(host.word(peer, 4, me), 0);
                swap(host.word(me, 4, peer), 1);
            }
        }
    });
    assert!(host.is_well());
}

/// Runs `signal` on each of `ranks`, where it must time out and report `what` and `missing`.
fn gives_up(host: &Host, ranks: &[usize], signal: Signal, slot: u32, what: &str, missing: &[u32]) {
    let begun = Instant::now();
    at_once(ranks.iter().copied(), |me| host.run(me, signal, slot));
    let seconds = begun.elapsed();
    assert!(seconds >= host.timeout && seconds < Duration::from_secs(20), "{seconds:?}");
    for &me in ranks {
        assert_eq!(host.reports[me][1].load(Ordering::Relaxed), host.timeout.as_millis() as u32);
        let reported = host.reported(me).expect("a report");
        let named: Vec<u32> = reported.missing.iter().map(|rank| rank.0).collect();
        assert_eq!(
            (reported.to_string(), &named[..]),
            (format!("{what} on channel {slot}"), missing),
            "rank {me}"
        );
    }
}

#[test]
fn all_who_do_not_come_to_a_barrier_are_named() {
    for (n, absent) in [(2, &[1][..]), (4, &[2]), (8, &[4]), (5, &[0, 2, 4])] {
        let host = Host::new(n, SHORT);
        let here = |rank: &usize| !absent.contains(&(*rank as u32));
        let ranks: Vec<usize> = (0..n).filter(here).collect();
        gives_up(&host, &ranks, Signal::Barrier, 6, "barrier", absent);
        // All words are zero, except for the signals to the missing ranks.
        for rank in 0..n {
            let left: u32 = host.pads[rank].iter().map(|word| word.load(Ordering::Acquire)).sum();
            let expected = if here(&rank) { 0 } else { ranks.len() };
            assert_eq!(left as usize, expected, "pad of rank {rank} of {n}");
        }
    }
}

/// A rank that cannot send to one peer has sent to the others, which must not report it as missing.
#[test]
fn a_signal_that_was_not_taken_holds_up_no_other() {
    let host = Host::new(3, SHORT);
    host.word(2, 0, 0).store(1, Ordering::Release);
    gives_up(&host, &[0, 1], Signal::Barrier, 0, "barrier", &[2]);
}

#[test]
fn a_signal_that_is_not_sent_or_not_taken_is_named() {
    let host = Host::new(3, SHORT);
    gives_up(&host, &[1], Signal::Wait(Rank(2)), 7, "wait_signal", &[2]);
    host.run(0, Signal::Put(Rank(1)), 2);
    assert_eq!(host.reported(0), None);
    gives_up(&host, &[0], Signal::Put(Rank(1)), 2, "put_signal", &[1]);
    assert_eq!(host.word(1, 2, 0).load(Ordering::Acquire), 1);
}

#[test]
fn after_one_gave_up_no_other_waits() {
    let host = Host::new(2, PATIENCE);
    host.reports[0][0].store(1, Ordering::Release);
    let begun = Instant::now();
    host.run(0, Signal::Barrier, 0);
    assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
    assert_eq!(
        (host.reports[0][0].load(Ordering::Acquire), host.reports[0][1].load(Ordering::Acquire)),
        (1, 0)
    );
}

// proves P21
#[test]
fn a_group_that_has_failed_ends_the_wait_without_a_report() {
    let host = &Host::new(2, PATIENCE);
    let begun = Instant::now();
    std::thread::scope(|scope| {
        scope.spawn(move || host.run(0, Signal::Wait(Rank(1)), 0));
        std::thread::sleep(Duration::from_millis(50));
        host.stop.store(1, Ordering::Release);
    });
    assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
    assert!(host.is_well());
}
