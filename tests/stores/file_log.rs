//! The reader of a file store's log with damaged and meaningless input.
//!
//! `SYMM_FUZZ_LOGS=1000000 cargo test --release --test stores file_log` tries more than the usual
//! number of logs.

use crate::logs::{contents, expected, log_of, program};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use symm::error::{Error, ErrorKind, Result};
use symm::store::file::log::Replica;
use symm::store::table::TableResult;

const FRONT: usize = 80;
const RECORD: usize = 12;

/// Counts a thread's allocations.
struct Counting;

thread_local! {
    static HELD: Cell<usize> = const { Cell::new(0) };
    static PEAK: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: every request is passed on to `System` unchanged; counting touches only cells that need
// no allocation.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        HELD.set(HELD.get().wrapping_add(layout.size()));
        PEAK.set(PEAK.get().max(HELD.get()));
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        HELD.set(HELD.get().saturating_sub(layout.size()));
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// Returns the reader's result for `bytes`, and its peak allocation.
fn load(bytes: &[u8]) -> (Result<Replica>, usize) {
    HELD.set(0);
    PEAK.set(0);
    let replica = Replica::load(bytes);
    (replica, PEAK.get())
}

fn contents_in(replica: &mut Replica) -> Vec<(String, Vec<u8>)> {
    contents(&mut |request| match replica.table.serve(request, None)? {
        TableResult::Done(reply) => Ok(reply),
        TableResult::Missing(_) => Err(Error::internal("missing")),
    })
}

#[test]
fn any_flipped_byte_is_an_error_or_changes_nothing() {
    let (log, expected) = (log_of(|store| program(store)), expected());
    let mut survived = 0;
    for at in 0..log.len() {
        for flip in 1..=255 {
            let mut damaged = log.clone();
            damaged[at] ^= flip;
            match Replica::load(&damaged[..]) {
                Ok(mut replica) => {
                    assert_eq!(contents_in(&mut replica), expected, "byte {at} ^ {flip:#x}");
                    survived += 1;
                }
                Err(error) => assert!(
                    error.kind == ErrorKind::Config && error.message.contains("at byte "),
                    "{error:?}"
                ),
            }
        }
    }
    // Either commit slot, 24 bytes each.
    assert_eq!(survived, 2 * 24 * 255);
}

#[test]
fn what_stands_behind_the_end_does_not_count_and_nothing_is_no_log() {
    let (log, expected) = (log_of(|store| program(store)), expected());
    assert!(
        Replica::load(&[][..]).is_err_and(|error| error.kind == ErrorKind::Config
            && error.message.contains("is damaged at byte 0"))
    );
    for tail in [&log[FRONT..], &[0; 100], &[0xff; 100], &log[..]] {
        assert_eq!(
            contents_in(&mut Replica::load(&[&log[..], tail].concat()[..]).unwrap()),
            expected
        );
    }
}

#[test]
fn records_longer_than_any_buffer_come_back() {
    let large: Vec<u8> = (0..300_000u32).map(|index| index as u8).collect();
    let log = log_of(|store| {
        store.set("small", b"1")?;
        store.set("large", &large)?;
        store.set("after", b"2")
    });
    let contents = contents_in(&mut Replica::load(&log[..]).unwrap());
    assert_eq!(
        contents,
        [("after".into(), b"2".to_vec()), ("large".into(), large), ("small".into(), b"1".to_vec())]
    );
}

/// xorshift64*
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) as usize % bound.max(1)
    }
}

fn mutate(random: &mut Random, log: &mut Vec<u8>) {
    if log.is_empty() {
        return;
    }
    let (at, other) = (random.below(log.len()), random.below(log.len()));
    let count = random.below(40).min(log.len() - at.max(other));
    match random.below(7) {
        0 => log[at] = random.below(256) as u8,
        1 => log[at] ^= 1 << random.below(8),
        2 => log.copy_within(at..at + count, other),
        3 => drop(log.drain(at..at + count)),
        4 => {
            let piece = log[at..at + count].to_vec();
            drop(log.splice(other..other, piece));
        }
        5 => log.truncate(at),
        // A number: a length, a count of keys, a position.
        _ => {
            let number = [0u32, 1, 12, 0xffff, 0x1_0000, 0x0800_0000, 0x7fff_ffff, u32::MAX]
                [random.below(8)];
            let count = (log.len() - at).min(4);
            log[at..at + count].copy_from_slice(&number.to_le_bytes()[..count]);
        }
    }
}

fn crc(before: u32, bytes: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new_with_initial(before);
    hasher.update(bytes);
    hasher.finalize()
}

/// Gives a log valid checksums, so that its content is accepted.
fn seal(log: &mut [u8]) {
    if log.len() < FRONT {
        return;
    }
    let sum = crc(0, &log[..28]).to_le_bytes();
    log[28..32].copy_from_slice(&sum);
    let run = crc(0, &log[12..28]);
    let (mut at, mut records, mut chain) = (FRONT, 0u64, run);
    while let Some(header) = log.get(at..at + RECORD) {
        let length = u32::from_le_bytes(header[..4].try_into().unwrap()) as usize;
        let Some(payload) = log.get(at + RECORD..at.saturating_add(RECORD + length)) else { break };
        chain = crc(chain, payload);
        log[at + 4..at + 8].copy_from_slice(&chain.to_le_bytes());
        let sum = crc(0, &log[at..at + 8]).to_le_bytes();
        log[at + 8..at + RECORD].copy_from_slice(&sum);
        at += RECORD + length;
        records += 1;
    }
    let mut slot =
        [&(at as u64).to_le_bytes()[..], &records.to_le_bytes(), &chain.to_le_bytes()].concat();
    slot.extend(crc(run, &slot).to_le_bytes());
    log[32..56].copy_from_slice(&slot);
    log[56..80].copy_from_slice(&slot);
}

#[test]
fn no_bytes_make_the_reader_panic_or_allocate_without_bound() {
    let logs: u64 = std::env::var("SYMM_FUZZ_LOGS").map_or(5000, |text| text.parse().unwrap());
    let all = log_of(|store| program(store));
    let many =
        log_of(|store| (0..200).try_for_each(|index| store.set(&format!("key {index}"), &[7; 9])));
    let large = log_of(|store| store.set("large", &[1; 100_000]));
    let bases = [all, many, large];
    for base in &bases {
        let mut sealed = base.clone();
        seal(&mut sealed);
        assert!(Replica::load(&sealed[..]).is_ok(), "the test's own seal fits");
    }
    let mut random = Random(0x5eed_5eed_5eed_5eed);
    let mut read = 0;
    for _ in 0..logs {
        let mut log = bases[random.below(bases.len())].clone();
        for _ in 0..=random.below(6) {
            mutate(&mut random, &mut log);
        }
        if random.below(2) == 0 {
            seal(&mut log);
        }
        let (outcome, peak) = load(&log);
        assert!(peak <= 64 * log.len() + (256 << 10), "{peak} bytes for a log of {}", log.len());
        match outcome {
            Ok(_) => read += 1,
            Err(error) => assert_eq!(error.kind, ErrorKind::Config),
        }
    }
    assert!(read > logs / 10, "{read} of {logs} logs were read");
}
