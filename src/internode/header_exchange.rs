//! Opening: the start of every call. Ranks exchange the descriptions of their calls, and with them
//! all data that fit.

use super::executor::{CallRail, InternodeExecutor, Scratch, copy_bytes};
use super::header::CallHeader;
use crate::coll::call::{Collective, Span};
use crate::coll::cost::network::HEADER_SLOT_BYTES;
use crate::coll::two_level::MessageLengths;
use crate::coll::two_level::slices::part;
use crate::coll::two_level::step::RailOp;
use crate::error::{Error, Result};
use crate::rank::Rank;
use std::sync::Arc;

/// Maximum number of bytes of data in a slot without texts.
const INLINE_BYTES: usize = HEADER_SLOT_BYTES - CallHeader::BYTES;
/// Size of the factor at the start of a rank's record.
const FACTOR_BYTES: usize = 8;

/// An opened call: this rank's rail, and the slots of all nodes, once rail 0 has received them.
pub(super) struct HeaderExchange<'a> {
    executor: &'a InternodeExecutor<'a>,
    /// This rank's rail, if the call uses it.
    pub(super) call_rail: Option<CallRail<'a>>,
    slots: Scratch,
}

impl InternodeExecutor<'_> {
    /// Returns the number of bytes that `rank` contributes to this call, if all ranks know it. For
    /// an all_to_all it assumes that every rank contributes as much as this one.
    pub(super) fn input_bytes(&self, rank: Rank) -> usize {
        let (n, agreed) = (self.node_map.size(), self.call.agreed_bytes() as usize);
        let of_root = |bytes: usize| if rank == self.call.root { bytes } else { 0 };
        match self.call.op {
            Collective::Barrier => 0,
            Collective::AllReduce
            | Collective::Reduce
            | Collective::Gather
            | Collective::ReduceScatter
            | Collective::AllReduceAddRmsNorm => agreed,
            Collective::Broadcast => of_root(agreed),
            Collective::Scatter => of_root(n * agreed),
            Collective::AllGather => self.call.outputs[rank.index()].bytes,
            Collective::AllToAll => self.call.inputs.iter().map(|span| span.bytes).sum(),
        }
    }

    /// Returns the size of the record of `rank` in a slot.
    fn record_bytes(&self, rank: Rank) -> usize {
        let given = self.input_bytes(rank);
        if given == 0 { 0 } else { FACTOR_BYTES + given }
    }

    /// Returns the maximum number of bytes of data in a slot of this call. Ranks agree on it,
    /// because headers also say which texts the call has.
    fn inline_bytes(&self) -> usize {
        INLINE_BYTES - CallHeader::texts_bytes(self.user_call)
    }

    /// Returns a slot with the header of this call and its texts.
    fn slot(&self, even: Option<usize>) -> [u8; HEADER_SLOT_BYTES] {
        let mut slot = [0; HEADER_SLOT_BYTES];
        slot[..CallHeader::BYTES]
            .copy_from_slice(&CallHeader::of(self.user_call, self.sequence).to_bytes(even));
        CallHeader::write_texts(&mut slot, self.user_call);
        slot
    }

    /// Returns true if the data of each rank and the data that each node sends fit into a slot;
    /// they are then exchanged with the headers.
    pub(super) fn is_short(&self) -> bool {
        if self.call.op.reduces() {
            // Every rank of a reduction contributes the same number of bytes.
            return self.record_bytes(self.rank).max(self.partial_bytes()) <= self.inline_bytes();
        }
        let records = |node: usize| {
            self.node_map.ranks_of(node).iter().map(|&rank| self.record_bytes(rank)).sum::<usize>()
        };
        (0..self.node_map.num_nodes()).all(|node| records(node) <= self.inline_bytes())
    }

    /// 1. Intra-node: ranks exchange and compare their headers. 2. Inter-node: rail 0 starts to
    ///    exchange the headers of the nodes; [`HeaderExchange::agree`] completes that. Ranks with
    ///    one of the first `rails` rails get `bytes` bytes of staging.
    ///
    /// The first transfer of every call is on rail 0 and has the same length for all calls, because
    /// some backends end the process if lengths differ. It starts only after all ranks of the node
    /// were found to run the same call.
    pub(super) fn open(&self, rails: usize, bytes: usize) -> Result<HeaderExchange<'_>> {
        let even = self.common_length();
        let short = self.is_short() && (self.call.op != Collective::AllToAll || even.is_some());
        let mut own = self.slot(even);
        if short && self.input_bytes(self.rank) > 0 {
            self.record(&mut own[CallHeader::BYTES..]);
        }
        let mut shown = Scratch::new(self.local_size() * HEADER_SLOT_BYTES)?;
        if self.local_size() == 1 {
            copy_bytes(Span { addr: own.as_ptr().addr(), bytes: HEADER_SLOT_BYTES }, shown.span());
        } else {
            let whole = shown.span();
            let outputs = (0..self.local_size())
                .map(|local| {
                    part(whole, &(local * HEADER_SLOT_BYTES..(local + 1) * HEADER_SLOT_BYTES))
                })
                .collect();
            let own = Span { addr: own.as_mut_ptr().addr(), bytes: HEADER_SLOT_BYTES };
            // This wait needs no grace after the deadline: it involves only this node, so no other
            // rank could name the missing ranks better.
            let show = self.intra_node_bytes(Collective::AllGather, vec![own], outputs);
            self.run_intra_node_within(&[show], self.limit.remaining().unwrap_or_default())?;
        }
        let here = self.node_map.ranks_of(self.node());
        let even =
            CallHeader::agree(shown.bytes(), HEADER_SLOT_BYTES, here, self.node_map, self.group())?;
        let opening = self.opened(rails, bytes)?;
        if let Some(between) = opening.call_rail.as_ref().filter(|_| self.local() == 0) {
            let mut slot = self.slot(even);
            if short {
                self.fill(&mut slot, &shown)?;
            }
            copy_bytes(
                Span { addr: slot.as_ptr().addr(), bytes: HEADER_SLOT_BYTES },
                between.staged(0, HEADER_SLOT_BYTES),
            );
            let whole =
                between.staged(HEADER_SLOT_BYTES, self.node_map.num_nodes() * HEADER_SLOT_BYTES);
            between.start(&RailOp::AllGather {
                from: between.staged(0, HEADER_SLOT_BYTES),
                to: whole,
            })?;
        }
        Ok(opening)
    }

    /// Fills the node's `slot` with the data of its ranks' slots in `shown`: with their records in
    /// rank order, or with their sum.
    fn fill(&self, slot: &mut [u8; HEADER_SLOT_BYTES], shown: &Scratch) -> Result<()> {
        let ranks = self.node_map.ranks_of(self.node());
        let records = ranks.iter().zip(shown.bytes().chunks_exact(HEADER_SLOT_BYTES)).map(
            |(&rank, shown)| {
                shown.get(CallHeader::BYTES..CallHeader::BYTES + self.record_bytes(rank))
            },
        );
        let room = &mut slot[CallHeader::BYTES..][..self.inline_bytes()];
        if self.call.op.reduces() {
            let given: Vec<_> = records.flatten().map(factor_and_data).collect();
            return self.sum_records(&given, &mut room[..self.partial_bytes()]);
        }
        let mut end = 0;
        // If the lengths of an all_to_all are unequal, no rank reads the records, and they may not
        // fit.
        for record in records {
            let Some((record, to)) =
                record.and_then(|record| Some((record, room.get_mut(end..end + record.len())?)))
            else {
                break;
            };
            to.copy_from_slice(record);
            end += record.len();
        }
        Ok(())
    }

    /// Returns the same as [`Self::open`], without an exchange, for a call that all nodes were
    /// already found to run.
    pub(super) fn opened(&self, rails: usize, bytes: usize) -> Result<HeaderExchange<'_>> {
        let between = if self.local() < rails { Some(self.call_rail(bytes)?) } else { None };
        Ok(HeaderExchange {
            executor: self,
            call_rail: between,
            slots: Scratch::new(self.node_map.num_nodes() * HEADER_SLOT_BYTES)?,
        })
    }

    /// Returns this rank's rail, with `bytes` bytes of staging.
    fn call_rail(&self, bytes: usize) -> Result<CallRail<'_>> {
        let begin = (self.node_map.num_nodes() + 1) * HEADER_SLOT_BYTES;
        let rail = self.internode.rail()?;
        Ok(CallRail::new(self, rail.staging(begin + bytes)?, begin, Arc::clone(&rail)))
    }

    /// Exchanges the lengths of all ranks; fails if a sender and its receiver disagree.
    pub(super) fn exchange_lengths(&self) -> Result<MessageLengths> {
        let n = self.node_map.size();
        let words = self.all_gather_words(
            self.call
                .inputs
                .iter()
                .chain(&*self.call.outputs)
                .map(|span| span.bytes as u64)
                .collect(),
        )?;
        let sent: Vec<usize> = words
            .chunks_exact(2 * n)
            .flat_map(|row| row[..n].iter().map(|&bytes| bytes as usize))
            .collect();
        for (from, to) in (0..n).flat_map(|from| (0..n).map(move |to| (from, to))) {
            let (gives, takes) = (words[from * 2 * n + to], words[to * 2 * n + n + from]);
            if gives != takes {
                let [from, to] = [from, to].map(|rank| self.node_map.describe(Rank(rank as u32)));
                let (group, sequence) = (self.group(), self.sequence);
                return Err(Error::mismatch(format!(
                    "ranks of group \"{group}\" do not agree: {from} sends {gives} bytes to {to} \
                     in all_to_all #{sequence}, which expects \
                     {takes}"
                )));
            }
        }
        Ok(MessageLengths::Each { sent, n })
    }

    /// Returns the words of all ranks, in rank order; every rank passes the same number of words.
    fn all_gather_words(&self, mut words: Vec<u64>) -> Result<Vec<u64>> {
        let (node, nodes, row) = (self.node(), self.node_map.num_nodes(), words.len() * 8);
        let most =
            (0..nodes).map(|node| self.node_map.ranks_of(node).len()).max().unwrap_or(0) * row;
        let mut all = Scratch::new(nodes * most)?;
        let whole = all.span();
        let mine = part(whole, &(node * most..node * most + self.local_size() * row));
        let own = Span { addr: words.as_mut_ptr().addr(), bytes: row };
        let rows = (0..self.local_size())
            .map(|local| part(mine, &(local * row..(local + 1) * row)))
            .collect();
        self.run_intra_node(&[self.intra_node_bytes(Collective::AllGather, vec![own], rows)])?;
        if self.local() == 0 {
            let between = self.call_rail((nodes + 1) * most)?;
            let (from, to) = (
                between.staged(between.begin, most),
                between.staged(between.begin + most, whole.bytes),
            );
            copy_bytes(mine, Span { bytes: mine.bytes, ..from });
            between.start(&RailOp::AllGather { from, to })?;
            between.finish()?;
            copy_bytes(to, whole);
        }
        let (inputs, outputs) =
            if self.local() == 0 { (vec![whole], vec![]) } else { (vec![], vec![whole]) };
        self.run_intra_node(&[self.intra_node_bytes(Collective::Broadcast, inputs, outputs)])?;
        let at =
            |rank: Rank| self.node_map.node_of(rank) * most + self.node_map.local_rank(rank) * row;
        let rows = (0..self.node_map.size() as u32)
            .map(Rank)
            .flat_map(|rank| all.bytes()[at(rank)..at(rank) + row].chunks_exact(8));
        Ok(rows.map(|word| u64::from_le_bytes(word.try_into().unwrap_or_default())).collect())
    }

    /// Writes this rank's record: its factor, then its data.
    fn record(&self, slot: &mut [u8]) {
        slot[..FACTOR_BYTES].copy_from_slice(&self.call.factor.to_bits().to_le_bytes());
        let mut at = slot.as_mut_ptr().addr() + FACTOR_BYTES;
        for &input in &*self.call.inputs {
            copy_bytes(input, Span { addr: at, ..input });
            at += input.bytes;
        }
    }

    /// Returns the one length of all inputs and outputs of this rank in an all_to_all; `None` if
    /// lengths differ.
    fn common_length(&self) -> Option<usize> {
        let first =
            self.call.inputs.first().filter(|_| self.call.op == Collective::AllToAll)?.bytes;
        self.call
            .inputs
            .iter()
            .chain(&*self.call.outputs)
            .all(|span| span.bytes == first)
            .then_some(first)
    }
}

