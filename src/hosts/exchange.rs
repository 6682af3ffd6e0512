//! gather, scatter and all_to_all on several hosts: every rank has something of its own for every other.

use super::rail::Transfer;
use super::step::{Between, Scratch, Step, copy};
use crate::coll::call::{Op, Span};
use crate::coll::two_level::slices::{LAG, Turns, part, rails};
use crate::coll::two_level::step::NOTHING;
use crate::error::{Error, Result};
use crate::rank::Rank;
use std::collections::BTreeMap;

/// Bytes that each rank sends to each other.
enum Lengths {
    /// The same for all pairs.
    Even(usize),
    /// Those of one rank's messages to all others are alike, or those of all others' to it; there are no more.
    Rooted { root: Rank, gathers: bool, bytes: usize },
    /// `sent[from * n + to]`.
    Each { sent: Vec<usize>, n: usize },
}

impl Lengths {
    fn of(&self, from: Rank, to: Rank) -> usize {
        match self {
            Self::Even(bytes) => *bytes,
            Self::Rooted { root, gathers, bytes } => {
                if (if *gathers { to } else { from }) == *root {
                    *bytes
                } else {
                    0
                }
            }
            Self::Each { sent, n } => sent[from.index() * n + to.index()],
        }
    }
}

/// Way of the messages between hosts: which rank carries each, in how many turns.
struct Ways<'a> {
    step: &'a Step<'a>,
    lengths: &'a Lengths,
    rails: usize,
    turns: Turns,
    /// Messages that this rank carries to each host, and from each.
    sent: Vec<Vec<(Rank, Rank)>>,
    received: Vec<Vec<(Rank, Rank)>>,
    /// Length of the longest message on this rank's rail, between whichever hosts.
    longest: usize,
}

impl<'a> Ways<'a> {
    fn new(step: &'a Step<'a>, lengths: &'a Lengths, rails: usize, turns: Turns) -> Self {
        let mut ways = Self { step, lengths, rails, turns, sent: Vec::new(), received: Vec::new(), longest: 0 };
        let (here, hosts) = (step.host(), || 0..step.layout.hosts());
        ways.sent = hosts().map(|host| ways.carried(here, host)).collect();
        ways.received = hosts().map(|host| ways.carried(host, here)).collect();
        let all = hosts().flat_map(|from| hosts().map(move |to| (from, to))).flat_map(|(from, to)| ways.carried(from, to));
        ways.longest = all.map(|(from, to)| lengths.of(from, to)).max().unwrap_or(0);
        ways
    }

    /// Local index that carries what `from` sends to `to` on another host: the same receives it there. Sums spread it whether one rank
    /// sends, one receives, or all do both.
    fn carrier(&self, from: Rank, to: Rank) -> usize {
        (self.step.layout.local(from) + self.step.layout.local(to)) % self.rails
    }

    /// The rank of `host` whose messages with local index `local` here are carried by `carrier`, one in each block of as many ranks as there
    /// are rails; `None` where there is none.
    fn partner(&self, carrier: usize, local: usize, host: usize, block: usize) -> Option<Rank> {
        let index = block * self.rails + (carrier + self.rails - local % self.rails) % self.rails;
        if carrier < self.rails { self.step.layout.members(host).get(index).copied() } else { None }
    }

    /// Blocks of ranks of the other hosts: host and number.
    fn blocks(&self) -> impl Iterator<Item = (usize, usize)> {
        let (layout, here, rails) = (self.step.layout, self.step.host(), self.rails);
        let blocks = move |host: usize| (0..layout.members(host).len().div_ceil(rails)).map(move |block| (host, block));
        (0..layout.hosts()).filter(move |&host| host != here).flat_map(blocks)
    }

    /// Messages that this rank carries from `from` to `to`.
    fn carried(&self, from: usize, to: usize) -> Vec<(Rank, Rank)> {
        let (layout, local) = (self.step.layout, self.step.local());
        if from == to {
            return vec![];
        }
        let pairs = layout.members(from).iter().flat_map(|&from| layout.members(to).iter().map(move |&to| (from, to)));
        pairs.filter(|&(from, to)| self.carrier(from, to) == local).collect()
    }

    /// The part of a message from `from` to `to` that moves in the turn `turn`.
    fn piece(&self, from: Rank, to: Rank, turn: usize) -> std::ops::Range<usize> {
        self.turns.piece(&(0..self.lengths.of(from, to)), turn)
    }

    /// Whether any rank of this rank's rail sends in the turn `turn`: all of them know.
    fn is_busy(&self, turn: usize) -> bool {
        !self.turns.piece(&(0..self.longest), turn).is_empty()
    }

    /// Places of what this rank carries in the turn `turn`, from `at` on, and lengths for each other host: of what it sends, or of what it
    /// receives.
    fn places(&self, sends: bool, turn: usize, mut at: Span) -> (BTreeMap<(Rank, Rank), Span>, Vec<usize>) {
        let mut places = BTreeMap::new();
        let mut of_host = |host: usize| {
            let before = at.bytes;
            for &pair in if sends { &self.sent[host] } else { &self.received[host] } {
                let bytes = self.piece(pair.0, pair.1, turn).len();
                places.insert(pair, Span { addr: at.addr + at.bytes, bytes });
                at.bytes += bytes;
            }
            at.bytes - before
        };
        let lengths = (0..self.step.layout.hosts()).map(&mut of_host).collect();
        (places, lengths)
    }
}

