//! Broadcast and all_gather on several hosts.

use super::rail::Transfer;
use super::step::{Scratch, Step, contiguous, copy, spread};
use crate::coll::call::{Op, Span, Spec};
use crate::coll::two_level::slices::{LAG, Turns, part, rails, slices};
use crate::coll::two_level::step::NOTHING;
use crate::error::Result;
use crate::rank::Rank;
use std::ops::Range;

impl Step<'_> {
    /// In each turn: 1. Inside, on the root's host: everybody gets the pieces. 2. Between: each rail brings its piece to the other hosts.
    /// 3. Inside, on those: everybody gets all pieces.
    pub(super) fn broadcast(&self) -> Result<()> {
        let root = self.layout.host(self.call.root);
        let here = root == self.host();
        let whole = if self.rank == self.call.root { self.call.inputs[0] } else { self.call.outputs[0] };
        let slices = slices(whole.bytes, self.call.dtype.size(), rails(whole.bytes, self.layout, self.thresholds()));
        let turns = Turns::of(slices[0].len(), self.thresholds());
        let mut opening = self.open(slices.len(), (LAG + 1) * turns.piece)?;
        opening.agree(slices.len())?;
        let pieces = |turn: usize| slices.iter().map(move |slice| part(whole, &turns.piece(slice, turn))).collect::<Vec<Span>>();
        let staged = |turn: usize| {
            let mine = pieces(turn).get(self.local()).map_or(0, |piece| piece.bytes);
            let between = opening.between.as_ref().filter(|_| mine > 0)?;
            Some((between, between.staged(between.begin + turn % (LAG + 1) * turns.piece, mine)))
        };
        for turn in 0..turns.count + LAG {
            if turn < turns.count {
                let begin = || -> Result<()> {
                    let Some((between, staged)) = staged(turn) else { return Ok(()) };
                    if here {
                        copy(pieces(turn)[self.local()], staged);
                    }
                    let at = between.begin + turn % (LAG + 1) * turns.piece;
                    between.start(&Transfer::Broadcast { root, at, bytes: staged.bytes })
                };
                // The root's own piece is on the wire while the ranks of its host get theirs.
                let first = !here || self.rank == self.call.root;
                if first {
                    begin()?;
                }
                if here {
                    let call = |piece: Span| {
                        let (inputs, outputs) = if self.rank == self.call.root { (vec![piece], vec![]) } else { (vec![], vec![piece]) };
                        Spec { root: Rank(self.layout.local(self.call.root) as u32), ..self.inner_bytes(Op::Broadcast, inputs, outputs) }
                    };
                    self.inside(pieces(turn).into_iter().map(call).collect())?;
                }
                if !first {
                    begin()?;
                }
            }
            let Some(turn) = turn.checked_sub(LAG) else { continue };
            staged(turn).map_or(Ok(()), |(between, _)| between.finish())?;
            if !here {
                let piece = staged(turn).map_or(NOTHING, |(_, piece)| piece);
                self.inside(vec![self.inner_bytes(Op::AllGather, vec![piece], self.padded(pieces(turn)))])?;
            }
        }
        Ok(())
    }

    /// 1. Inside: everybody gets what the ranks of the own host give. Then in each turn: 2. Between: each rail brings its piece of that to the
    ///    other hosts. 3. Inside: everybody gets the pieces of each other host.
    pub(super) fn all_gather(&self) -> Result<()> {
        let (host, local, hosts) = (self.host(), self.local(), self.layout.hosts());
        let outputs = |host: usize| -> Vec<Span> { self.layout.members(host).iter().map(|rank| self.call.outputs[rank.index()]).collect() };
        let bytes = |host: usize| -> usize { outputs(host).iter().map(|span| span.bytes).sum() };
        let rails = rails((0..hosts).map(bytes).sum(), self.layout, self.thresholds());
        let slices: Vec<Vec<Range<usize>>> = (0..hosts).map(|host| slices(bytes(host), self.call.dtype.size(), rails)).collect();
        let turns = Turns::of(slices.iter().map(|slices| slices[0].len()).max().unwrap_or(0), self.thresholds());
        let area = (hosts + 1) * turns.piece;
        let mut opening = self.open(rails, (LAG + 1) * area)?;
        opening.agree(rails)?;
        self.inside(vec![self.inner_bytes(Op::AllGather, self.call.inputs.to_vec(), outputs(host))])?;

        let (mut copies, mut apart) = (Vec::new(), Vec::<(Scratch, Vec<Span>)>::new());
        let own = contiguous(&outputs(host), &mut copies);
        let mut whole = |other: usize| {
            Span::joined(&outputs(other)).unwrap_or_else(|| {
                let mut scratch = Scratch::new(bytes(other));
                let whole = scratch.span();
                apart.push((scratch, outputs(other)));
                whole
            })
        };
        let others: Vec<(usize, Span)> = (0..hosts).filter(|&other| other != host).map(|other| (other, whole(other))).collect();
        let lengths = |turn: usize| -> Vec<usize> {
            slices.iter().map(|slices| slices.get(local).map_or(0, |slice| turns.piece(slice, turn).len())).collect()
        };
        let busy = |turn: usize| opening.between.as_ref().filter(|_| lengths(turn).iter().any(|&bytes| bytes > 0));
        for turn in 0..turns.count + LAG {
            if let Some(between) = busy(turn) {
                let (piece, from) = (turns.piece(&slices[host][local], turn), between.begin + turn % (LAG + 1) * area);
                copy(part(own, &piece), between.staged(from, piece.len()));
                between.share(from, &lengths(turn), from + turns.piece)?;
            }
            let Some(turn) = turn.checked_sub(LAG) else { continue };
            busy(turn).map_or(Ok(()), |between| between.finish())?;
            let mut calls = Vec::new();
            for &(other, whole) in &others {
                let piece = busy(turn).map_or(NOTHING, |between| {
                    let from = between.begin + turn % (LAG + 1) * area;
                    between.shared(from, &lengths(turn), from + turns.piece, other)
                });
                let take = slices[other].iter().map(|slice| part(whole, &turns.piece(slice, turn))).collect();
                calls.push(self.inner_bytes(Op::AllGather, vec![piece], self.padded(take)));
            }
            self.inside(calls)?;
        }
        apart.iter_mut().for_each(|(scratch, outputs)| spread(scratch.span(), outputs));
        Ok(())
    }
}