impl HeaderExchange<'_> {
    /// Waits until all nodes were found to run the same call. Local rank 0 always waits for this.
    /// The other ranks wait for it here if there are several `rails`; with one rail, they wait in
    /// their next intra-node step with local rank 0.
    pub(super) fn agree(&mut self, rails: usize) -> Result<()> {
        self.compare()?;
        let executor = self.executor;
        if rails > 1 && executor.local_size() > 1 {
            executor.run_intra_node(&[executor.intra_node_bytes(
                Collective::Barrier,
                vec![],
                vec![],
            )])?;
        }
        Ok(())
    }

    /// Returns the slots of all nodes on every rank, once all nodes were found to run the same
    /// call.
    pub(super) fn finish(mut self) -> Result<NodeSlots> {
        self.compare()?;
        let Self { executor, mut slots, .. } = self;
        if executor.local_size() > 1 {
            let spans = vec![slots.span()];
            let (inputs, outputs) =
                if executor.local() == 0 { (spans, vec![]) } else { (vec![], spans) };
            executor.run_intra_node(&[executor.intra_node_bytes(
                Collective::Broadcast,
                inputs,
                outputs,
            )])?;
        }
        Ok(NodeSlots {
            common_length: CallHeader::common(slots.bytes(), HEADER_SLOT_BYTES),
            bytes: slots,
        })
    }

    /// On local rank 0: waits for the slots of all nodes and compares them.
    fn compare(&mut self) -> Result<()> {
        let executor = self.executor;
        let Some(between) = self.call_rail.as_ref().filter(|_| executor.local() == 0) else {
            return Ok(());
        };
        between.finish()?;
        let whole = self.slots.span();
        copy_bytes(between.staged(HEADER_SLOT_BYTES, whole.bytes), whole);
        let ranks: Vec<Rank> = (0..executor.node_map.num_nodes())
            .map(|node| executor.node_map.ranks_of(node)[0])
            .collect();
        CallHeader::agree(
            self.slots.bytes(),
            HEADER_SLOT_BYTES,
            &ranks,
            executor.node_map,
            executor.group(),
        )
        .map(drop)
    }
}

