//! Zero-copy collectives: each rank reads its peers' tensors in symmetric memory and writes only to
//! its own memory.
//!
//! A rank offers its input in its post if all peers have mapped the input. The call is zero-copy if
//! every sender has offered its input; all ranks read the same words, so all make the same
//! decision. The call ends when every rank has finished reading, so inputs may change once it
//! returns.
#![allow(unsafe_code, reason = "copies between the tensors of ranks")]

use super::CpuCall;
use super::exchange::{StageCounters, chunk_of};
use super::helpers::{CopyItem, Helpers};
use super::pipeline::{self, InPlaceOps, StageClock};
use crate::coll::call::{CallSpec, Collective, Span};
use crate::control::ControlBlock;
use crate::error::{Error, Result};
use crate::kernels::cpu::{InputElements, WriteMode};
use crate::rank::Rank;
use crate::symm_mem::SegmentPin;

/// Number of bytes that a rank moves between two checks of its deadline and the group.
const LOOK_BYTES: usize = 4 << 20;
/// Maximum number of bytes that a rank of an all-reduce reduces before its peers fetch them, so
/// that they are still in its cache. A smaller part adds a wait to short calls: with 128 KB a call
/// of 1 MB took as long as a staged one (`docs/measurements/cpu.md`).
const PART_BYTES: usize = 512 << 10;

/// Returns true if `call` of rank `me` writes to none of its inputs that a peer may read.
pub(super) fn keeps_inputs(call: &CallSpec, me: Rank) -> bool {
    let own = if call.inputs.len() > 1 { call.inputs.get(me.index()) } else { call.inputs.first() };
    let apart = |output: &Span, input: &Span| {
        output.addr + output.bytes <= input.addr || input.addr + input.bytes <= output.addr
    };
    call.outputs
        .iter()
        .all(|output| Some(output) == own || call.inputs.iter().all(|input| apart(output, input)))
}

/// Returns the memory that peers of rank `me` would read in `call`: all inputs, if they are
/// contiguous and the call does not write to them while peers may read.
pub(super) fn readable(call: &CallSpec, me: Rank) -> Option<Span> {
    let input = Span::joined(&call.inputs)?;
    let suits = match call.op {
        // Each rank's part is reduced in place.
        Collective::AllReduce => call.outputs == call.inputs,
        Collective::Broadcast
        | Collective::AllGather
        | Collective::Gather
        | Collective::Scatter
        | Collective::AllToAll
        | Collective::ReduceScatter => keeps_inputs(call, me),
        Collective::Barrier | Collective::Reduce | Collective::AllReduceAddRmsNorm => false,
    };
    suits.then_some(input)
}

