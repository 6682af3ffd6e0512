//! The shared-memory protocols under every interleaving that loom finds: `make loom`.
//!
//! Rings, the pipeline, the failure record, the pads, the slots of fused matmuls and the work items
//! of helpers run the crate's own code over loom's atomics. Arrival and doorbell are a few lines
//! each, repeated here.
#![cfg(loom)]
#![allow(missing_docs, clippy::unwrap_used)]

#[path = "loom/failure.rs"]
mod failure;
#[path = "loom/fused.rs"]
mod fused;
#[path = "loom/signals.rs"]
mod signals;
#[path = "loom/work_items.rs"]
mod work_items;

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicU64, Ordering, fence};
use loom::thread;
use symm::coll::cpu::pipeline::{self, ChunkOps, ResultSharing, StageClock};
use symm::coll::cuda::agreement::zero_copy::{self, ZeroCopyWords};
use symm::error::Result;
use symm::mem::layout::{INPUT_SLOTS, RESULT_SLOTS};
use symm::sync::flag::Flag;
use symm::sync::ring::{ByteRing, UNIT};

struct Word(AtomicU64);

impl Word {
    fn new() -> Self {
        Self(AtomicU64::new(0))
    }
}

impl Flag for Word {
    fn publish(&self, value: u64) {
        self.0.store(value, Ordering::Release);
    }
    fn observe(&self) -> u64 {
        self.0.load(Ordering::Acquire)
    }
}

/// A word for which loom reports conflicting accesses.
struct Cell(UnsafeCell<u64>);

// SAFETY: loom checks each access, which is the purpose of the tests.
unsafe impl Sync for Cell {}

impl Cell {
    fn new() -> Self {
        Self(UnsafeCell::new(0))
    }
    fn write(&self, value: u64) {
        // SAFETY: loom panics if another access overlaps.
        self.0.with_mut(|cell| unsafe { *cell = value });
    }
    fn read(&self) -> u64 {
        // SAFETY: as above.
        self.0.with(|cell| unsafe { *cell })
    }
}

fn words<const N: usize>() -> [Word; N] {
    std::array::from_fn(|_| Word::new())
}

fn cells<const N: usize>() -> [Cell; N] {
    std::array::from_fn(|_| Cell::new())
}

fn model(preemptions: usize, body: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(body);
}

/// Runs `body` as rank 0 and as rank 1, which share the value that `make` returns.
fn both<T: Send + Sync + 'static>(
    preemptions: usize,
    make: impl Fn() -> T + Send + Sync + 'static,
    body: impl Fn(&T, usize) + Clone + Send + Sync + 'static,
) {
    model(preemptions, move || {
        let shared = Arc::new(make());
        let (other, body_there) = (Arc::clone(&shared), body.clone());
        let thread = thread::spawn(move || body_there(&other, 1));
        body(&shared, 0);
        thread.join().unwrap();
    });
}

#[test]
fn a_ring_hands_over_every_frame_once_and_in_order() {
    const UNITS: u64 = 3;
    // Frame 2 does not fit before the end of the ring; frame 3 fits once frames 1 and 2 are read.
    const FRAMES: [u64; 3] = [2, 2, 1];
    struct Shared {
        tail: Word,
        head: Word,
        data: [Cell; UNITS as usize],
    }
    fn produce(ring: &ByteRing<'_, Word>, data: &[Cell]) {
        let mut tail = 0;
        for (number, units) in (1..).zip(FRAMES) {
            let room = loop {
                match ring.reserve(tail, units * UNIT) {
                    Some(room) => break room,
                    None => thread::yield_now(),
                }
            };
            if let Some(place) = room.padding {
                data[(place / UNIT) as usize].write(0);
            }
            // Each frame is published unit by unit.
            for unit in 0..units {
                data[(room.place / UNIT + unit) as usize].write(number);
                tail = room.tail - (units - 1 - unit) * UNIT;
                ring.publish(tail);
            }
        }
    }
    fn consume(ring: &ByteRing<'_, Word>, data: &[Cell]) {
        let mut head = 0;
        for (number, units) in (1..).zip(FRAMES) {
            let place = loop {
                match ring.oldest(head) {
                    Some(place) if data[(place / UNIT) as usize].read() == 0 => {
                        head += UNITS * UNIT - place
                    }
                    Some(place) => break place,
                    None => thread::yield_now(),
                }
            };
            for unit in 0..units {
                while ring.tail.observe() <= head + unit * UNIT {
                    thread::yield_now();
                }
                assert_eq!(data[(place / UNIT + unit) as usize].read(), number);
            }
            head += units * UNIT;
            ring.release(head);
        }
    }
    let make = || Shared { tail: Word::new(), head: Word::new(), data: cells() };
    both(3, make, |Shared { tail, head, data }, rank| {
        let ring = ByteRing { tail, head, capacity: UNITS * UNIT };
        if rank == 0 { consume(&ring, data) } else { produce(&ring, data) }
    });
}

const RANKS: usize = 2;

struct Group {
    stages: [Word; RANKS],
    posts: [[Word; 2]; RANKS],
    posted: [[Cell; 2]; RANKS],
    inputs: [[Cell; INPUT_SLOTS]; RANKS],
    results: [[Cell; RESULT_SLOTS]; RANKS],
}

fn group() -> Group {
    Group {
        stages: words(),
        posts: [(); RANKS].map(|()| words()),
        posted: [(); RANKS].map(|()| cells()),
        inputs: [(); RANKS].map(|()| cells()),
        results: [(); RANKS].map(|()| cells()),
    }
}