/// The slots of all nodes.
pub(super) struct NodeSlots {
    bytes: Scratch,
    /// The one length of all inputs and outputs in an all_to_all; `None` if lengths differ.
    pub(super) common_length: Option<usize>,
}

impl NodeSlots {
    /// Returns the data of each rank in a short call that moves bytes, by node and local rank.
    pub(super) fn records<'a>(&'a self, executor: &'a InternodeExecutor<'_>) -> Vec<Vec<&'a [u8]>> {
        let of_node = |(node, slot): (usize, &'a [u8])| {
            let mut rest = &slot[CallHeader::BYTES..];
            let mut next = |&rank: &Rank| {
                let (record, others) = rest.split_at(executor.record_bytes(rank));
                rest = others;
                factor_and_data(record).1
            };
            executor.node_map.ranks_of(node).iter().map(&mut next).collect()
        };
        self.bytes.bytes().chunks_exact(HEADER_SLOT_BYTES).enumerate().map(of_node).collect()
    }

    /// Returns the first `bytes` bytes of data in each node's slot.
    pub(super) fn data(&self, bytes: usize) -> impl Iterator<Item = &[u8]> {
        let data = CallHeader::BYTES..CallHeader::BYTES + bytes;
        self.bytes.bytes().chunks_exact(HEADER_SLOT_BYTES).map(move |slot| &slot[data.clone()])
    }
}

/// Returns the two parts of a record.
fn factor_and_data(record: &[u8]) -> (f64, &[u8]) {
    let (factor, data) = record.split_at(FACTOR_BYTES.min(record.len()));
    (f64::from_bits(u64::from_le_bytes(factor.try_into().unwrap_or_default())), data)
}