impl Step<'_> {
    /// gather and scatter: what everybody sends follows from the call.
    pub(super) fn gather_or_scatter(&self) -> Result<()> {
        let (n, root) = (self.layout.size(), self.call.root);
        let gathers = self.call.op == Op::Gather;
        let lengths = Lengths::Rooted { root, gathers, bytes: self.call.agreed_bytes() as usize };
        let one = |spans: &[Span], at: Rank| {
            let mut all = vec![NOTHING; n];
            all[at.index()] = spans[0];
            all
        };
        let all = |spans: &[Span]| if spans.is_empty() { vec![NOTHING; n] } else { spans.to_vec() };
        let (inputs, outputs) = (&self.call.inputs, &self.call.outputs);
        let (give, take) = if gathers { (one(inputs, root), all(outputs)) } else { (all(inputs), one(outputs, root)) };
        self.open(1, 0)?.agree(self.layout.rails())?;
        self.exchange(&lengths, self.layout.rails(), &give, &take)
    }

    /// all_to_all: where not all lengths are equal every rank first tells all others what it sends and expects.
    pub(super) fn all_to_all(&self) -> Result<()> {
        let slots = self.open(1, 0)?.told()?;
        match slots.even {
            Some(_) if self.is_short() => {
                self.take_short(&slots);
                Ok(())
            }
            Some(bytes) => {
                let rails = rails(bytes * self.layout.size(), self.layout, self.thresholds());
                self.exchange(&Lengths::Even(bytes), rails, &self.call.inputs, &self.call.outputs)
            }
            None => self.exchange(&self.told_lengths()?, self.layout.rails(), &self.call.inputs, &self.call.outputs),
        }
    }

    /// Lengths that all ranks have told each other and that fit.
    fn told_lengths(&self) -> Result<Lengths> {
        let n = self.layout.size();
        let words = self.tell_all(self.call.inputs.iter().chain(&*self.call.outputs).map(|span| span.bytes as u64).collect())?;
        let sent: Vec<usize> = words.chunks_exact(2 * n).flat_map(|row| row[..n].iter().map(|&bytes| bytes as usize)).collect();
        for (from, to) in (0..n).flat_map(|from| (0..n).map(move |to| (from, to))) {
            let (gives, takes) = (words[from * 2 * n + to], words[to * 2 * n + n + from]);
            if gives != takes {
                let [from, to] = [from, to].map(|rank| self.layout.describe(Rank(rank as u32)));
                let (group, sequence) = (self.inner.control().name(), self.sequence);
                return Err(Error::mismatch(format!(
                    "ranks of group \"{group}\" do not agree: {from} sends {gives} bytes to {to} in all_to_all #{sequence}, which expects \
                     {takes}"
                )));
            }
        }
        Ok(Lengths::Each { sent, n })
    }

    /// The words of all ranks, in their order; all have as many.
    fn tell_all(&self, mut words: Vec<u64>) -> Result<Vec<u64>> {
        let (host, hosts, row) = (self.host(), self.layout.hosts(), words.len() * 8);
        let most = (0..hosts).map(|host| self.layout.members(host).len()).max().unwrap_or(0) * row;
        let mut all = Scratch::new(hosts * most);
        let whole = all.span();
        let mine = part(whole, &(host * most..host * most + self.locals() * row));
        let own = Span { addr: words.as_mut_ptr().addr(), bytes: row };
        let rows = (0..self.locals()).map(|local| part(mine, &(local * row..(local + 1) * row))).collect();
        self.inside(vec![self.inner_bytes(Op::AllGather, vec![own], rows)])?;
        if self.local() == 0 {
            let between = self.between((hosts + 1) * most)?;
            let (from, to) = (between.begin, between.begin + most);
            copy(mine, between.staged(from, mine.bytes));
            between.run(&Transfer::AllGather { from, each: most, to })?;
            copy(between.staged(to, whole.bytes), whole);
        }
        let (inputs, outputs) = if self.local() == 0 { (vec![whole], vec![]) } else { (vec![], vec![whole]) };
        self.inside(vec![self.inner_bytes(Op::Broadcast, inputs, outputs)])?;
        let at = |rank: Rank| self.layout.host(rank) * most + self.layout.local(rank) * row;
        let rows = (0..self.layout.size() as u32).map(Rank).flat_map(|rank| all.bytes()[at(rank)..at(rank) + row].chunks_exact(8));
        Ok(rows.map(|word| u64::from_le_bytes(word.try_into().unwrap_or_default())).collect())
    }

    /// In each turn: 1. Inside: pieces for other hosts go to their carriers. 2. Between: carriers exchange. 3. Inside: pieces reach their
    /// ranks. What stays on the host moves while the first pieces are on the wire.
    fn exchange(&self, lengths: &Lengths, rails: usize, give: &[Span], take: &[Span]) -> Result<()> {
        let (layout, hosts) = (self.layout, self.layout.hosts());
        let ranks = || (0..layout.size() as u32).map(Rank);
        let pairs = ranks().flat_map(|from| ranks().map(move |to| (from, to)));
        let far = pairs.filter(|&(from, to)| layout.host(from) != layout.host(to));
        let longest = far.map(|(from, to)| lengths.of(from, to)).max().unwrap_or(0);
        let parts = |from: usize, to: usize| (layout.members(from).len() * layout.members(to).len()).div_ceil(rails);
        let most = (0..hosts).flat_map(|from| (0..hosts).map(move |to| (from, to))).filter(|(from, to)| from != to);
        let most = most.map(|(from, to)| parts(from, to)).max().unwrap_or(1);
        let ways = Ways::new(self, lengths, rails, Turns::of_messages(longest, most, self.thresholds()));
        let carried = if self.local() < rails { ways.sent.iter().chain(&ways.received).map(Vec::len).sum() } else { 0 };
        let area = carried * ways.turns.piece;
        let between = if self.local() < rails { Some(self.between((LAG + 1) * area)?) } else { None };
        for turn in 0..ways.turns.count + LAG {
            let at = |turn: usize| turn % (LAG + 1) * area;
            if turn < ways.turns.count {
                self.give_to_carriers(&ways, between.as_ref(), turn, at(turn), give)?;
            }
            if turn == 0 {
                let here = |spans: &[Span]| layout.members(self.host()).iter().map(|rank| spans[rank.index()]).collect();
                self.inside(vec![self.inner_bytes(Op::AllToAll, here(give), here(take))])?;
            }
            if let Some(turn) = turn.checked_sub(LAG) {
                self.take_from_carriers(&ways, between.as_ref(), turn, at(turn), take)?;
            }
        }
        Ok(())
    }

    /// Brings the pieces of the turn `turn` to their carriers, which begin to exchange them.
    fn give_to_carriers(&self, ways: &Ways<'_>, between: Option<&Between<'_>>, turn: usize, at: usize, give: &[Span]) -> Result<()> {
        let (local, here) = (self.local(), self.layout.members(self.host()));
        let from = between.map_or(0, |between| between.begin + at);
        let (places, sent) = ways.places(true, turn, between.map_or(NOTHING, |between| between.staged(from, 0)));
        let mut calls = Vec::new();
        for (host, block) in ways.blocks() {
            let partner = |carrier, local| ways.partner(carrier, local, host, block);
            let moves =
                |from: usize| (0..ways.rails).filter_map(move |c| partner(c, from)).any(|to| !ways.piece(here[from], to, turn).is_empty());
            if !(0..here.len()).any(moves) {
                continue;
            }
            let given = |to: Rank| part(give[to.index()], &ways.piece(self.rank, to, turn));
            let inputs = (0..here.len()).map(|carrier| partner(carrier, local).map_or(NOTHING, given)).collect();
            let brought = |(from, &rank): (usize, &Rank)| partner(local, from).map_or(NOTHING, |to| places[&(rank, to)]);
            calls.push(self.inner_bytes(Op::AllToAll, inputs, here.iter().enumerate().map(brought).collect()));
        }
        self.inside(calls)?;
        let Some(between) = between else { return Ok(()) };
        let to = from + sent.iter().sum::<usize>();
        let received = ways.places(false, turn, NOTHING).1;
        if ways.is_busy(turn) { between.start(&Transfer::AllToAll { from, sent: &sent, to, received: &received }) } else { Ok(()) }
    }

    /// Waits for the pieces of the turn `turn` and brings them to their ranks.
    fn take_from_carriers(&self, ways: &Ways<'_>, between: Option<&Between<'_>>, turn: usize, at: usize, take: &[Span]) -> Result<()> {
        let (local, here) = (self.local(), self.layout.members(self.host()));
        if let Some(between) = between.filter(|_| ways.is_busy(turn)) {
            between.finish()?;
        }
        let sent: usize = ways.places(true, turn, NOTHING).1.iter().sum();
        let (places, _) = ways.places(false, turn, between.map_or(NOTHING, |between| between.staged(between.begin + at + sent, 0)));
        let mut calls = Vec::new();
        for (host, block) in ways.blocks() {
            let partner = |carrier, local| ways.partner(carrier, local, host, block);
            let moves =
                |to: usize| (0..ways.rails).filter_map(move |c| partner(c, to)).any(|from| !ways.piece(from, here[to], turn).is_empty());
            if !(0..here.len()).any(moves) {
                continue;
            }
            let came = |(to, &rank): (usize, &Rank)| partner(local, to).map_or(NOTHING, |from| places[&(from, rank)]);
            let inputs = here.iter().enumerate().map(came).collect();
            let taken = |from: Rank| part(take[from.index()], &ways.piece(from, self.rank, turn));
            let outputs = (0..here.len()).map(|carrier| partner(carrier, local).map_or(NOTHING, taken)).collect();
            calls.push(self.inner_bytes(Op::AllToAll, inputs, outputs));
        }
        self.inside(calls)
    }
}
