//! Threads that copy and reduce a part of long calls, where cores are idle.
//!
//! One core reaches only a fraction of the memory bandwidth (`docs/measurements/cpu.md`). So a rank
//! that has more than one core divides each stage of a long call into [`WorkItems`], and any thread
//! that is free claims the next piece. A helper that does not start, because its core is busy,
//! delays nothing. A helper that loses its core within a piece delays the call; the ranks then do
//! without helpers for a while, as [`SpinBudget`] decides.
//!
//! Helpers belong to the process. After the last piece they poll for 200 µs, then sleep, and exit
//! after a second.
#![allow(
    unsafe_code,
    reason = "copies between the group's memory and the bytes of tensors, and a job that lives on \
        its owner's stack"
)]

use crate::coll::call::CallSpec;
use crate::config::Config;
use crate::control::spin_budget::{PATIENCE, SpinBudget, now};
use crate::dtype::SumOrder;
use crate::kernels::cpu::{self, InputElements, WriteMode};
use crate::lock::{lock, unpoisoned};
use crate::sync::work_items::WorkItems;
use crate::sys::fork::PerProcess;
use crate::sys::thread;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// Tensor size from which helper threads are woken; shorter calls finish before the helpers start.
const LONG: usize = 1 << 20;
/// Maximum number of threads that work on one call in one rank.
const MOST_THREADS: usize = 4;
/// Minimum size of a piece in bytes, and number of pieces for each thread.
const PIECE: usize = 16 << 10;
const PIECES: usize = 2;
/// How long a helper polls before it sleeps, and how long it sleeps before it exits.
const HELPER_SPIN: Duration = Duration::from_micros(200);
const IDLE_THREAD_TIMEOUT: Duration = Duration::from_secs(1);
/// Polls between two reads of the clock, and spin iterations before a thread that waits for a
/// helper yields.
const SPIN_TURNS: u32 = 64;
const SPINS: u32 = 2000;

/// Size of the largest group of this process; its ranks share the cores.
static RANKS: AtomicUsize = AtomicUsize::new(1);
static TEAM: PerProcess<HelperPool> = PerProcess::new(HelperPool::default);

/// The helpers of a process.
#[derive(Debug, Default)]
struct HelperPool {
    /// Held by the call that uses the helpers.
    owner: Mutex<()>,
    pieces: WorkItems<AtomicU64>,
    /// True if a piece has panicked.
    panicked: AtomicBool,
    state: Mutex<PoolState>,
    called: Condvar,
    patience: SpinBudget,
}

#[derive(Debug, Default)]
struct PoolState {
    threads: usize,
    asleep: usize,
    /// Number of calls so far that have asked for helpers.
    calls: u64,
}

/// The work of a stage on a range of its bytes: start and length.
type Work<'a> = dyn Fn(usize, usize) + Sync + 'a;

struct HelperJob<'a> {
    work: &'a Work<'a>,
    bytes: usize,
    /// Size of a piece in bytes.
    piece: usize,
}

impl HelperJob<'_> {
    fn run(&self, piece: u64) {
        let start = piece as usize * self.piece;
        (self.work)(start, self.piece.min(self.bytes - start));
    }
}

/// A copy of bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct CopyItem {
    to: usize,
    from: usize,
    bytes: usize,
}

impl CopyItem {
    pub(super) fn new(to: *mut u8, from: *const u8, bytes: usize) -> Self {
        Self { to: to.addr(), from: from.addr(), bytes }
    }
}

/// The helper threads that a call holds, if any.
#[derive(Debug)]
pub(super) struct Helpers {
    held: Option<MutexGuard<'static, ()>>,
    threads: usize,
}

/// Counts the ranks of a group among the ranks that share this node's cores.
pub(crate) fn note_ranks(ranks: usize) {
    RANKS.fetch_max(ranks, Ordering::Relaxed);
}

/// Returns the number of cores that this rank may use.
fn cores() -> usize {
    // The query takes as long as a short call.
    static CORES: AtomicUsize = AtomicUsize::new(0);
    match CORES.load(Ordering::Relaxed) {
        0 => {
            let cores = std::thread::available_parallelism().map_or(1, usize::from);
            CORES.store(cores, Ordering::Relaxed);
            cores
        }
        cores => cores,
    }
}

/// Returns true if ranks share cores, so that a rank that waits may have to yield its core to the
/// peer.
pub(super) fn shares_cores() -> bool {
    cores() < RANKS.load(Ordering::Relaxed)
}

/// Returns the number of threads for a call in each of `ranks` ranks on `cores` cores. If it is
/// more than two, one core stays free for other work.
fn threads(cores: usize, ranks: usize) -> usize {
    (cores / ranks).min(((cores - 1) / ranks).max(2)).clamp(1, MOST_THREADS)
}

/// Returns [`threads`] of this rank, from the cores that it may use.
fn usual_threads() -> usize {
    threads(cores(), RANKS.load(Ordering::Relaxed))
}

impl Helpers {
    /// Makes a value for the caller's thread only.
    pub(super) fn none() -> Self {
        Self { held: None, threads: 1 }
    }

