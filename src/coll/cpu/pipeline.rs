//! The pipeline behind every staged collective: a message moves in chunks, and each rank is at most
//! one stage ahead of the slowest.
//!
//! Each rank owns one counter, the number of stages that it has finished since the group was
//! created. In stage `t` it writes chunk `t` into an input slot and processes chunk `t - 1` from
//! all ranks' input slots; in two-phase collectives it also collects the results of chunk `t - 2`.
//! The running stage number selects the slots, so a call may start while peers are still in the
//! last stage of the previous call. `docs/design/memory-model.md` argues why three input slots and
//! two result slots suffice; loom checks it (`tests/loom.rs`).

use crate::error::Result;
use crate::mem::layout::{INPUT_SLOTS, RESULT_SLOTS};

/// The ranks' stage counters.
pub trait StageClock {
    /// Returns the number of stages that this rank has finished.
    fn stage(&self) -> u64;
    /// Finishes a stage and publishes, with release ordering, everything that was written in it.
    fn tick(&mut self);
    /// Returns once every peer has finished `stage` stages, with acquire ordering for their writes.
    fn wait_for(&mut self, stage: u64) -> Result<()>;
    /// Fails if the group has failed or the call's timeout has expired, even though no peer is
    /// missing. It is called only while no peer can have finished the call, so that an event which
    /// fails a later call does not end this one.
    fn check_abort(&mut self) -> Result<()>;
}

/// Number of stages between two checks of the group. The waits alone may never check it, because a
/// faulty peer can dictate the number of stages and claim to have finished them all.
const LOOK_EVERY: u64 = 64;

/// The work of a collective on one chunk.
pub trait ChunkOps {
    /// Writes chunk `t` of this rank's input to its input slot.
    fn produce(&mut self, t: u64, slot: usize);
    /// Processes chunk `t` in all ranks' input slots; in two-phase collectives, writes this rank's
    /// share to its result slot.
    fn consume(&mut self, t: u64, slot: usize, result: usize);
    /// Collects all ranks' results of chunk `t`. Called in two-phase collectives only.
    fn finish(&mut self, t: u64, result: usize);
}

/// How ranks share their results.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResultSharing {
    /// One phase: each rank processes all that it needs, and shares no results.
    One,
    /// Two phases: each rank processes its share, and all ranks collect the results of all shares.
    Two,
}

/// Moves `count` chunks through the slots. The caller has just seen every peer arrive at this call,
/// so every peer has finished all stages of the previous call.
pub fn run(
    clock: &mut impl StageClock,
    phases: ResultSharing,
    count: u64,
    chunks: &mut impl ChunkOps,
) -> Result<()> {
    if count == 0 {
        return Ok(());
    }
    let input = |stage: u64| (stage % INPUT_SLOTS as u64) as usize;
    let result = |stage: u64| (stage % RESULT_SLOTS as u64) as usize;
    let stages = count + if phases == ResultSharing::Two { 2 } else { 1 };
    for t in 0..stages {
        let stage = clock.stage();
        if t < count {
            chunks.produce(t, input(stage));
        }
        if t > 0 {
            clock.wait_for(stage)?;
            let previous = stage - 1;
            if t - 1 < count {
                chunks.consume(t - 1, input(previous), result(stage));
            }
            if t > 1 && phases == ResultSharing::Two {
                chunks.finish(t - 2, result(previous));
            }
        }
        // A peer is at most one stage ahead, so it can have finished the call only while this rank
        // is in the last stage.
        if t % LOOK_EVERY == LOOK_EVERY - 1 && t + 1 < stages {
            clock.check_abort()?;
        }
        clock.tick();
    }
    Ok(())
}

/// The work of an in-place all-reduce on one chunk: each rank reduces a part of it.
pub trait InPlaceOps {
    /// Reduces this rank's part of chunk `t` from all ranks' tensors into its own tensor.
    fn reduce(&mut self, t: u64);
    /// Copies the parts of chunk `t` that the peers have reduced from their tensors into this
    /// rank's tensor.
    fn fetch(&mut self, t: u64);
}