impl CpuCall<'_> {
    /// Returns the word that tells peers where this rank's inputs are: 1 + their offset in its
    /// heap, or 0 if peers cannot read these inputs.
    pub(super) fn offer(&self) -> u64 {
        let Some(heaps) = self.heaps else { return 0 };
        let Some(input) = readable(self.call, self.control.rank()) else { return 0 };
        if input.bytes == 0 { 1 } else { heaps.offset(input).map_or(0, |offset| offset + 1) }
    }

    /// Returns true if `rank` sends something in this call.
    pub(super) fn sends(&self, rank: Rank) -> bool {
        !matches!(self.call.op, Collective::Broadcast | Collective::Scatter)
            || rank == self.call.root
    }

    /// Returns true if all senders of this call have offered their inputs.
    pub(super) fn all_offered(&self) -> bool {
        let me = self.control.rank();
        let offers = |rank| !self.sends(rank) || self.offered(rank) != 0;
        self.heaps.is_some() && offers(me) && self.control.peers().all(offers)
    }

    /// Runs a call to which all senders have offered their inputs.
    pub(super) fn direct(&mut self, store: WriteMode) -> Result<()> {
        let (mut pins, helpers) =
            (Vec::with_capacity(self.control.size()), Helpers::of(self.call.total()));
        match self.call.op {
            Collective::AllReduce => self.all_reduce_direct(&mut pins, &helpers, store)?,
            Collective::ReduceScatter => self.reduce_scatter_direct(&mut pins, &helpers, store)?,
            Collective::Broadcast
            | Collective::AllGather
            | Collective::Gather
            | Collective::Scatter
            | Collective::AllToAll => self.exchange_direct(&mut pins, &helpers, store)?,
            Collective::Barrier | Collective::Reduce | Collective::AllReduceAddRmsNorm => {
                return Err(Error::internal("nobody offers inputs to this call"));
            }
        }
        let mut stages = StageCounters(self);
        stages.tick();
        // Wait until all ranks have read this rank's inputs.
        stages.wait_for(stages.stage())
    }

    /// Returns the address of `bytes` at offset `skipped` of the inputs of `peer`; `pins` keep them
    /// mapped.
    fn reach(
        &self,
        pins: &mut Vec<SegmentPin>,
        peer: Rank,
        skipped: usize,
        bytes: usize,
    ) -> Result<*mut u8> {
        if bytes == 0 {
            return Ok(std::ptr::dangling_mut());
        }
        // The offer is read again after the decision, and a faulty rank may have overwritten it.
        let offset =
            self.offered(peer).checked_sub(1).and_then(|offset| offset.checked_add(skipped as u64));
        let reached =
            self.heaps.zip(offset).and_then(|(heaps, offset)| heaps.reach(peer, offset, bytes));
        let Some((address, pin)) = reached else {
            let (about, peer) = (self.about(), self.control.describe(peer));
            let text = format!(
                "{about}: the {bytes} bytes of symmetric memory that {peer} offers are \
                 not mapped here"
            );
            return Err(self.control.fail(Error::internal(text)));
        };
        pins.extend(pin);
        Ok(address as *mut u8)
    }

    /// Calls `body` with pieces (start, length) of at most `piece` bytes, and checks the group
    /// after each. No peer can have left the call meanwhile.
    pub(super) fn in_pieces(
        &self,
        bytes: usize,
        piece: usize,
        mut body: impl FnMut(usize, usize),
    ) -> Result<()> {
        for t in 0..bytes.div_ceil(piece) as u64 {
            let (begin, length) = chunk_of(bytes, piece, t);
            body(begin, length);
            self.control.look(self.limit, &|| self.about())?;
        }
        Ok(())
    }

    fn exchange_direct(
        &self,
        pins: &mut Vec<SegmentPin>,
        helpers: &Helpers,
        store: WriteMode,
    ) -> Result<()> {
        for (from, output) in self.incoming_from_next() {
            let input = self.reach(pins, from, self.skipped(from, output), output.bytes)?;
            self.in_pieces(output.bytes, LOOK_BYTES, |begin, bytes| {
                let copied = CopyItem::new(
                    output.ptr().wrapping_add(begin),
                    input.wrapping_add(begin),
                    bytes,
                );
                // SAFETY: `reach` checked that `output.bytes` bytes are mapped; no other code uses
                // the caller's output meanwhile.
                unsafe { helpers.copy(&[copied], store) }
            })?;
        }
        self.keep_own(helpers);
        Ok(())
    }

    /// Returns `bytes` bytes at offset `skipped` of the input of `rank` as a source; `pins` keep a
    /// peer's input mapped.
    fn source(
        &self,
        pins: &mut Vec<SegmentPin>,
        rank: Rank,
        skipped: usize,
        bytes: usize,
    ) -> Result<InputElements> {
        if rank == self.control.rank() {
            return Ok(InputElements {
                ptr: self.call.inputs[0].ptr().wrapping_add(skipped),
                factor: self.call.factor,
            });
        }
        self.reach(pins, rank, skipped, bytes).map(|ptr| self.peer(rank, ptr))
    }

    fn reduce_scatter_direct(
        &self,
        pins: &mut Vec<SegmentPin>,
        helpers: &Helpers,
        store: WriteMode,
    ) -> Result<()> {
        let (call, output) = (self.call, self.call.outputs[0]);
        let skipped =
            call.inputs[..self.control.rank().index()].iter().map(|span| span.bytes).sum();
        let mut whole = Vec::with_capacity(self.control.size());
        for rank in self.control.ranks() {
            whole.push(self.source(pins, rank, skipped, output.bytes)?);
        }
        let mut sources = Vec::with_capacity(whole.len());
        self.in_pieces(output.bytes, LOOK_BYTES, |begin, bytes| {
            sources.clear();
            sources.extend(
                whole
                    .iter()
                    .map(|source| InputElements { ptr: source.ptr.wrapping_add(begin), ..*source }),
            );
            // SAFETY: begin + bytes <= output.bytes, a length that `reach` checked for each peer's
            // tensor.
            unsafe {
                helpers.reduce(
                    (self.control.order(), call),
                    output.ptr().wrapping_add(begin),
                    &sources,
                    bytes,
                    None,
                    store,
                )
            }
        })
    }

    fn all_reduce_direct(
        &mut self,
        pins: &mut Vec<SegmentPin>,
        helpers: &Helpers,
        store: WriteMode,
    ) -> Result<()> {
        let (control, call) = (self.control, self.call);
        let bytes = call.inputs[0].bytes;
        let mut tensors = Vec::with_capacity(control.size());
        for rank in control.ranks() {
            tensors.push(self.source(pins, rank, 0, bytes)?);
        }
        let chunk = bytes.next_multiple_of(64 * control.size()).min(PART_BYTES * control.size());
        let (sources, copies) =
            (Vec::with_capacity(control.size()), Vec::with_capacity(control.size()));
        let mut parts =
            InPlace { control, call, helpers, bytes, chunk, tensors, sources, copies, store };
        pipeline::run_in_place(&mut StageCounters(self), bytes.div_ceil(chunk) as u64, &mut parts)
    }
}