    /// Returns the helpers for a call on tensors of `bytes` bytes.
    pub(super) fn of(bytes: usize) -> Self {
        if bytes < LONG {
            return Self::none();
        }
        let (wanted, team) = (Config::get().cpu_threads, TEAM.get());
        let threads = wanted.unwrap_or_else(usual_threads);
        // Ranks that lose time slices to other threads have no cores to spare.
        let crowded = || {
            PATIENCE.is_short(now) || PATIENCE.yields_to_peer(now) || team.patience.is_short(now)
        };
        if threads < 2 || wanted.is_none() && crowded() {
            return Self::none();
        }
        // Another group's call may hold the helpers.
        let Ok(held) = team.owner.try_lock() else { return Self::none() };
        team.call(threads - 1);
        Self { held: Some(held), threads }
    }

    /// Runs `work` on `bytes` bytes, which may be cut at multiples of 64; returns when all of it is
    /// done.
    fn share(&self, bytes: usize, work: &Work<'_>) {
        let piece = bytes.div_ceil(self.threads * PIECES).next_multiple_of(64).max(PIECE);
        if self.held.is_none() || bytes <= piece {
            return work(0, bytes);
        }
        TEAM.get().run(&HelperJob { work, bytes, piece }, bytes.div_ceil(piece) as u64);
    }

    /// Makes all of `copies`.
    ///
    /// # Safety
    /// As [`cpu::copy`], for each.
    pub(super) unsafe fn copy(&self, copies: &[CopyItem], store: WriteMode) {
        let all: usize = copies.iter().map(|copied| copied.bytes).sum();
        self.share(all, &|start, bytes| {
            let (end, mut before) = (start + bytes, 0);
            for copied in copies {
                let (from, to) = (start.max(before), end.min(before + copied.bytes));
                if from < to {
                    let (skipped, source) = (from - before, copied.from as *const u8);
                    // SAFETY: the caller's contract; skipped + (to - from) <= copied.bytes.
                    unsafe {
                        cpu::copy(
                            (copied.to as *mut u8).add(skipped),
                            source.add(skipped),
                            to - from,
                            store,
                        )
                    }
                }
                before += copied.bytes;
            }
        });
    }

    /// Reduces `bytes` bytes of `sources` to `dst` as `call` says, in `order`. With a `twin`, the
    /// result is also copied there with `store`; without one, `store` applies to `dst`.
    ///
    /// # Safety
    /// As [`cpu::reduce`]; `twin` is valid for writes of the same length and overlaps nothing else.
    pub(super) unsafe fn reduce(
        &self,
        (order, call): (SumOrder, &CallSpec),
        dst: *mut u8,
        sources: &[InputElements],
        bytes: usize,
        twin: Option<*mut u8>,
        store: WriteMode,
    ) {
        let all = ReduceItem { dst, sources, twin };
        self.share(bytes, &|start, bytes| {
            let all = &all;
            let later = |source: &InputElements| InputElements {
                ptr: source.ptr.wrapping_add(start),
                ..*source
            };
            let shifted: Vec<InputElements> =
                if start == 0 { Vec::new() } else { all.sources.iter().map(later).collect() };
            let (dst, sources) =
                (all.dst.wrapping_add(start), if start == 0 { all.sources } else { &shifted });
            reduce_chunk(
                (order, call),
                dst,
                sources,
                bytes,
                if all.twin.is_some() { WriteMode::Cached } else { store },
            );
            if let Some(twin) = all.twin {
                // SAFETY: the caller's contract; the bytes at `dst` were just written.
                unsafe { cpu::copy(twin.wrapping_add(start), dst, bytes, store) }
            }
        });
    }
}

/// Reduces `bytes` bytes of `sources` to `dst` on this thread, as [`Helpers::reduce`] does.
pub(super) fn reduce_chunk(
    (order, call): (SumOrder, &CallSpec),
    dst: *mut u8,
    sources: &[InputElements],
    bytes: usize,
    store: WriteMode,
) {
    // SAFETY: every caller passes memory of at least `bytes` bytes: spans whose validity the user
    // promises, or posts and slots of the segment whose bounds `ShmSegment::ptr` checked. The
    // caller has synchronised with their writers.
    unsafe {
        cpu::reduce_in(
            order,
            call.reduce_op,
            call.dtype,
            dst,
            sources,
            bytes / call.dtype.size(),
            store,
        )
    }
}

/// The memory of a reduction that is divided into pieces.
struct ReduceItem<'a> {
    dst: *mut u8,
    sources: &'a [InputElements],
    twin: Option<*mut u8>,
}

// SAFETY: the pointers are used on ranges that do not overlap, while the owner waits.
unsafe impl Sync for ReduceItem<'_> {}

impl HelperPool {
    /// Wakes `helpers` helpers, or starts them.
    #[inline(never)]
    fn call(&'static self, helpers: usize) {
        let mut state = lock(&self.state);
        state.calls += 1;
        let (calls, asleep) = (state.calls, state.asleep);
        while state.threads < helpers {
            // If the thread cannot start, the other threads claim its pieces.
            if thread::spawn("symm-helper", None, move || self.help(calls)).is_err() {
                break;
            }
            state.threads += 1;
        }
        drop(state);
        if asleep > 0 {
            self.called.notify_all();
        }
    }