/// Reduces `count` chunks in place. On return, peers may still be reading this rank's parts; the
/// caller waits until they have finished. The caller has just seen every peer arrive at this call.
pub fn run_in_place(
    clock: &mut impl StageClock,
    count: u64,
    parts: &mut impl InPlaceOps,
) -> Result<()> {
    for t in 0..count {
        parts.reduce(t);
        if t > 0 {
            clock.wait_for(clock.stage())?;
            parts.fetch(t - 1);
        }
        if t % LOOK_EVERY == LOOK_EVERY - 1 {
            clock.check_abort()?;
        }
        clock.tick();
    }
    if count > 0 {
        clock.wait_for(clock.stage())?;
        parts.fetch(count - 1);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;

    /// The stage of this rank, and the stage from which the check fails.
    struct Alone(u64, u64);

    impl StageClock for Alone {
        fn stage(&self) -> u64 {
            self.0
        }
        fn tick(&mut self) {
            self.0 += 1;
        }
        fn wait_for(&mut self, _stage: u64) -> Result<()> {
            Ok(())
        }
        fn check_abort(&mut self) -> Result<()> {
            if self.0 < self.1 { Ok(()) } else { Err(Error::timeout("time is up")) }
        }
    }

    #[derive(Default)]
    struct Log {
        inputs: [Option<u64>; INPUT_SLOTS],
        results: [Option<u64>; RESULT_SLOTS],
        produced: Vec<u64>,
        finished: Vec<u64>,
        consumed: Vec<u64>,
    }

    impl ChunkOps for Log {
        fn produce(&mut self, t: u64, slot: usize) {
            self.inputs[slot] = Some(t);
            self.produced.push(t);
        }
        fn consume(&mut self, t: u64, slot: usize, result: usize) {
            assert_eq!(self.inputs[slot], Some(t));
            self.results[result] = Some(t);
            self.consumed.push(t);
        }
        fn finish(&mut self, t: u64, result: usize) {
            assert_eq!(self.results[result], Some(t));
            self.finished.push(t);
        }
    }

    #[test]
    fn every_chunk_passes_once_in_order_from_its_own_slot() {
        let mut clock = Alone(0, u64::MAX);
        for count in [0, 1, 2, 3, 10] {
            for phases in [ResultSharing::One, ResultSharing::Two] {
                let mut log = Log::default();
                run(&mut clock, phases, count, &mut log).expect("alone");
                let all: Vec<u64> = (0..count).collect();
                assert_eq!((&log.produced, &log.consumed), (&all, &all));
                assert_eq!(
                    log.finished,
                    if phases == ResultSharing::Two { all } else { Vec::new() }
                );
            }
        }
    }

    /// The order in which a reduction in place runs its steps.
    #[derive(Default)]
    struct Order(Vec<(&'static str, u64)>);

    impl InPlaceOps for Order {
        fn reduce(&mut self, t: u64) {
            self.0.push(("reduce", t));
        }
        fn fetch(&mut self, t: u64) {
            assert!(self.0.contains(&("reduce", t)));
            self.0.push(("fetch", t));
        }
    }

    #[test]
    fn every_chunk_in_place_is_reduced_and_then_fetched_once() {
        for count in [0, 1, 2, 5] {
            let (mut clock, mut order) = (Alone(7, u64::MAX), Order::default());
            run_in_place(&mut clock, count, &mut order).expect("alone");
            let of = |step| {
                order
                    .0
                    .iter()
                    .filter(|(name, _)| *name == step)
                    .map(|(_, t)| *t)
                    .collect::<Vec<u64>>()
            };
            let all: Vec<u64> = (0..count).collect();
            assert_eq!((of("reduce"), of("fetch"), clock.0), (all.clone(), all, 7 + count));
        }
        // The check fails at once, but the call makes it only after a number of chunks.
        for (count, passes) in [(LOOK_EVERY - 1, true), (LOOK_EVERY, false)] {
            let mut clock = Alone(0, 0);
            let outcome = run_in_place(&mut clock, count, &mut Order::default());
            assert_eq!((outcome.is_ok(), clock.0), (passes, LOOK_EVERY - 1), "{count} chunks");
        }
    }

    #[test]
    fn a_call_that_never_waits_is_looked_at_but_not_in_its_last_stage() {
        for (count, passes) in [(LOOK_EVERY - 1, true), (LOOK_EVERY, false), (u64::MAX - 1, false)]
        {
            let mut clock = Alone(0, 0);
            let outcome = run(&mut clock, ResultSharing::One, count, &mut Log::default());
            assert_eq!(outcome.is_ok(), passes, "{count} chunks");
            assert_eq!(clock.0, if passes { count + 1 } else { LOOK_EVERY - 1 });
        }
    }
}