/// As in `coll::cpu::arrival`: write the data, then the flag; wait for all flags; read all ranks'
/// data.
fn arrive(group: &Group, me: usize, seq: u64, value: u64) -> u64 {
    let parity = (seq % 2) as usize;
    group.posted[me][parity].write(value);
    group.posts[me][parity].publish(seq);
    let peer = 1 - me;
    while group.posts[peer][parity].observe() != seq {
        thread::yield_now();
    }
    group.posted[peer][parity].read() + value
}

#[test]
fn two_parities_suffice_for_posts() {
    both(3, group, |group, me| {
        (1..=3).for_each(|seq| assert_eq!(arrive(group, me, seq, [1, 10][me] * seq), 11 * seq))
    });
}

struct Stages<'a> {
    group: &'a Group,
    me: usize,
    stage: u64,
}

impl StageClock for Stages<'_> {
    fn stage(&self) -> u64 {
        self.stage
    }
    fn tick(&mut self) {
        self.stage += 1;
        self.group.stages[self.me].publish(self.stage);
    }
    fn wait_for(&mut self, stage: u64) -> Result<()> {
        while self.group.stages[1 - self.me].observe() < stage {
            thread::yield_now();
        }
        Ok(())
    }

    fn check_abort(&mut self) -> Result<()> {
        Ok(())
    }
}

struct Sum<'a> {
    group: &'a Group,
    me: usize,
    phases: ResultSharing,
    base: u64,
}

impl Sum<'_> {
    fn input(&self, rank: usize, t: u64) -> u64 {
        self.base + t + 100 * rank as u64
    }
}

impl ChunkOps for Sum<'_> {
    fn produce(&mut self, t: u64, slot: usize) {
        self.group.inputs[self.me][slot].write(self.input(self.me, t));
    }
    fn consume(&mut self, t: u64, slot: usize, result: usize) {
        let theirs = self.group.inputs[1 - self.me][slot].read();
        assert_eq!(theirs, self.input(1 - self.me, t));
        if self.phases == ResultSharing::Two {
            self.group.results[self.me][result].write(theirs + self.input(self.me, t));
        }
    }
    fn finish(&mut self, t: u64, result: usize) {
        assert_eq!(self.group.results[1 - self.me][result].read(), 2 * (self.base + t) + 100);
    }
}

/// Two calls back to back: the first has more stages than slots, the second a single chunk.
fn two_calls(group: &Group, me: usize) {
    let mut stage = 0;
    for (seq, (phases, count)) in
        [(ResultSharing::Two, 3), (ResultSharing::One, 1)].into_iter().enumerate()
    {
        arrive(group, me, seq as u64 + 1, 1);
        let mut clock = Stages { group, me, stage };
        let mut sum = Sum { group, me, phases, base: 1000 * seq as u64 };
        pipeline::run(&mut clock, phases, count, &mut sum).unwrap();
        stage = clock.stage;
    }
}

#[test]
fn three_input_slots_and_two_result_slots_suffice() {
    both(2, group, two_calls);
}

/// As in `sync::doorbell`: a sleeper announces itself and checks again; a publisher writes and
/// checks for sleepers.
#[test]
fn a_publisher_sees_the_sleeper_or_the_sleeper_sees_the_flag() {
    model(3, || {
        let (flag, sleepers) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
        let (flag_there, sleepers_there) = (Arc::clone(&flag), Arc::clone(&sleepers));
        let publisher = thread::spawn(move || {
            flag_there.store(1, Ordering::Release);
            fence(Ordering::SeqCst);
            sleepers_there.load(Ordering::Relaxed) > 0
        });
        sleepers.fetch_add(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        let seen = flag.load(Ordering::Acquire) == 1;
        let rung = publisher.join().unwrap();
        assert!(seen || rung, "the sleeper would sleep and nobody would wake it");
    });
}

/// Two ranks launch, and the second requests symmetric memory at some point: both make the same
/// decision for every launch.
#[test]
fn ranks_agree_from_which_launch_on_kernels_are_zero_copy() {
    const LAUNCHES: u64 = 2;
    struct Words {
        handshake: AtomicU64,
        launched: [AtomicU64; 2],
    }
    struct Seen<'a> {
        words: &'a Words,
        me: usize,
    }
    impl ZeroCopyWords for Seen<'_> {
        fn word(&self) -> u64 {
            self.words.handshake.load(Ordering::Acquire)
        }
        fn exchange(&self, from: u64, to: u64) -> bool {
            self.words
                .handshake
                .compare_exchange(from, to, Ordering::SeqCst, Ordering::Relaxed)
                .is_ok()
        }
        fn most_launched(&self) -> u64 {
            fence(Ordering::SeqCst);
            self.words.launched[1 - self.me].load(Ordering::Acquire)
        }
        fn wait(&self, _: u32, ready: &dyn Fn() -> bool) -> Result<()> {
            while !ready() {
                thread::yield_now();
            }
            Ok(())
        }
        fn wake(&self) {}
    }
    fn run(words: &Words, me: usize, wants: u64) -> Vec<bool> {
        let seen = Seen { words, me };
        let one = |number| {
            seen.words.launched[me].store(number, Ordering::Release);
            fence(Ordering::SeqCst);
            zero_copy::decide(&seen, me as u32, number, number >= wants).unwrap()
        };
        (1..=LAUNCHES).map(one).collect()
    }
    for wants in [[LAUNCHES + 1, 1], [LAUNCHES + 1, 2], [2, 1]] {
        model(3, move || {
            let words = Arc::new(Words {
                handshake: AtomicU64::new(0),
                launched: [AtomicU64::new(0), AtomicU64::new(0)],
            });
            let other = Arc::clone(&words);
            let thread = thread::spawn(move || run(&other, 1, wants[1]));
            let (mine, theirs) = (run(&words, 0, wants[0]), thread.join().unwrap());
            assert_eq!(mine, theirs);
            assert!(mine.is_sorted());
        });
    }
}
