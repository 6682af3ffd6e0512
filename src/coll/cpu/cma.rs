//! Exchanges that read peers' private memory, used where other processes take time slices of the
//! ranks' cores, and where one copy is faster than two.
//!
//! A staged call waits once for each chunk, and each wait may cost a time slice. Here a rank waits
//! until all have posted, reads its messages with `process_vm_readv`, and waits until all ranks
//! have read. Each rank posts whether it may read, where its inputs are, and whether it has
//! repeatedly lost time slices. All ranks read the same words, so all make the same decision.
#![allow(unsafe_code, reason = "reading peers' memory")]

use super::CpuCall;
use super::exchange::StageCounters;
use super::helpers::Helpers;
use super::pipeline::StageClock;
use super::zero_copy::keeps_inputs;
use crate::coll::call::Collective;
use crate::control::spin_budget::{PATIENCE, now};
use crate::error::Result;
use crate::rank::Rank;
use crate::sys::process_vm::read_memory;
use std::ops::RangeInclusive;

/// Minimum length of the longest message with which ranks that lose time slices read their peers'
/// memory; shorter messages need only a chunk or two.
const LONG: usize = 256 << 10;

/// Returns the range of lengths of a call's longest message in which one copy by Linux is faster
/// than two copies through slots, for an `op` of `n` ranks that do not share cores. Below this
/// range the system calls dominate. Above it slots are faster, because they stay in the cache and
/// helpers copy. Several readers of one rank wait for each other inside Linux. Measured in
/// docs/measurements/cpu.md.
fn quick(op: Collective, n: usize) -> RangeInclusive<usize> {
    let (least, most) = match n {
        2 => (32 << 10, 256 << 10),
        3 | 4 if op == Collective::AllToAll => (16 << 10, 128 << 10),
        3 | 4 if op == Collective::AllGather => (32 << 10, 128 << 10),
        _ => (1, 0),
    };
    least..=most
}

/// Number of bytes that a rank reads between two checks of its deadline and the group.
const LOOK_BYTES: usize = 1 << 20;

/// The bits that a rank posts about itself.
const MAY_READ: u64 = 1;
const LOSES_SLICES: u64 = 2;
const KEEPS_INPUTS: u64 = 4;

impl CpuCall<'_> {
    /// Returns the word that tells peers whether this rank may read their memory, whether it has
    /// repeatedly lost time slices, and whether they may read its inputs in place.
    pub(super) fn reading(&self) -> u64 {
        if !*self.reads {
            return 0;
        }
        let bit = |yes: bool, bit: u64| if yes { bit } else { 0 };
        let keeps = self.is_exchange() && keeps_inputs(self.call, self.control.rank());
        MAY_READ | bit(PATIENCE.yields_to_peer(now), LOSES_SLICES) | bit(keeps, KEEPS_INPUTS)
    }

    /// Returns true if the call moves messages unchanged.
    pub(super) fn is_exchange(&self) -> bool {
        matches!(
            self.call.op,
            Collective::Broadcast
                | Collective::AllGather
                | Collective::Gather
                | Collective::Scatter
                | Collective::AllToAll
        )
    }

    /// Returns true if this call, whose longest message has `longest` bytes, reads private memory.
    /// The same on every rank. `shared_cores` is true if ranks share cores.
    pub(super) fn reads_peers(&self, longest: usize, shared_cores: bool) -> bool {
        let mut some_lost = false;
        let ready = |rank: Rank| {
            let word = self.posted_reading(rank);
            some_lost |= word & LOSES_SLICES != 0;
            word & MAY_READ != 0 && (!self.sends(rank) || word & KEEPS_INPUTS != 0)
        };
        // A slot holds the messages to all receivers, so each chunk is short and the call waits
        // often.
        let crowded = shared_cores && self.call.op == Collective::Scatter;
        let quick = !shared_cores && quick(self.call.op, self.control.size()).contains(&longest);
        self.is_exchange()
            && (quick || longest >= LONG)
            && self.control.ranks().all(ready)
            && (quick || crowded || some_lost)
    }

    /// Runs a call that reads private memory. Returns false if a rank could not read; the call must
    /// then run another way.
    pub(super) fn read_peers(&mut self) -> Result<bool> {
        let mut read = Ok(());
        for (from, output) in self.incoming_from_next() {
            let address = self.posted_address(
                from,
                if self.personal() { self.control.rank().index() } else { 0 },
            );
            self.in_pieces(output.bytes, LOOK_BYTES, |begin, bytes| {
                let (pid, to) = (self.control.pid(from), output.ptr().wrapping_add(begin));
                if read.is_ok() {
                    // SAFETY: begin + bytes <= output.bytes; no other code uses the caller's output
                    // meanwhile. Whatever address a peer has posted, only that peer's memory is
                    // read.
                    read = unsafe { read_memory(pid, address.wrapping_add(begin), to, bytes) };
                }
            })?;
        }
        if read.is_err() {
            *self.reads = false;
            self.post_unread();
        }
        self.keep_own(&Helpers::none());
        let mut stages = StageCounters(self);
        stages.tick();
        // Wait until all ranks have read this rank's inputs.
        stages.wait_for(stages.stage())?;
        // Warn only now: a read from a peer that has exited also fails, but then `wait_for` has
        // returned the error.
        if let Err(error) = read {
            log::warn!(
                "{}: long messages pass through shared memory from now on: {error}",
                self.about()
            );
        }
        Ok(!self.control.ranks().any(|rank| self.posted_unread(rank)))
    }
}
