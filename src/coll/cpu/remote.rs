//! Exchanges that read peers' private memory: where processes beside take slices of the ranks' cores, and where one copy is quicker than two.
//!
//! A staged call waits once for each chunk, and each wait may cost a slice of the scheduler's. Here a rank waits until all have posted, reads
//! what it gets with `process_vm_readv`, and waits until all have read. Each rank posts whether it may read, where each input lies, and whether
//! it has lost slices in a row: all ranks read the same words, so all decide alike.
#![allow(unsafe_code, reason = "reading peers' memory")]

use super::Step;
use super::direct::keeps_inputs;
use super::exchange::Stages;
use super::helpers::Helpers;
use super::pipeline::Clock;
use crate::coll::call::Op;
use crate::control::patience::{PATIENCE, now};
use crate::error::Result;
use crate::rank::Rank;
use crate::sys::remote::read_memory;
use std::ops::RangeInclusive;

/// Length of the longest message from which on peers' memory is read where slices are lost: shorter ones pass in a chunk or two.
const LONG: usize = 256 << 10;

/// Lengths of the longest message of an `op` of `n` ranks with cores of their own that the kernel copies once more quickly than slots pass it
/// on: below, system calls count; above, helpers and the cache of slots do. Several readers of one rank wait for each other in the kernel.
/// Measured in docs/measurements/cpu.md.
fn quick(op: Op, n: usize) -> RangeInclusive<usize> {
    let (least, most) = match n {
        2 => (32 << 10, 256 << 10),
        3 | 4 if op == Op::AllToAll => (16 << 10, 128 << 10),
        3 | 4 if op == Op::AllGather => (32 << 10, 128 << 10),
        _ => (1, 0),
    };
    least..=most
}

/// Bytes that a rank reads before it looks at its deadline and at the group.
const LOOK_BYTES: usize = 1 << 20;

/// What a rank posts about itself.
const MAY_READ: u64 = 1;
const LOSES_SLICES: u64 = 2;
const KEEPS_INPUTS: u64 = 4;

impl Step<'_> {
    /// Word that tells whether this rank may read its peers' memory, whether it has lost slices in a row, and whether peers may read its
    /// inputs where they lie.
    pub(super) fn reading(&self) -> u64 {
        if !*self.reads {
            return 0;
        }
        let bit = |yes: bool, bit: u64| if yes { bit } else { 0 };
        let keeps = self.is_exchange() && keeps_inputs(self.call, self.control.rank());
        MAY_READ | bit(PATIENCE.is_crowded(now), LOSES_SLICES) | bit(keeps, KEEPS_INPUTS)
    }

    /// Whether the call moves messages unchanged.
    pub(super) fn is_exchange(&self) -> bool {
        matches!(self.call.op, Op::Broadcast | Op::AllGather | Op::Gather | Op::Scatter | Op::AllToAll)
    }

    /// Whether this call, whose longest message has `longest` bytes, reads private memory. The same on every rank. `shared_cores`: ranks share
    /// cores.
    pub(super) fn reads_peers(&self, longest: usize, shared_cores: bool) -> bool {
        let mut some_lost = false;
        let ready = |rank: Rank| {
            let word = self.posted_reading(rank);
            some_lost |= word & LOSES_SLICES != 0;
            word & MAY_READ != 0 && (!self.sends(rank) || word & KEEPS_INPUTS != 0)
        };
        // Slots hold the messages to all receivers, so that a chunk of each is short and its waits are many.
        let crowded = shared_cores && self.call.op == Op::Scatter;
        let quick = !shared_cores && quick(self.call.op, self.control.size()).contains(&longest);
        self.is_exchange() && (quick || longest >= LONG) && self.control.ranks().all(ready) && (quick || crowded || some_lost)
    }

    /// Runs a call that reads private memory; false if a rank could not read, which leaves the call to be done another way.
    pub(super) fn read_peers(&mut self) -> Result<bool> {
        let mut read = Ok(());
        for (from, output) in self.incoming_from_next() {
            let address = self.posted_address(from, if self.personal() { self.control.rank().index() } else { 0 });
            self.in_pieces(output.bytes, LOOK_BYTES, |begin, bytes| {
                let (pid, to) = (self.control.pid(from), output.ptr().wrapping_add(begin));
                if read.is_ok() {
                    // SAFETY: begin + bytes <= output.bytes; the output is the caller's and nobody else's meanwhile. Whatever a peer has
                    // posted as its address, only its memory is read.
                    read = unsafe { read_memory(pid, address.wrapping_add(begin), to, bytes) };
                }
            })?;
        }
        if read.is_err() {
            *self.reads = false;
            self.post_unread();
        }
        self.keep_own(&Helpers::none());
        let mut stages = Stages(self);
        stages.tick();
        // Until all have read what this rank has posted.
        stages.wait_for(stages.stage())?;
        // Of one that has died nothing could be read either.
        if let Err(error) = read {
            log::warn!("{}: long messages pass through shared memory from now on: {error}", self.about());
        }
        Ok(!self.control.ranks().any(|rank| self.posted_unread(rank)))
    }
}