/// The parts of one rank in an in-place all-reduce.
struct InPlace<'a> {
    control: &'a ControlBlock,
    call: &'a CallSpec<'a>,
    helpers: &'a Helpers,
    bytes: usize,
    chunk: usize,
    /// The tensor of each rank.
    tensors: Vec<InputElements>,
    sources: Vec<InputElements>,
    copies: Vec<CopyItem>,
    store: WriteMode,
}

impl InPlace<'_> {
    /// Returns the start and length of the part of `rank` in chunk `t`; parts are whole elements.
    fn part(&self, rank: Rank, t: u64) -> (usize, usize) {
        let (start, bytes) = chunk_of(self.bytes, self.chunk, t);
        let (part, length) = chunk_of(
            bytes,
            bytes.div_ceil(self.control.size()).next_multiple_of(64),
            rank.0.into(),
        );
        (start + part, length)
    }
}

impl InPlaceOps for InPlace<'_> {
    fn reduce(&mut self, t: u64) {
        let (begin, bytes) = self.part(self.control.rank(), t);
        self.sources.clear();
        self.sources.extend(
            self.tensors
                .iter()
                .map(|tensor| InputElements { ptr: tensor.ptr.wrapping_add(begin), ..*tensor }),
        );
        let own = self.call.outputs[0].ptr().wrapping_add(begin);
        // SAFETY: begin + bytes <= self.bytes, the length of this rank's tensor, and of the peers'
        // tensors as `reach` checked. No other rank reads or writes this rank's part meanwhile
        // (pipeline).
        unsafe {
            self.helpers.reduce(
                (self.control.order(), self.call),
                own,
                &self.sources,
                bytes,
                None,
                WriteMode::Cached,
            )
        }
    }

    fn fetch(&mut self, t: u64) {
        let (me, n) = (self.control.rank().0, self.control.size() as u32);
        self.copies.clear();
        // Start from the next rank, so that the ranks do not all read the same tensor at once.
        for peer in (1..n).map(|step| Rank((me + step) % n)) {
            let (begin, bytes) = self.part(peer, t);
            let from = self.tensors[peer.index()].ptr.wrapping_add(begin);
            self.copies.push(CopyItem::new(
                self.call.outputs[0].ptr().wrapping_add(begin),
                from,
                bytes,
            ));
        }
        // SAFETY: begin + bytes <= self.bytes, the length of this rank's tensor, and of the peers'
        // tensors as `reach` checked. The owners of these parts have reduced them, and no rank
        // reads this rank's copies of them any more (pipeline).
        unsafe { self.helpers.copy(&self.copies, self.store) }
    }
}
