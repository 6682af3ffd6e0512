//! Barrier, broadcast and all_gather on several hosts.

use super::rail::Transfer;
use super::slices::{CHUNK, chunks, joined, part, rails, slices};
use super::step::{NOTHING, Scratch, Step, contiguous, copy, spread};
use crate::coll::call::{Call, Op, Span};
use crate::error::Result;
use crate::rank::Rank;
use std::ops::Range;

impl Step<'_> {
    /// 1. Inside: everybody has come. 2. Between: one rank of each host says so. 3. Inside: it has heard of all.
    pub(super) fn barrier(&self) -> Result<()> {
        self.agree_inside()?;
        self.agree_between(1, 0)?;
        self.inside(vec![self.inner_bytes(Op::Barrier, vec![], vec![])])
    }

    /// 1. Inside, on the root's host: everybody gets all. 2. Between: each rail brings its slice to the other hosts. 3. Inside, on those:
    ///    everybody gets all slices.
    pub(super) fn broadcast(&self) -> Result<()> {
        let root = self.layout.host(self.call.root);
        let here = root == self.host();
        let whole = if self.rank == self.call.root { self.call.inputs[0] } else { self.call.outputs[0] };
        let (rails, size) = (rails(whole.bytes, self.layout), self.call.dtype.size());
        self.agree_inside()?;
        let between = self.agree_between(rails, whole.bytes.min(CHUNK))?;
        for chunk in chunks(whole.bytes) {
            let (chunk, slices) = (part(whole, &chunk), slices(chunk.len(), size, rails));
            if here {
                let (inputs, outputs) = if self.rank == self.call.root { (vec![chunk], vec![]) } else { (vec![], vec![chunk]) };
                let call = self.inner_bytes(Op::Broadcast, inputs, outputs);
                self.inside(vec![Call { root: Rank(self.layout.local(self.call.root) as u32), ..call }])?;
            }
            let mut slice = NOTHING;
            if let Some(between) = &between {
                let range = &slices[self.local()];
                slice = between.staged(between.begin, range.len());
                if here {
                    copy(part(chunk, range), slice);
                }
                if !range.is_empty() {
                    between.run(&Transfer::Broadcast { root, at: between.begin, bytes: range.len() })?;
                }
            }
            if !here {
                let take = slices.iter().map(|range| part(chunk, range)).collect();
                self.inside(vec![self.inner_bytes(Op::AllGather, vec![slice], self.padded(take))])?;
            }
        }
        Ok(())
    }

    /// 1. Inside: everybody gets what the ranks of the own host give. 2. Between: each rail brings its slice of that to the other hosts.
    /// 3. Inside: everybody gets the slices of each other host.
    pub(super) fn all_gather(&self) -> Result<()> {
        let (host, local, hosts) = (self.host(), self.local(), self.layout.hosts());
        let outputs = |host: usize| -> Vec<Span> { self.layout.members(host).iter().map(|rank| self.call.outputs[rank.index()]).collect() };
        let bytes = |host: usize| -> usize { outputs(host).iter().map(|span| span.bytes).sum() };
        let rails = rails((0..hosts).map(bytes).sum(), self.layout);
        let slices: Vec<Vec<Range<usize>>> = (0..hosts).map(|host| slices(bytes(host), self.call.dtype.size(), rails)).collect();
        let longest = slices.iter().filter_map(|slices| slices.get(local)).map(Range::len).max().unwrap_or(0);
        self.agree_inside()?;
        let between = self.agree_between(rails, (hosts + 1) * longest)?;
        self.inside(vec![self.inner_bytes(Op::AllGather, self.call.inputs.clone(), outputs(host))])?;

        let mut copies = Vec::new();
        if let Some(between) = &between
            && longest > 0
        {
            let (slice, from) = (&slices[host][local], between.begin);
            copy(part(contiguous(&outputs(host), &mut copies), slice), between.staged(from, slice.len()));
            between.run(&Transfer::AllGather { from, each: longest, to: from + longest })?;
        }

        let mut calls = Vec::new();
        let mut apart: Vec<(Scratch, Vec<Span>)> = Vec::new();
        for other in (0..hosts).filter(|&other| other != host) {
            let whole = joined(&outputs(other)).unwrap_or_else(|| {
                let mut scratch = Scratch::new(bytes(other));
                let whole = scratch.span();
                apart.push((scratch, outputs(other)));
                whole
            });
            let slice = between
                .as_ref()
                .map_or(NOTHING, |between| between.staged(between.begin + (1 + other) * longest, slices[other][local].len()));
            let take = slices[other].iter().map(|range| part(whole, range)).collect();
            calls.push(self.inner_bytes(Op::AllGather, vec![slice], self.padded(take)));
        }
        self.inside(calls)?;
        apart.iter_mut().for_each(|(scratch, outputs)| spread(scratch.span(), outputs));
        Ok(())
    }
}