    /// Runs `count` pieces of `job` together with the helpers that claim some of them.
    fn run(&self, job: &HelperJob<'_>, count: u64) {
        self.pieces.offer(std::ptr::from_ref(job).addr() as u64, count);
        let mut panic = None;
        while let Some((_, piece)) = self.pieces.claim() {
            panic = catch_unwind(AssertUnwindSafe(|| job.run(piece))).err().or(panic);
            self.pieces.finish();
        }
        self.wait(count);
        if let Some(panic) = panic {
            resume_unwind(panic);
        }
        assert!(!self.panicked.swap(false, Ordering::Relaxed), "a helper panicked");
    }

    /// Waits until the pieces that helpers have claimed are done.
    fn wait(&self, count: u64) {
        let (mut turns, mut since) = (0, None);
        while !self.pieces.is_complete(count) {
            turns += 1;
            if turns < SPINS {
                std::hint::spin_loop();
                continue;
            }
            since.get_or_insert_with(Instant::now);
            std::thread::yield_now();
        }
        if let Some(since) = since {
            self.patience.gave_away(since.elapsed(), now());
        }
    }

    /// The main loop of a helper, which starts with call number `calls`.
    fn help(&self, calls: u64) {
        let mut calls = Some(calls);
        while let Some(seen) = calls {
            self.look_for_work();
            calls = self.sleep(seen);
        }
    }

    /// Sleeps until there have been more than `calls` calls, and returns their number. `None`: the
    /// helper exits.
    #[inline(never)]
    fn sleep(&self, calls: u64) -> Option<u64> {
        let mut state = lock(&self.state);
        state.asleep += 1;
        let waited = self
            .called
            .wait_timeout_while(state, IDLE_THREAD_TIMEOUT, |state| state.calls == calls);
        let (mut state, outcome) = unpoisoned(waited);
        state.asleep -= 1;
        if outcome.timed_out() {
            state.threads -= 1;
            return None;
        }
        Some(state.calls)
    }

    fn look_for_work(&self) {
        let (mut turns, mut last) = (0u32, Instant::now());
        loop {
            while let Some((job, piece)) = self.pieces.claim() {
                // SAFETY: `job` is the address of the owner's job, which lives until all its pieces
                // are finished; it is shared as `Work` is.
                let job = unsafe { &*(job as usize as *const HelperJob<'_>) };
                if catch_unwind(AssertUnwindSafe(|| job.run(piece))).is_err() {
                    self.panicked.store(true, Ordering::Relaxed);
                }
                self.pieces.finish();
                (turns, last) = (0, Instant::now());
            }
            std::hint::spin_loop();
            turns += 1;
            if turns.is_multiple_of(SPIN_TURNS) {
                if last.elapsed() > HELPER_SPIN {
                    return;
                }
                // Another thread that needs this core gets it.
                std::thread::yield_now();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU8;

    /// Returns a team of helpers that only this test uses.
    fn team() -> &'static HelperPool {
        Box::leak(Box::default())
    }

    fn job_of(team: &'static HelperPool, bytes: usize, piece: usize, work: &Work<'_>) {
        let _held = team.owner.lock();
        team.call(2);
        team.run(&HelperJob { work, bytes, piece }, bytes.div_ceil(piece) as u64);
    }

    #[test]
    fn threads_leave_a_core_where_there_are_many() {
        let found = [(1, 1), (2, 2), (4, 2), (16, 4), (16, 8), (16, 2), (32, 4), (2, 8)]
            .map(|(cores, ranks)| threads(cores, ranks));
        assert_eq!(found, [1, 1, 2, 3, 2, 4, 4, 1]);
    }

    #[test]
    fn every_byte_is_worked_on_once_and_helpers_end() {
        let team = team();
        for bytes in [1, 63, 64, 1000, 64 * 1000 + 1] {
            let seen: Vec<AtomicU8> = (0..bytes).map(|_| AtomicU8::new(0)).collect();
            job_of(team, bytes, 128, &|start, count| {
                for byte in &seen[start..start + count] {
                    byte.fetch_add(1, Ordering::Relaxed);
                }
            });
            assert!(seen.iter().all(|byte| byte.load(Ordering::Relaxed) == 1), "{bytes} bytes");
        }
        assert_eq!(lock(&team.state).threads, 2);
        let begin = Instant::now();
        while lock(&team.state).threads > 0 {
            assert!(begin.elapsed() < Duration::from_secs(30), "they stay");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    #[test]
    fn a_panic_in_a_piece_comes_out_once_all_others_are_done() {
        let (team, done) = (team(), AtomicUsize::new(0));
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            job_of(team, 64, 1, &|start, _| {
                assert!(start != 40, "piece 40");
                done.fetch_add(1, Ordering::Relaxed);
            });
        }));
        assert!(outcome.is_err());
        assert_eq!(done.load(Ordering::Relaxed), 63);
        job_of(team, 64, 1, &|_, _| {
            done.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(done.load(Ordering::Relaxed), 127);
    }
}
